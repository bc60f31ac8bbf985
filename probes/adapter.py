"""What low-rank adapters add to the logits of a head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .errors import ProbeError
from .readout import exact_products

_REFUSED = (
    "the head carries an adapter whose share of the logits is not known ({}): leave the head out "
    "of the adapter's target modules"
)


def base_of(head: nn.Module) -> nn.Module:
    """Find the layer below a head's adapters; the head itself where it carries none.

    Raises
    ------
    ProbeError
        An adapter that is none of PEFT's plain LoRA.
    """
    base = getattr(head, "base_layer", None)
    if not isinstance(base, nn.Module):
        return head
    if not all(hasattr(head, name) for name in ("lora_A", "lora_B", "scaling", "lora_dropout")):
        raise ProbeError(_REFUSED.format(f"{type(head).__name__} is no LoRA of PEFT"))
    if hasattr(base, "base_layer"):
        raise ProbeError(_REFUSED.format("one adapter lies within another"))
    for name in head.lora_A:  # type: ignore[union-attr]
        _check(head, name)
    return base


def low_rank(
    head: nn.Module, hidden: Tensor, *, exclusive: bool | None = None
) -> list[tuple[Tensor, Tensor]]:
    """What the active adapters of a head add, as factors: the logits gain B x for each.

    Parameters
    ----------
    head : nn.Module
        One that `base_of` takes.
    hidden : Tensor, shape (token, hidden)
        What enters the head.
    exclusive : bool, optional
        As in `readout.exact_products`.

    Returns
    -------
    list of (Tensor, Tensor)
        x = s A h, shape (token, rank), and B, shape (vocab, rank), in the dtype of A or wider;
        none where adapters are off, merged, or not there.
    """
    adapted: Any = head
    if base_of(head) is head or adapted.disable_adapters or adapted.merged_adapters:
        return []
    pairs = []
    for name in adapted.active_adapters:
        if name in adapted.lora_A:
            down, up = adapted.lora_A[name].weight, adapted.lora_B[name].weight
            if hasattr(down, "device_mesh") or hasattr(up, "device_mesh"):
                raise ProbeError(_REFUSED.format("its weights are sharded"))
            with exact_products(hidden, down, exclusive=exclusive) as wide:
                x = hidden.to(wide) @ down.to(wide).t()
            pairs.append((x * adapted.scaling[name], up))
    return pairs


def _check(head: Any, name: str) -> None:
    """Refuse what is more than s B A h."""
    if name in getattr(head, "lora_variant", {}) or getattr(head, "use_dora", {}).get(name):
        raise ProbeError(_REFUSED.format(f"adapter {name} is a variant of LoRA"))
    if head.lora_B[name].bias is not None:
        raise ProbeError(_REFUSED.format(f"adapter {name} has a bias"))
    if getattr(head.lora_dropout[name], "p", 0.0):
        raise ProbeError(_REFUSED.format(f"adapter {name} has dropout"))
