"""Samples of a made-up run whose distributions are known over the whole vocabulary.

Unlike the faults that are put into recorded dumps, nothing outside the lists is modelled here:
every fault acts on whole distributions, and the lists are read off afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.doctor import Sample
from deltad.dumps import Metadata

Floats = NDArray[np.float64]
Change = Callable[[Floats], Floats]

LENGTH = 6
RESPONSES = 4


def log_softmax(logits: Floats) -> Floats:
    """Log-probs along the last axis."""
    top = logits.max(axis=-1, keepdims=True)
    shifted = logits - top
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def made_sample(
    *,
    steps: int = 5,
    groups: int = 5,
    vocab_size: int = 60,
    top_k: int = 12,
    update: float = 0.15,
    lag: float = 0.0,
    rng_seed: int = 0,
    behavior: Change = lambda logits: logits,
    policy: Change = lambda logits: logits,
    sampler: Change | None = None,
    metadata: dict[str, Any] | None = None,
    thinned: float | None = None,
) -> Sample:
    """Rows of a chain of updates since one rollout, as a healthy run would store them.

    Parameters
    ----------
    steps, groups : int
        Updates that were measured, prompts a step; four responses of six tokens each.
    vocab_size, top_k : int
        n and K.
    update : float
        Standard deviation of a logit's change by one update; changes add up over the steps.
    lag : float
        Updates by which μ is older still.
    rng_seed : int
        For the generator.
    behavior, policy : callable
        Change the logits of every row, shape (token, vocab), before the log-softmax.
    sampler : callable, optional
        As `behavior`, for what the tokens are sampled from; by default `behavior`.
    metadata : dict, optional
        Of the run.
    thinned : float, optional
        Store only rows whose KL over the whole vocabulary exceeds this.
    """
    rng = np.random.default_rng(rng_seed)
    rows = steps * groups * RESPONSES * LENGTH
    index = np.arange(rows)
    position, sequence = index % LENGTH, index // LENGTH
    group, step = sequence // RESPONSES, 1 + sequence // (RESPONSES * groups)
    scale = rng.uniform(0.5, 3.5, size=(rows, 1))
    logits = rng.normal(size=(rows, vocab_size)) * scale
    # Responses of one prompt share their first state.
    first = np.flatnonzero(position == 0)
    logits[first] = logits[first[(group[first] * RESPONSES)]]
    direction = rng.normal(size=(rows, vocab_size))
    direction[first] = direction[first[(group[first] * RESPONSES)]]
    size = update * rng.lognormal(0.0, 0.7, size=rows)
    size[first] = size[first[(group[first] * RESPONSES)]]
    move = (direction * size[:, None]).astype(np.float64)
    old = behavior(logits - lag * move)
    mu = log_softmax(old)
    pre = log_softmax(policy(logits + step[:, None] * move))
    post = log_softmax(policy(logits + (step[:, None] + 1) * move))
    drawn = mu if sampler is None else log_softmax(sampler(logits))
    chances = np.exp(drawn)
    chances /= chances.sum(axis=1, keepdims=True)
    token = (chances.cumsum(axis=1) < rng.random((rows, 1))).sum(axis=1)
    token = np.minimum(token, vocab_size - 1)
    ids = np.argsort(-mu, axis=1, kind="stable")[:, :top_k]
    columns: dict[str, Any] = {
        "seed": np.zeros(rows, np.int32),
        "step": step.astype(np.int32),
        "group": group.astype(np.int32),
        "sequence": sequence.astype(np.int32),
        "position": position.astype(np.int32),
        "token_id": token.astype(np.int32),
        "advantage": np.where(sequence % RESPONSES == 0, 1.5, -0.5).astype(np.float32),
        "in_loss": np.ones(rows, np.bool_),
        "topk_ids": ids.astype(np.int32),
    }
    for name, logs in (("behavior", mu), ("pre", pre), ("post", post)):
        columns[f"{name}_logprob"] = logs[index, token].astype(np.float32)
        columns[f"topk_{name}_logprobs"] = logs[index[:, None], ids].astype(np.float32)
    stored: dict[str, Any] = {"rule": "all"}
    if thinned is not None:
        with np.errstate(invalid="ignore"):
            gap = np.where(np.isfinite(mu), np.exp(mu) * (mu - pre), 0.0).sum(axis=1)
        columns = {name: values[gap > thinned] for name, values in columns.items()}
        stored = {"rule": "above", "divergence": "kl", "threshold": thinned}
    described = {"behavior": {"precision": "float32"}, "stored": stored, **(metadata or {})}
    return Sample(
        columns,
        Metadata(top_k=top_k, vocab_size=vocab_size, rows_seen=rows, **described),
        in_loss={"none": columns["in_loss"]},
        masks={"none": {"mask": "none"}},
        arm="none",
        run="made",
        stored=len(columns["token_id"]),
        seen=rows,
    )


def nucleus(p: float) -> Change:
    """Top-p: logits outside the smallest set of mass p are −∞."""

    def cut(logits: Floats) -> Floats:
        logs = log_softmax(logits)
        order = np.argsort(-logs, axis=1)
        ranked = np.take_along_axis(np.exp(logs), order, axis=1)
        before = np.take_along_axis(ranked.cumsum(axis=1) - ranked, np.argsort(order, axis=1), 1)
        return np.where(before < p, logits, -np.inf)

    return cut


def moved_rows(distance: int) -> Change:
    """Each row holds the logits of the row `distance` before it in its response."""

    def move(logits: Floats) -> Floats:
        responses = logits.reshape(-1, LENGTH, logits.shape[1])
        return np.roll(responses, distance, axis=1).reshape(logits.shape)

    return move
