from __future__ import annotations

import numpy as np
import pytest

from deltad.dumps import Dump
from tests.probes.trl import laws

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> laws.Pair:
    """Two iterations over each generation, two micro-batches a step."""
    return laws.pair(tmp_path_factory.mktemp("stale"), num_iterations=2)


def test_logs_and_weights_are_those_without_the_probe(stale: laws.Pair) -> None:
    laws.nothing_changes(stale)


def test_a_policy_that_has_not_moved_has_no_divergence(stale: laws.Pair) -> None:
    laws.on_policy_steps_have_no_divergence(stale, (0, 2))


def test_a_stale_step_begins_where_the_last_ended(stale: laws.Pair) -> None:
    laws.a_stale_step_begins_where_the_last_ended(stale, 0)
    laws.a_stale_step_begins_where_the_last_ended(stale, 2)


def test_rows_are_those_of_a_forward_of_our_own(stale: laws.Pair) -> None:
    laws.rows_are_those_of_a_forward_of_our_own(stale, {0: 0, 1: 0, 2: 2, 3: 2})
    laws.groups_are_prompts(stale)


def test_the_dump_is_in_order_and_says_what_it_is_of(stale: laws.Pair) -> None:
    laws.the_dump_is_in_order(stale.run)
    metadata = Dump.open(stale.run).metadata("actual")
    assert (metadata.top_k, metadata.vocab_size, metadata.temperature) == (20, 64, 0.7)
    assert metadata.behavior["source"].startswith("the policy")
    assert metadata.readout["verified"]
    assert metadata.readout["exact"]
    assert metadata.update["mask"] == "trl-dapo"
    assert metadata.extra["trainer"]["num_iterations"] == 2


def test_in_loss_is_what_trls_clip_lets_pass(stale: laws.Pair) -> None:
    rows = stale.rows[stale.rows.step == 1]
    ratio = np.exp(rows.pre_logprob - rows.behavior_logprob)
    up, down = rows.advantage > 0, rows.advantage < 0
    clipped = (up & (ratio > 1.2)) | (down & (ratio < 0.8))
    near = ((ratio - 1.2).abs() < 1e-4) | ((ratio - 0.8).abs() < 1e-4)
    assert (rows.in_loss == ~clipped)[~near].all()
    assert 5 < clipped.sum() < len(rows) - 5
    assert stale.rows[stale.rows.step == 0].in_loss.all()


def test_steps_are_logged_among_the_trainers_metrics(stale: laws.Pair) -> None:
    logged = [entry for entry in stale.probed.state.log_history if "loss" in entry]
    assert len(logged) == 4
    for entry in logged:
        rows = stale.rows[stale.rows.step == entry["step"] - 1]
        before = laws.divergence(rows)
        assert entry["deltad/outside_rate"] == pytest.approx((before > 0.15).mean())
        assert entry["deltad/d_pre_mean"] == pytest.approx(before.mean(), abs=1e-6)
        assert entry["deltad/in_loss_rate"] == pytest.approx(rows.in_loss.mean())
