"""What a criterion or a weight says of every token of a batch, padding and gaps included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deltad._checks import LOGPROB_TOLERANCE, SupportError
from deltad.masks import CRITERIA, Criterion, CriterionError, Tokens
from deltad.support import binary_support, topk_support
from deltad.weights import Weight, weight

from .conventions import Convention, clip_higher
from .topk import TopKLogprobs

HALF = -0.6931471805599453
"""log ½: stands in for what must not be read."""


@dataclass(frozen=True)
class Judged:
    """Tokens of one batch, flattened, with what must not be read replaced.

    Attributes
    ----------
    tokens : Tokens
        As criteria look at them; float64 where the device has it, so that a trainer decides as
        the analysis of its dump does.
    usable : Tensor of bool, shape (batch · token,)
        Response tokens of which every number is known.
    response : Tensor of bool, shape (batch · token,)
        The response mask.
    """

    tokens: Tokens
    usable: Tensor
    response: Tensor

    def divergence(self, name: str) -> Tensor:
        """D on the top-K support where there is one, else on {k, rest}; shape (batch · token,)."""
        if self.tokens.support is None:
            binary: Tensor = self.tokens.binary_divergence(name)
            return binary
        listed: Tensor = self.tokens.divergence(name)
        return listed

    @cached_property
    def positive(self) -> Tensor:
        """Â > 0, shape (batch · token,)."""
        positive: Tensor = self.tokens.advantage > 0
        return positive


def lay_out(
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    response: Tensor,
    *,
    topk: TopKLogprobs | None,
    full: Mapping[str, tuple[Tensor, Tensor]],
    drop_missing: bool,
    check: bool,
    tolerance: float = LOGPROB_TOLERANCE,
) -> Judged:
    """Flatten a batch for the criteria; whatever lies outside the mask is replaced.

    Parameters
    ----------
    logprob, behavior_logprob, advantage, response
        Shape (batch, token).
    topk
        Both policies at the top-K ids.
    full
        Divergence and direction over the vocabulary by divergence name, each (batch, token).
    drop_missing
        Leave out response tokens for which the behaviour policy's numbers are NaN.
    check
        Refuse impossible numbers; waits for the device.
    tolerance
        Rounding that is let pass, as in `topk_support`.

    Raises
    ------
    SupportError
        An impossible number, with the response and position that hold it.
    """
    wide = torch.float32 if logprob.device.type == "mps" else torch.float64
    usable = response
    if drop_missing or not check:
        usable = usable & ~behavior_logprob.isnan()
        if topk is not None:
            usable = usable & ~((topk.topk_ids >= 0) & topk.behavior.isnan()).any(dim=-1)

    def flat(values: Tensor, instead: float) -> Tensor:
        """One value a token, replaced where it must not be read."""
        fill = torch.full((), instead, dtype=wide, device=logprob.device)
        return torch.where(usable, values.detach().to(wide), fill).reshape(-1)

    log_mu, log_pi = flat(behavior_logprob, HALF), flat(logprob, HALF)
    support = None
    try:
        if topk is not None:
            ids = torch.where(usable[..., None], topk.listed_ids(), -1)
            support = topk_support(
                ids.flatten(0, 1),
                topk.behavior.detach().to(wide).flatten(0, 1),
                topk.policy.detach().to(wide).flatten(0, 1),
                torch.where(usable, topk.token_ids, 0).reshape(-1),
                log_mu,
                log_pi,
                vocab_size=topk.vocab_size,
                tolerance=tolerance,
                check=check,
            )
        elif check:
            binary_support(log_mu, log_pi, tolerance=tolerance)
    except SupportError as error:
        response_at, position = divmod(error.row, logprob.shape[1])
        raise SupportError(
            error.row, f"(response {response_at}, token {position} of the batch) {error.reason}"
        ) from None
    tokens = Tokens(
        advantage=flat(advantage, 0.0),
        behavior_logprob=log_mu,
        policy_logprob=log_pi,
        support=support,
        collision=None if topk is None or topk.collision is None else flat(topk.collision, 1.0),
        full={name: (flat(d, 0.0), flat(dot, 0.0)) for name, (d, dot) in full.items()},
    )
    return Judged(tokens, usable.reshape(-1), response.reshape(-1))


def rule_of(
    criterion: str | Criterion | Weight, convention: Convention, parameters: Mapping[str, float]
) -> tuple[Criterion | Weight, Mapping[str, float]]:
    """The rule behind a name, its own parameters taken in.

    Raises
    ------
    CriterionError
        An unknown name, or a parameter that the rule does not have.
    """
    if isinstance(criterion, Criterion):
        rule: Criterion | Weight = criterion
    elif isinstance(criterion, Weight):
        rule = criterion if criterion.criterion is None else criterion.criterion
    else:
        named = weight(criterion)
        rule = named if named.criterion is None else named.criterion
    if isinstance(rule, Weight):
        return rule, parameters
    own = dict(parameters)
    if rule is CRITERIA["clip-higher"]:
        bounds = {name: own.pop(name) for name in ("low", "high") if name in own}
        if bounds:
            rule = clip_higher(**bounds)
        own.pop("dual", None)
    if own:
        takes = "low, high, dual" if rule.name == "clip-higher" else "none"
        raise CriterionError(
            f"criterion {rule.name} has no parameter {', '.join(sorted(own))}; its own: {takes}"
        )
    return convention.adapt(rule), {}


def weigh(
    judged: Judged,
    rule: Criterion | Weight,
    *,
    threshold: tuple[float, float],
    divergence: str,
    parameters: Mapping[str, float],
) -> Tensor:
    """Weight of every token, shape (batch · token,); 0 where it must not be read."""

    def at(delta: float) -> Tensor:
        """The weight under one threshold."""
        if isinstance(rule, Weight):
            soft: Tensor = rule.compute(
                judged.tokens, threshold=delta, divergence=divergence, **parameters
            )
            return soft
        kept: Tensor = rule.keep(judged.tokens, threshold=delta, divergence=divergence)
        return kept.to(judged.tokens.behavior_logprob.dtype)

    low, high = threshold
    found = at(high) if low == high else torch.where(judged.positive, at(high), at(low))
    return torch.where(judged.usable, found, torch.zeros_like(found))


def region_of(rule: Criterion | Weight) -> str:
    """The divergence that a rule's region is of where nobody says: its own, else KL."""
    if isinstance(rule, Criterion):
        if rule.family is not None:
            return rule.family
        if rule.name == "binary-tv":
            return "tv"
    return "tv" if rule.name == "drpo" else "kl"
