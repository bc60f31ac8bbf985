"""Dumps without the policy after the step, without any policy, or without top-K log-probs.

What is not known is NULL, None, or "unknown" there, never 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from deltad.dumps import READINGS
from tests.commands.app import as_json, assert_refused, deltad
from tests.dumps.factory import edit, make_dump, part_files

NO_DELTA = "ΔD needs the policy's log-probs after the update, and arm none of"
NO_D = "D, Ḋ and every mask need the policy's log-probs before the update, and arm none of"


def made(folder: Path, *without: str, **options: Any) -> Path:
    """A dump of one arm, some columns left out."""
    how = {"rows": 60, "optional": ("pre_entropy", "pre_collision"), "null_vectors": 0.1}
    run = make_dump(folder / "run", arms=("none",), parts=1, **{**how, **options})
    for file in part_files(run):
        edit(file, lambda table: table.drop_columns(list(without)))
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with everything, which the other two are made of."""
    return made(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the policy after the step."""
    return made(tmp_path_factory.mktemp("unread"), *READINGS["post"])


@pytest.fixture(scope="module")
def behavior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without any policy."""
    return made(tmp_path_factory.mktemp("behavior"), *READINGS["pre"], *READINGS["post"])


@pytest.mark.parametrize(
    "command",
    [
        ("table",), ("table", "--protocol", "all"), ("table", "--protocol", "shared:none"),
        ("table", "--power"), ("table", "--by", "position"),
        ("figure4", "-o", "x.png"), ("ladder",), ("ladder", "--calibration"),
        ("compare", "-o", "x.png"), ("table", "--over", "threshold", "-o", "x.pdf"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_needs_delta_says_what_is_missing_and_how_to_get_it(
    unread: Path, tmp_path: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert_refused(deltad(name, unread, *options), 2, NO_DELTA, "`deltad import … --post FILE`")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command",
    [
        ("table",), ("compare",), ("tokens",), ("ladder",), ("ladder", "--calibration"),
        ("table", "--over", "threshold"), ("table", "--over", "top-k"), ("view",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_needs_a_policy_says_so(behavior: Path, command: tuple[str, ...]) -> None:
    name, *options = command
    assert_refused(deltad(name, behavior, *options), 2, NO_D, "--pre FILE")


def test_check_doctor_and_watch_name_what_was_not_read(unread: Path, behavior: Path) -> None:
    after = "; the policy after the update was not read in arm none\n"
    assert deltad("check", unread).stdout.endswith(after)
    before = "; the policy before the update was not read in arm none"
    assert deltad("check", behavior).stdout.endswith(before + after)
    assert deltad("doctor", unread).exit_code in (0, 3)
    answer = deltad("doctor", behavior, "--format", "json")
    found = json.loads(answer.stdout)
    assert (answer.exit_code, found["healthy"], found["findings"]) == (4, None, [])
    why = "the policy before the update was not read"
    left_out = {each["cause"] for each in found["not_judged"] if each["why"] == why}
    assert {"temperature", "truncation", "shift", "stale", "other-model"} < left_out
    looked_for = deltad("doctor", behavior).stdout.partition("looked at")[0]
    assert not any(cause in looked_for for cause in left_out)


def test_watch_counts_what_needs_no_delta(whole: Path, unread: Path) -> None:
    ours, theirs = (as_json("watch", run)["newest"] for run in (unread, whole))
    assert [each["step"] for each in ours] == [each["step"] for each in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine["scalars"].items() <= yours["scalars"].items()
        assert {"deltad/outside", "deltad/criterion_kept"} <= {*mine["scalars"]}
        assert not [name for name in mine["scalars"] if "increase" in name or "unsafe" in name]


def test_tokens_have_all_but_delta(whole: Path, unread: Path, tmp_path: Path) -> None:
    tables = []
    for at, run in enumerate((unread, whole)):
        path = tmp_path / f"{at}.parquet"
        assert deltad("tokens", run, "-o", path).exit_code == 0
        tables.append(pq.read_table(path))
    ours, theirs = tables
    assert ours.schema.names == theirs.schema.names
    for name in ("d_post", "delta_d"):
        assert ours.column(name).null_count == ours.num_rows > theirs.column(name).null_count > 0
    rest = [each for each in ours.schema.names if each not in ("d_post", "delta_d", "undetermined")]
    assert ours.select(rest).equals(theirs.select(rest))
    unknown = theirs.column("d_pre").null_count
    for name in ("d_dot", "keep_ratio", "outside", "disagreement"):
        assert theirs.column(name).null_count == unknown > 0
    assert theirs.column("keep_clip_higher").null_count == 0  # needs no top-K log-probs


DELTA = {"increase", "guess", "unsafe", "contracting", "accuracy", "p", "lower", "tied", "higher"}


def test_compare_counts_what_is_masked(whole: Path, unread: Path) -> None:
    ours, theirs = (as_json("compare", run) for run in (unread, whole))
    assert ours["unjudged"].startswith(NO_DELTA)
    assert theirs["unjudged"] is None
    assert ours["agreement"] == theirs["agreement"]
    assert ours["rows_without_topk"] == theirs["rows_without_topk"] > 0
    assert ours["base"]["outside"]["tokens"] == theirs["base"]["outside"]["tokens"]
    assert ours["base"]["outside"]["increase_rate"] is None
    for mine, yours in zip(ours["criteria"], theirs["criteria"], strict=True):
        assert mine["masked_outside"] == yours["masked_outside"]
        for name, value in mine.items():
            if DELTA & {*name.split("_")} and not name.startswith("paired"):
                assert value in (None, 0), name
    text = " ".join(deltad("compare", unread).stdout.split())
    assert "unknown: ΔD needs" in text
    assert "P(ΔD > 0)" not in text


@pytest.mark.parametrize("over", ["threshold", "top-k"])
def test_sweeps_count_who_keeps_what(whole: Path, unread: Path, over: str) -> None:
    ours, theirs = (as_json("table", run, "--over", over) for run in (unread, whole))
    assert ours["unjudged"].startswith(NO_DELTA)
    for mine, yours in zip(ours["points"], theirs["points"], strict=True):
        for name in ("outside", "disagreement", "criterion_kept", "baseline_kept"):
            assert mine[name] == yours[name]
        assert mine["criterion_unsafe"] is None or mine["criterion_kept"] == 0
        assert mine["difference"] is mine["sign_test_p"] is None
    assert "unsafe" not in deltad("table", unread, "--over", over).stdout


def test_the_page_has_the_sections_that_it_can_have(unread: Path, tmp_path: Path) -> None:
    path = tmp_path / "view.html"
    done = deltad("view", unread, "-o", path)
    assert done.exit_code == 0, done.stderr
    html = path.read_text(encoding="utf-8")
    assert html.count('class="absent"') >= 5
    assert 'class="failed"' not in html


def test_tokens_without_any_topk_are_decided_by_what_needs_none(tmp_path: Path) -> None:
    run = made(tmp_path, null_vectors=1.0)
    found = as_json("table", run)
    assert [each["outside"] for each in found["seeds"]] == [None, None]
    assert found["summary"]["base"]["outside"]["increase_rate"] is None
    assert "120 rows without top-K" in " ".join(deltad("table", run).stdout.split())
    lines = deltad("tokens", run, "--format", "json").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert {each["d_pre"] for each in rows} == {each["keep_ratio"] for each in rows} == {None}
    assert {each["keep_clip_higher"] for each in rows} == {True, False}
