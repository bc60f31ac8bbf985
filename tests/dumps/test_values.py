"""Every impossible value is refused, and named by file, row and column."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltad.dumps import COLUMNS, Batch, DumpError, Metadata, check_batch, findings
from deltad.dumps.lists import rank_order
from deltad.support import SupportError, topk_support

METADATA = Metadata(top_k=3, vocab_size=50, derived={"version": 1, "divergence": "kl"})
ROUNDED = dataclasses.replace(METADATA, readout={"logits_rounded": True})


def good(rows: int = 5) -> dict[str, NDArray[Any]]:
    """Possible values: token 7 is listed first, with probabilities .5, .2, .1."""
    logprobs = np.tile(np.log([0.5, 0.2, 0.1]), (rows, 1)).astype(np.float32)
    index = np.arange(rows, dtype=np.int32)
    columns: dict[str, NDArray[Any]] = {
        "step": index,
        "group": index + 100,
        "sequence": index + 1000,
        "position": index % 3,
        "token_id": np.full(rows, 7, np.int32),
        "advantage": np.linspace(-1, 1, rows).astype(np.float32),
        "in_loss": np.ones(rows, bool),
        "topk_ids": np.tile(np.asarray([7, 8, 9], np.int32), (rows, 1)),
    }
    for time in ("behavior", "pre", "post"):
        columns[f"{time}_logprob"] = logprobs[:, 0].copy()
        columns[f"topk_{time}_logprobs"] = logprobs.copy()
    for name, column in COLUMNS.items():
        if not column.required:
            value: Any = {"string": "text", "int16": 2}.get(column.type, 0.25)
            value = 1.0 if name == "weight" else value
            columns[name] = np.full(rows, value, column.dtype)
    return columns


def batch_of(columns: dict[str, NDArray[Any]], first_row: int = 0) -> Batch:
    vectors = np.ones(len(columns["step"]), dtype=np.bool_)
    return Batch("RUN/f.parquet", first_row, columns, vectors)


def test_possible_values_pass() -> None:
    check_batch(batch_of(good()), METADATA)


def test_no_rows_pass() -> None:
    check_batch(batch_of(good(0)), METADATA)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("position", -1, "must be counted from 0, found -1"),
        ("token_id", -1, r"must be an id in \[0, 49\], found -1"),
        ("token_id", 50, r"must be an id in \[0, 49\], found 50"),
        *(
            (name, value, r"must be finite, found (nan|inf|-inf)")
            for name in ("advantage", "full_kl_direction", "full_tv_direction", "linear_delta")
            for value in (NAN, INF, -INF)
        ),
        *(
            (name, value, r"must be finite, found (inf|-inf)")
            for name in ("linear_delta_own", "linear_delta_batch", "delta_triple")
            for value in (INF, -INF)
        ),
        *(
            ("delta_d_noise", value, r"must be a finite bound of at least 0, found ")
            for value in (INF, -1e-9)
        ),
        *(
            ("weight", value, r"must be finite and at least 1, the inverse .*, found ")
            for value in (NAN, INF, 0.99)
        ),
        *(("d_dot_exact", value, r"must be finite, found ") for value in (INF, -INF)),
        *(
            ("d_post", value, r"must be a divergence in \[0, inf\], found ")
            for value in (INF, -0.01)
        ),
        *(("sampled_rank", value, r"must be a place in \[0, 2\], -1 ") for value in (-3, 3)),
        *(
            (f"{time}_logprob", value, r"must be a finite log-prob of at most 0 .*, found ")
            for time in ("behavior", "pre", "post")
            for value in (NAN, INF, -INF, 2e-4)
        ),
        *(
            (f"{time}_{what}", value, r"must be an? \w+ in \[0, .*\], found ")
            for time in ("pre", "post")
            for what, values in (
                ("collision", (NAN, INF, -0.01, 1.01)),
                ("entropy", (NAN, INF, -0.01, 4.0)),
            )
            for value in values
        ),
        *(
            (f"full_{family}_{time}", value, r"must be a divergence in \[0, .*\], found ")
            for time in ("pre", "post")
            for family, values in (("kl", (NAN, INF, -0.01)), ("tv", (NAN, INF, -0.01, 1.01)))
            for value in values
        ),
    ],
)
@pytest.mark.parametrize("row", [0, 3])
def test_an_impossible_scalar_names_file_row_and_column(
    column: str, value: float, expected: str, row: int
) -> None:
    columns = good()
    columns[column][row] = value
    with pytest.raises(DumpError, match=expected) as caught:
        check_batch(batch_of(columns, first_row=100), METADATA)
    assert str(caught.value).startswith(f"RUN/f.parquet, row {100 + row}, column `{column}`: ")
    problem = caught.value.problem
    assert (problem.path, problem.row, problem.column) == ("RUN/f.parquet", 100 + row, column)


@pytest.mark.parametrize(
    ("column", "slot", "value", "expected"),
    [
        ("topk_ids", 1, 50, r"must hold ids in \[0, 49\] or -1 \(padding\), found 50"),
        ("topk_ids", 1, -2, r"must hold ids in \[0, 49\] or -1 \(padding\), found -2"),
        ("topk_ids", 2, 8, r"must hold an id once, found 8 twice"),
        *(
            (f"topk_{time}_logprobs", slot, value, rf"log-prob.* found .* at id {7 + slot}")
            for time in ("behavior", "pre", "post")
            for slot in (1, 2)
            for value in (NAN, INF, 2e-4)
        ),
        ("topk_pre_logprobs", 2, -INF, "must be a finite log-prob"),
        ("topk_post_logprobs", 2, -INF, "must be a finite log-prob"),
        *(
            (f"topk_{time}_logprobs", 0, -0.6, rf"must agree with `{time}_logprob` .*found -0.6")
            for time in ("behavior", "pre", "post")
        ),
        ("topk_behavior_logprobs", 0, -INF, "must agree with `behavior_logprob`"),
        *(
            (f"topk_{time}_logprobs", 1, -0.6, r"must sum to 1 \+ 0.0001 at most, found 1.14881")
            for time in ("behavior", "pre", "post")
        ),
    ],
)
def test_an_impossible_list_names_file_row_and_column(
    column: str, slot: int, value: float, expected: str
) -> None:
    columns = good()
    columns[column][2, slot] = value
    with pytest.raises(DumpError, match=expected) as caught:
        check_batch(batch_of(columns), METADATA)
    assert str(caught.value).startswith(f"RUN/f.parquet, row 2, column `{column}`: ")


def test_minus_infinity_is_allowed_in_the_behaviors_list() -> None:
    columns = good()
    columns["topk_behavior_logprobs"][:, 1:] = -INF
    check_batch(batch_of(columns), METADATA)


@pytest.mark.parametrize("garbage", [NAN, INF, 1e30, 7.0, -INF])
def test_padding_is_never_read(garbage: float) -> None:
    columns = good()
    columns["topk_ids"][1, 1:] = -1
    columns["topk_ids"][3] = -1  # the engine returned nothing
    for time in ("behavior", "pre", "post"):
        columns[f"topk_{time}_logprobs"][columns["topk_ids"] < 0] = garbage
    check_batch(batch_of(columns), METADATA)


def test_the_sampled_token_outside_the_list_adds_to_the_mass() -> None:
    columns = good()
    columns["token_id"][4] = 30
    for name in ("behavior_logprob", "pre_logprob", "post_logprob"):
        columns[name][4] = np.log(0.19)
    check_batch(batch_of(columns), METADATA)
    columns["pre_logprob"][4] = np.log(0.21)
    with pytest.raises(DumpError, match=r"row 4, column `topk_pre_logprobs`: .* found 1.01"):
        check_batch(batch_of(columns), METADATA)


def test_rounding_counts_as_zero_and_one() -> None:
    columns = good()
    for time in ("behavior", "pre", "post"):
        columns[f"topk_{time}_logprobs"][1] = [9e-5, -12, -13]
        columns[f"{time}_logprob"][1] = 5e-5
        columns[f"topk_{time}_logprobs"][2, 1:] = np.log([0.3, 0.20009])
    check_batch(batch_of(columns), METADATA)


def test_rounded_logits_widen_log_prob_and_mass_but_not_agreement() -> None:
    columns = good()
    columns["topk_pre_logprobs"][1] = [0.04, -12, -13]
    columns["pre_logprob"][1] = 0.04
    columns["topk_pre_logprobs"][2, 1:] = np.log([0.3, 0.24])
    check_batch(batch_of(columns), ROUNDED)
    with pytest.raises(DumpError, match="row 1, column `pre_logprob`"):
        check_batch(batch_of(columns), METADATA)
    columns["pre_logprob"][1] = 0.0398
    with pytest.raises(DumpError, match="must agree with `pre_logprob`"):
        check_batch(batch_of(columns), ROUNDED)


def test_the_first_offending_row_is_named_whatever_the_columns_order() -> None:
    columns = good()
    columns["advantage"][3] = NAN
    columns["linear_delta"][1] = NAN
    with pytest.raises(DumpError, match="row 1, column `linear_delta`"):
        check_batch(batch_of(columns), METADATA)


def test_only_the_columns_asked_for_are_looked_at() -> None:
    columns = good()
    columns["linear_delta"][1] = NAN
    check_batch(batch_of(columns), METADATA, ["pre_logprob", "topk_pre_logprobs"])


def test_null_is_named() -> None:
    nulls = {"advantage": np.asarray([False, True, False, False, False])}
    batch = dataclasses.replace(batch_of(good()), nulls=nulls)
    with pytest.raises(DumpError, match="row 1, column `advantage`: must not be NULL"):
        check_batch(batch, METADATA)


def test_all_findings_are_listed_with_all_their_rows() -> None:
    columns = good()
    columns["advantage"][[1, 4]] = NAN
    columns["topk_ids"][2] = [7, 8, 8]
    found = {(f.column, f.kind): f.rows.tolist() for f in findings(batch_of(columns), METADATA)}
    assert found == {("advantage", "range"): [1, 4], ("topk_ids", "distinct"): [2]}


def test_rank_order_is_descending_but_for_rounding_and_padding() -> None:
    columns = good()
    columns["topk_behavior_logprobs"][0] = [-1, -1 + 5e-5, -INF]
    columns["topk_ids"][1, 1] = -1
    columns["topk_behavior_logprobs"][1] = [-1, 9, -2]
    assert list(rank_order(batch_of(columns), METADATA)) == []
    columns["topk_behavior_logprobs"][2] = [-2, -3, -1]
    columns["topk_behavior_logprobs"][3] = [-2, -INF, -3]
    (found,) = rank_order(batch_of(columns), METADATA)
    assert found.rows.tolist() == [2, 3]
    assert found.describe(2).endswith("found -1 after -3")


@given(
    st.integers(1, 60).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(-1, 80), min_size=size, max_size=size), min_size=1, max_size=8
        )
    )
)
def test_distinct_ids_are_found_as_by_sets(rows: list[list[int]]) -> None:
    expected = all(len({i for i in row if i >= 0}) == sum(i >= 0 for i in row) for row in rows)
    ids = np.asarray(rows, dtype=np.int32)
    batch = Batch("f", 0, {"topk_ids": ids}, np.ones(len(ids), bool))
    metadata = Metadata(top_k=ids.shape[1], vocab_size=81)
    assert (not list(findings(batch, metadata))) is expected


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 50]))
def test_rules_refuse_what_the_mathematics_refuses(seed: int, top_k: int) -> None:
    """Random rows near every limit: `check_batch` and `topk_support` draw the same line."""
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(60), (1, 1)), axis=1)[:, :top_k].astype(np.int32)
    if rng.random() < 0.2:
        ids[0, rng.integers(top_k)] = rng.choice([-2, -1, 60, ids[0, 0]])
    token = np.asarray([ids[0, 0] if rng.random() < 0.5 else 59], np.int32)
    logits = rng.normal(size=(3, top_k + 1)) * 2
    lists = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    lists += rng.choice([0, 8e-5, 3e-4], size=(3, 1))
    if rng.random() < 0.3:
        lists[rng.integers(3), rng.integers(top_k)] = rng.choice([NAN, -INF, 5e-5, 2e-4, INF])
    listed = np.flatnonzero(ids[0] == token[0])
    scalars = lists[:, listed[0]] if len(listed) else lists[:, -1].copy()
    scalars = scalars + rng.choice([0, 5e-5, 2e-4])
    stored = lists[:, :top_k].astype(np.float32), scalars.astype(np.float32)
    columns: dict[str, NDArray[Any]] = {"token_id": token, "topk_ids": ids}
    for number, time in enumerate(("behavior", "pre", "post")):
        columns[f"{time}_logprob"] = stored[1][number : number + 1]
        columns[f"topk_{time}_logprobs"] = stored[0][number : number + 1]
    refused = False
    try:
        for time in ("pre", "post"):
            topk_support(
                ids,
                columns["topk_behavior_logprobs"].astype(np.float64),
                columns[f"topk_{time}_logprobs"].astype(np.float64),
                token,
                columns["behavior_logprob"].astype(np.float64),
                columns[f"{time}_logprob"].astype(np.float64),
                vocab_size=60,
            )
    except SupportError:
        refused = True
    batch = Batch("f", 0, columns, np.ones(1, dtype=np.bool_))
    metadata = Metadata(top_k=top_k, vocab_size=60)
    assert bool(list(findings(batch, metadata))) is refused
