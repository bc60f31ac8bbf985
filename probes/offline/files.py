"""Reading files of scores record by record: JSON lines and Parquet, a token or a response each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from deltad._checks import parse_json
from deltad.probes.errors import first_line

from .faults import BadValueError, Fault, Faults, OfflineError, Origin
from .records import NAMES, Lists, Record, is_field, make_record, merged, unknown_fields

Progress = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""

PARQUET: Final = (".parquet", ".pq")
JSON_LINES: Final = (".jsonl", ".ndjson", ".json")
NO_FILE: Final = (
    "is a pipe or a device, and what is imported is read more than once: write it to a file first"
)
"""What is said of a path that can be read once only."""

_PACKED: Final = {
    b"\x1f\x8b": "is packed by gzip: unpack it first",
    b"\x28\xb5\x2f\xfd": "is packed by zstd: unpack it first",
    b"\xff\xfe": "must be UTF-8, found UTF-16",
    b"\xfe\xff": "must be UTF-8, found UTF-16",
}
_ROWS: Final = 1024  # of Parquet at once: with 20 ids a token, a few MB of responses


def expand(paths: Iterable[Path]) -> list[Path]:
    """Files in the order given; a folder stands for the files in it, sorted by name.

    Parameters
    ----------
    paths : iterable of Path
        Files and folders.

    Returns
    -------
    list of Path
        At least one.

    Raises
    ------
    OfflineError
        A path that is not there, a pipe or a device, or a folder without files of scores.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                each
                for each in path.rglob("*")
                if each.suffix.lower() in (*JSON_LINES, *PARQUET) and each.is_file()
            )
            if not inside:
                endings = ", ".join((*JSON_LINES, *PARQUET))
                raise OfflineError(f"{path} holds no file that ends in {endings}")
            found += inside
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise OfflineError(f"{path} {NO_FILE}")
        else:
            raise OfflineError(f"{path} does not exist")
    return found


def json_lines(
    path: Path, faults: Faults, progress: Progress | None = None
) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Read the objects of a file of JSON lines.

    Parameters
    ----------
    path : Path
        UTF-8, an object a line; empty lines are passed over.
    faults : Faults
        Takes lines that are no object, the last one cut off for instance.
    progress : callable, optional
        Told the bytes of every line.

    Yields
    ------
    Origin, dict
        Line and object.
    """
    with path.open("rb") as file:
        begin = file.read(4)
        for start, said in _PACKED.items():
            if begin.startswith(start):
                faults.add(Fault(path, said))
                return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if progress is not None:
                progress(len(line))
            if not line.strip():
                continue
            origin = Origin(path, number, "line")
            try:
                found = parse_json(line)
            except ValueError as error:
                half = "" if line.endswith(b"\n") else "; the file ends within it, half written"
                faults.add(Fault(origin, f"must be JSON ({first_line(error)}){half}"))
                continue
            if isinstance(found, dict):
                yield origin, found
            else:
                kind = type(found).__name__
                faults.add(Fault(origin, f"must be a JSON object, found {kind}"))


class ScoringFiles:
    """Files in the scoring format, one after the other.

    Parameters
    ----------
    paths : iterable of Path
        Files, or folders of them.
    score : bool
        Whether they are files of scores, with the fields of `records.SCORES`; otherwise of
        responses.
    step : int
        Of records that say none.

    Attributes
    ----------
    ignored : set of str
        Names of fields that meant nothing, of the records that were read.
    """

    def __init__(self, paths: Iterable[Path], *, score: bool = False, step: int = 0) -> None:
        self.paths = expand(paths)
        self.ignored: set[str] = set()
        self._score, self._step = score, step

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(path.stat().st_size for path in self.paths)

    def records(self, faults: Faults, progress: Progress | None = None) -> Iterator[Record]:
        """Read the responses.

        Parameters
        ----------
        faults : Faults
            Takes what is wrong; such records are left out.
        progress : callable, optional
            Told the number of bytes read.

        Yields
        ------
        Record
            In the order of the files.
        """
        for path in self.paths:
            read = _parquet if path.suffix.lower() in PARQUET else _json
            for origin, raw in read(path, faults, progress):
                self.ignored |= unknown_fields(raw, score=self._score)
                record = make_record(raw, origin, faults, score=self._score, step=self._step)
                if record is not None:
                    yield record


def _json(
    path: Path, faults: Faults, progress: Progress | None
) -> Iterator[tuple[Origin, Mapping[str, Any]]]:
    """Responses of JSON lines; consecutive lines of single tokens are put together."""
    lines = json_lines(path, faults, progress)
    for key, group in groupby(lines, key=lambda line: _token_of(line[1])):
        if key is None:
            yield from group
        else:
            tokens = list(group)
            yield tokens[0][0], merged([raw for _, raw in tokens])


def _token_of(raw: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What the tokens of one response have in common; None for a record that is a response."""
    if isinstance(raw.get("position"), list) or "position" not in raw:
        return None
    return tuple(repr(raw.get(name)) for name in NAMES)


def _parquet(
    path: Path, faults: Faults, progress: Progress | None
) -> Iterator[tuple[Origin, Mapping[str, Any]]]:
    """Responses of a Parquet file; consecutive rows of single tokens are put together."""
    row = 0
    left: tuple[Origin, dict[str, Any]] | None = None
    try:
        with pq.ParquetFile(path) as file:
            kind = file.schema_arrow
            if twice := [name for name in kind.names if kind.names.count(name) > 1]:
                raise BadValueError(f"must have each column once, found `{twice[0]}` twice")
            whole = "position" not in kind.names or _is_list(kind.field("position").type)
            for batch in file.iter_batches(_ROWS if whole else 16 * _ROWS, use_threads=False):
                origin = Origin(path, row, "row")
                if whole:
                    yield from _responses(batch, origin)
                else:
                    for each in _runs(batch, origin):
                        if left is not None and _names(left[1]) == _names(each[1]):
                            left = left[0], _joined(left[1], each[1])
                            continue
                        if left is not None:
                            yield left
                        left = each
                row += batch.num_rows
                if progress is not None:
                    rows = max(1, file.metadata.num_rows)
                    progress(path.stat().st_size * batch.num_rows // rows)
    except BadValueError as error:
        faults.add(Fault(path, str(error)))
    except (pa.ArrowException, OSError, ValueError) as error:
        faults.add(Fault(path, f"cannot be read as Parquet ({first_line(error)})"))
    if left is not None:
        yield left


def _responses(batch: pa.RecordBatch, origin: Origin) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Rows that are responses."""
    views = {name: _column(name, batch.column(name)) for name in batch.schema.names}
    for row in range(batch.num_rows):
        where = Origin(origin.path, origin.number + row, "row")
        yield where, {name: view(row, row + 1, True) for name, view in views.items()}


def _runs(batch: pa.RecordBatch, origin: Origin) -> Iterator[tuple[Origin, dict[str, Any]]]:
    """Consecutive rows of one response that are tokens."""
    views = {name: _column(name, batch.column(name)) for name in batch.schema.names}
    names = [name for name in (*NAMES, "prompt_ids") if name in views]
    keys = [batch.column(name).to_pylist() for name in NAMES if name in views]
    start = 0
    for _, rows in groupby(range(batch.num_rows), key=lambda row: [key[row] for key in keys]):
        stop = start + len(list(rows))
        found = {
            name: view(start, start + 1, True) if name in names else view(start, stop, False)
            for name, view in views.items()
        }
        yield Origin(origin.path, origin.number + start, "row"), found
        start = stop


def _names(raw: Mapping[str, Any]) -> list[Any]:
    """What says which response a record is of."""
    return [raw.get(name) for name in NAMES]


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of one response from two batches."""
    found = dict(first)
    for name, value in second.items():
        before = first[name]
        if isinstance(value, Lists):
            width = max(value.values.shape[1], before.values.shape[1])
            found[name] = Lists(
                np.concatenate([_widened(each.values, width) for each in (before, value)]),
                np.concatenate([before.lengths, value.lengths]),
            )
        elif name not in (*NAMES, "prompt_ids"):
            texts = isinstance(value, list)
            found[name] = [*before, *value] if texts else np.concatenate([before, value])
    return found


def _widened(values: NDArray[Any], width: int) -> NDArray[Any]:
    """Rows with room for more entries, which are empty."""
    empty = np.nan if values.dtype.kind == "f" else -1
    return np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=empty)


_View = Callable[[int, int, bool], Any]
"""Values of the rows from one to before another: as one record's field, or an entry a row."""


def _column(name: str, array: pa.Array) -> _View:
    """How to take the values of some rows out of a column."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not _is_list(array.type):
        values = _plain(name, array)
        return lambda start, stop, one: values[start] if one else values[start:stop]
    offsets, inner, there = _unpacked(array)
    if not _is_list(inner.type):
        flat = _plain(name, inner)

        def take(start: int, stop: int, one: bool) -> Any:
            if one:
                found = flat[offsets[start] : offsets[start + 1]]
                return found if there[start] else None
            lengths = np.where(there[start:stop], np.diff(offsets[start : stop + 1]), -1)
            return _rows(flat, offsets[start:stop], lengths)

        return take
    inside, leaf, present = _unpacked(inner)
    flat = _plain(name, leaf)

    def nested(start: int, stop: int, one: bool) -> Any:
        if not one:
            raise BadValueError(f"`{name}` must be a list in a row that is a token")
        if not there[start]:
            return None
        rows = slice(offsets[start], offsets[start + 1])
        lengths = np.diff(inside[rows.start : rows.stop + 1])
        return _rows(flat, inside[rows], np.where(present[rows], lengths, -1))

    return nested


def _rows(flat: Any, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Lists:
    """Lists that lie in one array, by where each begins; gaps between them are left out."""
    counts = np.maximum(lengths, 0)
    within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return Lists.of(flat[np.repeat(starts, counts) + within], lengths)


def _is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, of whatever layout."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _unpacked(array: pa.Array) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.bool_]]:
    """Where each list begins and ends in the array of all values, and which are not NULL."""
    there = ~array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(array.type):
        steps = array.offset + np.arange(len(array) + 1, dtype=np.int64)
        return steps * array.type.list_size, array.values, there
    return array.offsets.to_numpy(zero_copy_only=False).astype(np.int64), array.values, there


def _plain(name: str, array: pa.Array) -> Any:
    """Numbers as an array, texts and NULLs as a list."""
    kind = array.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        if array.null_count and name in NAMES:
            return array.to_pylist()
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind):
        return array.to_pylist()
    if is_field(name):
        raise BadValueError(f"`{name}` cannot be of type {kind}")
    return [None] * len(array)  # an unknown field
