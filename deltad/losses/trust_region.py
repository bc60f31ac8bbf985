"""The policy loss with any mask or weight of the registry, on tensors as a trainer has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, get_args

import torch
from torch import Tensor

from deltad._checks import LOGPROB_TOLERANCE, SupportError
from deltad.masks import DEFAULT_THRESHOLD, Rule, largest_ratio

from . import conventions
from .aggregation import aggregate
from .conventions import Value
from .judgement import lay_out
from .metrics import Metric, measure
from .rules import check_given, chosen, weigh
from .topk import TopKLogprobs

NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
"""The parameters of a rule that is left as it is."""


@dataclass(frozen=True)
class PolicyLoss:
    """A loss and what was decided on the way.

    Attributes
    ----------
    loss : Tensor
        A scalar of the log-probs' dtype, to be differentiated.
    keep : Tensor of bool, shape (batch, token)
        True at response tokens whose gradient passes (a weight above 0); False outside the mask.
    weight : Tensor, shape (batch, token)
        What the token's importance-weighted gradient was multiplied by: 1 or 0 for a criterion,
        anything for a soft weight; 0 outside the mask.
    factor : Tensor, shape (batch, token)
        w min(r, `ratio_cap`): what Â ∇ log π_k was multiplied by.
    metrics : mapping of name to Metric
        Numerators and denominators, to be added over micro-batches and ranks before they are
        divided; see `deltad.losses.metrics`.
    """

    loss: Tensor
    keep: Tensor
    weight: Tensor
    factor: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)


def trust_region_loss(
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    response_mask: Tensor,
    *,
    criterion: str | Rule = "predictive-kl-aggregated",
    threshold: float | tuple[float, float] = DEFAULT_THRESHOLD,
    divergence: str | None = None,
    topk: TopKLogprobs | None = None,
    full: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    parameters: Mapping[str, float] = NOTHING,
    ratio_cap: float | None = None,
    token_weight: Tensor | None = None,
    aggregation: str = "token-mean",
    denominator: Tensor | float | None = None,
    ranks: int = 1,
    horizon: int | None = None,
    convention: str = "paper",
    value: Value | None = None,
    sequence: Tensor | None = None,
    drop_missing: bool = False,
    check: bool = True,
    tolerance: float = LOGPROB_TOLERANCE,
) -> PolicyLoss:
    r"""Importance-weighted policy loss of the tokens that a trust region lets pass.

    .. math:: \ell_t = -w_t\, u_t\, \min(r_t, c)\, \hat A_t,
              \qquad r_t = \exp(\log\pi_k - \log\mu_k), \qquad
              \frac{\partial \ell_t}{\partial \log\pi_k} = \ell_t

    w is the criterion's decision (1 or 0) or the soft weight, u = `token_weight`, c = `ratio_cap`.
    Of everything, log π_k alone carries gradient.

    Parameters
    ----------
    logprob
        log π_k at the sampling temperature; shape (batch, token), float32 or float64, nats.
    behavior_logprob
        log μ_k of the policy that the region is around; same shape, nats.
    advantage
        Â; same shape, or (batch,) or (batch, 1) where a response has one.
    response_mask
        True at response tokens; same shape, bool or numbers. What lies outside may be anything,
        NaN and infinities included.
    criterion
        A name of `deltad.masks.RULES` ("none", a mask or a soft weight), `FILE.py:NAME`, or a
        `Rule` of your own.
    threshold
        δ ≥ 0: nats for KL, a probability for TV; or (δ where Â ≤ 0, δ where Â > 0).
    divergence
        The region's divergence, "kl" or "tv"; None takes the criterion's own, else KL.
    topk
        Both policies at the behaviour policy's top-K ids; needed by the criteria that judge by a
        top-K divergence or a predicted direction.
    full
        By divergence name D and Ḋ over the whole vocabulary, each (batch, token); needed by the
        `full` criteria alone.
    parameters
        A soft weight's own parameters by name (`cap`, `low`, `high`, `delta`), or `low`, `high`
        and `dual` of clip-higher.
    ratio_cap
        Upper bound c > 0 of the importance weight; its gradient is stopped: a token beyond pushes
        on with c. None for none.
    token_weight
        A further factor u a token (a trainer's correction for its engine); shape (batch, token)
        or (batch, 1).
    aggregation, denominator, ranks, horizon
        As in `aggregate`. With a denominator counted over the whole step the losses of its
        micro-batches add up to the step's.
    convention
        "paper", "trl" or "verl": what `deltad.losses.CONVENTIONS` says; the default is the
        paper's.
    value
        What the loss reads; the gradient is the same for all three. "ratio": the formula above.
        "logprob": − w u sg(min(r, c)) Â log π_k, as DPPO and CISPO log it. "clip" (clip-higher
        alone): −min(r Â, clip(r) Â), where Â < 0 at most −`dual` Â: masked tokens count with the
        bound that they were clipped to. None takes the convention's.
    sequence
        Number of the response of each token, shape (batch, token), for rules that judge whole
        responses; by default each row is one.
    drop_missing
        Leave out response tokens for which the behaviour policy's numbers are NaN (an engine did
        not report them) and count them in the metric `missing`; otherwise they are refused.
    check
        Refuse impossible numbers. False spares waiting for the device; NaN is then left out.
    tolerance
        Rounding that the check lets pass, as in `topk_support`.

    Returns
    -------
    PolicyLoss
        Loss, `keep`, weights and metrics.

    Raises
    ------
    ValueError
        Shapes or dtypes that do not fit, or an option that makes no sense.
    CriterionError
        An unknown criterion or parameter, a divergence that does not fit, or numbers missing
        that the criterion needs.
    SupportError
        An impossible number at a response token; says at which.

    Examples
    --------
    One response of two tokens, of which the second fell from 0.5 to 0.25 and would fall on:

    >>> import torch
    >>> log_pi = torch.tensor([[0.5, 0.25]]).log().requires_grad_()
    >>> log_mu = torch.tensor([[0.5, 0.5]]).log()
    >>> mask = torch.ones(1, 2)
    >>> result = trust_region_loss(
    ...     log_pi, log_mu, -torch.ones(1), mask, criterion="binary-kl", threshold=0.1
    ... )
    >>> result.loss.backward()
    >>> result.keep.tolist(), round(result.loss.item(), 6), log_pi.grad.tolist()
    ([[True, False]], 0.5, [[0.5, 0.0]])
    """
    _check_shapes(logprob, behavior_logprob, response_mask, topk, full or {})
    if check and response_mask.is_floating_point() and bool(response_mask.isnan().any()):
        raise ValueError("`response_mask` must tell response tokens from others, but holds NaN")
    advantage = _a_token("advantage", advantage, logprob)
    if ratio_cap is not None and not ratio_cap > 0:
        raise ValueError(f"`ratio_cap` must be positive or None, got {ratio_cap}")
    style = conventions.convention(convention)
    found_rule = chosen(criterion, style, parameters)
    rule, clip = found_rule.rule, found_rule.clip
    reads = value or (style.value if clip is None else style.clip_value)
    if reads not in get_args(Value):
        raise ValueError(f"`value` must be one of {', '.join(get_args(Value))}, got {reads!r}")
    if reads == "clip" and clip is None:
        raise ValueError(f"`value` clip belongs to criterion clip-higher, got {rule.name}")
    region = divergence or rule.divergence
    check_given(
        rule, collision=topk is None or topk.collision is not None, full=(full or {}).keys()
    )
    low, high = _pair(threshold)

    judged = lay_out(
        logprob,
        behavior_logprob,
        advantage,
        response_mask != 0,
        topk=topk,
        full=full or {},
        drop_missing=drop_missing,
        sequence=sequence,
        check=check,
        tolerance=tolerance,
    )
    with torch.no_grad():
        found = weigh(judged, rule, threshold=(low, high), divergence=region, check=check)
        log_ratio = judged.tokens.policy_logprob - judged.tokens.behavior_logprob
        if style.log_ratio_bound is not None:
            log_ratio = log_ratio.clamp(-style.log_ratio_bound, style.log_ratio_bound)
        ratio = log_ratio.exp()
        zero = torch.zeros_like(ratio)
        beyond = None
        if clip is not None and clip.dual < math.inf:
            beyond = clip.beyond(judged, ratio)
            found = torch.where(beyond, zero, found)
        # A soft weight is made of a ratio that is kept from overflowing: so w r is what it says.
        weight = ratio if rule.weight is None else ratio.clamp(max=largest_ratio(ratio.dtype))
        weight = weight if ratio_cap is None else weight.clamp(max=ratio_cap)
        # A weight of 0 meets a ratio that may have overflowed: 0 · inf must not become NaN.
        factor = torch.where(found != 0, found * weight, zero)
        pull = torch.where(found != 0, factor * judged.tokens.advantage, zero)
        held = zero
        if clip is not None and reads == "clip":
            held = torch.where(judged.usable & (found == 0), clip.held(judged, ratio), zero)

    shape = logprob.shape
    pull, held = (part.reshape(shape).to(logprob.dtype) for part in (pull, held))
    if token_weight is not None:
        extra = _a_token("token_weight", token_weight, logprob).detach().to(logprob.dtype)
        extra = torch.where((pull != 0) | (held != 0), extra, torch.zeros_like(extra))
        pull, held = pull * extra, held * extra
    if check:
        _check_pull(pull + held, log_ratio, None if token_weight is None else extra)
    # Unread tokens are replaced before anything is computed of them: 0 · NaN would be NaN.
    log_pi = torch.where(pull != 0, logprob, torch.zeros_like(logprob))
    # exp(x − x.detach()) is exactly 1 and has the derivative 1: the value stays the surrogate's.
    carrier = log_pi if reads == "logprob" else (log_pi - log_pi.detach()).exp()
    loss = aggregate(
        -(pull * carrier + held),
        response_mask,
        aggregation,
        denominator=denominator,
        ranks=ranks,
        horizon=horizon,
    )
    return PolicyLoss(
        loss=loss,
        keep=(found > 0).reshape(shape),
        weight=found.reshape(shape).to(logprob.dtype),
        factor=factor.reshape(shape).to(logprob.dtype),
        metrics=measure(
            judged,
            found,
            log_ratio,
            threshold=(low, high),
            divergence=region,
            ratio_cap=ratio_cap,
            beyond=beyond,
        ),
    )


def _check_shapes(
    logprob: Tensor,
    behavior_logprob: Tensor,
    response_mask: Tensor,
    topk: TopKLogprobs | None,
    full: Mapping[str, tuple[Tensor, Tensor]],
) -> None:
    """Refuse what is not (batch, token) of full precision."""
    if logprob.ndim != 2:
        raise ValueError(f"`logprob` must be of shape (batch, token), got {tuple(logprob.shape)}")
    others = {"behavior_logprob": behavior_logprob, "response_mask": response_mask}
    precise = {"behavior_logprob": behavior_logprob}
    if topk is not None:
        others["topk.token_ids"] = topk.token_ids
        precise |= {"topk.behavior": topk.behavior, "topk.policy": topk.policy}
    for name, pair in full.items():
        others |= {f"full[{name!r}][{at}]": part for at, part in enumerate(pair)}
    for name, tensor in others.items():
        if tensor.shape != logprob.shape:
            raise ValueError(
                f"`{name}` must have the shape of `logprob`, {tuple(logprob.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
    if logprob.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`logprob` must be float32 or float64, got {logprob.dtype}: a ratio of half-precision "
            "log-probs is mostly rounding; take the log-softmax in float32"
        )
    for name, tensor in precise.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"`{name}` must be float32 or float64 too, got {tensor.dtype}")


def _pair(threshold: float | tuple[float, float]) -> tuple[float, float]:
    """δ where Â ≤ 0, and where Â > 0."""
    pair = threshold if isinstance(threshold, tuple) else (threshold, threshold)
    if len(pair) != 2 or not all(isinstance(each, int | float | Tensor) for each in pair):
        raise ValueError(
            f"`threshold` must be a number, or a tuple (δ where Â ≤ 0, δ where Â > 0), got "
            f"{threshold!r}"
        )
    return pair


def _check_pull(pull: Tensor, log_ratio: Tensor, token_weight: Tensor | None) -> None:
    """Refuse what would make the loss infinite or NaN."""
    bad = ~(pull.abs() < largest_ratio(pull.dtype) / 16)
    if not bool(bad.any()):
        return
    row = int(bad.flatten().int().argmax())
    response, position = divmod(row, pull.shape[1])
    weight = "" if token_weight is None else f", token_weight is {token_weight[response, position]}"
    raise SupportError(
        row,
        f"response {response} of the batch, its token {position}: its loss is no finite number "
        f"(log r is {float(log_ratio[row]):g}{weight}): a log-prob that stands for none, or a "
        "ratio that needs `ratio_cap`",
    )


def _a_token(name: str, values: Tensor, logprob: Tensor) -> Tensor:
    """A value a token from one a token or one a response."""
    if values.ndim == 1:
        values = values[:, None]
    if (
        values.ndim != 2
        or values.shape[0] != logprob.shape[0]
        or values.shape[1]
        not in (
            1,
            logprob.shape[1],
        )
    ):
        raise ValueError(
            f"`{name}` must be of shape {tuple(logprob.shape)}, ({logprob.shape[0]}, 1) or "
            f"({logprob.shape[0]},), got {tuple(values.shape)}"
        )
    return values.expand_as(logprob)
