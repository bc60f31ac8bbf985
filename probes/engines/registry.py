"""Readers by engine name, and which of them fits what was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from .assemble import brief, field_of
from .ctranslate2 import read_ctranslate2
from .errors import EngineError
from .llama_cpp import read_llama_cpp
from .openai import read_openai
from .prime_rl import read_prime_rl
from .response import EngineResponse
from .rollout_dump import read_rollout_dump
from .sglang import read_sglang
from .transformers import read_transformers
from .vllm import read_vllm


@dataclass(frozen=True)
class Reader:
    """How one engine's responses are known and read.

    Attributes
    ----------
    engine : str
        Name, as in `READERS`.
    read : callable
        Takes what the engine returned and keyword options; returns a list of `EngineResponse`.
    fits : callable
        Whether one response has this engine's shape.
    shape : str
        What it looks for, for the error where none fits.
    """

    engine: str
    read: Callable[..., list[EngineResponse]]
    fits: Callable[[Any], bool]
    shape: str


def reader_for(value: Any) -> Reader:
    """Tell from its shape which engine something came from.

    Parameters
    ----------
    value
        What an engine returned, or a sequence of it, whose first entry is looked at.

    Returns
    -------
    Reader
        The one that fits.

    Raises
    ------
    EngineError
        None fits, or several do: then it cannot be told, and the reader must be named.

    Examples
    --------
    >>> reader_for({"meta_info": {"output_token_logprobs": []}}).engine
    'sglang'
    """
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    item = (value[0] if value else None) if several else value
    fitting = [reader for reader in READERS.values() if reader.fits(item)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        shapes = "; ".join(f"{reader.engine}: {reader.shape}" for reader in READERS.values())
        raise EngineError("unknown", f"no reader fits {brief(item)}. Known are {shapes}")
    names = ", ".join(reader.engine for reader in fitting)
    raise EngineError(
        "unknown",
        f"the shape does not tell which engine it came from, for these fit: {names}: name one",
    )


def _has(value: Any, *names: str) -> bool:
    """Whether all fields are there and not None."""
    return all(field_of(value, name) is not None for name in names)


def _choices(value: Any) -> list[Any]:
    """Entries of OpenAI's shape."""
    choices = field_of(value, "choices")
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return list(choices)
    return []


def _is_llama_cpp(value: Any) -> bool:
    """Native responses, and `/v1/` routes, whose entries alone have an `id`."""
    if _has(value, "completion_probabilities"):
        return True
    for choice in _choices(value):
        content = field_of(field_of(choice, "logprobs"), "content")
        if isinstance(content, Sequence) and any(_has(item, "id") for item in content):
            return True
    return False


def _is_vllm(value: Any) -> bool:
    """RequestOutput."""
    outputs = field_of(value, "outputs")
    return (
        isinstance(outputs, Sequence)
        and not isinstance(outputs, str)
        and all(_has(output, "token_ids") for output in outputs)
    )


def _is_sglang(value: Any) -> bool:
    """`meta_info` with log-probs."""
    meta = field_of(value, "meta_info")
    return isinstance(meta, Mapping) and "output_token_logprobs" in meta


_ALL: Final = (
    Reader("vllm", read_vllm, _is_vllm, "`outputs` with `token_ids`"),
    Reader("sglang", read_sglang, _is_sglang, "`meta_info` with `output_token_logprobs`"),
    Reader(
        "openai",
        read_openai,
        lambda value: bool(_choices(value)) and not _is_llama_cpp(value),
        "`choices`",
    ),
    Reader("llama.cpp", read_llama_cpp, _is_llama_cpp, "`completion_probabilities`"),
    Reader(
        "transformers",
        read_transformers,
        lambda value: (
            _has(value, "sequences")
            and not _has(value, "sequences_ids")
            and (_has(value, "logits") or _has(value, "scores"))
        ),
        "`sequences` with `logits` or `scores`",
    ),
    Reader(
        "ctranslate2",
        read_ctranslate2,
        lambda value: _has(value, "sequences_ids", "logits"),
        "`sequences_ids` with `logits`",
    ),
    Reader(
        "prime-rl",
        read_prime_rl,
        lambda value: _has(value, "schema_version", "inference_logprobs"),
        "`schema_version` with `inference_logprobs`",
    ),
    Reader(
        "slime",
        read_rollout_dump,
        lambda value: _has(value, "tokens", "response_length") or _has(value, "samples"),
        "`tokens` with `response_length`, or `samples`",
    ),
    Reader(
        "verl",
        read_rollout_dump,
        lambda value: _has(value, "responses", "response_mask"),
        "`responses` with `response_mask`",
    ),
)

READERS: Final[Mapping[str, Reader]] = MappingProxyType({reader.engine: reader for reader in _ALL})
"""Every engine's reader by its name."""
