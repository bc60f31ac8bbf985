"""The numbers that the paper reports, as data with their place, to lay beside ours.

Nothing here is measured by this package. The paper counts 61 seeds of one update with the
top-K KL divergence and compares its predictive criterion with the ratio rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PAPER: Final = "arXiv:2607.10848"
FIGURE: Final = "Figure 4"


@dataclass(frozen=True)
class Reported:
    """One number as the paper prints it.

    Attributes
    ----------
    value : float or int
        Rates and fractions as a share in [0, 1]; counts as they are.
    meaning : str
        What is counted.
    place : str
        Where the paper says so.
    """

    value: float
    meaning: str
    place: str = f"{FIGURE}, {PAPER}"


SEEDS: Final = Reported(61, "seeds")
OUTSIDE_PER_SEED: Final = Reported(1435, "tokens outside the region, about, a seed")
DISAGREEMENT_PER_SEED: Final = Reported(82, "tokens that exactly one criterion masks, a seed")
PREDICTIVE_UNSAFE_KEEP_RATE: Final = Reported(
    0.342, "share of the tokens kept by the predictive criterion that moved outward"
)
RATIO_UNSAFE_KEEP_RATE: Final = Reported(
    0.369, "share of the tokens kept by the ratio rule that moved outward"
)
SEEDS_LOWER: Final = Reported(38, "seeds in which the predictive criterion has the lower rate")
PREDICTIVE_CONTRACTING_FRACTION: Final = Reported(
    0.651, "share of the tokens kept by the predictive criterion that moved inward"
)
RATIO_CONTRACTING_FRACTION: Final = Reported(
    0.629, "share of the tokens kept by the ratio rule that moved inward"
)


def compares_with_paper(criterion: str, baseline: str) -> bool:
    """Whether a pair is the paper's: a predictive KL criterion against the ratio rule.

    Parameters
    ----------
    criterion, baseline : str
        Names of `deltad.masks.CRITERIA`.

    Returns
    -------
    bool
        False for every other pair: there is nothing in the paper to lay beside it.

    Examples
    --------
    >>> compares_with_paper("predictive-kl-aggregated", "ratio")
    True
    >>> compares_with_paper("binary-tv", "ratio")
    False
    """
    return criterion.startswith("predictive-kl-") and baseline == "ratio"
