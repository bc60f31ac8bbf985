"""How much of ΔD may be rounding: a bound for each token."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from deltad.divergence import DIVERGENCES, KL_TAIL_FLOOR
from deltad.support import Support, topk_support

from .errors import ProbeError
from .readout import Readout
from .rows import Rows

Array = np.ndarray[Any, Any]

_SIGMAS: Final = 3.0
_STORED: Final = 2.0**-24  # float32 keeps a number to within this, relatively
_UNIT: Final = 2.0**-53
_UNLIMITED: Final = 1 << 31


def delta_d_noise(
    rows: Rows,
    pre: Readout,
    post: Readout,
    divergence: str = "kl",
    *,
    vocab_size: int | None = None,
) -> Array:
    r"""Bound on what rounding can have done to ΔD = D(μ‖π_post) − D(μ‖π_pre).

    A ΔD smaller than this has no sign that means anything.

    Parameters
    ----------
    rows : Rows
        Columns of the behavior policy: `topk_ids`, `topk_behavior_logprobs`, `token_id` and
        `behavior_logprob`, as they are stored.
    pre, post : Readout
        Of these rows, before and after the step, at the top-K ids and the sampled token.
    divergence : {"kl", "tv"}
        Which D.
    vocab_size : int, optional
        n, so that a support of the whole vocabulary is known to have no tail.

    Returns
    -------
    array of float64, shape (row,)
        In nats (a probability for TV), ≥ 0; NaN where a readout does not know its error.

    Raises
    ------
    ProbeError
        Another divergence, or readouts of other rows.

    Notes
    -----
    What is bounded is the distance from the ΔD that a float64 head and float64 columns would
    give *for the same hidden states and weights*. What the model's own forward rounds is in the
    hidden states and not in here; nor is an error of μ, which is the same before and after.

    **Rounding of the readout.** Over the support S and the tail t, π is a softmax of the logits
    z_i and of λ = log Σ_{j∉S} e^(z_j), all known up to independent errors σ_i and σ_t
    (`ReadoutError`). By the derivative of a divergence through a softmax,

    .. math:: \sigma_D^2 = \sum_{a \in S \cup \{t\}} g_a^2 \sigma_a^2, \qquad
              g_a^{KL} = \pi_a - \mu_a, \qquad
              g_a^{TV} = -\tfrac12 \pi_a \big(s_a - \textstyle\sum_b s_b \pi_b\big)

    with s = sign(μ − π). For KL the derivative of Σ μ log(μ/π) by a logit is π − μ: where the two
    policies agree, an error of the logits is an error of second order.

    **Storage.** log π_i is rounded to float32, by at most 2⁻²⁴ |log π_i| and evenly within, and
    π_t = 1 − Σ π_i is computed from what was stored, so that

    .. math:: \frac{\partial D}{\partial \log\pi_i} = -\mu_i + \mu_t \pi_i/\pi_t, \qquad
              \tfrac12 \pi_i (s_t - s_i)

    for KL and TV. Where the stored numbers leave π_t itself uncertain by a tenth or more, its
    logarithm is not linear any more: the term μ_t log π_t is then taken at both ends of the
    interval, no lower than the floor that D has.

    Variances before and after add up, for nothing makes their errors alike; that the same
    rounding partly cancels in the difference makes the bound cautious. The bound is three
    standard deviations. For TV, |μ_a − π_a| has a kink: an atom whose sign the errors leave open
    adds three times its own error to the bound.

    See Also
    --------
    deltad.probes.readout.rounding : where σ_i and σ_t come from.
    """
    if divergence not in DIVERGENCES:
        raise ProbeError(
            f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {divergence!r}"
        )
    shape = (len(rows["token_id"]), rows["topk_ids"].shape[1] + 1)
    for name, read in (("pre", pre), ("post", post)):
        if tuple(read.logprobs.shape) != shape:
            raise ProbeError(
                f"`{name}` must be a readout of {shape[0]} rows at {shape[1]} ids, the top-K and "
                f"the sampled token; got shape {tuple(read.logprobs.shape)}"
            )
    if pre.error is None or post.error is None:
        return np.full(shape[0], np.nan)
    sides = [_side(rows, read, divergence, vocab_size) for read in (pre, post)]
    variance = sides[0][0] + sides[1][0]
    found: Array = _SIGMAS * np.sqrt(variance) + sides[0][1] + sides[1][1]
    return found


def _side(
    rows: Rows, read: Readout, divergence: str, vocab_size: int | None
) -> tuple[Array, Array]:
    """Variance of D under one readout, and what is added to the bound as it is."""
    if read.error is None:
        raise ProbeError("a readout whose error is not known has no noise")
    logprobs = read.logprobs.cpu().numpy().astype(np.float64)
    support: Support = topk_support(
        rows["topk_ids"],
        rows["topk_behavior_logprobs"].astype(np.float64),
        logprobs[:, :-1],
        rows["token_id"],
        rows["behavior_logprob"].astype(np.float64),
        logprobs[:, -1],
        vocab_size=_UNLIMITED if vocab_size is None else vocab_size,
        check=False,
    )
    logit, tail = (each.cpu().numpy() for each in (read.error.logit, read.error.tail))
    mu = np.concatenate([support.mu, support.mu_tail[:, None]], 1)
    pi = np.concatenate([support.pi, support.pi_tail[:, None]], 1)
    sigma = np.concatenate([np.where(support.used, logit[:, None], 0.0), tail[:, None]], 1)
    # Half a unit in the last place: evenly distributed, so a third of its square is the variance.
    stored = _STORED * np.abs(support.log_pi) / np.sqrt(3)
    variance, extra = (_kl if divergence == "kl" else _tv)(mu, pi, sigma, stored)
    # What float64 itself rounds, in z − logsumexp and in the sum over the support.
    extra = extra + _UNIT * (4 * read.logsumexp.abs().cpu().numpy() + mu.shape[1])
    return variance, extra


def _kl(mu: Array, pi: Array, sigma: Array, stored: Array) -> tuple[Array, Array]:
    """KL: variance of D, nothing besides."""
    rounding = np.square((pi - mu) * sigma).sum(1)
    mu_s, mu_t, pi_s, pi_t = mu[:, :-1], mu[:, -1], pi[:, :-1], pi[:, -1]
    floored = np.maximum(pi_t, KL_TAIL_FLOOR)
    linear = np.square(((mu_t / floored)[:, None] * pi_s - mu_s) * stored).sum(1)
    reach = _SIGMAS * np.sqrt(np.square(pi_s * stored).sum(1)) + pi.shape[1] * _UNIT
    ends = np.log((pi_t + reach) / np.maximum(pi_t - reach, KL_TAIL_FLOOR))
    apart = np.square(mu_s * stored).sum(1) + np.square(mu_t * np.maximum(ends, 0.0) / _SIGMAS)
    return rounding + np.where(reach > 0.1 * pi_t, apart, linear), np.zeros(len(mu))


def _tv(mu: Array, pi: Array, sigma: Array, stored: Array) -> tuple[Array, Array]:
    """TV: variance of D, and the errors of atoms whose sign is open."""
    sign = np.sign(mu - pi)
    mean = (sign * pi).sum(1, keepdims=True)
    rounding = np.square(pi / 2 * (sign - mean) * sigma).sum(1)
    storage = np.square(pi[:, :-1] / 2 * (sign[:, -1:] - sign[:, :-1]) * stored).sum(1)
    # δπ_a = π_a (δz_a − Σ_b π_b δz_b), and what storage adds to it.
    common = np.square(pi * sigma).sum(1, keepdims=True)
    own = np.square(pi) * (np.square(sigma) + common)
    own[:, :-1] += np.square(pi[:, :-1] * stored)
    own[:, -1] += np.square(pi[:, :-1] * stored).sum(1)
    reach = _SIGMAS * np.sqrt(own)
    open_sign = np.abs(mu - pi) <= reach
    return rounding + storage, np.where(open_sign, reach, 0.0).sum(1)
