"""Tokens as they are read, and every named number of them: conditions, predictors, columns.

A value is one entry of `VALUES`: a condition of `deltad compare --by`, a predictor, a rung of the
ladder, or a column that travels along. A column that it names is read for it, and a dump without
that column is refused with its name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltad.divergence import DIVERGENCES, Direction
from deltad.dumps import Batch
from deltad.masks import CRITERIA, Rule, Tokens
from deltad.masks import VALUES as RULE_VALUES
from deltad.tally import Judged

from .question import QuestionError

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

UNKNOWN: Final = -1
"""Stands for a name that is not known."""

SIGNS: Final = ("negative", "zero", "positive")
STATES: Final = ("own", "shared")
TOKEN_CLASSES: Final = ("digit", "word", "whitespace", "punctuation", "special", "other")
"""Classes of decoded text: all digits; all letters; blank; punctuation and operators; a name in
brackets that a tokenizer gives its control tokens; anything else or mixed."""

KEYS: Final = ("step", "sequence", "position")
"""What identifies a token within a seed."""

LINEAR: Final = "linear_delta"
"""The column of exact first-order ΔD along the arm's update, where it was recorded."""

NOISE: Final = "delta_d_noise"
WEIGHT: Final = "weight"
"""Optional columns: the bound on the error of ΔD, and the tokens that a row stands for."""

ROW: Final = "row"
"""Row of the file; travels with selected rows so that an error can name it."""

_MARKS: Final = str.maketrans("", "", "Ġ▁")
"""What tokenizers write in place of a space before a word."""


@dataclass(frozen=True, eq=False)
class Found:
    """Tokens of a block, before they are decided.

    Attributes
    ----------
    batch : Batch
        Their rows.
    tokens : Tokens
        What rules see of them before the update.
    d_pre, d_post : ndarray of float64, shape (token,)
        D before the update and after it; NaN where it is not known.
    """

    batch: Batch
    tokens: Tokens
    d_pre: Floats
    d_post: Floats

    @property
    def judged(self) -> Judged:
        """What the update did to them."""
        noise, weight = (
            self.batch[name].astype(np.float64) if name in self.batch.columns else None
            for name in (NOISE, WEIGHT)
        )
        return Judged.of(self.d_post - self.d_pre, noise, weight)

    def __getitem__(self, rows: Bools | NDArray[np.intp]) -> Found:
        """Some of them, nothing computed anew."""
        tokens = some_tokens(self.tokens, rows)
        return Found(select(self.batch, rows), tokens, self.d_pre[rows], self.d_post[rows])


def rows_of(batch: Batch) -> NDArray[np.intp]:
    """The row of the file that each row of a block is."""
    return batch[ROW] if ROW in batch.columns else batch.first_row + np.arange(len(batch))


def select(batch: Batch, rows: Bools | NDArray[np.intp]) -> Batch:
    """Some rows of a checked block, with their places in the file."""
    columns = {name: values[rows] for name, values in batch.columns.items()}
    if ROW not in columns:
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        columns[ROW] = batch.first_row + places
    return replace(batch, columns=columns, vectors=batch.vectors[rows], nulls={})


def some_tokens(tokens: Tokens, rows: Bools | NDArray[np.intp]) -> Tokens:
    """Some of the tokens, nothing computed anew."""

    def cut(value: Any) -> Any:
        """Some rows of an array, or of a tuple of them."""
        return tuple(each[rows] for each in value) if isinstance(value, tuple) else value[rows]

    support = tokens.support
    if support is not None:
        arrays: dict[str, Any] = {
            each.name: value[rows]
            for each in fields(support)
            if isinstance(value := getattr(support, each.name), np.ndarray)
        }
        support = replace(support, **arrays)
    return Tokens(
        tokens.advantage[rows],
        tokens.behavior_logprob[rows],
        tokens.policy_logprob[rows],
        support=support,
        collision=None if tokens.collision is None else tokens.collision[rows],
        full={name: cut(pair) for name, pair in tokens.full.items()},
        known={
            key: Direction(*cut(value)) if key[0] == "direction" else cut(value)
            for key, value in tokens.known.items()
            if support is None or key[0] == "topk"  # the others are made again of the support
        },
    )


@dataclass(frozen=True)
class Value:
    """A number, or a place among names, of every token outside.

    Attributes
    ----------
    name : str
        As options take it.
    meaning : str
        In words, with its unit.
    of : callable of (Found, Responses or None) to ndarray, shape (token,)
        Numbers, NaN where unknown; or places in `names`, `UNKNOWN` where unknown.
    columns : tuple of str
        Columns of a dump that it needs besides those of ΔD.
    names : tuple of str
        Of a value that has names; empty for numbers.
    topk : bool
        Whether it needs the top-K log-probs, though D is recorded.
    responses : bool
        Whether it needs whole responses.
    """

    name: str
    meaning: str
    of: Callable[[Found, Any], NDArray[Any]]
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    topk: bool = False
    responses: bool = False


class Responses:
    """How far every response of a seed goes along with a sibling.

    A token's state is its prompt and the response before it. Siblings (responses of one group in
    the same step) begin in one state, so their first tokens share it; they go on sharing as long
    as their tokens are the same. `tokens`, shape (token, 5), holds the `COLUMNS` of every token
    of a seed; `whole` says whether no token was left out on purpose.
    """

    COLUMNS: Final = ("step", "group", "sequence", "position", "token_id")

    def __init__(self, tokens: NDArray[np.int64], *, whole: bool) -> None:
        self._shared: dict[tuple[int, int], int] = {}
        if not whole:
            return
        order = np.lexsort(tuple(tokens[:, at] for at in (3, 2, 1, 0)))
        for _, group in groupby(tokens[order].tolist(), key=lambda row: (row[0], row[1])):
            self._read_group(list(group))

    def state(self, step: ArrayLike, sequence: ArrayLike, position: ArrayLike) -> NDArray[np.intp]:
        """Place in `STATES`, shape (token,).

        1 where another response of the group has the same tokens before this position, and always
        at position 0; else 0; `UNKNOWN` behind the first position where some token of the group is
        missing.
        """
        keys = zip(np.asarray(step).tolist(), np.asarray(sequence).tolist(), strict=True)
        reach = np.array([self._shared.get(key, UNKNOWN) for key in keys], dtype=np.intp)
        place = np.asarray(position)
        known = np.where(reach == UNKNOWN, UNKNOWN, np.where(place <= reach, 1, 0))
        return np.where(place == 0, 1, known)

    def _read_group(self, rows: list[list[int]]) -> None:
        """Note the longest prefix that every response of a group shares with another."""
        step = rows[0][0]
        responses: list[tuple[tuple[int, ...], int]] = []
        for sequence, tokens in groupby(rows, key=lambda row: row[2]):
            found = list(tokens)
            if [row[3] for row in found] != list(range(len(found))):
                return  # a token is missing, and could be what sets siblings apart
            responses.append((tuple(row[4] for row in found), sequence))
        responses.sort()
        reach = [0] * len(responses)
        # Among sorted responses, the one that shares the longest prefix is a neighbour.
        for at, ((one, _), (other, _)) in enumerate(pairwise(responses)):
            common = _common(one, other)
            reach[at] = max(reach[at], common)
            reach[at + 1] = common
        self._shared |= {
            (step, sequence): shared for (_, sequence), shared in zip(responses, reach, strict=True)
        }


def _common(one: Iterable[int], other: Iterable[int]) -> int:
    """How many tokens two responses begin with in common."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def token_class(text: str) -> int:
    r"""Place of a token's text in `TOKEN_CLASSES`; −1 for no text.

    Examples
    --------
    >>> [TOKEN_CLASSES[token_class(text)] for text in (" 42", "Ġthe", "\n", " +", "<eos>", "a1")]
    ['digit', 'word', 'whitespace', 'punctuation', 'special', 'other']
    >>> token_class("")
    -1
    """
    if not text:
        return UNKNOWN
    bare = text.translate(_MARKS).strip()
    if not bare:
        return TOKEN_CLASSES.index("whitespace")
    if len(bare) > 2 and (bare[0] + bare[-1] in ("<>", "[]")):
        return TOKEN_CLASSES.index("special")
    kinds = {unicodedata.category(letter)[0] for letter in bare}
    for name, allowed in (("digit", {"N"}), ("word", {"L", "M"}), ("punctuation", {"P", "S"})):
        if kinds <= allowed:
            return TOKEN_CLASSES.index(name)
    return TOKEN_CLASSES.index("other")


def _column(name: str) -> Callable[[Found, Any], NDArray[Any]]:
    """A column's numbers."""
    return lambda found, _: found.batch[name].astype(np.float64)


def _tail_mass(found: Found, _: Any) -> NDArray[Any]:
    """Mass of μ beyond the top-K and the sampled token."""
    support = found.tokens.support
    assert support is not None  # `Value.topk` asks for it
    return np.asarray(support.mu_tail)


def _noise(found: Found, _: Any) -> NDArray[Any]:
    """The bound on ΔD's error; NaN where none was recorded."""
    none = np.full(len(found.d_pre), np.nan)
    return found.batch.columns.get("delta_d_noise", none).astype(np.float64)


def _state(found: Found, responses: Responses) -> NDArray[Any]:
    """Whether a sibling shares the state."""
    return responses.state(*(found.batch[name] for name in KEYS))


def _predictor(rule: Rule) -> Value:
    """Â · r · push of a criterion: first order, up to the step size; above 0 predicts ΔD > 0."""

    def values(found: Found, _: Any) -> NDArray[Any]:
        tokens = found.tokens
        with np.errstate(invalid="ignore", over="ignore"):  # 0 · ∞ predicts nothing
            return np.asarray(tokens.advantage * tokens.ratio * rule.pushes(tokens))

    push = rule.push if isinstance(rule.push, str) else ""
    meaning = f"Â · r · ({RULE_VALUES[push].meaning})" if push else f"Â · r · push of {rule.name}"
    return Value(rule.name, meaning, values, rule.columns)


def _logits(divergence: str) -> Callable[[Found, Any], NDArray[Any]]:
    """Â · Ḋ with the exact tail: what a push on the token's own logits does."""
    return lambda found, _: np.asarray(
        found.tokens.advantage * found.tokens.push(divergence, "exact")
    )


CONDITIONS: Final[Mapping[str, Value]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Value(
                "advantage", "sign of the advantage Â",
                lambda found, _: np.sign(found.batch["advantage"]).astype(np.intp) + 1,
                names=SIGNS,
            ),
            Value(
                "position", "position in the response, from 0", _column("position"), ("position",)
            ),
            Value(
                "state", "own state, or shared with a sibling", _state,
                ("step", "sequence", "position"), STATES, responses=True,
            ),
            Value(
                "entropy", "entropy of π before the step, nats", _column("pre_entropy"),
                ("pre_entropy",),
            ),
            Value("divergence", "D before the step", lambda found, _: found.d_pre),
            Value(
                "ratio", "|r − 1|, the ratio's distance from 1",
                lambda found, _: np.abs(found.tokens.ratio_direction),
            ),
            Value(
                "tail", "mass of μ in the tail, beyond the top-K",
                _tail_mass, topk=True,
            ),
            Value(
                "token", "class of the token's text",
                lambda found, _: np.array(
                    [token_class(text) for text in found.batch["token"]], dtype=np.intp
                ),
                ("token",), TOKEN_CLASSES,
            ),
        )
    }
)  # fmt: skip
"""What `deltad compare --by` tells tokens apart by."""

VALUES: Final[Mapping[str, Value]] = MappingProxyType(
    {
        **CONDITIONS,
        **{f"predicted by {name}": _predictor(each) for name, each in CRITERIA.items()},
        **{
            f"logits-{name}": Value(
                f"logits-{name}", "Â · Ḋ, exact tail", _logits(name), ("pre_collision",),
                topk=True,
            )
            for name in DIVERGENCES
        },
        **{
            name: Value(name, name, _column(name), (name,))
            for name in (
                *KEYS, "linear_delta_own", "linear_delta_sequence", "linear_delta_batch",
                "delta_tenth", "delta_triple",
            )
        },
        LINEAR: Value(LINEAR, "exact first-order ΔD along the update", _column(LINEAR), (LINEAR,)),
        "noise": Value("noise", "bound on the error of ΔD", _noise),
        "d_post": Value("d_post", "D after the step", lambda found, _: found.d_post),
    }
)  # fmt: skip
"""Every value by name: conditions, predictors by criterion, the ladder's columns, keys."""


def conditions_named(names: Sequence[str]) -> tuple[Value, ...]:
    """Look conditions up, each once; QuestionError lists those that exist."""
    for name in names:
        if name not in CONDITIONS:
            raise QuestionError(
                f"there is no condition {name!r}; choose one of {', '.join(CONDITIONS)}"
            )
    return tuple(CONDITIONS[name] for name in dict.fromkeys(names))


def predictors(divergence: str) -> dict[str, str]:
    """Names in `VALUES` of what predicts ΔD, by the criterion's or the column's name."""
    found = {
        name: f"predicted by {name}"
        for name, each in CRITERIA.items()
        if name == "ratio" or each.family == divergence
    }
    return {**found, LINEAR: LINEAR}
