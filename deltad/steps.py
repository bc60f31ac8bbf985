"""One optimizer step in numbers: counts and sums that micro-batches and ranks add up to.

`deltad.step_counting` makes `StepScalars` of rows, as a probe hands them over or as a dump holds
them. They hold only numerators, denominators, histograms and extremes, so that those of two
micro-batches, or of two ranks, can be added; rates come last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from deltad.divergence import DIVERGENCES
from deltad.histogram import LogHistogram
from deltad.logprobs import LogprobSums
from deltad.masks import DEFAULT_THRESHOLD, CriterionError, criterion
from deltad.metrics import metric_values

STEPS: Final = "_steps"
"""Folder in RUN for steps in numbers; dataset readers skip names that begin with `_`."""

FORMAT: Final = 1

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Shares of tokens at which D is reported."""

RATES: Final[Mapping[str, tuple[str, str]]] = {
    "outside_rate": ("outside", "tokens"),
    "disagreement_rate": ("disagreement", "tokens"),
    "in_loss_rate": ("in_loss", "tokens"),
    "increase_rate": ("increase", "tokens"),
    "outside_increase_rate": ("outside_increase", "outside"),
    "disagreement_increase_rate": ("disagreement_increase", "disagreement"),
    "criterion_unsafe_keep_rate": ("criterion_unsafe", "criterion_kept"),
    "baseline_unsafe_keep_rate": ("baseline_unsafe", "baseline_kept"),
    "criterion_contracting_fraction": ("criterion_contracting", "criterion_kept"),
    "baseline_contracting_fraction": ("baseline_contracting", "baseline_kept"),
}
"""Every rate with the counts that it is the quotient of; both are among the scalars too."""

_OF_ALL_TOKENS: Final = ("tokens", "in_loss", "increase")
"""Counts that mean nothing where only the tokens outside a region were stored."""


@dataclass(frozen=True)
class StepQuestion:
    """Which region, and which criteria are watched.

    Attributes
    ----------
    threshold : float
        δ ≥ 0 of the region: nats for KL, a probability for TV.
    divergence : {"kl", "tv"}
        The region's divergence.
    criterion : str
        In question; by default `predictive-<divergence>-aggregated`.
    baseline : str
        What it is compared with.
    masked : tuple of str
        Criteria whose masked tokens are counted too, beside these two.

    Raises
    ------
    CriterionError
        A threshold that is negative or not finite, an unknown criterion or divergence, or a
        predictive criterion of another family.
    """

    threshold: float = DEFAULT_THRESHOLD
    divergence: str = "kl"
    criterion: str = ""
    baseline: str = "ratio"
    masked: tuple[str, ...] = ("clip-higher",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", float(self.threshold))
        object.__setattr__(self, "masked", tuple(self.masked))
        if self.divergence not in DIVERGENCES:
            raise CriterionError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}"
            )
        if not self.criterion:
            object.__setattr__(self, "criterion", f"predictive-{self.divergence}-aggregated")
        if not 0 <= self.threshold < math.inf:
            raise CriterionError(
                f"`threshold` must be finite and not negative, got {self.threshold!r}"
            )
        for name in self.watched:
            criterion(name).check_family(self.divergence)

    @property
    def pair(self) -> tuple[float, str, str, str]:
        """What must agree for counts to be comparable: region, criterion and baseline."""
        return self.threshold, self.divergence, self.criterion, self.baseline

    @property
    def watched(self) -> tuple[str, ...]:
        """The criterion, the baseline and the others, each once."""
        return tuple(dict.fromkeys((self.criterion, self.baseline, *self.masked)))


@dataclass(frozen=True)
class StepScalars:
    """What is counted of one step of one arm.

    Attributes
    ----------
    arm, seed, step
        Which step.
    question : StepQuestion
        What is counted.
    whole : bool
        Whether every response token was counted. Where a dump stores only tokens with a large
        D, all that is said about *all* tokens is left out of `scalars`.
    ranks : tuple of int
        Whose tokens are in it.
    counts : mapping of str to int
        `tokens`, `in_loss`, `outside`, `disagreement`; `increase` and with a prefix how many of
        them have ΔD > 0; `criterion_` and `baseline_` with `kept`, `unsafe` (ΔD > 0) and
        `contracting` (ΔD < 0) count disagreement tokens that each keeps, under this arm's
        update; `without_vectors` rows of unknown D.
    masked : mapping of str to int
        Tokens that each watched criterion masks, of those with vectors; where not all tokens
        are stored, without criteria whose region is another than the question's.
    d_pre, d_post : LogHistogram
        D before and after the step.
    extremes : mapping of str to float
        `d_pre_max`, `d_post_max`, and `delta_d_abs_max`, the largest |ΔD|.
    delta_d : tuple of float
        Σ ΔD over all tokens, and over those outside.
    fit : tuple of float
        Σ x² and Σ x y over the slots of all tokens, x and y being log μ and log π less their
        means over the token's top-K.
    logprobs : LogprobSums
        Of the policy before the step.
    """

    arm: str
    seed: int
    step: int
    question: StepQuestion = field(default_factory=StepQuestion)
    whole: bool = True
    ranks: tuple[int, ...] = (0,)
    counts: Mapping[str, int] = field(default_factory=dict)
    masked: Mapping[str, int] = field(default_factory=dict)
    d_pre: LogHistogram = field(default_factory=LogHistogram)
    d_post: LogHistogram = field(default_factory=LogHistogram)
    extremes: Mapping[str, float] = field(default_factory=dict)
    delta_d: tuple[float, float] = (0.0, 0.0)
    fit: tuple[float, float] = (0.0, 0.0)
    logprobs: LogprobSums = field(default_factory=LogprobSums)

    def __add__(self, other: StepScalars) -> StepScalars:
        """The same step's tokens of both.

        Raises
        ------
        ValueError
            They are of different steps, or answer different questions.
        """
        mine, theirs = ((s.arm, s.seed, s.step, s.question, s.whole) for s in (self, other))
        if mine != theirs:
            raise ValueError(f"only counts of one step can be added, got {mine} and {theirs}")
        return replace(
            self,
            ranks=tuple(sorted({*self.ranks, *other.ranks})),
            counts=_added(self.counts, other.counts),
            masked=_added(self.masked, other.masked),
            d_pre=self.d_pre + other.d_pre,
            d_post=self.d_post + other.d_post,
            extremes={
                name: max(each.get(name, -math.inf) for each in (self.extremes, other.extremes))
                for name in (*self.extremes, *other.extremes)
            },
            delta_d=_pair(self.delta_d, other.delta_d),
            fit=_pair(self.fit, other.fit),
            logprobs=self.logprobs + other.logprobs,
        )

    @property
    def temperature(self) -> float:
        """τ̂, the policy's temperature relative to the behaviour policy's.

        Least squares of log π = (1/τ) log μ + const within each token's top-K:
        τ̂ = Σ x² / Σ x y. NaN without two ids in any token, or where log π does not grow with
        log μ.
        """
        squares, products = self.fit
        return squares / products if squares > 0 and products > 0 else math.nan

    def scalars(self, *, prefix: str = "deltad", sums: bool = True) -> dict[str, float]:
        """Everything as numbers for a logger.

        Parameters
        ----------
        prefix : str
            Begins every name.
        sums : bool
            With the sums that the metrics are quotients of, as `<prefix>_sums/<name>`.

        Returns
        -------
        dict of str to float
            Counts, `masked/<criterion>`, the rates of `RATES`, quantiles of D, τ̂ and the
            metrics of `deltad.metrics`; without numbers that are undefined.
        """
        named: dict[str, float] = {}
        for name, count in self.counts.items():
            if self.whole or name not in _OF_ALL_TOKENS:
                named[name] = float(count)
        if self.whole:
            named |= self._of_all_tokens()
        named |= {f"masked/{name}": float(count) for name, count in self.masked.items()}
        for name, (above, below) in RATES.items():
            if named.get(below):
                named[name] = named.get(above, 0.0) / named[below]
        if self.counts.get("outside"):
            named["delta_d_outside_mean"] = self.delta_d[1] / self.counts["outside"]
        found = {f"{prefix}/{name}": value for name, value in named.items()}
        if sums and self.whole:
            found |= {f"{prefix}_sums/{name}": value for name, value in vars(self.logprobs).items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _of_all_tokens(self) -> dict[str, float]:
        """Numbers that need every response token."""
        named = {**self.extremes, **metric_values(self.logprobs)}
        for time, histogram in (("pre", self.d_pre), ("post", self.d_post)):
            for name, share in QUANTILES.items():
                named[f"d_{time}_{name}"] = histogram.quantile(share)
        known = self.d_pre.total
        named["delta_d_mean"] = self.delta_d[0] / known if known else math.nan
        named["temperature"] = self.temperature
        for name, count in self.masked.items():
            named[f"masked_rate/{name}"] = count / known if known else math.nan
        return named

    def to_json_object(self) -> dict[str, Any]:
        """Everything as plain objects, `format` first; an extreme of nothing is left out."""
        logprobs = {name: value for name, value in vars(self.logprobs).items() if _finite(value)}
        return {
            "format": FORMAT,
            "arm": self.arm,
            "seed": self.seed,
            "step": self.step,
            "question": dataclasses.asdict(self.question),
            "whole": self.whole,
            "ranks": list(self.ranks),
            "counts": dict(self.counts),
            "masked": dict(self.masked),
            "d_pre": {str(place): count for place, count in self.d_pre.counts.items()},
            "d_post": {str(place): count for place, count in self.d_post.counts.items()},
            "extremes": {name: value for name, value in self.extremes.items() if _finite(value)},
            "delta_d": list(self.delta_d),
            "fit": list(self.fit),
            "logprobs": logprobs,
        }

    @classmethod
    def from_json_object(cls, found: Mapping[str, Any]) -> StepScalars:
        """Read what `to_json_object` made; unknown keys are passed over.

        Raises
        ------
        ValueError
            Another format, or a part is missing or malformed.
        """
        if not isinstance(found, Mapping):
            raise ValueError(f"steps must be a JSON object, got {type(found).__name__}")
        if found.get("format") != FORMAT:
            raise ValueError(f"steps must be of format {FORMAT}, got {found.get('format')!r}")
        try:
            made = cls(
                arm=str(found["arm"]),
                seed=int(found["seed"]),
                step=int(found["step"]),
                question=StepQuestion(**found["question"]),
                whole=bool(found["whole"]),
                ranks=tuple(int(rank) for rank in found["ranks"]),
                counts={str(name): int(count) for name, count in found["counts"].items()},
                masked={str(name): int(count) for name, count in found["masked"].items()},
                d_pre=LogHistogram({int(k): int(v) for k, v in found["d_pre"].items()}),
                d_post=LogHistogram({int(k): int(v) for k, v in found["d_post"].items()}),
                extremes={str(k): float(v) for k, v in found["extremes"].items()},
                delta_d=_two(found["delta_d"]),
                fit=_two(found["fit"]),
                logprobs=LogprobSums(**found["logprobs"]),
            )
            made.scalars()  # what cannot be reckoned with is malformed too
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"steps are malformed: {type(error).__name__} {error}") from error
        return made


def steps_path(run: Path, arm: str, seed: int, rank: int) -> Path:
    """Where the steps of one arm and seed lie that one rank has counted."""
    return run / STEPS / f"arm={arm}" / f"seed={seed}" / f"rank-{rank}.jsonl"


def _added(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Counts by name, added."""
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def _pair(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Two sums, added."""
    return first[0] + second[0], first[1] + second[1]


def _two(values: Sequence[Any]) -> tuple[float, float]:
    """A list of two numbers."""
    first, second = values
    return float(first), float(second)


def _finite(value: float) -> bool:
    """Whether JSON has this number."""
    return math.isfinite(value)
