"""From a dump to tables: one protocol, or every protocol that the dump can answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .counting import ArmCounts
from .engine import Engine, Progress
from .kernel import count_arms
from .question import Question, Resolved, answerable_protocols
from .rates import RateTable, SeedRates
from .result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltad.dumps import Dump

Counted = Mapping[tuple[str, int], ArmCounts]
"""What every arm and seed holds."""


@dataclass(frozen=True, eq=False)
class ProtocolTable(Result):
    """One question under every protocol.

    Attributes
    ----------
    tables : tuple of RateTable
        `shared:none` and `own` first, then the other arms.
    refused : dict of str to str
        Protocols that the dump cannot answer, and why.
    """

    tables: tuple[RateTable, ...]
    refused: dict[str, str]

    def to_json_object(self) -> dict[str, Any]:
        """The first table's object, with all tables' objects under `protocols`, and `refused`."""
        objects = [table.to_json_object() for table in self.tables]
        return {**objects[0], "protocols": objects, "refused": self.refused}

    def columns(self) -> dict[str, list[Any]]:
        """A row a protocol, the columns of `analysis.export.PROTOCOL_COLUMNS`."""
        from .export import protocol_columns

        return protocol_columns(self)

    def text(self) -> RenderableType:
        """A row a protocol; see `protocol_text`."""
        from .text import protocol_text

        return protocol_text(self)


def rate_table(
    dump: Dump,
    question: Question | None = None,
    *,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
    recompute: bool = False,
) -> RateTable:
    """Count a dump and compare two criteria seed by seed.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        By default the paper's: top-K KL above 0.15, predictive against ratio.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    engine : Engine, optional
        Where to count: by default on the cores of this machine. The result is the same to the
        bit on any.
    recompute : bool
        Compute D and Ḋ from the vectors even where the dump has them recorded.

    Returns
    -------
    RateTable
        Counts by seed; summaries are computed when asked for.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question.
    DumpError
        A row holds an impossible value.
    """
    (resolved,), _ = resolved_questions(dump, question or Question())
    counted = count_arms(
        dump,
        resolved.question,
        resolved.arms,
        engine=engine,
        progress=progress,
        recompute=recompute,
    )
    return table_of(resolved, counted, bootstrap_seed, share=recorded_share(dump))


def protocol_table(
    dump: Dump,
    question: Question | None = None,
    *,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
    recompute: bool = False,
) -> ProtocolTable:
    """Compare two criteria under every protocol that the dump can answer, reading it once.

    Parameters
    ----------
    dump, question, bootstrap_seed, progress, engine, recompute
        As in `rate_table`; the question's own protocol is not looked at.

    Returns
    -------
    ProtocolTable
        At least one table.

    Raises
    ------
    QuestionError, CriterionError, DumpError
        As `rate_table`.
    """
    question = question or Question()
    resolved, refused = resolved_questions(dump, question, every=True)
    counted = count_arms(
        dump,
        question,
        dict.fromkeys(arm for each in resolved for arm in each.arms),
        engine=engine,
        progress=progress,
        recompute=recompute,
    )
    share = recorded_share(dump)
    tables = [table_of(each, counted, bootstrap_seed, share=share) for each in resolved]
    return ProtocolTable(tuple(tables), refused)


def resolved_questions(
    dump: Dump, question: Question, *, every: bool = False
) -> tuple[tuple[Resolved, ...], dict[str, str]]:
    """Settle a question for a dump, under its own protocol or under every one.

    Returns
    -------
    resolved : tuple of Resolved
        One, or with `every` one for each protocol that the dump can answer.
    refused : dict of str to str
        The protocols that it cannot answer, and why.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question.
    """
    if not every:
        return (question.resolve(dump, disagreement_only=True),), {}
    protocols, refused = answerable_protocols(dump, question, disagreement_only=True)
    return tuple(
        replace(question, protocol=each).resolve(dump, disagreement_only=True) for each in protocols
    ), refused


def table_of(
    resolved: Resolved, counted: Counted, bootstrap_seed: int = 0, *, share: float = 1.0
) -> RateTable:
    """Put the counts of both arms together.

    Parameters
    ----------
    resolved : Resolved
        The question and its arms.
    counted : mapping of (arm, seed) to ArmCounts
        Of at least these arms.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    share : float
        Of the sequences that were recorded.

    Returns
    -------
    RateTable
        A row for every seed of the criterion's arm, ascending.
    """
    arms = (resolved.criterion_arm, resolved.baseline_arm)
    weighted = unlike_weights(found for (arm, _), found in counted.items() if arm in arms)
    seeds = tuple(
        SeedRates.of(seed, *(counted[each, seed] for each in arms), weighted=weighted)
        for arm, seed in sorted(counted)
        if arm == arms[0]
    )
    return RateTable(resolved.question, seeds, bootstrap_seed, share)


def unlike_weights(counted: Iterable[ArmCounts]) -> bool:
    """Whether tokens stand for unlike numbers of tokens."""
    extremes = [each.outside.extremes for each in counted]
    return min((low for low, _ in extremes), default=1) < max(
        (high for _, high in extremes), default=1
    )


def recorded_share(dump: Dump) -> float:
    """Share of the sequences that a dump recorded, the least of its files; 1 for all."""
    return min(float((part.metadata.sampling or {}).get("sequences", 1.0)) for part in dump.parts)
