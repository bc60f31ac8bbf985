"""SGLang's meta_info: nested, flat, base64, the prompt's side, the sampling support."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from deltad.probes.engines import EngineError, read_sglang, read_sglang_prompt

from .known import Known, fixture, is_union, knowns, sglang_output

FORMS = ("nested", "texts", "flat", "base64")


@given(knowns())
def test_exactly_k_and_the_sampled_token_apart(known: Known) -> None:
    (response,) = read_sglang(sglang_output(known))
    is_union(response, known)
    assert response.request == "s1"
    assert response.mode == "tempered"


def test_greedy_log_probs_are_raw() -> None:
    output = fixture("sglang_nested")
    assert read_sglang(output, temperature=0.0)[0].mode == "raw"
    assert read_sglang(output, temperature=0.7)[0].mode == "tempered"
    assert read_sglang(output, mode="raw")[0].mode == "raw"


# Written by SGLang 0.5.23's own functions; see tests/fixtures/engines/README.md.


@pytest.mark.parametrize("form", FORMS)
def test_written_forms_give_the_table_back(form: str) -> None:
    (response,) = read_sglang(fixture(f"sglang_{form}"), temperature=0.7)
    table = np.array(fixture("sglang_table")["output"])
    is_union(response, Known(table, [2, 7, 0, 1], 3))
    assert response.texts == (("t2", "t7", "t0", "t1") if form == "texts" else None)


@pytest.mark.parametrize("form", FORMS)
def test_written_prompts_are_scored_after_their_first_token(form: str) -> None:
    (response,) = read_sglang_prompt(fixture(f"sglang_{form}"))
    table = np.array(fixture("sglang_table")["input"])
    is_union(response, Known(table, [3, 6], 3))
    assert response.prompt_ids is not None
    assert response.prompt_ids.tolist() == [5]
    (whole,) = read_sglang_prompt(fixture(f"sglang_{form}"), start=0)
    assert np.isnan(whole.logprobs).tolist() == [True, False, False]
    assert whole.missing_counts() == {"logprob": {"null": 1}, "topk": {"not-returned": 1}}


def test_chosen_ids_are_the_list_where_no_top_k_was_asked_for() -> None:
    output = fixture("sglang_nested")
    del output["meta_info"]["output_top_logprobs"]
    (response,) = read_sglang(output)
    assert sorted(response.topk_ids[0].tolist()) == [1, 4]
    table = np.array(fixture("sglang_table")["output"])
    np.testing.assert_array_equal(
        response.topk_logprobs, np.take_along_axis(table, response.topk_ids, axis=1)
    )


def test_no_list_at_all_is_said() -> None:
    output = fixture("sglang_nested")
    for key in ("output_top_logprobs", "output_token_ids_logprobs"):
        del output["meta_info"][key]
    (response,) = read_sglang(output)
    assert response.listed == 0
    assert response.missing_counts() == {"topk": {"not-returned": 4}}


def test_the_lowest_float_is_no_number() -> None:
    output = fixture("sglang_nested")
    lowest = float(np.finfo(np.float32).min)
    output["meta_info"]["output_token_logprobs"][1][0] = lowest
    output["meta_info"]["output_top_logprobs"][2][1][0] = lowest
    (response,) = read_sglang(output)
    assert np.isnan(response.logprobs).tolist() == [False, True, False, False]
    assert response.missing_counts() == {"logprob": {"sentinel": 1}, "topk": {"sentinel": 1}}


def support_output() -> dict[str, Any]:
    """From documentation: `return_sampling_mask` with `sampling_logprobs_mode="support"`."""
    return {
        "meta_info": {
            "id": "s9",
            "output_token_logprobs": [[-1.2, 4, None], [-0.1, 2, None]],
            "output_token_sampling_mask": [[7, 4], [2]],
            "output_token_sampling_logprobs": [np.log([0.4, 0.6]).tolist(), [0.0]],
        }
    }


def test_from_documentation_the_sampling_support_is_all_that_truncation_left() -> None:
    (response,) = read_sglang(support_output(), temperature=0.7, top_p=0.5)
    assert response.mode == "processed"
    assert response.topk_ids.tolist() == [[4, 7], [2, -1]]
    np.testing.assert_allclose(np.exp(response.logprobs), [0.6, 1.0])
    np.testing.assert_allclose(response.listed_mass(), 1.0)


def spoil(form: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    output = support_output() if form == "support" else copy.deepcopy(fixture(f"sglang_{form}"))
    change(output["meta_info"])
    return dict(output)


@pytest.mark.parametrize(
    ("output", "message", "position"),
    [
        ({"text": "a"}, "must have a mapping `meta_info`", None),
        ("text", "must have a mapping `meta_info`, got 'text'", None),
        (spoil("nested", lambda m: m.pop("output_token_logprobs")), "return_logprob=True", None),
        (
            spoil("nested", lambda m: m["output_token_logprobs"].__setitem__(2, [-1.0])),
            "must be [log-prob, id, text], got [-1.0]",
            2,
        ),
        (
            spoil("nested", lambda m: m["output_token_logprobs"].__setitem__(2, [-1.0, None, ""])),
            "must be a token id, a whole number of at least 0, got None",
            2,
        ),
        (
            spoil("nested", lambda m: m["output_token_logprobs"].__setitem__(2, [-1.0, 5, ""])),
            "must be the 4 ids of `output_token_logprobs`, got 4 ids, first 0",
            2,
        ),
        (
            spoil("nested", lambda m: m["output_top_logprobs"].pop()),
            "one list a token, 4, got 3",
            None,
        ),
        (
            spoil("nested", lambda m: m["output_top_logprobs"].__setitem__(1, 5)),
            "must be a list or null, got 5",
            1,
        ),
        (
            spoil("flat", lambda m: m.__setitem__("output_top_logprobs_shape", [4])),
            "must be [rows, K]",
            None,
        ),
        (
            spoil("flat", lambda m: m["output_top_logprobs_val_flat"].pop()),
            "must hold 4 × 3 values, got 11",
            None,
        ),
        (
            spoil("flat", lambda m: m.pop("output_top_logprobs_idx_flat")),
            "found neither",
            None,
        ),
        (
            spoil("base64", lambda m: m.__setitem__("output_top_logprobs_val_flat_b64", "!!!!")),
            "is not base64",
            None,
        ),
        (
            spoil("base64", lambda m: m.__setitem__("output_top_logprobs_val_flat_b64", "AAA=")),
            "is not base64 of f4 values",
            None,
        ),
        (
            spoil(
                "base64",
                lambda m: m.__setitem__("output_top_logprobs_val_flat_b64_dtype", "float64"),
            ),
            "must be float32, got 'float64'",
            None,
        ),
        (
            spoil("support", lambda m: m["output_token_sampling_mask"].__setitem__(0, [7, 5])),
            "must hold the sampled token 4",
            0,
        ),
        (
            spoil("support", lambda m: m["output_token_sampling_mask"].pop()),
            "one row a token, 2",
            None,
        ),
    ],
)
def test_malformed_output_is_refused_with_its_place(
    output: Any, message: str, position: int | None
) -> None:
    with pytest.raises(EngineError) as error:
        read_sglang([output])
    assert message in str(error.value)
    assert error.value.position == position
    assert error.value.request is not None


def test_a_start_outside_the_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match=r"must lie in \[0, 3\], the prompt, got 4"):
        read_sglang_prompt(fixture("sglang_nested"), start=4)
