"""The numbers computed of a sample, each once when it is asked for.

A row gives log μ and log π at the ids of the list. Where both are finite and neither is a fill
the slot is *usable*. Two numbers per row sum up how the policies differ there: with x = log μ and
y = log π over the usable slots,

    slope  b = cov(x, y) / var(x),      drift  ρ = √(1 − r²) / r,   r = corr(x, y).

A real update moves y away from x in all directions, so that b strays from 1 as ρ grows; as
ρ → 0 the slope of two equal policies tends to 1 and the offset of their log-probs to 0,
however the policy was trained. What is left *at vanishing drift* is therefore a fault, and it
can be seen even where every stored token was chosen for its large divergence.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from .sample import Sample

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

SIDES: Final = ("behavior", "pre", "post")

FEWEST: Final = 30  # rows below which a distribution's causes are not judged
LEAST_SLOTS: Final = 5  # usable slots that a slope needs
SOFTENING: Final = 0.02  # drift (no unit) below which a row's weight grows no more
LONGEST: Final = 200  # characters of a text from the metadata that are looked at
IMPOSSIBLE: Final = -500.0  # no log-prob of a float32 softmax lies below: logits differ by tens
SUSPICIOUS: Final = -50.0  # below, a value that repeats is a fill; real log-probs are seldom there
OTHER_MASS: Final = 0.05  # mass of a row's other ids that rules out a probability of 1


class Estimate(NamedTuple):
    """A number with its standard error over clusters, and the mean ρ of the rows it rests on."""

    value: float
    error: float
    rows: int
    clusters: int
    drift: float


class Evidence:
    """Derived quantities of a sample."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.metadata = sample, sample.metadata
        # What is stored: ids and log-probs of shape (token, topk), and of the sampled token
        self.ids: NDArray[np.int32] = sample["topk_ids"]
        self.token: NDArray[np.int32] = sample["token_id"]
        self.lists = {each: sample[f"topk_{each}_logprobs"].astype(np.float64) for each in SIDES}
        self.scalars = {each: sample[f"{each}_logprob"].astype(np.float64) for each in SIDES}
        self.mu, self.pi, self.post = self.lists.values()
        self.mu_token, self.pi_token, _ = self.scalars.values()
        self.listed: Bools = self.ids != -1  # slots that hold an id, possible or not
        self.has_list: Bools = self.listed.any(axis=1)
        self.sampled_slot: Bools = self.listed & (self.ids == self.token[:, None])
        self.is_listed: Bools = self.sampled_slot.any(axis=1)
        # Where the columns of log-probs hold fills, and where finite numbers that are none
        self.fills = find_fills(sample)
        self.sound: dict[str, Bools] = {
            name: np.isfinite(sample[name]) & ~cells for name, cells in self.fills.items()
        }
        # What can be used of it: slots, those with a sound log-prob after the step, and rows
        # whose sampled token has sound log-probs
        self.impossible: Bools = self.listed & (
            (self.ids < 0) | (self.ids >= self.metadata.vocab_size)
        )
        behavior, pre, post = (self.sound[f"topk_{side}_logprobs"] for side in SIDES)
        self.usable: Bools = self.listed & ~self.impossible & behavior & pre
        self.usable_post: Bools = self.usable & post
        self.usable_token: Bools = self.sound["behavior_logprob"] & self.sound["pre_logprob"]
        # Numbers for prompts and responses, shape (token,)
        self.cluster, self.response = self._codes("group"), self._codes("sequence")
        # KL of the usable slots and one tail, nats; NaN without a slot
        self.divergence = divergence(self.mu, self.pi, self.usable)
        # Rows with slots enough for a slope, and their r, b, log b (b at least 1e-3) and ρ
        rows = np.flatnonzero(self.usable.sum(axis=1) >= LEAST_SLOTS)
        if len(rows):
            spread = np.where(self.usable[rows], self.mu[rows], np.nan)
            rows = rows[np.nanstd(spread, axis=1) > 1e-6]
        self.rows: Ints = rows
        mu, pi, used = self.mu[rows], self.pi[rows], self.usable[rows]
        x, y = centred(mu, used), centred(pi, used)
        self.correlation: Floats = np.clip(correlation(mu, pi, used), -1, 1)
        self.slope: Floats = (x * y).sum(axis=1) / (x * x).sum(axis=1)
        self.log_slope: Floats = np.log(np.maximum(self.slope, 1e-3))
        self.drift = drift_of(self.correlation)

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.sample)

    @cached_property
    def has_duplicates(self) -> Bools:
        """Rows that list an id twice."""
        ordered = np.sort(np.where(self.listed, self.ids, -1), axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        return np.asarray(twice.any(axis=1))

    def entry(self, side: str) -> tuple[Floats, Bools]:
        """The sampled token's log-prob as the lists have it, and rows in which that is sound."""
        at = self.sampled_slot & self.sound[f"topk_{side}_logprobs"]
        found = np.where(at, self.lists[side], -np.inf).max(axis=1, initial=-np.inf)
        return np.asarray(found), np.asarray(at.any(axis=1))

    @cached_property
    def misplaced(self) -> float:
        """Share of rows whose policy scalar is another entry of their list, to the last digit.

        The scalar and the list then come from one row, but from that of another token.
        """
        entry, known = self.entry("pre")
        judged = known & self.sound["pre_logprob"]
        if judged.sum() < FEWEST:
            return 0.0
        differs = judged & (np.abs(entry - self.pi_token) > 1e-3)
        other = (np.abs(self.pi - self.pi_token[:, None]) < 1e-5) & self.listed
        return float((differs & other.any(axis=1)).sum() / judged.sum())

    def mass(self, side: str) -> Floats:
        """Mass of the "behavior", "pre" or "post" lists, shape (token,); fills and −∞ are 0."""
        used = self.listed & self.sound[f"topk_{side}_logprobs"]
        logs = np.minimum(self.lists[side], 1.0)
        return np.asarray(np.exp(np.where(used, logs, -np.inf)).sum(axis=1))

    @cached_property
    def residual(self) -> Floats:
        """Standard deviation of log π − log μ over the usable slots, nats, of `rows`."""
        gap = np.where(self.usable, self.pi - self.mu, np.nan)[self.rows]
        return np.nanstd(gap, axis=1) if len(gap) else np.zeros(0)

    def at_vanishing_drift(self, values: Floats) -> Estimate:
        """Mean of a quantity of `rows` as ρ → 0, with its error over clusters.

        Rows weigh 1 / (ε² + ρ²), the precision of a slope whose noise grows as ρ; at most the
        better half of the rows takes part. NaN below `FEWEST` rows.
        """
        take = np.isfinite(values)
        drift, values, cluster = self.drift[take], values[take], self.cluster[self.rows][take]
        if len(values) < FEWEST:
            return Estimate(np.nan, np.nan, len(values), len(np.unique(cluster)), np.nan)
        low = drift <= np.quantile(drift, 0.5)
        drift, values, cluster = drift[low], values[low], cluster[low]
        weight = 1 / (SOFTENING**2 + drift**2)
        mean = np.average(values, weights=weight)
        # Residuals depend within clusters.
        codes = np.unique(cluster, return_inverse=True)[1].reshape(-1)
        sums = np.bincount(codes, weights=weight * (values - mean))
        n, error = len(sums), np.nan
        if n > 1:
            error = np.sqrt((sums**2).sum() * n / (n - 1)) / weight.sum()
        left = np.average(drift, weights=weight)
        return Estimate(float(mean), float(error), len(values), n, float(left))

    @cached_property
    def tilt(self) -> tuple[float, float]:
        """Where between μ and π the policy lies that the tokens were sampled from.

        The maximum-likelihood λ and its standard error, NaN where the rows cannot tell, of

            p ∝ exp((1 + α) x + λ g),    g = y − (a + b x),

        over the usable slots, with x = log μ, y = log π and g what is left of y after a row's own
        line: 0 where the recorded μ is the sampler, 1 where π is. α takes up a temperature.
        """
        some = (self.usable & self.sampled_slot)[self.rows].any(axis=1)
        rows, slope = self.rows[some], self.slope[some]
        if len(rows) < FEWEST:
            return np.nan, np.nan
        used = self.usable[rows]
        x, y = centred(self.mu[rows], used), centred(self.pi[rows], used)
        both = np.stack([x, np.clip(y - slope[:, None] * x, -6, 6)])
        hit = np.where(self.sampled_slot[rows] & used, both, 0.0).sum(axis=2)
        value = np.zeros(2)
        for _ in range(15):
            logits = np.where(used, (1 + value[0]) * both[0] + value[1] * both[1], -np.inf)
            weight = softmax(logits, axis=1)
            mean = (weight * both).sum(axis=2)
            second = np.einsum("ts,its,jts->ij", weight, both, both) - mean @ mean.T
            if not np.isfinite(second).all() or np.linalg.det(second) < 1e-9:
                return np.nan, np.nan
            step = np.linalg.solve(second, (hit - mean).sum(axis=1))
            value = np.clip(value + np.clip(step, -0.5, 0.5), -2, 3)
            if np.abs(step).max() < 1e-6:
                break
        return float(value[1]), float(np.sqrt(np.linalg.inv(second)[1, 1]))

    def looked_up(self, rows: Ints, ids: NDArray[np.integer], logs: Floats) -> Floats:
        """Values that the lists of some rows give to ids, shape (row, slot); NaN for none."""
        base = (np.arange(len(rows)) << 33)[:, None]
        used = self.usable[rows]
        keys, values = (base + self.ids[rows])[used], logs[rows][used]
        if not len(keys):
            return np.full(ids.shape, np.nan)
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
        at = np.maximum(np.searchsorted(keys, base + ids, side="right") - 1, 0)
        return np.where(keys[at] == base + ids, values[at], np.nan)

    def _codes(self, name: str) -> Ints:
        """Number the distinct combinations of seed, step and a column, shape (token,)."""
        columns = [self.sample[each].astype(np.int64) for each in ("seed", "step", name)]
        stacked = np.stack(columns, axis=1)
        return np.unique(stacked, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    @cached_property
    def _places(self) -> tuple[Ints, Ints]:
        """Response and position as one ascending key, and the rows in that order."""
        key = self.response * 2**32 + self.sample["position"].astype(np.int64)
        order = np.argsort(key, kind="stable")
        return key[order], order

    def neighbours(self, distance: int) -> tuple[Ints, Ints]:
        """Pairs of stored rows of one response, at positions t and t − d for a distance d ≠ 0."""
        keys, order = self._places
        wanted = keys - distance
        place = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        found = keys[place] == wanted if len(keys) else np.zeros(0, np.bool_)
        return order[found], order[place[found]]

    @cached_property
    def twins(self) -> list[Ints]:
        """Rows of one step whose responses share prompt and prefix: both policies are equal.

        A row takes part whose whole prefix is stored; those at position 0 need none.
        """
        order = self._places[1]
        found: dict[int, list[int]] = {}
        # Every prefix has a number, given to it by the one before and the token; a prompt's is
        # below 0.
        numbers: dict[tuple[int, int], int] = {}
        prefix, length, response = 0, 0, -1
        for row in order.tolist():
            if self.response[row] != response:
                response, length = int(self.response[row]), 0
                prefix = -1 - int(self.cluster[row])
            if self.sample["position"][row] != length:
                continue
            if self.has_list[row]:
                found.setdefault(prefix, []).append(row)
            prefix = numbers.setdefault((prefix, int(self.token[row])), len(numbers))
            length += 1
        return [np.asarray(rows) for rows in found.values() if len(rows) > 1]


def said(words: Mapping[str, Any], name: str, default: str | None = None) -> Any:
    """A number or the beginning of a text, whatever else the metadata may hold."""
    value = words.get(name)
    if isinstance(value, str):
        return value[:LONGEST]
    return value if isinstance(value, int | float) else default


def drift_of(r: Floats) -> Floats:
    """ρ of a correlation."""
    r = np.maximum(r, 1e-3)
    return np.asarray(np.sqrt(np.maximum(1 - r**2, 0)) / r)


def divergence(log_p: Floats, log_q: Floats, usable: Bools) -> Floats:
    """KL over the usable slots and what is left of 1, never below 0; NaN without a slot."""
    p = np.exp(np.where(usable, np.minimum(log_p, 0), -np.inf))
    q = np.exp(np.where(usable, np.minimum(log_q, 0), -np.inf))
    inside = (p * np.where(usable, log_p - log_q, 0.0)).sum(axis=1)
    rest_p, rest_q = (np.maximum(1 - each.sum(axis=1), 1e-12) for each in (p, q))
    found = np.maximum(inside + rest_p * np.log(rest_p / rest_q), 0.0)
    return np.where(usable.any(axis=1), found, np.nan)


def centred(logs: Floats, used: Bools) -> Floats:
    """Values less their mean over the used slots of each row, 0 elsewhere."""
    logs = np.where(used, logs, 0.0)
    mean = logs.sum(axis=1, keepdims=True) / np.maximum(used.sum(axis=1, keepdims=True), 1)
    return np.where(used, logs - mean, 0.0)


def correlation(log_p: Floats, log_q: Floats, used: Bools, *, constant: float = 0.0) -> Floats:
    """Pearson's r over the used slots of each row; `constant` where one side does not vary."""
    p, q = centred(log_p, used), centred(log_q, used)
    with np.errstate(divide="ignore", invalid="ignore"):
        r = (p * q).sum(axis=1) / np.sqrt((p * p).sum(axis=1) * (q * q).sum(axis=1))
    return np.where(np.isfinite(r), r, constant)


# Fills: values that an engine, a parser or a trainer puts where a log-prob is missing.
#
# A float32 log-prob is a continuous number: that one and the same value comes up in different
# contexts, or that it is a whole number, does not happen by chance. 0.0 is different, since a
# sure token has it; it is a fill where other ids of the row hold mass.


def find_fills(sample: Sample) -> dict[str, Bools]:
    """Where every column of log-probs holds fills, in the column's shape."""
    ids, token = sample["topk_ids"], sample["token_id"]
    # A hash of each list: rows of the same context share it. It wraps round, which does no harm.
    weights = np.random.default_rng(0).integers(1, 2**40, ids.shape[1], dtype=np.int64)
    with np.errstate(over="ignore"):
        context = (ids.astype(np.int64) * weights).sum(axis=1)
    found = {}
    for name in (each for side in SIDES for each in (f"{side}_logprob", f"topk_{side}_logprobs")):
        values = np.asarray(sample[name], dtype=np.float32)
        at = ids if values.ndim == 2 else token
        there = ids != -1 if values.ndim == 2 else np.ones(len(values), np.bool_)
        found[name] = cells = np.zeros(values.shape, np.bool_)
        if name not in sample.unread:
            cells |= _not_finite(name, values, there, sample)
            cells |= _constants(values, there, context, at)
            cells |= _zeros(name, values, there, sample, cells)
    return found


def rounded_to(values: NDArray[np.float32]) -> str | None:
    """The short float type that nearly all of some float32 values fit into, or None.

    >>> rounded_to(np.float32([-0.5, -1.25, -3.0]))
    'bfloat16'
    >>> rounded_to(np.float32([-0.1])) is None
    True
    """
    finite = values[np.isfinite(values) & (values != 0)]
    if not len(finite):
        return None
    bits = np.ascontiguousarray(finite, dtype=np.float32).view(np.uint32)
    for name, spare in (("bfloat16", 16), ("float16", 13)):
        if ((bits & ((1 << spare) - 1)) == 0).mean() > 0.99:
            return name
    return None


def _not_finite(name: str, values: NDArray[np.float32], there: Bools, sample: Sample) -> Bools:
    """NaN and ∞ anywhere; −∞ but where a truncated policy has it: in a part of a list."""
    cells: Bools = (np.isnan(values) | np.isposinf(values)) & there
    minus = np.isneginf(values) & there
    if not minus.any() or name == "behavior_logprob":  # such a token cannot have been sampled
        return cells | minus
    if values.ndim == 2:
        # Part of a row is what truncated sampling leaves; a whole row is no distribution.
        known: Bools = np.isfinite(values) & there
        return np.asarray(cells | minus & ~known.any(axis=1, keepdims=True))
    lists, listed = sample[f"topk_{name}s"], sample["topk_ids"] != -1
    partly = (np.isneginf(lists) & listed).any(axis=1) & (np.isfinite(lists) & listed).any(axis=1)
    truncated = partly.sum() >= max(3, 0.01 * len(values))
    return np.asarray(cells | minus & ~(partly | truncated))


def _constants(
    values: NDArray[np.float32], there: Bools, context: Ints, ids: NDArray[np.int32]
) -> Bools:
    """Values too low or too positive, and those that come up again in other contexts.

    One id in one context has one value, however often it is stored; a repeated value is a fill
    where it comes up at several ids.
    """
    finite = np.isfinite(values) & there
    cells: Bools = finite & (values <= IMPOSSIBLE)
    flat = values[finite]
    if not len(flat):
        return cells
    rows = np.nonzero(finite)[0]
    short = rounded_to(flat) is not None
    distinct, place, counts = np.unique(flat, return_inverse=True, return_counts=True)
    # Only values that are frequent enough for the mildest of the rules below.
    frequent = (counts >= 3) & (distinct > IMPOSSIBLE) & (np.abs(distinct) > 1e-3)
    at = frequent[place]
    keys = context[rows[at]]
    if values.ndim == 1:
        keys = keys * 1_000_003 + ids[rows[at]]
    contexts = _different(place[at], keys, len(distinct))
    several_ids = _different(place[at], ids[finite][at], len(distinct)) >= 4
    noise = len(flat) * 2e-5  # chance meetings: float32 log-probs lie about 1e-6 apart
    whole = distinct == np.round(distinct)
    fills = (distinct > 1e-3) & (contexts >= 3)
    if not short:
        fills |= (contexts >= 8 + noise) & several_ids
        fills |= whole & (contexts >= 3 + noise / 4)
    fills &= frequent
    low = (distinct <= SUSPICIOUS) & (whole | (contexts >= 3))
    fills |= low & (counts >= 2) if short else low
    cells[finite] |= fills[place]
    return cells


def _different(place: Ints, keys: NDArray[np.integer], size: int) -> Ints:
    """How many different keys come with each place, shape (size,)."""
    order = np.lexsort((keys, place))
    place, keys = place[order], keys[order]
    fresh = np.ones(len(place), np.bool_)
    fresh[1:] = (place[1:] != place[:-1]) | (keys[1:] != keys[:-1])
    return np.bincount(place[fresh], minlength=size)


def _zeros(
    name: str, values: NDArray[np.float32], there: Bools, sample: Sample, others: Bools
) -> Bools:
    """0.0 where the row's other ids hold mass."""
    zero: Bools = (values == 0) & there
    if not zero.any():
        return zero
    if values.ndim == 2:
        logs = np.where(there & np.isfinite(values) & ~others, values, -np.inf)
        probs = np.exp(np.minimum(logs.astype(np.float64), 0))
        rest: Floats = probs.sum(axis=1, keepdims=True) - probs
        return zero & (rest > OTHER_MASS)
    logs = sample[f"topk_{name}s"].astype(np.float64)
    listed = sample["topk_ids"] != -1
    used = listed & np.isfinite(logs) & (logs < -1e-6) & (logs > IMPOSSIBLE)
    other = used & (sample["topk_ids"] != sample["token_id"][:, None])
    contradicted: Bools = np.exp(np.where(other, logs, -np.inf)).sum(axis=1) > OTHER_MASS
    # Without a list the other policy must do: a sure token is sure for both.
    beside = "pre_logprob" if name == "behavior_logprob" else "behavior_logprob"
    alone = ~listed.any(axis=1) & (sample[beside] < np.log1p(-OTHER_MASS))
    if alone.sum() >= 3:
        contradicted |= alone
    return zero & contradicted
