"""What is asked of a dump: region, pair of criteria, and which update ΔD is measured under.

A question is checked twice: by itself when it is made, and against a dump when it is resolved,
which settles the protocol and the arms to read, and refuses what the dump cannot answer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from deltad.divergence import DIVERGENCES
from deltad.dumps.columns import COLUMNS
from deltad.dumps.rules import Pair as StoredPair
from deltad.masks import DEFAULT_THRESHOLD, NONE, RULES, CriterionError, Rule, distinct, rule

if TYPE_CHECKING:
    from deltad.dumps import Dump, Metadata, PartFile

OWN: Final = "own"
SHARED: Final = "shared:"
ZERO_STEP: Final = "zero-step"
BOTH: Final = ("pre", "post")
"""The log-probs of the policy that ΔD is made of: before and after the update."""


class QuestionError(ValueError):
    """A question that makes no sense, or that this dump cannot answer."""


@dataclass(frozen=True)
class Question:
    """Which tokens, decided by which two criteria, judged under which update.

    Attributes
    ----------
    threshold : float
        δ ≥ 0 of the region: nats for KL, a probability for TV.
    divergence : {"kl", "tv"}
        The region's divergence.
    criterion : str or Rule
        The criterion in question, as `deltad.masks.rule` takes it; a soft weight masks where it
        is not positive. By default `predictive-<divergence>-aggregated`.
    baseline : str or Rule
        The one that it is compared with.
    protocol : str
        `shared:<arm>` measures ΔD of both under one arm's update; `own` of each under the arm
        that applied its mask. Empty until resolved: then `shared:none`, or the only arm there is.

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
    criterion: str | Rule = ""
    baseline: str | Rule = "ratio"
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
        for each in self.rules:
            each.check_family(self.divergence)
        arm = self.protocol.removeprefix(SHARED)
        if self.protocol not in ("", OWN) and (arm == self.protocol or not arm):
            raise QuestionError(
                f"`protocol` must be `own` or `shared:` and an arm, got {self.protocol!r}"
            )

    @cached_property
    def rules(self) -> tuple[Rule, Rule]:
        """Criterion and baseline, looked up."""
        return rule(self.criterion), rule(self.baseline)

    @property
    def names(self) -> tuple[str, str]:
        """Names of criterion and baseline."""
        return self.rules[0].name, self.rules[1].name

    def resolve(
        self, dump: Dump, *, needs: Collection[str] = BOTH, disagreement_only: bool = False
    ) -> Resolved:
        """Settle the protocol and the arms for one dump.

        Only the dump's footers are read.

        Parameters
        ----------
        needs : collection of {"pre", "post"}
            Log-probs of the policy that the answer cannot do without: both for ΔD, and "pre"
            alone for D, Ḋ and decisions.
        disagreement_only : bool
            Whether the answer is made of the tokens that exactly one criterion masks, and of the
            number outside: what a dump can tell that stores no others.

        Raises
        ------
        QuestionError
            There is no such arm; no arm applied the question's mask (`own`); a seed is missing in
            one of the arms; tokens or top-K log-probs that are asked for were not stored; or a
            criterion needs a column, or the answer log-probs, that are missing.
        """
        asked = self if self.protocol else replace(self, protocol=_default_protocol(dump))
        if asked.protocol == OWN:
            resolved = Resolved(asked, *(_arm_of(dump, each, asked) for each in asked.rules))
        else:
            arm = asked.protocol.removeprefix(SHARED)
            if arm not in dump.arms:
                raise QuestionError(f"there is no arm {arm!r} in {dump.path}: {_listed(dump)}")
            resolved = Resolved(asked, arm, arm)
        _check_seeds(dump, resolved)
        for arm in resolved.arms:
            _check_read(dump, arm, needs)
            for part in dump.files(arm):
                _check_stored(part, asked, disagreement_only)
            for each in asked.rules:
                check_rule(dump, arm, each)
        return resolved


@dataclass(frozen=True)
class Resolved:
    """A question that one dump can answer."""

    question: Question  # with the protocol filled in
    criterion_arm: str  # whose update judges the tokens that the criterion keeps
    baseline_arm: str  # the same for the baseline, and the same arm when shared

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms to read: the criterion's first, each once."""
        return tuple(dict.fromkeys((self.criterion_arm, self.baseline_arm)))


def answerable_protocols(
    dump: Dump, question: Question, names: Sequence[str] = (), **how: Any
) -> tuple[dict[str, Resolved], dict[str, str]]:
    """Every protocol (of those named) that a dump can answer, and why it cannot answer the others.

    By default `shared:none` and `own` come first, then the other arms, never `shared:zero-step`,
    whose ΔD is 0 by construction; `how` is as `Question.resolve` takes it, and so are the errors
    where no protocol is left.
    """
    others = [arm for arm in dump.arms if arm not in (NONE.name, ZERO_STEP)]
    first = [SHARED + NONE.name] if NONE.name in dump.arms else []
    found: dict[str, Resolved] = {}
    refused: dict[str, str] = {}
    for protocol in dict.fromkeys(names or [*first, OWN, *(SHARED + arm for arm in others)]):
        try:
            found[protocol] = replace(question, protocol=protocol).resolve(dump, **how)
        except (QuestionError, CriterionError) as error:
            refused[protocol] = str(error)
    if not found:
        # Refused too, and for the plainest reason.
        replace(question, protocol=names[0] if names else "").resolve(dump, **how)
    return found, refused


def comparable(
    dump: Dump,
    question: Question,
    criteria: Sequence[str | Rule] = (),
    *,
    needs: Collection[str] = BOTH,
) -> tuple[dict[str, Resolved], dict[str, str]]:
    """Criteria by name that a dump can answer for, each against the baseline, which comes first.

    By default all built-in ones that the region's divergence allows; which of these the dump
    cannot answer for comes second, and why. One that is asked for by name raises instead, as
    `Question.resolve` does.
    """
    base = replace(question, criterion=question.baseline).resolve(dump, needs=needs)
    resolved = {base.question.names[0]: base}
    refused: dict[str, str] = {}
    asked = criteria or [
        each
        for each in RULES.values()
        if each is not NONE and each.family in (None, question.divergence)
    ]
    for name, each in distinct([base.question.rules[0], *map(rule, asked)]).items():
        if name in resolved:
            continue
        try:
            found = replace(base.question, criterion=each).resolve(dump, needs=needs)
            for arm in {*found.arms, *arms_of(resolved)}:  # all of them decide in every arm
                for other in (found, *resolved.values()):
                    check_rule(dump, arm, other.question.rules[0])
        except (QuestionError, CriterionError) as error:
            if criteria:
                raise
            refused[name] = str(error)
        else:
            resolved[name] = found
    return resolved, refused


def arms_of(resolved: dict[str, Resolved]) -> tuple[str, ...]:
    """The arms to read of several questions, the first one's baseline first, each once."""
    every = list(resolved.values())
    return tuple(dict.fromkeys([every[0].baseline_arm, *(arm for r in every for arm in r.arms)]))


def check_rule(dump: Dump, arm: str, needed: Rule) -> None:
    """Refuse a rule that needs columns, or whole responses, that an arm was recorded without."""
    check_columns(dump, arm, needed.columns, f"criterion {needed.name}")
    for part in dump.files(arm) if needed.scope == "sequence" else ():
        if part.metadata.stored_above is not None:
            raise QuestionError(
                f"criterion {needed.name} judges whole responses, and {part.path} stores only "
                "some of their tokens: record all"
            )


def check_columns(dump: Dump, arm: str, columns: Collection[str], who: str) -> None:
    """Refuse what needs optional columns that an arm was recorded without; names the column."""
    present = dump.optional_columns(arm)
    for column in columns:
        if column not in COLUMNS:
            raise QuestionError(f"{who} needs the column `{column}`, which no dump has")
        if not COLUMNS[column].required and column not in present:
            raise QuestionError(
                f"{who} needs the column `{column}`, which arm {arm} of {dump.path} does not "
                "have: record it, or ask for something else"
            )


def chosen_seeds(dump: Dump, arm: str, wanted: Collection[int]) -> list[int]:
    """Seeds of an arm, or those wanted of them; one that there is not is refused."""
    known = dump.seeds(arm)
    if missing := sorted(set(wanted) - set(known)):
        raise QuestionError(
            f"there is no seed {', '.join(map(str, missing))} in {dump.path}: "
            f"its seeds are {', '.join(map(str, known))}"
        )
    return [seed for seed in known if not wanted or seed in wanted]


def unjudged(dump: Dump, arms: Collection[str]) -> str:
    """Why ΔD cannot be told under some arms, empty where it can."""
    try:
        for arm in arms:
            _check_read(dump, arm, BOTH)
    except QuestionError as error:
        return str(error)
    return ""


def recorded_share(dump: Dump) -> float:
    """Share of the sequences that a dump recorded, the least of its files; 1 for all."""
    return min(float((part.metadata.sampling or {}).get("sequences", 1.0)) for part in dump.parts)


def _check_read(dump: Dump, arm: str, needs: Collection[str]) -> None:
    """Refuse what needs log-probs of the policy ("pre", "post") that an arm has not."""
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


def _check_stored(part: PartFile, question: Question, disagreement_only: bool) -> None:
    """Refuse a question about tokens or top-K log-probs that a file does not store."""
    for what, divergence, least, remedy in _bounds(part):
        if divergence != question.divergence:
            raise QuestionError(
                f"{part.path} {what}, which does not bound the divergence "
                f"{question.divergence}: ask for {divergence}, or {remedy}"
            )
        if question.threshold < least:
            raise QuestionError(
                f"{part.path} {what}, and the threshold {question.threshold:g} asks for "
                f"more: ask for {least:g} or more, or {remedy}"
            )
    pair = part.metadata.stored_pair
    if pair is None:
        return
    where = (
        f"{part.path} stores only tokens with {pair.divergence} above {pair.threshold:g} that "
        f"exactly one of {pair.criterion} and {pair.baseline} masks"
    )
    if not disagreement_only:
        raise QuestionError(
            f"{where}, and this needs every token outside: record those, with "
            "`--store outside` or keep='outside'"
        )
    if not pair.answers(StoredPair(question.divergence, question.threshold, *question.names)):
        raise QuestionError(
            f"{where}, and the question is about {' and '.join(question.names)} at "
            f"{question.divergence} {question.threshold:g}: ask that pair there, or record more"
        )


def _bounds(part: PartFile) -> Iterator[tuple[str, str, float, str]]:
    """What a file keeps, above which divergence and threshold, and how to keep more."""
    metadata = part.metadata
    if metadata.stored_above is not None and metadata.stored_pair is None:
        name, least = metadata.stored_above
        yield f"stores only tokens with {name} above {least:g}", name, least, "record all tokens"
    if (near := metadata.near) is not None:
        what = (
            f"keeps top-K log-probs only where {near.divergence} is at least {near.threshold:g}, "
            f"and of {near.sample:g} of the other tokens"
        )
        yield what, near.divergence, near.threshold, "record with `--vectors all`"


def _default_protocol(dump: Dump) -> str:
    """`shared:none`, or the only arm there is besides `zero-step`."""
    real = _real_arms(dump)
    if NONE.name in real or len(real) == 1:
        return SHARED + (NONE.name if NONE.name in real else real[0])
    raise QuestionError(
        f"{dump.path} has no arm `none`, so `--protocol` must say which update ΔD is measured "
        f"under: {_listed(dump)}"
    )


def _real_arms(dump: Dump) -> list[str]:
    """Arms whose update moved the policy."""
    return [arm for arm in dump.arms if arm != ZERO_STEP]


def _listed(dump: Dump) -> str:
    """The arms that exist, for error messages."""
    return f"its arms are {', '.join(dump.arms)}"


def _arm_of(dump: Dump, applied: Rule, question: Question) -> str:
    """The arm whose recorded update applied this rule's mask, as the question has it."""
    real = _real_arms(dump)
    matching = [
        arm
        for arm in real
        if all(_is_update(part.metadata, applied, question) for part in dump.files(arm))
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
        "arm {} recorded mask {}, threshold {}, {}".format(
            arm, *map(dump.metadata(arm).update.get, ("mask", "threshold", "divergence"))
        )
        for arm in real
    )
    raise QuestionError(
        f"`--protocol own` needs an arm whose update was made with {wanted}; "
        f"in {dump.path} {recorded}"
    )


def _is_update(metadata: Metadata, applied: Rule, question: Question) -> bool:
    """Whether a recorded update masked as the rule does under the question's region."""
    update = metadata.update
    given = update.get("threshold")
    return (
        update.get("mask") == applied.name
        and (not applied.reads_divergence or update.get("divergence") == question.divergence)
        and (
            not applied.reads_threshold
            or (
                isinstance(given, int | float)
                and math.isclose(given, question.threshold, rel_tol=1e-12, abs_tol=0.0)
            )
        )
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
