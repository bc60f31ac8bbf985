"""A real second engine beside transformers: CTranslate2."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from deltad.dumps import Dump, check_dump
from deltad.probes.engines import EngineResponse
from deltad.probes.recipes import record
from deltad.probes.recipes.engine import Sampling, open_engine, sampling_of, weights_hash
from deltad.probes.recipes.engine_ctranslate2 import CTranslate2Engine
from deltad.probes.recipes.engine_ctranslate2 import open_engine as open_model

from .micro import micro, small_model
from .scoring import mismatch

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8], [5, 6], [40, 41, 42], [9, 8, 7, 6, 5]] * 4
"""Of several lengths, so that the engine has to force the longer ones."""


STOP = tuple(range(0, 72, 3))


def sampling(**overrides: Any) -> Sampling:
    fields: dict[str, Any] = {
        "temperature": 0.7, "max_new_tokens": 6, "stop_ids": STOP, "top_k": 5,
    }  # fmt: skip
    return Sampling(**(fields | overrides))


def opened(precision: str, **overrides: Any) -> CTranslate2Engine:
    return open_model(small_model(), sampling(**overrides), precision)


@pytest.fixture(scope="module")
def said(cache: Path) -> dict[str, list[EngineResponse]]:
    """Sixteen responses in each precision."""
    return {
        precision: opened(precision).generate(PROMPTS, range(len(PROMPTS)))
        for precision in ("float32", "int8")
    }


def test_float32_says_what_transformers_says(said: dict[str, list[EngineResponse]]) -> None:
    found = mismatch(small_model(), said["float32"], temperature=0.7)
    assert found.tokens > 30
    assert found.largest < 1e-3  # nats, sampled and top-K; 2e-5 where it was measured
    assert found.kl_mean < 1e-6


def test_int8_is_another_policy_and_not_by_much(said: dict[str, list[EngineResponse]]) -> None:
    """How coarse int8 is depends on the processor; everywhere it is far beyond rounding."""
    exact, found = (mismatch(small_model(), said[precision], temperature=0.7) for precision in said)
    assert 100 * exact.kl_mean < found.kl_mean < 0.5
    assert 100 * exact.sampled_mean < found.sampled_mean < 0.5


def test_responses_end_at_a_stop_and_are_handed_out_whole(
    said: dict[str, list[EngineResponse]],
) -> None:
    lengths = set()
    for prompt, response in zip(PROMPTS, said["float32"], strict=True):
        ids = response.token_ids.tolist()
        assert response.prompt_ids is not None
        assert response.prompt_ids.tolist() == prompt
        assert not set(ids[:-1]) & set(STOP)
        assert len(ids) == 6 or ids[-1] in STOP
        lengths.add(len(ids))
        assert response.topk_ids.shape == (len(ids), 5)
        assert (response.mode, response.temperature) == ("tempered", 0.7)
    assert {1, 6} <= lengths


def test_call_repeats_by_its_seeds(cache: Path) -> None:
    engine = opened("int8")
    first, again, other = (
        [response.token_ids.tolist() for response in engine.generate(PROMPTS, seeds)]
        for seeds in (range(16), range(16), range(1, 17))
    )
    assert first == again
    assert first != other


def test_first_tokens_follow_what_the_engine_says(cache: Path) -> None:
    count = 2000
    engine = opened("int8", max_new_tokens=1, top_k=72, temperature=3.0)
    said = engine.generate([[5, 6, 7]] * count, range(count))
    expected = np.zeros(72)
    expected[said[0].topk_ids[0]] = np.exp(said[0].topk_logprobs[0]) * count
    observed = np.bincount([int(response.token_ids[0]) for response in said], minlength=72)
    large = expected > 5
    chi_square = float((((observed - expected) ** 2) / np.maximum(expected, 1e-9))[large].sum())
    degrees = int(large.sum())
    assert degrees > 5
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_conversion_is_kept_for_the_same_weights_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path))
    first, again = opened("int8").folder, opened("int8").folder
    assert first == again
    model = small_model()
    weight = model.model.norm.weight
    before = weights_hash(model)
    with torch.no_grad():
        weight[3] += 1
        try:
            assert weights_hash(model) != before
            assert opened("int8").folder != first
        finally:
            weight[3] -= 1


def test_engine_holds_the_rounded_weights(cache: Path) -> None:
    """What the recipe rounds, the engine is given rounded."""

    class World:
        model, vocab_size, pad_id, stop = small_model(), 72, 0, torch.arange(72) == 3

    class Rounded(type(micro())):  # type: ignore[misc]
        behavior_rounding = "fp8"

    recipe = micro(engine="ctranslate2", engine_precision="float32", full=False)
    world: Any = World()
    exact = open_engine(recipe, world)
    coarse = open_engine(Rounded(**vars(recipe)), world)
    assert exact is not None
    assert coarse is not None
    near = mismatch(world.model, exact.generate(PROMPTS, range(16)), temperature=1.0)
    far = mismatch(world.model, coarse.generate(PROMPTS, range(16)), temperature=1.0)
    assert near.largest < 1e-3 < far.largest
    assert sampling_of(recipe, world) == Sampling(1.0, 8, (3,), 5)


@pytest.fixture(scope="module")
def run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "run"
    record(
        micro(engine="ctranslate2", unmeasured=0), folder, seeds=2, workers=0, store="all",
        quiet=True,
    )  # fmt: skip
    return folder


def test_recorded_dump_is_in_order_and_names_its_engine(run: Path) -> None:
    assert check_dump(run, strict=False) == []
    behavior = Dump.open(run).metadata("none").behavior
    assert behavior["engine"] == "ctranslate2"
    assert behavior["precision"].startswith("int8")
    assert behavior["logprobs_mode"] == "tempered_logprobs"
    assert behavior["support"] == "union"
    assert behavior["seeds"] == "one for each batch of requests"
    assert behavior["version"].count(".") == 2


def test_policy_that_has_not_moved_differs_from_the_engine(run: Path) -> None:
    """The first step shows the engines' mismatch and no staleness."""
    table = pq.read_table(run / "arm=none" / "seed=0" / "part-0-0.parquet").to_pandas()
    first = table[table["step"] == 0]
    gap = (first["behavior_logprob"] - first["pre_logprob"]).abs()
    assert 1e-4 < gap.mean() < 2.0  # float32 rounding is 1e-6; how coarse int8 is, the CPU decides
    assert (first["full_kl_pre"] > 0).all()
    assert first["full_kl_pre"].mean() < 1.0


def test_seed_repeats_whatever_was_recorded_before(run: Path, tmp_path: Path) -> None:
    record(
        micro(engine="ctranslate2", unmeasured=0), tmp_path / "run", seeds=[1], workers=0,
        store="all", quiet=True,
    )  # fmt: skip
    name = "arm=none/seed=1/part-0-0.parquet"
    ours, theirs = pq.read_table(tmp_path / "run" / name), pq.read_table(run / name)
    for column in theirs.column_names:
        assert repr(ours[column].to_pylist()) == repr(theirs[column].to_pylist()), column
