"""Where the hidden states of a training forward are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltad.probes import ProbeError, UpdateProbe

from .tiny import (
    Sink,
    backward,
    batch,
    surrogate,
    tiny,
)
from .training import (
    Plain,
    adamw,
    expected_rows,
    reference,
    step,
)


@pytest.mark.parametrize("keep", [1, 6, 10, "indices", "rows", "mask"])
def test_logits_to_keep(keep: Any) -> None:
    model = tiny("llama")
    each = batch(model, length=10)
    b, j = each.tokens.where()
    if keep == "indices":
        call = torch.arange(2, 10)
    elif keep == "rows":
        call = torch.arange(1, 10).expand(3, -1).contiguous()
    elif keep == "mask":
        call = torch.zeros(3, 10, dtype=torch.bool)
        call[b, j - 1] = True
    else:
        call = keep
    sinks = [Sink(), Sink()]
    optimizer = adamw(model, lr=0.0)
    with UpdateProbe(model, optimizer, sinks[0]) as probe:
        step(model, optimizer, [each], probe)
    with UpdateProbe(model, optimizer, sinks[1]) as probe:
        probe.expect(each.tokens)
        if keep in (1, 6):
            with pytest.raises(ProbeError, match="logits_to_keep leaves out position"):
                model(**each.inputs, logits_to_keep=call)
            probe.discard()
            return
        out = model(**each.inputs, logits_to_keep=call).logits
        backward(out.square().sum())
        optimizer.step()
    assert probe.readout_metadata["verified"] is True
    for name in ("pre_logprob", "topk_pre_logprobs", "post_logprob"):
        np.testing.assert_allclose(sinks[0].column(name), sinks[1].column(name), atol=1e-6)
    assert not sinks[1].deltas().any()


def test_a_positional_call_with_labels() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        probe.expect(each.tokens)
        backward(model(each.ids, each.inputs["attention_mask"], labels=each.ids).loss)
        optimizer.step()
    assert len(sink.column("step")) == int(each.tokens.response_mask.sum())
    assert not sink.deltas().any()


def fuse(model: Any) -> None:
    """Let the model give log-probs in place of logits, as trainers with fused heads do."""

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = model.model(input_ids=input_ids, attention_mask=attention_mask)[0]
        logits = hidden.float() @ model.lm_head.weight.T  # the head itself is never called
        chosen = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None])
        return type("Fused", (), {"log_probs": chosen[..., 0], "loss": -chosen.mean()})()

    model.forward = forward


def test_a_fused_head_is_read_from_the_body() -> None:
    model = tiny("llama", attention_dropout=0.2)
    each = batch(model)
    before = reference(model.eval(), each)
    fuse(model)
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, entropy=True) as probe:
        probe.expect(each.tokens)
        backward(model(**each.inputs).loss)
        optimizer.step()
    assert probe.readout_metadata["forward"] == "training"
    assert probe.readout_metadata["verified"] is False
    expected = expected_rows(before, each, "pre")
    np.testing.assert_allclose(sink.column("pre_logprob"), expected["pre_logprob"], atol=1e-5)
    still = Sink()
    model.train()
    optimizer = adamw(model, lr=0.0)
    with UpdateProbe(model, optimizer, still) as probe:
        probe.expect(each.tokens)
        backward(model(**each.inputs).loss)
        optimizer.step()
    assert not still.deltas().any()


def test_a_body_called_alone_is_held_against_the_models_logits() -> None:
    model = tiny("gemma2")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        backward(model.model(**each.inputs).last_hidden_state.square().sum())
        optimizer.step()
        assert probe.readout_metadata["verified"] is True
    with UpdateProbe(model, optimizer, Sink(), softcap=50.0) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="the model does something to its logits"):
            model.model(**each.inputs)
        probe.discard()


def test_a_head_called_twice_is_read_from_the_body() -> None:
    model = tiny("llama")
    each = batch(model)
    original = model.forward

    def forward(**inputs: Any) -> Any:
        output = original(**inputs)
        model.lm_head(torch.zeros(1, 32))
        return output

    model.forward = forward
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        step(model, optimizer, [each], probe)
    assert not sink.deltas().any()


def test_other_forwards_between_are_not_taken_for_the_one_announced() -> None:
    model = tiny("llama")
    batches = [batch(model, seed=seed) for seed in range(2)]
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        model(**batches[1].inputs)
        probe.expect(batches[0].tokens)
        backward(surrogate(model(**batches[0].inputs).logits, batches[0]))
        model(**batches[1].inputs)
        optimizer.step()
    np.testing.assert_array_equal(
        sink.column("token_id"), batches[0].ids[batches[0].tokens.response_mask]
    )
    assert not sink.deltas().any()


def test_a_forward_that_failed_can_be_made_again() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    failing = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with UpdateProbe(model, optimizer, sink) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ZeroDivisionError):
            model(**each.inputs)
        failing.remove()
        backward(surrogate(model(**each.inputs).logits, each))
        optimizer.step()
    assert len(sink.column("step")) == int(each.tokens.response_mask.sum())
    assert not sink.deltas().any()


def test_positions_that_the_model_adds_are_noticed() -> None:
    class Prompted(Plain):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            virtual = torch.zeros(input_ids.shape[0], 2, dtype=torch.long)
            return super().forward(torch.cat([virtual, input_ids], 1))

    model = Prompted()
    each = batch(Plain())
    with UpdateProbe(model, adamw(model), Sink(), head=model.out, vocab_size=96) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="hidden states at 36 positions, expected 30"):
            model(**each.inputs)
        probe.discard()


def test_a_checkpoint_that_is_recomputed_is_not_taken_for_the_forward_announced() -> None:
    model = tiny("llama", attention_dropout=0.2)
    batches = [batch(model, seed=seed) for seed in range(2)]
    optimizer = adamw(model, lr=0.0)
    sink = Sink()

    # The reentrant kind runs the whole forward again; the other stops where it has enough.
    zero = torch.zeros((), requires_grad=True)

    def run(zero: Tensor, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids, attention_mask=attention_mask).logits
        return logits + zero

    with UpdateProbe(model, optimizer, sink) as probe:
        for each, following in zip(batches, [batches[1], None], strict=True):
            if each is batches[0]:
                probe.expect(each.tokens)
            inputs = (zero, each.ids, each.inputs["attention_mask"])
            logits = checkpoint(run, *inputs, use_reentrant=True)
            if following is not None:
                probe.expect(following.tokens)
            backward(surrogate(logits, each))
        optimizer.step()
    expected = np.concatenate([each.ids[each.tokens.response_mask] for each in batches])
    np.testing.assert_array_equal(sink.column("token_id"), expected)
    assert not sink.deltas().any()
