"""Many criteria on one dump, against an independent count and against `deltad table`."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltad.analysis import (
    COMPARISON_COLUMNS,
    Comparison,
    Question,
    QuestionError,
    compare,
    rate_table,
)
from deltad.dumps import Dump
from deltad.masks import CriterionError
from deltad.weights import WEIGHTS
from tests.analysis.brute_many import brute_compare, brute_pair, judge_rows
from tests.dumps.factory import make_dump

KL = [name for name, entry in WEIGHTS.items() if name != "none" and "-tv-" not in name]
TV = [name for name in WEIGHTS if name != "none" and "-kl-" not in name]


def rows_by_name(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """The columns as a row a criterion."""
    columns = comparison.columns()
    return {
        name: {column: values[at] for column, values in columns.items()}
        for at, name in enumerate(columns["criterion"])
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Every expected value is there, to 1e-9."""
    for key, value in expected.items():
        if isinstance(value, float):
            assert found[key] == pytest.approx(value, abs=1e-9, nan_ok=True), (where, key)
        else:
            assert found[key] == value, (where, key)


def check(run: Path, family: str, threshold: float, baseline: str, arm: str = "none") -> Comparison:
    """A comparison agrees with the brute force; returns it."""
    question = Question(
        threshold=threshold, divergence=family, baseline=baseline, protocol=f"shared:{arm}"
    )
    comparison = compare(Dump.open(run), question)
    names = KL if family == "kl" else TV
    assert set(comparison.names) == {*names, baseline}
    assert comparison.names[0] == baseline
    tokens = judge_rows(run, arm, [*names, baseline], family, threshold)
    expected = brute_compare(tokens, comparison.names, baseline)
    rows = rows_by_name(comparison)
    for at, name in enumerate(comparison.names):
        alike = expected[name].pop("alike")
        assert comparison.alike[at].tolist() == [alike[other] for other in comparison.names]
        assert_same(rows[name], expected[name], name)
        assert_same(rows[name], brute_pair(tokens, name, baseline), name)
    return comparison


@settings(max_examples=4)
@given(
    dump=st.fixed_dictionaries(
        {
            "rows": st.sampled_from([0, 1, 45]),
            "seeds": st.sampled_from([(0,), (3, 7, 9)]),
            "top_k": st.sampled_from([1, 3, 20]),
            "vocab_size": st.sampled_from([2, 5, 24]),
            "rng_seed": st.integers(0, 2**32 - 1),
            "null_vectors": st.sampled_from([0.0, 0.3, 1.0]),
            "drift": st.sampled_from([0.3, 1.0, 3.0]),
        }
    ),
    asked=st.tuples(
        st.sampled_from(["kl", "tv"]),
        st.sampled_from([0.0, 0.05, 0.4]),
        st.sampled_from(["ratio", "none", "clip-higher", "drpo"]),
    ),
)
def test_every_criterion_is_counted_as_by_brute_force_on_any_dump(
    dump: dict[str, Any], asked: tuple[str, float, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = make_dump(Path(folder) / "run", arms=("none",), ranks=1, parts=2, **dump)
        comparison = check(run, *asked)
        assert not comparison.refused
        assert comparison.columns().keys() == COMPARISON_COLUMNS.keys()
        str(comparison), comparison.to_json_object()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump in which all criteria disagree about many tokens."""
    return make_dump(
        tmp_path_factory.mktemp("many") / "run", seeds=(0, 1, 2, 5), rows=150, ranks=1, parts=1,
        top_k=3, vocab_size=30, drift=1.5, null_vectors=0.1, threshold=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["kl", "tv"])
def test_many_tokens_are_decided_differently(run: Path, family: str) -> None:
    comparison = check(run, family, 0.1, "ratio")
    assert comparison.outside.tokens > 100
    for name in comparison.names[1:]:
        assert comparison[name].table.disagreement.tokens > 0
    inside = {name: comparison[name].masked["inside"] for name in comparison.names}
    assert inside["ratio"] == 0
    assert inside["clip-higher"] > 0
    assert inside["icepop"] > 0
    assert comparison["clip-higher"].masked["without_vectors"] > 0


def test_each_pair_is_the_table_of_rates(run: Path) -> None:
    dump = Dump.open(run)
    for protocol in ("shared:none", "own"):
        asked = Question(threshold=0.1, protocol=protocol)
        comparison = compare(dump, asked, ["predictive-kl-aggregated"], bootstrap_seed=3)
        expected = rate_table(dump, asked, bootstrap_seed=3).to_json_object()
        found = comparison["predictive-kl-aggregated"].table.to_json_object()
        assert found == expected


def test_the_agreement_is_symmetric_and_whole_on_its_diagonal(run: Path) -> None:
    comparison = compare(Dump.open(run), Question(threshold=0.1))
    assert np.array_equal(comparison.alike, comparison.alike.T)
    assert (np.diag(comparison.alike) == comparison.outside.tokens).all()
    ratio = comparison.names.index("ratio")
    for at, each in enumerate(comparison.criteria):
        apart = comparison.outside.tokens - comparison.alike[ratio, at]
        assert apart == each.table.disagreement.tokens


def test_two_criteria_foretell_each_disagreement_token_one_or_the_other(run: Path) -> None:
    comparison = compare(Dump.open(run), Question(threshold=0.1))
    for each in comparison.criteria[1:]:
        assert each.disagreement.rate == pytest.approx(each.table.sign_accuracy("criterion"))
    # On all tokens outside they differ by just what they foretell of those in disagreement.
    base = comparison.criteria[0].outside.part
    for each in comparison.criteria[1:]:
        gain = 2 * each.disagreement.part - each.disagreement.whole
        assert each.outside.part == base + gain


def test_holm_corrects_for_the_criteria_that_differ(run: Path) -> None:
    comparison = compare(Dump.open(run), Question(threshold=0.1))
    plain = [each.table.paired.sign_test_p for each in comparison.criteria]
    tested = sum(not math.isnan(p) for p in plain)
    assert 2 <= tested < len(plain)
    smallest = min(p for p in plain if not math.isnan(p))
    assert min(p for p in comparison.holm_p if not math.isnan(p)) == pytest.approx(
        min(1.0, tested * smallest)
    )
    assert math.isnan(comparison.holm_p[0])


def test_own_judges_no_sign_and_needs_an_arm_a_criterion(run: Path) -> None:
    comparison = compare(Dump.open(run), Question(threshold=0.1, protocol="own"))
    assert comparison.names == ("ratio", "predictive-kl-aggregated")
    assert {"icepop", "predictive-kl-exact"} <= comparison.refused.keys()
    assert all(math.isnan(each.outside.rate) for each in comparison.criteria)
    assert "no sign is judged" in str(comparison)
    with pytest.raises(QuestionError, match="icepop"):
        compare(Dump.open(run), Question(threshold=0.1, protocol="own"), ["icepop"])


def test_what_the_dump_lacks_is_left_out_by_default_and_refused_by_name(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), optional=()))
    comparison = compare(dump)
    assert comparison.refused.keys() == {"predictive-kl-exact", "predictive-kl-full"}
    assert "`pre_collision`" in comparison.refused["predictive-kl-exact"]
    assert "predictive-kl-exact is left out" in str(comparison)
    with pytest.raises(QuestionError, match="full_kl_pre"):
        compare(dump, criteria=["predictive-kl-full"])
    with pytest.raises(CriterionError, match="predictive-kl-exact"):
        compare(dump, criteria=["predictive-tv-exact"])
    with pytest.raises(CriterionError, match=r"no criterion 'ppo'.*icepop"):
        compare(dump, criteria=["ppo"])


def test_one_seed_has_no_intervals_and_an_empty_dump_no_rates(tmp_path: Path) -> None:
    one = compare(Dump.open(make_dump(tmp_path / "one", arms=("none",), seeds=(4,), drift=1.5)))
    assert not math.isnan(one["ratio"].outside.rate)
    assert all(math.isnan(end) for end in one["ratio"].outside.ci95)
    whole = Dump.open(make_dump(tmp_path / "none", arms=("none",)))
    none = compare(whole, Question(threshold=1e6))
    assert none.outside.tokens == 0
    assert np.isnan(none.agreement).all()
    assert math.isnan(none["ratio"].outside.rate)
    str(none), none.to_json_object()
    empty = compare(Dump.open(make_dump(tmp_path / "empty", arms=("none",), empty_seeds=(0, 1))))
    assert empty.rows == 0
    str(empty), empty.to_json_object()


DUMPS = Path(__file__).parents[2] / "data_dumps"

GOLDEN = {
    "ratio": (554, 0, 514, 0, 0),
    "predictive-kl-aggregated": (579, 0, 519, 31, 57),
    "icepop": (457, 38, 495, 151, 321),
    "mis": (111, 17, 416, 263, 624),
}
"""Masked in all and inside; signs right of the tokens outside and in disagreement; the latter."""


def test_golden_numbers_of_the_tiny_dump() -> None:
    comparison = compare(
        Dump.open(DUMPS / "tiny-whole"), criteria=["predictive-kl-aggregated", "icepop", "mis"]
    )
    found = {
        each.name: (
            sum(each.masked.values()),
            each.masked["inside"],
            int(each.outside.part),
            int(each.disagreement.part),
            int(each.disagreement.whole),
        )
        for each in comparison.criteria
    }
    assert comparison.outside.tokens == 954
    assert found == GOLDEN
