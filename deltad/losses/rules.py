"""The rule behind the name that a loss is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltad.masks import CRITERIA, Criterion, CriterionError
from deltad.weights import Weight, weight

from .clip import Clip
from .conventions import Convention
from .judgement import Judged


@dataclass(frozen=True)
class Rule:
    """What decides, with what is known of it.

    Attributes
    ----------
    decide : Criterion or Weight
        A criterion where it is one, as the convention computes it.
    parameters : mapping of str to float
        A soft weight's own; empty for a criterion.
    clip : Clip, optional
        The bounds where the criterion is clip-higher.
    """

    decide: Criterion | Weight
    parameters: Mapping[str, float] = field(default_factory=dict)
    clip: Clip | None = None

    @property
    def region(self) -> str:
        """The divergence that its region is of where nobody says: its own, else KL."""
        if isinstance(self.decide, Criterion) and self.decide.family is not None:
            return self.decide.family
        return "tv" if self.decide.name in ("binary-tv", "drpo") else "kl"


def rule_of(
    criterion: str | Criterion | Weight, convention: Convention, parameters: Mapping[str, float]
) -> Rule:
    """Look a rule up and take in its own parameters.

    Raises
    ------
    CriterionError
        An unknown name, or a parameter that the rule does not have.
    """
    if not isinstance(criterion, str | Criterion | Weight):
        raise CriterionError(
            f"`criterion` must be a name, a Criterion or a Weight, got {criterion!r}"
        )
    named = weight(criterion) if isinstance(criterion, str) else criterion
    decide = named.criterion or named if isinstance(named, Weight) else named
    if isinstance(decide, Weight):
        return Rule(decide, parameters)
    takes = ("low", "high", "dual") if decide is CRITERIA["clip-higher"] else ()
    unknown = sorted(parameters.keys() - set(takes))
    if unknown:
        raise CriterionError(
            f"criterion {decide.name} has no parameter {', '.join(unknown)}; its own: "
            f"{', '.join(takes) or 'none'}"
        )
    if takes:
        clip = Clip(**parameters)
        return Rule(clip.criterion(), clip=clip)
    return Rule(convention.adapt(decide))


def check_given(rule: Rule, *, collision: bool, full: Collection[str]) -> None:
    """Say which argument a rule lacks, where the rule itself would name a dump's column.

    Raises
    ------
    CriterionError
        The exact tail without a collision, or the whole vocabulary's divergence not given.
    """
    decide = rule.decide
    if "pre_collision" in decide.columns and not collision:
        raise CriterionError(
            f"criterion {decide.name} needs `collision` in `topk`: read it with "
            "`policy_logprobs(..., collision=True)`, or take another tail"
        )
    if decide.name.endswith("-full") and rule.region not in full:
        raise CriterionError(
            f"criterion {decide.name} needs `full[{rule.region!r}]`, D and Ḋ over the whole "
            "vocabulary: give it, or take another tail"
        )


def weigh(judged: Judged, rule: Rule, *, threshold: tuple[float, float], divergence: str) -> Tensor:
    """Weigh every token.

    Parameters
    ----------
    judged
        The tokens.
    rule
        What decides.
    threshold
        δ where Â ≤ 0, and where Â > 0.
    divergence
        The region's.

    Returns
    -------
    Tensor
        Shape (batch · token,); 0 where a token must not be read.

    Raises
    ------
    CriterionError
        As `Criterion.keep` and `Weight.compute`.
    """

    def at(delta: float) -> Tensor:
        """The weight under one threshold."""
        decide = rule.decide
        if isinstance(decide, Weight):
            weights = decide.compute(
                judged.tokens, threshold=delta, divergence=divergence, **rule.parameters
            )
        else:
            weights = decide.keep(judged.tokens, threshold=delta, divergence=divergence)
        found: Tensor = weights.to(judged.tokens.behavior_logprob.dtype)
        return found

    low, high = threshold
    found = at(high) if low == high else torch.where(judged.positive, at(high), at(low))
    return torch.where(judged.usable, found, torch.zeros_like(found))
