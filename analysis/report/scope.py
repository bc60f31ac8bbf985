"""What of a dump the page can show: seeds, arms, and the least threshold that it can answer."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.question import ZERO_STEP, QuestionError

from .gather import Columns

if TYPE_CHECKING:
    from deltad.dumps import Dump

MAX_ARMS: Final = 4
"""Arms whose ΔD the page can show; each costs 8 bytes a token."""


def chosen_seeds(dump: Dump, arm: str, seeds: Collection[int]) -> list[int]:
    """The seeds asked for, ascending."""
    known = dump.seeds(arm)
    if missing := sorted(set(seeds) - set(known)):
        raise QuestionError(
            f"there is no seed {', '.join(map(str, missing))} in {dump.path}: "
            f"its seeds are {', '.join(map(str, known))}"
        )
    return [seed for seed in known if not seeds or seed in seeds]


def stored_floor(dump: Dump, arm: str, seeds: Sequence[int]) -> float:
    """The least threshold that the stored rows can answer."""
    known = [part.metadata for seed in seeds for part in dump.files(arm, seed)]
    rows = [each.stored_above[1] for each in known if each.stored_above is not None]
    vectors = [each.near.threshold for each in known if each.near is not None]
    return max([0.0, *rows, *vectors])


def floor_for(d_pre: NDArray[np.float64], tokens: int) -> float:
    """A D that at most so many tokens exceed, rounded up to three digits."""
    if len(d_pre) <= tokens:
        return 0.0
    least = float(np.partition(d_pre, -tokens - 1)[-tokens - 1])
    if least <= 0:
        return 0.0
    place = 10.0 ** (math.floor(math.log10(least)) - 2)
    rounded = float(f"{math.ceil(least / place) * place:.3g}")
    return rounded if rounded >= least else least


def floor_reason(dump: Dump, arm: str, floor: float, least_stored: float | None) -> str:
    """Why the page's threshold stops at its floor."""
    if least_stored is not None and floor > least_stored:
        return (
            f"the page holds only the tokens with the largest D, those above {floor:g}; ask for "
            "more by --tokens, or for fewer seeds by --seed"
        )
    metadata = dump.metadata(arm)
    if metadata.near is not None and floor <= metadata.near.threshold:
        return (
            f"the dump keeps vectors only of tokens with {metadata.near.divergence} of {floor:g} "
            "or more, and of a sample of the others"
        )
    if floor > 0:
        return (
            f"the dump stores only tokens with {metadata.stored['divergence']} above {floor:g}: "
            "below that, tokens are missing"
        )
    return "a divergence is never below 0"


def shown_arms(dump: Dump, arm: str, seeds: Sequence[int]) -> tuple[list[str], dict[str, str]]:
    """The arms that the page can judge by, the question's first, and why others are not there."""
    found, left_out = [arm], {}
    for other in dump.arms:
        if other == arm:
            continue
        if other == ZERO_STEP:
            left_out[other] = "a step of no length: ΔD is 0 by construction"
        elif missing := set(seeds) - set(dump.seeds(other)):
            left_out[other] = f"it lacks seed {', '.join(map(str, sorted(missing)))}"
        elif len(found) == MAX_ARMS:
            left_out[other] = f"the page has room for {MAX_ARMS} arms; name it by --protocol"
        else:
            found.append(other)
    return found, left_out


def same_tokens(ours: Columns, theirs: Columns) -> bool:
    """Whether two arms hold the same tokens."""
    if not ours or not theirs:
        return not ours and not theirs
    keys = ("seed_index", "step", "sequence", "position", "token_id")
    return all(np.array_equal(ours[name], theirs[name]) for name in keys)
