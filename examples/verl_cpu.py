"""A CPU platform for verl, so that its FSDP2 engine runs without a GPU; for examples and tests.

verl has no such platform itself. Import it before anything of verl that asks for a device
(`VERL_USE_EXTERNAL_MODULES=verl_cpu` does), with `VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device:
    """`torch.cpu`, with what verl asks of `torch.cuda`: memory is not counted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        return lambda *_, **__: {"mem_get_info": (1 << 34, 1 << 34), "get_device_name": "CPU"}.get(
            name, 0
        )


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """What verl's CUDA platform says, but of the CPU and over gloo."""

    device_name = "cpu"
    vendor_name = "nvidia"  # what the engine is registered for
    device_module = _Device()

    def is_available(self) -> bool:
        """Say that it is there."""
        return True

    def current_device(self) -> Any:
        """Where tensors go: the one CPU."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One."""
        return 1

    def communication_backend_name(self) -> str:
        """Gloo."""
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        """Mark nothing."""
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...
