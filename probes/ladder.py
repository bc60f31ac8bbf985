"""The ladder: what one optimizer step does to D, from a token's own gradient up to the step.

For every response token the first-order change of D along the step and along the batch's
gradient, and its change at a tenth and at three times the step; for a sample of tokens also
along their own gradient and along their sequence's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.masks import DEFAULT_THRESHOLD, CriterionError, criterion

from .elsewhere import Elsewhere, inner, length, moved, reduced_divergence
from .errors import ProbeError
from .forward import again
from .head import Head
from .microbatch import MicroBatch
from .reading import PolicyReader
from .rows import Rows, policy_columns

LADDER_COLUMNS: Final = (
    "linear_delta",
    "linear_delta_own",
    "linear_delta_sequence",
    "linear_delta_batch",
    "delta_tenth",
    "delta_triple",
)
"""What the ladder adds to the rows of a dump."""

TENTH: Final = 0.1
TRIPLE: Final = 3.0

JVP: Final = "jvp"
DIFFERENCE: Final = "central difference"
FORWARD: Final = "forward"
ALONE: Final = "gradients, each sequence by itself"
WHOLE: Final = "gradients, whole micro-batches"

# A forward of one sequence by itself must give the log-probs of the whole batch's: products in
# other shapes round otherwise, another dropout mask or a batch statistic is far beyond that.
_SAME_FORWARD: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAME_FORWARD_ROUNDED: Final = 0.1

Slopes = NDArray[np.float64]
Derivative = Literal["auto", "jvp", "difference"]
T = TypeVar("T")


@dataclass(frozen=True)
class Ladder:
    """What `UpdateProbe(..., ladder=Ladder(...))` measures beside the step itself.

    Attributes
    ----------
    tokens : int
        Tokens a step for which the token's own and its sequence's gradient are taken: first
        those that exactly one of two criteria masks, then others outside the region, then any;
        at random within each. Costs two backward passes of the sequence for each.
    divergence : {"kl", "tv"}
        D, that of the update's region.
    threshold : float
        δ of the region.
    criterion, baseline : str
        The two criteria; by default `predictive-<divergence>-aggregated` and `ratio`.
    least : float
        Tokens with D up to this are not sampled: those that the dump does not store.
    seed : int
        Of the sample's own random numbers.
    ratio_cap : float, optional
        Upper bound of the importance weight in the loss, where it has one.
    derivative : {"auto", "jvp", "difference"}
        How the slopes along the step and the batch's gradient are taken: forward-mode
        differentiation where the model has it, else a central difference ("auto"), or one of
        the two.
    arms : tuple of str, optional
        The arms that are measured; by default all but `zero-step`.

    Raises
    ------
    ProbeError
        An option that makes no sense.

    Notes
    -----
    Directions are those in which a loss descends: −Σ r Â of a token or of its sequence's tokens
    in the loss, the gradient that the optimizer saw, the step that it took. A positive slope
    says that this push makes D grow. The first three are in nats per unit of learning rate
    under plain SGD, of a loss that is a sum for the token and its sequence, and the user's own
    for the batch.
    """

    tokens: int = 64
    divergence: str = "kl"
    threshold: float = DEFAULT_THRESHOLD
    criterion: str = ""
    baseline: str = "ratio"
    least: float = 0.0
    seed: int = 0
    ratio_cap: float | None = None
    derivative: Derivative = "auto"
    arms: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ProbeError(f"`tokens` must be at least 0, got {self.tokens}")
        if self.derivative not in ("auto", "jvp", "difference"):
            raise ProbeError(
                f"`derivative` must be auto, jvp or difference, got {self.derivative!r}"
            )
        for name in ("threshold", "least"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ProbeError(f"`{name}` must be finite and not negative, got {value!r}")
        if not self.criterion:
            object.__setattr__(self, "criterion", f"predictive-{self.divergence}-aggregated")
        try:
            for name in (self.criterion, self.baseline):
                criterion(name).check_family(self.divergence)
        except CriterionError as error:
            raise ProbeError(f"the ladder's pair of criteria: {error}") from error

    def measures(self, arm: str) -> bool:
        """Whether an arm is measured."""
        return arm != "zero-step" if self.arms is None else arm in self.arms


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
        self._alone = True
        self._methods: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    @property
    def metadata(self) -> dict[str, Any]:
        """See `UpdateProbe.ladder_metadata`."""
        ladder = self.ladder
        return {
            "divergence": ladder.divergence,
            "threshold": ladder.threshold,
            "criterion": ladder.criterion,
            "baseline": ladder.baseline,
            "tokens": ladder.tokens,
            "sample": "a step's disagreement tokens first, then others outside, then any; at "
            "random within each",
            "least": ladder.least,
            "seed": ladder.seed,
            "ratio_cap": ladder.ratio_cap,
            "methods": dict(self._methods),
            "reasons": dict(self._reasons),
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
        found = []
        for batch, d_pre, sample in zip(batches, known, samples, strict=True):
            own, sequence = self._own(batch, before, sample)
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
                        f"the derivative along the {rung} failed: {_first_line(error)}; use "
                        "Ladder(derivative='difference')"
                    ) from error
                self._difference = True
                self._reasons["update"] = _first_line(error)
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
        """Central difference, as far out as a tenth of the step; a whole one in half precision."""
        size, far = length(direction), length(update) or 1e-4 * length(before)
        if not size:
            return np.zeros(batch.size)
        wide = all(each.dtype.itemsize >= 4 for each in before.values())
        by = (TENTH if wide else 1.0) * far / size
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

    def _own(
        self, batch: MicroBatch, before: Mapping[str, Tensor], sample: NDArray[np.intp]
    ) -> tuple[Slopes, Slopes]:
        """Slopes of D along the token's own gradient and along its sequence's."""
        own, whole = np.full(batch.size, np.nan), np.full(batch.size, np.nan)
        if not len(sample):
            return own, whole
        leaves = {
            name: each.detach().requires_grad_(each.is_floating_point())
            for name, each in before.items()
        }
        sequence = batch.rows["sequence"]
        groups = [np.flatnonzero(sequence == each) for each in np.unique(sequence[sample])]

        def alone() -> None:
            for members in groups:
                self._of_sequences(batch, leaves, [members], sample, own, whole, alone=True)

        def together() -> None:
            self._of_sequences(batch, leaves, groups, sample, own, whole, alone=False)

        if self._alone:
            try:
                self._elsewhere.run(leaves, alone)
            except torch.OutOfMemoryError:
                raise
            except (ProbeError, RuntimeError, ValueError, IndexError) as error:
                self._alone = False
                self._reasons["own"] = _first_line(error)
        if not self._alone:
            own[:], whole[:] = np.nan, np.nan
            self._elsewhere.run(leaves, together)
        self._methods["own"] = self._methods["sequence"] = ALONE if self._alone else WHOLE
        return own, whole

    def _of_sequences(
        self,
        batch: MicroBatch,
        leaves: Mapping[str, Tensor],
        groups: Sequence[NDArray[np.intp]],
        sample: NDArray[np.intp],
        own: Slopes,
        whole: Slopes,
        *,
        alone: bool,
    ) -> None:
        """Fill in the slopes of some sequences' tokens, from one forward of them."""
        forward = batch.forward
        if forward is None:
            raise ProbeError("the micro-batch's training forward is gone")
        members = torch.from_numpy(np.concatenate(groups))
        rows = batch.batch_rows(members) if alone else None
        if rows is not None:
            forward = forward.of_rows(rows, batch.tokens.response_mask.shape[0])
        hidden = self._reader.undisturbed(
            lambda: again(forward, self._head.module, grad=True, graph=True).hidden
        )
        with torch.enable_grad():
            selected = batch.select_of(hidden, members, rows)
            logprobs = self._elsewhere.logprobs(batch, selected, members)
            if alone:
                _refuse_another_forward(batch, members, logprobs, hidden.dtype)
            divergences = reduced_divergence(batch, self.ladder.divergence, members, logprobs)
            sampled = logprobs[:, -1]
            push = torch.from_numpy(_push(batch.rows, self.ladder.ratio_cap)[members.numpy()])
            kept = torch.from_numpy(batch.rows["in_loss"][members.numpy()])
            push, kept = push.to(sampled.device), kept.to(sampled.device)
            inputs = tuple(leaves.values())

            def gradient(of: Tensor) -> tuple[Tensor | None, ...]:
                return torch.autograd.grad(of, inputs, retain_graph=True, allow_unused=True)

            start = 0
            for group in groups:
                part = slice(start, start + len(group))
                start += len(group)
                mine = kept[part]
                taking_part = (push[part] * sampled[part])[mine].sum() if bool(mine.any()) else None
                of_sequence = None if taking_part is None else gradient(taking_part)
                for place, row in enumerate(group.tolist(), part.start):
                    if row not in sample:
                        continue
                    slope = gradient(divergences[place])
                    weight = float(push[place])
                    own[row] = weight * inner(gradient(sampled[place]), slope) if weight else 0.0
                    whole[row] = 0.0 if of_sequence is None else inner(of_sequence, slope)


def _priority(batch: MicroBatch, d_pre: Slopes, ladder: Ladder) -> NDArray[np.int64]:
    """0 for disagreement tokens, 1 for others outside, 2 for the rest."""
    tokens = batch.criterion_tokens()
    first, second = (
        criterion(name).keep(tokens, threshold=ladder.threshold, divergence=ladder.divergence)
        for name in (ladder.criterion, ladder.baseline)
    )
    outside = d_pre > ladder.threshold
    return np.where(outside & (first != second), 0, np.where(outside, 1, 2))


def _push(rows: Rows, cap: float | None) -> Slopes:
    """Â r of every row, r bounded where the loss bounds it."""
    log_ratio = rows["pre_logprob"].astype(np.float64) - rows["behavior_logprob"]
    weight = np.exp(log_ratio if cap is None else np.minimum(log_ratio, math.log(cap)))
    return np.asarray(rows["advantage"] * weight, np.float64)


def _refuse_another_forward(
    batch: MicroBatch, members: Tensor, logprobs: Tensor, dtype: torch.dtype
) -> None:
    """See that a forward of few rows gave the policy that the whole batch's gave."""
    before = torch.from_numpy(batch.rows["pre_logprob"][members.numpy()])
    gap = float((logprobs[:, -1].detach().cpu() - before).abs().max())
    if not gap <= _SAME_FORWARD.get(dtype, _SAME_FORWARD_ROUNDED):
        raise ProbeError(
            f"a forward of the sequence by itself gives other log-probs (by {gap:.3g} nats)"
        )


def _stored(values: Slopes) -> NDArray[np.float32]:
    """In the stored precision; NaN for what is not finite."""
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    return np.where(np.isfinite(stored), stored, np.float32(np.nan))


def _first_line(error: BaseException) -> str:
    """First line of what an error says."""
    return next(iter(str(error).splitlines()), type(error).__name__)
