"""Shards: what several machines read of one dump, each every N-th span, put together again.

A shard is a Parquet file of arrays, what `reading.Ask` gave for its spans, next to the footers of
the whole dump; so any table can be made of all shards, to the bit as one machine makes it, and
where the dump itself is out of reach.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deltad import __version__
from deltad.dumps import Dump, DumpError, Metadata, PartFile
from deltad.dumps.errors import DAMAGE, unreadable
from deltad.dumps.storage import StorageError, open_parquet, place

from .backends import Backend, Item, LocalBackend
from .question import QuestionError
from .reading import Ask, Outside

FORMAT: Final = 2
"""Of the files; another number is refused."""

METADATA_KEY: Final = b"deltad_shard"

SCHEMA: Final = pa.schema(
    [
        pa.field("span", pa.int64(), nullable=False),
        pa.field("point", pa.int64(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)
"""One row per array: of which span and point, its name, type, first dimension and bytes."""

_TYPES: Final = ("float64", "int64", "bool", "int32", "float32", "intp")


class ShardWritten(Exception):  # noqa: N818
    """Not an error: a share of the spans was read and written, so there is no table yet.

    Attributes
    ----------
    spans : int
        Of the dump, in all.
    """

    def __init__(self, spans: int) -> None:
        super().__init__(f"a shard of {spans} spans was written")
        self.spans = spans


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
        if not whole or len(text) > 20 or not 1 <= int(number) <= int(total):
            raise QuestionError(f"a shard must be I/N with 1 ≤ I ≤ N, got {text[:40]!r}")
        return cls(int(number), int(total))

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


class ShardWriter:
    """A backend that reads one share of the spans into a file and ends with `ShardWritten`.

    Parameters
    ----------
    share : Share
        Which.
    file : binary file
        Open for writing.
    dump : Dump
        Whose footers go along.
    backend : Backend, optional
        Where to read; by default on this machine's cores.
    """

    def __init__(
        self, share: Share, file: BinaryIO, dump: Dump, backend: Backend | None = None
    ) -> None:
        self._share, self._file, self._dump = share, file, dump
        self._backend = backend or LocalBackend()

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """The share of the items."""
        return items[self._share.number - 1 :: self._share.total]

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        progress: Callable[[Any], None] | None = None,
    ) -> Iterator[Any]:
        """Read the share and write it; see `Backend.map`.

        Raises
        ------
        ShardWritten
            When that is done.
        """
        mine = self.chosen(range(len(items)))
        found = self._backend.map(function, self.chosen(items), progress=progress)
        rows = [
            row
            for at, points in zip(mine, found, strict=True)
            for point, outside in enumerate(points)
            for row in _rows(at, point, outside)
        ]
        described = {
            "format": FORMAT,
            "deltad": __version__,
            "share": list(self._share),
            "ask": _described(function),
            "spans": [[each.part.arm, each.part.seed, each.rows] for each in items],
            **_footers(self._dump),
        }
        table = pa.Table.from_pylist(rows, SCHEMA)
        table = table.replace_schema_metadata({METADATA_KEY: json.dumps(described)})
        pq.write_table(table, self._file, compression="zstd")
        raise ShardWritten(len(items))


@dataclass(frozen=True)
class _Shard:
    """One file: where it is, what its metadata says, and the arrays by span and point."""

    path: Path
    said: Mapping[str, Any]
    outside: Mapping[int, Mapping[int, Outside]]


class Shards:
    """A backend that gives what shards hold, and the dump that their footers describe.

    Parameters
    ----------
    paths : sequence of str or Path
        All shards of one table, in any order.

    Attributes
    ----------
    dump : Dump
        By its footers; its rows may be out of reach.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    DumpError
        A file is damaged, none of these files, or of another format.
    QuestionError
        A share is missing or there twice, or the files are of different questions, dumps or
        numbers of shares; names the files.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        shards = [_read(path) for path in paths]
        _check_whole(shards)
        first = shards[0]
        self._said = first.said
        self._found = {at: found for each in shards for at, found in each.outside.items()}
        self.dump = _dump(first)

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """None: everything was read."""
        return items[:0]

    def map(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        progress: Callable[[Any], None] | None = None,
    ) -> Iterator[Any]:
        """Give what was read of each span; see `Backend.map`.

        Raises
        ------
        QuestionError
            The shards were read for another question.
        """
        asked, read = _described(function), self._said["ask"]
        if asked != read:
            unlike = [name for name in asked if asked[name] != read.get(name)]
            said = (f"`{name}` was {read.get(name)}, not {asked[name]}" for name in unlike)
            raise QuestionError(
                "the shards were read for another question: give the command and the options that "
                f"they were made with ({shorten('; '.join(said), 300, placeholder=' …')})"
            )
        spans = [[each.part.arm, each.part.seed, each.rows] for each in items]
        if spans != self._said["spans"]:
            raise QuestionError("the shards were read of other spans: read all of them anew")
        for at, item in enumerate(items):
            points = self._found[at]
            yield [points[point] for point in sorted(points)]
            if progress is not None:
                progress(item)


def _described(ask: Any) -> dict[str, Any]:
    """What was asked, in plain words."""
    if not isinstance(ask, Ask):
        raise QuestionError("this is not made of tokens outside, so it takes no shards")
    region = ask.region
    return {
        "threshold": region.threshold,
        "divergence": region.divergence,
        "criteria": [each.name for each in ask.rules],
        "points": [list(each) for each in ask.points],
        "values": list(ask.values),
        "recompute": ask.recompute,
        "everywhere": ask.everywhere,
        "apart": ask.apart,
    }


def _footers(dump: Dump) -> dict[str, Any]:
    """A dump's footers, metadata that are alike once."""
    texts: dict[str, int] = {}
    parts = []
    for part in dump.parts:
        at = texts.setdefault(part.metadata.to_json(), len(texts))
        parts.append(
            {**{key: getattr(part, key) for key in ("arm", "seed", "rank", "part", "rows")},
             "path": str(part.path), "columns": list(part.columns), "groups": list(part.groups),
             "metadata": at}
        )  # fmt: skip
    return {"run": str(dump.path), "parts": parts, "metadata": list(texts)}


def _dump(shard: _Shard) -> Dump:
    """The dump that a shard's footers describe."""
    said = shard.said
    try:
        metadata = [Metadata.from_json(text, shard.path) for text in said["metadata"]]
        parts = [
            PartFile(
                Path(each["path"]), str(each["arm"]), int(each["seed"]), int(each["rank"]),
                int(each["part"]), int(each["rows"]), metadata[each["metadata"]],
                tuple(each["columns"]), tuple(each["groups"]),
            )
            for each in said["parts"]
        ]  # fmt: skip
        return Dump(Path(said["run"]), tuple(parts))
    except (*DAMAGE, TypeError, AttributeError, IndexError) as error:
        raise DumpError(shard.path, f"is malformed ({type(error).__name__}: {error})") from error


def _rows(span: int, point: int, outside: Outside) -> Iterator[dict[str, Any]]:
    """The arrays of what was read of a span at a point."""
    stored = -1 if outside.stored is None else outside.stored
    arrays: dict[str, NDArray[Any]] = {
        **{f"column {name}": values for name, values in outside.columns.items()},
        "keep": outside.keep,
        "totals": outside.totals,
        "elsewhere": outside.elsewhere,
        "soft": outside.soft,
        "weights": np.array(outside.weights, np.float64),
        "counts": np.array([outside.seen, outside.rows, outside.unknown, stored], np.int64),
    }
    for name, values in arrays.items():
        yield {
            "span": span, "point": point, "name": name, "dtype": values.dtype.name,
            "rows": len(values), "data": np.ascontiguousarray(values).tobytes(),
        }  # fmt: skip


def _read(path: str | Path) -> _Shard:
    """Read a shard; raises as `Shards`."""
    file = place(path)
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        with open_parquet(file) as opened:
            table = opened.read()
        said = json.loads((table.schema.metadata or {})[METADATA_KEY])
    except StorageError:
        raise
    except KeyError as error:
        raise DumpError(
            file, "is no shard: `deltad table RUN --shard I/N -o FILE.parquet` makes them"
        ) from error
    except (*DAMAGE, RecursionError) as error:
        raise unreadable(file, error) from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        found = said.get("format") if isinstance(said, dict) else said
        raise DumpError(file, f"must be a shard of format {FORMAT}, found {found!r}")
    try:
        arrays: dict[int, dict[int, dict[str, NDArray[Any]]]] = {}
        for row in table.cast(SCHEMA).to_pylist():
            if row["dtype"] not in _TYPES:
                raise ValueError(f"an array is of type {row['dtype']}")
            values = np.frombuffer(row["data"], row["dtype"])
            if row["name"] in ("keep", "elsewhere"):
                values = values.reshape(row["rows"], -1)
            here = arrays.setdefault(row["span"], {}).setdefault(row["point"], {})
            if row["name"] in here:
                raise ValueError(f"span {row['span']} is there twice")
            here[row["name"]] = values
        number, total = (int(each) for each in said["share"])
        spans = range(len(said["spans"]))[number - 1 :: total]
        if set(arrays) != set(spans):
            raise ValueError("it does not hold its share of the spans")
        rules, points = len(said["ask"]["criteria"]), max(1, len(said["ask"]["points"]))
        outside = {
            at: {point: _outside(here, rules) for point, here in found.items()}
            for at, found in arrays.items()
        }
        if any(set(found) != set(range(points)) for found in outside.values()):
            raise ValueError("it does not hold every point of its spans")
    except (*DAMAGE, TypeError, AttributeError) as error:
        raise DumpError(file, f"is malformed ({type(error).__name__}: {error})") from error
    return _Shard(file, said, outside)


def _outside(arrays: Mapping[str, NDArray[Any]], rules: int) -> Outside:
    """What a span's arrays hold; raises ValueError for what reading never gives."""
    columns = {
        name.removeprefix("column "): values
        for name, values in arrays.items()
        if name.startswith("column ")
    }
    keep, counts, weights = arrays["keep"], arrays["counts"], arrays["weights"]
    size = keep.shape[1] if keep.size else 0
    if len(keep) != rules or {len(each) for each in columns.values()} != {size}:
        raise ValueError("arrays of unlike lengths")
    if len(counts) != 4 or (counts[:3] < 0).any() or arrays["totals"][0] < size:
        raise ValueError("impossible counts")
    if np.isinf(columns["delta_d"]).any() or not (columns["weight"] >= 1).all():
        raise ValueError("an impossible ΔD or weight")
    return Outside(
        columns,
        keep.reshape(rules, size),
        arrays["totals"],
        int(counts[0]),
        int(counts[1]),
        int(counts[2]),
        arrays["elsewhere"],
        arrays["soft"],
        (float(weights[0]), float(weights[1])),
        None if counts[3] < 0 else int(counts[3]),
    )


def _check_whole(shards: Sequence[_Shard]) -> None:
    """Refuse shards that do not make up one table."""
    if not shards:
        raise QuestionError("name at least one shard")
    known: dict[tuple[int, ...], _Shard] = {}
    first = shards[0]
    for each in shards:
        for what, keys in (
            ("versions of deltad", ("deltad",)),
            ("questions", ("ask",)),
            ("dumps", ("spans", "parts")),
        ):
            if any(each.said.get(key) != first.said.get(key) for key in keys):
                raise QuestionError(f"{first.path} and {each.path} are of different {what}")
        share = tuple(each.said["share"])
        if share[1] != first.said["share"][1]:
            raise QuestionError(f"{first.path} and {each.path} are of different numbers of shards")
        if share in known:
            raise QuestionError(
                f"{known[share].path} and {each.path} are both shard {share[0]}/{share[1]}: give "
                "each once"
            )
        known[share] = each
    total = first.said["share"][1]
    missing = [number for number in range(1, total + 1) if (number, total) not in known]
    if missing:
        named = ", ".join(f"{number}/{total}" for number in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise QuestionError(f"missing are the shards {named}{more}: read each with `--shard`")
