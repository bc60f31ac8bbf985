"""The runner of the pages' code, on pages of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import sessions
from docs.tools.sessions import SessionError, images, refreshed, run_page


def console(*lines: str) -> str:
    return "\n".join(["```console", *lines, "```", ""])


def test_an_output_that_agrees_is_left_and_one_that_moved_is_replaced(tmp_path: Path) -> None:
    page = console("$ deltad --version", "deltad ...", "$ echo $?", "7")
    assert refreshed(page, tmp_path) == console(
        "$ deltad --version", "deltad ...", "$ echo $?", "0"
    )


def test_errors_and_their_status_are_shown(tmp_path: Path) -> None:
    page = console("$ deltad table none", "$ echo $?")
    found = refreshed(page, tmp_path)
    assert "error: none does not exist" in found
    assert found.endswith("$ echo $?\n2\n```\n")


def test_a_line_of_dots_stands_for_any_lines_but_not_for_another_end(tmp_path: Path) -> None:
    for last, kept in (("--quiet", True), ("another end", False)):
        page = console("$ deltad check --help", "...", f"...{last}...")
        assert (refreshed(page, tmp_path) == page) is kept


def test_a_page_is_one_session(tmp_path: Path) -> None:
    page = (
        "```python\nx = 1\nprint('shown nowhere')\n```\n\nwords\n\n"
        "```pycon\n>>> for i in range(2):\n...     print(x + i)\n0\n>>> x = 5\n```\n"
        "```pycon\n>>> x\n```\n"
    )
    found = refreshed(page, tmp_path)
    assert "...     print(x + i)\n1\n2\n>>> x = 5\n```" in found
    assert found.endswith(">>> x\n5\n```\n")


def test_marked_blocks_wait(tmp_path: Path) -> None:
    slow = "<!-- slow -->\n```pycon\n>>> 1 + 1\n```\n"
    assert refreshed(slow, tmp_path) == slow
    assert ">>> 1 + 1\n2\n" in refreshed(slow, tmp_path, slow=True)
    never = "<!-- not run: no such package -->\n```python\nimport nothing\n```\n"
    assert refreshed(never, tmp_path, slow=True) == never


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (console("$ rm x"), "runs `deltad` alone"),
        (console("$ deltad table x | head"), "without pipes"),
        (console("words"), "must begin with"),
        ("```python\n1 / 0\n```\n", "1 / 0"),
    ],
)
def test_what_no_page_may_hold_is_refused(page: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=words.replace("`", ".")):
        refreshed(page, tmp_path)


def test_writing_keeps_outputs_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ROOT", tmp_path)
    (tmp_path / "data_dumps").mkdir()
    path = tmp_path / "page.md"
    draw = (
        "```pycon\n>>> from pathlib import Path\n>>> Path('figure.png').write_text('drawn')\n```\n"
        "\n![a figure](figure.png)\n"
    )
    path.write_text(draw)
    assert images(draw) == ["figure.png"]
    assert run_page(path, slow=False, write=False)
    assert path.read_text() == draw
    assert run_page(path, slow=False, write=True)
    assert path.read_text() == draw.replace("\n```\n\n!", "\n5\n```\n\n!")
    assert (tmp_path / "figure.png").read_text() == "drawn"
    assert not run_page(path, slow=False, write=False)
