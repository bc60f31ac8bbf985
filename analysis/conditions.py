"""What the tokens outside are told apart by: the registry of conditions.

A condition is one entry of `CONDITIONS`: its values, and whether they are numbers, binned by
quantile, or have names. Tables, the command line and the tests find it there.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps.columns import COLUMNS

from .bins import UNKNOWN
from .counting import Outside
from .question import QuestionError
from .responses import STATES, Responses

if TYPE_CHECKING:
    from deltad.dumps import Dump

SIGNS: Final = ("negative", "zero", "positive")
TOKEN_CLASSES: Final = ("digit", "word", "whitespace", "punctuation", "special", "other")
"""Classes of decoded text: all digits; all letters; blank; punctuation and operators; a name in
brackets that a tokenizer gives its control tokens; anything else or mixed."""

_MARKS: Final = str.maketrans("", "", "Ġ▁")
"""What tokenizers write in place of a space before a word."""


@dataclass(frozen=True)
class Condition:
    """What tokens are told apart by.

    Attributes
    ----------
    name : str
        As `--by` takes it.
    meaning : str
        In words, with its unit.
    values : callable of (Outside, Responses or None) to ndarray, shape (token,)
        Numbers, NaN where unknown; or the place in `names`, −1 where unknown.
    names : tuple of str
        Of a condition that has names for its values; empty for numbers.
    columns : tuple of str
        Columns of a dump that it needs beside those of ΔD.
    responses : bool
        Whether it needs whole responses.
    vectors : bool
        Whether it needs top-K vectors.
    """

    name: str
    meaning: str
    values: Callable[[Outside, Responses | None], NDArray[Any]]
    names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    responses: bool = False
    vectors: bool = False


def token_class(text: str) -> int:
    r"""Place of a token's text in `TOKEN_CLASSES`; −1 for no text.

    Parameters
    ----------
    text : str
        Decoded, or as the tokenizer's vocabulary spells it.

    Returns
    -------
    int
        Spaces around a word or a number do not matter.

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


def _column(name: str) -> Callable[[Outside, Responses | None], NDArray[Any]]:
    """A column's numbers."""
    return lambda outside, _: outside.batch[name].astype(np.float64)


def _ratio_distance(outside: Outside, _: Responses | None) -> NDArray[Any]:
    """|r − 1|."""
    distance: NDArray[np.float64] = np.abs(outside.tokens.ratio_direction)
    return distance


def _tail_mass(outside: Outside, _: Responses | None) -> NDArray[Any]:
    """Mass of μ beyond the top-K and the sampled token."""
    assert outside.tokens.support is not None  # a token outside has a D, made of its support
    return np.asarray(outside.tokens.support.mu_tail)


def _state(outside: Outside, responses: Responses | None) -> NDArray[Any]:
    """Whether a sibling shares the state."""
    assert responses is not None  # `Condition.responses` asks for them
    batch = outside.batch
    return responses.state(batch["step"], batch["sequence"], batch["position"])


CONDITIONS: Final[Mapping[str, Condition]] = MappingProxyType(
    {
        each.name: each
        for each in (
            Condition(
                "advantage",
                "sign of the advantage Â",
                lambda outside, _: np.sign(outside.batch["advantage"]).astype(np.intp) + 1,
                names=SIGNS,
            ),
            Condition(
                "position", "position in the response, from 0", _column("position"),
                columns=("position",),
            ),
            Condition(
                "state", "own state, or shared with a sibling", _state,
                names=STATES, columns=("step", "sequence", "position"), responses=True,
            ),
            Condition(
                "entropy", "entropy of π before the step, nats", _column("pre_entropy"),
                columns=("pre_entropy",),
            ),
            Condition("divergence", "D before the step", lambda outside, _: outside.d_pre),
            Condition("ratio", "|r − 1|, the ratio's distance from 1", _ratio_distance),
            Condition(
                "tail", "mass of μ in the tail, beyond the top-K", _tail_mass, vectors=True,
            ),
            Condition(
                "token", "class of the token's text",
                lambda outside, _: np.array(
                    [token_class(text) for text in outside.batch["token"]], dtype=np.intp
                ),
                names=TOKEN_CLASSES, columns=("token",),
            ),
        )
    }
)  # fmt: skip
"""Every condition by name. A new one is one entry; a column that it names is read for it, and
a dump without that column is refused with its name."""


def conditions_named(names: Sequence[str]) -> tuple[Condition, ...]:
    """Look conditions up, each once.

    Raises
    ------
    QuestionError
        An unknown name; the message lists those that exist.
    """
    for name in names:
        if name not in CONDITIONS:
            raise QuestionError(
                f"there is no condition {name!r}; choose one of {', '.join(CONDITIONS)}"
            )
    return tuple(CONDITIONS[name] for name in dict.fromkeys(names))


def check_condition(dump: Dump, arm: str, condition: Condition) -> None:
    """Refuse a condition whose columns an arm was recorded without.

    Raises
    ------
    QuestionError
        Names the column.
    """
    present = dump.optional_columns(arm)
    for column in condition.columns:
        if not COLUMNS[column].required and column not in present:
            raise QuestionError(
                f"the condition `{condition.name}` needs the column `{column}`, which arm {arm} "
                f"of {dump.path} does not have: record it, or ask by something else"
            )
