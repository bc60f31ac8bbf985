"""The object of all engines: what it refuses, what it says of itself."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from deltad.probes import ProbeError
from deltad.probes.engines import EngineError, EngineResponse, Missing, shared_metadata

from .known import unlisted

NAN, INF = float("nan"), float("inf")


def response(**changes: Any) -> EngineResponse:
    """Two tokens, K = 2; the second was sampled outside its list."""
    fields: dict[str, Any] = {
        "engine": "vllm",
        "token_ids": [5, 3],
        "logprobs": np.log([0.25, 0.125]),
        "topk_ids": [[9, 5], [1, -1]],
        "topk_logprobs": [np.log([0.5, 0.25]), [np.log(0.5), NAN]],
        "mode": "processed",
        "request": "r1",
    }
    return EngineResponse(**{**fields, **changes})


def test_what_is_given_is_kept_in_its_types_and_cannot_be_changed() -> None:
    made = response(prompt_ids=[1, 2], texts=("a", "b"))
    assert len(made) == 2
    assert made.listed == 2
    assert made.token_ids.dtype == made.topk_ids.dtype == np.int64
    assert made.logprobs.dtype == made.topk_logprobs.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        made.token_ids[0] = 1


@pytest.mark.parametrize(
    ("changes", "message", "position"),
    [
        ({"token_ids": [[5, 3]]}, "`token_ids` must have one dimension", None),
        ({"token_ids": [5.5, 3]}, "`token_ids` is not an array of int64", None),
        ({"logprobs": [0.0]}, "`logprobs` must have the shape", None),
        ({"topk_ids": [9, 5]}, "`topk_ids` must have shape", None),
        ({"topk_logprobs": [[0.0], [0.0]]}, "`topk_logprobs` must have the shape", None),
        ({"token_ids": [5, -2]}, "at least 0, got -2", 1),
        ({"token_ids": [5, -1]}, "`token_id` is missing without a reason", 1),
        ({"logprobs": [np.log(0.25), NAN]}, "`logprob` is missing without a reason", 1),
        ({"logprobs": [np.log(0.25), -INF]}, "it was sampled", 1),
        ({"logprobs": [np.log(0.25), 2.5]}, "must be at most 0 nats, got 2.5: are these logits", 1),
        ({"topk_ids": [[9, 5], [1, -3]]}, "got -3", 1),
        ({"topk_ids": [[9, 5], [-1, 1]]}, "padding", 1),
        ({"topk_ids": [[9, 9], [1, -1]]}, "id 9 is listed twice", 0),
        ({"topk_ids": [[9, 5], [1, 4]]}, "the listed id 4 has no log-prob", 1),
        (
            {"topk_ids": [[5, 9], [1, -1]], "topk_logprobs": [np.log([0.25, 0.5]), [-1, NAN]]},
            "must descend, got -1.38629 before -0.693147",
            0,
        ),
        ({"logprobs": np.log([0.26, 0.125])}, "but -1.38629 in its list", 0),
        ({"logprobs": np.log([0.25, 0.9])}, "must sum to at most 1, got 1.4", 1),
        ({"support": "replaced-last"}, "must hold the sampled token 3", 1),
        ({"support": "first"}, "`support` must be one of union, replaced-last", None),
        ({"mode": "cooked"}, "`mode` must be one of raw, tempered", None),
        ({"temperature": -1.0}, "`temperature` must be a finite number", None),
        ({"texts": ("a",)}, "`texts` must hold 2 texts, got 1", None),
        ({"prompt_ids": [[1]]}, "`prompt_ids` must have one dimension", None),
        ({"missing": (Missing(7, "topk", "nan"),)}, "position 7 of 2", None),
        ({"missing": (Missing(0, "topk", "lost"),)}, "reason of the known", None),  # type: ignore[arg-type]
    ],
)
def test_what_no_engine_can_mean_is_refused(
    changes: dict[str, Any], message: str, position: int | None
) -> None:
    with pytest.raises(EngineError) as error:
        response(**changes)
    assert message in str(error.value)
    assert error.value.request == "r1"
    assert error.value.position == position
    assert str(error.value).startswith("vllm, request r1")
    assert isinstance(error.value, ProbeError)


def test_an_error_survives_a_worker_process() -> None:
    error = EngineError("vllm", "no", request="r1", position=3)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "vllm, request r1, position 3: no"
    assert (again.engine, again.request, again.position) == ("vllm", "r1", 3)


def test_gaps_with_a_reason_are_kept() -> None:
    made = response(
        token_ids=[5, -1],
        logprobs=[np.log(0.25), NAN],
        missing=(
            Missing(None, "token_id", "no-ids"),
            Missing(1, "logprob", "sentinel", detail="x"),
        ),
    )
    assert made.missing_counts() == {"token_id": {"no-ids": 2}, "logprob": {"sentinel": 1}}


def test_listed_mass_counts_the_sampled_token_once() -> None:
    np.testing.assert_allclose(response().listed_mass(), [0.75, 0.625])
    unknown = response(
        logprobs=[np.log(0.25), NAN], missing=(Missing(1, "logprob", "null"),)
    ).listed_mass()
    np.testing.assert_allclose(unknown, [0.75, 0.5])


def test_no_tokens_and_no_lists_are_possible() -> None:
    none = unlisted([], [], width=3)
    assert (len(none), none.listed, none.listed_mass().tolist()) == (0, 3, [])
    bare = unlisted([1], [-1.0])
    np.testing.assert_allclose(bare.listed_mass(), [np.exp(-1)])


def test_a_cut_list_is_the_true_top_k_again() -> None:
    made = response(
        topk_ids=[[9, 5], [1, 3]],
        topk_logprobs=[np.log([0.5, 0.25]), np.log([0.5, 0.125])],
        support="replaced-last",
    )
    assert made.cut(2) is made
    cut = made.cut(1)
    assert cut.topk_ids.tolist() == [[9], [1]]
    assert cut.support == "union"
    assert cut.logprobs.tolist() == made.logprobs.tolist()
    with pytest.raises(EngineError, match="must not be negative"):
        made.cut(-1)


def test_metadata_name_what_is_known_alone() -> None:
    assert response().behavior_metadata() == {
        "engine": "vllm", "support": "union", "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    made = response(
        mode="unknown", temperature=0.7, top_p=0.9, top_k=20, min_p=0.1,
        missing=(Missing(0, "topk", "truncated", 3),),
    )  # fmt: skip
    assert made.behavior_metadata() == {
        "engine": "vllm", "support": "union", "temperature": 0.7, "top_p": 0.9, "top_k": 20,
        "min_p": 0.1, "missing": {"topk": {"truncated": 3}},
    }  # fmt: skip


def test_metadata_of_several_add_up_and_must_agree() -> None:
    gap = (Missing(0, "topk", "nan"),)
    both = shared_metadata([response(missing=gap), response(missing=gap)])
    assert both["missing"] == {"topk": {"nan": 2}}
    with pytest.raises(EngineError, match=r"one `temperature`, got None .* and 0\.7"):
        shared_metadata([response(), response(temperature=0.7)])
    with pytest.raises(EngineError, match="at least one"):
        shared_metadata([])
