"""The numbers that the paper reports, with their place, to lay next to ours.

Nothing here is measured by this package. The paper counts 61 seeds of one update with the top-K
KL divergence and compares its predictive criterion with the ratio rule.
"""

from __future__ import annotations

from typing import Final

from .question import Question

PAPER: Final = "arXiv:2607.10848"
FIGURE: Final = "Figure 4"

SEEDS: Final = 61
OUTSIDE_PER_SEED: Final = 1435
"""About; tokens outside the region."""
DISAGREEMENT_PER_SEED: Final = 82
SEEDS_LOWER: Final = 38
"""Seeds in which the predictive criterion has the lower unsafe-keep rate."""
UNSAFE_KEEP_RATES: Final = {"criterion": 0.342, "baseline": 0.369}
CONTRACTING_FRACTIONS: Final = {"criterion": 0.651, "baseline": 0.629}


def compares_with_paper(question: Question) -> bool:
    """Whether a pair is the paper's: a prediction of the KL against the ratio rule.

    Examples
    --------
    >>> compares_with_paper(Question()), compares_with_paper(Question(criterion="binary-tv"))
    (True, False)
    """
    criterion, baseline = question.rules
    return criterion.family == "kl" and baseline.name == "ratio"
