"""Every command on a dump without the policy after the step, and on one without any policy."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from deltad.analysis import Question, QuestionError, compare, rate_table, sweep
from deltad.analysis.doctor import examine
from deltad.cli import app
from deltad.dumps import READINGS, Dump
from tests.dumps.factory import edit, make_dump, part_files

RUNNER = CliRunner()
NO_DELTA = "ΔD needs the policy's log-probs after the update, and arm none of"
NO_D = "D, Ḋ and every mask need the policy's log-probs before the update, and arm none of"
OPTIONAL = ("pre_entropy", "pre_collision")


def deltad(*arguments: object) -> Result:
    """Run the command line."""
    return RUNNER.invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with everything, which the other two are made of."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return make_dump(
        run, arms=("none",), rows=60, seeds=(0, 1), optional=OPTIONAL, null_vectors=0.1, parts=1
    )


def _without(run: Path, *columns: str) -> Path:
    make_dump(
        run, arms=("none",), rows=60, seeds=(0, 1), optional=OPTIONAL, null_vectors=0.1, parts=1
    )
    for file in part_files(run):
        edit(file, lambda table: table.drop_columns(list(columns)))
    return run


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the policy after the step."""
    return _without(tmp_path_factory.mktemp("unread") / "run", *READINGS["post"])


@pytest.fixture(scope="module")
def behavior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without any policy."""
    columns = [name for names in READINGS.values() for name in names]
    return _without(tmp_path_factory.mktemp("behavior") / "run", *columns)


@pytest.mark.parametrize(
    "command",
    [
        ("table",),
        ("table", "--protocol", "all"),
        ("table", "--protocol", "shared:none"),
        ("figure4", "-o", "x.png"),
        ("ladder",),
        ("calibration",),
        ("sweep", "--over", "protocol"),
        ("compare", "--by", "position"),
        ("compare", "-o", "x.png"),
        ("sweep", "--over", "threshold", "-o", "x.pdf"),
    ],
)
def test_what_needs_delta_says_what_is_missing_and_how_to_get_it(
    unread: Path, tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    done = deltad(name, unread, *options)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {NO_DELTA}")
    assert "import them anew, `deltad import … --post FILE`" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ("table",), ("compare",), ("tokens",), ("ladder",), ("calibration",),
        ("sweep", "--over", "threshold"), ("sweep", "--over", "top-k"), ("report",),
    ],
)  # fmt: skip
def test_what_needs_a_policy_says_so(behavior: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    done = deltad(name, behavior, *options)
    assert done.exit_code == 2
    assert NO_D in done.stderr
    assert "--pre FILE" in done.stderr


def test_check_names_what_was_not_read(unread: Path, behavior: Path) -> None:
    done = deltad("check", unread)
    assert done.exit_code == 0
    assert done.stdout.endswith("; the policy after the update was not read in arm none\n")
    done = deltad("check", behavior)
    assert "the policy before the update was not read in arm none; the policy after" in done.stdout


def test_tokens_have_all_but_delta(whole: Path, unread: Path, tmp_path: Path) -> None:
    tables = {}
    for name, run in (("whole", whole), ("unread", unread)):
        path = tmp_path / f"{name}.parquet"
        assert deltad("tokens", run, "-o", path).exit_code == 0
        tables[name] = pq.read_table(path)
    ours, theirs = tables["unread"], tables["whole"]
    assert ours.schema.names == theirs.schema.names
    for name in ("d_post", "delta_d"):
        assert ours.column(name).null_count == ours.num_rows > theirs.column(name).null_count
    rest = [name for name in ours.schema.names if name not in ("d_post", "delta_d")]
    assert ours.select(rest).equals(theirs.select(rest))
    outside = deltad("tokens", unread, "--outside", "--format", "csv")
    assert outside.exit_code == 0
    assert len(outside.stdout.splitlines()) > 2


DELTA = ("increase", "guess", "unsafe", "contracting", "accuracy", "p", "lower", "tied", "higher")


def test_compare_counts_what_is_masked(whole: Path, unread: Path) -> None:
    ours, theirs = (
        json.loads(deltad("compare", run, "--format", "json").stdout) for run in (unread, whole)
    )
    assert ours["unjudged"].startswith(NO_DELTA)
    assert theirs["unjudged"] is None
    assert ours["agreement"] == theirs["agreement"]
    assert ours["base"]["outside"] == {
        "tokens": theirs["base"]["outside"]["tokens"], "increase_rate": None,
        "constant_guess": None, "undetermined": 0,
    }  # fmt: skip
    kept = 0
    for mine, yours in zip(ours["criteria"], theirs["criteria"], strict=True):
        assert mine.keys() == yours.keys()
        for name, value in mine.items():
            if value is not None and not name.endswith(("_right", "_judged")):
                assert value == yours[name], name
                assert not any(word in name.split("_") for word in DELTA), name
                kept += 1
            elif name.endswith(("_right", "_judged")):
                assert value == 0
    assert kept == 11 * len(ours["criteria"])
    text = deltad("compare", unread).stdout
    assert "What a mask does is not judged: ΔD needs" in text.replace("\n", " ")
    assert "P(ΔD > 0)" not in text
    assert "unsafe" not in text


@pytest.mark.parametrize("over", ["threshold", "top-k"])
def test_sweeps_count_who_keeps_what(whole: Path, unread: Path, over: str) -> None:
    ours, theirs = (
        json.loads(deltad("sweep", run, "--over", over, "--format", "json").stdout)
        for run in (unread, whole)
    )
    assert ours["unjudged"].startswith(NO_DELTA)
    for mine, yours in zip(ours["points"], theirs["points"], strict=True):
        for name in ("outside", "disagreement", "criterion_kept", "baseline_kept"):
            assert mine[name] == yours[name]
        for name in ("criterion_unsafe", "difference", "sign_test_p", "baseline_accuracy"):
            assert mine[name] is None
    text = deltad("sweep", unread, "--over", over).stdout
    assert "of these kept" in text
    assert "unsafe" not in text
    for form in ("csv", "markdown"):
        assert deltad("sweep", unread, "--over", over, "--format", form).exit_code == 0


def test_the_doctor_looks_at_what_there_is(whole: Path, unread: Path, behavior: Path) -> None:
    theirs, ours, bare = (examine(run) for run in (whole, unread, behavior))
    assert [each.cause for each in ours.findings] == [each.cause for each in theirs.findings]
    assert all(each.cause != "sentinel" for each in (*ours.findings, *bare.findings))
    said = " ".join(bare.looked.without)
    assert "whatever needs the policy before the update: this arm has no pre columns" in said
    assert "whatever needs the policy after the update: this arm has no post columns" in said
    assert deltad("doctor", unread).exit_code in (0, 3)
    assert deltad("doctor", behavior).exit_code in (0, 3)


def test_the_report_has_the_sections_that_it_can_have(unread: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    done = deltad("report", unread, "-o", path)
    assert done.exit_code == 0, done.stderr
    html = path.read_text(encoding="utf-8")
    assert html.count('class="absent"') >= 5
    assert 'class="failed"' not in html
    assert "ΔD and π after are unknown: ΔD needs" in html
    assert "What a mask does is not judged" in html


def test_watch_names_files_whose_steps_cannot_be_counted(unread: Path) -> None:
    done = deltad("watch", unread, "--once")
    assert done.exit_code == 0
    assert "is without the policy before or after the step" in done.stdout + done.stderr


def test_in_python_too(whole: Path, unread: Path) -> None:
    dump = Dump.open(unread)
    with pytest.raises(QuestionError, match="ΔD needs"):
        rate_table(dump)
    found = compare(dump, Question(), ["predictive-kl-aggregated"])
    with pytest.raises(QuestionError, match="ΔD needs"):
        found.figure()
    theirs = compare(Dump.open(whole), Question(), ["predictive-kl-aggregated"])
    assert found["ratio"].masked == theirs["ratio"].masked
    swept = sweep(dump, over="top-k")
    with pytest.raises(QuestionError, match="ΔD needs"):
        swept.figure()
