"""Tokens are unique within arm and seed; arms hold the same tokens and agree on what they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import COLUMNS, KEY
from .content import drawn
from .errors import DumpError
from .finding import Finding
from .footers import PartFile
from .reader import part_batches

# Read together: each alone is small, and a pass over the file costs more than its bytes.
_SCALARS: Final = tuple(
    name
    for name, column in COLUMNS.items()
    if column.shared
    and not column.is_vector
    and not column.derived  # each file's are checked against its own vectors
    and name not in KEY
)
_VECTORS: Final = tuple(
    name for name, column in COLUMNS.items() if column.shared and column.is_vector
)

BYTES_AT_ONCE: Final = 256 << 20
"""Bytes of one column that are compared at once; a larger seed is read several times."""

_ROW_BYTES: Final = 128  # of a row's key while keys are sorted


class Rows(NamedTuple):
    """Rows of one file, by number, with their step, sequence, position and group."""

    part: PartFile
    rows: NDArray[np.int64]
    keys: NDArray[np.int32]


def seed_findings(
    parts: Sequence[PartFile], batch_rows: int, *, incomplete: Collection[str] = ()
) -> Iterator[tuple[str, int, Finding] | DumpError]:
    """Find what the files of one seed say against each other.

    Parameters
    ----------
    parts : sequence of PartFile
        Readable files of one seed.
    batch_rows : int
        Rows read at once.
    incomplete : collection of str
        Arms that may lack tokens.

    Yields
    ------
    path, first_row, finding : str, int, Finding
        Tokens that occur twice in an arm, responses of two prompts, values that differ between
        arms; or a DumpError for an arm that lacks tokens of another one.
    """
    width = max([_ROW_BYTES, *(4 * part.metadata.top_k for part in parts)])
    room = max(1, BYTES_AT_ONCE // width)
    shards = 1 + sum(part.rows for part in parts) // room
    lacking: dict[str, list[tuple[int, tuple[int, ...], str]]] = defaultdict(list)
    for shard in range(shards):
        files, whole = _read_keys(parts, batch_rows, shard, shards, 4 * room)
        twice = list(_key_findings(files))
        yield from twice
        if not whole:  # responses are spread evenly, so one token is there very often
            if not twice:
                yield DumpError(parts[0].path.parent, "holds a response too long to be checked")
            return
        arms = dict.fromkeys(part.arm for part in parts)
        if len(arms) < 2:
            continue
        places, keys = _places(files)
        for arm, *rest in _lacks(files, places, keys, incomplete):
            lacking[arm].append(tuple(rest))  # type: ignore[arg-type]
        for names in (_SCALARS, *((name,) for name in _VECTORS)):
            yield from _differences(files, places, len(keys), names, batch_rows)
    for arm, found in lacking.items():
        folder = next(part.path.parent for part in parts if part.arm == arm)
        (step, sequence, position), other = min(each[1:] for each in found)
        yield DumpError(
            folder,
            "must hold the same tokens as the other arms of its seed: "
            f"{sum(each[0] for each in found)} are missing in arm {arm}, the first of them step "
            f"{step}, sequence {sequence}, position {position}, which arm {other} has",
            kind="same tokens",
        )


def _read_keys(
    parts: Sequence[PartFile], batch_rows: int, shard: int, shards: int, most: int
) -> tuple[list[Rows], bool]:
    """Keys of the responses in one of `shards`; False where `most` rows were not enough."""
    found = []
    for part in parts:
        rows, keys = [np.zeros(0, dtype=np.int64)], [np.zeros((0, 4), dtype=np.int32)]
        for batch in part_batches(part, columns=(*KEY, "group"), batch_rows=batch_rows):
            here = np.arange(len(batch))
            if shards > 1:
                drawn_ = drawn(0, batch["step"], batch["sequence"], np.zeros_like(batch["step"]))
                here = np.flatnonzero((drawn_ * shards).astype(np.int64) == shard)
            rows.append(batch.first_row + here)
            keys.append(np.stack([batch[name][here] for name in (*KEY, "group")], axis=1))
            most -= len(here)
            if most < 0:
                break
        found.append(Rows(part, np.concatenate(rows), np.concatenate(keys)))
        if most < 0:
            return found, False
    return found, True


def _key_findings(files: Sequence[Rows]) -> Iterator[tuple[str, int, Finding]]:
    """Tokens that occur twice in one arm, and responses of two prompts."""
    for arm in dict.fromkeys(each.part.arm for each in files):
        mine = [each for each in files if each.part.arm == arm]
        keys = np.concatenate([each.keys for each in mine])
        order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
        ordered = keys[order]
        same_response = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
        same_token = same_response & (ordered[1:, 2] == ordered[:-1, 2])
        two_groups = same_response & ~same_token & (ordered[1:, 3] != ordered[:-1, 3])
        starts = np.cumsum([0, *(len(each.keys) for each in mine)])

        def place(index: int, *, mine: list[Rows] = mine, starts: NDArray[Any] = starts) -> str:
            file = int(np.searchsorted(starts, index, side="right")) - 1
            return f"row {mine[file].rows[index - starts[file]]} of {mine[file].part.path}"

        for column, kind, bad, say in (
            ("position", "unique", same_token, "occurs already in"),
            ("group", "one prompt a response", two_groups, "has another group in"),
        ):
            earlier, later = order[:-1][bad], order[1:][bad]
            for number, each in enumerate(mine):
                start = int(starts[number])
                here = np.sort(later[(later >= start) & (later < starts[number + 1])]) - start
                if not len(here):
                    continue

                def describe(
                    row: int,
                    *,
                    each: Rows = each,
                    start: int = start,
                    earlier: NDArray[Any] = earlier,
                    later: NDArray[Any] = later,
                    say: str = say,
                    column: str = column,
                    place: Any = place,
                ) -> str:
                    at = int(np.searchsorted(each.rows, row))
                    step, sequence, position, _ = each.keys[at].tolist()
                    who = f"step {step}, sequence {sequence}"
                    if column == "position":
                        who += f", position {position}"
                    where = place(int(earlier[(later == start + at).argmax()]))
                    return f"must be unique within arm and seed: {who} {say} {where}"

                yield str(each.part.path), 0, Finding(column, kind, each.rows[here], describe)


def _places(files: Sequence[Rows]) -> tuple[list[NDArray[np.intp]], NDArray[np.int32]]:
    """For each file the number of each row's token among all, and all tokens, sorted."""
    keys = np.concatenate([each.keys[:, :3] for each in files])
    order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    new = np.ones(len(keys), dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    place = np.empty(len(keys), dtype=np.intp)
    place[order] = np.cumsum(new) - 1
    return np.split(place, np.cumsum([len(each.keys) for each in files])[:-1]), ordered[new]


def _lacks(
    files: Sequence[Rows],
    places: Sequence[NDArray[np.intp]],
    keys: NDArray[np.int32],
    incomplete: Collection[str],
) -> Iterator[tuple[str, int, tuple[int, ...], str]]:
    """Arms without tokens that another arm of the same rule has: how many, the first, and whose."""
    has: dict[frozenset[object], dict[str, NDArray[np.bool_]]] = defaultdict(dict)
    for arm in dict.fromkeys(each.part.arm for each in files):
        mine = [number for number, each in enumerate(files) if each.part.arm == arm]
        rules = frozenset(files[number].part.metadata.choice for number in mine)
        has[rules][arm] = np.zeros(len(keys), dtype=np.bool_)
        for number in mine:
            has[rules][arm][places[number]] = True
    for alike in has.values():
        anywhere = np.logical_or.reduce(list(alike.values()))
        for arm, present in alike.items():
            lacks = anywhere & ~present
            if arm not in incomplete and lacks.any():
                first = int(lacks.argmax())
                other = next(each for each, there in alike.items() if there[first])
                yield arm, int(np.count_nonzero(lacks)), tuple(keys[first].tolist()), other


def _differences(
    files: Sequence[Rows],
    places: Sequence[NDArray[np.intp]],
    tokens: int,
    names: Sequence[str],
    batch_rows: int,
) -> Iterator[tuple[str, int, Finding]]:
    """Rows that differ from the same token's row in the first arm that has it."""
    known: dict[str, _Known] = {}
    for (part, rows, _), place in zip(files, places, strict=True):
        wanted = [name for name in names if name in part.columns]
        if not wanted or not len(rows):
            continue
        for batch in part_batches(part, columns=wanted, batch_rows=batch_rows):
            first, last = np.searchsorted(rows, [batch.first_row, batch.first_row + len(batch)])
            here = rows[first:last] - batch.first_row
            for name in wanted:
                values = batch[name][here]
                column = known.setdefault(name, _Known(tokens, values))
                if values.shape[1:] != column.values.shape[1:]:
                    continue  # another K, reported when the footers were read
                used = None
                if COLUMNS[name].is_vector and name != "topk_ids":
                    used = batch["topk_ids"][here] >= 0
                found = column.compare(
                    name, part.arm, place[first:last], here, values, used, batch.vectors[here]
                )
                if found is not None:
                    yield batch.path, batch.first_row, found


class _Known:
    """One column, a value for each token, as the first arm that has the token says."""

    def __init__(self, tokens: int, like: NDArray[Any]) -> None:
        self.values = np.empty((tokens, *like.shape[1:]), dtype=like.dtype)
        self.arm = np.full(tokens, -1, dtype=np.int32)
        self.arms: list[str] = []

    def compare(
        self,
        name: str,
        arm: str,
        place: NDArray[np.intp],
        rows: NDArray[np.int64],
        values: NDArray[Any],
        used: NDArray[np.bool_] | None,
        stored: NDArray[np.bool_],
    ) -> Finding | None:
        """Compare with what is known and learn the rest; `used` are slots that are read."""
        if arm not in self.arms:
            self.arms.append(arm)
        number = len(self.arms) - 1
        other = self.values[place]
        differs = np.asarray(values != other, dtype=np.bool_)
        if values.dtype.kind == "f":
            differs &= ~(np.isnan(values) & np.isnan(other))
        if used is not None:
            differs &= used
        whose = self.arm[place]
        elsewhere = (whose >= 0) & (whose != number)
        bad = (differs.any(axis=1) if values.ndim == 2 else differs) & elsewhere & stored
        new = (whose < 0) & stored
        self.values[place[new]] = values[new]
        self.arm[place[new]] = number
        if not bad.any():
            return None

        def describe(row: int) -> str:
            at = int(np.searchsorted(rows, row))
            slot: Any = (at, int(differs[at].argmax())) if values.ndim == 2 else at
            return (
                "must be the same in all arms, found "
                f"{_text(values[slot])} here and {_text(other[slot])} for this token in arm "
                f"{self.arms[whose[at]]}"
            )

        return Finding(name, "same in all arms", rows[bad], describe)


def _text(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, np.floating):
        return f"{value:.9g}"
    return repr(value.item() if isinstance(value, np.generic) else value)
