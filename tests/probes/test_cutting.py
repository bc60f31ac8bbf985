"""The cut forward gives what the whole one gives, and a null update nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltad.probes import ResponseTokens, UpdateProbe

from .tiny import VOCAB, Batch, Sink, batch, same_bits, tiny, weights
from .training import adamw, step

EXACT = 1e-6  # nats
NEAR_ALL: dict[str, Any] = {"keep": "near", "near": 0.05}


def grouped(model: Any, *, padding: str = "none", groups: int = 2, seed: int = 0) -> Batch:
    """Three responses to each prompt, of different lengths; prompts padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response, of_one = 9, 14, 3
    rows = groups * of_one
    ids = torch.randint(3, VOCAB, (rows, prompt + response), generator=generator)
    attended = torch.ones_like(ids)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row in range(rows):
        group = row // of_one
        ids[row, :prompt] = ids[group * of_one, :prompt]
        if padding == "left":
            attended[row, : group * 2] = 0
        end = prompt + response - 3 * (row % of_one)
        attended[row, end:] = 0
        mask[row, prompt:end] = True
    ids[attended == 0] = 0
    made = batch(model, seed=seed, rows=rows, length=ids.shape[1])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attended).logits.float()
    noise = torch.randn(logits.shape, generator=generator) * 0.5
    logprobs = (logits + noise).log_softmax(-1).roll(1, 1)
    best = logprobs.topk(made.tokens.top_k, -1)
    tokens = ResponseTokens(
        response_mask=mask,
        advantages=torch.linspace(-1.5, 2.0, rows),
        behavior_logprobs=logprobs.gather(2, ids[..., None])[..., 0],
        topk_ids=best.indices,
        topk_logprobs=best.values,
        sequence=torch.arange(rows),
        group=torch.arange(rows) // of_one,
    )
    return Batch({"input_ids": ids, "attention_mask": attended}, tokens)


def recorded(
    family: str,
    made: Any,
    options: dict[str, Any],
    *,
    lr: float = 1e-2,
    steps: int = 2,
    model: Any = None,
    **model_options: Any,
) -> tuple[Sink, UpdateProbe, Any]:
    """Steps of a fresh model under a probe with these options."""
    model = tiny(family, **model_options) if model is None else model
    each = made(model)
    optimizer = adamw(model, lr)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, **options) as probe:
        for _ in range(steps):
            step(model, optimizer, [each], probe)
    return sink, probe, model


def by_token(sink: Sink) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Rows by step, sequence and position."""
    columns = {name: sink.column(name) for name in sink.calls[0][1]}
    keys = zip(columns["step"], columns["sequence"], columns["position"], strict=True)
    return {
        tuple(int(part) for part in key): {name: values[at] for name, values in columns.items()}
        for at, key in enumerate(keys)
    }


def divergence(row: dict[str, Any], when: str) -> float:
    """KL of the top-K support, written out."""
    mu = row["topk_behavior_logprobs"].astype(np.float64)
    pi = row[f"topk_{when}_logprobs"].astype(np.float64)
    if row["token_id"] not in row["topk_ids"].tolist():
        mu = np.append(mu, np.float64(row["behavior_logprob"]))
        pi = np.append(pi, np.float64(row[f"{when}_logprob"]))
    tails = [1 - np.exp(each).sum() for each in (mu, pi)]
    return float((np.exp(mu) * (mu - pi)).sum() + tails[0] * np.log(tails[0] / tails[1]))


def assert_agree(cut: Sink, whole: Sink) -> None:
    """Rows of the cut reading are those of the whole one, D to 1e-6 nats."""
    every = by_token(whole)
    for key, row in by_token(cut).items():
        for name, value in row.items():
            # Far down a log-prob of -20 has no more digits in float32.
            np.testing.assert_allclose(value, every[key][name], EXACT, EXACT, err_msg=name)
        for when in ("pre", "post"):
            assert divergence(row, when) == pytest.approx(divergence(every[key], when), abs=EXACT)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 4}),
    "granite": ("granite", {"logits_scaling": 2.0}),
    "sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "eager": ("llama", {"attn_implementation": "eager"}),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cut_forward_gives_what_the_whole_one_gives(
    variant: str, padding: str, shared: bool
) -> None:
    family, options = VARIANTS[variant]
    whole, _, trained = recorded(family, lambda m: grouped(m, padding=padding), {}, **options)
    cut, probe, same = recorded(
        family,
        lambda m: grouped(m, padding=padding),
        {**NEAR_ALL, "share_prompts": shared, "pre": "training", "tail": "head"},
        **options,
    )
    assert same_bits(weights(trained), weights(same))
    said = probe.readout_metadata["cut"]
    assert said["forward"] == "cut"
    assert said["prompts"] == ("shared" if shared else "each")
    assert said["rms"] < EXACT
    assert 0 < len(cut.column("step")) < len(whole.column("step"))
    assert_agree(cut, whole)
    expected = [key for key, row in by_token(whole).items() if divergence(row, "pre") > 0.05]
    assert sorted(by_token(cut)) == sorted(expected)
