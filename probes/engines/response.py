"""One completion as an engine reported it, in one form for all engines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from deltad.support import ROUNDED_LOGITS_TOLERANCE

from .errors import EngineError

Mode = Literal["raw", "tempered", "processed", "unknown"]
"""What the engine had done to the logits: nothing; divided them by the temperature; that and cut
them by top-p, top-k or min-p; or it is not known."""

SupportRule = Literal["union", "replaced-last"]
"""Whether the list is the top-K, or the sampled token has taken the place of the K-th."""

Field = Literal["token_id", "logprob", "topk"]
"""What is missing: a sampled token's id, its log-prob, or an entry of its list."""

Reason = Literal[
    "null", "nan", "minus-infinity", "sentinel", "truncated", "ambiguous-text", "unknown-text",
    "collision", "no-ids", "cut-off", "not-returned",
]  # fmt: skip
"""Why something is missing.

`null`: JSON null, Python None. `nan`: not a number. `minus-infinity`: −∞ for a token that was
sampled. `sentinel`: a number that stands for "none", as −9999. `truncated`: −∞ in the list, an id
that top-p, top-k or min-p had cut; its probability is 0. `ambiguous-text`: several ids have this
text. `unknown-text`: no id has it. `collision`: two ids of a list had one text, and the engine
kept one of them. `no-ids`: text alone was returned. `cut-off`: the response ends before its
log-probs should. `not-returned`: the engine gave no list here, or a shorter one.
"""

AGREEMENT_TOLERANCE: Final = 1e-4
"""Nats by which the sampled token's entry in the list may differ from its own log-prob."""


@dataclass(frozen=True)
class Missing:
    """Something that the engine did not say, and why.

    Attributes
    ----------
    position : int or None
        Token within the response, from 0; None where it concerns every token.
    field : str
        `token_id`, `logprob` or `topk`.
    reason : str
        One of `Reason`.
    count : int
        Entries concerned.
    detail : str
        The value that came, or the texts concerned.
    """

    position: int | None
    field: Field
    reason: Reason
    count: int = 1
    detail: str = ""


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
        _check(self)

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
        alone = ~_sampled_entries(self).any(axis=1) & ~np.isnan(self.logprobs)
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


def _sampled_entries(response: EngineResponse) -> NDArray[np.bool_]:
    """Where the lists hold the sampled token, shape (token, K)."""
    ids = response.topk_ids
    return np.asarray((ids >= 0) & (ids == response.token_ids[:, None]))


def _check(response: EngineResponse) -> None:
    """Refuse what no engine can mean."""

    def refuse(bad: NDArray[np.bool_], reason: str, *values: NDArray[Any]) -> None:
        """Raise for the first position where `bad` holds; `{}` in `reason` takes its values."""
        rows = bad.reshape(len(bad), -1).any(axis=1)
        if not rows.any():
            return
        position = int(rows.argmax())
        slot = int(bad[position].argmax()) if bad.ndim == 2 else None
        said = [v[position] if slot is None or v.ndim == 1 else v[position, slot] for v in values]
        raise EngineError(
            response.engine,
            reason.format(*(f"{v:.6g}" if isinstance(v, np.floating) else v for v in said)),
            request=response.request,
            position=position,
        )

    _check_shapes(response)
    ids, logprobs, missing = response.topk_ids, response.topk_logprobs, response.missing
    refuse(response.token_ids < -1, "a token id must be at least 0, got {}", response.token_ids)
    refuse(ids < -1, "a listed id must be at least 0 (−1 pads), got {}", ids)
    for field, gaps in (
        ("token_id", response.token_ids == -1),
        ("logprob", np.isnan(response.logprobs)),
    ):
        explained = np.zeros(len(response), bool)
        for gap in missing:
            if gap.field == field:
                explained[slice(None) if gap.position is None else gap.position] = True
        refuse(gaps & ~explained, f"`{field}` is missing without a reason in `missing`")
    refuse(
        response.logprobs == -np.inf,
        "the sampled token's log-prob is −∞, but it was sampled: such a value is missing",
    )
    highest = ROUNDED_LOGITS_TOLERANCE
    for what, values in (("a log-prob", response.logprobs), ("a listed log-prob", logprobs)):
        refuse(
            values > highest,
            f"{what} must be at most 0 nats, got {{}}: are these logits or probabilities?",
            values,
        )
    padding = ids == -1
    refuse(padding & ~np.isnan(logprobs), "padding (id −1) has a log-prob of {}", logprobs)
    refuse(~padding & np.isnan(logprobs), "the listed id {} has no log-prob", ids)
    refuse(padding[:, :-1] & ~padding[:, 1:], "id {} is listed after padding", ids[:, 1:])
    refuse(
        logprobs[:, :-1] < logprobs[:, 1:],
        "listed log-probs must descend, got {} before {}", logprobs[:, :-1], logprobs[:, 1:],
    )  # fmt: skip
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    refuse(twice, "id {} is listed twice", ordered[:, 1:])
    hit = _sampled_entries(response)
    apart = np.where(hit, np.abs(logprobs - response.logprobs[:, None]), 0.0)
    refuse(
        apart > AGREEMENT_TOLERANCE,
        "the sampled token's log-prob is {}, but {} in its list: they must be the same",
        response.logprobs, logprobs,
    )  # fmt: skip
    mass = response.listed_mass()
    refuse(mass > 1 + highest, "listed probabilities must sum to at most 1, got {}", mass)
    if response.support == "replaced-last":
        refuse(
            ~hit.any(axis=1) & (ids >= 0).any(axis=1) & (response.token_ids >= 0),
            "`support` is 'replaced-last', so the list must hold the sampled token {}",
            response.token_ids,
        )


def _check_shapes(response: EngineResponse) -> None:
    """Shapes, names and settings."""

    def require(holds: bool, reason: str) -> None:
        if not holds:
            raise EngineError(response.engine, reason, request=response.request)

    tokens, listed = response.token_ids.shape, response.topk_ids.shape
    require(len(tokens) == 1, f"`token_ids` must have one dimension, got shape {tokens}")
    require(
        response.logprobs.shape == tokens,
        f"`logprobs` must have the shape of `token_ids`, {tokens}, got {response.logprobs.shape}",
    )
    require(
        len(listed) == 2 and listed[0] == tokens[0],
        f"`topk_ids` must have shape ({tokens[0]}, K), got {listed}",
    )
    require(
        response.topk_logprobs.shape == listed,
        f"`topk_logprobs` must have the shape of `topk_ids`, {listed}, got "
        f"{response.topk_logprobs.shape}",
    )
    prompt, texts = response.prompt_ids, response.texts
    require(prompt is None or prompt.ndim == 1, "`prompt_ids` must have one dimension")
    require(
        texts is None or len(texts) == tokens[0],
        f"`texts` must hold {tokens[0]} texts, got {len(texts or ())}",
    )
    for name, value, choices in (
        ("mode", response.mode, get_args(Mode)),
        ("support", response.support, get_args(SupportRule)),
    ):
        require(value in choices, f"`{name}` must be one of {', '.join(choices)}, got {value!r}")
    for gap in response.missing:
        require(
            gap.position is None or 0 <= gap.position < tokens[0],
            f"`missing` speaks of position {gap.position} of {tokens[0]} tokens",
        )
    for name in ("temperature", "top_p", "min_p"):
        setting = getattr(response, name)
        require(
            setting is None or (np.isfinite(setting) and setting >= 0),
            f"`{name}` must be a finite number, at least 0, got {setting}",
        )
