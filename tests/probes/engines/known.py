"""A known distribution, and what each engine would say of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltad.probes.engines import EngineResponse

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engines"


def fixture(name: str) -> Any:
    """A recorded response."""
    return json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Known:
    """Sampled tokens and the whole distribution that each came from."""

    logprobs: NDArray[np.float64]
    token_ids: list[int]
    top_k: int

    def sampled(self, t: int) -> float:
        return float(self.logprobs[t, self.token_ids[t]])

    def order(self, t: int) -> list[int]:
        return [int(i) for i in np.argsort(-self.logprobs[t], kind="stable")]

    def best(self, t: int) -> list[tuple[int, float]]:
        """The top-K in rank order."""
        return [(i, float(self.logprobs[t, i])) for i in self.order(t)[: self.top_k]]

    def rank(self, t: int) -> int:
        return self.order(t).index(self.token_ids[t]) + 1

    def inside(self, t: int) -> bool:
        return self.rank(t) <= self.top_k

    def sampled_first(self, t: int) -> dict[int, float]:
        """The sampled token, then the top-K: K or K + 1 entries."""
        return {self.token_ids[t]: self.sampled(t), **dict(self.best(t))}

    def __len__(self) -> int:
        return len(self.token_ids)


def unlisted(
    token_ids: list[int], logprobs: list[float], *, width: int = 0, **options: Any
) -> EngineResponse:
    """A response whose lists are empty."""
    shape = (len(token_ids), width)
    return EngineResponse(
        options.pop("engine", "openai"),
        np.array(token_ids, np.int64),
        np.array(logprobs),
        np.full(shape, -1),
        np.full(shape, np.nan),
        **options,
    )


@st.composite
def knowns(draw: st.DrawFn) -> Known:
    """Distributions of at most 9 ids without ties, float32 as engines have them."""
    tokens, vocab = draw(st.integers(1, 5)), draw(st.integers(3, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(0.0, 2.0, (tokens, vocab))
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return Known(
        logprobs.astype(np.float32).astype(np.float64),
        rng.integers(0, vocab, tokens).tolist(),
        draw(st.integers(1, vocab - 1)),
    )


def is_union(response: EngineResponse, known: Known, *, atol: float = 0.0) -> None:
    """The list is the true top-K, the sampled token stands apart, nothing is missing."""
    assert response.token_ids.tolist() == known.token_ids
    np.testing.assert_allclose(
        response.logprobs, [known.sampled(t) for t in range(len(known))], atol=atol, rtol=0
    )
    assert response.support == "union"
    assert response.missing == ()
    assert response.topk_ids.tolist() == [[i for i, _ in known.best(t)] for t in range(len(known))]
    np.testing.assert_allclose(
        response.topk_logprobs,
        [[value for _, value in known.best(t)] for t in range(len(known))],
        atol=atol,
        rtol=0,
    )


def vllm_dicts(known: Known, *, ranks: bool = True) -> list[dict[int, dict[str, Any]]]:
    """As vLLM: the sampled token first."""
    return [
        {
            i: {
                "logprob": value,
                "rank": known.order(t).index(i) + 1 if ranks else None,
                "decoded_token": f"t{i}",
            }
            for i, value in known.sampled_first(t).items()
        }
        for t in range(len(known))
    ]


def vllm_flat(known: Known) -> dict[str, Any]:
    """As FlatLogprobs: K + 1 entries, the sampled token twice where it is in the top-K."""
    flat: dict[str, Any] = {
        key: [] for key in ("start_indices", "end_indices", "token_ids", "logprobs", "ranks")
    }
    for t in range(len(known)):
        flat["start_indices"].append(len(flat["token_ids"]))
        entries = [(known.token_ids[t], known.sampled(t), known.rank(t))]
        entries += [(i, value, at + 1) for at, (i, value) in enumerate(known.best(t))]
        for i, value, rank in entries:
            flat["token_ids"].append(i)
            flat["logprobs"].append(value)
            flat["ranks"].append(rank)
        flat["end_indices"].append(len(flat["token_ids"]))
    return flat


def vllm_output(known: Known, logprobs: Any) -> dict[str, Any]:
    return {
        "request_id": "r7",
        "prompt_token_ids": [1, 2],
        "outputs": [{"index": 0, "token_ids": known.token_ids, "logprobs": logprobs}],
    }


def sglang_output(known: Known) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": known.token_ids,
        "meta_info": {
            "id": "s1",
            "output_token_logprobs": [
                [known.sampled(t), known.token_ids[t], None] for t in range(len(known))
            ],
            "output_top_logprobs": [
                [[value, i, None] for i, value in known.best(t)] for t in range(len(known))
            ],
        },
    }


def completion(known: Known, text: str = "token_id:{}") -> dict[str, Any]:
    """As `/v1/completions`: an object a token, the sampled one first."""
    return {
        "id": "cmpl-1",
        "choices": [
            {
                "text": "",
                "logprobs": {
                    "tokens": [text.format(i) for i in known.token_ids],
                    "token_logprobs": [known.sampled(t) for t in range(len(known))],
                    "top_logprobs": [
                        {text.format(i): v for i, v in known.sampled_first(t).items()}
                        for t in range(len(known))
                    ],
                },
            }
        ],
    }


def chat(known: Known, *, vllm: bool) -> dict[str, Any]:
    """As `/v1/chat/completions`: exactly K; vLLM cuts its list, sampled token first, at K."""
    content = []
    for t in range(len(known)):
        entries = list(known.sampled_first(t).items())[: known.top_k] if vllm else known.best(t)
        content.append(
            {
                "token": f"token_id:{known.token_ids[t]}",
                "logprob": known.sampled(t),
                "top_logprobs": [
                    {"token": f"token_id:{i}", "logprob": value} for i, value in entries
                ],
            }
        )
    fingerprint = "vllm-0.32.0" if vllm else "fp_1"
    return {
        "id": "chat-1",
        "system_fingerprint": fingerprint,
        "choices": [{"message": {"content": ""}, "logprobs": {"content": content}}],
    }
