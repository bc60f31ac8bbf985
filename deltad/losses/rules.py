"""The rule behind the name that a loss is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from deltad.masks import CRITERIA, Criterion, CriterionError
from deltad.weights import Weight, weight

from .clip import clip_higher
from .conventions import Convention


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


def region_of(rule: Criterion | Weight) -> str:
    """The divergence that a rule's region is of where nobody says: its own, else KL."""
    if isinstance(rule, Criterion):
        if rule.family is not None:
            return rule.family
        if rule.name == "binary-tv":
            return "tv"
    return "tv" if rule.name == "drpo" else "kl"
