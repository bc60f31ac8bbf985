"""What the token viewer is given: columns of numbers, and a header that says what they are.

Every rule decides on the page by data: its region and its push are columns, and it masks where the
region exceeds the threshold and Â times the push is positive. What no two columns can say (a soft
weight, a rule with its own `keep`, one of whole responses) is decided here, at the threshold that
the page begins with.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.backends import Progress
from deltad.analysis.question import (
    ZERO_STEP,
    Question,
    QuestionError,
    check_rule,
    chosen_seeds,
)
from deltad.analysis.reading import Ask, checked_batches, seed_context, topk_columns
from deltad.analysis.result import counted, unit
from deltad.analysis.values import NOISE, WEIGHT, Block, Context
from deltad.divergence import TAILS
from deltad.dumps import read_prompts
from deltad.dumps.columns import VECTORS
from deltad.masks import RULES, VALUES, CriterionError, Rule, distinct, rule
from deltad.tally import Judged

if TYPE_CHECKING:
    from deltad.dumps import Dump

MAX_TOKENS: Final = 100_000
"""Tokens of the page unless told otherwise."""

MAX_ARMS: Final = 4
"""Arms whose ΔD the page can show; each costs 8 bytes per token."""

PAGE_BYTES: Final = 14_000_000
"""What a page should not exceed by much; top-K lists fill what the rest leaves."""

TEXT_LENGTH: Final = 200
PROMPT_LENGTH: Final = 20_000
"""Characters of a token's text and of a prompt; the rest is cut off."""

TYPES: Final = {
    "float64": "Float64Array", "float32": "Float32Array", "int32": "Int32Array",
    "uint16": "Uint16Array", "uint8": "Uint8Array",
}  # fmt: skip
"""NumPy types that a page can hold, and the typed arrays that they become there."""

QUANTUM: Final = 1 / 2048
"""Step of a log-prob shown on the page, in nats: 0.05 % of a probability."""

UNKNOWN: Final = 65_535
BEYOND: Final = 65_534
"""Quantised numbers that are not there, and those of 32 nats and more."""

UNCLEAR: Final = 2
"""Stands for an unknown decision, and for a ΔD of whose error no bound is known."""

_KEYS: Final = ("seed", "step", "sequence", "position", "token_id")
_RESPONSE: Final = ("seed", "step", "group", "sequence")
_LOGPROBS: Final = {"behavior_logprob": -1, "pre_logprob": -1, "post_logprob": -1}
_ENTROPIES: Final = {"pre_entropy": 1, "post_entropy": 1}
_D: Final = "value-divergence"
_SECTION_BYTES: Final = 1_500_000  # tables, figures, style and script
_TRIAL_ROWS: Final = 2_000  # lists that are encoded to learn how many there is room for

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Viewer:
    """The token viewer's data.

    Attributes
    ----------
    header : dict
        Plain objects: the question, arms, rules with the columns that decide, seeds, texts,
        prompts, what was left out and why.
    columns : dict of str to ndarray
        By name, of the types in `TYPES`.
    """

    header: dict[str, Any]
    columns: Columns

    def encoded(self) -> dict[str, str]:
        """The columns as text, by name."""
        return {name: encode(values) for name, values in self.columns.items()}


def encode(values: NDArray[Any]) -> str:
    """Write a column as text: base64 of its deflated little-endian bytes, transposed.

    All first bytes come first, then all second bytes: signs and exponents of floats are alike from
    row to row, so that they shrink. Nothing is rounded.
    """
    TYPES[values.dtype.name]  # refuses another
    flat = np.ascontiguousarray(values.reshape(-1), dtype=values.dtype.newbyteorder("<"))
    planes = flat.view(np.uint8).reshape(-1, values.dtype.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode()


def quantised(nats: NDArray[Any]) -> NDArray[np.uint16]:
    """Negative log-probs or entropies for display, in steps of `QUANTUM`.

    Examples
    --------
    >>> quantised(np.array([0.0, 1.0, np.inf, np.nan])).tolist()
    [0, 2048, 65534, 65535]
    """
    nats = nats.astype(np.float64)
    steps = np.clip(np.nan_to_num(nats / QUANTUM, nan=0.0, posinf=BEYOND), 0, BEYOND)
    return np.where(np.isnan(nats), UNKNOWN, np.rint(steps)).astype(np.uint16)


def token_viewer(
    dump: Dump,
    question: Question | None = None,
    *,
    criteria: Collection[str | Rule] = (),
    seeds: Collection[int] = (),
    tokens: int = MAX_TOKENS,
    progress: Progress | None = None,
) -> Viewer | None:
    """Read the tokens that the page shows.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is checked.
    question : Question, optional
        Region, pair and protocol; under `own` the page begins with the criterion's arm.
    criteria : collection of str or Rule
        Further rules to decide by, in addition to the pair and to every built-in one that the dump
        can answer.
    seeds : collection of int
        Only these; all where empty.
    tokens : int
        At most so many tokens. Where there are more, those with the largest D are kept, and
        the page's threshold stops where some would be missing.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    Viewer or None
        None where there is no token to show.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question, or has no such seed.
    DumpError
        A row holds an impossible value.
    """
    if tokens < 1:
        raise QuestionError(f"`tokens` must be at least 1, got {tokens}")
    resolved = (question or Question()).resolve(dump, needs=("pre",))
    arm, asked = resolved.criterion_arm, resolved.question
    source = _Source(dump, chosen_seeds(dump, arm, seeds), asked, progress)
    floor, reason, cut = _floor(source, arm, tokens)
    source = replace(source, question=replace(asked, threshold=max(asked.threshold, floor)))
    above = floor if cut else None
    rules = _rules(source, arm, criteria)
    rows, known_seeds = source.rows(arm, rules, above)
    if not rows:
        return None
    arms, left_out = _arms(source, arm)
    judged = {}
    for other in arms:
        theirs = rows if other == arm else source.rows(other, (), above)[0]
        if theirs and all(np.array_equal(rows[name], theirs[name]) for name in _KEYS):
            judged[other] = theirs
        else:
            left_out[other] = "its tokens are not those of the other arms"
    pair = {each.name for each in (*asked.rules, *map(rule, criteria))}
    rules = [each for each in rules if each.name in pair or _decides(each, rows)]
    columns = _columns(rows, rules, source.shown, list(judged.values()))
    header: dict[str, Any] = {
        "divergence": asked.divergence,
        "unit": unit(asked).strip(),
        "threshold": source.question.threshold,
        "criterion": asked.names[0],
        "baseline": asked.names[1],
        "protocol": asked.protocol,
        "shown": {"column": f"value-{source.shown}", "label": VALUES[source.shown].meaning},
        "floor": floor,
        "floor_reason": reason,
        "arm": arm,
        "arms": list(judged),
        "left_out": left_out,
        "rules": [_entry(each, source.question) for each in rules],
        "seeds": [
            {"seed": seed, "tokens": dump.rows_seen(arm, seed), "known": is_known}
            for seed, is_known in zip(source.seeds, known_seeds, strict=True)
        ],
        "all_seeds": len(dump.seeds(arm)),
        "stored": sum(dump.rows(arm, seed) for seed in source.seeds),
        "rows": len(columns["token_id"]),
        "quantum": QUANTUM,
        "cut": 0,
    }
    _add_texts(header, columns, rows)
    header["prompts"] = _prompts(source, columns)
    size = sum(len(encode(values)) for values in columns.values())
    header["details"] = _add_details(columns, rows, dump.top_k, size)
    header["columns"] = {
        name: {"type": TYPES[values.dtype.name], "length": int(values.size)}
        for name, values in columns.items()
    }
    return Viewer(header, columns)


@dataclass(frozen=True)
class _Source:
    """Where rows come from, and what is asked of them."""

    dump: Dump
    seeds: Sequence[int]
    question: Question
    progress: Progress | None

    @property
    def shown(self) -> str:
        """The Ḋ that the page shows: that of the pair where it has one, else the aggregated."""
        pushes = (each.push for each in self.question.rules if each.is_mask)
        own = (p for p in pushes if isinstance(p, str) and VALUES[p].family is not None)
        return next(own, f"{self.question.divergence}-aggregated")

    def blocks(self, arm: str, seed: int, columns: Collection[str]) -> Iterator[Block]:
        """The rows of a seed, judged by their top-K log-probs."""
        divergence = self.question.divergence
        for part in self.dump.files(arm, seed):
            more = [NOISE, WEIGHT]
            more += ["d_pre", "d_post"] if part.metadata.derived_divergence == divergence else []
            names = [*columns, *(name for name in more if name in part.columns)]
            for batch in checked_batches(part, names, progress=self.progress):
                yield Block.of_topk(batch, part, divergence)

    def rows(
        self, arm: str, rules: Sequence[Rule], above: float | None
    ) -> tuple[Columns, list[bool]]:
        """Rows with D above a number, sorted, and by seed whether any row's D is known.

        Without rules only what differs between arms; D, Ḋ and ΔD are NaN where not known.
        """
        present = self.dump.optional_columns(arm)
        names = [*topk_columns(rules, post="post" in self.dump.readings(arm)), "in_loss"]
        names += ["step", "group", "sequence", "position"]
        names += [name for name in ("token", *_ENTROPIES) if name in present and rules]
        blocks: list[Columns] = []
        known = [not self.dump.rows(arm, seed) for seed in self.seeds]
        for index, seed in enumerate(self.seeds):
            ask = Ask(self.question, tuple(rules))
            context = seed_context(self.dump, arm, seed, ask)
            for block in self.blocks(arm, seed, list(dict.fromkeys(names))):
                found = _judged(block) | (self._decided(block, rules, context) if rules else {})
                found["seed"] = np.full(len(block.batch), index, np.int32)
                is_inside = block.part.metadata.near is not None  # where D is not known
                known[index] |= is_inside or not bool(np.isnan(block.d_pre).all())
                wanted = slice(None) if above is None else block.d_pre > above
                blocks.append({name: values[wanted] for name, values in found.items()})
        if not sum(len(each["seed"]) for each in blocks):
            return {}, known
        rows = {name: np.concatenate([each[name] for each in blocks]) for name in blocks[0]}
        order = np.lexsort([rows[name] for name in ("position", "sequence", "step", "seed")])
        return {name: values[order] for name, values in rows.items()}, known

    def _decided(self, block: Block, rules: Sequence[Rule], context: Context) -> Columns:
        """What decides, what is shown, and the top-K log-probs of a block."""
        batch, divergence = block.batch, self.question.divergence
        found: Columns = {name: batch[name] for name in ("advantage", *VECTORS[:3])}
        unread = np.full(batch["topk_pre_logprobs"].shape, np.nan, np.float32)
        found[VECTORS[3]] = batch.columns.get(VECTORS[3], unread)
        found["vectors"] = block.batch.vectors
        found[WEIGHT] = batch.columns.get(WEIGHT, np.ones(len(batch), np.float32))
        for name, sign in (_LOGPROBS | _ENTROPIES).items():
            if name in batch.columns:
                found[name] = quantised(sign * batch[name])
        if "token" in batch.columns:
            found["token"] = batch["token"]
        found[_D] = block.d_pre
        for name in ("ratio", self.shown):
            found[f"value-{name}"] = _known(block, lambda t, n=name: VALUES[n].of(t, divergence))
        if tail := next((t for t in TAILS if self.shown == f"{divergence}-{t}"), ""):
            local = _known(block, lambda t: t.direction(divergence, tail).local)
            found["d_dot_local"] = local.astype(np.float32)
        for each in rules:
            if not _live(each):
                keep, known = block.keep(each, self.question.threshold, context)
                found[f"keep-{each.name}"] = np.where(known, keep, UNCLEAR).astype(np.uint8)
                continue
            for name, compute in (
                (_column(each, "region"), each.regions), (_column(each, "push"), each.pushes)
            ):  # fmt: skip
                if name not in found:
                    found[name] = _known(block, lambda t, f=compute: f(t, divergence), each)
        return found


def _known(block: Block, compute: Any, needed_by: Rule | None = None) -> NDArray[np.float64]:
    """A number of every row, NaN where it is not known."""
    values, known = block.value(compute, needed_by)
    return np.where(known, values, np.nan)


def _judged(block: Block) -> Columns:
    """Keys of a block, and what an arm's update did."""
    batch = block.batch
    noise = batch[NOISE].astype(np.float64) if NOISE in batch.columns else None
    judged = Judged.of(block.d_post - block.d_pre, noise)
    bounded = judged.bounded & ~np.isnan(judged.delta_d)
    names = (*_KEYS[1:], "group")
    return {name: batch[name].astype(np.int32) for name in names} | {
        "in_loss": batch["in_loss"].astype(np.uint8),
        "delta_d": judged.delta_d,
        "undetermined": np.where(bounded, judged.undetermined, UNCLEAR).astype(np.uint8),
    }


def _live(each: Rule) -> bool:
    """Whether two columns decide at any threshold."""
    return each.is_mask and each.scope == "token"


def _column(each: Rule, what: str) -> str:
    """The column of a region or push: one per name of `VALUES`, else the rule's own."""
    value = getattr(each, what)
    return f"value-{value}" if isinstance(value, str) else f"{what}-{each.name}"


def _rules(source: _Source, arm: str, criteria: Collection[str | Rule]) -> list[Rule]:
    """The built-in rules that the dump can answer for, the pair, and those asked for."""
    found = distinct([*source.question.rules, *map(rule, criteria)])
    for each in found.values():
        each.check_family(source.question.divergence)
        check_rule(source.dump, arm, each)
    answered = {}
    for each in RULES.values():
        try:
            each.check_family(source.question.divergence)
            check_rule(source.dump, arm, each)
        except (QuestionError, CriterionError):
            continue
        answered[each.name] = each
    return list((answered | found).values())


def _decides(each: Rule, rows: Columns) -> bool:
    """Whether the page can show a rule to mask something."""
    return _live(each) or bool((rows[f"keep-{each.name}"] == 0).any())


def _entry(each: Rule, question: Question) -> dict[str, Any]:
    """What the page knows of a rule."""
    live, note = _live(each), ""
    if each.weight is not None:
        note = f"{each.name} is a weight, which the slider does not move."
    elif not live:
        note = (
            f"{each.name} was decided at δ = {question.threshold:g} when the page was made; the "
            "slider does not move it."
        )
    return {
        "name": each.name,
        "region": _column(each, "region") if live else "",
        "push": _column(each, "push") if live else "",
        "threshold": each.threshold,
        "keep": "" if live else f"keep-{each.name}",
        "note": note,
        "says": f"{each.words} · {each.source or each.origin}".removesuffix(" · "),
    }


def _floor(source: _Source, arm: str, tokens: int) -> tuple[float, str, bool]:
    """The least threshold that the page can answer, why, and whether tokens are left out for it."""
    files = [part.metadata for seed in source.seeds for part in source.dump.files(arm, seed)]
    bounds = {0.0: "a divergence is never below 0"}
    for each in files:
        if each.stored_above is not None:
            name, least = each.stored_above
            bounds[least] = f"the dump stores only tokens with {name} above {least:g}"
        if (near := each.near) is not None:
            bounds[near.threshold] = (
                f"the dump keeps top-K log-probs only of tokens with {near.divergence} of "
                f"{near.threshold:g} or more, and of a sample of the others"
            )
    floor = max(bounds)
    if sum(source.dump.rows(arm, seed) for seed in source.seeds) <= tokens:
        return floor, bounds[floor], False
    names = topk_columns((), post=False)
    found = [block.d_pre for seed in source.seeds for block in source.blocks(arm, seed, names)]
    cut = _exceeded_by(np.concatenate(found), tokens)
    reason = (
        f"the page holds only the tokens with the largest D, those above {cut:g}; raise --tokens, "
        "or choose fewer seeds by --seed"
    )
    return (cut, reason, True) if cut > floor else (floor, bounds[floor], True)


def _exceeded_by(d_pre: NDArray[np.float64], tokens: int) -> float:
    """A D that at most so many tokens exceed, rounded up to three digits."""
    known = d_pre[~np.isnan(d_pre)]
    if len(known) <= tokens:
        return 0.0
    least = float(np.partition(known, -tokens - 1)[-tokens - 1])
    if least <= 0:
        return 0.0
    place = 10.0 ** (math.floor(math.log10(least)) - 2)
    return max(least, float(f"{math.ceil(least / place) * place:.3g}"))


def _arms(source: _Source, arm: str) -> tuple[list[str], dict[str, str]]:
    """The arms that the page can judge by, the question's first, and why others are not there."""
    found, left_out = [arm], {}
    for other in source.dump.arms:
        if other == arm:
            continue
        if other == ZERO_STEP:
            left_out[other] = "a step of length zero, whose ΔD is 0 by construction"
        elif missing := set(source.seeds) - set(source.dump.seeds(other)):
            left_out[other] = f"it lacks seed {', '.join(map(str, sorted(missing)))}"
        elif len(found) == MAX_ARMS:
            left_out[other] = f"the page has room for {MAX_ARMS} arms; name it by --protocol"
        else:
            found.append(other)
    return found, left_out


def _columns(
    rows: Columns, rules: Sequence[Rule], shown: str, judged: Sequence[Columns]
) -> Columns:
    """The columns of the page without texts and details; `judged` are the rows of every arm."""
    changed = np.ones(len(rows["token_id"]), np.bool_)
    changed[1:] = np.any([rows[name][1:] != rows[name][:-1] for name in _RESPONSE], axis=0)
    starts = np.flatnonzero(changed)
    decisive = [_column(each, what) for each in rules if _live(each) for what in ("region", "push")]
    decisive += [f"keep-{each.name}" for each in rules if not _live(each)]
    names = ["position", "token_id", "advantage", _D, "value-ratio", f"value-{shown}", *decisive]
    names += [name for name in ("d_dot_local", *_LOGPROBS, *_ENTROPIES) if name in rows]
    if (rows[WEIGHT][1:] != rows[WEIGHT][:-1]).any():
        names.append(WEIGHT)
    columns = {f"response_{name}": rows[name][starts] for name in _RESPONSE}
    columns["response_start"] = np.append(starts, len(changed)).astype(np.int32)
    columns |= {name: rows[name] for name in names}
    for index, theirs in enumerate(judged):
        columns |= {f"{name}_{index}": theirs[name] for name in ("delta_d", "in_loss")}
        if (theirs["undetermined"] != UNCLEAR).any():
            columns[f"undetermined_{index}"] = theirs["undetermined"]
    return columns


def shortened(text: str, length: int) -> str:
    """A text cut to a number of characters, with an ellipsis where something is missing."""
    return text if len(text) <= length else f"{text[:length]}…"


def _add_texts(header: dict[str, Any], columns: Columns, rows: Columns) -> None:
    """The decoded tokens: each text once, and an index per token; long ones cut, and counted."""
    texts: dict[str, int] = {}
    if "token" in rows:
        every = [str(text) for text in rows["token"]]
        places = [texts.setdefault(shortened(text, TEXT_LENGTH), len(texts)) for text in every]
        columns["text"] = np.array(places, np.int32)
        header["cut"] = sum(len(text) > TEXT_LENGTH for text in every)
    header["texts"] = list(texts)


def _prompts(source: _Source, columns: Columns) -> list[dict[str, Any]]:
    """The prompts of the groups on the page, long ones cut."""
    groups = (columns[f"response_{name}"].tolist() for name in ("seed", "group"))
    wanted = set(zip(*groups, strict=True))
    return [
        {
            "seed": index,
            "group": each.group,
            "prompt": shortened(each.prompt, PROMPT_LENGTH),
            "answer": None if each.answer is None else shortened(each.answer, PROMPT_LENGTH),
        }
        for index, seed in enumerate(source.seeds)
        for each in read_prompts(source.dump.path, seed=seed)
        if (index, each.group) in wanted
    ]


def _add_details(columns: Columns, rows: Columns, top_k: int, size: int) -> dict[str, Any]:
    """The top-K lists of the tokens with the largest D for which there is room after `size`.

    They are for display; nothing is decided by them.
    """
    listed = np.flatnonzero(rows["vectors"])
    chosen, least = listed, None
    if len(listed) > _TRIAL_ROWS:
        trial = listed[:: len(listed) // _TRIAL_ROWS]
        each = sum(len(encode(values)) for values in _lists(rows, trial).values()) / len(trial)
        room = max(_TRIAL_ROWS, int((PAGE_BYTES - _SECTION_BYTES - size) / each))
        if room < len(listed):
            ranked = listed[np.argsort(-rows[_D][listed], kind="stable")]
            chosen, least = np.sort(ranked[:room]), float(rows[_D][ranked[room]])
    columns |= _lists(rows, chosen)
    return {"rows": len(chosen), "top_k": top_k, "least": least, "listed": len(listed)}


def _lists(rows: Columns, chosen: NDArray[np.intp]) -> Columns:
    """The lists of some tokens: ids, −log μ, and π before and after as differences modulo 2¹⁶."""
    ids = rows["topk_ids"][chosen]
    mu, pi, post = (
        quantised(np.where(ids >= 0, -rows[name][chosen], np.nan)) for name in VECTORS[1:]
    )
    return {
        "detail_row": chosen.astype(np.int32),
        "detail_ids": ids.astype(np.int32),
        "detail_mu": mu,
        "detail_pi": pi - mu,
        "detail_post": post - pi,
    }


def describe(viewer: Viewer) -> Iterator[str]:
    """What the viewer holds and what it does not, in sentences."""
    header = viewer.header
    yield (
        f"{header['rows']:,} of {header['stored']:,} stored tokens, {len(header['seeds'])} of "
        f"{counted(header['all_seeds'], 'seed')}."
    )
    if not header["texts"]:
        yield "The dump holds no decoded text, so tokens are shown by their ids."
    if header["cut"]:
        yield f"Texts of {counted(header['cut'], 'token')} are cut after {TEXT_LENGTH} characters."
    if header["floor"]:
        yield f"δ stops at {header['floor']:g}: {header['floor_reason']}."
    if header["protocol"] == "own":
        yield (
            "The protocol is `own`, and the viewer counts under the update of one arm at a time, "
            f"first {header['arm']}."
        )
    for arm, reason in header["left_out"].items():
        yield f"Arm {arm} is left out: {reason}."
