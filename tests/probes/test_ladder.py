"""The ladder against finite differences of real steps, and that measuring it changes nothing."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deltad.masks import rule
from deltad.probes import LADDER_COLUMNS, Ladder, ProbeError, UpdateProbe, branch, climber, own
from deltad.probes.elsewhere import Elsewhere
from deltad.probes.replay import Call

from .tiny import Batch, Sink, backward, batch, same_bits, surrogate, tiny, weights
from .training import (
    DROPOUT,
    LOOPS,
    Loop,
    Plain,
    adamw,
    build,
    changed,
    checkpointed_outside,
    checkpointed_reentrant,
    plain,
    scaled,
    step,
    step_with,
)

Rows = dict[str, NDArray[Any]]
QUICK = (plain, scaled, checkpointed_reentrant)
THRESHOLD, TOKENS = 0.05, 20
FLOAT32: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(
    model: Any, each: Batch, rows: Rows, divergence: str = "kl", temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """D of every row in float64 from the definition, and log π_k."""
    logits = model(**each.inputs).logits.double() / temperature
    b, j = each.tokens.where()
    policy = logits[b, j - 1].softmax(-1)
    found = []
    for row, pi in enumerate(policy):
        k = int(rows["token_id"][row])
        mu = {
            int(i): float(np.exp(np.float64(value)))
            for i, value in zip(
                rows["topk_ids"][row], rows["topk_behavior_logprobs"][row], strict=True
            )
            if i >= 0
        }
        mu.setdefault(k, float(np.exp(np.float64(rows["behavior_logprob"][row]))))
        ids = list(mu)
        q, p = torch.tensor([mu[i] for i in ids], dtype=torch.float64), pi[ids]
        q_tail, p_tail = 1 - q.sum(), 1 - p.sum()
        if divergence == "kl":
            value = (q * (q / p).log()).sum() + q_tail * (q_tail / p_tail).log()
        else:
            value = ((q - p).abs().sum() + (q_tail - p_tail).abs()) / 2
        found.append(value)
    sampled = torch.as_tensor(rows["token_id"], dtype=torch.int64)
    return torch.stack(found), policy.gather(1, sampled[:, None])[:, 0].log()


def in_double(model: Any) -> Any:
    """In float64 throughout; its norms would go through float32."""

    def norm(self: Any, hidden: Tensor) -> Tensor:
        scale = (hidden.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        normed: Tensor = self.weight * (hidden * scale)
        return normed

    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = types.MethodType(norm, part)
    return model.double()


def trained(
    family: str,
    *,
    loop: Loop = plain,
    temperature: float = 1.0,
    ladder: Ladder | None = None,
    keep: bool = True,
    **options: Any,
) -> tuple[Any, dict[str, Tensor], list[Batch], list[Rows], UpdateProbe, dict[str, Tensor]]:
    """A float64 model's step over two micro-batches under the ladder, and the state before it."""
    model = in_double(tiny(family, **options))
    batches = [
        batch(model, seed=seed, first_sequence=10 * seed, temperature=temperature)
        for seed in (0, 1)
    ]
    if keep:
        generator = torch.Generator().manual_seed(5)
        batches = [
            changed(each, keep=torch.rand(each.ids.shape, generator=generator) < 0.7)
            for each in batches
        ]
    optimizer = adamw(model, lr=1e-3)
    before, sink = weights(model), Sink()
    ladder = ladder or Ladder(tokens=1000, threshold=0.05)
    with UpdateProbe(model, optimizer, sink, temperature=temperature, ladder=ladder) as probe:
        loop(model, optimizer, batches, probe)
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    return model, before, batches, [rows for _, rows in sink.calls], probe, gradients


def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def by_sgd(
    model: Any,
    before: dict[str, Tensor],
    loss: Callable[[], Tensor],
    measure: Callable[[], Tensor],
    lr: float,
) -> Tensor:
    """Change of a measure by a real step of SGD and by one uphill, over twice the step."""
    ends = []
    for uphill in (False, True):
        load(model, before)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, maximize=uphill)
        optimizer.zero_grad()
        backward(loss())
        optimizer.step()
        with torch.no_grad():
            ends.append(measure())
    return (ends[0] - ends[1]) / (2 * lr)


@pytest.mark.parametrize(
    ("family", "temperature", "divergence"),
    [
        ("llama", 1.0, "tv"),
        ("qwen3", 0.7, "kl"),
        pytest.param("llama", 1.0, "kl", marks=pytest.mark.slow),
        pytest.param("qwen3", 0.7, "tv", marks=pytest.mark.slow),
    ],
)
def test_own_and_sequence_rungs_are_real_sgd_steps_of_those_tokens_alone(
    family: str, temperature: float, divergence: str
) -> None:
    """`qwen3` has a tied head; two micro-batches, tokens out of the loss among them."""
    ladder = Ladder(tokens=1000, threshold=0.05, divergence=divergence)
    model, before, batches, recorded, _, _ = trained(family, temperature=temperature, ladder=ladder)
    for each, rows in zip(batches, recorded, strict=True):
        advantage = torch.as_tensor(rows["advantage"], dtype=torch.float64)
        behavior = torch.as_tensor(rows["behavior_logprob"], dtype=torch.float64)
        same = rows["sequence"][:, None] == rows["sequence"][None, :]

        def loss_of(which: NDArray[np.bool_], each: Batch = each, rows: Rows = rows) -> Tensor:
            _, logprob = oracle(model, each, rows, divergence, temperature)
            surrogate = -((logprob - behavior).exp() * advantage)  # noqa: B023 - called at once
            return surrogate[torch.from_numpy(which)].sum()

        for row in (0, len(advantage) // 2):

            def measure(row: int = row, each: Batch = each, rows: Rows = rows) -> Tensor:
                return oracle(model, each, rows, divergence, temperature)[0][row]

            alone = np.arange(len(advantage)) == row
            mates = same[row] & rows["in_loss"]
            for column, which in (("own", alone), ("sequence", mates)):
                found = rows[f"linear_delta_{column}"][row]
                if not which.any():
                    assert found == 0
                    continue
                lr = 1e-7 / max(1.0, abs(float(found)))
                expected = by_sgd(model, before, partial(loss_of, which), measure, lr)
                np.testing.assert_allclose(found, expected, rtol=2e-4, err_msg=column)


@pytest.mark.parametrize(
    ("family", "loop"), [("llama", plain), ("qwen3", plain), ("llama", checkpointed_outside)]
)
def test_batch_and_step_rungs_are_differences_along_gradient_and_step(
    family: str, loop: Loop
) -> None:
    model, before, batches, recorded, _, gradients = trained(
        family, loop=loop, ladder=Ladder(tokens=0)
    )
    after = weights(model)
    update = {name: after[name] - before[name] for name in gradients}

    def divergences(direction: dict[str, Tensor], by: float) -> list[Tensor]:
        load(model, {name: before[name] + by * each for name, each in direction.items()})
        with torch.no_grad():
            return [oracle(model, *pair)[0] for pair in zip(batches, recorded, strict=True)]

    start = divergences(update, 0.0)
    for column, direction, by in (
        ("linear_delta", update, 1e-3),
        ("linear_delta_batch", {name: -each for name, each in gradients.items()}, 1e-6),
    ):
        ends = zip(divergences(direction, by), divergences(direction, -by), strict=True)
        for rows, (up, down) in zip(recorded, ends, strict=True):
            np.testing.assert_allclose(
                rows[column], (up - down) / (2 * by), rtol=1e-4, atol=1e-6, err_msg=column
            )
    for column, part in (("delta_tenth", 0.1), ("delta_triple", 3.0)):
        for rows, there, here in zip(recorded, divergences(update, part), start, strict=True):
            # D before is of the log-probs as stored, in float32.
            np.testing.assert_allclose(
                rows[column], there - here, rtol=1e-4, atol=2e-6, err_msg=column
            )


def test_gradient_checkpointing_in_the_model_changes_no_rung() -> None:
    """Recomputed activations must come from the parameters before the step, not from after."""
    found = []
    for checkpointing in (False, True):
        model = tiny("llama")
        if checkpointing:
            enable: Any = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})
        sink = Sink()
        optimizer = adamw(model)
        ladder = Ladder(tokens=6)
        with UpdateProbe(model, optimizer, sink, ladder=ladder) as probe:
            step(model, optimizer, [batch(model)], probe)
        found.append((sink, probe.ladder_metadata["methods"]))
    for name in LADDER_COLUMNS:
        np.testing.assert_allclose(
            found[0][0].column(name), found[1][0].column(name), rtol=1e-3, atol=1e-5
        )
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=() if loop in QUICK else pytest.mark.slow, id=loop.__name__)
        for loop in LOOPS
    ],
)
def test_training_is_bit_identical_with_and_without_the_ladder(loop: Loop) -> None:
    family = ("gemma2", "qwen3")[LOOPS.index(loop) % 2]
    results = []
    for ladder in (None, Ladder(tokens=5, threshold=0.05)):
        model = build(family)
        optimizer = adamw(model)
        batches = [batch(model, seed=seed, first_sequence=10 * seed) for seed in (0, 1)]
        torch.manual_seed(3)
        random.seed(3)
        sink = Sink()
        with UpdateProbe(model, optimizer, sink, ladder=ladder) as probe:
            for _ in range(2):
                loop(model, optimizer, batches, probe)
        state = optimizer.state_dict()["state"]
        results.append(
            (
                weights(model),
                {name: each.grad for name, each in model.named_parameters()},
                {f"{i}/{key}": value for i, of in state.items() for key, value in of.items()},
                torch.get_rng_state(),
                random.getstate(),
                {name: sink.column(name) for name in sink.calls[0][1]},
            )
        )
    (without, with_ladder) = results
    for ours, theirs in zip(without[:3], with_ladder[:3], strict=True):
        assert same_bits(ours, theirs)
    assert torch.equal(without[3], with_ladder[3])
    assert without[4] == with_ladder[4]
    for name, values in without[5].items():
        np.testing.assert_array_equal(values, with_ladder[5][name], err_msg=name)
    assert set(with_ladder[5]) - set(without[5]) == set(LADDER_COLUMNS)


def test_branched_arms_are_bit_identical_and_share_what_they_have_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    forward = Elsewhere.hidden

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        passes.append(bool(kwargs["grad"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(Elsewhere, "hidden", counted)
    results = []
    for ladder in (None, Ladder(tokens=1000, threshold=0.05)):
        model = build("qwen3")
        optimizer, each, sink = adamw(model), batch(model), Sink()
        torch.manual_seed(3)
        with UpdateProbe(model, optimizer, sink, ladder=ladder) as probe:

            def update(
                arm: str, probe: Any = probe, model: Any = model, o: Any = optimizer
            ) -> None:
                kept = changed(each, keep=torch.full(each.ids.shape, arm != "half"))  # noqa: B023
                step(model, o, [kept], probe)

            branch(model, optimizer, ["none", "half", "zero-step"], update, probe=probe)
        results.append((weights(model), torch.get_rng_state(), sink))
    assert same_bits(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    arms = dict(results[1][2].calls)
    assert list(arms) == ["half", "zero-step", "none"]
    assert not set(arms["zero-step"]) & set(LADDER_COLUMNS)
    np.testing.assert_array_equal(
        arms["none"]["linear_delta_own"], arms["half"]["linear_delta_own"]
    )
    assert not arms["half"]["linear_delta_sequence"].any()
    assert arms["none"]["linear_delta_sequence"].all()
    assert sum(passes) == 2  # with dropout: one sequence by itself is tried, then the batch


def test_a_central_difference_agrees_with_forward_mode() -> None:
    found = {}
    for derivative in ("jvp", "difference"):
        ladder = Ladder(tokens=0, derivative=derivative)
        _, _, _, recorded, probe, _ = trained("llama", ladder=ladder)
        found[derivative] = recorded
        expected = "jvp" if derivative == "jvp" else "central difference"
        assert probe.ladder_metadata["methods"]["update"] == expected
        assert probe.ladder_metadata["methods"]["batch"] == expected
    for exact, other in zip(found["jvp"], found["difference"], strict=True):
        assert np.isnan(exact["linear_delta_own"]).all()
        for name in ("linear_delta", "linear_delta_batch"):
            scale = np.abs(exact[name]).max()
            np.testing.assert_allclose(other[name], exact[name], rtol=0.02, atol=5e-3 * scale)


class _WithoutForwardMode(torch.autograd.Function):
    """Doubles; has no forward-mode derivative."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return 2 * values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


class Peculiar(Plain):
    """A model with a part that forward-mode differentiation cannot pass."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.body(self.embedding(input_ids)))
        logits = self.out(_WithoutForwardMode.apply(hidden))  # type: ignore[no-untyped-call]
        return type("Output", (), {"logits": logits})()


def test_without_forward_mode_a_central_difference_is_taken_and_recorded() -> None:
    found = []
    for derivative in ("auto", "difference"):
        model = Peculiar()
        optimizer, sink = adamw(model), Sink()
        ladder = Ladder(tokens=3, derivative=derivative)
        with UpdateProbe(
            model, optimizer, sink, head=model.out, vocab_size=96, ladder=ladder
        ) as probe:
            step(model, optimizer, [batch(model)], probe)
        found.append((sink.column("linear_delta"), probe.ladder_metadata))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1]["methods"]["update"] == "central difference"
    assert "jvp" in found[0][1]["reasons"]["update"]
    model = Peculiar()
    optimizer = adamw(model)
    probe = UpdateProbe(
        model, optimizer, Sink(), head=model.out, vocab_size=96, ladder=Ladder(derivative="jvp")
    )
    with pytest.raises(ProbeError, match=r"derivative along the update failed: .*jvp"), probe:
        step(model, optimizer, [batch(model)], probe)


def test_sequences_by_themselves_whole_batches_and_single_gradients_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, methods = [], []
    for kind in ("alone", "whole", "few"):
        with monkeypatch.context() as patch:
            if kind == "whole":

                def refuse(*_: Any) -> Any:
                    raise ValueError("cannot be taken apart")

                patch.setattr(Call, "of_rows", refuse)
            if kind == "few":
                patch.setattr(own, "_TOGETHER", 0)
            ladder = Ladder(tokens=6, threshold=0.05)
            _, _, _, recorded, probe, _ = trained("qwen3", ladder=ladder)
        results.append(recorded)
        methods.append(probe.ladder_metadata)
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            for name in ("linear_delta_own", "linear_delta_sequence"):
                np.testing.assert_allclose(ours[name], theirs[name], **FLOAT32)
    assert methods[0]["methods"]["own"] == "gradients, each sequence by itself"
    assert methods[1]["methods"]["own"] == "gradients, whole micro-batches"
    assert methods[1]["reasons"]["own"] == "cannot be taken apart"


def test_dropout_is_taken_as_it_fell_in_training() -> None:
    """A sequence by itself would draw another mask, so the whole micro-batch is differentiated."""
    model = tiny("llama", **DROPOUT)
    optimizer, sink = adamw(model), Sink()
    with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=4)) as probe:
        step(model, optimizer, [batch(model)], probe)
    assert probe.ladder_metadata["methods"]["own"] == "gradients, whole micro-batches"
    assert "other log-probs" in probe.ladder_metadata["reasons"]["own"]
    assert np.isfinite(sink.column("linear_delta_own")).sum() == 4


def test_sample_takes_disagreement_first_then_outside_and_leaves_global_generators() -> None:
    chosen = {}
    for seed in (0, 1):
        model = tiny("llama")
        batches = [batch(model, seed=each, first_sequence=10 * each) for each in (0, 1)]
        optimizer, sink = adamw(model), Sink()
        ladder = Ladder(tokens=TOKENS, threshold=THRESHOLD, seed=seed)
        with UpdateProbe(model, optimizer, sink, ladder=ladder) as probe:
            handles = step(model, optimizer, batches, probe)
        sampled = np.isfinite(sink.column("linear_delta_own"))
        np.testing.assert_array_equal(sampled, np.isfinite(sink.column("linear_delta_sequence")))
        tokens = [each.criterion_tokens() for each in handles]
        outside = np.concatenate([each.divergence("kl") > THRESHOLD for each in tokens])
        keeps = [
            np.concatenate([rule(name).keeps(each, threshold=THRESHOLD) for each in tokens])
            for name in ("predictive-kl-aggregated", "ratio")
        ]
        disagree = outside & (keeps[0] != keeps[1])
        assert sampled.sum() == TOKENS
        assert 0 < disagree.sum() < TOKENS < outside.sum()
        assert sampled[disagree].all()
        assert sampled[outside].sum() == TOKENS
        chosen[seed] = sampled
    assert (chosen[0] != chosen[1]).any()


def test_tokens_that_are_not_stored_are_not_sampled() -> None:
    model = tiny("llama")
    optimizer, sink = adamw(model), Sink()
    ladder = Ladder(tokens=1000, threshold=0.1, least=0.1)
    with UpdateProbe(model, optimizer, sink, ladder=ladder) as probe:
        (handle,) = step(model, optimizer, [batch(model)], probe)
    sampled = np.isfinite(sink.column("linear_delta_own"))
    np.testing.assert_array_equal(sampled, handle.criterion_tokens().divergence("kl") > 0.1)
    assert 0 < sampled.sum() < len(sampled)


def test_ratio_cap_bounds_the_push() -> None:
    found = []
    for cap in (None, 0.5):
        ladder = Ladder(tokens=4, threshold=0.05, ratio_cap=cap)
        found.append(trained("llama", ladder=ladder)[3][0])
    ratio = np.exp(found[0]["pre_logprob"].astype(np.float64) - found[0]["behavior_logprob"])
    np.testing.assert_allclose(
        found[1]["linear_delta_own"],
        found[0]["linear_delta_own"] * np.minimum(ratio, 0.5) / ratio,
        **FLOAT32,
    )


def test_what_cannot_be_measured_is_nan_and_says_why() -> None:
    model = tiny("llama").to(torch.bfloat16)
    optimizer, sink = adamw(model), Sink()
    with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=2)) as probe:
        step(model, optimizer, [batch(model)], probe)
    assert np.isnan(sink.column("delta_tenth")).all()
    assert np.isfinite(sink.column("linear_delta")).all()
    assert "half precision" in probe.ladder_metadata["reasons"]["tenth"]

    model = tiny("llama")
    lbfgs, sink, each = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2), Sink(), None
    each = batch(model)
    with UpdateProbe(model, lbfgs, sink, ladder=Ladder(tokens=2)) as probe:
        probe.expect(each.tokens)

        def closure() -> Tensor:
            lbfgs.zero_grad()
            loss = surrogate(model(**each.inputs).logits, each)
            backward(loss)
            return loss

        step_with(lbfgs, closure)
    assert np.isnan(sink.column("linear_delta_batch")).all()
    assert "closure" in probe.ladder_metadata["reasons"]["batch"]
    assert np.isfinite(sink.column("linear_delta")).all()


def test_gradients_that_a_fused_optimizer_unscales_itself_are_unscaled() -> None:
    found = []
    for scale in (1.0, 8.0):
        model, sink = tiny("llama"), Sink()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=0)) as probe:
            each = batch(model)
            optimizer.zero_grad()
            probe.expect(each.tokens)
            backward(scale * surrogate(model(**each.inputs).logits, each))
            if scale != 1.0:
                optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
            optimizer.step()
        found.append(sink.column("linear_delta_batch"))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_a_step_that_moves_nothing_has_slope_zero() -> None:
    model = tiny("llama")
    optimizer, sink = adamw(model, lr=0.0), Sink()
    with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=2)) as probe:
        step(model, optimizer, [batch(model)], probe)
    for name in ("linear_delta", "delta_tenth", "delta_triple"):
        assert not sink.column(name).any()
    assert np.abs(sink.column("linear_delta_batch")).max() > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_no_way_along_the_step_d_is_d_before_to_the_bit(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of the step are read by the same kernels as before and after, with the same noise."""
    monkeypatch.setattr(climber, "TENTH", 0.0)
    model = tiny(family)
    optimizer, sink = adamw(model), Sink()
    with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=0)) as probe:
        step(model, optimizer, [batch(model)], probe)
    assert not sink.column("delta_tenth").any()
    assert sink.column("delta_triple").all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_model_has_the_same_ladder() -> None:
    found = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = tiny("llama")
        if compiled:
            model.compile(backend="eager")
        optimizer, sink = adamw(model), Sink()
        with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=5)) as probe:
            step(model, optimizer, [batch(model)], probe)
        found.append(sink)
    for name in LADDER_COLUMNS:
        np.testing.assert_allclose(
            found[1].column(name), found[0].column(name), rtol=1e-3, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": -1}, "`tokens` must be at least 0, got -1"),
        ({"threshold": -0.1}, "`threshold` must be finite and not negative"),
        ({"derivative": "magic"}, "`derivative` must be auto, jvp or difference, got 'magic'"),
        ({"divergence": "js"}, "there is no criterion 'predictive-js-aggregated'"),
        ({"criterion": "predictive-tv-exact"}, "cannot judge a KL region"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ProbeError, match=words):
        Ladder(**options)


def test_arms_can_be_chosen() -> None:
    assert [arm for arm in ("none", "ratio", "zero-step") if Ladder().measures(arm)] == [
        "none",
        "ratio",
    ]
    assert Ladder(arms=("ratio",)).measures("ratio")
    assert not Ladder(arms=("ratio",)).measures("none")
