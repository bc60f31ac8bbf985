"""A rule of one's own, given as FILE.py:NAME, in every command that takes a criterion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.commands.app import COUNTING, as_json, assert_refused, counted, deltad
from tests.dumps.factory import make_dump

MINE = """
from deltad import Rule

halve = Rule("halve", weight=lambda tokens: 0 * tokens.advantage + 0.5)
far = Rule("far", region=lambda tokens: abs(tokens.log_ratio), threshold=0.5)
likely = Rule("likely", keep=lambda tokens, threshold, divergence: tokens.policy_logprob > -2.0)
whole = Rule(
    "whole", region=lambda tokens: abs(tokens.sequence_log_ratio), scope="sequence"
)
unsure = Rule(
    "unsure", region=lambda tokens: tokens["pre_entropy"], push="kl-aggregated",
    needs=("pre_entropy",),
)
ours = Rule("ours", push="kl-aggregated")  # predictive-kl-aggregated by another name
"""
NAMES = re.findall(r"^(\w+) = Rule", MINE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file, in the folder that commands run in."""
    path = tmp_path_factory.mktemp("rules") / "my_masks.py"
    path.write_text(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        yield path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump of whole responses."""
    return make_dump(
        tmp_path_factory.mktemp("ruled") / "run", rows=60, drift=1.5, ranks=1, parts=1,
        arms=("none",),
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_works_wherever_a_built_in_one_does(
    run: Path, mine: Path, tmp_path: Path, name: str
) -> None:
    given = f"my_masks.py:{name}"
    found = as_json("table", run, "--criterion", given)
    assert found["criterion"] == name
    compared = as_json("compare", run, "--criteria", f"{given},tis")["criteria"]
    assert [row["criterion"] for row in compared] == ["ratio", name, "tis"]
    disagreement = sum(seed["disagreement"] for seed in found["seeds"])
    assert compared[1]["disagreement"] == disagreement
    if name == "halve":
        assert compared[1]["weight_outside"] == 0.5
    assert name in as_json("ladder", run, "--criterion", given)["criteria"]
    assert name in as_json("ladder", run, "--criteria", given)["criteria"]
    for each in set(COUNTING) - {"compare", "power"}:
        assert counted(each, run, "--criterion", given).exit_code == 0
    file = tmp_path / "tokens.parquet"
    assert deltad("tokens", run, "--criterion", given, "--outside", "-o", file).exit_code == 0
    tokens = pq.read_table(file)
    keep = tokens.column(f"keep_{name}").to_pylist()
    assert sum(tokens.column("disagreement").to_pylist()) == disagreement
    assert any(keep)
    image = tmp_path / "figure.svg"
    assert deltad("figure4", run, "--criterion", given, "-o", image).exit_code == 0
    assert name in image.read_text()
    page = tmp_path / "page.html"
    assert deltad("view", run, "--criterion", given, "-o", page).exit_code == 0
    assert name in page.read_text()
    watched = as_json("watch", run, "--criterion", given, "--threshold", 0.15)
    assert {each["criterion"] for each in watched["newest"]} == {name}
    (total,) = watched["totals"]
    assert total["disagreement"] == disagreement
    for side in ("baseline", "criterion"):
        assert total[f"{side}_kept"] == sum(seed[side]["kept"] for seed in found["seeds"])


def test_a_rule_by_another_name_gives_the_same_numbers(run: Path, mine: Path) -> None:
    theirs = as_json("table", run)
    ours = as_json("table", run, "--criterion", f"{mine}:ours")
    assert (ours["seeds"], ours["criterion"]) == (theirs["seeds"], "ours")
    swapped = as_json("table", run, "--criterion", "ratio", "--baseline", f"{mine}:ours")
    assert swapped["summary"]["baseline"] == theirs["summary"]["criterion"]


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("def (", "far", "bad.py"),
        ("far = 1", "far", "Rule"),
        (MINE, "nearer", "nearer"),
        (MINE.replace("0.5)\nlikely", "0.5, push='sideways')\nlikely"), "far", "`push` of rule"),
        (MINE.replace("abs(tokens.log_ratio)", "tokens.log_ratio * float('nan')"), "far",
         "gave NaN"),
        (MINE.replace("tokens.policy_logprob > -2.0", "tokens.nothing"), "likely",
         "AttributeError"),
        (MINE.replace('needs=("pre_entropy",)', 'needs=("no_such",)'), "unsure", "no_such"),
    ],
)  # fmt: skip
def test_a_rule_that_fails_is_one_sentence(
    run: Path, tmp_path: Path, text: str, name: str, words: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    for command, option in (("table", "--criterion"), ("compare", "--criteria"),
                            ("tokens", "--criterion")):  # fmt: skip
        done = deltad(command, run, option, f"{file}:{name}")
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        assert words in line


def test_columns_and_whole_responses_must_be_there(mine: Path, tmp_path: Path) -> None:
    bare = make_dump(tmp_path / "bare", rows=20, optional=(), arms=("none",))
    assert_refused(deltad("table", bare, "--criterion", f"{mine}:unsure"), 2, "pre_entropy")
    thin = make_dump(tmp_path / "thin", rows=40, stored=("kl", 0.1), arms=("none",))
    assert_refused(deltad("table", thin, "--criterion", f"{mine}:whole"), 2, "whole responses")
    assert as_json("table", thin, "--criterion", f"{mine}:far")["criterion"] == "far"
