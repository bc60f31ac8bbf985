"""Trainings read, compared and drawn, against numbers reckoned by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from deltad.analysis import QuestionError, TrainingTable, training_table
from deltad.analysis.statistics import bootstrap_mean, holm, sign_test
from deltad.analysis.tables.training import MEASURES
from deltad.curves import CURVES, BatchLine, log_path, options_path, read_lines
from deltad.dumps import DumpError

from .trainings import line, write_training

ACCURACIES = {
    "ratio": [[0.1, 0.3, 0.2], [0.1, 0.2, 0.4], [0.1, 0.1, 0.1], [0.1, 0.4, 0.3]],
    "none": [[0.1, 0.2, 0.1], [0.1, 0.2, 0.3], [0.1, 0.1, 0.1], [0.1, 0.1, 0.4]],
    "predictive-kl-exact": [[0.1, 0.3, 0.3], [0.1, 0.2, 0.5], [0.1, 0.2], [0.1, 0.5, 0.5]],
}


@pytest.fixture
def table(tmp_path: Path) -> TrainingTable:
    return training_table([write_training(tmp_path / "run", ACCURACIES)])


def test_measures_are_the_last_the_highest_and_the_mean_after_the_first(
    table: TrainingTable,
) -> None:
    run = table.of(table.settings[0], "ratio")[0]
    assert [run.measure(name) for name in MEASURES] == pytest.approx([0.2, 0.3, 0.25])
    row = next(row for row in table.rows if row.mask == "ratio")
    assert row.measure("final") == pytest.approx(0.25)
    assert row.measure("best") == pytest.approx((0.3 + 0.4 + 0.1 + 0.4) / 4)
    assert row.ci95("final") == bootstrap_mean([0.2, 0.4, 0.1, 0.3], seed=0)


def test_runs_that_did_not_end_take_no_part_and_are_named(table: TrainingTable) -> None:
    assert [(run.mask, run.seed) for run in table.incomplete] == [("predictive-kl-exact", 2)]
    exact = next(row for row in table.rows if row.mask == "predictive-kl-exact")
    assert [run.seed for run in exact.runs] == [0, 1, 3]
    assert math.isnan(table.incomplete[0].measure("final"))
    text = " ".join(str(table).split())
    assert "left out: predictive-kl-exact seed 2." in text


def test_masks_are_paired_by_seed_with_the_baseline(table: TrainingTable) -> None:
    by_mask = {row.mask: row.paired() for row in table.rows}
    none = by_mask["none"]
    assert (none.lower, none.tied, none.higher) == (2, 1, 1)
    assert none.difference == pytest.approx(-0.025)
    exact = by_mask["predictive-kl-exact"]
    assert (exact.seeds, exact.lower, exact.tied, exact.higher) == (3, 0, 0, 3)
    assert exact.difference == pytest.approx((0.1 + 0.1 + 0.2) / 3)
    assert exact.sign_test_p == sign_test(0, 3) == 0.25
    corrected = table.corrected(table.settings[0])
    assert list(corrected.values()) == holm([none.sign_test_p, 0.25]).tolist()
    assert by_mask["ratio"].seeds == 0


def test_totals_are_quotients_of_sums_over_batches(table: TrainingTable) -> None:
    run = table.of(table.settings[0], "ratio")[0]
    wanted = {
        "reward": 33 / 128, "length": 4.0, "cut_fraction": 6 / 128, "mixed_fraction": 12 / 16,
        "ppo_kl": 3 / 300, "masked_fraction": 10 / 300, "clip_fraction": 14 / 180,
        "outside_fraction": 20 / 300, "disagreement_fraction": 4 / 300,
        "increase_fraction": 8 / 16, "delta_d": -1 / 300, "delta_d_outside": 0.5 / 20,
        "entropy": 100 / 300, "accuracy": 0.6 / 3,
    }  # fmt: skip
    assert set(wanted) == set(CURVES)
    for name, value in wanted.items():
        assert run.total(name) == pytest.approx(value), name


def test_course_has_the_points_that_a_curve_has(table: TrainingTable) -> None:
    setting = table.settings[0]
    steps, values = table.course(setting, "none", "accuracy")
    assert steps.tolist() == [0, 4, 8]
    assert values == pytest.approx(np.array(ACCURACIES["none"]))
    steps, values = table.course(setting, "none", "reward")
    assert steps.tolist() == [0, 4]
    assert values == pytest.approx(np.array([[16 / 64, 17 / 64]] * 4))


def test_columns_say_what_they_hold_and_the_object_has_the_same(table: TrainingTable) -> None:
    columns = table.to_dict()
    assert columns["mask"] == ["none", "ratio", "predictive-kl-exact"]
    assert columns["seeds"] == [4, 4, 3]
    assert columns["final_difference"][0] == pytest.approx(-0.025)
    assert columns["best_higher"] == [0, 0, 2]
    found = table.to_json_object()
    assert found["format"] == 1
    assert found["rows"][2]["final_accuracy"] == columns["final_accuracy"][2]
    assert found["rows"][1]["final_difference"] is None
    assert [run["complete"] for run in found["runs"]].count(False) == 1


def test_batches_have_a_row_a_line(table: TrainingTable) -> None:
    columns = table.batches.to_dict()
    assert len(columns["step"]) == 11 + 12 + 12
    assert set(CURVES) < set(columns)
    rows = table.batches.to_json_object()["batches"]
    assert [row["accuracy"] for row in rows[:3]] == pytest.approx(ACCURACIES["none"][0])
    assert rows[2]["reward"] is None
    assert "predictive-kl-exact" in table.batches.text(wide=True)


def test_several_settings_stand_beside_each_other(tmp_path: Path) -> None:
    first = write_training(tmp_path / "a", {"ratio": ACCURACIES["ratio"]})
    second = write_training(tmp_path / "b", {"ratio": ACCURACIES["none"]}, threshold=0.05)
    third = write_training(tmp_path / "c", {"ratio": ACCURACIES["none"]}, threshold=0.05)
    table = training_table([first, second, third])
    names = [table.name_of(setting) for setting in table.settings]
    assert names[0] == "tiny, fp32, δ = 0.15, K = 20"
    assert names[1:] == [f"tiny, fp32, δ = 0.05, K = 20 ({run})" for run in (second, third)]
    assert [row.measure("final") for row in table.rows] == pytest.approx([0.25, 0.225, 0.225])
    assert all(name in table.text(wide=True) for name in names)


def test_baseline_is_asked_for_or_found(tmp_path: Path) -> None:
    run = write_training(tmp_path / "run", {"none": ACCURACIES["none"]})
    assert training_table([run]).baseline == "none"
    with pytest.raises(QuestionError, match="`baseline` must be a mask that was trained with"):
        training_table([run], baseline="ratio")
    with pytest.raises(QuestionError, match="each once"):
        training_table([run, run])
    with pytest.raises(QuestionError, match="no run has begun"):
        training_table([write_training(tmp_path / "empty", {})])


def test_malformed_logs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="holds no training"):
        training_table([tmp_path])
    run = write_training(tmp_path / "run", {"none": ACCURACIES["none"]})
    path = log_path(run, "none", 1)
    whole = path.read_text()
    path.write_text(whole + '{"mask": "none"')  # half a line: the run goes on
    assert len(training_table([run]).runs) == 4
    path.write_text("{}\n" + whole)
    with pytest.raises(DumpError, match=r"seed=1.jsonl: line 1: .*malformed"):
        training_table([run])
    options_path(run).write_text("[]")
    with pytest.raises(DumpError, match="must hold the options of a training, of format 1"):
        training_table([run])


def test_lines_come_back_from_their_json() -> None:
    made = line("ratio", 3, 1, 0.25)
    assert BatchLine.from_json(made.to_json()) == made
    assert math.isnan(BatchLine("none", 0, 0, 0).values()["reward"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": 1.5}, "`batch` must be a whole number"),
        ({"batch": 7}, "must be of batch 0, found 7"),
        ({"mask": "none"}, "is of none, seed 0"),
        ({"sums": {"reward": float("nan")}}, "`reward` must be finite, found nan"),
        ({"sums": {"reward": 10**400}}, "a line of a training is malformed"),
    ],
)
def test_a_line_that_cannot_be_true_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    line = {"mask": "ratio", "seed": 0, "batch": 0, "step": 0, "sums": {}}
    path = log_path(tmp_path, "ratio", 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**line, **change}) + "\n", encoding="utf-8")
    with pytest.raises(DumpError, match=said):
        list(read_lines(path))
