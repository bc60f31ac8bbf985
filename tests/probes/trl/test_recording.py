from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.dumps import Dump, Metadata
from deltad.probes import ProbeError, Rows
from deltad.probes.trl.recording import RunRecorder
from tests.probes.trl import trainers

PLACE = "arm=actual/seed=0"


def rows(step: int) -> Rows:
    """Two tokens of one step."""
    ids = np.array([[3, 4], [4, 3]], np.int32)
    listed = np.log(np.array([[0.5, 0.25], [0.5, 0.25]], np.float32))
    found: Rows = {
        "step": np.full(2, step, np.int32),
        "group": np.zeros(2, np.int32),
        "sequence": np.zeros(2, np.int32),
        "position": np.arange(2, dtype=np.int32),
        "token_id": ids[:, 0],
        "advantage": np.ones(2, np.float32),
        "in_loss": np.ones(2, np.bool_),
        "topk_ids": ids,
    }
    for name in ("behavior", "pre", "post"):
        found[f"{name}_logprob"] = listed[:, 0]
        found[f"topk_{name}_logprobs"] = listed
    return found


def recorder(run: Path, **options: Any) -> RunRecorder:
    settings: dict[str, Any] = {"arm": "actual", "seed": 0, "rank": 0, **options}
    return RunRecorder(run, metadata=lambda arm: Metadata(top_k=2, vocab_size=9), **settings)


def steps(run: Path) -> list[int]:
    return sorted({int(step) for step in trainers.rows(run).step})


def record(made: RunRecorder, *numbers: int) -> None:
    for number in numbers:
        made(rows(number))


def test_a_checkpoint_completes_a_file(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.begin(0, resumed=False)
    record(made, 0, 1)
    assert not list(tmp_path.glob("arm=*"))
    made.cut()
    assert [part.name for part in (tmp_path / PLACE).glob("part-*")] == ["part-0-0.parquet"]
    made.cut()  # nothing since
    record(made, 2)
    made.cut(whole=True)
    assert sorted(part.name for part in (tmp_path / PLACE).glob("part-*")) == [
        "part-0-0.parquet",
        "part-0-1.parquet",
    ]
    assert steps(tmp_path) == [0, 1, 2]


def test_resuming_makes_the_steps_after_the_checkpoint_once_more(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.begin(0, resumed=False)
    record(made, 0, 1)
    made.cut()
    record(made, 2, 3)
    made.__exit__(RuntimeError, RuntimeError("killed"), None)
    assert steps(tmp_path) == [0, 1, 2, 3]
    again = recorder(tmp_path)
    again.begin(2, resumed=True)
    assert steps(tmp_path) == [0, 1]
    record(again, 2)
    again.cut(whole=True)
    assert steps(tmp_path) == [0, 1, 2]
    assert len(Dump.open(tmp_path).parts) == 2


def test_resuming_in_the_middle_of_a_file_is_refused(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.begin(0, resumed=False)
    record(made, 0, 1, 2)
    made.cut()
    with pytest.raises(ProbeError, match=r"steps 0 to 2 and training resumes at step 1"):
        recorder(tmp_path).begin(1, resumed=True)
    assert steps(tmp_path) == [0, 1, 2]


def test_another_training_in_the_same_place_is_refused_or_replaces(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.begin(0, resumed=False)
    record(made, 0, 1)
    made.cut()
    with pytest.raises(ProbeError, match=r"part-0-0\.parquet exists already"):
        recorder(tmp_path).begin(0, resumed=False)
    other = recorder(tmp_path, existing="replace")
    other.begin(0, resumed=False)
    record(other, 5)
    other.cut()
    assert steps(tmp_path) == [5]
    more = recorder(tmp_path, existing="append")
    more.begin(0, resumed=False)
    record(more, 6)
    more.cut()
    assert steps(tmp_path) == [5, 6]


def test_a_rank_without_rows_writes_a_file_of_none(tmp_path: Path) -> None:
    made = recorder(tmp_path, rank=1)
    made.begin(0, resumed=False)
    made.cut()
    assert not (tmp_path / PLACE).exists()
    made.cut(whole=True)
    assert [part.name for part in (tmp_path / PLACE).glob("part-*")] == ["part-1-0.parquet"]


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_first_step(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProbeError, match=r"`run` must be a folder that can be made, got .*file"):
        recorder(tmp_path / place).begin(0, resumed=False)
