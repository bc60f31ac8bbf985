"""Which product is chosen, by what the device can multiply."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltad.probes import ProbeError
from deltad.probes.readout import Product, precision, readout

from .plain import inputs, likeliest


def chosen(hidden: Tensor, weight: Tensor, **options: bool) -> Product:
    return precision.product_of(
        hidden, weight, plain=options.get("plain", True), fusable=options.get("fusable", False)
    )


@pytest.mark.parametrize("native", [True, False])
def test_bfloat16_is_multiplied_as_it_is_only_where_the_processor_can(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: native)
    half, single = torch.zeros(2, 2).bfloat16(), torch.zeros(2, 2)
    assert chosen(half, half) == ("rounded" if native else "converted")
    assert chosen(half, half, plain=False) == "converted"
    assert chosen(half, single) == chosen(single, half) == chosen(single, single) == "converted"
    assert chosen(half.half(), half.half()) == "converted"
    # On a CPU the kernels run in an interpreter: only who asks for them gets them.
    assert chosen(single, single, fusable=True) == "converted"


def test_the_readout_takes_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _ = inputs(dtype=torch.bfloat16)
    ids = likeliest(hidden, weight)
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    found = readout(hidden, weight, ids).logprobs
    assert torch.equal(found, readout(hidden, weight, ids, product="rounded").logprobs)
    assert not torch.equal(found, readout(hidden, weight, ids, product="converted").logprobs)


@pytest.mark.parametrize(
    ("probe", "expected"),
    [("_is_amx_tile_supported", True), ("_is_avx512_bf16_supported", True), (None, False)],
)
def test_what_the_processor_says(
    monkeypatch: pytest.MonkeyPatch, probe: str | None, expected: bool
) -> None:
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == probe)
    assert precision.multiplies_bfloat16() is expected


@pytest.mark.parametrize("product", ["rounded", "widened", "fused"])
def test_a_product_that_cannot_be_had_is_refused(product: Product) -> None:
    hidden, weight, ids = inputs()
    with pytest.raises(ProbeError, match=f"`product` cannot be '{product}' for hidden states of"):
        readout(hidden, weight, ids, product=product)
    with pytest.raises(ProbeError, match="must be one of converted, rounded, widened, fused"):
        readout(hidden, weight, ids, product="exact")  # type: ignore[arg-type]
