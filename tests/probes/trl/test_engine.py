from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltad.dumps import Dump
from deltad.probes import ProbeError
from deltad.probes.trl.engine import EngineAsBehavior
from tests.probes.trl import engine, laws, trainers


class Said:
    """What `VLLMGeneration.generate` gives back: sorted by rank, K or K + 1 entries."""

    logprobs = 0

    def __init__(self) -> None:
        self.asked: list[int] = []

    def generate(self, **_: Any) -> Any:
        self.asked.append(self.logprobs)
        if not self.logprobs:
            return [[9]], [[4, 6]], [[[-0.9], [-3.0]]], [[[4], [6]]]
        return (
            [[9]],
            [[4, 6]],
            [[[-0.5, -0.9], [-0.7, -1.1, -3.0]]],
            [[[5, 4], [2, 3, 6]]],
        )


def kept(said: Any, *, top_k: int = 2) -> tuple[EngineAsBehavior, Any]:
    """The engine's words on one completion, and what TRL gets of them."""
    behavior = EngineAsBehavior(said, top_k, lambda: True)
    behavior.begin()
    return behavior, behavior.generate(said.generate)


def test_trl_gets_the_sampled_tokens_log_prob_alone() -> None:
    said = Said()
    _, given = kept(said)
    assert given == said.generate()
    assert said.asked == [2, 0]


def test_top_k_is_without_the_sampled_token_where_it_is_not_among_the_likeliest() -> None:
    behavior, _ = kept(Said())
    inputs = {"completion_ids": torch.tensor([[4, 6, 0]]), "completion_mask": torch.ones(1, 3)}
    inputs["completion_mask"][0, 2] = 0
    behavior.end(inputs)
    mask, logprobs, ids, values = behavior.read(inputs, [0])
    assert mask.tolist() == [[True, True, False]]
    assert logprobs.tolist() == [-0.9, -3.0]
    assert ids.tolist() == [[5, 4], [2, 3]]
    assert values.tolist() == [[-0.5, -0.9], [-0.7, -1.1]]


def test_nothing_is_asked_for_in_an_evaluation() -> None:
    said = Said()
    behavior = EngineAsBehavior(said, 2, lambda: False)
    assert behavior.generate(said.generate) == Said().generate()
    assert said.asked == [0]


def test_a_call_that_raises_leaves_the_engine_as_it_was() -> None:
    said = Said()

    def broken() -> Any:
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        EngineAsBehavior(said, 2, lambda: True).generate(broken)
    assert said.logprobs == 0


def test_rollouts_of_several_calls_are_refused() -> None:
    said = Said()
    behavior, _ = kept(said)
    behavior.generate(said.generate)
    with pytest.raises(ProbeError, match=r"2 calls of vLLM.*behavior='policy'"):
        behavior.end({"completion_ids": torch.tensor([[4, 6]])})


def test_completions_that_trl_changed_are_refused() -> None:
    behavior, _ = kept(Said())
    with pytest.raises(ProbeError, match="not what vLLM generated, from token 1 on"):
        behavior.end({"completion_ids": torch.tensor([[4, 7]])})


@pytest.mark.parametrize("answer", [(None, None), ([[[-1.0]]], [[[5]]])])
def test_answers_without_the_sampled_token_are_refused(answer: Any) -> None:
    said = SimpleNamespace(logprobs=0)
    with pytest.raises(ProbeError, match="no log-prob"):
        EngineAsBehavior(said, 2, lambda: True).generate(lambda: ([[9]], [[4]], *answer))


@pytest.fixture(scope="module")
def colocate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training whose completions come through TRL's vLLM code."""
    engines: list[engine.Engine] = []
    with pytest.MonkeyPatch.context() as patch:
        found = laws.pair(
            tmp_path_factory.mktemp("colocate"),
            prepare=lambda made: engines.append(
                engine.put_into(made, patch, unscored=not trainers.is_old())
            ),
            how={"top_k": 4},
            num_iterations=2,
            max_steps=2,
        )
    return found, engines


def test_the_engine_samples_and_trl_trains_as_without_the_probe(colocate: Any) -> None:
    found, (plain, probed) = colocate
    laws.nothing_changes(found)
    assert plain.asked == [0] * len(plain.asked)
    assert probed.asked == [4] * len(plain.asked)
    assert [ids for ids, _ in plain.said] == [ids for ids, _ in probed.said]


def test_rows_hold_what_the_engine_said(colocate: Any) -> None:
    found, (_, probed) = colocate
    laws.the_dump_is_in_order(found.run)
    laws.a_stale_step_begins_where_the_last_ended(found, 0)
    rows = found.rows
    assert (found.attached.unscored_tokens > 0) != trainers.is_old()  # which cannot take them
    for number, (ids, entries) in enumerate(probed.said):  # numbered as they were generated
        scored = [at for at, token in enumerate(ids) if not math.isnan(entries[at][token].logprob)]
        mine = rows[rows.sequence == number]
        mine = mine[mine.step == mine.step.min()].sort_values("position")
        assert mine.token_id.tolist() == [ids[at] for at in scored]
        for (_, row), at in zip(mine.iterrows(), scored, strict=True):
            best = sorted(
                (name for name in entries[at] if entries[at][name].rank <= 4),
                key=lambda name: entries[at][name].rank,
            )
            assert row.topk_ids.tolist() == best
            said = [entries[at][name].logprob for name in best]
            np.testing.assert_allclose(row.topk_behavior_logprobs, said, rtol=1e-6)
            np.testing.assert_allclose(
                row.behavior_logprob, entries[at][ids[at]].logprob, rtol=1e-6
            )
    assert len(rows) // 2 + found.attached.unscored_tokens == sum(len(i) for i, _ in probed.said)


def test_the_dump_names_the_engine(colocate: Any) -> None:
    metadata = Dump.open(colocate[0].run).metadata("actual")
    assert metadata.behavior["engine"] == "vllm"
    assert metadata.behavior["logprobs_mode"] == "processed_logprobs"


@pytest.mark.slow
def test_the_policy_can_stand_for_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltad.probes.trl import attach

    made = laws.build(tmp_path / "made", max_steps=1)
    asked = engine.put_into(made, monkeypatch)
    attach(made, tmp_path / "run", behavior="policy")
    laws.train(made)
    rows = trainers.rows(tmp_path / "run")
    assert asked.asked == [0]
    assert (rows.pre_logprob == rows.behavior_logprob).all()
