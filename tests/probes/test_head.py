"""From the model's own words to its logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from deltad.probes import ProbeError, UpdateProbe
from deltad.probes.head import Head

from .precisions import another_thread
from .tiny import (
    SIZES,
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


def test_one_thread_next_to_it_is_enough_for_good() -> None:
    """What *pre* was read by must still hold at *post*."""
    head, alone = Head.of(tiny()), Head.of(tiny())
    was = alone.exclusive
    with another_thread():
        assert not head.exclusive
    assert not head.exclusive
    assert alone.exclusive == was


def test_an_unknown_transform_of_the_logits_is_refused() -> None:
    model = tiny("gemma2")
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink(), softcap=50.0) as probe:
        probe.expect(each.tokens)
        with pytest.raises(ProbeError, match="the model does something to its logits"):
            model(**each.inputs)
        probe.discard()


def test_any_module_with_a_head_works() -> None:
    model = Plain()
    each = batch(model)
    optimizer = adamw(model)
    with pytest.raises(ProbeError, match="give the module that makes the logits as `head`"):
        UpdateProbe(model, optimizer, Sink())
    with pytest.raises(ProbeError, match="give `vocab_size`"):
        UpdateProbe(model, optimizer, Sink(), head=model.out)
    sink = Sink()
    before = reference(model, each)
    with UpdateProbe(model, optimizer, sink, head=model.out, vocab_size=96, entropy=True) as probe:
        step(model, optimizer, [each], probe)
    assert probe.readout_metadata["verified"] is True
    expected = expected_rows(before, each, "pre")
    np.testing.assert_allclose(sink.column("pre_logprob"), expected["pre_logprob"], atol=1e-5)


# Families of transformers that treat their logits or their head in a way of their own.
OTHERS: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 0.25},
    "HyperCLOVAX": {"logits_scaling": 0.5},
    "FalconH1": {
        "lm_head_multiplier": 0.3,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "head_dim": 8,
    },
    "NanoChat": {"final_logit_softcapping": 2.0},
    "GraniteMoe": {"logits_scaling": 4.0, "num_local_experts": 4},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Phi": {},
    "Mixtral": {"num_local_experts": 4},
}


@pytest.mark.filterwarnings("ignore")  # what these models say of kernels they miss
@pytest.mark.parametrize("name", OTHERS)
def test_the_transform_of_the_logits_is_found(name: str) -> None:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **OTHERS[name]})
    kind = getattr(transformers, f"{name}ForCausalLM", None) or transformers.GPT2LMHeadModel
    torch.manual_seed(0)
    model = kind(config).eval()
    if name == "Phi":
        torch.nn.init.normal_(model.lm_head.bias, std=2.0)
    each = batch(model)
    optimizer = adamw(model)
    sink = Sink()
    before = reference(model, each)
    with UpdateProbe(model, optimizer, sink, entropy=True) as probe:
        step(model, optimizer, [each], probe)
    assert probe.readout_metadata["verified"] is True
    expected = expected_rows(before, each, "pre")
    np.testing.assert_allclose(sink.column("pre_logprob"), expected["pre_logprob"], atol=1e-5)


def test_config_and_head_must_agree_on_the_vocabulary() -> None:
    model = tiny("llama")
    optimizer = adamw(model)
    model.config.vocab_size = 90
    with pytest.raises(ProbeError, match="the head has 96 rows and the vocabulary 90 ids"):
        UpdateProbe(model, optimizer, Sink())
    each = batch(model)
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, vocab_size=96) as probe:
        step(model, optimizer, [each], probe)
    assert np.abs(sink.deltas()).max() > 1e-3


class Adapted(torch.nn.Module):
    """What a low-rank adapter makes of a head: its weight is that of the layer below."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.weight = base.weight
        self.down = torch.nn.Parameter(torch.randn(4, base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.base_layer(hidden) + hidden @ self.down.T @ self.up.T


def test_a_head_with_an_adapter_is_refused() -> None:
    model = tiny("llama")
    model.lm_head = Adapted(model.lm_head)
    with pytest.raises(ProbeError, match="the head carries an adapter"):
        UpdateProbe(model, adamw(model), Sink())


def test_what_a_step_adds_to_the_logits_is_noticed() -> None:
    """An adapter that begins at zero passes the first comparison and not the one after."""
    model = tiny("llama")
    adapted = Adapted(model.lm_head)
    base = adapted.base_layer
    del adapted.base_layer  # so that nothing tells what it is

    def forward(hidden: torch.Tensor) -> Any:
        return base(hidden) + hidden @ adapted.down.T @ adapted.up.T

    adapted.forward = forward  # type: ignore[method-assign]
    model.lm_head = adapted
    each = batch(model)
    optimizer = adamw(model)
    with UpdateProbe(model, optimizer, Sink()) as probe:
        probe.expect(each.tokens)
        backward(surrogate(model(**each.inputs).logits, each))
        with pytest.raises(ProbeError, match="the model does something to its logits"):
            optimizer.step()


def test_a_head_without_a_plain_weight_is_refused() -> None:
    model = tiny("llama")
    with pytest.raises(ProbeError, match=r"the head \(Identity\) must have a plain floating-point"):
        UpdateProbe(model, adamw(model), Sink(), head=torch.nn.Identity(), vocab_size=96)
