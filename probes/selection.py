"""Which response tokens are worth a forward after the step: known before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from deltad._checks import is_integer, is_real
from deltad.divergence import DIVERGENCES
from deltad.masks import DEFAULT_THRESHOLD, CriterionError, Rule, Tokens, rule

from .errors import ProbeError

Keep = Literal["all", "outside", "near", "disagreement"]
"""Which tokens are read after the step; see `Selection`."""

NEAR: Final = 0.01

_GOLDEN: Final = 0x9E3779B97F4A7C15

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which response tokens are read after the step, and recorded.

    Attributes
    ----------
    keep : {"all", "outside", "near", "disagreement"}
        "outside": D before the step above `threshold`; "near": above `near`; "disagreement":
        outside, and kept by exactly one of `criterion` and `baseline`.
    threshold : float
        δ.
    divergence : {"kl", "tv"}
        D, of the top-K support.
    near : float
        A smaller threshold, in the divergence's unit.
    criterion, baseline : str or Rule
        Two criteria, as `deltad.masks.rule` takes them; by default
        `predictive-<divergence>-aggregated` and `ratio`.
    sequences : float
        Share of the sequences that are looked at, in (0, 1]. Each is drawn by itself, by a hash
        of `seed`, step and the sequence's number: the same in all arms and on all ranks, and no
        generator of random numbers is touched.
    every : int
        Only optimizer steps whose number it divides are read.
    seed : int
        Of the draw.

    Raises
    ------
    ProbeError
        An option that makes no sense.
    """

    keep: Keep = "all"
    threshold: float = DEFAULT_THRESHOLD
    divergence: str = "kl"
    near: float = NEAR
    criterion: str | Rule = ""
    baseline: str | Rule = "ratio"
    sequences: float = 1.0
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.keep not in get_args(Keep):
            raise ProbeError(
                f"`keep` must be one of {', '.join(get_args(Keep))}, got {self.keep!r}"
            )
        if self.divergence not in tuple(DIVERGENCES):
            raise ProbeError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}"
            )
        for name in ("threshold", "near"):
            value = getattr(self, name)
            if not is_real(value) or not 0 <= value < math.inf:
                raise ProbeError(f"`{name}` must be finite and not negative, got {value!r}")
        share: Any = self.sequences
        if not is_real(share) or not 0 < share <= 1:
            raise ProbeError(
                f"`sequences` must be a share above 0 and at most 1, got {self.sequences!r}"
            )
        for name, least in (("every", 1), ("seed", 0)):
            value = getattr(self, name)
            if not is_integer(value) or value < least:
                raise ProbeError(f"`{name}` must be an integer of at least {least}, got {value!r}")
        if not self.criterion:
            object.__setattr__(self, "criterion", f"predictive-{self.divergence}-aggregated")
        if self.keep == "disagreement":
            if self.criterion == self.baseline:
                raise ProbeError(
                    f"`criterion` and `baseline` must differ, got {self.baseline!r} for both: "
                    "a criterion never disagrees with itself"
                )
            try:
                for each in (self.criterion, self.baseline):
                    rule(each).check_family(self.divergence)
            except CriterionError as error:
                raise ProbeError(f"the pair of criteria of `keep`: {error}") from error

    @property
    def whole(self) -> bool:
        """Whether every token of a step that is read is read."""
        return self.keep == "all" and self.sequences == 1

    @property
    def least(self) -> float:
        """What D must exceed."""
        return self.near if self.keep == "near" else self.threshold

    def reads(self, step: int) -> bool:
        """Whether a step is read."""
        return step % self.every == 0

    def wanted(self, tokens: Tokens, *, slack: float = 0.0) -> Mask:
        """Tokens that are kept by what is known of them before the step.

        Parameters
        ----------
        tokens : deltad.masks.Tokens
            As `MicroBatch.criterion_tokens` gives them.
        slack : float
            Take also tokens whose D is so much below what it must exceed.

        Returns
        -------
        array of bool, shape (token,)
            Regardless of the draw of sequences.
        """
        if self.keep == "all":
            return np.ones(len(tokens.advantage), np.bool_)
        d_pre = np.asarray(tokens.divergence(self.divergence))
        wanted: Mask = d_pre > self.least - slack
        if self.keep == "disagreement":
            first, second = (
                np.asarray(
                    rule(each).keeps(tokens, threshold=self.threshold, divergence=self.divergence)
                )
                for each in (self.criterion, self.baseline)
            )
            # A criterion keeps all tokens inside: what lies within the slack is taken as it is.
            wanted &= (first != second) | (d_pre <= self.threshold)
        return wanted

    def outside(self, tokens: Tokens) -> Mask:
        """Tokens with D above the threshold, shape (token,)."""
        outside: Mask = np.asarray(tokens.divergence(self.divergence)) > self.threshold
        return outside

    def drawn(self, step: int, sequence: NDArray[np.integer[Any]]) -> Mask:
        """Whether each token's sequence was drawn, shape (token,)."""
        if self.sequences == 1:
            return np.ones(len(sequence), np.bool_)
        return _uniform(self.seed, step, sequence) < self.sequences

    @property
    def weight(self) -> float:
        """What a recorded row stands for: 1 / `sequences`."""
        return 1 / self.sequences

    @property
    def stored(self) -> Mapping[str, Any]:
        """`Metadata.stored` of a dump of what is kept."""
        if self.keep == "all":
            return {"rule": "all"}
        found: dict[str, Any] = {
            "rule": "disagreement" if self.keep == "disagreement" else "above",
            "divergence": self.divergence,
            "threshold": self.least,
        }
        if self.keep == "disagreement":
            # The writer counts the tokens outside.
            pair = {"criterion": rule(self.criterion).name, "baseline": rule(self.baseline).name}
            found |= {**pair, "outside": 0}
        return found

    @property
    def sampling(self) -> Mapping[str, Any] | None:
        """The key `sampling` of a dump; None where every sequence of every step is looked at."""
        if self.sequences == 1 and self.every == 1:
            return None
        return {"sequences": self.sequences, "every": self.every, "seed": self.seed}


def _uniform(seed: int, step: int, sequence: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """A number in [0, 1) for each sequence of a step, by the finalizer of splitmix64."""
    mixed = sequence.astype(np.uint64)
    for salt in (seed, step):
        # In Python's numbers: NumPy warns where a scalar overflows, as it is meant to.
        mixed = _mixed(mixed + np.uint64(salt * _GOLDEN % 2**64))
    found: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit numbers, one to one."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
