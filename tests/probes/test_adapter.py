"""Low-rank adapters on the head, with PEFT's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltad.probes import Ladder, ProbeError, UpdateProbe
from deltad.probes.adapter import low_rank
from deltad.probes.head import Head

from .precisions import Products, environment
from .tiny import Sink, batch, same_bits, tiny, weights
from .training import adamw, expected_rows, no_probe, reference, step

__all__ = ["environment"]

# Of transformers, said to PEFT, and of PEFT, on a bias that is refused here anyway.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
]


def adapted(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["lm_head", "q_proj"], **options}
    )
    return get_peft_model(tiny("llama"), config).train()


def test_the_head_is_read_with_its_adapter() -> None:
    results = []
    for probed in (False, True):
        model = adapted()
        each = batch(model)
        optimizer = adamw(model, lr=0.1)
        sink = Sink()
        expected = []
        around = UpdateProbe(model, optimizer, sink, entropy=True) if probed else no_probe()
        with around as probe:
            for _ in range(2):
                expected.append(reference(model, each))
                step(model, optimizer, [each], probe)
        expected.append(reference(model, each))
        results.append(weights(model))
    assert same_bits(*results)
    # What the adapter adds begins at zero, and is something in the second step.
    assert float((expected[2] - expected[1]).abs().max()) > 1e-2
    for index, (_, rows) in enumerate(sink.calls):
        for when, logprobs in (("pre", expected[index]), ("post", expected[index + 1])):
            for name, values in expected_rows(logprobs, each, when).items():
                np.testing.assert_allclose(rows[name], values, rtol=0, atol=1e-5, err_msg=name)
    assert probe is not None
    assert probe.readout_metadata["verified"] is True


def test_its_product_is_exact_where_the_process_allows_less(environment: str) -> None:
    head = Head.of(adapted())
    with Products() as products:
        low_rank(head.module, torch.zeros(2, head.weight.shape[1]), exclusive=True)
    ((setting, dtype),) = products.made
    assert setting in ("ieee", "none")
    assert dtype == torch.float32


def test_adapters_that_are_off_or_merged_add_nothing() -> None:
    model = adapted()
    each = batch(model)
    optimizer = adamw(model, lr=0.1)
    step(model, optimizer, [each])
    for context in (model.disable_adapter(), torch.no_grad()):
        with context:
            if isinstance(context, torch.no_grad):
                model.merge_adapter()
            sink = Sink()
            expected = expected_rows(reference(model, each), each, "pre")
            with UpdateProbe(model, optimizer, sink) as probe:
                probe.expect(each.tokens)
                model(**each.inputs)
                optimizer.step()
        found = sink.column("pre_logprob")
        np.testing.assert_allclose(found, expected["pre_logprob"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lora_dropout": 0.1}, "adapter default has dropout"),
        ({"use_dora": True}, "adapter default is a variant of LoRA"),
        ({"lora_bias": True}, "adapter default has a bias"),
    ],
)
def test_what_is_more_than_low_rank_is_refused(options: dict[str, Any], why: str) -> None:
    model = adapted(**options)
    with pytest.raises(ProbeError, match=why):
        UpdateProbe(model, adamw(model), Sink())


def test_the_ladder_knows_the_adapter() -> None:
    model = adapted()
    each = batch(model)
    optimizer = adamw(model, lr=1e-3)
    step(model, optimizer, [each])
    sink = Sink()
    with UpdateProbe(model, optimizer, sink, ladder=Ladder(tokens=2)) as probe:
        step(model, optimizer, [each], probe)
    assert probe.ladder_metadata["methods"]["update"] == "jvp"
    tenth, slope = sink.column("delta_tenth"), sink.column("linear_delta")
    np.testing.assert_allclose(tenth, 0.1 * slope, rtol=0.2, atol=2e-6)
