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

from deltad.divergence import DIVERGENCES, TAILS, Direction
from deltad.dumps import (
    Batch,
    DumpError,
    batch_tokens,
    check_batch,
    findings,
    part_batches,
    scalar_tokens,
)
from deltad.dumps.columns import VECTORS
from deltad.dumps.derived import derive
from deltad.dumps.tokens import RESPONSE, response_tokens
from deltad.masks import VALUES as RULE_VALUES
from deltad.masks import CriterionError, Rule, RuleError, Tokens
from deltad.support import binary_support
from deltad.tally import FIELDS, Judged, count

from .backends import Backend, LocalBackend, Progress, Span, spans_of
from .question import Question, QuestionError
from .screening import SEEN, Screen, block_rows
from .values import KEYS, NOISE, ROW, VALUES, WEIGHT, Found, Responses, rows_of, select, some_tokens

if TYPE_CHECKING:
    from deltad.dumps import Dump, Metadata, PartFile

SCALARS: Final = ("token_id", "advantage", "behavior_logprob", "pre_logprob")
"""What rules see of a token without top-K log-probs, and the token itself."""

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

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Outside:
    """The tokens outside of a span, or of a seed, at one point.

    Attributes
    ----------
    columns : dict of str to ndarray, shape (token,)
        ΔD, `undetermined`, `bounded`, `weight`, and the values asked for.
    keep : ndarray of bool, shape (rule, token)
        What each rule lets pass.
    totals : ndarray of float64, shape (field,)
        `deltad.tally.FIELDS` of all tokens outside, whether they are in `columns` or not.
    seen, rows, unknown : int
        Tokens looked at; rows stored; of these, those whose D is not known.
    elsewhere : ndarray of int, shape (2, rule)
        Tokens masked inside, and among those of unknown D, where that was asked for.
    soft : ndarray of float64, shape (rule,)
        Σ weight that each rule gives the tokens outside.
    weights : tuple of float
        Least and largest number of tokens that a token outside stands for.
    stored : int, optional
        Their number, where only those in disagreement were stored.
    """

    columns: dict[str, NDArray[Any]]
    keep: Bools
    totals: Floats
    seen: int = 0
    rows: int = 0
    unknown: int = 0
    elsewhere: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 1), np.int64))
    soft: Floats = field(default_factory=lambda: np.zeros(1))
    weights: tuple[float, float] = (np.inf, -np.inf)
    stored: int | None = None

    @property
    def judged(self) -> Judged:
        """What the update did to the tokens in `columns`."""
        return Judged(*(self.columns[name] for name in ("delta_d", *_JUDGED)))

    @property
    def disagreements(self) -> Bools:
        """Where the first two rules decide differently, shape (token,)."""
        return np.asarray(self.keep[0] != self.keep[min(1, len(self.keep) - 1)])

    def __getitem__(self, rows: Bools | NDArray[np.intp]) -> Outside:
        """Some of the tokens, with their own totals."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        some = replace(self, columns=columns, keep=self.keep[:, rows], stored=None)
        return replace(some, totals=count(some.judged, np.ones(some.keep.shape[1], np.bool_)))

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
            np.sum([part.elsewhere for part in parts], axis=0),
            np.sum([part.soft for part in parts], axis=0),
            (min(part.weights[0] for part in parts), max(part.weights[1] for part in parts)),
            sum(known) if known else None,
        )


_JUDGED: Final = ("undetermined", "bounded", "weight")


@dataclass(frozen=True)
class Ask:
    """What to read of a span: a function of the span, which may be pickled.

    Attributes
    ----------
    region : Question
        Divergence and threshold; of several points the least threshold.
    rules : tuple of Rule
        Who decides.
    points : tuple of (threshold, K')
        Where; by default at the region's threshold, with all K.
    values : tuple of str
        Names of `VALUES`.
    post : bool
        Whether the policy after the update was read.
    recompute : bool
        From the top-K log-probs even where D and Ḋ are recorded.
    everywhere : bool
        Count what is masked inside and among tokens of unknown D, too.
    apart : bool
        Keep only the tokens on which the first two rules differ; `totals` is of all.
    context : mapping of (arm, seed) to Context
        Filled by `read`.
    """

    region: Question
    rules: tuple[Rule, ...]
    points: tuple[tuple[float, int | None], ...] = ()
    values: tuple[str, ...] = ()
    post: bool = True
    recompute: bool = False
    everywhere: bool = False
    apart: bool = False
    context: Mapping[tuple[str, int], Context] = field(default_factory=dict)

    def __call__(self, span: Span) -> list[Outside]:
        """Read a span: the tokens outside at every point.

        Raises
        ------
        DumpError
            A row holds an impossible value; names file, row and column.
        QuestionError
            A rule of the user's failed; names rule, file and row.
        """
        points = self.points or ((self.region.threshold, None),)
        parts: list[list[Outside]] = [[] for _ in points]
        rows = unknown = 0
        elsewhere = np.zeros((2, len(self.rules)), np.int64)
        for block in _blocks(span, self):
            rows, unknown = rows + block.rows, unknown + block.unknown
            for place, others, chosen in block.others:
                elsewhere[place] += [
                    self._masks(at, others, chosen, span) for at in range(len(self.rules))
                ]
            for kept, (threshold, top_k) in zip(parts, points, strict=True):
                if (found := block.found[top_k]) is not None:
                    kept.append(self._outside(found, threshold, span))
        none = dict.fromkeys(("delta_d", *self.values, "weight"), np.empty(0))
        none |= dict.fromkeys(("undetermined", "bounded"), np.empty(0, np.bool_))
        rest = Outside(
            none, np.empty((len(self.rules), 0), np.bool_), np.zeros(len(FIELDS)),
            span.rows_seen, rows, unknown, elsewhere, np.zeros(len(self.rules)),
            stored=span.part.metadata.stored_outside if span.first == 0 else None,
        )  # fmt: skip
        return [Outside.joined([rest, *kept]) for kept in parts]

    @property
    def columns(self) -> list[str]:
        """Columns that rules and values need besides those of D."""
        sequences = any(each.scope == "sequence" for each in self.rules)
        names = [column for each in self.rules for column in each.columns]
        names += [column for each in self.values for column in VALUES[each].columns]
        return list(dict.fromkeys([*names, *(KEYS if sequences else ())]))

    def _outside(self, found: Found, threshold: float, span: Span) -> Outside:
        """Some tokens, decided."""
        rows = found.d_pre > threshold
        found = found if rows.all() else found[rows]
        weights = [self._weigh(at, found, threshold, span) for at in range(len(self.rules))]
        judged = found.judged
        columns = {"delta_d": judged.delta_d, **{name: getattr(judged, name) for name in _JUDGED}}
        for name in self.values:
            columns[name] = VALUES[name].of(found, self._context(span).responses)
        keep = np.stack([each > 0 for each in weights])
        if self.apart:
            chosen = np.flatnonzero(keep[0] != keep[1])
            columns = {name: values[chosen] for name, values in columns.items()}
            keep = keep[:, chosen]
        stood = judged.weight
        return Outside(
            columns,
            keep,
            count(judged, np.ones(len(stood), np.bool_)),
            elsewhere=np.zeros((2, len(self.rules)), np.int64),
            soft=np.array([float(each.sum()) for each in weights]),
            weights=(stood.min(), stood.max()) if len(stood) else (np.inf, -np.inf),
        )

    def _context(self, span: Span) -> Context:
        """What is known of the span's seed."""
        return self.context.get((span.part.arm, span.part.seed), Context())

    def _weigh(self, at: int, found: Found, threshold: float, span: Span) -> NDArray[Any]:
        """One rule's weight of every token: above 0 where it keeps."""
        rule = self.rules[at]
        if rule.scope == "sequence":
            return self._context(span).weights_of(rule.name, found.batch)
        given = {name: found.batch[name].astype(np.float64) for name in rule.needs}
        tokens = replace(found.tokens, columns=given) if given else found.tokens
        try:
            divergence = self.region.divergence
            return np.asarray(rule.weigh(tokens, threshold=threshold, divergence=divergence))
        except RuleError as error:
            raise failed(error, span.part, found.batch) from error

    def _masks(self, at: int, found: Found, rows: Bools, span: Span) -> int:
        """How many of some tokens a rule masks; 0 where it cannot decide."""
        try:
            weights = self._weigh(at, found, self.region.threshold, span)
        except CriterionError:
            return 0
        return int(np.count_nonzero(~(weights > 0) & rows))


def failed(
    error: RuleError, part: PartFile, batch: Batch, places: NDArray[np.intp] | None = None
) -> QuestionError:
    """What is said where a rule of the user's failed on (some places of) rows of a file."""
    rows = rows_of(batch) if places is None else rows_of(batch)[places]
    where = f"rows {rows[0]} to {rows[-1]}" if error.row is None else f"row {rows[error.row]}"
    return QuestionError(f"rule {error.rule} {error.reason}, at {where} of {part.path}")


@dataclass(frozen=True, eq=False)
class Context:
    """What is known of a whole seed before its spans are read.

    Attributes
    ----------
    responses : Responses, optional
        For values that need them.
    keys : ndarray of int64, shape (token,)
        Every token's place among all keys of the seed, ascending.
    weights : mapping of str to ndarray, shape (token,)
        Weights by rules that judge whole responses.
    """

    responses: Responses | None = None
    sizes: tuple[int, int] = (1, 1)
    keys: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    weights: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def weights_of(self, rule: str, batch: Batch) -> NDArray[Any]:
        """A rule's weights of a batch's tokens."""
        place = np.searchsorted(self.keys, _packed(batch, self.sizes))
        return self.weights[rule][place]


def read(
    dump: Dump,
    arms: Collection[str],
    ask: Ask,
    *,
    backend: Backend | None = None,
    progress: Progress | None = None,
) -> dict[tuple[str, int], list[Outside]]:
    """Read the tokens outside of every seed of some arms.

    Every row of the columns used is read and checked. Gives a seed's tokens outside at every
    point, in the order of the dump's rows; `progress` is told the rows of every span done.
    QuestionError where the arms do not hold the same tokens.
    """
    dump.check_arms(arms)
    backend = backend or LocalBackend()
    spans = with_verified(spans_of(dump, arms))
    mine = {(span.part.arm, span.part.seed) for span in backend.chosen(spans)}
    known = (
        {key: seed_context(dump, *key, ask) for key in sorted(mine)} if _needs_context(ask) else {}
    )

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
    """Stream all rows of a file, every value checked, of which `rows_of` tells the place.

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


def recorded_tokens(batch: Batch, divergence: str) -> Tokens:
    """What rules see of rows whose D and Ḋ are recorded, in float64 of the stored values."""
    known: dict[tuple[str, ...], Any] = {("topk", divergence): batch["d_pre"]}
    for tail in TAILS:
        if (name := f"d_dot_{tail}") in batch.columns:
            local = batch.columns.get("d_dot_local", np.full(len(batch), np.nan))
            known["direction", divergence, tail] = Direction(
                batch[name], local, batch[name] - local
            )
    if "topk_ids" in batch.columns:
        known |= _binary(batch)
    full = (f"full_{divergence}_pre", f"full_{divergence}_direction")
    whole = {}
    if set(full) <= batch.columns.keys():
        whole[divergence] = (batch[full[0]].astype(np.float64), batch[full[1]].astype(np.float64))
    advantage, behavior, policy = (batch[name].astype(np.float64) for name in SCALARS[1:])
    return Tokens(advantage, behavior, policy, full=whole, known=known)


def _binary(batch: Batch) -> dict[tuple[str, ...], Any]:
    """Binary divergences by the sampled token's entry in the top-K where there is one."""
    hit = batch["topk_ids"] == batch["token_id"][:, None]
    listed = hit.any(axis=1) & batch.vectors
    logs = []
    for name, scalar in (
        ("topk_behavior_logprobs", "behavior_logprob"), ("topk_pre_logprobs", "pre_logprob")
    ):  # fmt: skip
        alone = batch[scalar].astype(np.float64)
        alone[listed] = batch[name][listed][hit[listed]]
        logs.append(alone)
    support = binary_support(logs[0], logs[1], check=False)
    return {("binary", name): each.value(support) for name, each in DIVERGENCES.items()}


@dataclass(frozen=True, eq=False)
class _Block:
    """Some rows of a file: the tokens outside by K', and how many rows have no D.

    `others` are rows, by `Outside.elsewhere`, of which it is asked who masks them.
    """

    found: Mapping[int | None, Found | None]
    rows: int = 0
    unknown: int = 0
    others: Sequence[tuple[int, Found, Bools]] = ()


def _blocks(span: Span, ask: Ask) -> Iterator[_Block]:
    """Blocks of a span in the file's order, from wherever D is to be had."""
    ks = dict.fromkeys(top_k for _, top_k in ask.points) or {None: None}
    topk = ask.recompute or list(ks) != [None] or any(VALUES[each].topk for each in ask.values)
    names = None if topk else recorded_columns(span.part, ask.region, ask.rules, post=ask.post)
    if names is not None:
        yield from _recorded_blocks(span, ask, _along(span, [*names, *ask.columns]))
        return
    names = _along(span, [*topk_columns(ask.rules, post=ask.post), *ask.columns])
    if list(ks) == [None] and not ask.everywhere:
        yield from _screened_blocks(span, ask, names)
        return
    metadata = span.part.metadata
    for batch in _batches(span, names, block_rows(metadata.top_k)):
        check_batch(batch, metadata, names)
        found = {
            k: _outside(batch if k is None else _shortened(batch, k), metadata, ask.region)
            for k in ks
        }
        others = _others(batch, metadata, ask.region) if ask.everywhere else []
        yield _Block(found, len(batch), _unknown(batch, metadata), others)


def _screened_blocks(span: Span, ask: Ask, names: list[str]) -> Iterator[_Block]:
    """By top-K log-probs, of which only rows that a first look does not rule out are judged."""
    metadata = span.part.metadata
    screen = Screen(metadata, ask.region)
    size = block_rows(metadata.top_k)
    others = [name for name in names if name not in SEEN]
    picked: list[Batch] = []

    def judge() -> _Block:
        """The rows picked so far."""
        if not picked:
            return _Block({})
        columns = {name: np.concatenate([b[name] for b in picked]) for name in picked[0].columns}
        vectors = np.concatenate([each.vectors for each in picked])
        rows = replace(picked[0], columns=columns, vectors=vectors)
        picked.clear()
        return _Block({None: _outside(rows, metadata, ask.region)})

    for batch in _batches(span, names, 4 * size):  # few enough to be allocated once
        sound = not batch.nulls and not any(findings(batch, metadata, others))
        for start in range(0, len(batch), size):
            rows = slice(start, min(start + size, len(batch)))
            places = screen.candidates(batch, rows) if sound else None
            if places is not None:
                picked.append(select(batch, places))
            if places is None or sum(map(len, picked)) >= size:
                yield _found(judge())
            if places is None:
                block = _cut(batch, rows)
                check_batch(block, metadata, names)
                yield _Block({None: _outside(block, metadata, ask.region)})
        yield _Block({None: None}, len(batch), _unknown(batch, metadata))
    yield _found(judge())


def _found(block: _Block) -> _Block:
    """A block that says of the whole K that nothing is outside, where nothing was picked."""
    return block if block.found else _Block({None: None})


def _recorded_blocks(span: Span, ask: Ask, names: list[str]) -> Iterator[_Block]:
    """By recorded D and Ḋ, some of which are computed again first."""
    region = ask.region
    verify(span, region.divergence, names)
    for batch in _batches(span, names, RECORDED_ROWS):
        check_batch(batch, span.part.metadata, names)
        d_pre = batch["d_pre"]
        bare = np.isnan(d_pre)
        places = np.flatnonzero(d_pre > region.threshold)
        found = _recorded(select(batch, places), region, span.part) if len(places) else None
        others: list[tuple[int, Found, Bools]] = []
        if ask.everywhere:
            tokens = recorded_tokens(batch, region.divergence)
            every = Found(batch, tokens, d_pre, d_pre)
            others = [(0, every, d_pre <= region.threshold)]
            if bare.any():
                some = replace(every[bare], tokens=replace(every[bare].tokens, known={}))
                others.append((1, some, np.ones(int(bare.sum()), np.bool_)))
        yield _Block({None: found}, len(batch), int(np.count_nonzero(bare)), others)


def _recorded(batch: Batch, region: Question, part: PartFile) -> Found:
    """Rows outside by their recorded D, of which no other derived value may be missing."""
    for name in batch.columns:
        if name == "d_post" or name.startswith("d_dot_"):
            missing = np.flatnonzero(np.isnan(batch[name]))
            if len(missing):
                raise DumpError(
                    part.path,
                    f"must be there where `d_pre` is above {region.threshold:g}, found NULL",
                    row=int(batch[ROW][missing[0]]),
                    column=name,
                )
    d_pre = batch["d_pre"]
    d_post = batch.columns.get("d_post", np.full(len(d_pre), np.nan))
    return Found(batch, recorded_tokens(batch, region.divergence), d_pre, d_post)


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
    needed = [*SCALARS, "topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs"]
    if "d_post" in names:
        needed += ["post_logprob", "topk_post_logprobs"]
    if "d_dot_exact" in names:
        needed.append("pre_collision")
    if not set(needed) <= set(part.columns):
        return
    for group in span.verified:
        one = Span(part, group, group + 1)
        batch = next(_batches(one, [*needed, *derived], VERIFIED_ROWS), None)
        if batch is None or not batch.vectors.any():
            continue
        check_batch(batch, metadata, [*needed, *derived])
        known = select(batch, batch.vectors)
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
    """Rows of a span."""
    yield from part_batches(span.part, columns=names, batch_rows=rows, groups=span.groups)


def _along(span: Span, columns: Collection[str]) -> list[str]:
    """The columns, with the bound of ΔD's error and the weight where the file has them."""
    more = [name for name in (NOISE, WEIGHT) if name in span.part.columns]
    return list(dict.fromkeys([*columns, *more]))


def _outside(batch: Batch, metadata: Metadata, region: Question) -> Found | None:
    """The tokens of a checked block outside the region, by their top-K log-probs."""
    known = np.flatnonzero(batch.vectors)
    if not len(known):
        return None
    tokens = batch_tokens(batch, metadata)
    d_pre = tokens.divergence(region.divergence)
    is_outside = d_pre > region.threshold
    if not is_outside.any():
        return None
    block, tokens = select(batch, known[is_outside]), some_tokens(tokens, is_outside)
    d_pre = d_pre[is_outside]
    d_post = np.full(len(d_pre), np.nan)
    if "post_logprob" in block.columns and tokens.support is not None:
        after = tokens.support.with_policy(
            block["topk_post_logprobs"].astype(np.float64),
            block["post_logprob"].astype(np.float64),
            check=False,  # `check_batch` has done it
        )
        d_post = DIVERGENCES[region.divergence].value(after)
    return Found(block, tokens, d_pre, d_post)


def _others(batch: Batch, metadata: Metadata, region: Question) -> list[tuple[int, Found, Bools]]:
    """Rows that are not outside: inside, or without D."""
    found: list[tuple[int, Found, Bools]] = []
    known = batch.vectors
    if not known.all():
        bare = select(batch, ~known)
        none = np.full(len(bare), np.nan)
        every = np.ones(len(bare), np.bool_)
        # A rule that left top-K log-probs out near 0 says that these are inside.
        place = 0 if metadata.near else 1
        found.append((place, Found(bare, scalar_tokens(batch), none, none), every))
    if known.any():
        some, tokens = select(batch, known), batch_tokens(batch, metadata)
        d_pre = tokens.divergence(region.divergence)
        found.append((0, Found(some, tokens, d_pre, d_pre), d_pre <= region.threshold))
    return found


def _unknown(batch: Batch, metadata: Metadata) -> int:
    """Rows whose D is unknown; where top-K log-probs were left out near 0, it is known to be."""
    return 0 if metadata.near is not None else int(np.count_nonzero(~batch.vectors))


def _cut(batch: Batch, rows: slice) -> Batch:
    """Consecutive rows of an unchecked batch."""
    return replace(
        batch,
        first_row=batch.first_row + rows.start,
        columns={name: values[rows] for name, values in batch.columns.items()},
        vectors=batch.vectors[rows],
        nulls={name: absent[rows] for name, absent in batch.nulls.items() if absent[rows].any()},
    )


def _shortened(batch: Batch, top_k: int) -> Batch:
    """The block as an inference engine that returns fewer ids would have left it.

    Ids are in rank order. Where this cuts off the sampled token, its scalar log-probs stand for
    it: within 1e-4 nats of the entry.
    """
    columns = {
        name: values[:, :top_k] if name in VECTORS else values
        for name, values in batch.columns.items()
    }
    return replace(batch, columns=columns)


def _needs_context(ask: Ask) -> bool:
    """Whether whole seeds must be looked at first."""
    return any(VALUES[each].responses for each in ask.values) or any(
        each.scope == "sequence" for each in ask.rules
    )


def seed_context(dump: Dump, arm: str, seed: int, ask: Ask) -> Context:
    """What is known of a whole seed, from one reading of it."""
    responses = None
    if any(VALUES[each].responses for each in ask.values):
        parts = dump.files(arm, seed)
        whole = all(p.metadata.stored_above is None and p.metadata.sampling is None for p in parts)
        names = Responses.COLUMNS
        blocks = [np.empty((0, len(names)), np.int64)]
        for part in parts if whole else ():
            for batch in checked_batches(part, names):
                blocks.append(np.stack([batch[name].astype(np.int64) for name in names], axis=1))
        responses = Responses(np.concatenate(blocks), whole=whole)
    rules = [each for each in ask.rules if each.scope == "sequence"]
    if not rules:
        return Context(responses)
    needs = [column for each in rules for column in each.columns]
    known: dict[str, list[NDArray[Any]]] = {name: [np.empty(0)] for name in (*RESPONSE, *needs)}
    for part in dump.files(arm, seed):
        for batch in checked_batches(part, list(known)):
            for name, values in known.items():
                values.append(batch[name])
    every = {name: np.concatenate(values) for name, values in known.items()}
    sizes = tuple(int(every[name].max(initial=0)) + 1 for name in KEYS[1:])
    tokens, order = response_tokens(every, needs)
    keys = _packed(every, sizes)[order]
    weights = {}
    for each in rules:
        try:
            weights[each.name] = np.asarray(
                each.weigh(tokens, threshold=ask.region.threshold, divergence=ask.region.divergence)
            )
        except RuleError as error:
            where = f"arm {arm}, seed {seed} of {dump.path}"
            raise QuestionError(f"rule {error.rule} {error.reason}, at {where}") from error
    return Context(responses, (sizes[0], sizes[1]), keys, weights)


def _packed(columns: Any, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """The key of every token as one number."""
    step, sequence, position = (np.asarray(columns[name]).astype(np.int64) for name in KEYS)
    return np.asarray((step * sizes[0] + sequence) * sizes[1] + position)
