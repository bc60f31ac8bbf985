"""How often intervals cover and tests reject, by simulation: `python -m …coverage` prints it.

A seed draws how many tokens each side keeps from what the seeds of `data_dumps/tiny` kept, then
a rate of its own from a beta law with standard deviation 0.15, shared by both sides, then its
unsafe tokens. So rates are equal in truth, tokens of a seed depend on each other, and some seeds
keep nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.stats
from numpy.typing import ArrayLike, NDArray

from deltad.analysis.statistics import (
    METHOD,
    Interval,
    bootstrap_ratio,
    permutation_test,
    pooled_difference,
    sign_test,
    wilcoxon_test,
)

METHODS = ("percentile", "bca", METHOD, "studentised")
SEEDS = (8, 12, 20, 61)
RATES = (0.46, 0.15)
SPREAD = 0.15
RESAMPLES = 1000
QUANTITIES = (
    "mean of rates, few tokens",
    "mean of rates, more tokens",
    "pooled ratio, few tokens",
    "pooled ratio, more tokens",
    "mean paired difference",
)
TESTS = ("sign test", "Wilcoxon", "permutation", "pooled difference")

# Tokens kept by the ratio and by the prediction, by seed, under shared:none.
KEPT = np.array(
    """7/6 14/4 20/6 10/2 15/3 16/3 6/2 18/6 8/1 27/7 15/2 15/4 18/5 19/2 11/3 11/1 25/3 20/4 14/4
    19/6 27/6 19/2 8/1 10/7 19/5 4/0 7/0 10/4 5/2 7/2 21/4 30/3 13/3 15/2 22/1 32/2 19/2 5/0
    4/0 20/3 12/2 17/3 18/1 28/3 14/2 22/8 17/3 29/8 27/3 8/1 9/7 22/5 22/4 23/2 26/4 16/3 29/1
    13/4 26/1 25/5 16/0""".replace("/", " ").split(),
    dtype=np.int64,
).reshape(-1, 2)

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Counts of one simulated dump, each of shape (seed,)."""

    many: Counts
    many_unsafe: Counts
    few: Counts
    few_unsafe: Counts


def runs(
    seeds: int, rate: float, times: int, *, seed: int = 0, alike: bool = False
) -> Iterator[Run]:
    """Simulated dumps; `alike`: both sides keep as many, from the same law."""
    rng = np.random.default_rng([seed, seeds, round(1000 * rate)])
    size = rate * (1 - rate) / SPREAD**2 - 1
    for _ in range(times):
        many, few = KEPT[rng.integers(0, len(KEPT), seeds)].T
        if alike:
            many = KEPT[rng.integers(0, len(KEPT), seeds), 1]
        own = rng.beta(rate * size, (1 - rate) * size, seeds)
        yield Run(many, rng.binomial(many, own), few, rng.binomial(few, own))


def measured(run: Run, quantity: str, rate: float) -> tuple[NDArray[np.float64], Counts, float]:
    """Numerators and denominators of a quantity that is a ratio of sums, and its true value."""
    both = (run.few > 0) & (run.many > 0)
    if quantity == "mean paired difference":
        gaps = run.few_unsafe[both] / run.few[both] - run.many_unsafe[both] / run.many[both]
        return gaps, np.ones(both.sum(), np.int64), 0.0
    few = quantity.endswith("few tokens")
    above, below = (run.few_unsafe, run.few) if few else (run.many_unsafe, run.many)
    if quantity.startswith("mean"):
        return above[below > 0] / below[below > 0], np.ones((below > 0).sum(), np.int64), rate
    return above.astype(np.float64), below, rate


def interval(
    numerator: ArrayLike, denominator: ArrayLike, method: str, *, seed: int = 0, resamples: int
) -> Interval:
    """Any of the `METHODS`, of a ratio Σ numerator / Σ denominator over at least two seeds.

    With θ the ratio, θ* those of the resamples, F their distribution, z = ±1.96: `percentile` is
    F⁻¹(Φ(z)), `bca` (Efron 1987) F⁻¹(Φ(b + (b + z) / (1 − a (b + z)))) with the bias b and the
    acceleration a, and `studentised` θ − q s with q the quantiles of (θ* − θ)/s*, s the linearised
    standard error.
    """
    if method == METHOD:
        return bootstrap_ratio(numerator, denominator, seed=seed, resamples=resamples)
    above, below = (np.asarray(each, np.float64) for each in (numerator, denominator))
    if np.count_nonzero(below) < 2:
        return math.nan, math.nan
    order = np.lexsort((above, below))
    above, below = above[order], below[order]
    ratio = above.sum() / below.sum()
    if np.allclose(above, ratio * below, rtol=0, atol=1e-12 * below.max()):
        return float(ratio), float(ratio)
    places = np.random.default_rng(seed).integers(0, len(above), size=(resamples, len(above)))
    places = places[below[places].sum(axis=1) > 0]
    drawn = above[places].sum(axis=1) / below[places].sum(axis=1)
    normal = scipy.stats.norm
    ends = [0.025, 0.975]
    if method == "percentile":
        low, high = np.quantile(drawn, ends)
        return float(low), float(high)
    if method == "studentised":

        def error(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
            count, total = a.shape[-1], b.sum(axis=-1)
            rest = a - (a.sum(axis=-1) / total)[..., None] * b
            return np.asarray(np.sqrt(count / (count - 1) * (rest**2).sum(axis=-1)) / total)

        errors = error(above[places], below[places])
        spread = errors > 1e-12
        low, high = np.quantile((drawn[spread] - ratio) / errors[spread], ends)
        own = float(error(above, below))
        return float(ratio - high * own), float(ratio - low * own)
    tied = np.abs(drawn - ratio) <= 1e-12
    share = (((drawn < ratio) & ~tied).sum() + tied.sum() / 2) / len(drawn)
    bias = normal.ppf(np.clip(share, 0.5 / len(drawn), 1 - 0.5 / len(drawn)))
    without = (above.sum() - above) / (below.sum() - below)
    gaps = without.mean() - without
    reach = bias + normal.ppf(ends)
    room = 1 - (gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5) * reach
    shares = np.where(room > 0, normal.cdf(bias + reach / room), reach > 0)
    low, high = np.quantile(drawn, shares)
    return float(low), float(high)


def coverage(quantity: str, seeds: int, rate: float, *, times: int) -> dict[str, float]:
    """Share of simulated dumps whose interval holds the truth, by method."""
    held = dict.fromkeys(METHODS, 0)
    for at, run in enumerate(runs(seeds, rate, times)):
        above, below, truth = measured(run, quantity, rate)
        for method in METHODS:
            low, high = interval(above, below, method, seed=at, resamples=RESAMPLES)
            held[method] += low - 1e-9 <= truth <= high + 1e-9
    return {method: count / times for method, count in held.items()}


def pooled_coverage(seeds: int, rate: float, *, times: int) -> float:
    """Share of simulated dumps whose cluster-robust interval holds 0."""
    held = 0
    for run in runs(seeds, rate, times):
        low, high = pooled_difference(
            (run.few_unsafe, run.few), (run.many_unsafe, run.many)
        ).difference_ci95
        held += low - 1e-9 <= 0 <= high + 1e-9
    return held / times


def rejection(seeds: int, rate: float, *, times: int, alike: bool) -> dict[str, float]:
    """Share of simulated dumps in which each test rejects at 0.05."""
    count = dict.fromkeys(TESTS, 0)
    for at, run in enumerate(runs(seeds, rate, times, seed=1, alike=alike)):
        both = (run.few > 0) & (run.many > 0)
        gaps = run.few_unsafe[both] / run.few[both] - run.many_unsafe[both] / run.many[both]
        gaps = np.round(gaps, 12)
        p_values = (
            sign_test(int((gaps < 0).sum()), int((gaps > 0).sum())),
            wilcoxon_test(gaps),
            permutation_test(gaps, seed=at, flips=999),
            pooled_difference((run.few_unsafe, run.few), (run.many_unsafe, run.many)).p,
        )
        for name, p in zip(TESTS, p_values, strict=True):
            count[name] += p <= 0.05
    return {name: each / times for name, each in count.items()}


def per_cent(share: float) -> str:
    """A share with one digit of a per cent."""
    return f"{100 * share:.1f}"


def main() -> None:
    """Print the tables of docs/statistics.md."""
    parser = argparse.ArgumentParser(description="Measure coverage and rejection.")
    parser.add_argument("--times", type=int, default=2000, help="simulated dumps a line")
    times = parser.parse_args().times
    print(f"| 95 % interval of | rate | seeds | {' | '.join(METHODS)} |")
    print(f"| --- |{' --- |' * (2 + len(METHODS))}")
    for quantity in QUANTITIES:
        for rate in RATES:
            for seeds in SEEDS:
                found = coverage(quantity, seeds, rate, times=times)
                shares = " | ".join(per_cent(found[method]) for method in METHODS)
                print(f"| {quantity} | {rate} | {seeds} | {shares} |", flush=True)
    print("\n| pooled difference, rate | 8 seeds | 12 seeds | 20 seeds | 61 seeds |")
    print("| --- | --- | --- | --- | --- |")
    for rate in RATES:
        shares = " | ".join(per_cent(pooled_coverage(n, rate, times=times)) for n in SEEDS)
        print(f"| {rate} | {shares} |", flush=True)
    print(f"\n| equal rates | rate | seeds | {' | '.join(TESTS)} |")
    print(f"| --- | --- | --- |{' --- |' * len(TESTS)}")
    for alike in (True, False):
        for rate in RATES:
            for seeds in SEEDS:
                found = rejection(seeds, rate, times=times, alike=alike)
                shares = " | ".join(per_cent(found[name]) for name in TESTS)
                kept = "few and few" if alike else "few and more"
                print(f"| {kept} tokens | {rate} | {seeds} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
