"""The output head of a model: which weight, and what the model does to its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ProbeError
from .readout import Readout, readout

# Names in the configs of transformers; each lists the fields that hold the number.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "softcap")
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


@dataclass(frozen=True)
class Head:
    """From hidden states to logits, as the model itself does it.

    Attributes
    ----------
    module : nn.Module
        Has `weight` (vocab, hidden) and perhaps `bias`; read anew at each readout.
    vocab_size : int
        Rows of the head, equal to what the config says.
    scale : float
        The model multiplies its logits by it.
    softcap : float or None
        The model then bounds its logits by it.
    """

    module: nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        head: nn.Module | None = None,
        vocab_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Head:
        """Find the head of a model and read its transform from the config.

        Parameters
        ----------
        model : nn.Module
            A causal LM of transformers, or any module where `head` and `vocab_size` are given.
        head, vocab_size, scale, softcap
            Override what the model says.

        Returns
        -------
        Head
            Of the model.

        Raises
        ------
        ProbeError
            No head, no vocabulary size, or a head whose rows are not the vocabulary.
        """
        if head is None:
            getter = getattr(model, "get_output_embeddings", None)
            head = getter() if callable(getter) else None
        if head is None:
            raise ProbeError(
                f"{type(model).__name__} names no output head by get_output_embeddings(): give "
                "the module that makes the logits as `head`"
            )
        if hasattr(head, "base_layer"):
            raise ProbeError(
                "the head carries an adapter, so its weight is not what makes the logits: leave "
                "the head out of the adapter's target modules"
            )
        config = _text_config(model)
        if vocab_size is None:
            vocab_size = getattr(config, "vocab_size", None)
        if vocab_size is None:
            raise ProbeError(
                f"{type(model).__name__} has no config.vocab_size: give `vocab_size`, the number "
                "of ids that the policy chooses from"
            )
        found = cls(
            head,
            int(vocab_size),
            _scale(config) if scale is None else scale,
            _softcap(config) if softcap is None else softcap,
        )
        rows = found.weight.shape[0]
        if rows != found.vocab_size:
            raise ProbeError(
                f"the head has {rows} rows and the vocabulary {found.vocab_size} ids, so it is "
                "not known which ids the policy's softmax runs over: make config.vocab_size the "
                f"head's rows, or give vocab_size={rows} if all rows take part"
            )
        return found

    @property
    def weight(self) -> Tensor:
        """W, shape (vocab, hidden)."""
        weight = getattr(self.module, "weight", None)
        if (
            not isinstance(weight, Tensor)
            or weight.ndim != 2
            or not weight.is_floating_point()
            or hasattr(weight, "device_mesh")
        ):
            raise ProbeError(
                f"the head ({type(self.module).__name__}) must have a plain floating-point "
                "`weight` of shape (vocab, hidden); quantized and sharded heads are not supported"
            )
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias b, shape (vocab,)."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        return bias

    def read(
        self,
        hidden: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
    ) -> Readout:
        """Read the policy from hidden states; see `readout`."""
        return readout(
            hidden,
            self.weight,
            ids,
            bias=self.bias,
            scale=self.scale,
            softcap=self.softcap,
            temperature=temperature,
            token_chunk=token_chunk,
            vocab_chunk=vocab_chunk,
        )

    def check_against(
        self,
        logits: Tensor,
        logprobs: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        dtypes: set[torch.dtype],
    ) -> None:
        """Compare a readout with the logits that the model itself gave.

        Parameters
        ----------
        logits : Tensor, shape (token, vocab)
            The model's output at a few positions.
        logprobs : Tensor, shape (token, id)
            The readout there.
        ids : Tensor of int, shape (token, id)
            Where; negative ids are padding.
        temperature : float
            Of the readout.
        dtypes : set of torch.dtype
            Everything that the model's logits may have been rounded to.

        Raises
        ------
        ProbeError
            They differ by more than rounding explains.
        """
        if logits.shape[1] != self.vocab_size:
            raise ProbeError(
                f"the model gives {logits.shape[1]} logits a position and the vocabulary has "
                f"{self.vocab_size} ids"
            )
        scaled = logits.double() / temperature
        expected = scaled.log_softmax(-1).gather(1, ids.clamp(min=0))
        worst = float(torch.where(ids >= 0, (expected - logprobs).abs(), 0.0).max())
        # The product, the scaling and the cap each round, and so does the log-sum-exp.
        rounding = 4 * max(torch.finfo(dtype).eps for dtype in dtypes)
        allowed = 1e-4 + rounding * max(float(scaled.abs().max()), 1.0)
        if not worst <= allowed:
            raise ProbeError(
                f"the log-probs read from hidden states and head (scale {self.scale:g}, softcap "
                f"{self.softcap}) differ by {worst:.3g} nats from those of the model's own "
                f"logits, more than rounding explains ({allowed:.3g}): the model does something "
                "to its logits that the probe does not know; give `scale` or `softcap`"
            )


def _text_config(model: nn.Module) -> Any:
    """Config of the language model within a model."""
    config = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def _scale(config: Any) -> float:
    """Factor of the logits by the config."""
    scale = 1.0
    for name in _MULTIPLIERS:
        value = getattr(config, name, None)
        scale *= 1.0 if value is None else float(value)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        # Granite divides by what HyperCLOVA X multiplies by, under one name.
        multiplies = getattr(config, "model_type", "") == "hyperclovax"
        scale = scale * float(scaling) if multiplies else scale / float(scaling)
    return scale


def _softcap(config: Any) -> float | None:
    """Bound of the logits by the config."""
    for name in _SOFTCAPS:
        value = getattr(config, name, None)
        if value is not None:
            return float(value)
    return None
