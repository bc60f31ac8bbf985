"""The ΔD table, token by token, against the independent count."""

from __future__ import annotations

import io
import json
import math
import re
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltad.analysis import TOKEN_COLUMNS, Question, QuestionError, TokenTable, rate_table
from deltad.divergence import TAILS
from deltad.dumps import Dump
from deltad.masks import RULES
from tests.analysis.bruteforce import Token, assert_same, direction, judge_rows, log_ratio_of
from tests.analysis.random_dumps import ARMS, FAR, OWN, dumps, write

COPIED = ("group", "token_id", "advantage", "in_loss", "token", "weight")


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A dump with every optional column, rows without top-K log-probs and an empty seed."""
    return write(
        tmp_path_factory.mktemp("tokens") / "run", rows=60, seeds=(0, 1, 4), empty_seeds=(4,),
        null_vectors=0.2, drift=1.5, ranks=2, parts=1, arms=ARMS,
    )  # fmt: skip


def expected(token: Token, family: str, tail: str, names: tuple[str, str]) -> dict[str, Any]:
    """What a row of the table holds, NaN where it is not known."""
    row, pair = token.row, token.pair
    found = {name: row[name] for name in COPIED if name in row}
    found |= {"d_pre": token.d_pre, "delta_d": token.delta_d}
    found |= {"d_post": token.d_post, "ratio": math.exp(log_ratio_of(row))}
    d_dot = direction(pair, family, tail, row["pre_collision"]) if pair else math.nan
    found |= {"d_dot": d_dot, "outside": token.outside if pair else None}
    for name, weight in token.weight.items():
        found[f"keep_{name.replace('-', '_')}"] = weight > 0
    apart = all(name in token.weight for name in names) and token.outside
    apart = apart and token.kept(names[0]) != token.kept(names[1])
    return {**found, "disagreement": apart if pair else None}


@given(
    dump=dumps(post=False),
    family=st.sampled_from(["kl", "tv"]),
    tail=st.sampled_from(TAILS),
    baseline=st.sampled_from([name for name, each in RULES.items() if each.family is None]),
    recompute=st.booleans(),
)
def test_every_value_is_that_of_the_brute_force(
    dump: dict[str, Any], family: str, tail: str, baseline: str, recompute: bool
) -> None:
    names = (f"predictive-{family}-{tail}", baseline)
    asked = Question(dump["threshold"], family, *names, "shared:ratio")
    rules = [name for name, each in RULES.items() if each.family in (None, family)]
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / "run", **dump)
        table = TokenTable(made, asked, criteria=[*rules, FAR], recompute=recompute)
        lines = {
            (line["seed"], line["step"], line["sequence"], line["position"]): line
            for batch in table.batches()
            for line in batch.to_pylist()
        }
        tokens = judge_rows(
            Path(str(made.path)), "ratio", [*rules, FAR.name], family, dump["threshold"], own=OWN
        )
    for seed, some in tokens.items():
        for token in some:
            line = lines.pop((seed, *token.key))
            assert_same(line, expected(token, family, tail, names), (seed, token.key))
            undecided = set(table.schema.names) - line.keys()
            assert not undecided
            if token.pair is None:
                assert line[f"keep_predictive_{family}_{tail}"] is None
            elif line["d_dot_local"] is not None:
                terms = line["d_dot_local"] + line["d_dot_global"]
                assert terms == pytest.approx(line["d_dot"], rel=1e-9, abs=1e-12)
    assert not lines


def test_columns_are_the_documented_ones_with_a_decision_for_each_criterion(dump: Dump) -> None:
    columns = TokenTable(dump, Question(divergence="tv")).schema.names
    masks = [n for n, each in RULES.items() if each.is_mask and each.family != "kl" and n != "none"]
    documented = [each.name for each in TOKEN_COLUMNS]
    kept = [f"keep_{name.replace('-', '_')}" for name in masks]
    assert columns == [*documented[:-2], *kept, *documented[-2:]]


def test_criteria_whose_columns_are_missing_have_no_decision(tmp_path: Path) -> None:
    made = write(tmp_path / "run", rows=5, ranks=1, parts=1, optional=("full_kl_pre",))
    columns = TokenTable(made).schema.names
    assert not {"keep_predictive_kl_exact", "keep_predictive_kl_full", "token"} & set(columns)
    assert "keep_predictive_kl_uniform" in columns


@pytest.mark.parametrize(
    ("criterion", "known"),
    [("clip-higher", ["ratio"]), ("predictive-kl-full", ["d_dot"]), ("icepop", [])],
)
def test_a_direction_without_terms_has_none(dump: Dump, criterion: str, known: list[str]) -> None:
    frame = TokenTable(dump, Question(criterion=criterion)).to_frame()
    assert frame[["d_dot_local", "d_dot_global"]].isna().all(axis=None)
    assert frame["d_dot"].notna().all() == bool(known)


@pytest.mark.parametrize("protocol", ["shared:none", "own"])
def test_filters_give_the_tokens_that_the_table_counts(dump: Dump, protocol: str) -> None:
    question = Question(protocol=protocol)
    table = rate_table(dump, question)
    arms = ["none"] if protocol == "shared:none" else ["predictive-kl-aggregated", "ratio"]
    seen: list[int] = []
    for name, counted in (("outside", table.outside), ("disagreement", table.disagreement)):
        filtered = TokenTable(dump, question, **{name: True})  # type: ignore[arg-type]
        frame = filtered.to_frame(progress=seen.append)
        assert frame[name].all()
        assert list(frame.arm.unique()) == arms
        assert (frame.arm == arms[0]).sum() == counted.tokens
        assert sum(seen) == filtered.rows == 120 * len(arms)
        seen.clear()


def test_seeds_and_steps_are_selected_and_an_unknown_seed_is_refused(dump: Dump) -> None:
    frame = TokenTable(dump, seeds=[1], steps=[0, 2]).to_frame()
    assert (set(frame.seed), set(frame.step)) == ({1}, {0, 2})
    with pytest.raises(QuestionError, match=r"no seed 3 in .*its seeds are 0, 1, 4"):
        TokenTable(dump, seeds=[1, 3])


def test_every_form_holds_the_same_values(dump: Dump) -> None:
    table = TokenTable(dump, outside=True)
    written = {}
    for form in ("parquet", "csv", "tsv", "json"):
        sink = io.BytesIO()
        assert table.write(sink, form) > 10
        written[form] = io.BytesIO(sink.getvalue())
    parquet = pq.read_table(written["parquet"])
    assert parquet.schema.equals(table.schema)
    rows = parquet.to_pylist()
    assert [json.loads(line) for line in written["json"].getvalue().splitlines()] == rows
    for row in rows:  # a text that a spreadsheet would take for a formula is quoted
        text = row["token"]
        row["token"] = None if not text else re.sub(r"^([=+\-@\t\r])", r"'\1", text)
    options = pyarrow.csv.ConvertOptions(column_types=table.schema, strings_can_be_null=True)
    for form, delimiter in (("csv", ","), ("tsv", "\t")):
        parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        read = pyarrow.csv.read_csv(written[form], parse_options=parse, convert_options=options)
        for found, row in zip(read.to_pylist(), rows, strict=True):
            assert {**found, "token": found["token"] or None} == row
    with pytest.raises(QuestionError, match="parquet, csv, tsv, json, got 'xlsx'"):
        table.write(io.BytesIO(), "xlsx")


def test_nothing_selected_is_a_table_of_no_rows_with_all_columns(dump: Dump) -> None:
    table = TokenTable(dump, seeds=[4])
    assert table.rows == 0
    assert list(table.to_frame().columns) == table.schema.names
    assert all(table.write(io.BytesIO(), form) == 0 for form in ("parquet", "csv", "json"))
    assert "no such row" in table._repr_html_()


def test_a_notebook_shows_the_first_rows_and_how_many_there_are(dump: Dump) -> None:
    table = TokenTable(dump, Question(protocol="shared:none"))
    found = ET.fromstring(table._repr_html_())
    rows = list(found.iter("tr"))
    assert len(rows) == 1 + 10
    assert [each.text for each in rows[0]] == table.schema.names
    assert "120 rows are read in all" in "".join(found.itertext())
    assert repr(table).startswith("<TokenTable of ")
