"""Environment variables of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltad.probes import ProbeError
from deltad.probes.verl.settings import Settings


def test_nothing_is_recorded_unless_told() -> None:
    assert Settings.from_environment({"PATH": "/bin"}) == Settings()
    assert Settings.from_environment({"DELTAD_VERL_RUN": ""}).run is None


def test_every_variable_is_read() -> None:
    given = {
        "DELTAD_VERL_RUN": "runs/a",
        "DELTAD_VERL_SEED": "3",
        "DELTAD_VERL_ARM": "mine",
        "DELTAD_VERL_EVERY": "10",
        "DELTAD_VERL_STEPS_PER_FILE": "4",
        "DELTAD_VERL_EXISTING": "append",
        "DELTAD_VERL_READOUT": "hidden",
        "DELTAD_VERL_TOPK": "7",
        "DELTAD_VERL_RULES": "a.py:x, b.py:y",
        "DELTAD_VERL_BEHAVIOR": '{"engine": "vllm"}',
    }
    assert Settings.from_environment(given) == Settings(
        Path("runs/a"),
        3,
        "mine",
        10,
        4,
        "append",
        "hidden",
        7,
        ("a.py:x", "b.py:y"),
        {"engine": "vllm"},
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("EVRY", "2", "there is no environment variable DELTAD_VERL_EVRY; .*DELTAD_VERL_EVERY"),
        ("EVERY", "0", "DELTAD_VERL_EVERY must be an integer of at least 1, got '0'"),
        ("SEED", "-1", "DELTAD_VERL_SEED must be an integer of at least 0, got '-1'"),
        ("TOPK", "many", "DELTAD_VERL_TOPK must be an integer of at least 1, got 'many'"),
        ("EXISTING", "keep", "DELTAD_VERL_EXISTING must be one of refuse, replace, append"),
        ("READOUT", "bf16", "DELTAD_VERL_READOUT must be one of auto, hidden, logits, got 'bf16'"),
        ("BEHAVIOR", "vllm", "DELTAD_VERL_BEHAVIOR must be a JSON object, got 'vllm'"),
        ("BEHAVIOR", "[1]", r"DELTAD_VERL_BEHAVIOR must be a JSON object, got '\[1\]'"),
    ],
)
def test_what_cannot_be_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        Settings.from_environment({f"DELTAD_VERL_{variable}": value})
