"""A forward made again is the same forward, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltad.probes import ProbeError, ResponseTokens, UpdateProbe
from deltad.probes.reading import Pre

from .tiny import (
    Sink,
    backward,
    batch,
    surrogate,
    tiny,
)
from .training import (
    DROPOUT,
    Plain,
    adamw,
    expected_rows,
    no_probe,
    reference,
    step,
)


def test_inputs_that_the_caller_reuses_are_kept_as_they_were() -> None:
    model = tiny("llama")
    batches = [batch(model, seed=seed) for seed in range(2)]
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    ids = torch.empty_like(batches[0].ids)
    with UpdateProbe(model, optimizer, sink) as probe:
        for each in batches:
            ids.copy_(each.ids)
            probe.expect(each.tokens)
            inputs = {**each.inputs, "input_ids": ids}
            backward(surrogate(model(**inputs).logits, each))
        ids.zero_()
        optimizer.step()
    assert not sink.deltas().any()


def test_the_weights_are_read_after_the_step_also_within_autocast() -> None:
    """A cache of casted weights from before the step must not reach post."""
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model, lr=3e-2)
    sink = Sink()
    with (
        torch.autocast("cpu", torch.bfloat16),
        UpdateProbe(model, optimizer, sink, entropy=True) as probe,
    ):
        step(model, optimizer, [each], probe)
    with torch.autocast("cpu", torch.bfloat16):
        after = reference(model, each)
    expected = expected_rows(after, each, "post")["post_logprob"]
    np.testing.assert_allclose(sink.column("post_logprob"), expected, atol=0.05)
    moved = np.abs(sink.column("post_logprob") - sink.column("pre_logprob")).max()
    assert moved > 0.5


def test_the_mode_of_the_training_forward_is_used_and_the_present_one_kept() -> None:
    model = tiny("llama", **DROPOUT)
    each = batch(model)
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        model.train()
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        model.eval()
        optimizer.step()
        assert not any(part.training for part in model.modules())
    assert not sink.deltas().any()


def test_nothing_of_the_callers_state_moves() -> None:
    model = tiny("llama", **DROPOUT)
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    each = batch(model)
    optimizer = adamw(model, lr=0.0)
    with UpdateProbe(model, optimizer, Sink(), pre="matching") as probe:
        probe.expect(each.tokens)
        loss = surrogate(model(**each.inputs).logits, each)
        backward(loss)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        flags = [p.requires_grad for p in model.parameters()]
        random = torch.get_rng_state()
        legacy: Any = np.random.get_state()  # noqa: NPY002
        np_random = legacy[1].copy()
        optimizer.step()
    assert torch.equal(random, torch.get_rng_state())
    legacy = np.random.get_state()  # noqa: NPY002
    np.testing.assert_array_equal(np_random, legacy[1])
    assert flags == [p.requires_grad for p in model.parameters()]
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in grads)
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, grads[name])


def test_gradients_of_the_inputs_are_refused() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        tokens = ResponseTokens(**{**vars(each.tokens), "input_ids": each.ids})
        probe.expect(tokens)
        embedded = model.get_input_embeddings()(each.ids)
        with pytest.raises(ProbeError, match="`inputs_embeds` of the training forward carries"):
            model(inputs_embeds=embedded)
        probe.discard()
        probe.expect(tokens)
        backward(surrogate(model(inputs_embeds=embedded.detach()).logits, each))
        optimizer.step()


def test_a_cache_is_refused() -> None:
    from transformers import DynamicCache

    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="call the model on the whole sequence"):
            model(**each.inputs, cache=DynamicCache())
        probe.discard()


def test_a_forward_that_writes_to_buffers_is_matched_and_its_buffers_are_kept() -> None:
    results = []
    for probed in (False, True):
        model = Plain(state="counts")
        batches = [batch(model, seed=seed) for seed in range(2)]
        optimizer = adamw(model, lr=0.0)
        sink = Sink()
        with (UpdateProbe if probed else no_probe)(
            model, optimizer, sink, head=model.out, vocab_size=96
        ) as probe:
            step(model, optimizer, batches, probe)
            step(model, optimizer, batches, probe)
        results.append(float(model.calls))
    assert results[0] == results[1] == 6
    assert probe is not None
    assert probe.readout_metadata["forward"] == "matching"
    assert not sink.deltas().any()


def test_a_forward_that_cannot_be_made_again_is_refused_or_matched() -> None:
    model = Plain(state="random")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(
        model, optimizer, Sink(), head=model.out, vocab_size=96, pre="training"
    ) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="gives other hidden states"):
            model(**each.inputs)
        probe.discard()


def test_an_exception_in_the_probes_own_forward_leaves_nothing() -> None:
    model = tiny("llama", **DROPOUT)
    model.register_buffer("counter", torch.zeros(3))
    each = batch(model)
    optimizer = adamw(model)
    counter = model.counter
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        failing = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        random = torch.get_rng_state()
        hooks = len(model.lm_head._forward_pre_hooks)
        model.eval()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        failing.remove()
        assert torch.equal(torch.get_rng_state(), random)
        assert len(model.lm_head._forward_pre_hooks) == hooks
        assert not model.lm_head._forward_hooks
        assert model.counter is counter
        assert not model.training
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        # The rows of the step are lost, and the next step is recorded as ever.
        model.train()
        sink = Sink()
        probe.record = sink
        step(model, optimizer, [each], probe)
    assert len(sink.calls) == 1


def test_the_attention_kernels_of_the_training_forward_are_used() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = tiny("llama")
    each = batch(model, rows=2)
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        probe.expect(each.tokens)
        with sdpa_kernel(SDPBackend.MATH):
            backward(surrogate(model(**each.inputs).logits, each))
        allowed: Any = torch.backends.cuda.flash_sdp_enabled
        before = allowed()
        optimizer.step()
        assert allowed() == before
    assert not sink.deltas().any()


def test_a_labels_argument_is_left_out_wherever_it_is_given() -> None:
    seen = []

    class Labelled(Plain):
        def forward(self, input_ids: Tensor, labels: Any = None, logits_to_keep: int = 0) -> Any:
            seen.append(labels is not None)
            return super().forward(input_ids)

    model = Labelled()
    each = batch(Plain())
    optimizer = adamw(model)
    for args, kwargs in (((each.ids, each.ids), {}), ((each.ids,), {"labels": each.ids})):
        seen.clear()
        with UpdateProbe(model, optimizer, Sink(), head=model.out, vocab_size=96) as probe:
            probe.expect(each.tokens)
            backward(surrogate(model(*args, **kwargs).logits, each))
            optimizer.step()
        assert seen == [True, False, False]


def test_gradients_are_on_as_in_the_training_forward() -> None:
    seen = []

    class Telling(Plain):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            seen.append(torch.is_grad_enabled())
            return super().forward(input_ids)

    model = Telling()
    each = batch(Plain())
    optimizer = adamw(model)
    expected: dict[Pre, list[bool]] = {
        "training": [True, True, True],  # in training, tried once, after the step
        "matching": [True, False, False, False],
    }
    for pre, modes in expected.items():
        seen.clear()
        with UpdateProbe(model, optimizer, Sink(), head=model.out, vocab_size=96, pre=pre) as probe:
            step(model, optimizer, [each], probe)
        assert seen == modes
