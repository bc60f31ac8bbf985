"""Numbers and questions in words, the same in text and in figures."""

from __future__ import annotations

import math
from typing import Final

from .question import Question
from .statistics import Interval

DASH: Final = "–"
"""Stands for an undefined number."""


def unit(question: Question) -> str:
    """The unit of D and ΔD with a space before it; nothing where D is a probability."""
    return " nats" if question.divergence == "kl" else ""


def region(question: Question) -> str:
    """The region: divergence, threshold and its unit."""
    return f"top-K {question.divergence.upper()} > {question.threshold:g}{unit(question)}"


def title(question: Question) -> str:
    """Pair and region in one line."""
    return f"{question.criterion} against {question.baseline} · outside: {region(question)}"


def number(value: float, *, signed: bool = False) -> str:
    """A share to three digits, a dash for NaN."""
    if math.isnan(value):
        return DASH
    return (f"{value:+.3f}" if signed else f"{value:.3f}").replace("-", "−")


def p_value(value: float) -> str:
    """A p-value to two significant digits, a dash for NaN."""
    return DASH if math.isnan(value) else f"{value:.2g}"


def with_interval(value: float, interval: Interval, *, signed: bool = False) -> str:
    """A share with its interval, which is left out where it is undefined."""
    low, high = interval
    if math.isnan(low):
        return number(value, signed=signed)
    ends = f"{number(low, signed=signed)}, {number(high, signed=signed)}"
    return f"{number(value, signed=signed)} [{ends}]"


def count(number_of: int, noun: str) -> str:
    """A count with its noun in the right number.

    Examples
    --------
    >>> count(1, "seed"), count(61, "seed")
    ('1 seed', '61 seeds')
    """
    return f"{number_of} {noun}" if number_of == 1 else f"{number_of} {noun}s"


def points(share: float) -> str:
    """A difference of shares in points.

    Examples
    --------
    >>> points(0.01), points(0.025)
    ('1 point', '2.5 points')
    """
    return "1 point" if round(100 * share, 9) == 1 else f"{100 * share:g} points"
