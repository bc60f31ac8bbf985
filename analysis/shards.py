"""Shards: what several machines read of one dump, each every N-th span, put together again.

A shard is a Parquet file of arrays, what `reading.Ask` gave for its spans, next to the footers of
the whole dump; so any table can be made of all shards, to the bit as one machine makes it, and
where the dump itself is out of reach.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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

FORMAT: Final = 3
"""Of the files; another number is refused."""

METADATA_KEY: Final = b"deltad_shard"

_FIELDS: Final = {"span": pa.int64(), "point": pa.int64(), "arrays": pa.large_binary()}
SCHEMA: Final = pa.schema([pa.field(*each, nullable=False) for each in _FIELDS.items()])
"""One row per span and point, with what was read there as the bytes of NumPy's `.npz`."""


class ShardWritten(Exception):  # noqa: N818
    """Not an error: a share of the spans was read and written, so there is no table yet."""


class Share(NamedTuple):
    """One of several equal parts of the spans: every `total`-th, from the `number`-th on."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read `I/N`; anything but two whole numbers with 1 ≤ I ≤ N is a QuestionError."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        share = cls(*map(int, found.groups())) if found else cls(0, 0)
        if not 1 <= share.number <= share.total:
            raise QuestionError(f"a shard must be I/N with 1 ≤ I ≤ N, got {text[:40]!r}")
        return share

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


class ShardWriter(Backend):
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

    def map(self, function: Any, items: Sequence[Any], *, progress: Any = None) -> Iterator[Any]:
        """Read the share and write it, then raise ShardWritten."""
        found = self._backend.map(function, self.chosen(items), progress=progress)
        rows = [
            {"span": at, "point": point, "arrays": _to_bytes(outside)}
            for at, points in zip(self.chosen(range(len(items))), found, strict=True)
            for point, outside in enumerate(points)
        ]
        described = {
            "format": FORMAT,
            "deltad": __version__,
            "share": list(self._share),
            "ask": _described(function),
            "spans": _spans(items),
            **_footers(self._dump),
        }
        table = pa.Table.from_pylist(rows, SCHEMA)
        table = table.replace_schema_metadata({METADATA_KEY: json.dumps(described)})
        pq.write_table(table, self._file, compression="zstd")
        raise ShardWritten(f"{self._share} of {len(items)} spans")


@dataclass(frozen=True)
class _Shard:
    """One file: where it is, what its metadata says, and the arrays by span and point."""

    path: Path
    said: Mapping[str, Any]
    outside: Mapping[int, Mapping[int, Outside]]


class Shards(Backend):
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
        self._said = shards[0].said
        self._found = {at: found for each in shards for at, found in each.outside.items()}
        self.dump = _dump(shards[0])

    def chosen(self, items: Sequence[Item]) -> Sequence[Item]:
        """None: everything was read."""
        return items[:0]

    def map(self, function: Any, items: Sequence[Any], *, progress: Any = None) -> Iterator[Any]:
        """Give what was read of each span; QuestionError where it was for another question."""
        asked, read = _described(function), self._said["ask"]
        if asked != read:
            unlike = [name for name in asked if asked[name] != read.get(name)]
            said = (f"`{name}` was {read.get(name)}, not {asked[name]}" for name in unlike)
            raise QuestionError(
                "the shards were read for another question: give the command and the options that "
                f"they were made with ({shorten('; '.join(said), 300, placeholder=' …')})"
            )
        if _spans(items) != self._said["spans"]:
            raise QuestionError("the shards were read of other spans: read all of them anew")
        for at, item in enumerate(items):
            yield [outside for _, outside in sorted(self._found[at].items())]
            if progress is not None:
                progress(item)


def _described(ask: Any) -> dict[str, Any]:
    """What was asked, in plain words."""
    if not isinstance(ask, Ask):
        raise QuestionError("this is not made of tokens outside, so it takes no shards")
    return {
        "threshold": ask.region.threshold,
        "divergence": ask.region.divergence,
        "criteria": [each.name for each in ask.rules],
        "points": [list(each) for each in ask.points],
        "values": list(ask.values),
        "recompute": ask.recompute,
        "everywhere": ask.everywhere,
        "apart": ask.apart,
    }


def _spans(items: Sequence[Any]) -> list[list[Any]]:
    """What tells spans apart."""
    return [[each.part.arm, each.part.seed, each.rows] for each in items]


_PLAIN: Final = ("arm", "seed", "rank", "part", "rows")
"""Attributes of a file that are written as they are."""


def _footers(dump: Dump) -> dict[str, Any]:
    """A dump's footers, metadata that are alike once."""
    texts: dict[str, int] = {}
    parts = [
        {
            **{name: getattr(part, name) for name in _PLAIN},
            "path": str(part.path),
            "columns": part.columns,
            "groups": part.groups,
            "metadata": texts.setdefault(part.metadata.to_json(), len(texts)),
        }
        for part in dump.parts
    ]
    return {"run": str(dump.path), "parts": parts, "metadata": list(texts)}


def _dump(shard: _Shard) -> Dump:
    """The dump that a shard's footers describe."""
    said = shard.said
    try:
        metadata = [Metadata.from_json(text, shard.path) for text in said["metadata"]]
        parts = [
            PartFile(
                Path(each["path"]),
                metadata=metadata[each["metadata"]],
                columns=tuple(each["columns"]),
                groups=tuple(each["groups"]),
                **{name: each[name] for name in _PLAIN},
            )
            for each in said["parts"]
        ]
        return Dump(Path(said["run"]), tuple(parts))
    except Exception as error:  # of many kinds
        raise _malformed(shard.path, error) from error


def _malformed(file: Path, error: Exception) -> DumpError:
    """A file that is a shard by its metadata, and does not hold what a shard holds."""
    return DumpError(file, f"is malformed ({type(error).__name__}: {error})")


def _to_bytes(outside: Outside) -> bytes:
    """The arrays of what was read of a span at a point."""
    stored = -1 if outside.stored is None else outside.stored
    arrays = {
        **{f"column {name}": values for name, values in outside.columns.items()},
        "keep": outside.keep,
        "totals": outside.totals,
        "elsewhere": outside.elsewhere,
        "soft": outside.soft,
        "weights": np.array(outside.weights, np.float64),
        "counts": np.array([outside.seen, outside.rows, outside.unknown, stored], np.int64),
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def _from_bytes(data: bytes, rules: int) -> Outside:
    """The same read back; raises ValueError for what reading never gives."""
    with np.load(io.BytesIO(data)) as file:
        arrays: dict[str, NDArray[Any]] = dict(file)
    columns = {
        name.removeprefix("column "): values
        for name, values in arrays.items()
        if name.startswith("column ")
    }
    keep, totals = arrays["keep"], arrays["totals"]
    if len(keep) != rules or {keep[0].shape} != {each.shape for each in columns.values()}:
        raise ValueError("arrays of unlike lengths")
    seen, rows, unknown, stored = arrays["counts"].tolist()
    if min(seen, rows, unknown) < 0 or totals[0] < keep.shape[1]:
        raise ValueError("impossible counts")
    if np.isinf(columns["delta_d"]).any() or not (columns["weight"] >= 1).all():
        raise ValueError("an impossible ΔD or weight")
    least, most = arrays["weights"].tolist()
    return Outside(
        columns, keep, totals, seen, rows, unknown, arrays["elsewhere"], arrays["soft"],
        (least, most), None if stored < 0 else stored,
    )  # fmt: skip


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
        number, total = (int(each) for each in said["share"])
        rules, points = len(said["ask"]["criteria"]), max(1, len(said["ask"]["points"]))
        outside: dict[int, dict[int, Outside]] = {}
        for row in table.cast(SCHEMA).to_pylist():
            here = outside.setdefault(row["span"], {})
            if row["point"] in here:
                raise ValueError(f"span {row['span']} is there twice")
            here[row["point"]] = _from_bytes(row["arrays"], rules)
        if outside.keys() != {*range(len(said["spans"]))[number - 1 :: total]}:
            raise ValueError("it does not hold its share of the spans")
        if any(found.keys() != {*range(points)} for found in outside.values()):
            raise ValueError("it does not hold every point of its spans")
    except Exception as error:  # of many kinds
        raise _malformed(file, error) from error
    return _Shard(file, said, outside)


def _check_whole(shards: Sequence[_Shard]) -> None:
    """Refuse shards that do not make up one table."""
    if not shards:
        raise QuestionError("name at least one shard")
    first, known = shards[0], dict[int, _Shard]()
    total = first.said["share"][1]
    for each in shards:
        for what, keys in (
            ("versions of deltad", ("deltad",)),
            ("questions", ("ask",)),
            ("dumps", ("spans", "parts")),
        ):
            if any(each.said.get(key) != first.said.get(key) for key in keys):
                raise QuestionError(f"{first.path} and {each.path} are of different {what}")
        number, of = each.said["share"]
        if of != total:
            raise QuestionError(f"{first.path} and {each.path} are of different numbers of shards")
        if number in known:
            raise QuestionError(
                f"{known[number].path} and {each.path} are both shard {number}/{total}: give "
                "each once"
            )
        known[number] = each
    missing = [f"{at}/{total}" for at in range(1, total + 1) if at not in known]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise QuestionError(
            f"missing are the shards {', '.join(missing[:8])}{more}: read each with `--shard`"
        )
