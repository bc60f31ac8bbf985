from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from deltad.analysis.doctor.injections import CONTROLS, INJECTIONS
from deltad.analysis.doctor.trial import (
    NOTHING,
    SOUND,
    Case,
    Share,
    Trial,
    clopper_pearson,
    planned,
    trial,
)
from deltad.analysis.export import to_csv, to_markdown
from deltad.analysis.figures.trial import draw_confusion
from deltad.dumps import Dump

DUMPS = Path(__file__).parents[3] / "data_dumps"


@dataclass(frozen=True)
class Finding:
    cause: str
    confidence: float = 0.9
    estimate: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    findings: tuple[Finding, ...]


class Parrot:
    """Says what it was told to, one answer after the other, and remembers what it saw."""

    def __init__(self, *answers: tuple[Finding, ...]) -> None:
        self.answers = list(answers)
        self.seen: list[tuple[tuple[str, ...], tuple[int, ...], int]] = []
        self.first: list[float] = []

    def __call__(self, dump: Dump) -> Diagnosis:
        arm = dump.arms[0]
        seeds = dump.seeds(arm)
        self.seen.append((dump.arms, seeds, sum(dump.rows(arm, seed) for seed in seeds)))
        self.first.append(float(next(dump.batches(arm, seeds[0]))["behavior_logprob"][0]))
        return Diagnosis(self.answers.pop(0) if self.answers else ())


def case(
    injection: str, cause: str, *said: str, strength: float = 1.0, estimate: float = math.nan
) -> Case:
    known = {**INJECTIONS, **CONTROLS}[injection]
    return Case(
        injection, strength, cause, known.accepted or frozenset([NOTHING]), said,
        0.8 if said else math.nan, estimate, strength if known.estimate else math.nan, (0,),
    )  # fmt: skip


@pytest.fixture
def some() -> Trial:
    return Trial(
        "clean",
        (
            case("temperature-policy", "temperature", "temperature", strength=0.7, estimate=0.71),
            case("temperature-policy", "temperature", "temperature", strength=0.7, estimate=0.66),
            case("temperature-policy", "temperature", "shift", "temperature", strength=0.7),
            case("zero-row", "sentinel", "sentinel"),
            case("zero-row", "sentinel"),
            case("everything-masked", "concentration", "advantage"),
            case("untouched", SOUND),
            case("thinned", SOUND),
            case("thinned", SOUND, "moon"),
        ),
        (("top-k", 50.0),),
        3,
        7,
    )


def test_the_matrix_counts_cases_by_what_was_put_in_and_named(some: Trial) -> None:
    assert some.causes == ("temperature", "sentinel", "concentration", SOUND)
    assert some.named == (
        "temperature", "sentinel", "concentration", "advantage", "moon", "shift", NOTHING,
    )  # fmt: skip
    assert some.matrix == [
        [2, 0, 0, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 0, 1],
        [0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 2],
    ]


def test_shares_are_counts_over_cases(some: Trial) -> None:
    assert some.right == Share(4, 6)
    assert some.false_alarms == Share(1, 3)
    by_cause = some.right_by_cause()
    assert by_cause["temperature"] == Share(2, 3)
    assert by_cause["concentration"] == Share(1, 1), "another cause that is right too"
    assert by_cause[SOUND] == Share(2, 3)
    assert some.right_by_injection()["thinned"] == Share(1, 2)
    assert [each.injection for each in some.failures] == [
        "temperature-policy", "zero-row", "thinned",
    ]  # fmt: skip
    assert some.misses_by_injection() == {"temperature-policy": pytest.approx([0.01, -0.04])}
    assert math.isnan(Share(0, 0).share)
    assert all(math.isnan(end) for end in Share(0, 0).ci95)


@pytest.mark.parametrize(("count", "cases"), [(0, 10), (10, 10), (3, 17), (95, 100), (1, 1)])
def test_the_interval_is_that_of_clopper_and_pearson(count: int, cases: int) -> None:
    found = clopper_pearson(count, cases)
    want = stats.binomtest(count, cases).proportion_ci(method="exact")
    assert found == pytest.approx((want.low, want.high))


def test_all_forms_tell_the_same(some: Trial) -> None:
    text = str(some)
    assert "4 of 6 = 0.667 [0.223, 0.957]" in text
    assert "1 of 3 = 0.333" in text
    assert "shift, temperature" in text
    assert "1 of 3" in text
    assert "top-k 50" in text
    assert "off by 0.025 on average, 0.04 at most, in 2 cases" in text
    found = json.loads(json.dumps(some.to_json_object()))
    assert found["format"] == 1
    assert found["matrix"] == some.matrix
    assert found["right"] == {
        "count": 4, "cases": 6, "share": 4 / 6, "ci95": list(clopper_pearson(4, 6)),
    }  # fmt: skip
    assert found["estimates_off"]["temperature-policy"]["largest"] == pytest.approx(0.04)
    assert [each["said"] for each in found["failures"]] == [["shift", "temperature"], [], ["moon"]]
    assert found["failures"][1]["confidence"] is None
    assert found["nothing_to_break"] == [{"injection": "top-k", "strength": 50.0}]
    columns = some.columns()
    assert {len(values) for values in columns.values()} == {9}
    assert (
        to_csv(columns)
        .decode()
        .splitlines()[3]
        .startswith("temperature-policy,0.7,temperature,shift,False,")
    )
    assert to_markdown(columns).decode().count("\n") == 11
    assert "<" in some._repr_html_()


def test_the_figure_shows_every_cell(some: Trial) -> None:
    axes = draw_confusion(some)
    shown = {
        (round(text.get_position()[1]), round(text.get_position()[0])): int(text.get_text())
        for text in axes.texts
    }
    matrix = np.asarray(some.matrix)
    assert shown == {
        (int(row), int(column)): int(matrix[row, column]) for row, column in np.argwhere(matrix)
    }
    shades = np.asarray(axes.images[0].get_array())
    np.testing.assert_allclose(shades, matrix / matrix.sum(axis=1, keepdims=True))
    assert axes.get_yticklabels()[0].get_text() == "temperature (3)"
    assert "4 of 6" in axes.get_title()
    assert some.figure().axes


def test_a_trial_asks_the_doctor_about_every_fault_and_strength() -> None:
    names = ["recomputed", "zero-advantage", "untouched", "some-groups"]
    parrot = Parrot((Finding("recomputed"),), (Finding("shift", 0.7, 1.0), Finding("advantage")))
    ticks: list[int] = []
    result = trial(DUMPS / "smollm2-whole", injections=names, examine=parrot, progress=ticks.append)
    assert len(ticks) == planned(names) == 5
    assert [each.injection for each in result.cases] == [*names[:3], "some-groups", "some-groups"]
    assert [each.strength for each in result.cases[3:]] == [0.5, 0.8]
    first, second, *sound = result.cases
    assert first.right
    assert (second.named, second.said) == ("shift", ("shift", "advantage"))
    assert (second.confidence, second.estimate) == (0.7, 1.0)
    assert math.isnan(second.truth)
    assert not second.right
    assert all(each.right and each.cause == SOUND for each in sound)
    for arms, seeds, rows in parrot.seen[:3]:
        assert arms == ("none", "predictive-kl-aggregated", "ratio")
        assert rows >= 1000
        assert len(seeds) == 2


def test_a_case_takes_as_many_seeds_as_it_needs_rows() -> None:
    parrot = Parrot()
    trial(
        DUMPS / "smollm2", injections=["untouched", "recomputed"], rows_per_case=300, repeats=3,
        examine=parrot,
    )  # fmt: skip
    assert len(parrot.seen) == 6
    assert all(300 <= rows < 900 for _, _, rows in parrot.seen)
    assert len({seeds for _, seeds, _ in parrot.seen}) > 3, "repeats differ in their seeds"


def test_the_seed_decides_everything() -> None:
    def first(seed: int) -> list[float]:
        parrot = Parrot()
        trial(
            DUMPS / "smollm2-whole", injections=["rounded-logits"], seed=seed,
            rows_per_case=1, examine=parrot,
        )  # fmt: skip
        return parrot.first

    assert first(0) == first(0) != first(1)


def test_fewer_strengths_are_spread_over_the_list() -> None:
    def tried(strengths: int | None) -> list[float]:
        names = ["zero-row"]
        result = trial(
            DUMPS / "smollm2-whole",
            injections=names,
            strengths=strengths,
            rows_per_case=1,
            examine=Parrot(),
        )
        assert planned(names, strengths=strengths) == len(result.cases)
        return [each.strength for each in result.cases]

    assert tried(1) == [0.5]
    assert tried(2) == [0.05, 1.0]
    assert tried(None) == tried(99) == list(INJECTIONS["zero-row"].strengths)


def test_what_finds_nothing_to_break_is_no_case(tmp_path: Path) -> None:
    from tests.dumps.factory import make_dump

    dump = make_dump(tmp_path / "run", seeds=(0,), top_k=4)
    result = trial(dump, injections=["top-k"], repeats=2, examine=Parrot())
    assert [each.strength for each in result.cases] == [2.0, 2.0, 3.0, 3.0]
    assert result.not_broken == (("top-k", 5.0), ("top-k", 10.0), ("top-k", 20.0))


def test_a_trial_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="`repeats` must be at least 1, got 0"):
        trial(DUMPS / "tiny-whole", repeats=0)
    with pytest.raises(ValueError, match="`strengths` must be at least 1, got 0"):
        trial(DUMPS / "tiny-whole", strengths=0)
    with pytest.raises(ValueError, match="there is no injection 'flu'"):
        trial(DUMPS / "tiny-whole", injections=["flu"])
    with pytest.raises(FileNotFoundError):
        trial(DUMPS / "no-dump")


QUICK = (
    "temperature-policy", "top-k", "shift", "zero-scalar", "recomputed", "stale", "other-context",
    "padded-vocabulary", "duplicated", "rounded-logprobs", "constant-advantage", "concentrated",
    "untouched", "thinned", "bf16-engine", "some-groups",
)  # fmt: skip
"""A fault of each cause, and some sound dumps."""


def judged(result: Trial, right: float = 0.95, alarms: float = 0.05) -> None:
    """What the doctor promises, with every failure in the message."""
    failures = "\n".join(
        f"{each.injection} {each.strength:g} ({each.cause}): {', '.join(each.said) or NOTHING}"
        for each in result.failures
    )
    assert result.right.share >= right, failures
    assert result.false_alarms.share <= alarms, failures


@pytest.mark.pages
@pytest.mark.parametrize("dump", ["tiny-whole", "smollm2-whole"])
def test_the_doctor_names_the_right_cause(dump: str) -> None:
    judged(trial(DUMPS / dump, injections=QUICK, strengths=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dump", ["tiny-whole", "smollm2", "smollm2-whole"])
def test_the_doctor_names_the_right_cause_of_every_fault(dump: str, seed: int) -> None:
    judged(trial(DUMPS / dump, seed=seed, repeats=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_doctor_is_wrong_more_often_where_rows_with_little_divergence_are_not_stored(
    seed: int,
) -> None:
    """Of 318 faults it named 289 (seed 1), and it raised 4 false alarms on 42 sound dumps."""
    judged(trial(DUMPS / "tiny", seed=seed, repeats=2), right=0.88, alarms=0.13)
