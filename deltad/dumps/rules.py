"""What a file's metadata says of its own completeness: which rows, vectors and sequences.

Each is an object with its own keys, checked here when metadata is made or read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, Final, TypeGuard

from deltad.divergence import DIVERGENCES

DERIVED_VERSION: Final = 1
"""Version of the definitions by which `deltad.dumps.derived` fills its columns."""


@dataclass(frozen=True)
class Near:
    """Vectors are stored near the region and outside it, and of a random share of the rest.

    Attributes
    ----------
    threshold : float
        Least D before the step at which a row's vectors are stored; nats for KL, a probability
        for TV.
    sample : float
        Share in [0, 1] of the other rows whose vectors are stored too.
    divergence : {"kl", "tv"}
        Which D.

    Raises
    ------
    ValueError
        A number is out of its range, or the divergence unknown.

    Examples
    --------
    >>> Near().to_json_object()
    {'rule': 'near', 'divergence': 'kl', 'threshold': 0.01, 'sample': 0.01}
    """

    threshold: float = 0.01
    sample: float = 0.01
    divergence: str = "kl"

    def __post_init__(self) -> None:
        _check_region("vectors", {"divergence": self.divergence, "threshold": self.threshold})
        if not is_number(self.sample) or not 0 <= self.sample <= 1:
            raise ValueError(
                f"the sample of `vectors` must be a share in [0, 1], got {brief(self.sample)}"
            )

    def to_json_object(self) -> dict[str, Any]:
        """As the metadata's key `vectors` has it."""
        return {
            "rule": "near",
            "divergence": self.divergence,
            "threshold": float(self.threshold),
            "sample": float(self.sample),
        }


@dataclass(frozen=True)
class Pair:
    """A region and two criteria, of which only the disagreement tokens are stored.

    Attributes
    ----------
    divergence : {"kl", "tv"}
        The region's divergence.
    threshold : float
        δ.
    criterion, baseline : str
        Names in `deltad.masks.RULES`, or of a user's rules; which is which does not matter.
    """

    divergence: str
    threshold: float
    criterion: str
    baseline: str

    def answers(self, other: Pair) -> bool:
        """Whether the disagreement tokens of another pair are the same ones."""
        return (
            self.divergence == other.divergence
            and self.threshold == other.threshold
            and {self.criterion, self.baseline} == {other.criterion, other.baseline}
        )


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number and no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether `value` is an integer of at least `least` and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_stored(stored: Mapping[str, Any]) -> None:
    """Refuse a rule of storage that a reader could not follow.

    Parameters
    ----------
    stored : mapping
        The metadata's `stored`.

    Raises
    ------
    ValueError
        Names the key and what came.
    """
    rule = stored.get("rule")
    if rule == "all":
        return
    if rule not in ("above", "disagreement"):
        raise ValueError(
            f"the rule of `stored` must be 'all', 'above' or 'disagreement', got {brief(rule)}"
        )
    _check_region("stored", stored)
    if rule == "above":
        return
    for key in ("criterion", "baseline"):
        if not isinstance(stored.get(key), str) or not stored[key]:
            raise ValueError(
                f"the {key} of `stored` must be a rule's name, got {brief(stored.get(key))}"
            )
    if not is_count(stored.get("outside")):
        raise ValueError(
            "`outside` of `stored`, the number of tokens seen outside the region, must be an "
            f"integer of at least 0, got {brief(stored.get('outside'))}"
        )


def check_vectors(vectors: Mapping[str, Any]) -> None:
    """Refuse a rule of which rows keep their vectors that a reader could not follow.

    Parameters
    ----------
    vectors : mapping
        The metadata's `vectors`.

    Raises
    ------
    ValueError
        Names the key and what came.
    """
    rule = vectors.get("rule")
    if rule == "all":
        return
    if rule != "near":
        raise ValueError(f"the rule of `vectors` must be 'all' or 'near', got {brief(rule)}")
    near_of(vectors)


def near_of(vectors: Mapping[str, Any]) -> Near:
    """The rule `near` as an object; raises as `Near` does."""
    found: dict[str, Any] = {key: vectors.get(key) for key in ("threshold", "sample", "divergence")}
    return Near(**found)


def check_derived(derived: Mapping[str, Any]) -> None:
    """Refuse a description of derived columns that says too little.

    Parameters
    ----------
    derived : mapping
        The metadata's `derived`. Another version than ours is no error: its columns are not
        used, and those of the contract tell the same.

    Raises
    ------
    ValueError
        Names the key and what came.
    """
    if not is_count(derived.get("version"), 1):
        raise ValueError(
            "the version of `derived` must be an integer of at least 1, "
            f"got {brief(derived.get('version'))}"
        )
    _check_divergence("derived", derived)
    if not isinstance(derived.get("arithmetic", ""), str):
        raise ValueError(
            f"`arithmetic` of `derived` must be a string, got {brief(derived['arithmetic'])}"
        )


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Refuse a description of how sequences and steps were chosen that cannot be.

    Parameters
    ----------
    sampling : mapping
        The metadata's `sampling`: `sequences`, the share of sequences recorded; `every`, steps
        from one recorded step to the next; `seed` of the choice. Each may be left out.

    Raises
    ------
    ValueError
        Names the key and what came.
    """
    share = sampling.get("sequences", 1)
    if not is_number(share) or not 0 < share <= 1:
        raise ValueError(f"`sequences` of `sampling` must be a share in (0, 1], got {brief(share)}")
    if not is_count(sampling.get("every", 1), 1):
        raise ValueError(
            "`every` of `sampling` must be an integer of at least 1, "
            f"got {brief(sampling.get('every'))}"
        )
    seed = sampling.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"`seed` of `sampling` must be an integer, got {brief(seed)}")


def _check_region(key: str, found: Mapping[str, Any]) -> None:
    """Refuse an impossible divergence or threshold."""
    _check_divergence(key, found)
    threshold = found.get("threshold")
    if not is_number(threshold) or threshold < 0:
        raise ValueError(
            f"the threshold of `{key}` must be a number of at least 0, got {brief(threshold)}"
        )


def _check_divergence(key: str, found: Mapping[str, Any]) -> None:
    """Refuse an unknown divergence."""
    if found.get("divergence") not in tuple(DIVERGENCES):  # it may be unhashable
        raise ValueError(
            f"the divergence of `{key}` must be one of {', '.join(DIVERGENCES)}, "
            f"got {brief(found.get('divergence'))}"
        )
