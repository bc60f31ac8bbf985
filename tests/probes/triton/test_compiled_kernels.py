"""The kernels compile for GPUs that are not there: Triton brings all that this needs."""

from __future__ import annotations

from typing import Any

import pytest

from deltad.probes.triton.launch import Blocks

pytestmark = pytest.mark.slow

CASES = [(80, "bf16", Blocks(stages=2)), (90, "bf16", Blocks(vocab=256))]


@pytest.mark.parametrize(("arch", "dtype", "blocks"), CASES, ids=lambda each: str(each)[:12])
def test_the_sums_use_tensor_cores_and_fit_their_memory(
    arch: int, dtype: str, blocks: Blocks
) -> None:
    triton: Any = pytest.importorskip("triton")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deltad.probes.triton.kernels import sums_kernel

    constants = {
        "HAS_BIAS": False, "HAS_SCALE": False, "HAS_SOFTCAP": False, "COLLISION": True,
        "ENTROPY": False, "WIDEN": False, "SPLIT": 2048, "BLOCK_TOKENS": blocks.tokens,
        "BLOCK_VOCAB": blocks.vocab, "BLOCK_HIDDEN": blocks.hidden,
    }  # fmt: skip
    types = dict.fromkeys(("hidden", "weight", "bias"), f"*{dtype}")
    types |= dict.fromkeys(("pivot", "totals", "squares", "weights"), "*fp32")
    types |= dict.fromkeys(("scale", "softcap", "inverse_temperature"), "fp32")
    types |= dict.fromkeys(constants, "constexpr") | {"sorted_ids": "*i32"}
    names = sums_kernel.arg_names
    sixteen = [["tt.divisibility", 16]]
    even = {"vocab", "width", "hidden_stride", "weight_stride"}
    compiled = triton.compile(
        ASTSource(
            sums_kernel,
            signature={name: types.get(name, "i32") for name in names},
            constexprs=constants,
            attrs={
                (i,): sixteen
                for i, name in enumerate(names)
                if types.get(name, "").startswith("*") or name in even
            },
        ),
        target=GPUTarget("cuda", arch, 32),
        options={
            "num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True,
        },
    )  # fmt: skip
    assert ("wgmma" if arch >= 90 else "mma.sync") in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]  # the next tile is fetched meanwhile
    assert "atom" not in compiled.asm["ptx"]
    assert compiled.metadata.shared <= (227 if arch >= 90 else 99) * 1024
