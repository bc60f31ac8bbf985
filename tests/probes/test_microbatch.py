"""The rows of a micro-batch: what is recorded, refused and decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deltad.masks import rule
from deltad.probes import ProbeError, ResponseTokens, UpdateProbe
from tests import oracle

from .tiny import (
    Batch,
    Sink,
    backward,
    batch,
    surrogate,
    tiny,
)
from .training import (
    adamw,
    changed,
    reference,
    step,
)


def test_the_columns_describe_the_tokens() -> None:
    model = tiny()
    each = batch(model, rows=4, padding="left")
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, step=7) as probe:
        step(model, optimizer, [each], probe)
        step(model, optimizer, [each], probe)
    b, j = each.tokens.where()
    (_, first), (_, second) = sink.calls
    assert set(first["step"]) == {7}
    assert set(second["step"]) == {8}
    np.testing.assert_array_equal(first["sequence"], b)
    np.testing.assert_array_equal(first["group"], b // 2)
    np.testing.assert_array_equal(first["token_id"], each.ids[b, j])
    np.testing.assert_array_equal(first["topk_ids"], each.tokens.topk_ids[b, j])
    np.testing.assert_array_equal(first["advantage"], each.tokens.advantages[b])
    np.testing.assert_array_equal(first["behavior_logprob"], each.tokens.behavior_logprobs[b, j])
    np.testing.assert_array_equal(first["topk_behavior_logprobs"], each.tokens.topk_logprobs[b, j])
    for sequence in range(4):
        mine = first["position"][first["sequence"] == sequence]
        np.testing.assert_array_equal(mine, np.arange(len(mine)))
    assert first["in_loss"].all()
    for name in ("step", "group", "sequence", "position", "token_id", "topk_ids"):
        assert first[name].dtype == np.int32


def test_the_sampled_token_has_one_number_in_entry_and_scalar() -> None:
    model = tiny()
    each = batch(model, top_k=96)
    rounded = each.tokens.behavior_logprobs + 5e-5
    tokens = ResponseTokens(**{**vars(each.tokens), "behavior_logprobs": rounded})
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, vocab_chunk=17) as probe:
        step(model, optimizer, [Batch(each.inputs, tokens)], probe)
    rows = sink.calls[0][1]
    at = (rows["topk_ids"] == rows["token_id"][:, None]).argmax(1)
    for scalar, entries in (
        ("behavior_logprob", "topk_behavior_logprobs"),
        ("pre_logprob", "topk_pre_logprobs"),
        ("post_logprob", "topk_post_logprobs"),
    ):
        picked = rows[entries][np.arange(len(at)), at]
        np.testing.assert_array_equal(rows[scalar].view(np.int32), picked.view(np.int32))


def test_padding_among_the_top_k_stays_padding() -> None:
    model = tiny()
    each = batch(model)
    ids = each.tokens.topk_ids.clone()
    ids[..., -2:] = -1
    logprobs = each.tokens.topk_logprobs.clone()
    logprobs[..., -2:] = 5.0  # whatever an engine leaves there
    tokens = ResponseTokens(**{**vars(each.tokens), "topk_ids": ids, "topk_logprobs": logprobs})
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        step(model, optimizer, [Batch(each.inputs, tokens)], probe)
    rows = sink.calls[0][1]
    assert (rows["topk_ids"][:, -2:] == -1).all()
    for name in ("topk_behavior_logprobs", "topk_pre_logprobs", "topk_post_logprobs"):
        assert np.isnan(rows[name][:, -2:]).all()
        assert np.isfinite(rows[name][:, :-2]).all()


def test_minus_infinity_among_the_behaviors_top_k_is_recorded() -> None:
    model = tiny("llama")
    each = batch(model)
    logprobs = each.tokens.topk_logprobs.clone()
    b, j = each.tokens.where()
    free = (each.tokens.topk_ids[b, j] != each.ids[b, j][:, None]).long().argmax(1)
    logprobs[b, j, free] = -torch.inf
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        step(model, optimizer, [changed(each, topk_logprobs=logprobs)], probe)
    assert np.isneginf(sink.column("topk_behavior_logprobs")).any(1).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_whole_vocabulary_gives_its_divergences(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltad.probes.whole._TOGETHER", 5 * 96)  # five rows at a time
    model = tiny("llama")
    each = batch(model, full=True, temperature=temperature)
    optimizer = adamw(model)
    b, j = each.tokens.where()
    sink = Sink()
    pi = {"pre": reference(model, each, temperature).exp()}
    with UpdateProbe(model, optimizer, sink, temperature=temperature) as probe:
        step(model, optimizer, [each], probe)
    pi["post"] = reference(model, each, temperature).exp()
    assert each.tokens.full_logprobs is not None
    mu = each.tokens.full_logprobs[b, j].exp()
    for row, sampled in enumerate(each.ids[b, j].tolist()):
        for family, divergence in (("kl", oracle.kl), ("tv", oracle.tv)):
            everything = range(96)
            for when in ("pre", "post"):
                found = sink.column(f"full_{family}_{when}")[row]
                whole = divergence(mu[row].tolist(), pi[when][row].tolist(), everything)
                assert found == pytest.approx(whole, abs=1e-6)
            slope = oracle.central_difference(
                divergence, mu[row].tolist(), pi["pre"][row].tolist(), everything, sampled
            )
            found = sink.column(f"full_{family}_direction")[row]
            assert found == pytest.approx(slope, abs=1e-6)


def test_the_full_criterion_decides_while_training() -> None:
    model = tiny("llama")
    each = batch(model, full=True)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        measured = probe.expect(each.tokens)
        model(**each.inputs)
        tokens = measured.criterion_tokens()
        probe.discard()
    kept = rule("predictive-kl-full").keeps(tokens, threshold=0.1)
    expected = ~(
        (measured.rows["full_kl_pre"] > 0.1)
        & (measured.rows["advantage"] * measured.rows["full_kl_direction"] > 0)
    )
    np.testing.assert_array_equal(kept, expected)
    assert not kept.all()


def test_packed_sequences_are_told_apart() -> None:
    model = tiny("llama")
    each = batch(model, rows=1, length=12)
    response = torch.zeros(1, 12, dtype=torch.bool)
    response[0, 2:6] = True
    response[0, 8:12] = True
    sequence = torch.tensor([[0] * 6 + [1] * 6])
    tokens = changed(each, response_mask=response, sequence=sequence, group=sequence).tokens
    optimizer = adamw(model)
    sink = Sink()
    positions = torch.tensor([[*range(6), *range(6)]])
    with UpdateProbe(model, optimizer, sink) as probe:
        probe.expect(tokens)
        backward(model(input_ids=each.ids, position_ids=positions).logits.sum())
        optimizer.step()
    np.testing.assert_array_equal(sink.column("position"), [0, 1, 2, 3, 0, 1, 2, 3])
    np.testing.assert_array_equal(sink.column("sequence"), [0] * 4 + [1] * 4)
    np.testing.assert_array_equal(sink.column("group"), [0] * 4 + [1] * 4)


def test_a_micro_batch_without_response_tokens_gives_no_rows() -> None:
    model = tiny("llama")
    each = batch(model)
    nothing = ResponseTokens(
        **{**vars(each.tokens), "response_mask": torch.zeros_like(each.tokens.response_mask)}
    )
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        optimizer.zero_grad()
        handle = probe.expect(nothing)
        backward(model(**each.inputs).logits.sum())
        assert handle.rows["topk_ids"].shape == (0, 5)
        optimizer.step()
    assert sink.calls == []


def test_rows_are_known_before_backward_and_decide_the_mask() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        handle = probe.expect(each.tokens)
        ready = [handle.ready]
        with pytest.raises(ProbeError, match="once the training forward has been made"):
            _ = handle.rows
        logits = model(**each.inputs).logits
        ready.append(handle.ready)
        assert ready == [False, True]
        assert probe.pending == (handle,)
        pre = {name: values.copy() for name, values in handle.rows.items()}
        keep = pre["pre_logprob"] > np.median(pre["pre_logprob"])
        handle.keep(keep)
        laid = handle.scatter(keep, False)
        backward(surrogate(logits * laid[..., None], each))
        optimizer.step()
    rows = sink.calls[0][1]
    np.testing.assert_array_equal(rows["in_loss"], keep)
    b, j = each.tokens.where()
    np.testing.assert_array_equal(laid[b, j], keep)
    assert int(laid.sum()) == keep.sum()
    for name, values in pre.items():
        if name != "in_loss":
            np.testing.assert_array_equal(rows[name], values)


def at_first(each: Batch, name: str, value: float) -> Batch:
    """Another value at the first response token."""
    b, j = (int(index[0]) for index in each.tokens.where())
    values = getattr(each.tokens, name).clone()
    values[b, j] = value
    return changed(each, **{name: values})


PLACE = "response token at row 0, position 3: "


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: at_first(e, "behavior_logprobs", float("nan")), PLACE),
        (lambda e: at_first(e, "behavior_logprobs", -float("inf")), PLACE),
        (lambda e: at_first(e, "behavior_logprobs", 0.5), PLACE),
        (lambda e: at_first(e, "topk_ids", 7), PLACE),
        (lambda e: at_first(e, "topk_ids", 96), PLACE + "id in `topk_ids` outside the vocab"),
        (lambda e: at_first(e, "topk_ids", -2), PLACE + "id in `topk_ids` outside the vocab"),
        (lambda e: at_first(e, "topk_logprobs", -0.1), PLACE),
        (lambda e: at_first(e, "topk_logprobs", float("nan")), PLACE),
        (
            lambda e: changed(e, advantages=torch.full((3,), torch.nan)),
            PLACE + "`advantages` is not finite",
        ),
        (
            lambda e: Batch({**e.inputs, "attention_mask": torch.zeros(3, 10).long()}, e.tokens),
            PLACE + "a response token is masked out",
        ),
        (
            lambda e: Batch({"input_ids": e.ids[:, :-1]}, e.tokens),
            r"got input_ids of shape \(3, 9\), expected \(3, 10\)",
        ),
        (
            lambda e: changed(e, full_logprobs=torch.zeros(3, 10, 95)),
            "`full_logprobs` must hold the 96 ids of the vocabulary, got 95",
        ),
        (
            lambda e: changed(e, full_logprobs=torch.full((3, 10, 96), -9.0)),
            PLACE + "the probabilities in `full_logprobs` must add up to 1",
        ),
        (
            lambda e: changed(e, full_logprobs=torch.zeros(3, 10, 96).log_softmax(-1)),
            PLACE + "`full_logprobs` and `behavior_logprobs` differ",
        ),
        (
            lambda e: changed(e, input_ids=e.ids + 1),
            "`input_ids` of ResponseTokens are not those of the forward",
        ),
    ],
)
def test_impossible_tokens_are_refused_by_name(
    change: Callable[[Batch], Batch], message: str
) -> None:
    model = tiny("llama")
    each = change(batch(model))
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match=message):
            model(**each.inputs)
        probe.discard()


def test_a_policy_that_diverged_is_named() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model, lr=float("inf"))
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        with pytest.raises(ProbeError, match=PLACE + "the policy after the step is not finite"):
            optimizer.step()
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match=PLACE + "the policy before the step is not finite"):
            model(**each.inputs)
        probe.discard()


@pytest.mark.parametrize(
    "keep", [np.ones(3, np.bool_), np.ones(16), torch.ones(3, 9, dtype=torch.bool)]
)
def test_a_keep_mask_that_does_not_fit_is_refused(keep: Any) -> None:
    model = tiny("llama")
    each = batch(model)
    with UpdateProbe(model, adamw(model), Sink()) as probe:
        handle = probe.expect(each.tokens)
        with pytest.raises(ProbeError, match=r"`keep` must be bool of shape \(\d+,\) or \(3, 10\)"):
            handle.keep(keep)
        probe.discard()


def test_a_keep_mask_can_come_with_the_tokens() -> None:
    model = tiny("llama")
    each = batch(model)
    keep = torch.rand(3, 10, generator=torch.Generator().manual_seed(0)) > 0.5
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink) as probe:
        step(model, optimizer, [changed(each, keep=keep)], probe)
    np.testing.assert_array_equal(sink.column("in_loss"), keep[each.tokens.response_mask])


@pytest.mark.parametrize("name", ["sequence", "group"])
def test_a_number_that_32_bits_cannot_hold_is_refused(name: str) -> None:
    model = tiny("llama")
    each = changed(batch(model), **{name: torch.tensor([0, 2**31, 1])})
    with UpdateProbe(model, adamw(model), Sink()) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match=f"`{name}` must fit into 32 bits, got 2147483648"):
            model(**each.inputs)
        probe.discard()
