from __future__ import annotations

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
