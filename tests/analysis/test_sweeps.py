"""Sweeps: every point is the table that it stands for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from deltad.analysis import (
    SWEEP_COLUMNS,
    Question,
    QuestionError,
    RateTable,
    Sweep,
    protocol_table,
    rate_table,
    sweep,
)
from deltad.analysis.sweeps import THRESHOLDS, shortened
from deltad.dumps import Dump
from deltad.dumps.columns import VECTORS
from tests.analysis.brute_many import brute_pair, judge_rows, right
from tests.analysis.test_comparison import assert_same
from tests.dumps.factory import edit, edit_metadata, make_dump

PAIR = ("predictive-kl-aggregated", "ratio")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with tails, padding, tokens sampled outside the top-K and rows without vectors."""
    return make_dump(
        tmp_path_factory.mktemp("sweeps") / "run", seeds=(0, 1, 5), rows=120, ranks=1, parts=1,
        top_k=6, vocab_size=30, drift=1.5, null_vectors=0.1,
        arms=("none", "ratio", "predictive-kl-aggregated", "zero-step"),
    )  # fmt: skip


def cut(source: Path, target: Path, top_k: int) -> Path:
    """The unmasked arm as an engine with a smaller K would have left it."""
    for file in (source / "arm=none").glob("*/*.parquet"):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())

        def narrow(table: pa.Table) -> pa.Table:
            for name in VECTORS:
                at = table.schema.get_field_index(name)
                rows = [row and row[:top_k] for row in table.column(name).to_pylist()]
                kind = pa.list_(table.schema.field(at).type.value_type, top_k)
                table = table.set_column(at, pa.field(name, kind), pa.array(rows, kind))
            return table

        edit(copy, narrow)
        edit_metadata(copy, top_k=top_k)
    return target


def assert_points(swept: Sweep, expected: list[tuple[float | str, RateTable]]) -> None:
    """Points have these values and tables."""
    assert [point.value for point in swept.points] == [value for value, _ in expected]
    for point, (_, table) in zip(swept.points, expected, strict=True):
        assert repr(point.table.columns()) == repr(table.columns())  # to the bit, NaN too
        assert point.table.question == table.question


def test_every_threshold_is_the_table_of_its_own(run: Path) -> None:
    dump = Dump.open(run)
    for baseline in ("ratio", "icepop"):
        swept = sweep(dump, Question(baseline=baseline))
        assert_points(
            swept,
            [
                (value, rate_table(dump, Question(threshold=value, baseline=baseline)))
                for value in THRESHOLDS
            ],
        )
        assert not swept.refused


def test_signs_foretold_are_counted_as_by_brute_force(run: Path) -> None:
    swept = sweep(Dump.open(run), values=["0.4", 0.1])
    columns = swept.columns()
    assert columns.keys() == SWEEP_COLUMNS.keys()
    for at, threshold in enumerate((0.1, 0.4)):
        tokens = judge_rows(run, "none", PAIR, "kl", threshold)
        row = {name: values[at] for name, values in columns.items()}
        assert_same(row, brute_pair(tokens, *PAIR), str(threshold))
        out = [token for seed in tokens.values() for token in seed if token.outside]
        assert row["value"] == threshold
        assert row["criterion_right"] == sum(right(token, PAIR[0]) for token in out)
        assert row["baseline_right"] == sum(right(token, PAIR[1]) for token in out)
        assert row["criterion_judged"] == row["baseline_judged"] == len(out) > 0


def test_every_k_is_the_table_of_a_dump_recorded_with_it(run: Path, tmp_path: Path) -> None:
    for criterion in ("predictive-kl-aggregated", "predictive-kl-exact", "binary-kl"):
        asked = Question(criterion=criterion, threshold=0.1)
        swept = sweep(Dump.open(run), asked, over="top-k", values=[1, 3, 6])
        assert [point.value for point in swept.points] == [1, 3, 6]
        for point in swept.points:
            narrow = tmp_path / f"{point.value}"
            if not narrow.exists():
                cut(run, narrow, int(point.value))
            assert_points(
                replace(swept, points=(point,)),
                [(point.value, rate_table(Dump.open(narrow), asked))],
            )


def test_fewer_ids_make_d_smaller(run: Path) -> None:
    for divergence in ("kl", "tv"):
        swept = sweep(Dump.open(run), Question(divergence=divergence), over="top-k")
        assert [point.value for point in swept.points] == [1, 2, 3, 5, 6]
        outside = [point.table.outside.tokens for point in swept.points]
        assert outside == sorted(outside)


def test_a_block_is_cut_in_rank_order(run: Path) -> None:
    batch = next(Dump.open(run).batches("none", 0))
    short = shortened(batch, 2)
    for name in VECTORS:
        assert short[name].shape == (len(batch), 2)
        assert np.array_equal(short[name], batch[name][:, :2], equal_nan=True)
    assert short["token_id"] is batch["token_id"]


def test_every_protocol_is_its_table(run: Path) -> None:
    dump = Dump.open(run)
    swept = sweep(dump, over="protocol")
    expected = protocol_table(dump)
    assert_points(swept, [(table.question.protocol, table) for table in expected.tables])
    own = next(point for point in swept.points if point.value == "own")
    assert all(math.isnan(share.rate) for share in own.accuracy.values())
    few = sweep(dump, over="protocol", values=["shared:ratio", "shared:zero-step"])
    assert [point.value for point in few.points] == ["shared:ratio", "shared:zero-step"]
    assert few.points[1].table.criterion.unsafe == 0


def test_what_a_thinned_dump_cannot_answer_is_refused_and_the_rest_is_shown(
    tmp_path: Path,
) -> None:
    options = {"seeds": (0, 1), "rows": 80, "drift": 1.5, "arms": ("none",)}
    whole = Dump.open(make_dump(tmp_path / "whole", **options))  # type: ignore[arg-type]
    thin = Dump.open(make_dump(tmp_path / "thin", stored=("kl", 0.1), **options))  # type: ignore[arg-type]
    swept = sweep(thin)
    assert list(swept.refused) == ["0.02", "0.03", "0.05", "0.07"]
    assert "stores only tokens with kl above 0.1" in swept.refused["0.05"]
    assert "0.05: " in str(swept)
    rest = [value for value in THRESHOLDS if value >= 0.1]
    assert_points(swept, [(v, rate_table(whole, Question(threshold=v))) for v in rest])
    # D on fewer ids is smaller: what is outside there is stored.
    ours, theirs = (sweep(dump, Question(threshold=0.15), over="top-k") for dump in (thin, whole))
    assert_points(ours, [(point.value, point.table) for point in theirs.points])
    with pytest.raises(QuestionError, match=r"no threshold.*at 0\.02:.*stores only"):
        sweep(thin, values=[0.02])
    own = sweep(whole, Question(protocol="own", baseline="none", criterion="none"), values=[0.15])
    assert own.points[0].table.disagreement.tokens == 0


def test_own_answers_at_the_recorded_threshold_alone(run: Path) -> None:
    swept = sweep(Dump.open(run), Question(protocol="own"))
    assert [point.value for point in swept.points] == [0.15]
    assert len(swept.refused) == len(THRESHOLDS) - 1
    assert "mask predictive-kl-aggregated, threshold 0.02" in swept.refused["0.02"]


@pytest.mark.parametrize(
    ("over", "values", "words"),
    [
        ("time", [], "`over` must be one of threshold, top-k, protocol, got 'time'"),
        ("threshold", ["low"], "must be a number, got 'low'"),
        ("threshold", [-1], "not negative"),
        ("top-k", [0], "from 1 to the dump's K = 6, got 0"),
        ("top-k", [7], "from 1 to the dump's K = 6, got 7"),
        ("top-k", ["2.5"], "whole number"),
        ("protocol", ["both"], "`protocol` must be"),
        ("protocol", ["shared:x"], "no arm 'x'"),
    ],
)
def test_nonsense_is_refused(run: Path, over: str, values: list[float | str], words: str) -> None:
    with pytest.raises(QuestionError, match=words):
        sweep(Dump.open(run), over=over, values=values)


def test_a_dump_without_tokens_outside_has_points_without_rates(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "run", arms=("none",), empty_seeds=(0, 1)))
    for over in ("threshold", "top-k", "protocol"):
        swept = sweep(dump, over=over)
        assert all(point.table.outside.tokens == 0 for point in swept.points)
        str(swept), swept.to_json_object(), swept.to_frame()


def test_golden_numbers_of_the_tiny_dump() -> None:
    dump = Dump.open(Path(__file__).parents[2] / "data_dumps" / "tiny-whole")
    found = {
        point.value: (
            point.table.outside.tokens,
            point.table.disagreement.tokens,
            int(point.accuracy["criterion"].part),
        )
        for over in ("threshold", "top-k")
        for point in sweep(dump, over=over).points
    }
    assert found[0.02] == (1642, 82, 875)
    assert found[0.15] == found[20] == (954, 57, 519)
    assert found[5] == (496, 113, 278)
