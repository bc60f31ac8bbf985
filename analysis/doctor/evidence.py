"""What the causes look at: quantities derived from a sample, computed once when asked for.

A row gives log μ and log π at the ids of the list. Where both are finite and neither is a fill
the slot is *usable*. Two numbers a row sum up how the policies differ there: with x = log μ and
y = log π over the usable slots,

    slope  b = cov(x, y) / var(x),      drift  ρ = √(1 − r²) / r,   r = corr(x, y).

A real update moves y away from x in all directions, so that b strays from 1 as ρ grows; as
ρ → 0 the slope of two equal policies tends to 1 and the offset of their log-probs to 0,
however the policy was trained. What is left *at vanishing drift* is therefore a fault, and it
can be seen even where every stored token was chosen for its large divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .fills import Fills, find_fills
from .sample import Sample

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

FEWEST: Final = 30
"""Rows below which a distribution's causes are not judged."""

LEAST_SLOTS: Final = 5
"""Usable slots that a slope needs."""

SOFTENING: Final = 0.02
"""Drift (no unit) below which a row's weight grows no more."""


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error over clusters.

    Attributes
    ----------
    value, error : float
        NaN where there are too few rows or clusters.
    rows, clusters : int
        What it rests on.
    drift : float
        Weighted mean ρ of these rows, the room for what drift may have left in it.
    """

    value: float
    error: float
    rows: int
    clusters: int
    drift: float


class Evidence:
    """Derived quantities of a sample.

    Parameters
    ----------
    sample : Sample
        Rows as they are stored.
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.metadata = sample.metadata

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.sample)

    # What is stored, in float64

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """Listed ids, shape (token, topk)."""
        return np.asarray(self.sample["topk_ids"])

    @cached_property
    def token(self) -> NDArray[np.int32]:
        """Sampled tokens, shape (token,)."""
        return np.asarray(self.sample["token_id"])

    @cached_property
    def listed(self) -> Bools:
        """Slots that hold an id, possible or not, shape (token, topk)."""
        return np.asarray(self.ids != -1)

    @cached_property
    def has_list(self) -> Bools:
        """Rows with a list, shape (token,)."""
        return np.asarray(self.listed.any(axis=1))

    @cached_property
    def mu(self) -> Floats:
        """Log-probs log μ at the listed ids, nats, shape (token, topk)."""
        return np.asarray(self.sample["topk_behavior_logprobs"], dtype=np.float64)

    @cached_property
    def pi(self) -> Floats:
        """Log-probs log π at the listed ids before the step."""
        return np.asarray(self.sample["topk_pre_logprobs"], dtype=np.float64)

    @cached_property
    def post(self) -> Floats:
        """Log-probs log π at the listed ids after the step."""
        return np.asarray(self.sample["topk_post_logprobs"], dtype=np.float64)

    @cached_property
    def mu_token(self) -> Floats:
        """Log-probs log μ of the sampled token, shape (token,)."""
        return np.asarray(self.sample["behavior_logprob"], dtype=np.float64)

    @cached_property
    def pi_token(self) -> Floats:
        """Log-probs log π of the sampled token before the step."""
        return np.asarray(self.sample["pre_logprob"], dtype=np.float64)

    # What can be used of it

    @cached_property
    def fills(self) -> dict[str, Fills]:
        """Values that stand for a missing one, by column."""
        return find_fills(self.sample)

    def filled(self, column: str) -> Bools:
        """Where a column holds a fill, in the column's shape."""
        found = self.fills.get(column)
        return np.zeros(self.sample[column].shape, np.bool_) if found is None else found.cells

    @cached_property
    def usable(self) -> Bools:
        """Slots with a possible id and finite log-probs of both policies that are no fills."""
        return (
            self.listed
            & (self.ids >= 0)
            & (self.ids < self.metadata.vocab_size)
            & np.isfinite(self.mu)
            & np.isfinite(self.pi)
            & ~self.filled("topk_behavior_logprobs")
            & ~self.filled("topk_pre_logprobs")
        )

    @cached_property
    def usable_token(self) -> Bools:
        """Rows whose sampled token has finite log-probs of both that are no fills."""
        return (
            np.isfinite(self.mu_token)
            & np.isfinite(self.pi_token)
            & ~self.filled("behavior_logprob")
            & ~self.filled("pre_logprob")
        )

    @cached_property
    def sampled_slot(self) -> Bools:
        """Slots that hold the sampled token."""
        return np.asarray(self.listed & (self.ids == self.token[:, None]))

    @cached_property
    def is_listed(self) -> Bools:
        """Rows whose sampled token is in the list."""
        return np.asarray(self.sampled_slot.any(axis=1))

    @cached_property
    def policy_entry(self) -> Floats:
        """The sampled token's log π as the list has it, shape (token,); NaN where not listed."""
        at = self.sampled_slot & ~self.filled("topk_pre_logprobs") & np.isfinite(self.pi)
        found = np.where(at, self.pi, -np.inf).max(axis=1, initial=-np.inf)
        return np.where(at.any(axis=1), found, np.nan)

    @cached_property
    def misplaced(self) -> float:
        """Share of rows whose policy scalar is another entry of their list, to the last digit.

        The scalar and the list then come from one row, but from that of another token.
        """
        judged = np.isfinite(self.policy_entry) & np.isfinite(self.pi_token)
        judged &= ~self.filled("pre_logprob")
        if judged.sum() < FEWEST:
            return 0.0
        differs = judged & (np.abs(self.policy_entry - self.pi_token) > 1e-3)
        with np.errstate(invalid="ignore"):
            other = (np.abs(self.pi - self.pi_token[:, None]) < 1e-5) & self.listed
        return float((differs & other.any(axis=1)).sum() / judged.sum())

    def mass(self, side: str) -> Floats:
        """Mass of a list, shape (token,): `mu`, `pi` or `post`; fills and −∞ count nothing."""
        logs, column = {
            "mu": (self.mu, "topk_behavior_logprobs"),
            "pi": (self.pi, "topk_pre_logprobs"),
            "post": (self.post, "topk_post_logprobs"),
        }[side]
        skip = ~self.listed | self.filled(column) | ~np.isfinite(logs)
        return np.asarray(np.exp(np.where(skip, -np.inf, np.minimum(logs, 1.0))).sum(axis=1))

    @cached_property
    def mass_mu(self) -> Floats:
        """Σ μ over the list."""
        return self.mass("mu")

    @cached_property
    def mass_pi(self) -> Floats:
        """Σ π over the list, before the step."""
        return self.mass("pi")

    @cached_property
    def list_entropy(self) -> Floats:
        """Entropy of μ over its list and one tail, nats, shape (token,); NaN without a slot."""
        skip = ~self.listed | self.filled("topk_behavior_logprobs") | ~np.isfinite(self.mu)
        logs = np.where(skip, 0.0, np.minimum(self.mu, 0.0))
        p = np.where(skip, 0.0, np.exp(logs))
        rest = np.maximum(1 - p.sum(axis=1), 1e-12)
        found = -(p * logs).sum(axis=1) - rest * np.log(rest)
        return np.where(skip.all(axis=1), np.nan, found)

    @cached_property
    def divergence(self) -> Floats:
        """KL of the usable slots and one tail, nats, shape (token,); NaN without a slot."""
        return _divergence(self.mu, self.pi, self.usable)

    @cached_property
    def update(self) -> Floats:
        """KL from the policy before the step to the one after it, nats, shape (token,)."""
        usable = self.usable & np.isfinite(self.post) & ~self.filled("topk_post_logprobs")
        return _divergence(self.pi, self.post, usable)

    # How the policies differ in a row

    @cached_property
    def rows(self) -> Ints:
        """Rows with slots enough for a slope."""
        spread = np.where(self.usable, self.mu, np.nan)
        enough = self.usable.sum(axis=1) >= LEAST_SLOTS
        found = np.flatnonzero(enough)
        if len(found):
            found = found[np.nanstd(spread[found], axis=1) > 1e-6]
        return found

    @cached_property
    def _moments(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Means of x and y, their variances and covariance, of `rows`."""
        used = self.usable[self.rows]
        n = used.sum(axis=1)
        x = np.where(used, self.mu[self.rows], 0.0)
        y = np.where(used, self.pi[self.rows], 0.0)
        mean_x, mean_y = x.sum(axis=1) / n, y.sum(axis=1) / n
        dx = np.where(used, x - mean_x[:, None], 0.0)
        dy = np.where(used, y - mean_y[:, None], 0.0)
        return (
            mean_x,
            mean_y,
            (dx * dx).sum(axis=1) / n,
            (dy * dy).sum(axis=1) / n,
            (dx * dy).sum(axis=1) / n,
        )

    @cached_property
    def correlation(self) -> Floats:
        """Correlation r over the usable slots, of `rows`; 0 where π is constant."""
        _, _, xx, yy, xy = self._moments
        with np.errstate(divide="ignore", invalid="ignore"):
            found = xy / np.sqrt(xx * yy)
        return np.where(np.isfinite(found), np.clip(found, -1, 1), 0.0)

    @cached_property
    def slope(self) -> Floats:
        """b, of `rows`."""
        _, _, xx, _, xy = self._moments
        return np.asarray(xy / xx)

    @cached_property
    def drift(self) -> Floats:
        """ρ, of `rows`; large where the policies are unrelated."""
        r = np.maximum(self.correlation, 1e-3)
        return np.asarray(np.sqrt(np.maximum(1 - r**2, 0)) / r)

    @cached_property
    def update_drift(self) -> Floats:
        """ρ of the policy before and after the step, of `rows`; 0 where it cannot be told."""
        used = self.usable[self.rows] & np.isfinite(self.post[self.rows])
        used &= ~self.filled("topk_post_logprobs")[self.rows]
        n = np.maximum(used.sum(axis=1, keepdims=True), 1)
        x = np.where(used, self.pi[self.rows], 0.0)
        y = np.where(used, self.post[self.rows], 0.0)
        x = np.where(used, x - x.sum(axis=1, keepdims=True) / n, 0.0)
        y = np.where(used, y - y.sum(axis=1, keepdims=True) / n, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            r = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
        r = np.clip(np.where(np.isfinite(r), r, 1.0), 1e-3, 1.0)
        return np.asarray(np.sqrt(np.maximum(1 - r**2, 0)) / r)

    @cached_property
    def offset(self) -> Floats:
        """Mean of log π − log μ over the usable slots, weighted by μ, nats, of `rows`."""
        used = self.usable[self.rows]
        weight = np.exp(np.where(used, np.minimum(self.mu[self.rows], 0), -np.inf))
        gap = np.where(used, self.pi[self.rows] - self.mu[self.rows], 0.0)
        return np.asarray((weight * gap).sum(axis=1) / np.maximum(weight.sum(axis=1), 1e-300))

    def at_vanishing_drift(self, values: Floats, *, rows: Bools | None = None) -> Estimate:
        """Mean of a row's quantity as ρ → 0, with its error over clusters.

        Rows weigh 1 / (ε² + ρ²), the precision of a slope whose noise grows as ρ; at most the
        better half of the rows takes part.

        Parameters
        ----------
        values : array of float64, shape (row,)
            Of `rows`.
        rows : array of bool, shape (row,), optional
            Only these.

        Returns
        -------
        Estimate
            NaN below `FEWEST` rows.
        """
        take = np.isfinite(values) if rows is None else rows & np.isfinite(values)
        drift, chosen, cluster = self.drift[take], values[take], self.cluster[self.rows][take]
        if len(chosen) < FEWEST:
            return Estimate(np.nan, np.nan, len(chosen), len(np.unique(cluster)), np.nan)
        low = drift <= np.quantile(drift, 0.5)
        drift, chosen, cluster = drift[low], chosen[low], cluster[low]
        weight = 1 / (SOFTENING**2 + drift**2)
        mean = float((weight * chosen).sum() / weight.sum())
        error = _cluster_error(chosen - mean, weight, cluster)
        return Estimate(
            mean,
            error,
            len(chosen),
            len(np.unique(cluster)),
            float((weight * drift).sum() / weight.sum()),
        )

    # Which rows belong together

    @cached_property
    def cluster(self) -> Ints:
        """The prompt of each row: seed, step and group as one number, shape (token,)."""
        return _codes(self.sample["seed"], self.sample["step"], self.sample["group"])

    @cached_property
    def response(self) -> Ints:
        """The response of each row: seed, step and sequence as one number."""
        return _codes(self.sample["seed"], self.sample["step"], self.sample["sequence"])

    @cached_property
    def _places(self) -> tuple[Ints, Ints]:
        """Response and position as one ascending key, and the rows in that order."""
        key = self.response * 2**32 + self.sample["position"].astype(np.int64)
        order = np.argsort(key, kind="stable")
        return key[order], order

    def neighbours(self, distance: int) -> tuple[Ints, Ints]:
        """Pairs of stored rows of one response, `distance` positions apart.

        Parameters
        ----------
        distance : int
            d ≠ 0.

        Returns
        -------
        rows, others : array of int
            Position t and position t − d.
        """
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
        sample = self.sample
        order = np.lexsort((sample["position"], self.response))
        found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        prefix: tuple[int, ...] = ()
        response = -1
        for row in order.tolist():
            if self.response[row] != response:
                response, prefix = int(self.response[row]), ()
            if sample["position"][row] != len(prefix):
                continue
            if self.has_list[row]:
                found.setdefault((int(self.cluster[row]), prefix), []).append(row)
            prefix = (*prefix, int(self.token[row]))
        return [np.asarray(rows) for rows in found.values() if len(rows) > 1]


def _divergence(log_p: Floats, log_q: Floats, usable: Bools) -> Floats:
    """KL over the usable slots and what is left of 1, never below 0; NaN without a slot."""
    p = np.exp(np.where(usable, np.minimum(log_p, 0), -np.inf))
    q = np.exp(np.where(usable, np.minimum(log_q, 0), -np.inf))
    inside = (p * np.where(usable, log_p - log_q, 0.0)).sum(axis=1)
    rest_p, rest_q = (np.maximum(1 - each.sum(axis=1), 1e-12) for each in (p, q))
    found = np.maximum(inside + rest_p * np.log(rest_p / rest_q), 0.0)
    return np.where(usable.any(axis=1), found, np.nan)


def _codes(*columns: NDArray[np.int32]) -> Ints:
    """Number the distinct combinations of some columns, shape (token,)."""
    if not len(columns[0]):
        return np.zeros(0, np.int64)
    stacked = np.stack([each.astype(np.int64) for each in columns], axis=1)
    _, codes = np.unique(stacked, axis=0, return_inverse=True)
    return np.asarray(codes.reshape(-1), dtype=np.int64)


def _cluster_error(residual: Floats, weight: Floats, cluster: Ints) -> float:
    """Standard error of a weighted mean whose residuals depend within clusters."""
    _, codes = np.unique(cluster, return_inverse=True)
    sums = np.bincount(codes.reshape(-1), weights=weight * residual)
    clusters = len(sums)
    if clusters < 2:
        return float("nan")
    return float(np.sqrt((sums**2).sum() * clusters / (clusters - 1)) / weight.sum())
