"""Sums over the sampled tokens' log-probs under two policies; micro-batches and ranks add up.

With log μ_k of the behaviour policy, log π_k of the policy and r = π_k/μ_k. `deltad.metrics`
says which numbers are made of these sums.

The KL that the estimators here estimate is *forward*, with samples of μ:

    KL(μ‖π) = E_μ[log μ − log π] = E_μ[k1] = E_μ[k3],

the direction of every divergence in `deltad.divergence`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad._array import Array, namespace
from deltad.masks import CLIP_HIGH, CLIP_LOW

LOG_RATIO_BOUND: Final = 300.0
"""|log r| beyond which a token's r counts as e^±300, so that sums of r² stay finite in float64.

verl and TRL bound it, and its sum over a sequence, at 20.
"""

LOG_PPL_BOUND: Final = 600.0
"""Log-perplexity beyond which a perplexity counts as e^600, so that sums stay finite."""


def k1(behavior_logprob: Array, policy_logprob: Array) -> Array:
    """Estimator of KL(μ‖π) under samples of μ: log μ_k − log π_k.

    Parameters
    ----------
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats.

    Returns
    -------
    Array, shape (token,)
        In nats, of either sign; E_μ[k1] = KL(μ‖π).

    Examples
    --------
    >>> import numpy as np
    >>> k1(np.log([0.5]), np.log([0.25])).round(4).tolist()
    [0.6931]
    """
    return behavior_logprob - policy_logprob


def k2(behavior_logprob: Array, policy_logprob: Array) -> Array:
    """Estimator of KL(μ‖π) that is biased and never negative: ½ (log r)².

    Parameters
    ----------
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats.

    Returns
    -------
    Array, shape (token,)
        In [0, ∞) nats; E_μ[k2] equals KL(μ‖π) to second order in π − μ.

    Examples
    --------
    >>> import numpy as np
    >>> k2(np.log([0.5]), np.log([0.25])).round(4).tolist()
    [0.2402]
    """
    log_ratio = policy_logprob - behavior_logprob
    return 0.5 * log_ratio * log_ratio


def k3(behavior_logprob: Array, policy_logprob: Array) -> Array:
    """Estimator of KL(μ‖π) that is unbiased and never negative: r − 1 − log r.

    Parameters
    ----------
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats.

    Returns
    -------
    Array, shape (token,)
        In [0, ∞) nats. E_μ[k3] = KL(μ‖π) where π puts no mass on what μ cannot sample; under
        truncated sampling it lies below by that mass.

    Notes
    -----
    Schulman, "Approximating KL divergence" (2020). log r is bounded at LOG_RATIO_BOUND.

    Examples
    --------
    >>> import numpy as np
    >>> k3(np.log([0.5]), np.log([0.25])).round(4).tolist()
    [0.1931]
    """
    xp = namespace(behavior_logprob)
    log_ratio = policy_logprob - behavior_logprob
    return xp.expm1(_bounded(xp, log_ratio)) - log_ratio


def _add_logs(first: float, second: float) -> float:
    """Logarithm of the sum of two numbers that are given by theirs."""
    with np.errstate(invalid="ignore"):  # NaN stays
        return float(np.logaddexp(first, second))


@dataclass(frozen=True)
class LogprobSums:
    """Sums and extremes over tokens and over sequences; those of two batches can be added.

    A sequence must lie in one batch as a whole, or it counts as several.

    Attributes
    ----------
    tokens, sequences : float
        How many there are.
    clip_tokens, clipped : float
        Tokens whose advantage is known, and those of them that clip-higher drops.
    log_sequence_ratio, log_sequence_ratio_squared : float
        Logarithms of the sums over sequences of Π_t r_t and of its square, which overflow and
        underflow in long sequences; −∞ without any, NaN where they are not known.
    """

    tokens: float = 0.0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    logprob_diff: float = 0.0
    prob_diff: float = 0.0
    prob_diff_squared: float = 0.0
    mu: float = 0.0
    pi: float = 0.0
    mu_squared: float = 0.0
    pi_squared: float = 0.0
    mu_pi: float = 0.0
    clip_tokens: float = 0.0
    clipped: float = 0.0
    sequences: float = 0.0
    behavior_ppl: float = 0.0
    policy_ppl: float = 0.0
    behavior_log_ppl: float = 0.0
    policy_log_ppl: float = 0.0
    log_ppl_abs_diff: float = 0.0
    ppl_ratio: float = 0.0
    ratio_max: float = field(default=-math.inf, metadata={"merge": max})
    ratio_min: float = field(default=math.inf, metadata={"merge": min})
    logprob_diff_max: float = field(default=-math.inf, metadata={"merge": max})
    prob_diff_max: float = field(default=-math.inf, metadata={"merge": max})
    log_ppl_diff_max: float = field(default=-math.inf, metadata={"merge": max})
    log_ppl_diff_min: float = field(default=math.inf, metadata={"merge": min})
    log_sequence_ratio: float = field(default=-math.inf, metadata={"merge": _add_logs})
    log_sequence_ratio_squared: float = field(default=-math.inf, metadata={"merge": _add_logs})

    @classmethod
    def of(
        cls,
        behavior_logprob: Array,
        policy_logprob: Array,
        *,
        advantage: Array | None = None,
        sequence: Array | None = None,
    ) -> LogprobSums:
        """Sum over the tokens of one batch.

        Parameters
        ----------
        behavior_logprob, policy_logprob : Array, shape (token,)
            log μ_k and log π_k in nats, finite.
        advantage : Array, shape (token,), optional
            Â, for the clip fraction.
        sequence : Array of int, shape (token,), optional
            Number of the response that each token belongs to, for perplexities and all that is
            counted by sequence. Tokens of a response must all be here.

        Returns
        -------
        LogprobSums
            In float64.

        Raises
        ------
        ValueError
            Arrays of different shapes.

        Examples
        --------
        >>> import numpy as np
        >>> sums = LogprobSums.of(np.log([0.5, 0.5]), np.log([0.25, 0.5]))
        >>> round(sums.k3 / sums.tokens, 4)
        0.0966
        """
        log_mu, log_pi = _host(behavior_logprob), _host(policy_logprob)
        extra = {"policy_logprob": log_pi}
        if advantage is not None:
            extra["advantage"] = _host(advantage)
        if sequence is not None:
            extra["sequence"] = _host(sequence)
        for name, values in extra.items():
            if values.shape != log_mu.shape or values.ndim != 1:
                raise ValueError(
                    f"`{name}` must be of the shape (token,) of `behavior_logprob`, "
                    f"{log_mu.shape}, got {values.shape}"
                )
        found = _token_sums(log_mu, log_pi)
        if advantage is not None:
            found |= _clip_sums(log_mu, log_pi, extra["advantage"])
        if sequence is not None:
            found |= _sequence_sums(log_mu, log_pi, extra["sequence"])
        return cls(**found)

    @classmethod
    def by_sequence(
        cls, behavior_logprob: Array, policy_logprob: Array, sequence: Array
    ) -> LogprobSums:
        """Sum what is counted by sequence and nothing else, for tokens that were summed apart.

        Parameters
        ----------
        behavior_logprob, policy_logprob, sequence
            As in `of`.

        Returns
        -------
        LogprobSums
            With `tokens` 0.
        """
        return cls(**_sequence_sums(*map(_host, (behavior_logprob, policy_logprob, sequence))))

    def __add__(self, other: LogprobSums) -> LogprobSums:
        """Both batches together."""
        return LogprobSums(
            **{
                each.name: each.metadata.get("merge", _add)(
                    getattr(self, each.name), getattr(other, each.name)
                )
                for each in dataclasses.fields(self)
            }
        )


def _host(values: Array) -> NDArray[Any]:
    """A tensor of any device, or an array, as float64 (integers stay what they are)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    found: NDArray[Any] = np.asarray(values)
    return found.astype(np.float64) if found.dtype.kind == "f" else found


def _add(first: float, second: float) -> float:
    """Sum of two."""
    return first + second


def _bounded(xp: Any, log_ratio: Array) -> Array:
    """Log r within ±LOG_RATIO_BOUND."""
    high = xp.where(log_ratio > LOG_RATIO_BOUND, LOG_RATIO_BOUND, log_ratio)
    return xp.where(high < -LOG_RATIO_BOUND, -LOG_RATIO_BOUND, high)


def _token_sums(log_mu: NDArray[Any], log_pi: NDArray[Any]) -> dict[str, float]:
    """What is summed over tokens."""
    if not len(log_mu):
        return {}
    ratio = np.exp(_bounded(np, log_pi - log_mu))
    mu, pi = np.exp(np.minimum(log_mu, 0)), np.exp(np.minimum(log_pi, 0))
    gap, shift = np.abs(log_pi - log_mu), np.abs(pi - mu)
    sums = {
        "k1": k1(log_mu, log_pi),
        "k2": k2(log_mu, log_pi),
        "k3": k3(log_mu, log_pi),
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "logprob_diff": gap,
        "prob_diff": shift,
        "prob_diff_squared": shift**2,
        "mu": mu,
        "pi": pi,
        "mu_squared": mu**2,
        "pi_squared": pi**2,
        "mu_pi": mu * pi,
    }
    return {
        "tokens": float(len(log_mu)),
        **{name: float(values.sum()) for name, values in sums.items()},
        "ratio_max": float(ratio.max()),
        "ratio_min": float(ratio.min()),
        "logprob_diff_max": float(gap.max()),
        "prob_diff_max": float(shift.max()),
    }


def _clip_sums(
    log_mu: NDArray[Any], log_pi: NDArray[Any], advantage: NDArray[Any]
) -> dict[str, float]:
    """Tokens that clip-higher drops, and those that it judged."""
    ratio = np.exp(_bounded(np, log_pi - log_mu))
    dropped = ((advantage > 0) & (ratio > 1 + CLIP_HIGH)) | (
        (advantage < 0) & (ratio < 1 - CLIP_LOW)
    )
    return {"clip_tokens": float(len(advantage)), "clipped": float(np.count_nonzero(dropped))}


def _sequence_sums(
    log_mu: NDArray[Any], log_pi: NDArray[Any], sequence: NDArray[Any]
) -> dict[str, float]:
    """What is summed over sequences."""
    if not len(sequence):
        return {}
    _, place = np.unique(sequence, return_inverse=True)
    length = np.bincount(place)
    behavior, policy = (np.bincount(place, values) / length for values in (-log_mu, -log_pi))
    difference = policy - behavior
    log_ratio = np.bincount(place, log_pi - log_mu)
    sums = {
        "behavior_ppl": np.exp(np.minimum(behavior, LOG_PPL_BOUND)),
        "policy_ppl": np.exp(np.minimum(policy, LOG_PPL_BOUND)),
        "behavior_log_ppl": behavior,
        "policy_log_ppl": policy,
        "log_ppl_abs_diff": np.abs(difference),
        "ppl_ratio": np.exp(np.minimum(difference, LOG_PPL_BOUND)),
    }
    return {
        "sequences": float(len(length)),
        **{name: float(values.sum()) for name, values in sums.items()},
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "log_sequence_ratio": float(np.logaddexp.reduce(log_ratio)),
        "log_sequence_ratio_squared": float(np.logaddexp.reduce(2 * log_ratio)),
    }
