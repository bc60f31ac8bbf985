"""From a dump to tables: one protocol, or every protocol that the dump can answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .counting import ArmCounts, Progress, count_arm
from .question import Question, Resolved, answerable_protocols
from .rates import RateTable, SeedRates
from .result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltad.dumps import Dump

_Counted = dict[tuple[str, int], ArmCounts]


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
        Told the number of rows of every block read.

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
    resolved = (question or Question()).resolve(dump)
    return _table(dump, resolved, {}, bootstrap_seed, progress)


def protocol_table(
    dump: Dump,
    question: Question | None = None,
    *,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
) -> ProtocolTable:
    """Compare two criteria under every protocol that the dump can answer, reading it once.

    Parameters
    ----------
    dump, question, bootstrap_seed, progress
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
    protocols, refused = answerable_protocols(dump, question)
    counted: _Counted = {}
    tables = [
        _table(
            dump,
            replace(question, protocol=protocol).resolve(dump),
            counted,
            bootstrap_seed,
            progress,
        )
        for protocol in protocols
    ]
    return ProtocolTable(tuple(tables), refused)


def _table(
    dump: Dump,
    resolved: Resolved,
    counted: _Counted,
    bootstrap_seed: int,
    progress: Progress | None,
) -> RateTable:
    """Table of a resolved question; `counted` keeps what other protocols can use again."""
    seeds = []
    for seed in dump.seeds(resolved.criterion_arm):
        for arm in resolved.arms:
            if (arm, seed) not in counted:
                counted[arm, seed] = count_arm(dump, arm, seed, resolved, progress=progress)
        ours, theirs = (
            counted[arm, seed] for arm in (resolved.criterion_arm, resolved.baseline_arm)
        )
        seeds.append(SeedRates.of(seed, ours, theirs))
    return RateTable(resolved.question, tuple(seeds), bootstrap_seed)
