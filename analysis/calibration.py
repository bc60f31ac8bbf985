"""Predicted first-order change against realized ΔD: sign, order and size.

A token's own policy gradient moves its D at first order by η · Â · r · Ḋ, with Ḋ the direction
of a criterion. η is unknown, so the size is right up to one factor for all tokens: a good
direction orders tokens as their ΔD does, and its zero divides them by sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from . import statistics
from .bins import bin_of, interval_label, quantile_edges
from .engine import Engine, Progress, Span, read_arms
from .kernel import blocks_of
from .prediction import LINEAR, Predictor, linear_family, predictors
from .question import OWN, Question, QuestionError, decider
from .rates import BaseRate, ratio
from .result import Result
from .shares import Share

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from deltad.dumps import Dump

    from .statistics import Interval

DEFAULT_BINS: Final = 8

LEAST_RANKED: Final = 3
"""Tokens that a rank correlation needs: two always agree or disagree in full."""

_Arrays = tuple[NDArray[np.float64], ...]


@dataclass(frozen=True)
class Bin:
    """Tokens whose prediction lies in one bin.

    Attributes
    ----------
    label : str
        The bin in words.
    low, high : float
        (low, high], closed below too in the first bin.
    prediction : float
        Mean prediction of its tokens.
    delta_d : Share
        Σ ΔD / tokens: nats for KL.
    increase : Share
        Tokens with ΔD > 0 / tokens whose ΔD is determined.
    """

    label: str
    low: float
    high: float
    prediction: float
    delta_d: Share
    increase: Share


@dataclass(frozen=True, eq=False)
class Calibrated:
    """One predictor against realized ΔD.

    Attributes
    ----------
    predictor : Predictor
        What foretold.
    predictions, delta_d : tuple of ndarray of float64, shape (token,)
        Of the tokens outside, by seed.
    unclear : tuple of ndarray of bool, shape (token,), optional
        Where |ΔD| is below the bound on its error, by seed: no sign is judged there.
    bins_asked : int
        Bins by quantile of the prediction; tied predictions may leave fewer.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    """

    predictor: Predictor
    predictions: _Arrays
    delta_d: _Arrays
    bins_asked: int = DEFAULT_BINS
    bootstrap_seed: int = 0
    unclear: tuple[NDArray[np.bool_], ...] = ()

    @property
    def clear(self) -> tuple[NDArray[np.bool_], ...]:
        """Where ΔD is determined, by seed."""
        if not self.unclear:
            return tuple(np.ones(len(d), dtype=np.bool_) for d in self.delta_d)
        return tuple(~each for each in self.unclear)

    @cached_property
    def signs(self) -> Share:
        """Tokens whose sign of ΔD it foretold: above 0 and ΔD > 0, or neither.

        Tokens without a prediction, and those whose ΔD is undetermined, take no part.
        """
        right, judged = [], []
        for p, d, clear in zip(self.predictions, self.delta_d, self.clear, strict=True):
            known = ~np.isnan(p) & clear
            right.append(int(np.count_nonzero((p > 0)[known] == (d > 0)[known])))
            judged.append(int(np.count_nonzero(known)))
        return Share.of(right, judged, self.bootstrap_seed)

    @cached_property
    def slope(self) -> Share:
        """Σ p ΔD / Σ p²: the least-squares slope of ΔD through the origin.

        For `linear_delta` it is 1 where the first order is all there is. Tokens whose
        prediction is not finite take no part.
        """
        above, below = [], []
        for p, d in zip(self.predictions, self.delta_d, strict=True):
            finite = np.isfinite(p)
            above.append(float(p[finite] @ d[finite]))
            below.append(float(p[finite] @ p[finite]))
        return Share.of(above, below, self.bootstrap_seed)

    @cached_property
    def r_squared(self) -> float:
        """1 − Σ (ΔD − slope · p)² / Σ (ΔD − mean ΔD)², at most 1, pooled over seeds.

        Below 0 where the mean is the better guess; NaN where ΔD does not vary.
        """
        p, d = self._pooled()
        finite = np.isfinite(p)
        p, d = p[finite], d[finite]
        if not len(d) or np.all(d == d[0]):
            return math.nan
        return 1 - float(np.sum((d - self.slope.rate * p) ** 2) / np.sum((d - d.mean()) ** 2))

    @cached_property
    def spearman(self) -> float:
        """Spearman rank correlation of prediction and ΔD over the tokens of all seeds."""
        return rank_correlation(*self._pooled())

    @cached_property
    def spearman_by_seed(self) -> tuple[float, ...]:
        """The same within every seed; NaN with fewer than three tokens."""
        pairs = zip(self.predictions, self.delta_d, strict=True)
        return tuple(rank_correlation(p, d) for p, d in pairs)

    @cached_property
    def spearman_seed_mean(self) -> tuple[float, Interval]:
        """Its mean over the seeds that have one, with a 95 % bootstrap interval."""
        values = self.spearman_by_seed
        interval = statistics.bootstrap_mean(values, seed=self.bootstrap_seed)
        return statistics.mean(values), interval

    @cached_property
    def bins(self) -> tuple[Bin, ...]:
        """ΔD by quantile of the prediction; tokens without one are in none."""
        edges = quantile_edges(self._pooled()[0], self.bins_asked)
        places = [bin_of(p, edges) for p in self.predictions]
        found = []
        for at in range(max(0, len(edges) - 1)):
            chosen = [place == at for place in places]
            sizes = [int(each.sum()) for each in chosen]
            mine = [d[here] for d, here in zip(self.delta_d, chosen, strict=True)]
            judged = [
                d[here & clear]
                for d, here, clear in zip(self.delta_d, chosen, self.clear, strict=True)
            ]
            total = sum(
                float(p[here].sum()) for p, here in zip(self.predictions, chosen, strict=True)
            )
            low, high = float(edges[at]), float(edges[at + 1])
            found.append(
                Bin(
                    interval_label(low, high, first=not at),
                    low,
                    high,
                    ratio(total, sum(sizes)),
                    Share.of([float(d.sum()) for d in mine], sizes, self.bootstrap_seed),
                    Share.of(
                        [int((d > 0).sum()) for d in judged],
                        [len(d) for d in judged],
                        self.bootstrap_seed,
                    ),
                )
            )
        return tuple(found)

    @property
    def unknown(self) -> int:
        """Tokens without a prediction."""
        return sum(int(np.count_nonzero(np.isnan(p))) for p in self.predictions)

    def _pooled(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predictions and ΔD of all seeds."""
        return (
            np.concatenate([np.empty(0), *self.predictions]),
            np.concatenate([np.empty(0), *self.delta_d]),
        )


@dataclass(frozen=True, eq=False)
class Calibration(Result):
    """Every direction's prediction against realized ΔD, on the tokens outside.

    Attributes
    ----------
    question : Question
        Region and settled protocol.
    predictors : tuple of Calibrated
        The ratio first, then the predictions, then `linear_delta` where it was recorded.
    base : BaseRate
        How often ΔD > 0, whatever is predicted.
    refused : dict of str to str
        Directions that the dump cannot answer for, and why.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    """

    question: Question
    predictors: tuple[Calibrated, ...]
    base: BaseRate
    refused: dict[str, str]
    bootstrap_seed: int = 0

    def columns(self) -> dict[str, list[Any]]:
        """A row a predictor and bin, the columns of `CALIBRATION_COLUMNS`."""
        from .forms.calibration import calibration_columns

        return calibration_columns(self)

    def text(self) -> RenderableType:
        """A row a predictor, then the bins of each."""
        from .forms.calibration import calibration_text

        return calibration_text(self)

    def to_json_object(self) -> dict[str, Any]:
        """Predictors with their bins as objects."""
        from .forms.calibration import calibration_object

        return calibration_object(self)

    def figure(self) -> Figure:
        """Mean ΔD and share of ΔD > 0 along the prediction's quantiles."""
        from .figures.calibration import calibration_figure

        return calibration_figure(self)


def calibrate(
    dump: Dump,
    question: Question | None = None,
    *,
    bins: int = DEFAULT_BINS,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
    recompute: bool = False,
) -> Calibration:
    """Hold every direction's prediction against realized ΔD.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        Region and protocol, which must be a shared one; its criteria are not looked at. With a
        threshold of 0 all tokens take part whose D is not 0.
    bins : int
        Bins by quantile of the prediction.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    engine : Engine, optional
        Where to read: by default on the cores of this machine.
    recompute : bool
        From the vectors even where D and Ḋ are recorded.

    Returns
    -------
    Calibration
        At least the ratio's direction.

    Raises
    ------
    QuestionError
        The protocol is `own`, fewer bins than 1, or what the dump cannot answer.
    DumpError
        A row holds an impossible value.
    """
    resolved = (question or Question()).resolve(dump)
    asked = resolved.question
    if asked.protocol == OWN:
        raise QuestionError(
            "a calibration needs one update that judges all tokens, got `own`: "
            "ask for `--protocol shared:` and an arm"
        )
    if bins < 1:
        raise QuestionError(f"`bins` must be at least 1, got {bins}")
    arm = resolved.criterion_arm
    present = dump.optional_columns(arm)
    chosen, refused = [], {}
    for each in predictors(asked.divergence):
        missing = [name for name in each.columns if name not in present]
        if missing:
            refused[each.name] = f"needs the column `{missing[0]}`, which arm {arm} does not have"
        elif each.name == LINEAR and (family := linear_family(dump, arm)) != asked.divergence:
            refused[each.name] = f"is of the divergence {family}, as arm {arm} says"
        else:
            chosen.append(each)
    reader = _Reader(replace(asked, protocol=""), tuple(each.name for each in chosen), recompute)
    spans = read_arms(reader, dump, [arm], engine=engine, progress=progress)
    read = [_Read.joined(parts) for _, parts in sorted(spans.items())]
    calibrated = tuple(
        Calibrated(
            each,
            tuple(seed.predictions[at] for seed in read),
            tuple(seed.delta_d for seed in read),
            bins,
            bootstrap_seed,
            tuple(seed.unclear for seed in read),
        )
        for at, each in enumerate(chosen)
    )
    deltas = [seed.delta_d[~seed.unclear] for seed in read]
    undetermined = sum(int(np.count_nonzero(seed.unclear)) for seed in read)
    base = BaseRate(
        sum(map(len, deltas)) + undetermined,
        sum(int(np.count_nonzero(d > 0)) for d in deltas),
        undetermined,
    )
    return Calibration(asked, calibrated, base, refused, bootstrap_seed)


@dataclass(frozen=True, eq=False)
class _Read:
    """The tokens outside of a span, or of a seed."""

    delta_d: NDArray[np.float64]
    unclear: NDArray[np.bool_]
    predictions: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[_Read]) -> _Read:
        """Join spans in their order."""
        return cls(
            np.concatenate([each.delta_d for each in parts]),
            np.concatenate([each.unclear for each in parts]),
            np.concatenate([each.predictions for each in parts], axis=1),
        )


@dataclass(frozen=True)
class _Reader:
    """Reads the predictions of a span, by name; may be pickled."""

    region: Question
    names: tuple[str, ...]
    recompute: bool

    def __call__(self, span: Span) -> _Read:
        """Predict every token outside."""
        known = {each.name: each for each in predictors(self.region.divergence)}
        chosen = [known[name] for name in self.names]
        linear = [LINEAR] if LINEAR in self.names else []
        directions = [decider(name) for name in self.names if name != LINEAR]
        parts = [_Read(np.empty(0), np.empty(0, np.bool_), np.empty((len(chosen), 0)))]
        for block in blocks_of(span, self.region, directions, linear, recompute=self.recompute):
            if (found := block.found) is not None:
                values = np.stack([each.values(found) for each in chosen])
                parts.append(_Read(found.delta_d, found.undetermined, values))
        return _Read.joined(parts)


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's rank correlation; tied values share their mean rank.

    Parameters
    ----------
    one, other : ndarray of float64, shape (token,)
        A pair with a NaN takes no part.

    Returns
    -------
    float
        In [−1, 1]; NaN with fewer than three pairs, or where one side does not vary.

    Examples
    --------
    >>> round(rank_correlation(np.array([1.0, 2, 3, 4]), np.array([0.1, 0.2, 0.9, 0.3])), 3)
    0.8
    """
    both = ~(np.isnan(one) | np.isnan(other))
    if np.count_nonzero(both) < LEAST_RANKED:
        return math.nan
    ranks = [_ranks(values[both]) for values in (one, other)]
    centred = [each - each.mean() for each in ranks]
    size = math.sqrt(float(centred[0] @ centred[0]) * float(centred[1] @ centred[1]))
    return ratio(float(centred[0] @ centred[1]), size)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; tied values have the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2)[place])
