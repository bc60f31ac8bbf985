"""Blocks of rows as they are read, and every named number of a token.

A value is one entry of `VALUES`: a condition of `deltad compare --by`, a predictor, a rung of the
ladder, or a column that travels along. A column that it names is read for it, and a dump without
that column is refused with its name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial
from itertools import groupby, pairwise, takewhile
from operator import eq, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltad.divergence import DIVERGENCES, TAILS, Direction
from deltad.dumps import Batch, batch_tokens, scalar_tokens
from deltad.masks import CRITERIA, CriterionError, Rule, RuleError, Tokens
from deltad.masks import VALUES as RULE_VALUES
from deltad.support import binary_support
from deltad.tally import Judged

from .question import QuestionError

if TYPE_CHECKING:
    from deltad.dumps import PartFile

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

UNKNOWN: Final = -1
"""Stands for a name that is not known."""

SIGNS: Final = ("negative", "zero", "positive")
STATES: Final = ("own", "shared")
TOKEN_CLASSES: Final = ("digit", "word", "whitespace", "punctuation", "special", "other")
"""Classes of decoded text: all digits; all letters; blank; punctuation and operators; a name in
brackets that a tokenizer gives its control tokens; anything else or mixed."""

ROW: Final = "row"
"""Row of the file; travels with the columns so that an error can name it."""

SCALARS: Final = ("token_id", "advantage", "behavior_logprob", "pre_logprob")
"""What rules see of a token without top-K log-probs, and the token itself."""

KEYS: Final = ("step", "sequence", "position")
"""What identifies a token within a seed."""

LINEAR: Final = "linear_delta"
"""The column of exact first-order ΔD along the arm's update, where it was recorded."""

NOISE: Final = "delta_d_noise"
WEIGHT: Final = "weight"
"""Optional columns: the bound on the error of ΔD, and the tokens that a row stands for."""

_MARKS: Final = str.maketrans("", "", "Ġ▁")
"""What tokenizers write in place of a space before a word."""

Known = tuple[NDArray[Any], Bools]
"""A number or decision of every row, and where it is known."""

Rows = Bools | NDArray[np.intp] | slice
Some = TypeVar("Some")


def some(of: Some, rows: Rows) -> Some:
    """Some rows of an array, or of every array in a tuple, mapping or dataclass; nothing anew."""
    value: Any = of
    if isinstance(value, np.ndarray):
        value = value[rows]
    elif isinstance(value, Mapping):
        value = {key: some(each, rows) for key, each in value.items()}
    elif isinstance(value, tuple):
        cut = [some(each, rows) for each in value]
        value = type(value)(*cut) if hasattr(value, "_fields") else tuple(cut)
    elif is_dataclass(value):
        parts = {each.name: some(getattr(value, each.name), rows) for each in fields(value)}
        value = replace(value, **parts)  # type: ignore[type-var]
    return cast(Some, value)


@dataclass(frozen=True)
class Value:
    """A number, or a place among names, of every token outside.

    `of` gives them, of shape (token,): numbers, NaN where unknown, or places in `names`, `UNKNOWN`
    where unknown.
    """

    name: str  # as options take it
    meaning: str  # with its unit
    of: Callable[[Block, Any], NDArray[Any]]  # of Block and Responses, None where not needed
    columns: tuple[str, ...] = ()  # of a dump, that it needs besides those of ΔD
    names: tuple[str, ...] = ()  # empty for numbers
    topk: bool = False  # whether it needs the top-K log-probs, though D is recorded
    responses: bool = False  # whether it needs whole responses


class Responses:
    """How far every response of a seed goes along with a sibling.

    A token's state is its prompt and the response before it. Siblings (responses of one group in
    the same step) begin in one state, so their first tokens share it; they go on sharing as long
    as their tokens are the same. `tokens`, of shape (token, 5), are the `COLUMNS` of every token
    of a seed, in any order; `whole` says that none was left out on purpose.
    """

    COLUMNS: Final = ("step", "group", "sequence", "position", "token_id")

    def __init__(self, tokens: NDArray[np.int64], *, whole: bool) -> None:
        self._shared: dict[tuple[int, int], int] = {}
        order = np.lexsort(tokens.T[3::-1])
        for (step, _), rows in groupby(tokens[order].tolist() if whole else (), itemgetter(0, 1)):
            every = {at: list(mine) for at, mine in groupby(rows, itemgetter(2))}
            if any([row[3] for row in mine] != [*range(len(mine))] for mine in every.values()):
                continue  # a token is missing, and could be what sets siblings apart
            # Among sorted responses, the one that shares the longest prefix is a neighbour.
            responses = sorted(([row[4] for row in mine], at) for at, mine in every.items())
            common = [
                sum(takewhile(bool, map(eq, one, other)))
                for (one, _), (other, _) in pairwise(responses)
            ]
            for (_, at), before, after in zip(responses, [0, *common], [*common, 0], strict=True):
                self._shared[step, at] = max(before, after)

    def state(self, step: ArrayLike, sequence: ArrayLike, position: ArrayLike) -> NDArray[np.intp]:
        """Whether tokens stand in a state of their own: places in `STATES`, shape (token,).

        "shared" where another response of the group has the same tokens before this position, and
        always at position 0; `UNKNOWN` behind the first position where some token of the group is
        missing.
        """
        keys = zip(np.asarray(step).tolist(), np.asarray(sequence).tolist(), strict=True)
        reach = np.array([self._shared.get(key, UNKNOWN) for key in keys], dtype=np.intp)
        place = np.asarray(position)
        known = np.where(reach == UNKNOWN, UNKNOWN, np.where(place <= reach, 1, 0))
        return np.where(place == 0, 1, known)


@dataclass(frozen=True, eq=False)
class Context:
    """What is known of a whole seed before its rows are read.

    Whole responses for values that need them; and, by rule and file, the weight of every row by
    rules that judge whole responses.
    """

    responses: Responses | None = None
    weights: Mapping[tuple[str, str], NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Block:
    """Rows of a file, and what rules see of them.

    `d_pre`, of shape (token,), is D before the update, NaN where it is not known; `sets` are
    disjoint sets of rows and what rules see of each, last those whose D is known.
    """

    batch: Batch
    part: PartFile
    divergence: str
    d_pre: Floats
    sets: Sequence[tuple[Tokens, Bools]]

    @classmethod
    def of_topk(cls, batch: Batch, part: PartFile, divergence: str) -> Block:
        """Judge rows by their top-K log-probs."""
        bare, d_pre = ~batch.vectors, _column(batch, "d_pre")
        sets = [(scalar_tokens(batch), bare)] if bare.any() else []
        if not bare.all():
            tokens = batch_tokens(batch, part.metadata)
            d_pre[~bare] = tokens.divergence(divergence)
            sets.append((tokens, ~bare))
        return cls(batch, part, divergence, d_pre, sets)

    @classmethod
    def recorded(cls, batch: Batch, part: PartFile, divergence: str) -> Block:
        """Judge rows by their recorded D and Ḋ."""
        tokens, d_pre = recorded_tokens(batch, divergence), batch["d_pre"]
        unknown = np.isnan(d_pre)
        sets = [(tokens, ~unknown)]
        if unknown.any():
            alone = replace(some(tokens, unknown), known={})
            sets = [(alone, unknown), (some(tokens, ~unknown), ~unknown)]
        return cls(batch, part, divergence, d_pre, sets)

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def tokens(self) -> Tokens:
        """What rules see of the rows whose D is known: of all, in what `above` gives."""
        return self.sets[-1][0]

    @cached_property
    def d_post(self) -> Floats:
        """D after the update, shape (token,); NaN where it is not known."""
        found, known = _column(self.batch, "d_post"), self.batch.vectors
        if "topk_post_logprobs" in self.batch.columns and known.any():
            after = batch_tokens(self.batch, self.part.metadata, post=True)
            found[known] = after.divergence(self.divergence)
        return found

    @property
    def judged(self) -> Judged:
        """What the update did to the tokens."""
        noise, weight = (
            self.batch[name].astype(np.float64) if name in self.batch.columns else None
            for name in (NOISE, WEIGHT)
        )
        return Judged.of(self.d_post - self.d_pre, noise, weight)

    @property
    def settled(self) -> Bools:
        """Where it is known whether a token is outside, shape (token,).

        A rule that left top-K log-probs out near 0 says that such a token is inside.
        """
        near = self.part.metadata.near is not None and "d_pre" not in self.batch.columns
        return np.asarray(~np.isnan(self.d_pre) | near)

    def above(self, threshold: float) -> Block:
        """The tokens outside."""
        tokens, rows = self.sets[-1]
        outside = self.d_pre[rows] > threshold
        if len(outside) == len(self) and outside.all():
            return self
        places = np.flatnonzero(rows)[outside]
        sets = [(some(tokens, outside), np.ones(len(places), np.bool_))]
        return replace(self, batch=some(self.batch, places), d_pre=self.d_pre[places], sets=sets)

    def value(
        self, compute: Callable[[Tokens], Any], rule: Rule | None = None, dtype: Any = np.float64
    ) -> Known:
        """A number of every row (of a rule's), unknown where a set of rows lacks what it needs."""
        column, valid = np.zeros(len(self), dtype), np.zeros(len(self), np.bool_)
        for tokens, rows in self.sets:
            try:
                values = self._asked(compute, rule, tokens, rows)
            except CriterionError:  # rows without top-K log-probs
                continue
            column[rows] = values
            valid[rows] = ~np.isnan(values) if values.dtype.kind == "f" else True
        return column, valid

    def keep(self, rule: Rule, threshold: float, context: Context) -> Known:
        """One rule's decisions."""
        if rule.scope == "sequence":
            return self.weigh(rule, threshold, context) > 0, np.ones(len(self), np.bool_)
        keeps = partial(rule.keeps, threshold=threshold, divergence=self.divergence)
        return self.value(keeps, rule, np.bool_)

    def weigh(self, rule: Rule, threshold: float, context: Context) -> NDArray[Any]:
        """One rule's weight of every token, of whose rows D is known."""
        if rule.scope == "sequence":
            return np.asarray(context.weights[rule.name, self.batch.path][self.batch[ROW]])
        weigh = partial(rule.weigh, threshold=threshold, divergence=self.divergence)
        return self._asked(weigh, rule, *self.sets[-1])

    def _asked(
        self, compute: Callable[[Tokens], Any], rule: Rule | None, tokens: Tokens, rows: Bools
    ) -> NDArray[Any]:
        """What is computed of the tokens in some rows; a rule that fails is named, with its row."""
        needs = rule.needs if rule is not None else ()
        given = {name: self.batch[name][rows].astype(np.float64) for name in needs}
        try:
            return np.asarray(compute(replace(tokens, columns=given) if given else tokens))
        except RuleError as error:
            at = self.batch[ROW][rows]
            where = f"rows {at[0]} to {at[-1]}" if error.row is None else f"row {at[error.row]}"
            said = f"rule {error.rule} {error.reason}, at {where} of {self.part.path}"
            raise QuestionError(said) from error


def _column(batch: Batch, name: str) -> Floats:
    """A column that may be changed; NaN where it was not read."""
    known = batch.columns.get(name, np.array(np.nan))
    return np.array(np.broadcast_to(known, len(batch)), np.float64)


def recorded_tokens(batch: Batch, divergence: str) -> Tokens:
    """What rules see of rows whose D and Ḋ are recorded, in float64 of the stored values."""
    known: dict[tuple[str, ...], Any] = {("topk", divergence): batch["d_pre"]}
    local = _column(batch, "d_dot_local")
    for tail in TAILS:
        if (name := f"d_dot_{tail}") in batch.columns:
            terms = Direction(batch[name], local, batch[name] - local)
            known["direction", divergence, tail] = terms
    if "topk_ids" in batch.columns:
        known |= _binary(batch)
    return replace(scalar_tokens(batch, slice(None)), known=known)


def _binary(batch: Batch) -> dict[tuple[str, ...], Any]:
    """Binary divergences by the sampled token's entry in the top-K where there is one."""
    hit = batch["topk_ids"] == batch["token_id"][:, None]
    listed = hit.any(axis=1) & batch.vectors
    logs = []
    for name, scalar in (
        ("topk_behavior_logprobs", "behavior_logprob"), ("topk_pre_logprobs", "pre_logprob")
    ):  # fmt: skip
        alone = batch[scalar].astype(np.float64)
        alone[listed] = batch[name][listed][hit[listed]]
        logs.append(alone)
    support = binary_support(logs[0], logs[1], check=False)
    return {("binary", name): each.value(support) for name, each in DIVERGENCES.items()}


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


def _numbers(name: str) -> Callable[[Block, Any], NDArray[Any]]:
    """A column's numbers."""
    return lambda block, _: block.batch[name].astype(np.float64)


def _tail_mass(found: Block, _: Any) -> NDArray[Any]:
    """Mass of μ beyond the top-K and the sampled token."""
    support = found.tokens.support
    assert support is not None  # `Value.topk` asks for it
    return np.asarray(support.mu_tail)


def _predictor(rule: Rule) -> Value:
    """Â · r · push of a criterion: first order, up to the step size; above 0 predicts ΔD > 0."""

    def values(found: Block, _: Any) -> NDArray[Any]:
        tokens = found.tokens
        with np.errstate(invalid="ignore", over="ignore"):  # 0 · ∞ predicts nothing
            return np.asarray(tokens.advantage * tokens.ratio * rule.pushes(tokens))

    push = rule.push if isinstance(rule.push, str) else ""
    meaning = f"Â · r · ({RULE_VALUES[push].meaning})" if push else f"Â · r · push of {rule.name}"
    return Value(rule.name, meaning, values, rule.columns)


def _logits(divergence: str) -> Callable[[Block, Any], NDArray[Any]]:
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
                "position", "position in the response, from 0", _numbers("position"), ("position",)
            ),
            Value(
                "state", "own state, or shared with a sibling",
                lambda found, responses: responses.state(*(found.batch[name] for name in KEYS)),
                KEYS, STATES, responses=True,
            ),
            Value(
                "entropy", "entropy of π before the step, nats",
                _numbers("pre_entropy"), ("pre_entropy",),
            ),
            Value("divergence", "D before the step", lambda found, _: found.d_pre),
            Value(
                "ratio", "|r − 1|, the ratio's distance from 1",
                lambda found, _: np.abs(found.tokens.ratio_direction),
            ),
            Value("tail", "mass of μ in the tail, beyond the top-K", _tail_mass, topk=True),
            Value(
                "token", "class of the token's text",
                lambda found, _: np.array([*map(token_class, found.batch["token"])], np.intp),
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
                f"logits-{name}", "Â · Ḋ, exact tail", _logits(name), ("pre_collision",), topk=True
            )
            for name in DIVERGENCES
        },
        **{
            name: Value(name, name, _numbers(name), (name,))
            for name in (
                *KEYS, "linear_delta_own", "linear_delta_sequence", "linear_delta_batch",
                "delta_tenth", "delta_triple",
            )
        },
        LINEAR: Value(LINEAR, "exact first-order ΔD along the update", _numbers(LINEAR), (LINEAR,)),
        "noise": Value("noise", "bound on the error of ΔD", lambda f, _: _column(f.batch, NOISE)),
        "d_post": Value("d_post", "D after the step", lambda found, _: found.d_post),
    }
)  # fmt: skip
"""Every value by name: conditions, predictors by criterion, the ladder's columns, keys."""


def conditions_named(names: Sequence[str]) -> tuple[Value, ...]:
    """Look conditions up, each once; an unknown name is a QuestionError that lists those known."""
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
