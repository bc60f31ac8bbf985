"""Files of counts: which share of which dump, and what every span of it holds.

A partial is a Parquet file with a row a span: which row groups of which file, that file's size,
and what was counted there. Its metadata names the question, the dump by a digest of its files,
and which share of how many it is.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deltad import __version__
from deltad.dumps import DumpError
from deltad.dumps.errors import DAMAGE, unreadable
from deltad.dumps.storage import StorageError, open_parquet, place

from .counting import ArmCounts, Judged, Tally
from .engine import Span
from .question import Question, QuestionError, Resolved, decider

FORMAT: Final = 1
"""Of the files; another number is refused."""

METADATA_KEY: Final = b"deltad_partial"

_KEY: Final = ("arm", "seed", "rank", "part", "first")
"""What identifies a span, and the order of spans."""

_ARRAYS: Final = {
    "delta_d": pa.float64(),
    "keep": pa.bool_(),
    "undetermined": pa.bool_(),
    "bounded": pa.bool_(),
    "weight": pa.float64(),
}
"""Columns of a value for each disagreement token of a span."""

PARTIAL_SCHEMA: Final = pa.schema(
    [
        pa.field("arm", pa.string(), nullable=False),
        *(pa.field(name, pa.int32(), nullable=False) for name in ("seed", "rank", "part")),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("first", "end", "bytes")),
        *(pa.field(name, pa.int64(), nullable=False) for name in ("tokens", "without_vectors")),
        pa.field("outside", pa.int64(), nullable=False),
        pa.field("outside_increase", pa.int64()),
        pa.field("outside_undetermined", pa.int64(), nullable=False),
        pa.field("outside_bounded", pa.int64(), nullable=False),
        pa.field("outside_weights", pa.list_(pa.float64(), 2), nullable=False),
        pa.field("outside_extremes", pa.list_(pa.float64(), 2), nullable=False),
        *(pa.field(name, pa.list_(kind), nullable=False) for name, kind in _ARRAYS.items()),
    ]
)
"""Columns of a partial: the span, its file's size, then the fields of `ArmCounts`."""


class Share(NamedTuple):
    """One of several equal parts of the spans: every `total`-th, from the `number`-th on.

    Attributes
    ----------
    number, total : int
        `number` of `total`, counted from 1.
    """

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read `I/N`.

        Raises
        ------
        QuestionError
            Not two whole numbers with 1 ≤ I ≤ N.
        """
        number, slash, total = text.partition("/")
        whole = slash and text.isascii() and number.isdecimal() and total.isdecimal()
        if not whole or not 1 <= int(number) <= int(total):
            raise QuestionError(f"a share must be I/N with 1 ≤ I ≤ N, got {text!r}")
        return cls(int(number), int(total))

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


@dataclass(frozen=True)
class Plan:
    """What is counted of a dump, whoever counts it.

    Attributes
    ----------
    resolved : tuple of Resolved
        The question under one protocol, or under each that can be answered.
    every : bool
        Whether all protocols were asked for.
    refused : dict of str to str
        Protocols that cannot be answered, and why.
    share_recorded : float
        Of the sequences of the dump.
    spans : int
        In all.
    digest : str
        Of the files' places, sizes and row groups.
    """

    resolved: tuple[Resolved, ...]
    every: bool
    refused: dict[str, str]
    share_recorded: float
    spans: int
    digest: str

    @property
    def arms(self) -> tuple[str, ...]:
        """Arms to read, each once."""
        return tuple(dict.fromkeys(arm for each in self.resolved for arm in each.arms))

    def to_json(self) -> dict[str, Any]:
        """As plain objects."""
        return {
            "questions": [
                {**asdict(each.question), "arms": [each.criterion_arm, each.baseline_arm]}
                for each in self.resolved
            ],
            "every": self.every,
            "refused": self.refused,
            "share_recorded": self.share_recorded,
            "spans": self.spans,
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Plan:
        """Read what `to_json` made."""
        resolved = []
        for each in found["questions"]:
            arms = each.pop("arms")
            question = Question(**each)
            resolved.append(
                Resolved(question, decider(question.criterion), decider(question.baseline), *arms)
            )
        rest = {name: found[name] for name in ("every", "refused", "share_recorded")}
        return cls(tuple(resolved), **rest, spans=int(found["spans"]), digest=str(found["digest"]))


def write_rows(
    file: BinaryIO, rows: list[dict[str, Any]], plan: Plan, share: Share, *, run: str
) -> None:
    """Write a partial.

    Parameters
    ----------
    file : binary file
        Open for writing.
    rows : list of dict
        Of `span_row`.
    plan, share
        What it is a part of, and which.
    run : str
        Where the dump lay; for whoever looks into the file.
    """
    described = {
        "format": FORMAT,
        "deltad": __version__,
        "run": run,
        "share": list(share),
        **plan.to_json(),
    }
    table = pa.Table.from_pylist(rows, PARTIAL_SCHEMA)
    pq.write_table(
        table.replace_schema_metadata({METADATA_KEY: json.dumps(described)}),
        file,
        compression="zstd",
    )


@dataclass(frozen=True, eq=False)
class Partial:
    """What was read of one file.

    Attributes
    ----------
    path : Path
        The file.
    share : Share
        Which.
    version : str
        Of the package that counted.
    plan : Plan
        What it is a part of.
    spans : dict of tuple to ArmCounts
        By arm, seed, rank, part and first row group.
    """

    path: Path
    share: Share
    version: str
    plan: Plan
    spans: dict[tuple[Any, ...], ArmCounts]


def read_partial(path: str | Path) -> Partial:
    """Read a partial.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    DumpError
        It is damaged, none of these files, or of another format.
    """
    path = place(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with open_parquet(path) as file:
            table = file.read()
        described = json.loads((table.schema.metadata or {})[METADATA_KEY])
    except StorageError:
        raise
    except KeyError as error:
        raise DumpError(
            path, "is no partial: `deltad table RUN --share I/N -o` makes them"
        ) from error
    except DAMAGE as error:
        raise unreadable(path, error) from error
    if not isinstance(described, dict):
        raise DumpError(path, f"must have an object as metadata, found {described!r}")
    if described.get("format") != FORMAT:
        raise DumpError(path, f"must be of format {FORMAT}, found {described.get('format')!r}")
    try:
        plan = Plan.from_json(described)
        share = Share(*described["share"])
        rows = table.cast(PARTIAL_SCHEMA).to_pylist()
        spans = {tuple(row[name] for name in _KEY): _counts(row) for row in rows}
        version = str(described["deltad"])
    except (*DAMAGE, TypeError, AttributeError) as error:
        raise DumpError(path, f"is malformed ({type(error).__name__}: {error})") from error
    if len(spans) < len(rows):
        raise DumpError(path, "holds a span twice")
    return Partial(path, share, version, plan, spans)


def span_row(span: Span, size: int, found: ArmCounts) -> dict[str, Any]:
    """A row of a partial: a span, the size of its file in bytes, and what was counted."""
    part, outside, tokens = span.part, found.outside, found.disagreement
    return {
        "arm": part.arm,
        "seed": part.seed,
        "rank": part.rank,
        "part": part.part,
        "first": span.first,
        "end": span.end,
        "bytes": size,
        "tokens": found.tokens,
        "without_vectors": found.without_vectors,
        "outside": outside.tokens,
        "outside_increase": outside.increase,
        "outside_undetermined": outside.undetermined,
        "outside_bounded": outside.bounded,
        "outside_weights": list(outside.weights),
        "outside_extremes": list(outside.extremes),
        "delta_d": tokens.delta_d,
        "keep": tokens.keep[0],
        "undetermined": tokens.undetermined,
        "bounded": tokens.bounded,
        "weight": tokens.weight,
    }


def _check_counts(row: dict[str, Any]) -> None:
    """Refuse what counting a span never gives; raises ValueError."""
    where = f"in {row['arm']}, seed {row['seed']}"
    for name in ("outside_weights", "outside_extremes", *_ARRAYS):
        if None in row[name]:
            raise ValueError(f"`{name}` must hold no NULL, found one {where}")
    for name in ("tokens", "without_vectors", "outside"):
        if row[name] < 0:
            raise ValueError(f"`{name}` must be at least 0, found {row[name]} {where}")
    for name in ("outside_increase", "outside_undetermined", "outside_bounded"):
        if row[name] is not None and not 0 <= row[name] <= row["outside"]:
            raise ValueError(
                f"`{name}` must lie in [0, {row['outside']}], the tokens outside, found "
                f"{row[name]} {where}"
            )
    if not all(map(math.isfinite, row["delta_d"])):
        raise ValueError(f"`delta_d` must be finite, found another number {where}")
    if not all(math.isfinite(weight) and weight >= 1 for weight in row["weight"]):
        raise ValueError(f"`weight` must be finite and at least 1, found another number {where}")


def _counts(row: dict[str, Any]) -> ArmCounts:
    """What `span_row` was made of."""
    _check_counts(row)
    numbers = {name: np.array(row[name], dtype=np.float64) for name in ("delta_d", "weight")}
    flags = {
        name: np.array(row[name], dtype=np.bool_) for name in ("keep", "undetermined", "bounded")
    }
    if len({len(each) for each in (*numbers.values(), *flags.values())}) > 1:
        raise ValueError(f"columns of unlike lengths in {row['arm']}, seed {row['seed']}")
    return ArmCounts(
        row["tokens"],
        row["without_vectors"],
        Tally(
            row["outside"],
            row["outside_increase"],
            row["outside_undetermined"],
            row["outside_bounded"],
            tuple(row["outside_weights"]),
            tuple(row["outside_extremes"]),
        ),
        Judged(
            numbers["delta_d"],
            flags["keep"][None],
            flags["undetermined"],
            flags["bounded"],
            numbers["weight"],
        ),
    )
