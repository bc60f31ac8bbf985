"""Tokens are unique within arm and seed, and arms agree on what they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from .columns import COLUMNS
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
    and name not in ("step", "sequence", "position")
)
_VECTORS: Final = tuple(
    name for name, column in COLUMNS.items() if column.shared and column.is_vector
)


@dataclass(frozen=True)
class Rows:
    """What identifies the rows of one file.

    Attributes
    ----------
    part : PartFile
        The file.
    keys : array of int32, shape (token, 4)
        `KEY` of each row.
    """

    part: PartFile
    keys: NDArray[np.int32]

    KEY: ClassVar[tuple[str, ...]] = ("step", "sequence", "position", "group")


def key_findings(files: Sequence[Rows]) -> Iterator[tuple[str, Finding]]:
    """Find tokens that occur twice in one arm of one seed, and responses of two prompts.

    Parameters
    ----------
    files : sequence of Rows
        All files of the arm and seed.

    Yields
    ------
    path : str
        The file of the later row.
    finding : Finding
        Rows of that file.
    """
    keys = np.concatenate([rows.keys for rows in files])
    order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    same_response = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
    same_token = same_response & (ordered[1:, 2] == ordered[:-1, 2])
    two_groups = same_response & ~same_token & (ordered[1:, 3] != ordered[:-1, 3])
    starts = np.cumsum([0, *(len(rows.keys) for rows in files)])

    def place(index: int) -> str:
        file = int(np.searchsorted(starts, index, side="right")) - 1
        return f"row {index - starts[file]} of {files[file].part.path}"

    for column, kind, bad, say in (
        ("position", "unique", same_token, "occurs already in"),
        ("group", "one prompt a response", two_groups, "has another group in"),
    ):
        later, earlier = order[1:][bad], order[:-1][bad]
        first_of = dict(zip(later.tolist(), earlier.tolist(), strict=True))
        later = np.sort(later)
        for number, rows in enumerate(files):
            mine = later[(later >= starts[number]) & (later < starts[number + 1])]
            if not len(mine):
                continue

            def describe(
                row: int,
                *,
                start: int = int(starts[number]),
                first_of: Mapping[int, int] = first_of,
                say: str = say,
                column: str = column,
            ) -> str:
                step, sequence, position, _ = keys[start + row].tolist()
                who = f"step {step}, sequence {sequence}"
                if column == "position":
                    who += f", position {position}"
                where = place(first_of[start + row])
                return f"must be unique within arm and seed: {who} {say} {where}"

            yield str(rows.part.path), Finding(column, kind, mine - starts[number], describe)


def arm_findings(
    arms: Mapping[str, Sequence[Rows]], batch_rows: int
) -> Iterator[tuple[str, int, Finding]]:
    """Find rows that differ from the same token's row in another arm where they must not.

    Each shared column is read once an arm and compared with the first arm that has the token,
    so that memory is one column of one seed.

    Parameters
    ----------
    arms : mapping of str to sequence of Rows
        Readable files of one seed by arm.
    batch_rows : int
        Rows read at once.

    Yields
    ------
    path, first_row : str, int
        The batch.
    finding : Finding
        Rows of that batch.
    """
    if len(arms) < 2:
        return
    places, tokens = _places(arms)
    for names in (_SCALARS, *((name,) for name in _VECTORS)):
        known: dict[str, _Known] = {}
        for arm, files in arms.items():
            for rows in files:
                wanted = [name for name in names if name in rows.part.columns]
                if not wanted:
                    continue
                place = places[str(rows.part.path)]
                try:
                    batches = part_batches(rows.part, columns=wanted, batch_rows=batch_rows)
                    for batch in batches:
                        here = place[batch.first_row : batch.first_row + len(batch)]
                        for name in wanted:
                            column = known.setdefault(name, _Known(tokens, batch[name]))
                            if batch[name].shape[1:] != column.values.shape[1:]:
                                continue  # another K, reported when the footers were read
                            used = None
                            if COLUMNS[name].is_vector and name != "topk_ids":
                                used = batch["topk_ids"] >= 0
                            found = column.compare(
                                name, arm, here, batch[name], used, batch.vectors
                            )
                            if found is not None:
                                yield batch.path, batch.first_row, found
                except DumpError:
                    continue  # reported when the file itself was checked


class _Known:
    """One column of one seed, a value a token, as the first arm that has the token says."""

    def __init__(self, tokens: int, like: NDArray[Any]) -> None:
        self.values = np.empty((tokens, *like.shape[1:]), dtype=like.dtype)
        self.arm = np.full(tokens, -1, dtype=np.int32)
        self.arms: list[str] = []

    def compare(
        self,
        name: str,
        arm: str,
        place: NDArray[np.intp],
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
            slot: Any = (row, int(differs[row].argmax())) if values.ndim == 2 else row
            return (
                "must be the same in all arms, found "
                f"{_text(values[slot])} here and {_text(other[slot])} for this token in arm "
                f"{self.arms[whose[row]]}"
            )

        return Finding(name, "same in all arms", np.flatnonzero(bad), describe)


def _text(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, np.floating):
        return f"{value:.9g}"
    return repr(value.item() if isinstance(value, np.generic) else value)


def _places(arms: Mapping[str, Sequence[Rows]]) -> tuple[dict[str, NDArray[np.intp]], int]:
    """For each file the number of each row's token among the seed's, and how many there are."""
    files = [rows for each in arms.values() for rows in each]
    keys = np.concatenate([rows.keys[:, :3] for rows in files])
    order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    new = np.ones(len(keys), dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    place = np.empty(len(keys), dtype=np.intp)
    place[order] = np.cumsum(new) - 1
    starts = np.cumsum([0, *(len(rows.keys) for rows in files)]).tolist()
    by_file = {
        str(rows.part.path): place[starts[number] : starts[number + 1]]
        for number, rows in enumerate(files)
    }
    return by_file, int(new.sum())
