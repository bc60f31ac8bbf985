"""Counts a dump for the ladder: signs of ΔD rung by rung, and what criteria foretell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .blocks import outside_blocks
from .counting import Outside, columns_for, decisions
from .engine import Engine, Progress, Span, read_arms
from .ladder import RUNGS, UNKNOWN, Bools, Floats, LadderTable, SeedLadder, place
from .question import OWN, Question, QuestionError, check_columns, decider

if TYPE_CHECKING:
    from deltad.dumps import Dump, Metadata


def ladder_table(
    dump: Dump,
    question: Question | None = None,
    *,
    criteria: Sequence[str] = (),
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
) -> LadderTable:
    """Follow the sign of ΔD from a token's own logits to the realized step.

    Parameters
    ----------
    dump : Dump
        With the ladder's columns; without them the lowest rung and the step itself remain.
    question : Question, optional
        By default the paper's; its protocol names the arm.
    criteria : sequence of str
        Others to judge beside the question's two.
    bootstrap_seed : int
        Of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    engine : Engine, optional
        Where to read: by default on the cores of this machine.

    Returns
    -------
    LadderTable
        `missing` says which rungs the dump does not have, and why.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question, or the protocol is `own`.
    DumpError
        A row holds an impossible value.
    """
    asked = question or Question()
    if asked.protocol == OWN:
        raise QuestionError(
            "the ladder follows one update: ask for the protocol `shared:` and an arm"
        )
    resolved = asked.resolve(dump)
    arm = resolved.criterion_arm
    names = tuple(
        dict.fromkeys((resolved.question.criterion, resolved.question.baseline, *criteria))
    )
    deciders = [decider(name) for name in names]
    for each in deciders:
        check_columns(dump, arm, each)
    recorded = dump.metadata(arm).extra.get("ladder")
    recorded = recorded if isinstance(recorded, dict) else {}
    missing = _missing(dump, arm, resolved.question)
    columns = [
        *columns_for(*deciders),
        *(rung.column for rung in RUNGS if rung.column and rung.name not in missing),
    ]
    if "logits" not in missing:
        columns.append("pre_collision")
    reader = _Reader(
        replace(resolved.question, protocol=""),
        names,
        tuple(dict.fromkeys(columns)),
        recorded,
        tuple(missing),
    )
    spans = read_arms(reader, dump, [arm], engine=engine, progress=progress)
    seeds = tuple(
        _seed(seed, dump.rows_seen(arm, seed), parts) for (_, seed), parts in sorted(spans.items())
    )
    for rung in RUNGS:
        if rung.name not in missing and all(
            (seed.grows[place(rung.name)] == UNKNOWN).all() for seed in seeds
        ):
            reason = recorded.get("reasons", {}).get(rung.name)
            missing[rung.name] = (
                f"column `{rung.column}` is NULL in every token outside"
                + (f" ({reason})" if reason else "")
                if any(len(seed.disagreement) for seed in seeds)
                else "no token is outside"
            )
    return LadderTable(resolved.question, names, seeds, missing, recorded, bootstrap_seed)


def _missing(dump: Dump, arm: str, question: Question) -> dict[str, str]:
    """Rungs that an arm does not have, and why."""
    present = dump.optional_columns(arm)
    found: dict[str, str] = {}
    if "pre_collision" not in present:
        found["logits"] = "column `pre_collision` is missing"
    metadata = dump.metadata(arm)
    followed = _followed(metadata)
    for rung in RUNGS:
        if rung.column and rung.column not in present:
            found[rung.name] = f"column `{rung.column}` is missing"
        elif rung.column and followed != question.divergence:
            found[rung.name] = (
                f"column `{rung.column}` follows the divergence {followed}, not "
                f"{question.divergence}"
            )
    return found


def _followed(metadata: Metadata) -> str:
    """The divergence that the ladder's columns follow."""
    ladder = metadata.extra.get("ladder")
    named = ladder.get("divergence") if isinstance(ladder, dict) else None
    return str(named or metadata.update.get("divergence") or "kl")


@dataclass(frozen=True, eq=False)
class _Read:
    """The tokens outside of a span: signs by rung, decisions, and how each was sampled."""

    grows: NDArray[np.int8]
    keep: Bools
    strata: NDArray[np.int64]


@dataclass(frozen=True)
class _Reader:
    """Reads a span, criteria by name; may be pickled."""

    question: Question
    criteria: tuple[str, ...]
    columns: tuple[str, ...]
    recorded: Mapping[str, Any]
    missing: tuple[str, ...]

    def __call__(self, span: Span) -> _Read:
        """Judge the tokens outside."""
        deciders = [decider(name) for name in self.criteria]
        parts = [
            _Read(
                np.empty((len(RUNGS), 0), np.int8),
                np.empty((len(deciders), 0), np.bool_),
                np.empty(0, np.int64),
            )
        ]
        for block in outside_blocks(span, self.question, self.columns):
            if (found := block.found) is not None:
                parts.append(
                    _Read(
                        _grows(found, self.question, self.missing),
                        decisions(found.tokens, self.question, deciders),
                        _strata(found, self.recorded),
                    )
                )
        return _join(parts)


def _join(parts: Sequence[_Read]) -> _Read:
    """Join what was read, in its order."""
    return _Read(
        np.concatenate([each.grows for each in parts], axis=1),
        np.concatenate([each.keep for each in parts], axis=1),
        np.concatenate([each.strata for each in parts]),
    )


def _seed(seed: int, tokens: int, parts: Sequence[_Read]) -> SeedLadder:
    """Put one seed's spans together."""
    read = _join(parts)
    measured = read.grows[place("own")] != UNKNOWN
    return SeedLadder(
        seed=seed,
        tokens=tokens,
        grows=read.grows,
        masks=~read.keep,
        # None where both are one criterion.
        disagreement=read.keep[0] != read.keep[min(1, len(read.keep) - 1)],
        weight=_weights(read.strata, measured),
    )


def _grows(found: Outside, question: Question, missing: Sequence[str]) -> NDArray[np.int8]:
    """Sign of ΔD of every token on every rung, shape (rung, token)."""
    rows = np.full((len(RUNGS), len(found.delta_d)), UNKNOWN, np.int8)
    for at, rung in enumerate(RUNGS):
        if rung.name in missing:
            continue
        if rung.name == "realized":
            values = np.where(found.undetermined, np.nan, found.delta_d)
        elif rung.name == "logits":
            direction = found.tokens.direction(question.divergence, "exact").total
            values = np.asarray(found.tokens.advantage * direction)
        else:
            values = found.batch[rung.column]
        rows[at] = np.where(np.isnan(values), UNKNOWN, values > 0)
    return rows


def _strata(found: Outside, recorded: Mapping[str, Any]) -> NDArray[np.int64]:
    """Which of the groups, that were sampled one before the other, a token belongs to."""
    try:
        region = Question(
            threshold=recorded["threshold"],
            divergence=recorded["divergence"],
            criterion=recorded["criterion"],
            baseline=recorded["baseline"],
        )
        keep = decisions(
            found.tokens, region, [decider(region.criterion), decider(region.baseline)]
        )
    except (KeyError, TypeError, ValueError):  # the dump does not say how it was sampled
        return np.zeros(len(found.delta_d), np.int64)
    outside = found.tokens.divergence(region.divergence) > region.threshold
    return np.where(outside & (keep[0] != keep[1]), 0, np.where(outside, 1, 2))


def _weights(strata: NDArray[np.int64], measured: Bools) -> Floats:
    """Tokens of a stratum a sampled one stands for; 1 where all were sampled, 0 where none."""
    weight = np.ones(len(strata))
    for each in np.unique(strata):
        inside = strata == each
        sampled = int((inside & measured).sum())
        weight[inside] = inside.sum() / sampled if sampled else 0.0
    return weight
