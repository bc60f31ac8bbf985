"""The rows that the doctor looks at: a bounded sample, read whatever values it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import Dump, DumpError, Metadata
from deltad.dumps.batch import Batch
from deltad.dumps.columns import COLUMNS, READINGS, REQUIRED
from deltad.dumps.content import drawn
from deltad.dumps.footers import PartFile
from deltad.dumps.reader import part_batches

LIMIT: Final = 60_000
"""Rows looked at by default; more of them sharpen no answer."""

ENTRIES: Final = 2**22
"""Rows times K that are looked at, at most: the evidence takes some 0.2 kB of memory for each."""

_OPTIONAL: Final = ("pre_collision", "post_collision", "pre_entropy", "post_entropy")
_KEY: Final = ("seed", "step", "sequence", "position")
_BLOCK: Final = 8_192

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Sample:
    """Rows of one arm, as they are stored.

    Attributes
    ----------
    columns : mapping of str to array
        The dump's required columns, shape (token,) or (token, topk), the policy's collisions
        and entropies where every file has them, and `seed`. A row without top-K log-probs holds
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
        The dump's folder or URL.
    stored, seen : int
        Rows of the arm, and tokens its recorder looked at, over the seeds asked for.
    unread : frozenset of str
        Columns of the policy that were not read before or after the step: all NaN.
    unlike : str, optional
        How the arms that were recorded to their end differ in the tokens that they hold; empty
        where they do not, None where there are no two of them.
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
    unlike: str | None = None

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
    progress: Progress | None = None,
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
        Rows to read at most, at least one block; fewer where rows times K would exceed
        `ENTRIES`.
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
        The dump cannot be read: its footers break the contract, a file is damaged, or one list
        alone exceeds `ENTRIES`.
    """
    dump = run if isinstance(run, Dump) else Dump.open(run)
    arm = arm if arm is not None else chosen_arm(dump)
    wanted = tuple(dump.seeds(arm)) if seeds is None else tuple(seeds)
    parts = [part for seed in wanted for part in dump.files(arm, seed)]
    unread = frozenset(
        name for each in READINGS.keys() - dump.readings(arm) for name in READINGS[each]
    )
    names = [name for name in REQUIRED if name not in unread]
    filled = [part for part in parts if part.rows]
    names += [name for name in _OPTIONAL if all(name in part.columns for part in filled)]
    columns = _read(parts, names, limit, progress)
    for name in unread:
        like = columns["topk_ids" if COLUMNS[name].is_vector else "token_id"]
        columns[name] = np.full(like.shape, np.nan, dtype=COLUMNS[name].dtype)
    order = np.lexsort(tuple(columns[name] for name in reversed(_KEY)))
    columns = {name: values[order] for name, values in columns.items()}
    in_loss = {arm: columns["in_loss"]}
    masks: dict[str, Mapping[str, Any]] = {arm: dump.metadata(arm).update}
    for other in dump.arms:
        if other in (arm, "zero-step"):
            continue
        files = [part for part in dump.files(other) if part.seed in wanted]
        theirs = _read(files, [*_KEY[1:], "in_loss"], limit, progress)
        found = _aligned(columns, theirs)
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
        unlike=_unlike(dump),
    )


def _unlike(dump: Dump) -> str | None:
    """How the arms that were recorded to their end differ in the tokens that they hold."""
    unfinished = {arm for arm, _ in dump.unfinished}
    arms = [arm for arm in dump.arms if arm not in unfinished]
    if len(arms) < 2:
        return None
    try:
        dump.check_arms(arms)
    except DumpError as error:
        if error.problem.kind != "same tokens":
            raise
        return str(error)
    return ""


def chosen_arm(dump: Dump) -> str:
    """The arm to look at: all share what was recorded before the step."""
    arms = [arm for arm in dump.arms if arm != "zero-step"] or list(dump.arms)
    return next((name for name in ("none", "actual") if name in arms), arms[0])


def _read(
    parts: list[PartFile], names: list[str], limit: int, progress: Progress | None
) -> dict[str, NDArray[Any]]:
    """Columns of the chosen rows of some files, `seed` among them.

    Rows that keep their top-K log-probs for their D alone are no fair sample: these become NULL.
    """
    top_k = parts[0].metadata.top_k if parts else 1
    found = {
        name: [np.zeros((0, top_k) if COLUMNS[name].is_vector else 0, COLUMNS[name].dtype)]
        for name in names
    }
    seeds = [np.zeros(0, np.int32)]
    for part, batch in _blocks(parts, names, limit):
        far, near = None, part.metadata.near
        if near is not None and "topk_ids" in names:
            far = drawn(part.seed, *(batch[name] for name in _KEY[1:])) >= near.sample
        for name in names:
            values = np.asarray(batch[name])
            if far is not None and COLUMNS[name].is_vector:
                values = np.where(far[:, None], -1 if name == "topk_ids" else np.nan, values)
            found[name].append(values.astype(COLUMNS[name].dtype, copy=False))
        seeds.append(np.full(len(batch), part.seed, np.int32))
        if progress is not None:
            progress(len(batch))
    return {name: np.concatenate(each) for name, each in (*found.items(), ("seed", seeds))}


def _blocks(
    parts: list[PartFile], names: list[str], limit: int
) -> Iterator[tuple[PartFile, Batch]]:
    """Batches to keep: all of them, or every so many, counted over all files."""
    if not parts:
        return
    top_k = parts[0].metadata.top_k
    if top_k > ENTRIES:
        message = f"must have lists of at most {ENTRIES} ids for the doctor, got {top_k}"
        raise DumpError(parts[0].path, message, column="topk_ids")
    limit = min(limit, ENTRIES // top_k)
    rows = sum(part.rows for part in parts)
    size = min(_BLOCK, max(1, ENTRIES // (8 * top_k)))
    if rows > limit:  # smaller blocks where there are many files, so that no seed goes unseen
        size = min(size, max(256, limit // (4 * len(parts))))
    stride = rows / limit if rows > limit else 0.0
    position, due = 0, 0.0
    for part in parts:
        end = position + part.rows
        if due < end:
            for batch in part_batches(part, columns=names, batch_rows=size):
                if position >= due:
                    due += stride * size
                    yield part, batch
                position += len(batch)
                if due >= end > position:
                    break
        position = end


def _aligned(
    columns: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]
) -> NDArray[np.bool_] | None:
    """Another arm's `in_loss` in our order of rows; None where it has not the same rows."""
    ours, others = (
        zip(*(each[name].tolist() for name in _KEY), strict=True) for each in (columns, theirs)
    )
    known = dict(zip(others, theirs["in_loss"].tolist(), strict=True))
    found = [known.get(key) for key in ours]
    return np.array(found, np.bool_) if found and None not in found else None
