"""Which reader fits what was given."""

from __future__ import annotations

from typing import Any

import pytest

from deltad.probes.engines import READERS, EngineError, read_ctranslate2, reader_for

from .known import FIXTURES, fixture

ENGINES = {
    "vllm_offline": "vllm",
    "vllm_server": "openai",
    "vllm_processed": "openai",
    "sglang": "sglang",
    "llama_cpp_python": "openai",
    "llama_cpp": "llama.cpp",
    "verl": "verl",
}
RECORDED = sorted(
    path.stem
    for path in FIXTURES.glob("*.json")
    if path.stem not in ("ctranslate2", "sglang_table")
)


@pytest.mark.parametrize("name", RECORDED)
def test_every_fixture_is_known_by_its_shape_and_read(name: str) -> None:
    reader = reader_for(fixture(name))
    assert reader.engine == next(e for prefix, e in ENGINES.items() if name.startswith(prefix))
    assert reader is READERS[reader.engine]
    assert reader_for([fixture(name)]) is reader
    assert all(len(response) for response in reader.read(fixture(name)))


@pytest.mark.parametrize(
    ("value", "engine"),
    [
        ({"sequences": [[1]], "scores": []}, "transformers"),
        ({"sequences_ids": [[1]], "sequences": [["a"]], "logits": []}, "ctranslate2"),
        ({"schema_version": 1, "inference_logprobs": []}, "prime-rl"),
        ({"tokens": [1], "response_length": 1}, "slime"),
        ({"samples": []}, "slime"),
    ],
)
def test_shapes_without_a_fixture_are_known_too(value: Any, engine: str) -> None:
    assert reader_for(value).engine == engine


def test_ctranslate2_is_read_with_its_prompts() -> None:
    result = fixture("ctranslate2")["results"]
    assert reader_for(result).read is read_ctranslate2


@pytest.mark.parametrize("value", [{"x": 1}, [], "text", None, 5])
def test_what_no_reader_fits_is_refused_with_the_shapes_known(value: Any) -> None:
    with pytest.raises(EngineError, match=r"no reader fits .* Known are vllm: `outputs`"):
        reader_for(value)


def test_what_several_fit_is_not_guessed() -> None:
    both = {**fixture("sglang_nested"), **fixture("llama_cpp_native")}
    with pytest.raises(EngineError, match=r"for these fit: sglang, llama\.cpp: name one"):
        reader_for(both)
