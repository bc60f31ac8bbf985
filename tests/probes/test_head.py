"""From the model's own words to its logits."""

from __future__ import annotations

import numpy as np
import pytest

from deltad.probes import ProbeError, UpdateProbe

from .tiny import (
    Sink,
    batch,
    tiny,
)
from .training import (
    Plain,
    adamw,
    expected_rows,
    reference,
    step,
)


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
    with UpdateProbe(model, optimizer, sink, head=model.out, vocab_size=96) as probe:
        step(model, optimizer, [each], probe)
    assert probe.readout_metadata["verified"] is True
    expected = expected_rows(before, each, "pre")
    np.testing.assert_allclose(sink.column("pre_logprob"), expected["pre_logprob"], atol=1e-5)
