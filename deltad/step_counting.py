"""Rows into counts: what one optimizer step did, from a probe's columns or from a dump's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.histogram import LogHistogram
from deltad.logprobs import LogprobSums
from deltad.masks import CriterionError, criterion
from deltad.steps import StepQuestion, StepScalars

_COLUMNS: Final = (
    "step",
    "sequence",
    "token_id",
    "advantage",
    "in_loss",
    "behavior_logprob",
    "pre_logprob",
    "post_logprob",
    "topk_ids",
    "topk_behavior_logprobs",
    "topk_pre_logprobs",
    "topk_post_logprobs",
)
"""What every count is made of."""


def columns_for(question: StepQuestion) -> tuple[str, ...]:
    """Columns of rows that the counts are made of."""
    optional = (column for name in question.watched for column in criterion(name).columns)
    return tuple(dict.fromkeys((*_COLUMNS, *optional)))


def count_steps(
    batch: Batch,
    metadata: Metadata,
    question: StepQuestion,
    *,
    arm: str,
    seed: int,
    rank: int = 0,
    by_sequence: bool = True,
) -> Iterator[StepScalars]:
    """Count the rows of a batch, step by step.

    Parameters
    ----------
    batch : Batch
        Rows with `columns_for(question)`, checked.
    metadata : Metadata
        Of their file.
    question : StepQuestion
        What to count.
    arm, seed, rank
        Where the rows are from.
    by_sequence : bool
        Count by response too; the rows of a response must all be in the batch.

    Yields
    ------
    StepScalars
        One for each step in the batch, in order.

    Raises
    ------
    CriterionError
        A watched criterion needs a column that the batch lacks, the file stores too few tokens
        for the question's region, or the policy before or after the step was not read.
    """
    if "post_logprob" not in batch.columns or "pre_logprob" not in batch.columns:
        raise CriterionError(
            f"{batch.path} is without the policy before or after the step, so that its steps "
            "cannot be counted: score its tokens and import them by `deltad import --pre --post`"
        )
    whole = metadata.stored_above is None and metadata.near is None
    if not whole:
        _check_stored(batch, metadata, question)
    for step in np.unique(batch["step"]).tolist():
        rows = batch["step"] == step
        part = batch if rows.all() else _some(batch, rows)
        empty = StepScalars(arm, seed, int(step), question, whole=whole, ranks=(rank,))
        yield _count(part, metadata, empty, by_sequence)


def _check_stored(batch: Batch, metadata: Metadata, question: StepQuestion) -> None:
    """The rules by which rows and vectors were stored keep every token outside the region."""
    if metadata.stored_pair is not None:
        raise CriterionError(
            f"{batch.path} stores only tokens on which two criteria disagree, which leaves out "
            "others outside the region: record all of these, or all tokens"
        )
    rules = {"stores only tokens": metadata.stored_above}
    if metadata.near is not None:
        rules["keeps vectors only of tokens"] = metadata.near.divergence, metadata.near.threshold
    for what, rule in rules.items():
        divergence, least = rule or (question.divergence, 0.0)
        if divergence != question.divergence or question.threshold < least:
            raise CriterionError(
                f"{batch.path} {what} with {divergence} above {least:g}, which leaves out "
                f"tokens outside {question.divergence} {question.threshold:g}: ask for "
                f"{divergence} and a larger threshold, or record all tokens"
            )


def _count(batch: Batch, metadata: Metadata, empty: StepScalars, by_sequence: bool) -> StepScalars:
    """Counts of rows of one step."""
    question, stored = empty.question, batch.columns
    known = batch if batch.vectors.all() else _some(batch, batch.vectors)
    before, after = (batch_tokens(known, metadata, post=post) for post in (False, True))
    d_pre, d_post = (each.divergence(question.divergence) for each in (before, after))
    delta_d = d_post - d_pre
    keeps = {
        name: criterion(name).keep(
            before, threshold=question.threshold, divergence=question.divergence
        )
        for name in question.watched
    }
    kept = {"criterion": keeps[question.criterion], "baseline": keeps[question.baseline]}
    outside = d_pre > question.threshold
    disagreement = outside & (kept["criterion"] != kept["baseline"])
    counts = {
        "tokens": len(batch),
        "in_loss": int(np.count_nonzero(stored["in_loss"])),
        "without_vectors": int(np.count_nonzero(~batch.vectors)),
        "outside": int(outside.sum()),
        "disagreement": int(disagreement.sum()),
        "increase": int((delta_d > 0).sum()),
        "outside_increase": int((delta_d[outside] > 0).sum()),
        "disagreement_increase": int((delta_d[disagreement] > 0).sum()),
    }
    for side, keep in kept.items():
        mine = delta_d[disagreement & keep]
        counts[f"{side}_kept"] = len(mine)
        counts[f"{side}_unsafe"] = int((mine > 0).sum())
        counts[f"{side}_contracting"] = int((mine < 0).sum())
    extremes = {}
    if len(delta_d):
        extremes = {
            "d_pre_max": float(d_pre.max()),
            "d_post_max": float(d_post.max()),
            "delta_d_abs_max": float(np.abs(delta_d).max()),
        }
    return replace(
        empty,
        counts=counts,
        masked={
            name: int((~keep).sum())
            for name, keep in keeps.items()
            if empty.whole or _masks_only_outside(name)
        },
        d_pre=LogHistogram.of(d_pre),
        d_post=LogHistogram.of(d_post),
        extremes=extremes,
        delta_d=(float(delta_d.sum()), float(delta_d[outside].sum())),
        fit=_temperature_sums(known),
        logprobs=LogprobSums.of(
            stored["behavior_logprob"],
            stored["pre_logprob"],
            advantage=stored["advantage"],
            sequence=stored["sequence"] if by_sequence else None,
        ),
    )


def _masks_only_outside(name: str) -> bool:
    """Whether a criterion's region is the top-K divergence's, so that thinned rows suffice."""
    return name in ("none", "ratio") or (
        name.startswith("predictive-") and not name.endswith("-full")
    )


def _temperature_sums(batch: Batch) -> tuple[float, float]:
    """Σ x² and Σ x y of log-probs less their means over each token's top-K."""
    mu = batch["topk_behavior_logprobs"].astype(np.float64)
    pi = batch["topk_pre_logprobs"].astype(np.float64)
    used = (batch["topk_ids"] >= 0) & np.isfinite(mu)
    size = np.maximum(used.sum(axis=1), 1)[:, None]
    x, y = (np.where(used, values, 0.0) for values in (mu, pi))
    x, y = (np.where(used, v - v.sum(axis=1, keepdims=True) / size, 0.0) for v in (x, y))
    return float((x * x).sum()), float((x * y).sum())


def _some(batch: Batch, rows: NDArray[np.bool_]) -> Batch:
    """Some rows of a checked batch."""
    return replace(
        batch,
        columns={name: values[rows] for name, values in batch.columns.items()},
        vectors=batch.vectors[rows],
        nulls={},
    )
