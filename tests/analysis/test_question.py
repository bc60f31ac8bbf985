"""Which questions a dump answers, and what is said where it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis import Question, QuestionError
from deltad.analysis.question import answerable_protocols, comparable
from deltad.dumps import READINGS, Dump
from deltad.masks import RULES, CriterionError, Rule
from tests.dumps.factory import edit, edit_metadata, make_dump, part_files

ALL = ("none", "ratio", "predictive-kl-aggregated", "zero-step")
NEAR = {"rule": "near", "divergence": "kl", "threshold": 0.05, "sample": 0.5}
PAIR = {
    "rule": "disagreement", "divergence": "kl", "threshold": 0.15, "criterion": "ratio",
    "baseline": "predictive-kl-aggregated", "outside": 40,
}  # fmt: skip


def small(path: Path, **options: Any) -> Dump:
    """A dump of a few rows."""
    return Dump.open(make_dump(path / "run", **{"rows": 6, "ranks": 1, "parts": 1, **options}))


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        *(({"threshold": each}, QuestionError, r"`threshold` must be finite and not negative, got")
          for each in (-0.1, math.nan, math.inf, -math.inf)),
        *(({"protocol": each}, QuestionError, "`protocol` must be `own` or `shared:` and an arm")
          for each in ("shared", "shared:", "none", "OWN", "all")),
        ({"divergence": "js"}, QuestionError, "kl, tv, got 'js'"),
        ({"baseline": "ratios"}, CriterionError, "no criterion 'ratios', did you mean ratio"),
        ({"criterion": "ice"}, CriterionError, "no criterion 'ice'"),
        *(({"divergence": "tv", side: "predictive-kl-exact"}, CriterionError,
           "or for predictive-tv-exact") for side in ("criterion", "baseline")),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Question(**asked)


def test_what_is_not_given_follows_from_the_rest() -> None:
    assert Question().names == ("predictive-kl-aggregated", "ratio")
    assert Question(divergence="tv").names == ("predictive-tv-aggregated", "ratio")
    mine = Rule("mine", push="ratio")
    assert Question(divergence="tv", criterion=mine, baseline="binary-kl").rules == (
        mine, RULES["binary-kl"]
    )  # fmt: skip
    numbers: list[Any] = [0, 1, np.float32(0.25), np.int64(2)]
    assert all(type(Question(each).threshold) is float for each in numbers)


@pytest.mark.parametrize(
    ("arms", "asked", "expected"),
    [
        (("none", "ratio", "zero-step"), {}, ("none",)),
        (("actual",), {}, ("actual",)),
        (("ratio", "zero-step"), {}, ("ratio",)),
        (ALL, {"protocol": "shared:zero-step"}, ("zero-step",)),
        (ALL, {"protocol": "own"}, ("predictive-kl-aggregated", "ratio")),
        (ALL, {"protocol": "own", "criterion": "ratio"}, ("ratio",)),
        # What a criterion does not depend on is not compared.
        (("none", "binary-kl"), {"protocol": "own", "divergence": "tv", "criterion": "binary-kl",
                                 "baseline": "none"}, ("binary-kl", "none")),
    ],
)  # fmt: skip
def test_a_protocol_finds_its_arms(
    tmp_path: Path, arms: tuple[str, ...], asked: dict[str, Any], expected: tuple[str, ...]
) -> None:
    resolved = Question(**asked).resolve(small(tmp_path, arms=arms))
    assert resolved.arms == expected
    assert resolved.question.protocol == asked.get("protocol", f"shared:{expected[0]}")


def test_own_takes_an_arm_of_another_name_by_its_recorded_update(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=("ratio", "actual"))
    for path in part_files(dump.path):
        if "arm=actual" in str(path):
            update = {"mask": "predictive-kl-aggregated", "threshold": 0.15, "divergence": "kl"}
            edit_metadata(path, update=update)
    resolved = Question(protocol="own").resolve(Dump.open(dump.path))
    assert resolved.arms == ("actual", "ratio")


def other_update(run: Path) -> None:
    """One file of an arm says that another update was applied."""
    path = next(path for path in part_files(run) if "arm=ratio/seed=1" in str(path))
    edit_metadata(path, update={"mask": "ratio", "threshold": 0.3, "divergence": "kl"})


def lost_seed(run: Path) -> None:
    """One arm lacks a seed."""
    for path in (run / "arm=ratio" / "seed=1").iterdir():
        path.unlink()
    (run / "arm=ratio" / "seed=1").rmdir()


def without(reading: str) -> Callable[[Path], None]:
    """The policy's log-probs were not read at a time."""

    def change(run: Path) -> None:
        names = [*READINGS["post"], *(READINGS["pre"] if reading == "pre" else ())]
        for path in part_files(run):
            edit(path, lambda table: table.drop_columns(names))

    return change


OWN: dict[str, Any] = {"protocol": "own"}
DAMAGES: list[tuple[dict[str, Any], Callable[[Path], None] | None, dict[str, Any], str]] = [
    ({"arms": ("zero-step",)}, None, {}, "its arms are zero-step"),
    ({"arms": ("ratio", "actual")}, None, {}, "its arms are actual, ratio"),
    ({}, None, {"protocol": "shared:all"}, "no arm 'all'.*none, predictive-kl-aggregated, ratio"),
    ({}, None, {**OWN, "threshold": 0.2}, r"threshold 0\.2, kl;.*mask ratio, threshold 0\.15, kl"),
    ({}, None, {**OWN, "divergence": "tv"}, "mask predictive-tv-aggregated.*, tv;"),
    ({}, None, {**OWN, "criterion": "icepop"}, "an update|whose update was made with mask icepop"),
    ({}, None, {**OWN, "baseline": "clip-higher"}, "mask clip-higher"),
    ({}, other_update, OWN, "own"),
    ({}, lost_seed, OWN, "arm ratio .*lacks seed 1"),
    ({"optional": ()}, None, {"criterion": "predictive-kl-exact"},
     "predictive-kl-exact needs the column `pre_collision`"),
    ({"optional": ("full_tv_direction",)}, None,
     {"divergence": "tv", "criterion": "predictive-tv-full"},
     "predictive-tv-full needs the column `full_tv_pre`"),
    ({}, None, {"criterion": Rule("mine", needs=("size",))}, "`size`, which no dump has"),
    ({"stored": ("kl", 0.05)}, None, {"threshold": 0.04}, r"part-0-0\.parquet.*above 0\.05.*0\.04"),
    ({"stored": ("kl", 0.05)}, None, {"divergence": "tv", "threshold": 0.9},
     "does not bound the divergence tv"),
    ({"stored": ("kl", 0.05)}, None, {"criterion": "sequence_mask"}, "judges whole responses"),
    ({"metadata": {"vectors": NEAR}}, None, {"threshold": 0.04},
     r"part-0-0\.parquet keeps top-K log-probs only where kl is at least 0\.05, and of 0\.5"),
    ({"metadata": {"vectors": NEAR}}, None, {"divergence": "tv", "threshold": 0.9},
     "does not bound the divergence tv: ask for kl"),
    ({"metadata": {"stored": PAIR}, "arms": ("none",), "rows": 40, "seeds": (0,)}, None, {},
     "this needs every token outside"),
    ({}, without("post"), {}, "ΔD needs the policy's log-probs after the update"),
    ({}, without("pre"), {}, "D, Ḋ and every mask need .* before the update"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "change", "asked", "words"), DAMAGES)
def test_what_the_dump_cannot_answer_is_refused(
    tmp_path: Path,
    made: dict[str, Any],
    change: Callable[[Path], None] | None,
    asked: dict[str, Any],
    words: str,
) -> None:
    run = small(tmp_path, **made).path
    if change is not None:
        change(Path(str(run)))
    with pytest.raises(QuestionError, match=words):
        Question(**asked).resolve(Dump.open(run))


def test_what_is_stored_answers_what_it_bounds(tmp_path: Path) -> None:
    Question(0.05).resolve(small(tmp_path / "above", stored=("kl", 0.05), arms=("none",)))
    Question(0.05).resolve(small(tmp_path / "near", metadata={"vectors": NEAR}))
    pair = small(tmp_path / "pair", arms=("none",), rows=40, metadata={"stored": PAIR})
    Question().resolve(pair, disagreement_only=True)  # either way round
    for asked in (Question(0.2), Question(baseline="binary-kl"), Question(divergence="tv")):
        with pytest.raises(QuestionError, match=r"exactly one of .* and the question is about"):
            asked.resolve(pair, disagreement_only=True)


def test_every_protocol_is_found_that_the_dump_can_answer(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=ALL)
    shared = ["shared:predictive-kl-aggregated", "shared:ratio"]
    found, refused = answerable_protocols(dump, Question())
    assert ([*found], refused) == (["shared:none", "own", *shared], {})
    found, refused = answerable_protocols(dump, Question(0.3))
    assert [*found] == ["shared:none", *shared]
    assert "threshold 0.3" in refused["own"]
    assert [*answerable_protocols(dump, Question(), ["shared:ratio"])[0]] == ["shared:ratio"]
    with pytest.raises(QuestionError, match="zero-step"):
        answerable_protocols(small(tmp_path / "zero", arms=("zero-step",)), Question())


def test_every_criterion_is_found_that_the_dump_can_answer_for(tmp_path: Path) -> None:
    dump = small(tmp_path, optional=())
    found, refused = comparable(dump, Question(baseline="mis"))
    assert next(iter(found)) == "mis"
    assert refused.keys() == {"predictive-kl-exact", "predictive-kl-full"}
    assert {*found, *refused} == {n for n in RULES if "-tv-" not in n and n != "none"}
    with pytest.raises(QuestionError, match="pre_collision"):
        comparable(dump, Question(), ["predictive-kl-exact"])
