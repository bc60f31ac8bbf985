"""Two policies at one token, reduced to the support S and one tail bucket.

A serving engine returns log-probs for a handful of ids, so μ and π are compared on a
*support* S of known ids, and all other ids fall into one bucket, the tail. Three supports
cover every use: the behavior policy's top-K united with the sampled token, the whole
vocabulary (no tail), and the sampled token alone (the binary support of PPO-like masks).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deltad import _checks
from deltad._array import Array, namespace
from deltad._checks import LOGPROB_TOLERANCE, ROUNDED_LOGITS_TOLERANCE, SupportError

__all__ = [
    "LOGPROB_TOLERANCE",
    "ROUNDED_LOGITS_TOLERANCE",
    "Support",
    "SupportError",
    "binary_support",
    "full_support",
    "topk_support",
]


@dataclass(frozen=True)
class Support:
    """μ and π on a support S and one tail bucket, a row a token.

    Arrays are of shape (token, slot) or (token,), all of one dtype and device. Slots that a
    token does not use hold probability 0 and log-prob 0.

    Attributes
    ----------
    log_mu, log_pi : Array, shape (token, slot)
        Log-probs in nats, at most 0.
    mu, pi : Array, shape (token, slot)
        Probabilities.
    used : Array of bool, shape (token, slot)
        Slots that hold an id of S.
    sampled : Array of bool, shape (token, slot)
        True at the one slot that holds the sampled token k.
    mu_tail, pi_tail : Array, shape (token,)
        Mass outside S, max(0, 1 − Σ_S); 0 where S is the whole vocabulary. The sum of m
        rounded probabilities makes it uncertain by about m/2 units in the last place of 1.
    tail_size : Array, shape (token,)
        n − |S|, the number of ids in the tail, never below 0.
    tolerance : float
        Excess over 1 that counts as rounding, in nats and in mass.
    """

    log_mu: Array
    log_pi: Array
    mu: Array
    pi: Array
    used: Array
    sampled: Array
    mu_tail: Array
    pi_tail: Array
    tail_size: Array
    tolerance: float

    @property
    def log_mu_sampled(self) -> Array:
        """Log μ_k in nats, shape (token,)."""
        return self._at_sampled(self.log_mu)

    @property
    def log_pi_sampled(self) -> Array:
        """Log π_k in nats, shape (token,)."""
        return self._at_sampled(self.log_pi)

    @property
    def mu_sampled(self) -> Array:
        """μ_k, shape (token,)."""
        return self._at_sampled(self.mu)

    @property
    def pi_sampled(self) -> Array:
        """π_k, shape (token,)."""
        return self._at_sampled(self.pi)

    def with_policy(
        self, topk_policy_logprobs: Array, policy_logprob: Array, *, check: bool = True
    ) -> Support:
        """Put another policy, say the one after the step, on the same top-K support.

        Parameters
        ----------
        topk_policy_logprobs : Array, shape (token, topk)
            log π at the behavior policy's top-K ids, in nats.
        policy_logprob : Array, shape (token,)
            log π_k in nats.
        check : bool
            Refuse impossible values; False spares a device synchronisation.

        Returns
        -------
        Support
            The same S and μ with the new π.

        Raises
        ------
        SupportError
            As `topk_support`.
        """
        xp = namespace(self.mu)
        if check:
            _checks.sampled(xp, policy_logprob, "policy", self.tolerance)
            _checks.agreement(
                xp, topk_policy_logprobs, policy_logprob, self.sampled[:, :-1], "policy"
            )
        log_pi = _join(xp, topk_policy_logprobs, policy_logprob)
        return _with_policy(xp, self, log_pi, check=check)

    def _at_sampled(self, values: Array) -> Array:
        """Value of the sampled token's slot."""
        xp = namespace(values)
        return xp.sum(xp.where(self.sampled, values, xp.zeros_like(values)), axis=-1)


def topk_support(
    topk_ids: Array,
    topk_behavior_logprobs: Array,
    topk_policy_logprobs: Array,
    token_id: Array,
    behavior_logprob: Array,
    policy_logprob: Array,
    *,
    vocab_size: int,
    tolerance: float = LOGPROB_TOLERANCE,
    check: bool = True,
) -> Support:
    """Reduce both policies to S = top-K of μ united with the sampled token, and a tail.

    Where the sampled token is among the top-K its entry there is used, otherwise its scalar
    takes a slot of its own, so S holds K or K + 1 ids.

    Parameters
    ----------
    topk_ids : Array of int, shape (token, topk)
        The behavior policy's top-K ids, distinct; −1 pads.
    topk_behavior_logprobs, topk_policy_logprobs : Array, shape (token, topk)
        log μ and log π at those ids, in nats; never read where the id is −1. log μ may be −∞.
    token_id : Array of int, shape (token,)
        Sampled token k.
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats.
    vocab_size : int
        n. Where |S| = n there is no tail.
    tolerance : float
        Excess of a log-prob over 0, and of a mass over 1, that counts as rounding.
    check : bool
        Refuse impossible values; False spares a device synchronisation.

    Returns
    -------
    Support
        With K + 1 slots.

    Raises
    ------
    SupportError
        A repeated id or one outside the vocabulary, NaN, a log-prob above `tolerance`, −∞
        where it cannot be, an entry that disagrees with its scalar, or a mass above
        1 + `tolerance`; names the first such row.
    TypeError
        Log-probs that are neither float32 nor float64.

    Examples
    --------
    The engine returned id 7 (μ = 0.5); id 3 was sampled (μ = 0.1), of a vocabulary of 10:

    >>> import numpy as np
    >>> log = lambda *p: np.log(np.asarray(p))
    >>> s = topk_support(
    ...     np.asarray([[7]]), log(0.5)[None], log(0.25)[None],
    ...     np.asarray([3]), log(0.1), log(0.35), vocab_size=10,
    ... )
    >>> s.mu.round(3).tolist(), s.mu_tail.round(3).tolist(), s.tail_size.tolist()
    ([[0.5, 0.1]], [0.4], [8.0])
    """
    xp = namespace(topk_behavior_logprobs)
    listed_used = topk_ids >= 0
    hit = listed_used & (topk_ids == token_id[:, None])
    unlisted = ~xp.any(hit, axis=-1)
    if check:
        _checks.ids(xp, topk_ids, token_id, vocab_size)
        for logprob, who in ((behavior_logprob, "behavior"), (policy_logprob, "policy")):
            _checks.sampled(xp, logprob, who, tolerance)
        _checks.agreement(xp, topk_behavior_logprobs, behavior_logprob, hit, "behavior")
        _checks.agreement(xp, topk_policy_logprobs, policy_logprob, hit, "policy")
    return _support(
        xp,
        _join(xp, topk_behavior_logprobs, behavior_logprob),
        _join(xp, topk_policy_logprobs, policy_logprob),
        used=xp.concat([listed_used, unlisted[:, None]], axis=-1),
        sampled=xp.concat([hit, unlisted[:, None]], axis=-1),
        vocab_size=vocab_size,
        tolerance=tolerance,
        check=check,
    )


def full_support(
    behavior_logprobs: Array,
    policy_logprobs: Array,
    token_id: Array,
    *,
    tolerance: float = LOGPROB_TOLERANCE,
    check: bool = True,
) -> Support:
    """Take the whole vocabulary for S, so that there is no tail.

    Parameters
    ----------
    behavior_logprobs, policy_logprobs : Array, shape (token, vocab)
        log μ and log π in nats; log μ may be −∞.
    token_id : Array of int, shape (token,)
        Sampled token k.
    tolerance, check
        As in `topk_support`.

    Returns
    -------
    Support
        With a slot for each id of the vocabulary.

    Raises
    ------
    SupportError
        As `topk_support`.
    """
    xp = namespace(behavior_logprobs)
    vocab_size = behavior_logprobs.shape[-1]
    ids = xp.arange(vocab_size, dtype=token_id.dtype, device=token_id.device)
    sampled = ids[None, :] == token_id[:, None]
    if check:
        _checks.require(
            xp,
            xp.any(sampled, axis=-1),
            lambda row: f"sampled id {int(token_id[row])} is not in [0, {vocab_size})",
        )
        for logprobs, who in ((behavior_logprobs, "behavior"), (policy_logprobs, "policy")):
            at_sampled = xp.where(sampled, logprobs, xp.zeros_like(logprobs))
            _checks.sampled(xp, xp.sum(at_sampled, axis=-1), who, tolerance)
    return _support(
        xp,
        behavior_logprobs,
        policy_logprobs,
        used=xp.ones_like(sampled),
        sampled=sampled,
        vocab_size=vocab_size,
        tolerance=tolerance,
        check=check,
    )


def binary_support(
    behavior_logprob: Array,
    policy_logprob: Array,
    *,
    tolerance: float = LOGPROB_TOLERANCE,
    check: bool = True,
) -> Support:
    """Take S = {k}: the sampled token against everything else.

    Parameters
    ----------
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats.
    tolerance, check
        As in `topk_support`.

    Returns
    -------
    Support
        With one slot; its tail is the rest of the vocabulary, taken as one atom.

    Raises
    ------
    SupportError
        NaN, an infinite log-prob or one above `tolerance`; names the first such row.
    """
    xp = namespace(behavior_logprob)
    if check:
        for logprob, who in ((behavior_logprob, "behavior"), (policy_logprob, "policy")):
            _checks.sampled(xp, logprob, who, tolerance)
    every = xp.ones_like(behavior_logprob[:, None], dtype=xp.bool)
    return _support(
        xp,
        behavior_logprob[:, None],
        policy_logprob[:, None],
        used=every,
        sampled=every,
        vocab_size=2,
        tolerance=tolerance,
        check=check,
    )


def _support(
    xp: Array,
    log_mu: Array,
    log_pi: Array,
    *,
    used: Array,
    sampled: Array,
    vocab_size: int,
    tolerance: float,
    check: bool,
) -> Support:
    """Fill a Support from log-probs a slot."""
    tail_size = vocab_size - xp.sum(xp.astype(used, log_mu.dtype), axis=-1)
    tail_size = xp.where(tail_size > 0, tail_size, xp.zeros_like(tail_size))
    log_mu, mu, mu_tail = _distribution(
        xp, log_mu, used, tail_size, "behavior", tolerance, check=check
    )
    empty = Support(log_mu, log_mu, mu, mu, used, sampled, mu_tail, mu_tail, tail_size, tolerance)
    return _with_policy(xp, empty, log_pi, check=check)


def _with_policy(xp: Array, support: Support, log_pi: Array, *, check: bool) -> Support:
    """Replace π by log-probs a slot."""
    log_pi, pi, pi_tail = _distribution(
        xp, log_pi, support.used, support.tail_size, "policy", support.tolerance, check=check
    )
    return dataclasses.replace(support, log_pi=log_pi, pi=pi, pi_tail=pi_tail)


def _distribution(
    xp: Array,
    logprobs: Array,
    used: Array,
    tail_size: Array,
    who: str,
    tolerance: float,
    *,
    check: bool,
) -> tuple[Array, Array, Array]:
    """Clamped log-probs, probabilities and tail mass of one policy."""
    if logprobs.dtype not in (xp.float32, xp.float64):
        raise TypeError(
            f"{who} log-probs must be float32 or float64, got {logprobs.dtype}: convert them, "
            "for half precision cannot hold a divergence"
        )
    zero = xp.zeros_like(logprobs)
    logprobs = xp.where(used, logprobs, zero)
    if check:
        _checks.slots(xp, logprobs, who, tolerance)
    logprobs = xp.where(logprobs > 0, zero, logprobs)
    probs = xp.where(used, xp.exp(logprobs), zero)
    mass = xp.sum(probs, axis=-1)
    if check:
        _checks.require(
            xp,
            mass <= 1 + tolerance,
            lambda row: (
                f"{who} probabilities of the support sum to {float(mass[row]):.6g}, "
                f"expected at most 1 + {tolerance:g}"
            ),
        )
    tail = xp.where((tail_size > 0) & (mass < 1), 1 - mass, xp.zeros_like(mass))
    return logprobs, probs, tail


def _join(xp: Array, listed: Array, scalar: Array) -> Array:
    """Append the sampled token's value to the listed ones as the last slot."""
    return xp.concat([listed, xp.astype(scalar[:, None], listed.dtype)], axis=-1)
