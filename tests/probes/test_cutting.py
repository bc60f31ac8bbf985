"""The cut forward gives what the whole one gives, and a null update nothing."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from deltad.analysis import Question, rate_table
from deltad.dumps import Batch as DumpBatch
from deltad.dumps import Dump, Metadata, batch_tokens, check_dump
from deltad.masks import rule
from deltad.probes import (
    Ladder,
    Monitor,
    ProbeError,
    Recorder,
    ResponseTokens,
    UpdateProbe,
    branch,
)
from deltad.probes.cutting import Grid, cut_call, plan_cut
from deltad.probes.forward import Forward
from deltad.probes.replay import Call

from .tiny import VOCAB, Batch, Sink, backward, batch, same_bits, surrogate, tiny, weights
from .training import DROPOUT, Plain, adamw, no_probe, step

EXACT = 1e-6  # nats
NEAR_ALL: dict[str, Any] = {"keep": "near", "near": 0.05}


@pytest.fixture(autouse=True)
def _forwards_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small a batch would otherwise hardly be taken apart."""
    monkeypatch.setattr("deltad.probes.cutting._OVERHEAD", {"cpu": 0})


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
        (int(a), int(b), int(c)): {name: values[at] for name, values in columns.items()}
        for at, (a, b, c) in enumerate(keys)
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


QUICK = {("llama", "none", False), ("sliding", "left", True), ("gemma2", "left", True)}


@pytest.mark.parametrize(
    ("variant", "padding", "shared"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in itertools.product(VARIANTS, ("none", "left"), (False, True))
    ],
)
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


def packed(model: Any) -> Batch:
    """Three sequences packed into each of two rows, told apart by their positions alone."""
    generator = torch.Generator().manual_seed(3)
    rows, each, prompt = 2, 8, 3
    ids = torch.randint(3, VOCAB, (rows, 3 * each), generator=generator)
    positions = torch.arange(each).repeat(3).expand(rows, -1).contiguous()
    inputs = {"input_ids": ids, "position_ids": positions}
    with torch.no_grad():
        logits = model(**inputs).logits.float()
    noise = torch.randn(logits.shape, generator=generator) * 0.5
    logprobs = (logits + noise).log_softmax(-1).roll(1, 1)
    best = logprobs.topk(5, -1)
    number = torch.arange(rows * 3).view(rows, 3).repeat_interleave(each, 1)
    tokens = ResponseTokens(
        response_mask=positions >= prompt,
        advantages=torch.ones(rows),
        behavior_logprobs=logprobs.gather(2, ids[..., None])[..., 0],
        topk_ids=best.indices,
        topk_logprobs=best.values,
        sequence=number,
        group=number // 3,
    )
    return Batch(inputs, tokens)


def test_packed_rows_end_with_their_last_wanted_token_and_share_nothing() -> None:
    whole, _, _ = recorded("qwen3", packed, {})
    highest = sorted(divergence(row, "pre") for row in by_token(whole).values())[-6]
    options = {"keep": "near", "near": highest, "pre": "training", "share_prompts": True}
    cut, probe, _ = recorded("qwen3", packed, options)
    assert probe.readout_metadata["cut"]["forward"] == "cut"
    assert probe.readout_metadata["cut"]["prompts"] == "each"
    assert_agree(cut, whole)


@pytest.mark.parametrize(
    "keep",
    ["near", "disagreement", pytest.param("outside", marks=pytest.mark.slow)],
)
def test_what_is_kept_is_what_the_criteria_say_of_the_stored_values(keep: Any) -> None:
    options: dict[str, Any] = {"keep": keep, "threshold": 0.1, "near": 0.04, "share_prompts": True}
    whole, _, _ = recorded("llama", grouped, {})
    cut, probe, _ = recorded("llama", grouped, options)
    expected = set()
    for _, rows in whole.calls:
        tokens = stored_tokens(rows)
        d_pre = np.asarray(tokens.divergence("kl"))
        first, second = (
            rule(name).keeps(tokens, threshold=0.1)
            for name in ("predictive-kl-aggregated", "ratio")
        )
        mask = {
            "outside": d_pre > 0.1,
            "near": d_pre > 0.04,
            "disagreement": (d_pre > 0.1) & (first != second),
        }[keep]
        keys = zip(rows["step"], rows["sequence"], rows["position"], strict=True)
        expected |= {key for key, is_kept in zip(keys, mask, strict=True) if is_kept}
    assert expected
    assert by_token(cut).keys() == expected
    assert probe.skipped_tokens == len(by_token(whole)) - len(expected)


def stored_tokens(rows: dict[str, Any]) -> Any:
    """What a reader of the file sees."""
    metadata = Metadata(top_k=rows["topk_ids"].shape[1], vocab_size=VOCAB)
    return batch_tokens(DumpBatch("", 0, rows, np.ones(len(rows["step"]), np.bool_)), metadata)


OPTIONS: dict[str, dict[str, Any]] = {
    "outside": {"keep": "outside", "threshold": 0.1},
    "near": NEAR_ALL,
    "disagreement": {"keep": "disagreement", "threshold": 0.02},
    "shared": {"share_prompts": True},
    "sequences": {"sequences": 0.5},
    "all of it": {**NEAR_ALL, "sequences": 0.7, "share_prompts": True, "every": 2},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("disagreement", "all of it") else pytest.mark.slow)
        for name in OPTIONS
    ],
)
def test_training_is_not_changed_and_a_null_update_changes_nothing(name: str) -> None:
    options = OPTIONS[name]
    results = []
    for probed in (False, True):
        model = tiny("llama")
        batches = [grouped(model, seed=seed) for seed in range(2)]
        optimizer = adamw(model)
        torch.manual_seed(5)
        around: Any = UpdateProbe if probed else no_probe
        with around(model, optimizer, Sink(), **options) as probe:
            for _ in range(2):
                step(model, optimizer, batches, probe)
        results.append({**weights(model), "random": torch.get_rng_state()})
    assert same_bits(*results)

    still, probe, _ = recorded("llama", grouped, {**options, "pre": "matching"}, lr=0.0, steps=3)
    assert len(still.column("step"))
    assert not still.deltas().any()
    assert probe.readout_metadata["exact"]
    near, probe, _ = recorded("llama", grouped, {**options, "pre": "training"}, lr=0.0, steps=3)
    assert np.abs(near.deltas()).max() < 1e-5
    assert probe.readout_metadata["exact"] is False
    assert probe.readout_metadata["cut"]["noise"] < 1e-5


def test_in_half_precision_the_cut_forward_is_matched() -> None:
    def by_shape(module: Any, inputs: Any, hidden: Tensor) -> Tensor:
        # Some processors round every shape alike, so the model itself does not.
        return hidden * (1 + 2**-13 * hidden.shape[:-1].numel())

    def half() -> Any:
        model = tiny("llama").to(torch.bfloat16)
        model.model.norm.register_forward_hook(by_shape)
        return model

    still, probe, _ = recorded("llama", grouped, NEAR_ALL, lr=0.0, model=half())
    said = probe.readout_metadata
    assert (said["cut"]["forward"], said["forward"], said["exact"]) == ("cut", "matching", True)
    assert len(still.column("step"))
    assert not still.deltas().any()
    # The training forward's own numbers are another rounding, as is said.
    noisy, probe, _ = recorded(
        "llama",
        grouped,
        {**NEAR_ALL, "pre": "training"},
        lr=0.0,
        model=half(),
    )
    assert probe.readout_metadata["exact"] is False
    assert probe.readout_metadata["cut"]["noise"] > 1e-4
    assert noisy.deltas().any()


class Averaging(Plain):
    """Every position sees the whole sequence, as in a model that is not causal."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.body(self.embedding(input_ids)))
        hidden = hidden + hidden.mean(1, keepdim=True)
        return type("Output", (), {"logits": self.out(hidden)})()


def test_what_cannot_be_cut_is_forwarded_whole_and_the_metadata_say_why() -> None:
    model: Any = Averaging()
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    head: dict[str, Any] = {"head": model.out, "vocab_size": VOCAB}
    with UpdateProbe(model, optimizer, sink, **head, **NEAR_ALL) as probe:
        step(model, optimizer, [each], probe)
    assert probe.readout_metadata["cut"]["forward"] == "whole"
    assert "other sequences or later tokens" in probe.readout_metadata["cut"]["reason"]
    assert probe.readout_metadata["exact"]
    assert len(sink.column("step"))


@pytest.mark.parametrize("module", [pytest.param("attention", marks=pytest.mark.slow), "layer"])
def test_dropout_is_not_cut(module: str) -> None:
    model = tiny("llama", **(DROPOUT if module == "attention" else {}))
    if module == "layer":
        model.model.layers[0].mlp.act_fn = torch.nn.Sequential(
            torch.nn.SiLU(), torch.nn.Dropout(0.1)
        )
    each = grouped(model)
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    torch.manual_seed(3)
    with UpdateProbe(model, optimizer, sink, **NEAR_ALL, share_prompts=True) as probe:
        step(model, optimizer, [each], probe)
    assert "dropout" in probe.readout_metadata["cut"]["reason"]
    assert not sink.deltas().any()


def test_a_model_without_a_cache_shares_no_prompts() -> None:
    model: Any = Plain()
    each = grouped(model)
    optimizer = adamw(model)
    sink, whole = Sink(), Sink()
    start = copy.deepcopy(model.state_dict())
    head: dict[str, Any] = {"head": model.out, "vocab_size": VOCAB}
    with UpdateProbe(model, optimizer, sink, **head, **NEAR_ALL, share_prompts=True) as probe:
        step(model, optimizer, [each], probe)
    said = probe.readout_metadata["cut"]
    assert (said["forward"], said["prompts"]) == ("cut", "each")
    assert "Plain has no config to make a cache from" in said["reason"]
    model.load_state_dict(start)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, whole, **head) as probe:
        step(model, optimizer, [each], probe)
    assert_agree(sink, whole)


def test_a_mask_keeps_what_is_before_the_batch_and_tells_rows_apart() -> None:
    model = tiny("llama")
    ids = torch.full((2, 6), 7)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4] = 0
    longer = torch.cat([torch.zeros(2, 3, dtype=torch.long), mask], 1)
    both = np.array([0, 1])
    grid = Grid(both, np.array([5, 5]), 2, 6, np.zeros(2, np.int64))

    def called(attention_mask: Tensor) -> Call:
        inputs = {"input_ids": ids, "attention_mask": attention_mask}
        return Call.capture(model, (), inputs, {})

    cut = cut_call(called(longer), grid, [1], 0, 5).kwargs["attention_mask"]
    assert torch.equal(cut, longer[1:, :8])
    forward = Forward(called(mask), True, None, None)
    (trunk,) = plan_cut(forward, grid, both, share_prompts=True, overhead=0).trunks
    assert trunk.length == 4


def test_a_whole_forward_without_a_wanted_token_records_nothing() -> None:
    model: Any = Averaging()
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    head: dict[str, Any] = {"head": model.out, "vocab_size": VOCAB}
    with UpdateProbe(model, optimizer, sink, **head, keep="near", near=50.0) as probe:
        step(model, optimizer, [each], probe)
    assert probe.readout_metadata["cut"]["forward"] == "whole"
    assert not sink.calls
    assert probe.skipped_tokens == int(each.tokens.response_mask.sum())


def test_an_argument_that_comes_later_and_cannot_be_cut_is_forwarded_whole() -> None:
    model = tiny("llama")
    each = grouped(model)
    optimizer = adamw(model, lr=0.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, **NEAR_ALL, pre="matching") as probe:
        step(model, optimizer, [each], probe)
        rows = len(sink.column("step"))
        step(model, optimizer, [each], probe, unknown=object())
    assert len(sink.column("step")) == 2 * rows
    assert not sink.deltas().any()


def test_every_so_many_th_step_is_read_and_the_others_cost_nothing() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    forwards = []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, every=3) as probe:
        for number in range(5):
            assert probe.reads == (number % 3 == 0)
            before = len(forwards)
            (handle,) = step(model, optimizer, [each], probe)
            assert handle.idle != (number % 3 == 0)
            if handle.idle:
                assert len(forwards) == before + 1
                handle.keep(each.tokens.response_mask)
                assert not handle.scatter(np.zeros(handle.size)).any()
                with pytest.raises(ProbeError, match="this step is not read"):
                    _ = handle.rows
    assert set(sink.column("step")) == {0, 3}
    assert probe.step == 5
    assert probe.sampling_metadata == {"sequences": 1.0, "every": 3, "seed": 0}


def test_sequences_are_drawn_alike_in_all_arms_and_carry_their_weight() -> None:
    model = tiny("llama")
    each = grouped(model, groups=3)
    optimizer = adamw(model)
    sink = Sink()
    options: dict[str, Any] = {"sequences": 0.4, "sequences_seed": 1}
    with UpdateProbe(model, optimizer, sink, **options) as probe:
        for _ in range(3):
            branch(
                model,
                optimizer,
                ["none", "other"],
                lambda arm: step(model, optimizer, [each], probe),
                probe=probe,
            )
    drawn = {
        arm: set(zip(sink.column("step", arm), sink.column("sequence", arm), strict=True))
        for arm in ("none", "other")
    }
    assert drawn["none"] == drawn["other"]
    assert 0 < len(drawn["none"]) < 27
    assert (sink.column("weight") == np.float32(2.5)).all()


def test_steps_that_a_scaler_skips_are_dropped_with_what_was_chosen() -> None:
    model = tiny("llama")
    batches = [grouped(model, seed=seed) for seed in range(2)]
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, scaler=scaler, **NEAR_ALL) as probe:
        for overflow in (False, True, False):
            optimizer.zero_grad()
            for each in batches:
                probe.expect(each.tokens)
                backward(scaler.scale(surrogate(model(**each.inputs).logits, each)))
            if overflow:
                next(model.parameters()).grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert probe.dropped_steps == 1
    assert set(sink.column("step")) == {0, 1}


@pytest.mark.parametrize("tail", ["auto", pytest.param("head", marks=pytest.mark.slow), "logits"])
def test_the_tail_of_pre_may_come_from_the_logits_of_the_training_forward(tail: Any) -> None:
    whole, _, _ = recorded("gemma2", grouped, {})
    cut, probe, _ = recorded("gemma2", grouped, {**NEAR_ALL, "tail": tail})
    assert ("tail" in probe.readout_metadata) == (tail != "head")
    assert_agree(cut, whole)


def test_logits_that_are_not_there_are_refused() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink(), tail="logits") as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="makes none that can be seen"):
            model.model(**each.inputs)
        probe.discard()


@pytest.mark.slow
def test_a_compiled_model_is_cut_in_eager_mode() -> None:
    plain, _, _ = recorded("llama", grouped, NEAR_ALL)
    model = tiny("llama")
    each = grouped(model)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = adamw(model)
    sink = Sink()
    with UpdateProbe(compiled, optimizer, sink, **NEAR_ALL) as probe:
        for _ in range(2):
            step(compiled, optimizer, [each], probe)
    assert probe.readout_metadata["cut"]["forward"] == "cut"
    np.testing.assert_allclose(sink.column("post_logprob"), plain.column("post_logprob"), atol=1e-4)


@pytest.mark.slow
def test_gradient_checkpointing_goes_with_shared_prompts() -> None:
    plain, _, _ = recorded("llama", grouped, {**NEAR_ALL, "share_prompts": True})
    model = tiny("llama")
    older = "gradient_checkpointing_enable"  # its name until transformers 5.2x
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or getattr(model, older)
    enable({"use_reentrant": False})
    sink, probe, _ = recorded("llama", grouped, {**NEAR_ALL, "share_prompts": True}, model=model)
    assert probe.readout_metadata["cut"]["prompts"] == "shared"
    np.testing.assert_allclose(sink.column("post_logprob"), plain.column("post_logprob"), atol=1e-5)


@pytest.mark.slow
def test_the_ladder_measures_every_token_and_gives_those_that_are_kept() -> None:
    ladder = Ladder(tokens=2)
    whole, _, _ = recorded("llama", grouped, {"ladder": ladder}, steps=1)
    cut, _, _ = recorded("llama", grouped, {**NEAR_ALL, "ladder": ladder}, steps=1)
    every = by_token(whole)
    for key, row in by_token(cut).items():
        for name in ("linear_delta", "delta_tenth"):
            assert row[name] == pytest.approx(every[key][name], abs=1e-4)


def test_a_dump_of_disagreement_tokens_says_how_many_were_outside(tmp_path: Path) -> None:
    model = tiny("llama")
    each = grouped(model)
    optimizer = adamw(model)
    kept: dict[str, Any] = {"keep": "disagreement", "threshold": 0.02, "sequences": 0.8}

    def describe(arm: str) -> Metadata:
        return Metadata(
            top_k=5,
            vocab_size=VOCAB,
            readout=probe.readout_metadata,
            # The recorder takes `stored` and `sampling` from the probe.
        )

    recorder = Recorder(tmp_path, seed=0, metadata_for=describe)
    with recorder, UpdateProbe(model, optimizer, recorder, **kept) as probe:
        for _ in range(4):
            step(model, optimizer, [each], probe)
    (path,) = tmp_path.glob("arm=*/seed=*/*.parquet")
    found = json.loads(pq.read_metadata(path).metadata[b"deltad"])
    whole, _, _ = recorded("llama", grouped, {"sequences": 0.8}, steps=4)
    outside = sum(divergence(row, "pre") > 0.02 for row in by_token(whole).values())
    assert found["stored"]["outside"] == outside
    assert found["sampling"] == probe.sampling_metadata
    assert found["rows_seen"] == len(by_token(whole))
    assert 0 < pq.read_metadata(path).num_rows < outside
    assert not list(check_dump(tmp_path))


def test_the_table_is_that_of_the_whole_dump(tmp_path: Path) -> None:
    tables = []
    for name, options in {
        "all": {},
        "near": {"keep": "near", "near": 0.05},
        "disagreement": {"keep": "disagreement", "threshold": 0.1, "share_prompts": True},
    }.items():
        recorder = Recorder(
            tmp_path / name,
            seed=0,
            metadata_for=lambda arm: Metadata(
                top_k=5,
                vocab_size=VOCAB,
                readout=probe.readout_metadata,
                stored=probe.stored_metadata,
            ),
        )
        model = tiny("llama")
        each = grouped(model, groups=4)
        optimizer = adamw(model)
        keep: Any = options
        with recorder, UpdateProbe(model, optimizer, recorder, **keep) as probe:
            for _ in range(3):
                step(model, optimizer, [each], probe)
        table = rate_table(Dump.open(tmp_path / name), Question(threshold=0.1)).to_frame()
        tables.append(table.to_dict("list"))
    assert tables[0]["disagreement"][0] > 0
    assert tables[1] == tables[0]
    assert tables[2] == tables[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "some"}, "`keep` must be one of all, outside, near, disagreement"),
        ({"sequences": 0.0}, "`sequences` must be a share above 0"),
        ({"every": 0}, "`every` must be an integer of at least 1"),
        ({"keep": "near", "near": -1.0}, "`near` must be finite and not negative"),
        ({"keep": "disagreement", "criterion": "what"}, "the pair of criteria of `keep`"),
        ({"keep": "outside", "divergence": "js"}, "`divergence` must be one of kl, tv"),
        ({"sequences": "half"}, "`sequences` must be a share above 0.*got 'half'"),
        ({"threshold": None}, "`threshold` must be finite and not negative, got None"),
        ({"divergence": ["kl"]}, "`divergence` must be one of kl, tv"),
        ({"workers": 0}, "`workers` must be positive and an integer, got 0"),
        ({"token_chunk": 1.5}, "`token_chunk` must be positive and an integer, got 1.5"),
        ({"temperature": "1"}, "`temperature` must be positive and finite, got '1'"),
        ({"softcap": -1.0}, "`softcap` must be positive and finite, got -1.0"),
        ({"step": 1.5}, "`step` must be an integer of at least 0, got 1.5"),
        ({"tail": "none"}, "`tail` must be one of auto, head, logits"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    model = tiny("llama")
    with pytest.raises(ProbeError, match=message):
        UpdateProbe(model, adamw(model), Sink(), **options)


def test_a_monitor_counts_every_token() -> None:
    model = tiny("llama")
    with pytest.raises(ProbeError, match="a Monitor counts every response token"):
        UpdateProbe(model, adamw(model), Monitor(lambda scalars, step: None), keep="outside")
