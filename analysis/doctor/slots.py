"""A dump's distributions, row by row, as a fault reaches them: the known ids and a modelled tail.

A row stores log-probs of the top-K ids and of the sampled token; the rest of the vocabulary is
known by its mass alone, and where the dump has a collision, by Σ p² too. A fault such as a
temperature acts on the rest as well, so it is modelled: the m = n − |S| ids of the tail are
taken to be log-normal, which makes their power sums

    M(β) = Σ_tail p^β = m (t/m)^β exp(σ²(β² − β)/2)

with t the tail's mass and σ² = log(m C_t / t²), C_t the tail's share of the collision. Count,
mass and collision come out as they are stored. No id of the tail is likelier than the least
likely one listed, which bounds M(β).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.dumps import Metadata

Columns = dict[str, NDArray[Any]]
Floats = NDArray[np.float64]

BEHAVIOR: Final = "behavior"
POLICIES: Final = ("pre", "post")

_SPREAD: Final = 4.0
"""σ² where no collision tells it: a standard deviation of 2 nats."""

_LARGEST_SPREAD: Final = 9.0


class NothingToBreakError(ValueError):
    """The rows do not hold what the fault would change."""


def needs(rows: int, what: str) -> None:
    """Refuse to call unchanged rows broken."""
    if not rows:
        raise NothingToBreakError(what)


def some_rows(rng: Generator, possible: Any, share: float) -> NDArray[np.bool_]:
    """A share of all rows, drawn from the possible ones; three at least."""
    drawn = np.where(possible, rng.random(len(possible)), np.inf)
    needs(int(possible.sum()), "a value to replace")
    count = min(int(possible.sum()), max(3, round(share * len(possible))))
    return np.asarray((drawn <= np.sort(drawn)[count - 1]) & possible)


@dataclass(frozen=True)
class Slots:
    """Both policies of some rows on S, the top-K ids and the sampled token.

    Attributes
    ----------
    ids : array of int64, shape (token, topk + 1)
        The listed ids, and in the last slot the sampled token where it is not listed; −1
        elsewhere.
    used, sampled : array of bool, shape (token, topk + 1)
        Slots that hold an id, and the one that holds the sampled token.
    size : array of float64, shape (token,)
        n − |S|.
    """

    ids: NDArray[np.int64]
    used: NDArray[np.bool_]
    sampled: NDArray[np.bool_]
    size: Floats

    @classmethod
    def of(cls, columns: Mapping[str, NDArray[Any]], metadata: Metadata) -> Slots:
        """Slots of rows as they are stored."""
        listed = columns["topk_ids"].astype(np.int64)
        token = columns["token_id"].astype(np.int64)[:, None]
        hit = (listed == token) & (listed >= 0)
        alone = ~hit.any(axis=1, keepdims=True)
        ids = np.concatenate([listed, np.where(alone, token, -1)], axis=1)
        used = ids >= 0
        size = np.maximum(metadata.vocab_size - used.sum(axis=1), 0).astype(np.float64)
        return cls(ids, used, np.concatenate([hit, alone], axis=1), size)

    def logs(self, columns: Mapping[str, NDArray[Any]], side: str) -> Floats:
        """Log-probs of one side in nats, shape (token, topk + 1); −∞ in unused slots."""
        both = np.concatenate(
            [columns[f"topk_{side}_logprobs"], columns[f"{side}_logprob"][:, None]], axis=1
        )
        return np.where(self.used, both.astype(np.float64), -np.inf)

    def store(self, columns: Columns, side: str, logs: Floats) -> None:
        """Put log-probs into the columns, which are replaced; padding stays as it was."""
        name = f"topk_{side}_logprobs"
        listed = self.used[:, :-1]
        columns[name] = np.where(listed, logs[:, :-1], columns[name]).astype(np.float32)
        columns[f"{side}_logprob"] = self.at_sampled(logs).astype(np.float32)

    def at_sampled(self, values: Floats) -> Floats:
        """Value at the sampled token, shape (token,)."""
        return np.asarray(np.where(self.sampled, values, 0.0).max(axis=1, where=self.sampled,
                                                                 initial=-np.inf))  # fmt: skip

    def tail(self, logs: Floats) -> Floats:
        """Mass outside S, at most what ids less likely than all listed ones can hold."""
        probs = np.exp(np.minimum(logs, 0))
        least = np.min(probs, axis=1, where=self.used, initial=1.0)
        return np.asarray(np.clip(1 - probs.sum(axis=1), 0, self.size * least))

    def spread(self, columns: Mapping[str, NDArray[Any]], side: str) -> Floats:
        """σ² of the tail, from the collision of the policy where there is one."""
        side = "pre" if side == BEHAVIOR else side
        collision = columns.get(f"{side}_collision")
        if collision is None:
            return np.full(len(self.size), _SPREAD)
        logs = self.logs(columns, side)
        tail = self.tail(logs)
        known = np.exp(2 * np.minimum(logs, 0)).sum(axis=1)
        rest = np.maximum(collision.astype(np.float64) - known, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log(self.size * rest / tail**2)
        usable = (tail > 1e-4) & np.isfinite(found)  # below, the stored digits do not tell it
        return np.where(usable, np.clip(found, 0, _LARGEST_SPREAD), _SPREAD)


@dataclass(frozen=True)
class Tail:
    """The modelled ids outside S.

    Attributes
    ----------
    size, mass, spread : array of float64, shape (token,)
        m, t and σ².
    least : array of float64, shape (token,)
        Probability of the least likely id of S, which no id of the tail exceeds.
    """

    size: Floats
    mass: Floats
    spread: Floats
    least: Floats

    @classmethod
    def of(cls, slots: Slots, logs: Floats, spread: Floats) -> Tail:
        """Tail of distributions given on S."""
        least = np.exp(np.min(np.minimum(logs, 0), axis=1, where=slots.used, initial=0.0))
        return cls(slots.size, slots.tail(logs), spread, least)

    def power(self, exponent: float) -> Floats:
        """Σ_tail p^β, shape (token,)."""
        some = (self.mass > 0) & (self.size > 0)
        size, mass = np.where(some, self.size, 1.0), np.where(some, self.mass, 1.0)
        logs = (
            np.log(size)
            + exponent * np.log(mass / size)
            + self.spread * (exponent**2 - exponent) / 2
        )
        # Where all of the tail is as likely as can be, and the sum is p^(β−1) t.
        edge = np.log(mass) + (exponent - 1) * np.log(np.where(some, self.least, 1.0))
        logs = np.maximum(logs, edge) if exponent < 1 else np.minimum(logs, edge)
        return np.where(some, np.exp(logs), 0.0)

    def draw(self, normal: Floats) -> Floats:
        """Log-probs of ids of the tail from standard normal numbers, shape (token, slot)."""
        sigma = np.sqrt(self.spread)[:, None]
        # A policy gives every id something, though float32 cannot tell a tail below 1e-9.
        mean = np.log(np.maximum(self.mass, 1e-9) / np.maximum(self.size, 1))[:, None]
        top = np.log(np.maximum(self.least, 1e-30))[:, None]
        drawn = mean + sigma * normal - sigma**2 / 2
        return np.where(drawn > top, top - 0.3 * np.abs(normal), drawn)  # no two alike


def tempered(slots: Slots, logs: Floats, exponent: float, spread: Floats) -> Floats:
    """p^β renormalised over the vocabulary, the modelled tail included.

    Parameters
    ----------
    slots : Slots
        Rows.
    logs : array of float64, shape (token, topk + 1)
        Log-probs on S, in nats.
    exponent : float
        β: 1/τ for a temperature τ.
    spread : array of float64, shape (token,)
        σ² of the tail.

    Returns
    -------
    array of float64, shape (token, topk + 1)
        Log-probs on S.
    """
    rest = Tail.of(slots, logs, spread).power(exponent)
    scaled = exponent * logs
    total = np.exp(np.where(slots.used, scaled, -np.inf)).sum(axis=1) + rest
    return np.where(slots.used, scaled - np.log(total)[:, None], -np.inf)


def normalised(slots: Slots, logits: Floats, tail_mass: Floats) -> Floats:
    """Log-probs of unnormalised ones on S beside a tail of the given unnormalised mass."""
    total = np.exp(np.where(slots.used, logits, -np.inf)).sum(axis=1) + tail_mass
    with np.errstate(divide="ignore", invalid="ignore"):
        found = logits - np.log(total)[:, None]
    return np.where(slots.used, np.minimum(found, 0.0), -np.inf)


def refresh(columns: Columns, slots: Slots, side: str, spread: Floats) -> None:
    """Bring a policy's collision and entropy, where stored, in line with its log-probs."""
    logs = slots.logs(columns, side)
    tail = Tail.of(slots, logs, spread)
    probs = np.exp(np.minimum(logs, 0))
    if f"{side}_collision" in columns:
        collision = (probs**2).sum(axis=1) + tail.power(2.0)
        columns[f"{side}_collision"] = np.minimum(collision, 1).astype(np.float32)
    if f"{side}_entropy" in columns:
        inside = -np.where(probs > 0, probs * np.where(probs > 0, logs, 0), 0).sum(axis=1)
        some = (tail.mass > 0) & (tail.size > 0)
        mean = np.log(np.where(some, tail.mass / np.maximum(tail.size, 1), 1.0))
        outside = np.where(some, -tail.mass * (mean + tail.spread / 2), 0.0)
        columns[f"{side}_entropy"] = np.maximum(inside + np.maximum(outside, 0), 0).astype(
            np.float32
        )


def read_at(
    slots: Slots, logs: Floats, source: NDArray[np.intp], ids: NDArray[np.int64], drawn: Floats
) -> Floats:
    """Log-probs that other rows' distributions give to ids.

    Parameters
    ----------
    slots, logs
        The distributions.
    source : array of int, shape (token,)
        Row whose distribution is read.
    ids : array of int64, shape (token, slot)
        Ids asked for; −1 for none.
    drawn : array of float64, shape (token, slot)
        Log-probs for ids that the source does not list.

    Returns
    -------
    array of float64, shape (token, slot)
        In nats; −∞ where no id was asked for. The mass of each row is at most 1.
    """
    found = np.full(ids.shape, -np.inf)
    listed = np.zeros(ids.shape, bool)
    for slot in range(slots.ids.shape[1]):
        theirs = slots.ids[source, slot][:, None]
        match = (ids == theirs) & (theirs >= 0)
        found = np.where(match, logs[source, slot][:, None], found)
        listed |= match
    rest = (ids >= 0) & ~listed
    # The ids drawn may together exceed the tail; they take nine tenths of it then.
    mass = np.where(rest, np.exp(drawn), 0.0).sum(axis=1)
    room = np.maximum(0.9 * slots.tail(logs)[source], 1e-9)
    down = np.where(mass > room, np.log(room / np.maximum(mass, 1e-30)), 0.0)
    return np.where(rest, drawn + down[:, None], found)


def relist(columns: Columns) -> None:
    """List what a changed μ ranks first: the sampled token instead of one less likely, in order."""
    ids, token = columns["topk_ids"], columns["token_id"]
    full = (ids >= 0).all(axis=1)
    alone = full & ~(ids == token[:, None]).any(axis=1)
    logs = columns["topk_behavior_logprobs"]
    last = logs.argmin(axis=1)
    rows = np.arange(len(ids))
    better = alone & (columns["behavior_logprob"] > logs[rows, last])
    slot = (np.arange(ids.shape[1])[None, :] == last[:, None]) & better[:, None]
    columns["topk_ids"] = np.where(slot, token[:, None], ids)
    for side in (BEHAVIOR, *POLICIES):
        name = f"topk_{side}_logprobs"
        columns[name] = np.where(slot, columns[f"{side}_logprob"][:, None], columns[name])
    rerank(columns)


def rerank(columns: Columns) -> None:
    """Put the lists into the behavior policy's rank order again, padding last."""
    ids = columns["topk_ids"]
    keys = np.where(ids >= 0, -columns["topk_behavior_logprobs"].astype(np.float64), np.inf)
    order = np.argsort(keys, axis=1, kind="stable")
    if (order == np.arange(ids.shape[1])).all():
        return
    # Among −∞ and padding the sort is stable, so padding must be moved behind by hand.
    order = np.take_along_axis(
        order,
        np.argsort(np.take_along_axis(ids, order, axis=1) < 0, axis=1, kind="stable"),
        axis=1,
    )
    for name in ("topk_ids", *(f"topk_{side}_logprobs" for side in (BEHAVIOR, *POLICIES))):
        columns[name] = np.take_along_axis(columns[name], order, axis=1)
