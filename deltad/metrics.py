"""The numbers that trainers log about two policies, by our name and by theirs.

All of them are made of `deltad.logprobs.LogprobSums`, so each is known for any number of
micro-batches and ranks together. `METRICS` says what is computed, which number of verl's or
TRL's is the same, and where theirs differs. A test runs verl 0.9.1's own functions
(`trainer/ppo/rollout_corr_helper.py`, `utils/debug/metrics.py`, the vanilla loss of
`trainer/ppo/core_algos.py`) on random batches and finds every name of verl's with the value that
is computed here, where the difference that is noted does not come in. TRL's names and definitions
were read in `trainer/grpo_trainer.py` and not run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from deltad.logprobs import LogprobSums, k1, k2, k3
from deltad.masks import CLIP_HIGH, CLIP_LOW

__all__ = [
    "METRICS",
    "LogprobSums",
    "Metric",
    "k1",
    "k2",
    "k3",
    "metric_values",
    "metrics_reference",
]


@dataclass(frozen=True)
class Metric:
    """One number that trainers log, and what it is made of.

    Attributes
    ----------
    name : str
        Ours.
    equation : str
        With ⟨·⟩ for the mean over tokens and ⟨·⟩_s for the mean over sequences.
    numerator : callable of LogprobSums to float
        What is divided; for an extreme, the value itself.
    denominator : callable of LogprobSums to float
        What it is divided by.
    finish : callable of float to float
        What is done with the quotient.
    theirs : tuple of str
        verl's and TRL's names of the same number, where their training policy is our π.
    difference : str
        Where theirs is not quite the same; empty where it is.
    """

    name: str
    equation: str
    numerator: Callable[[LogprobSums], float]
    denominator: Callable[[LogprobSums], float]
    finish: Callable[[float], float] = float
    theirs: tuple[str, ...] = ()
    difference: str = ""

    def value(self, sums: LogprobSums) -> float:
        """Compute it; NaN over nothing."""
        below = self.denominator(sums)
        return self.finish(self.numerator(sums) / below) if below > 0 else math.nan


def _tokens(sums: LogprobSums) -> float:
    """Denominator of a mean over tokens."""
    return sums.tokens


def _sequences(sums: LogprobSums) -> float:
    """Denominator of a mean over sequences."""
    return sums.sequences


def _mean_product(sums: LogprobSums) -> float:
    """Logarithm of the mean over sequences of Π_t r_t."""
    return sums.log_sequence_ratio - math.log(sums.sequences)


def _mean_square(sums: LogprobSums) -> float:
    """Logarithm of the mean over sequences of (Π_t r_t)²."""
    return sums.log_sequence_ratio_squared - math.log(sums.sequences)


def _exp(value: float) -> float:
    """Exponential, ∞ where it overflows."""
    return math.inf if value > _OVERFLOW else math.exp(value)


def _one_if(count: Callable[[LogprobSums], float]) -> Callable[[LogprobSums], float]:
    """Denominator of an extreme: 1 where there is anything."""
    return lambda sums: 1.0 if count(sums) else 0.0


def _standard_deviation(sums: LogprobSums) -> float:
    """Numerator of the variance of |π_k − μ_k|, which is divided by n − 1."""
    return max(sums.prob_diff_squared - sums.prob_diff**2 / sums.tokens, 0.0)


def _covariance(sums: LogprobSums) -> float:
    """Numerator of Pearson's correlation."""
    return sums.tokens * sums.mu_pi - sums.mu * sums.pi


def _spread(sums: LogprobSums) -> float:
    """Denominator of Pearson's correlation; 0 where one side is constant but for rounding."""
    product = 1.0
    for total, squares in ((sums.mu, sums.mu_squared), (sums.pi, sums.pi_squared)):
        spread = sums.tokens * squares - total**2
        product *= spread if spread > 1e-12 * sums.tokens * squares else 0.0
    return math.sqrt(product)


_OVERFLOW: Final = math.log(sys.float_info.max)
_BOUND: Final = "theirs bounds |log r| at 20"
_TRL: Final = "TRL averages over ranks, ours over tokens"
_TRL_TOKEN: Final = (
    "TRL's where `vllm_importance_sampling_mode` is `token_mask` or `token_truncate`"
)

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            Metric(
                "kl", "⟨log μ_k − log π_k⟩ = ⟨k1⟩", lambda s: s.k1, _tokens,
                theirs=("rollout_corr/kl", "actor/ppo_kl"),
                difference="`actor/ppo_kl` is of the trainer's old policy, which is μ in bypass "
                "mode alone, and averages over micro-batches",
            ),
            Metric("k2_kl", "⟨½ (log r)²⟩", lambda s: s.k2, _tokens),
            Metric(
                "k3_kl", "⟨r − 1 − log r⟩", lambda s: s.k3, _tokens,
                theirs=("rollout_corr/k3_kl",),
            ),
            Metric(
                "chi2_token", "⟨r²⟩ − 1", lambda s: s.ratio_squared, _tokens,
                finish=lambda mean: mean - 1, theirs=("rollout_corr/chi2_token",),
                difference=_BOUND,
            ),
            Metric(
                "chi2_seq", "⟨(Π_t r_t)²⟩_s − 1", _mean_square, _one_if(_sequences),
                finish=lambda log: _exp(log) - 1, theirs=("rollout_corr/chi2_seq",),
                difference="theirs bounds |Σ_t log r_t| at 20",
            ),
            Metric(
                "ess", "⟨r⟩² / ⟨r²⟩", lambda s: s.ratio**2,
                lambda s: s.tokens * s.ratio_squared,
                theirs=("rollout_corr/rollout_is_eff_sample_size",),
                difference="theirs is of the truncated weights (`rollout_is: token`), and is "
                "logged only where such weights are made",
            ),
            Metric(
                "ess_seq", "⟨Π_t r_t⟩_s² / ⟨(Π_t r_t)²⟩_s",
                lambda s: 2 * _mean_product(s) - _mean_square(s), _one_if(_sequences), finish=_exp,
            ),
            Metric(
                "sequence_ratio_mean", "⟨Π_t r_t⟩_s", _mean_product, _one_if(_sequences),
                finish=_exp, theirs=("sampling/importance_sampling_ratio/mean",),
                difference="theirs where `vllm_importance_sampling_mode` is `sequence_mask` (TRL's "
                "default) or `sequence_truncate`, after masking or truncation",
            ),
            Metric(
                "ratio_mean", "⟨r⟩", lambda s: s.ratio, _tokens,
                theirs=("rollout_corr/rollout_is_mean", "sampling/importance_sampling_ratio/mean"),
                difference=f"theirs is of the masked or truncated weights; {_TRL_TOKEN}; {_TRL}",
            ),
            Metric(
                "ratio_max", "max r", lambda s: s.ratio_max, _one_if(_tokens),
                theirs=("rollout_corr/rollout_is_max", "sampling/importance_sampling_ratio/max"),
                difference=f"theirs is of the masked or truncated weights; {_TRL_TOKEN}",
            ),
            Metric(
                "ratio_min", "min r", lambda s: s.ratio_min, _one_if(_tokens),
                theirs=("rollout_corr/rollout_is_min", "sampling/importance_sampling_ratio/min"),
                difference=f"theirs is of the weights, 0 where masked; {_TRL_TOKEN}",
            ),
            Metric(
                "behavior_ppl", "⟨exp(−mean_t log μ)⟩_s", lambda s: s.behavior_ppl, _sequences,
                theirs=("rollout_corr/rollout_ppl",),
            ),
            Metric(
                "policy_ppl", "⟨exp(−mean_t log π)⟩_s", lambda s: s.policy_ppl, _sequences,
                theirs=("rollout_corr/training_ppl",),
            ),
            Metric(
                "behavior_log_ppl", "⟨−mean_t log μ⟩_s", lambda s: s.behavior_log_ppl, _sequences,
                theirs=("rollout_corr/rollout_log_ppl",),
            ),
            Metric(
                "policy_log_ppl", "⟨−mean_t log π⟩_s", lambda s: s.policy_log_ppl, _sequences,
                theirs=("rollout_corr/training_log_ppl",),
            ),
            Metric(
                "log_ppl_diff", "⟨mean_t (log μ − log π)⟩_s",
                lambda s: s.policy_log_ppl - s.behavior_log_ppl, _sequences,
                theirs=("rollout_corr/log_ppl_diff",),
            ),
            Metric(
                "log_ppl_abs_diff", "⟨|mean_t (log μ − log π)|⟩_s", lambda s: s.log_ppl_abs_diff,
                _sequences, theirs=("rollout_corr/log_ppl_abs_diff",),
            ),
            Metric(
                "log_ppl_diff_max", "max_s mean_t (log μ − log π)", lambda s: s.log_ppl_diff_max,
                _one_if(_sequences), theirs=("rollout_corr/log_ppl_diff_max",),
            ),
            Metric(
                "log_ppl_diff_min", "min_s mean_t (log μ − log π)", lambda s: s.log_ppl_diff_min,
                _one_if(_sequences), theirs=("rollout_corr/log_ppl_diff_min",),
            ),
            Metric(
                "ppl_ratio", "⟨exp(mean_t (log μ − log π))⟩_s", lambda s: s.ppl_ratio, _sequences,
                theirs=("rollout_corr/ppl_ratio",),
            ),
            Metric(
                "logprob_diff_mean", "⟨|log π_k − log μ_k|⟩", lambda s: s.logprob_diff, _tokens,
                theirs=("sampling/sampling_logp_difference/mean",), difference=_TRL,
            ),
            Metric(
                "logprob_diff_max", "max |log π_k − log μ_k|", lambda s: s.logprob_diff_max,
                _one_if(_tokens), theirs=("sampling/sampling_logp_difference/max",),
            ),
            Metric(
                "prob_diff_mean", "⟨|π_k − μ_k|⟩", lambda s: s.prob_diff, _tokens,
                theirs=("training/rollout_probs_diff_mean",),
            ),
            Metric(
                "prob_diff_max", "max |π_k − μ_k|", lambda s: s.prob_diff_max, _one_if(_tokens),
                theirs=("training/rollout_probs_diff_max",),
            ),
            Metric(
                "prob_diff_std", "standard deviation of |π_k − μ_k|, n − 1 below",
                lambda s: _standard_deviation(s), lambda s: s.tokens - 1, finish=math.sqrt,
                theirs=("training/rollout_probs_diff_std",),
            ),
            Metric(
                "prob_pearson", "Pearson's correlation of π_k and μ_k", _covariance, _spread,
                theirs=("training/rollout_actor_probs_pearson_corr",),
            ),
            Metric(
                "clip_fraction",
                f"⟨Â > 0 and r > {1 + CLIP_HIGH:g}, or Â < 0 and r < {1 - CLIP_LOW:g}⟩",
                lambda s: s.clipped, lambda s: s.clip_tokens,
                theirs=("actor/pg_clipfrac", "clip_ratio/region_mean"),
                difference="theirs is of the trainer's old policy and its own clip range, and is "
                "averaged over micro-batches (ranks)",
            ),
        )
    }
)  # fmt: skip
"""Every metric by name, in the order of the documentation's table."""


def metric_values(sums: LogprobSums) -> dict[str, float]:
    """Compute every metric of some sums.

    Parameters
    ----------
    sums : LogprobSums
        Of any number of batches.

    Returns
    -------
    dict of str to float
        By name; NaN where there is nothing to compute it of.

    Examples
    --------
    >>> import numpy as np
    >>> sums = LogprobSums.of(np.log([0.5, 0.5]), np.log([0.25, 0.5]))
    >>> round(metric_values(sums)["k3_kl"], 4), metric_values(sums)["ppl_ratio"]
    (0.0966, nan)
    """
    return {name: metric.value(sums) for name, metric in METRICS.items()}


def metrics_reference() -> str:
    """Table of all metrics in Markdown; `docs/metrics.md` shows it.

    Returns
    -------
    str
        One row per metric: name, equation, verl's and TRL's names, differences.
    """
    rows = ["| metric | equation | verl, TRL | where theirs differs |", "| --- | --- | --- | --- |"]
    for metric in METRICS.values():
        theirs = ", ".join(f"`{name}`" for name in metric.theirs)
        cells = (f"`{metric.name}`", metric.equation, theirs, metric.difference)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
