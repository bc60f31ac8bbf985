"""Ids of texts: certain or said not to be."""

from __future__ import annotations

import pytest

from deltad.probes.engines import vocabulary_of
from deltad.probes.engines.texts import id_of

VOCABULARY = {"a": [3], "�": [5, 6, 7, 8, 9]}


@pytest.mark.parametrize(
    ("text", "known", "expected"),
    [
        ("token_id:17", True, (17, None, "")),
        ("token_id:17", False, (17, None, "")),
        ("a", True, (3, None, "")),
        ("a", False, (-1, "no-ids", "")),
        ("b", True, (-1, "unknown-text", "'b'")),
        ("�", True, (-1, "ambiguous-text", "'�' is 5, 6, 7, 8, …")),
        ("token_id:x", True, (-1, "unknown-text", "'token_id:x'")),
        ("token_id:", False, (-1, "no-ids", "")),
    ],
)
def test_a_text_has_an_id_or_a_reason(
    text: str, known: bool, expected: tuple[int, str | None, str]
) -> None:
    assert id_of(text, VOCABULARY if known else None) == expected


def test_all_ids_of_a_text_are_found() -> None:
    assert vocabulary_of(lambda ids: "xyx"[ids[0]], 3) == {"x": [0, 2], "y": [1]}
