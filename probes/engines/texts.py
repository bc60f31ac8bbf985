"""Token ids where an engine returned texts: what is certain, and why the rest is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .missing import Reason

ID_PREFIX: Final = "token_id:"
"""What servers write in the place of a text when they are asked for ids."""

Vocabulary = Mapping[str, Sequence[int]]
"""All ids of each text."""


def vocabulary_of(decode: Callable[[list[int]], str], size: int) -> dict[str, list[int]]:
    r"""Say which ids have which text.

    Parameters
    ----------
    decode
        Text of a list of ids, such as a tokenizer's `decode`; special tokens must not be skipped.
    size
        Number of ids.

    Returns
    -------
    dict of str to list of int
        Ids in ascending order; a text of several ids is ambiguous.

    Examples
    --------
    Single bytes of a longer character all decode to U+FFFD:

    >>> vocabulary_of(lambda ids: "ab\ufffd\ufffd"[ids[0]], 4)
    {'a': [0], 'b': [1], '�': [2, 3]}
    """
    found: dict[str, list[int]] = {}
    for token in range(size):
        found.setdefault(decode([token]), []).append(token)
    return found


def id_of(text: str, vocabulary: Vocabulary | None) -> tuple[int, Reason | None, str]:
    """Find the id that a text stands for.

    Parameters
    ----------
    text
        A token's text, or `token_id:N`.
    vocabulary
        All ids of each text, if known.

    Returns
    -------
    int
        The id; −1 where it is not certain.
    str or None
        Why it is not: `no-ids` (no vocabulary), `unknown-text` or `ambiguous-text`.
    str
        The text and the ids it may stand for.
    """
    number = text.removeprefix(ID_PREFIX)
    if number != text and number.isascii() and number.isdigit():
        return int(number), None, ""
    if vocabulary is None:
        return -1, "no-ids", ""
    ids = vocabulary.get(text, ())
    if len(ids) == 1:
        return int(ids[0]), None, ""
    if not ids:
        return -1, "unknown-text", repr(text)
    shown = ", ".join(str(token) for token in ids[:4]) + (", …" if len(ids) > 4 else "")
    return -1, "ambiguous-text", f"{text!r} is {shown}"
