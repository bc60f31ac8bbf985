"""Which questions a dump answers, and what is said where it does not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis import Question, QuestionError
from deltad.analysis.question import answerable_protocols
from deltad.dumps import Dump
from deltad.masks import CriterionError
from tests.dumps.factory import edit_metadata, make_dump, part_files


def small(path: Path, **options: Any) -> Dump:
    """A dump of a few rows."""
    return Dump.open(make_dump(path / "run", **{"rows": 6, "ranks": 1, "parts": 1, **options}))


@pytest.mark.parametrize("threshold", [-0.1, math.nan, math.inf, -math.inf])
def test_threshold_is_finite_and_not_negative(threshold: float) -> None:
    with pytest.raises(QuestionError, match=r"`threshold`.*got"):
        Question(threshold=threshold)


def test_threshold_may_be_zero() -> None:
    assert Question(threshold=0.0).threshold == 0


@pytest.mark.parametrize("protocol", ["shared", "shared:", "none", "OWN", "all"])
def test_protocol_is_own_or_shared_and_an_arm(protocol: str) -> None:
    with pytest.raises(QuestionError, match="`protocol`"):
        Question(protocol=protocol)


def test_criterion_follows_the_divergence_by_default() -> None:
    assert Question(divergence="kl").criterion == "predictive-kl-aggregated"
    assert Question(divergence="tv").criterion == "predictive-tv-aggregated"


@pytest.mark.parametrize("side", ["criterion", "baseline"])
def test_a_predictive_criterion_judges_its_own_family_alone(side: str) -> None:
    with pytest.raises(CriterionError, match="predictive-kl-exact"):
        Question(divergence="tv", **{side: "predictive-kl-exact"})  # type: ignore[arg-type]
    Question(divergence="tv", **{side: "binary-kl"})  # type: ignore[arg-type]


def test_an_unknown_criterion_or_divergence_is_named_with_the_known_ones() -> None:
    with pytest.raises(CriterionError, match=r"no criterion 'ratios'.*clip-higher"):
        Question(baseline="ratios")
    with pytest.raises(QuestionError, match="kl, tv, got 'js'"):
        Question(divergence="js")


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        (("none", "ratio", "zero-step"), "shared:none"),
        (("actual",), "shared:actual"),
        (("ratio", "zero-step"), "shared:ratio"),
    ],
)
def test_protocol_by_default_is_none_or_the_only_real_arm(
    tmp_path: Path, arms: tuple[str, ...], expected: str
) -> None:
    resolved = Question().resolve(small(tmp_path, arms=arms))
    assert resolved.question.protocol == expected
    assert resolved.arms == (expected.removeprefix("shared:"),)


@pytest.mark.parametrize("arms", [("zero-step",), ("ratio", "actual"), ("a", "b", "zero-step")])
def test_without_a_default_the_arms_are_listed(tmp_path: Path, arms: tuple[str, ...]) -> None:
    with pytest.raises(QuestionError, match=", ".join(sorted(arms))):
        Question().resolve(small(tmp_path, arms=arms))


def test_shared_names_an_arm_that_exists(tmp_path: Path) -> None:
    dump = small(tmp_path)
    with pytest.raises(QuestionError, match=r"no arm 'all'.*none, predictive-kl-aggregated, ratio"):
        Question(protocol="shared:all").resolve(dump)


def test_own_finds_the_arms_that_applied_the_masks(tmp_path: Path) -> None:
    resolved = Question(protocol="own").resolve(small(tmp_path))
    assert resolved.arms == ("predictive-kl-aggregated", "ratio")
    same = Question(criterion="ratio", protocol="own").resolve(small(tmp_path))
    assert same.arms == ("ratio",)


@pytest.mark.parametrize(
    "asked",
    [
        {"threshold": 0.2},
        {"divergence": "tv"},
        {"criterion": "predictive-kl-uniform"},
        {"baseline": "clip-higher"},
    ],
)
def test_own_is_refused_with_what_was_asked_and_what_was_recorded(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    with pytest.raises(QuestionError) as caught:
        Question(protocol="own", **asked).resolve(small(tmp_path))
    words = str(caught.value)
    assert "mask ratio, threshold 0.15, kl" in words
    value = next(iter(asked.values()))
    assert re.search(rf"(mask|threshold) {value}|, {value};", words)


def test_own_takes_an_arm_of_another_name_by_its_recorded_update(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=("ratio", "actual"))
    for path in part_files(dump.path):
        if "arm=actual" in str(path):
            update = {"mask": "predictive-kl-aggregated", "threshold": 0.15, "divergence": "kl"}
            edit_metadata(path, update=update)
    resolved = Question(protocol="own").resolve(Dump.open(dump.path))
    assert resolved.arms == ("actual", "ratio")


def test_own_is_refused_where_one_file_recorded_another_update(tmp_path: Path) -> None:
    dump = small(tmp_path)
    path = next(path for path in part_files(dump.path) if "arm=ratio/seed=1" in str(path))
    edit_metadata(path, update={"mask": "ratio", "threshold": 0.3, "divergence": "kl"})
    with pytest.raises(QuestionError, match="own"):
        Question(protocol="own").resolve(Dump.open(dump.path))


def test_own_does_not_compare_what_a_criterion_does_not_depend_on(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=("none", "binary-kl"))
    resolved = Question(
        divergence="tv", criterion="binary-kl", baseline="none", protocol="own"
    ).resolve(dump)
    assert resolved.arms == ("binary-kl", "none")
    with pytest.raises(QuestionError, match="binary-kl"):
        Question(threshold=0.3, criterion="binary-kl", baseline="none", protocol="own").resolve(
            dump
        )


def test_own_names_the_seed_that_an_arm_lacks(tmp_path: Path) -> None:
    dump = small(tmp_path, seeds=(0, 7))
    for path in (dump.path / "arm=ratio" / "seed=7").iterdir():
        path.unlink()
    (dump.path / "arm=ratio" / "seed=7").rmdir()
    lacking = Dump.open(dump.path)
    with pytest.raises(QuestionError, match=r"arm ratio .*lacks seed 7"):
        Question(protocol="own").resolve(lacking)
    Question().resolve(lacking)


@pytest.mark.parametrize(
    ("criterion", "column"),
    [
        ("predictive-kl-exact", "pre_collision"),
        ("predictive-kl-full", "full_kl_pre"),
        ("predictive-tv-full", "full_tv_pre"),
    ],
)
def test_a_missing_column_is_named(tmp_path: Path, criterion: str, column: str) -> None:
    dump = small(tmp_path, optional=("full_kl_direction", "full_tv_direction"))
    family = criterion.split("-")[1]
    with pytest.raises(QuestionError, match=f"{criterion} needs the column `{column}`"):
        Question(divergence=family, criterion=criterion).resolve(dump)


def test_a_stored_rule_bounds_the_questions_that_can_be_asked(tmp_path: Path) -> None:
    dump = small(tmp_path, stored=("kl", 0.05), arms=("none",))
    Question(threshold=0.05).resolve(dump)
    with pytest.raises(QuestionError, match=r"part-0-0\.parquet.*above 0\.05.*0\.04"):
        Question(threshold=0.04).resolve(dump)
    with pytest.raises(QuestionError, match="does not bound the divergence tv"):
        Question(divergence="tv", threshold=0.9).resolve(dump)


NEAR = {"rule": "near", "divergence": "kl", "threshold": 0.05, "sample": 0.5}
PAIR = {
    "rule": "disagreement",
    "divergence": "kl",
    "threshold": 0.15,
    "criterion": "ratio",
    "baseline": "predictive-kl-aggregated",
    "outside": 40,
}


def test_a_rule_of_vectors_bounds_the_questions_that_can_be_asked(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=("none",), metadata={"vectors": NEAR})
    Question(threshold=0.05).resolve(dump)
    with pytest.raises(
        QuestionError,
        match=r"part-0-0\.parquet keeps vectors only where kl is at least 0\.05, and of 0\.5 of "
        r"the other tokens, and the threshold 0\.04 lies below that: ask for 0\.05 or more",
    ):
        Question(threshold=0.04).resolve(dump)
    with pytest.raises(QuestionError, match="does not bound the divergence tv: ask for kl"):
        Question(divergence="tv", threshold=0.9).resolve(dump)


def test_a_dump_of_disagreements_answers_its_own_pair_alone(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=("none",), rows=40, ranks=1, parts=1, metadata={"stored": PAIR})
    Question().resolve(dump, disagreement_only=True)  # the pair, either way round
    for asked in (
        Question(threshold=0.2),
        Question(baseline="binary-kl"),
        Question(criterion="predictive-kl-uniform"),
        Question(divergence="tv"),
    ):
        with pytest.raises(QuestionError, match=r"exactly one of .* and the question is about"):
            asked.resolve(dump, disagreement_only=True)
    with pytest.raises(QuestionError, match="this needs every token outside"):
        Question().resolve(dump)
    assert answerable_protocols(dump, Question(), disagreement_only=True)[0] == ["shared:none"]
    with pytest.raises(QuestionError, match="this needs every token outside"):
        answerable_protocols(dump, Question())


def test_every_protocol_is_found_that_the_dump_can_answer(tmp_path: Path) -> None:
    dump = small(tmp_path, arms=("none", "ratio", "predictive-kl-aggregated", "zero-step"))
    found, refused = answerable_protocols(dump, Question())
    assert found == ["shared:none", "own", "shared:predictive-kl-aggregated", "shared:ratio"]
    assert not refused
    found, refused = answerable_protocols(dump, Question(threshold=0.3))
    assert found == ["shared:none", "shared:predictive-kl-aggregated", "shared:ratio"]
    assert list(refused) == ["own"]
    assert "threshold 0.3" in refused["own"]


def test_no_protocol_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match="zero-step"):
        answerable_protocols(small(tmp_path, arms=("zero-step",)), Question())


def test_a_threshold_of_another_number_type_becomes_a_float() -> None:
    numbers: list[Any] = [1, np.float32(0.25), np.int64(2)]
    for threshold in numbers:
        assert type(Question(threshold=threshold).threshold) is float


def test_a_neighbours_weight_is_asked_for_as_a_criterion_is(tmp_path: Path) -> None:
    resolved = Question(criterion="icepop", baseline="drpo").resolve(small(tmp_path))
    assert (resolved.criterion.name, resolved.baseline.name) == ("icepop", "drpo")
    with pytest.raises(CriterionError, match=r"no criterion 'ice'.*icepop, mis, tis, cispo, drpo"):
        Question(criterion="ice")
    with pytest.raises(QuestionError, match="an arm whose update was made with mask icepop"):
        Question(criterion="icepop", protocol="own").resolve(small(tmp_path / "own"))
