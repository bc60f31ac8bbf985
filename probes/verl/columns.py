"""One value a token, as verl's engine carries them from its logits to its output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deltad.losses import PolicyLogprobs, policy_logprobs
from deltad.losses.vocab_parallel import vocab_parallel_logprobs
from deltad.probes.errors import ProbeError
from deltad.probes.readout import Readout

from .fields import TOPK_IDS, has_topk, responses_of

COLLISION: Final = "deltad_collision"
ENTROPY: Final = "deltad_entropy"
_ID: Final = "deltad_id_{}"

Columns = dict[str, Tensor]
"""By name a tensor of shape (1, position): the engine gathers each over its sequence ranks."""


@dataclass(frozen=True)
class Layout:
    """How a training engine lays out the positions whose logits it hands over.

    Attributes
    ----------
    data_format : str, optional
        Megatron's "thd" or "bshd"; None for the FSDP engine.
    """

    data_format: str | None = None

    @property
    def vocab_parallel(self) -> bool:
        """Whether each rank of a tensor-parallel group has the logits of some ids only."""
        return self.data_format is not None

    def local(self, values: Tensor, offsets: Tensor) -> Tensor:
        """What this rank holds of a value a token, shape (sequence, position, …).

        Parameters
        ----------
        values : Tensor, shape (token, …)
            Of all responses and their prompts, one after the other.
        offsets : Tensor of int, shape (response + 1,)
            Where each begins.
        """
        if self.data_format is None:
            from verl.utils.ulysses import (
                get_ulysses_sequence_parallel_world_size,
                slice_input_tensor,
            )

            whole = values[None]
            if get_ulysses_sequence_parallel_world_size() > 1:
                whole = slice_input_tensor(whole, dim=1)
            return whole
        from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine

        lay_out = preprocess_thd_engine if self.data_format == "thd" else preprocess_bshd_engine
        nested = torch.nested.nested_tensor_from_jagged(values, offsets)
        laid: Tensor = lay_out(nested, pre_process=True)[0]
        return laid


def ids_of(data: Any, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids whose log-probs are wanted at each position that this rank holds.

    Returns
    -------
    tuple of Tensor
        The next token, shape (sequence, position), and μ's top-K, (sequence, position, topk),
        or None where it is not known.
    """
    input_ids = data["input_ids"]
    offsets = input_ids.offsets().to(device)
    flat = input_ids.values().to(device)
    # At a prompt's or response's last token it is the first of what follows: never a row.
    following = layout.local(torch.roll(flat, -1, 0), offsets).long()
    if not has_topk(data):
        return following, None
    listed = data[TOPK_IDS].values().to(device)
    return following, layout.local(listed, offsets).long()


@torch.no_grad()
def read_logits(logits: Tensor, data: Any, layout: Layout, *, vocab_size: int) -> Columns:
    """Log-probs, collision and entropy of the logits that an engine hands over.

    Parameters
    ----------
    logits : Tensor, shape (sequence, position, vocab)
        At the temperature already; with a vocabulary spread over ranks this rank's part.
    data : TensorDict
        The micro-batch.
    layout : Layout
        Of the engine.
    vocab_size : int
        n of the model's config.

    Returns
    -------
    Columns
        float32, whatever the logits are rounded to.
    """
    token_ids, topk_ids = ids_of(data, layout, logits.device)
    if token_ids.shape != logits.shape[:-1]:
        raise ProbeError(
            f"the engine hands over logits of shape {tuple(logits.shape)} for "
            f"{tuple(token_ids.shape)} positions: this layout is not known"
        )
    if layout.vocab_parallel:
        from megatron.core.parallel_state import get_tensor_model_parallel_group

        found = vocab_parallel_logprobs(
            logits,
            token_ids,
            topk_ids,
            group=get_tensor_model_parallel_group(),
            vocab_size=vocab_size,
            collision=True,
            entropy=True,
        )
    else:
        if logits.shape[-1] < vocab_size:
            raise ProbeError(
                f"the engine hands over logits of {logits.shape[-1]} ids and the vocabulary has "
                f"{vocab_size}"
            )
        found = policy_logprobs(
            logits[..., :vocab_size], token_ids, topk_ids, collision=True, entropy=True
        )
    return pack(found)


def pack(found: PolicyLogprobs) -> Columns:
    """Name a column a value."""
    if found.collision is None or found.entropy is None:
        raise ProbeError("collision and entropy are wanted too")
    each = [] if found.topk is None else list(found.topk.unbind(-1))
    columns = {_ID.format(index): values for index, values in enumerate([*each, found.logprob])}
    return {**columns, COLLISION: found.collision, ENTROPY: found.entropy}


def unpack(output: Mapping[str, Any], data: Any) -> PolicyLogprobs:
    """From the columns in an engine's output to what they are of the responses.

    Parameters
    ----------
    output : mapping of str to Tensor
        The engine's `model_output`.
    data : TensorDict
        The batch it is of.

    Returns
    -------
    PolicyLogprobs
        Of shape (response, token), without gradient.
    """
    names = [name for name in output if name.startswith(_ID.format(""))]
    laid = [responses_of(output[_ID.format(index)], data).detach() for index in range(len(names))]
    if not laid:
        raise ProbeError("the engine did not hand over its logits: is its head fused with a loss?")
    return PolicyLogprobs(
        laid[-1],
        torch.stack(laid[:-1], -1) if len(laid) > 1 else None,
        responses_of(output[COLLISION], data).detach(),
        responses_of(output[ENTROPY], data).detach(),
    )


def readout_of(found: PolicyLogprobs, mask: Tensor) -> Readout:
    """The rows of a batch as the dump's columns are made of, on the CPU in float64.

    Parameters
    ----------
    found : PolicyLogprobs
        Of shape (response, token).
    mask : Tensor of bool, shape (response, token)
        Response tokens, on the CPU.
    """
    if found.collision is None or found.entropy is None:
        raise ProbeError("collision and entropy are wanted too")
    sampled = found.logprob.cpu()[mask].double()
    listed = (
        torch.full((len(sampled), 1), torch.nan, dtype=torch.float64)
        if found.topk is None
        else found.topk.cpu()[mask].double()
    )
    return Readout(
        logsumexp=torch.zeros_like(sampled),  # of log-probs
        logprobs=torch.cat([listed, sampled[:, None]], 1),
        entropy=found.entropy.cpu()[mask].double(),
        collision=found.collision.cpu()[mask].double(),
    )
