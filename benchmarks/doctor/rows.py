"""A dump's rows as a fault changes them: the known ids of each distribution, and a modelled tail.

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

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.dumps import Metadata

Columns = dict[str, NDArray[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

BEHAVIOR: Final = "behavior"
POLICIES: Final = ("pre", "post")
SIDES: Final = (BEHAVIOR, *POLICIES)

ENTRIES: Final = (
    ("topk_ids", "token_id"),
    *((f"topk_{side}_logprobs", f"{side}_logprob") for side in SIDES),
)
"""Each list and the column that holds the sampled token's value."""

_SPREAD: Final = 4.0
"""σ² where no collision tells it: a standard deviation of 2 nats."""

_LARGEST_SPREAD: Final = 9.0


class NothingToBreakError(ValueError):
    """The rows do not hold what the fault would change."""


def needs(rows: Any, what: str) -> None:
    """Refuse to call unchanged rows broken."""
    if not np.any(rows):
        raise NothingToBreakError(what)


@dataclass
class Rows:
    """Rows of one arm and seed, in the order of step, sequence and position.

    A fault replaces columns and metadata; it never writes into an array.
    """

    columns: Columns
    metadata: Metadata
    rng: Generator

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.columns["token_id"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """One column."""
        return self.columns[name]

    def __setitem__(self, name: str, values: NDArray[Any]) -> None:
        self.columns[name] = values

    @property
    def stored(self) -> Bools:
        """Rows whose top-K log-probs are stored."""
        return np.asarray((self["topk_ids"] >= 0).any(axis=1))

    @property
    def hit(self) -> Bools:
        """Entries of the sampled token, shape (token, topk)."""
        ids = self["topk_ids"]
        return np.asarray((ids == self["token_id"][:, None]) & (ids >= 0))

    @property
    def first(self) -> NDArray[np.intp]:
        """The row at which each row's sequence begins."""
        step, sequence = self["step"], self["sequence"]
        begins = np.ones(len(self), bool)
        begins[1:] = (step[1:] != step[:-1]) | (sequence[1:] != sequence[:-1])
        return np.maximum.accumulate(np.where(begins, np.arange(len(self)), 0))

    def describe(self, **changes: Any) -> None:
        """Change the metadata."""
        self.metadata = dataclasses.replace(self.metadata, **changes)

    def declare(self, **behavior: str) -> None:
        """Let the metadata say more of the behavior policy."""
        self.describe(behavior={**self.metadata.behavior, **behavior})

    def some(self, possible: Any, share: float) -> Bools:
        """A share of all rows, drawn from the possible ones; three at least."""
        drawn = np.where(possible, self.rng.random(len(possible)), np.inf)
        needs(possible, "a value to replace")
        count = min(int(possible.sum()), max(3, round(share * len(possible))))
        return np.asarray((drawn <= np.sort(drawn)[count - 1]) & possible)

    def unlist(self, gone: Bools) -> None:
        """Take entries out of the lists, shape (token, topk) or (token, 1)."""
        for name, _ in ENTRIES:
            absent = np.int32(-1) if name == "topk_ids" else np.float32(np.nan)
            self[name] = np.where(gone, absent, self[name])

    def reorder(self, order: NDArray[np.intp]) -> None:
        """Put the lists into another order, shape (token, topk)."""
        for name, _ in ENTRIES:
            self[name] = np.take_along_axis(self[name], order, axis=1)

    def rerank(self) -> None:
        """Put the lists into the behavior policy's rank order again, padding last."""
        ids = self["topk_ids"]
        keys = np.where(ids >= 0, -self["topk_behavior_logprobs"].astype(np.float64), np.inf)
        self.reorder(np.lexsort((keys, ids < 0)))

    def relist(self) -> None:
        """List what a changed μ ranks first: the sampled token for one less likely, in order."""
        ids = self["topk_ids"]
        alone = (ids >= 0).all(axis=1) & ~self.hit.any(axis=1)
        logs = self["topk_behavior_logprobs"]
        last = logs.argmin(axis=1)
        better = alone & (self["behavior_logprob"] > logs[np.arange(len(ids)), last])
        slot = (np.arange(ids.shape[1])[None, :] == last[:, None]) & better[:, None]
        for name, scalar in ENTRIES:
            self[name] = np.where(slot, self[scalar][:, None], self[name])
        self.rerank()


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

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        hit = rows.hit
        alone = ~hit.any(axis=1, keepdims=True)
        token = np.where(alone, rows["token_id"].astype(np.int64)[:, None], -1)
        self.ids: Ints = np.concatenate([rows["topk_ids"].astype(np.int64), token], axis=1)
        self.used: Bools = self.ids >= 0
        self.sampled: Bools = np.concatenate([hit, alone], axis=1)
        size = np.maximum(rows.metadata.vocab_size - self.used.sum(axis=1), 0)
        self.size: Floats = size.astype(np.float64)

    def logs(self, side: str) -> Floats:
        """Log-probs of one side in nats, shape (token, topk + 1); −∞ in unused slots."""
        rows = self.rows
        both = [rows[f"topk_{side}_logprobs"], rows[f"{side}_logprob"][:, None]]
        return np.where(self.used, np.concatenate(both, axis=1).astype(np.float64), -np.inf)

    def store(self, side: str, logs: Floats) -> None:
        """Put log-probs into the columns; padding stays as it was."""
        name, listed = f"topk_{side}_logprobs", self.used[:, :-1]
        sampled = np.where(self.sampled, logs, -np.inf).max(axis=1)
        self.rows[name] = np.where(listed, logs[:, :-1], self.rows[name]).astype(np.float32)
        self.rows[f"{side}_logprob"] = sampled.astype(np.float32)

    def tail(self, logs: Floats) -> Floats:
        """Mass outside S, at most what ids less likely than all listed ones can hold."""
        probs = np.exp(np.minimum(logs, 0))
        least = np.min(probs, axis=1, where=self.used, initial=1.0)
        return np.asarray(np.clip(1 - probs.sum(axis=1), 0, self.size * least))

    def spread(self, side: str) -> Floats:
        """σ² of the tail, from the collision of the policy where there is one."""
        side = "pre" if side == BEHAVIOR else side
        collision = self.rows.columns.get(f"{side}_collision")
        if collision is None:
            return np.full(len(self.size), _SPREAD)
        logs = self.logs(side)
        tail = self.tail(logs)
        known = np.exp(2 * np.minimum(logs, 0)).sum(axis=1)
        rest = np.maximum(collision.astype(np.float64) - known, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.log(self.size * rest / tail**2)
        usable = (tail > 1e-4) & np.isfinite(found)  # below, the stored digits do not tell it
        return np.where(usable, np.clip(found, 0, _LARGEST_SPREAD), _SPREAD)

    def normalised(self, logits: Floats, tail_mass: Any) -> Floats:
        """Log-probs of unnormalised ones on S with a tail of the given unnormalised mass."""
        total = np.exp(np.where(self.used, logits, -np.inf)).sum(axis=1) + tail_mass
        with np.errstate(divide="ignore", invalid="ignore"):
            found = logits - np.log(total)[:, None]
        return np.where(self.used, np.minimum(found, 0.0), -np.inf)

    def tempered(self, logs: Floats, exponent: float, spread: Floats) -> Floats:
        """p^β renormalised over the vocabulary with its modelled tail, on S; β = 1/τ."""
        rest = Tail(self, logs, spread).power(exponent)
        scaled = exponent * logs
        total = np.exp(np.where(self.used, scaled, -np.inf)).sum(axis=1) + rest
        return np.where(self.used, scaled - np.log(total)[:, None], -np.inf)

    def refresh(self, side: str, spread: Floats) -> None:
        """Bring a policy's collision and entropy, where stored, in line with its log-probs."""
        columns, logs = self.rows.columns, self.logs(side)
        tail = Tail(self, logs, spread)
        probs = np.exp(np.minimum(logs, 0))
        if f"{side}_collision" in columns:
            collision = (probs**2).sum(axis=1) + tail.power(2.0)
            columns[f"{side}_collision"] = np.minimum(collision, 1).astype(np.float32)
        if f"{side}_entropy" in columns:
            inside = -np.where(probs > 0, probs * np.where(probs > 0, logs, 0), 0).sum(axis=1)
            mean = np.log(np.where(tail.some, tail.mass / np.maximum(tail.size, 1), 1.0))
            outside = np.where(tail.some, -tail.mass * (mean + tail.spread / 2), 0.0)
            entropy = np.maximum(inside + np.maximum(outside, 0), 0)
            columns[f"{side}_entropy"] = entropy.astype(np.float32)

    def read(self, logs: Floats, source: NDArray[np.intp], ids: Ints, drawn: Floats) -> Floats:
        """Log-probs that the `source` rows' distributions give to ids, shape (token, slot).

        An id that the source does not list gets the one `drawn`; −∞ where `ids` is −1. The mass
        of a row is at most 1.
        """
        found = np.full(ids.shape, -np.inf)
        listed = np.zeros(ids.shape, bool)
        for slot in range(self.ids.shape[1]):
            theirs = self.ids[source, slot][:, None]
            match = (ids == theirs) & (theirs >= 0)
            found = np.where(match, logs[source, slot][:, None], found)
            listed |= match
        rest = (ids >= 0) & ~listed
        # The ids drawn may together exceed the tail; they take nine tenths of it then.
        mass = np.where(rest, np.exp(drawn), 0.0).sum(axis=1)
        room = np.maximum(0.9 * self.tail(logs)[source], 1e-9)
        down = np.where(mass > room, np.log(room / np.maximum(mass, 1e-30)), 0.0)
        return np.where(rest, drawn + down[:, None], found)


class Tail:
    """The modelled ids outside S: their number m, mass t and σ², and the least likely id of S."""

    def __init__(self, slots: Slots, logs: Floats, spread: Floats) -> None:
        self.size, self.mass, self.spread = slots.size, slots.tail(logs), spread
        self.least = np.exp(np.min(np.minimum(logs, 0), axis=1, where=slots.used, initial=0.0))
        self.some = (self.mass > 0) & (self.size > 0)

    def power(self, exponent: float) -> Floats:
        """Σ_tail p^β, shape (token,)."""
        size, mass = np.where(self.some, self.size, 1.0), np.where(self.some, self.mass, 1.0)
        curve = self.spread * (exponent**2 - exponent) / 2
        logs = np.log(size) + exponent * np.log(mass / size) + curve
        # Where all of the tail is as likely as can be, and the sum is p^(β−1) t.
        edge = np.log(mass) + (exponent - 1) * np.log(np.where(self.some, self.least, 1.0))
        logs = np.maximum(logs, edge) if exponent < 1 else np.minimum(logs, edge)
        return np.where(self.some, np.exp(logs), 0.0)

    def draw(self, normal: Floats) -> Floats:
        """Log-probs of ids of the tail from standard normal numbers, shape (token, slot)."""
        sigma = np.sqrt(self.spread)[:, None]
        # A policy gives every id something, though float32 cannot tell a tail below 1e-9.
        mean = np.log(np.maximum(self.mass, 1e-9) / np.maximum(self.size, 1))[:, None]
        top = np.log(np.maximum(self.least, 1e-30))[:, None]
        drawn = mean + sigma * normal - sigma**2 / 2
        return np.where(drawn > top, top - 0.3 * np.abs(normal), drawn)  # no two alike
