"""Any number of criteria side by side on one dump, each against one baseline.

The dump is read once for all of them. Each pair is counted as `deltad table` counts it; beside
it stand what a criterion masks, how often it foretells the sign of ΔD, and how often any two
criteria decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import batch_tokens, check_batch, part_batches, scalar_tokens
from deltad.masks import NONE, Criterion, CriterionError, Tokens
from deltad.weights import WEIGHTS, Weight

from .blocks import unknown_rows, where_recorded
from .counting import Decided, Decider, Judged, Outside, columns_for, decisions, outside_of
from .engine import Engine, Progress, Span, read_arms
from .question import (
    BOTH,
    OWN,
    Question,
    QuestionError,
    Resolved,
    check_columns,
    decider,
    unjudged,
)
from .rates import BaseRate, RateTable, SeedRates
from .recorded import recorded_batches, recorded_columns, recorded_tokens
from .result import Result
from .screening import BLOCK_ROWS
from .shares import Share
from .statistics import Paired, compare_paired, holm
from .tables import recorded_share, unlike_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from deltad.dumps import Dump

PLACES: Final = ("outside", "inside", "without_vectors")
"""Where a masked token may lie: D above δ, D up to δ, D unknown."""

INSIDE: Final = 0
UNKNOWN: Final = 1
"""Of the last two."""


@dataclass(frozen=True, eq=False)
class Compared:
    """One criterion of a comparison.

    Attributes
    ----------
    name : str
        As options name it.
    masked : dict of str to int
        Stored tokens that it masks, by `PLACES`. A row without top-K vectors is not decided by
        a criterion that needs them.
    weight : Share
        Σ weight / tokens outside: a criterion weighs 1 where it keeps.
    outside, disagreement : Share
        Tokens whose sign of ΔD it foretold, of all outside and of those that exactly one of it
        and the baseline masks, as far as ΔD is determined; over nothing under `own`, where a
        masked token has no update of its own to be judged by.
    table : RateTable
        It against the baseline, as `rate_table` counts them.
    """

    name: str
    masked: dict[str, int]
    weight: Share
    outside: Share
    disagreement: Share
    table: RateTable

    @cached_property
    def contracting(self) -> Paired:
        """Its contracting fraction against the baseline's within seeds.

        Σ contracting / Σ (kept − undetermined) of a seed's disagreement tokens; seeds in which
        one of the two has none take no part.
        """
        seeds = self.table.seeds
        return compare_paired(
            [seed.criterion.contracting_fraction for seed in seeds],
            [seed.baseline.contracting_fraction for seed in seeds],
            bootstrap_seed=self.table.bootstrap_seed,
        )


@dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Criteria side by side on one dump.

    Attributes
    ----------
    question : Question
        Region, baseline and settled protocol; its criterion is the baseline.
    criteria : tuple of Compared
        The baseline first.
    alike : ndarray of int, shape (criterion, criterion)
        Tokens outside that two criteria decide alike; all tokens outside on the diagonal.
    rows : int
        Rows stored; where a dump holds only some tokens, less than its tokens.
    refused : dict of str to str
        Criteria that were left out because the dump cannot answer for them, and why.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    unjudged : str
        Why there is no ΔD, where the dump has no policy after the update; empty otherwise. All
        that ΔD decides is without meaning then, and the result's forms leave it out.
    """

    question: Question
    criteria: tuple[Compared, ...]
    alike: NDArray[np.int64]
    rows: int
    refused: dict[str, str]
    bootstrap_seed: int = 0
    unjudged: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the criteria, the baseline's first."""
        return tuple(each.name for each in self.criteria)

    @property
    def outside(self) -> BaseRate:
        """All tokens outside; under `own` in the baseline's arm."""
        return self.criteria[0].table.outside

    @property
    def agreement(self) -> NDArray[np.float64]:
        """Share of the tokens outside that two criteria decide alike; NaN over none."""
        tokens = self.outside.tokens
        return self.alike / tokens if tokens else np.full(self.alike.shape, np.nan)

    @cached_property
    def holm_p(self) -> tuple[float, ...]:
        """Sign-test p of every criterion against the baseline, corrected for their number.

        Holm's step-down rule over the criteria that differ from the baseline in some seed; NaN
        for the others.
        """
        return tuple(holm([each.table.paired.sign_test_p for each in self.criteria]).tolist())

    def __getitem__(self, name: str) -> Compared:
        """One criterion by name."""
        return self.criteria[self.names.index(name)]

    def columns(self) -> dict[str, list[Any]]:
        """A row a criterion, the columns of `COMPARISON_COLUMNS`."""
        from .forms.comparison import comparison_columns

        return comparison_columns(self)

    def text(self) -> RenderableType:
        """What each masks and foretells, the pairs with the baseline, who agrees with whom."""
        from .forms.comparison import comparison_text

        return comparison_text(self)

    def to_json_object(self) -> dict[str, Any]:
        """The columns a criterion, and the agreement matrix."""
        from .forms.comparison import comparison_object

        return comparison_object(self)

    def figure(self) -> Figure:
        """Agreement as a heat map, sign accuracy as a forest plot.

        Raises
        ------
        QuestionError
            There is no ΔD.
        """
        if self.unjudged:
            raise QuestionError(self.unjudged)
        from .figures.comparison import comparison_figure

        return comparison_figure(self)


def compare(
    dump: Dump,
    question: Question | None = None,
    criteria: Sequence[str] = (),
    *,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    engine: Engine | None = None,
    recompute: bool = False,
) -> Comparison:
    """Compare criteria with a baseline, reading the dump once for all of them.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        Region, baseline and protocol; its own criterion is not looked at. Under `own` every
        criterion needs an arm that applied its mask.
    criteria : sequence of str
        Names of `deltad.weights.WEIGHTS`; by default all of the region's divergence that the
        dump can answer. The baseline takes part in any case.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    engine : Engine, optional
        Where to count: by default on the cores of this machine.
    recompute : bool
        From the vectors even where D and Ḋ are recorded.

    Returns
    -------
    Comparison
        The baseline and at least no one else.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer for the baseline or for a criterion that was asked for by name.
    DumpError
        A row holds an impossible value.
    """
    resolved, refused = comparable(dump, question or Question(), criteria, needs=("pre",))
    names = list(resolved)
    base = resolved[names[0]]
    arms = arms_of(resolved)
    without_delta = unjudged(dump, arms)
    reader = _Reader(base.question, tuple(names), post=not without_delta, recompute=recompute)
    parts = read_arms(reader, dump, arms, engine=engine, progress=progress)
    read = {key: _Read.joined(each) for key, each in parts.items()}
    weighted = unlike_weights(each.decided.pair(0, 0) for each in read.values())
    rates: list[list[SeedRates]] = [[] for _ in names]
    shares: list[list[list[tuple[float, float]]]] = [[[], [], []] for _ in names]
    masked = np.zeros((len(PLACES), len(names)), dtype=np.int64)
    alike = np.zeros((len(names), len(names)), dtype=np.int64)
    rows = 0
    for seed in dump.seeds(base.baseline_arm):
        rows += dump.rows(base.baseline_arm, seed)
        here = read[base.baseline_arm, seed]
        decided = here.decided
        keep = decided.judged.keep
        masked += np.stack([np.count_nonzero(~keep, axis=1), *here.elsewhere])
        alike += np.count_nonzero(keep[:, None] == keep[None], axis=2)
        for at, each in enumerate(resolved.values()):
            mine = read[each.criterion_arm, seed].decided
            rates[at].append(
                SeedRates.of(seed, mine.pair(at, 0), decided.pair(at, 0), weighted=weighted)
            )
            clear = ~mine.judged.undetermined
            right = mine.foretold(at) & clear
            apart = (mine.judged.keep[at] != mine.judged.keep[0]) & clear
            shares[at][0].append((float(here.weights[at]), keep.shape[1]))
            shares[at][1].append((int(right.sum()), int(clear.sum())))
            shares[at][2].append((int(right[apart].sum()), int(apart.sum())))
    share = recorded_share(dump)
    unknown = bool(without_delta) or base.question.protocol == OWN
    found = []
    for at, each in enumerate(resolved.values()):
        weight, outside, disagreement = (_share(pairs, bootstrap_seed) for pairs in shares[at])
        nothing = Share.undefined(len(rates[at]))
        found.append(
            Compared(
                name=names[at],
                masked=dict(zip(PLACES, masked[:, at].tolist(), strict=True)),
                weight=weight,
                outside=nothing if unknown else outside,
                disagreement=nothing if unknown else disagreement,
                table=RateTable(each.question, tuple(rates[at]), bootstrap_seed, share),
            )
        )
    return Comparison(
        base.question, tuple(found), alike, rows, refused, bootstrap_seed, without_delta
    )


def comparable(
    dump: Dump,
    question: Question,
    criteria: Sequence[str] = (),
    *,
    needs: Collection[str] = BOTH,
) -> tuple[dict[str, Resolved], dict[str, str]]:
    """Find the criteria that a dump can answer for, each against the question's baseline.

    Parameters
    ----------
    dump : Dump
        Only its footers are read.
    question : Question
        Region, baseline and protocol.
    criteria : sequence of str
        Those asked for; by default every one that the region's divergence allows.
    needs : collection of {"pre", "post"}
        Readings of the policy that the arms must have.

    Returns
    -------
    resolved : dict of str to Resolved
        The baseline first, then the others in the order asked for.
    refused : dict of str to str
        Criteria of the default that the dump cannot answer for, and why.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer for the baseline, or for a criterion asked for by name.
    """
    base = replace(question, criterion=question.baseline).resolve(dump, needs=needs)
    resolved = {question.baseline: base}
    refused: dict[str, str] = {}
    for name in dict.fromkeys(criteria or _of_family(question.divergence)):
        if name in resolved:
            continue
        try:
            found = replace(base.question, criterion=name).resolve(dump, needs=needs)
            # Every arm that is read is decided by all criteria.
            for arm in {*found.arms, *arms_of(resolved)}:
                check_columns(dump, arm, decider(name))
                for other in resolved.values():
                    check_columns(dump, arm, other.criterion)
        except (QuestionError, CriterionError) as error:
            if criteria:
                raise
            refused[name] = str(error)
        else:
            resolved[name] = found
    return resolved, refused


def arms_of(resolved: dict[str, Resolved]) -> tuple[str, ...]:
    """The arms to read, the baseline's first, each once."""
    baseline = next(iter(resolved.values())).baseline_arm
    return tuple(dict.fromkeys([baseline, *(each.criterion_arm for each in resolved.values())]))


def _of_family(divergence: str) -> list[str]:
    """Every criterion and weight that masks and does not predict another divergence."""
    return [
        name
        for name, entry in WEIGHTS.items()
        if name != NONE.name
        and (entry.criterion is None or entry.criterion.family in (None, divergence))
    ]


@dataclass(frozen=True, eq=False)
class _Read:
    """What a span, or a seed of an arm, holds about all criteria.

    Attributes
    ----------
    decided : Decided
        The tokens outside.
    elsewhere : ndarray of int, shape (2, criterion)
        Tokens masked inside, and among the rows whose D is unknown. Rows that have no vectors
        since they lie near 0 are inside.
    weights : ndarray of float64, shape (criterion,)
        Σ weight of the tokens outside.
    """

    decided: Decided
    elsewhere: NDArray[np.int64]
    weights: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[_Read]) -> _Read:
        """Add up spans, in their order."""
        criteria = len(parts[0].weights)
        return cls(
            Decided.joined([each.decided for each in parts], criteria),
            np.sum([each.elsewhere for each in parts], axis=0),
            np.sum([each.weights for each in parts], axis=0),
        )


@dataclass(frozen=True)
class _Reader:
    """Reads a span for some criteria, by name; may be pickled."""

    region: Question
    names: tuple[str, ...]
    post: bool
    recompute: bool

    def __call__(self, span: Span) -> _Read:
        """Decide about every row of the span."""
        region, deciders = self.region, [decider(name) for name in self.names]
        unknown = 0
        blocks: list[Judged] = []
        elsewhere = np.zeros((2, len(deciders)), dtype=np.int64)
        weights = np.zeros(len(deciders))
        for rows in self._rows(span, deciders):
            unknown += rows.unknown
            for place, tokens, where in rows.elsewhere:
                elsewhere[place] += [_masks(each, tokens, region, where) for each in deciders]
            if (found := rows.found) is None:
                continue
            keep = decisions(found.tokens, region, deciders)
            blocks.append(Judged.of(found, keep))
            weights += [
                float(each.compute(found.tokens).sum()) if isinstance(each, Weight) else kept.sum()
                for each, kept in zip(deciders, keep, strict=True)
            ]
        judged = Judged.joined(blocks, len(deciders))
        return _Read(Decided(span.rows_seen, unknown, judged), elsewhere, weights)

    def _rows(self, span: Span, deciders: Sequence[Decider]) -> Iterator[_Rows]:
        """All rows, from wherever D is to be had."""
        names = None
        if not self.recompute:
            names = recorded_columns(span.part, self.region, deciders, post=self.post)
        if names is not None:
            yield from _recorded_rows(span, self.region, names)
            return
        region, metadata = self.region, span.part.metadata
        columns = where_recorded(span, columns_for(*deciders, post=self.post))
        for batch in part_batches(
            span.part, columns=columns, batch_rows=BLOCK_ROWS, groups=span.groups
        ):
            check_batch(batch, metadata, columns)
            elsewhere: list[tuple[int, Tokens, NDArray[np.bool_]]] = []
            bare = len(batch) - int(np.count_nonzero(batch.vectors))
            if bare:
                everywhere = np.ones(bare, dtype=np.bool_)
                place = INSIDE if metadata.near else UNKNOWN
                elsewhere.append((place, scalar_tokens(batch), everywhere))
            found = None
            if bare < len(batch):
                tokens = batch_tokens(batch, metadata)
                inside = tokens.divergence(region.divergence) <= region.threshold
                elsewhere.append((INSIDE, tokens, inside))
                found = outside_of(batch, metadata, region, tokens=tokens)
            yield _Rows(found, unknown_rows(batch, metadata), elsewhere)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of a file.

    Attributes
    ----------
    found : Outside or None
        Those outside.
    unknown : int
        Those whose D is unknown.
    elsewhere : list of (place, Tokens, ndarray of bool)
        The others: inside or unknown, and which of the tokens they are.
    """

    found: Outside | None
    unknown: int
    elsewhere: list[tuple[int, Tokens, NDArray[np.bool_]]]


def _recorded_rows(span: Span, region: Question, names: Sequence[str]) -> Iterator[_Rows]:
    """All rows by their recorded D; there is none in a row whose D is unknown."""
    for batch, block in recorded_batches(span, region, names):
        tokens = recorded_tokens(batch, region)
        bare = np.isnan(tokens.d)
        elsewhere: list[tuple[int, Tokens, NDArray[np.bool_]]] = [
            (INSIDE, tokens, tokens.d <= region.threshold)
        ]
        if bare.any():
            without = Tokens(
                tokens.advantage[bare],
                tokens.behavior_logprob[bare],
                tokens.policy_logprob[bare],
                full={name: (d[bare], d_dot[bare]) for name, (d, d_dot) in tokens.full.items()},
            )
            elsewhere.append((UNKNOWN, without, np.ones(int(bare.sum()), dtype=np.bool_)))
        yield _Rows(block.found, block.unknown, elsewhere)


def _masks(each: Decider, tokens: Tokens, region: Question, rows: NDArray[np.bool_]) -> int:
    """How many of some rows it masks; none where it needs what they lack."""
    threshold, divergence = region.threshold, region.divergence
    try:
        # Most criteria mask nothing inside the region, and need no direction to say so.
        if isinstance(each, Criterion) and not np.any(
            each.outside(tokens, threshold, divergence) & rows
        ):
            return 0
        kept = each.keep(tokens, threshold=threshold, divergence=divergence)
        return int(np.count_nonzero(~kept & rows))
    except CriterionError:  # rows without vectors
        return 0


def _share(pairs: list[tuple[float, float]], bootstrap_seed: int) -> Share:
    """A share from a seed's two numbers each."""
    parts, wholes = zip(*pairs, strict=True) if pairs else ((), ())
    return Share.of(parts, wholes, bootstrap_seed)
