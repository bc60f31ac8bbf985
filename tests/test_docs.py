"""What the pages say, held against the code."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

from deltad.masks import RULES
from docs.tools.cli import cli_reference
from docs.tools.sessions import DOCS, images, pages, refreshed

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.pages

each_page = pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)


def blocks(page: str) -> list[str]:
    """What stands in fences."""
    return re.findall(r"^```\w+\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


@each_page
def test_code_on_the_page_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert refreshed(text, tmp_path) == text


@pytest.mark.slow
@each_page
def test_slow_code_on_the_page_prints_what_it_shows_and_draws_its_figures(
    page: Path, tmp_path: Path
) -> None:
    text = page.read_text(encoding="utf-8")
    assert refreshed(text, tmp_path, slow=True) == text
    made = [name for name in images(text) if f"-o {name}" in text]
    assert [name for name in made if not (tmp_path / name).is_file()] == []


@each_page
def test_every_figure_is_made_by_a_command_on_its_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in images(text):
        assert (page.parent / name).is_file(), name
        assert any(Path(name).name in block for block in blocks(text)), name


def test_every_figure_is_shown() -> None:
    shown = {page.parent / name for page in pages() for name in images(page.read_text())}
    drawn = {path for kind in ("png", "svg") for path in DOCS.rglob(f"*.{kind}")}
    assert drawn - shown == set()


@each_page
def test_every_test_that_is_named_exists(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert not name or name in names, f"{file}::{name}"


@each_page
def test_every_name_that_is_linked_exists(page: Path) -> None:
    for name in re.findall(r"`\]\[(deltad[\w.]*)\]", page.read_text()):
        pkgutil.resolve_name(name)


@each_page
def test_every_row_of_a_table_has_the_cells_of_its_head(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", row) for row in table.splitlines()]
        assert [row for row in rows if len(row) != len(rows[0])] == []


def test_every_equation_has_a_function_and_a_test() -> None:
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert len(sections) > 10
    for section in sections:
        assert "tests/" in section, section.splitlines()[0]
        assert "][deltad." in section, section.splitlines()[0]


def test_reference_of_the_commands_is_the_present_one() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert page == cli_reference(), "run `python -m docs.tools.cli`"


def _expand(name: str) -> list[str]:
    """Every name that `a-{b,c}` stands for."""
    found = re.search(r"\{([^}]*)\}", name)
    if not found:
        return [name]
    return [
        full
        for choice in found[1].split(",")
        for full in _expand(name[: found.start()] + choice + name[found.end() :])
    ]


def test_definitions_list_every_criterion_and_no_other() -> None:
    page = (DOCS / "definitions.md").read_text(encoding="utf-8")
    rows = page.split("## Criteria")[1].split("## ")[0]
    named = re.findall(r"^\| `([^`]+)` \|", rows, flags=re.MULTILINE)
    masks = {name for name, rule in RULES.items() if rule.weight is None and name != "none"}
    assert {full for name in named for full in _expand(name)} == masks
