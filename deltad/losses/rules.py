"""The rule behind the name that a loss is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deltad.masks import RULES, CriterionError, Rule, rule

from .clip import Clip
from .conventions import Convention
from .judgement import Judged


@dataclass(frozen=True)
class Chosen:
    """What decides, as the convention computes it, and its bounds where it is clip-higher."""

    rule: Rule
    clip: Clip | None = None


def chosen(
    criterion: str | Rule, convention: Convention, parameters: Mapping[str, float]
) -> Chosen:
    """Look a rule up and take in its own parameters.

    Raises
    ------
    CriterionError
        An unknown name, or a parameter that the rule does not have.
    """
    found = rule(criterion)
    if found is not RULES["clip-higher"]:
        return Chosen(convention.adapt(found.with_parameters(parameters)))
    dual = {name: value for name, value in parameters.items() if name == "dual"}
    bounds = {name: value for name, value in parameters.items() if name != "dual"}
    made = found.with_parameters(bounds)
    return Chosen(made, Clip(**made.parameters, **dual))


def check_given(decides: Rule, *, collision: bool, full: Collection[str]) -> None:
    """Say which argument a rule lacks, where the rule itself would name a dump's column.

    Raises
    ------
    CriterionError
        The exact tail without a collision, the whole vocabulary's divergence not given, or a
        column that only a dump has.
    """
    if "pre_collision" in decides.columns and not collision:
        raise CriterionError(
            f"criterion {decides.name} needs `collision` in `topk`: read it with "
            "`policy_logprobs(..., collision=True)`, or take another tail"
        )
    if f"full_{decides.family}_pre" in decides.columns and decides.family not in full:
        raise CriterionError(
            f"criterion {decides.name} needs `full[{decides.family!r}]`, D and Ḋ over the whole "
            "vocabulary: give it, or take another tail"
        )
    if missing := [name for name in decides.needs if name != "pre_collision"]:
        raise CriterionError(
            f"rule {decides.name} needs the column `{missing[0]}` of a dump, which a loss does not "
            "have"
        )


def weigh(
    judged: Judged,
    decides: Rule,
    *,
    threshold: tuple[float, float],
    divergence: str,
    check: bool = True,
) -> Tensor:
    """Weigh every token.

    Parameters
    ----------
    judged
        The tokens.
    decides
        The rule.
    threshold
        δ where Â ≤ 0, and where Â > 0.
    divergence
        The region's.
    check
        As `Rule.keeps` takes it.

    Returns
    -------
    Tensor
        Shape (batch · token,); 0 where a token must not be read.

    Raises
    ------
    CriterionError
        As `Rule.weigh`.
    """
    low, high = threshold

    def at(delta: float) -> Tensor:
        """The weight under one threshold."""
        found: Tensor = decides.weigh(
            judged.tokens, threshold=delta, divergence=divergence, check=check
        )
        return found

    found = at(high) if low == high else torch.where(judged.positive, at(high), at(low))
    return torch.where(judged.usable, found, torch.zeros_like(found))
