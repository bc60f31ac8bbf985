"""The page put together: sections, viewer, data, style and script in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deltad import __version__
from deltad.analysis.export import without_nan
from deltad.analysis.question import Question, QuestionError, unjudged
from deltad.masks import CriterionError

from .payload import MAX_TOKENS, Payload, build_payload
from .sections import Context, Section, failed, sections

if TYPE_CHECKING:
    from deltad.analysis.engine import Progress
    from deltad.dumps import Dump

SCRIPTS: Final = (
    "codec", "words", "tokens", "decide", "colour", "list", "inspector", "counts", "filter",
    "controls", "keys", "main",
)  # fmt: skip
"""The parts of the page's one script, in the order in which they are joined."""

_SLOT: Final = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, eq=False)
class Report:
    """A page about a dump.

    Attributes
    ----------
    html : str
        The whole page; it needs nothing beside itself.
    failures : tuple of (str, Exception)
        Titles of the sections that could not be made, and why; the page says so too.
    """

    html: str
    failures: tuple[tuple[str, Exception], ...] = ()

    def write(self, path: str | Path) -> None:
        """Write the page to a file.

        Parameters
        ----------
        path : str or Path
            Where to.
        """
        Path(path).write_text(self.html, encoding="utf-8")

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
    seeds : collection of int
        The token viewer shows only these; the tables always count all.
    tokens : int
        At most so many tokens in the viewer; see `build_payload`.
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
        The dump cannot answer the question, or has no such seed.
    """
    resolved = (question or Question()).resolve(dump, needs=("pre",))
    context = Context(dump, resolved, bootstrap_seed, progress=progress)
    viewer = _viewer(context, seeds, tokens)
    made = [*sections(context), viewer]
    data = "" if context.payload is None else _data(context.payload)
    script = "\n".join(_part(f"{name}.js") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = filled(
        _part("template.html"),
        {
            "title": escape(f"{dump.path.name} · deltad report"),
            "run": escape(dump.path.name),
            "script_hash": f"'sha256-{digest}'",
            "style": _part("style.css"),
            "navigation": "".join(f'<a href="#{each.name}">{each.title}</a>' for each in made),
            "sections": "\n".join(map(_section, made)),
            "footer": f"deltad {escape(__version__)}, {escape(str(dump.path))}",
            "data": data,
            "script": script,
        },
    )
    failures = tuple((each.title, each.failure) for each in made if each.failure is not None)
    return Report(html, failures)


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with its slots filled, once: what is filled in is not looked at again.

    Examples
    --------
    >>> filled("{{a}}-{{b}}", {"a": "{{b}}", "b": "1"})
    '{{b}}-1'
    """
    return _SLOT.sub(lambda slot: values[slot.group(1)], template)


def json_for_page(value: Any) -> str:
    r"""JSON that ends no script element and opens none, NaN as null.

    Examples
    --------
    >>> print(json_for_page("</script>"))
    "\u003c/script\u003e"
    """
    text = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    # Half a surrogate pair has no UTF-8.
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half.group()):04x}", text)


def _viewer(context: Context, seeds: Collection[int], tokens: int) -> Section:
    """The section of the token viewer; sets the context's payload."""
    title = "Tokens"
    try:
        payload = build_payload(
            context.dump, context.question, seeds=seeds, tokens=tokens, progress=context.progress
        )
    except (QuestionError, CriterionError):
        raise  # the question itself is at fault
    except Exception as error:
        return Section("tokens", title, failed(error), error)
    context.payload = payload
    html = filled(
        _part("viewer.html"),
        {"unit": escape(payload.header["unit"]), "precision": escape(_precision(payload))},
    )
    return Section("tokens", title, f"<p class=lead>{escape(_lead(payload, context))}</p>{html}")


def _lead(payload: Payload, context: Context) -> str:
    """What the viewer holds."""
    header, question = payload.header, context.question
    shown, seeds = header["rows"], len(header["seeds"])
    words = f"{shown:,} of {header['stored']:,} stored tokens, {seeds} of {header['all_seeds']} "
    words += "seeds. " if header["all_seeds"] != 1 else "seed. "
    if not header["texts"]:
        words += "The dump holds no decoded text, so tokens are shown by their ids. "
    if header["floor"]:
        words += f"δ stops at {header['floor']:g}: {header['floor_reason']}. "
    if question.protocol == "own":
        words += (
            f"The protocol is `own`; what follows is counted under the update of one arm, "
            f"first {header['arm']}. "
        )
    if without := unjudged(context.dump, [header["arm"]]):
        words += f"ΔD and π after are unknown: {without}. "
    for arm, reason in header["left_out"].items():
        words += f"Arm {arm} is not here: {reason}. "
    return words.strip()


def _precision(payload: Payload) -> str:
    """What of the viewer is exact and what is not."""
    details = payload.header["details"]
    words = (
        "Decisions and counts are made in this page from the float64 values of D, r − 1, Ḋ and ΔD "
        "and the recorded Â. The lists of the top-K, log-probs and entropies are rounded to "
        "1/2048 nat, for display alone"
    )
    if details["least"] is None:
        return f"{words}."
    return (
        f"{words}, and there are lists for {details['rows']:,} of {details['with_vectors']:,} "
        f"tokens, all those with D above {details['least']:.3g}."
    )


def _section(section: Section) -> str:
    """A section as an element."""
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{section.title}</h2>\n{section.html}\n</section>'
    )


def _data(payload: Payload) -> str:
    """The viewer's data as elements that no browser runs."""
    header = json_for_page(payload.header)
    parts = [f'<script type="application/json" id="deltad-header">{header}</script>']
    parts += [
        f'<script type="text/plain" id="column-{name}">{text}</script>'
        for name, text in payload.encoded().items()
    ]
    return "\n".join(parts)


@cache
def _part(name: str) -> str:
    """One file of the package."""
    return (resources.files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
