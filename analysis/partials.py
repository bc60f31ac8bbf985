"""A share of a dump on each of several machines, and the table of all shares.

Merging joins what the spans gave in their order, so that the table is the one that a single
machine makes, to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .counting import ArmCounts
from .engine import Engine, LocalEngine, Progress, Span, spans_of
from .kernel import arm_counter
from .partial_files import Partial, Plan, Share, read_partial, span_row, write_rows
from .question import Question, QuestionError
from .rates import RateTable
from .tables import ProtocolTable, recorded_share, resolved_questions, table_of

if TYPE_CHECKING:
    from deltad.dumps import Dump


def write_partial(
    dump: Dump,
    question: Question,
    share: Share,
    file: BinaryIO,
    *,
    every: bool = False,
    engine: Engine | None = None,
    recompute: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Count a share of a dump and write what was counted.

    Parameters
    ----------
    dump : Dump
        An open dump.
    question : Question
        As of `rate_table`.
    share : Share
        Which share of its spans.
    file : binary file
        Open for writing.
    every : bool
        For every protocol that the dump can answer; the question's own is not looked at then.
    engine, recompute, progress
        As of `rate_table`.

    Returns
    -------
    Plan
        What all shares together answer.

    Raises
    ------
    QuestionError, CriterionError, DumpError
        As `rate_table`.
    """
    resolved, refused = resolved_questions(dump, question, every=every)
    arms = tuple(dict.fromkeys(arm for each in resolved for arm in each.arms))
    spans = spans_of(dump, arms)
    sizes = {span.part.path: span.part.path.stat().st_size for span in spans}
    digest = hashlib.sha256()
    for span in spans:
        part = span.part
        place_and_size = (part.arm, part.seed, part.rank, part.part, sizes[part.path])
        digest.update(repr((*place_and_size, span.first, span.end, span.rows)).encode())
    plan = Plan(
        resolved, every, refused, recorded_share(dump), len(spans), digest.hexdigest()
    )  # fmt: skip
    mine = spans[share.number - 1 :: share.total]
    counter = arm_counter(dump, question, arms, recompute=recompute)

    def tell(span: Span) -> None:
        if progress is not None:
            progress(span.rows)

    counts = (engine or LocalEngine()).map(counter, mine, progress=tell)
    rows = [
        span_row(span, sizes[span.part.path], found)
        for span, found in zip(mine, counts, strict=True)
    ]
    write_rows(file, rows, plan, share, run=str(dump.path))
    return plan


def merge_partials(
    paths: Sequence[str | Path], *, bootstrap_seed: int = 0
) -> RateTable | ProtocolTable:
    """Make the table of all shares of a dump.

    Parameters
    ----------
    paths : sequence of str or Path
        Files, in any order.
    bootstrap_seed : int
        Seed of the intervals' random numbers.

    Returns
    -------
    RateTable or ProtocolTable
        What `rate_table`, or with `every` `protocol_table`, gives of the dump.

    Raises
    ------
    QuestionError
        A share is missing or there twice, or the files are of different questions, dumps or
        numbers of shares; names the files.
    DumpError, FileNotFoundError
        As `read_partial`.
    """
    partials = [read_partial(path) for path in paths]
    _check_whole(partials)
    spans = {key: found for each in partials for key, found in each.spans.items()}
    grouped: dict[tuple[str, int], list[ArmCounts]] = {}
    for key in sorted(spans):
        grouped.setdefault((key[0], key[1]), []).append(spans[key])
    counted = {key: ArmCounts.joined(found) for key, found in grouped.items()}
    plan = partials[0].plan
    tables = tuple(
        table_of(each, counted, bootstrap_seed, share=plan.share_recorded)
        for each in plan.resolved
    )  # fmt: skip
    return ProtocolTable(tables, plan.refused) if plan.every else tables[0]


def _check_whole(partials: Iterable[Partial]) -> None:
    """Refuse partials that do not make up one table."""
    known: dict[Share, Partial] = {}
    first: Partial | None = None
    for each in partials:
        first = first or each
        for what, ours, theirs in (
            ("questions", each.plan.to_json()["questions"], first.plan.to_json()["questions"]),
            ("dumps", each.plan.digest, first.plan.digest),
            ("numbers of shares", each.share.total, first.share.total),
            ("versions of deltad", each.version, first.version),
        ):
            if ours != theirs:
                raise QuestionError(f"{first.path} and {each.path} are of different {what}")
        if each.share in known:
            raise QuestionError(
                f"{known[each.share].path} and {each.path} are both share {each.share}: give each "
                "once"
            )
        known[each.share] = each
    if first is None:
        raise QuestionError("name at least one partial")
    total = first.share.total
    missing = [number for number in range(1, total + 1) if Share(number, total) not in known]
    if missing:
        named = ", ".join(f"{number}/{total}" for number in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise QuestionError(
            f"missing are the shares {named}{more}: count each with `deltad table RUN --share`"
        )
    spans = [key for each in known.values() for key in each.spans]
    if len(set(spans)) != len(spans) or len(spans) != first.plan.spans:
        raise QuestionError(
            f"the partials hold {len(spans)} spans, {len(set(spans))} of them different, and the "
            f"dump has {first.plan.spans}: count all shares anew"
        )
