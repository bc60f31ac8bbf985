"""Rows of a dump as the mathematics takes them, against plain loops over the stored values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltad.dumps import (
    COLUMNS,
    Dump,
    batch_support,
    batch_tokens,
    scalar_tokens,
    token_columns,
)
from deltad.masks import CRITERIA, CriterionError

from .factory import make_dump

KL = [name for name, criterion in CRITERIA.items() if criterion.family in (None, "kl")]
TV = [name for name, criterion in CRITERIA.items() if criterion.family in (None, "tv")]


def oracle(row: dict[str, Any], time: str, vocab_size: int) -> tuple[float, float]:
    """KL and TV of one row by the definitions."""
    pairs = [
        (math.exp(mu), math.exp(pi))
        for i, mu, pi in zip(
            row["topk_ids"],
            row["topk_behavior_logprobs"],
            row[f"topk_{time}_logprobs"],
            strict=True,
        )
        if i >= 0
    ]
    if row["token_id"] not in row["topk_ids"]:
        pairs.append((math.exp(row["behavior_logprob"]), math.exp(row[f"{time}_logprob"])))
    mu_tail = max(0.0, 1 - math.fsum(mu for mu, _ in pairs))
    pi_tail = max(0.0, 1 - math.fsum(pi for _, pi in pairs))
    if len(pairs) >= vocab_size:
        mu_tail = pi_tail = 0.0
    kl = math.fsum(mu * math.log(mu / pi) for mu, pi in pairs if mu > 0)
    if mu_tail > 0:
        kl += mu_tail * math.log(mu_tail / max(pi_tail, 1e-12))
    tv = (math.fsum(abs(mu - pi) for mu, pi in pairs) + abs(mu_tail - pi_tail)) / 2
    return kl, tv


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("top_k", [1, 4, 24, 50])
def test_divergences_of_stored_rows_are_those_of_the_definition(
    tmp_path: Path, top_k: int, post: bool
) -> None:
    run = make_dump(tmp_path / "RUN", arms=["none"], seeds=[0], top_k=top_k, null_vectors=0.3)
    dump = Dump.open(run)
    columns = token_columns(post=post)
    checked = 0
    for batch in dump.batches("none", 0, columns=columns, batch_rows=9):
        assert set(batch.columns) == set(columns)
        rows = [
            {name: batch[name][i].tolist() for name in columns}
            for i in np.flatnonzero(batch.vectors)
        ]
        tokens = batch_tokens(batch, dump.metadata("none"), post=post)
        expected = [oracle(row, "post" if post else "pre", 24) for row in rows]
        for place, name in enumerate(("kl", "tv")):
            found = tokens.divergence(name)
            assert found.dtype == np.float64
            np.testing.assert_allclose(
                found, [pair[place] for pair in expected], rtol=1e-9, atol=1e-12
            )
        assert tokens.advantage.tolist() == [row["advantage"] for row in rows]
        time = "post" if post else "pre"
        ratio = [math.exp(row[f"{time}_logprob"] - row["behavior_logprob"]) for row in rows]
        np.testing.assert_allclose(tokens.ratio, ratio, rtol=1e-12)
        checked += len(rows)
    assert 20 < checked < 60


@pytest.mark.parametrize(("family", "arms"), [("kl", KL), ("tv", TV)])
@pytest.mark.parametrize("batch_rows", [7, 100])
def test_every_criterion_decides_from_the_file_what_was_applied(
    tmp_path: Path, family: str, arms: list[str], batch_rows: int
) -> None:
    dump = Dump.open(make_dump(tmp_path / "RUN", arms=arms, seeds=[0], divergence=family))
    masked = 0
    for arm in arms:
        for batch in dump.batches(arm, 0, batch_rows=batch_rows):
            tokens = batch_tokens(batch, dump.metadata(arm))
            keep = CRITERIA[arm].keeps(tokens, threshold=0.15, divergence=family)
            assert keep.tolist() == batch["in_loss"].tolist()
            masked += int((~keep).sum())
    assert masked > 3 * len(arms)


def test_collision_and_whole_vocabulary_come_along_where_they_were_read(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "RUN", arms=["none"], seeds=[0]))
    metadata = dump.metadata("none")
    (name, *_) = dump.arms
    bare = next(dump.batches(name, 0, columns=token_columns()))
    tokens = batch_tokens(bare, metadata)
    assert tokens.collision is None
    with pytest.raises(CriterionError, match="pre_collision"):
        tokens.direction("kl", "exact")
    with pytest.raises(CriterionError, match="full_tv_pre"):
        tokens.full_divergence("tv")
    whole = next(dump.batches(name, 0))
    before, after = batch_tokens(whole, metadata), batch_tokens(whole, metadata, post=True)
    for tokens, time in ((before, "pre"), (after, "post")):
        assert tokens.collision is not None
        assert tokens.collision.dtype == np.float64
        assert tokens.collision.tolist() == whole[f"{time}_collision"].tolist()
    assert before.full_divergence("tv").tolist() == whole["full_tv_pre"].tolist()
    assert before.full_direction("kl").tolist() == whole["full_kl_direction"].tolist()
    with pytest.raises(CriterionError):
        after.full_divergence("kl")


def test_the_policy_after_the_step_is_put_on_the_same_support(tmp_path: Path) -> None:
    dump = Dump.open(make_dump(tmp_path / "RUN", arms=["none"], seeds=[0]))
    batch = next(dump.batches("none", 0))
    before = batch_support(batch, dump.metadata("none"))
    after = batch_support(batch, dump.metadata("none"), post=True)
    moved = before.with_policy(
        batch["topk_post_logprobs"].astype(np.float64), batch["post_logprob"].astype(np.float64)
    )
    np.testing.assert_array_equal(after.pi, moved.pi)
    np.testing.assert_array_equal(after.mu, before.mu)


def test_rows_without_vectors_still_have_their_ratio(tmp_path: Path) -> None:
    run = make_dump(tmp_path / "RUN", arms=["clip-higher"], seeds=[0], null_vectors=0.5)
    dump = Dump.open(run)
    seen = 0
    for batch in dump.batches("clip-higher", 0):
        tokens = scalar_tokens(batch)
        keep = CRITERIA["clip-higher"].keeps(tokens)
        assert keep.tolist() == batch["in_loss"][~batch.vectors].tolist()
        with pytest.raises(CriterionError, match="no top-K"):
            tokens.divergence("kl")
        seen += len(keep)
    assert 10 < seen < 50


def test_columns_of_tokens_are_columns_of_the_dump() -> None:
    assert set(token_columns()) < set(COLUMNS)
    assert set(token_columns(post=True)) - set(token_columns()) == {
        "post_logprob",
        "topk_post_logprobs",
    }
