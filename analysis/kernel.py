"""The kernel that counts a pair of criteria: one span of a dump at a time, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .blocks import outside_blocks, plain_blocks
from .counting import ArmCounts, Decided, Decider, Judged, columns_for, decisions
from .engine import Engine, Progress, Span, read_arms
from .question import Question, QuestionError, decider

if TYPE_CHECKING:
    from deltad.dumps import Dump


@dataclass(frozen=True)
class ArmCounter:
    """Counts a span: a function of the span that may be pickled.

    Attributes
    ----------
    question : Question
        Region and pair; its protocol is not looked at.
    plain : bool
        In the plainest way, without a first look: the reference.
    """

    question: Question
    plain: bool = False

    def __call__(self, span: Span) -> ArmCounts:
        """Count what a span holds.

        Parameters
        ----------
        span : Span
            Row groups of a file.

        Returns
        -------
        ArmCounts
            To be joined with those of the other spans.

        Raises
        ------
        DumpError
            A row holds an impossible value; names file, row and column.
        """
        pair = (decider(self.question.criterion), decider(self.question.baseline))
        return decide(span, self.question, pair, columns_for(*pair), plain=self.plain).pair(0, 1)


def decide(
    span: Span,
    region: Question,
    deciders: Sequence[Decider],
    columns: Iterable[str],
    *,
    plain: bool = False,
) -> Decided:
    """Decide about the tokens outside of a span.

    Parameters
    ----------
    span : Span
        Row groups of a file.
    region : Question
        Its threshold and divergence.
    deciders : sequence of Decider
        Criteria or weights.
    columns : iterable of str
        Those that the deciders need.
    plain : bool
        By `plain_blocks`.

    Returns
    -------
    Decided
        In the order of the rows.
    """
    unknown = 0
    judged: list[Judged] = []
    for block in (plain_blocks if plain else outside_blocks)(span, region, list(columns)):
        unknown += block.unknown
        if block.found is not None:
            judged.append(Judged.of(block.found, decisions(block.found.tokens, region, deciders)))
    stored = span.part.metadata.stored_outside
    return Decided(
        span.rows_seen,
        unknown,
        Judged.joined(judged, len(deciders)),
        stored if stored is None or span.first == 0 else 0,
    )


def count_arms(
    dump: Dump,
    question: Question,
    arms: Iterable[str],
    *,
    engine: Engine | None = None,
    progress: Progress | None = None,
    recompute: bool = False,
    plain: bool = False,
) -> dict[tuple[str, int], ArmCounts]:
    """Count a pair of criteria in every seed of some arms, checking every row that is read.

    Parameters
    ----------
    dump : Dump
        An open dump.
    question : Question
        Region and pair.
    arms : iterable of str
        Whose post columns give ΔD.
    engine : Engine, optional
        Where to count; by default on this machine's cores.
    progress : callable, optional
        Told the number of rows of every span that is done.
    plain : bool
        In the plainest way: the reference.

    Returns
    -------
    dict of (arm, seed) to ArmCounts
        The same to the bit whatever the engine.

    Raises
    ------
    DumpError
        A row holds an impossible value; names file, row and column, of the first such file.
    """
    counter = arm_counter(dump, question, arms, recompute=recompute, plain=plain)
    found = read_arms(counter, dump, arms, engine=engine, progress=progress)
    return {key: ArmCounts.joined(parts) for key, parts in found.items()}


def arm_counter(
    dump: Dump,
    question: Question,
    arms: Iterable[str],
    *,
    recompute: bool = False,
    plain: bool = False,
) -> ArmCounter:
    """What counts a span of some arms; parameters as of `count_arms`."""
    # The protocol says which arms are asked, which no span needs to know.
    return ArmCounter(replace(question, protocol=""), plain)


def require_outside(dump: Dump, arms: Iterable[str]) -> None:
    """Refuse what needs all tokens outside where only those in disagreement were stored.

    Raises
    ------
    QuestionError
        Names a file.
    """
    for part in (part for arm in arms for part in dump.files(arm)):
        if part.metadata.stored_pair is not None:
            raise QuestionError(
                f"{part.path} stores only the tokens that exactly one of two criteria masks, and "
                "this needs all tokens outside: ask `deltad table`, or record them all"
            )
