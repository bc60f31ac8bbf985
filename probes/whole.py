"""D and Ḋ over the whole vocabulary, where all of the behavior policy is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from deltad.divergence import DIVERGENCES
from deltad.support import LOGPROB_TOLERANCE, full_support

from .behavior import ResponseTokens
from .errors import ProbeError
from .head import Head
from .rows import at_rows

_TOGETHER: Final = 1 << 22  # log-probs of whole vocabularies held at once, 32 MB


def checked_whole(
    tokens: ResponseTokens,
    sampled: Tensor,
    vocab_size: int,
    refuse_where: Callable[[Tensor, str], None],
) -> Tensor | None:
    """What the behavior policy gives to the whole vocabulary, if it is known.

    Parameters
    ----------
    tokens : ResponseTokens
        As the behavior policy gave them.
    sampled : Tensor of int, shape (row,)
        The sampled tokens.
    vocab_size : int
        n.
    refuse_where : callable
        Takes a mask of rows and what is wrong there; raises where one is True.

    Returns
    -------
    Tensor of float64, shape (row, vocab), or None
        On the CPU.

    Raises
    ------
    ProbeError
        Another number of ids, or log-probs that cannot be.
    """
    full = tokens.full_logprobs
    if full is None:
        return None
    if full.shape[-1] != vocab_size:
        raise ProbeError(
            f"`full_logprobs` must hold the {vocab_size} ids of the vocabulary, got "
            f"{full.shape[-1]}"
        )
    b, j = tokens.where()
    rows = at_rows(full, b, j).detach().cpu().double()
    mass = rows.exp().sum(-1)
    refuse_where(
        ~((mass - 1).abs() <= LOGPROB_TOLERANCE),
        "the probabilities in `full_logprobs` must add up to 1: give log-probs of the whole "
        "vocabulary at the sampling temperature",
    )
    given = at_rows(tokens.behavior_logprobs, b, j).cpu().double()
    same = rows.gather(1, sampled.cpu()[:, None])[:, 0]
    refuse_where(
        ~((same - given).abs() <= LOGPROB_TOLERANCE),
        "`full_logprobs` and `behavior_logprobs` differ at the sampled token",
    )
    return rows


def read_whole(
    behavior: Tensor, hidden: Tensor, sampled: Tensor, head: Head, options: Mapping[str, Any]
) -> dict[str, tuple[Tensor, Tensor]]:
    """D and Ḋ over the whole vocabulary, a few rows at a time.

    Parameters
    ----------
    behavior : Tensor of float64, shape (row, vocab)
        As `checked_whole` gives it.
    hidden : Tensor, shape (row, hidden)
        What enters the head.
    sampled : Tensor of int, shape (row,)
        The sampled tokens.
    head : Head
        Of the policy.
    options : mapping
        For `Head.read`.

    Returns
    -------
    dict of str to (Tensor, Tensor), each of shape (row,)
        D and Ḋ by divergence, in float64.
    """
    vocab = torch.arange(head.vocab_size, device=hidden.device)
    found = {family: [hidden.new_empty((2, 0), dtype=torch.float64)] for family in DIVERGENCES}
    step = max(1, _TOGETHER // head.vocab_size)
    for start in range(0, len(hidden), step):
        part = hidden[start : start + step]
        policy = head.read(part, vocab.expand(len(part), -1), **options).logprobs
        support = full_support(
            behavior[start : start + step].to(policy),
            policy,
            sampled[start : start + step].to(policy.device),
            check=False,  # `checked_whole` has done it, and names the token
        )
        for family, divergence in DIVERGENCES.items():
            pair = (divergence.value(support), divergence.direction(support).total)
            found[family].append(torch.stack(pair))
    whole = {family: torch.cat(parts, 1) for family, parts in found.items()}
    return {family: (each[0], each[1]) for family, each in whole.items()}
