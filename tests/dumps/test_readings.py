"""A dump may be without the policy after the step, or without both readings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from deltad.dumps import (
    READINGS,
    REQUIRED,
    Dump,
    DumpError,
    DumpWriter,
    Metadata,
    check_dump,
    part_batches,
    schema,
)
from deltad.dumps.columns import derived_names, missing_columns
from tests.dumps.factory import edit, edit_metadata, edit_value, make_dump, part_files

POST = READINGS["post"]
BOTH = (*READINGS["pre"], *POST)


def without(run: Path, *columns: str, arm: str = "") -> Path:
    """Take columns out of every file, or of one arm's."""
    for file in part_files(run):
        if not arm or file.parent.parent.name == f"arm={arm}":
            edit(file, lambda table: table.drop_columns(list(columns)))
    return run


def test_readings_are_two_columns_each() -> None:
    assert dict(READINGS) == {
        "pre": ("pre_logprob", "topk_pre_logprobs"),
        "post": ("post_logprob", "topk_post_logprobs"),
    }
    assert set(BOTH) < set(REQUIRED)


@pytest.mark.parametrize("columns", [POST, BOTH])
def test_a_dump_without_readings_is_in_order(tmp_path: Path, columns: tuple[str, ...]) -> None:
    run = without(
        make_dump(tmp_path / "run", arms=("none", "ratio"), seeds=(0,), rows=30, null_vectors=0.2),
        *columns,
    )
    dump = Dump.open(run)
    made = {"pre"} if columns == POST else set()
    assert all(dump.readings(arm) == made for arm in dump.arms)
    assert not check_dump(run)
    batch = next(part_batches(dump.parts[0]))
    assert not set(columns) & set(batch.columns)
    with pytest.raises(DumpError, match=r"is missing in this file and is needed here"):
        next(part_batches(dump.parts[0], columns=["topk_ids", columns[0]]))


@pytest.mark.parametrize("name", BOTH)
def test_half_a_reading_is_a_missing_column(tmp_path: Path, name: str) -> None:
    run = without(make_dump(tmp_path / "run", arms=("none",), seeds=(0,), rows=30), name)
    with pytest.raises(DumpError, match=rf"column `{name}`: is missing"):
        Dump.open(run)


def test_after_the_step_is_nothing_without_before(tmp_path: Path) -> None:
    run = without(
        make_dump(tmp_path / "run", arms=("none",), seeds=(0,), rows=30), *READINGS["pre"]
    )
    with pytest.raises(DumpError, match="column `pre_logprob`: is missing"):
        Dump.open(run)
    assert missing_columns(set(REQUIRED) - set(READINGS["pre"])) == list(READINGS["pre"])
    assert missing_columns(set(REQUIRED) - {"step", *BOTH}) == ["step"]


def test_arms_may_differ_in_what_was_read(tmp_path: Path) -> None:
    run = without(
        make_dump(tmp_path / "run", arms=("none", "ratio"), seeds=(0,), rows=30), *POST, arm="ratio"
    )
    dump = Dump.open(run)
    assert dump.readings("ratio") == {"pre"}
    assert dump.readings("none") == {"pre", "post"}
    assert not check_dump(run)
    # What they share is compared all the same.
    file = next(file for file in part_files(run) if "arm=ratio" in str(file))
    edit_value(file, "pre_logprob", 3, -9.0)
    problems = check_dump(run, strict=False)
    assert any(problem.kind == "same in all arms" for problem in problems)


def test_files_of_no_rows_say_nothing_of_readings(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "run", arms=("none",), seeds=(0, 1), rows=30, empty_seeds=(1,))
    for file in part_files(run):
        if file.parent.name == "seed=1":
            edit(file, lambda table: table.drop_columns(list(POST)))
    assert Dump.open(run).readings("none") == {"pre", "post"}


@pytest.mark.parametrize("made", [("pre",), ()])
def test_values_of_what_is_there_are_checked(tmp_path: Path, made: tuple[str, ...]) -> None:
    columns = POST if made else BOTH
    run = without(
        make_dump(tmp_path / "run", arms=("none",), seeds=(0,), rows=30, parts=1), *columns
    )
    edit_value(part_files(run)[0], "behavior_logprob", 2, 0.5)
    with pytest.raises(DumpError, match="row 2, column `behavior_logprob`"):
        check_dump(run)


def test_a_mask_cannot_be_checked_without_the_policy_it_was_decided_on(tmp_path: Path) -> None:
    run = without(make_dump(tmp_path / "run", arms=("ratio",), seeds=(0,), rows=30), *BOTH)
    for file in part_files(run):
        edit(file, lambda table: _all_false(table, "in_loss"))
    assert not check_dump(run)


def _all_false(table: Any, name: str) -> Any:
    index = table.schema.get_field_index(name)
    values = np.zeros(table.num_rows, dtype=bool)
    return table.set_column(index, table.schema.field(index), [values])


def test_rows_above_a_d_cannot_be_told_without_it(tmp_path: Path) -> None:
    run = without(make_dump(tmp_path / "run", arms=("none",), seeds=(0,), rows=30), *BOTH)
    rule = {"rule": "above", "divergence": "kl", "threshold": 0.1}
    for file in part_files(run):
        edit_metadata(file, stored=rule)
    with pytest.raises(DumpError, match="`stored` must have the rule 'all'"):
        Dump.open(run)
    with pytest.raises(ValueError, match="cannot be chosen where the reading 'pre' is missing"):
        DumpWriter(
            tmp_path / "other", arm="a", seed=0, readings=(),
            metadata=Metadata(top_k=2, vocab_size=9, stored=rule),
        )  # fmt: skip


def _rows(*left_out: str) -> dict[str, Any]:
    """Three rows of K = 2."""
    ids = np.array([[1, 2], [2, -1], [3, 0]], dtype=np.int32)
    lists = np.log(np.array([[0.5, 0.25], [0.5, 0.1], [0.4, 0.3]]))
    scalars = np.log(np.array([0.5, 0.5, 0.4]))
    rows: dict[str, Any] = {
        name: np.zeros(3, dtype=np.int32) for name in ("step", "group", "sequence")
    }
    rows |= {"position": np.arange(3), "token_id": ids[:, 0], "in_loss": np.ones(3, dtype=bool)}
    rows |= {"advantage": np.ones(3), "topk_ids": ids}
    for time in ("behavior", "pre", "post"):
        rows |= {f"{time}_logprob": scalars, f"topk_{time}_logprobs": lists}
    return {name: values for name, values in rows.items() if name not in left_out}


@pytest.mark.parametrize(
    ("readings", "columns"), [(("pre", "post"), ()), (("pre",), POST), ((), BOTH)]
)
def test_a_writer_writes_the_readings_it_was_made_for(
    tmp_path: Path, readings: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    metadata = Metadata(top_k=2, vocab_size=9)
    with DumpWriter(tmp_path, arm="a", seed=0, metadata=metadata, readings=readings) as writer:
        writer.append(_rows(*columns))
    with DumpWriter(tmp_path, arm="a", seed=1, metadata=metadata, readings=readings):
        pass  # a file of no rows
    assert Dump.open(tmp_path).readings("a") == set(readings)
    assert not check_dump(tmp_path)
    for file in part_files(tmp_path):
        names = pq.read_schema(file).names
        derived = derived_names(names) if "seed=0" in str(file) else ()
        assert ("d_pre" in derived, "d_post" in derived) == (
            "pre" in readings and "seed=0" in str(file),
            "post" in readings and "seed=0" in str(file),
        )
        assert names == schema(2, readings=readings, optional=derived).names


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda writer: writer.append(_rows(*POST)), DumpError, "`post_logprob`: is missing"),
        (lambda writer: writer.append(_rows()), None, ""),
    ],
)
def test_a_writer_made_for_both_takes_no_less(
    tmp_path: Path, make: Callable[[DumpWriter], None], error: type[Exception] | None, says: str
) -> None:
    with DumpWriter(tmp_path, arm="a", seed=0, metadata=Metadata(top_k=2, vocab_size=9)) as writer:
        if error is None:
            make(writer)
            return
        with pytest.raises(error, match=says):
            make(writer)


def test_a_writer_made_without_a_reading_refuses_its_columns(tmp_path: Path) -> None:
    metadata = Metadata(top_k=2, vocab_size=9)
    with (
        DumpWriter(tmp_path, arm="a", seed=0, metadata=metadata, readings=("pre",)) as writer,
        pytest.raises(DumpError, match=r"`post_logprob`: belongs to the reading 'post'"),
    ):
        writer.append(_rows())
    with pytest.raises(ValueError, match=r"`readings` must be of pre, post"):
        DumpWriter(tmp_path, arm="b", seed=0, metadata=metadata, readings=("post",))
