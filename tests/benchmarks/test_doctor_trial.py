from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.doctor import FAULTS, Case, every_case, summary, trial
from benchmarks.doctor.__main__ import main
from deltad.analysis.doctor import Diagnosis, examine
from deltad.dumps import Dump
from tests.dumps.factory import make_dump

DUMPS = Path(__file__).parents[2] / "data_dumps"


class Recorder:
    """The doctor, which remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[str, ...], tuple[int, ...], int]] = []
        self.first: list[float] = []

    def __call__(self, dump: Dump) -> Diagnosis:
        arm = dump.arms[0]
        seeds = dump.seeds(arm)
        self.seen.append((dump.arms, seeds, sum(dump.rows(arm, seed) for seed in seeds)))
        self.first.append(float(next(dump.batches(arm, seeds[0]))["behavior_logprob"][0]))
        return examine(dump)


def case(name: str, *said: str, strength: float = 1.0, estimate: float = math.nan) -> Case:
    return Case(FAULTS[name], strength, said, estimate)


def test_the_summary_counts_what_was_named_first() -> None:
    text = summary(
        [
            case("temperature-policy", "temperature", strength=0.7, estimate=0.71),
            case("temperature-policy", "temperature", strength=0.7, estimate=0.66),
            case("temperature-policy", "shift", "temperature", strength=0.7),
            case("zero-row", "sentinel"),
            case("zero-row"),
            case("everything-masked", "advantage"),
            case("untouched"),
            case("thinned"),
            case("thinned", "shift"),
            Case(FAULTS["top-k"], 50.0, None),
        ]
    )
    lines = text.splitlines()
    assert lines[0] == "right cause named first:   4 of   6 = 0.667 [0.223, 0.957]"
    assert lines[2].startswith("temperature        2 of   3 = 0.667")
    assert "concentration      1 of   1" in text, "another cause that is right too"
    assert "sound              2 of   3" in text
    assert "temperature-policy: estimates are off by 0.025 on average, 0.04 at most" in text
    assert "wrong: temperature-policy 0.7: shift, temperature (1×)" in text
    assert "wrong: zero-row 1: nothing (1×)" in text
    assert "nothing to break: top-k 50" in text
    assert max(map(len, lines)) <= 80


def test_a_case_is_a_dump_of_as_many_seeds_as_it_needs_rows() -> None:
    doctor = Recorder()
    cases = [(FAULTS[name], 1.0) for name in ("recomputed", "untouched")]
    first, second = trial(DUMPS / "smollm2-whole", cases, doctor=doctor)
    assert (first.said, second.said) == (("recomputed",), ())
    assert first.right
    assert second.right
    for arms, seeds, rows in doctor.seen:
        assert arms == ("none", "predictive-kl-aggregated", "ratio")
        assert rows >= 1000
        assert len(seeds) == 2


def test_seed_fault_and_repeat_decide_everything() -> None:
    def first(seed: int, *names: str) -> list[float]:
        doctor = Recorder()
        trial(DUMPS / "smollm2", [(FAULTS[name], 30.0) for name in names], seed=seed, doctor=doctor)
        return doctor.first

    one, two = first(0, "rounded-logits", "rounded-logits")
    assert [one] == first(0, "rounded-logits") != first(1, "rounded-logits")
    assert one != two


def test_what_finds_nothing_to_break_is_said_to_be_so(tmp_path: Path) -> None:
    dump = make_dump(tmp_path / "run", seeds=(0,), top_k=4)
    (found,) = trial(dump, [(FAULTS["top-k"], 5.0)])
    assert found.said is None


def test_the_command_prints_the_summary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in FAULTS.keys() - {"untouched"}:
        monkeypatch.delitem(FAULTS, name)
    main(DUMPS / "smollm2", repeats=2)
    assert "sound              2 of   2" in capsys.readouterr().out


QUICK = (
    "temperature-policy", "top-k", "shift", "zero-scalar", "recomputed", "stale", "other-context",
    "padded-vocabulary", "duplicated", "rounded-logprobs", "constant-advantage", "concentrated",
    "untouched", "thinned", "bf16-engine", "some-groups",
)  # fmt: skip
"""A fault of each cause, and some sound dumps."""


def judged(cases: list[Case], right: float = 0.95, alarms: float = 0.05) -> None:
    """What the doctor promises, with every failure in the message."""
    for sound, share in ((False, right), (True, 1 - alarms)):
        mine = [each for each in cases if each.said is not None]
        mine = [each for each in mine if (each.fault.cause is None) is sound]
        assert sum(each.right for each in mine) >= share * len(mine), summary(cases)


@pytest.mark.pages
@pytest.mark.parametrize("dump", ["tiny-whole", "smollm2-whole"])
def test_the_doctor_names_the_right_cause(dump: str) -> None:
    judged(trial(DUMPS / dump, [(FAULTS[name], FAULTS[name].middle) for name in QUICK]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dump", ["tiny-whole", "smollm2", "smollm2-whole"])
def test_the_doctor_names_the_right_cause_of_every_fault(dump: str, seed: int) -> None:
    judged(trial(DUMPS / dump, every_case(2), seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_doctor_is_wrong_more_often_where_rows_with_little_divergence_are_not_stored(
    seed: int,
) -> None:
    judged(trial(DUMPS / "tiny", every_case(2), seed=seed), right=0.88, alarms=0.13)
