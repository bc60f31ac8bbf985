"""What every result of an analysis is: columns, declared once, from which every form is made."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from deltad._checks import printable
from deltad.divergence import DIVERGENCES

from .question import Question, QuestionError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from .statistics import Interval

FORMAT: Final = 1
"""Version of the JSON objects."""

DASH: Final = "–"
"""Stands for an undefined number."""

WIDTH: Final = 80
"""Columns of text where the terminal does not say."""

ENDINGS: Final[Mapping[str, str]] = {
    ".txt": "text", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv",
    ".tsv": "tsv", ".md": "markdown", ".tex": "latex", ".html": "html", ".parquet": "parquet",
    ".png": "png", ".pdf": "pdf", ".svg": "svg",
}  # fmt: skip
"""The form that a file's ending stands for."""

FIGURES: Final = "deltad.analysis.figures"
"""The package that draws results; it has `draw(result)` and `figure_bytes(figure, form)`."""

DRAWN: Final = ("png", "pdf", "svg")
FORMS: Final = ("text", "json", "csv", "tsv", "markdown", "latex", "html", "parquet")
"""The forms of a result, and those that it has in addition where it can be drawn."""


@dataclass(frozen=True)
class Column:
    """One column of a result.

    Attributes
    ----------
    name : str
        In files and in JSON.
    meaning : str
        What stands in it, with its unit.
    value : callable
        Of a row; NaN or None where it is not known.
    head : str
        Its heading in text; columns without stand in files only.
    show : callable, optional
        A row's cell in text; by default the value.
    key : bool
        Whether it says what the row is of, rather than a number about it.
    """

    name: str
    meaning: str
    value: Callable[..., Any]
    head: str = ""
    show: Callable[..., str] | None = None
    key: bool = False

    def cell(self, row: Any) -> str:
        """A row's cell in text."""
        return self.show(row) if self.show is not None else shown(self.value(row))


def record(columns: Iterable[Column], row: Any) -> dict[str, Any]:
    """A row as an object: the columns that have a name."""
    return {each.name: each.value(row) for each in columns if each.name}


@dataclass(frozen=True)
class Table:
    """Rows to be read: cells that are text already, under their headings."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, columns: Iterable[Column], rows: Iterable[Any]) -> Table:
        """Those columns of some rows that have a heading."""
        headed = [each for each in columns if each.head]
        cells = [[each.cell(row) for each in headed] for row in rows]
        return cls([each.head for each in headed], cells)


class Result(ABC):
    """A computed answer; its forms are made from its columns when they are asked for.

    A command prints `text`, or writes one of the other forms; a notebook shows `_repr_html_`.
    """

    COLUMNS: ClassVar[Sequence[Column]] = ()
    """What stands in a row, where that is the same for all results of a kind."""

    if TYPE_CHECKING:  # a subclass may have them as a field

        @property
        def rows(self) -> Sequence[Any]:
            """Rows, as the columns take them."""

    @property
    def columns(self) -> Sequence[Column]:
        """What stands in a row."""
        return self.COLUMNS

    @abstractmethod
    def objects(self) -> dict[str, Any]:
        """What its JSON object holds after `format`."""

    def to_json_object(self) -> dict[str, Any]:
        """Everything as plain objects, `format` first; NaN is None."""
        found: dict[str, Any] = without_nan({"format": FORMAT, **self.objects()})
        return found

    def records(self) -> list[dict[str, Any]]:
        """The rows as objects."""
        return [record(self.columns, row) for row in self.rows]

    @abstractmethod
    def parts(self) -> Iterable[str | Table]:
        """What a person reads: lines and tables, the first line being the heading."""

    def figure(self) -> Figure:
        """Draw it.

        Raises
        ------
        QuestionError
            There is no figure of this, or nothing to draw.
        """
        # Figures stand above the tables that they draw, so they are asked by name.
        drawn: Figure = import_module(FIGURES).draw(self)
        return drawn

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns by name, of equal length; NaN or None where a number is undefined."""
        rows = self.rows  # which may be made anew each time it is asked for
        return {each.name: [each.value(row) for row in rows] for each in self.columns}

    def to_frame(self, *, long: bool = False) -> pd.DataFrame:
        """The columns as a DataFrame.

        Parameters
        ----------
        long : bool
            One row per number instead: the columns that say what a row is of, then `quantity` and
            `number`.
        """
        import pandas as pd

        frame = pd.DataFrame(self.to_dict())
        if not long:
            return frame
        keys = [each.name for each in self.columns if each.key]
        return frame.melt(id_vars=keys, var_name="quantity", value_name="number")

    def text(self, *, width: int | None = None, wide: bool = False) -> str:
        """What a person reads at a terminal.

        Parameters
        ----------
        width : int, optional
            Characters of a line; by default the terminal's, or 80.
        wide : bool
            All columns, in lines as wide as they need.
        """
        limit = 10_000 if wide else width or shutil.get_terminal_size((WIDTH, 24)).columns
        lines: list[str] = []
        for part in self.parts():
            if isinstance(part, Table):
                lines += ["", *_fitted(part, limit), ""]
            else:
                for line in part.split("\n"):
                    lines += _wrapped(_printable(line), max(20, limit))
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def save(self, path: str | Path) -> None:
        """Write it in the form that the path's ending stands for.

        Raises
        ------
        QuestionError
            An ending that stands for none.
        """
        Path(path).write_bytes(self.form(form_of(path)))

    def form(self, name: str, **how: Any) -> bytes:
        """One of the forms; `how` goes to `text`."""
        if name in DRAWN:
            written: bytes = import_module(FIGURES).figure_bytes(self.figure(), name)
            return written
        if name == "text":
            return self.text(**how).encode()
        if name == "json":
            return to_json(self.to_json_object()).encode()
        if name == "html":
            return f"{self._repr_html_()}\n".encode()
        made: bytes = COLUMN_FORMS[name](self.to_dict())
        return made

    def __repr__(self) -> str:
        lines = self.text().splitlines()
        return "\n".join(lines if len(lines) <= 10 else [*lines[:9], "…"])

    def __str__(self) -> str:
        return self.text().rstrip("\n")

    def _repr_html_(self) -> str:
        """What Jupyter shows: lines as paragraphs, tables as tables, in the page's colours."""
        return as_html(self.parts())


def as_html(parts: Iterable[str | Table]) -> str:
    """Lines and tables as one `<div>`, in which what is wide scrolls; all text is escaped.

    Examples
    --------
    >>> as_html(["head", "1 < 2"])[-58:]
    '<p style="margin:.4em 0;max-width:60em">1 &lt; 2</p></div>'
    """
    from html import escape  # slow to import

    style = "padding:.2em 1.2em .2em 0;vertical-align:top;border:0;background:none;white-space:pre;"

    def row(tag: str, cells: Iterable[str]) -> str:
        """One line of a table, the first cell to the left."""
        line = ";border-bottom:1px solid currentColor" if tag == "th" else ""
        made = (
            f'<{tag} style="{style}font-weight:normal;text-align:{"right" if place else "left"}'
            f'{line}">{escape(_printable(words))}</{tag}>'
            for place, words in enumerate(cells)
        )
        return f"<tr>{''.join(made)}</tr>"

    found = []
    for at, part in enumerate(parts):
        if isinstance(part, Table):
            body = "".join(row("td", cells) for cells in part.rows)
            found.append(
                '<table style="border-collapse:collapse;margin:.4em 0 .8em;font-variant-numeric:'
                f'tabular-nums"><thead>{row("th", part.heads)}</thead><tbody>{body}</tbody></table>'
            )
            continue
        weight = "" if at else ";font-weight:600"
        for line in map(_printable, part.split("\n")):
            found.append(f'<p style="margin:.4em 0;max-width:60em{weight}">{escape(line)}</p>')
    return f'<div style="overflow-x:auto">{"".join(found)}</div>'


_folded = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def _wrapped(line: str, limit: int) -> list[str]:
    """A line folded; what stands behind an indented name hangs behind it."""
    name = re.match(r" +\S+(?: \S+)* {2,}", line)
    indent = " " * (name.end() if name is not None else 0)
    return _folded(line, limit, subsequent_indent=indent) or [""]


def _fitted(table: Table, limit: int) -> list[str]:
    """A table's lines; where they are too long, in blocks that repeat the first column."""
    heads = [_printable(head) for head in table.heads]
    rows = [[_printable(cell) for cell in row] for row in table.rows]
    widths = [
        max(min(12, len(head)), *map(len, head.split(" ")), *(len(row[at]) for row in rows))
        for at, head in enumerate(heads)
    ]
    folded = [_folded(head, max(1, width)) for head, width in zip(heads, widths, strict=True)]

    def needed(places: Sequence[int]) -> int:
        """Characters of a line of some columns."""
        return sum(widths[at] for at in places) + 2 * (len(places) - 1)

    blocks: list[list[int]] = [[]]
    for at in range(len(heads)):
        if len(blocks[-1]) > 1 and needed([*blocks[-1], at]) > limit:
            blocks.append([0])
        blocks[-1].append(at)
    lines: list[str] = []
    for block in blocks:
        height = max(len(folded[at]) for at in block)
        stacked = [[""] * (height - len(folded[at])) + folded[at] for at in block]
        every = [*zip(*stacked, strict=True), *([row[at] for at in block] for row in rows)]
        padded = [
            [cell.rjust(widths[at]) if place else cell.ljust(widths[at])
             for place, (at, cell) in enumerate(zip(block, cells, strict=True))]
            for cells in every
        ]  # fmt: skip
        texts = ["  ".join(cells) for cells in padded]
        texts.insert(height, "─" * needed(block))
        lines += [*([""] if lines else []), *texts]
    return lines


def _printable(cell: str) -> str:
    """A cell fit for any terminal, its leading spaces kept."""
    return cell if cell.isprintable() else printable(cell)


def form_of(path: str | Path, forms: Sequence[str] = (*FORMS, *DRAWN)) -> str:
    """The form that a file's ending stands for.

    Raises
    ------
    QuestionError
        An ending that stands for none of them.
    """
    form = ENDINGS.get(Path(path).suffix.lower(), "")
    if form not in forms:
        known = ", ".join(ending for ending, each in ENDINGS.items() if each in forms)
        raise QuestionError(f"the file's name must end in one of {known}, got {str(path)!r}")
    return form


def to_json(value: Any) -> str:
    """JSON text of an object, indented, NaN as null, with a newline at its end."""
    return json.dumps(without_nan(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """The same value with every float that JSON cannot hold (NaN, ±∞) made None."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _to_csv(columns: Mapping[str, Sequence[Any]], delimiter: str = ",") -> bytes:
    """CSV or TSV: every digit of a float, an empty field for what is not known."""
    import csv

    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(plain_cell, row) for row in zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def plain_cell(value: Any) -> Any:
    """A cell for a spreadsheet, in which no text of a dump becomes a formula."""
    if is_unknown(value):
        return ""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def _to_markdown(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """A Markdown table, floats to four digits, a dash for what is not known."""
    rows = [list(columns), ["---"] * len(columns)]
    rows += [
        [printable(shown(value)).replace("|", "\\|") for value in row]
        for row in zip(*columns.values(), strict=True)
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).encode()


_LATEX: Final = str.maketrans(
    {each: f"\\{each}" for each in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"−": "$-$", DASH: "--", "Δ": r"$\Delta$"}
)


def _to_latex(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """A LaTeX table for the package booktabs, floats to four digits."""

    def row(cells: Iterable[Any]) -> str:
        """One line of the table."""
        return " & ".join(printable(shown(cell)).translate(_LATEX) for cell in cells) + r" \\"

    kinds = "".join(
        "l" if any(isinstance(value, str) for value in values) else "r"
        for values in columns.values()
    )
    lines = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", row(columns), r"\midrule"]
    lines += [row(cells) for cells in zip(*columns.values(), strict=True)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]).encode()


def _to_parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """A Parquet file, NaN as NULL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


COLUMN_FORMS: Final[Mapping[str, Callable[[Mapping[str, Sequence[Any]]], bytes]]] = {
    "csv": _to_csv, "tsv": partial(_to_csv, delimiter="\t"), "markdown": _to_markdown,
    "latex": _to_latex, "parquet": _to_parquet,
}  # fmt: skip
"""The forms of a file that has columns."""


def is_unknown(value: Any) -> bool:
    """Whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def shown(value: Any) -> str:
    """A value in a table to be read: floats to four digits, a dash for what is not known."""
    if is_unknown(value):
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)


def number(value: float | None, *, signed: bool = False) -> str:
    """A share to three digits, a dash where it is not known."""
    if value is None or math.isnan(value):
        return DASH
    return (f"{value:+.3f}" if signed else f"{value:.3f}").replace("-", "−")


def p_value(value: float) -> str:
    """A p-value to two significant digits, a dash for NaN."""
    return DASH if math.isnan(value) else f"{value:.2g}"


def with_interval(value: float, interval: Interval, *, signed: bool = False) -> str:
    """A share with its interval, which is left out where it is undefined."""
    low, high = interval
    if math.isnan(low):
        return number(value, signed=signed)
    ends = f"{number(low, signed=signed)}, {number(high, signed=signed)}"
    return f"{number(value, signed=signed)} [{ends}]"


def counted(number_of: float | None, noun: str) -> str:
    """A count with its noun in the right number.

    Examples
    --------
    >>> counted(1, "seed"), counted(61, "seed"), counted(None, "token")
    ('1 seed', '61 seeds', 'an unknown number of tokens')
    """
    if number_of is None:
        return f"an unknown number of {noun}s"
    return f"{number_of:g} {noun}" if number_of == 1 else f"{number_of:.10g} {noun}s"


def points(share: float) -> str:
    """A difference of shares in points.

    Examples
    --------
    >>> points(0.01), points(0.025)
    ('1 point', '2.5 points')
    """
    return "1 point" if round(100 * share, 9) == 1 else f"{100 * share:g} points"


def unit(question: Question) -> str:
    """The unit of D and ΔD with a space before it; nothing where D is a probability."""
    name = DIVERGENCES[question.divergence].unit
    return f" {name}" if name else ""


def region(question: Question) -> str:
    """The region: divergence, threshold and its unit."""
    return f"top-K {question.divergence.upper()} > {question.threshold:g}{unit(question)}"


def title(question: Question) -> str:
    """Pair and region in one line."""
    criterion, baseline = question.names
    return f"{criterion} against {baseline} · outside: {region(question)}"
