"""An independent count of a dump: loops over rows and `math`, from the equations of the design.

It shares no code with the package and reads with pyarrow alone, one row at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Row = dict[str, Any]
Weigh = Callable[[Row], float]


@dataclass
class Pair:
    """μ and π on the support of one token, by slot; the sampled token's slot; the tails."""

    mu: list[float]
    pi: list[float]
    log_mu: list[float]
    log_pi: list[float]
    k: int
    mu_t: float
    pi_t: float
    rest: int


def read_rows(run: Path, arm: str) -> tuple[dict[int, list[Row]], dict[int, int], int]:
    """Rows by seed, Σ rows_seen by seed, and n."""
    rows: dict[int, list[Row]] = {}
    seen: dict[int, int] = {}
    size = 0
    for path in sorted((run / f"arm={arm}").glob("seed=*/part-*.parquet")):
        seed = int(path.parent.name.split("=")[1])
        file = pq.ParquetFile(path)
        metadata = json.loads(file.metadata.metadata[b"deltad"])
        size = metadata["vocab_size"]
        seen[seed] = seen.get(seed, 0) + metadata["rows_seen"]
        rows.setdefault(seed, []).extend(file.read().to_pylist())
    return rows, seen, size


def support(row: Row, when: str, n: int, top_k: int | None = None) -> Pair:
    """S = the first K' listed ids and the sampled one, and the tails."""
    log_mu: list[float] = []
    log_pi: list[float] = []
    k = -1
    for slot, token in enumerate(row["topk_ids"][:top_k]):
        if token == -1:
            continue
        if token == row["token_id"]:
            k = len(log_mu)
        log_mu.append(min(0.0, row["topk_behavior_logprobs"][slot]))
        log_pi.append(min(0.0, row[f"topk_{when}_logprobs"][slot]))
    if k < 0:
        k = len(log_mu)
        log_mu.append(min(0.0, row["behavior_logprob"]))
        log_pi.append(min(0.0, row[f"{when}_logprob"]))
    mu, pi = [math.exp(x) for x in log_mu], [math.exp(x) for x in log_pi]
    rest = max(0, n - len(mu))
    mu_t = max(0.0, 1 - math.fsum(mu)) if rest else 0.0
    pi_t = max(0.0, 1 - math.fsum(pi)) if rest else 0.0
    return Pair(mu, pi, log_mu, log_pi, k, mu_t, pi_t, rest)


def divergence(p: Pair, family: str) -> float:
    """D of the reduced policies."""
    if family == "tv":
        gaps = [abs(m - q) for m, q in zip(p.mu, p.pi, strict=True)]
        return 0.5 * math.fsum([*gaps, abs(p.mu_t - p.pi_t)])
    terms = [m * (lm - lq) for m, lm, lq in zip(p.mu, p.log_mu, p.log_pi, strict=True) if m > 0]
    if p.mu_t > 0:
        terms.append(p.mu_t * math.log(p.mu_t / max(p.pi_t, 1e-12)))
    return math.fsum(terms)


def direction(p: Pair, family: str, tail: str, collision: float | None) -> float:
    """Ḋ with C_t as the tail says."""
    squares = math.fsum(q * q for q in p.pi)
    if tail == "aggregated" or p.rest == 0:
        c_t = p.pi_t**2
    elif tail == "uniform":
        c_t = p.pi_t**2 / p.rest
    else:
        assert collision is not None
        c_t = min(max(collision - squares, p.pi_t**2 / p.rest), p.pi_t**2)
    if family == "kl":
        inner = math.fsum(q * (m - q) for m, q in zip(p.mu, p.pi, strict=True))
        last = c_t / p.pi_t * (p.mu_t - p.pi_t) if p.pi_t > 0 else 0.0
        return (p.pi[p.k] - p.mu[p.k]) + inner + last
    signs = [(m > q) - (m < q) for m, q in zip(p.mu, p.pi, strict=True)]
    s_t = (p.mu_t > p.pi_t) - (p.mu_t < p.pi_t)
    signed = math.fsum([*(s * q for s, q in zip(signs, p.pi, strict=True)), s_t * p.pi_t])
    signed_squares = math.fsum([*(s * q * q for s, q in zip(signs, p.pi, strict=True)), s_t * c_t])
    q_k = p.pi[p.k]
    return -0.5 * (signs[p.k] * q_k - signed_squares - (q_k - squares - c_t) * signed)


def binary(p: Pair, family: str) -> float:
    """D on {k, rest}."""
    mu_k, pi_k = p.mu[p.k], p.pi[p.k]
    reduced = Pair(
        [mu_k], [pi_k], [p.log_mu[p.k]], [p.log_pi[p.k]], 0, max(0.0, 1 - mu_k),
        max(0.0, 1 - pi_k), 1,
    )  # fmt: skip
    return divergence(reduced, family)


def keeps(name: str, row: Row, p: Pair, d: float, threshold: float) -> bool:
    """One criterion's decision."""
    advantage, r = row["advantage"], ratio_of(row)
    if name == "none":
        return True
    if name == "clip-higher":
        return not ((advantage > 0 and r > 1.28) or (advantage < 0 and r < 0.8))
    outward = advantage * math.expm1(log_ratio_of(row)) > 0
    if name == "ratio":
        return not (d > threshold and outward)
    if found := re.fullmatch("binary-(kl|tv)", name):
        return not (binary(p, found[1]) > threshold and outward)
    found = re.fullmatch("predictive-(kl|tv)-(.*)", name)
    assert found is not None
    family, tail = found[1], found[2]
    if tail == "full":
        return not (
            row[f"full_{family}_pre"] > threshold
            and advantage * row[f"full_{family}_direction"] > 0
        )
    d_dot = direction(p, family, tail, row.get("pre_collision"))
    return not (d > threshold and advantage * d_dot > 0)


NEIGHBOURS = (
    "icepop", "mis", "tis", "cispo", "drpo", "sequence_mask", "sequence_truncate"
)  # fmt: skip
FREE = ("none", "clip-higher", "binary-kl", "binary-tv")
"""Criteria that decide without top-K log-probs."""


@dataclass
class Token:
    """One row, judged: the weight of each rule that can decide it, above 0 where it keeps."""

    row: Row
    pair: Pair | None
    outside: bool
    d_pre: float
    d_post: float
    weight: dict[str, float] = field(default_factory=dict)

    @property
    def delta_d(self) -> float:
        """ΔD."""
        return self.d_post - self.d_pre

    @property
    def noise(self) -> float:
        """The bound on the error of ΔD, NaN where there is none."""
        noise = self.row.get("delta_d_noise")
        return math.nan if noise is None else float(noise)

    @property
    def unclear(self) -> bool:
        """Whether ΔD is below the bound on its error."""
        return abs(self.delta_d) < self.noise

    @property
    def clear(self) -> bool:
        """Whether ΔD has a sign, or is 0, beyond doubt."""
        return not math.isnan(self.delta_d) and not self.unclear

    @property
    def stands_for(self) -> float:
        """Tokens that it stands for."""
        return float(self.row.get("weight", 1.0))

    @property
    def key(self) -> tuple[int, int, int]:
        """What identifies it in its seed."""
        return self.row["step"], self.row["sequence"], self.row["position"]

    def kept(self, name: str) -> bool:
        """Whether a rule keeps it."""
        return self.weight[name] > 0

    def right(self, name: str) -> bool:
        """Kept predicts ΔD ≤ 0, masked ΔD > 0."""
        return self.clear and self.kept(name) == (self.delta_d <= 0)


Tokens = Mapping[int, list[Token]]
"""By seed."""


def log_ratio_of(row: Row) -> float:
    """Log r from the scalars, what exceeds 0 counting as 0."""
    return float(min(0.0, row["pre_logprob"]) - min(0.0, row["behavior_logprob"]))


def ratio_of(row: Row) -> float:
    """r from the scalars."""
    return math.exp(log_ratio_of(row))


def neighbour(name: str, row: Row, log_sequence: float) -> float:
    """The neighbours' weights, from their papers' formulas, given log R of the response."""
    r, advantage = ratio_of(row), row["advantage"]
    if name == "icepop":
        return 1.0 if 0.5 <= r <= 5 else 0.0
    if name == "mis":
        return 1.0 if r <= 2 else 0.0
    if name == "tis":
        return min(1.0, 2 / r)
    if name == "cispo":
        return min(1.0, 5 / r)
    if name == "sequence_mask" and log_sequence > math.log(3):
        return 0.0
    if name.startswith("sequence"):
        return math.exp(min(log_sequence, math.log(3)) - log_ratio_of(row))
    assert name == "drpo"
    shift = math.exp(min(0.0, row["pre_logprob"])) - math.exp(min(0.0, row["behavior_logprob"]))
    return float(1 - ((advantage > 0) - (advantage < 0)) * shift / 0.15)


def scalar_pair(row: Row) -> Pair:
    """μ and π on {k, rest} from the scalars."""
    log_mu, log_pi = min(0.0, row["behavior_logprob"]), min(0.0, row["pre_logprob"])
    mu, pi = math.exp(log_mu), math.exp(log_pi)
    return Pair([mu], [pi], [log_mu], [log_pi], 0, max(0.0, 1 - mu), max(0.0, 1 - pi), 1)


def judge_rows(
    run: Path,
    arm: str,
    names: Sequence[str],
    family: str,
    threshold: float,
    *,
    top_k: int | None = None,
    own: Mapping[str, Weigh] | None = None,
) -> dict[int, list[Token]]:
    """Every row of an arm by seed; `own` are the weights of rules that are not built in."""
    rows, seen, n = read_rows(run, arm)
    judged: dict[int, list[Token]] = {}
    for seed in sorted(seen):
        found = rows.get(seed, [])
        logs: dict[tuple[int, int], list[float]] = {}
        for row in found:
            logs.setdefault((row["step"], row["sequence"]), []).append(log_ratio_of(row))
        judged[seed] = []
        for row in found:
            pair, d, d_post = None, math.nan, math.nan
            if row["topk_ids"] is not None:
                pair = support(row, "pre", n, top_k)
                d = divergence(pair, family)
                if "topk_post_logprobs" in row:
                    d_post = divergence(support(row, "post", n, top_k), family)
            token = Token(row, pair, d > threshold, d, d_post)
            for name in names:
                if name in (own or {}):
                    token.weight[name] = (own or {})[name](row)
                elif name in NEIGHBOURS:
                    log_sequence = math.fsum(logs[row["step"], row["sequence"]])
                    token.weight[name] = neighbour(name, row, log_sequence)
                elif pair is not None or name in FREE or name.endswith("-full"):
                    known = pair or scalar_pair(row)
                    token.weight[name] = float(keeps(name, row, known, d, threshold))
            judged[seed].append(token)
    return judged


def every(tokens: Tokens) -> list[Token]:
    """All seeds' tokens."""
    return [token for seed in tokens.values() for token in seed]


def unlike(*arms: Tokens) -> bool:
    """Whether tokens outside stand for unlike numbers of tokens."""
    return len({t.stands_for for arm in arms for t in every(arm) if t.outside}) > 1


def share(part: float, whole: float) -> float:
    """A share, NaN over nothing."""
    return part / whole if whole else math.nan


def weigh(tokens: Iterable[Token], weighted: bool) -> float:
    """How many tokens some stand for."""
    return math.fsum(token.stands_for if weighted else 1.0 for token in tokens)


def brute_pair(
    ours: Tokens,
    theirs: Tokens,
    criterion: str,
    baseline: str,
    *,
    weighted: bool = False,
    chosen: Callable[[Token], bool] = lambda token: True,
) -> dict[str, Any]:
    """The columns that every table of pairs has; the baseline's tokens are those of its arm."""
    found: dict[str, Any] = {}
    out = [t for t in every(ours) if t.outside and chosen(t)]
    differ = [t for t in out if t.kept(criterion) != t.kept(baseline)]
    for name, some in (("outside", out), ("disagreement", differ)):
        clear = [t for t in some if t.clear]
        rate = share(weigh([t for t in clear if t.delta_d > 0], weighted), weigh(clear, weighted))
        found[name] = len(some)
        found[f"{name}_undetermined"] = sum(t.unclear for t in some)
        found[f"{name}_increase_rate"] = rate
        found[f"{name}_constant_guess"] = rate if math.isnan(rate) else max(rate, 1 - rate)
    if hidden(ours):
        found |= {"outside": None, "outside_undetermined": None}
        found |= {"outside_increase_rate": math.nan, "outside_constant_guess": math.nan}
    rates: dict[str, list[float]] = {}
    for side, arm, mine, other in (
        ("criterion", ours, criterion, baseline), ("baseline", theirs, baseline, criterion)
    ):  # fmt: skip
        kept = {
            seed: [
                t for t in some if t.outside and chosen(t) and t.kept(mine) and not t.kept(other)
            ]
            for seed, some in arm.items()
        }
        clear = [t for t in every(kept) if t.clear]
        down = [t for t in clear if t.delta_d < 0]
        rates[side] = [
            share(
                weigh([t for t in some if t.clear and t.delta_d > 0], weighted),
                weigh([t for t in some if t.clear], weighted),
            )
            for some in kept.values()
        ]
        known = [rate for rate in rates[side] if not math.isnan(rate)]
        found[f"{side}_kept"] = len(every(kept))
        unjudged = bool(every(kept)) and not any(t.clear or t.unclear for t in every(kept))
        found[f"{side}_unsafe"] = None if unjudged else sum(t.delta_d > 0 for t in clear)
        found[f"{side}_contracting"] = None if unjudged else len(down)
        found[f"{side}_undetermined"] = sum(t.unclear for t in every(kept))
        found[f"{side}_unsafe_keep_rate"] = share(math.fsum(known), len(known))
        found[f"{side}_contracting_fraction"] = share(weigh(down, weighted), weigh(clear, weighted))
    pairs = [
        (a, b)
        for a, b in zip(rates["criterion"], rates["baseline"], strict=True)
        if not math.isnan(a + b)
    ]
    lower, higher = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return found | {
        "paired_seeds": len(pairs),
        "lower": lower,
        "tied": len(pairs) - lower - higher,
        "higher": higher,
        "difference": share(math.fsum(a - b for a, b in pairs), len(pairs)),
        "sign_test_p": sign_test(lower, higher),
    }


def hidden(tokens: Tokens) -> bool:
    """Whether there is a seed of which no row has top-K log-probs: who is outside is unknown."""
    return any(some and all(t.pair is None for t in some) for some in tokens.values())


def sign_test(lower: int, higher: int) -> float:
    """Exact two-sided binomial test of one half."""
    n = lower + higher
    if not n:
        return math.nan
    extreme = sum(math.comb(n, i) for i in range(min(lower, higher) + 1))
    return min(1.0, extreme / float(2 ** (n - 1)))


def brute_accuracy(
    prefix: str, tokens: Iterable[Token], name: str, *, weighted: bool, known: bool = True
) -> dict[str, float]:
    """The columns of one rule's predicted signs on some tokens."""
    clear = [t for t in tokens if t.clear]
    right = weigh([t for t in clear if t.right(name)], weighted) if known else math.nan
    whole = weigh(clear, weighted) if known else math.nan
    return {
        f"{prefix}_right": right,
        f"{prefix}_judged": whole,
        f"{prefix}_accuracy": share(right, whole),
    }


def brute_masked(tokens: Tokens, name: str) -> dict[str, Any]:
    """What a rule masks, and where, and its mean weight outside."""
    masked = [t for t in every(tokens) if name in t.weight and not t.kept(name)]
    out = [t for t in every(tokens) if t.outside]
    return {
        "masked": len(masked),
        "masked_outside": sum(t.outside for t in masked),
        "masked_inside": sum(t.pair is not None and not t.outside for t in masked),
        "masked_without_topk": sum(t.pair is None for t in masked),
        "weight_outside": share(math.fsum(t.weight[name] for t in out), len(out)),
    }


def brute_keep_effect(
    ours: Tokens, theirs: Tokens, criterion: str, baseline: str, *, weighted: bool
) -> dict[str, Any]:
    """What keeping a token causes, by the arms that applied the two masks."""
    kept: dict[str, list[Token]] = {"criterion": [], "baseline": []}
    unsafe: dict[str, list[Token]] = {"criterion": [], "baseline": []}
    steps, undetermined = set(), 0
    for seed, some in ours.items():
        other = {t.key: t for t in theirs[seed]}
        for t in some:
            if not t.outside or t.kept(criterion) == t.kept(baseline):
                continue
            steps.add((seed, t.row["step"]))
            twin = other[t.key]
            tau = t.d_post - twin.d_post
            side = "criterion" if t.kept(criterion) else "baseline"
            tau = tau if side == "criterion" else -tau
            if abs(tau) < math.hypot(t.noise, twin.noise):
                undetermined += 1
                continue
            kept[side].append(t)
            if tau > 0:
                unsafe[side].append(t)
    found: dict[str, Any] = {
        "tokens": len(kept["criterion"]) + len(kept["baseline"]) + undetermined,
        "undetermined": undetermined,
    }
    found["disagreements_per_step"] = share(found["tokens"], len(steps))
    whole = weigh(kept["criterion"] + kept["baseline"], weighted)
    for side, another in (("criterion", "baseline"), ("baseline", "criterion")):
        safe = weigh(kept[side], weighted) - weigh(unsafe[side], weighted)
        found[side] = {
            "kept": len(kept[side]),
            "unsafe": len(unsafe[side]),
            "causal_unsafe_keep": share(weigh(unsafe[side], weighted), weigh(kept[side], weighted)),
            "sign_accuracy": share(safe + weigh(unsafe[another], weighted), whole),
        }
    return found


def predicted(token: Token, name: str, family: str) -> float:
    """Â · r · direction of a criterion."""
    assert token.pair is not None
    r = ratio_of(token.row)
    along = math.expm1(log_ratio_of(token.row))
    if name != "ratio":
        tail = name.rpartition("-")[2]
        if tail == "full":
            along = token.row[f"full_{family}_direction"]
        else:
            along = direction(token.pair, family, tail, token.row.get("pre_collision"))
    return float(token.row["advantage"] * r * along)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], where: object = "") -> None:
    """Counts are equal and numbers agree to 1e-9 wherever `expected` has one; None is NaN."""
    for key, value in expected.items():
        if isinstance(value, Mapping):
            assert_same(found[key], value, (where, key))
        elif isinstance(value, float):
            have = math.nan if found[key] is None else found[key]
            close = math.isclose(have, value, rel_tol=1e-9, abs_tol=1e-9)
            assert close or (math.isnan(have) and math.isnan(value)), (where, key, have, value)
        else:
            assert found[key] == value, (where, key, found[key], value)
