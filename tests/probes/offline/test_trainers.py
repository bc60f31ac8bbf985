"""Records that trainers write themselves, in the shape that their code gives them.

The fixtures are written here after prime-rl's `token_export.py` (schema 1) and NeMo-RL's
`grpo.py`; no run of either has made them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltad.analysis import Question, compare
from deltad.dumps import Dump, check_dump
from deltad.probes.offline import NemoRL, OfflineError, PrimeRL, import_dump
from tests.probes.offline.exported import rows_of, write_json

METADATA = {"vocab_size": 50}


def prime_record(rank: int = 0, index: int = 0, step: int = 4, **changes: Any) -> dict[str, Any]:
    """One packed sequence: two tokens of prompt, a sampled one, a tool's, two sampled ones."""
    mask = [False, False, True, False, True, True]
    return {
        "schema_version": 1,
        "step": 40,
        "export_step": step,
        "rank": rank,
        "micro_step": 0,
        "micro_sequence_idx": index,
        "export_sequence_idx": index,
        "run_id": None,
        "env_name": "math",
        "token_ids": [11, 12, 20 + index, 21, 22, 23],
        "position_ids": [0, 1, 2, 3, 4, 5],
        "loss_mask": mask,
        "advantages": [0.0, 0.0, 0.5, 0.0, 0.5, 0.5],
        "losses": [{"rl": {"advantage": 0.5, "mask": each}} for each in mask],
        "rewards": [None] * 6,
        "inference_logprobs": [0.0, 0.0, -1.0, 0.0, -2.0, -0.25],
        "trainer_logprobs": [-3.9, -3.5, -1.125, -7.0, -0.5, -0.25],
        "entropy": [3.9, 3.0, 1.0, 2.0, 1.5, 0.5],
        "mismatch_kl": [None] * 6,
        "log_importance_ratio": [None] * 6,
        "importance_ratio": [None] * 6,
        "prob_delta": [None] * 6,
        "is_masked": [False, False, False, False, True, False],
        "is_masked_high": [False] * 6,
        "is_masked_low": [False] * 6,
    } | changes


def exported(folder: Path) -> Path:
    """An export of one step by two ranks."""
    for rank in (0, 1):
        records = [prime_record(rank, index) for index in (0, 1)]
        write_json(folder / "token_exports" / "step_4" / f"rank_{rank}.jsonl", records)
    (folder / "token_exports" / "step_4" / "STABLE").touch()
    return folder / "token_exports"


def test_prime_rl_gives_a_dump_without_lists(tmp_path: Path) -> None:
    done = import_dump(
        PrimeRL([exported(tmp_path)]),
        tmp_path / "run",
        metadata={**METADATA, "behavior": PrimeRL.behavior, "update": PrimeRL.update},
    )
    assert (done.responses, done.tokens, done.left_out, done.without_lists) == (4, 12, 4, 12)
    assert done.readings == ("pre",)
    rows = rows_of(tmp_path / "run", "actual", 0)
    first = [row for row in rows if row["sequence"] == 0]
    assert [row["position"] for row in first] == [0, 2, 3]
    assert [row["token_id"] for row in first] == [20, 22, 23]
    assert [row["behavior_logprob"] for row in first] == [-1.0, -2.0, -0.25]
    assert [row["pre_logprob"] for row in first] == [-1.125, -0.5, -0.25]
    assert [row["pre_entropy"] for row in first] == [1.0, 1.5, 0.5]
    assert [row["in_loss"] for row in first] == [True, False, True]
    assert {row["group"] for row in rows} == {0}  # one prompt
    assert {row["step"] for row in rows} == {4}
    assert all(row["topk_ids"] is None for row in rows)
    assert not check_dump(tmp_path / "run")


def test_the_masks_by_scalars_are_counted_in_prime_rls_dump(tmp_path: Path) -> None:
    import_dump(PrimeRL([exported(tmp_path)]), tmp_path / "run", metadata=METADATA)
    found = compare(Dump.open(tmp_path / "run"), Question(), ["binary-kl", "clip-higher"])
    # r = e^1.5 at the second sampled token, with Â > 0: outside both regions, in all four.
    assert found["clip-higher"].masked["without_topk"] == 4
    assert found["binary-kl"].masked["without_topk"] == 4
    assert "no post columns" in found.unjudged


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 2}, r"`schema_version` must be 1, found 2"),
        ({"token_ids": None}, r"`token_ids` is missing, which a record of prime-rl"),
        ({"token_ids": [1, 2]}, r"`loss_mask` must have an entry for each of the 2 tokens"),
        ({"loss_mask": [1, 0, 0, 0, 0, 0]}, r"the first token cannot have been sampled"),
        ({"advantages": [0, "x", 0, 0, 0, 0]}, r"`advantages` at token 1 must be a number"),
        ({"run_id": "other"}, r"`run_id` must be the same in all records, found 'other'"),
        ({"rank": "a"}, r"`rank` must be a whole number, found 'a'"),
        (
            {"trainer_logprobs": [-1.0, -1.0, None, -1.0, -1.0, -1.0]},
            r"position 0, field `pre_logprob`: must be a finite log-prob",
        ),
    ],
)  # fmt: skip
def test_prime_rls_faults_are_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    records = [prime_record(), prime_record(index=1, **change)]
    path = write_json(tmp_path / "rank_0.jsonl", records)
    with pytest.raises(OfflineError, match=says) as caught:
        import_dump(PrimeRL([path]), tmp_path / "run", metadata=METADATA)
    assert "rank_0.jsonl, line 2" in str(caught.value)


def test_a_step_that_is_still_written_is_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / "step_4" / "STABLE").unlink()
    with pytest.raises(OfflineError, match=r"step_4 has no file STABLE"):
        PrimeRL([folder])
    PrimeRL([folder / "step_4" / "rank_0.jsonl"])  # by name it is the user's word


def nemo_record(index: int = 0, **changes: Any) -> dict[str, Any]:
    """One sample, padded to eight tokens."""
    return {
        "idx": index,
        "content": ["text"],
        "rewards": 1.0,
        "input_lengths": 6,
        "token_ids": [11, 12 + index, 20, 21, 22, 23, 0, 0],
        "token_loss_mask": [0, 0, 1, 1, 1, 1, 0, 0],
        "sample_loss_mask": 1.0,
        "advantages": [0.5] * 8,
        "generation_logprobs": [0.0, 0.0, -1.0, -2.0, -0.5, -0.25, 0.0, 0.0],
        "prev_logprobs": [0.0, -3.0, -1.5, -2.0, -0.5, -0.125, 0.0, 0.0],
    } | changes


def test_nemo_rl_gives_a_dump_without_lists(tmp_path: Path) -> None:
    records = [nemo_record(0), nemo_record(1, sample_loss_mask=0.0)]
    path = write_json(tmp_path / "train_data_step7.jsonl", records)
    done = import_dump(NemoRL([path]), tmp_path / "run", metadata=METADATA)
    rows = rows_of(tmp_path / "run", "actual", 0)
    assert done.tokens == 8
    assert {row["step"] for row in rows} == {7}
    assert [row["pre_logprob"] for row in rows[:4]] == [-1.5, -2.0, -0.5, -0.125]
    assert [row["behavior_logprob"] for row in rows[:4]] == [-1.0, -2.0, -0.5, -0.25]
    assert [row["in_loss"] for row in rows] == [True] * 4 + [False] * 4
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4
    assert not check_dump(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("other.jsonl", {}, r"must be named train_data_step<n>\.jsonl"),
        ("train_data_step1.jsonl", {"token_ids": None}, r"`token_ids` is missing"),
        ("train_data_step1.jsonl", {"advantages": [0.5]}, r"`advantages` must have an entry"),
    ],
)
def test_nemo_rls_faults_are_named(
    tmp_path: Path, name: str, change: dict[str, Any], says: str
) -> None:
    path = write_json(tmp_path / name, [nemo_record(**change)])
    with pytest.raises(OfflineError, match=says):
        import_dump(NemoRL([path]), tmp_path / "run", metadata=METADATA)


@pytest.mark.parametrize(
    ("reader", "record", "mask"),
    [(PrimeRL, prime_record, "loss_mask"), (NemoRL, nemo_record, "token_loss_mask")],
)
def test_sequences_of_which_nothing_was_trained_on_are_left_out(
    tmp_path: Path,
    reader: Callable[[list[Path]], PrimeRL | NemoRL],
    record: Callable[..., dict[str, Any]],
    mask: str,
) -> None:
    untrained = record(index=1)
    untrained[mask] = [0] * len(untrained[mask])
    path = write_json(tmp_path / "train_data_step1.jsonl", [record(), untrained])
    done = import_dump(reader([path]), tmp_path / "run", metadata=METADATA)
    assert done.responses == 1
