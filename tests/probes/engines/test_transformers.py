"""What `generate` returns, read with and without the temperature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from deltad.probes.engines import EngineError, read_transformers
from tests.probes.tiny import tiny

from .known import Known, is_union, knowns


def output(known: Known, key: str = "logits") -> dict[str, Any]:
    """One row with a prompt of two."""
    return {
        "sequences": torch.tensor([[1, 2, *known.token_ids]]),
        key: tuple(torch.tensor(row, dtype=torch.float32)[None] for row in known.logprobs),
    }


@given(knowns())
def test_logits_and_scores_give_the_distribution_back(known: Known) -> None:
    for key, mode in (("logits", "raw"), ("scores", "processed")):
        (response,) = read_transformers(output(known, key), listed=known.top_k)
        is_union(response, known, atol=1e-5)
        assert response.mode == mode
        assert response.prompt_ids is not None
        assert response.prompt_ids.tolist() == [1, 2]


@pytest.fixture(scope="module")
def generated() -> Any:
    """Three rows of a real `generate` at temperature 1.7 with top-k 7."""
    model = tiny().eval()
    torch.manual_seed(1)
    prompt = torch.tensor([[5, 6, 7]]).expand(3, -1)
    return model, model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True,
        temperature=1.7, top_k=7, top_p=1.0, eos_token_id=2, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
    )  # fmt: skip


def test_a_real_generation_is_the_model_at_the_temperature(generated: Any) -> None:
    model, made = generated
    responses = read_transformers(made, temperature=1.7, top_k=7, eos_token_id=2, listed=5)
    assert len(responses) == 3
    for row, response in enumerate(responses):
        with torch.no_grad():
            logits = model(made.sequences[row : row + 1]).logits[0, 2:-1].double() / 1.7
        logprobs = torch.log_softmax(logits, -1)[: len(response)].numpy()
        assert response.mode == "tempered"
        np.testing.assert_allclose(
            response.logprobs, logprobs[range(len(response)), response.token_ids], atol=1e-5
        )
        np.testing.assert_allclose(
            response.topk_logprobs, -np.sort(-logprobs, axis=1)[:, :5], atol=1e-5
        )


def test_scores_of_a_real_generation_hold_what_truncation_left(generated: Any) -> None:
    _, made = generated
    scores = {"sequences": made.sequences, "scores": made.scores}
    (response, *_) = read_transformers(scores, eos_token_id=2, listed=20)
    assert response.mode == "processed"
    assert ((response.topk_ids >= 0).sum(axis=1) == 7).all()
    np.testing.assert_allclose(response.listed_mass(), 1.0)


def test_what_follows_the_end_is_padding() -> None:
    steps = tuple(torch.zeros(2, 4) for _ in range(3))
    made = {"sequences": torch.tensor([[9, 1, 3, 0], [9, 1, 1, 1]]), "logits": steps}
    short, long = read_transformers(made, eos_token_id=[3], listed=2)
    assert short.token_ids.tolist() == [1, 3]
    assert long.token_ids.tolist() == [1, 1, 1]
    assert len(read_transformers(made, listed=2)[0]) == 3


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "return_dict_in_generate=True"),
        ({"sequences": np.ones((1, 3), int)}, "return_dict_in_generate=True"),
        ({"sequences": np.ones(3, int), "logits": ()}, r"prompt \+ 0 steps\), got \(3,\)"),
        (
            {"sequences": np.ones((1, 1), int), "logits": (np.zeros((1, 4)),) * 2},
            r"prompt \+ 2 steps\), got \(1, 1\)",
        ),
        (
            {"sequences": np.ones((1, 2), int), "logits": (np.zeros((2, 4)),)},
            r"position 0: a step must have shape \(1, vocab\), got \(2, 4\)",
        ),
        (
            {"sequences": np.ones((1, 2), int), "logits": (np.zeros((1, 4)),), "beam_indices": 1},
            "beam search",
        ),
    ],
)
def test_malformed_output_is_refused(made: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_transformers(made)
