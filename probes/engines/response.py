"""One completion as an engine reported it, in one form for all engines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import check, sampled_entries
from .errors import EngineError
from .missing import Missing, Mode, SupportRule


@dataclass(frozen=True, eq=False)
class EngineResponse:
    """The tokens of one completion with the behavior policy's log-probs, in nats.

    Attributes
    ----------
    engine : str
        `vllm`, `sglang`, `openai`, …
    token_ids : ndarray of int64, shape (token,)
        Sampled tokens k; −1 where the engine gave text only and the id is not known.
    logprobs : ndarray of float64, shape (token,)
        log μ_k; NaN where it is missing, never a number that stands for "none".
    topk_ids : ndarray of int64, shape (token, K)
        The listed ids by descending log-prob, distinct; −1 pads at the end. K may be 0.
    topk_logprobs : ndarray of float64, shape (token, K)
        log μ at those ids; NaN where the id is −1.
    mode : str
        `raw` (before temperature and truncation), `tempered` (at the sampling temperature, not
        truncated), `processed` (after both) or `unknown`.
    temperature, top_p, min_p : float or None
        How the tokens were sampled; None where it is not known.
    top_k : int or None
        Truncation of the sampling, not K; −1 or 0 for none.
    support : str
        `union`: the list is the engine's top-K, and the support is its union with the sampled
        token. `replaced-last`: the list always holds the sampled token, in the place of the K-th
        where it was not among the top-K; what stood there is lost.
    missing : tuple of Missing
        Every NaN among `logprobs` and every −1 among `token_ids` has its reason here.
    prompt_ids : ndarray of int64, shape (prompt,), or None
        Tokens before the response.
    texts : tuple of str, shape (token,), or None
        The sampled tokens as the engine spelled them.
    request : str or None
        The engine's own name for the request.

    Raises
    ------
    EngineError
        Values that no engine can mean: shapes that do not fit, a log-prob above 0 (logits?),
        probabilities that sum to more than 1, an id listed twice, a list out of order, an entry
        for the sampled token that disagrees with its log-prob, a gap without its reason.

    Examples
    --------
    Token 5 was sampled with μ = 0.25; the engine listed ids 9 (0.5) and 5:

    >>> import numpy as np
    >>> r = EngineResponse(
    ...     "vllm", [5], np.log([0.25]), [[9, 5]], np.log([[0.5, 0.25]]), mode="raw"
    ... )
    >>> len(r), r.listed_mass().tolist(), r.behavior_metadata()["logprobs_mode"]
    (1, [0.75], 'raw_logprobs')
    """

    engine: str
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    topk_ids: NDArray[np.int64]
    topk_logprobs: NDArray[np.float64]
    mode: Mode = "unknown"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    support: SupportRule = "union"
    missing: tuple[Missing, ...] = ()
    prompt_ids: NDArray[np.int64] | None = None
    texts: tuple[str, ...] | None = None
    request: str | None = None

    def __post_init__(self) -> None:
        for name, dtype in (
            ("token_ids", np.int64),
            ("logprobs", np.float64),
            ("topk_ids", np.int64),
            ("topk_logprobs", np.float64),
            ("prompt_ids", np.int64),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _array(self, name, value, dtype))
        check(self)

    def __len__(self) -> int:
        """Tokens of the response."""
        return len(self.token_ids)

    @property
    def listed(self) -> int:
        """K, the width of the lists."""
        return int(self.topk_ids.shape[1])

    def listed_mass(self) -> NDArray[np.float64]:
        """Probability of the support, the listed ids and the sampled one, shape (token,).

        In [0, 1] up to rounding; 0 where nothing is known. In mode `processed` it is 1 where the
        list holds all that truncation left.
        """
        mass = np.exp(np.where(self.topk_ids >= 0, self.topk_logprobs, -np.inf)).sum(axis=1)
        alone = ~sampled_entries(self).any(axis=1) & ~np.isnan(self.logprobs)
        return np.asarray(mass + np.where(alone, np.exp(np.nan_to_num(self.logprobs)), 0.0))

    def cut(self, top_k: int) -> EngineResponse:
        """Keep the first `top_k` entries of every list.

        Whatever the sampled token may have replaced stood last, so a list that is cut is the true
        top-K again: its support is `union`.

        Parameters
        ----------
        top_k
            Entries to keep; K or more changes nothing.

        Returns
        -------
        EngineResponse
            With K ≤ `top_k`.

        Raises
        ------
        EngineError
            A negative `top_k`.
        """
        if top_k < 0:
            raise EngineError(self.engine, f"`top_k` must not be negative, got {top_k}")
        if top_k >= self.listed:
            return self
        return dataclasses.replace(
            self,
            topk_ids=self.topk_ids[:, :top_k],
            topk_logprobs=self.topk_logprobs[:, :top_k],
            support="union",
        )

    def missing_counts(self) -> dict[str, dict[str, int]]:
        """How often what is missing for which reason, by field and reason."""
        return count_missing([self])

    def behavior_metadata(self) -> dict[str, Any]:
        """What a dump's metadata says of the behavior policy, under `behavior`.

        Returns
        -------
        dict
            `engine`, `support`; `logprobs_mode` (`raw_logprobs`, …), `temperature`, `top_p`,
            `top_k` and `min_p` where they are known; `missing` (field → reason → count) where
            something is.
        """
        return shared_metadata([self])


def shared_metadata(responses: Iterable[EngineResponse]) -> dict[str, Any]:
    """Say once what all responses of a dump share.

    Parameters
    ----------
    responses
        All of one engine and one way of sampling.

    Returns
    -------
    dict
        As `EngineResponse.behavior_metadata`, with the counts of what is missing added up.

    Raises
    ------
    EngineError
        No response at all, or two that differ in engine, mode, sampling or support.
    """
    responses = list(responses)
    if not responses:
        raise EngineError("responses", "there must be at least one to describe, got none")
    first = responses[0]
    for index, response in enumerate(responses):
        for name in ("engine", "mode", "temperature", "top_p", "top_k", "min_p", "support"):
            ours, theirs = getattr(first, name), getattr(response, name)
            if ours != theirs:
                raise EngineError(
                    response.engine,
                    f"one dump holds responses of one `{name}`, got {ours!r} in response 0 and "
                    f"{theirs!r} here: record them apart"
                    + (", or cut the lists by one entry" if name == "support" else ""),
                    request=response.request or str(index),
                )
    known = {
        "logprobs_mode": None if first.mode == "unknown" else f"{first.mode}_logprobs",
        "temperature": first.temperature,
        "top_p": first.top_p,
        "top_k": first.top_k,
        "min_p": first.min_p,
        "missing": count_missing(responses) or None,
    }
    return {
        "engine": first.engine,
        "support": first.support,
        **{name: value for name, value in known.items() if value is not None},
    }


def count_missing(responses: Iterable[EngineResponse]) -> dict[str, dict[str, int]]:
    """Add up what is missing, by field and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for response in responses:
        for gap in response.missing:
            times = len(response) if gap.position is None else 1
            counts[gap.field, gap.reason] += gap.count * times
    nested: dict[str, dict[str, int]] = {}
    for (field, reason), count in sorted(counts.items()):
        nested.setdefault(field, {})[reason] = count
    return nested


def _array(
    response: EngineResponse, name: str, value: object, dtype: type[np.generic]
) -> NDArray[Any]:
    """Convert, refusing what is no number; a copy that nobody can change."""
    try:
        given = np.asarray(value)
        if given.size and dtype is np.int64 and given.dtype.kind not in "iu":
            raise TypeError(f"expected whole numbers, got {given.dtype}")
        array = np.array(given, dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            response.engine, f"`{name}` is not an array of {dtype.__name__}: {error}",
            request=response.request,
        ) from error  # fmt: skip
    array.flags.writeable = False
    return array
