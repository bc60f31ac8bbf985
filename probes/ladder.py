"""The ladder: what one optimizer step does to D, from a token's own gradient up to the step.

For every response token the first-order change of D along the step and along the batch's
gradient, and its change at a tenth and at three times the step; for a sample of tokens also
along their own gradient and along their sequence's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deltad.dumps import Batch, Metadata, batch_tokens
from deltad.masks import DEFAULT_THRESHOLD, CriterionError, criterion

from .elsewhere import Elsewhere, inner, length, moved, reduced_divergence
from .errors import ProbeError
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

# A batch's gradient is steep: as far along it as along the step, D has long turned.
_NEAR: Final = 0.02

JVP: Final = "jvp"
DIFFERENCE: Final = "central difference"
FORWARD: Final = "forward"
ALONE: Final = "gradients, each sequence by itself"
WHOLE: Final = "gradients, whole micro-batches"

# A forward of one sequence by itself must give the log-probs of the whole batch's: products in
# other shapes round otherwise, another dropout mask or a batch statistic is far beyond that.
_SAME_FORWARD: Final = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAME_FORWARD_ROUNDED: Final = 0.1

# Numbers that the gradients of one sequence may hold together, 128 MB in float64.
_TOGETHER: Final = 1 << 24

_SAME_ROWS: Final = (
    "sequence", "position", "token_id", "advantage", "behavior_logprob", "pre_logprob", "topk_ids",
    "topk_behavior_logprobs", "topk_pre_logprobs",
)  # fmt: skip

Slopes = NDArray[np.float64]
Derivative = Literal["auto", "jvp", "difference"]


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
        self._same: _SameState | None = None
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
        slopes = self._own(batches, before, samples, step)
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

    def _own(
        self,
        batches: Sequence[MicroBatch],
        before: Mapping[str, Tensor],
        samples: Sequence[NDArray[np.intp]],
        step: int,
    ) -> list[tuple[Slopes, Slopes]]:
        """Slopes of D along the token's own gradient and along its sequence's."""
        if self._same is not None and self._same.holds(batches, before, step):
            products = self._same.products
        else:
            self._same = None  # an arm before this one is not kept beside it
            leaves = {
                name: each.detach().requires_grad_(each.is_floating_point())
                for name, each in before.items()
            }
            products = [
                self._products(batch, leaves, sample) if len(sample) else []
                for batch, sample in zip(batches, samples, strict=True)
            ]
            if all(each.gradients is None for part in products for each in part):
                self._same = _SameState(step, [_key(batch) for batch in batches], before, products)
        return [
            _along(batch, part, self.ladder.ratio_cap)
            for batch, part in zip(batches, products, strict=True)
        ]

    def _products(
        self, batch: MicroBatch, leaves: Mapping[str, Tensor], sample: NDArray[np.intp]
    ) -> list[_Products]:
        """Inner products of the gradients of D and of log π_k, sequence by sequence."""
        sequence = batch.rows["sequence"]
        groups = [np.flatnonzero(sequence == each) for each in np.unique(sequence[sample])]
        if self._alone:
            try:
                return self._elsewhere.differentiate(
                    leaves,
                    lambda: [
                        each
                        for group in groups
                        for each in self._of_sequences(batch, leaves, [group], sample, alone=True)
                    ],
                )
            except torch.OutOfMemoryError:
                raise
            except (ProbeError, RuntimeError, ValueError, IndexError) as error:
                self._alone = False
                self._reasons["own"] = _first_line(error)
        return self._elsewhere.differentiate(
            leaves, lambda: self._of_sequences(batch, leaves, groups, sample, alone=False)
        )

    def _of_sequences(
        self,
        batch: MicroBatch,
        leaves: Mapping[str, Tensor],
        groups: Sequence[NDArray[np.intp]],
        sample: NDArray[np.intp],
        *,
        alone: bool,
    ) -> list[_Products]:
        """Inner products of some sequences' gradients, from one forward of them."""
        members = torch.from_numpy(np.concatenate(groups))
        rows = batch.batch_rows(members) if alone else None
        hidden = self._reader.undisturbed(lambda: self._elsewhere.hidden(batch, rows, grad=True))
        self._methods["own"] = self._methods["sequence"] = ALONE if alone else WHOLE
        size = sum(each.numel() for each in leaves.values())
        with torch.enable_grad():
            selected = batch.select_of(hidden, members, rows)
            logprobs = self._elsewhere.logprobs(batch, selected, members)
            if alone:
                _refuse_another_forward(batch, members, logprobs, hidden.dtype)
            divergences = reduced_divergence(batch, self.ladder.divergence, members, logprobs)
            sampled = logprobs[:, -1]
            found, start = [], 0
            for group in groups:
                part = slice(start, start + len(group))
                start += len(group)
                wanted = np.flatnonzero(np.isin(group, sample))
                heads = divergences[part][torch.from_numpy(wanted).to(divergences.device)]
                small = size * (len(group) + len(wanted)) <= _TOGETHER
                make = _all_products if small else _few_products
                found.append(make(batch, group, wanted, sampled[part], heads, leaves, self.ladder))
        return found


@dataclass(frozen=True, eq=False)
class _Products:
    """Inner products of the gradients of one sequence.

    `gradients` is None where `matrix` holds <∇ log π_k of the member, ∇D of the wanted> of shape
    (wanted, member); in a large model it holds the two slopes of each wanted token instead.
    """

    group: NDArray[np.intp]
    wanted: NDArray[np.intp]
    matrix: Slopes
    gradients: tuple[Slopes, Slopes] | None = None


@dataclass(frozen=True, eq=False)
class _SameState:
    """The products at one state, which further arms branch from."""

    step: int
    keys: list[tuple[NDArray[Any], ...]]
    before: Mapping[str, Tensor]
    products: list[list[_Products]]

    def holds(self, batches: Sequence[MicroBatch], before: Mapping[str, Tensor], step: int) -> bool:
        """Whether these are the same tokens, read at the same parameters."""
        return (
            step == self.step
            and len(batches) == len(self.keys)
            and all(
                np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
                for batch, key in zip(batches, self.keys, strict=True)
                for ours, theirs in zip(_key(batch), key, strict=True)
            )
            and before.keys() == self.before.keys()
            and all(torch.equal(each, self.before[name]) for name, each in before.items())
        )


def _key(batch: MicroBatch) -> tuple[NDArray[Any], ...]:
    """What the products of a micro-batch rest on beside the parameters."""
    return tuple(batch.rows[name] for name in _SAME_ROWS)


def _all_products(
    batch: MicroBatch,
    group: NDArray[np.intp],
    wanted: NDArray[np.intp],
    sampled: Tensor,
    heads: Tensor,
    leaves: Mapping[str, Tensor],
    ladder: Ladder,
) -> _Products:
    """All gradients of a sequence in one batched backward, and all their inner products."""
    outputs = torch.cat([sampled, heads])
    gradients = torch.autograd.grad(
        outputs,
        tuple(leaves.values()),
        torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    rows = torch.cat([each.flatten(1).double() for each in gradients if each is not None], 1)
    pushes, slopes = rows[: len(group)], rows[len(group) :]
    return _Products(group, wanted, (slopes @ pushes.t()).cpu().numpy())


def _few_products(
    batch: MicroBatch,
    group: NDArray[np.intp],
    wanted: NDArray[np.intp],
    sampled: Tensor,
    heads: Tensor,
    leaves: Mapping[str, Tensor],
    ladder: Ladder,
) -> _Products:
    """One gradient after the other, for models of which not many gradients fit the memory."""
    inputs = tuple(leaves.values())
    push = _push(batch.rows, ladder.ratio_cap)[group]
    weights = torch.from_numpy(np.where(batch.rows["in_loss"][group], push, 0.0))

    def gradient(of: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(of, inputs, retain_graph=True, allow_unused=True)

    of_sequence = gradient((weights.to(sampled.device) * sampled).sum())
    own, whole = np.zeros(len(wanted)), np.zeros(len(wanted))
    for place, member in enumerate(wanted.tolist()):
        slope = gradient(heads[place])
        whole[place] = inner(of_sequence, slope)
        own[place] = push[member] * inner(gradient(sampled[member]), slope)
    return _Products(group, wanted, np.empty((0, 0)), (own, whole))


def _along(
    batch: MicroBatch, products: Sequence[_Products], cap: float | None
) -> tuple[Slopes, Slopes]:
    """Slopes along own and sequence's gradient in the rows' order; NaN outside the sample."""
    own, whole = np.full(batch.size, np.nan), np.full(batch.size, np.nan)
    push, in_loss = _push(batch.rows, cap), batch.rows["in_loss"]
    for each in products:
        at = each.group[each.wanted]
        if each.gradients is not None:
            own[at], whole[at] = each.gradients
        else:
            own[at] = push[at] * each.matrix[np.arange(len(at)), each.wanted]
            whole[at] = each.matrix @ np.where(in_loss[each.group], push[each.group], 0.0)
    return own, whole


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
