"""What an option for others' way of writing changes, and what it leaves alone.

That these are others' ways is shown where their code runs: `test_trl_dppo.py`, `test_trl_grpo.py`
and the tests of the verl plugin.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from deltad.losses import CONVENTIONS, trust_region_loss
from deltad.masks import CRITERIA
from tests.losses.batch import draw, gradient, run

each_convention = pytest.mark.parametrize("name", CONVENTIONS)


@each_convention
@pytest.mark.parametrize("criterion", CRITERIA)
def test_keeps_and_gradients_agree_away_from_the_edges(name: str, criterion: str) -> None:
    batch = draw(0)
    options: dict[str, Any] = {"criterion": criterion, "convention": name}
    assert torch.equal(run(batch, **options).keep, run(batch, criterion=criterion).keep)
    torch.testing.assert_close(
        gradient(batch, **options), gradient(batch, criterion=criterion), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    ("name", "criterion", "value"),
    [
        ("paper", "binary-kl", "ratio"),
        ("paper", "clip-higher", "ratio"),
        ("trl", "binary-kl", "logprob"),
        ("trl", "clip-higher", "clip"),
        ("verl", "ratio", "logprob"),
        ("verl", "clip-higher", "clip"),
    ],
)
def test_the_value_read_is_the_conventions(name: str, criterion: str, value: str) -> None:
    batch = draw(1)
    found = run(batch, criterion=criterion, convention=name).loss.item()
    assert found == run(batch, criterion=criterion, value=value).loss.item()
    others = {"ratio", "logprob", "clip"} - {value} - ({"clip"} - {criterion[:4]})
    for other in others:
        assert found != run(batch, criterion=criterion, value=other).loss.item()


def test_only_verl_bounds_the_log_ratio() -> None:
    """e^20 is about 4.9e8, e^25 about 7.2e10."""
    log_mu = torch.tensor([[-25.5]], dtype=torch.float64)
    log_pi = torch.tensor([[-0.5]], dtype=torch.float64)
    one = torch.ones(1, 1)
    for name, expected in (("paper", 25), ("trl", 25), ("verl", 20)):
        found = trust_region_loss(
            log_pi, log_mu, one, one, criterion="none", convention=name, value="ratio"
        )
        assert -found.loss.item() == pytest.approx(math.exp(expected), rel=1e-12)


@each_convention
@pytest.mark.parametrize("gap", [1e-3, 1e-7, 1e-10])
def test_binary_kl_near_certainty(name: str, gap: float) -> None:
    """μ_k = 0.98, π_k = 1 − gap: D = 0.98 log(0.98/π_k) + 0.02 log(0.02/gap), the gap as taken."""
    taken = {"paper": gap, "trl": max(gap, 1e-7), "verl": gap + 1e-8}[name]
    expected = 0.98 * math.log(0.98 / (1 - gap)) + 0.02 * math.log(0.02 / taken)
    log_mu, log_pi = (
        torch.log1p(-torch.tensor([[rest]], dtype=torch.float64)) for rest in (0.02, gap)
    )
    one = torch.ones(1, 1)
    # The decision flips where δ passes D.
    for threshold, kept in ((expected - 1e-5, False), (expected + 1e-5, True)):
        found = trust_region_loss(
            log_pi,
            log_mu,
            one,
            one,
            criterion="binary-kl",
            threshold=threshold,
            convention=name,
        )
        assert bool(found.keep) == kept


def test_every_convention_says_whose_it_is() -> None:
    assert list(CONVENTIONS) == ["paper", "trl", "verl"]
    assert all(convention.source for convention in CONVENTIONS.values())
