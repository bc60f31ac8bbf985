from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.analysis.doctor import Finding, examine, read_sample
from deltad.analysis.doctor.diagnosis import CAUSES, explained_away
from deltad.dumps import Dump, DumpWriter, Near
from deltad.dumps.columns import DERIVED
from tests.analysis.doctor.made import Change, made_sample, moved_rows, nucleus
from tests.dumps.factory import make_dump

DUMPS = Path(__file__).parents[3] / "data_dumps"


def permuted(logits: Any) -> Any:
    return logits + 1.5 * np.random.default_rng(3).normal(size=logits.shape)


@pytest.mark.parametrize("rng_seed", [0, 1])
@pytest.mark.parametrize("options", [{}, {"update": 0.01}, {"update": 0.3}, {"thinned": 0.05}])
def test_a_healthy_chain_of_updates_has_no_finding(options: dict[str, Any], rng_seed: int) -> None:
    assert examine(made_sample(rng_seed=rng_seed, **options)).healthy


@pytest.mark.parametrize(
    ("cause", "estimate", "options"),
    [
        ("temperature", 0.7, {"policy": lambda logits: logits / 0.7}),
        ("temperature", 1.2, {"policy": lambda logits: logits / 1.2}),
        ("temperature", 1.5, {"behavior": lambda x: 1.5 * x, "sampler": lambda x: x}),
        ("truncation", None, {"behavior": nucleus(0.9)}),
        ("truncation", None, {"policy": nucleus(0.9)}),
        ("truncation", None, {"sampler": nucleus(0.75)}),
        ("shift", 1, {"policy": moved_rows(1)}),
        ("shift", -1, {"policy": moved_rows(-1)}),
        ("shift", 2, {"policy": moved_rows(2)}),
        ("stale", None, {"lag": 8.0}),
        ("stale", None, {"lag": 6.0, "sampler": lambda x: x}),
        ("vocabulary", 1, {"policy": lambda logits: np.roll(logits, 1, axis=1)}),
        ("other-model", None, {"policy": permuted}),
    ],
)
def test_a_fault_of_whole_distributions_is_named_first(
    cause: str, estimate: float | None, options: dict[str, Any]
) -> None:
    diagnosis = examine(made_sample(rng_seed=2, **options))
    assert max(map(len, str(diagnosis).splitlines())) <= 80
    found = diagnosis.findings[0]
    assert found.cause == cause
    assert found.confidence >= 0.7
    assert found.tokens > 0
    assert found.advice == CAUSES[cause].advice
    if estimate is not None:
        assert found.estimate == pytest.approx(estimate, rel=0.05)


@pytest.mark.parametrize(
    ("dump", "seed"), [("tiny", 0), ("tiny", 30), ("tiny-whole", 2), ("smollm2", 4)]
)
def test_recorded_dumps_are_healthy(dump: str, seed: int) -> None:
    assert examine(DUMPS / dump, seeds=[seed]).healthy


@pytest.mark.slow
@pytest.mark.parametrize("dump", ["tiny", "tiny-whole", "smollm2", "smollm2-whole"])
def test_at_most_one_seed_in_twenty_raises_an_alarm(dump: str) -> None:
    sample = read_sample(DUMPS / dump)
    alarms = [
        seed
        for seed in np.unique(sample["seed"])
        if not examine(sample.take(sample["seed"] == seed)).healthy
    ]
    assert len(alarms) <= 0.05 * len(np.unique(sample["seed"]))


def test_few_tokens_raise_no_alarm_and_are_said_to_be_few() -> None:
    sample = made_sample(policy=lambda logits: logits / 0.5)
    diagnosis = examine(sample.take(np.arange(12)))
    assert diagnosis.healthy is None
    assert diagnosis.not_judged["advantage"] == "30 tokens are needed, there are 12"
    text = str(diagnosis)
    assert text.startswith("nothing wrong found, but not enough to tell\nlooked for: sentinel, ")
    judged = text.split("looked at")[0]
    assert not any(cause in judged for cause in diagnosis.not_judged)
    assert {"temperature", "truncation", "shift", "stale", "advantage"} < {*diagnosis.not_judged}


def test_no_tokens_at_all_are_no_fault(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", empty_seeds=(0, 1))
    assert examine(run).healthy is None


def test_rows_without_lists_are_looked_at_as_far_as_they_go(tmp_path: Path) -> None:
    diagnosis = examine(make_dump(tmp_path / "run", null_vectors=1.0, rows=40))
    assert any("without lists" in each for each in diagnosis.open)


def test_vectors_that_were_kept_for_their_distance_are_not_looked_at(tmp_path: Path) -> None:
    source = Dump.open(DUMPS / "tiny-whole")
    metadata = dataclasses.replace(source.metadata("none"), rows_seen=0)
    near = Near(threshold=0.05, sample=0.3)
    with DumpWriter(
        tmp_path / "run", arm="none", seed=2, metadata=metadata, vectors=near
    ) as writer:
        for batch in source.batches("none", 2):
            writer.append({each: batch[each] for each in batch.columns if each not in DERIVED})
    stored = next(Dump.open(tmp_path / "run").batches("none", 2))
    sample = read_sample(tmp_path / "run")
    listed = (sample["topk_ids"] >= 0).any(axis=1)
    assert 0.25 < listed.mean() < 0.35 < stored.vectors.mean()
    assert np.isnan(sample["topk_pre_logprobs"][~listed]).all()
    diagnosis = examine(sample)
    assert diagnosis.healthy
    assert any("without lists" in each for each in diagnosis.open)


def test_two_faults_that_do_not_explain_each_other_are_both_found() -> None:
    sample = made_sample(policy=lambda logits: logits / 0.7)
    values = sample["behavior_logprob"].copy()
    values[::9] = -9999.0
    causes = {each.cause for each in examine(sample.replace(behavior_logprob=values)).findings}
    assert causes == {"sentinel", "temperature"}


def test_what_a_cause_explains_is_dropped() -> None:
    findings = [Finding("shift", 0.9, 10), Finding("other-model", 0.95, 10)]
    assert [each.cause for each in explained_away(findings)] == ["shift"]


def test_the_likeliest_finding_stands_first() -> None:
    findings = [Finding("temperature", 0.6, 10), Finding("advantage", 0.9, 10)]
    assert [each.cause for each in explained_away(findings)] == ["advantage", "temperature"]


def test_every_cause_of_the_design_is_registered() -> None:
    wanted = {
        "temperature", "truncation", "shift", "sentinel", "recomputed", "stale", "other-model",
        "vocabulary", "topk-convention", "precision", "advantage", "concentration",
    }  # fmt: skip
    assert wanted <= set(CAUSES)
    assert all(cause.explains <= set(CAUSES) for cause in CAUSES.values())


def test_a_change_is_what_it_says() -> None:
    change: Change = nucleus(0.5)
    logs = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))
    np.testing.assert_array_equal(np.isfinite(change(logs)), [[True, True, False, False]])
