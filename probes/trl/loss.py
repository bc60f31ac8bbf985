r"""A mask as the loss of an unmodified trainer: through the numbers that TRL's loss is made of.

TRL's clipped losses sum :math:`-\min(\rho_t \hat A_t, \text{clip}(\rho_t) \hat A_t)` over tokens,
with :math:`\rho_t = \exp(\log\pi_t - o_t)`, o being `old_per_token_logps`, and divide by what
`loss_type` says. Right after the training forward, before TRL looks at them, they are set to

.. math:: \hat A_t \leftarrow w_t \min(r_t, c)\, \hat A_t, \qquad
          o_t \leftarrow \operatorname{sg}(\log\pi_t), \qquad r_t = \pi_t / \mu_t

so that ρ is 1, no clip is reached, and a token's loss and its derivative by log π are both
:math:`-w_t \min(r_t, c) \hat A_t`: those of `deltad.losses.trust_region_loss`, to the rounding of
one float32 product, whatever the denominator. Denominators count dropped tokens too. The KL to a
reference model, an entropy bonus and TRL's metrics stay TRL's own; its `epsilon`, `epsilon_high`
and `delta` have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from deltad.losses import PolicyLoss, TopKLogprobs, trust_region_loss
from deltad.losses.metrics import Metric
from deltad.masks import DEFAULT_THRESHOLD, Rule, rule
from deltad.probes.errors import ProbeError
from deltad.probes.microbatch import MicroBatch

LOSS_TYPES: Final = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of TRL that are −ρ Â a token where no clip is reached."""


@dataclass(frozen=True)
class MaskedLoss:
    """A criterion or a soft weight in the place of TRL's clip.

    Attributes
    ----------
    criterion : str or Rule
        As `deltad.masks.rule` takes it.
    threshold : float
        δ.
    divergence : str or None
        The region's; None for the criterion's own.
    ratio_cap : float or None
        c, with stop-gradient: a capped token pushes with the weight c.
    parameters : mapping of str to float
        A soft weight's own.

    Raises
    ------
    CriterionError, ValueError
        What `trust_region_loss` raises of such options, or a criterion that needs all of μ.
    """

    criterion: str | Rule
    threshold: float = DEFAULT_THRESHOLD
    divergence: str | None = None
    ratio_cap: float | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Two ids, of which the first was sampled: whatever the options cannot do shows here.
        half = torch.full((1, 1), 0.5, dtype=torch.float64).log()
        ids = torch.zeros(1, 1, dtype=torch.long)
        pair = half[..., None]
        topk = TopKLogprobs(ids, ids[..., None], pair, pair, 2, torch.full_like(half, 0.5))
        self._judge(half, half, torch.ones_like(half), topk)

    @property
    def family(self) -> str:
        """Divergence of the region."""
        return self.divergence or rule(self.criterion).family or "kl"

    def put_into(
        self, inputs: dict[str, Any], logps: Tensor, batch: MicroBatch, mask: Tensor
    ) -> Mapping[str, Metric]:
        """Change the micro-batch that TRL is about to compute its loss of.

        Parameters
        ----------
        inputs : dict
            A copy of the trainer's; changed in place.
        logps : Tensor, shape (B, T)
            log π as TRL has it, with its graph.
        batch : MicroBatch
            Read by the probe; is told which tokens are kept.
        mask : Tensor of bool, shape (B, T)
            Tokens of the rows. Others, which the behavior policy did not score, are dropped.

        Returns
        -------
        mapping of str to Metric
            As `trust_region_loss` gives them.
        """
        laid = torch.zeros(logps.shape, dtype=torch.float32, device=logps.device)
        inputs["old_per_token_logps"] = logps.detach()
        inputs["sampling_per_token_logps"] = laid
        correction = inputs.get("importance_sampling_ratio")
        if correction is not None:
            # The weight is π/μ already; from TRL's own π_old to μ it would be corrected twice.
            inputs["importance_sampling_ratio"] = torch.ones_like(correction)
        if not batch.size:
            inputs["advantages"] = laid
            return {}
        rows = {
            name: torch.from_numpy(batch.rows[name])[None]
            for name in (
                "behavior_logprob", "pre_logprob", "advantage", "token_id", "topk_ids",
                "topk_behavior_logprobs", "topk_pre_logprobs", "pre_collision",
            )
        }  # fmt: skip
        # In float64 of the float32 that is stored, so that a reader of the dump decides the same.
        topk = TopKLogprobs(
            rows["token_id"].long(),
            rows["topk_ids"].long(),
            rows["topk_behavior_logprobs"].double(),
            rows["topk_pre_logprobs"].double(),
            batch.vocab_size,
            rows["pre_collision"].double(),
        )
        policy, behavior = rows["pre_logprob"].double(), rows["behavior_logprob"].double()
        advantage = rows["advantage"].double()
        sequence = torch.from_numpy(batch.rows["sequence"])[None]
        judged = self._judge(policy, behavior, advantage, topk, sequence)
        batch.keep(judged.keep[0])
        pull = judged.factor * advantage
        inputs["advantages"] = laid.masked_scatter(mask, pull[0].to(laid))
        # Read by TRL's off-policy mask of whole sequences.
        inputs["sampling_per_token_logps"] = laid.masked_scatter(mask, behavior[0].to(laid))
        return judged.metrics

    def _judge(
        self,
        policy: Tensor,
        behavior: Tensor,
        advantage: Tensor,
        topk: TopKLogprobs,
        sequence: Tensor | None = None,
    ) -> PolicyLoss:
        """Weights of tokens, of shape (1, row)."""
        return trust_region_loss(
            policy,
            behavior,
            advantage,
            torch.ones_like(policy),
            criterion=self.criterion,
            threshold=self.threshold,
            divergence=self.divergence,
            topk=topk,
            parameters=self.parameters,
            ratio_cap=self.ratio_cap,
            sequence=sequence,
        )


def in_loss(batch: MicroBatch, mask: Tensor, advantages: Tensor) -> Callable[[Tensor], None]:
    """Note at backward which tokens TRL's own loss took a gradient of.

    Parameters
    ----------
    batch : MicroBatch
        Is told.
    mask : Tensor of bool, shape (B, T)
        Tokens of its rows.
    advantages : Tensor, shape (B,) or (B, T)
        Â; a token of none has no gradient, and was not masked for it.

    Returns
    -------
    callable
        A hook for the trainer's log-probs, shape (B, T).
    """
    weighed = advantages[:, None] if advantages.ndim == 1 else advantages

    def note(gradient: Tensor) -> None:
        batch.keep(((gradient != 0) | (weighed == 0))[mask])

    return note


def check_trainer(trainer: Any) -> None:
    """Refuse settings under which TRL's loss would not be the mask's.

    Raises
    ------
    ProbeError
        One sentence says which, and what to set.
    """
    if trainer.loss_type not in LOSS_TYPES:
        raise ProbeError(
            "a criterion can take the place of the clip where loss_type is one of "
            f"{', '.join(LOSS_TYPES)}; got {trainer.loss_type!r}"
        )
    if trainer.importance_sampling_level != "token":
        raise ProbeError(
            "a criterion weighs token by token: set importance_sampling_level='token', got "
            f"{trainer.importance_sampling_level!r}"
        )
    if trainer.beta != 0.0 and getattr(trainer.args, "use_bias_correction_kl", False):
        raise ProbeError(
            "use_bias_correction_kl weighs the KL by TRL's own ratio, which a criterion replaces: "
            "set it to False"
        )
    if getattr(trainer, "use_liger_kernel", False):  # since TRL 1.15 its layers only
        raise ProbeError(
            "Liger's GRPO loss has its clip inside its kernel: set use_liger_kernel=False to "
            "train with a criterion"
        )
