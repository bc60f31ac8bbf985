"""vLLM's outputs: dictionaries, FlatLogprobs, prompts, both modes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from deltad.probes.engines import EngineError, read_vllm, read_vllm_prompt

from .known import Known, fixture, is_union, knowns, vllm_dicts, vllm_flat, vllm_output


@given(knowns())
def test_dictionaries_give_the_distribution_back(known: Known) -> None:
    output = vllm_output(known, vllm_dicts(known))
    (response,) = read_vllm(output, listed=known.top_k)
    is_union(response, known)
    assert response.prompt_ids is not None
    assert response.prompt_ids.tolist() == [1, 2]
    assert response.texts == tuple(f"t{i}" for i in known.token_ids)
    assert response.request == "r7"


@given(knowns())
def test_flat_logprobs_give_the_same_without_the_duplicate(known: Known) -> None:
    (response,) = read_vllm(vllm_output(known, vllm_flat(known)), listed=known.top_k)
    is_union(response, known)


@given(knowns())
def test_k_is_told_from_lengths_and_ranks(known: Known) -> None:
    """Where none was sampled beyond rank K + 1, the lists may be the true top-(K + 1)."""
    told = read_vllm(vllm_output(known, vllm_dicts(known)))[0].listed
    at_next = all(known.rank(t) == known.top_k + 1 for t in range(len(known)))
    assert told == known.top_k + at_next


@given(knowns())
def test_k_without_ranks_is_the_largest_that_the_lists_prove(known: Known) -> None:
    (response,) = read_vllm(vllm_output(known, vllm_dicts(known, ranks=False)))
    proven = any(known.rank(t) != known.top_k for t in range(len(known)))
    assert response.listed == known.top_k - (not proven)
    for t, ids in enumerate(response.topk_ids.tolist()):
        assert ids == known.order(t)[: response.listed]


@given(knowns())
def test_a_smaller_k_cuts_without_losing_the_sampled_token(known: Known) -> None:
    (response,) = read_vllm(vllm_output(known, vllm_dicts(known)), listed=1)
    assert response.topk_ids.tolist() == [[known.order(t)[0]] for t in range(len(known))]
    assert response.logprobs.tolist() == [known.sampled(t) for t in range(len(known))]


def test_responses_of_one_call_have_one_k() -> None:
    """The first alone would be taken for a top-2: its sampled token is the second in rank."""
    near = Known(np.log([[0.5, 0.3, 0.2]]), [1], 1)
    far = Known(np.log([[0.5, 0.3, 0.2]]), [2], 1)
    outputs = [vllm_output(known, vllm_dicts(known)) for known in (near, far)]
    assert read_vllm(outputs[0])[0].listed == 2
    assert [response.listed for response in read_vllm(outputs)] == [1, 1]


def test_ties_with_the_last_of_the_list_keep_k() -> None:
    """The sampled token's rank counts its equals; in the top-K the later rank stands."""
    flat = {
        "start_indices": [0], "end_indices": [3], "token_ids": [4, 7, 4],
        "logprobs": [-1.0, -1.0, -1.0], "ranks": [3, 1, 2],
    }  # fmt: skip
    (response,) = read_vllm({"outputs": [{"token_ids": [4], "logprobs": flat}]})
    assert sorted(response.topk_ids[0].tolist()) == [4, 7]


def test_objects_are_read_as_dictionaries_are() -> None:
    known = Known(np.log([[0.5, 0.3, 0.2]]), [2], 1)
    listed = [{i: SimpleNamespace(**entry) for i, entry in vllm_dicts(known)[0].items()}]
    output = SimpleNamespace(
        request_id="0",
        prompt_token_ids=(1, 2),
        outputs=[SimpleNamespace(token_ids=(2,), logprobs=listed)],
    )
    for given_output in (output, [output]):
        (response,) = read_vllm(given_output)
        is_union(response, known)


def test_nan_and_minus_infinity_become_reasons() -> None:
    logprobs = [
        {3: {"logprob": float("nan"), "rank": 1}, 4: {"logprob": -0.5, "rank": 2}},
        {3: {"logprob": -math.inf, "rank": 9}, 4: {"logprob": -0.5, "rank": 1}},
        {3: {"logprob": None, "rank": 1}, 4: {"logprob": -math.inf, "rank": 2}},
    ]
    (response,) = read_vllm({"outputs": [{"token_ids": [3, 3, 3], "logprobs": logprobs}]})
    assert np.isnan(response.logprobs).all()
    assert response.missing_counts() == {
        "logprob": {"minus-infinity": 1, "nan": 1, "null": 1},
        "topk": {"nan": 1, "null": 1, "truncated": 1},
    }
    assert response.topk_ids.tolist() == [[4], [4], [-1]]


def test_without_log_probs_all_are_missing() -> None:
    (response,) = read_vllm({"outputs": [{"token_ids": [3, 4], "logprobs": None}]})
    assert response.listed == 0
    assert response.missing_counts() == {
        "logprob": {"not-returned": 2}, "topk": {"not-returned": 2},
    }  # fmt: skip


# Recorded of a real vLLM 0.32.0; see tests/fixtures/engines/README.md.


def truth(mode: str) -> np.ndarray[Any, Any]:
    """All log-probs of the six tokens, (token, vocab)."""
    (completion,) = fixture(f"vllm_offline_{mode}_full")["outputs"]
    return np.array(
        [[entry[str(i)]["logprob"] for i in range(64)] for entry in completion["logprobs"]]
    )


def test_recorded_full_vocabulary_sums_to_one() -> None:
    (response,) = read_vllm(fixture("vllm_offline_raw_full"), mode="raw")
    assert response.listed == 64
    assert response.missing == ()
    np.testing.assert_allclose(response.listed_mass(), 1.0, atol=1e-6)


@pytest.mark.parametrize("form", ["top5", "flat"])
def test_recorded_raw_lists_are_the_top_of_the_whole_vocabulary(form: str) -> None:
    responses = read_vllm(fixture(f"vllm_offline_raw_{form}"), mode="raw", temperature=1.3)
    assert len(responses) == 2
    first, table = responses[0], truth("raw")
    order = np.argsort(-table, axis=1)[:, :5]
    assert first.listed == 5
    assert first.topk_ids.tolist() == order.tolist()
    np.testing.assert_allclose(
        first.topk_logprobs, np.take_along_axis(table, order, axis=1), atol=1e-6
    )
    np.testing.assert_allclose(first.logprobs, table[np.arange(6), first.token_ids], atol=1e-6)
    ranks = (table > first.logprobs[:, None]).sum(axis=1)
    assert (ranks >= 5).any(), "no sampled token outside the top-K: record another seed"
    assert (ranks < 5).any()


def test_recorded_dictionaries_and_flat_are_the_same() -> None:
    for mode in ("raw", "processed"):
        pairs = zip(
            read_vllm(fixture(f"vllm_offline_{mode}_top5")),
            read_vllm(fixture(f"vllm_offline_{mode}_flat")),
            strict=True,
        )
        for one, other in pairs:
            np.testing.assert_array_equal(one.topk_ids, other.topk_ids)
            np.testing.assert_array_equal(one.topk_logprobs, other.topk_logprobs)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert one.missing_counts() == other.missing_counts()


def test_recorded_truncation_leaves_a_distribution_of_mass_one() -> None:
    """Ids that top-p had cut are there with −∞ in arbitrary order: they are dropped."""
    for response in read_vllm(fixture("vllm_offline_processed_top5"), mode="processed"):
        assert response.missing_counts()["topk"]["truncated"] > 0
        np.testing.assert_allclose(response.listed_mass(), 1.0, atol=1e-6)
    table = truth("processed")
    (first, _) = read_vllm(fixture("vllm_offline_processed_top5"), mode="processed")
    alive = [sorted(np.flatnonzero(row > -np.inf).tolist()) for row in table]
    assert [sorted(i for i in ids if i >= 0) for ids in first.topk_ids.tolist()] == alive


def test_recorded_sampled_tokens_alone_have_no_list_or_the_argmax() -> None:
    (response,) = read_vllm(fixture("vllm_offline_raw_sampled"))
    assert response.listed == 0
    assert not np.isnan(response.logprobs).any()


def test_recorded_prompt_is_scored_from_its_second_token() -> None:
    for form in ("top5", "flat"):
        (response,) = read_vllm_prompt(fixture(f"vllm_offline_raw_{form}"), mode="raw")
        assert response.token_ids.tolist() == [1, 4, 1, 5]
        assert response.listed == 3
        assert response.prompt_ids is not None
        assert response.prompt_ids.tolist() == [3]
        assert (response.topk_logprobs.max(axis=1) > response.logprobs).all()
    (tail,) = read_vllm_prompt(fixture("vllm_offline_raw_top5"), start=3, mode="raw")
    np.testing.assert_array_equal(tail.topk_ids, response.topk_ids[2:])
    (first,) = read_vllm_prompt(fixture("vllm_offline_raw_top5"), start=1, listed=3)
    assert first.missing == ()


def spoil(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The recorded output, spoilt."""
    output = copy.deepcopy(fixture("vllm_offline_raw_top5"))
    change(output)
    return dict(output)


def spoil_flat(**changes: Any) -> dict[str, Any]:
    output = copy.deepcopy(fixture("vllm_offline_raw_flat"))
    output["outputs"][0]["logprobs"].update(changes)
    return dict(output)


@pytest.mark.parametrize(
    ("output", "message", "position"),
    [
        ({}, "must have a list `outputs`, got None", None),
        ({"outputs": "text"}, "must have a list `outputs`, got 'text'", None),
        (spoil(lambda o: o["outputs"][0]["logprobs"].pop()), "one entry a token, 6, got 5", None),
        (
            spoil(lambda o: o["outputs"][0]["token_ids"].__setitem__(2, 0)),
            "must hold the sampled token 0",
            2,
        ),
        (
            spoil(lambda o: o["outputs"][0]["token_ids"].__setitem__(2, "x")),
            "must be a token id, a whole number of at least 0, got 'x'",
            2,
        ),
        (
            spoil(lambda o: o["outputs"][0]["logprobs"].__setitem__(1, [1])),
            "must map ids to log-probs, got [1]",
            1,
        ),
        (
            spoil(lambda o: o["outputs"][0]["logprobs"][1].__setitem__("9a", 0.0)),
            "a key of `logprobs` must be a token id",
            1,
        ),
        (
            spoil(lambda o: o["outputs"][0]["logprobs"][4].__setitem__("63", {"logprob": "x"})),
            "must be a number or null, got 'x'",
            4,
        ),
        (
            spoil(lambda o: o["outputs"][0]["logprobs"][4].__setitem__("63", {"logprob": 7.0})),
            "are these logits",
            4,
        ),
        (spoil(lambda o: o["outputs"][0].__setitem__("logprobs", 5)), "list or FlatLogprobs", None),
        (spoil(lambda o: o.__setitem__("prompt_token_ids", "abc")), "list of ids, got 'abc'", None),
        (spoil_flat(logprobs=None), "FlatLogprobs must have a list `logprobs`", None),
        (spoil_flat(start_indices=[0]), "as many start as end indices", None),
        (spoil_flat(token_ids=[1, 2, 3]), "`logprobs` must be a list of 3", None),
    ],
)
def test_malformed_output_is_refused_with_its_place(
    output: dict[str, Any], message: str, position: int | None
) -> None:
    with pytest.raises(EngineError) as error:
        read_vllm(output)
    assert message in str(error.value)
    assert error.value.position == position
    assert error.value.request is not None
    assert error.value.request[0] in "01"


def test_a_prompt_without_log_probs_or_a_start_outside_is_refused() -> None:
    output = fixture("vllm_offline_raw_sampled")
    with pytest.raises(EngineError, match="ask for them"):
        read_vllm_prompt(output)
    with pytest.raises(EngineError, match=r"`start` must lie in \[1, 5\], the prompt, got 0"):
        read_vllm_prompt(fixture("vllm_offline_raw_top5"), start=0)


def _one(*lists: Any, ids: Any = (5, 9)) -> dict[str, Any]:
    """An output of two tokens."""
    return {"prompt_token_ids": [1], "outputs": [{"token_ids": list(ids), "logprobs": list(lists)}]}


def test_numpy_numbers_are_numbers() -> None:
    single = np.float32
    output = _one({5: single(-0.1), 8: single(-3.0)}, {9: single(-0.1), 3: single(-3.0)})
    (response,) = read_vllm(output)
    assert response.topk_ids.tolist() == [[5, 8], [9, 3]]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (_one({5: -0.5, "5": -0.9}, {9: -0.1}), "position 0: an entry must hold each id once"),
        (_one({5: -0.5, 8: "-0.9"}, {9: -0.1}), "position 0: a log-prob must be a number or null"),
        (_one({5: {"logprob": -0.5, "rank": "1"}}, {9: -0.1}), "position 0: `rank` must be"),
        (
            _one({5: {"logprob": -3.0, "rank": 1}, 8: {"logprob": -0.4, "rank": 2}}, ids=(5,)),
            "position 0: the sampled token 5 has rank 1, but of the 2 listed log-probs 1 are above",
        ),
        (
            _one({5: {"logprob": -0.1, "rank": 9}, 8: {"logprob": -3.0, "rank": 1}}, ids=(5,)),
            "position 0: the sampled token 5 has rank 9, but of the 2 listed",
        ),
        (_one({10**30: -0.5}, {9: -0.1}, ids=(10**30, 9)), "must be a token id"),
        ({"outputs": [{"token_ids": 5, "logprobs": None}]}, "must be a list of ids, got 5"),
        (spoil_flat(logprobs=[-9.0] * 3), "`logprobs` must be a list of"),
        (spoil_flat(ranks=[1]), "`ranks` must be a list of"),
        (spoil_flat(start_indices=["0"] * 5, end_indices=["1"] * 5), "must begin where"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(output: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_vllm(output)


def test_flat_entries_that_overlap_or_differ_are_refused() -> None:
    flat = {
        "start_indices": [0, 3],
        "end_indices": [3, 5],
        "token_ids": [5, 5, 2, 9, 9],
        "logprobs": [-0.4, -0.4, -1.6, -0.1, -0.1],
        "ranks": [1, 1, 2, 1, 1],
    }
    output = _one()
    output["outputs"][0]["logprobs"] = flat
    assert read_vllm(output)[0].topk_ids.tolist() == [[5], [9]]
    for change, message in (
        ({"logprobs": [-3.0, -0.4, -1.6, -0.1, -0.1]}, "position 0: .* twice, with log-probs -3.0"),
        ({"start_indices": [0, 2]}, r"position 1: .* at 3, .* got \[2, 5\)"),
        ({"end_indices": [3, 4]}, "hold 5 values, but their entries end at 4"),
    ):
        output["outputs"][0]["logprobs"] = flat | change
        with pytest.raises(EngineError, match=message):
            read_vllm(output)
