"""Log-probs and top-K of logits over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.probes.engines import EngineError
from deltad.probes.engines.logits import response_from_logits

from .known import Known, is_union, knowns


@given(knowns(), st.floats(-50, 50), st.floats(0.3, 3.0))
def test_shifted_and_scaled_logits_give_the_distribution_back(
    known: Known, shift: float, temperature: float
) -> None:
    response = response_from_logits(
        "x", known.logprobs * temperature + shift, known.token_ids, sampling={"mode": "tempered"},
        divide_by=temperature, listed=known.top_k,
    )  # fmt: skip
    is_union(response, known, atol=1e-5)  # float32 log-probs sum to 1 within 1e-6


def test_masked_ids_have_no_place_in_the_list() -> None:
    lowest = np.finfo(np.float32).min
    logits = np.array([[0.0, lowest, -np.inf, 0.0], [0.0, 0.0, 0.0, 0.0]])
    response = response_from_logits("x", logits, [0, 3], sampling={}, listed=3)
    assert response.topk_ids.tolist() == [[0, 3, -1], [0, 1, 2]]
    np.testing.assert_allclose(np.exp(response.logprobs), [0.5, 0.25])
    assert response.missing_counts() == {"topk": {"truncated": 1}}


def test_a_masked_token_cannot_have_been_sampled() -> None:
    response = response_from_logits("x", [[0.0, -np.inf]], [1], sampling={}, listed=1)
    assert response.missing_counts() == {"logprob": {"minus-infinity": 1}}


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    response = response_from_logits("x", [[0.0, 1.0]], [1], sampling={}, listed=20)
    assert response.listed == 2
    assert response_from_logits("x", np.empty((0, 4)), [], sampling={}).listed == 4


@pytest.mark.parametrize(
    ("logits", "tokens", "options", "message"),
    [
        ([0.0], [0], {}, r"shape \(token, vocab\) for 1 tokens, got \(1,\)"),
        ([[0.0, 1.0]], [0, 1], {}, "for 2 tokens"),
        ([[0.0, 1.0]], [2], {}, r"position 0: token 2 is not in \[0, 2\)"),
        ([[0.0, np.nan]], [0], {}, "position 0: logits must not be NaN"),
        ([[-np.inf, -np.inf]], [0], {}, "every id is masked"),
        ([[0.0, 1.0]], [0], {"listed": -1}, "`listed` must not be negative"),
        ([[0.0, 1.0]], [0], {"divide_by": 0.0}, "must be above 0"),
    ],
)
def test_logits_that_are_none_are_refused(
    logits: Any, tokens: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        response_from_logits("x", logits, tokens, sampling={}, **options)
