"""Which tokens are worth a forward, and which sequences are drawn."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from deltad.masks import Tokens, rule
from deltad.probes.selection import Keep, Selection
from deltad.support import topk_support


def tokens(seed: int = 0, count: int = 400) -> Tokens:
    """Policies on three ids of nine, some of them far apart."""
    generator = np.random.default_rng(seed)
    scale = generator.choice([0.05, 1.0], (count, 1))
    mu = _logs(generator.normal(size=(count, 9)))
    pi = _logs(mu + scale * generator.normal(size=(count, 9)))
    ids = np.argsort(-mu, 1)[:, :3].astype(np.int32)
    sampled = generator.integers(9, size=count).astype(np.int32)
    at = np.arange(count)
    support = topk_support(
        ids,
        np.take_along_axis(mu, ids, 1),
        np.take_along_axis(pi, ids, 1),
        sampled,
        mu[at, sampled],
        pi[at, sampled],
        vocab_size=9,
    )
    return Tokens(generator.normal(size=count), mu[at, sampled], pi[at, sampled], support)


def _logs(values: Any) -> Any:
    return values - np.log(np.exp(values).sum(1, keepdims=True))


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_what_is_wanted(divergence: str) -> None:
    some = tokens()
    d_pre = np.asarray(some.divergence(divergence))
    options: dict[str, Any] = {"divergence": divergence, "threshold": 0.1, "near": 0.03}
    wanted = {
        keep: Selection(keep=keep, **options).wanted(some)
        for keep in ("all", "outside", "near", "disagreement")
    }
    first, second = (
        rule(name).keeps(some, threshold=0.1, divergence=divergence)
        for name in (f"predictive-{divergence}-aggregated", "ratio")
    )
    assert wanted["all"].all()
    np.testing.assert_array_equal(wanted["outside"], d_pre > 0.1)
    np.testing.assert_array_equal(wanted["near"], d_pre > 0.03)
    np.testing.assert_array_equal(wanted["disagreement"], (d_pre > 0.1) & (first != second))
    assert 0 < wanted["disagreement"].sum() < wanted["outside"].sum() < wanted["near"].sum()


@pytest.mark.parametrize("keep", ["outside", "near", "disagreement"])
def test_slack_takes_what_rounding_could_carry_over_the_threshold(keep: Keep) -> None:
    some = tokens(1)
    selection = Selection(keep=keep, threshold=0.1, near=0.03)
    without, more = selection.wanted(some), selection.wanted(some, slack=0.02)
    d_pre = np.asarray(some.divergence("kl"))
    below = (d_pre <= selection.least) & (d_pre > selection.least - 0.02)
    np.testing.assert_array_equal(more, without | below)


def test_sequences_are_drawn_with_the_probability_that_their_weight_says() -> None:
    sequence = np.arange(200_000, dtype=np.int32)
    for share in (0.1, 0.5):
        drawn = Selection(sequences=share, seed=3).drawn(7, sequence)
        # Within four standard deviations of a binomial.
        assert abs(drawn.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(sequence))
    assert Selection(sequences=0.1).weight == 10


def test_draws_of_steps_and_seeds_have_nothing_to_do_with_each_other() -> None:
    sequence = np.arange(100_000, dtype=np.int32)
    draws = [
        Selection(sequences=0.5, seed=seed).drawn(step, sequence)
        for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1), (2**40, 0))
    ]
    for at, first in enumerate(draws):
        for second in draws[at + 1 :]:
            assert abs((first == second).mean() - 0.5) < 0.01


def test_a_draw_is_the_same_again_whatever_else_is_drawn_and_touches_no_generator() -> None:
    selection = Selection(sequences=0.3, seed=5)
    before = torch.get_rng_state(), random.getstate()
    whole = selection.drawn(2, np.arange(50, dtype=np.int32))
    few = selection.drawn(2, np.array([40, 3, 40], np.int32))
    assert few.tolist() == whole[[40, 3, 40]].tolist()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_what_a_dump_says_of_it() -> None:
    assert Selection().stored == {"rule": "all"}
    assert Selection().sampling is None
    assert Selection().whole
    near = Selection(keep="near", near=0.02, every=4)
    assert near.stored == {"rule": "above", "divergence": "kl", "threshold": 0.02}
    assert near.sampling == {"sequences": 1.0, "every": 4, "seed": 0}
    assert [step for step in range(9) if near.reads(step)] == [0, 4, 8]
    assert Selection(keep="disagreement", divergence="tv", threshold=0.2).stored == {
        "rule": "disagreement",
        "divergence": "tv",
        "threshold": 0.2,
        "criterion": "predictive-tv-aggregated",
        "baseline": "ratio",
        "outside": 0,
    }
