"""The built site in a real browser, from disk: nothing is fetched and nothing complains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("index", "equations", "api/deltad", "notebooks/figure4")

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site") / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_from_disk_without_a_network_or_a_complaint(
    site: Path, browser: Any, scheme: str
) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.set_default_timeout(120_000)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for name in PAGES:
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_load_state("networkidle")
        shown = page.locator("body").get_attribute("data-md-color-scheme")
        assert shown == {"light": "default", "dark": "slate"}[scheme]
    assert complaints == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()


def test_search_works_from_disk(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.keyboard.type("collision")
    page.locator(".md-search-result__item").first.wait_for()
    assert "matching documents" in page.locator(".md-search-result__meta").inner_text()
    page.close()


def test_equations_are_drawn(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto((site / "equations.html").as_uri())
    assert page.locator("math[display=block]").count() > 10
    assert page.locator(".arithmatex").count() == 0
    assert page.locator("math[display=block]").first.bounding_box()["height"] > 20
    page.close()
