"""What table, compare and ladder print: the JSON contract, and the same rows in every form."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from deltad.analysis import (
    CALIBRATION_COLUMNS,
    COMPARISON_COLUMNS,
    CONDITION_COLUMNS,
    LADDER_TABLE_COLUMNS,
    POWER_COLUMNS,
    PROTOCOL_COLUMNS,
    RATE_COLUMNS,
    SWEEP_COLUMNS,
    Question,
    compare,
)
from deltad.dumps import Dump
from tests.commands.app import COUNTING, DUMPS, as_json, assert_refused, counted, deltad
from tests.dumps.factory import OPTIONAL, make_dump, part_files

ARMS = ("none", "ratio", "predictive-kl-aggregated", "zero-step")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose criteria disagree, with rows without top-K log-probs."""
    return make_dump(
        tmp_path_factory.mktemp("tables") / "run", rows=150, drift=1.5, seeds=(0, 1, 2), ranks=1,
        parts=1, null_vectors=0.1, arms=ARMS,
    )  # fmt: skip


SIDE = {"kept": 1, "unsafe": 1, "contracting": 1, "undetermined": 1, "unsafe_keep_rate": 1.0}
INTERVAL = [1.0, 1.0]
MEANS = {
    "unsafe_keep_rate": 1.0, "unsafe_keep_rate_ci95": INTERVAL, "contracting_fraction": 1.0,
    "contracting_fraction_ci95": INTERVAL,
}  # fmt: skip
BASE = {"tokens": 1, "undetermined": 1, "increase_rate": 1.0}
POOLED = {
    "criterion": 1.0, "baseline": 1.0, "difference": 1.0, "difference_ci95": INTERVAL, "p": 1.0,
    "clusters": 1, "degrees": 1,
}  # fmt: skip
EFFECT = {
    "kept": 1, "unsafe": 1, "causal_unsafe_keep": 1.0, "sign_accuracy": 1.0,
    "sign_accuracy_ci95": INTERVAL,
}  # fmt: skip
SUMMARY = {
    "seeds": 1,
    "bootstrap": {"method": "", "resamples": 1, "seed": 1},
    "base": {"outside": BASE, "disagreement": BASE},
    "tokens_per_seed": 1.0, "outside_per_seed": 1.0, "disagreement_per_seed": 1.0,
    "share_of_sequences": 1.0, "weighted": False,
    "baseline": MEANS, "criterion": MEANS,
    "paired": {
        "seeds": 1, "lower": 1, "tied": 1, "higher": 1, "difference": 1.0,
        "difference_ci95": INTERVAL, "sign_test_p": 1.0, "wilcoxon_p": 1.0, "permutation_p": 1.0,
        "permutation": {"method": "", "flips": 1, "seed": 1},
    },
    "pooled": {"method": "", "unsafe_keep_rate": POOLED, "contracting_fraction": POOLED},
}  # fmt: skip
GOLDEN: dict[str, Any] = {
    "format": 1, "threshold": 1.0, "divergence": "", "protocol": "", "baseline": "",
    "criterion": "",
    "seeds": [
        {"seed": 1, "tokens": 1, "outside": 1, "disagreement": 1, "baseline": SIDE,
         "criterion": SIDE},
    ],
    "summary": SUMMARY,
}  # fmt: skip
"""Names, nesting, order and types of the object, with values that mean nothing."""


def assert_shaped(found: Any, golden: Any, where: str = "") -> None:
    """The same keys in the same order, lists of such, and values of the same type."""
    if isinstance(golden, dict):
        assert list(found) == list(golden), where
        for key, value in golden.items():
            assert_shaped(found[key], value, f"{where}/{key}")
    elif isinstance(golden, list):
        for entry in found:
            assert_shaped(entry, golden[0], where)
    else:  # what may be undefined is a number with a fraction: null where it is
        allowed = {type(golden)} | ({type(None)} if isinstance(golden, float) else set())
        assert type(found) in allowed, (where, found)


def test_json_of_the_table_has_the_documented_shape() -> None:
    found = as_json("table", DUMPS / "tiny-whole")
    effect = {
        "method": "", "tokens": 1, "undetermined": 1, "disagreements_per_step": 1.0,
        "criterion": EFFECT, "baseline": EFFECT,
    }  # fmt: skip
    assert_shaped(found, {**GOLDEN, "summary": {**SUMMARY, "keep_effect": effect}})
    asked = [found[key] for key in ("threshold", "divergence", "protocol", "baseline", "criterion")]
    assert asked == [0.15, "kl", "shared:none", "ratio", "predictive-kl-aggregated"]
    effect = found["summary"]["keep_effect"]
    kept = [effect[side]["kept"] for side in ("criterion", "baseline")]
    assert (effect["method"], sum(kept)) == ("arms", effect["tokens"] - effect["undetermined"])


def test_undefined_numbers_are_null(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", rows=12, arms=("none",), empty_seeds=(0, 1))
    found = as_json("table", run)
    assert_shaped(found, GOLDEN)
    summary = found["summary"]
    assert summary["base"]["outside"] == {"tokens": 0, "undetermined": 0, "increase_rate": None}
    assert summary["criterion"]["unsafe_keep_rate_ci95"] == [None, None]
    assert summary["paired"]["sign_test_p"] is None
    for name in COUNTING:
        done = counted(name, run)
        if name == "conditions":
            assert_refused(done, 2, "no token outside")
        else:
            assert done.exit_code == 0, done.output
            assert "nan" not in done.stdout


COLUMNS = {
    "table": RATE_COLUMNS, "protocols": PROTOCOL_COLUMNS, "sweep": SWEEP_COLUMNS,
    "conditions": CONDITION_COLUMNS, "power": POWER_COLUMNS, "compare": COMPARISON_COLUMNS,
    "ladder": LADDER_TABLE_COLUMNS, "calibration": CALIBRATION_COLUMNS,
}  # fmt: skip


def plain(value: Any) -> str:
    """A JSON value as a CSV has it."""
    return "" if value is None else str(value)


@pytest.mark.parametrize("name", COUNTING)
def test_every_form_holds_the_same_rows(run: Path, tmp_path: Path, name: str) -> None:
    columns = [each.name for each in COLUMNS[name] if each.name]
    endings = ("csv", "tsv", "md", "parquet", "tex", "html", "json", "txt")
    files = {ending: tmp_path / f"out.{ending}" for ending in endings}
    for file in files.values():
        done = counted(name, run, "-o", file, "--quiet")
        assert (done.exit_code, done.output) == (0, ""), done.output
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert list(rows[0]) == columns
    assert rows == list(csv.DictReader(io.StringIO(files["tsv"].read_text()), delimiter="\t"))
    markdown = files["md"].read_text().splitlines()
    assert markdown[0] == "| " + " | ".join(columns) + " |"
    assert len(markdown) == len(rows) + 2
    frame = pd.read_parquet(files["parquet"])
    assert list(frame.columns) == columns
    assert [plain(each) for each in frame.iloc[:, 0]] == [row[columns[0]] for row in rows]
    assert files["tex"].read_text().count(r"\\") == len(rows) + 1
    assert files["html"].read_text().startswith("<div")
    found = json.loads(files["json"].read_text())
    assert next(iter(found)) == "format"
    text = files["txt"].read_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert len(counted(name, run, "--wide").stdout.splitlines()) <= len(text.splitlines())
    listed = {"sweep": "points", "conditions": "rows", "compare": "criteria"}
    if name in listed:
        assert [{key: plain(each[key]) for key in columns} for each in found[listed[name]]] == rows


@pytest.mark.parametrize("name", COUNTING)
def test_a_figure_is_drawn_of_every_table(run: Path, tmp_path: Path, name: str) -> None:
    done = counted(name, run, "-o", tmp_path / "out.svg", "--quiet")
    if name == "protocols":
        assert done.exit_code == 2
        return
    assert (done.exit_code, done.output) == (0, ""), done.output
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_figure4_is_written_in_every_format_asked_for(run: Path, tmp_path: Path) -> None:
    files = [tmp_path / "figure.png", tmp_path / "figure.svg", tmp_path / "figure.pdf"]
    outputs = [each for file in files for each in ("-o", file)]
    done = deltad("figure4", run, *outputs, "--protocol", "own", "--quiet")
    assert (done.exit_code, done.output) == (0, ""), done.output
    for file, start in zip(files, (b"\x89PNG", b"<?xml", b"%PDF"), strict=True):
        assert file.read_bytes().startswith(start)
    assert "own" in files[1].read_text()


def test_text_says_base_rate_constant_guess_counts_and_the_papers_numbers(run: Path) -> None:
    summary = as_json("table", run)["summary"]
    text = deltad("table", run, "--by-seed", "--wide").stdout
    for side in ("criterion", "baseline"):
        rate, (low, high) = (summary[side][f"unsafe_keep_rate{end}"] for end in ("", "_ci95"))
        assert f"{rate:.3f} [{low:.3f}, {high:.3f}]" in text
    base = summary["base"]["outside"]["increase_rate"]
    assert f"{base:.3f} (" in text
    assert f"{max(base, 1 - base):.3f}" in text
    paired = summary["paired"]
    assert f"{paired['lower']} / {paired['tied']} / {paired['higher']} of" in text
    for words in ("0.342 / 0.369", "0.651 / 0.629", "38 of 61 lower", "2607.10848"):
        assert words in text
    assert all(re.search(rf"^ *{seed} +150 ", text, re.MULTILINE) for seed in (0, 1, 2))
    assert "paper" not in deltad("table", run, "--criterion", "clip-higher").stdout.lower()


def test_tokens_of_unknown_divergence_are_counted_in_the_text(run: Path) -> None:
    files = [path for path in part_files(run) if "arm=none" in str(path)]
    unknown = sum(pq.read_table(file).column("topk_ids").null_count for file in files)
    assert unknown > 0
    for name in ("table", "compare", "sweep"):
        assert re.search(rf"\b{unknown}\b.*without top-K", flat(counted(name, run).stdout))


def flat(text: str) -> str:
    """A text in one line."""
    return " ".join(text.split())


def test_all_protocols_are_the_tables_of_each(run: Path) -> None:
    found = as_json("table", run, "--protocol", "all", "--threshold", 0.15)
    protocols = ["shared:none", "own", "shared:predictive-kl-aggregated", "shared:ratio"]
    assert found["protocol"] == "shared:none"  # what `table` without `--protocol all` prints
    assert found["summary"] == found["protocols"][0]["summary"]
    for entry, protocol in zip(found["protocols"], protocols, strict=True):
        assert entry == as_json("table", run, "--protocol", protocol)
    text = deltad("table", run, "--protocol", "all", "--threshold", 0.2).stdout
    assert re.search(r"own is left out: .* threshold 0\.2", flat(text))


def test_options_become_the_question(run: Path) -> None:
    found = as_json(
        "compare", run, "--criteria", "binary-kl,drpo", "--baseline", "clip-higher",
        "--threshold", 0.2, "--bootstrap-seed", 4,
    )  # fmt: skip
    asked = Question(threshold=0.2, baseline="clip-higher")
    expected = compare(Dump.open(run), asked, ["binary-kl", "drpo"], bootstrap_seed=4)
    assert found == expected.to_json_object()
    assert [row["criterion"] for row in found["criteria"]] == ["clip-higher", "binary-kl", "drpo"]
    found = as_json("table", run, "--power", "--points", "30", "--goal", 0.7, "--level", 0.1)
    assert (found["power"], found["level"]) == (0.7, 0.1)
    assert {row["difference"] for row in found["rows"]} == {0.3}
    assert [each["value"] for each in as_json("table", run, "--over", "top-k")["points"]][-1] == 4
    assert as_json("table", run, "--recompute") == as_json("table", run)


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_by_default_all_criteria_of_the_divergence_are_compared(run: Path, divergence: str) -> None:
    found = as_json("compare", run, "--divergence", divergence)
    names = [row["criterion"] for row in found["criteria"]]
    assert names[0] == "ratio"
    assert {f"predictive-{divergence}-full", "icepop", "binary-kl", "binary-tv"} <= {*names}
    assert {name.split("-")[1] for name in names if name.startswith("predictive")} == {divergence}
    text = deltad("compare", run, "--criteria", "icepop,tis", "--agreement").stdout
    assert len(text) > len(deltad("compare", run, "--criteria", "icepop,tis").stdout)


def test_what_cannot_be_answered_is_noted(tmp_path: Path) -> None:
    optional = [name for name in OPTIONAL if "linear" not in name]
    thin = make_dump(
        tmp_path / "run", arms=("none",), stored=("kl", 0.1), rows=40, optional=optional
    )
    asked = ("table", thin, "--over", "threshold", "--values", "0.05,0.2")
    found = deltad(*asked, "--format", "csv")
    assert found.exit_code == 0
    assert len(found.stdout.splitlines()) == 2
    assert found.stderr.startswith("note: 0.05 is left out: ")
    assert deltad(*asked, "--format", "csv", "--quiet").stderr == ""
    assert "0.05" in deltad(*asked).stdout
    assert "own gradient" in deltad("ladder", thin).stdout


def test_tokens_are_written_as_the_ending_says(run: Path, tmp_path: Path) -> None:
    asked = ("--disagreement", "--seed", 1, "--seed", 2)
    for ending in ("csv", "jsonl", "parquet"):
        done = deltad("tokens", run, "-o", tmp_path / f"tokens.{ending}", *asked)
        assert (done.exit_code, done.output) == (0, "")
    frame = pd.read_parquet(tmp_path / "tokens.parquet")
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    delta = pd.read_csv(tmp_path / "tokens.csv").delta_d.tolist()
    assert delta == [json.loads(line)["delta_d"] for line in lines] == frame.delta_d.tolist()
    assert set(frame.seed) == {1, 2}
    assert frame.disagreement.all()
    assert deltad("tokens", run, *asked, "--format", "json").stdout.splitlines() == lines
