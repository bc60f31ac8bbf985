"""Prompts and rewards of reasoning-gym."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from typing import Any

from .recipe import RecipeError
from .rollout import stream
from .smollm2 import SmolLM2Recipe

INSTALL_EXTRA = "pip install 'deltad[recipes]'"


@dataclass(frozen=True)
class Question:
    """One entry of a reasoning-gym dataset, with the dataset that scores it."""

    text: str
    answer: str
    entry: dict[str, Any]
    dataset: Any

    def score(self, answer: str) -> float:
        """Score an answer by the task's own scorer."""
        return float(self.dataset.score_answer(answer, self.entry))


class Task:
    """Questions, few-shot examples and rewards of one recipe.

    Raises
    ------
    RecipeError
        reasoning-gym is missing, has no such task, or refuses the configuration.
    """

    def __init__(self, recipe: SmolLM2Recipe) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise RecipeError(
                f"this recipe needs reasoning-gym ({error}): run {INSTALL_EXTRA}"
            ) from error
        self._create = reasoning_gym.create_dataset
        self.name = recipe.task
        self.config: dict[str, Any] = json.loads(recipe.task_config)
        self.style = recipe.prompt_style
        self.success = recipe.success
        source = random.Random(stream(0, "examples"))
        self.examples = [self.question(source) for _ in range(recipe.shots)]
        if not self.examples:
            self.question(source)  # so that a bad task or configuration is known at once

    def question(self, source: random.Random) -> Question:
        """Draw a question."""
        try:
            dataset = self._create(self.name, seed=source.getrandbits(31), size=1, **self.config)
            entry = dataset[0]
        except Exception as error:  # reasoning-gym's tasks raise whatever they like
            raise RecipeError(
                f"reasoning-gym cannot make the task {self.name!r} with {json.dumps(self.config)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Question(entry["question"].strip(), str(entry["answer"]), entry, dataset)

    def messages(self, question: Question) -> list[dict[str, str]]:
        """Write examples and question as the turns of a chat."""
        turns = []
        for example in self.examples:
            turns.append({"role": "user", "content": example.text})
            turns.append({"role": "assistant", "content": example.answer})
        return [*turns, {"role": "user", "content": question.text}]

    def prompt(self, question: Question) -> str:
        """Write examples and question as one text that a response goes on from."""
        if self.style == "worked":
            lines = [
                f"{_expression(example)} ={worked_sum(_expression(example))}\n"
                for example in self.examples
            ]
            return "".join(lines) + f"{_expression(question)} ="
        lines = [
            f"Question: {example.text}\nAnswer: {example.answer}\n\n" for example in self.examples
        ]
        return "".join(lines) + f"Question: {question.text}\nAnswer:"

    def reward(self, question: Question, text: str) -> float:
        """Score a response's text."""
        answer = text.rsplit("=", 1)[-1] if self.style == "worked" else text
        score = question.score(answer.strip())
        return score if self.success == 0 else float(score >= self.success)


def worked_sum(expression: str) -> str:
    """Running results of a chained sum.

    Examples
    --------
    >>> worked_sum("7 + 5 - 3")
    ' 12 - 3 = 9'
    """
    first, *rest = expression.split()
    total = int(first)
    steps = []
    while rest:
        sign, number, *rest = rest
        total += int(number) if sign == "+" else -int(number)
        steps.append(" ".join([str(total), *rest]))
    return "".join(f" {step} =" for step in steps).removesuffix(" =")


def _expression(question: Question) -> str:
    """Sum that a chain_sum question asks for."""
    known = question.entry.get("metadata", {}).get("expression")
    if isinstance(known, str):
        return known
    found = re.search(r":\s*(.*?)\s*=\s*$", question.text)
    if found is None:
        raise RecipeError(f"no sum in the question {question.text!r}")
    return found[1]
