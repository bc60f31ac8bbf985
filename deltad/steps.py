"""One optimizer step in numbers: counts and sums that micro-batches and ranks add up to.

`count_steps` makes `StepScalars` of rows, as a probe hands them over or as a dump holds them. They
hold only numerators, denominators, histograms and extremes, so that those of two micro-batches, or
of two ranks, can be added; rates come last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.dumps.tokens import RESPONSE, response_tokens
from deltad.logprobs import LogprobSums
from deltad.masks import DEFAULT_THRESHOLD, CriterionError, Rule, distinct, rule
from deltad.metrics import metric_values
from deltad.tally import FIELDS, Judged, count, count_pair

STEPS: Final = "_steps"
"""Folder in RUN for steps in numbers; dataset readers skip names that begin with `_`."""

FORMAT: Final = 1

Decisions = Mapping[str, NDArray[np.bool_]]
"""Which tokens each rule keeps, by its name."""

NOISE: Final = "delta_d_noise"
"""The column of the bound on ΔD's error."""

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Shares of tokens at which D is reported."""

BINS_PER_DECADE: Final = 40
"""Bins are 10^(1/40) = 1.059 wide: a quantile is off by a factor of 10^(1/80) = 1.029 at most."""

_LEAST, _MOST = -10, 3
"""Decades: below the first everything counts as 0, above the second as one."""
_ZERO: Final = -1
_ABOVE: Final = (_MOST - _LEAST) * BINS_PER_DECADE

RATES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "outside_rate": ("outside", "with_topk"),
        "disagreement_rate": ("disagreement", "with_topk"),
        "in_loss_rate": ("in_loss", "tokens"),
        "increase_rate": ("increase", "determined"),
        "outside_increase_rate": ("outside_increase", "outside_determined"),
        "disagreement_increase_rate": ("disagreement_increase", "disagreement_determined"),
        "criterion_unsafe_keep_rate": ("criterion_unsafe", "criterion_determined"),
        "baseline_unsafe_keep_rate": ("baseline_unsafe", "baseline_determined"),
        "criterion_contracting_fraction": ("criterion_contracting", "criterion_determined"),
        "baseline_contracting_fraction": ("baseline_contracting", "baseline_determined"),
    }
)
"""Every rate with the counts that it is the quotient of; both are among the scalars too."""

_OF_ALL_TOKENS: Final = (
    "tokens", "with_topk", "without_topk", "in_loss", "increase", "determined", "undetermined",
)  # fmt: skip
"""Counts that mean nothing where only the tokens outside a region were stored."""

_DETERMINED: Final = {
    "determined": "with_topk", "outside_determined": "outside",
    "disagreement_determined": "disagreement", "criterion_determined": "criterion_kept",
    "baseline_determined": "baseline_kept",
}  # fmt: skip
"""What older lines, which took every ΔD for determined, have in place of these counts."""

_SCALARS: Final = (
    "step", "sequence", "token_id", "advantage", "in_loss", "behavior_logprob", "pre_logprob",
    "post_logprob", "topk_ids", "topk_behavior_logprobs", "topk_pre_logprobs",
    "topk_post_logprobs",
)  # fmt: skip
"""What every count is made of; without post, those that need ΔD are left out."""


@dataclass(frozen=True)
class LogHistogram:
    """Counts of numbers ≥ 0 in bins of equal width on a logarithmic scale.

    Attributes
    ----------
    counts : mapping of int to int
        Numbers in a bin, by the bin's place; −1 holds those below 1e-10.
    """

    counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> LogHistogram:
        """Count numbers; what is below 0 by rounding counts as 0, and NaN not at all."""
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.floor((np.log10(np.maximum(values, 0.0)) - _LEAST) * BINS_PER_DECADE)
        known = place[~np.isnan(values)]
        bins, counts = np.unique(np.clip(known, _ZERO, _ABOVE).astype(np.int64), return_counts=True)
        return cls(dict(zip(bins.tolist(), counts.tolist(), strict=True)))

    @property
    def total(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts.values())

    def __add__(self, other: LogHistogram) -> LogHistogram:
        """Both together."""
        return LogHistogram(dict(sorted((Counter(self.counts) + Counter(other.counts)).items())))

    def quantile(self, share: float) -> float:
        """Find the number that a share in (0, 1] of all numbers does not exceed.

        It is the geometric middle of its bin, right within a factor of 10^(1/80); 0 for the lowest
        bin, ∞ for the highest, NaN where nothing was counted.

        Examples
        --------
        >>> histogram = LogHistogram.of(np.array([0.0, 0.1, 0.2, 0.4]))
        >>> histogram.quantile(0.25), round(histogram.quantile(0.75), 2)
        (0.0, 0.21)
        """
        if not 0 < share <= 1:
            raise ValueError(f"`share` must be in (0, 1], got {share!r}")
        rank = math.ceil(share * self.total - 1e-9)  # 0.1 · 30 is a hair above 3
        seen = 0
        for place, number in sorted(self.counts.items()):
            seen += number
            if seen >= rank:
                if place in (_ZERO, _ABOVE):
                    return 0.0 if place == _ZERO else math.inf
                return float(10 ** (_LEAST + (place + 0.5) / BINS_PER_DECADE))
        return math.nan


@dataclass(frozen=True)
class StepQuestion:
    """Which region, and which criteria are watched.

    Attributes
    ----------
    threshold : float
        δ ≥ 0 of the region: nats for KL, a probability for TV.
    divergence : {"kl", "tv"}
        The region's divergence.
    criterion, baseline : str
        Names of the criterion in question (by default `predictive-<divergence>-aggregated`) and
        of the one that it is compared with; given as `deltad.masks.rule` takes them.
    masked : tuple of str
        Criteria whose masked tokens are counted too, in addition to these two.
    rules : mapping of str to Rule
        All of them by name.
    look_up : bool
        False takes names as they are, of rules that may be unknown here.

    Raises
    ------
    CriterionError
        A threshold that is negative or not finite, an unknown criterion or divergence, a
        predictive criterion of another family, or two rules of one name.
    """

    threshold: float = DEFAULT_THRESHOLD
    divergence: str = "kl"
    criterion: str | Rule = ""
    baseline: str | Rule = "ratio"
    masked: tuple[str | Rule, ...] = ("clip-higher",)
    rules: Mapping[str, Rule] = field(init=False, compare=False, repr=False, default_factory=dict)
    look_up: InitVar[bool] = True

    def __post_init__(self, look_up: bool) -> None:
        if self.divergence not in DIVERGENCES:
            raise CriterionError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {self.divergence!r}"
            )
        if not 0 <= self.threshold < math.inf:
            raise CriterionError(
                f"`threshold` must be finite and not negative, got {self.threshold!r}"
            )
        given = self.criterion or f"predictive-{self.divergence}-aggregated"
        every: list[Any] = [given, self.baseline, *self.masked]
        found = [rule(each) for each in every] if look_up else []
        for each in found:
            each.check_family(self.divergence)
        rules = distinct(found)
        every = [each.name for each in found] or list(map(str, every))
        named = {"criterion": every[0], "baseline": every[1], "masked": tuple(every[2:])}
        for name, value in {**named, "threshold": float(self.threshold), "rules": rules}.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Names alone: rules of a user's file need not be known in another process."""
        return {**self.__dict__, "rules": {}}

    @property
    def of_responses(self) -> list[Rule]:
        """The rules that judge whole responses."""
        return [each for each in self.rules.values() if each.scope == "sequence"]

    @property
    def pair(self) -> tuple[Any, ...]:
        """What must agree for counts to be comparable: region, criterion and baseline."""
        return self.threshold, self.divergence, self.criterion, self.baseline


@dataclass(frozen=True)
class StepScalars:
    """What is counted of one step of one arm.

    Attributes
    ----------
    arm, seed, step
        Which step.
    question : StepQuestion
        What is counted.
    whole : bool
        Whether every response token was counted. Where a dump stores only tokens with a large D,
        all that is said about *all* tokens is left out of `scalars`.
    ranks : tuple of int
        Whose tokens are in it.
    counts : mapping of str to int
        `tokens`, `in_loss`, `with_topk`, `without_topk` (rows of unknown D); `outside`,
        `disagreement`, `criterion_kept` and `baseline_kept` (disagreement tokens that each keeps).
        With `increase` (of a side `unsafe`, ΔD > 0), `determined` and `undetermined` (|ΔD| below
        the bound on its error), alone or after the name of a set, how many of these; a side's
        `contracting` are those with ΔD < 0. Without what is not known.
    masked : mapping of str to int
        Tokens that each watched criterion masks, of those with top-K log-probs; where not all
        tokens are stored, without criteria whose region is another than the question's.
    d_pre, d_post : LogHistogram
        D before and after the step.
    extremes : mapping of str to float
        `d_pre_max`, `d_post_max`, and `delta_d_abs_max`, the largest |ΔD|.
    delta_d : tuple of float
        Σ ΔD over all tokens, and over those outside.
    fit : tuple of float
        Σ x² and Σ x y over the slots of all tokens, x and y being log μ and log π less their means
        over the token's top-K.
    logprobs : LogprobSums
        Of the policy before the step.
    """

    arm: str
    seed: int
    step: int
    question: StepQuestion = field(default_factory=StepQuestion)
    whole: bool = True
    ranks: tuple[int, ...] = (0,)
    counts: Mapping[str, int] = field(default_factory=dict)
    masked: Mapping[str, int] = field(default_factory=dict)
    d_pre: LogHistogram = field(default_factory=LogHistogram)
    d_post: LogHistogram = field(default_factory=LogHistogram)
    extremes: Mapping[str, float] = field(default_factory=dict)
    delta_d: tuple[float, float] = (0.0, 0.0)
    fit: tuple[float, float] = (0.0, 0.0)
    logprobs: LogprobSums = field(default_factory=LogprobSums)

    def __add__(self, other: StepScalars) -> StepScalars:
        """The same step's tokens of both; ValueError where they are not of one step."""
        mine, theirs = ((s.arm, s.seed, s.step, s.question, s.whole) for s in (self, other))
        if mine != theirs:
            raise ValueError(f"only counts of one step can be added, got {mine} and {theirs}")

        def added(name: str) -> Any:
            """Two mappings of counts, or two pairs of sums."""
            first, second = getattr(self, name), getattr(other, name)
            if isinstance(first, tuple):
                return first[0] + second[0], first[1] + second[1]
            return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}

        return replace(
            self,
            ranks=tuple(sorted({*self.ranks, *other.ranks})),
            d_pre=self.d_pre + other.d_pre,
            d_post=self.d_post + other.d_post,
            extremes={
                name: max(each.get(name, -math.inf) for each in (self.extremes, other.extremes))
                for name in (*self.extremes, *other.extremes)
            },
            logprobs=self.logprobs + other.logprobs,
            **{name: added(name) for name in ("counts", "masked", "delta_d", "fit")},
        )

    @property
    def temperature(self) -> float:
        """τ̂ = Σ x² / Σ x y, the policy's temperature relative to the behavior policy's.

        Least squares of log π = (1/τ) log μ + const within each token's top-K; NaN without two ids
        in any token, or where log π does not grow with log μ.
        """
        squares, products = self.fit
        return squares / products if squares > 0 and products > 0 else math.nan

    def scalars(self, *, prefix: str = "deltad", sums: bool = True) -> dict[str, float]:
        """Everything as numbers for a logger.

        Parameters
        ----------
        prefix : str
            Begins every name.
        sums : bool
            With the sums that the metrics are quotients of, as `<prefix>_sums/<name>`.

        Returns
        -------
        dict of str to float
            Counts, `masked/<criterion>`, the rates of `RATES`, quantiles of D, τ̂ and the metrics
            of `deltad.metrics`; without numbers that are undefined.
        """
        counts, known = self.counts, self.d_pre.total
        named: dict[str, float] = {
            name: float(number)
            for name, number in counts.items()
            if self.whole or name not in _OF_ALL_TOKENS
        }
        named |= {f"masked/{name}": float(number) for name, number in self.masked.items()}
        if self.whole:
            named |= {**self.extremes, **metric_values(self.logprobs)}
            for time, histogram in (("pre", self.d_pre), ("post", self.d_post)):
                for name, share in QUANTILES.items():
                    named[f"d_{time}_{name}"] = histogram.quantile(share)
            named["delta_d_mean"] = _ratio(self.delta_d[0], self.d_post.total)
            named["temperature"] = self.temperature
            for name, number in self.masked.items():
                named[f"masked_rate/{name}"] = _ratio(number, known)
        for name, (above, below) in RATES.items():
            if named.get(below):
                named[name] = named.get(above, 0.0) / named[below]
        judged = counts.get("outside_determined", 0) + counts.get("outside_undetermined", 0)
        named["delta_d_outside_mean"] = _ratio(self.delta_d[1], judged)
        found = {f"{prefix}/{name}": value for name, value in named.items()}
        if sums and self.whole:
            found |= {f"{prefix}_sums/{name}": value for name, value in vars(self.logprobs).items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def to_json_object(self) -> dict[str, Any]:
        """Everything as plain objects, `format` first; an extreme of nothing is left out."""
        found = {name: getattr(self, name) for name in ("arm", "seed", "step", "whole", "ranks")}
        for name in ("counts", "masked", "delta_d", "fit"):
            found[name] = getattr(self, name)
        for name in ("d_pre", "d_post"):
            counts = getattr(self, name).counts
            found[name] = {str(place): number for place, number in counts.items()}
        for name, numbers in (("extremes", self.extremes), ("logprobs", vars(self.logprobs))):
            found[name] = {key: value for key, value in numbers.items() if math.isfinite(value)}
        names = ("threshold", "divergence", "criterion", "baseline", "masked")
        question = {name: getattr(self.question, name) for name in names}
        return {"format": FORMAT, "question": question, **found}

    @classmethod
    def from_json_object(cls, found: Mapping[str, Any]) -> StepScalars:
        """Read what `to_json_object` made, also in older versions; unknown keys are passed over.

        Raises
        ------
        ValueError
            Another format, or a part is missing or malformed.
        """
        if not isinstance(found, Mapping):
            raise ValueError(f"steps must be a JSON object, got {type(found).__name__}")
        if found.get("format") != FORMAT:
            raise ValueError(f"steps must be of format {FORMAT}, got {found.get('format')!r}")
        try:
            counts = {str(name): int(number) for name, number in found["counts"].items()}
            if (bare := counts.pop("without_vectors", None)) is not None:
                counts |= {"without_topk": bare, "with_topk": counts["tokens"] - bare}
                counts |= {name: counts[whole] for name, whole in _DETERMINED.items()}
            first, second = ([float(each) for each in found[name]] for name in ("delta_d", "fit"))
            made = cls(
                arm=str(found["arm"]),
                seed=int(found["seed"]),
                step=int(found["step"]),
                question=StepQuestion(**{**found["question"], "look_up": False}),
                whole=bool(found["whole"]),
                ranks=tuple(int(rank) for rank in found["ranks"]),
                counts=counts,
                masked={str(name): int(number) for name, number in found["masked"].items()},
                d_pre=LogHistogram({int(k): int(v) for k, v in found["d_pre"].items()}),
                d_post=LogHistogram({int(k): int(v) for k, v in found["d_post"].items()}),
                extremes={str(k): float(v) for k, v in found["extremes"].items()},
                delta_d=(first[0], first[1]),
                fit=(second[0], second[1]),
                logprobs=_logprobs(found["logprobs"]),
            )
            for name in (made.arm, *made.counts, *made.masked, *made.extremes):
                if not name.isprintable():
                    raise ValueError(f"names in steps must be printable, got {name!r}")
            made.scalars()  # what cannot be reckoned with is malformed too
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"steps are malformed: {type(error).__name__} {error}") from error
        return made


def _logprobs(found: Mapping[str, float]) -> LogprobSums:
    """Sums of log-probs; logs of earlier versions lack those over products of ratios."""
    known = {each.name: found[each.name] for each in fields(LogprobSums) if each.name in found}
    unknown = ("log_sequence_ratio", "log_sequence_ratio_squared") if known.get("sequences") else ()
    return LogprobSums(**dict.fromkeys(unknown, math.nan) | known)


def steps_path(run: Path, arm: str, seed: int, rank: int) -> Path:
    """Where the steps of one arm and seed lie that one rank has counted."""
    return run / STEPS / f"arm={arm}" / f"seed={seed}" / f"rank-{rank}.jsonl"


def columns_for(question: StepQuestion) -> tuple[str, ...]:
    """Columns of rows that the counts are made of; `NOISE` and post where there are any."""
    optional = (column for each in question.rules.values() for column in each.columns)
    responses = RESPONSE if question.of_responses else ()
    return tuple(dict.fromkeys((*_SCALARS, NOISE, *optional, *responses)))


def judge_responses(columns: Mapping[str, NDArray[Any]], question: StepQuestion) -> Decisions:
    """Decide by the rules that judge whole responses.

    Parameters
    ----------
    columns : mapping of str to array, shape (token,)
        Those of `RESPONSE` and those that the rules need; all tokens of each response.
    question : StepQuestion
        Whose rules.

    Returns
    -------
    dict of str to array of bool, shape (token,)
        Which tokens each rule keeps, by its name.

    Raises
    ------
    CriterionError
        A column is missing, or the first token of a response, which another file or
        micro-batch must hold.
    """
    rules = question.of_responses
    if not rules:
        return {}
    needs = [name for each in rules for name in each.needs]
    for name in (*RESPONSE, *needs):
        if name not in columns:
            raise CriterionError(f"criterion {rules[0].name} needs the column `{name}`: record it")
    tokens, order = response_tokens(columns, needs)
    first = order[np.unique(np.asarray(tokens.sequence), return_index=True)[1]]
    if len(late := first[columns["position"][first] > 0]):
        raise CriterionError(
            f"criterion {rules[0].name} judges whole responses, and response "
            f"{columns['sequence'][late[0]]} of step {columns['step'][late[0]]} begins elsewhere"
        )
    region = {"threshold": question.threshold, "divergence": question.divergence}
    back = np.argsort(order)
    return {each.name: np.asarray(each.keeps(tokens, **region))[back] for each in rules}  # type: ignore[arg-type]


def count_steps(
    batch: Batch,
    metadata: Metadata,
    question: StepQuestion,
    *,
    arm: str,
    seed: int,
    rank: int = 0,
    judged: Decisions | None = None,
) -> Iterator[StepScalars]:
    """Count the rows of a batch, step by step.

    Parameters
    ----------
    batch : Batch
        Rows with those of `columns_for(question)` that there are, checked.
    metadata : Metadata
        Of their file.
    question : StepQuestion
        What to count.
    arm, seed, rank
        Where the rows are from.
    judged : dict of str to array of bool, shape (token,), optional
        What `judge_responses` gave for these rows, where a response may go on in another batch:
        nothing is counted by response then. By default the rows of a response must all be in the
        batch.

    Yields
    ------
    StepScalars
        One for each step in the batch, in order.

    Raises
    ------
    CriterionError
        A watched criterion needs a column that the batch lacks, the file stores too few tokens for
        the question's region, or the policy before the step was not read.
    """
    if "pre_logprob" not in batch.columns:
        raise CriterionError(
            f"{batch.path} is without the policy before the step, so that its steps cannot be "
            "counted: score its tokens and import them by `deltad import --pre`"
        )
    whole = metadata.stored_above is None and metadata.near is None
    _check_stored(batch, metadata, question)
    by_sequence = judged is None
    if judged is None:
        judged = judge_responses(batch.columns, question)
    for step in np.unique(batch["step"]).tolist():
        rows = batch["step"] == step
        part = batch if rows.all() else _some(batch, rows)
        empty = StepScalars(arm, seed, int(step), question, whole=whole, ranks=(rank,))
        mine = {name: keep[rows] for name, keep in judged.items()}
        yield _count(part, metadata, empty, mine, by_sequence)


def _check_stored(batch: Batch, metadata: Metadata, question: StepQuestion) -> None:
    """The rules by which rows and top-K log-probs were stored keep every token outside."""
    if metadata.stored_above is not None and (responses := question.of_responses):
        raise CriterionError(
            f"criterion {responses[0].name} judges whole responses, and {batch.path} stores only "
            "some of their tokens: record all"
        )
    if metadata.stored_pair is not None:
        raise CriterionError(
            f"{batch.path} stores only tokens on which two criteria disagree, which leaves out "
            "others outside the region: record all of these, or all tokens"
        )
    stored = {"stores only tokens": metadata.stored_above}
    if metadata.near is not None:
        near = metadata.near.divergence, metadata.near.threshold
        stored["keeps top-K log-probs only of tokens"] = near
    for what, region in stored.items():
        divergence, least = region or (question.divergence, 0.0)
        if divergence != question.divergence or question.threshold < least:
            raise CriterionError(
                f"{batch.path} {what} with {divergence} above {least:g}, which leaves out tokens "
                f"outside {question.divergence} {question.threshold:g}: ask for {divergence} and a "
                "larger threshold, or record all tokens"
            )


def _count(
    batch: Batch, metadata: Metadata, empty: StepScalars, judged: Decisions, by_sequence: bool
) -> StepScalars:
    """Counts of rows of one step."""
    question, stored = empty.question, batch.columns
    known = batch if batch.vectors.all() else _some(batch, batch.vectors)
    moved = "post_logprob" in stored and "topk_post_logprobs" in stored
    before = batch_tokens(known, metadata)
    d_pre = before.divergence(question.divergence)
    d_post = np.full(len(d_pre), np.nan)
    if moved:
        d_post = batch_tokens(known, metadata, post=True).divergence(question.divergence)
    delta_d, outside = d_post - d_pre, d_pre > question.threshold
    noise = known[NOISE].astype(np.float64) if NOISE in stored else None
    region = {"threshold": question.threshold, "divergence": question.divergence}
    keeps = {
        name: judged[name][batch.vectors]
        if name in judged
        else np.asarray(
            each.keeps(replace(before, columns={n: known[n] for n in each.needs}), **region)  # type: ignore[arg-type]
        )
        for name, each in question.rules.items()
    }
    counts = {
        "tokens": len(batch),
        "in_loss": int(np.count_nonzero(stored["in_loss"])),
        "with_topk": len(known),
        "without_topk": len(batch) - len(known),
    }
    if len(known):
        pair = (keeps[str(name)][outside] for name in (question.criterion, question.baseline))
        counts |= _counted(Judged.of(delta_d, noise), outside, *pair, moved=moved)
    extremes = {}
    if len(d_pre):
        extremes["d_pre_max"] = float(d_pre.max())
        if moved:
            extremes |= {
                "d_post_max": float(d_post.max()),
                "delta_d_abs_max": float(np.abs(delta_d).max()),
            }
    return replace(
        empty,
        counts=counts,
        masked={
            name: int((~keep).sum())
            for name, keep in keeps.items()
            if len(known) and (empty.whole or _masks_only_outside(question.rules[name]))
        },
        d_pre=LogHistogram.of(d_pre),
        d_post=LogHistogram.of(d_post),
        extremes=extremes,
        delta_d=(float(np.nansum(delta_d)), float(np.nansum(delta_d[outside]))),
        fit=_temperature_sums(known),
        logprobs=LogprobSums.of(
            stored["behavior_logprob"],
            stored["pre_logprob"],
            advantage=stored["advantage"],
            sequence=stored["sequence"] if by_sequence else None,
        ),
    )


def _counted(
    judged: Judged,
    outside: NDArray[np.bool_],
    criterion: NDArray[np.bool_],
    baseline: NDArray[np.bool_],
    *,
    moved: bool,
) -> dict[str, int]:
    """Counts of the tokens of known D; without ΔD only those that need none."""
    sets = count_pair(judged.some(outside), criterion, baseline)
    sets["all"] = count(judged, np.ones_like(outside))
    found = {}
    for name, of, up in (
        ("", "all", "increase"), ("outside_", "outside", "increase"),
        ("disagreement_", "disagreement", "increase"), ("criterion_", "criterion_kept", "unsafe"),
        ("baseline_", "baseline_kept", "unsafe"),
    ):  # fmt: skip
        numbers = dict(zip(FIELDS, sets[of].astype(int).tolist(), strict=True))
        if of != "all":
            found[of] = numbers["tokens"]
        if moved:
            found[name + up] = numbers["increase"]
            found |= {name + each: numbers[each] for each in ("determined", "undetermined")}
            if up == "unsafe":
                found[f"{name}contracting"] = numbers["decrease"]
    return found


def _masks_only_outside(found: Rule) -> bool:
    """Whether a criterion's region is the top-K divergence's, so that thinned rows suffice."""
    return found.is_mask and found.region in ("zero", "divergence")


def _ratio(above: float, below: float) -> float:
    """A quotient, NaN over nothing."""
    return above / below if below else math.nan


def _temperature_sums(batch: Batch) -> tuple[float, float]:
    """Σ x² and Σ x y of log-probs less their means over each token's top-K."""
    mu = batch["topk_behavior_logprobs"].astype(np.float64)
    pi = batch["topk_pre_logprobs"].astype(np.float64)
    used = (batch["topk_ids"] >= 0) & np.isfinite(mu)
    size = np.maximum(used.sum(axis=1), 1)[:, None]
    x, y = (np.where(used, values, 0.0) for values in (mu, pi))
    x, y = (np.where(used, v - v.sum(axis=1, keepdims=True) / size, 0.0) for v in (x, y))
    return float((x * x).sum()), float((x * y).sum())


def _some(batch: Batch, rows: NDArray[np.bool_]) -> Batch:
    """Some rows of a checked batch."""
    return replace(
        batch,
        columns={name: values[rows] for name, values in batch.columns.items()},
        vectors=batch.vectors[rows],
        nulls={},
    )
