"""What verl's batch holds of the response tokens, laid out (response, token)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltad.probes.behavior import ResponseTokens
from deltad.probes.errors import ProbeError

ROW: Final = "deltad_row"
"""Field of the batch that numbers its responses; micro-batches carry it along."""

TOPK_IDS: Final = "teacher_ids"
TOPK_LOGPROBS: Final = "teacher_logprobs"
"""Where `deltad_rescored` puts μ's top-K: of all fields verl carries these two from its rollout
to its engine as they are, a list of K for each token of prompt and response."""

_ASKS: Final = "distillation_use_topk"
_DISTILLS: Final = "deltad_distills"  # what the former was before the plugin set it
_BATCH_FIELDS: Final = (
    "input_ids",
    "responses",
    "response_mask",
    "advantages",
    "old_log_probs",
)


@dataclass(frozen=True)
class BatchFields:
    """One rank's batch of one optimizer step; all tensors are on the CPU.

    Attributes
    ----------
    tokens : ResponseTokens
        As the rollout gave them; their first column is empty, since a response token needs a
        position before it. Where μ's top-K is not known all its ids are −1: K is 1 then, and
        what can be recorded is the support {k, rest}.
    token_id : Tensor of int, shape (row,)
        Sampled tokens, in the order of the rows.
    mask : Tensor of bool, shape (response, token)
        The same without the empty column.
    temperature : float
        Sampling temperature.
    behavior : dict
        Where μ comes from, for the dump's metadata.
    """

    tokens: ResponseTokens
    token_id: Tensor
    mask: Tensor
    temperature: float
    behavior: dict[str, str]

    @property
    def top_k(self) -> int:
        """K."""
        return self.tokens.top_k


def is_policy_batch(data: Any) -> bool:
    """Whether this is what a policy loss is made of (not a critic's, not of fine-tuning)."""
    return all(name in data for name in _BATCH_FIELDS)


def has_topk(data: Any) -> bool:
    """Whether μ's top-K is there; in a distillation the same fields hold the teacher's."""
    return TOPK_IDS in data and TOPK_LOGPROBS in data and not is_distillation(data)


def is_distillation(data: Any) -> bool:
    """Whether verl itself has a use for the engine's logits, and the batch a teacher's top-K."""
    from verl.utils import tensordict_utils as tu

    asked = tu.get_non_tensor_data(data, key=_ASKS, default=False)
    return bool(tu.get_non_tensor_data(data, key=_DISTILLS, default=asked))


def asking_for_logits(data: Any, *, ask: bool = True, **flags: Any) -> Any:
    """A copy of the batch, its tensors shared, with which an engine hands over its logits.

    Parameters
    ----------
    data : TensorDict
        The batch.
    ask : bool
        Whether the engine shall hand them over; in a distillation it does anyway.
    **flags
        Further flags of the batch.
    """
    from verl.utils import tensordict_utils as tu

    distills = is_distillation(data)
    copied = data.copy()
    # verl's engines ask a distillation's loss what is to be made of their logits.
    tu.assign_non_tensor(copied, **{_ASKS: ask or distills, _DISTILLS: distills}, **flags)
    return copied


def temperature_of(data: Any) -> float:
    """The sampling temperature, one for the whole batch."""
    given = data["temperature"]
    values = torch.as_tensor(given, dtype=torch.float64).reshape(-1)
    if not bool((values == values[0]).all()):
        raise ProbeError(
            "all responses must be sampled at one temperature, got "
            f"{float(values.min()):g} to {float(values.max()):g}"
        )
    # verl keeps it as float32 where it is a tensor.
    return float(f"{float(values[0]):.6g}")


def responses_of(values: Tensor, data: Any) -> Tensor:
    """From a value a token of prompt and response to (response, token, …): what predicts them."""
    from verl.workers.utils.padding import no_padding_2_padding

    laid: Tensor = no_padding_2_padding(values, data)
    return laid


def padded(values: Tensor, fill: float = 0) -> Tensor:
    """A nested tensor as a padded one; others as they are."""
    return values.to_padded_tensor(fill) if values.is_nested else values


def read_fields(data: Any, *, rank: int, ranks: int) -> BatchFields:
    """Read a batch as verl's engine gets it.

    Parameters
    ----------
    data : TensorDict
        The batch.
    rank, ranks : int
        Of this process among those that hold different responses.

    Returns
    -------
    BatchFields
        Sequences are numbered so that no two ranks use the same number. Groups carry 31 bits of
        a checksum of the prompt's `uid` (without one, of its ids): the same on every rank.
    """
    mask = padded(data["response_mask"]).bool().cpu()
    responses = mask.shape[0]
    behavior, mu = _sampled(data)
    topk_ids, topk_logprobs = _topk(data, mask)
    if has_topk(data):
        behavior["topk_source"] = "rescored: the rollout server read prompt and response once more"
    else:
        behavior["topk_source"] = "none: the support is the sampled token and the rest"
    tokens = ResponseTokens(
        response_mask=pad(mask, (1, 0)),
        advantages=pad(padded(data["advantages"]).float().cpu(), (1, 0)),
        behavior_logprobs=pad(mu, (1, 0)),
        topk_ids=pad(topk_ids, (0, 0, 1, 0), value=-1),
        topk_logprobs=pad(topk_logprobs, (0, 0, 1, 0)),
        sequence=torch.arange(responses) * ranks + rank,
        group=torch.tensor(_groups(data)),
    )
    return BatchFields(
        tokens,
        padded(data["responses"]).cpu()[mask],
        mask,
        temperature_of(data),
        behavior,
    )


def _sampled(data: Any) -> tuple[dict[str, str], Tensor]:
    """Log μ of the sampled tokens, and where it comes from."""
    name = "rollout_log_probs" if "rollout_log_probs" in data else "old_log_probs"
    source = "rollout" if name == "rollout_log_probs" else "recomputed"
    return {"mu_source": source, "mu_field": name}, padded(data[name]).float().cpu()


def _topk(data: Any, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log μ of the top-K, shape (response, token, topk)."""
    if not has_topk(data):
        shape = (*mask.shape, 1)
        return torch.full(shape, -1), torch.full(shape, torch.nan)
    ids = responses_of(data[TOPK_IDS], data).long().cpu()
    return ids, responses_of(data[TOPK_LOGPROBS], data).float().cpu()


def _groups(data: Any) -> list[int]:
    """A number a prompt."""
    if "uid" in data:
        names = [str(getattr(each, "data", each)).encode() for each in data["uid"]]
    else:
        prompts = data["prompts"]
        rows = prompts.unbind() if prompts.is_nested else list(prompts)
        names = [row.cpu().numpy().astype("int64").tobytes() for row in rows]
    return [zlib.crc32(name) & 0x7FFFFFFF for name in names]
