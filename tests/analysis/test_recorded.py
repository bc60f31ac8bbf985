"""Counting from recorded D and Ḋ gives what counting from vectors gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.shaped import shaped_rows
from deltad.analysis import calibrate, compare, condition_table, protocol_table, rate_table, sweep
from deltad.analysis.kernel import count_arms
from deltad.analysis.question import Question, QuestionError, decider
from deltad.analysis.recorded import recorded_columns
from deltad.cli import app
from deltad.dumps import Dump, DumpError, DumpWriter, Metadata, Near
from deltad.masks import CRITERIA
from deltad.weights import WEIGHTS
from tests.analysis.test_blocks import assert_equal
from tests.dumps.factory import OPTIONAL, edit_metadata, edit_value, make_dump, part_files

ALLOWED = {
    "none", "ratio", "clip-higher", "predictive-kl-aggregated", "predictive-kl-uniform",
    "predictive-kl-exact", "predictive-kl-full", "icepop", "mis", "tis", "cispo", "drpo",
}  # fmt: skip


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    run = tmp_path_factory.mktemp("recorded") / "run"
    return Dump.open(
        make_dump(
            run, derived=True, null_vectors=0.1, rows=150, drift=1.2,
            optional=[*OPTIONAL, *DERIVED_NAMES], arms=("none", "ratio", "zero-step"),
        )
    )  # fmt: skip


DERIVED_NAMES = (
    "d_pre", "d_post", "d_dot_aggregated", "d_dot_uniform", "d_dot_exact", "d_dot_local",
    "sampled_rank",
)  # fmt: skip


def test_criteria_that_need_no_vectors_are_these(dump: Dump) -> None:
    part, region = dump.parts[0], Question()
    found = {
        name
        for name in WEIGHTS
        if recorded_columns(part, region, [decider(name)]) is not None
        and (name not in CRITERIA or CRITERIA[name].family in (None, "kl"))
    }
    assert found == ALLOWED
    assert recorded_columns(part, Question(divergence="tv"), [decider("ratio")]) is None
    columns = recorded_columns(part, region, [decider("predictive-kl-uniform")])
    assert columns is not None
    assert not any(name.startswith("topk") for name in columns)
    assert {"d_pre", "d_post", "d_dot_uniform"} <= set(columns)


@pytest.mark.parametrize("name", sorted(ALLOWED))
@pytest.mark.parametrize("threshold", [0.05])
def test_counts_are_those_of_the_vectors(dump: Dump, name: str, threshold: float) -> None:
    question = Question(threshold=threshold, criterion=name, baseline="ratio")
    ours = count_arms(dump, question, dump.arms)
    assert_equal(ours, count_arms(dump, question, dump.arms, recompute=True))
    assert_equal(ours, count_arms(dump, question, dump.arms, plain=True))
    assert any(each.without_vectors for each in ours.values())


def test_every_result_is_that_of_the_vectors(dump: Dump) -> None:
    question = Question(threshold=0.1, protocol="shared:none")
    criteria = ["clip-higher", "predictive-kl-exact", "drpo", "predictive-kl-full"]
    options: dict[str, Any] = {"recompute": True}
    for make in (
        lambda **more: rate_table(dump, question, **more),
        lambda **more: protocol_table(dump, replace(question, protocol=""), **more),
        lambda **more: compare(dump, question, criteria, **more),
        lambda **more: sweep(dump, question, **more),
        lambda **more: sweep(dump, question, over="protocol", **more),
        lambda **more: sweep(dump, question, over="top-k", **more),
        lambda **more: calibrate(dump, question, **more),
        lambda **more: condition_table(dump, question, ["divergence", "ratio", "state"], **more),
        lambda **more: condition_table(dump, question, ["tail"], **more),
    ):
        assert make().to_json_object() == make(**options).to_json_object()


def test_recorded_values_are_what_is_counted_unless_vectors_are_asked_for(
    dump: Dump, tmp_path: Path
) -> None:
    run = make_dump(
        tmp_path / "run", derived=True, arms=("none",), seeds=(0,), ranks=1, parts=1,
        optional=[*OPTIONAL, *DERIVED_NAMES],
    )  # fmt: skip
    before = rate_table(Dump.open(run))
    inside = int(
        np.flatnonzero(next(Dump.open(run).batches("none", 0, columns=["d_pre"]))["d_pre"] < 0.1)[0]
    )
    edit_value(part_files(run)[0], "d_pre", inside, 0.9)
    after = rate_table(Dump.open(run))
    assert after.outside.tokens == before.outside.tokens + 1
    assert rate_table(Dump.open(run), recompute=True).outside == before.outside
    said = [
        CliRunner().invoke(app, ["table", str(run), "--format", "json", "--quiet", *options])
        for options in ((), ("--recompute",))
    ]
    outside = [json.loads(each.stdout)["seeds"][0]["outside"] for each in said]
    assert outside == [after.outside.tokens, before.outside.tokens]


def test_another_version_of_the_definitions_is_not_used(dump: Dump, tmp_path: Path) -> None:
    run = make_dump(
        tmp_path / "run", derived=True, arms=("none",), seeds=(0,), ranks=1, parts=1,
        optional=[*OPTIONAL, *DERIVED_NAMES],
    )  # fmt: skip
    edit_metadata(part_files(run)[0], derived={"version": 2, "divergence": "kl"})
    part = Dump.open(run).parts[0]
    assert recorded_columns(part, Question(), [decider("ratio")]) is None


def test_a_value_that_is_missing_outside_is_refused(tmp_path: Path) -> None:
    run = make_dump(
        tmp_path / "run", derived=True, arms=("none",), seeds=(0,), ranks=1, parts=1,
        optional=[*OPTIONAL, *DERIVED_NAMES],
    )  # fmt: skip
    d_pre = next(Dump.open(run).batches("none", 0, columns=["d_pre"]))["d_pre"]
    row = int(np.flatnonzero(d_pre > 0.2)[0])
    edit_value(part_files(run)[0], "d_dot_aggregated", row, None)
    with pytest.raises(DumpError, match=rf"row {row}, column `d_dot_aggregated`: must be there"):
        rate_table(Dump.open(run))


def test_vectors_near_the_region_alone_are_enough(tmp_path: Path) -> None:
    metadata = Metadata(top_k=20, vocab_size=151_936)
    rows = shaped_rows(6_000, 0)
    tables = {}
    rules: dict[str, Near | Literal["all"]] = {"all": "all", "near": Near(0.01, sample=0.02)}
    for name, vectors in rules.items():
        run = tmp_path / name
        with DumpWriter(run, arm="none", seed=0, metadata=metadata, vectors=vectors) as writer:
            writer.append(rows)
        dump = Dump.open(run)
        for recompute in (False, True):
            tables[name, recompute] = rate_table(dump, recompute=recompute)
    first = tables["all", False].to_json_object()
    assert first["summary"]["base"]["outside"]["tokens"] > 20
    for table in tables.values():
        assert table.to_json_object() == first
        assert table.without_vectors == 0
    near = Dump.open(tmp_path / "near")
    with pytest.raises(QuestionError, match="keeps vectors only where"):
        rate_table(near, Question(threshold=0.005))
    criteria = ["clip-higher", "predictive-kl-uniform"]
    assert (
        compare(near, criteria=criteria).to_json_object()
        == compare(near, criteria=criteria, recompute=True).to_json_object()
        == compare(Dump.open(tmp_path / "all"), criteria=criteria).to_json_object()
    )
