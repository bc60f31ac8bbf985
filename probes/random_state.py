"""The state of every random number generator that a forward or a sampler draws from."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Python's, NumPy's (the global one) and torch's generators at one moment.

    Attributes
    ----------
    python, numpy : tuple
        As `random.getstate` and `numpy.random.get_state` give them.
    cpu : Tensor
        torch's CPU generator.
    cuda : dict of device to Tensor
        torch's generators on the devices asked for.
    """

    python: tuple[Any, ...]
    numpy: Any
    cpu: Tensor
    cuda: dict[torch.device, Tensor]

    @classmethod
    def capture(cls, devices: Iterable[torch.device] = ()) -> RandomState:
        """Read the generators.

        Parameters
        ----------
        devices : iterable of torch.device
            Where the model lives; the CPU is always read, devices other than CUDA's never.

        Returns
        -------
        RandomState
            Nothing is drawn by it.
        """
        return cls(
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002 - the global generator is what users may draw from
            torch.get_rng_state(),
            {
                device: torch.cuda.get_rng_state(device)
                for device in set(devices)
                if device.type == "cuda"
            },
        )

    def restore(self) -> None:
        """Put the generators back to where they were."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.cpu)
        for device, state in self.cuda.items():
            torch.cuda.set_rng_state(state, device)
