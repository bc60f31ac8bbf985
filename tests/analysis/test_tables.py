"""Tables as objects, frames and texts."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from deltad.analysis import (
    PROTOCOL_COLUMNS,
    RATE_COLUMNS,
    Question,
    RateTable,
    protocol_table,
    protocol_text,
    rate_table,
    rate_text,
)
from deltad.analysis.export import to_csv, to_json, to_markdown, without_nan
from deltad.analysis.paper import compares_with_paper
from deltad.analysis.rates import BaseRate, Kept, SeedRates
from deltad.dumps import Dump
from tests.dumps.factory import make_dump

deltas = st.lists(st.sampled_from([-0.5, 0.0, 0.25]), max_size=6)


def table_of(seeds: list[tuple[list[float], list[float]]], protocol: str) -> RateTable:
    """A table from the ΔD that criterion and baseline keep, by seed."""
    rows = tuple(
        SeedRates(
            seed=seed,
            tokens=10,
            outside=len(ours) + len(theirs),
            outside_increase=sum(delta > 0 for delta in ours + theirs),
            disagreement=len(ours) + len(theirs),
            disagreement_increase=sum(delta > 0 for delta in ours + theirs),
            without_vectors=0,
            baseline=Kept(np.array(theirs)),
            criterion=Kept(np.array(ours)),
        )
        for seed, (ours, theirs) in enumerate(seeds)
    )
    return RateTable(Question(protocol=protocol), rows)


def words(renderable: RenderableType) -> str:
    """What a console prints."""
    console = Console(file=io.StringIO(), width=400)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump that answers every protocol."""
    path = tmp_path_factory.mktemp("tables") / "run"
    return Dump.open(
        make_dump(
            path, rows=200, top_k=3, vocab_size=30, drift=1.5, ranks=1, parts=2, seeds=(0, 1, 5)
        )
    )


@given(st.lists(st.tuples(deltas, deltas), max_size=5))
def test_the_two_criteria_foretell_each_disagreement_token_one_or_the_other(
    seeds: list[tuple[list[float], list[float]]],
) -> None:
    table = table_of(seeds, "shared:none")
    both = [table.sign_accuracy(side) for side in ("criterion", "baseline")]
    if table.disagreement.tokens:
        assert sum(both) == pytest.approx(1)
        right = sum(
            sum(delta <= 0 for delta in ours) + sum(delta > 0 for delta in theirs)
            for ours, theirs in seeds
        )
        assert both[0] == pytest.approx(right / table.disagreement.tokens)
    else:
        assert all(math.isnan(share) for share in both)
    assert math.isnan(table_of(seeds, "own").sign_accuracy("criterion"))


@settings(max_examples=10)
@given(st.lists(st.tuples(deltas, deltas), max_size=5))
def test_any_table_can_be_printed_and_written(
    seeds: list[tuple[list[float], list[float]]],
) -> None:
    for protocol in ("own", "shared:none"):
        table = table_of(seeds, protocol)
        text = words(rate_text(table, per_seed=True))
        assert protocol in text
        assert "nan" not in text.lower()
        assert "NaN" not in to_json(table.to_json_object())


@pytest.mark.parametrize(("increase", "guess"), [(0, 1.0), (3, 0.75), (1, 0.75), (2, 0.5)])
def test_the_better_constant_guess_is_right_on_the_larger_share(
    increase: int, guess: float
) -> None:
    assert BaseRate(4, increase).constant_guess == guess
    assert math.isnan(BaseRate(0, 0).constant_guess)


def test_unsafe_and_contracting_leave_out_what_did_not_move() -> None:
    kept = Kept(np.array([0.0, 0.1, -0.1, -0.2]))
    assert (kept.kept, kept.unsafe, kept.contracting, kept.unsafe_keep_rate) == (4, 1, 2, 0.25)


def test_a_seed_without_a_rate_is_told_and_takes_no_part_in_the_mean() -> None:
    table = table_of([([0.25], [0.25]), ([], [-0.5]), ([-0.5], [])], "shared:none")
    assert table.criterion.unsafe_keep_rate == 0.5
    assert table.baseline.unsafe_keep_rate == 0.5
    assert table.criterion.seeds == 2
    assert (table.paired.seeds, table.paired.tied) == (1, 1)
    text = words(rate_text(table))
    assert "seeds without a rate of predictive-kl-aggregated  1 (" in text
    assert "seeds without a rate of ratio                     1 (" in text


def test_the_contracting_fraction_is_pooled_and_the_rate_is_a_mean_over_seeds() -> None:
    table = table_of([([-0.5], []), ([0.25, 0.25, 0.25], [])], "shared:none")
    assert table.criterion.unsafe_keep_rate == 0.5
    assert table.criterion.contracting_fraction == 0.25


def test_pooled_differences_are_those_of_all_kept_tokens() -> None:
    table = table_of(
        [([0.25, -0.5], [0.25]), ([], [-0.5, 0.25]), ([-0.5, 0.0], [-0.5])], "shared:none"
    )
    assert table.pooled_unsafe.difference == pytest.approx(1 / 4 - 2 / 4)
    assert table.pooled_contracting.difference == pytest.approx(2 / 4 - 2 / 4)
    assert (table.pooled_unsafe.clusters, table.pooled_unsafe.degrees) == (3, 1)
    low, high = table.pooled_unsafe.difference_ci95
    text = words(rate_text(table))
    assert f"unsafe keep pooled, criterion − baseline          −0.250 [{low:+.3f}" in text.replace(
        "[−", "[-"
    )
    assert f"{high:+.3f}]" in text
    assert "jackknife over seeds" in text
    assert "Permutation test: all " in text


def test_frames_have_the_documented_columns(dump: Dump) -> None:
    table = rate_table(dump)
    frame = table.to_frame()
    assert list(frame.columns) == list(RATE_COLUMNS)
    assert frame.seed.tolist() == [0, 1, 5]
    object_rows = table.to_json_object()["seeds"]
    for row, seed in zip(frame.to_dict("records"), object_rows, strict=True):
        assert row["outside"] == seed["outside"]
        for side in ("baseline", "criterion"):
            for name, value in seed[side].items():
                found = row[f"{side}_{name}"]
                assert math.isnan(found) if value is None else found == value
    protocols = protocol_table(dump).to_frame()
    assert list(protocols.columns) == list(PROTOCOL_COLUMNS)
    first = protocols.iloc[0]
    summary = table.to_json_object()["summary"]
    assert first.protocol == "shared:none"
    assert first.outside_increase_rate == summary["base"]["outside"]["increase_rate"]
    assert first.baseline_contracting_fraction == summary["baseline"]["contracting_fraction"]
    low, high = summary["criterion"]["unsafe_keep_rate_ci95"]
    assert (first.criterion_unsafe_keep_rate_low, first.criterion_unsafe_keep_rate_high) == (
        low,
        high,
    )
    assert (first.lower, first.tied, first.higher) == tuple(
        summary["paired"][name] for name in ("lower", "tied", "higher")
    )
    assert first.difference_low == summary["paired"]["difference_ci95"][0]
    assert first.wilcoxon_p == summary["paired"]["wilcoxon_p"]
    assert first.permutation_p == summary["paired"]["permutation_p"]
    for name, key in (("unsafe", "unsafe_keep_rate"), ("contracting", "contracting_fraction")):
        pooled = summary["pooled"][key]
        found = [first[f"pooled_{name}_difference{end}"] for end in ("", "_low", "_high")]
        assert found == [pooled["difference"], *pooled["difference_ci95"]]


def test_every_protocol_is_that_of_its_own_table_and_each_row_is_read_once(dump: Dump) -> None:
    seen: list[int] = []
    protocols = protocol_table(dump, bootstrap_seed=7, progress=seen.append)
    assert sum(seen) == sum(part.rows for part in dump.parts)
    for table in protocols.tables:
        question = Question(protocol=table.question.protocol)
        alone = rate_table(dump, question, bootstrap_seed=7)
        assert alone.to_json_object() == table.to_json_object()


def test_the_bootstrap_seed_moves_intervals_alone(dump: Dump) -> None:
    first, second = (rate_table(dump, bootstrap_seed=seed).to_json_object() for seed in (1, 2))
    assert first["seeds"] == second["seeds"]
    assert first["summary"]["bootstrap"] == {**second["summary"]["bootstrap"], "seed": 1}
    assert first["summary"]["paired"]["sign_test_p"] == second["summary"]["paired"]["sign_test_p"]


def test_the_protocol_table_names_the_paper_and_what_was_refused(dump: Dump) -> None:
    text = words(protocol_text(protocol_table(dump)))
    assert "the paper (Figure 4)" in text
    assert "0.342 / 0.369" in text
    other = words(protocol_text(protocol_table(dump, Question(criterion="binary-kl"))))
    assert "the paper" not in other
    assert "own: `--protocol own` needs an arm" in other


@pytest.mark.parametrize(
    ("criterion", "baseline", "same"),
    [
        ("predictive-kl-uniform", "ratio", True),
        ("predictive-tv-aggregated", "ratio", False),
        ("ratio", "predictive-kl-aggregated", False),
    ],
)
def test_the_paper_compares_a_predictive_kl_criterion_with_the_ratio(
    criterion: str, baseline: str, same: bool
) -> None:
    assert compares_with_paper(criterion, baseline) is same


def test_undefined_values_are_empty_in_each_form() -> None:
    columns: dict[str, list[Any]] = {"a": [1, 2], "b": [0.1 + 0.2, math.nan], "c": ["x|y", "z,w"]}
    assert to_csv(columns) == b'a,b,c\n1,0.30000000000000004,x|y\n2,,"z,w"\n'
    lines = to_markdown(columns).decode().splitlines()
    assert lines[2:] == ["| 1 | 0.3 | x\\|y |", "| 2 | – | z,w |"]
    assert without_nan({"x": [math.nan, (1.0)]}) == {"x": [None, 1.0]}
