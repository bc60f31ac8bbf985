"""The laws of the probe, on real optimizer steps of tiny models."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deltad.probes import ProbeError, UpdateProbe
from deltad.probes.reading import Pre

from .tiny import (
    FAMILIES,
    LargestTensor,
    Sink,
    backward,
    batch,
    same_bits,
    surrogate,
    tiny,
    weights,
)
from .training import (
    DROPOUT,
    LOOPS,
    Loop,
    Optimizer,
    adamw,
    build,
    expected_rows,
    no_probe,
    reference,
    step,
    step_with,
)

# Every family in a plain step, and every other kind of step in one family or another.
KINDS = [
    pytest.param(family, loop, id=f"{family}-{loop.__name__}")
    for index, loop in enumerate(LOOPS)
    for family in (FAMILIES if index == 0 else [("gemma2", "qwen3")[index % 2]])
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pre_and_post_are_the_policies_before_and_after_the_step(
    family: str, padding: str, temperature: float
) -> None:
    model = tiny(family)
    each = batch(model, padding=padding, temperature=temperature)
    optimizer = adamw(model)
    sink = Sink()
    before = reference(model, each, temperature)
    with UpdateProbe(model, optimizer, sink, temperature=temperature, entropy=True) as probe:
        step(model, optimizer, [each], probe, temperature=temperature)
    after = reference(model, each, temperature)
    (arm, rows), *rest = sink.calls
    assert arm == "actual"
    assert not rest
    for name, values in {
        **expected_rows(before, each, "pre"),
        **expected_rows(after, each, "post"),
    }.items():
        assert rows[name].dtype == np.float32
        np.testing.assert_allclose(rows[name], values, rtol=0, atol=1e-5, err_msg=name)
    assert np.abs(sink.deltas()).max() > 1e-2
    assert probe.readout_metadata["verified"] is True
    assert probe.readout_metadata["forward"] == "training"


@pytest.mark.parametrize(("family", "loop"), KINDS)
def test_weights_are_bit_identical_with_and_without_the_probe(family: str, loop: Loop) -> None:
    results = []
    for probed in (False, True):
        model = build(family)
        batches = [batch(model, seed=seed, padding="left") for seed in range(2)]
        optimizer = adamw(model)
        torch.manual_seed(5)
        sink = Sink()
        with (UpdateProbe if probed else no_probe)(model, optimizer, sink) as probe:
            for _ in range(3):
                loop(model, optimizer, batches, probe)
        assert len(sink.calls) == (6 if probed else 0)
        results.append((weights(model), torch.get_rng_state(), optimizer.state_dict()))
    (plain_weights, plain_random, plain_state), (probed_weights, random, state) = results
    assert same_bits(plain_weights, probed_weights)
    assert torch.equal(plain_random, random)
    for key, values in plain_state["state"].items():
        for name, value in values.items():
            assert torch.equal(value, state["state"][key][name])


@pytest.mark.parametrize(("family", "loop"), KINDS)
def test_a_step_of_length_zero_changes_no_token(family: str, loop: Loop) -> None:
    for padding in ("left", "right"):
        model = build(family)
        batches = [batch(model, seed=seed, padding=padding) for seed in range(2)]
        optimizer = adamw(model, lr=0.0)
        sink = Sink()
        with UpdateProbe(model, optimizer, sink) as probe:
            loop(model, optimizer, batches, probe)
        assert np.array_equal(sink.deltas(), np.zeros_like(sink.deltas()))
        assert probe.readout_metadata["forward"] == "training"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    results = []
    for probed in (False, True):
        model = build(family, checkpointing=reentrant)
        batches = [batch(model, seed=seed) for seed in range(2)]
        optimizer = adamw(model)
        torch.manual_seed(5)
        sink = Sink()
        with (UpdateProbe if probed else no_probe)(model, optimizer, sink) as probe:
            for _ in range(2):
                step(model, optimizer, batches, probe)
        results.append(weights(model))
    assert same_bits(*results)
    assert len(sink.calls) == 4

    optimizer = adamw(model, lr=0.0)
    still = Sink()
    with UpdateProbe(model, optimizer, still) as probe:
        step(model, optimizer, batches, probe)
    assert not still.deltas().any()


@pytest.mark.parametrize("pre", ["training", "matching"])
def test_pre_of_the_next_step_is_post_of_this_one(pre: Pre) -> None:
    model = tiny("qwen3")
    batches = [batch(model, seed=seed) for seed in range(2)]
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, pre=pre, entropy=True) as probe:
        for _ in range(3):
            step(model, optimizer, batches, probe)
    for (_, now), (_, after) in zip(sink.calls[:-2], sink.calls[2:], strict=True):
        for name in ("{}_logprob", "topk_{}_logprobs", "{}_collision", "{}_entropy"):
            np.testing.assert_array_equal(now[name.format("post")], after[name.format("pre")])


def test_matching_agrees_with_training_up_to_rounding() -> None:
    columns = {}
    for pre in ("training", "matching"):
        model = tiny("llama", **DROPOUT)
        each = batch(model)
        optimizer = adamw(model)
        sink = Sink()
        torch.manual_seed(3)
        with UpdateProbe(model, optimizer, sink, pre=pre) as probe:
            step(model, optimizer, [each], probe)
        assert probe.readout_metadata["forward"] == pre
        columns[pre] = sink.column("post_logprob")
    np.testing.assert_allclose(columns["training"], columns["matching"], atol=1e-4)


def test_no_whole_matrix_of_logits_in_the_probes_own_forward() -> None:
    model = tiny("gemma2", vocab_size=1024)
    each = batch(model, rows=6, length=40)
    size = int(each.tokens.response_mask.sum())
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, token_chunk=64, vocab_chunk=128) as probe:
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        with LargestTensor() as largest:
            optimizer.step()
    # Attention and embeddings are far smaller than that here.
    assert largest.elements < size * 1024 / 4
    assert len(sink.column("step")) == size


def hook_tables(model: Any, optimizer: Optimizer) -> list[list[Any]]:
    tables = [
        list(getattr(part, table).items())
        for part in model.modules()
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    ]
    return [
        *tables,
        list(optimizer._optimizer_step_post_hooks.items()),
        list(optimizer._optimizer_step_pre_hooks.items()),
    ]


@pytest.mark.parametrize("where", ["before", "forward", "backward", "step", "record"])
def test_an_exception_leaves_no_hook_and_passes(where: str) -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu")
    fired = []
    model.register_forward_hook(lambda *_: fired.append(1))
    optimizer.register_step_post_hook(lambda *_: fired.append(2))
    before = hook_tables(model, optimizer)

    def record(arm: str, rows: Any) -> None:
        raise ZeroDivisionError("record")

    probe = UpdateProbe(model, optimizer, record, scaler=scaler)

    def fail(at: str) -> None:
        if where == at:
            raise ZeroDivisionError(at)

    with pytest.raises(ZeroDivisionError, match=where), probe:  # noqa: PT012
        fail("before")
        probe.expect(each.tokens)
        fail("forward")
        loss = surrogate(model(**each.inputs).logits, each)
        fail("backward")
        backward(loss)
        fail("step")
        optimizer.step()
    assert hook_tables(model, optimizer) == before
    assert "step" not in vars(scaler)
    assert probe.pending == ()
    fired.clear()
    step(model, optimizer, [each])
    assert fired == [1, 2]


def test_the_probe_can_be_entered_again() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    probe = UpdateProbe(model, optimizer, sink)
    for _ in range(2):
        with probe:
            step(model, optimizer, [each], probe)
    assert [set(rows["step"]) for _, rows in sink.calls] == [{0}, {1}]
    with probe, pytest.raises(ProbeError, match="already in place"):
        probe.__enter__()


def test_steps_without_expectation_are_counted_and_not_recorded() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        step(model, optimizer, [each])
        step(model, optimizer, [each], probe)
        step(model, optimizer, [each])
    assert probe.step == 3
    assert set(sink.column("step")) == {1}


def test_lbfgs_reads_the_first_evaluation_of_the_closure() -> None:
    def train(sink: Sink | None) -> Any:
        model = tiny("llama")
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = surrogate(model(**each.inputs).logits, each)
            backward(loss)
            return loss

        probe = None if sink is None else UpdateProbe(model, optimizer, sink)
        with probe or nullcontext():
            for _ in range(2):
                if probe is not None:
                    probe.expect(each.tokens)
                step_with(optimizer, closure)
        return model

    start = tiny("llama")
    each = batch(start)
    sink = Sink()
    assert same_bits(weights(train(None)), weights(train(sink)))
    first, second = (rows for _, rows in sink.calls)
    expected = expected_rows(reference(start, each), each, "pre")
    np.testing.assert_allclose(first["pre_logprob"], expected["pre_logprob"], atol=1e-5)
    np.testing.assert_array_equal(first["post_logprob"], second["pre_logprob"])


def test_expect_within_a_step_is_refused() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    probe = UpdateProbe(model, optimizer, Sink())

    def closure() -> Tensor:
        probe.expect(each.tokens)
        return torch.zeros(())

    with probe, pytest.raises(ProbeError, match="within optimizer"):
        step_with(optimizer, closure)


def overflow(model: Any) -> None:
    next(model.parameters()).grad.fill_(torch.inf)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skips", [[1], [0, 1], [0, 2]])
def test_a_step_that_the_scaler_skips_is_dropped_and_counted(skips: list[int], fused: bool) -> None:
    results = []
    for probed in (False, True):
        model = tiny("llama")
        each = batch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        sink = Sink()
        with (UpdateProbe if probed else no_probe)(model, optimizer, sink, scaler=scaler) as probe:
            for index in range(3):
                optimizer.zero_grad()
                if probe is not None:
                    probe.expect(each.tokens)
                backward(scaler.scale(surrogate(model(**each.inputs).logits, each)))
                if index in skips:
                    overflow(model)
                scaler.step(optimizer)
                scaler.update()
        results.append(weights(model))
        assert scaler.get_scale() == 4.0 / 2 ** len(skips)
        assert "step" not in vars(scaler)
    assert same_bits(*results)
    size = int(each.tokens.response_mask.sum())
    assert probe is not None
    assert probe.dropped_steps == len(skips)
    assert probe.dropped_tokens == size * len(skips)
    assert len(sink.calls) == 3 - len(skips)
    np.testing.assert_array_equal(np.unique(sink.column("step")), np.arange(3 - len(skips)))
    assert (np.abs(sink.column("post_logprob") - sink.column("pre_logprob")) > 0).any()


def test_float16_autocast_asks_for_the_scaler() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        with (
            torch.autocast("cpu", torch.float16),
            pytest.raises(ProbeError, match="give the GradScaler as `scaler`"),
        ):
            model(**each.inputs)
        probe.discard()


def test_a_forward_that_never_came() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="the forward of the `expect` before never came"):
            probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="ran before the forward that `expect` announced"):
            optimizer.step()
        probe.discard()
    with (
        pytest.raises(ProbeError, match="forward of the last `expect` never came"),
        UpdateProbe(model, optimizer, Sink()) as probe,
    ):
        probe.expect(each.tokens)


def test_a_step_that_never_came() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    probe = UpdateProbe(model, optimizer, Sink())
    with pytest.raises(ProbeError, match="1 micro-batches were read and no opt"), probe:  # noqa: PT012
        probe.expect(each.tokens)
        model(**each.inputs)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        model(**each.inputs)
        probe.discard()
    with pytest.raises(ProbeError, match="for use within the probe's block"):
        probe.expect(each.tokens)
