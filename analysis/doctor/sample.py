"""The rows that the doctor looks at: a bounded sample, read whatever values it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import Dump, Metadata
from deltad.dumps.batch import Batch
from deltad.dumps.columns import COLUMNS, READINGS, REQUIRED
from deltad.dumps.content import drawn
from deltad.dumps.footers import PartFile
from deltad.dumps.reader import part_batches

LIMIT: Final = 60_000
"""Rows looked at by default; more of them sharpen no answer."""

ZERO_STEP: Final = "zero-step"

_OPTIONAL: Final = ("pre_collision", "post_collision", "pre_entropy", "post_entropy")
_KEY: Final = ("seed", "step", "sequence", "position")
_BLOCK: Final = 8_192


@dataclass(frozen=True)
class Sample:
    """Rows of one arm, as they are stored.

    Attributes
    ----------
    columns : mapping of str to array
        The dump's required columns, shape (token,) or (token, topk), the policy's collisions
        and entropies where every file has them, and `seed`. A row whose vectors are NULL holds
        −1 among its ids and NaN.
    metadata : Metadata
        Of the arm's first file.
    in_loss : mapping of str to array of bool, shape (token,)
        `in_loss` of the same rows in every arm in which they were found.
    masks : mapping of str to mapping
        `update` of these arms' metadata.
    arm : str
        The arm that was read.
    run : str
        Where it lies.
    stored, seen : int
        Rows of the arm, and tokens its recorder looked at, over the seeds asked for.
    unread : frozenset of str
        Columns of the policy that were not read before or after the step: all NaN.
    """

    columns: Mapping[str, NDArray[Any]]
    metadata: Metadata
    in_loss: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    masks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    arm: str = ""
    run: str = ""
    stored: int = 0
    seen: int = 0
    unread: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.columns["token_id"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """One column."""
        return self.columns[name]

    @property
    def thinned(self) -> bool:
        """Whether only rows with a large D were stored."""
        return self.metadata.stored_above is not None

    def replace(self, **columns: NDArray[Any]) -> Sample:
        """The same rows with other values in some columns."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def with_metadata(self, **changes: Any) -> Sample:
        """The same rows under other metadata."""
        return dataclasses.replace(self, metadata=dataclasses.replace(self.metadata, **changes))

    def take(self, rows: NDArray[Any]) -> Sample:
        """Some of the rows, by a bool mask or by indices; `stored` and `seen` stay."""
        return dataclasses.replace(
            self,
            columns={name: values[rows] for name, values in self.columns.items()},
            in_loss={arm: values[rows] for arm, values in self.in_loss.items()},
        )


def read_sample(
    run: Dump | str | Path,
    *,
    arm: str | None = None,
    seeds: Iterable[int] | None = None,
    limit: int = LIMIT,
    progress: Callable[[int], None] | None = None,
) -> Sample:
    """Read a bounded sample of a dump's rows, whatever values they hold.

    Where an arm has more than `limit` rows, whole blocks of consecutive rows are read, spread
    evenly over its seeds and files, so that sequences stay together. The choice is the same
    every time.

    Parameters
    ----------
    run : Dump, str or Path
        The dump.
    arm : str, optional
        By default `none`, then `actual`, then the first but `zero-step`.
    seeds : iterable of int, optional
        By default all.
    limit : int
        Rows to read at most, at least one block.
    progress : callable, optional
        Called with a number of rows whenever so many have been read.

    Returns
    -------
    Sample
        Rows in the order of seed, step, sequence and position.

    Raises
    ------
    FileNotFoundError
        There is no RUN.
    DumpError
        The dump cannot be read: its footers break the contract, or a file is damaged.
    """
    dump = run if isinstance(run, Dump) else Dump.open(run)
    arm = arm if arm is not None else chosen_arm(dump)
    wanted = tuple(dump.seeds(arm)) if seeds is None else tuple(seeds)
    parts = [part for seed in wanted for part in dump.files(arm, seed)]
    unread = frozenset(
        name for each in READINGS.keys() - dump.readings(arm) for name in READINGS[each]
    )
    columns = _read(parts, limit, progress, unread=unread)
    order = np.lexsort(tuple(columns[name] for name in reversed(_KEY)))
    columns = {name: values[order] for name, values in columns.items()}
    key = _key(columns)
    in_loss = {arm: columns["in_loss"]}
    masks: dict[str, Mapping[str, Any]] = {arm: dump.metadata(arm).update}
    for other in dump.arms:
        if other in (arm, ZERO_STEP):
            continue
        theirs = _read(
            [part for part in dump.files(other) if part.seed in wanted],
            limit,
            progress,
            only=(*_KEY[1:], "in_loss"),
        )
        found = _aligned(key, _key(theirs), theirs["in_loss"])
        if found is not None:
            in_loss[other], masks[other] = found, dump.metadata(other).update
    return Sample(
        columns=columns,
        metadata=parts[0].metadata if parts else dump.metadata(arm),
        in_loss=in_loss,
        masks=masks,
        arm=arm,
        run=str(dump.path),
        stored=sum(part.rows for part in parts),
        seen=sum(part.metadata.rows_seen for part in parts),
        unread=unread,
    )


def chosen_arm(dump: Dump) -> str:
    """The arm to look at: all share what was recorded before the step."""
    arms = [arm for arm in dump.arms if arm != ZERO_STEP] or list(dump.arms)
    for name in ("none", "actual"):
        if name in arms:
            return name
    return arms[0]


def _read(
    parts: list[PartFile],
    limit: int,
    progress: Callable[[int], None] | None,
    only: tuple[str, ...] | None = None,
    unread: frozenset[str] = frozenset(),
) -> dict[str, NDArray[Any]]:
    """Columns of the chosen rows of some files, `seed` among them; NaN for what was not read."""
    names = only or tuple(name for name in REQUIRED if name not in unread)
    optional = (
        ()
        if only
        else tuple(
            name for name in _OPTIONAL if all(name in part.columns for part in parts if part.rows)
        )
    )
    rows = sum(part.rows for part in parts)
    collected: dict[str, list[NDArray[Any]]] = {name: [] for name in (*names, *optional, "seed")}
    for part, batch in _blocks(parts, (*names, *optional), rows, limit):
        unchosen = _chosen_for_distance(part, batch) if only is None else None
        for name in (*names, *optional):
            values = np.asarray(batch[name])
            if unchosen is not None and COLUMNS[name].is_vector:
                values = values.copy()
                values[unchosen] = -1 if name == "topk_ids" else np.nan
            collected[name].append(values)
        collected["seed"].append(np.full(len(batch), part.seed, np.int32))
        if progress is not None:
            progress(len(batch))
    top_k = parts[0].metadata.top_k if parts else 1
    columns = {
        name: np.concatenate(found) if found else _empty(name, top_k)
        for name, found in collected.items()
    }
    for name in unread:
        like = columns["topk_ids" if COLUMNS[name].is_vector else "token_id"]
        columns[name] = np.full(like.shape, np.nan, dtype=COLUMNS[name].dtype)
    return columns


def _blocks(
    parts: list[PartFile], names: tuple[str, ...], rows: int, limit: int
) -> Iterator[tuple[PartFile, Batch]]:
    """Batches to keep: all of them, or every so many, counted over all files."""
    if rows <= limit:
        for part in parts:
            for batch in part_batches(part, columns=names):
                yield part, batch
        return
    # Smaller blocks where there are many files, so that no seed goes unseen.
    size = int(min(_BLOCK, max(256, limit // (4 * max(1, len(parts))))))
    stride = rows / limit
    position, due = 0.0, 0.0
    for part in parts:
        if part.rows == 0:
            continue
        blocks = -(-part.rows // size)
        chosen = set()
        for block in range(blocks):
            if position >= due:
                chosen.add(block)
                due += stride * size
            position += min(size, part.rows - block * size)
        if not chosen:
            continue
        for block, batch in enumerate(part_batches(part, columns=names, batch_rows=size)):
            if block in chosen:
                yield part, batch
            if block >= max(chosen):
                break


def _chosen_for_distance(part: PartFile, batch: Batch) -> NDArray[np.bool_] | None:
    """Rows that keep their vectors for their D alone: no fair sample of the lists."""
    near = part.metadata.near
    if near is None:
        return None
    step, sequence, position = (batch[name] for name in _KEY[1:])
    return np.asarray(drawn(part.seed, step, sequence, position) >= near.sample)


def _empty(name: str, top_k: int) -> NDArray[Any]:
    """A column of no rows."""
    if name == "seed":
        return np.zeros(0, np.int32)
    column = COLUMNS[name]
    return np.zeros((0, top_k) if column.is_vector else 0, column.dtype)


def _key(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    """What identifies a row within an arm, shape (token, 4)."""
    return np.stack([columns[name].astype(np.int64) for name in _KEY], axis=1)


def _aligned(
    key: NDArray[np.int64], theirs: NDArray[np.int64], values: NDArray[Any]
) -> NDArray[np.bool_] | None:
    """Another arm's values in our order of rows; None where it has not the same rows."""
    if not len(key) or not len(theirs):
        return None
    _, place = np.unique(np.concatenate([theirs, key]), axis=0, return_inverse=True)
    place = place.reshape(-1)
    row = np.full(int(place.max()) + 1, -1)
    row[place[: len(theirs)]] = np.arange(len(theirs))
    mine = row[place[len(theirs) :]]
    if (mine < 0).any():
        return None
    return np.asarray(values[mine], dtype=np.bool_)
