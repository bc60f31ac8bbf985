"""The registry's masks as policy losses of verl, under names for `policy_loss.loss_mode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Final

from torch import Tensor

from deltad.losses import TopKLogprobs, trust_region_loss
from deltad.masks import CRITERIA, ENTRY_POINTS, VALUES, Rule, rule
from deltad.probes.errors import ProbeError

from .settings import Settings


@dataclass(frozen=True)
class TopKFields:
    """Both policies at μ's top-K ids in one micro-batch; see `deltad.losses.TopKLogprobs`."""

    token_ids: Tensor
    topk_ids: Tensor
    behavior: Tensor
    policy: Tensor
    collision: Tensor | None
    vocab_size: int


_TOPK: ContextVar[TopKFields | None] = ContextVar("deltad_topk", default=None)


@contextmanager
def offer_topk(topk: TopKFields | None) -> Iterator[None]:
    """Let the policy loss that is called within the block have the top-K."""
    token = _TOPK.set(topk)
    try:
        yield
    finally:
        _TOPK.reset(token)


@dataclass(frozen=True)
class RegisteredLoss:
    """A policy loss of verl's signature.

    Attributes
    ----------
    name : str
        For `actor.policy_loss.loss_mode`.
    criterion : str or Rule
        As `deltad.masks.rule` takes it.
    divergence : str
        The region's: "kl" or "tv".
    """

    name: str
    criterion: str | Rule
    divergence: str

    @property
    def wants_topk(self) -> bool:
        """Whether it judges by both policies at μ's top-K."""
        judge = rule(self.criterion)
        named = (VALUES[each] for each in judge.named)
        return judge.opaque or any(not (each.scalar or each.entry) for each in named)

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        r"""Importance-weighted loss of the tokens that the criterion keeps.

        Parameters
        ----------
        old_log_prob, log_prob : Tensor, shape (response, token)
            log μ_k (of the rollout in verl's bypass mode) and log π_k, in nats.
        advantages, response_mask : Tensor, shape (response, token)
            Â, and 1 at response tokens.
        loss_agg_mode : str
            verl's name of the aggregation.
        config : ActorConfig
            `clip_ratio_low` and `clip_ratio_high` are δ where Â ≤ 0 and where Â > 0, as in verl's
            own dppo losses (for clip-higher the clip range); `clip_ratio_c` is the cap of the
            importance weight (for clip-higher the dual clip); `global_batch_info` what is
            divided by.
        rollout_is_weights : Tensor, optional
            verl's correction weights.

        Returns
        -------
        tuple of Tensor and dict
            The loss of this micro-batch, and numbers to log. verl averages those over
            micro-batches and ranks, so every share comes as `…/sum` and `…/count`, whose
            averages have the right quotient.
        """
        if config is None:
            raise ProbeError(f"policy loss {self.name} needs the actor's config")
        topk = _TOPK.get()
        if self.wants_topk and topk is None:
            raise ProbeError(
                f"policy loss {self.name} judges by both policies at the behaviour policy's top-K: "
                "these are reached in the training of an engine only, with the plugin loaded "
                "(python -m deltad.probes.verl says whether it is) and deltad_rescored as "
                "actor_rollout_ref.rollout.agent.default_agent_loop"
            )
        bounds = float(config.clip_ratio_low), float(config.clip_ratio_high)
        cap = float(config.clip_ratio_c)
        clip = self.criterion == "clip-higher"
        found = trust_region_loss(
            log_prob.float(),  # verl's may be bfloat16; its rounding has happened
            old_log_prob.float(),
            advantages.float(),
            response_mask,
            criterion=self.criterion,
            divergence=self.divergence,
            threshold=bounds,
            parameters=dict(zip(("low", "high", "dual"), (*bounds, cap), strict=True))
            if clip
            else {},
            ratio_cap=None if clip else cap,
            topk=None if not self.wants_topk or topk is None else _logprobs(topk),
            token_weight=rollout_is_weights,
            aggregation=loss_agg_mode,
            check=False,  # the rollout server's numbers differ from decode to prefill
            **_denominator(loss_agg_mode, config.global_batch_info),
        )
        metrics: dict[str, Any] = {}
        for name, metric in found.metrics.items():
            metrics[f"deltad/{name}/sum"] = metric.numerator.item()
            metrics[f"deltad/{name}/count"] = metric.denominator.item()
        for theirs, ours in (("pg_clipfrac", "masked"), ("ppo_kl", "ppo_kl")):
            metrics[f"actor/{theirs}"] = found.metrics[ours].value
        return found.loss, metrics


def _logprobs(topk: TopKFields) -> TopKLogprobs:
    """As the losses take it."""
    return TopKLogprobs(
        token_ids=topk.token_ids,
        topk_ids=topk.topk_ids,
        behavior=topk.behavior,
        policy=topk.policy,
        vocab_size=topk.vocab_size,
        collision=topk.collision,
    )


def _denominator(mode: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """What verl's `agg_loss` divides by, as `deltad.losses.aggregate` is told it."""
    counted = info.get("batch_num_tokens" if mode == "token-mean" else "global_batch_size")
    return {
        "denominator": None if mode == "token-sum" else counted,
        "ranks": int(info.get("dp_size") or 1),
        "horizon": info.get("loss_scale_factor"),
    }


def _losses() -> dict[str, RegisteredLoss]:
    """Every criterion that verl's batch has the numbers for."""
    found = []
    for name, criterion in CRITERIA.items():
        if f"full_{criterion.family}_pre" in criterion.columns or name == "ratio":
            continue  # no trainer has all of μ
        found.append(RegisteredLoss(name.replace("-", "_"), name, criterion.divergence))
    for family in ("kl", "tv"):
        found.append(RegisteredLoss(f"dppo_topk_{family}", "ratio", family))
        found.append(
            RegisteredLoss(f"predictive_{family}", f"predictive-{family}-aggregated", family)
        )
    return {loss.name: loss for loss in found}


def _own_losses() -> dict[str, RegisteredLoss]:
    """Losses of the user's rules: those that the settings name, and of installed packages."""
    installed = (each.name for each in entry_points(group=ENTRY_POINTS))
    found = [rule(each) for each in (*Settings.from_environment().rules, *installed)]
    names = ((each, each.name.replace("-", "_")) for each in found)
    return {name: RegisteredLoss(name, each, each.divergence) for each, name in names}


LOSSES: Final[dict[str, RegisteredLoss]] = _losses()
"""By the name that verl's `policy_loss.loss_mode` takes; a user's rules are added when verl's
losses are imported."""


def register_losses(core_algos: ModuleType) -> None:
    """Give verl all of them.

    Parameters
    ----------
    core_algos : module
        `verl.trainer.ppo.core_algos`.

    Raises
    ------
    ProbeError
        verl, or another plugin, has a loss of that name.
    """
    LOSSES.update(_own_losses())
    registry: dict[str, Any] = core_algos.POLICY_LOSS_REGISTRY
    taken = [name for name, loss in LOSSES.items() if registry.get(name, loss) is not loss]
    if taken:
        raise ProbeError(
            f"verl has a policy loss {taken[0]!r} already ({registry[taken[0]]}), which this "
            "version of deltad would hide"
        )
    for name, loss in LOSSES.items():
        core_algos.register_policy_loss(name)(loss)
