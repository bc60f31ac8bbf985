"""Completions and chat of OpenAI-compatible servers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from deltad.probes.engines import EngineError, read_openai, read_vllm_prompt, shared_metadata

from .known import Known, chat, completion, fixture, is_union, knowns


@given(knowns())
def test_completions_with_ids_give_the_distribution_back(known: Known) -> None:
    (response,) = read_openai(completion(known), listed=known.top_k)
    is_union(response, known)


@given(knowns())
def test_completions_of_texts_do_with_a_vocabulary(known: Known) -> None:
    vocabulary = {f"w{i}": [i] for i in range(known.logprobs.shape[1])}
    (response,) = read_openai(completion(known, "w{}"), listed=known.top_k, vocabulary=vocabulary)
    is_union(response, known)
    assert response.texts == tuple(f"w{i}" for i in known.token_ids)


@given(knowns())
def test_k_of_completions_is_the_largest_that_the_lists_prove(known: Known) -> None:
    (response,) = read_openai(completion(known))
    proven = any(known.rank(t) != known.top_k for t in range(len(known)))
    assert response.listed == known.top_k - (not proven)
    assert response.missing == ()
    for t, ids in enumerate(response.topk_ids.tolist()):
        assert ids == known.order(t)[: response.listed]


@given(knowns())
def test_chat_of_openai_lists_exactly_k(known: Known) -> None:
    (response,) = read_openai(chat(known, vllm=False), support="union")
    is_union(response, known)


@given(knowns())
def test_chat_of_vllm_drops_the_last_for_a_sampled_token_outside(known: Known) -> None:
    """Sampled first, then the top K − 1: what stood last is lost, and the support says so."""
    (response,) = read_openai(chat(known, vllm=True))
    assert response.support == "replaced-last"
    assert response.missing == ()
    for t, ids in enumerate(response.topk_ids.tolist()):
        best = known.order(t)[: known.top_k]
        expected = best if known.inside(t) else [*best[:-1], known.token_ids[t]]
        assert ids == expected
    cut = response.cut(known.top_k - 1)
    for t, ids in enumerate(cut.topk_ids.tolist()):
        assert ids == known.order(t)[: known.top_k - 1]


@given(knowns())
def test_chat_of_others_claims_no_top_k_that_it_cannot_prove(known: Known) -> None:
    (response,) = read_openai(chat(known, vllm=False))
    inside = all(known.inside(t) for t in range(len(known)))
    last = any(known.rank(t) == known.top_k for t in range(len(known)))
    assert response.support == ("replaced-last" if inside and last else "union")


def test_chat_that_appends_the_sampled_token_has_longer_lists_there() -> None:
    """As llama-cpp-python, whose chat is made of its completions."""
    known = Known(np.log([[0.5, 0.3, 0.2]] * 2), [2, 0], 2)
    body = chat(known, vllm=False)
    first = body["choices"][0]["logprobs"]["content"][0]
    first["top_logprobs"].append({"token": "token_id:2", "logprob": known.sampled(0)})
    is_union(read_openai(body)[0], known)


def test_a_text_of_several_ids_leaves_its_entry_out() -> None:
    known = Known(np.log([[0.5, 0.3, 0.2]]), [0], 3)
    (response,) = read_openai(
        completion(known, "w{}"), vocabulary={"w0": [0], "w1": [1, 8], "w3": [3]}
    )
    assert response.topk_ids.tolist() == [[0, -1, -1]]
    assert response.missing_counts() == {"topk": {"ambiguous-text": 1, "unknown-text": 1}}
    assert any("'w1' is 1, 8" in gap.detail for gap in response.missing)
    np.testing.assert_allclose(response.listed_mass(), [0.5])


def test_an_ambiguous_sampled_token_keeps_its_log_prob_without_an_id() -> None:
    known = Known(np.log([[0.5, 0.3, 0.2]]), [0], 1)
    (response,) = read_openai(completion(known, "w{}"), vocabulary={"w0": [0, 4]})
    assert response.token_ids.tolist() == [-1]
    np.testing.assert_allclose(np.exp(response.logprobs), [0.5])
    assert response.missing_counts()["token_id"] == {"ambiguous-text": 1}


def test_an_id_of_the_choice_names_an_ambiguous_sampled_token() -> None:
    known = Known(np.log([[0.5, 0.3, 0.2]]), [0], 2)
    body = completion(known, "w{}")
    body["choices"][0]["token_ids"] = [0]
    (response,) = read_openai(body, vocabulary={"w0": [0, 4], "w1": [1]})
    assert response.token_ids.tolist() == [0]
    assert response.topk_ids.tolist() == [[0, 1]]
    assert response.missing == ()


def test_a_short_object_is_a_collision_of_texts() -> None:
    body = completion(Known(np.log([[0.5, 0.3, 0.2]] * 2), [0, 0], 3))
    body["choices"][0]["logprobs"]["top_logprobs"][1].popitem()
    (response,) = read_openai(body)
    assert response.missing_counts() == {"topk": {"collision": 1}}
    assert [gap.position for gap in response.missing] == [1]
    assert response.topk_ids.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_an_entry_of_the_sampled_text_that_is_another_ids_is_left_out() -> None:
    """Ids 1 and 4 are spelt alike; the sampled one's entry was overwritten."""
    body = completion(Known(np.log([[0.5, 0.1, 0.4]]), [1], 2), "w{}")
    logprobs = body["choices"][0]["logprobs"]
    logprobs["top_logprobs"] = [{"w1": float(np.log(0.4)), "w0": float(np.log(0.5))}]
    body["choices"][0]["token_ids"] = [1]
    (response,) = read_openai(body, listed=2, vocabulary={"w0": [0], "w1": [1, 4]})
    assert response.topk_ids.tolist() == [[0, -1]]
    np.testing.assert_allclose(np.exp(response.logprobs), [0.1])
    assert response.missing_counts() == {"topk": {"collision": 1}}


# Recorded of a real vLLM 0.32.0 server; see tests/fixtures/engines/README.md.


def test_recorded_completions_with_ids() -> None:
    (response,) = read_openai(fixture("vllm_server_completions_ids"), mode="raw", temperature=1.0)
    assert response.token_ids.tolist() == [374, 129]
    assert response.topk_ids.tolist() == [[7, 270, 199], [374, 190, 390]]
    assert response.logprobs.tolist() == [-6.413336753845215, -6.413257598876953]
    assert response.topk_logprobs[1, 0] == -5.620232582092285
    assert response.prompt_ids is not None
    assert response.prompt_ids.tolist() == [5, 6, 7]
    assert response.support == "union"
    assert response.missing == ()


def test_recorded_texts_and_ids_of_one_request_agree_given_the_vocabulary() -> None:
    """The server's ids are its texts' numbers and three: w371 is 374."""
    vocabulary = {f"w{i}": [i + 3] for i in range(509)}
    (texts,) = read_openai(fixture("vllm_server_completions"), vocabulary=vocabulary)
    (ids,) = read_openai(fixture("vllm_server_completions_ids"))
    np.testing.assert_array_equal(texts.topk_ids, ids.topk_ids)
    np.testing.assert_array_equal(texts.topk_logprobs, ids.topk_logprobs)
    np.testing.assert_array_equal(texts.token_ids, ids.token_ids)


def test_recorded_texts_without_a_vocabulary_have_no_ids() -> None:
    (response,) = read_openai(fixture("vllm_server_completions"))
    assert response.token_ids.tolist() == [-1, -1]
    assert not np.isnan(response.logprobs).any()
    assert response.texts == ("w371", "w126")
    assert set(response.missing_counts()) == {"token_id", "topk"}


def test_recorded_echo_leaves_the_prompt_out() -> None:
    body = fixture("vllm_server_completions_echo")
    (response,) = read_openai(body)
    assert response.token_ids.tolist() == [374]
    assert response.logprobs.tolist() == [-6.413336753845215]
    del body["choices"][0]["token_ids"]
    (by_usage,) = read_openai(body)
    assert by_usage.logprobs.tolist() == response.logprobs.tolist()
    (later,) = read_openai(body, start=2)
    assert len(later) == 2
    (all_of_it,) = read_openai(body, start=0)
    assert np.isnan(all_of_it.logprobs).tolist() == [True, False, False, False]
    assert all_of_it.missing_counts()["logprob"] == {"null": 1}
    assert all_of_it.missing_counts()["topk"]["not-returned"] == 1


def test_recorded_echo_has_prompt_log_probs_as_vllm_writes_them() -> None:
    choice = fixture("vllm_server_completions_echo")["choices"][0]
    (prompt,) = read_vllm_prompt(choice, listed=2)
    assert prompt.token_ids.tolist() == [6, 7]
    assert prompt.topk_ids.tolist() == [[5, 199], [317, 6]]


def test_recorded_chat_with_ids_replaces_the_last() -> None:
    (response,) = read_openai(fixture("vllm_server_chat_ids"))
    assert response.token_ids.tolist() == [5, 5]
    assert response.topk_ids.tolist() == [[5, 222, 36], [5, 492, 222]]
    assert response.support == "replaced-last"
    vocabulary = {f"w{i}": [i + 3] for i in range(509)}
    (texts,) = read_openai(fixture("vllm_server_chat"), vocabulary=vocabulary)
    assert texts.topk_ids.tolist() == [[5, 222, 374], [374, 20, 129]]
    assert texts.support == "replaced-last"


def test_recorded_truncation_is_minus_9999_and_no_number() -> None:
    (response,) = read_openai(
        fixture("vllm_processed_server_completions_ids"), mode="processed", temperature=0.7,
        top_p=0.6,
    )  # fmt: skip
    np.testing.assert_allclose(response.listed_mass(), 1.0, atol=1e-6)
    assert response.topk_logprobs[response.topk_ids >= 0].min() > -100
    assert response.missing_counts()["topk"] == {"sentinel": 15}


def test_recorded_collisions_are_found() -> None:
    """37 ids of this tokenizer decode to nothing printable, so their entries overwrite each other;
    where the sampled token is one of them, its entry is not its log-prob."""
    body = fixture("vllm_processed_server_completions")
    body["choices"][0]["token_ids"] = [9, 28, 62, 38, 52, 4]
    letters = {chr(ord("a") + i): [1 + i] for i in range(26)} | {"": list(range(27, 64))}
    (response,) = read_openai(body, listed=5, vocabulary=letters)
    lost = {gap.position for gap in response.missing if gap.reason == "collision"}
    assert lost == {0, 1, 2, 3, 4, 5}
    by_ids = read_openai(fixture("vllm_processed_server_completions_ids"))[0]
    for t, ids in enumerate(response.topk_ids.tolist()):
        for i, value in zip(ids, response.topk_logprobs[t], strict=True):
            if i >= 0:
                assert value == by_ids.topk_logprobs[t][by_ids.topk_ids[t] == i].item()


def test_recorded_responses_of_one_server_share_their_metadata() -> None:
    bodies = [fixture(f"vllm_server_chat{ids}") for ids in ("", "_ids")]
    responses = [read_openai(body)[0] for body in bodies]
    assert shared_metadata(responses)["support"] == "replaced-last"


def test_objects_of_the_client_are_read_as_mappings() -> None:
    class Answer:
        def model_dump(self) -> Any:
            return fixture("vllm_server_completions_ids")

    assert read_openai(Answer())[0].token_ids.tolist() == [374, 129]


def test_a_choice_without_log_probs_has_ids_alone() -> None:
    body = fixture("vllm_server_completions_ids")
    body["choices"][0]["logprobs"] = None
    (response,) = read_openai(body)
    assert response.token_ids.tolist() == [374, 129]
    assert response.missing_counts() == {
        "logprob": {"not-returned": 2}, "topk": {"not-returned": 2},
    }  # fmt: skip


def spoil(name: str, change: Callable[[Any], Any]) -> Any:
    """A recorded body, its first choice spoilt."""
    body = copy.deepcopy(fixture(name))
    change(body["choices"][0])
    return body


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Set what stands at a path."""

    def change(choice: Any) -> None:
        for key in path[:-1]:
            choice = choice[key]
        choice[path[-1]] = value

    return change


COMPLETION, CHAT = "vllm_server_completions_ids", "vllm_server_chat_ids"


@pytest.mark.parametrize(
    ("body", "message", "position"),
    [
        ({"id": "x"}, "must have a list `choices`", None),
        ([], "must have a list `choices`", None),
        ({"choices": ["a"]}, "a choice must be an object, got 'a'", None),
        ({"choices": [{}]}, "neither `logprobs` nor `token_ids`", None),
        (spoil(COMPLETION, put("logprobs", value=[])), "`logprobs` must be an object", None),
        (
            spoil(COMPLETION, put("logprobs", "tokens", value="ab")),
            "`logprobs.tokens` must be a list, got 'ab'",
            None,
        ),
        (
            spoil(COMPLETION, put("logprobs", "token_logprobs", value=[-1.0])),
            "one entry a token, 2, got 1",
            None,
        ),
        (
            spoil(COMPLETION, put("logprobs", "token_logprobs", 1, value="x")),
            "must be a number or null, got 'x'",
            1,
        ),
        (
            spoil(COMPLETION, put("logprobs", "top_logprobs", 1, value=[1])),
            "must be an object or null, got [1]",
            1,
        ),
        (
            spoil(COMPLETION, put("logprobs", "top_logprobs", 1, "token_id:9", value=True)),
            "must be a number or null, got True",
            1,
        ),
        (spoil(COMPLETION, put("token_ids", value=[374])), "name the 2 tokens", None),
        (spoil(COMPLETION, put("token_ids", value="ab")), "list of ids, got 'ab'", None),
        (spoil(CHAT, put("logprobs", "content", value="x")), "must be a list, got 'x'", None),
        (spoil(CHAT, put("logprobs", "content", 1, value={})), "must have a text `token`", 1),
        (
            spoil(CHAT, put("logprobs", "content", 1, "top_logprobs", value="x")),
            "`top_logprobs` must be a list, got 'x'",
            1,
        ),
        (
            spoil(CHAT, put("logprobs", "content", 0, "top_logprobs", 1, "token", value=7)),
            "must have a text `token`",
            0,
        ),
        (
            spoil(CHAT, put("logprobs", "content", 0, "logprob", value=5.5)),
            "are these logits",
            0,
        ),
    ],
)
def test_malformed_bodies_are_refused_with_their_place(
    body: Any, message: str, position: int | None
) -> None:
    with pytest.raises(EngineError) as error:
        read_openai(body)
    assert message in str(error.value)
    assert error.value.position == position
    assert error.value.request is not None


def test_an_echo_that_does_not_say_where_the_prompt_ends_is_refused() -> None:
    body = fixture("vllm_server_completions_echo")
    del body["choices"][0]["token_ids"], body["usage"]
    with pytest.raises(EngineError, match="says where it ends: give `start`"):
        read_openai(body)
    with pytest.raises(EngineError, match=r"`start` must lie in \[0, 4\], got 9"):
        read_openai(body, start=9)
