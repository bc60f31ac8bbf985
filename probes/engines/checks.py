"""What no engine can mean: the law that every `EngineResponse` keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from deltad.support import ROUNDED_LOGITS_TOLERANCE

from .errors import EngineError
from .missing import Field, Mode, Reason, SupportRule

if TYPE_CHECKING:
    from .response import EngineResponse

AGREEMENT_TOLERANCE: Final = 1e-4
"""Nats by which the sampled token's entry in the list may differ from its own log-prob."""


def sampled_entries(response: EngineResponse) -> NDArray[np.bool_]:
    """Where the lists hold the sampled token, shape (token, K)."""
    ids = response.topk_ids
    return np.asarray((ids >= 0) & (ids == response.token_ids[:, None]))


def check(response: EngineResponse) -> None:
    """Refuse what no engine can mean."""

    def refuse(bad: NDArray[np.bool_], reason: str, *values: NDArray[Any]) -> None:
        """Raise for the first position where `bad` holds; `{}` in `reason` takes its values."""
        rows = bad if bad.ndim == 1 else bad.any(axis=1)
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
    hit = sampled_entries(response)
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
            gap.field in get_args(Field) and gap.reason in get_args(Reason),
            f"`missing` must name a field and a reason of the known, got {gap}",
        )
        require(
            gap.position is None or 0 <= gap.position < tokens[0],
            f"`missing` speaks of position {gap.position} of {tokens[0]} tokens",
        )
    for name in ("temperature", "top_p", "min_p"):
        setting = getattr(response, name)
        number = isinstance(setting, int | float | np.number) and not isinstance(setting, bool)
        require(
            setting is None or (number and np.isfinite(float(setting)) and setting >= 0),
            f"`{name}` must be a finite number, at least 0, got {setting!r}",
        )
    whole = isinstance(response.top_k, int | np.integer) and not isinstance(response.top_k, bool)
    require(
        response.top_k is None or whole,
        f"`top_k` must be a whole number, got {response.top_k!r}",
    )
