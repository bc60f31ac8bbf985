"""The top-K that the rollout server gives for what it has generated."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch

from deltad.probes import ProbeError
from deltad.probes.verl import rescored
from deltad.probes.verl.rescored import check_room, refuse_distillation, rescore, topk_of
from tests.probes.verl.verl_here import imported

K = 2
# A row a token of prompt and response: the distribution of the next one; the last is a dummy.
ANSWER = {
    "prompt_ids": [[7, 3], [4, None], [1, 0], [0, 0]],
    "prompt_logprobs": [[-0.1, -3.0], [-0.5, None], [-0.2, -2.5], [0.0, 0.0]],
}


def ask(temperature: float = 1.0, answer: Any = None) -> tuple[Any, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    async def generate(**request: Any) -> Any:
        asked.append(request)
        return SimpleNamespace(extra_fields=ANSWER if answer is None else answer)

    output = SimpleNamespace(prompt_ids=[5, 6], response_ids=[7, 1], extra_fields={"turns": 1})
    made = asyncio.run(rescore(output, generate, temperature=temperature, top_k=K))
    return made, asked


def test_prompt_and_response_are_scored_as_a_prompt() -> None:
    output, asked = ask()
    assert len(asked) == 1
    assert asked[0]["prompt_ids"] == [5, 6, 7, 1]
    assert asked[0]["sampling_params"] == {
        "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": K, "detokenize": False,
    }  # fmt: skip
    assert output.extra_fields["turns"] == 1
    ids, logprobs = output.extra_fields["teacher_ids"], output.extra_fields["teacher_logprobs"]
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[7, 3], [4, -1], [1, 0], [0, 0]]
    assert logprobs[:, 0].tolist() == pytest.approx([-0.1, -0.5, -0.2, 0.0])
    assert logprobs.isnan().tolist() == [[False, False], [False, True], [False] * 2, [False] * 2]


def test_greedy_validation_is_left_alone() -> None:
    output, asked = ask(temperature=0.0)
    assert not asked
    assert set(output.extra_fields) == {"turns"}


def test_another_temperature_is_refused() -> None:
    with pytest.raises(ProbeError, match=r"temperature=1 .*, got 0.7: servers score prompts"):
        ask(temperature=0.7)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "gave no prompt log-probs: .*at least 2 allowed"),
        ({**ANSWER, "prompt_ids": ANSWER["prompt_ids"][:3]}, "must be 4 lists of 2, got 3 lists"),
        ({**ANSWER, "prompt_logprobs": [[0.0]] * 4}, "must be 4 lists of 2"),
    ],
)
def test_an_answer_of_another_shape_is_refused(answer: Any, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        ask(answer=answer)


def test_a_distillation_is_refused() -> None:
    refuse_distillation({"distillation": {"enabled": False}})
    refuse_distillation({})
    with pytest.raises(ProbeError, match=r"set distillation.enabled=False"):
        refuse_distillation({"distillation": {"enabled": True}})


def test_a_server_without_room_for_a_longest_response_is_refused() -> None:
    lengths = {"prompt_length": 10, "response_length": 20}
    check_room({**lengths, "max_model_len": None})
    check_room({**lengths, "max_model_len": 32})
    with pytest.raises(ProbeError, match=r"max_model_len must be at least 32 .*, got 31"):
        check_room({**lengths, "max_model_len": 31})


def test_there_is_nothing_else_to_find() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'AgentLoop'"):
        _ = rescored.AgentLoop


@pytest.mark.verl
def test_verls_extractor_gives_what_is_read() -> None:
    """The lists as verl's vLLM server makes them of a `RequestOutput`."""
    root = Path(str(imported("verl").__file__)).parent
    # The function alone: its module cannot be imported without vLLM.
    tree = ast.parse((root / "workers/rollout/vllm_rollout/utils.py").read_text())
    (function,) = (
        each
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name == "extract_prompt_logprobs"
    )
    scope: dict[str, Any] = {"RequestOutput": Any, "Optional": Optional}
    exec(compile(ast.Module([function], []), "verl", "exec"), scope)
    extract = scope["extract_prompt_logprobs"]

    def entry(**by_id: tuple[float, int]) -> dict[int, Any]:
        return {
            int(name[1:]): SimpleNamespace(logprob=logprob, rank=rank)
            for name, (logprob, rank) in by_id.items()
        }

    output = SimpleNamespace(
        prompt_logprobs=[
            None,
            entry(_6=(-0.1, 1), _3=(-3.0, 2)),
            entry(_9=(-8.0, 40), _4=(-0.5, 1), _2=(-1.5, 2)),  # the token itself is not in the top
        ]
    )
    fields: dict[str, Any] = {}
    extract(output, K, fields)
    ids, logprobs = topk_of(fields, 3, K)
    assert ids[:2].tolist() == [[6, 3], [4, 2]]
    torch.testing.assert_close(logprobs[:2], torch.tensor([[-0.1, -3.0], [-0.5, -1.5]]))


@pytest.mark.verl
def test_verl_finds_the_loop_by_its_name() -> None:
    loops = imported("verl.experimental.agent_loop.agent_loop")
    imported("deltad.probes.verl")
    single = imported("verl.experimental.agent_loop.single_turn_agent_loop").SingleTurnAgentLoop
    registered = loops._agent_loop_registry[rescored.NAME]
    hydra = imported("hydra.utils")
    found = hydra.get_class(registered["_target_"])
    assert found is rescored.RescoredAgentLoop
    assert issubclass(found, single)
    answered: list[Any] = []

    async def run(self: Any, sampling_params: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(prompt_ids=[5, 6], response_ids=[7, 1], extra_fields={})

    async def generate(**request: Any) -> Any:
        answered.append(request)
        return SimpleNamespace(extra_fields=ANSWER)

    loop = object.__new__(found)
    loop._top_k, loop.server_manager = K, SimpleNamespace(generate=generate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single, "run", run)
        output = asyncio.run(loop.run({"temperature": 1.0}, raw_prompt=[]))
    assert len(answered) == 1
    assert output.extra_fields["teacher_ids"].shape == (4, K)
