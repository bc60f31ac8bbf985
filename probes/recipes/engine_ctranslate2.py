"""CTranslate2 as the engine that samples: int8 on any CPU, without a GPU and without vLLM.

It hands out the logits of every decoding step, so the log-probs here are those that its own
sampling used. Its random generator belongs to a worker thread and is seeded when the thread
starts: each call opens the model anew, seeded by all of the call's seeds, so that a call repeats;
one request by itself does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deltad.probes.engines import EngineResponse
from deltad.probes.engines.ctranslate2 import read_ctranslate2

from .cache import cached_folder
from .engine import Sampling, saved_weights, weights_hash

CONVERSION_REVISION: Final = 1
"""Raised whenever the conversion below would write another folder."""


def open_engine(model: Any, sampling: Sampling, precision: str) -> CTranslate2Engine:
    """Convert a transformers model, once for the same weights, and open it.

    Parameters
    ----------
    model
        A causal language model that CTranslate2's converter knows.
    sampling
        How to sample.
    precision
        "float32" or "int8": of the weights and of the products with them.
    """
    import ctranslate2

    key = {
        "weights": weights_hash(model),
        "precision": precision,
        "ctranslate2": ctranslate2.__version__,
        "revision": CONVERSION_REVISION,
    }
    folder = cached_folder("ctranslate2", key, lambda folder: _convert(model, folder, precision))
    return CTranslate2Engine(folder, sampling, precision)


@dataclass(frozen=True)
class CTranslate2Engine:
    """A converted model.

    Attributes
    ----------
    folder
        Written by the converter; tokens are named by their ids.
    sampling
        How to sample.
    precision
        "float32" or "int8".
    """

    folder: Path
    sampling: Sampling
    precision: str

    @property
    def facts(self) -> Mapping[str, Any]:
        """Version, precision, kind of log-probs and what a seed covers."""
        import ctranslate2

        return {
            "version": ctranslate2.__version__,
            "precision": {"int8": "int8 weights and activations, float32 between them"}.get(
                self.precision, self.precision
            ),
            "logprobs_mode": "tempered_logprobs",
            "seeds": "one for each batch of requests",
        }

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[EngineResponse]:
        """Sample one response to each prompt; the call as a whole repeats by its seeds."""
        import ctranslate2

        digest = hashlib.sha256(repr(list(seeds)).encode()).digest()
        ctranslate2.set_random_seed(int.from_bytes(digest[:4], "little"))
        generator = ctranslate2.Generator(
            str(self.folder), compute_type=self.precision, inter_threads=1, intra_threads=1
        )
        results = generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            sampling_topk=0,
            sampling_temperature=self.sampling.temperature,
            max_length=self.sampling.max_new_tokens,
            end_token=list(self.sampling.stop_ids),
            return_end_token=True,
            include_prompt_in_result=False,
            return_logits_vocab=True,
        )
        return read_ctranslate2(
            results,
            prompts,
            temperature=self.sampling.temperature,
            top_p=1.0,
            top_k=-1,
            include_prompt=False,
            listed=self.sampling.top_k,
        )

    def reset(self) -> None:
        """Nothing to forget: each call opens the model anew."""


class _Ids:
    """Stands for a tokenizer in the conversion: every token is named by its id."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.bos_token = self.eos_token = self.pad_token = self.unk_token = "0"

    def get_vocab(self) -> dict[str, int]:
        """Names of all ids."""
        return {str(token): token for token in range(self._count)}


def _convert(model: Any, folder: Path, precision: str) -> None:
    """Convert with ids for tokens, so that no tokenizer is needed and none can interfere."""
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]
        """The library's converter, without a tokenizer."""

        def load_tokenizer(self, *args: Any, **options: Any) -> _Ids:
            """Give the stand-in."""
            return _Ids(int(model.config.get_text_config().vocab_size))

    with saved_weights(model) as source:
        Converter(str(source)).convert(str(folder), quantization=precision, force=True)
