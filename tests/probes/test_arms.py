"""Several updates from one state: exact restoration, whatever the optimizer keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deltad.probes import ZERO_STEP, ProbeError, Snapshot, UpdateProbe, branch

from .tiny import Batch, Sink, backward, batch, same_bits, surrogate, tiny, weights
from .training import DROPOUT, adamw, step, step_with

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


def update(model: Any, optimizer: Any, each: Batch) -> None:
    """One step of any optimizer, drawing from every generator."""
    noise = random.random() + np.random.random() + float(torch.rand(()))  # noqa: NPY002

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = surrogate(model(**each.inputs).logits, each) * (1 + noise)
        backward(loss)
        return loss

    step_with(optimizer, closure)


def generators() -> list[Any]:
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), legacy[1].tolist(), torch.get_rng_state().tolist()]


def flat(value: Any) -> Any:
    """Nested state with tensors as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): flat(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restore_puts_everything_back_and_the_run_goes_on_as_if_nothing_was(
    name: str, warm: int
) -> None:
    model = tiny("qwen3", **DROPOUT)
    each = batch(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(warm):
        update(model, optimizer, each)
    identities = [id(parameter) for parameter in model.parameters()]
    before = (weights(model), generators(), flat(optimizer.state_dict()))

    snapshot = Snapshot(model, optimizer)
    ends = []
    for _ in range(3):
        for _ in range(2):
            update(model, optimizer, each)
        ends.append((weights(model), generators(), flat(optimizer.state_dict())))
        assert not same_bits(before[0], ends[-1][0])
        snapshot.restore()
        assert same_bits(before[0], weights(model))
        assert generators() == before[1]
        assert flat(optimizer.state_dict()) == before[2]
        assert len(optimizer.state) == len(before[2]["state"])
    for end in ends[1:]:
        assert same_bits(ends[0][0], end[0])
        assert ends[0][1:] == end[1:]
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_optimizer_state_keeps_its_tensors() -> None:
    model = tiny()
    each = batch(model)
    optimizer = adamw(model)
    update(model, optimizer, each)
    first = next(iter(optimizer.state.values()))
    tensors = {key: value for key, value in first.items() if isinstance(value, Tensor)}
    snapshot = Snapshot(model, optimizer)
    update(model, optimizer, each)
    snapshot.restore()
    for key, value in tensors.items():
        assert next(iter(optimizer.state.values()))[key] is value


def test_a_snapshot_is_one_copy_of_the_state() -> None:
    model = tiny("qwen3")
    each = batch(model)
    optimizer = adamw(model)
    update(model, optimizer, each)
    snapshot = Snapshot(model, optimizer)
    held = _storages(vars(snapshot))
    live = _storages([list(model.parameters()), list(model.buffers()), optimizer.state])
    grads = _storages([p.grad for p in model.parameters()])
    copies = sum(held[key] for key in held.keys() - live.keys() - grads.keys())
    state = sum(live.values()) + sum(grads.values())
    # Beside the state only the generators' few kilobytes.
    assert state <= copies <= state + 20_000


def _storages(value: Any, seen: set[int] | None = None) -> dict[int, int]:
    """Bytes of every storage that is reached from here, by its address."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return {}
    seen.add(id(value))
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    items: list[Any] = []
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, (list, tuple)):
        items = list(value)
    elif hasattr(value, "__dict__"):
        items = list(vars(value).values())
    found: dict[int, int] = {}
    for item in items:
        found |= _storages(item, seen)
    return found


def test_gradients_buffers_modes_and_groups_are_restored() -> None:
    model = tiny()
    model.register_buffer("counter", torch.zeros(3))
    each = batch(model)
    optimizer = adamw(model)
    backward(surrogate(model(**each.inputs).logits, each))
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    snapshot = Snapshot(model, optimizer)
    optimizer.zero_grad()
    model.counter += 1
    model.counter = torch.ones(5)
    model.eval()
    optimizer.param_groups[0].update(lr=7.0, added=1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    snapshot.restore()
    assert model.counter.tolist() == [0.0, 0.0, 0.0]
    assert all(part.training for part in model.modules())
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert "added" not in optimizer.param_groups[0]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("forwarded", [False, True])
def test_the_scaler_is_restored(forwarded: bool) -> None:
    model = tiny()
    each = batch(model)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def scaled_step(*, overflow: bool = False) -> None:
        optimizer.zero_grad()
        backward(scaler.scale(surrogate(model(**each.inputs).logits, each)))
        if overflow:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()

    if forwarded:
        scaled_step()
    before = flat(scaler.state_dict())
    snapshot = Snapshot(model, optimizer, scaler)
    scaled_step(overflow=True)
    assert scaler.get_scale() == 8.0
    snapshot.restore()
    assert flat(scaler.state_dict()) == before
    # A step that was not followed by update() must not stand in the way of the next.
    backward(scaler.scale(surrogate(model(**each.inputs).logits, each)))
    scaler.step(optimizer)
    snapshot.restore()
    scaled_step()
    assert scaler.get_scale() == (32.0 if forwarded else 16.0)


def test_gradients_that_were_unscaled_before_the_snapshot_are_not_unscaled_again() -> None:
    model = tiny()
    each = batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    backward(scaler.scale(surrogate(model(**each.inputs).logits, each)))
    scaler.unscale_(optimizer)
    snapshot = Snapshot(model, optimizer, scaler)
    ends = []
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
        ends.append(weights(model))
        snapshot.restore()
    assert same_bits(*ends)


def test_extra_objects_are_restored() -> None:
    model = tiny()
    each = batch(model)
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    snapshot = Snapshot(model, optimizer, extra=[generator, schedule])
    expected = torch.rand(3, generator=torch.Generator().manual_seed(4))
    for _ in range(2):
        assert torch.equal(torch.rand(3, generator=generator), expected)
        update(model, optimizer, each)
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 5e-3
        snapshot.restore()
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert schedule.last_epoch == 0
    with pytest.raises(ProbeError, match=r"objects with state_dict.*got int"):
        Snapshot(model, optimizer, extra=[3])


ARMS = ["none", "half", ZERO_STEP]


def branched(
    go_on: str | None, arms: list[str], *, steps: int = 2
) -> tuple[Any, Sink, UpdateProbe]:
    model = tiny("llama", **DROPOUT)
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    torch.manual_seed(9)
    with UpdateProbe(model, optimizer, sink, arm="outside") as probe:

        def arm(name: str) -> None:
            optimizer.zero_grad()
            probe.expect(each.tokens)
            loss = surrogate(model(**each.inputs).logits, each)
            backward(loss * (0.5 if name == "half" else 1.0))
            optimizer.step()

        for _ in range(steps):
            branch(model, optimizer, arms, arm, go_on=go_on, probe=probe)
    return model, sink, probe


def test_arms_share_everything_before_the_step_and_the_chosen_one_goes_on() -> None:
    model, sink, probe = branched("none", ARMS)
    alone, only, _ = branched("none", ["none"])
    assert same_bits(weights(model), weights(alone))
    assert probe.step == 2
    assert probe.arm == "outside"
    assert [arm for arm, _ in sink.calls] == ["half", ZERO_STEP, "none"] * 2
    assert set(sink.column("step")) == {0, 1}
    for name in ("pre_logprob", "topk_pre_logprobs", "pre_collision", "step", "position"):
        for arm in ("half", ZERO_STEP):
            np.testing.assert_array_equal(sink.column(name, arm), sink.column(name, "none"))
    np.testing.assert_array_equal(sink.column("post_logprob", "none"), only.column("post_logprob"))
    assert not sink.deltas(ZERO_STEP).any()
    assert np.abs(sink.deltas("half")).max() > 1e-3
    assert (sink.deltas("half") != sink.deltas("none")).any()


def test_going_on_along_no_arm_puts_the_state_back() -> None:
    model, sink, _ = branched(None, ["none", "half"])
    untouched = tiny("llama", **DROPOUT)
    assert same_bits(weights(model), weights(untouched))
    pre = sink.column("pre_logprob", "none")
    half = len(pre) // 2
    np.testing.assert_array_equal(pre[:half], pre[half:])


def test_an_exception_in_an_arm_puts_the_state_back_and_passes() -> None:
    model = tiny("llama")
    each = batch(model)
    optimizer = adamw(model)
    update(model, optimizer, each)
    before = (weights(model), generators(), flat(optimizer.state_dict()))
    with UpdateProbe(model, optimizer, Sink()) as probe:

        def arm(name: str) -> None:
            step(model, optimizer, [each], probe)
            if name == "half":
                probe.expect(each.tokens)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            branch(model, optimizer, ["none", "half"], arm, probe=probe)
        assert same_bits(before[0], weights(model))
        assert generators() == before[1]
        assert flat(optimizer.state_dict()) == before[2]
        assert probe.step == 0
        assert probe.pending == ()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("rprop", "lbfgs")])
def test_the_step_of_length_zero_restores_the_learning_rate(name: str) -> None:
    model = tiny()
    each = batch(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    update(model, optimizer, each)
    rate = optimizer.param_groups[0]["lr"]
    seen = []

    def arm(name: str) -> None:
        seen.append(float(optimizer.param_groups[0]["lr"]))
        step(model, optimizer, [each])

    branch(model, optimizer, [ZERO_STEP, "none"], arm)
    assert seen == [0.0, pytest.approx(float(rate))]
    assert optimizer.param_groups[0]["lr"] is rate


def test_an_optimizer_that_moves_at_learning_rate_zero_is_refused() -> None:
    model = tiny()
    each = batch(model)
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-2)
    step(model, optimizer, [each])
    before = weights(model)
    with pytest.raises(ProbeError, match=r"moved in the step of length zero.*Rprop"):
        branch(
            model, optimizer, [ZERO_STEP], lambda _: step(model, optimizer, [each]), go_on=ZERO_STEP
        )
    assert same_bits(before, weights(model))


@pytest.mark.parametrize(
    ("arms", "go_on", "message"),
    [
        ([], None, "must name at least one update"),
        (["none", "none"], "none", "each once"),
        (["ratio"], "none", "`go_on` must be one of the arms ratio, got 'none'"),
    ],
)
def test_arms_that_make_no_sense_are_refused(
    arms: list[str], go_on: str | None, message: str
) -> None:
    model = tiny()
    optimizer = adamw(model)
    with pytest.raises(ProbeError, match=message):
        branch(model, optimizer, arms, lambda _: None, go_on=go_on)


def test_weights_of_eight_bits_are_part_of_the_state() -> None:
    model = tiny()
    frozen = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_parameter("scales", frozen)
    each = batch(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    snapshot = Snapshot(model, optimizer)
    assert snapshot.moved() is None
    frozen.data = torch.zeros(3).to(torch.float8_e4m3fn)
    assert snapshot.moved() == "scales"
    branch(model, optimizer, [ZERO_STEP], lambda _: step(model, optimizer, [each]), go_on=None)
