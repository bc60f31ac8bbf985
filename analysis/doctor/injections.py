"""Faults that can be put into a clean dump on purpose, each with the cause that the doctor owes.

`INJECTIONS` is data: a fault's name, the cause, strengths that occur in practice. `CONTROLS`
are changes that leave a dump sound, at which the doctor must keep quiet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from deltad.divergence import DIVERGENCES
from deltad.dumps import KEY, Batch, Metadata, batch_support, batch_tokens
from deltad.masks import CRITERIA, CriterionError

from . import broken_policies as faults
from . import broken_values as fills
from . import sound_changes as controls
from .broken_policies import NothingToBreakError
from .slots import Columns

__all__ = ["CONTROLS", "INJECTIONS", "Injection", "NothingToBreakError"]

Change = Callable[[Columns, Metadata, float, Generator], Metadata]


@dataclass(frozen=True)
class Injection:
    """A fault, or a harmless change, that can be put into the rows of one arm and seed.

    Attributes
    ----------
    name : str
        Unique among faults and controls.
    cause : str or None
        What the doctor should call it; None for a change that leaves the dump sound.
    strengths : tuple of float
        Sizes that occur in practice.
    unit : str
        What a strength is.
    change : callable
        Replaces columns, whose rows are in order, and returns the metadata.
    also : tuple of str
        Other causes that are right too.
    estimate : bool
        Whether the strength is what the doctor's estimate should be.
    decides : bool
        Whether the mask was applied on the changed numbers, so that `in_loss` follows.
    thin : bool
        Whether a thinned dump can keep its rule: the rows that lie below it now are dropped.
        Otherwise most would go, and the dump is marked as storing all its rows.
    """

    name: str
    cause: str | None
    strengths: tuple[float, ...]
    unit: str
    change: Change
    also: tuple[str, ...] = ()
    estimate: bool = False
    decides: bool = True
    thin: bool = True

    @property
    def accepted(self) -> frozenset[str]:
        """Causes that are right; none for a sound dump."""
        return frozenset([self.cause, *self.also] if self.cause else self.also)

    @property
    def summary(self) -> str:
        """What goes wrong, in a sentence."""
        return (self.change.__doc__ or "").partition("\n")[0]

    def apply(
        self,
        columns: Mapping[str, NDArray[Any]],
        metadata: Metadata,
        strength: float,
        rng: Generator,
    ) -> tuple[Columns, Metadata]:
        """Put the fault into rows.

        Parameters
        ----------
        columns : mapping of str to array
            All rows of one arm and seed, whose values obey the contract; not changed. A row
            whose vectors are NULL holds −1 for its ids.
        metadata : Metadata
            Of their file.
        strength : float
            Its size, in its unit.
        rng : Generator
            The same state gives the same fault, in every arm alike.

        Returns
        -------
        columns : dict of str to array
            Rows in the order of step, sequence and position. Columns over the whole vocabulary
            (`full_*`) are left out, since nobody knows what they would hold.
        metadata : Metadata
            `rows_seen` and `stored` agree with the rows.

        Raises
        ------
        NothingToBreakError
            The rows do not hold what the fault would change.
        """
        order = np.lexsort(tuple(columns[name] for name in reversed(KEY)))
        changed = {
            name: values[order]
            for name, values in columns.items()
            if not (self.decides and name.startswith("full_"))
        }
        with np.errstate(all="ignore"):  # placeholders are no numbers to reckon with
            metadata = self.change(changed, metadata, strength, rng)
            if self.decides:
                changed["in_loss"] = _decided(changed, metadata)
            return _stored(changed, metadata, keeps_rule=self.thin)


def _batch(columns: Columns) -> Batch:
    """Columns as the mathematics takes them."""
    return Batch("", 0, columns, np.asarray((columns["topk_ids"] >= 0).any(axis=1)))


def _decided(columns: Columns, metadata: Metadata) -> NDArray[np.bool_]:
    """`in_loss` as the applied mask decides it now; as it was where that cannot be known."""
    in_loss = columns["in_loss"].copy()
    update, batch = metadata.update, _batch(columns)
    criterion = CRITERIA.get(str(update.get("mask")))
    if criterion is None or not batch.vectors.any():
        return np.asarray(in_loss)
    with contextlib.suppress(CriterionError):  # it looks at a column that is not there
        in_loss[batch.vectors] = criterion.keep(
            batch_tokens(batch, metadata),
            threshold=float(update.get("threshold", 0.0)),
            divergence=str(update.get("divergence", "kl")),
        )
    return np.asarray(in_loss)


def _stored(columns: Columns, metadata: Metadata, *, keeps_rule: bool) -> tuple[Columns, Metadata]:
    """Rows and metadata that agree on what was stored."""
    rows = len(columns["token_id"])
    if metadata.stored_above is None or not keeps_rule:
        return columns, dataclasses.replace(metadata, stored={"rule": "all"}, rows_seen=rows)
    family, threshold = metadata.stored_above
    batch = _batch(columns)
    above = np.ones(rows, bool)
    # A placeholder may leave no number; such a row stays, for it is the evidence.
    above[batch.vectors] = ~(DIVERGENCES[family](batch_support(batch, metadata)) <= threshold)
    return {name: values[above] for name, values in columns.items()}, metadata


_SHARES: Final = (0.005, 0.05, 0.5, 1.0)
_NAN, _INFINITE = float("nan"), float("-inf")

_FAULTS: Final = (
    Injection(
        "temperature-behavior", "temperature", (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0),
        "τ of the policy relative to μ", faults.behavior_temperature, estimate=True,
    ),
    Injection(
        "temperature-policy", "temperature", (0.36, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0),
        "τ of the policy relative to μ", faults.policy_temperature, estimate=True,
    ),
    Injection("top-p", "truncation", (0.7, 0.8, 0.9, 0.95, 0.99), "p", faults.top_p),
    Injection("top-p-absent", "truncation", (0.8, 0.9, 0.95), "p", faults.top_p_absent),
    Injection("top-p-raw", "truncation", (0.7, 0.8, 0.9), "p", faults.top_p_raw),
    Injection("top-k", "truncation", (2.0, 3.0, 5.0, 10.0, 20.0), "k", faults.top_k),
    Injection("min-p", "truncation", (0.02, 0.05, 0.1, 0.2), "share", faults.min_p),
    Injection("policy-on-support", "truncation", (1.0,), "", faults.policy_on_support),
    Injection(
        "shift", "shift", (1.0, -1.0, 2.0, -2.0), "d tokens", faults.shift, estimate=True
    ),
    Injection("shift-start", "shift", (-1.0, 1.0, -2.0), "d tokens", faults.shift_start),
    Injection(
        "zero-scalar", "sentinel", _SHARES, "share of rows", fills.fill_scalar(0.0, "behavior")
    ),
    Injection("zero-row", "sentinel", _SHARES, "share of rows", fills.fill_row(0.0, "behavior")),
    Injection("one-scalar", "sentinel", _SHARES, "share of rows", fills.fill_scalar(1.0, "behavior")),
    Injection(
        "zero-policy", "sentinel", _SHARES, "share of rows", fills.fill_scalar(0.0, "pre", "post")
    ),
    Injection(
        "minus-100-scalar", "sentinel", _SHARES, "share of rows",
        fills.fill_scalar(-100.0, "behavior"),
    ),
    Injection(
        "minus-9999-row", "sentinel", _SHARES, "share of rows", fills.fill_row(-9999.0, "behavior")
    ),
    Injection(
        "minus-9999-rest", "sentinel", _SHARES, "share of rows", fills.fill_rest(-9999.0)
    ),
    Injection("minus-9999-unlikely", "sentinel", (0.05, 0.3, 0.6), "share of entries",
              fills.fill_unlikely(-9999.0)),
    Injection("zero-rest", "sentinel", _SHARES, "share of rows", fills.fill_rest(0.0)),
    Injection(
        "minus-1e30-scalar", "sentinel", _SHARES, "share of rows",
        fills.fill_scalar(-1e30, "behavior"),
    ),
    Injection("nan-row", "sentinel", _SHARES, "share of rows", fills.fill_row(_NAN, "behavior")),
    Injection(
        "minus-inf-row", "sentinel", _SHARES, "share of rows", fills.fill_row(_INFINITE, "behavior")
    ),
    Injection(
        "minus-inf-policy", "sentinel", _SHARES, "share of rows",
        fills.fill_row(_INFINITE, "pre", "post"),
    ),
    Injection("recomputed", "recomputed", (1.0,), "", faults.recomputed, thin=False),
    Injection("recomputed-scalar", "recomputed", (1.0,), "", faults.recomputed_scalar),
    Injection("stale", "stale", (2.0, 4.0, 8.0), "c at the last step", faults.stale),
    Injection("other-model", "other-model", (1.0, 1.5, 2.5), "σ in nats", faults.other_model),
    Injection("other-context", "other-model", (1.0,), "", faults.other_context),
    Injection("weaker-model", "other-model", (0.5, 0.8), "weight", faults.weaker_model),
    Injection(
        "padded-vocabulary", "vocabulary", (0.01, 0.1, 0.5), "share of rows",
        fills.padded_vocabulary,
    ),
    Injection("permuted-ids", "vocabulary", (0.3, 0.6, 1.0), "share of ids", faults.permuted_ids),
    Injection("offset-ids", "vocabulary", (1.0, 2.0), "ids", faults.offset_ids),
    Injection(
        "duplicated", "topk-convention", (0.05, 1.0), "share of rows", fills.duplicated
    ),
    Injection("sampled-first", "topk-convention", (1.0,), "share of rows", fills.sampled_first),
    Injection("replaced-last", "topk-convention", (1.0,), "", fills.replaced_last),
    Injection("appended", "topk-convention", (1.0,), "", fills.appended),
    Injection("left-out", "topk-convention", (1.0,), "", fills.left_out),
    Injection("out-of-order", "topk-convention", (0.05, 1.0), "share of rows", fills.out_of_order),
    Injection("ascending", "topk-convention", (1.0,), "", fills.ascending),
    Injection(
        "engine-noise", "precision", (0.04, 0.1, 0.25), "σ in nats", faults.engine_noise, thin=False
    ),
    Injection("outliers", "precision", (0.02, 0.05), "share of rows", faults.outliers, thin=False),
    Injection(
        "drift-by-position", "precision", (0.3, 0.6), "σ in nats at the end",
        faults.drift_by_position, thin=False,
    ),
    Injection("rounded-logits", "precision", (15.0, 30.0), "size of logits", faults.rounded_logits),
    Injection(
        "rounded-logprobs", "precision", (1.0, 2.0), "1: bfloat16, 2: float16",
        faults.rounded_logprobs,
    ),
    Injection(
        "zero-advantage", "advantage", (0.0,), "", fills.constant_advantage
    ),
    Injection("constant-advantage", "advantage", (1.0, -0.5), "Â", fills.constant_advantage),
    Injection("raw-rewards", "advantage", (1.0, 10.0), "reward", fills.raw_rewards),
    Injection("unsigned-advantage", "advantage", (1.0,), "", fills.unsigned_advantage),
    Injection("nan-advantage", "advantage", (0.05, 0.3, 1.0), "share of groups",
              fills.nan_advantage),
    Injection(
        "everything-masked", "concentration", (1.0,), "", fills.everything_masked,
        also=("advantage",), decides=False,
    ),
    Injection(
        "concentrated", "concentration", (0.8, 1.0), "share of the tokens' rows",
        faults.concentrated, thin=False,
    ),
)  # fmt: skip

_SOUND: Final = (
    Injection("untouched", None, (0.0,), "", controls.untouched),
    Injection("some-groups", None, (0.5, 0.8), "share of groups", controls.some_groups),
    Injection("some-steps", None, (0.5,), "share of steps", controls.some_steps),
    Injection("thinned", None, (0.02, 0.05, 0.15), "D above which rows stay", controls.thinned),
    Injection("without-vectors", None, (0.3, 0.8), "share of rows", controls.without_vectors),
    Injection("without-optional", None, (0.0,), "", controls.without_optional),
    Injection("without-metadata", None, (0.0,), "", controls.without_metadata),
    Injection("declared-replacing", None, (0.0,), "", controls.declared_replacing),
    Injection("fewer-listed", None, (0.3,), "share of rows", controls.fewer_listed),
    Injection("fp32-engine", None, (5e-6, 1e-4), "σ in nats", faults.engine_noise, thin=False),
    Injection("bf16-engine", None, (0.02, 0.03), "σ in nats", controls.bf16_engine, thin=False),
    Injection("declared-rounding", None, (20.0,), "size of logits", controls.declared_rounding),
    Injection("some-zero-advantages", None, (0.2,), "share of groups", controls.some_zero),
    Injection("other-advantages", None, (0.1, 5.0), "factor", controls.scaled_advantages),
)


def _named(every: tuple[Injection, ...]) -> Mapping[str, Injection]:
    """By name, in order."""
    return MappingProxyType({each.name: each for each in every})


INJECTIONS: Final[Mapping[str, Injection]] = _named(_FAULTS)
"""Every fault by name."""

CONTROLS: Final[Mapping[str, Injection]] = _named(_SOUND)
"""Changes by name that leave a dump sound."""
