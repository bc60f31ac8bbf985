"""Rates by condition, bin by bin against an independent count."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltad.analysis import (
    CONDITION_COLUMNS,
    CONDITIONS,
    ConditionTable,
    Question,
    QuestionError,
    condition_table,
    rate_table,
)
from deltad.dumps import Dump
from tests.analysis.brute_many import Token, brute_pair, judge_rows, ratio_of, right
from tests.analysis.test_comparison import assert_same
from tests.analysis.test_conditions import CLASSES, WORDS, written
from tests.dumps.factory import make_dump

NAMES = ("ratio", "predictive-kl-aggregated")
ASKED = Question(threshold=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with every column and rows without vectors."""
    return make_dump(
        tmp_path_factory.mktemp("conditions") / "run", seeds=(0, 1, 5), rows=90, threshold=0.1,
        ranks=1, parts=2, top_k=3, vocab_size=30, drift=1.5, null_vectors=0.1, change=written,
    )  # fmt: skip


@pytest.fixture(scope="module")
def table(run: Path) -> ConditionTable:
    """All conditions at once."""
    return condition_table(Dump.open(run), ASKED, criteria=NAMES, bins=3)


@pytest.fixture(scope="module")
def tokens(run: Path) -> dict[int, list[Token]]:
    """Every row, judged by loops."""
    return judge_rows(run, "none", NAMES, "kl", 0.1)


VALUES: dict[str, Callable[[Token], Any]] = {
    "position": lambda token: token.row["position"],
    "entropy": lambda token: token.row["pre_entropy"],
    "divergence": lambda token: token.d_pre,
    "ratio": lambda token: abs(ratio_of(token.row) - 1),
    "tail": lambda token: token.pair.mu_t if token.pair is not None else math.nan,
    "advantage": lambda token: ("zero", "positive", "negative")[
        (token.row["advantage"] > 0) - (token.row["advantage"] < 0)
    ],
    "token": lambda token: CLASSES[token.row["token_id"] % len(WORDS)] or "unknown",
}


def in_bin(part: Any, value: Any, *, first: bool) -> bool:
    """Whether a value lies in a part's bin."""
    if isinstance(value, str):
        return bool(part.label == value)
    tiny = 1e-13  # sums are taken in another order here
    low = part.low - tiny if first else part.low + tiny
    return bool(low <= value <= part.high + tiny)


@pytest.mark.parametrize("name", list(VALUES))
def test_every_bin_is_counted_as_by_brute_force(
    table: ConditionTable, tokens: dict[int, list[Token]], name: str
) -> None:
    columns = table.columns()
    assert columns.keys() == CONDITION_COLUMNS.keys()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for criterion in NAMES:
        parts = table.of(name, criterion)
        assert sum(part.table.outside.tokens for part in parts) == sum(
            token.outside for seed in tokens.values() for token in seed
        )
        for at, part in enumerate(parts):

            def chosen(token: Token, part: Any = part, first: bool = not at) -> bool:
                return in_bin(part, VALUES[name](token), first=first)

            row = next(
                row
                for row in rows
                if (row["condition"], row["bin"], row["criterion"]) == (name, part.label, criterion)
            )
            assert_same(row, brute_pair(tokens, criterion, "ratio", chosen), f"{name} {part.label}")
            mine = [t for seed in tokens.values() for t in seed if t.outside and chosen(t)]
            assert row["outside_right"] == sum(right(token, criterion) for token in mine)
            assert row["outside_judged"] == len(mine)


def test_numbers_are_binned_evenly_and_names_are_all_shown(table: ConditionTable) -> None:
    for name in ("entropy", "divergence", "ratio"):
        sizes = [part.table.outside.tokens for part in table.of(name, "ratio")]
        assert len(sizes) == 3
        assert max(sizes) - min(sizes) <= 1
    labels = [part.label for part in table.of("token", "ratio")]
    assert labels == [
        "digit", "word", "whitespace", "punctuation", "special", "other", "unknown"
    ]  # fmt: skip
    assert [part.label for part in table.of("state", "ratio")] == ["own", "shared"]


def test_one_bin_holds_the_table_of_rates(run: Path) -> None:
    dump = Dump.open(run)
    for protocol in ("shared:none", "own"):
        asked = Question(threshold=0.1, protocol=protocol)
        (_, part) = condition_table(dump, asked, ["entropy"], bins=1).parts
        assert part.table.to_json_object() == rate_table(dump, asked).to_json_object()
        assert math.isnan(part.accuracy.rate) == (protocol == "own")


def test_tied_numbers_leave_fewer_bins_and_it_is_said(table: ConditionTable, run: Path) -> None:
    assert len(condition_table(Dump.open(run), ASKED, ["position"], bins=9).of("position", "ratio"))
    table = condition_table(Dump.open(run), ASKED, ["position"], bins=9)
    assert len(table.of("position", "ratio")) == 5
    assert "position: 5 bins of the 9 asked for" in str(table)


def test_states_of_a_thinned_dump_are_unknown_and_counted(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), stored=("kl", 0.05), drift=1.5))
    table = condition_table(dump, by=["state"])
    own, shared, unknown = table.of("state", "ratio")
    assert own.table.outside.tokens == 0
    assert shared.table.outside.tokens > 0
    assert unknown.label == "unknown"
    assert unknown.table.outside.tokens > 0
    assert "does not hold whole responses" in str(table)


def test_a_dump_with_no_token_outside_has_no_bins_of_numbers(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), empty_seeds=(0,), rows=5))
    table = condition_table(dump, Question(threshold=1e6))
    assert table.of("entropy", "ratio") == []
    assert [part.table.outside.tokens for part in table.of("advantage", "ratio")] == [0, 0, 0]
    str(table), table.to_json_object(), table.to_frame()


def test_nonsense_is_refused(run: Path) -> None:
    dump = Dump.open(run)
    with pytest.raises(QuestionError, match="`bins` must be at least 1, got 0"):
        condition_table(dump, bins=0)
    with pytest.raises(QuestionError, match="no condition 'size'"):
        condition_table(dump, by=["size"])


def test_golden_numbers_of_the_whole_tiny_dump() -> None:
    run = Path(__file__).parents[2] / "data_dumps" / "tiny-whole"
    table = condition_table(Dump.open(run), by=["state", "token"])
    found = {
        (part.label, part.criterion): (part.table.outside.tokens, int(part.accuracy.part))
        for part in table.parts
        if part.table.outside.tokens
    }
    assert found == {
        ("own", "ratio"): (142, 79),
        ("own", "predictive-kl-aggregated"): (142, 76),
        ("shared", "ratio"): (812, 435),
        ("shared", "predictive-kl-aggregated"): (812, 443),
        ("digit", "ratio"): (951, 511),
        ("digit", "predictive-kl-aggregated"): (951, 517),
        ("punctuation", "ratio"): (3, 3),
        ("punctuation", "predictive-kl-aggregated"): (3, 2),
    }
    assert set(CONDITIONS) > {each.name for each in table.conditions}
