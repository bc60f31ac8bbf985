"""The ΔD table, token by token, against the independent count."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from deltad.analysis import TOKEN_COLUMNS, Question, QuestionError, TokenTable, rate_table
from deltad.dumps import Dump
from deltad.masks import CRITERIA
from tests.analysis import bruteforce
from tests.dumps.factory import make_dump

KEY = ["arm", "seed", "step", "sequence", "position"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every optional column, rows without vectors and an empty seed."""
    path = tmp_path_factory.mktemp("tokens") / "run"
    return Dump.open(
        make_dump(
            path, rows=60, seeds=(0, 1, 4), empty_seeds=(4,), null_vectors=0.2, drift=1.5,
            ranks=2, parts=1,
        )
    )  # fmt: skip


def by_key(frame: pd.DataFrame) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by what identifies a token."""
    return {tuple(row[name] for name in KEY): row for row in frame.to_dict("records")}  # type: ignore[misc]


@pytest.mark.parametrize("family", ["kl", "tv"])
@pytest.mark.parametrize("tail", ["aggregated", "uniform", "exact"])
def test_every_value_is_that_of_the_brute_force(dump: Dump, family: str, tail: str) -> None:
    name = f"predictive-{family}-{tail}"
    question = Question(0.1, family, name, "ratio", "shared:ratio")
    found = by_key(TokenTable(dump, question).to_frame())
    names = [each for each in CRITERIA if CRITERIA[each].family in (None, family)]
    checked = 0
    rows, _, n = bruteforce.read_rows(dump.path, "ratio")
    for seed, tokens in rows.items():
        for row in tokens:
            line = found.pop(("ratio", seed, row["step"], row["sequence"], row["position"]))
            for copied in ("group", "token_id", "advantage", "in_loss", "token"):
                assert line[copied] == row[copied]
            r = math.exp(row["pre_logprob"] - row["behavior_logprob"])
            assert line["ratio"] == pytest.approx(r, rel=1e-12)
            if row["topk_ids"] is None:
                assert math.isnan(line["d_pre"] + line["d_post"] + line["delta_d"])
                assert math.isnan(line["d_dot"] + line["d_dot_local"] + line["d_dot_global"])
                assert not line["outside"]
                assert not line["disagreement"]
                assert line["keep_ratio"] is None
                assert line[f"keep_predictive_{family}_{tail}"] is None
                continue
            before, after = (bruteforce.support(row, when, n) for when in ("pre", "post"))
            d = bruteforce.divergence(before, family)
            assert line["d_pre"] == pytest.approx(d, abs=1e-12)
            d_post = bruteforce.divergence(after, family)
            assert line["d_post"] == pytest.approx(d_post, abs=1e-12)
            assert line["delta_d"] == line["d_post"] - line["d_pre"]
            d_dot = bruteforce.direction(before, family, tail, row["pre_collision"])
            assert line["d_dot"] == pytest.approx(d_dot, abs=1e-12)
            assert line["d_dot_local"] + line["d_dot_global"] == pytest.approx(d_dot, abs=1e-12)
            if family == "kl":
                local = before.pi[before.k] - before.mu[before.k]
                assert line["d_dot_local"] == pytest.approx(local, abs=1e-12)
            keep = {each: bruteforce.keeps(each, row, before, d, 0.1) for each in names}
            for each in names:
                assert line["keep_" + each.replace("-", "_")] == keep[each], each
            assert line["outside"] == (d > 0.1)
            assert line["disagreement"] == (d > 0.1 and keep[name] != keep["ratio"])
            checked += 1
    assert not found
    assert checked > 50


def test_columns_are_the_documented_ones_with_a_decision_a_criterion(dump: Dump) -> None:
    columns = TokenTable(dump, Question(divergence="tv")).schema.names
    kept = [f"keep_{name.replace('-', '_')}" for name in CRITERIA if "-kl-" not in name]
    documented = list(TOKEN_COLUMNS)
    at = documented.index("outside")
    assert columns == [*documented[:at], *kept, *documented[at:]]


def test_criteria_whose_columns_are_missing_have_no_decision(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", rows=5, ranks=1, parts=1, optional=("full_kl_pre",))
    columns = TokenTable(Dump.open(run)).schema.names
    assert "keep_predictive_kl_exact" not in columns
    assert "keep_predictive_kl_full" not in columns
    assert "token" not in columns
    assert "keep_predictive_kl_uniform" in columns


def test_a_direction_without_terms_has_none(dump: Dump) -> None:
    frame = TokenTable(dump, Question(criterion="clip-higher")).to_frame()
    assert frame["d_dot"].to_numpy() == pytest.approx(frame["ratio"].to_numpy() - 1, abs=1e-12)
    assert frame[["d_dot_local", "d_dot_global"]].isna().all(axis=None)
    full = TokenTable(dump, Question(criterion="predictive-kl-full")).to_frame()
    assert full["d_dot"].notna().all()
    assert full["d_dot_local"].isna().all()


def test_a_weight_has_no_direction_and_a_disagreement_set(dump: Dump) -> None:
    question = Question(criterion="icepop", threshold=0.1)
    frame = TokenTable(dump, question).to_frame()
    assert frame[["d_dot", "d_dot_local", "d_dot_global"]].isna().all(axis=None)
    outside = frame[frame.outside]
    kept = outside.ratio.between(0.5, 5.0)
    assert (outside.disagreement == (kept != outside.keep_ratio)).all()
    assert outside.disagreement.any()


def test_rows_without_vectors_have_the_decisions_that_need_none(dump: Dump) -> None:
    frame = TokenTable(dump).to_frame()
    bare = frame[frame["d_pre"].isna()]
    assert len(bare) > 5
    for name in ("clip_higher", "binary_kl", "binary_tv", "predictive_kl_full"):
        assert bare[f"keep_{name}"].notna().all()
    clipped = ((bare.advantage > 0) & (bare.ratio > 1.28)) | (
        (bare.advantage < 0) & (bare.ratio < 0.8)
    )
    assert (bare["keep_clip_higher"].astype(bool) == ~clipped).all()


@pytest.mark.parametrize("protocol", ["shared:none", "own"])
def test_filters_give_the_tokens_that_the_table_counts(dump: Dump, protocol: str) -> None:
    question = Question(protocol=protocol)
    table = rate_table(dump, question)
    arm = "none" if protocol == "shared:none" else "predictive-kl-aggregated"
    for name in ("outside", "disagreement"):
        frame = TokenTable(dump, question, **{name: True}).to_frame()  # type: ignore[arg-type]
        assert frame[name].all()
        mine = frame[frame.arm == arm].groupby("seed").size()
        for seed in table.seeds:
            assert mine.get(seed.seed, 0) == getattr(seed, name)
    assert set(frame.arm) == ({"none"} if arm == "none" else {arm, "ratio"})


def test_seeds_are_selected_and_an_unknown_one_is_refused(dump: Dump) -> None:
    assert set(TokenTable(dump, seeds=[1]).to_frame().seed) == {1}
    with pytest.raises(QuestionError, match=r"no seed 3 in .*its seeds are 0, 1, 4"):
        TokenTable(dump, seeds=[1, 3])


def test_nothing_selected_is_a_table_of_no_rows_with_all_columns(dump: Dump) -> None:
    table = TokenTable(dump, seeds=[4])
    assert table.rows == 0
    frame = table.to_frame()
    assert list(frame.columns) == table.schema.names
    assert not len(frame)
    for form in ("parquet", "csv", "json"):
        assert table.write(io.BytesIO(), form) == 0


def test_three_forms_hold_the_same_values(dump: Dump) -> None:
    table = TokenTable(dump, outside=True)
    written = {}
    for form in ("parquet", "csv", "json"):
        sink = io.BytesIO()
        assert table.write(sink, form) > 10
        written[form] = io.BytesIO(sink.getvalue())
    parquet = pq.read_table(written["parquet"])
    assert parquet.schema.equals(table.schema)
    rows = parquet.to_pylist()
    assert [json.loads(line) for line in written["json"].getvalue().splitlines()] == rows
    options = pyarrow.csv.ConvertOptions(column_types=table.schema, strings_can_be_null=True)
    assert pyarrow.csv.read_csv(written["csv"], convert_options=options).to_pylist() == rows


def test_another_form_is_refused(dump: Dump) -> None:
    with pytest.raises(QuestionError, match="parquet, csv, json, got 'xlsx'"):
        TokenTable(dump).write(io.BytesIO(), "xlsx")


def test_progress_counts_every_row(dump: Dump) -> None:
    seen: list[int] = []
    table = TokenTable(dump, Question(protocol="own"), disagreement=True)
    for _ in table.batches(progress=seen.append):
        pass
    assert sum(seen) == table.rows == 2 * 120
