"""What the columns of one row, and the metadata, must say of each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deltad._array import Array
from deltad.divergence import DIVERGENCES
from deltad.masks import CRITERIA, NONE, CriterionError, Rule, Tokens
from deltad.support import LOGPROB_TOLERANCE

from .batch import Batch
from .columns import COLUMNS
from .finding import Finding, find
from .footers import PartFile
from .keeping import rule_findings
from .lists import rank_order
from .metadata import Metadata
from .rules import is_number
from .tokens import batch_tokens, scalar_tokens

ZERO_STEP: Final = "zero-step"
"""The arm whose step has zero length."""

SUPPORTS: Final = ("union", "replaced-last")
"""Where the sampled token may be, as `behavior.support` says."""


@dataclass(frozen=True)
class Applied:
    """The mask that a file says was applied.

    Attributes
    ----------
    criterion : Rule
        Which one.
    threshold : float
        δ.
    divergence : str
        The region's divergence.
    """

    criterion: Rule
    threshold: float
    divergence: str


def applied(part: PartFile) -> Applied | None:
    """The mask that the metadata says was applied.

    Returns
    -------
    Applied or None
        None where there was none, or one that this version does not know, and where the policy
        before the step was not read.

    Raises
    ------
    ValueError
        The metadata contradicts the arm's name, or does not say what it takes to recompute
        the mask.
    """
    update, arm = part.metadata.update, part.arm
    mask = update.get("mask")
    if (arm in CRITERIA or arm == NONE.name) and mask != arm:
        raise ValueError(
            f"`update.mask` must be {arm!r}, as the arm's name says, found {brief(mask)}"
        )
    if not isinstance(mask, str) or mask not in CRITERIA:
        return None
    criterion = CRITERIA[mask]
    if part.rows and "pre_logprob" not in part.columns:
        return None  # a mask is decided on what was not read
    if missing := [name for name in criterion.columns if part.rows and name not in part.columns]:
        raise ValueError(
            f"column `{missing[0]}` is missing, so that `in_loss` cannot be checked against "
            f"criterion {mask}"
        )
    if not criterion.reads_threshold:  # its bounds are fixed
        return Applied(criterion, 0.0, criterion.family or next(iter(DIVERGENCES)))
    threshold = update.get("threshold")
    if not is_number(threshold) or threshold < 0:
        raise ValueError(
            "`update.threshold` must be a number of at least 0 where a mask was applied, "
            f"found {brief(threshold)}"
        )
    divergence = str(update.get("divergence"))
    criterion.check_family(divergence)
    return Applied(criterion, float(threshold), divergence)


def derived_findings(part: PartFile, batch: Batch, mask: Applied | None) -> Iterator[Finding]:
    """Find rows whose columns contradict each other or the metadata.

    Parameters
    ----------
    part : PartFile
        Of which the batch is.
    batch : Batch
        All columns of the file. Rows with impossible values give findings without meaning.
    mask : Applied or None
        What `in_loss` must be.

    Yields
    ------
    Finding
        One a rule and column.
    """
    yield from rank_order(batch, part.metadata)
    if part.metadata.behavior.get("support") == "replaced-last":
        yield from _replaced_last(batch)
    if part.arm == ZERO_STEP:
        yield from _zero_step(batch, part.metadata)
    yield from rule_findings(part, batch)
    if mask is not None:
        yield from _in_loss(batch, part.metadata, mask)


def _replaced_last(batch: Batch) -> Iterator[Finding]:
    """The sampled token took the place of the K-th, so it is listed."""
    token_id = batch["token_id"]
    listed = (batch["topk_ids"] == token_id[:, None]).any(axis=1)
    yield from find(
        "topk_ids",
        "replaced-last",
        ~listed & batch.vectors,
        lambda row: (
            "must hold the sampled token, since `behavior.support` is 'replaced-last', found no "
            f"{token_id[row]}"
        ),
    )


def _zero_step(batch: Batch, metadata: Metadata) -> Iterator[Finding]:
    """A step of zero length leaves the policy as it was, to the bit unless the readouts differ.

    Where the forward after the step was cut, its rounding may be another than that before.
    """
    room = _readout_noise(metadata)
    for name, column in COLUMNS.items():
        before = column.before
        if before is None or name not in batch.columns or before not in batch.columns:
            continue
        post, pre = batch[name], batch[before]
        differs = (post != pre) & ~(np.isnan(post) & np.isnan(pre))
        if room > 0:
            if not name.endswith("logprob") and not name.endswith("logprobs"):
                continue  # of what is bounded so, but with another bound
            differs &= ~(np.abs(post - pre) <= room)
        if column.is_vector:
            differs &= batch["topk_ids"] >= 0
            bad = differs.any(axis=1)
        else:
            bad = differs

        def describe(
            row: int,
            *,
            before: str = before,
            room: float = room,
            post: NDArray[Any] = post,
            pre: NDArray[Any] = pre,
            differs: NDArray[np.bool_] = differs,
        ) -> str:
            place: Any = (row, int(differs[row].argmax())) if differs.ndim == 2 else row
            return (
                f"must equal `{before}` "
                + ("exactly" if room == 0 else f"within {room:g} nats, the readouts' noise,")
                + " after a step of zero length, found "
                f"{float(post[place]):.9g} and {float(pre[place]):.9g}"
            )

        yield from find(name, "zero step", bad, describe)


def _readout_noise(metadata: Metadata) -> float:
    """By how much log-probs before and after a null update may differ, in nats."""
    if metadata.readout.get("exact") is not False:
        return 0.0
    cut = metadata.readout.get("cut")
    noise = cut.get("noise") if isinstance(cut, Mapping) else None
    return max(LOGPROB_TOLERANCE, 10 * noise if is_number(noise) else 0.0)


class _WithoutVectors(Tokens):
    """Tokens whose lists were not stored, whatever their mask was decided on."""

    def binary_divergence(self, name: str) -> Array:
        """Unknown: where the list held the sampled token, its entry there decided."""
        raise CriterionError("the sampled token's entry in the list is not stored")


def _in_loss(batch: Batch, metadata: Metadata, mask: Applied) -> Iterator[Finding]:
    """`in_loss` is what the criterion decides on the values stored."""
    criterion, threshold, divergence = mask.criterion, mask.threshold, mask.divergence
    in_loss = batch["in_loss"]
    keep = in_loss.copy()
    if batch.vectors.any():
        keep[batch.vectors] = criterion.keeps(
            batch_tokens(batch, metadata), threshold=threshold, divergence=divergence
        )
    if not batch.vectors.all():
        known = scalar_tokens(batch)
        rest = _WithoutVectors(
            known.advantage,
            known.behavior_logprob,
            known.policy_logprob,
            collision=known.collision,
            full=known.full,
        )
        # Where the criterion looks at lists nothing can be said of these rows.
        with contextlib.suppress(CriterionError):
            keep[~batch.vectors] = criterion.keeps(rest, threshold=threshold, divergence=divergence)
    yield from find(
        "in_loss",
        "in_loss",
        keep != in_loss,
        lambda row: (
            f"must be {bool(keep[row])}, as criterion {criterion.name} decides at threshold "
            f"{threshold:g} on {divergence}, found {bool(in_loss[row])}"
        ),
    )
