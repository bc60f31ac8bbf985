"""prime-rl's token exports."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from deltad.probes.engines import EngineError, read_prime_rl


def record(**changes: Any) -> dict[str, Any]:
    """From documentation: a line as prime-rl's exporter writes it (schema 1)."""
    return {
        "schema_version": 1, "step": 4, "export_step": 4, "rank": 0, "micro_step": 0,
        "micro_sequence_idx": 0, "export_sequence_idx": 0, "run_id": None, "env_name": "math",
        "token_ids": [7, 8, 3, 5, 9, 2], "position_ids": [0, 1, 2, 3, 4, 5],
        "loss_mask": [False, False, True, True, False, True],
        "advantages": [0.0, 0.0, 0.5, 0.5, 0.0, 0.5],
        "inference_logprobs": [0.0, 0.0, -0.5, None, 0.0, -1.5],
        "trainer_logprobs": [-1.0, -2.0, -0.6, -0.7, -3.0, -1.4],
        "entropy": [1.0] * 6, "is_masked": [None] * 6,
        **changes,
    }  # fmt: skip


def test_from_documentation_a_record_holds_the_sampled_tokens_alone() -> None:
    (response,) = read_prime_rl(record(), temperature=1.0)
    assert response.token_ids.tolist() == [3, 5, 2]
    np.testing.assert_array_equal(response.logprobs, [-0.5, np.nan, -1.5])
    assert response.listed == 0
    assert response.prompt_ids is not None
    assert response.prompt_ids.tolist() == [7, 8]
    assert response.missing_counts() == {"logprob": {"null": 1}, "topk": {"not-returned": 3}}
    assert (response.mode, response.temperature) == ("processed", 1.0)


def test_from_documentation_lines_are_read_as_records() -> None:
    lines = [json.dumps(record()), "\n", json.dumps(record(loss_mask=[False] * 6))]
    for given in (lines, "\n".join(lines), [record(), record(loss_mask=[False] * 6)]):
        first, empty = read_prime_rl(given)
        assert first.token_ids.tolist() == [3, 5, 2]
        assert len(empty) == 0


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (["{"], "line 1: a line must be JSON"),
        (["[" * 100_000], "line 1: a line must be JSON"),
        ([5], "request 0: a record must be an object, got 5"),
        (record(schema_version=2), "`schema_version` must be 1, got 2"),
        (record(inference_logprobs=None), "`inference_logprobs` must be a list, got None"),
        (record(loss_mask=[True]), "columns must be of one length"),
        (record(token_ids=[7, 8, 3.5, 5, 9, 2]), "position 2: `token_ids` must be a token id"),
        (record(inference_logprobs=[0.0] * 5 + ["x"]), "position 2: a log-prob must be a number"),
    ],
)
def test_malformed_records_are_refused_with_their_place(records: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message.replace("{", "{")):
        read_prime_rl(records)
