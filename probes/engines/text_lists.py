"""Lists of texts, or of `token_id:N`: how long they should be, and which ids they name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .assemble import SENTINEL, Position
from .missing import Field, Reason
from .texts import Vocabulary, id_of


@dataclass(frozen=True)
class Entry:
    """One text with its log-prob, and its id where the engine gave it."""

    text: str
    logprob: float | None
    token_id: int | None = None

    @property
    def value(self) -> float:
        """The log-prob, −∞ where it stands for none."""
        given = self.logprob
        if given is None or math.isnan(given) or given <= SENTINEL:
            return -math.inf
        return float(given)

    def same(self, other: Entry) -> bool:
        """Whether both are the same token, as far as text and id tell."""
        if self.token_id is not None and other.token_id is not None:
            return self.token_id == other.token_id
        return self.text == other.text

    def is_last(self, entries: Sequence[Entry]) -> bool:
        """Whether no entry but this one is less probable."""
        return all(self.same(entry) or entry.value >= self.value for entry in entries)


def width_of(
    tokens: Sequence[Entry],
    lists: Sequence[list[Entry] | None],
    listed: int | None,
    *,
    exact: bool,
) -> int:
    """K: what was asked for, or the largest that the lists prove.

    Parameters
    ----------
    tokens, lists
        The sampled tokens and their lists.
    listed
        What was asked for.
    exact
        Lists hold K entries whatever was sampled. Else they hold the sampled token beyond the
        top-K too, so that one in which it stands last proves one entry less.

    Returns
    -------
    int
        At least 0.
    """
    if listed is not None and listed >= 0:
        return listed
    proven = 0
    for token, entries in zip(tokens, lists, strict=True):
        if entries:
            within = any(token.same(entry) for entry in entries)
            beyond = not exact and within and token.is_last(entries)
            proven = max(proven, len(entries) - beyond)
    return proven


def position_of(
    token: Entry,
    entries: Sequence[Entry] | None,
    token_id: int | None,
    width: int,
    vocabulary: Vocabulary | None,
    *,
    by_text: bool,
) -> Position:
    """Give ids to one token and its list.

    Parameters
    ----------
    token, entries
        The sampled token and its list.
    token_id
        Its id, where the choice names it.
    width
        K.
    vocabulary
        All ids of each text.
    by_text
        The list came as an object with texts as keys, which keeps one of several ids.

    Returns
    -------
    Position
        With everything that is not certain left out and its reason noted.
    """
    missing: list[tuple[Field, Reason, str]] = []
    number, reason, detail = _number(token, vocabulary)
    if number == -1 and token_id is not None:
        number, reason = token_id, None
    if reason is not None:
        missing.append(("token_id", reason, detail))
    if entries is None:
        missing.append(("topk", "not-returned", "null"))
    ids, values = [], []
    for entry in entries or ():
        own = token.same(entry)
        at, why, what = (number, reason, detail) if own else _number(entry, vocabulary)
        if own and by_text and entry.value != token.value:
            at, why, what = -1, "collision", f"{entry.text!r} is another id too"
        if why is not None:
            missing.append(("topk", why, what))
        if at != -1:
            ids.append(at)
            values.append(entry.logprob)
    if by_text and entries is not None:
        lost = width - len(entries)
        missing += [("topk", "collision", "ids of one text")] * max(lost, 0)
    beyond = sum(entry.value > token.value for entry in entries or ()) >= width
    return Position(
        number, token.logprob, ids, values, outside=beyond, text=token.text, missing=missing
    )


def _number(entry: Entry, vocabulary: Vocabulary | None) -> tuple[int, Reason | None, str]:
    """Id of an entry."""
    if entry.token_id is not None:
        return entry.token_id, None, ""
    return id_of(entry.text, vocabulary)
