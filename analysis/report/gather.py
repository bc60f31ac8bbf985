"""From the rows of a dump to the numbers of the token viewer, arm by arm.

What decides is kept as it was computed, in float64: D of every proximity, and the directions
that Â is multiplied by. A direction that is neither the question's own nor r − 1 is shown
nowhere and kept in float32, since only its sign is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad.analysis.counting import NOISE, WEIGHT, checked_batches, columns_for
from deltad.analysis.engine import Progress
from deltad.analysis.question import Resolved
from deltad.direction import TAILS
from deltad.dumps import COLUMNS, READINGS, VECTORS, batch_tokens, scalar_tokens
from deltad.masks import NONE, Criterion, CriterionError, Tokens
from deltad.weights import WEIGHTS, Weight

if TYPE_CHECKING:
    from deltad.dumps import Batch, Dump, Metadata

Columns = dict[str, NDArray[Any]]

KEYS: Final = ("step", "group", "sequence", "position", "token_id")
_ORDER: Final = ("position", "sequence", "step", "seed_index")  # last is first, for np.lexsort
UNBOUNDED: Final = 2
"""Stands in `undetermined` for a token of whose ΔD no bound is known."""

_TINY: Final = float(np.finfo(np.float32).smallest_subnormal)


@dataclass(frozen=True)
class Rule:
    """How a criterion decides on the page.

    Attributes
    ----------
    decider : Criterion or Weight
        Of the registry.
    proximity, direction : str
        Columns: masked where D > δ and Â times the direction > 0. Empty where `masked` is not.
    masked : str
        Column of decisions that no threshold moves: 1 masks, 0 keeps, 2 is unknown.
    """

    decider: Criterion | Weight
    proximity: str = ""
    direction: str = ""
    masked: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the page that it reads."""
        return tuple(name for name in (self.proximity, self.direction, self.masked) if name)


def rules_for(dump: Dump, arm: str, divergence: str) -> list[Rule]:
    """The criteria, and neighbours' weights, that a dump can answer for a region's divergence.

    Parameters
    ----------
    dump : Dump
        Only its footers are read.
    arm : str
        Must have a criterion's columns.
    divergence : {"kl", "tv"}
        The region's; predictive criteria of another family are left out.

    Returns
    -------
    list of Rule
        In the registry's order.
    """
    present = dump.optional_columns(arm)
    found = []
    for weight in WEIGHTS.values():
        each = weight.criterion or weight
        if _family(each) not in (None, divergence) or not present.issuperset(each.columns):
            continue
        if isinstance(each, Weight) or each.name in ("clip-higher", NONE.name):
            found.append(Rule(each, masked=f"masked_{each.name.replace('-', '_')}"))
            continue
        proximity = "d_pre"
        if each.name.startswith("binary-"):
            proximity = f"d_{each.name.replace('-', '_')}"
        elif each.name.endswith("-full"):
            proximity = "d_full"
        direction = "r_minus_1" if each.family is None else f"d_dot_{each.name.rpartition('-')[2]}"
        found.append(Rule(each, proximity, direction))
    return found


def _family(each: Criterion | Weight) -> str | None:
    """The divergence that a criterion is bound to."""
    return each.family if isinstance(each, Criterion) else None


def main_direction(resolved: Resolved) -> str:
    """The column of Ḋ that the page shows: the question's own, else the aggregated one."""
    for each in (resolved.criterion, resolved.baseline):
        if _family(each) is not None:
            return f"d_dot_{each.name.rpartition('-')[2]}"
    return "d_dot_aggregated"


def pre_divergences(
    dump: Dump,
    arm: str,
    seeds: Sequence[int],
    divergence: str,
    *,
    progress: Progress | None = None,
) -> NDArray[np.float64]:
    """D before the update of every row that has vectors, shape (token,)."""
    found = [np.empty(0)]
    for seed in seeds:
        columns = columns_for(post=False)
        for batch, metadata in checked_batches(dump, arm, seed, columns, progress=progress):
            found.append(batch_tokens(batch, metadata).divergence(divergence))
    return np.concatenate(found)


def arm_rows(
    dump: Dump,
    arm: str,
    seeds: Sequence[int],
    resolved: Resolved,
    rules: Sequence[Rule],
    *,
    main: bool,
    above: float | None = None,
    progress: Progress | None = None,
) -> Columns:
    """The rows of some seeds of an arm, sorted by seed, step, sequence and position.

    Parameters
    ----------
    dump, arm, seeds
        Which rows; every value used is checked.
    resolved : Resolved
        Its region, and the direction that is shown.
    rules : sequence of Rule
        What must be decided.
    main : bool
        Everything; otherwise only what differs between arms.
    above : float, optional
        Only rows with D before the update above it.
    progress : callable, optional
        Told the number of rows of every block read.

    Returns
    -------
    dict of str to ndarray
        Columns of equal length. D, Ḋ and ΔD are NaN where a row has no vectors; ΔD and the
        policy after the update also where that was not read. `undetermined` is 1 where |ΔD| is
        below the bound on its error, 0 where it is not, 2 where there is no ΔD or no bound.
    """
    columns = [*KEYS, "in_loss", *columns_for(post="post" in dump.readings(arm))]
    if main:
        present = dump.optional_columns(arm)
        columns += [name for name in ("token", "pre_entropy", "post_entropy") if name in present]
        columns += [column for rule in rules for column in rule.decider.columns]
    along = [NOISE, *([WEIGHT] if main else [])]
    blocks: list[Columns] = []
    for index, seed in enumerate(seeds):
        for batch, metadata in checked_batches(
            dump, arm, seed, columns, along=along, progress=progress
        ):
            block = _block(batch, metadata, resolved, rules if main else (), main=main)
            block["seed_index"] = np.full(len(batch), index, dtype=np.int32)
            if above is not None:
                wanted = block["d_pre"] > above
                block = {name: values[wanted] for name, values in block.items()}
            blocks.append(block)
    if not blocks:
        return {}
    rows = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    order = np.lexsort([rows[name] for name in _ORDER])
    return {name: values[order] for name, values in rows.items()}


def _block(
    batch: Batch, metadata: Metadata, resolved: Resolved, rules: Sequence[Rule], *, main: bool
) -> Columns:
    """What the page needs of one block."""
    divergence = resolved.question.divergence
    known = batch.vectors
    tokens = batch_tokens(batch, metadata) if known.any() else None
    sets = [] if tokens is None else [(tokens, known)]
    block: Columns = {name: batch[name] for name in (*KEYS, "in_loss")}
    block["d_pre"] = _filled([(tokens, known)], lambda each: each.divergence(divergence))
    unread = "post_logprob" not in batch.columns
    after = batch_tokens(batch, metadata, post=True) if known.any() and not unread else None
    d_post = _filled([(after, known)], lambda each: each.divergence(divergence))
    block["delta_d"] = d_post - block["d_pre"]
    block["undetermined"] = _undetermined(batch, block["delta_d"])
    if not main:
        return block
    block["vectors"] = known
    block[WEIGHT] = batch[WEIGHT] if WEIGHT in batch.columns else np.ones(len(batch), np.float32)
    copied = ("advantage", "behavior_logprob", "pre_logprob", "post_logprob", *VECTORS)
    block.update({name: batch[name] for name in copied if name in batch.columns})
    if unread:
        for name in READINGS["post"]:
            before = batch[COLUMNS[name].before or name]
            block[name] = np.full(before.shape, np.nan, dtype=before.dtype)
    for name in ("token", "pre_entropy", "post_entropy"):
        if name in batch.columns:
            block[name] = batch[name]
    if not known.all():
        sets.append((scalar_tokens(batch), ~known))
    for name, values in _decisive(sets, rules, divergence).items():
        block[name] = values
    shown = main_direction(resolved)
    tail = shown.removeprefix("d_dot_")
    if shown not in block:
        block[shown] = _filled(sets, lambda each: each.direction(divergence, tail).total)
    if tail in TAILS:
        local = _filled(sets, lambda each: each.direction(divergence, tail).local)
        block["d_dot_local"] = local.astype(np.float32)
    for rule in rules:
        if rule.direction not in ("", "r_minus_1", shown):
            block[rule.direction] = _signed32(block[rule.direction])
    return block


def _undetermined(batch: Batch, delta_d: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Whether |ΔD| is below the bound on its error, or that this is not known."""
    if NOISE not in batch.columns:
        return np.full(len(batch), UNBOUNDED, dtype=np.uint8)
    noise = batch[NOISE]
    with np.errstate(invalid="ignore"):
        below = np.abs(delta_d) < noise
    return np.where(np.isnan(delta_d) | np.isnan(noise), UNBOUNDED, below).astype(np.uint8)


def _decisive(
    sets: list[tuple[Tokens, NDArray[np.bool_]]], rules: Sequence[Rule], divergence: str
) -> Columns:
    """Every column that a rule reads, but for D of the region itself."""
    found: Columns = {"r_minus_1": _filled(sets, lambda each: each.ratio_direction)}
    for rule in rules:
        decider = rule.decider
        if rule.masked:
            keep = partial(decider.keep, divergence=divergence)
            found[rule.masked] = np.nan_to_num(1 - _filled(sets, keep), nan=2).astype(np.uint8)
        elif rule.proximity.startswith("d_binary"):
            family = decider.name.removeprefix("binary-")
            found[rule.proximity] = _filled(sets, partial(Tokens.binary_divergence, name=family))
        elif rule.proximity == "d_full":
            found["d_full"] = _filled(sets, lambda each: each.full_divergence(divergence))
        if isinstance(decider, Criterion) and rule.direction and rule.direction not in found:
            found[rule.direction] = _filled(sets, decider.push)
    return found


def _filled(sets: Any, compute: Any) -> NDArray[np.float64]:
    """A column from its values in disjoint sets of rows; NaN where a set cannot tell."""
    column = np.full(len(sets[0][1]) if sets else 0, np.nan)
    for tokens, at in sets:
        if tokens is None:
            continue
        try:
            column[at] = compute(tokens)
        except CriterionError:  # rows without vectors
            continue
    return column


def _signed32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The same in float32, with no number but 0 rounded to 0: the sign is what counts."""
    small = values.astype(np.float32)
    lost = (small == 0) & (values != 0)
    return np.where(lost, np.sign(values) * _TINY, small).astype(np.float32)
