"""The first look never calls a block sound that is not, nor a token inside that is outside."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.shaped import shaped_rows
from deltad.analysis.question import Question
from deltad.analysis.screening import LISTS, Screen, block_rows
from deltad.dumps import Batch, DumpError, Metadata, batch_tokens, check_batch

K = 6
N = 400
COUNT = 300
METADATA = Metadata(top_k=K, vocab_size=N)


def make(seed: int = 0, *, top_k: int = K, vocab: int = N, count: int = COUNT) -> Batch:
    """A sound batch."""
    columns: dict[str, NDArray[Any]] = dict(shaped_rows(count, seed, top_k=top_k, vocab=vocab))
    # Strides may meet in so small a vocabulary.
    draw = np.random.default_rng(seed)
    ids = np.argsort(draw.random((count, vocab)), axis=1)[:, : top_k + 1].astype(np.int32)
    hit = columns["topk_ids"] == columns["token_id"][:, None]
    slot = np.where(hit.any(axis=1), hit.argmax(axis=1), top_k)
    columns["topk_ids"] = np.ascontiguousarray(ids[:, :top_k])
    columns["token_id"] = ids[np.arange(count), slot]
    for name, scalar in LISTS:
        listed = slot < top_k
        entry = columns[name][np.arange(count), np.minimum(slot, top_k - 1)]
        columns[scalar] = np.where(listed, entry, columns[scalar])
    return Batch("part", 0, columns, np.ones(count, np.bool_))


def look(batch: Batch, question: Question, metadata: Metadata = METADATA) -> Any:
    """What the first look says of the whole batch."""
    return Screen(metadata, question).candidates(batch, slice(0, len(batch)))


@pytest.mark.parametrize("divergence", ["kl", "tv"])
@pytest.mark.parametrize("threshold", [0.0, 1e-4, 0.15])
def test_every_token_outside_is_a_candidate_and_few_others_are(
    divergence: str, threshold: float
) -> None:
    batch = make(3, count=block_rows(K))
    check_batch(batch, METADATA)
    d = batch_tokens(batch, METADATA).divergence(divergence)
    # A token that lies exactly on the threshold is inside, one a bit above it outside.
    for delta in (threshold, float(np.sort(d)[-20]), np.nextafter(float(np.sort(d)[-40]), 0)):
        found = look(batch, Question(divergence=divergence, threshold=float(delta)))
        outside = np.flatnonzero(d > delta)
        assert set(outside) <= set(found)
        if delta >= 0.01:
            assert len(found) <= len(outside) + 0.002 * len(batch) + 2


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_a_tail_at_the_edge_of_float32_is_bounded(divergence: str) -> None:
    batch = make(1)
    draw = np.random.default_rng(5)
    for name, _ in LISTS:
        # All mass on the first id but for a tail of 1e-12 to 1e-4, and log-probs down to −80.
        tail = np.exp(draw.uniform(math.log(1e-12), math.log(1e-4), COUNT))
        values = np.sort(draw.uniform(-80, -20, (COUNT, K)), axis=1)[:, ::-1].copy()
        values[:, 0] = np.log1p(-tail)
        batch.columns[name][:] = values
    slot = (batch["topk_ids"] == batch["token_id"][:, None]).argmax(axis=1)
    for name, scalar in LISTS:
        batch.columns[scalar][:] = batch[name][np.arange(COUNT), slot]
        batch.columns["token_id"][:] = batch["topk_ids"][np.arange(COUNT), slot]
    d = batch_tokens(batch, METADATA).divergence(divergence)
    for delta in (1e-9, 1e-6, 1e-4, 1e-3, *np.quantile(d, [0.2, 0.6, 0.9]).tolist()):
        found = look(batch, Question(divergence=divergence, threshold=max(0.0, delta)))
        assert found is not None
        assert set(np.flatnonzero(d > delta)) <= set(found)


def test_probability_zero_in_the_behavior_policy_is_no_obstacle() -> None:
    batch = make(2)
    batch.columns["topk_behavior_logprobs"][::3, -1] = -np.inf
    keep = batch["topk_ids"][:, -1] != batch["token_id"]
    batch = Batch("part", 0, {n: v[keep] for n, v in batch.columns.items()}, batch.vectors[keep])
    check_batch(batch, METADATA)
    d = batch_tokens(batch, METADATA).divergence("kl")
    found = look(batch, Question())
    assert set(np.flatnonzero(d > 0.15)) <= set(found)
    assert len(found) < len(d) / 4


def test_rows_without_topk_are_passed_over() -> None:
    batch = make(4)
    bare = np.arange(COUNT) % 3 == 0
    for name in ("topk_ids", *(name for name, _ in LISTS)):
        batch.columns[name][bare] = -1 if name == "topk_ids" else np.nan
    batch = Batch("part", 0, batch.columns, ~bare)
    check_batch(batch, METADATA)
    found = look(batch, Question(threshold=0.01))
    d = batch_tokens(batch, METADATA).divergence("kl")
    assert set(np.flatnonzero(~bare)[d > 0.01]) <= set(found)
    assert not bare[found].any()
    none = Batch("part", 0, batch.columns, np.zeros(COUNT, np.bool_))
    assert look(none, Question()).tolist() == []


def test_a_support_without_tail_leaves_the_judgement_to_float64() -> None:
    metadata = Metadata(top_k=K, vocab_size=K + 1)
    batch = make(6, vocab=K + 1)
    found = look(batch, Question(), metadata)
    assert found is None or found.tolist() == list(range(COUNT))


BREAKS = st.sampled_from(
    [
        "nan", "inf", "minus infinity", "positive", "mass", "agreement", "twice", "id", "padding",
        "barely positive",
    ]
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    kind=BREAKS,
    row=st.integers(0, COUNT - 1),
    slot=st.integers(0, K - 1),
    which=st.integers(0, 2),
    seed=st.integers(0, 3),
)
def test_what_the_check_refuses_is_never_called_sound(
    kind: str, row: int, slot: int, which: int, seed: int
) -> None:
    batch = make(seed)
    name, scalar = LISTS[which]
    values, ids = batch.columns[name], batch.columns["topk_ids"]
    if kind in ("nan", "inf", "minus infinity"):
        values[row, slot] = {"nan": np.nan, "inf": np.inf}.get(kind, -np.inf)
    elif kind == "positive":
        values[row, slot] = 0.01
    elif kind == "barely positive":
        values[row] = -30.0
        values[row, slot] = 9e-5
    elif kind == "mass":
        values[row] = math.log(1.001 / K)
    elif kind == "agreement":
        batch.columns[scalar][row] -= 2e-4
    elif kind == "twice":
        ids[row, slot] = ids[row, (slot + 1) % K]
    elif kind == "id":
        ids[row, slot] = N
    else:
        ids[row, slot] = -1
    found = look(batch, Question())
    try:
        check_batch(batch, METADATA)
    except DumpError:
        assert found is None
    else:
        if found is not None:
            d = batch_tokens(batch, METADATA).divergence("kl")
            assert set(np.flatnonzero(d > 0.15)) <= set(found)
