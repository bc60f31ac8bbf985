"""Rollouts by another engine than the trainer: what one must be able to do, and which there are.

An engine takes token ids and gives back what it sampled with the log-probs that it reported
itself, as `EngineResponse`s; nothing is scored again. To add one: a class with the methods of
`RolloutEngine` in a module of its own, its line in `ENGINES` and its name in the field `engine`
of `Recipe`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deltad.probes.behavior import ResponseTokens

from .batch import Minibatch
from .hub import quiet_transformers
from .recipe import ENGINES, Recipe, RecipeError
from .rollout import Group, World
from .weights import rounded

if TYPE_CHECKING:
    from deltad.probes.engines import EngineResponse


@dataclass(frozen=True)
class Sampling:
    """How an engine samples, the same for all requests.

    Attributes
    ----------
    temperature
        Above 0.
    max_new_tokens
        Longest response.
    stop_ids
        Ids that end a response; the last id is part of it.
    top_k
        Ids whose log-probs are wanted at each position.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    top_k: int


class RolloutEngine(Protocol):
    """A model in an engine, with the weights that the policy had when it was opened."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the dump's `behavior` says of it.

        At least `version`, `precision`, `logprobs_mode` and `seeds`, what one seed covers.
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[EngineResponse]:
        """Sample one response to each prompt.

        Parameters
        ----------
        prompts
            Ids of each request.
        seeds
            Of each request, in [0, 2^62).

        Returns
        -------
        list of EngineResponse
            One a request, log-probs at the sampling temperature, top-K without gaps.
        """

    def reset(self) -> None:
        """Forget what earlier requests left behind, such as a prefix cache."""


def check_installed(engine: str) -> None:
    """Refuse an engine whose package is not there, before anything is computed.

    Raises
    ------
    RecipeError
        The message says what to install.
    """
    if engine in ENGINES and importlib.util.find_spec(ENGINES[engine].package) is None:
        raise RecipeError(
            f"`engine` {engine} needs the package {ENGINES[engine].package}, which is not "
            f"installed: run pip install {ENGINES[engine].install}"
        )


def sampling_of(recipe: Recipe, world: World) -> Sampling:
    """How a recipe samples; over the whole vocabulary where it records all of it."""
    return Sampling(
        temperature=recipe.temperature,
        max_new_tokens=recipe.max_new_tokens,
        stop_ids=tuple(world.stop.nonzero()[:, 0].tolist()),
        top_k=world.vocab_size if recipe.full else min(recipe.top_k, world.vocab_size),
    )


def open_engine(recipe: Recipe, world: World) -> RolloutEngine | None:
    """Load the policy, as it is now and rounded as the recipe says, into the recipe's engine.

    Returns
    -------
    RolloutEngine or None
        None where the trainer's own model samples.
    """
    if recipe.engine not in ENGINES:
        return None
    entry = ENGINES[recipe.engine]
    module = importlib.import_module(f".{entry.module}", __package__)
    with rounded(world.model, recipe.behavior_rounding):
        opened: RolloutEngine = module.open_engine(
            world.model, sampling_of(recipe, world), recipe.precision
        )
    return opened


@contextmanager
def saved_weights(model: Any) -> Iterator[Path]:
    """Save a transformers model into a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="deltad-weights-") as name, quiet_transformers():
        model.save_pretrained(name)
        yield Path(name)


def weights_hash(model: Any) -> str:
    """SHA-256 of a model's configuration and of every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def behavior_facts(engine: RolloutEngine, recipe: Recipe) -> dict[str, Any]:
    """What the metadata's `behavior` says where an engine sampled."""
    rounding = recipe.model_facts()["precision"]
    facts = dict(engine.facts)
    if recipe.behavior_rounding != "exact":
        facts["precision"] = f"{facts['precision']}, from {rounding.split(',')[0]}"
    return {
        "engine": recipe.engine,
        "temperature": recipe.temperature,
        "support": "union",
        "top_p": 1.0,
        "top_k": -1,
        "staleness": "the policy moved by the earlier minibatches of the rollout batch",
    } | facts


def engine_tokens(
    groups: Sequence[Group], minibatch: Minibatch, *, top_k: int, vocab_size: int, full: bool
) -> ResponseTokens:
    """What the engine said, when it sampled them, of a minibatch's tokens.

    Parameters
    ----------
    groups
        Of this minibatch, in order, sampled by an engine.
    minibatch
        Made from them.
    top_k
        K of the dump.
    vocab_size
        Of the model.
    full
        Whether the responses hold the whole vocabulary, which is then handed on.
    """
    from deltad.probes.engines.packing import response_tokens

    said = [each for group in groups for each in group.said]
    options: dict[str, Any] = {
        "response_mask": minibatch.response_mask,
        "input_ids": minibatch.inputs["input_ids"],
        "advantages": minibatch.advantages,
        "sequence": minibatch.sequence,
        "group": minibatch.group,
    }
    tokens = response_tokens(said, top_k=top_k, **options)
    if not full:
        return tokens
    mask = minibatch.response_mask
    everything = response_tokens(said, top_k=vocab_size, **options)
    whole = torch.zeros(*mask.shape, vocab_size, dtype=torch.float64)
    whole[mask] = torch.full((int(mask.sum()), vocab_size), torch.nan, dtype=torch.float64).scatter(
        1, everything.topk_ids[mask].long(), everything.topk_logprobs[mask].double()
    )
    return ResponseTokens(**{**vars(tokens), "full_logprobs": whole})
