"""Climbs the ladder of each optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.masks import rule

from .elsewhere import Elsewhere, length, moved
from .errors import ProbeError, first_line
from .head import Head
from .ladder import Ladder
from .microbatch import MicroBatch
from .own import OwnGradients, Slopes
from .reading import PolicyReader
from .rows import Rows, policy_columns

TENTH: Final = 0.1
TRIPLE: Final = 3.0

# A batch's gradient is steep: as far along it as along the step, D has long turned.
_NEAR: Final = 0.02

JVP: Final = "jvp"
DIFFERENCE: Final = "central difference"
FORWARD: Final = "forward"


class Climber:
    """Measures the ladder of each step of one optimizer.

    Parameters
    ----------
    ladder : Ladder
        What is asked for.
    model : nn.Module
        Unwrapped.
    optimizer : torch.optim.Optimizer
        Its parameters are the ones that move.
    head : Head
        Of the model.
    reader : PolicyReader
        Reads D at a part of the step as *pre* and *post* are read.
    temperature : float
        Of all policies.
    token_chunk : int
        See `UpdateProbe`.
    """

    def __init__(
        self,
        ladder: Ladder,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        head: Head,
        reader: PolicyReader,
        *,
        temperature: float,
        token_chunk: int,
    ) -> None:
        self.ladder = ladder
        self._model = model
        self._optimizer = optimizer
        self._head = head
        self._reader = reader
        self._elsewhere = Elsewhere(model, head, temperature=temperature, token_chunk=token_chunk)
        self._before: dict[str, Tensor] | None = None
        self._descent: dict[str, Tensor] = {}
        self._difference = ladder.derivative == "difference"
        self._jvp_worked = False
        self._own = OwnGradients(ladder, self._elsewhere, reader)
        self._methods: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """See `UpdateProbe.ladder_metadata`."""
        ladder = self.ladder
        return {
            "divergence": ladder.divergence,
            "threshold": ladder.threshold,
            "criterion": rule(ladder.criterion).name,
            "baseline": rule(ladder.baseline).name,
            "tokens": ladder.tokens,
            "sample": "a step's disagreement tokens first, then others outside, then any; at "
            "random within each",
            "least": ladder.least,
            "seed": ladder.seed,
            "ratio_cap": ladder.ratio_cap,
            "methods": {**self._own.methods, **self._methods},
            "reasons": {**self._own.reasons, **self._reasons},
        }

    def before_step(self, *, closure: bool) -> None:
        """Copy parameters and gradients as the optimizer is about to see them; no forward."""
        parameters = self._parameters()
        self._before = {name: each.detach().clone() for name, each in parameters.items()}
        self._descent = {}
        if closure:
            self._methods["batch"] = "none"
            self._reasons["batch"] = "the optimizer takes its gradients in a closure"
            return
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer unscales itself
        for name, each in parameters.items():
            if each.grad is not None:
                grad = each.grad.detach()
                grad = grad.to_dense() if grad.is_sparse else grad
                grad = grad if scale is None else grad / scale
                self._descent[name] = grad.neg().to(each.dtype)

    def discard(self) -> None:
        """Forget a step that did not come."""
        self._before = None
        self._descent = {}

    def climb(self, batches: Sequence[MicroBatch], step: int) -> list[Rows]:
        """Measure the step that was just made.

        Parameters
        ----------
        batches : sequence of MicroBatch
            Of the step, each with response tokens.
        step : int
            Number of the step.

        Returns
        -------
        list of Rows
            The columns of `LADDER_COLUMNS` of each micro-batch; NaN where nothing was measured.
        """
        before = self._before
        if before is None:
            raise ProbeError("the ladder was not told of the step before it")
        update = {name: each.detach() - before[name] for name, each in self._parameters().items()}
        # What did not move needs no derivative.
        update = {name: each for name, each in update.items() if bool(each.any())}
        known = [self._divergence(batch, batch.rows, "pre") for batch in batches]
        samples = self._sample(batches, known, step)
        slopes = self._own.slopes(batches, before, samples, step)
        found = []
        for batch, d_pre, (own, sequence) in zip(batches, known, slopes, strict=True):
            columns = {
                "linear_delta": self._slope("update", batch, before, update, update),
                "linear_delta_own": own,
                "linear_delta_sequence": sequence,
                "linear_delta_batch": self._slope("batch", batch, before, self._descent, update),
                "delta_tenth": self._realized("tenth", TENTH, batch, before, update, d_pre),
                "delta_triple": self._realized("triple", TRIPLE, batch, before, update, d_pre),
            }
            found.append({name: _stored(values) for name, values in columns.items()})
        self.discard()
        return found

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the optimizer by their names in the model."""
        stepped = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        return {name: each for name, each in self._model.named_parameters() if id(each) in stepped}

    def _divergence(self, batch: MicroBatch, rows: Rows, when: str) -> Slopes:
        """D of the values that are stored, in float64."""
        metadata = Metadata(top_k=batch.tokens.top_k, vocab_size=batch.vocab_size)
        whole = Batch("", 0, rows, np.ones(batch.size, np.bool_))
        tokens = batch_tokens(whole, metadata, post=when == "post")
        return np.asarray(tokens.divergence(self.ladder.divergence), np.float64)

    def _sample(
        self, batches: Sequence[MicroBatch], known: Sequence[Slopes], step: int
    ) -> list[NDArray[np.intp]]:
        """Rows of each micro-batch whose own gradients are taken."""
        ladder = self.ladder
        rank = [
            _priority(batch, d_pre, ladder) for batch, d_pre in zip(batches, known, strict=True)
        ]
        whole, every = np.concatenate(rank), np.concatenate(known)
        possible = np.flatnonzero(every > ladder.least)
        # The same tokens in every arm, which agree on all that this rests on.
        shuffled = np.random.default_rng([ladder.seed, step]).permutation(len(every))[possible]
        chosen = np.sort(possible[np.lexsort((shuffled, whole[possible]))][: ladder.tokens])
        ends = np.cumsum([batch.size for batch in batches])
        starts = ends - [batch.size for batch in batches]
        return [
            chosen[(chosen >= start) & (chosen < end)] - start
            for start, end in zip(starts, ends, strict=True)
        ]

    def _slope(
        self,
        rung: str,
        batch: MicroBatch,
        before: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        update: Mapping[str, Tensor],
    ) -> Slopes:
        """Derivative of D along a direction."""
        if not direction:
            if rung == "batch" and rung not in self._methods:
                self._methods[rung] = "none"
                self._reasons[rung] = "no parameter had a gradient at the step"
            # A step that moved nothing has slope 0; a gradient that is not there has none.
            return np.full(batch.size, 0.0 if rung == "update" else np.nan)
        if not self._difference:
            try:
                slope = self._reader.undisturbed(
                    lambda: self._elsewhere.slope(batch, self.ladder.divergence, before, direction)
                )
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # also NotImplementedError
                if self._jvp_worked or self.ladder.derivative == "jvp":
                    raise ProbeError(
                        f"the derivative along the {rung} failed: {first_line(error)}; use "
                        "Ladder(derivative='difference')"
                    ) from error
                self._difference = True
                self._reasons["update"] = first_line(error)
            else:
                self._jvp_worked = True
                self._methods[rung] = JVP
                return slope.cpu().numpy()
        self._methods[rung] = DIFFERENCE
        return self._central(batch, before, direction, update)

    def _central(
        self,
        batch: MicroBatch,
        before: Mapping[str, Tensor],
        direction: Mapping[str, Tensor],
        update: Mapping[str, Tensor],
    ) -> Slopes:
        """Central difference, out to a small part of the step's length."""
        size, far = length(direction), length(update) or 1e-3 * length(before)
        if not size:
            return np.zeros(batch.size)
        part = TENTH if direction is update else _NEAR
        if any(each.dtype.itemsize < 4 for each in before.values()):
            part = 1.0  # half precision cannot hold less
        by = part * far / size
        ends = [self._at(batch, moved(before, direction, sign * by)) for sign in (1.0, -1.0)]
        return (ends[0] - ends[1]) / (2 * by)

    def _realized(
        self,
        rung: str,
        part: float,
        batch: MicroBatch,
        before: Mapping[str, Tensor],
        update: Mapping[str, Tensor],
        d_pre: Slopes,
    ) -> Slopes:
        """Change of D at a part of the step."""
        if part < 1 and any(each.dtype.itemsize < 4 for each in update.values()):
            self._methods[rung] = "none"
            self._reasons[rung] = "parameters in half precision cannot hold a tenth of the step"
            return np.full(batch.size, np.nan)
        self._methods[rung] = FORWARD
        return self._at(batch, moved(before, update, part)) - d_pre

    def _at(self, batch: MicroBatch, parameters: Mapping[str, Tensor]) -> Slopes:
        """D at other parameters, read as *post* is."""
        read = self._elsewhere.run(parameters, lambda: self._reader.read(batch))
        rows = {**batch.rows, **policy_columns(read, "post")}
        with np.errstate(all="ignore"):  # three times a step may be too far for any policy
            return self._divergence(batch, rows, "post")


def _priority(batch: MicroBatch, d_pre: Slopes, ladder: Ladder) -> NDArray[np.int64]:
    """0 for disagreement tokens, 1 for others outside, 2 for the rest."""
    tokens = batch.criterion_tokens()
    first, second = (
        rule(name).keeps(tokens, threshold=ladder.threshold, divergence=ladder.divergence)
        for name in (ladder.criterion, ladder.baseline)
    )
    outside = d_pre > ladder.threshold
    return np.where(outside & (first != second), 0, np.where(outside, 1, 2))


def _stored(values: Slopes) -> NDArray[np.float32]:
    """In the stored precision; NaN for what is not finite."""
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    return np.where(np.isfinite(stored), stored, np.float32(np.nan))
