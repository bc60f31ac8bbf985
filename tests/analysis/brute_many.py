"""An independent count of many criteria: loops over rows, from the equations of the design.

It builds on `tests.analysis.bruteforce`, which shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.analysis.bruteforce import (
    Pair,
    Row,
    binary,
    direction,
    divergence,
    keeps,
    noise_of,
    read_rows,
    share,
    support,
)


@dataclass
class Token:
    """One row, judged."""

    row: Row
    pair: Pair | None
    outside: bool
    d_pre: float
    delta_d: float
    weight: dict[str, float] = field(default_factory=dict)

    @property
    def clear(self) -> bool:
        """Whether ΔD is above the bound on its error, where there is one."""
        return not abs(self.delta_d) < noise_of(self.row)

    @property
    def stands_for(self) -> float:
        """Tokens that it stands for."""
        return float(self.row.get("weight", 1.0))


def ratio_of(row: Row) -> float:
    """r from the scalars, what exceeds 0 counting as 0."""
    return math.exp(min(0.0, row["pre_logprob"]) - min(0.0, row["behavior_logprob"]))


def neighbour(name: str, row: Row) -> float:
    """The weights of the neighbours, from their papers' formulas."""
    r, advantage = ratio_of(row), row["advantage"]
    if name == "icepop":
        return 1.0 if 0.5 <= r <= 5 else 0.0
    if name == "mis":
        return 1.0 if r <= 2 else 0.0
    if name == "tis":
        return min(1.0, 2 / r)
    if name == "cispo":
        return min(1.0, 5 / r)
    assert name == "drpo"
    shift = math.exp(min(0.0, row["pre_logprob"])) - math.exp(min(0.0, row["behavior_logprob"]))
    return float(1 - ((advantage > 0) - (advantage < 0)) * shift / 0.15)


NEIGHBOURS = ("icepop", "mis", "tis", "cispo", "drpo")
FREE = ("clip-higher", "binary-kl", "binary-tv", *NEIGHBOURS)
"""What decides without top-K vectors."""


def scalar_pair(row: Row) -> Pair:
    """μ and π on {k, rest} from the scalars."""
    log_mu, log_pi = min(0.0, row["behavior_logprob"]), min(0.0, row["pre_logprob"])
    mu, pi = math.exp(log_mu), math.exp(log_pi)
    return Pair([mu], [pi], [log_mu], [log_pi], 0, max(0.0, 1 - mu), max(0.0, 1 - pi), 1)


def weight_of(name: str, row: Row, pair: Pair | None, d: float, threshold: float) -> float | None:
    """A criterion's weight; None where it cannot decide."""
    if name in NEIGHBOURS:
        return neighbour(name, row)
    if pair is not None:
        return float(keeps(name, row, pair, d, threshold))
    if name.endswith("-full"):
        return float(keeps(name, row, scalar_pair(row), math.nan, threshold))
    if name in FREE:
        if name.startswith("binary"):
            outward = row["advantage"] * (ratio_of(row) - 1) > 0
            return float(not (binary(scalar_pair(row), name[-2:]) > threshold and outward))
        return float(keeps(name, row, scalar_pair(row), math.nan, threshold))
    return None


def judge_rows(
    run: Path, arm: str, names: Sequence[str], family: str, threshold: float
) -> dict[int, list[Token]]:
    """Every row of an arm by seed."""
    rows, seen, n = read_rows(run, arm)
    judged: dict[int, list[Token]] = {seed: [] for seed in seen}
    for seed, found in rows.items():
        for row in found:
            pair, d, delta = None, math.nan, math.nan
            if row["topk_ids"] is not None:
                pair = support(row, "pre", n)
                d = divergence(pair, family)
                delta = divergence(support(row, "post", n), family) - d
            token = Token(row, pair, d > threshold, d, delta)
            for name in names:
                weight = weight_of(name, row, pair, d, threshold)
                if weight is not None:
                    token.weight[name] = weight
            judged[seed].append(token)
    return judged


def right(token: Token, name: str) -> bool:
    """Kept foretells ΔD ≤ 0, masked ΔD > 0."""
    return (token.weight[name] > 0) == (token.delta_d <= 0)


def brute_compare(
    tokens: dict[int, list[Token]], names: Sequence[str], baseline: str
) -> dict[str, dict[str, Any]]:
    """Counts of every criterion under one shared update."""
    every = [token for seed in tokens.values() for token in seed]
    out = [token for token in every if token.outside]
    found = {}
    for name in names:
        masked = [t for t in every if name in t.weight and t.weight[name] <= 0]
        differ = [t for t in out if (t.weight[name] > 0) != (t.weight[baseline] > 0)]
        found[name] = {
            "masked": len(masked),
            "masked_outside": sum(t.outside for t in masked),
            "masked_inside": sum(t.pair is not None and not t.outside for t in masked),
            "masked_without_vectors": sum(t.pair is None for t in masked),
            "weight_outside": share_of(sum(t.weight[name] for t in out), len(out)),
            "outside_right": sum(right(t, name) for t in out if t.clear),
            "outside_judged": sum(t.clear for t in out),
            "disagreement_right": sum(right(t, name) for t in differ if t.clear),
            "disagreement_judged": sum(t.clear for t in differ),
            "alike": {
                other: sum((t.weight[name] > 0) == (t.weight[other] > 0) for t in out)
                for other in names
            },
        }
    return found


def share_of(part: float, whole: float) -> float:
    """A share, NaN over nothing."""
    return part / whole if whole else math.nan


def brute_pair(
    tokens: dict[int, list[Token]],
    criterion: str,
    baseline: str,
    chosen: Callable[[Token], bool] = lambda token: True,
) -> dict[str, Any]:
    """The pair's counts and rates on some of the tokens outside, under one shared update."""
    sides = {"criterion": (criterion, baseline), "baseline": (baseline, criterion)}
    found: dict[str, Any] = {}
    out = [t for seed in tokens.values() for t in seed if t.outside and chosen(t)]
    differ = [t for t in out if (t.weight[criterion] > 0) != (t.weight[baseline] > 0)]
    every = {t.stands_for for seed in tokens.values() for t in seed if t.outside}

    def weigh(some: Iterable[Token]) -> float:
        """How many tokens some stand for."""
        return math.fsum(t.stands_for if len(every) > 1 else 1.0 for t in some)

    for name, some in (("outside", out), ("disagreement", differ)):
        found[name] = len(some)
        found[f"{name}_undetermined"] = sum(not t.clear for t in some)
        found[f"{name}_increase_rate"] = share_of(
            weigh(t for t in some if t.clear and t.delta_d > 0), weigh(t for t in some if t.clear)
        )
    by_seed: dict[str, list[float | None]] = {}
    for side, (mine, other) in sides.items():
        rates, kept_all, contracting, undetermined = [], 0, 0, 0
        down = whole = 0.0
        for seed in tokens.values():
            kept = [
                t
                for t in seed
                if t.outside and chosen(t) and t.weight[mine] > 0 and not t.weight[other] > 0
            ]
            clear = [t for t in kept if t.clear]
            rates.append(share(weigh(t for t in clear if t.delta_d > 0), weigh(clear)))
            kept_all += len(kept)
            undetermined += len(kept) - len(clear)
            contracting += sum(t.delta_d < 0 for t in clear)
            down += weigh(t for t in clear if t.delta_d < 0)
            whole += weigh(clear)
        known = [rate for rate in rates if rate is not None]
        by_seed[side] = rates
        found[f"{side}_kept"] = kept_all
        found[f"{side}_contracting"] = contracting
        found[f"{side}_unsafe_keep_rate"] = share_of(math.fsum(known), len(known))
        found[f"{side}_undetermined"] = undetermined
        found[f"{side}_contracting_fraction"] = share_of(down, whole)
    pairs = [
        (a, b)
        for a, b in zip(by_seed["criterion"], by_seed["baseline"], strict=True)
        if a is not None and b is not None
    ]
    found["paired_seeds"] = len(pairs)
    found["lower"] = sum(a < b for a, b in pairs)
    found["higher"] = sum(a > b for a, b in pairs)
    found["difference"] = share_of(math.fsum(a - b for a, b in pairs), len(pairs))
    return found


def predicted(token: Token, name: str, family: str) -> float:
    """Â · r · direction of a criterion."""
    assert token.pair is not None
    r = ratio_of(token.row)
    along = r - 1
    if name != "ratio":
        tail = name.rpartition("-")[2]
        if tail == "full":
            along = token.row[f"full_{family}_direction"]
        else:
            along = direction(token.pair, family, tail, token.row.get("pre_collision"))
    return float(token.row["advantage"] * r * along)
