"""Two criteria on one dump, under one protocol or under every one, and what keeping causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis import paper, statistics
from deltad.analysis.backends import Backend, Progress
from deltad.analysis.pairs import (
    SIDES,
    Estimate,
    Kept,
    Pair,
    Tokens,
    asked,
    bootstrap_object,
    bootstrap_text,
    named,
    pair_columns,
    pair_of,
    ratio,
    unknown_text,
)
from deltad.analysis.question import (
    OWN,
    Question,
    QuestionError,
    Resolved,
    answerable_protocols,
    recorded_share,
)
from deltad.analysis.reading import Ask, Outside, read, unlike_weights
from deltad.analysis.result import (
    DASH,
    Column,
    Result,
    Table,
    counted,
    number,
    p_value,
    title,
    with_interval,
)
from deltad.analysis.values import KEYS
from deltad.dumps import DumpError
from deltad.masks import CriterionError
from deltad.tally import FIELDS, Judged, count

if TYPE_CHECKING:
    from deltad.dumps import Dump

Read = Mapping[tuple[str, int], Sequence[Outside]]


@dataclass(frozen=True, eq=False)
class KeepEffect:
    """What keeping a disagreement token causes, by the arms that applied the two masks.

    τ = D after the update of the arm whose criterion keeps the token − D after that of the arm
    whose criterion masks it. A criterion is right where it keeps and τ ≤ 0, or masks and τ > 0.

    Attributes
    ----------
    kept : mapping of str to Tokens
        By side: the tokens that it keeps, counted by τ in place of ΔD.
    steps : int
        Optimizer steps, over all seeds, in which there is a disagreement token.
    """

    kept: Mapping[str, Tokens]
    steps: int

    @property
    def tokens(self) -> int:
        """Disagreement tokens."""
        return sum(each.tokens or 0 for each in self.kept.values())

    @property
    def undetermined(self) -> int:
        """Those of them whose |τ| is below the bound on its error."""
        return sum(each.undetermined or 0 for each in self.kept.values())

    def causal_unsafe_keep(self, side: str) -> Estimate:
        """Share of the determined tokens that a side keeps with τ > 0, pooled over seeds."""
        return self.kept[side].increases

    def sign_accuracy(self, side: str) -> Estimate:
        """Share of the determined tokens on which a side is right, pooled over seeds."""
        mine, other = self.kept[side].increases, self.kept[SIDES[side == SIDES[0]]].increases
        right = mine.wholes - mine.parts + other.parts
        return Estimate(right, mine.wholes + other.wholes, mine.bootstrap_seed)

    def to_json_object(self) -> dict[str, Any]:
        """As `summary.keep_effect` of `deltad table --format json`."""
        return {
            "method": "arms",
            "tokens": self.tokens,
            "undetermined": self.undetermined,
            "disagreements_per_step": ratio(self.tokens, self.steps),
            **{
                side: {
                    "kept": self.kept[side].determined,
                    "unsafe": self.kept[side].increase,
                    "causal_unsafe_keep": self.causal_unsafe_keep(side).value,
                    "sign_accuracy": self.sign_accuracy(side).value,
                    "sign_accuracy_ci95": list(self.sign_accuracy(side).ci95),
                }
                for side in SIDES
            },
        }

    def __str__(self) -> str:
        """One line."""
        ours, theirs = (self.kept[side] for side in SIDES)
        accuracy = self.sign_accuracy("criterion")
        words = (
            f"Keep effect τ (D after in the arm that keeps − in the arm that masks), "
            f"{counted(self.tokens, 'token')}: unsafe {ours.increase} of the {ours.determined} "
            f"that the criterion keeps, {theirs.increase} of the baseline's {theirs.determined}; "
            f"sign of τ predicted by the criterion on "
            f"{with_interval(accuracy.value, accuracy.ci95)}"
        )
        return words + (f", {self.undetermined} undetermined." if self.undetermined else ".")


@dataclass(frozen=True, eq=False, repr=False)
class RateTable(Result, Pair):
    """Two criteria compared on one dump: a pair with its forms.

    Attributes
    ----------
    share : float
        Of the sequences, drawn at random, that were recorded and are counted.
    keep_effect : KeepEffect, optional
        Where the dump has the arms that applied both masks.
    seed_rows : bool
        Whether the text has a row per seed too.
    """

    share: float = 1.0
    keep_effect: KeepEffect | None = None
    seed_rows: bool = False

    @property
    def pair(self) -> Pair:
        """Itself, as the rows of other tables hold theirs."""
        return self

    @property
    def rows(self) -> Sequence[Pair]:
        """The pair of each seed."""
        return self.by_seed

    def objects(self) -> dict[str, Any]:
        """What `deltad table --format json` prints."""
        sides = {side: self.side(side) for side in reversed(SIDES)}
        rates = ("unsafe_keep_rate", "contracting_fraction")
        paired, seed = self.paired, self.bootstrap_seed
        summary = {
            "seeds": len(self.seeds),
            "bootstrap": bootstrap_object(seed),
            "base": {
                name: _taken(getattr(self, name), "tokens", "undetermined", "increase_rate")
                for name in ("outside", "disagreement")
            },
            **{f"{name}_per_seed": self.per_seed(name) for name in
               ("tokens", "outside", "disagreement")},
            "share_of_sequences": self.share,
            "weighted": self.weighted,
            **{side: _taken(kept, *(f"{name}{end}" for name in rates for end in ("", "_ci95")))
               for side, kept in sides.items()},
            "paired": {
                **_taken(
                    paired, "seeds", "lower", "tied", "higher", "difference", "difference_ci95",
                    "sign_test_p", "wilcoxon_p", "permutation_p",
                ),
                "permutation": {
                    "method": "exact" if paired.permutation_exact else "monte-carlo",
                    "flips": paired.permutation_flips,
                    "seed": seed,
                },
            },
            "pooled": {
                "method": statistics.CLUSTER_METHOD,
                "unsafe_keep_rate": vars(self.pooled_unsafe),
                "contracting_fraction": vars(self.pooled_contracting),
            },
        }  # fmt: skip
        if self.keep_effect is not None:
            summary["keep_effect"] = self.keep_effect.to_json_object()
        return {
            **asked(self.question),
            "baseline": self.question.names[1],
            "criterion": self.question.names[0],
            "seeds": [
                {
                    "seed": each.seeds[0],
                    "tokens": each.tokens,
                    "outside": each.outside.tokens,
                    "disagreement": each.disagreement.tokens,
                    **{side: _kept_object(each.side(side)) for side in reversed(SIDES)},
                }
                for each in self.by_seed
            ],
            "summary": summary,
        }

    def parts(self) -> Iterable[str | Table]:
        """Both criteria, the paired comparison, base rates, the keep effect."""
        yield f"{title(self.question)} · {self.question.protocol}"
        yield _criteria(self)
        yield from _comparison(self)
        yield _base_rates(self)
        if self.keep_effect is not None:
            yield str(self.keep_effect)
        yield from self._notes()
        if self.seed_rows:
            yield Table.of(RATE_COLUMNS, self.rows)

    def _notes(self) -> Iterable[str]:
        """How intervals were made, and what was not counted."""
        pair, paired = self, self.paired
        yield (
            f"{bootstrap_text(pair.bootstrap_seed)} Of pooled differences: "
            f"{statistics.CLUSTER_METHOD}."
        )
        if not math.isnan(paired.permutation_p):
            tried = "all" if paired.permutation_exact else "random"
            yield f"Permutation test: {tried} {paired.permutation_flips} flips of the signs."
        base = pair.disagreement
        if base.tokens:
            yield _undetermined(pair)
        if pair.outside.tokens is not None and pair.outside.increase is None:
            yield "Only the disagreement tokens were stored: of those outside, their number."
        if self.share < 1:
            yield (
                f"Counts are of a random {self.share:.3g} of the sequences, all that was recorded."
            )
        yield from unknown_text([pair])
        if paper.compares_with_paper(self.question):
            yield f"Paper: {paper.PAPER}, {paper.FIGURE}, predictive / ratio."


@dataclass(frozen=True, eq=False, repr=False)
class ProtocolTable(Result):
    """One question under every protocol.

    Attributes
    ----------
    tables : tuple of RateTable
        `shared:none` and `own` first, then the other arms.
    refused : dict of str to str
        Protocols that the dump cannot answer, and why.
    """

    tables: tuple[RateTable, ...]
    refused: dict[str, str]

    @property
    def rows(self) -> Sequence[RateTable]:
        """The tables."""
        return self.tables

    def objects(self) -> dict[str, Any]:
        """The first table's object, with all tables' objects under `protocols`, and `refused`."""
        tables = [table.to_json_object() for table in self.tables]
        return {**tables[0], "protocols": tables, "refused": self.refused}

    def parts(self) -> Iterable[str | Table]:
        """A row per protocol, and what was refused."""
        first = self.tables[0]
        yield title(first.question)
        yield _size(first)
        shown = Table.of(PROTOCOLS, self.tables)
        if paper.compares_with_paper(first.question):
            rates, fractions = paper.UNSAFE_KEEP_RATES, paper.CONTRACTING_FRACTIONS
            row = [
                "the paper", *(number(rates[side]) for side in SIDES),
                f"{paper.SEEDS_LOWER} of {paper.SEEDS} lower", "",
                " / ".join(number(fractions[side]) for side in SIDES),
            ]  # fmt: skip
            shown = replace(
                shown, rows=[*shown.rows, [*row, *[""] * (len(shown.heads) - len(row))]]
            )
        yield shown
        effect = self.tables[0].keep_effect
        if effect is not None:
            yield str(effect)
        yield from unknown_text([first])
        yield from (f"{name} is left out: {why}" for name, why in self.refused.items())


def rate_table(
    dump: Dump,
    question: Question | None = None,
    *,
    bootstrap_seed: int = 0,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
) -> RateTable:
    """Count a dump and compare two criteria seed by seed.

    Parameters
    ----------
    dump : Dump
        An open dump; every row of the columns used is read and checked.
    question : Question, optional
        By default the paper's: top-K KL above 0.15, predictive against ratio.
    bootstrap_seed : int
        Seed of the intervals' random numbers.
    progress : callable, optional
        Told the number of rows of every span of the dump that is done.
    backend : Backend, optional
        Where to count: by default on the cores of this machine. The result is the same to the
        bit on any.
    recompute : bool
        Compute D and Ḋ from the top-K log-probs even where the dump has them recorded.

    Returns
    -------
    RateTable
        Counts by seed; summaries are computed when asked for.

    Raises
    ------
    QuestionError, CriterionError
        The dump cannot answer the question.
    DumpError
        A row holds an impossible value.
    """
    asked = question or Question()
    resolved = asked.resolve(dump, disagreement_only=True)
    (table,) = _rate_tables(
        dump, [resolved], bootstrap_seed, progress=progress, backend=backend, recompute=recompute
    )
    return table


def protocol_table(
    dump: Dump, question: Question | None = None, *, bootstrap_seed: int = 0, **how: Any
) -> ProtocolTable:
    """Compare two criteria under every protocol that the dump can answer, reading it once.

    Parameters
    ----------
    dump, question, bootstrap_seed, **how
        As in `rate_table`; the question's own protocol is not looked at.

    Returns
    -------
    ProtocolTable
        At least one table.

    Raises
    ------
    QuestionError, CriterionError, DumpError
        As `rate_table`.
    """
    asked = question or Question()
    resolved, refused = answerable_protocols(dump, asked, disagreement_only=True)
    tables = _rate_tables(dump, list(resolved.values()), bootstrap_seed, **how)
    return ProtocolTable(tuple(tables), refused)


def _rate_tables(
    dump: Dump,
    resolved: Sequence[Resolved],
    bootstrap_seed: int,
    *,
    progress: Progress | None = None,
    backend: Backend | None = None,
    recompute: bool = False,
) -> list[RateTable]:
    """A table per resolved question, and what keeping a token causes; one reading for all."""
    question = resolved[0].question
    own = _own_arms(dump, question)
    arms = dict.fromkeys(arm for each in resolved for arm in each.arms)
    ask = Ask(
        question, question.rules, values=(*KEYS, "d_post", "noise") if own else (),
        recompute=recompute, apart=True,
    )  # fmt: skip
    every = (*arms, *(arm for arm in (own.arms if own else ()) if arm not in arms))
    got = read(dump, every, ask, backend=backend, progress=progress)
    effect = None if own is None else _keep_effect(own, got, bootstrap_seed)
    share = recorded_share(dump)
    tables = []
    for each in resolved:
        mine = [found[0] for (arm, _), found in got.items() if arm in each.arms]
        pair = pair_of(
            each, got, weighted=unlike_weights(mine), bootstrap_seed=bootstrap_seed
        )  # fmt: skip
        tables.append(RateTable(**vars(pair), share=share, keep_effect=effect))
    return tables


def _own_arms(dump: Dump, question: Question) -> Resolved | None:
    """The two arms that applied the pair's masks to the same tokens, if there are any."""
    try:
        own = replace(question, protocol=OWN).resolve(dump, disagreement_only=True)
        dump.check_arms(own.arms)
    except (QuestionError, CriterionError, DumpError):
        return None
    return own if len(own.arms) == 2 else None


def _keep_effect(own: Resolved, read: Read, bootstrap_seed: int) -> KeepEffect:
    """Join the two arms token by token."""
    kept: dict[str, list[NDArray[np.float64]]] = {side: [] for side in SIDES}
    steps = 0
    for seed in sorted(seed for arm, seed in read if arm == own.criterion_arm):
        ours, theirs = (
            _sorted(read[arm, seed][0]) for arm in (own.criterion_arm, own.baseline_arm)
        )
        for name in KEYS:
            if not np.array_equal(ours.columns[name], theirs.columns[name]):
                raise QuestionError(
                    f"in seed {seed} the arms {own.criterion_arm} and {own.baseline_arm} do not "
                    "hold the same tokens: run `deltad check`"
                )
        keeps = {"criterion": ours.keep[0], "baseline": ~ours.keep[0]}
        tau = ours.columns["d_post"] - theirs.columns["d_post"]
        tau = np.where(keeps["criterion"], tau, -tau)
        # Each bound is of a difference with the same D before, three standard deviations.
        bound = np.hypot(ours.columns["noise"], theirs.columns["noise"])
        judged = Judged.of(tau, bound, ours.columns["weight"])
        for side in SIDES:
            kept[side].append(count(judged, keeps[side]))
        steps += len(np.unique(ours.columns["step"]))
    mine = [found[0] for (arm, _), found in read.items() if arm in own.arms]
    weighted = unlike_weights(mine)
    tokens = {
        side: Tokens(np.array(each).reshape(-1, len(FIELDS)), weighted, bootstrap_seed)
        for side, each in kept.items()
    }
    return KeepEffect(tokens, steps)


def _sorted(outside: Outside) -> Outside:
    """The same tokens in the order of their keys."""
    return outside[np.lexsort([outside.columns[name] for name in reversed(KEYS)])]


def _taken(found: Any, *names: str) -> dict[str, Any]:
    """Some attributes by name."""
    return {name: getattr(found, name) for name in names}


def _kept_object(kept: Kept) -> dict[str, Any]:
    """One criterion of one seed; with unlike weights also the sums that its rate is made of."""
    found = _taken(
        kept, "kept", "unsafe", "contracting", "undetermined", "unsafe_keep_rate"
    )  # fmt: skip
    if kept.weighted:
        found["weights"] = {
            "determined": kept.increases.whole,
            "unsafe": kept.increases.part,
            "contracting": kept.contractions.part,
        }
    return found


def _criteria(pair: Pair) -> Table:
    """Both criteria with intervals and counts, and the paper's numbers where they compare."""
    sides = [pair.side(side) for side in SIDES]
    reported = paper.compares_with_paper(pair.question)
    rates, fractions = paper.UNSAFE_KEEP_RATES, paper.CONTRACTING_FRACTIONS
    rows: list[tuple[str, list[str], str]] = [
        (
            "unsafe-keep rate, seed mean",
            [with_interval(each.unsafe_keep_rate, each.unsafe_keep_rate_ci95) for each in sides],
            " / ".join(number(rates[side]) for side in SIDES),
        ),
        ("  seeds with a rate", [f"{each.seeds} of {len(pair.seeds)}" for each in sides], ""),
        ("  unsafe / kept", [each.of("unsafe") for each in sides], ""),
        (
            "contracting fraction, pooled",
            [str(with_interval(each.contracting_fraction, each.contracting_fraction_ci95))
             for each in sides],
            " / ".join(number(fractions[side]) for side in SIDES),
        ),
        ("  contracting / kept", [each.of("contracting") for each in sides], ""),
    ]  # fmt: skip
    if pair.disagreement.bounded:
        rows.append(
            ("undetermined, in neither", [f"{e.undetermined} of {e.kept}" for e in sides], "")
        )
    if pair.question.protocol != OWN:
        accuracies = [pair.accuracy(side, "disagreement").value for side in SIDES]
        guess = number(pair.disagreement.constant_guess)
        rows.append(("sign of ΔD predicted", [number(each) for each in accuracies], ""))
        rows.append(("  always the more common", [guess, guess], ""))
    return Table(
        ["kept disagreement tokens", *pair.question.names, *(["paper"] if reported else [])],
        [[label, *cells, *([beside] if reported else [])] for label, cells, beside in rows],
    )


def _comparison(pair: Pair) -> Iterable[str]:
    """The paired comparison, a line per fact."""
    paired, names = pair.paired, pair.question.names
    lower = f"{paired.lower} / {paired.tied} / {paired.higher} of {paired.seeds} seeds"
    if paper.compares_with_paper(pair.question):
        lower += f" (paper: {paper.SEEDS_LOWER} of {paper.SEEDS} lower)"
    yield f"Criterion lower / tied / higher: {lower}."
    difference = with_interval(paired.difference, paired.difference_ci95, signed=True)
    yield (
        f"Criterion − baseline, mean over these: {difference}. Two-sided p: sign test "
        f"{p_value(paired.sign_test_p)}, Wilcoxon {p_value(paired.wilcoxon_p)}, permutation of the "
        f"mean {p_value(paired.permutation_p)}."
    )
    unsafe, contracting = pair.pooled_unsafe, pair.pooled_contracting
    yield (
        "Pooled, criterion − baseline: unsafe keep "
        f"{with_interval(unsafe.difference, unsafe.difference_ci95, signed=True)}, contracting "
        f"{with_interval(contracting.difference, contracting.difference_ci95, signed=True)}."
    )
    for side, name in zip(SIDES, names, strict=True):
        empty = len(pair.seeds) - pair.side(side).seeds
        if empty:
            yield (
                f"{counted(empty, 'seed')} left out of the mean of {name} and of the pairs: no "
                "determined disagreement token kept."
            )


def _base_rates(pair: Pair) -> Table:
    """How many tokens there are, and how often ΔD > 0 whatever a criterion says."""
    reported = paper.compares_with_paper(pair.question)
    rows = [["all", str(pair.tokens), f"{pair.per_seed('tokens'):.0f}", "", "", ""]]
    for label, name, beside in (
        ("outside", "outside", f"about {paper.OUTSIDE_PER_SEED}"),
        ("in disagreement", "disagreement", str(paper.DISAGREEMENT_PER_SEED)),
    ):
        base: Tokens = getattr(pair, name)
        mean = "" if base.tokens is None else f"{pair.per_seed(name):.1f}"
        rate = DASH if base.increase is None else str(base)
        rows.append([label, known(base.tokens), mean, rate, number(base.constant_guess), beside])
    heads = ["tokens", "all seeds", "per seed", "P(ΔD > 0)", "always the more common", "paper"]
    shown = slice(None if reported else -1)
    return Table(heads[shown], [row[shown] for row in rows])


def _undetermined(pair: Pair) -> str:
    """How many tokens have a ΔD below the bound on its error, or that none is known."""
    base = pair.disagreement
    if not base.bounded:
        return "Undetermined: unknown, for no bound on the error of ΔD was recorded."
    words = (
        f"Undetermined: {base.undetermined} of {counted(base.tokens, 'disagreement token')} have "
        "a ΔD below the bound on its error; rates are of the others."
    )
    if base.tokens and base.bounded < base.tokens:
        words += f" {base.tokens - base.bounded} have no such bound."
    return words


def _size(pair: Pair) -> str:
    """Seeds and tokens in one line."""
    return (
        f"{counted(len(pair.seeds), 'seed')}, per seed: {pair.per_seed('tokens'):.0f} tokens, "
        f"{pair.per_seed('outside'):.1f} outside, {pair.per_seed('disagreement'):.1f} in "
        "disagreement"
    )


def _per_seed_columns() -> list[Column]:
    """Columns of a rate table, one row per seed."""
    found = [
        Column("seed", "independent repetition", lambda p: p.seeds[0], "seed", key=True),
        Column("tokens", "response tokens, stored or not", attrgetter("tokens"), "tokens"),
        Column("outside", "tokens with D > δ before the update", attrgetter("outside.tokens"),
               "outside"),
        Column("disagreement", "tokens outside that exactly one of the two criteria masks",
               attrgetter("disagreement.tokens"), "disagreement"),
    ]  # fmt: skip
    for side in reversed(SIDES):
        for name, meaning, head in (
            ("kept", "disagreement tokens that the {} keeps", ""),
            ("unsafe", "of the tokens that the {} keeps, those with ΔD > 0", "unsafe"),
            ("contracting", "of the tokens that the {} keeps, those with ΔD < 0", ""),
            ("undetermined", "of these, those whose |ΔD| is below the bound on its error", ""),
            ("unsafe_keep_rate", "unsafe / (kept − undetermined) of the {}", "rate"),
        ):
            get = attrgetter(f"{side}.{name}")
            heading = f"{side} {head}" if head else ""
            found.append(Column(f"{side}_{name}", meaning.format(side), get, heading))
    return found


RATE_COLUMNS: Final = _per_seed_columns()
"""Columns of a rate table, one row per seed."""


def key(name: str, meaning: str, value: Callable[[Any], Any], head: str = "") -> Column:
    """A column that says what a row is of."""
    return Column(name, meaning, value, head, key=True)


def pair_keys(of: Callable[[Any], Pair]) -> list[Column]:
    """The names of a pair's two criteria."""
    return [
        key("criterion", "the criterion in question", lambda row: of(row).question.names[0]),
        key("baseline", "the one that it is compared with", lambda row: of(row).question.names[1]),
    ]


def pair_in(row: Any) -> Pair:
    """The pair of a row."""
    found: Pair = row.pair
    return found


def in_text(head: str, show: Callable[[Any], str]) -> Column:
    """A column that stands in text only, made of several numbers."""
    return Column("", "", str, head, show)


def sided(head: str, show: Callable[[str, Any], str]) -> list[Column]:
    """Two such columns, the criterion's before the baseline's."""
    return [in_text(head.format(side), partial(show, side)) for side in SIDES]


def _rate(side: str, row: Any) -> str:
    """A side's unsafe-keep rate with its interval."""
    kept = row.pair.side(side)
    return with_interval(kept.unsafe_keep_rate, kept.unsafe_keep_rate_ci95)


RATES: Final = sided("unsafe keep, {}", _rate)
LOWER: Final = in_text(
    "lower / tied / higher",
    lambda row: f"{row.pair.paired.lower} / {row.pair.paired.tied} / {row.pair.paired.higher}",
)
SIGN_TEST: Final = in_text("sign test p", lambda row: p_value(row.pair.paired.sign_test_p))
DIFFERENCE: Final = in_text(
    "difference",
    lambda row: with_interval(
        row.pair.paired.difference, row.pair.paired.difference_ci95, signed=True
    ),
)
CONTRACTING: Final = in_text(
    "contracting, both",
    lambda row: " / ".join(number(row.pair.side(side).contracting_fraction) for side in SIDES),
)
UNSAFE: Final = in_text(
    "unsafe / kept, both", lambda row: ", ".join(row.pair.side(s).of("unsafe") for s in SIDES)
)
GUESS: Final = in_text(
    "always the more common", lambda row: number(row.pair.outside.constant_guess)
)
BASE: Final = in_text("P(ΔD > 0)", lambda row: number(row.pair.outside.increase_rate))
OUTSIDE: Final = in_text("outside", lambda row: known(row.pair.outside.tokens))
APART: Final = in_text("in disagreement", lambda row: known(row.pair.disagreement.tokens))


def known(count: int | None) -> str:
    """A count, or that it is not known."""
    return "unknown" if count is None else str(count)


PROTOCOL_COLUMNS: Final = [
    key("protocol", "which update ΔD is measured under", lambda t: t.question.protocol),
    *pair_keys(pair_in),
    Column("seeds", "seeds of the dump", lambda t: len(t.pair.seeds)),
    *pair_columns(pair_in),
    Column("wilcoxon_p", "two-sided signed-rank; zeros left out",
           lambda t: t.pair.paired.wilcoxon_p),
    Column("permutation_p", "two-sided, of the mean difference under sign flips; zeros left out",
           lambda t: t.pair.paired.permutation_p),
    *named("pooled_unsafe_difference",
           "Σ unsafe / Σ (kept − undetermined), criterion − baseline, seeds as clusters",
           attrgetter("pair.pooled_unsafe.difference"),
           attrgetter("pair.pooled_unsafe.difference_ci95")),
    *named("pooled_contracting_difference",
           "Σ contracting / Σ (kept − undetermined), criterion − baseline, seeds as clusters",
           attrgetter("pair.pooled_contracting.difference"),
           attrgetter("pair.pooled_contracting.difference_ci95")),
]  # fmt: skip
"""Columns of a protocol table, one row per protocol."""

RateTable.COLUMNS, ProtocolTable.COLUMNS = RATE_COLUMNS, PROTOCOL_COLUMNS

PROTOCOLS: Final = [
    in_text("protocol", lambda t: t.question.protocol),
    *sided("unsafe keep, {}", lambda side, t: number(t.pair.side(side).unsafe_keep_rate)),
    LOWER,
    SIGN_TEST,
    CONTRACTING,
    BASE,
    GUESS,
]
