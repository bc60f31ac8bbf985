"""Columns as data: the schema, what readers accept, and the reference made from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from deltad.dumps import COLUMNS, DERIVED, OPTIONAL, REQUIRED, VECTORS, column_reference, schema

ROOT = Path(__file__).parents[2]


def test_committed_reference_is_generated_from_the_columns() -> None:
    assert (ROOT / "docs" / "columns.md").read_text(encoding="utf-8") == column_reference()


@pytest.mark.process
def test_module_prints_and_writes_the_reference_without_a_word_beside(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltad.dumps.columns"]
    target = tmp_path / "columns.md"
    printed = subprocess.run(command, capture_output=True, check=True)
    subprocess.run([*command, str(target)], capture_output=True, check=True)
    assert printed.stderr == b""
    assert printed.stdout.decode() == target.read_text(encoding="utf-8") == column_reference()


def test_columns_are_those_of_the_contract() -> None:
    assert REQUIRED == (
        "step", "group", "sequence", "position", "token_id", "advantage", "in_loss",
        "behavior_logprob", "pre_logprob", "post_logprob", "topk_ids",
        "topk_behavior_logprobs", "topk_pre_logprobs", "topk_post_logprobs",
    )  # fmt: skip
    assert OPTIONAL == (
        "pre_collision", "post_collision", "pre_entropy", "post_entropy", "full_kl_pre",
        "full_kl_post", "full_kl_direction", "full_tv_pre", "full_tv_post",
        "full_tv_direction", "linear_delta", "linear_delta_own", "linear_delta_sequence",
        "linear_delta_batch", "delta_tenth", "delta_triple", "delta_d_noise", "d_pre", "d_post",
        "d_dot_aggregated", "d_dot_uniform", "d_dot_exact", "d_dot_local", "sampled_rank",
        "weight", "token",
    )  # fmt: skip
    assert DERIVED == (
        "d_pre", "d_post", "d_dot_aggregated", "d_dot_uniform", "d_dot_exact", "d_dot_local",
        "sampled_rank",
    )  # fmt: skip
    assert VECTORS == (
        "topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs", "topk_post_logprobs",
    )  # fmt: skip


def test_columns_that_arms_need_not_share_are_those_after_the_step() -> None:
    free = {name for name, column in COLUMNS.items() if not column.shared}
    assert free == {
        "in_loss", "post_logprob", "topk_post_logprobs", "post_collision", "post_entropy",
        "full_kl_post", "full_tv_post", "linear_delta", "linear_delta_own",
        "linear_delta_sequence", "linear_delta_batch", "delta_tenth", "delta_triple",
        "delta_d_noise", "d_post",
    }  # fmt: skip
    before = {column.before for column in COLUMNS.values() if column.before}
    assert before == {
        "pre_logprob", "topk_pre_logprobs", "pre_collision", "pre_entropy", "full_kl_pre",
        "full_tv_pre", "d_pre",
    }  # fmt: skip
    assert all(COLUMNS[name].type for name in before)


def test_schema_is_nullable_where_columns_say_so_and_for_vectors_where_asked() -> None:
    strict = schema(3, optional=OPTIONAL)
    assert strict.names == list(COLUMNS)
    assert [field.name for field in strict if field.nullable] == [
        "linear_delta_own", "linear_delta_sequence", "linear_delta_batch", "delta_tenth",
        "delta_triple", "delta_d_noise", *DERIVED[:-1],
    ]  # fmt: skip
    loose = schema(3, vectors_nullable=True)
    assert [field.name for field in loose if field.nullable] == list(VECTORS)
    assert loose.field("topk_ids").type == pa.list_(pa.field("element", pa.int32(), False), 3)


def test_schema_refuses_an_unknown_optional_column() -> None:
    with pytest.raises(ValueError, match=r"optional columns are pre_collision, .*'colour'"):
        schema(3, optional=["colour"])


@pytest.mark.parametrize(
    ("name", "found", "accepted"),
    [
        ("step", pa.int32(), True),
        ("step", pa.int64(), True),
        ("step", pa.float32(), False),
        ("in_loss", pa.bool_(), True),
        ("in_loss", pa.int8(), False),
        ("pre_logprob", pa.float32(), True),
        ("pre_logprob", pa.float16(), False),
        ("pre_logprob", pa.float64(), True),
        ("full_kl_pre", pa.float64(), True),
        ("full_kl_pre", pa.float32(), True),
        ("topk_ids", pa.list_(pa.int32(), 4), True),
        ("topk_ids", pa.list_(pa.field("item", pa.int32(), False), 4), True),
        ("topk_ids", pa.list_(pa.int32(), 5), False),
        ("topk_ids", pa.large_list(pa.int32()), True),
        ("topk_ids", pa.list_(pa.int64()), True),
        ("topk_ids", pa.list_(pa.float64(), 4), True),
        ("topk_ids", pa.list_(pa.float32(), 4), False),
        ("topk_pre_logprobs", pa.list_(pa.float16(), 4), False),
        ("token", pa.string(), True),
        ("token", pa.large_string(), True),
        ("token", pa.dictionary(pa.int8(), pa.string()), True),
        ("token", pa.string_view(), True),
        ("token", pa.binary(), False),
        ("token", pa.dictionary(pa.int32(), pa.int32()), False),
    ],
)
def test_readers_accept_types_that_hold_the_same_values(
    name: str, found: pa.DataType, accepted: bool
) -> None:
    assert COLUMNS[name].accepts(found, 4) is accepted
