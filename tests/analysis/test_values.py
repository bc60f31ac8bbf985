"""Every named value against the row that it is of, and shared states against every sibling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis import CONDITIONS, Question, QuestionError, condition_table
from deltad.analysis.reading import Ask, read
from deltad.analysis.values import (
    SIGNS,
    STATES,
    TOKEN_CLASSES,
    UNKNOWN,
    VALUES,
    Responses,
    conditions_named,
    predictors,
    token_class,
)
from deltad.dumps import Dump
from deltad.masks import CRITERIA
from tests.analysis.bruteforce import Token, direction, judge_rows, log_ratio_of, predicted
from tests.analysis.random_dumps import CLASSES, WORDS, write

CLASS_OF = {**{name: at for at, name in enumerate(TOKEN_CLASSES)}, "unknown": UNKNOWN}
OWN_STATE, SHARED_STATE = (STATES.index(name) for name in ("own", "shared"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every column and rows without top-K log-probs."""
    return write(
        tmp_path_factory.mktemp("values") / "run", arms=("none",), seeds=(0,), rows=150, ranks=1,
        parts=1, top_k=3, vocab_size=30, drift=1.5, null_vectors=0.1,
    )  # fmt: skip


def expected(name: str, token: Token) -> Any:
    """A value of one row, from the row itself."""
    row, pair = token.row, token.pair
    assert pair is not None
    if name.startswith("predicted by "):
        criterion = name.removeprefix("predicted by ")
        family = CRITERIA[criterion].family
        return predicted(token, criterion if family else "ratio", family or "kl")
    if name.startswith("logits-"):
        family = name.removeprefix("logits-")
        return row["advantage"] * direction(pair, family, "exact", row["pre_collision"])
    known: dict[str, Callable[[], Any]] = {
        "advantage": lambda: SIGNS.index("zero") + (row["advantage"] > 0) - (row["advantage"] < 0),
        "entropy": lambda: row["pre_entropy"],
        "divergence": lambda: token.d_pre,
        "ratio": lambda: abs(np.expm1(log_ratio_of(row))),
        "tail": lambda: pair.mu_t,
        "token": lambda: CLASS_OF[CLASSES[row["token_id"] % len(WORDS)]],
        "noise": lambda: token.noise,
        "d_post": lambda: token.d_post,
    }
    return known[name]() if name in known else row[name]


@pytest.mark.parametrize("name", [name for name in VALUES if name != "state"])
def test_a_value_is_what_the_row_says(dump: Dump, name: str) -> None:
    ask = Ask(Question(0.1), Question().rules, values=(name,))
    ((outside,),) = read(dump, ["none"], ask).values()
    tokens = [t for t in judge_rows(Path(str(dump.path)), "none", (), "kl", 0.1)[0] if t.outside]
    wanted = [expected(name, token) for token in tokens]
    wanted = [np.nan if value is None else value for value in wanted]
    found = outside.columns[name]
    assert len(found) == len(tokens) > 50
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert len(set(found.tolist())) > 2


def test_every_value_says_what_it_is_and_predictors_are_values() -> None:
    assert all(each.name and each.meaning for each in VALUES.values())
    assert set(CONDITIONS) < set(VALUES)
    for family in ("kl", "tv"):
        found = predictors(family)
        assert set(found.values()) < set(VALUES)
        other = "tv" if family == "kl" else "kl"
        assert "ratio" in found
        assert not any(f"-{other}-" in name for name in found)


def test_conditions_are_looked_up_once_each(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match=r"'colour'.*advantage, position, state, entropy"):
        conditions_named(["colour"])
    assert [each.name for each in conditions_named(["tail", "ratio", "tail"])] == ["tail", "ratio"]
    dump = write(tmp_path / "run", arms=("none",), optional=())
    for name, column in (("entropy", "pre_entropy"), ("token", "token")):
        with pytest.raises(QuestionError, match=f"`{name}` needs the column `{column}`"):
            condition_table(dump, by=[name])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("42", "digit"), (" 42", "digit"), ("▁42 ", "digit"), ("²", "digit"),
        ("the", "word"), ("Ġthe", "word"), ("日本", "word"), ("naïve", "word"),
        (" ", "whitespace"), ("\n\n", "whitespace"), ("Ġ", "whitespace"), ("\t", "whitespace"),
        ("+", "punctuation"), (" -", "punctuation"), ("…", "punctuation"), ("<", "punctuation"),
        ("<=", "punctuation"), ("<>", "punctuation"), ("[]", "punctuation"),
        ("<|im_end|>", "special"), ("</s>", "special"), ("[PAD]", "special"), ("<eos>", "special"),
        ("x1", "other"), ("it's", "other"), ("\ufffd\x00", "other"), ("", "unknown"),
    ],
)  # fmt: skip
def test_a_token_is_classed_by_its_text(text: str, name: str) -> None:
    assert token_class(text) == CLASS_OF[name]


Response = tuple[int, int, list[int]]
"""Step, group and token ids."""


def brute(responses: list[Response], at: int, position: int) -> int:
    """Whether some other response of the group begins with the same tokens."""
    step, group, tokens = responses[at]
    begins = [
        other[:position] == tokens[:position]
        for place, (s, g, other) in enumerate(responses)
        if place != at and (s, g) == (step, group)
    ]
    return SHARED_STATE if any(begins) or position == 0 else OWN_STATE


def rows_of(responses: list[Response]) -> list[tuple[int, ...]]:
    """Rows of step, group, sequence, position, token."""
    return [
        (step, group, sequence, position, token)
        for sequence, (step, group, tokens) in enumerate(responses)
        for position, token in enumerate(tokens)
    ]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.integers(0, 1),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
        ),
        min_size=1, max_size=7,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_state_is_shared_where_a_sibling_had_the_same_tokens(
    responses: list[Response], random: Any
) -> None:
    rows = rows_of(responses)
    shuffled = list(rows)
    random.shuffle(shuffled)
    known = Responses(np.array(shuffled, dtype=np.int64), whole=True)
    columns = np.array(rows)
    found = known.state(columns[:, 0], columns[:, 2], columns[:, 3])
    assert found.tolist() == [brute(responses, row[2], row[3]) for row in rows]


GROUPS: list[Response] = [(0, 0, [1, 2, 3]), (0, 0, [1, 2, 4]), (0, 1, [5, 6]), (0, 1, [5, 6])]


@pytest.mark.parametrize("fault", ["missing", "twice"])
def test_behind_a_faulty_token_a_group_is_unknown_and_other_groups_are_not(fault: str) -> None:
    rows = rows_of(GROUPS)
    if fault == "missing":
        del rows[4]  # the second token of the second response
    else:
        rows.append(rows[4])
    known = Responses(np.array(rows, dtype=np.int64), whole=True)
    assert known.state([0, 0], [0, 0], [0, 1]).tolist() == [SHARED_STATE, UNKNOWN]
    assert known.state([0, 0], [1, 1], [0, 2]).tolist() == [SHARED_STATE, UNKNOWN]
    assert known.state([0], [2], [1]).tolist() == [SHARED_STATE]
    thinned = Responses(np.array(rows, dtype=np.int64), whole=False)
    assert thinned.state([0, 0], [2, 2], [0, 1]).tolist() == [SHARED_STATE, UNKNOWN]
