"""Prompts and rewards from reasoning-gym."""

from __future__ import annotations

import builtins
import random
import sys
from typing import Any

import pytest

from deltad.probes.recipes import RecipeError, SmolLM2Recipe
from deltad.probes.recipes.reasoning import Question, Task, worked_sum

PLAIN: dict[str, Any] = {"prompt_style": "plain"}


def expression(question: Question) -> str:
    text: str = question.entry["metadata"]["expression"]
    return text


@pytest.mark.parametrize(
    ("asked", "worked"),
    [
        ("7 + 5 - 3", " 12 - 3 = 9"),
        ("1 - 6 + 4", " -5 + 4 = -1"),
        ("4 + 4", " 8"),
        ("1 + 2 + 3 + 4", " 3 + 3 + 4 = 6 + 4 = 10"),
    ],
)
def test_worked_sums_show_the_running_results(asked: str, worked: str) -> None:
    assert worked_sum(asked) == worked


def test_questions_follow_from_the_source() -> None:
    task = Task(SmolLM2Recipe())
    one, same, other = (task.question(random.Random(seed)) for seed in (1, 1, 2))
    assert (one.text, one.answer) == (same.text, same.answer)
    assert one.text != other.text


def test_worked_prompt_shows_examples_and_ends_with_the_question() -> None:
    task = Task(SmolLM2Recipe(shots=3))
    question = task.question(random.Random(1))
    lines = task.prompt(question).split("\n")
    assert len(lines) == 4
    assert lines[-1] == f"{expression(question)} ="
    for line in lines[:-1]:
        first, *steps = line.split(" = ")
        assert all(eval(step) == eval(first) for step in steps)


@pytest.mark.parametrize(
    ("response", "reward"),
    [(" 12 - 3 = {}\n", 1.0), (" {}\n", 1.0), (" {}.0", 1.0), (" 12 - 3 = {}1\n", 0.0), ("", 0.0)],
)
def test_worked_responses_are_scored_by_what_follows_the_last_sign(
    response: str, reward: float
) -> None:
    task = Task(SmolLM2Recipe())
    question = task.question(random.Random(1))
    assert task.reward(question, response.format(question.answer)) == reward


def test_success_decides_between_all_or_nothing_and_the_score_itself() -> None:
    config = '{"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}'
    question = Task(SmolLM2Recipe(task_config=config)).question(random.Random(1))
    partly = f"about {question.answer}"
    score = question.score(partly)
    assert 0 < score < 1
    for success, reward in ((1.0, 0.0), (score / 2, 1.0), (0.0, score)):
        task = Task(SmolLM2Recipe(success=success, task_config=config))
        assert task.reward(question, partly) == reward


def test_other_tasks_take_plain_prompts_and_chats() -> None:
    task = Task(SmolLM2Recipe(task="spell_backward", task_config="{}", shots=2, **PLAIN))
    question = task.question(random.Random(0))
    prompt = task.prompt(question)
    assert prompt.endswith(f"Question: {question.text}\nAnswer:")
    assert prompt.count("\nAnswer:") == 3
    turns = task.messages(question)
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2 + ["user"]
    assert turns[-1]["content"] == question.text
    assert task.reward(question, f" {question.answer}\n") == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "no_such_task", **PLAIN}, "cannot make the task 'no_such_task'.*not registered"),
        ({"task_config": '{"min_term": 3}'}, "cannot make the task 'chain_sum'.*min_term"),
        ({"task_config": '{"min_terms": 0}', "shots": 0}, "cannot make the task.*min_terms"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused_at_once(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        Task(SmolLM2Recipe(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task_config": "[1]"}, "`task_config` must be a JSON object"),
        ({"task_config": "{terms: 3}"}, "`task_config` must be a JSON object"),
        ({"task_config": '{"seed": 3}'}, "`task_config` must leave seed to the recipe"),
        ({"task": "spell_backward"}, "`prompt_style` worked knows chain_sum only"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        SmolLM2Recipe(**fields)


def test_missing_reasoning_gym_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "reasoning_gym":
            raise ImportError("No module named 'reasoning_gym'", name=name)
        return importing(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RecipeError, match=r"pip install 'deltad\[recipes\]'"):
        Task(SmolLM2Recipe())
