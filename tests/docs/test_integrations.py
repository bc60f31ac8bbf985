"""Every row of the table of integrations names tests that CI can run, or says that none does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
NOT_RUN = "read, not run"
ENVIRONMENTS = {"core": set(), "verl": {"verl"}, "vllm": {"engine"}, "TRL 1.8": {"trl18"}}


def _rows() -> list[tuple[str, ...]]:
    """Cells of the table's rows."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return [row for row in cells if row[0] != "integration"]


ROWS = _rows()


def _marks(node: ast.AST) -> set[str]:
    """Markers named in decorators or in `pytestmark`."""
    return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node)))


def _markers(test: str) -> set[str]:
    """Markers of a test `file::function`, which must exist."""
    file, _, function = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0]):
            found |= _marks(node.value)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
    assert functions, f"{file} has no test {function}"
    for decorator in functions[0].decorator_list:
        # A mark within `parametrize` is one of some cases.
        if "parametrize" not in ast.unparse(decorator):
            found |= _marks(decorator)
    return found


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 40
    assert {len(row) for row in ROWS} == {5}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]}")
def test_row_is_run_in_ci_or_says_that_it_is_not(row: tuple[str, ...]) -> None:
    _, _, _, where, proof = row
    tests = re.findall(r"`(tests/[^`]+::\w+)`", proof)
    if not tests:
        assert NOT_RUN in proof
        return
    assert NOT_RUN not in proof
    for test in tests:
        markers = _markers(test)
        assert "gpu" not in markers
        assert markers & {"verl", "engine", "trl18"} == ENVIRONMENTS[where]
