"""What holds of every command: help, exit statuses, one error line, refusals before any work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from deltad.cli import COMMANDS, app
from deltad.masks import DEFAULT_THRESHOLD
from tests.commands.app import COUNTING, DUMPS, SCRIPT, assert_refused, counted, deltad
from tests.dumps.factory import edit, edit_metadata, edit_value, make_dump, part_files, write_table

READING = (*COUNTING, "tokens", "figure4", "doctor", "view", "check")
"""What reads the rows of a dump."""


def small(path: Path, **options: Any) -> Path:
    """A dump of a few rows, one file per seed."""
    return make_dump(path / "run", **{"rows": 12, "ranks": 1, "parts": 1, **options})


def read(name: str, run: object, folder: Path, *options: object) -> Any:
    """Run one of `READING`, what it writes going into a folder."""
    if name in COUNTING:
        return counted(name, run, *options)
    files = {"figure4": "figure.png", "view": "view.html"}
    output = ("-o", folder / files[name]) if name in files else ()
    return deltad(name, run, *output, *options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of three arms."""
    return make_dump(
        tmp_path_factory.mktemp("cli") / "run", rows=60, drift=1.5, seeds=(0, 1, 2), ranks=1,
        parts=1,
    )  # fmt: skip


def commands() -> Iterator[tuple[str, ...]]:
    """Every command, those of a group too."""
    for name in COMMANDS:
        if name in ("record", "train"):
            yield from ((name, recipe) for recipe in ("tiny", "smollm2"))
        else:
            yield (name,)


@pytest.mark.parametrize("name", list(commands()), ids=" ".join)
def test_help_fits_80_columns_and_ends_with_an_example(
    name: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    narrow = deltad(*name, "--help").stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert "<bool>" not in narrow
    monkeypatch.setenv("COLUMNS", "4000")
    wide = deltad(*name, "--help").stdout
    whole = narrow.replace("-\n", "-")  # a line may end after a hyphen
    assert {*whole.split()} >= {*wide.split()} - {*narrow.split()}
    assert re.search(rf"^  Example: deltad {' '.join(name)} ", wide, flags=re.MULTILINE)


def example_of(*name: str) -> list[str]:
    """The words of the example in a command's help."""
    shown = " ".join(deltad(*name, "--help").stdout.partition("Example: deltad ")[2].split())
    return shlex.split(shown)


@pytest.mark.parametrize(
    "name", [each for each in commands() if each[0] not in ("record", "reproduce")], ids=" ".join,
)  # fmt: skip
def test_the_example_in_the_help_runs(
    name: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in ("data_dumps", "data_training", "examples"):
        (tmp_path / data).symlink_to(DUMPS.parent / data)
    monkeypatch.chdir(tmp_path)
    done = deltad(*example_of(*name))
    assert done.exit_code == 0, done.output
    assert done.stdout or list(tmp_path.glob("*.*"))


@pytest.mark.parametrize(
    "name", [("record", "tiny"), ("record", "smollm2"), ("reproduce",)], ids=" ".join
)
def test_the_example_of_what_takes_long_is_parsed(
    name: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command: Any = typer.main.get_command(app)
    for each in name:
        command = command.get_command(command.context_class(command), each)
    arguments = example_of(*name)
    assert command.make_context(name[-1], arguments[len(name) :]).params


def test_the_list_of_commands_shows_their_first_sentences() -> None:
    shown = " ".join(deltad("--help").stdout.split())
    assert deltad().stdout.split() == shown.split()
    for name, command in COMMANDS.items():
        assert f"{name} {command.summary}" in shown
        assert " ".join(deltad(name, "--help").stdout.split()).count(command.summary) == 1
    assert re.fullmatch(r"deltad \d+\.\d+\.\d+\n", deltad("--version").stdout)
    assert f"({DEFAULT_THRESHOLD})" in deltad("table", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tabel", "{run}"), "'table'"),
        (("record", "tinny", "x"), "'tiny'"),
        (("table", "{run}", "--threshhold", "1"), "--threshold"),
        (("table", "{run}", "--criterion", "ratoi"), "did you mean ratio?"),
        (("table", "{run}", "--criterion", "predictiv"), "predictive-kl-aggregated"),
        (("table", "{run}", "--criterion", "predictive-tv-exact"), "predictive-kl-exact"),
        (("table", "{run}", "--threshold", "-0.1"), "-0.1"),
        (("table", "{run}", "--threshold", "nan"), "nan"),
        (("table", "{run}", "--threshold", "much"), "--threshold"),
        (("table", "{run}", "--divergence", "js"), "must be one of kl, tv"),
        (("table", "{run}", "--protocol", "none"), "`own` or `shared:`"),
        (("table", "{run}", "--protocol", "shared:sgd"), "no arm 'sgd'"),
        (("table", "{run}", "--protocol", "own", "--threshold", "0.3"), "threshold 0.15"),
        (("table", "{run}", "--protocol", "all", "--by", "ratio"), "`--protocol all`"),
        (("table", "{run}", "--over", "time"), "threshold, top-k, protocol"),
        (("table", "{run}", "--over", "top-k", "--values", "99"), "K = 4, got '99'"),
        (("table", "{run}", "--over", "threshold", "--threshold", "1"), "use `--values`"),
        (("table", "{run}", "--over", "threshold", "--by", "ratio"), "give one of"),
        (("table", "{run}", "--values", "1"), "goes with `--over`"),
        (("table", "{run}", "--bins", "2"), "goes with `--by`"),
        (("table", "{run}", "--goal", "0.9"), "goes with `--power`"),
        (("table", "{run}", "--power", "--points", "1,x"), "`--points` must be numbers"),
        (("table", "{run}", "--power", "--points", "0"), "points"),
        (("table", "{run}", "--power", "--goal", "2"), "power"),
        (("table", "{run}", "--power", "--level", "1e-300"), "level"),
        (("table", "{run}", "--by", "colour"), "choose one of advantage"),
        (("table", "{run}", "--by", "ratio", "--bins", "0"), "--bins"),
        (("table", "{run}", "--bootstrap-seed", "-1"), "--bootstrap-seed"),
        (("table", "{run}", "--on", "spark"), "local, ray"),
        (("table", "{run}", "--address", "auto"), "`--on ray`"),
        (("table", "{run}", "{run}"), "one folder"),
        (("table",), "RUN"),
        (("compare", "{run}", "--criteria", "ratio,,icepop"), "single commas"),
        (("compare", "{run}", "--criteria", "no_file.py:rule"), "no_file.py"),
        (("ladder", "{run}", "--protocol", "own"), "follows one update"),
        (("ladder", "{run}", "--bins", "2"), "goes with `--calibration`"),
        (("tokens", "{run}", "--seed", "9"), "9"),
        (("doctor", "{run}", "--seed", "9"), "9"),
        (("view", "{run}", "--seed", "9", "-o", "{free}.html"), "9"),
        (("view", "{run}", "--tokens", "0"), "--tokens"),
        (("watch", "{run}", "--interval", "0"), "--interval"),
        (("watch", __file__), "is no folder"),
        (("figure4", "{run}"), "--output"),
        (("--verbose",), "--verbose"),
    ],
)  # fmt: skip
def test_a_bad_option_exits_2_with_one_line(
    run: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    free = tmp_path / "free"
    assert_refused(deltad(*(each.format(run=run, free=free) for each in arguments)), 2, words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*READING, "watch"])
def test_an_output_that_cannot_be_is_refused_before_any_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*arguments: object) -> None:
        raise AssertionError("the dump was opened")

    monkeypatch.setattr("deltad.dumps.Dump.open", touched)
    run = tmp_path / "run"
    run.mkdir()
    before = ("-o", tmp_path / "fine.png") if name == "figure4" else ()
    outputs: dict[object, str] = {
        tmp_path / "out.xlsx": "must end in one of",
        tmp_path / "out": "must end in one of",
        run / "out.html": "",
        run / "out.png": "",
        tmp_path / "no" / "out.png": "",
    }
    command = [name] if name not in COUNTING else [*COUNTING[name]]
    for output, words in outputs.items() if name != "check" else ():
        done = deltad(command[0], run, *command[1:], *before, "-o", output)
        assert_refused(done, 2, words)
    if name not in ("figure4", "view"):
        done = deltad(command[0], run, *command[1:], "--format", "xml")
        assert_refused(done, 2, "`--format` must be one of")
    assert not list(run.iterdir())
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", [*READING, "watch"])
def test_a_run_that_does_not_exist_exits_2(name: str, tmp_path: Path) -> None:
    assert_refused(read(name, tmp_path / "nowhere", tmp_path), 2, "nowhere does not exist")


def test_what_is_no_dump_exits_1(tmp_path: Path) -> None:
    assert_refused(deltad("table", tmp_path), 1, str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    assert_refused(deltad("table", tmp_path), 1, "notes.txt")
    assert_refused(deltad("table", tmp_path / "notes.txt"), 1, "notes.txt")


def corrupt_pages(path: Path) -> None:
    """Overwrite the middle of the data and leave the footer."""
    data = bytearray(path.read_bytes())
    data[40 : len(data) // 3] = b"\xff" * (len(data) // 3 - 40)
    path.write_bytes(bytes(data))


def retype(table: pa.Table) -> pa.Table:
    """Make the advantage a text."""
    at = table.schema.get_field_index("advantage")
    return table.set_column(at, "advantage", table.column(at).cast(pa.string()))


def pipe(path: Path) -> None:
    """Put a named pipe in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def deep(path: Path) -> None:
    """Nest the metadata deeper than Python's own reader follows."""
    write_table(path, pq.read_table(path), '{"a":' * 10**5 + "1" + "}" * 10**5)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:400]), ""),
    "empty": (lambda path: path.write_bytes(b""), ""),
    "a named pipe": (pipe, ""),
    "pages overwritten": (corrupt_pages, ""),
    "missing column": (
        lambda path: edit(path, lambda table: table.drop_columns(["post_logprob"])), "post_logprob",
    ),
    "wrong type": (lambda path: edit(path, retype), "advantage"),
    "format 2": (lambda path: edit_metadata(path, format=2), "2"),
    "another temperature": (lambda path: edit_metadata(path, temperature=0.8), "temperature"),
    "deep JSON": (deep, ""),
    "NaN": (lambda path: edit_value(path, "advantage", 3, float("nan")), "advantage"),
    "NULL": (lambda path: edit_value(path, "pre_logprob", 3, None), "pre_logprob"),
    "positive log-prob": (lambda path: edit_value(path, "pre_logprob", 3, 0.3), "pre_logprob"),
    "id beyond n": (lambda path: edit_value(path, "token_id", 3, 24), "token_id"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_gives_one_sentence_that_names_the_file(damage: str, tmp_path: Path) -> None:
    run = small(tmp_path, padding=0.0, arms=("none",), rng_seed=3)
    target = part_files(run)[1]
    change, word = DAMAGE[damage]
    change(target)
    found = deltad("check", run)
    assert (found.exit_code, found.stdout) == (1, "")
    assert any(str(target) in line and word in line for line in found.stderr.splitlines())
    for name in ("table", "compare", "figure4"):
        assert_refused(read(name, run, tmp_path), 1, str(target), word)
    streamed = deltad("tokens", run)  # rows before the bad one may be out already
    assert streamed.exit_code == 1
    assert str(target) in streamed.stderr
    assert len(streamed.stderr.splitlines()) == 1
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.parametrize("name", COUNTING)
def test_every_counting_command_refuses_a_bad_value(name: str, tmp_path: Path) -> None:
    run = small(tmp_path, arms=("none",))
    edit_value(part_files(run)[0], "advantage", 3, float("nan"))
    assert_refused(counted(name, run), 1, "advantage")


def test_check_lists_every_problem_once(tmp_path: Path) -> None:
    run = small(tmp_path, arms=("none",), rows=30)
    first, second = part_files(run)[:2]
    for row in range(13):
        edit_value(first, "advantage", row, float("nan"))
    edit_value(second, "behavior_logprob", 1, 0.5)
    found = deltad("check", run)
    lines = found.stderr.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert any(str(second) in line and "behavior_logprob" in line for line in lines)
    assert found.stderr.count("more such rows)\n") == 1
    found = deltad("check", run, "--format", "json")
    assert found.exit_code == 1
    problems = json.loads(found.stdout)["problems"]
    assert {problem["path"] for problem in problems} == {str(first), str(second)}


def test_check_says_what_is_in_order(run: Path) -> None:
    found = deltad("check", run)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith(f"in order: {run} has arms none, predictive-kl-aggregated, r")
    assert "3 seeds, 9 files, 540 rows" in found.stdout
    found = json.loads(deltad("check", run, "--format", "json").stdout)
    assert found == {"format": 1, "ok": True, "problems": []}


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", rows=12, ranks=2, parts=2, arms=("none",), seeds=(0,))
    gone = run / "arm=none" / "seed=0" / "part-1-0.parquet"
    gone.unlink()
    assert_refused(deltad("table", run), 1, str(gone))


def test_a_missing_column_exits_2_and_is_named(tmp_path: Path) -> None:
    run = small(tmp_path, optional=())
    for name, option in (("table", "--criterion"), ("tokens", "--criterion"),
                         ("compare", "--criteria")):  # fmt: skip
        assert_refused(deltad(name, run, option, "predictive-kl-exact"), 2, "pre_collision")
    assert_refused(deltad("table", run, "--by", "token"), 2, "`token`")


def test_a_failed_command_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    run = small(tmp_path)
    edit_value(part_files(run)[1], "pre_logprob", 3, 0.3)
    kept = tmp_path / "out.csv"
    kept.write_text("mine")
    for name in ("tokens", "table"):
        assert deltad(name, run, "-o", kept).exit_code == 1
        assert kept.read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.csv", "run"]


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [(KeyboardInterrupt(), 130, "interrupted"), (MemoryError("8 GB"), 1, "not enough memory")],
)
def test_what_ends_a_command_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, status: int, words: str
) -> None:
    def end(*arguments: Any, **options: Any) -> None:
        raise raised

    monkeypatch.setattr("deltad.analysis.tables.rates.rate_table", end)
    assert_refused(deltad("table", run), status, words)


def test_an_unexpected_error_is_not_hidden(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("deltad.analysis.tables.rates.rate_table", fail)
    assert isinstance(deltad("table", run).exception, ZeroDivisionError)


def test_an_unfinished_recording_is_noted(tmp_path: Path) -> None:
    from deltad.dumps import DumpWriter, Metadata

    run = small(tmp_path, arms=("none",))
    writer = DumpWriter(run, arm="none", seed=7, metadata=Metadata(top_k=4, vocab_size=24))
    del writer  # killed before its end
    done = deltad("table", run, "--format", "json")
    assert json.loads(done.stdout)["summary"]["seeds"] == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("note: ")
    assert "arm none, seed 7" in line
    assert deltad("table", run, "--quiet").stderr == ""


def test_the_installed_script_prints_data_alone(run: Path) -> None:
    done = subprocess.run(
        [SCRIPT, "table", run, "--format", "json"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["protocol"] == "shared:none"


@pytest.mark.process
def test_a_long_error_stays_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / ("y" * 120)
    done = subprocess.run(
        [SCRIPT, "table", path], capture_output=True, text=True, timeout=120,
        env={**os.environ, "COLUMNS": "40"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, f"error: {path} does not exist\n")


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    run = small(tmp_path, rows=3000, row_group_size=3000)
    script = f"set -o pipefail; {SCRIPT} tokens {run} | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith('"arm","seed"')
    assert (done.returncode, done.stderr) == (141, "")


def test_names_from_a_dump_are_text_alone(tmp_path: Path) -> None:
    run = small(tmp_path, arms=["none"], optional=["token"])
    (run / "arm=none").rename(run / "arm=[bold]$x^{$y")
    assert "shared:[bold]$x^{$y" in deltad("table", run, "--protocol", "all").stdout
    edit_value(part_files(run)[0], "token", 3, "=1+1\x1b[31m")
    rows = deltad("tokens", run, "--format", "csv").stdout
    assert "'=1+1" in rows
    text = deltad("table", run, "--by", "token").stdout
    assert "\x1b" not in text
    assert_refused(deltad("table", run, "--criterion", "\x1b[31m"), 2, "\\x1b[31m")


def test_a_ratio_that_overflows_is_null_in_json_lines(tmp_path: Path) -> None:
    run = small(tmp_path, arms=["none"], seeds=[0], optional=[], rows=60)
    rows = pq.read_table(part_files(run)[0], columns=["topk_ids", "token_id"]).to_pylist()
    row = next(at for at, each in enumerate(rows) if each["token_id"] not in each["topk_ids"])
    edit_value(part_files(run)[0], "behavior_logprob", row, -2000.0)
    found = deltad("tokens", run, "--format", "json", "--quiet")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[row])["ratio"] is None
    assert deltad("table", run, "--quiet").exit_code == 0
