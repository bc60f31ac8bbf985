"""Random dumps in every corner that the format has, for whoever counts them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from deltad.dumps import READINGS, Dump
from deltad.masks import Rule
from tests.analysis.bruteforce import Row, Weigh, log_ratio_of
from tests.dumps.factory import DERIVED, OPTIONAL, Columns, edit, make_dump, part_files

ARMS = ("none", "ratio", "predictive-kl-aggregated", "zero-step")
KEYS = ("step", "group", "sequence", "position", "weight")

FAR = Rule(
    "far", region=lambda tokens: abs(tokens.log_ratio) + tokens["pre_entropy"], push="ratio",
    needs=("pre_entropy",), threshold=0.9,
)  # fmt: skip
"""A user's rule."""


def far(row: Row) -> float:
    """What that rule says of a row."""
    outside = abs(log_ratio_of(row)) + row["pre_entropy"] > 0.9
    return float(not (outside and row["advantage"] * math.expm1(log_ratio_of(row)) > 0))


OWN: dict[str, Weigh] = {FAR.name: far}

WORDS = ("7", " 12", "Ġword", "\n", "+=", "<eos>", "", "x1")
CLASSES = ("digit", "digit", "word", "whitespace", "punctuation", "special", "unknown", "other")
"""Texts of tokens, by id in turn, and their classes."""

EXTREMES = {
    "a ratio of e^30": ([-30.0], [-1e-4], [-2.0]),
    "a ratio of e^-30": ([0.0], [-30.0], [-29.0]),
    "log-probs a little above 0": ([9e-5], [8e-5], [-0.5]),
    "denormal log-probs": ([-1e-42], [-0.0], [-1e-42]),
    "no mass left in either tail": ([math.log(0.5)] * 2, [math.log(0.5)] * 2, [-0.5, -1.2]),
    "no policy mass in the tail": ([-1.0, -1.0], [math.log(0.6), math.log(0.4)], [-0.7, -0.8]),
    "no behavior mass in the tail": ([math.log(0.5)] * 2, [-2.0, -3.0], [-2.5, -1.0]),
    "an impossible id in the list": ([-0.3, -math.inf], [-0.9, -1.1], [-0.8, -1.3]),
    "a policy that gives an id nothing": ([-0.3, -3.0], [-0.2, -3e38], [-0.2, -90.0]),
    "a mass a little above 1": ([math.log(0.50003)] * 2, [math.log(0.50002)] * 2, [-1.0, -1.0]),
}
"""log μ, log π before and after of a list whose first id is the sampled one."""


def roughen(arm: str, seed: int, columns: Columns) -> None:
    """Ties, extremes, zeros of either sign, denormals, updates that do nothing, noise bounds."""
    count, top_k = columns["topk_ids"].shape
    draw = np.random.default_rng([seed % 2**32, count, top_k])
    rows = np.arange(count)
    for place, extreme in enumerate(EXTREMES.values()):
        at = 3 * place
        if at < count and len(extreme[0]) <= min(top_k, columns["_log_mu"].shape[1] - 1):
            columns["topk_ids"][at] = [*range(len(extreme[0])), *[-1] * (top_k - len(extreme[0]))]
            columns["token_id"][at] = 0
            for name, values in zip(("behavior", "pre", "post"), extreme, strict=True):
                columns[f"topk_{name}_logprobs"][at, : len(values)] = values
                columns[f"{name}_logprob"][at] = values[0]
            square = sum(math.exp(min(0.0, value)) ** 2 for value in extreme[1])
            columns["pre_collision"][at] = min(1.0, square)
    still = draw.random(count) < 0.1
    for name in ("post_logprob", "topk_post_logprobs"):
        columns[name][still] = columns[name.replace("post", "pre")][still]
    source = np.where(draw.random(count) < 0.3, draw.integers(0, max(1, count), count), rows)
    for name in columns.keys() - set(KEYS):
        columns[name] = columns[name][source]
    special = np.array([0.0, -0.0, 1e-42, -1e-42], np.float32)[draw.integers(0, 4, count)]
    columns["advantage"] = np.where(draw.random(count) < 0.2, special, columns["advantage"])
    columns["token"] = np.array([WORDS[k % len(WORDS)] for k in columns["token_id"]], object)
    bounds = np.array([0.0, 0.02, 0.1, math.nan, math.nan])
    columns["delta_d_noise"] = bounds[draw.integers(0, len(bounds), count)]


@st.composite
def dumps(draw: st.DrawFn, *, post: bool = True) -> dict[str, Any]:
    """Arguments of `write`; with `post` False, dumps without the policy after the step too."""
    seeds = draw(st.sampled_from([(0,), (3, 7), (0, 2, 12)]))
    missing = {"weight"} if draw(st.booleans()) else set()
    missing |= {"delta_d_noise"} if draw(st.booleans()) else set()
    derived = draw(st.booleans())
    return {
        "arms": ARMS,
        "seeds": seeds,
        "top_k": draw(st.sampled_from([1, 2, 3, 5, 8, 20])),
        "vocab_size": draw(st.sampled_from([2, 3, 5, 9, 24, 60])),
        "rows": draw(st.sampled_from([1, 20, 45])),
        "rng_seed": draw(st.integers(0, 2**32 - 1)),
        "null_vectors": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "ranks": draw(st.integers(1, 2)),
        "parts": draw(st.integers(1, 2)),
        "empty_seeds": draw(st.sampled_from([(), seeds[:1]])),
        "drift": draw(st.sampled_from([0.3, 1.0, 3.0])),
        "threshold": draw(st.sampled_from([0.0, 0.01, 0.05, 0.15, 0.4])),
        "optional": [name for name in (*OPTIONAL, *DERIVED) if name not in missing],
        "derived": derived,
        "post": post or draw(st.booleans()),
    }


def write(path: Path, *, post: bool = True, **given: Any) -> Dump:
    """Write a dump and open it."""
    run = make_dump(path, change=roughen, **given)
    if not post:
        for file in part_files(run):
            edit(file, _without_post)
    return Dump.open(run)


def _without_post(table: Any) -> Any:
    """A table without the policy after the step and what is derived of it."""
    gone = [*READINGS["post"], "d_post", *(n for n in OPTIONAL if n.endswith("_post"))]
    gone += ["post_collision", "post_entropy", "delta_d_noise"]
    return table.drop_columns([name for name in gone if name in table.column_names])
