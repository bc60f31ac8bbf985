"""The policy surrogate with a keep mask: what the recipes train with and a trainer can plug in."""

import math

import torch
from torch import Tensor


def policy_loss(
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    keep: Tensor,
    *,
    denominator: float,
    ratio_cap: float | None = None,
) -> Tensor:
    r"""Policy-gradient surrogate of the kept tokens, over one denominator for every mask.

    .. math:: L = -\frac{1}{N} \sum_t m_t\, \min(r_t, c)\, \hat A_t,
              \qquad r_t = \exp(\log\pi_k - \log\mu_k)

    with m = `keep`, N = `denominator`, c = `ratio_cap`. The gradient is that of the importance
    weight held fixed (the cap stops it, the token still pushes with the capped weight):

    .. math:: \frac{\partial L}{\partial \log\pi_k} = -\frac{m_t}{N} \min(r_t, c)\, \hat A_t

    Parameters
    ----------
    logprob
        log π_k of the sampled tokens under the policy, at the sampling temperature; shape
        (token,) or any other, float32 or float64, nats. The only input that carries gradient.
    behavior_logprob
        log μ_k as the behaviour policy reported it; same shape, nats.
    advantage
        Â; same shape.
    keep
        True where the token's gradient passes; same shape, bool. A dropped token takes no part
        at all: whatever its numbers are (NaN, infinities), they cannot reach the loss.
    denominator
        What the sum is divided by, > 0: the response tokens of the *whole* step, kept or not
        (also over the micro-batches of an accumulated step), so that a mask does not change the
        step size of the tokens that it keeps.
    ratio_cap
        Upper bound c of the importance weight, > 0; None for none.

    Returns
    -------
    Tensor
        The loss, a scalar of `logprob`'s dtype; 0 with a gradient of 0 where nothing is kept.

    Raises
    ------
    ValueError
        Shapes that differ, half precision, a `keep` that is not bool, a denominator or cap
        that is not positive.

    Notes
    -----
    Without a cap this is the unclipped surrogate −Σ m r Â / N of which the trust-region masks
    choose the tokens; with one it is the truncated importance weight that DPPO implementations
    multiply log π with. The value is that of the surrogate in both cases.

    Examples
    --------
    Two tokens of Â = 1 with r = 2 and r = 1, the second dropped, over a step of 4 tokens:

    >>> import torch
    >>> log_pi = torch.tensor([0.5, 0.25]).log().requires_grad_()
    >>> log_mu = torch.tensor([0.25, 0.25]).log()
    >>> keep = torch.tensor([True, False])
    >>> loss = policy_loss(log_pi, log_mu, torch.ones(2), keep, denominator=4)
    >>> loss.backward()
    >>> round(loss.item(), 6), [round(g, 6) for g in log_pi.grad.tolist()]
    (-0.5, [-0.5, 0.0])
    """
    for name, value in (
        ("behavior_logprob", behavior_logprob),
        ("advantage", advantage),
        ("keep", keep),
    ):
        if value.shape != logprob.shape:
            raise ValueError(
                f"`{name}` must have the shape of `logprob`, {tuple(logprob.shape)}, "
                f"got {tuple(value.shape)}"
            )
    if logprob.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`logprob` must be float32 or float64, got {logprob.dtype}: a ratio of half-precision "
            "log-probs is mostly rounding; take the log-softmax in float32"
        )
    if keep.dtype != torch.bool:
        raise ValueError(f"`keep` must be bool (True = the gradient passes), got {keep.dtype}")
    if not denominator > 0:
        raise ValueError(
            f"`denominator` must be positive: the response tokens of the step, got {denominator}"
        )
    if ratio_cap is not None and not ratio_cap > 0:
        raise ValueError(f"`ratio_cap` must be positive or None, got {ratio_cap}")

    zero = torch.zeros((), dtype=logprob.dtype, device=logprob.device)
    # Dropped tokens are replaced before anything is computed of them: 0 * inf would be NaN.
    log_pi = torch.where(keep, logprob, zero)
    fixed = log_pi.detach()
    log_weight = fixed - torch.where(keep, behavior_logprob.detach().to(logprob.dtype), zero)
    if ratio_cap is not None:
        log_weight = log_weight.clamp(max=math.log(ratio_cap))
    weight = log_weight.exp() * torch.where(keep, advantage.detach().to(logprob.dtype), zero)
    # exp(x - x.detach()) is exactly 1 and has the derivative 1: the value stays the surrogate's.
    return -(weight * (log_pi - fixed).exp()).sum() / denominator
