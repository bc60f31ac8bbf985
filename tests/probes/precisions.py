"""Processes in which somebody has set the precision of float32 products, or runs a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

MKLDNN: Any = torch.backends.mkldnn
CUDA: Any = torch.backends.cuda
ALL: Any = torch.backends


def legacy(value: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(value)


def switch(module: Any, value: str) -> Callable[[], None]:
    return lambda: setattr(module, "fp32_precision", value)


ENVIRONMENTS: dict[str, Callable[[], None]] = {
    "untouched": lambda: None,
    "legacy high": legacy("high"),
    "legacy medium": legacy("medium"),
    "cuda tf32": switch(CUDA.matmul, "tf32"),
    "cuda allow_tf32": lambda: setattr(CUDA.matmul, "allow_tf32", True),
    "mkldnn bf16": switch(MKLDNN.matmul, "bf16"),
    "mkldnn tf32": switch(MKLDNN.matmul, "tf32"),
    "all tf32": switch(ALL, "tf32"),
    "all bf16": switch(ALL, "bf16"),
}


def state() -> list[str]:
    """Everything that can be read of the setting; "raises" where torch refuses to say."""
    found = []
    for read in (
        lambda: MKLDNN.matmul.fp32_precision,
        lambda: CUDA.matmul.fp32_precision,
        torch.get_float32_matmul_precision,
        lambda: str(CUDA.matmul.allow_tf32),
    ):
        try:
            found.append(read())
        except RuntimeError:
            found.append("raises")
    return found


@pytest.fixture(params=ENVIRONMENTS)
def environment(request: pytest.FixtureRequest) -> Iterator[str]:
    """A process in which somebody has set the precision of float32 products."""
    ENVIRONMENTS[request.param]()
    yield request.param
    ALL.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for each in (MKLDNN.matmul, CUDA.matmul):
        each.fp32_precision = "none"


@contextmanager
def another_thread() -> Iterator[None]:
    """A thread that, for all that is known, may be training."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.addmm_.default,
}


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes by which setting and in which dtype matrix products are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.made.add((MKLDNN.matmul.fp32_precision, args[0].dtype))
        return func(*args, **(kwargs or {}))
