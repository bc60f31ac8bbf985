"""The kernel that counts a pair of criteria: one span of a dump at a time, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .blocks import Block, outside_blocks, plain_blocks
from .counting import ArmCounts, Decided, Decider, Judged, columns_for, decisions
from .engine import Engine, Progress, Span, read_arms
from .question import Question, decider
from .recorded import recorded_blocks, recorded_columns

if TYPE_CHECKING:
    from deltad.dumps import Dump


@dataclass(frozen=True)
class ArmCounter:
    """Counts a span: a function of the span that may be pickled.

    Attributes
    ----------
    question : Question
        Region and pair; its protocol is not looked at.
    recompute : bool
        From the vectors even where D and Ḋ are recorded.
    plain : bool
        In the plainest way, from the vectors and without a first look: the reference.
    """

    question: Question
    recompute: bool = False
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
        unknown = 0
        judged: list[Judged] = []
        for block in self._blocks(span, pair):
            unknown += block.unknown
            if (found := block.found) is not None:
                judged.append(Judged.of(found, decisions(found.tokens, self.question, pair)))
        stored = span.part.metadata.stored_outside
        outside = stored if stored is None or span.first == 0 else 0
        decided = Decided(span.rows_seen, unknown, Judged.joined(judged, len(pair)), outside)
        return decided.pair(0, 1)

    def _blocks(self, span: Span, pair: tuple[Decider, Decider]) -> Iterator[Block]:
        """The tokens outside, from wherever they are to be had."""
        if self.plain:
            return plain_blocks(span, self.question, columns_for(*pair))
        return blocks_of(span, self.question, pair, recompute=self.recompute)


def blocks_of(
    span: Span,
    region: Question,
    deciders: Sequence[Decider],
    columns: Iterable[str] = (),
    *,
    post: bool = True,
    recompute: bool = False,
) -> Iterator[Block]:
    """Stream the tokens outside of a span: by recorded D and Ḋ if these do, else by vectors.

    Parameters
    ----------
    span : Span
        Row groups of a file.
    region : Question
        Its threshold and divergence.
    deciders : sequence of Decider
        Criteria or weights that are to be asked.
    columns : iterable of str
        Wanted of the tokens outside besides what the deciders need.
    post : bool
        Whether the policy after the update was read.
    recompute : bool
        By vectors in any case.

    Yields
    ------
    Block
        In the file's order.

    Raises
    ------
    DumpError
        A row holds an impossible value; names file, row and column.
    """
    names = None
    if not recompute:
        names = recorded_columns(span.part, region, deciders, post=post)
    if names is not None:
        return recorded_blocks(span, region, [*names, *columns])
    return outside_blocks(span, region, [*columns_for(*deciders, post=post), *columns])


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
    recompute : bool
        From the vectors even where D and Ḋ are recorded.
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
    return ArmCounter(replace(question, protocol=""), recompute=recompute, plain=plain)
