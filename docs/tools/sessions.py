"""The code in pages, run from top to bottom, and what it prints held against what they show.

`python -m docs.tools.sessions` runs every page and says which outputs have moved; with `--write`
the pages take the new ones, and `docs/` the figures that the pages show. Give names of pages to run
these alone.

A page is one session in a folder that holds `data_dumps`, `data_training` and nothing else:

- ```` ```console ````: lines that begin with `$ deltad` or `$ echo $?`, each followed by its output
- ```` ```pycon ````: `>>>` lines, each followed by its output
- ```` ```python ````: run for what it does; what it prints is shown nowhere

A line `...` in an output stands for any lines, `...` within a line for any text. A line
`<!-- slow -->` above a fence leaves it to a slow run, `<!-- not run: reason -->` to none. Blocks in
other languages are for reading.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import functools
import io
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from typer.testing import CliRunner

from deltad.cli import app

DOCS: Final = Path(__file__).parents[1]
ROOT: Final = DOCS.parent

_FENCE: Final = re.compile(
    r"(?:^<!-- (?P<mark>slow|not run: .*?) -->\n+)?"
    r"^```(?P<language>console|pycon|python)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class SessionError(Exception):
    """A command that no session may hold, or code that failed."""


def pages() -> list[Path]:
    """Every page that is written by hand or generated, in the order of their names."""
    return sorted(DOCS.rglob("*.md"))


def refreshed(page: str, folder: Path, *, slow: bool = False) -> str:
    """A page with the outputs that its code has now; the same text where nothing moved.

    Parameters
    ----------
    page : str
        Markdown.
    folder : Path
        An empty folder to run in; files that the page writes are left there.
    slow : bool
        Run the blocks marked slow too.

    Returns
    -------
    str
        The page. Outputs that agree are left as they are, with their `...`.

    Raises
    ------
    SessionError
        Python code that raised, or a command other than those above.
    """
    names: dict[str, Any] = {"__name__": "__page__"}
    status = 0

    def run(found: re.Match[str]) -> str:
        nonlocal status
        mark, language, body = found["mark"] or "", found["language"], found["body"]
        if mark.startswith("not run") or (mark == "slow" and not slow):
            return found[0]
        if language == "python":
            _execute(body, names, "exec")
            return found[0]
        if language == "pycon":
            fresh = "".join(_pycon(body, names))
        else:
            fresh, status = _console(body, status)
        return found[0].removesuffix(f"{body}```") + f"{fresh}```"

    for name in ("data_dumps", "data_training"):
        link = folder / name
        if not link.exists():
            link.symlink_to(ROOT / name)
    with contextlib.chdir(folder):
        return _FENCE.sub(run, page)


def _console(body: str, status: int) -> tuple[str, int]:
    """A console block with its outputs of now, and the last exit status."""
    parts: list[str] = []
    for command, shown in _commands(body):
        if command == "echo $?":
            printed = f"{status}\n"
        else:
            printed, status = _deltad(command)
        parts.append(f"$ {command}\n{_kept(shown, printed)}")
    return "".join(parts), status


def _commands(body: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output shown under it."""
    head, *rest = re.split(r"^\$ ", body, flags=re.MULTILINE)
    if head:
        raise SessionError(f"a console block must begin with `$ `, got {head.splitlines()[0]!r}")
    for each in rest:
        command, _, shown = each.partition("\n")
        yield command, shown


def _deltad(command: str) -> tuple[str, int]:
    """What a command prints and its exit status; asked once where it only reads `data_dumps`."""
    reads_alone = " data_dumps/" in command and " -o " not in command
    return _read(command) if reads_alone else _run(command)


@functools.cache
def _read(command: str) -> tuple[str, int]:
    """The same, from memory: several pages show the same table."""
    return _run(command)


def _run(command: str) -> tuple[str, int]:
    """Run a command; its two streams in their order, and its exit status."""
    name, *arguments = shlex.split(command)
    if name != "deltad" or re.search(r"[|<>;&]", re.sub(r"'[^']*'", "", command)):
        raise SessionError(f"a session runs `deltad` alone, without pipes; got {command!r}")
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise SessionError(f"{command!r} failed") from result.exception
    return result.output, result.exit_code


def _pycon(body: str, names: dict[str, Any]) -> Iterator[str]:
    """A block of `>>>` lines with its outputs of now."""
    for part in doctest.DocTestParser().parse(body):
        if isinstance(part, str):
            yield part
            continue
        lines = part.source.splitlines()
        yield "".join(
            f"{'...' if number else '>>>'} {line}".rstrip() + "\n"
            for number, line in enumerate(lines)
        )
        yield _kept(part.want, _execute(part.source, names, "single"))


def _execute(source: str, names: dict[str, Any], mode: str) -> str:
    """Run Python code; return what it printed."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "<page>", mode), names)
    except Exception as error:
        raise SessionError(f"this code of the page failed:\n{source}") from error
    return printed.getvalue()


def _kept(shown: str, printed: str) -> str:
    """The output as shown where it agrees with the one printed, else the one printed."""
    blank = shown[len(shown.rstrip("\n")) :]  # blank lines before the next prompt
    lines = [line.rstrip() for line in printed.rstrip("\n").splitlines()]
    pattern = "".join(
        ".*" if part == "..." else re.escape(part)
        for part in re.split(r"(\.\.\.)", shown.rstrip("\n"))
    )
    text = "\n".join(lines)
    if re.fullmatch(pattern, text, flags=re.DOTALL):
        return shown
    return text + (blank or "\n") if text else ""


def images(page: str) -> list[str]:
    """The image files that a page shows, as it names them."""
    return re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page)


def run_page(path: Path, *, slow: bool, write: bool) -> bool:
    """Run one page in a folder of its own; say whether an output has moved.

    Parameters
    ----------
    path : Path
        A file in `docs/`.
    slow : bool
        Run the blocks marked slow too.
    write : bool
        Put the outputs of now into the page, and the figures that it shows beside it.

    Returns
    -------
    bool
        True where the page shows another text than its code prints; figures are not compared.

    Raises
    ------
    SessionError
        As `refreshed`, and names the page.
    """
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            fresh = refreshed(text, folder, slow=slow)
        except SessionError as error:
            raise SessionError(f"{path.relative_to(ROOT)}: {error}") from error.__cause__
        if write:
            path.write_text(fresh, encoding="utf-8")
            for image in filter(lambda each: (folder / each).is_file(), images(text)):
                shutil.copyfile(folder / image, path.parent / image)
    return fresh != text


def main() -> int:
    """Parse the options and run the pages."""
    parser = argparse.ArgumentParser(description="Run the code in pages.")
    parser.add_argument("pages", nargs="*", help="as dump.md; all without it")
    parser.add_argument("--write", action="store_true", help="keep the new outputs and figures")
    parser.add_argument("--slow", action="store_true", help="run the blocks marked slow too")
    options = parser.parse_args()
    moved = False
    for path in [DOCS / page for page in options.pages] or pages():
        if run_page(path, slow=options.slow, write=options.write):
            moved = True
            state = "written" if options.write else "have moved"
            sys.stdout.write(f"{path.relative_to(ROOT)}: outputs {state}\n")
    return 1 if moved and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
