"""The registry of conditions, value by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis import Question, QuestionError
from deltad.analysis.conditions import (
    CONDITIONS,
    SIGNS,
    TOKEN_CLASSES,
    check_condition,
    conditions_named,
    token_class,
)
from deltad.analysis.counting import checked_batches, columns_for, outside_of
from deltad.analysis.responses import read_responses
from deltad.dumps import Dump
from tests.analysis.brute_many import Token, judge_rows, ratio_of
from tests.dumps.factory import Columns, make_dump

WORDS = ("7", " 12", "Ġword", "\n", "+=", "<eos>", "", "x1")
CLASSES = ("digit", "digit", "word", "whitespace", "punctuation", "special", "", "other")


def written(arm: str, seed: int, columns: Columns) -> None:
    """Give tokens a text of every class."""
    columns["token"] = np.array([WORDS[k % len(WORDS)] for k in columns["token_id"]], object)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with every column and rows without vectors."""
    return make_dump(
        tmp_path_factory.mktemp("conditions") / "run", arms=("none",), seeds=(0,), rows=150,
        ranks=1, parts=1, top_k=3, vocab_size=30, drift=1.5, null_vectors=0.1, change=written,
    )  # fmt: skip


def expected(name: str, token: Token) -> Any:
    """A condition's value of one row, from the row itself."""
    row, pair = token.row, token.pair
    assert pair is not None
    simple = {
        "advantage": SIGNS.index(
            "zero" if row["advantage"] == 0 else "positive" if row["advantage"] > 0 else "negative"
        ),
        "position": row["position"],
        "entropy": row["pre_entropy"],
        "divergence": token.d_pre,
        "ratio": abs(ratio_of(row) - 1),
        "tail": pair.mu_t,
        "token": ([*TOKEN_CLASSES, ""].index(CLASSES[row["token_id"] % len(WORDS)])),
    }
    return -1 if name == "token" and simple[name] == len(TOKEN_CLASSES) else simple[name]


@pytest.mark.parametrize("name", [name for name in CONDITIONS if name != "state"])
def test_a_condition_has_the_value_that_the_row_has(run: Path, name: str) -> None:
    dump, condition = Dump.open(run), CONDITIONS[name]
    question = Question(threshold=0.1)
    columns = [*columns_for(), *condition.columns]
    values = [
        found_values
        for batch, metadata in checked_batches(dump, "none", 0, columns)
        if (found := outside_of(batch, metadata, question)) is not None
        for found_values in condition.values(found, None).tolist()
    ]
    tokens = [t for t in judge_rows(run, "none", (), "kl", 0.1)[0] if t.outside]
    assert len(values) == len(tokens) > 50
    assert values == pytest.approx([expected(name, token) for token in tokens], abs=1e-9)
    assert len(set(values)) > 2


def test_the_state_is_that_of_the_whole_responses(run: Path) -> None:
    dump = Dump.open(run)
    columns = [*columns_for(), *CONDITIONS["state"].columns]
    responses = read_responses(dump, "none", 0)
    batch, metadata = next(iter(checked_batches(dump, "none", 0, columns)))
    found = outside_of(batch, metadata, Question(threshold=0.1))
    assert found is not None
    states = CONDITIONS["state"].values(found, responses)
    assert (states[found.batch["position"] == 0] == 1).all()
    keys = [found.batch[name] for name in ("step", "sequence", "position")]
    assert states.tolist() == responses.state(*keys).tolist()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("42", "digit"), (" 42", "digit"), ("▁42 ", "digit"), ("²", "digit"),
        ("the", "word"), ("Ġthe", "word"), ("日本", "word"), ("naïve", "word"),
        (" ", "whitespace"), ("\n\n", "whitespace"), ("Ġ", "whitespace"), ("\t", "whitespace"),
        ("+", "punctuation"), (" -", "punctuation"), ("…", "punctuation"), ("<", "punctuation"),
        ("<=", "punctuation"), ("<>", "punctuation"), ("[]", "punctuation"),
        ("<|im_end|>", "special"), ("</s>", "special"), ("[PAD]", "special"), ("<eos>", "special"),
        ("x1", "other"), ("it's", "other"), ("\ufffd\x00", "other"),
    ],
)  # fmt: skip
def test_a_token_is_classed_by_its_text(text: str, name: str) -> None:
    assert TOKEN_CLASSES[token_class(text)] == name


def test_no_text_has_no_class() -> None:
    assert token_class("") == -1


def test_an_unknown_condition_is_named_with_the_known_ones() -> None:
    with pytest.raises(QuestionError, match=r"'colour'.*advantage, position, state, entropy"):
        conditions_named(["colour"])
    assert [each.name for each in conditions_named(["tail", "ratio", "tail"])] == ["tail", "ratio"]


@pytest.mark.parametrize(("name", "column"), [("entropy", "pre_entropy"), ("token", "token")])
def test_a_missing_column_is_said_by_name(tmp_path: Path, name: str, column: str) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), optional=()))
    with pytest.raises(QuestionError, match=f"`{name}` needs the column `{column}`"):
        check_condition(dump, "none", CONDITIONS[name])
    check_condition(dump, "none", CONDITIONS["state"])


def test_every_condition_says_what_it_is() -> None:
    for name, each in CONDITIONS.items():
        assert each.name == name
        assert each.meaning
