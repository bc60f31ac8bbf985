"""Questions that a dump cannot answer, since rows or vectors were left out when it was written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltad.dumps.rules import Pair

if TYPE_CHECKING:
    from pathlib import Path

    from deltad.dumps import Dump

    from .question import Question


class QuestionError(ValueError):
    """A question that makes no sense, or that this dump cannot answer."""


def check_stored(dump: Dump, arm: str, question: Question, *, disagreement_only: bool) -> None:
    """Refuse a question about tokens that the rule of storage left out.

    Parameters
    ----------
    dump : Dump
        Only its footers are read.
    arm : str
        Of the dump.
    question : Question
        Region and pair.
    disagreement_only : bool
        Whether the answer is made of disagreement tokens and the number outside alone.

    Raises
    ------
    QuestionError
        Says what is stored and what to ask or to record.
    """
    asked = Pair(question.divergence, question.threshold, question.criterion, question.baseline)
    for part in dump.files(arm):
        if part.metadata.stored_above is None:
            continue
        pair = part.metadata.stored_pair
        if pair is not None:
            _check_pair(part.path, pair, asked, disagreement_only=disagreement_only)
            continue
        divergence, least = part.metadata.stored_above
        where = f"{part.path} stores only tokens with {divergence} above {least:g}"
        if divergence != question.divergence:
            raise QuestionError(
                f"{where}, which does not bound the divergence {question.divergence}: "
                f"ask for {divergence}, or record all tokens"
            )
        if question.threshold < least:
            raise QuestionError(
                f"{where}, and the threshold {question.threshold:g} asks for more: "
                "ask for a larger threshold, or record all tokens"
            )


def check_vectors(dump: Dump, arm: str, question: Question) -> None:
    """Refuse a question about tokens whose vectors the rule "near" left out.

    Parameters
    ----------
    dump, arm, question
        As `check_stored`.

    Raises
    ------
    QuestionError
        Says what is stored and what to ask or to record.
    """
    for part in dump.files(arm):
        near = part.metadata.near
        if near is None:
            continue
        where = (
            f"{part.path} keeps vectors only where {near.divergence} is at least "
            f"{near.threshold:g}, and of {near.sample:g} of the other tokens"
        )
        if near.divergence != question.divergence:
            raise QuestionError(
                f"{where}, which does not bound the divergence {question.divergence}: ask for "
                f"{near.divergence}, or record with `--vectors all`"
            )
        if question.threshold < near.threshold:
            raise QuestionError(
                f"{where}, and the threshold {question.threshold:g} lies below that: ask for "
                f"{near.threshold:g} or more, or record with `--vectors all`"
            )


def _check_pair(path: Path, pair: Pair, asked: Pair, *, disagreement_only: bool) -> None:
    """Only disagreement tokens were stored, and they are those of the question."""
    where = (
        f"{path} stores only tokens with {pair.divergence} above {pair.threshold:g} that exactly "
        f"one of {pair.criterion} and {pair.baseline} masks"
    )
    if not disagreement_only:
        raise QuestionError(
            f"{where}, and this needs every token outside: record those, with "
            "`--store outside` or keep='outside'"
        )
    if not pair.answers(asked):
        raise QuestionError(
            f"{where}, and the question is about {asked.criterion} and {asked.baseline} at "
            f"{asked.divergence} {asked.threshold:g}: ask that pair there, or record more"
        )
