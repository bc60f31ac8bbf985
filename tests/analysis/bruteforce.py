"""An independent count of a dump: loops over rows and `math`, from the equations of the design.

It shares no code with the package and reads with pyarrow alone, one row at a time.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

Row = dict[str, Any]


@dataclass
class Judged:
    """What the count needs of one token."""

    outside: bool
    delta_d: float
    keep: dict[str, bool]
    noise: float = math.nan
    weight: float = 1.0

    @property
    def clear(self) -> bool:
        """Whether ΔD is above the bound on its error, where there is one."""
        return not abs(self.delta_d) < self.noise

    @property
    def up(self) -> bool:
        """ΔD > 0 beyond doubt."""
        return self.clear and self.delta_d > 0


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


def support(row: Row, when: str, n: int) -> Pair:
    """S = listed ids and the sampled one, and the tails."""
    log_mu: list[float] = []
    log_pi: list[float] = []
    k = -1
    for slot, token in enumerate(row["topk_ids"]):
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
    advantage = row["advantage"]
    r = math.exp(min(0.0, row["pre_logprob"]) - min(0.0, row["behavior_logprob"]))
    if name == "none":
        return True
    if name == "clip-higher":
        return not ((advantage > 0 and r > 1.28) or (advantage < 0 and r < 0.8))
    outward = advantage * (r - 1) > 0
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


def judge(row: Row, n: int, family: str, threshold: float, names: tuple[str, str]) -> Judged:
    """One token."""
    if row["topk_ids"] is None:
        return Judged(False, math.nan, {})
    before, after = support(row, "pre", n), support(row, "post", n)
    d = divergence(before, family)
    return Judged(
        d > threshold,
        divergence(after, family) - d,
        {name: keeps(name, row, before, d, threshold) for name in names},
        noise_of(row),
        row.get("weight", 1.0),
    )


def noise_of(row: Row) -> float:
    """The bound on the error of ΔD, NaN where there is none."""
    noise = row.get("delta_d_noise")
    return math.nan if noise is None else float(noise)


def unlike(tokens: list[Any]) -> bool:
    """Whether tokens stand for unlike numbers of tokens."""
    return len({each.weight for each in tokens}) > 1


def weigh(tokens: list[Any], weighted: bool) -> float:
    """How many tokens some stand for."""
    return math.fsum(each.weight for each in tokens) if weighted else len(tokens)


def share(part: float, whole: float) -> float | None:
    """A ratio, None over nothing."""
    return part / whole if whole else None


def mean(values: list[float]) -> float | None:
    """A mean, None over nothing."""
    return math.fsum(values) / len(values) if values else None


def count_side(judged: list[Judged], mine: str, other: str, weighted: bool) -> dict[str, Any]:
    """What one criterion keeps of the disagreement set."""
    kept = [each for each in judged if each.outside and each.keep[mine] and not each.keep[other]]
    clear = [each for each in kept if each.clear]
    down = [each for each in clear if each.delta_d < 0]
    unsafe = [each for each in kept if each.up]
    whole = weigh(clear, weighted)
    return {
        "kept": len(kept),
        "unsafe": len(unsafe),
        "contracting": len(down),
        "undetermined": len(kept) - len(clear),
        "unsafe_keep_rate": share(weigh(unsafe, weighted), whole),
        "_sums": (weigh(down, weighted), whole),
    }


def brute_table(
    run: Path,
    *,
    criterion_arm: str,
    baseline_arm: str,
    threshold: float,
    family: str,
    criterion: str,
    baseline: str,
) -> dict[str, Any]:
    """The counts and rates of `deltad table --format json`, without intervals and p-values."""
    names = (criterion, baseline)
    sides = {}
    for side, arm in (("criterion", criterion_arm), ("baseline", baseline_arm)):
        rows, seen, n = read_rows(run, arm)
        sides[side] = {
            seed: [judge(row, n, family, threshold, names) for row in rows.get(seed, [])]
            for seed in seen
        }
        if side == "criterion":
            tokens = seen
    weighted = unlike(
        [each for side in sides.values() for some in side.values() for each in some if each.outside]
    )
    seeds: list[dict[str, Any]] = []
    outside, disagreement = [], []
    for seed in sorted(tokens):
        ours, theirs = sides["criterion"][seed], sides["baseline"][seed]
        out = [each for each in ours if each.outside]
        differ = [each for each in out if each.keep[criterion] != each.keep[baseline]]
        outside += out
        disagreement += differ
        seeds.append(
            {
                "seed": seed,
                "tokens": tokens[seed],
                "outside": len(out),
                "disagreement": len(differ),
                "baseline": count_side(theirs, baseline, criterion, weighted),
                "criterion": count_side(ours, criterion, baseline, weighted),
            }
        )
    summary = _summary(seeds, outside, disagreement, weighted)
    for each in seeds:
        for side in sides:
            del each[side]["_sums"]
    return {"seeds": seeds, "summary": summary}


def _summary(
    seeds: list[dict[str, Any]],
    outside: list[Judged],
    disagreement: list[Judged],
    weighted: bool,
) -> dict[str, Any]:
    """What the seeds say together."""
    summary: dict[str, Any] = {"seeds": len(seeds)}
    for name in ("tokens", "outside", "disagreement"):
        summary[f"{name}_per_seed"] = mean([seed[name] for seed in seeds])
    summary["base"] = {
        name: {
            "tokens": len(tokens),
            "undetermined": sum(not each.clear for each in tokens),
            "increase_rate": share(
                weigh([each for each in tokens if each.up], weighted),
                weigh([each for each in tokens if each.clear], weighted),
            ),
        }
        for name, tokens in (("outside", outside), ("disagreement", disagreement))
    }
    for side in ("criterion", "baseline"):
        found = [seed[side] for seed in seeds]
        rates = [each["unsafe_keep_rate"] for each in found if each["_sums"][1]]
        summary[side] = {
            "unsafe_keep_rate": mean(rates),
            "contracting_fraction": share(
                math.fsum(each["_sums"][0] for each in found),
                math.fsum(each["_sums"][1] for each in found),
            ),
        }
    pairs = [
        (seed["criterion"]["unsafe_keep_rate"], seed["baseline"]["unsafe_keep_rate"])
        for seed in seeds
        if seed["criterion"]["_sums"][1] and seed["baseline"]["_sums"][1]
    ]
    lower, higher = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    summary["paired"] = {
        "seeds": len(pairs),
        "lower": lower,
        "tied": len(pairs) - lower - higher,
        "higher": higher,
        "difference": mean([a - b for a, b in pairs]),
        "sign_test_p": _sign_test(lower, higher),
    }
    return summary


def _sign_test(lower: int, higher: int) -> float | None:
    """Exact two-sided binomial test of one half."""
    n = lower + higher
    if not n:
        return None
    extreme = sum(math.comb(n, i) for i in range(min(lower, higher) + 1))
    return min(1.0, extreme / float(2 ** (n - 1)))
