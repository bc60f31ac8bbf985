"""The quickstarts run as they are written, and pages show them; verl's is run beside verl."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltad.dumps import Dump, check_dump

ROOT = Path(__file__).parents[2]
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
COMMANDS: dict[str, list[str]] = {
    "plain_loop.py": [],
    "accelerate_loop.py": [],
    "fabric_loop.py": [],
    "fsdp2.py": TORCHRUN,
    "trl_grpo.py": [],
}
OURS = {
    "attach",
    "Recorder",
    "ResponseTokens",
    "UpdateProbe",
    "Metadata",
    "probe",
    "recorder",
    "about",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_at_most_ten_lines_are_deltads(name: str) -> None:
    tree = ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))
    lines = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.alias)
        and (node.id if isinstance(node, ast.Name) else node.name) in OURS
    }
    assert 2 <= len(lines) <= 10


@pytest.mark.parametrize("name", [*COMMANDS, "verl_ppo.py"])
def test_a_page_shows_it(name: str) -> None:
    shown = f"--8<--\nexamples/{name}\n--8<--"
    assert any(shown in page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs_and_records(name: str, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, *COMMANDS[name], str(EXAMPLES / name), str(tmp_path / "RUN")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    assert check_dump(tmp_path / "RUN") == []
    ranks = 2 if COMMANDS[name] else 1
    parts = Dump.open(tmp_path / "RUN").parts
    if name == "trl_grpo.py":
        assert {part.arm for part in parts} == {"actual"}
        assert sum(part.rows for part in parts) > 1000
    else:
        assert [part.rows for part in parts] == [512] * ranks
