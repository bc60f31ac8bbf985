"""Rules: which tokens lose their gradient, or how much of it they keep.

Every trust-region mask of the field is a *region* (is this token outside?) and a *push* (would
its gradient carry it further out?). A token is masked where both say yes:

    region(token) > threshold and Â · push(token) > 0

A soft weight w multiplies the importance-weighted gradient r Â ∇ log π_k of a token instead, and
keeps it where w > 0. Both are a `Rule`, and rules are data: the built-in ones are the entries of
`RULES`, anyone else's are found by `rule`. Region and push are names of `VALUES` or functions of
`Tokens`.

Here μ is the behavior policy, the one that sampled. Some methods were written for two policies of
the trainer and a third of the inference engine, and correct for the engine alone (π_old/μ); a
dump knows the policy of the step and μ, and the whole ratio is judged.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from deltad._array import Array, namespace
from deltad.divergence import DIVERGENCES, TAILS, Direction
from deltad.support import Support, binary_support

DEFAULT_THRESHOLD: Final = 0.15
"""δ of DPPO's and the paper's masks: nats for KL, a probability for TV."""

CLIP_LOW: Final = 0.2
"""GRPO clip-higher leaves r ≥ 1 − CLIP_LOW alone (DAPO, arXiv:2503.14476)."""

CLIP_HIGH: Final = 0.28
"""GRPO clip-higher leaves r ≤ 1 + CLIP_HIGH alone (DAPO, arXiv:2503.14476)."""

ENTRY_POINTS: Final = "deltad.rules"
"""Group of entry points by which an installed package offers rules."""


class CriterionError(ValueError):
    """A criterion that does not exist, does not fit the question or lacks a column."""


class RuleError(CriterionError):
    """A rule whose own function failed or gave what no rule may give.

    Attributes
    ----------
    rule : str
        Its name, with the file that it is from.
    reason : str
        What happened.
    row : int, optional
        The first token that it happened at, counted from 0 in the tokens given.
    """

    def __init__(self, rule: str, reason: str, row: int | None = None) -> None:
        super().__init__(f"rule {rule} {reason}" + ("" if row is None else f" at token {row}"))
        self.rule, self.reason, self.row = rule, reason, row

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by what the constructor takes, so that worker processes can raise it."""
        return RuleError, (self.rule, self.reason, self.row)


@dataclass(frozen=True)
class Tokens:
    """What rules look at: one batch of tokens; derived values are computed once.

    Attributes
    ----------
    advantage : Array, shape (token,)
        Â.
    behavior_logprob, policy_logprob : Array, shape (token,)
        log μ_k and log π_k in nats; what exceeds 0 by rounding counts as 0.
    support : Support, optional
        Both policies on S; without it only binary divergences and the ratio are known.
    collision : Array, shape (token,), optional
        Σ_j π_j² over the whole vocabulary, for the exact tail.
    full : mapping of name to (D, Ḋ), optional
        Divergence and direction over the whole vocabulary by divergence name, each of shape
        (token,), for the `full` criteria.
    sequence : Array of int, shape (token,), optional
        Number of the response that each token belongs to; whole responses must be here.
    columns : mapping of str to Array of shape (token,), optional
        Columns of the dump that a rule's `needs` names.
    known : dict of tuple to Array or Direction
        Values that need not be computed, as a dump's derived columns hold them: by ("topk",
        divergence), ("binary", divergence) and ("direction", divergence, tail).

    Examples
    --------
    >>> import numpy as np
    >>> tokens = Tokens(np.ones(1), np.log([0.2]), np.log([0.3]))
    >>> float(tokens.ratio[0].round(4)), float(tokens.ratio_direction[0].round(4))
    (1.5, 0.5)
    """

    advantage: Array
    behavior_logprob: Array
    policy_logprob: Array
    support: Support | None = None
    collision: Array | None = None
    full: Mapping[str, tuple[Array, Array]] = field(default_factory=dict)
    sequence: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)
    known: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, column: str) -> Array:
        """A column of the dump, shape (token,); LookupError where it was not read."""
        if column not in self.columns:
            raise LookupError(
                f"column `{column}` is not here: name it in the rule's `needs`, and record it"
            )
        return self.columns[column]

    @cached_property
    def log_ratio(self) -> Array:
        """Log r = log π_k − log μ_k in nats, each clamped to at most 0; shape (token,)."""
        xp = namespace(self.behavior_logprob)
        behavior, policy = (
            xp.where(each > 0, xp.zeros_like(each), each)
            for each in (self.behavior_logprob, self.policy_logprob)
        )
        return policy - behavior

    @cached_property
    def ratio_direction(self) -> Array:
        """PPO's direction r − 1, in [−1, ∞], whose sign is that of the binary divergences.

        Shape (token,); ∞ where r overflows, and exactly 0 only where both log-probs are equal.
        """
        with np.errstate(over="ignore"):
            return namespace(self.log_ratio).expm1(self.log_ratio)

    @cached_property
    def ratio(self) -> Array:
        """Importance ratio r = π_k/μ_k in [0, ∞], shape (token,)."""
        with np.errstate(over="ignore"):
            return namespace(self.log_ratio).exp(self.log_ratio)

    @cached_property
    def sequence_log_ratio(self) -> Array:
        """Σ log r over the response that a token belongs to, in nats; shape (token,)."""
        return self.sum_by_sequence(self.log_ratio)

    def sum_by_sequence(self, values: Array) -> Array:
        """Σ of some values over the response that each token belongs to, shape (token,)."""
        if self.sequence is None:
            raise CriterionError("these tokens do not say which response they belong to")
        xp = namespace(values)
        _, place = xp.unique_inverse(self.sequence)
        total = xp.bincount(place, weights=values)
        return xp.astype(total, values.dtype)[place]

    def divergence(self, name: str) -> Array:
        """D on the top-K support, shape (token,)."""
        return self._once(("topk", name), lambda: DIVERGENCES[name].value(self._topk()))

    def binary_divergence(self, name: str) -> Array:
        """D on the support {k, rest}, shape (token,)."""
        return self._once(("binary", name), lambda: DIVERGENCES[name].value(self._binary))

    def full_divergence(self, name: str) -> Array:
        """D over the whole vocabulary, shape (token,)."""
        return self._whole(name)[0]

    def direction(self, name: str, tail: str) -> Direction:
        """Ḋ on the top-K support with its two terms, each of shape (token,)."""
        key = ("direction", name, tail)
        if tail == "exact" and self.collision is None and key not in self.known:
            raise CriterionError(
                "the exact tail needs the column `pre_collision`, which is missing: "
                "record it, or ask for another tail"
            )
        collision = self.collision if tail == "exact" else None
        compute = DIVERGENCES[name].direction
        found: Direction = self._once(
            key, lambda: compute(self._topk(), tail=tail, collision=collision)
        )
        return found

    def push(self, name: str, tail: str) -> Array:
        """Ḋ on the top-K support, shape (token,)."""
        return self.direction(name, tail).total

    def full_direction(self, name: str) -> Array:
        """Ḋ over the whole vocabulary, shape (token,)."""
        return self._whole(name)[1]

    @cached_property
    def _binary(self) -> Support:
        """The support {k, rest}, from the entry in the top-K where there is one."""
        if self.support is None:
            return binary_support(self.behavior_logprob, self.policy_logprob)
        support = self.support
        return binary_support(support.log_mu_sampled, support.log_pi_sampled, check=False)

    def _topk(self) -> Support:
        """The top-K support, or an error that says it is missing."""
        if self.support is None:
            raise CriterionError("these tokens have no top-K log-probs, which this needs")
        return self.support

    def _whole(self, name: str) -> tuple[Array, Array]:
        """D and Ḋ over the whole vocabulary, or an error that says which columns are missing."""
        if name not in self.full:
            raise CriterionError(
                f"the whole vocabulary's divergence needs the columns `full_{name}_pre` and "
                f"`full_{name}_direction`, which are missing: record them, or ask for another tail"
            )
        return self.full[name]

    def _once(self, key: tuple[str, ...], compute: Callable[[], Any]) -> Any:
        """Value of `compute()`, kept for the next question about the same tokens."""
        if key not in self.known:
            self.known[key] = compute()
        return self.known[key]


@dataclass(frozen=True)
class Value:
    """A number of every token that rules name as their region or push.

    Attributes
    ----------
    meaning : str
        In words.
    of : callable of (Tokens, divergence) to Array, shape (token,)
        The number, given the divergence of the question's region.
    columns : tuple of str
        Optional columns of a dump that it needs.
    home : str
        The divergence that it is of; empty where it is of none, or of the question's.
    family : str, optional
        The same where no other region makes sense; None where any will do.
    recorded : str
        The derived column that holds it; empty for none.
    scalar : bool
        Whether it needs no top-K log-probs.
    entry : bool
        Whether it needs of these only the sampled token's own entry.
    counts_ids : bool
        Whether it needs the size of the vocabulary.
    """

    meaning: str
    of: Callable[[Tokens, str], Array]
    home: str = ""
    columns: tuple[str, ...] = ()
    family: str | None = None
    recorded: str = ""
    scalar: bool = False
    entry: bool = False
    counts_ids: bool = False


def _of(method: str, *given: str) -> Callable[[Tokens, str], Array]:
    """What a method of `Tokens` gives, whatever the region's divergence."""
    return lambda tokens, _: getattr(tokens, method)(*given)


def _values() -> dict[str, Value]:
    """The values that need no divergence of their own, then those of each divergence."""
    found = {
        "divergence": Value("top-K divergence", Tokens.divergence, recorded="d_pre"),
        "ratio": Value("r − 1", lambda tokens, _: tokens.ratio_direction, scalar=True),
        "zero": Value("0", lambda tokens, _: tokens.log_ratio * 0, scalar=True),
    }
    for name in DIVERGENCES:
        title, whole = name.upper(), (f"full_{name}_pre", f"full_{name}_direction")
        found[f"binary-{name}"] = Value(
            f"binary {title}", _of("binary_divergence", name), name, entry=True
        )
        for key, meaning, method in (
            (f"full-{name}", f"{title} over the vocabulary", "full_divergence"),
            (f"{name}-full", f"Ḋ of the {title} over the vocabulary", "full_direction"),
        ):
            found[key] = Value(meaning, _of(method, name), name, whole, name, scalar=True)
        for tail in TAILS:
            found[f"{name}-{tail}"] = Value(
                f"Ḋ of the top-K {title}, {tail} tail",
                _of("push", name, tail),
                name,
                ("pre_collision",) if tail == "exact" else (),
                name,
                f"d_dot_{tail}",
                counts_ids=tail != "aggregated",
            )
    return found


VALUES: Final[Mapping[str, Value]] = MappingProxyType(_values())
"""Every value that a rule's `region` or `push` may name."""


@dataclass(frozen=True, eq=False)
class Rule:
    """A criterion, mask or soft weight, as one object.

    Attributes
    ----------
    name : str
        As tables and dumps name it; letters, digits, `.`, `_` and `-`.
    region : str or callable of Tokens to Array, shape (token,)
        A name of `VALUES`, or a function; a token is outside where it exceeds the threshold.
    push : str or callable of Tokens to Array, shape (token,)
        Likewise; Â times it positive means further out.
    weight : callable of Tokens to Array, shape (token,), optional
        A soft weight w in place of region and push; it keeps a token where w > 0.
    needs : tuple of str
        Columns of a dump that its functions look at, as `tokens[name]`.
    scope : {"token", "sequence"}
        "sequence" where it looks at whole responses (`Tokens.sequence`).
    source : str
        Where in the literature it comes from.
    keep : callable of (Tokens, threshold, divergence) to Array of bool, optional
        Decides in place of region and push: True where the gradient passes.
    threshold : float, optional
        A fixed threshold in place of the question's.
    parameters : mapping of str to float
        Keyword arguments of its functions, with their defaults.
    formula : str
        In words and symbols; made from region and push where empty.
    divergence : {"kl", "tv"}, optional
        Of the region, where the question names none; by default that of region and push, else KL.
    origin : str
        The file that it was loaded from.

    Raises
    ------
    CriterionError
        A name, value or scope that does not exist.

    Examples
    --------
    A mask on tokens whose ratio left [0.5, 2], wherever their gradient points away from 1:

    >>> import numpy as np
    >>> far = Rule("far", region=lambda tokens: abs(tokens.log_ratio), push="ratio",
    ...            threshold=float(np.log(2)))
    >>> tokens = Tokens(np.ones(3), np.log([0.2, 0.2, 0.5]), np.log([0.5, 0.3, 0.1]))
    >>> far.keeps(tokens).tolist()
    [False, True, True]
    """

    name: str
    region: str | Callable[..., Array] = "divergence"
    push: str | Callable[..., Array] = "ratio"
    weight: Callable[..., Array] | None = None
    needs: tuple[str, ...] = ()
    scope: str = "token"
    source: str = ""
    keep: Callable[..., Array] | None = None
    threshold: float | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    formula: str = ""
    divergence: str = ""
    origin: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z][\w.-]*", self.name):
            raise CriterionError(
                "the name of a rule must be letters, digits, `.`, `_` and `-`, beginning with a "
                f"letter, got {self.name!r}"
            )
        for what in ("region", "push"):
            value = getattr(self, what)
            if not callable(value) and value not in VALUES:
                raise CriterionError(
                    f"`{what}` of rule {self.name} is {value!r}, but must be a function of Tokens "
                    f"or one of {', '.join(VALUES)}"
                )
        if self.scope not in ("token", "sequence"):
            raise CriterionError(
                f"`scope` of rule {self.name} must be 'token' or 'sequence', got {self.scope!r}"
            )
        homes = (VALUES[each].home for each in self.named)
        home = self.divergence or next((each for each in homes if each), "kl")
        if home not in DIVERGENCES:
            raise CriterionError(
                f"`divergence` of rule {self.name} must be one of {', '.join(DIVERGENCES)}, got "
                f"{home!r}"
            )
        object.__setattr__(self, "divergence", home)
        needs: Any = self.needs
        if isinstance(needs, str) or not all(isinstance(each, str) for each in needs):
            raise CriterionError(
                f"`needs` of rule {self.name} must be a tuple of column names, got {needs!r}"
            )
        object.__setattr__(self, "needs", tuple(needs))

    def __reduce__(self) -> Any:
        """Pickle a built-in rule by its name: its functions have none of their own."""
        return (rule, (self.name,)) if RULES.get(self.name) is self else super().__reduce__()

    @property
    def is_mask(self) -> bool:
        """Whether region and push decide, not a weight or a function of its own."""
        return self.weight is None and self.keep is None

    @property
    def opaque(self) -> bool:
        """Whether a function of a user's decides, which may look at anything."""
        functions = (self.region, self.push, self.weight, self.keep)
        return any(map(callable, functions)) and RULES.get(self.name) is not self

    @property
    def named(self) -> tuple[str, ...]:
        """The names of `VALUES` that decide."""
        used = (self.region, self.push) if self.is_mask else ()
        return tuple(each for each in used if isinstance(each, str))

    @property
    def columns(self) -> tuple[str, ...]:
        """Optional columns of a dump that it needs."""
        values = (column for each in self.named for column in VALUES[each].columns)
        return tuple(dict.fromkeys((*values, *self.needs)))

    @property
    def family(self) -> str | None:
        """The divergence whose derivative it predicts; None where any region will do."""
        return next((f for each in self.named if (f := VALUES[each].family) is not None), None)

    @property
    def reads_threshold(self) -> bool:
        """Whether the question's threshold matters to it."""
        masks = self.is_mask and self.threshold is None and self.region != "zero"
        return masks or self.keep is not None

    @property
    def reads_divergence(self) -> bool:
        """Whether the divergence of the question's region matters to it."""
        return self.keep is not None or (self.is_mask and self.region == "divergence")

    @property
    def words(self) -> str:
        """Its formula, in words and symbols."""
        if self.formula or not self.is_mask:
            return self.formula or "its own function"
        region, push = (_meaning(each) for each in (self.region, self.push))
        limit = "δ" if self.threshold is None else f"{self.threshold:g}"
        return f"0 where {region} > {limit} and Â · ({push}) > 0, else 1"

    def with_parameters(self, parameters: Mapping[str, float]) -> Rule:
        """The same rule with other parameters.

        Raises
        ------
        CriterionError
            A parameter that it does not have.
        """
        unknown = sorted(parameters.keys() - self.parameters.keys())
        if unknown:
            takes = ", ".join(self.parameters) or "none"
            raise CriterionError(
                f"criterion {self.name} has no parameter {', '.join(unknown)}; its own: {takes}"
            )
        return replace(self, parameters={**self.parameters, **parameters}) if parameters else self

    def check_family(self, divergence: str) -> None:
        """Refuse a divergence that this rule's prediction is not the derivative of.

        Raises
        ------
        CriterionError
            `divergence` is unknown, or of another family than the prediction.
        """
        if divergence not in DIVERGENCES:
            raise CriterionError(
                f"`divergence` must be one of {', '.join(DIVERGENCES)}, got {divergence!r}"
            )
        if self.family not in (None, divergence):
            other = self.name.replace(f"-{self.family}-", f"-{divergence}-")
            instead = f" or for {other}" if other in RULES and other != self.name else ""
            raise CriterionError(
                f"criterion {self.name} predicts the {str(self.family).upper()} divergence and "
                f"cannot judge a {divergence.upper()} region: ask for {self.family}{instead}"
            )

    def regions(self, tokens: Tokens, divergence: str = "kl", *, check: bool = True) -> Array:
        """What must exceed the threshold for a token to be outside, shape (token,)."""
        return self._value(self.region, "region", tokens, divergence, check)

    def pushes(self, tokens: Tokens, divergence: str = "kl", *, check: bool = True) -> Array:
        """What Â times is positive where the gradient carries a token on, shape (token,)."""
        return self._value(self.push, "push", tokens, divergence, check)

    def weigh(
        self,
        tokens: Tokens,
        *,
        threshold: float = DEFAULT_THRESHOLD,
        divergence: str = "kl",
        check: bool = True,
    ) -> Array:
        """Weigh every token: a soft weight's w; of any other rule 1 where it keeps, else 0.

        Parameters
        ----------
        tokens, threshold, divergence, check
            As in `keeps`.

        Returns
        -------
        Array, shape (token,)
            In the dtype of the log-probs.

        Raises
        ------
        CriterionError
            As `keeps`.

        Examples
        --------
        >>> import numpy as np
        >>> tokens = Tokens(np.ones(2), np.log([0.1, 0.1]), np.log([0.8, 0.1]))
        >>> rule("tis").with_parameters({"cap": 4.0}).weigh(tokens).round(12).tolist()
        [0.5, 1.0]
        """
        if self.weight is None:
            kept = self.keeps(tokens, threshold=threshold, divergence=divergence, check=check)
            return namespace(kept).astype(kept, tokens.behavior_logprob.dtype)
        self._check_question(tokens, threshold, divergence)
        return self._call(self.weight, "weight", tokens, check)

    def keeps(
        self,
        tokens: Tokens,
        *,
        threshold: float = DEFAULT_THRESHOLD,
        divergence: str = "kl",
        check: bool = True,
    ) -> Array:
        """Decide which tokens' gradients pass.

        Parameters
        ----------
        tokens : Tokens
            One batch.
        threshold : float
            δ ≥ 0: nats for KL, a probability for TV.
        divergence : {"kl", "tv"}
            The region's divergence.
        check : bool
            Refuse NaN and wrong shapes of a rule's own functions; False spares waiting for a
            device.

        Returns
        -------
        Array of bool, shape (token,)
            False where the token is outside the region and Â times the push is positive, both
            strictly; for a soft weight True where w > 0.

        Raises
        ------
        CriterionError
            The threshold is negative or not finite, the divergence does not fit, or a needed
            column is missing.
        RuleError
            A function of the rule raised, or gave NaN or another shape.

        Examples
        --------
        μ_k = 0.5 fell to π_k = 0.25, and a negative advantage would push it on:

        >>> import numpy as np
        >>> tokens = Tokens(np.asarray([1.0, -1.0]), np.log([0.5, 0.5]), np.log([0.25, 0.25]))
        >>> rule("binary-kl").keeps(tokens, threshold=0.1).tolist()
        [True, False]
        """
        if self.weight is not None:
            weight = self.weigh(tokens, threshold=threshold, divergence=divergence, check=check)
            return weight > 0
        self._check_question(tokens, threshold, divergence)
        if self.keep is not None:
            return self._call(self.keep, "keep", tokens, check, threshold, divergence)
        with np.errstate(invalid="ignore"):  # 0 · ∞ is no push: NaN > 0 is False
            further = tokens.advantage * self.pushes(tokens, divergence, check=check) > 0
        limit = threshold if self.threshold is None else self.threshold
        return ~((self.regions(tokens, divergence, check=check) > limit) & further)

    def _check_question(self, tokens: Tokens, threshold: float, divergence: str) -> None:
        """Refuse a region that makes no sense, and tokens that are no whole responses."""
        self.check_family(divergence)
        if not 0 <= threshold < math.inf:
            raise CriterionError(f"`threshold` must be finite and not negative, got {threshold!r}")
        if self.scope == "sequence" and tokens.sequence is None:
            raise CriterionError(
                f"criterion {self.name} judges whole responses, and these tokens do not say which "
                "response they belong to"
            )

    def _value(self, value: Any, what: str, tokens: Tokens, divergence: str, check: bool) -> Array:
        """A named value, or what a function of the rule gives."""
        if isinstance(value, str):
            return VALUES[value].of(tokens, divergence)
        return self._call(value, what, tokens, check)

    def _call(
        self, function: Callable[..., Array], what: str, tokens: Tokens, check: bool, *given: Any
    ) -> Array:
        """Call a function of the rule, and refuse what it must not give."""
        name = f"{self.name} ({self.origin})" if self.origin else self.name
        try:
            with np.errstate(over="ignore"):
                found = function(tokens, *given, **self.parameters)
        except CriterionError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise RuleError(name, f"raised {type(error).__name__}: {said}") from error
        wanted = tuple(tokens.advantage.shape)
        if not hasattr(found, "dtype") or tuple(found.shape) != wanted:
            shape = tuple(getattr(found, "shape", ())) if hasattr(found, "dtype") else type(found)
            raise RuleError(name, f"must give `{what}` of shape {wanted}, gave {shape}")
        xp = namespace(found)
        if what == "keep":
            if found.dtype != xp.bool:
                raise RuleError(name, f"must give `keep` as bool, gave {found.dtype}")
        elif found.dtype == xp.bool:
            found = xp.astype(found, tokens.behavior_logprob.dtype)
        elif check and bool(xp.any(nan := xp.isnan(found))):
            row = int(xp.argmax(xp.astype(nan, xp.int8)))
            raise RuleError(name, f"gave NaN as `{what}`", row)
        return found


def _meaning(value: str | Callable[..., Array]) -> str:
    """A named value in words; a function's first line, or its name."""
    if isinstance(value, str):
        return VALUES[value].meaning
    said = (value.__doc__ or "").strip().splitlines()
    return said[0].rstrip(".") if said else getattr(value, "__name__", "a function")


def largest_ratio(dtype: Any) -> float:
    """The ratio that soft weights take a larger one for, so that w r stays what it says."""
    return math.exp(700 if "64" in str(dtype) else 80)


def _exp(log: Array) -> Array:
    """The exponential, kept between the largest ratio and its inverse."""
    bound = math.log(largest_ratio(log.dtype))
    return namespace(log).exp(namespace(log).clip(log, -bound, bound))


def _positive(name: str, value: float) -> float:
    """A parameter that must be a positive number."""
    if not 0 < value < math.inf:
        raise CriterionError(f"`{name}` must be positive and finite, got {value!r}")
    return value


def _clip(tokens: Tokens, low: float, high: float) -> Array:
    """How far r lies out of [1 − low, 1 + high]."""
    if not (0 <= low <= 1 and high >= 0):
        raise CriterionError(
            f"`low` must lie in [0, 1] and `high` must not be negative, got {low} and {high}"
        )
    return namespace(tokens.ratio).maximum(tokens.ratio - (1 + high), (1 - low) - tokens.ratio)


def _cap(tokens: Tokens, cap: float) -> Array:
    """min(r, cap)/r; positive even where r overflows, so that every token is kept."""
    log_cap = math.log(_positive("cap", cap))
    xp = namespace(tokens.log_ratio)
    one = xp.ones_like(tokens.log_ratio)
    ratio = _exp(tokens.log_ratio)
    return xp.where(tokens.log_ratio > log_cap, cap / ratio, one)


def _band(tokens: Tokens, low: float, high: float) -> Array:
    """1 where low ≤ r ≤ high, else 0."""
    if not 0 <= low <= 1 <= high < math.inf:
        raise CriterionError(
            f"`low` and `high` must bound a band around r = 1, got [{low!r}, {high!r}]"
        )
    inside = (tokens.ratio >= low) & (tokens.ratio <= high)
    return namespace(inside).astype(inside, tokens.log_ratio.dtype)


def _drpo(tokens: Tokens, delta: float) -> Array:
    """1 − sign(Â) (π_k − μ_k)/δ."""
    xp = namespace(tokens.advantage)
    policy, behavior = (
        xp.exp(xp.where(each > 0, xp.zeros_like(each), each))
        for each in (tokens.policy_logprob, tokens.behavior_logprob)
    )
    return 1 - xp.sign(tokens.advantage) * (policy - behavior) / _positive("delta", delta)


def _sequence(tokens: Tokens, cap: float, *, mask: bool) -> Array:
    """R/r with R = Π r over the response: 0 beyond the cap, or R capped there."""
    log_cap = math.log(_positive("cap", cap))
    total = tokens.sequence_log_ratio
    xp = namespace(total)
    beyond = total > log_cap
    capped = xp.where(beyond, xp.full_like(total, log_cap), total)
    weight = _exp(capped - tokens.log_ratio)
    return xp.where(beyond, xp.zeros_like(weight), weight) if mask else weight


def _soft(name: str, formula: str, weight: Callable[..., Array], source: str, **given: Any) -> Rule:
    """A soft weight with its parameters."""
    more = {key: given.pop(key) for key in ("scope", "divergence") if key in given}
    return Rule(
        name, weight=weight, formula=formula, source=source,
        parameters=MappingProxyType(given), **more,
    )  # fmt: skip


NONE: Final = Rule("none", "zero", source="the unmasked policy gradient", formula="1")
"""Keeps every token; the unmasked update that other arms are compared with."""

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        each.name: each
        for each in (
            NONE,
            Rule("ratio", source="DPPO-TopK-KL/TV (TRL, verl)"),
            *(
                Rule(
                    f"predictive-{family}-{tail}",
                    f"full-{family}" if tail == "full" else "divergence",
                    f"{family}-{tail}",
                    source="deltad; see deltad.divergence" if tail == "exact"
                    else "arXiv:2607.10848v1",
                )
                for family in DIVERGENCES
                for tail in (*TAILS, "full")
            ),
            *(
                Rule(
                    f"binary-{family}",
                    f"binary-{family}",
                    source=f"DPPO-Binary-{family.upper()} (TRL, verl)",
                )
                for family in DIVERGENCES
            ),
            Rule(
                "clip-higher",
                _clip,
                threshold=0.0,
                parameters=MappingProxyType({"low": CLIP_LOW, "high": CLIP_HIGH}),
                formula=f"0 where (r > {1 + CLIP_HIGH:g} or r < {1 - CLIP_LOW:g}) and "
                "Â · (r − 1) > 0, else 1",
                source="GRPO clip-higher, DAPO (arXiv:2503.14476)",
            ),
            _soft(
                "icepop", "1 where α ≤ r ≤ β, else 0", _band,
                "IcePop: Ring-1T (arXiv:2510.18855), INTELLECT-3 (arXiv:2512.16144, Eq. 1); α, β "
                "as commonly set, read in neither report; slime and miles take β = 2",
                low=0.5, high=5.0,
            ),
            _soft(
                "mis", "1 where r ≤ C, else 0",
                lambda tokens, cap: _band(tokens, low=0.0, high=cap),
                "masked importance sampling per token, TRL's `token_mask`; C as in TRL's "
                "documentation",
                cap=2.0,
            ),
            _soft(
                "tis", "min(r, C)/r", _cap,
                "truncated importance sampling per token (Yao et al. 2025), TRL's "
                "`token_truncate`, verl's `rollout_is: token`, whose default C is",
                cap=2.0,
            ),
            _soft(
                "cispo", "min(r, ε_max)/r", _cap,
                "CISPO: MiniMax-M1 (arXiv:2506.13585, Eq. 4 and 5, without a lower bound), ε_max "
                "of ScaleRL (arXiv:2510.13786)",
                cap=5.0,
            ),
            _soft(
                "sequence_mask", "R/r where R = Π r of the response is at most C, else 0",
                lambda tokens, cap: _sequence(tokens, cap, mask=True),
                "TRL 1.16's `sequence_mask` and its default C, taken for the whole ratio",
                cap=3.0, scope="sequence",
            ),
            _soft(
                "sequence_truncate", "min(R, C)/r with R = Π r of the response",
                lambda tokens, cap: _sequence(tokens, cap, mask=False),
                "TRL 1.16's `sequence_truncate` and its default C, taken for the whole ratio",
                cap=3.0, scope="sequence",
            ),
            _soft(
                "drpo", "1 − sign(Â (r − 1)) |π_k − μ_k|/δ", _drpo,
                "DRPO (arXiv:2606.09821): the derivative of r Â − (|Â|/2δ) μ_k (r − 1)² over r Â, "
                "checked against two descriptions of the paper, which could not be read; δ of "
                "DPPO's binary TV mask, whose region it shares",
                delta=DEFAULT_THRESHOLD, divergence="tv",
            ),
        )
    }
)  # fmt: skip
"""Every built-in rule by name: `none`, the criteria that mask, then the soft weights."""

CRITERIA: Final[Mapping[str, Rule]] = MappingProxyType(
    {name: each for name, each in RULES.items() if each.is_mask and each is not NONE}
)
"""Those of them that mask."""


def distinct(found: Iterable[Rule]) -> dict[str, Rule]:
    """Rules by name, each once; two different ones of one name are a CriterionError."""
    rules: dict[str, Rule] = {}
    for each in found:
        known = rules.setdefault(each.name, each)
        if known is not each and not (each.origin and each.origin == known.origin):
            raise CriterionError(f"two different rules are named {each.name}: rename one")
    return rules


def rule(asked: str | Rule) -> Rule:
    """Find a rule.

    Parameters
    ----------
    asked : str or Rule
        A name of `RULES`, `FILE.py:NAME` for a rule that a file defines, the name of an entry
        point of the group `deltad.rules`, or a rule itself.

    Returns
    -------
    Rule
        Of a file: loaded once, and anew when the file changes.

    Raises
    ------
    CriterionError
        There is no such rule, or loading it failed.

    Examples
    --------
    >>> rule("ratio").words
    '0 where top-K divergence > δ and Â · (r − 1) > 0, else 1'
    """
    if isinstance(asked, Rule):
        return asked
    if not isinstance(asked, str):
        raise CriterionError(f"a criterion must be a name or a Rule, got {asked!r}")
    if asked in RULES:
        return RULES[asked]
    path, colon, name = asked.rpartition(":")
    if colon and path.endswith(".py"):
        file = Path(path)
        if not file.is_file():
            raise CriterionError(f"there is no file {path}, in which rule {name!r} should be")
        return _of_module(path, _module(file.resolve(), file.stat().st_mtime_ns), name)
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS, name=asked):
        try:
            found = entry.load()
        except Exception as error:
            raise CriterionError(f"rule {asked} cannot be loaded: {_said(error)}") from error
        if not isinstance(found, Rule):
            raise CriterionError(f"rule {asked} must be a deltad.Rule, {entry.value} is not")
        return replace(found, origin=entry.value)
    from difflib import get_close_matches  # slow to import, as the others here

    near = get_close_matches(asked, RULES, 1)
    raise CriterionError(
        f"there is no criterion {asked!r}"
        + (f", did you mean {near[0]}?" if near else ";")
        + f" Choose one of {', '.join(RULES)}, or name your own as FILE.py:NAME"
    )


def _of_module(path: str, module: Any, name: str) -> Rule:
    """A rule of a loaded file."""
    found = getattr(module, name, None)
    if not isinstance(found, Rule):
        named = [key for key, value in vars(module).items() if isinstance(value, Rule)]
        raise CriterionError(
            f"{path} has no rule {name!r}; " + (f"its rules are {', '.join(named)}" if named
            else "define one as `NAME = deltad.Rule(…)`")
        )  # fmt: skip
    return replace(found, origin=path)


@lru_cache(maxsize=32)
def _module(path: Path, changed: int) -> Any:
    """Load a file as a module; anew when it has changed."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = f"deltad_rules_{path.stem}_{abs(hash((str(path), changed))):x}"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # the path ends in `.py`
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise CriterionError(f"{path} cannot be loaded: {_said(error)}") from error
    return module


def _said(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
