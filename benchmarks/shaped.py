"""Synthetic rows shaped like those of a large language model, made fast with NumPy.

Peaked top-K distributions over the vocabulary of Qwen3, an engine's mismatch that puts about
1.4 % of the tokens outside δ = 0.15 and an update that moves them by a tenth of it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Rows = dict[str, NDArray[Any]]

TOP_K: Final = 20
VOCAB: Final = 151_936
RESPONSE: Final = 256
_HEAVY: Final = 0.05  # tokens on which engine and trainer disagree


def shaped_rows(count: int, seed: int, *, top_k: int = TOP_K, vocab: int = VOCAB) -> Rows:
    """Make the required columns of a dump.

    Parameters
    ----------
    count : int
        Rows.
    seed : int
        Of the random numbers.
    top_k, vocab : int
        K and n.

    Returns
    -------
    dict of str to array
        As `DumpWriter.append` takes them; three tokens in a hundred were sampled outside the
        top-K.
    """
    draw = np.random.default_rng(seed)
    sharpness = np.exp(draw.normal(1.2, 0.9, count))[:, None]
    logits = -sharpness * np.log1p(np.arange(top_k)) + draw.normal(0, 0.3, (count, top_k))
    logits = -np.sort(-logits, axis=1)
    tail = np.exp(draw.normal(-6, 2, count)).clip(1e-9, 0.5)
    mass = np.exp(logits - logits.max(axis=1, keepdims=True))
    mass *= ((1 - tail) / mass.sum(axis=1))[:, None]
    behavior = np.log(np.maximum(mass, 1e-12))
    scale = np.where(draw.random(count) < _HEAVY, 8.0, 1.0) * np.exp(draw.normal(-2.6, 0.7, count))
    before, tail_before = _moved(behavior, tail, scale, draw)
    after, tail_after = _moved(before, tail_before, scale / 10, draw)
    stride = 7919 * draw.integers(1, 9, count)
    ids = (draw.integers(0, vocab, count)[:, None] + stride[:, None] * np.arange(top_k)) % vocab
    sampled = (np.cumsum(mass, axis=1) < draw.random(count)[:, None]).sum(axis=1)
    listed = sampled < top_k
    rows, slot = np.arange(count), np.minimum(sampled, top_k - 1)
    lists = {
        "behavior": (behavior, tail),
        "pre": (before, tail_before),
        "post": (after, tail_after),
    }
    scalars = {
        name: np.where(listed, logprobs[rows, slot], np.log(rest) - 2)
        for name, (logprobs, rest) in lists.items()
    }
    return {
        "step": np.zeros(count, np.int32),
        "group": (rows // (8 * RESPONSE)).astype(np.int32),
        "sequence": (rows // RESPONSE).astype(np.int32),
        "position": (rows % RESPONSE).astype(np.int32),
        "token_id": np.where(listed, ids[rows, slot], (ids[:, 0] + 1) % vocab).astype(np.int32),
        "advantage": draw.normal(0, 1, count).astype(np.float32),
        "in_loss": np.ones(count, np.bool_),
        **{f"{name}_logprob": scalars[name].astype(np.float32) for name in lists},
        "topk_ids": ids.astype(np.int32),
        **{f"topk_{name}_logprobs": lists[name][0].astype(np.float32) for name in lists},
    }


def _moved(
    logprobs: NDArray[np.float64],
    tail: NDArray[np.float64],
    scale: NDArray[np.float64],
    draw: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log-probs and tail after random moves of the logits, normalized."""
    moved = logprobs + draw.normal(0, 1, logprobs.shape) * scale[:, None]
    rest = np.log(tail) + draw.normal(0, 1, len(tail)) * scale
    normalizer = np.log(np.exp(moved).sum(axis=1) + np.exp(rest))
    return moved - normalizer[:, None], np.exp(rest - normalizer)
