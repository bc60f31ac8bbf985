"""Precisions of a training: what the rollouts are computed in, and what the training is.

Low precisions are emulated: matrices are rounded as an engine or a trainer would hold them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deltad.probes.recipes.batch import SharedPrefix
from deltad.probes.recipes.weights import round_weights, rounded

from .options import Precision


class RoundedTraining:
    """Weights rounded in the forward and backward, float32 master weights in the step.

    Between optimizer steps the model holds rounded matrices; within a step, the master weights.
    Gradients are those at the rounded weights, applied to the master weights (straight-through).

    Parameters
    ----------
    model : nn.Module
        In float32; holds the master weights at first.
    optimizer : torch.optim.Optimizer
        Of all its parameters. An `UpdateProbe` must be entered after this, so that it reads
        *post* from rounded weights too.
    kind : {"exact", "bf16", "fp8"}
        As in `deltad.probes.recipes.weights.round_weights`; "exact" does nothing.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self._model, self._optimizer, self._kind = model, optimizer, kind
        self._master: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []

    @property
    def master(self) -> dict[str, torch.Tensor]:
        """The float32 weights by name, each once."""
        names = [name for name, _ in self._model.named_parameters()]
        held = self._master or [value.detach() for value in self._model.parameters()]
        return dict(zip(names, held, strict=True))

    def __enter__(self) -> Self:
        if self._kind != "exact":
            self._handles = [
                self._optimizer.register_step_pre_hook(lambda *_: self._put_back()),
                self._optimizer.register_step_post_hook(lambda *_: self._round()),
            ]
            self._round()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self._put_back()
        self._handles, self._master = [], []

    def _round(self) -> None:
        """Keep the master weights and round the model's."""
        self._master = [value.detach().clone() for value in self._model.parameters()]
        round_weights(self._model, self._kind)

    @torch.no_grad()
    def _put_back(self) -> None:
        """Give the model its master weights."""
        for value, master in zip(self._model.parameters(), self._master, strict=True):
            value.copy_(master)


_ARITHMETIC: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RolloutModel:
    """The policy as an engine would serve it: other weights, other arithmetic.

    Parameters
    ----------
    model : PreTrainedModel
        The trained one; its weights are taken over whenever `serving` is entered.
    precision : Precision
        `rollout_weights` and `rollout_arithmetic` are used.
    """

    def __init__(self, model: Any, precision: Precision) -> None:
        self._model = model
        self._weights = precision.rollout_weights
        dtype = _ARITHMETIC[precision.rollout_arithmetic]
        self._copy = None if dtype == torch.float32 else copy.deepcopy(model).to(dtype)

    @contextmanager
    def serving(self) -> Iterator[SharedPrefix]:
        """Give the policy as it stands now, to sample and to read log-probs from."""
        with rounded(self._model, self._weights):
            if self._copy is None:
                yield SharedPrefix(self._model)
                return
            with torch.no_grad():
                pairs = zip(self._copy.parameters(), self._model.parameters(), strict=True)
                for served, trained in pairs:
                    served.copy_(trained)
        yield SharedPrefix(self._copy)
