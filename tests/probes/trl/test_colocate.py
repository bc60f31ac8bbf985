"""TRL's trainer with vLLM in its process: the engine's own top-K, and nothing else changed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltad.dumps import Dump
from tests.probes.trl import laws, trainers

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # of vLLM, TRL and transformers; ours raise elsewhere
]

TOP_K = 5
TEMPERATURE = 0.7


def policy(folder: Path) -> Callable[[], Any]:
    """Heads as wide as vLLM asks, in a folder that vLLM can read; saved once."""
    from transformers import AutoModelForCausalLM

    trainers.model(head_dim=32).save_pretrained(folder)
    trainers.tokenizer().save_pretrained(folder)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return load


@pytest.fixture(scope="module")
def colocated() -> Iterator[pytest.MonkeyPatch]:
    """One process, and linear layers whose weights TRL can replace.

    vLLM repacks the weights of linear layers for the CPU, and TRL's weight sync then finds no
    parameter to load into. Both are of the CPU alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)  # TRL sets them; gone again afterwards
        import vllm.model_executor.layers.utils as layers

        def plain(layer: Any, remove_weight: bool = False) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        patch.setattr(layers, "dispatch_cpu_unquantized_gemm", plain)
        yield patch


def trained(folder: Path, dtype: str, patch: pytest.MonkeyPatch) -> laws.Pair:
    """The same training twice, with an engine of this dtype."""
    generation: Any = importlib.import_module("trl.generation.vllm_generation")
    made = generation.LLM

    def engine(**options: Any) -> Any:
        return made(**options, dtype=dtype, enforce_eager=True, disable_log_stats=True)

    with patch.context() as inner:
        inner.setattr(generation, "LLM", engine)
        return laws.pair(
            folder,
            policy=policy(folder / "policy"),
            how={"top_k": TOP_K},
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=64,
            vllm_gpu_memory_utilization=0.05,
            num_iterations=2,
            temperature=TEMPERATURE,
        )


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory, colocated: pytest.MonkeyPatch) -> laws.Pair:
    return trained(tmp_path_factory.mktemp("exact"), "float32", colocated)


@pytest.fixture(scope="module")
def coarse(tmp_path_factory: pytest.TempPathFactory, colocated: pytest.MonkeyPatch) -> laws.Pair:
    return trained(tmp_path_factory.mktemp("coarse"), "bfloat16", colocated)


def whole(state: dict[str, Any], inputs: dict[str, Any]) -> Any:
    """log π of the whole vocabulary at the completion tokens, by a plain model."""
    model = trainers.model(head_dim=32)
    model.load_state_dict(state, strict=False)
    model.eval()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attended, use_cache=False).logits
    first = inputs["prompt_ids"].shape[1] - 1
    found = (logits[:, first:-1].double() / TEMPERATURE).log_softmax(-1)
    return found[inputs["completion_mask"].bool()].numpy()


def reference(each: laws.Pair, step: int, born: int) -> Any:
    """What the weights of step `born` give to the tokens of a step."""
    before = each.witness.before[born]
    return np.concatenate([whole(before, inputs) for inputs in each.witness.batches[step]])


def test_logs_and_weights_are_those_without_the_probe(exact: laws.Pair) -> None:
    laws.nothing_changes(exact)


def test_trl_keeps_the_sampled_tokens_log_prob(exact: laws.Pair) -> None:
    """Not the largest of the K that were asked for in its place."""
    for step, batches in exact.witness.batches.items():
        recorded = exact.rows[exact.rows.step == step].behavior_logprob.to_numpy()
        theirs = np.concatenate(
            [
                inputs["sampling_per_token_logps"][inputs["completion_mask"].bool()].numpy()
                for inputs in batches
            ]
        )
        np.testing.assert_array_equal(theirs, recorded)


@pytest.mark.parametrize(("step", "born"), [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_engines_top_k_is_that_of_the_weights_it_was_given(
    exact: laws.Pair, step: int, born: int
) -> None:
    """float32 against float32: the sync has reached the engine, and the reading is right."""
    rows = exact.rows[exact.rows.step == step]
    policy = reference(exact, step, born)
    ids = rows.token_id.to_numpy()[:, None]
    own = np.take_along_axis(policy, ids, 1)[:, 0]
    np.testing.assert_allclose(rows.behavior_logprob, own, atol=1e-4)
    listed, said = np.stack(rows.topk_ids), np.stack(rows.topk_behavior_logprobs)
    assert listed.shape[1] == TOP_K
    np.testing.assert_allclose(said, np.take_along_axis(policy, listed, 1), atol=1e-4)
    np.testing.assert_allclose(said, -np.sort(-policy, 1)[:, :TOP_K], atol=1e-4)
    inside = (listed == ids).any(axis=1)
    assert inside.any()
    assert not inside.all()  # K + 1 entries came there


def test_a_stale_step_begins_where_the_last_ended(exact: laws.Pair) -> None:
    laws.a_stale_step_begins_where_the_last_ended(exact, 0)
    laws.a_stale_step_begins_where_the_last_ended(exact, 2)


def test_the_dump_is_in_order_and_names_the_engine(exact: laws.Pair) -> None:
    laws.the_dump_is_in_order(exact)
    laws.groups_are_prompts(exact)
    behavior = Dump.open(exact.run).metadata("actual").behavior
    assert (behavior["engine"], behavior["source"]) == ("vllm", "engine")
    assert behavior["logprobs_mode"] == "processed_logprobs"
    assert behavior["support"] == "union"


def test_bfloat16_engine_is_another_policy_from_the_first_step_on(coarse: laws.Pair) -> None:
    laws.nothing_changes(coarse)
    laws.the_dump_is_in_order(coarse)
    rows = coarse.rows[coarse.rows.step == 0]
    gap = (rows.behavior_logprob - rows.pre_logprob).abs()
    assert 1e-5 < gap.mean() < 0.05
    np.testing.assert_allclose(
        rows.behavior_logprob,
        np.take_along_axis(reference(coarse, 0, 0), rows.token_id.to_numpy()[:, None], 1)[:, 0],
        atol=0.2,
    )
