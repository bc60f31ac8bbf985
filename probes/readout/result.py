"""What a readout says of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ReadoutError:
    """How far rounding may have moved a readout: standard deviations, float64, in nats.

    Attributes
    ----------
    logit : Tensor, shape (token,)
        Of each logit z_i at the temperature, at the ids asked for.
    tail : Tensor, shape (token,)
        Of the logarithm of the mass of all other ids, log Σ e^z; 0 where they have none.
    """

    logit: Tensor
    tail: Tensor


@dataclass(frozen=True)
class Readout:
    """What a policy says at N positions; all tensors are float64.

    Attributes
    ----------
    logsumexp : Tensor, shape (token,)
        log Σ_j exp z_j of the logits z at the temperature, in nats.
    logprobs : Tensor, shape (token, id)
        log π at the ids asked for, in nats; NaN where the id was negative (padding).
    entropy : Tensor, shape (token,), or None
        −Σ_j π_j log π_j over the whole vocabulary, in nats; None where it was not asked for.
    collision : Tensor, shape (token,), or None
        Σ_j π_j² over the whole vocabulary, in (0, 1]; None where it was not asked for.
    full : mapping of str to (Tensor, Tensor), each of shape (token,)
        D and Ḋ over the whole vocabulary by divergence, where all of μ is known.
    error : ReadoutError or None
        What rounding may have done; None where it is not known.
    """

    logsumexp: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    collision: Tensor | None
    full: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    error: ReadoutError | None = None
