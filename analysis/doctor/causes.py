"""The registry of causes: a new cause is a function that looks at the evidence, and an entry here.

The order is that in which causes explain each other away. A cause that stands above has seen
its fault in single values, or in a relation that those below only suffer from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from . import alignment, distance, identifiers, noise, renormalised, training, values
from .evidence import Evidence
from .findings import Finding


@dataclass(frozen=True)
class Cause:
    """One reason why engine and trainer disagree.

    Attributes
    ----------
    name : str
        As in the JSON.
    meaning : str
        What went wrong, in a sentence.
    detect : callable
        Looks at the evidence and gives a finding, or None where nothing speaks for this cause.
    advice : str
        The remedy.
    explains : frozenset of str
        Causes whose signs this one shows too, so that they are no news beside it.
    """

    name: str
    meaning: str
    detect: Callable[[Evidence], Finding | None]
    advice: str
    explains: frozenset[str] = frozenset()


_DISTANCE: Final = frozenset({"temperature", "stale", "other-model", "precision"})

_ALL: Final = (
    Cause(
        "sentinel",
        "A number stands where a log-prob is missing.",
        values.sentinel,
        "Treat this value as missing where the engine's answer is parsed: drop the entry (id −1) "
        "or the row, and let no trainer exponentiate it.",
        frozenset({"impossible-values"}),
    ),
    Cause(
        "recomputed",
        "μ was computed by the trainer instead of taken from the engine.",
        distance.recomputed,
        "Record the engine's own log-probs at sampling time; recomputed ones hide every "
        "difference between engine and trainer, and r is 1 by construction.",
        frozenset({"topk-convention", "stale", "precision"}),
    ),
    Cause(
        "stale",
        "μ comes from older weights than the sampler's, or than the updates explain.",
        distance.stale,
        "Synchronise the engine's weights before each rollout, take log-probs from the weights "
        "that sampled, and record the staleness in the metadata.",
        _DISTANCE | {"shift", "vocabulary", "topk-convention", "concentration"},
    ),
    Cause(
        "shift",
        "The policy's rows are misaligned with the behavior's.",
        alignment.shift,
        "Align labels and logits (the logits at t − 1 predict the token at t), and compare the "
        "prompt's ids on both sides: chat template, BOS, EOS, left padding.",
        _DISTANCE
        | {"vocabulary", "truncation", "topk-convention", "impossible-values", "concentration"},
    ),
    Cause(
        "vocabulary",
        "Both sides do not mean the same tokens by the same ids.",
        identifiers.vocabulary,
        "Compare the config's vocab_size, the tokenizer's length and the head's rows on both "
        "sides: cut padded rows before the log-softmax, and load one tokenizer everywhere.",
        _DISTANCE | {"impossible-values", "shift", "truncation", "topk-convention"},
    ),
    Cause(
        "topk-convention",
        "The lists are not the ranked top-K with the sampled token's own entry.",
        values.topk_convention,
        "Read the lists by id, not by place: drop duplicates, sort by log-prob, keep the sampled "
        "token's own entry, and set behavior.support in the metadata to what the engine does.",
        frozenset({"impossible-values", "truncation"}),
    ),
    Cause(
        "truncation",
        "One side renormalised over the ids that truncated sampling left.",
        renormalised.truncation,
        "Use the same support on both sides: record log-probs before top-p, top-k and min-p "
        "(vLLM: logprobs_mode), or sample without truncation (top_p = 1, top_k = −1, min_p = 0).",
        _DISTANCE | {"vocabulary", "concentration"},
    ),
    Cause(
        "other-model",
        "Engine and trainer do not hold the same model, or do not read the same prompt.",
        distance.other_model,
        "Check the checkpoint, revision and adapter on both sides, that weights were synchronised "
        "at all, and that both read the same prompt.",
        _DISTANCE | {"vocabulary", "concentration"},
    ),
    Cause(
        "temperature",
        "One side applies a temperature that the other does not.",
        distance.temperature,
        "Divide the logits by the sampling temperature once on both sides, before the "
        "log-softmax (vLLM: logprobs_mode = processed_logprobs).",
        (_DISTANCE - {"other-model"}) | {"vocabulary", "concentration", "truncation"},
    ),
    Cause(
        "precision",
        "Rounding noise beyond what the declared precision explains.",
        noise.precision,
        "Compute logits and log-softmax in float32 on both sides, declare the engine's precision, "
        "and look for routing or cache differences where few or late tokens are far out.",
        frozenset({"impossible-values", "topk-convention", "concentration"}),
    ),
    Cause(
        "advantage",
        "The advantages teach nothing, or nothing is left in the loss.",
        training.advantage,
        "Follow the reward from the verifier to the batch: its spread within a prompt, the "
        "baseline, the division by a spread of 0, the mask's threshold.",
    ),
    Cause(
        "concentration",
        "The mask hits the same few tokens again and again.",
        training.concentration,
        "Look at these tokens in the report: a mask that always drops the deciding tokens stops "
        "learning where it matters; raise the threshold or see why their policies part.",
    ),
    Cause(
        "impossible-values",
        "Log-probs above 0, or lists whose mass exceeds 1.",
        values.impossible,
        "Take log-probs from one log-softmax over the whole vocabulary; these are none.",
    ),
)

CAUSES: Final = MappingProxyType({cause.name: cause for cause in _ALL})
"""Every cause by name, in the order in which they explain each other away."""
