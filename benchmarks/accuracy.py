"""R6: how right the readout is on a real update of SmolLM2, and how right other heads are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from deltad.probes.noise import delta_d_noise
from deltad.probes.readout import Readout, readout
from deltad.probes.recipes import RecipeError

from .anchors import ANCHORS, float64_head
from .heads import arithmetic
from .real_step import STEP, RealStep, real_step
from .row import Row, asked, missing

THRESHOLD: Final = 0.15
"""δ in nats, the paper's."""

FULL: Final[dict[str, Any]] = {"groups": 8, "prompts": 2, "tokens": 24, "drift": 6, "lr": 8e-5}
QUICK: Final[dict[str, Any]] = {"groups": 2, "prompts": 1, "tokens": 12, "drift": 2, "lr": 1e-4}

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Accuracy:
    """A head against a float64 head on the same hidden states and weights.

    Attributes
    ----------
    d_error, d_error_outside : float
        Mean |error of D| before and after the step, of all tokens and of those with D > δ, nats.
    change_error : float
        Mean |error of ΔD| where D > δ, nats.
    same_sign, same_sign_all : float
        Share of tokens with D > δ, and of all, whose sign(ΔD) is that of the float64 head.
    highest : float
        Largest log π, nats.
    """

    d_error: float
    d_error_outside: float
    change_error: float
    same_sign: float
    same_sign_all: float
    highest: float

    def __str__(self) -> str:
        return (
            f"sign {100 * self.same_sign:.1f} % ({100 * self.same_sign_all:.1f} % of all tokens), "
            f"|ΔD error| {self.change_error:.1e}, log π up to {self.highest:.1e}"
        )


@dataclass(frozen=True)
class Truth:
    """D of a real step by the float64 head, before and after."""

    step: RealStep
    before: Array
    after: Array

    @classmethod
    def of(cls, step: RealStep) -> Truth:
        """Read both policies in float64."""
        before, after = (
            step.d(float64_head(*policy, step.ids)) for policy in (step.before, step.after)
        )
        return cls(step, before, after)

    @property
    def outside(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tokens with D > δ before the step."""
        return self.before > THRESHOLD

    @property
    def change(self) -> Array:
        """ΔD."""
        return self.after - self.before

    def accuracy(self, before: torch.Tensor, after: torch.Tensor) -> Accuracy:
        """Compare log-probs at the step's ids with the truth."""
        found = [self.step.d(each) for each in (before, after)]
        errors = (np.abs(found[0] - self.before) + np.abs(found[1] - self.after)) / 2
        change = found[1] - found[0]
        same = np.sign(change) == np.sign(self.change)
        return Accuracy(
            d_error=float(errors.mean()),
            d_error_outside=float(errors[self.outside].mean()),
            change_error=float(np.abs(change - self.change)[self.outside].mean()),
            same_sign=float(same[self.outside].mean()),
            same_sign_all=float(same.mean()),
            highest=float(max(before.max(), after.max())),
        )


@dataclass(frozen=True)
class Noise:
    """The noise bound of ΔD against the error that was made.

    Attributes
    ----------
    covered : float
        Share of tokens whose error of ΔD, from log-probs stored in float32, is within the bound.
    undetermined, undetermined_outside : float
        Share of tokens, of all and of those with D > δ, whose |ΔD| is below the bound.
    wrong : float
        Share of tokens with D > δ that are determined and have the wrong sign.
    """

    covered: float
    undetermined: float
    undetermined_outside: float
    wrong: float


def ours(step: RealStep) -> tuple[Readout, Readout]:
    """The readout before and after a step."""
    before, after = (
        readout(hidden, weight, step.ids) for hidden, weight in (step.before, step.after)
    )
    return before, after


def noise(truth: Truth, before: Readout, after: Readout) -> Noise:
    """Hold the bound against the error, as a dump stores both."""
    step = truth.step
    ids = step.ids.numpy()
    columns = {
        "topk_ids": ids[:, :-1],
        "topk_behavior_logprobs": step.behavior[:, :-1],
        "token_id": ids[:, -1],
        "behavior_logprob": step.behavior[:, -1],
    }
    bound = delta_d_noise(columns, before, after, vocab_size=len(step.before[1]))
    stored = [step.d(each.logprobs.float()) for each in (before, after)]
    change = stored[1] - stored[0]
    blurred = np.abs(change) < bound
    outside = truth.outside
    wrong = ~blurred & (np.sign(change) != np.sign(truth.change))
    return Noise(
        covered=float((np.abs(change - truth.change) <= bound).mean()),
        undetermined=float(blurred.mean()),
        undetermined_outside=float(blurred[outside].mean()),
        wrong=float(wrong[outside].mean()),
    )


def rows(prefixes: tuple[str, ...], quick: bool) -> Iterator[Row]:
    """Measure the rows whose ids begin with one of the prefixes, all without any."""
    if not asked(prefixes, "R6"):
        return
    try:
        step = real_step(**(QUICK if quick else FULL))
    except RecipeError as error:
        what = "accuracy on a real step of SmolLM2-135M"
        yield missing("R6 bf16", what, 99.5, str(error), unit="%", at_least=True)
        return
    truth = Truth.of(step)
    outside = int(truth.outside.sum())
    changes = np.abs(truth.change)
    yield Row(
        id="R6 bf16 tokens",
        what=f"tokens with D > {THRESHOLD} in one AdamW step at lr {STEP:g} of SmolLM2-135M",
        limit=500,
        figure=outside,
        unit="tokens",
        at_least=True,
        note=f"{arithmetic(torch.bfloat16)}; of {len(changes)}; |ΔD| median "
        f"{np.median(changes):.1e}, where D > δ {np.median(changes[truth.outside]):.1e}",
    )
    read = ours(step)
    found = truth.accuracy(read[0].logprobs, read[1].logprobs)
    yield from _of_readout(found)
    yield _of_noise(truth, noise(truth, *read))
    yield _of_anchors(truth)


def _of_readout(found: Accuracy) -> Iterator[Row]:
    """The rows of the readout as this machine makes it."""
    against = "float64 head on the same bf16 hidden states and weights"
    yield Row(
        id="R6 bf16 sign",
        what=f"sign(ΔD) as by the {against}, D > δ",
        limit=99.5,
        figure=100 * found.same_sign,
        unit="%",
        at_least=True,
        note=f"{100 * found.same_sign_all:.1f} % of all tokens; "
        f"|ΔD error| {found.change_error:.1e} nats",
    )
    for name, limit, figure, what in (
        ("D", 1e-6, found.d_error, "mean |D error|, all tokens"),
        ("D outside", 1e-4, found.d_error_outside, "mean |D error|, D > δ"),
        ("log π", 1e-6, found.highest, "largest log π"),
    ):
        yield Row(
            id=f"R6 bf16 {name}", what=f"{what}, {against}", limit=limit, figure=figure, unit="nats"
        )


def _of_noise(truth: Truth, found: Noise) -> Row:
    """The row of the noise bound."""
    return Row(
        id="R6 bf16 noise",
        what="errors of ΔD within the recorded noise bound, all tokens",
        limit=99.5,
        figure=100 * found.covered,
        unit="%",
        at_least=True,
        note=f"undetermined (|ΔD| below the bound): {100 * found.undetermined_outside:.2f} % of "
        f"the {int(truth.outside.sum())} with D > δ, {100 * found.undetermined:.2f} % of all; "
        f"determined and wrong: {100 * found.wrong:.2f} % of those with D > δ",
    )


def _of_anchors(truth: Truth) -> Row:
    """The other heads on the same tokens; the figure is the best of them."""
    step = truth.step
    found = {
        anchor.name: truth.accuracy(
            *(anchor.read(*policy, step.ids) for policy in (step.before, step.after))
        )
        for anchor in ANCHORS
    }
    best = max(found, key=lambda name: found[name].same_sign)
    return Row(
        id="R6 other heads",
        what=f"sign(ΔD) as by the float64 head, D > δ: the best of the others, {best}",
        limit=100,
        figure=100 * found[best].same_sign,
        unit="%",
        note="no goal of ours; " + "; ".join(f"{name}: {each}" for name, each in found.items()),
    )
