"""Every global generator goes back to where it was."""

from __future__ import annotations

import random

import numpy as np
import torch

from deltad.probes.random_state import RandomState


def draw() -> tuple[float, float, float, float]:
    numpy_draw = float(np.random.random())  # noqa: NPY002
    # The second normal number of a pair is kept aside by Python's and NumPy's generators.
    gauss = random.gauss(0, 1)
    return random.random(), numpy_draw, float(torch.rand(())), gauss


def test_restored_generators_draw_the_same_again() -> None:
    random.gauss(0, 1)
    state = RandomState.capture([torch.device("cpu")])
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first
    state.restore()
    assert draw() == first


def test_capturing_draws_nothing() -> None:
    before = RandomState.capture()
    RandomState.capture()
    first = draw()
    before.restore()
    assert draw() == first
