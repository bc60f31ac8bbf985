"""What a support refuses: numbers that cannot be two probability distributions."""

from __future__ import annotations

import json
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Final

from deltad._array import Array

LOGPROB_TOLERANCE: Final = 1e-4
"""Nats by which a log-prob may exceed 0, and a support's mass 1, through rounding."""

ROUNDED_LOGITS_TOLERANCE: Final = 0.05
"""The same where logits were rounded to bfloat16 before the log-sum-exp."""

AGREEMENT_TOLERANCE: Final = 1e-4
"""Nats by which the sampled token's entry in the top-K may differ from its scalar."""


class SupportError(ValueError):
    """One token's numbers cannot be two probability distributions on a support.

    Attributes
    ----------
    row : int
        Index of the first offending token in the arrays given.
    reason : str
        What was found there and what was expected.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row = row
        self.reason = reason

    def __reduce__(self) -> tuple[type[SupportError], tuple[int, str]]:
        """Pickle by what the constructor takes, so that worker processes can raise it."""
        return SupportError, (self.row, self.reason)


def is_real(value: object) -> bool:
    """Whether this is a number of Python or NumPy."""
    return isinstance(value, Real)


def is_integer(value: object) -> bool:
    """Whether this is an integer of Python or NumPy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def printable(text: str) -> str:
    """Text from outside that any terminal prints on one line, escape characters spelled out."""
    words = " ".join(text.split())
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in words
    )


def parse_json(text: str | bytes) -> Any:
    """Parse a file's JSON; what is none, or is nested too deeply to be read, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def require(xp: Array, holds: Array, message: Callable[[int], str]) -> None:
    """Raise for the first row where `holds` is False."""
    if bool(xp.all(holds)):
        return
    row = int(xp.argmax(xp.astype(~holds, xp.int8)))
    raise SupportError(row, message(row))


def ids(xp: Array, topk_ids: Array, token_id: Array, vocab_size: int) -> None:
    """Ids lie in the vocabulary and none is listed twice."""
    require(
        xp,
        (token_id >= 0) & (token_id < vocab_size),
        lambda row: f"sampled id {int(token_id[row])} is not in [0, {vocab_size})",
    )
    possible = (topk_ids >= -1) & (topk_ids < vocab_size)
    require(
        xp,
        xp.all(possible, axis=-1),
        lambda row: (
            f"top-K id {int(topk_ids[row, int(xp.argmax(xp.astype(~possible[row], xp.int8)))])} "
            f"is neither -1 (padding) nor in [0, {vocab_size})"
        ),
    )
    ordered = xp.sort(topk_ids, axis=-1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    require(
        xp,
        ~xp.any(repeated, axis=-1),
        lambda row: (
            f"id {int(ordered[row, 1 + int(xp.argmax(xp.astype(repeated[row], xp.int8)))])} "
            "is listed twice in the top-K, expected distinct ids"
        ),
    )


def sampled(xp: Array, logprob: Array, who: str, tolerance: float) -> None:
    """A sampled token's log-prob is finite and at most 0."""
    require(
        xp,
        xp.isfinite(logprob) & (logprob <= tolerance),
        lambda row: (
            f"{who} log-prob of the sampled token is {float(logprob[row]):.6g}, "
            f"expected a finite number of nats, at most 0 (+ {tolerance:g} of rounding)"
        ),
    )


def slots(xp: Array, logprobs: Array, who: str, tolerance: float) -> None:
    """Log-probs in used slots are at most 0; only the behavior's may be −∞."""
    possible = logprobs <= tolerance  # False for NaN
    if who == "policy":
        possible = possible & xp.isfinite(logprobs)
    require(
        xp,
        xp.all(possible, axis=-1),
        lambda row: (
            f"{who} log-prob in slot "
            f"{(slot := int(xp.argmax(xp.astype(~possible[row], xp.int8))))} of the support is "
            f"{float(logprobs[row, slot]):.6g}, expected at most 0 (+ {tolerance:g} of rounding)"
            + ("" if who == "behavior" else " and finite")
        ),
    )


def agreement(xp: Array, listed: Array, scalar: Array, hit: Array, who: str) -> None:
    """The sampled token's entry equals its scalar."""
    zero = xp.zeros_like(listed)
    entry = xp.sum(xp.where(hit, listed, zero), axis=-1)
    gap = xp.abs(entry - scalar)
    require(
        xp,
        ~xp.any(hit, axis=-1) | (gap <= AGREEMENT_TOLERANCE),
        lambda row: (
            f"{who} log-prob of the sampled token is {float(scalar[row]):.6g}, but "
            f"{float(entry[row]):.6g} among the top-K; expected the same "
            f"within {AGREEMENT_TOLERANCE:g} nats"
        ),
    )
