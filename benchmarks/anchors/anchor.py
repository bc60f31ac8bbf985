"""What a peer's head is to the benchmark."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_TOGETHER = 64
"""Tokens whose rows of the weight are held at once."""

Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden (token, hidden), weight (vocab, hidden), ids (token, id)) → log-probs (token, id)."""


@dataclass(frozen=True)
class Anchor:
    """A head that training libraries use.

    Attributes
    ----------
    name : str
        Short, for tables.
    method : str
        What it does, and whether it is the library's own code or written here after it.
    read : callable
        Takes hidden states (token, hidden), the head's weight (vocab, hidden) and ids
        (token, id), none negative; gives log π there in nats, float32, shape (token, id). Peers
        that read one id a token do just that where one is asked for; where more are, the other
        log-probs are `rounded_dots` less the peer's own log-sum-exp.
    package : str or None
        Whose code it runs; None where it is written here.
    """

    name: str
    method: str
    read: Read
    package: str | None = None

    @property
    def source(self) -> str:
        """The package and its version, or that there is none."""
        if self.package is None:
            return "written here after its method"
        return f"{self.package} {importlib.metadata.version(self.package)}"


def rounded_dots(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Logits at some ids, rounded to the dtype of the hidden states as a matrix product is.

    Parameters
    ----------
    hidden : Tensor, shape (token, hidden)
        What enters the head.
    weight : Tensor, shape (vocab, hidden)
        Of the head.
    ids : Tensor of int, shape (token, id)
        Where.

    Returns
    -------
    Tensor of float32, shape (token, id)
        Of numbers that `hidden.dtype` has.
    """
    found = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(ids), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        exact = torch.einsum("th,tih->ti", hidden[part].float(), weight[ids[part]].float())
        found[part] = exact.to(hidden.dtype)
    return found
