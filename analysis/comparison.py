"""Any number of criteria side by side on one dump, each against one baseline.

The dump is read once for all of them. Each pair is counted as `deltad table` counts it; beside
it stand what a criterion masks, how often it foretells the sign of ΔD, and how often any two
criteria decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.dumps import batch_tokens, scalar_tokens
from deltad.masks import NONE, Criterion, CriterionError, Tokens
from deltad.weights import WEIGHTS, Weight

from .counting import (
    Decided,
    Decider,
    Judged,
    Progress,
    checked_batches,
    columns_for,
    decisions,
    outside_of,
)
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
from .rates import BaseRate, RateTable, SeedRates, ratio
from .result import Result
from .shares import Share
from .statistics import Paired, compare_paired, holm

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from deltad.dumps import Dump

PLACES: Final = ("outside", "inside", "without_vectors")
"""Where a masked token may lie: D above δ, D up to δ, D unknown."""


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
        and the baseline masks; over nothing under `own`, where a masked token has no update of
        its own to be judged by.
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

        Σ contracting / Σ kept of a seed's disagreement tokens; seeds in which one of the two
        keeps none take no part.
        """
        seeds = self.table.seeds
        return compare_paired(
            [ratio(seed.criterion.contracting, seed.criterion.kept) for seed in seeds],
            [ratio(seed.baseline.contracting, seed.baseline.kept) for seed in seeds],
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
        Told the number of rows of every block read.

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
    deciders = [decider(name) for name in names]
    arms = arms_of(resolved)
    without_delta = unjudged(dump, arms)
    rates: list[list[SeedRates]] = [[] for _ in names]
    shares: list[list[list[tuple[float, float]]]] = [[[], [], []] for _ in names]
    masked = np.zeros((len(PLACES), len(names)), dtype=np.int64)
    alike = np.zeros((len(names), len(names)), dtype=np.int64)
    rows = 0
    for seed in dump.seeds(base.baseline_arm):
        rows += dump.rows(base.baseline_arm, seed)
        read = {
            arm: _read(dump, arm, seed, base.question, deciders, progress, post=not without_delta)
            for arm in arms
        }
        decided, elsewhere, weights = read[base.baseline_arm]
        masked += np.stack([np.count_nonzero(~decided.keep, axis=1), *elsewhere])
        alike += np.count_nonzero(decided.keep[:, None] == decided.keep[None], axis=2)
        for at, each in enumerate(resolved.values()):
            mine = read[each.criterion_arm][0]
            rates[at].append(SeedRates.of(seed, mine.pair(at, 0), decided.pair(at, 0)))
            right = mine.foretold(at)
            apart = mine.keep[at] != mine.keep[0]
            shares[at][0].append((float(weights[at]), decided.keep.shape[1]))
            shares[at][1].append((int(right.sum()), len(right)))
            shares[at][2].append((int(right[apart].sum()), int(apart.sum())))
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
                table=RateTable(each.question, tuple(rates[at]), bootstrap_seed),
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


def _read(
    dump: Dump,
    arm: str,
    seed: int,
    region: Question,
    deciders: Sequence[Decider],
    progress: Progress | None,
    *,
    post: bool,
) -> tuple[Decided, NDArray[np.int64], NDArray[np.float64]]:
    """One seed of one arm: tokens outside, masked counts elsewhere (2, criterion), Σ weight."""
    without_vectors = 0
    blocks: list[Judged] = []
    elsewhere = np.zeros((2, len(deciders)), dtype=np.int64)
    weights = np.zeros(len(deciders))
    for batch, metadata in checked_batches(
        dump, arm, seed, columns_for(*deciders, post=post), progress=progress
    ):
        bare = len(batch) - int(np.count_nonzero(batch.vectors))
        without_vectors += bare
        if bare:
            tokens = scalar_tokens(batch)
            everywhere = np.ones(bare, dtype=np.bool_)
            elsewhere[1] += [_masks(each, tokens, region, everywhere) for each in deciders]
        if bare == len(batch):
            continue
        tokens = batch_tokens(batch, metadata)
        inside = tokens.divergence(region.divergence) <= region.threshold
        elsewhere[0] += [_masks(each, tokens, region, inside) for each in deciders]
        found = outside_of(batch, metadata, region, tokens=tokens)
        if found is None:
            continue
        keep = decisions(found.tokens, region, deciders)
        blocks.append((found.delta_d, keep))
        weights += [
            float(each.compute(found.tokens).sum()) if isinstance(each, Weight) else kept.sum()
            for each, kept in zip(deciders, keep, strict=True)
        ]
    seen = dump.rows_seen(arm, seed)
    return Decided.of(seen, without_vectors, blocks, len(deciders)), elsewhere, weights


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
