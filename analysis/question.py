"""What is asked of a dump: region, pair of criteria, and whose update judges a kept token.

A question is checked twice: by itself when it is made, and against a dump when it is
resolved, which settles the protocol and the arms to read.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from deltad.divergence import DIVERGENCES
from deltad.masks import DEFAULT_THRESHOLD, NONE, Criterion, CriterionError
from deltad.weights import WEIGHTS, Weight

from .stored_rules import QuestionError as QuestionError
from .stored_rules import check_stored, check_vectors

if TYPE_CHECKING:
    from deltad.dumps import Dump, Metadata

OWN: Final = "own"
SHARED: Final = "shared:"
ZERO_STEP: Final = "zero-step"
BOTH: Final = ("pre", "post")
"""The readings of the policy that ΔD is made of."""


@dataclass(frozen=True)
class Question:
    """Which tokens, decided by which two criteria, judged under which update.

    Attributes
    ----------
    threshold : float
        δ ≥ 0 of the region: nats for KL, a probability for TV.
    divergence : {"kl", "tv"}
        The region's divergence.
    criterion : str
        The criterion in question, or a neighbour's weight of `deltad.weights`, which masks
        where it is not positive; by default `predictive-<divergence>-aggregated`.
    baseline : str
        The one that it is compared with.
    protocol : str
        `shared:<arm>` judges both by one arm's update; `own` each by the arm that applied its
        mask. Empty until resolved: then `shared:none`, or the only arm there is.

    Raises
    ------
    QuestionError
        A threshold below 0 or not finite, or a protocol of neither form.
    CriterionError
        An unknown criterion or divergence, or a predictive criterion of another family.

    Examples
    --------
    >>> Question(divergence="tv").criterion
    'predictive-tv-aggregated'
    """

    threshold: float = DEFAULT_THRESHOLD
    divergence: str = "kl"
    criterion: str = ""
    baseline: str = "ratio"
    protocol: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", float(self.threshold))  # of a NumPy scalar, say
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise QuestionError(
                f"`threshold` must be finite and not negative, got {self.threshold!r}"
            )
        if self.divergence not in DIVERGENCES:
            raise QuestionError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}"
            )
        if not self.criterion:
            object.__setattr__(self, "criterion", f"predictive-{self.divergence}-aggregated")
        for name in (self.criterion, self.baseline):
            _check_family(decider(name), self.divergence)
        shared_arm = self.protocol.removeprefix(SHARED)
        if self.protocol not in ("", OWN) and (shared_arm == self.protocol or not shared_arm):
            raise QuestionError(
                f"`protocol` must be `own` or `shared:` and an arm, got {self.protocol!r}"
            )

    def resolve(
        self, dump: Dump, *, needs: Collection[str] = BOTH, disagreement_only: bool = False
    ) -> Resolved:
        """Settle the protocol and the arms for one dump.

        Parameters
        ----------
        dump : Dump
            Only its footers are read.
        needs : collection of {"pre", "post"}
            Readings of the policy that the answer cannot do without: both for ΔD, and "pre"
            alone for D, Ḋ and decisions.
        disagreement_only : bool
            Whether the answer is made of the tokens that exactly one criterion masks, and of the
            number outside: what a dump can tell that stores no others.

        Returns
        -------
        Resolved
            The question with its protocol filled in, and the arms to read.

        Raises
        ------
        QuestionError
            There is no such arm; no arm applied the question's mask (`own`); a seed is
            missing in one of the arms; the stored rule left out tokens, or the vectors' rule
            vectors, that are asked for; or a criterion needs a column, or the answer a reading,
            that is missing.
        """
        question = self if self.protocol else replace(self, protocol=_default_protocol(dump))
        judged, against = decider(question.criterion), decider(question.baseline)
        if question.protocol == OWN:
            arms = tuple(_arm_of(dump, each, question) for each in (judged, against))
        else:
            arm = question.protocol.removeprefix(SHARED)
            if arm not in dump.arms:
                raise QuestionError(f"there is no arm {arm!r} in {dump.path}: {_listed(dump)}")
            arms = (arm, arm)
        resolved = Resolved(question, judged, against, arms[0], arms[1])
        _check_seeds(dump, resolved)
        for arm in resolved.arms:
            check_readings(dump, arm, needs)
            check_stored(dump, arm, question, disagreement_only=disagreement_only)
            check_vectors(dump, arm, question)
            for each in (judged, against):
                check_columns(dump, arm, each)
        return resolved


@dataclass(frozen=True)
class Resolved:
    """A question that one dump can answer.

    Attributes
    ----------
    question : Question
        With the protocol filled in.
    criterion, baseline : Criterion or Weight
        Looked up.
    criterion_arm, baseline_arm : str
        Whose update judges the tokens that each keeps; the same arm when shared.
    """

    question: Question
    criterion: Criterion | Weight
    baseline: Criterion | Weight
    criterion_arm: str
    baseline_arm: str

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms to read: the criterion's first, each once."""
        return tuple(dict.fromkeys((self.criterion_arm, self.baseline_arm)))


def decider(name: str) -> Criterion | Weight:
    """Look up a criterion, or a neighbour's weight, by name.

    Raises
    ------
    CriterionError
        No such name; the message lists those that exist.
    """
    if name not in WEIGHTS:
        raise CriterionError(f"there is no criterion {name!r}; choose one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name].criterion or WEIGHTS[name]


def answerable_protocols(
    dump: Dump, question: Question, *, disagreement_only: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Find every protocol under which a dump can answer a question.

    Parameters
    ----------
    dump : Dump
        Only its footers are read.
    question : Question
        Its own protocol is not looked at.
    disagreement_only : bool
        As `Question.resolve`.

    Returns
    -------
    protocols : list of str
        `shared:none` and `own` first, then the other arms; never `shared:zero-step`, whose ΔD
        is 0 by construction.
    refused : dict of str to str
        The protocols that were tried in vain and why.

    Raises
    ------
    QuestionError, CriterionError
        No protocol is left.
    """
    others = [arm for arm in dump.arms if arm not in (NONE.name, ZERO_STEP)]
    candidates = [SHARED + NONE.name] if NONE.name in dump.arms else []
    candidates += [OWN, *(SHARED + arm for arm in others)]
    found: list[str] = []
    refused: dict[str, str] = {}
    for protocol in candidates:
        try:
            replace(question, protocol=protocol).resolve(dump, disagreement_only=disagreement_only)
        except (QuestionError, CriterionError) as error:
            refused[protocol] = str(error)
        else:
            found.append(protocol)
    if not found:
        # Refused too, and for the plainest reason.
        replace(question, protocol="").resolve(dump, disagreement_only=disagreement_only)
    return found, refused


def check_columns(dump: Dump, arm: str, needed: Criterion | Weight) -> None:
    """Refuse a criterion whose optional columns an arm was recorded without.

    Raises
    ------
    QuestionError
        Names the column.
    """
    present = dump.optional_columns(arm)
    for column in needed.columns:
        if column not in present:
            raise QuestionError(
                f"criterion {needed.name} needs the column `{column}`, which arm {arm} of "
                f"{dump.path} does not have: record it, or ask for another criterion"
            )


def check_readings(dump: Dump, arm: str, needs: Collection[str]) -> None:
    """Refuse what needs a reading of the policy that an arm was recorded without.

    Parameters
    ----------
    dump : Dump
        Only its footers are read.
    arm : str
        Of the dump.
    needs : collection of {"pre", "post"}
        Readings.

    Raises
    ------
    QuestionError
        Says what is missing and how to get it.
    """
    missing = set(needs) - dump.readings(arm)
    for reading, what, when in (
        ("pre", "D, Ḋ and every mask need", "before"),
        ("post", "ΔD needs", "after"),
    ):
        if reading in missing:
            raise QuestionError(
                f"{what} the policy's log-probs {when} the update, and arm {arm} of {dump.path} "
                f"has no {reading} columns: score its tokens {when} the step and import them "
                f"anew, `deltad import … --{reading} FILE`"
            )


def unjudged(dump: Dump, arms: Collection[str]) -> str:
    """Why ΔD cannot be told under some arms, empty where it can; see `check_readings`."""
    try:
        for arm in arms:
            check_readings(dump, arm, BOTH)
    except QuestionError as error:
        return str(error)
    return ""


def _default_protocol(dump: Dump) -> str:
    """`shared:none`, or the only arm there is besides `zero-step`."""
    real = [arm for arm in dump.arms if arm != ZERO_STEP]
    if NONE.name in real:
        return SHARED + NONE.name
    if len(real) == 1:
        return SHARED + real[0]
    raise QuestionError(
        f"{dump.path} has no arm `none`, so `--protocol` must say whose update judges: "
        f"{_listed(dump)}"
    )


def _listed(dump: Dump) -> str:
    """The arms that exist, for error messages."""
    return f"its arms are {', '.join(dump.arms)}"


def _arm_of(dump: Dump, applied: Criterion | Weight, question: Question) -> str:
    """The arm whose recorded update applied this criterion's mask, as the question has it."""
    matching = [
        arm
        for arm in dump.arms
        if arm != ZERO_STEP
        and all(_is_update(part.metadata, applied, question) for part in dump.files(arm))
    ]
    if applied.name in matching:
        return applied.name
    if len(matching) == 1:
        return matching[0]
    wanted = f"mask {applied.name}, threshold {question.threshold:g}, {question.divergence}"
    if matching:
        raise QuestionError(
            f"`--protocol own` needs one arm that applied {wanted}, but "
            f"{', '.join(matching)} of {dump.path} all did: name one by `shared:`"
        )
    recorded = "; ".join(
        f"arm {arm} recorded {_described(dump.metadata(arm))}"
        for arm in dump.arms
        if arm != ZERO_STEP
    )
    raise QuestionError(
        f"`--protocol own` needs an arm whose update was made with {wanted}; "
        f"in {dump.path} {recorded}"
    )


def _is_update(metadata: Metadata, applied: Criterion | Weight, question: Question) -> bool:
    """Whether a recorded update masked as the criterion does under the question's region."""
    update = metadata.update
    return update.get("mask") == applied.name and all(
        _same(update.get(name), getattr(question, name)) for name in _region(applied)
    )


def _check_family(judge: Criterion | Weight, divergence: str) -> None:
    """Refuse a divergence that a criterion does not predict; a weight predicts none."""
    if isinstance(judge, Criterion):
        judge.check_family(divergence)


def _region(applied: Criterion | Weight) -> tuple[str, ...]:
    """What of the region a criterion's decision depends on."""
    if isinstance(applied, Weight) or applied.name in (NONE.name, "clip-higher"):
        return ()
    return ("threshold",) if applied.name.startswith("binary-") else ("threshold", "divergence")


def _same(recorded: Any, asked: float | str) -> bool:
    """Equality, with thresholds that went through decimal text allowed their last digits."""
    if isinstance(recorded, int | float) and isinstance(asked, int | float):
        return math.isclose(recorded, asked, rel_tol=1e-12, abs_tol=0.0)
    return bool(recorded == asked)


def _described(metadata: Metadata) -> str:
    """What an arm recorded of its update, for error messages."""
    update = metadata.update
    return f"mask {update.get('mask')}, threshold {update.get('threshold')}, " + str(
        update.get("divergence")
    )


def _check_seeds(dump: Dump, resolved: Resolved) -> None:
    """Both arms have the same seeds."""
    ours, theirs = resolved.criterion_arm, resolved.baseline_arm
    for have, lack in ((ours, theirs), (theirs, ours)):
        missing = sorted(set(dump.seeds(have)) - set(dump.seeds(lack)))
        if missing:
            raise QuestionError(
                f"`--protocol own` needs every seed in both arms, but arm {lack} of {dump.path} "
                f"lacks seed {', '.join(map(str, missing))}, which arm {have} has"
            )
