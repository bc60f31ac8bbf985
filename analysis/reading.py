"""The only loop over rows: from a dump to its tokens outside, decided by any rules.

Every table is a count of `Outside`. What is asked is an `Ask`; a file is read by its recorded D
and Ḋ where these do, else by its top-K log-probs, of which a first look in float32 leaves out
what is surely inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import Batch, DumpError, check_batch, findings, part_batches
from deltad.dumps.columns import VECTORS
from deltad.dumps.derived import derive
from deltad.dumps.tokens import RESPONSE, response_tokens
from deltad.masks import VALUES as RULE_VALUES
from deltad.masks import Rule, RuleError
from deltad.tally import FIELDS, Judged, count

from .backends import Backend, LocalBackend, Progress, Span, spans_of
from .question import Question, QuestionError
from .screening import SEEN, Screen, block_rows
from .values import (
    NOISE,
    ROW,
    SCALARS,
    VALUES,
    WEIGHT,
    Block,
    Bools,
    Context,
    Floats,
    Responses,
    Rows,
    some,
)

if TYPE_CHECKING:
    from deltad.dumps import Dump, PartFile

_ENTRY: Final = ("token_id", "topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs")

RECORDED_ROWS: Final = 131_072
"""Rows decoded at once where D is recorded; there are some forty bytes in each."""

VERIFIED_ROWS: Final = 16
"""Rows of a row group whose recorded D and Ḋ are computed again before they are believed."""

VERIFIED_GROUPS: Final = 2
"""Row groups that are looked at so, spread over all files that are as `DumpWriter` writes them;
of files that another tool has rewritten it is every one. Each costs as much as counting itself."""

_AGREED: Final = 1e-6
"""Difference that last bits of exponentials make between machines; more is another number."""


@dataclass(frozen=True, eq=False)
class Outside:
    """The tokens outside of a span, or of a seed, at one point.

    `columns`, each of shape (token,), are ΔD, `undetermined`, `bounded`, `weight` and the values
    asked for.
    """

    columns: dict[str, NDArray[Any]]
    keep: Bools  # shape (rule, token): what each rule lets pass
    totals: Floats  # `deltad.tally.FIELDS` of all tokens outside, in `columns` or not
    seen: int = 0  # tokens looked at
    rows: int = 0  # of these, those stored
    unknown: int = 0  # of these, those whose D is not known
    elsewhere: Any = 0  # shape (2, rule): tokens masked inside, and among those of unknown D
    soft: Any = 0.0  # shape (rule,): Σ weight that each rule gives the tokens outside
    weights: tuple[float, float] = (np.inf, -np.inf)  # fewest and most tokens that one stands for
    stored: int | None = None  # number outside, where only those in disagreement were stored

    @property
    def judged(self) -> Judged:
        """What the update did to the tokens in `columns`."""
        return Judged(*(self.columns[name] for name in Judged._fields))

    def __getitem__(self, rows: Rows) -> Outside:
        """Some of the tokens, with their own totals."""
        part = replace(self, columns=some(self.columns, rows), keep=self.keep[:, rows], stored=None)
        return replace(part, totals=count(part.judged, np.ones(part.keep.shape[1], np.bool_)))

    @classmethod
    def joined(cls, parts: Sequence[Outside]) -> Outside:
        """Several spans, in their order."""
        known = [part.stored for part in parts if part.stored is not None]
        return cls(
            {
                name: np.concatenate([part.columns[name] for part in parts])
                for name in parts[0].columns
            },
            np.concatenate([part.keep for part in parts], axis=1),
            np.sum([part.totals for part in parts], axis=0),
            sum(part.seen for part in parts),
            sum(part.rows for part in parts),
            sum(part.unknown for part in parts),
            sum(part.elsewhere for part in parts),
            np.sum([part.soft for part in parts], axis=0),
            (min(part.weights[0] for part in parts), max(part.weights[1] for part in parts)),
            sum(known) if known else None,
        )


@dataclass(frozen=True)
class Ask:
    """What to read of a span: a function of the span, which may be pickled."""

    region: Question  # divergence and threshold; of several points the least threshold
    rules: tuple[Rule, ...]  # who decides
    points: tuple[tuple[float, int | None], ...] = ()  # thresholds and K'; by default the region's
    values: tuple[str, ...] = ()  # names of `VALUES`
    post: bool = True  # whether the policy after the update was read
    recompute: bool = False  # from the top-K log-probs even where D and Ḋ are recorded
    everywhere: bool = False  # count what is masked inside and among tokens of unknown D, too
    apart: bool = False  # keep only tokens on which the first two rules differ; `totals` is of all
    context: Mapping[tuple[str, int], Context] = field(default_factory=dict)  # filled by `read`

    def __call__(self, span: Span) -> list[Outside]:
        """Read a span: the tokens outside at every point.

        An impossible value is a DumpError that names file, row and column; a rule of the user's
        that fails a QuestionError that names rule, file and row.
        """
        points = self.points or ((self.region.threshold, None),)
        parts: list[list[Outside]] = [[] for _ in points]
        unknown, elsewhere = 0, np.zeros((2, len(self.rules)), np.int64)
        context = self.context.get((span.part.arm, span.part.seed), Context())
        for found, without, block in _read(span, self):
            unknown += without
            if block is not None:
                elsewhere += self._elsewhere(block, context)
            for kept, (threshold, top_k) in zip(parts, points, strict=True):
                if len(found.get(top_k, ())):
                    kept.append(self._outside(found[top_k].above(threshold), threshold, context))
        none = dict.fromkeys(("delta_d", *self.values, "weight"), np.empty(0))
        none |= dict.fromkeys(("undetermined", "bounded"), np.empty(0, np.bool_))
        rest = Outside(
            none, np.empty((len(self.rules), 0), np.bool_), np.zeros(len(FIELDS)),
            span.rows_seen, span.rows, unknown, elsewhere, np.zeros(len(self.rules)),
            stored=span.part.metadata.stored_outside if span.first == 0 else None,
        )  # fmt: skip
        return [Outside.joined([rest, *kept]) for kept in parts]

    @property
    def columns(self) -> list[str]:
        """Columns that rules and values need besides those of D."""
        names = [column for each in self.rules for column in each.columns]
        names += [column for each in self.values for column in VALUES[each].columns]
        return list(dict.fromkeys(names))

    def _outside(self, found: Block, threshold: float, context: Context) -> Outside:
        """The tokens outside, decided."""
        weights = [found.weigh(rule, threshold, context) for rule in self.rules]
        keep, judged = np.stack([each > 0 for each in weights]), found.judged
        columns = judged._asdict()
        columns |= {name: VALUES[name].of(found, context.responses) for name in self.values}
        if self.apart:
            apart = keep[0] != keep[min(1, len(keep) - 1)]
            columns, keep = some(columns, apart), keep[:, apart]
        stood = judged.weight
        return Outside(
            columns,
            keep,
            count(judged, np.ones(len(stood), np.bool_)),
            soft=np.array([float(each.sum()) for each in weights]),
            weights=(stood.min(), stood.max()) if len(stood) else (np.inf, -np.inf),
        )

    def _elsewhere(self, block: Block, context: Context) -> NDArray[np.int64]:
        """How many tokens each rule masks inside, and of those of unknown D; shape (2, rule)."""
        threshold = self.region.threshold
        decided = [block.keep(each, threshold, context) for each in self.rules]
        places = (block.settled & ~(block.d_pre > threshold), ~block.settled)
        return np.array(
            [[np.count_nonzero(known & ~keep & rows) for keep, known in decided] for rows in places]
        )


def read(
    dump: Dump,
    arms: Collection[str],
    ask: Ask,
    *,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, int], list[Outside]]:
    """Read the tokens outside of every seed (by arm and seed) of some arms, at every point.

    Every row of the columns used is read and checked, on this machine's cores by default;
    `progress` is told the rows of every span that is done. Raises as `Ask`, and DumpError where
    the arms do not hold the same tokens.
    """
    dump.check_arms(arms)
    backend = backend or LocalBackend()
    spans = with_verified(spans_of(dump, arms))
    mine = {(span.part.arm, span.part.seed) for span in backend.chosen(spans)}
    known = {key: seed_context(dump, *key, ask) for key in sorted(mine)}

    def tell(span: Span) -> None:
        if progress is not None:
            progress(span.rows)

    grouped: dict[tuple[str, int], list[list[Outside]]] = {}
    read_spans = backend.map(replace(ask, context=known), spans, progress=tell)
    for span, each in zip(spans, read_spans, strict=True):
        grouped.setdefault((span.part.arm, span.part.seed), []).append(each)
    return {
        key: [Outside.joined(at) for at in zip(*parts, strict=True)]
        for key, parts in grouped.items()
    }


def unlike_weights(outside: Collection[Outside]) -> bool:
    """Whether tokens stand for unlike numbers of tokens, so that rates must weigh them."""
    least = min((each.weights[0] for each in outside), default=1.0)
    return bool(least < max((each.weights[1] for each in outside), default=1.0))


def checked_batches(
    part: PartFile, columns: Collection[str], *, progress: Progress | None = None
) -> Iterator[Batch]:
    """Stream all rows of a file, every value checked, each with its `ROW`.

    `progress` is told the number of rows of every block, once it was used.
    """
    lists = not set(VECTORS).isdisjoint(columns)
    rows = block_rows(part.metadata.top_k) if lists else RECORDED_ROWS
    for batch in _batches(Span(part, 0, len(part.groups)), columns, rows):
        check_batch(batch, part.metadata, columns)
        yield batch
        if progress is not None:
            progress(len(batch))


def topk_columns(rules: Sequence[Rule], *, post: bool = True) -> list[str]:
    """Columns by which tokens are judged from their top-K log-probs."""
    names = [*SCALARS, *("post_logprob",) * post, "topk_ids", "topk_behavior_logprobs"]
    names += ["topk_pre_logprobs", *("topk_post_logprobs",) * post]
    return list(dict.fromkeys([*names, *(column for each in rules for column in each.columns)]))


def recorded_columns(
    part: PartFile, region: Question, rules: Sequence[Rule], *, post: bool = True
) -> list[str] | None:
    """Columns by which a file can be judged without its top-K log-probs, None where it cannot.

    Its derived columns must follow this version's definitions and the region's divergence, and
    nothing that decides may need more than they hold.
    """
    if part.metadata.derived_divergence != region.divergence:
        return None
    names = dict.fromkeys([*SCALARS[1:], "d_pre", *(["d_post"] if post else [])])
    for rule in rules:
        if rule.scope == "sequence":
            continue
        if rule.opaque:
            return None
        for each in rule.named:
            value = RULE_VALUES[each]
            names |= dict.fromkeys([value.recorded] if value.recorded else value.columns)
            names |= dict.fromkeys(_ENTRY if value.entry else ())
        names |= dict.fromkeys(rule.needs)
    return list(names) if set(names) <= set(part.columns) else None


_Read = tuple[dict[int | None, Block], int, Block | None]
"""Of some rows of a file: the tokens outside by K', how many have no D, and all if asked for."""


def _read(span: Span, ask: Ask) -> Iterator[_Read]:
    """Rows of a span in the file's order, from wherever D is to be had."""
    part, region = span.part, ask.region
    ks = list(dict.fromkeys(top_k for _, top_k in ask.points)) or [None]
    topk = ask.recompute or ks != [None] or any(VALUES[each].topk for each in ask.values)
    recorded = None if topk else recorded_columns(part, region, ask.rules, post=ask.post)
    names = topk_columns(ask.rules, post=ask.post) if recorded is None else recorded
    names += [*ask.columns, *(name for name in (NOISE, WEIGHT) if name in part.columns)]
    names = list(dict.fromkeys(names))
    if recorded is not None:
        return _read_recorded(span, ask, names)
    if ask.everywhere or ks != [None]:
        return _read_topk(span, ask, names, ks)
    return _read_screened(span, ask, names)


def _read_topk(span: Span, ask: Ask, names: list[str], ks: Sequence[int | None]) -> Iterator[_Read]:
    """By top-K log-probs, cut to every K'.

    As an inference engine that returns fewer ids would have left them: ids are in rank order, and
    where this cuts off the sampled token, its scalar log-probs stand for it, within 1e-4 nats of
    the entry.
    """
    part, region = span.part, ask.region
    lists = [name for name in names if name in VECTORS]
    for batch in _batches(span, names, block_rows(part.metadata.top_k)):
        check_batch(batch, part.metadata, names)
        blocks = {}
        for k in ks:
            cut = {name: batch[name][:, :k] for name in lists}
            shortened = replace(batch, columns={**batch.columns, **cut})
            blocks[k] = Block.of_topk(shortened, part, region.divergence)
        found = {k: each.above(region.threshold) for k, each in blocks.items()}
        yield found, _unknown(batch, part), blocks[ks[0]] if ask.everywhere else None


def _read_screened(span: Span, ask: Ask, names: list[str]) -> Iterator[_Read]:
    """By top-K log-probs, of which only rows that a first look does not rule out are judged."""
    part, region = span.part, ask.region
    screen, size = Screen(part.metadata, region), block_rows(part.metadata.top_k)
    others = [name for name in names if name not in SEEN]
    picked: list[Batch] = []

    def judged() -> _Read:
        """The rows picked so far."""
        columns = {name: np.concatenate([b[name] for b in picked]) for name in picked[0].columns}
        vectors = np.concatenate([each.vectors for each in picked])
        rows = replace(picked[0], columns=columns, vectors=vectors)
        picked.clear()
        block = Block.of_topk(rows, part, region.divergence)
        return {None: block.above(region.threshold)}, 0, None

    for batch in _batches(span, names, 4 * size):  # few enough to be allocated once
        sound = not batch.nulls and not any(findings(batch, part.metadata, others))
        for start in range(0, len(batch), size):
            rows = slice(start, min(start + size, len(batch)))
            places = screen.candidates(batch, rows) if sound else None
            if places is None:
                picked.append(_cut(batch, rows))
                check_batch(picked[-1], part.metadata, names)
            else:
                picked.append(some(batch, places))
            if sum(map(len, picked)) >= size:
                yield judged()
        yield {}, _unknown(batch, part), None
    if any(map(len, picked)):
        yield judged()


def _read_recorded(span: Span, ask: Ask, names: list[str]) -> Iterator[_Read]:
    """By recorded D and Ḋ, some of which are computed again first."""
    part, region = span.part, ask.region
    verify(span, region.divergence, names)
    for batch in _batches(span, names, RECORDED_ROWS):
        check_batch(batch, part.metadata, names)
        outside = some(batch, np.flatnonzero(batch["d_pre"] > region.threshold))
        for name in outside.columns:
            if name == "d_post" or name.startswith("d_dot_"):
                missing = np.flatnonzero(np.isnan(outside[name]))
                if len(missing):
                    raise DumpError(
                        part.path,
                        f"must be there where `d_pre` is above {region.threshold:g}, found NULL",
                        row=int(outside[ROW][missing[0]]),
                        column=name,
                    )
        found = Block.recorded(outside, part, region.divergence)
        block = Block.recorded(batch, part, region.divergence) if ask.everywhere else None
        yield {None: found}, int(np.count_nonzero(np.isnan(batch["d_pre"]))), block


def with_verified(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans, with the row groups settled whose recorded D and Ḋ are computed again."""
    own = [(at, group) for at, s in enumerate(spans) if s.part.as_written for group in s.groups]
    step = max(1, len(own) / VERIFIED_GROUPS)
    chosen = {own[int(at * step)] for at in range(min(len(own), VERIFIED_GROUPS))}
    return tuple(
        replace(
            s, verified=tuple(g for g in s.groups if not s.part.as_written or (at, g) in chosen)
        )
        for at, s in enumerate(spans)
    )


def verify(span: Span, divergence: str, names: Collection[str]) -> None:
    """Refuse recorded D and Ḋ that are not what the rows' log-probs give.

    A few rows of the span's `verified` row groups are computed again: columns that somebody edited,
    leaving the derived ones as they were, differ everywhere.
    """
    part, metadata = span.part, span.part.metadata
    derived = [name for name in names if name in ("d_pre", "d_post") or name.startswith("d_dot_")]
    needed = topk_columns((), post="d_post" in names)
    needed += ["pre_collision"] if "d_dot_exact" in names else []
    if not set(needed) <= set(part.columns):
        return
    for group in span.verified:
        one = Span(part, group, group + 1)
        batch = next(_batches(one, [*needed, *derived], VERIFIED_ROWS), None)
        if batch is None or not batch.vectors.any():
            continue
        check_batch(batch, metadata, [*needed, *derived])
        known = some(batch, batch.vectors)
        expected = derive(known, metadata, divergence=divergence)
        for name in derived:
            gap = np.abs(known[name] - expected[name])
            bad = np.flatnonzero(~(gap <= _AGREED * np.maximum(1, np.abs(expected[name]))))
            if len(bad):
                raise DumpError(
                    part.path,
                    f"must be what the row's log-probs give, {expected[name][bad[0]]:.9g}, found "
                    f"{known[name][bad[0]]:.9g}: the file was changed after it was recorded; count "
                    "with `--recompute`, which does not read this column",
                    row=int(known[ROW][bad[0]]),
                    column=name,
                )


def _batches(span: Span, names: Collection[str], rows: int) -> Iterator[Batch]:
    """Rows of a span, each with its place in the file."""
    for batch in part_batches(span.part, columns=names, batch_rows=rows, groups=span.groups):
        place = np.arange(batch.first_row, batch.first_row + len(batch))
        yield replace(batch, columns={**batch.columns, ROW: place})


def _unknown(batch: Batch, part: PartFile) -> int:
    """Rows whose D is unknown; where top-K log-probs were left out near 0, it is known to be."""
    return 0 if part.metadata.near is not None else int(np.count_nonzero(~batch.vectors))


def _cut(batch: Batch, rows: slice) -> Batch:
    """Consecutive rows of an unchecked batch."""
    cut = some(batch, rows)
    nulls = {name: absent for name, absent in cut.nulls.items() if absent.any()}
    return replace(cut, first_row=batch.first_row + rows.start, nulls=nulls)


def seed_context(dump: Dump, arm: str, seed: int, ask: Ask) -> Context:
    """What is known of a whole seed, as far as values and rules need it."""
    parts = dump.files(arm, seed)
    responses = None
    if any(VALUES[each].responses for each in ask.values):
        whole = all(p.metadata.stored_above is None and p.metadata.sampling is None for p in parts)
        found = _whole(parts if whole else (), Responses.COLUMNS)
        keys = np.stack([found[name].astype(np.int64) for name in Responses.COLUMNS], axis=1)
        responses = Responses(keys, whole=whole)
    rules = [each for each in ask.rules if each.scope == "sequence"]
    if not rules:
        return Context(responses)
    needs = dict.fromkeys(column for each in rules for column in each.columns)
    found = _whole(parts, [*RESPONSE, *needs])
    tokens, order = response_tokens(found, needs)
    how: Any = {"threshold": ask.region.threshold, "divergence": ask.region.divergence}
    starts = np.cumsum([part.rows for part in parts])[:-1]
    weights = {}
    for rule in rules:
        try:
            mine = np.empty(len(order))
            mine[order] = rule.weigh(tokens, **how)
        except RuleError as error:
            where = f"arm {arm}, seed {seed} of {dump.path}"
            raise QuestionError(f"rule {error.rule} {error.reason}, at {where}") from error
        for part, some_weights in zip(parts, np.split(mine, starts), strict=True):
            weights[rule.name, str(part.path)] = some_weights
    return Context(responses, weights)


def _whole(parts: Sequence[PartFile], names: Collection[str]) -> dict[str, Floats]:
    """All rows of some files, in their order."""
    found = {name: [np.empty(0)] for name in names}
    for part in parts:
        for batch in checked_batches(part, list(found)):
            for name, blocks in found.items():
                blocks.append(batch[name])
    return {name: np.concatenate(blocks) for name, blocks in found.items()}
