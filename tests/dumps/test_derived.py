"""Derived columns: the same bits as analysis finds in the vectors, and checked against them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltad.dumps import (
    COLUMNS,
    DERIVED,
    Batch,
    Dump,
    DumpError,
    DumpWriter,
    Metadata,
    Near,
    Problem,
    arithmetic,
    batch_tokens,
    check_dump,
    derive,
    derived_names,
)
from deltad.dumps import derived as module
from deltad.dumps.derived import reference_values, rounded_down

from .factory import edit_metadata, edit_value, make_dump, part_files, read_metadata

Rows = dict[str, NDArray[Any]]
FIRST = "arm=none/seed=0/part-0-0.parquet"


def rows_of(path: Path, **options: Any) -> tuple[Rows, Metadata]:
    """Rows of the factory without derived columns, and their metadata."""
    options = {"ranks": 1, "parts": 1, "row_group_size": 1_000_000, **options}
    run = make_dump(path, arms=["none"], seeds=[0], **options)
    dump = Dump.open(run)
    batch = read(dump)
    return dict(batch.columns), dataclasses.replace(dump.metadata("none"), rows_seen=0)


def write(run: Path, rows: Rows, metadata: Metadata, **options: Any) -> Dump:
    with DumpWriter(run, arm="none", seed=0, metadata=metadata, **options) as writer:
        writer.append(rows)
    return Dump.open(run)


def read(dump: Dump, seed: int = 0) -> Batch:
    """All rows of a seed at once."""
    found = list(dump.batches("none", seed))
    columns = {name: np.concatenate([each[name] for each in found]) for name in found[0].columns}
    return Batch("f", 0, columns, np.concatenate([each.vectors for each in found]))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, Metadata]:
    """Rows with all that is special: padding, −∞, K ≥ n, an empty tail, equal policies."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, top_k = draw(st.integers(0, 40)), draw(st.sampled_from([1, 2, 7, 8, 20, 33]))
    vocab = draw(st.sampled_from([1, 2, top_k, top_k + 1, 50, 151_936]))
    listed = np.argsort(rng.random((rows, min(vocab, 60))), axis=1)[:, :top_k].astype(np.int32)
    ids = np.full((rows, top_k), -1, np.int32)
    ids[:, : listed.shape[1]] = listed
    ids[np.arange(top_k) >= rng.integers(0, top_k + 1, (rows, 1))] = -1
    columns: Rows = {"topk_ids": ids, "token_id": rng.integers(0, min(vocab, 60), rows, np.int32)}
    weight = rng.exponential(size=(rows, top_k + 2)) ** draw(st.sampled_from([1, 4, 30]))
    weight[:, -1] *= draw(st.sampled_from([0, 1e-9, 1]))  # what lies beyond the support
    columns["advantage"] = rng.normal(size=rows).astype(np.float32)
    same = rng.random(rows) < 0.2
    for time in ("behavior", "pre", "post"):
        if time != "behavior":
            moved = weight * np.exp(rng.normal(size=weight.shape) * 0.3)
            weight = np.where(same[:, None], weight, moved)
        logprob = np.log(np.maximum(weight / weight.sum(axis=1, keepdims=True), 1e-30))
        values = logprob[:, :top_k].astype(np.float32)
        if time == "behavior":
            values[rng.random(values.shape) < 0.1] = -np.inf
        scalar = logprob[:, top_k].astype(np.float32)
        hit = ids == columns["token_id"][:, None]
        scalar = np.where(hit.any(axis=1), values[np.arange(rows), hit.argmax(axis=1)], scalar)
        columns[f"{time}_logprob"] = np.maximum(scalar, np.float32(-80))
        values[ids < 0] = np.nan
        columns[f"topk_{time}_logprobs"] = values
    columns["pre_collision"] = rng.random(rows).astype(np.float32)
    vectors = rng.random(rows) < draw(st.sampled_from([0.6, 1.0]))
    for name in columns:
        if COLUMNS[name].is_vector:
            columns[name][~vectors] = -1 if name == "topk_ids" else np.nan
    metadata = Metadata(top_k=top_k, vocab_size=vocab)
    return Batch("f", 0, columns, vectors), metadata


@settings(max_examples=60)
@given(batches(), st.sampled_from(["kl", "tv"]), st.sampled_from([1, 3, 1024]))
def test_derived_values_are_those_of_the_vectors_to_the_bit(
    made: tuple[Batch, Metadata], divergence: str, block: int
) -> None:
    batch, metadata = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        found = derive(batch, metadata, divergence=divergence)
    assert tuple(found) == DERIVED
    before, after = (batch_tokens(batch, metadata, post=post) for post in (False, True))
    expected = {
        "d_pre": before.divergence(divergence),
        "d_post": after.divergence(divergence),
        **{
            f"d_dot_{tail}": before.direction(divergence, tail).total
            for tail in ("aggregated", "uniform", "exact")
        },
        "d_dot_local": before.direction(divergence, "uniform").local,
    }
    if batch.vectors.all():
        plain = reference_values(batch, metadata, divergence=divergence)
        assert all(np.array_equal(plain[name], found[name]) for name in DERIVED)
    for name, values in expected.items():
        assert found[name].dtype == np.float64
        np.testing.assert_array_equal(found[name][batch.vectors], values, strict=True)
        assert np.isnan(found[name][~batch.vectors]).all()
    # Ties: a threshold that is some token's own D leaves it inside either way.
    for threshold in expected["d_pre"][:5]:
        np.testing.assert_array_equal(
            found["d_pre"][batch.vectors] > threshold, expected["d_pre"] > threshold
        )
    for row in range(len(batch)):
        listed = batch["topk_ids"][row].tolist()
        rank = listed.index(batch["token_id"][row]) if batch["token_id"][row] in listed else -1
        assert found["sampled_rank"][row] == (rank if batch.vectors[row] else -2)


def test_what_was_not_read_is_not_derived() -> None:
    pre = {"topk_pre_logprobs"}
    assert derived_names(set()) == ()
    assert derived_names({"topk_post_logprobs", "pre_collision"}) == ()
    assert set(DERIVED) - set(derived_names(pre)) == {"d_post", "d_dot_exact"}
    assert derived_names(pre | {"topk_post_logprobs", "pre_collision"}) == DERIVED


@given(st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.05, 0.15, np.nan]))
def test_rounding_down_never_crosses_a_threshold(value: float) -> None:
    found = rounded_down(np.asarray([value]))
    assert found.dtype == np.float64
    if np.isnan(value):
        assert np.isnan(found[0])
        return
    assert found[0] <= value
    with np.errstate(over="ignore"):
        nearest = float(np.float32(value))
    assert found[0] == nearest or nearest > value


def test_a_writer_derives_what_it_stores(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made")
    dump = write(tmp_path / "RUN", rows, metadata, rows_per_group=7)
    assert dump.metadata("none").derived == {
        "version": 1, "divergence": "kl", "arithmetic": arithmetic(),
    }  # fmt: skip
    assert dump.metadata("none").derived_divergence == "kl"
    batch = read(dump)
    expected = derive(batch, metadata)
    for name in DERIVED:
        np.testing.assert_array_equal(batch[name], expected[name])
    assert len({batch[name].tobytes() for name in DERIVED}) == len(DERIVED)
    assert check_dump(dump.path) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"update": {"mask": "none", "divergence": "tv"}}, "tv"),
        ({"update": {"mask": "none"}}, "kl"),
        ({"stored": {"rule": "above", "divergence": "tv", "threshold": 0.0}}, "tv"),
        ({"derived": {"version": 7, "divergence": "tv"}}, "tv"),
    ],
)
def test_the_divergence_is_that_of_the_rules_or_the_update(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=12)
    dump = write(tmp_path / "RUN", rows, dataclasses.replace(metadata, **changes))
    assert dump.metadata("none").derived_divergence == expected
    batch = read(dump)
    tokens = batch_tokens(batch, metadata)
    np.testing.assert_array_equal(batch["d_pre"], tokens.divergence(expected))
    assert check_dump(dump.path) == []


def test_derived_columns_are_given_only_to_a_writer_that_does_not_derive(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", derived=True)
    with pytest.raises(DumpError, match="column `d_pre`: is filled by the writer"):
        write(tmp_path / "A", rows, metadata)
    dump = write(tmp_path / "B", rows, metadata, derived=False)
    assert dump.metadata("none").derived == metadata.derived
    for name in DERIVED:
        np.testing.assert_array_equal(read(dump)[name], rows[name])
    del rows["d_pre"]
    plain = {name: values for name, values in rows.items() if name not in DERIVED}
    bare = dataclasses.replace(metadata, derived=None)
    dump = write(tmp_path / "C", plain, bare, derived=False)
    assert not set(DERIVED) & set(dump.parts[0].columns)
    assert dump.metadata("none").derived is None


def test_columns_of_other_definitions_are_someones_own(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1, derived=True)
    edit_metadata(run / FIRST, derived={"version": 2, "divergence": "kl"})
    dump = Dump.open(run)
    assert dump.metadata("none").derived_divergence is None
    assert not set(DERIVED) & dump.optional_columns("none")
    edit_metadata(run / FIRST, drop=["derived"])
    edit_value(run / FIRST, "d_pre", 3, 99.0)
    assert check_dump(run) == []


def one(run: Path) -> Problem:
    problems = check_dump(run, strict=False)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_value_that_is_another_is_found(tmp_path: Path, name: str) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1, derived=True)
    value = pq.ParquetFile(run / FIRST).read()[name][6].as_py()
    other = float(np.nextafter(value, 2.0)) if name != "sampled_rank" else (value + 1) % 3
    edit_value(run / FIRST, name, 6, other)
    problem = one(run)
    assert (problem.row, problem.column, problem.kind) == (6, name, "derived")
    assert f"must be what the row's vectors give, {value:.17g}, found" in problem.message
    # Where another machine wrote the file, last bits may differ, and no more.
    edit_metadata(
        run / FIRST, derived={"version": 1, "divergence": "kl", "arithmetic": "elsewhere"}
    )
    if name != "sampled_rank":
        assert check_dump(run) == []
        edit_value(run / FIRST, name, 6, value + 2e-6)
    assert "within 1e-06, found" in one(run).message


def test_a_missing_derived_value_is_found(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], ranks=1, parts=1, derived=True)
    edit_value(run / FIRST, "d_post", 2, None)
    assert "found nan" in one(run).message


def test_a_zero_step_leaves_d_as_it_was(tmp_path: Path) -> None:
    options: Any = {"arms": ["zero-step"], "seeds": [0], "ranks": 1, "parts": 1, "derived": True}
    run = make_dump(tmp_path / "RUN", null_vectors=0.3, **options)
    assert check_dump(run) == []
    file = part_files(run)[0]
    row = int(np.flatnonzero(next(Dump.open(run).batches("zero-step", 0)).vectors)[2])
    value = pq.ParquetFile(file).read()["d_post"][row].as_py()
    edit_value(file, "d_post", row, value + 1.0)
    kinds = {(each.row, each.column, each.kind) for each in check_dump(run, strict=False)}
    assert kinds == {(row, "d_post", "zero step"), (row, "d_post", "derived")}


NEAR = Near(threshold=0.05, sample=0.25)


def test_vectors_are_left_out_where_d_is_small_but_for_a_sample(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=400, drift=0.5)
    full = read(write(tmp_path / "A", rows, metadata))
    dump = write(tmp_path / "B", rows, metadata, vectors=NEAR, rows_per_group=150)
    assert dump.metadata("none").vectors == NEAR.to_json_object()
    assert dump.metadata("none").near == NEAR
    assert check_dump(dump.path) == []
    near = read(dump)
    inside = full["d_pre"] < 0.05
    assert near.vectors[~inside].all()
    assert 0.15 < near.vectors[inside].mean() < 0.35
    for name, column in COLUMNS.items():
        if column.is_vector or name not in DERIVED:
            stored = near.vectors if column.is_vector else np.ones(400, bool)
            np.testing.assert_array_equal(near[name][stored], full[name][stored])
    for name in DERIVED:
        np.testing.assert_array_equal(near[name][near.vectors], full[name][near.vectors])
    rest = ~near.vectors
    for name in ("d_pre", "d_post"):
        np.testing.assert_array_equal(near[name][rest], rounded_down(full[name][rest]))
    assert all(np.isnan(near[name][rest]).all() for name in DERIVED if "dot" in name)
    np.testing.assert_array_equal(near["sampled_rank"], full["sampled_rank"])


def test_the_sample_depends_on_nothing_but_the_token(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=200, drift=0.5)
    order = np.random.default_rng(0).permutation(200)
    mixed = {name: values[order] for name, values in rows.items()}
    first = read(write(tmp_path / "A", rows, metadata, vectors=NEAR))
    second = read(write(tmp_path / "B", mixed, metadata, vectors=NEAR))
    np.testing.assert_array_equal(first.vectors[order], second.vectors)
    with DumpWriter(tmp_path / "C", arm="none", seed=1, metadata=metadata, vectors=NEAR) as writer:
        writer.append(rows)
    other = read(Dump.open(tmp_path / "C"), 1)
    assert (other.vectors != first.vectors).any()


def test_a_vector_that_the_rule_forbids_or_misses_is_found(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=200, drift=0.5)
    dump = write(tmp_path / "RUN", rows, metadata, vectors=NEAR)
    batch, file = read(dump), dump.parts[0].path
    row = int(np.flatnonzero(~batch.vectors)[0])
    edit_value(file, "d_pre", row, 0.0625)
    problem = one(dump.path)
    assert (problem.row, problem.column, problem.kind) == (row, "topk_ids", "vectors near")
    assert "must be there" in problem.message
    edit_value(file, "d_pre", row, float(np.nextafter(0.03, 0)))
    assert "must be a float32, rounded down" in one(dump.path).message
    edit_value(file, "d_pre", row, 0.03125)
    assert check_dump(dump.path) == []
    edit_metadata(file, vectors={**NEAR.to_json_object(), "sample": 0.0})
    assert "must not be there" in check_dump(dump.path, strict=False)[0].message


def test_what_replaces_vectors_must_be_there(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=12)
    options: Any = {"arm": "a", "seed": 0, "metadata": metadata, "vectors": NEAR}
    with pytest.raises(ValueError, match="`derived` must be true"):
        DumpWriter(tmp_path / "R", **options, derived=False)
    with pytest.raises(ValueError, match="`derived` must be true and the reading 'pre' made"):
        DumpWriter(tmp_path / "R", **options, readings=())
    with pytest.raises(ValueError, match="`vectors` must be 'all' or a Near, got 'near'"):
        DumpWriter(tmp_path / "R", **{**options, "vectors": "near"})
    options["metadata"] = dataclasses.replace(metadata, derived={"version": 1, "divergence": "tv"})
    with pytest.raises(ValueError, match="of one divergence, got kl and tv"):
        DumpWriter(tmp_path / "R", **options)
    with (
        DumpWriter(tmp_path / "R", arm="a", seed=0, metadata=metadata, vectors=NEAR) as writer,
        pytest.raises(ValueError, match="`vectors_stored` is found by the writer"),
    ):
        writer.append(rows, vectors_stored=np.ones(12, bool))


PAIR = {
    "rule": "disagreement",
    "divergence": "kl",
    "threshold": 0.15,
    "criterion": "predictive-kl-aggregated",
    "baseline": "ratio",
    "outside": 0,
}


def test_disagreement_tokens_alone_are_stored_and_those_outside_are_counted(
    tmp_path: Path,
) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=600)
    full = read(write(tmp_path / "A", rows, metadata))
    tokens = batch_tokens(full, metadata)
    ratio = tokens.advantage * tokens.ratio_direction > 0
    ours = tokens.advantage * full["d_dot_aggregated"] > 0
    outside = full["d_pre"] > 0.15
    wanted = outside & (ratio != ours)
    assert 3 < wanted.sum() < outside.sum()
    stored = dataclasses.replace(metadata, stored=PAIR)
    half = {name: values[:250] for name, values in rows.items()}
    with DumpWriter(tmp_path / "B", arm="none", seed=0, metadata=stored, rows_per_part=4) as writer:
        writer.append(half)
        writer.append({name: values[250:] for name, values in rows.items()})
        writer.skip(20, outside=7)
    dump = Dump.open(tmp_path / "B")
    assert len(dump.parts) > 1
    found = [each["sequence"] * 10 + each["position"] for each in dump.batches("none", 0)]
    expected = (rows["sequence"] * 10 + rows["position"])[wanted]
    np.testing.assert_array_equal(np.concatenate(found), expected)
    assert dump.rows_seen("none", 0) == 620
    counts = [part.metadata.stored_outside or 0 for part in dump.parts]
    assert sum(counts) == outside.sum() + 7
    assert check_dump(tmp_path / "B") == []


def test_a_row_that_is_no_disagreement_is_found(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=300)
    dump = write(tmp_path / "RUN", rows, dataclasses.replace(metadata, stored=PAIR))
    file = dump.parts[0].path
    row = 1
    edit_value(file, "advantage", row, 0.0)
    problem = one(dump.path)
    assert (problem.row, problem.kind) == (row, "stored disagreement")
    edit_metadata(file, stored={**PAIR, "outside": 2})
    assert "`outside` of `stored` must lie between" in one(dump.path).message
    edit_metadata(file, stored={**PAIR, "outside": 301})
    assert "and `rows_seen`: in [" in one(dump.path).message


def test_outside_is_counted_where_it_is_not_stored(tmp_path: Path) -> None:
    _, metadata = rows_of(tmp_path / "made", rows=12)
    above = {"rule": "above", "divergence": "kl", "threshold": 0.1}
    for number, (stored, outside) in enumerate(((PAIR, 4), (above, 1))):
        changed = dataclasses.replace(metadata, stored=stored)
        with (
            DumpWriter(tmp_path / "R", arm="a", seed=number, metadata=changed) as writer,
            pytest.raises(ValueError, match=r"`outside` must be an integer in \[0, [30]\] of 3"),
        ):
            writer.skip(3, outside=outside)


def test_a_pair_whose_column_is_missing_is_named(tmp_path: Path) -> None:
    rows, metadata = rows_of(tmp_path / "made", rows=12, optional=())
    exact = {**PAIR, "criterion": "predictive-kl-exact"}
    with pytest.raises(DumpError, match=r"cannot be kept.*`pre_collision`"):
        write(tmp_path / "R", rows, dataclasses.replace(metadata, stored=exact))


def test_a_share_of_sequences_needs_weights(tmp_path: Path) -> None:
    sampling = {"sequences": 0.25, "every": 2, "seed": 1}
    options: Any = {"arms": ["none"], "seeds": [0], "ranks": 1, "parts": 1}
    run = make_dump(tmp_path / "A", **options, metadata={"sampling": sampling})
    assert check_dump(run) == []
    run = make_dump(tmp_path / "B", **options, optional=(), metadata={"sampling": sampling})
    with pytest.raises(DumpError, match="column `weight`: is missing, though `sampling`"):
        Dump.open(run)
    assert read_metadata(run / FIRST)["sampling"] == sampling


def test_a_cut_forward_may_move_log_probs_by_its_noise_after_no_step(tmp_path: Path) -> None:
    options: Any = {"arms": ["zero-step"], "seeds": [0], "ranks": 1, "parts": 1, "optional": ()}
    run = make_dump(tmp_path / "RUN", **options)
    file = part_files(run)[0]
    value = pq.ParquetFile(file).read()["post_logprob"][4].as_py()
    edit_value(file, "post_logprob", 4, value - 5e-5)
    assert one(run).kind == "zero step"
    for cut, ok in ({"noise": 1e-6}, True), ({}, True):
        edit_metadata(file, readout={"exact": False, "cut": cut})
        assert (check_dump(run) == []) is ok
    edit_value(file, "post_logprob", 4, value - 8e-5 * 3)
    assert "within 0.0001 nats, the readouts' noise, after a step" in one(run).message
