"""One HTML page of a dump: its sections as data, and the page that they are put into."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from deltad import __version__
from deltad.analysis.doctor import examine
from deltad.analysis.question import Question, QuestionError, Resolved, check_columns, unjudged
from deltad.analysis.result import Result, title, without_nan
from deltad.analysis.tables.compare import compare, condition_table, sweep
from deltad.analysis.tables.ladder import calibrate, ladder_table
from deltad.analysis.tables.rates import protocol_table, rate_table
from deltad.analysis.values import CONDITIONS
from deltad.masks import CriterionError, Rule

from .viewer import MAX_TOKENS, TEXT_LENGTH, Viewer, describe, shortened, token_viewer

if TYPE_CHECKING:
    from deltad.analysis.backends import Progress
    from deltad.dumps import Dump

SCRIPTS: Final = (
    "codec", "words", "tokens", "decide", "colour", "list", "inspector", "filter", "controls",
    "main",
)  # fmt: skip
"""The parts of the page's one script, in the order in which they are joined."""

POINT: Final = 128 / 72
"""Pixels on the page per point of a figure: type of 7 points is then about 12 pixels high."""

_SLOT: Final = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, eq=False)
class Report:
    """A page about a dump.

    Attributes
    ----------
    html : str
        The whole page, which needs no other file and no network.
    failures : tuple of (str, Exception)
        Titles of the sections of which something could not be made, and why; the page says so too.
    """

    html: str
    failures: tuple[tuple[str, Exception], ...] = ()

    def _repr_html_(self) -> str:
        """What Jupyter shows: the page in a frame of its own, which cannot touch the notebook."""
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts allow-modals" '
            'title="deltad report" style="width:100%;height:85vh;border:1px solid #8884;'
            'border-radius:8px"></iframe>'
        )


def report(
    dump: Dump,
    question: Question | None = None,
    *,
    criteria: Collection[str | Rule] = (),
    seeds: Collection[int] = (),
    tokens: int = MAX_TOKENS,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Make the page of a dump.

    Parameters
    ----------
    dump : Dump
        An open dump.
    question : Question, optional
        Region, pair and protocol; by default the paper's.
    criteria : collection of str or Rule
        Further rules that the token viewer decides by.
    seeds : collection of int
        The token viewer shows only these; the tables always count all.
    tokens : int
        At most so many tokens in the viewer, those with the largest D.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    Report
        Sections that could not be made are in its `failures`.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question or for one of the rules, or has no such seed.
    """
    asked = _Asked(
        dump,
        (question or Question()).resolve(dump, needs=("pre",)),
        {"bootstrap_seed": bootstrap_seed, "progress": progress},
    )
    viewer = None
    try:
        viewer = token_viewer(
            dump, asked.question, criteria=criteria, seeds=seeds, tokens=tokens, progress=progress
        )
        tokens_html = _viewer_html(viewer, asked)
    except (QuestionError, CriterionError):
        raise  # the question itself is at fault
    except Exception as error:
        tokens_html = asked.failed("Tokens", error)
    parts = {name: (head, _section(asked, head, lead, made)) for name, head, lead, made in SECTIONS}
    parts["tokens"] = ("Tokens", tokens_html)
    script = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = _filled(
        _file("template.html"),
        {
            "title": escape(f"{dump.path.name} · deltad report"),
            "run": escape(dump.path.name),
            "script_hash": f"'sha256-{digest}'",
            "style": _file("style.css"),
            "navigation": "".join(f'<a href="#{name}">{head}</a>' for name, (head, _) in
                                  parts.items()),
            "sections": "\n".join(
                f'<section id="{name}" aria-labelledby="{name}-title">\n'
                f'<h2 id="{name}-title">{head}</h2>\n{html}\n</section>'
                for name, (head, html) in parts.items()
            ),
            "footer": f"deltad {escape(__version__)}, {escape(str(dump.path))}",
            "data": "" if viewer is None else _data(viewer),
            "script": script,
        },
    )  # fmt: skip
    return Report(html, tuple(asked.failures.items()))


@dataclass(frozen=True)
class _Asked:
    """What the sections share, and which of them failed."""

    dump: Dump
    resolved: Resolved
    options: Mapping[str, Any]
    failures: dict[str, Exception] = field(default_factory=dict)

    @property
    def question(self) -> Question:
        """The question, its protocol settled."""
        return self.resolved.question

    def failed(self, section: str, error: Exception) -> str:
        """Remember a failure, and say on the page what could not be made."""
        self.failures.setdefault(section, error)
        words = f"Not made: {error} ({type(error).__name__})"
        return f'<p class="failed" role="alert">{escape(words)}</p>'


@dataclass(frozen=True)
class Part:
    """What a section shows: a result as a table, under its figure where that has a label.

    Attributes
    ----------
    make : callable
        Computes the result.
    label : str
        What the figure shows, for those who cannot see it; no figure is drawn where empty.
    folded : bool
        Whether the table under a figure stands behind a line to open.
    """

    make: Callable[[_Asked], Result | str]
    label: str = ""
    folded: bool = True


def _section(asked: _Asked, head: str, lead: str, parts: Collection[Part]) -> str:
    """A section; what the dump cannot answer is said, what fails is shown as failed."""

    def attempt(make: Callable[..., str], *given: Any) -> str:
        """Some HTML, or why it could not be made."""
        try:
            return make(*given)
        except (QuestionError, CriterionError) as error:
            return f'<p class="absent">{escape(str(error))}</p>'
        except Exception as error:
            return asked.failed(head, error)

    def part(each: Part) -> str:
        """A result with its figure."""
        result = each.make(asked)
        if not isinstance(result, Result):
            return result
        table = f'<div class="result">{result._repr_html_()}</div>'
        if not each.label:
            return table
        drawn = attempt(_drawn, result, each.label)
        if each.folded:
            table = f'<details class="numbers-of"><summary>Numbers</summary>{table}</details>'
        return drawn + table

    made = [f'<div class="part">{attempt(part, each)}</div>' for each in parts]
    opening = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f'{opening}<div class="parts">{"".join(made)}</div>'


def _drawn(result: Result, label: str) -> str:
    """A result's figure as an element of the page, without a reference to anywhere.

    Black is the page's ink and white its ground, but for a figure with a heat map, whose words are
    meant for its own cells: that one stays on white.
    """
    drawn = result.form("svg").decode()
    on_white = "<image" in drawn or 'id="QuadMesh' in drawn
    drawn = re.sub(
        r"<metadata>.*?</metadata>|<title>.*?</title>|<style.*?</style>|<!--.*?-->", "",
        drawn[drawn.index("<svg") :], flags=re.DOTALL,
    )  # fmt: skip
    name = hashlib.sha256(label.encode()).hexdigest()[:8]  # apart from other figures' ids

    def for_page(found: re.Match[str]) -> str:
        tag = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", found.group()).replace("xlink:href", "href")
        tag = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", tag)
        if not on_white:
            tag = re.sub(r"#(?:000000|333333)\b", "currentColor", tag)
            tag = re.sub(r"fill: #ffffff\b", "fill: var(--panel)", tag)
        return tag

    head, _, rest = re.sub(r"<[^>]*>", for_page, drawn).partition(">")
    width = round(POINT * float(head.partition('viewBox="')[2].split()[2]))
    attributes = re.sub(r'\b(?:width|height|version)="[^"]*"\s*', "", head.removeprefix("<svg"))
    kind = ' class="on-white"' if on_white else ""
    return (
        f'<figure class="figure" style="max-width:{width}px"><svg role="img" '
        f'aria-label="{escape(label)}"{kind} fill="currentColor" {attributes.strip()}>{rest}'
        "</figure>"
    )


def _of(analysis: Callable[..., Result], **how: Any) -> Callable[[_Asked], Result]:
    """One analysis of the question."""
    return lambda asked: analysis(asked.dump, asked.question, **how, **asked.options)


def _unrecorded(asked: _Asked) -> dict[str, str]:
    """Conditions that the dump cannot tell tokens apart by, and why."""
    found = {}
    for name, value in CONDITIONS.items():
        try:
            for arm in asked.resolved.arms:
                check_columns(asked.dump, arm, value.columns, name)
        except QuestionError as error:
            found[name] = str(error)
    return found


def _conditions(asked: _Asked) -> Result:
    """By every condition that the dump can tell tokens apart by."""
    unrecorded = _unrecorded(asked)
    return _of(condition_table, by=[name for name in CONDITIONS if name not in unrecorded])(asked)


def _left_out(asked: _Asked) -> str:
    """What is said of the other conditions."""
    reasons = _unrecorded(asked).values()
    return "".join(f'<p class="absent">Left out: {escape(each)}.</p>' for each in reasons)


def _facts(asked: _Asked) -> str:
    """What the dump says about itself, and what the page asks of it."""
    dump, question, arm = asked.dump, asked.question, asked.resolved.criterion_arm
    metadata, seeds = dump.metadata(arm), dump.seeds(arm)
    behavior, update, readout = metadata.behavior, metadata.update, metadata.readout
    stored = metadata.stored_above
    top_p, top_k = behavior.get("top_p"), behavior.get("top_k")
    facts = {
        "model": metadata.model,
        "tokenizer": metadata.tokenizer if metadata.tokenizer != metadata.model else "",
        "behavior policy": _listed(behavior, engine="", precision="", quantization=""),
        "staleness": _listed(behavior, staleness=""),
        "sampling": f"temperature {metadata.temperature:g}"
        + (f", top-p {top_p}" if top_p not in (None, 1) else "")
        + (f", top-k {top_k}" if top_k not in (None, -1, 0) else ""),
        "log-probs": _listed(behavior, logprobs_mode=""),
        "readout": _listed(readout, hidden_dtype="hidden states ", head_dtype="head ")
        + (", logits rounded to bfloat16" if readout.get("logits_rounded") else ""),
        "update": _listed(update, optimizer="", lr="lr ", batch="batch "),
        "arms": ", ".join(dump.arms),
        "vocabulary and top-K": f"{metadata.vocab_size:,} ids, K = {metadata.top_k}",
        "seeds": f"{len(seeds):,}",
        "tokens": f"{sum(dump.rows_seen(arm, seed) for seed in seeds):,} seen, "
        f"{sum(dump.rows(arm, seed) for seed in seeds):,} stored in each arm",
        "stored": "all tokens" if stored is None
        else f"only tokens with {stored[0]} above {stored[1]:g}",
        "recorded": metadata.created,
    }  # fmt: skip
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(shortened(str(value), TEXT_LENGTH))}</dd></div>"
        for name, value in facts.items()
        if value
    )
    words = f"{title(question)} · protocol {question.protocol}"
    return f'<p class="asked">{escape(words)}</p><dl class="facts">{items}</dl>'


def _listed(values: Mapping[str, Any], **words: str) -> str:
    """Some values of the metadata, those that are there, each after its words."""
    found = ((word, values.get(name)) for name, word in words.items())
    return ", ".join(f"{word}{value}" for word, value in found if value is not None)


SECTIONS: Final[tuple[tuple[str, str, str, tuple[Part, ...]], ...]] = (
    ("run", "The run", "", (Part(_facts),)),
    ("doctor", "Doctor", "Why engine and trainer may disagree, judged from their log-probs alone.",
     (Part(lambda asked: examine(asked.dump, arm=asked.resolved.criterion_arm)),)),
    ("figure4", "Figure 4",
     "Disagreement tokens are outside the region, and exactly one of the two criteria masks them. "
     "Of those that each keeps, how many did the update carry further out?",
     (Part(_of(rate_table), "ΔD of the kept disagreement tokens, contracting fractions, and "
           "unsafe-keep rates by seed", folded=False),)),
    ("protocols", "Protocols",
     "A kept token can be judged by the update that was applied or by another one, and the answer "
     "depends on it.",
     (Part(_of(sweep, over="protocol"), "The rates under every protocol"),
      Part(_of(protocol_table)))),
    ("ladder", "Ladder",
     "Where the sign of ΔD is lost, rung by rung from a token's own gradient to the step.",
     (Part(_of(ladder_table), "Share of signs of ΔD predicted on every rung"),)),
    ("sweeps", "Sweeps",
     "The same question at other thresholds, and with only the K' likeliest ids recorded.",
     (Part(_of(sweep, over="threshold"), "Rates by threshold"),
      Part(_of(sweep, over="top-k"), "Rates by K'"))),
    ("criteria", "Criteria",
     "Every built-in rule that this dump can answer for, against the baseline.",
     (Part(_of(compare), "Agreement of rules, and how often each predicts the sign of ΔD"),)),
    ("conditions", "Conditions",
     "Among which tokens the criterion is right, and among which it is not.",
     (Part(_conditions, "How often the criterion predicts the sign of ΔD, by condition"),
      Part(_left_out))),
    ("calibration", "Calibration",
     "The change that a direction predicts for a token, against the realized change.",
     (Part(_of(calibrate), "Realized ΔD against the change that each direction predicts"),)),
)  # fmt: skip
"""Name, title, what it is about in a sentence, and parts of every section before the tokens."""


def _viewer_html(viewer: Viewer | None, asked: _Asked) -> str:
    """The token viewer without its data."""
    if viewer is None:
        return '<p class="absent">There is no token to show.</p>'
    header = viewer.header
    words = [*describe(viewer)]
    if without := unjudged(asked.dump, [header["arm"]]):
        words.append(f"ΔD and π after the update are unknown: {without}.")
    details = header["details"]
    exact = (
        "Decisions and counts are made in this page from the float64 values of D, r − 1, Ḋ and ΔD "
        "and the recorded Â. Top-K lists, log-probs and entropies are rounded to 1/2048 nat and "
        "are for display only."
    )
    if details["least"] is not None:
        exact += (
            f" There are top-K lists for {details['rows']:,} of {details['listed']:,} tokens, all "
            f"those with D above {details['least']:.3g}."
        )
    filled = {"unit": escape(header["unit"]), "precision": escape(exact)}
    lead = escape(" ".join(words))
    return f'<p class="lead">{lead}</p>{_filled(_file("viewer.html"), filled)}'


def _data(viewer: Viewer) -> str:
    """The viewer's data as elements that no browser runs."""
    columns = (
        f'<script type="text/plain" id="column-{name}">{text}</script>'
        for name, text in viewer.encoded().items()
    )
    header = _json(viewer.header)
    first = f'<script type="application/json" id="deltad-header">{header}</script>'
    return "\n".join([first, *columns])


def _filled(template: str, values: Mapping[str, str]) -> str:
    """A template with its slots filled, once: what is filled in is not looked at again."""
    return _SLOT.sub(lambda slot: values[slot.group(1)], template)


def _json(value: Any) -> str:
    r"""JSON that ends no script element and opens none, NaN as null.

    Examples
    --------
    >>> print(_json("</script>"))
    "\u003c/script\u003e"
    """
    text = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False)
    # Half a surrogate pair has no UTF-8.
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda s: f"\\u{ord(s.group()):04x}", text)


@cache
def _file(name: str) -> str:
    """One file of the package."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
