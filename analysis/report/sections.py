"""The sections of the page: each asks the analysis one thing and shows the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Final

from deltad.analysis.html import as_html
from deltad.analysis.question import Question, QuestionError, Resolved
from deltad.masks import CriterionError

from .summary import summary
from .svg import inline_svg

if TYPE_CHECKING:
    from deltad.analysis.engine import Progress
    from deltad.analysis.rates import RateTable
    from deltad.analysis.result import Result
    from deltad.dumps import Dump

    from .payload import Payload


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes
    ----------
    name : str
        Its anchor.
    title : str
        Its heading.
    html : str
        What stands under it.
    failure : Exception, optional
        What went wrong; the section says so.
    """

    name: str
    title: str
    html: str
    failure: Exception | None = None


@dataclass
class Context:
    """What the sections share.

    Attributes
    ----------
    dump : Dump
        Open.
    resolved : Resolved
        The question that the page answers.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    payload : Payload or None
        The token viewer's data; None where it could not be read.
    progress : callable, optional
        Told the number of rows of every block read.
    """

    dump: Dump
    resolved: Resolved
    bootstrap_seed: int = 0
    payload: Payload | None = None
    progress: Progress | None = None

    @property
    def question(self) -> Question:
        """The question, its protocol settled."""
        return self.resolved.question

    @property
    def options(self) -> Any:
        """What every part of the analysis is told."""
        return {"bootstrap_seed": self.bootstrap_seed, "progress": self.progress}

    @cached_property
    def rates(self) -> RateTable:
        """The rate table of the question."""
        from deltad.analysis import rate_table

        return rate_table(self.dump, self.question, **self.options)


Part = Callable[[Context], str]

_PIXELS_AN_INCH: Final = 128  # type of 7 points is then about 12 pixels high


def sections(context: Context) -> Iterator[Section]:
    """Make the sections before the token viewer, each on its own.

    Parameters
    ----------
    context : Context
        Dump and question.

    Yields
    ------
    Section
        What a dump cannot answer is said in a sentence; what fails is shown as failed.
    """
    for name, (heading, lead, parts) in SECTIONS.items():
        made, failure = [], None
        for part in parts:
            try:
                html = part(context)
            except (QuestionError, CriterionError) as error:
                html = f'<p class="absent">{escape(str(error))}</p>'
            except Exception as error:
                html, failure = failed(error), error
            made.append(f'<div class="part">{html}</div>')
        opening = f'<p class="lead">{escape(lead)}</p>' if lead else ""
        yield Section(name, heading, f'{opening}<div class="parts">{"".join(made)}</div>', failure)


def failed(error: Exception) -> str:
    """A notice that something could not be made, and why."""
    kind = type(error).__name__
    return f'<p class="failed" role="alert">Not made: {escape(str(error))} ({escape(kind)})</p>'


def figure_element(result: Result, *, name: str, label: str) -> str:
    """A result's figure in a frame, not much larger than it was drawn."""
    figure = result.figure()
    width = round(float(figure.get_size_inches()[0]) * _PIXELS_AN_INCH)
    svg = inline_svg(figure, name=name, label=label)
    return f'<figure class="figure" style="max-width:{width}px">{svg}</figure>'


def folded(result: Result, words: str) -> str:
    """A result's numbers, behind a line to open."""
    return f'<details class="numbers-of"><summary>{words}</summary>{shown(result)}</details>'


def shown(result: Result) -> str:
    """A result's numbers as tables."""
    return f'<div class="result">{as_html(result.text())}</div>'


def _figure4(context: Context) -> str:
    """Figure 4 and the table that it is drawn from."""
    label = (
        "ΔD of the kept disagreement tokens, contracting fractions, and unsafe-keep rates by seed; "
        "the numbers are in the table below"
    )
    table = context.rates
    return figure_element(table, name="figure4", label=label) + shown(table)


def _protocols(context: Context) -> str:
    """The rates under every protocol."""
    from deltad.analysis import protocol_table

    return shown(protocol_table(context.dump, context.question, **context.options))


def _ladder(context: Context) -> str:
    """Where the sign of ΔD is lost."""
    from deltad.analysis import ladder_table

    table = ladder_table(context.dump, context.question, **context.options)
    missing = "; ".join(f"{rung} ({why})" for rung, why in table.missing.items())
    note = f'<p class="absent">Rungs that this dump does not have: {escape(missing)}.</p>'
    label = "Share of signs of ΔD foretold, from a token's own gradient to the step that was made"
    drawn = figure_element(table, name="ladder", label=label)
    return drawn + (note if missing else "") + folded(table, "Numbers")


def _swept(over: str, label: str) -> Part:
    """A sweep of the question."""

    def part(context: Context) -> str:
        from deltad.analysis import sweep

        swept = sweep(context.dump, context.question, over=over, **context.options)
        if swept.unjudged:
            return shown(swept)
        words = f"{label}; the numbers are in the table below"
        return figure_element(swept, name=f"by-{over}", label=words) + folded(swept, "Numbers")

    return part


def _comparison(context: Context) -> str:
    """Every criterion that the dump can answer."""
    from deltad.analysis import compare

    compared = compare(context.dump, context.question, **context.options)
    if compared.unjudged:
        return shown(compared)
    label = "Agreement of criteria, and how often each foretells the sign of ΔD"
    return figure_element(compared, name="comparison", label=label) + folded(compared, "Numbers")


def _conditions(context: Context) -> str:
    """Among which tokens a criterion errs."""
    from deltad.analysis import CONDITIONS, condition_table
    from deltad.analysis.conditions import check_condition

    answered, refused = [], ""
    for name, condition in CONDITIONS.items():
        try:
            for arm in context.resolved.arms:
                check_condition(context.dump, arm, condition)
        except QuestionError as error:
            refused += f'<p class="absent">{escape(str(error))}</p>'
        else:
            answered.append(name)
    table = condition_table(
        context.dump, context.question, answered, [context.question.criterion], **context.options
    )
    label = "How often the criterion foretells the sign of ΔD, by properties of the tokens"
    drawn = figure_element(table, name="conditions", label=label)
    return drawn + refused + folded(table, "Numbers")


def _calibration(context: Context) -> str:
    """Predicted against realized change."""
    from deltad.analysis import calibrate

    calibration = calibrate(context.dump, context.question, **context.options)
    label = "Realized ΔD against the change that each direction predicts"
    return figure_element(calibration, name="calibration", label=label) + folded(
        calibration, "Numbers"
    )


def _doctor(context: Context) -> str:
    """What engine and trainer disagree about, and why."""
    from deltad.analysis.doctor import examine

    return shown(examine(context.dump, arm=context.resolved.criterion_arm))


SECTIONS: Final[dict[str, tuple[str, str, tuple[Part, ...]]]] = {
    "run": ("The run", "", (lambda context: summary(context.dump, context.resolved),)),
    "doctor": (
        "Doctor",
        "Why engine and trainer may disagree, judged from their log-probs alone.",
        (_doctor,),
    ),
    "figure4": (
        "Figure 4",
        "Disagreement tokens are outside the region and exactly one of the two criteria masks "
        "them. Of those that each keeps, how many did the update carry further out?",
        (_figure4,),
    ),
    "protocols": (
        "Protocols",
        "A kept token can be judged by the update that was applied, or by another; the answer "
        "depends on it.",
        (_swept("protocol", "The rates under every protocol"), _protocols),
    ),
    "ladder": (
        "Ladder",
        "Where the sign of ΔD is lost, rung by rung from a token's own gradient to the step that "
        "was made.",
        (_ladder,),
    ),
    "sweeps": (
        "Sweeps",
        "The same question at other thresholds, and with only the K' likeliest ids recorded.",
        (
            _swept("threshold", "Rates and sign accuracy by threshold"),
            _swept("top-k", "Rates and sign accuracy by K'"),
        ),
    ),
    "criteria": (
        "Criteria",
        "Every criterion, and every neighbour's weight, that this dump can answer, against the "
        "baseline.",
        (_comparison,),
    ),
    "conditions": (
        "Conditions",
        "Among which tokens the criterion is right, and among which it is not.",
        (_conditions,),
    ),
    "calibration": (
        "Calibration",
        "The change that a direction predicts for a token, against the change that came.",
        (_calibration,),
    ),
}
"""Title, what it is about in a sentence, and how its parts are made, by name and in order."""
