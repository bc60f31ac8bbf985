"""Where the hidden states of a training forward are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltad.probes import ProbeError, UpdateProbe

from .tiny import (
    Sink,
    backward,
    batch,
    tiny,
)
from .training import (
    adamw,
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
