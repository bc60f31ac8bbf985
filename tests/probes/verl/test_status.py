"""What is said where verl is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from deltad.probes.verl.status import Status, status


@pytest.mark.skipif(find_spec("verl") is not None, reason="verl is installed")
def test_without_verl_it_says_how_to_install_it() -> None:
    found = status()
    assert not found.loaded
    assert found.text() == (
        "the plugin is NOT loaded\n  verl is not installed: pip install 'deltad[verl]'\n"
    )


def test_the_verdict_comes_first() -> None:
    assert Status(True, ("verl is here",)).text() == "the plugin is loaded\n  verl is here\n"
