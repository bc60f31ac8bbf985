"""The bound on the error of ΔD against a float64 head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltad.divergence import DIVERGENCES
from deltad.probes import ProbeError, Readout
from deltad.probes.noise import delta_d_noise
from deltad.probes.readout import read_logits, readout
from deltad.probes.rows import Rows
from deltad.support import topk_support

Array = np.ndarray[Any, Any]

TOKENS, HIDDEN, VOCAB, TOP_K = 600, 96, 2000, 12


class Step:
    """Hidden states and head before and after a small step, and rows of a behavior policy."""

    def __init__(self, dtype: torch.dtype, *, peaked: float = 3.0, size: float = 1e-3) -> None:
        generator = torch.Generator().manual_seed(7)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        hidden, weight = noise(TOKENS, HIDDEN), noise(VOCAB, HIDDEN) * peaked / HIDDEN**0.5
        hidden[:, :3] *= 8  # as language models have them
        moved = hidden + size * noise(TOKENS, HIDDEN), weight * (1 + size * noise(VOCAB, HIDDEN))
        self.before = hidden.to(dtype), weight.to(dtype)
        self.after = moved[0].to(dtype), moved[1].to(dtype)
        behavior = (hidden @ weight.T + 0.3 * noise(TOKENS, VOCAB)).double().log_softmax(1)
        listed, self.ids = behavior.topk(TOP_K, 1)
        sampled = torch.multinomial(behavior.exp(), 1, generator=generator)
        self.ids = torch.cat([self.ids, sampled], 1)
        self.rows: Rows = {
            "topk_ids": self.ids[:, :-1].numpy().astype(np.int32),
            "topk_behavior_logprobs": listed.numpy().astype(np.float32),
            "token_id": sampled[:, 0].numpy().astype(np.int32),
            "behavior_logprob": behavior.gather(1, sampled)[:, 0].numpy().astype(np.float32),
        }

    def divergence(self, logprobs: Array, family: str) -> Array:
        rows = self.rows
        support = topk_support(
            rows["topk_ids"],
            rows["topk_behavior_logprobs"].astype(np.float64),
            logprobs[:, :-1],
            rows["token_id"],
            rows["behavior_logprob"].astype(np.float64),
            logprobs[:, -1],
            vocab_size=VOCAB,
            check=False,
        )
        found: Array = np.asarray(DIVERGENCES[family].value(support))
        return found

    def errors(self, pre: Readout, post: Readout, family: str) -> Array:
        """|ΔD of the stored columns − ΔD of a float64 head|."""
        deltas = []
        for read, (hidden, weight) in ((pre, self.before), (post, self.after)):
            stored = read.logprobs.numpy().astype(np.float32).astype(np.float64)
            logits = hidden.double() @ weight.double().T
            exact = logits.log_softmax(1).gather(1, self.ids).numpy()
            deltas.append(self.divergence(stored, family) - self.divergence(exact, family))
        found: Array = np.abs(deltas[1] - deltas[0])
        return found


def tiled(hidden: Tensor, weight: Tensor, ids: Tensor) -> Readout:
    return readout(hidden, weight, ids, vocab_chunk=512)


def hybrid(hidden: Tensor, weight: Tensor, ids: Tensor) -> Readout:
    return read_logits(hidden, weight, hidden @ weight.T, ids)


@pytest.mark.parametrize("family", DIVERGENCES)
@pytest.mark.parametrize("peaked", [1.0, 3.0])
@pytest.mark.parametrize(
    ("dtype", "read_by"),
    [
        (torch.float32, tiled),
        (torch.float32, hybrid),
        (torch.bfloat16, tiled),
        (torch.bfloat16, hybrid),
        (torch.float64, tiled),
    ],
)
def test_bounds_the_error_and_is_not_far_above_it(
    dtype: torch.dtype,
    read_by: Callable[[Tensor, Tensor, Tensor], Readout],
    peaked: float,
    family: str,
) -> None:
    step = Step(dtype, peaked=peaked)
    pre, post = read_by(*step.before, step.ids), read_by(*step.after, step.ids)
    noise = delta_d_noise(step.rows, pre, post, family, vocab_size=VOCAB)
    errors = step.errors(pre, post, family)
    assert noise.dtype == np.float64
    assert (noise > 0).all()
    assert (errors <= noise).mean() >= 0.99
    assert np.median(noise) <= 30 * np.median(errors)


def test_a_sure_token_whose_tail_float32_cannot_tell() -> None:
    """1 − Σ π of the stored columns is all rounding; the tail of μ is not."""
    step = Step(torch.float32, peaked=9.0)
    pre, post = tiled(*step.before, step.ids), tiled(*step.after, step.ids)
    noise = delta_d_noise(step.rows, pre, post, vocab_size=VOCAB)
    errors = step.errors(pre, post, "kl")
    tails = 1 - np.exp(pre.logprobs.numpy()[:, :-1]).sum(1)
    assert (tails < 1e-6).mean() > 0.1
    assert (errors <= noise).mean() >= 0.99
    assert (errors[tails < 1e-6] <= noise[tails < 1e-6]).mean() >= 0.98


@pytest.mark.parametrize("family", DIVERGENCES)
def test_grows_with_the_error_of_a_readout(family: str) -> None:
    step = Step(torch.float32)
    pre, post = tiled(*step.before, step.ids), tiled(*step.after, step.ids)
    assert post.error is not None
    worse = replace(post, error=replace(post.error, logit=post.error.logit * 100))
    assert (
        delta_d_noise(step.rows, pre, worse, family) > delta_d_noise(step.rows, pre, post, family)
    ).all()


def test_is_not_known_where_a_readout_does_not_know_its_error() -> None:
    step = Step(torch.float32)
    read = tiled(*step.before, step.ids)
    assert np.isnan(delta_d_noise(step.rows, read, replace(read, error=None))).all()


def test_no_rows() -> None:
    step = Step(torch.float32)
    none = tiled(step.before[0][:0], step.before[1], step.ids[:0])
    rows = {name: values[:0] for name, values in step.rows.items()}
    assert delta_d_noise(rows, none, none).shape == (0,)


def test_refuses_other_rows_and_divergences() -> None:
    step = Step(torch.float32)
    read = tiled(*step.before, step.ids)
    less = tiled(step.before[0][1:], step.before[1], step.ids[1:])
    with pytest.raises(ProbeError, match="`post` must be a readout of 600 rows at 13 ids"):
        delta_d_noise(step.rows, read, less)
    with pytest.raises(ProbeError, match="must be one of kl, tv, got 'js'"):
        delta_d_noise(step.rows, read, read, "js")


def test_padding_and_rows_without_a_list_have_a_bound_too() -> None:
    step = Step(torch.bfloat16)
    rows, ids = dict(step.rows), step.ids.clone()
    rows["topk_ids"] = rows["topk_ids"].copy()
    rows["topk_ids"][:, 5:] = -1
    rows["topk_behavior_logprobs"] = np.where(
        rows["topk_ids"] < 0, np.float32(np.nan), rows["topk_behavior_logprobs"]
    )
    ids[:, 5:-1] = -1
    step.rows, step.ids = rows, ids
    pre, post = (tiled(*each, ids) for each in (step.before, step.after))
    assert np.isfinite(delta_d_noise(rows, pre, post, vocab_size=VOCAB)).all()

    for name in ("topk_ids", "topk_behavior_logprobs"):
        rows[name] = rows[name][:, :0]
    pre, post = (tiled(*each, ids[:, -1:]) for each in (step.before, step.after))
    assert (delta_d_noise(rows, pre, post, vocab_size=VOCAB) > 0).all()
