"""The table of steps agrees with the table of rates, and draws what it holds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis.question import Question
from deltad.analysis.result import to_json
from deltad.analysis.tables.rates import rate_table
from deltad.analysis.tables.steps import BLOCKS, SHOWN, StepTable, sparkline
from deltad.dumps import Dump
from deltad.steps import StepQuestion, StepScalars, steps_path
from tests.dumps.factory import OPTIONAL, Columns, edit, make_dump, part_files

DATA = Path(__file__).parents[2] / "data_dumps"
ARMS = ("none", "ratio", "predictive-kl-aggregated")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch") / "run"
    return make_dump(folder, arms=ARMS, rows=120, drift=1.5, ranks=1, parts=1)


@pytest.fixture(scope="module")
def table(run: Path) -> StepTable:
    return StepTable.of(run, StepQuestion(threshold=0.05))


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("smollm2-whole", "kl"),
        ("smollm2-whole", "tv"),
        pytest.param("tiny-whole", "kl", marks=pytest.mark.slow),
        pytest.param("smollm2", "kl", marks=pytest.mark.slow),
        pytest.param("tiny", "kl", marks=pytest.mark.slow),
    ],
)
def test_totals_are_those_of_the_rate_table(name: str, divergence: str) -> None:
    dump = Dump.open(DATA / name)
    table = StepTable.of(DATA / name, StepQuestion(divergence=divergence))
    assert not table.problems
    for arm in ARMS:
        rates = rate_table(dump, Question(divergence=divergence, protocol=f"shared:{arm}")).pair
        total = table.total(arm)
        assert total["seeds"] == len(rates.seeds)
        assert total["outside"] == rates.outside.tokens
        assert total["outside_increase"] == rates.outside.increase
        assert total["disagreement"] == rates.disagreement.tokens
        for side in ("criterion", "baseline"):
            for count in ("kept", "unsafe", "contracting", "determined", "undetermined"):
                assert total[f"{side}_{count}"] == getattr(rates.side(side), count)
        whole = name.endswith("whole")
        assert total.get("tokens") == (rates.tokens if whole else None)


@pytest.mark.parametrize(
    "options",
    [
        {"null_vectors": 0.3, "ranks": 2, "parts": 2},
        {"seeds": (-1, 0, 7), "empty_seeds": (7,), "optional": ()},
        {"top_k": 30, "vocab_size": 24},
        {"drift": 0.0, "top_k": 1},
        {"stored": ("kl", 0.02)},
        {"stored": ("tv", 0.02), "divergence": "tv", "arms": ("none", "ratio")},
    ],
)
def test_totals_are_those_of_the_rate_table_on_odd_dumps(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    divergence = options.get("divergence", "kl")
    run = make_dump(tmp_path / "run", **{"drift": 1.5, "rows": 40, **options})
    table = StepTable.of(run, StepQuestion(threshold=0.05, divergence=divergence))
    assert not table.problems
    table.text()
    to_json(table.to_json_object())
    question = Question(threshold=0.05, divergence=divergence, protocol="shared:none")
    rates = rate_table(Dump.open(run), question).pair
    total = table.total("none")
    assert total["outside"] == rates.outside.tokens
    assert total["disagreement_increase"] == rates.disagreement.increase
    assert total["criterion_unsafe"] == rates.criterion.unsafe
    assert total["baseline_contracting"] == rates.baseline.contracting
    assert total["criterion_undetermined"] == rates.criterion.undetermined


def test_columns_have_a_row_a_step(table: StepTable) -> None:
    columns = table.to_dict()
    assert {len(values) for values in columns.values()} == {len(table.steps)}
    keys = list(zip(columns["arm"], columns["seed"], columns["step"], strict=True))
    assert keys == sorted(set(keys))
    for at, step in enumerate(table.steps):
        assert columns["outside"][at] == step.counts["outside"]
        assert columns["masked/ratio"][at] == step.masked["ratio"]
    assert set(SHOWN) <= set(columns)


def test_json_has_the_newest_step_of_every_arm_and_seed(table: StepTable) -> None:
    found = json.loads(to_json(table.to_json_object()))
    assert {(each["arm"], each["seed"]) for each in found["newest"]} == {
        (arm, seed) for arm in ARMS for seed in (0, 1)
    }
    for each in found["newest"]:
        newest = table.courses[each["arm"], each["seed"]][-1]
        assert each["step"] == newest.step == 5
        assert each["scalars"] == newest.scalars()
        assert each["threshold"] == 0.05
    assert [each["arm"] for each in found["totals"]] == sorted(ARMS)
    assert found["problems"] == []


def test_text_shows_totals_newest_steps_and_courses(table: StepTable) -> None:
    text = table.text(wide=True)
    for arm in ARMS:
        total = table.total(arm)
        kept = f"{total['criterion_unsafe']:.0f} / {total['criterion_determined']:.0f}"
        assert any(line.startswith(arm) and kept in line for line in text.splitlines())
    assert "predictive-kl-aggregated against ratio · outside: top-K KL > 0.05 nats" in text
    assert any(block in text for block in BLOCKS)
    one = StepTable(table.run, table.steps, shown=("kl",), places=1)
    assert len(one.text(wide=True).splitlines()) < len(text.splitlines())
    assert "k3_kl" not in one.text(wide=True)


def test_courses_are_as_wide_as_there_is_room(table: StepTable) -> None:
    def blocks(width: int) -> int:
        text = StepTable(table.run, table.steps, shown=("kl",), width=width).text(wide=True)
        (line,) = (line for line in text.splitlines() if line.startswith("kl "))
        return sum(line.count(block) for block in BLOCKS)

    assert blocks(60) == blocks(400) == 3 * 6  # six steps and at least six blocks an arm
    many = StepTable(table.run, [replace(table.steps[0], step=n) for n in range(99)], ("kl",))
    lines = [len(replace(many, width=width).text(wide=True)) for width in (60, 75, 400)]
    assert lines == sorted(set(lines))


def test_thinned_rows_are_said_to_be_so(tmp_path: Path) -> None:
    table = StepTable.of(make_dump(tmp_path / "run", stored=("kl", 0.1)))
    assert "Only tokens outside are stored" in table.text(wide=True)
    assert "tokens" not in table.total("none")


def test_rates_leave_undetermined_tokens_out_as_the_rate_table_does(tmp_path: Path) -> None:
    def bound(arm: str, seed: int, columns: Columns) -> None:
        columns["delta_d_noise"] = np.full(len(columns["step"]), 0.05)

    names = [name for name in OPTIONAL if name != "weight"]
    run = make_dump(tmp_path / "run", rows=150, drift=1.5, change=bound, optional=names)
    total, rates = StepTable.of(run).total("none"), rate_table(Dump.open(run)).pair
    assert total["criterion_undetermined"] == rates.criterion.undetermined != 0
    pooled = rates.criterion.increases
    assert total["criterion_unsafe_keep_rate"] == pooled.part / pooled.whole
    assert total["outside_increase_rate"] == rates.outside.increase_rate
    plain = make_dump(tmp_path / "plain", rows=150, drift=1.5, optional=())
    assert (
        total["criterion_unsafe_keep_rate"]
        != StepTable.of(plain).total("none")["criterion_unsafe_keep_rate"]
    )


def test_a_dump_without_the_policy_after_the_step_has_the_numbers_that_need_none(
    tmp_path: Path,
) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), rows=80, drift=1.5)
    whole = StepTable.of(run)
    for part in part_files(run):
        edit(part, lambda found: found.drop_columns(
            [name for name in found.column_names if "post" in name]))  # fmt: skip
    table = StepTable.of(run)
    assert not table.problems
    for step, known in zip(table.steps, whole.steps, strict=True):
        assert step.masked == known.masked
        assert step.d_pre == known.d_pre
        scalars = step.scalars()
        assert {n: v for n, v in known.scalars().items() if n in scalars} == scalars
        for name in ("increase", "increase_rate", "d_post_p50", "delta_d_mean", "criterion_unsafe"):
            assert f"deltad/{name}" not in scalars
    total = table.total("none")
    assert total["outside"] == whole.total("none")["outside"]
    assert "outside_increase_rate" not in total
    assert "– / –" in table.text(wide=True)


def test_text_of_files_cannot_move_the_cursor(tmp_path: Path) -> None:
    step = StepScalars("actual", 0, 1, counts={"tokens": 4}).to_json_object()
    path = steps_path(tmp_path, "actual", 0, 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**step, "arm": "a\x1b[2J"}) + '\n{"format": "\\u001b[2J"}\n')
    table = StepTable.of(tmp_path)
    assert len(table.problems) == 1
    assert "\x1b" not in table.text() + "".join(table.problems.values())


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    assert "no step is complete yet" in StepTable.of(tmp_path).text(wide=True)
    assert StepTable.of(tmp_path).to_json_object()["newest"] == []


def test_a_sparkline_is_as_high_as_its_numbers() -> None:
    assert sparkline([0, 7, 0], 10) == "▁█▁"
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([math.nan, 1, 2], 10) == " ▁█"
    assert sparkline([], 10) == ""
    assert sparkline([math.nan], 10) == " "
    assert sparkline([0, 0, 1, 1, 2, 2], 3) == "▁▅█"
    assert len(sparkline(list(range(1000)), 12)) == 12
    assert sparkline(list(range(100)), 8) == BLOCKS


def test_unlike_weights_are_said_to_count_once(tmp_path: Path) -> None:
    bare = [name for name in OPTIONAL if name != "weight"]
    for optional, unlike in ((("weight",), True), (bare, False)):
        run = make_dump(tmp_path / str(unlike), rows=60, optional=optional, ranks=1, parts=1)
        table = StepTable.of(run)
        assert table.to_json_object()["unweighted"] is unlike
        assert ("each counts once here" in str(table)) is unlike
