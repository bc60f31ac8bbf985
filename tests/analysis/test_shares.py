"""Pooled shares."""

from __future__ import annotations

import math

import pytest

from deltad.analysis.shares import Share
from deltad.analysis.statistics import bootstrap_ratio


def test_a_share_is_pooled_and_its_interval_is_over_seeds() -> None:
    share = Share.of([1, 0, 3], [2, 0, 4], 7)
    assert (share.part, share.whole) == (4, 6)
    assert share.rate == pytest.approx(2 / 3)
    assert share.ci95 == bootstrap_ratio([1, 0, 3], [2, 0, 4], seed=7)
    first, second, third = share.by_seed
    assert (first, third) == (0.5, 0.75)
    assert math.isnan(second)


def test_a_share_of_nothing_is_undefined() -> None:
    for share in (Share.undefined(3), Share.of([], [])):
        assert math.isnan(share.rate)
        assert all(math.isnan(end) for end in share.ci95)
    assert len(Share.undefined(3).by_seed) == 3
