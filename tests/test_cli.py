"""The commands through their app, and once as the installed script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from deltad.analysis import RATE_COLUMNS
from deltad.analysis.export import PROTOCOL_COLUMNS
from deltad.cli import PLACES, app
from deltad.masks import DEFAULT_THRESHOLD
from tests.dumps.factory import edit, edit_metadata, edit_value, make_dump, part_files

SCRIPT = Path(sys.executable).with_name("deltad")


def deltad(*arguments: object) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def small(path: Path, **options: Any) -> Path:
    """A dump of a few rows, one file a seed."""
    return make_dump(path / "run", **{"rows": 12, "ranks": 1, "parts": 1, **options})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump whose pairs disagree, with rows without vectors."""
    return make_dump(
        tmp_path_factory.mktemp("cli") / "run", rows=150, drift=1.5, seeds=(0, 1, 2), ranks=1,
        parts=1, null_vectors=0.1, arms=("none", "ratio", "predictive-kl-aggregated", "zero-step"),
    )  # fmt: skip


def assert_refused(result: Result, status: int, *words: str) -> None:
    """One error line on standard error that holds some words; no data and no traceback."""
    assert result.exit_code == status, (result.exit_code, result.output)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


GOLDEN_SIDE = {
    "kept": 1,
    "unsafe": 1,
    "contracting": 1,
    "undetermined": 1,
    "unsafe_keep_rate": 1.0,
}
GOLDEN_SUMMARY = {
    "unsafe_keep_rate": 1.0,
    "unsafe_keep_rate_ci95": [1.0, 1.0],
    "contracting_fraction": 1.0,
    "contracting_fraction_ci95": [1.0, 1.0],
}
GOLDEN_BASE = {"tokens": 1, "undetermined": 1, "increase_rate": 1.0}
GOLDEN_POOLED = {
    "criterion": 1.0,
    "baseline": 1.0,
    "difference": 1.0,
    "difference_ci95": [1.0, 1.0],
    "p": 1.0,
    "clusters": 1,
    "degrees": 1,
}
GOLDEN = {
    "format": 1,
    "threshold": 1.0,
    "divergence": "",
    "protocol": "",
    "baseline": "",
    "criterion": "",
    "seeds": [
        {
            "seed": 1,
            "tokens": 1,
            "outside": 1,
            "disagreement": 1,
            "baseline": GOLDEN_SIDE,
            "criterion": GOLDEN_SIDE,
        }
    ],
    "summary": {
        "seeds": 1,
        "bootstrap": {"method": "", "resamples": 1, "seed": 1},
        "base": {"outside": GOLDEN_BASE, "disagreement": GOLDEN_BASE},
        "tokens_per_seed": 1.0,
        "outside_per_seed": 1.0,
        "disagreement_per_seed": 1.0,
        "share_of_sequences": 1.0,
        "weighted": False,
        "baseline": GOLDEN_SUMMARY,
        "criterion": GOLDEN_SUMMARY,
        "paired": {
            "seeds": 1,
            "lower": 1,
            "tied": 1,
            "higher": 1,
            "difference": 1.0,
            "difference_ci95": [1.0, 1.0],
            "sign_test_p": 1.0,
            "wilcoxon_p": 1.0,
            "permutation_p": 1.0,
            "permutation": {"method": "", "flips": 1, "seed": 1},
        },
        "pooled": {
            "method": "",
            "unsafe_keep_rate": GOLDEN_POOLED,
            "contracting_fraction": GOLDEN_POOLED,
        },
    },
}
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
    else:
        # What may be undefined is a number with a fraction: null where it is.
        allowed = {type(golden)} | ({type(None)} if isinstance(golden, float) else set())
        assert type(found) in allowed, (where, found)


def test_json_of_the_table_has_the_documented_shape(run: Path) -> None:
    found = json.loads(deltad("table", run, "--format", "json").stdout)
    assert_shaped(found, GOLDEN)
    assert found["summary"]["bootstrap"] == {
        "method": "bca-expanded",
        "resamples": 10_000,
        "seed": 0,
    }
    assert [seed["seed"] for seed in found["seeds"]] == [0, 1, 2]
    assert found["threshold"] == DEFAULT_THRESHOLD
    assert (found["protocol"], found["baseline"]) == ("shared:none", "ratio")
    assert found["criterion"] == "predictive-kl-aggregated"


def test_undefined_numbers_are_null(tmp_path: Path) -> None:
    path = small(tmp_path, empty_seeds=(0, 1))
    found = json.loads(deltad("table", path, "--format", "json").stdout)
    assert_shaped(found, GOLDEN)
    summary = found["summary"]
    assert summary["criterion"] == {
        "unsafe_keep_rate": None,
        "unsafe_keep_rate_ci95": [None, None],
        "contracting_fraction": None,
        "contracting_fraction_ci95": [None, None],
    }
    assert summary["paired"]["difference_ci95"] == [None, None]
    assert summary["paired"]["sign_test_p"] is None
    assert summary["base"]["outside"] == {
        "tokens": 0,
        "undetermined": 0,
        "increase_rate": None,
    }
    assert deltad("table", path).exit_code == 0


def test_text_stands_on_base_rate_constant_guess_counts_and_the_papers_numbers(run: Path) -> None:
    found = json.loads(deltad("table", run, "--format", "json").stdout)["summary"]
    text = deltad("table", run, "--by-seed").stdout
    for side in ("criterion", "baseline"):
        rate, (low, high) = (found[side][f"unsafe_keep_rate{end}"] for end in ("", "_ci95"))
        assert f"{rate:.3f} [{low:.3f}, {high:.3f}]" in text
        assert f"{found[side]['contracting_fraction']:.3f} [" in text
    base = found["base"]["outside"]["increase_rate"]
    assert f"{base:.3f} (" in text
    assert f"{max(base, 1 - base):.3f}" in text
    paired = found["paired"]
    lower = f"{paired['lower']} / {paired['tied']} / {paired['higher']} of {paired['seeds']} seeds"
    assert lower in text
    for words in ("0.342 / 0.369", "0.651 / 0.629", "38 of 61 lower", "about 1435", "2607.10848"):
        assert words in text
    assert "…" not in text
    assert all(re.search(rf"^ *{seed} +150 ", text, re.MULTILINE) for seed in (0, 1, 2))
    other = deltad("table", run, "--criterion", "clip-higher").stdout
    assert "paper" not in other.lower()


def test_rows_without_vectors_are_told_unless_quiet(run: Path) -> None:
    result = deltad("table", run, "--format", "json")
    count = sum(
        pq.read_table(path).column("topk_ids").null_count
        for path in part_files(run)
        if "arm=none" in str(path)
    )
    assert result.stderr == (
        "note: rows without top-K vectors count as tokens and are never outside; "
        f"there are {count}\n"
    )
    assert deltad("table", run, "--format", "json", "--quiet").stderr == ""


def test_csv_markdown_and_parquet_have_a_row_a_seed(run: Path, tmp_path: Path) -> None:
    expected = json.loads(deltad("table", run, "--format", "json").stdout)["seeds"]
    for ending in ("csv", "parquet", "md"):
        path = tmp_path / f"table.{ending}"
        assert deltad("table", run, "-o", path, "--quiet").exit_code == 0
    csv = pd.read_csv(tmp_path / "table.csv")
    parquet = pd.read_parquet(tmp_path / "table.parquet")
    for frame in (csv, parquet):
        assert list(frame.columns) == list(RATE_COLUMNS)
        for row, seed in zip(frame.to_dict("records"), expected, strict=True):
            assert row["disagreement"] == seed["disagreement"]
            assert row["criterion_unsafe"] == seed["criterion"]["unsafe"]
            assert row["baseline_unsafe_keep_rate"] == seed["baseline"]["unsafe_keep_rate"]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "| " + " | ".join(RATE_COLUMNS) + " |"
    assert len(lines) == 2 + 3


def test_all_protocols_have_a_row_each(run: Path) -> None:
    result = deltad("table", run, "--protocol", "all", "--format", "csv", "--quiet")
    lines = result.stdout.splitlines()
    assert lines[0] == ",".join(PROTOCOL_COLUMNS)
    protocols = ["shared:none", "own", "shared:predictive-kl-aggregated", "shared:ratio"]
    assert [line.split(",")[0] for line in lines[1:]] == protocols
    found = json.loads(deltad("table", run, "--protocol", "all", "--format", "json").stdout)
    assert found["protocol"] == "shared:none"  # what `table` without `--protocol all` prints
    assert found["summary"] == found["protocols"][0]["summary"]
    for entry, protocol in zip(found["protocols"], protocols, strict=True):
        alone = deltad("table", run, "--protocol", protocol, "--format", "json").stdout
        assert entry == json.loads(alone)
    text = deltad("table", run, "--protocol", "all", "--threshold", 0.2).stdout
    assert "shared:ratio" in text
    assert re.search(r"^own: .*threshold 0\.2", text, re.MULTILINE)
    assert "…" not in text


def test_tokens_are_written_as_the_ending_says(run: Path, tmp_path: Path) -> None:
    for ending in ("csv", "jsonl", "parquet"):
        path = tmp_path / f"tokens.{ending}"
        result = deltad("tokens", run, "-o", path, "--disagreement", "--seed", 1, "--seed", 2)
        assert result.exit_code == 0
        assert result.output == ""
    csv, parquet = (
        pd.read_csv(tmp_path / "tokens.csv"),
        pd.read_parquet(tmp_path / "tokens.parquet"),
    )
    lines = (tmp_path / "tokens.jsonl").read_text().splitlines()
    assert len(csv) == len(parquet) == len(lines) > 0
    assert set(parquet.seed) == {1, 2}
    assert parquet.disagreement.all()
    assert csv.delta_d.tolist() == [json.loads(line)["delta_d"] for line in lines]
    printed = deltad("tokens", run, "--disagreement", "--seed", 1, "--seed", 2, "--format", "json")
    assert printed.stdout.splitlines() == lines


def test_figure4_is_written_in_every_format_asked_for(run: Path, tmp_path: Path) -> None:
    files = [tmp_path / "figure.png", tmp_path / "figure.svg"]
    result = deltad("figure4", run, "-o", files[0], "-o", files[1], "--protocol", "own", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "protocol own" in files[1].read_text()


def test_check_says_what_is_in_order(run: Path) -> None:
    result = deltad("check", run)
    assert result.exit_code == 0, result.output
    assert "in order" in result.stdout
    assert "3 seeds" in result.stdout
    found = json.loads(deltad("check", run, "--format", "json").stdout)
    assert found == {"format": 1, "ok": True, "problems": []}


def test_check_lists_every_problem(tmp_path: Path) -> None:
    path = small(tmp_path, arms=("none",))
    first, second = part_files(path)[:2]
    edit_value(first, "advantage", 2, float("nan"))
    edit_value(second, "behavior_logprob", 1, 0.5)
    result = deltad("check", path)
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("error: ") for line in lines)
    assert any(str(first) in line and "row 2" in line and "advantage" in line for line in lines)
    assert any(str(second) in line and "behavior_logprob" in line for line in lines)
    found = deltad("check", path, "--format", "json")
    assert found.exit_code == 1
    problems = json.loads(found.stdout)["problems"]
    assert {problem["path"] for problem in problems} == {str(first), str(second)}


def truncate(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop(column: str) -> Callable[[Path], None]:
    """Leave a column out."""
    return lambda path: edit(path, lambda table: table.drop_columns([column]))


def retype(path: Path) -> None:
    """Make the advantage a double."""

    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("advantage")
        return table.set_column(at, "advantage", table.column(at).cast(pa.float64()))

    edit(path, change)


def spoil(column: str, value: Any, slot: int | None = None) -> Callable[[Path], None]:
    """Put an impossible value into row 3."""
    return lambda path: edit_value(path, column, 3, value, slot)


def corrupt_pages(path: Path) -> None:
    """Overwrite the middle of the data and leave the footer."""
    data = bytearray(path.read_bytes())
    data[40 : len(data) // 3] = b"\xff" * (len(data) // 3 - 40)
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, ""),
    "not Parquet": (lambda path: path.write_text("hello"), ""),
    "empty": (lambda path: path.write_bytes(b""), ""),
    "pages overwritten": (corrupt_pages, ""),
    "missing column": (drop("post_logprob"), "post_logprob"),
    "missing vectors": (drop("topk_post_logprobs"), "topk_post_logprobs"),
    "wrong type": (retype, "advantage"),
    "format 2": (lambda path: edit_metadata(path, format=2), "2"),
    "format missing": (lambda path: edit_metadata(path, drop=["format"]), "format"),
    "another K": (lambda path: edit_metadata(path, top_k=5), "4"),
    "another vocabulary": (lambda path: edit_metadata(path, vocab_size=25), "vocab_size"),
    "another temperature": (lambda path: edit_metadata(path, temperature=0.8), "temperature"),
    "another row count": (lambda path: edit_metadata(path, rows_seen=11), "rows_seen"),
    "NaN": (spoil("advantage", float("nan")), "advantage"),
    "infinite advantage": (spoil("advantage", float("inf")), "advantage"),
    "NULL": (spoil("pre_logprob", None), "pre_logprob"),
    "positive log-prob": (spoil("pre_logprob", 0.3), "pre_logprob"),
    "impossible sampled token": (spoil("behavior_logprob", -float("inf")), "behavior_logprob"),
    "no policy": (spoil("topk_post_logprobs", -float("inf"), 0), "topk_post_logprobs"),
    "id outside the vocabulary": (spoil("token_id", 24), "token_id"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["table", "tokens", "figure4", "check"])
def test_damage_gives_one_sentence_that_names_the_file(
    command: str, damage: str, tmp_path: Path
) -> None:
    path = small(tmp_path, padding=0.0, arms=("none",), rng_seed=3)
    target = part_files(path)[1]
    change, word = DAMAGE[damage]
    change(target)
    options = ["-o", str(tmp_path / "figure.png")] if command == "figure4" else []
    result = deltad(command, path, *options)
    if command == "check":
        assert result.exit_code == 1
        assert result.stdout == ""
        assert any(str(target) in line and word in line for line in result.stderr.splitlines())
    elif command == "tokens" and result.stdout:
        # Rows before the bad one are out already: a stream.
        assert result.exit_code == 1
        assert str(target) in result.stderr
    else:
        assert_refused(result, 1, str(target), word)
    assert "Traceback" not in result.output
    assert not (tmp_path / "figure.png").exists()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", rows=12, ranks=2, parts=2, arms=("none",), seeds=(0,))
    gone = path / "arm=none" / "seed=0" / "part-1-0.parquet"
    gone.unlink()
    assert_refused(deltad("table", path), 1, str(gone))


def test_an_empty_folder_is_no_dump(tmp_path: Path) -> None:
    assert_refused(deltad("table", tmp_path), 1, str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    assert_refused(deltad("table", tmp_path), 1, "notes.txt")
    assert_refused(deltad("table", tmp_path / "notes.txt"), 1, "notes.txt")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--threshold", "-0.1"], "-0.1"),
        (["--threshold", "nan"], "nan"),
        (["--threshold", "much"], "--threshold"),
        (["--divergence", "js"], "js"),
        (["--criterion", "predictiv"], "predictive-kl-aggregated"),
        (["--criterion", "predictive-tv-exact"], "predictive-kl-exact"),
        (["--baseline", "predictive-tv-exact"], "predictive-kl-exact"),
        (["--baseline", "rat"], "clip-higher"),
        (["--protocol", "none"], "shared:"),
        (["--protocol", "shared:sgd"], "arms are none"),
        (["--protocol", "own", "--threshold", "0.3"], "threshold 0.15"),
        (["--format", "xml"], "markdown"),
        (["-o", "table.xlsx", "--format", "xlsx"], "xlsx"),
        (["--bootstrap-seed", "-1"], "--bootstrap-seed"),
        (["--bootstrap-seed", "x"], "--bootstrap-seed"),
        (["--tail", "exact"], "--tail"),
        (["-o", "no/such/folder/table.json"], "no/such/folder"),
        (["again"], "again"),
    ],
)
def test_a_bad_option_exits_2_with_one_line(run: Path, options: list[str], words: str) -> None:
    assert_refused(deltad("table", run, "--quiet", *options), 2, words)


@pytest.mark.parametrize(
    "arguments",
    [
        ("table",),
        ("tables", "run"),
        ("--verbose",),
        ("tokens", "{run}", "--seed", "9"),
        ("tokens", "{run}", "--format", "markdown"),
        ("tokens", "{run}", "-o", "{run}/tokens.csv"),
        ("table", "{run}", "-o", "{run}"),
        ("table", "{run}", "-o", "."),
        ("figure4", "{run}"),
        ("figure4", "{run}", "-o", "figure.jpg"),
        ("check", "{run}", "--format", "csv"),
    ],
)
def test_a_bad_command_line_exits_2_with_one_line(run: Path, arguments: tuple[str, ...]) -> None:
    assert_refused(deltad(*(text.format(run=run) for text in arguments)), 2)


@pytest.mark.parametrize("command", ["table", "tokens", "figure4", "check"])
def test_a_run_that_does_not_exist_exits_2(command: str, tmp_path: Path) -> None:
    options = ["-o", str(tmp_path / "figure.png")] if command == "figure4" else []
    assert_refused(deltad(command, tmp_path / "nowhere", *options), 2, "nowhere does not exist")


def test_a_missing_column_exits_2_and_is_named(tmp_path: Path) -> None:
    path = small(tmp_path, optional=())
    asked = ("--criterion", "predictive-kl-exact")
    assert_refused(deltad("table", path, *asked), 2, "pre_collision")
    assert_refused(deltad("tokens", path, *asked), 2, "pre_collision")


def test_a_failed_command_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = small(tmp_path)
    edit_value(part_files(path)[1], "pre_logprob", 3, 0.3)
    kept = tmp_path / "tokens.csv"
    kept.write_text("mine")
    assert deltad("tokens", path, "-o", kept).exit_code == 1
    assert kept.read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "tokens.csv"]


def test_an_unexpected_error_is_not_hidden(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("deltad.analysis.rate_table", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        CliRunner().invoke(app, ["table", str(run)], catch_exceptions=False)


def test_an_interrupt_is_told_and_exits_130(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("deltad.analysis.rate_table", interrupt)
    assert_refused(deltad("table", run), 130, "interrupted")


def test_help_without_a_command_and_version() -> None:
    result = deltad()
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
    for command in ("tokens", "table", "figure4", "check"):
        assert command in result.stdout
    assert re.fullmatch(r"deltad \d+\.\d+\.\d+\n", deltad("--version").stdout)


def test_the_helps_threshold_is_the_default() -> None:
    assert f"({DEFAULT_THRESHOLD})" in deltad("table", "--help").stdout


def test_the_installed_script_prints_data_alone(run: Path) -> None:
    result = subprocess.run(
        [SCRIPT, "table", run, "--format", "json"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0
    assert json.loads(result.stdout)["protocol"] == "shared:none"
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.process
def test_a_long_error_stays_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / ("y" * 120)
    result = subprocess.run(
        [SCRIPT, "table", path],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "40"},
    )
    assert result.returncode == 2
    assert result.stderr == f"error: {path} does not exist\n"


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = small(tmp_path, rows=3000, row_group_size=3000)
    script = f"set -o pipefail; {SCRIPT} tokens {path} | head -n 1"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith('"arm","seed"')
    assert result.stderr == ""
    assert result.returncode == 141


def test_ratio_that_overflows_is_null_in_json_lines(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", arms=["none"], seeds=[0], ranks=1, parts=1, optional=[])
    file = part_files(path)[0]
    listed = pq.read_table(file, columns=["topk_ids", "token_id"]).to_pylist()
    row = next(at for at, each in enumerate(listed) if each["token_id"] not in each["topk_ids"])
    edit_value(file, "behavior_logprob", row, -2000.0)
    result = deltad("tokens", path, "--format", "json", "--quiet")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[row])["ratio"] is None
    assert deltad("table", path, "--quiet").exit_code == 0


def test_arm_may_be_named_anything(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", arms=["none"], seeds=[0, 1], optional=[])
    (path / "arm=none").rename(path / "arm=[bold]$x^{$y")
    assert "shared:[bold]$x^{$y" in deltad("table", path, "--protocol", "all").stdout
    assert deltad("figure4", path, "-o", tmp_path / "figure.svg").exit_code == 0


def test_check_counts_further_rows_once(tmp_path: Path) -> None:
    path = make_dump(tmp_path / "run", arms=["none"], seeds=[0], ranks=1, parts=1, optional=[])
    file = part_files(path)[0]
    for row in range(13):
        edit_value(file, "advantage", row, float("nan"))
    said = deltad("check", path).stderr
    assert said.count("more") == 1
    assert "more such rows)\n" in said


@pytest.mark.parametrize("name", PLACES)
def test_the_list_says_what_the_commands_own_help_says(name: str) -> None:
    root = typer.main.get_command(app)
    found = root.get_command(root.context_class(root), name)  # type: ignore[attr-defined]
    assert found.name == name
    assert PLACES[name].help == " ".join(found.help.split("\n\n")[0].split())
    assert PLACES[name].help in " ".join(deltad("--help").stdout.split())
