"""The output head of a model: which weight, and what the model does to its logits."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import base_of, low_rank
from .errors import ProbeError
from .readout import Readout, is_exclusive, read_logits, readout
from .sharded.tensors import local_rows, whole
from .sharded.vocab import VocabShard

# Names in the configs of transformers; each lists the fields that hold the number.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "softcap")
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


@dataclass(frozen=True)
class Head:
    """From hidden states to logits, as the model itself does it.

    Attributes
    ----------
    module : nn.Module
        Has `weight` (vocab, hidden) and perhaps `bias`, and perhaps PEFT's LoRA around them; read
        anew at each readout.
    vocab_size : int
        Rows of the head, equal to what the config says.
    scale : float
        The model multiplies its logits by it.
    softcap : float or None
        The model then bounds its logits by it.
    group : ProcessGroup or None
        Ranks that each hold the rows of some ids, where the head is tensor-parallel.
    """

    module: nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    group: Any = None
    _shared: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        head: nn.Module | None = None,
        vocab_size: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        group: Any = None,
    ) -> Head:
        """Find the head of a model and read its transform from the config.

        Parameters
        ----------
        model : nn.Module
            A causal LM of transformers, or any module where `head` and `vocab_size` are given.
        head, vocab_size, scale, softcap
            Override what the model says.
        group : ProcessGroup, optional
            As above.

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
            group,
        )
        rows = found.all_rows()
        if rows != found.vocab_size:
            raise ProbeError(
                f"the head has {rows} rows and the vocabulary {found.vocab_size} ids, so it is "
                "not known which ids the policy's softmax runs over: make config.vocab_size the "
                f"head's rows, or give vocab_size={rows} if all rows take part"
            )
        return found

    @property
    def weight(self) -> Tensor:
        """Rows of W that this rank holds, shape (vocab, hidden); all but in a sharded head."""
        return local_rows(self._weight())

    @property
    def bias(self) -> Tensor | None:
        """The bias b of those rows, shape (vocab,)."""
        bias: Tensor | None = getattr(base_of(self.module), "bias", None)
        return None if bias is None else local_rows(bias)

    @property
    def exclusive(self) -> bool:
        """Whether no thread that could multiply has been seen next to this one; see `readout`.

        One is enough for good: *pre* and *post* must come from the same arithmetic to be
        comparable bit for bit.
        """
        if not is_exclusive():
            self._shared.set()
        return not self._shared.is_set()

    def all_rows(self) -> int:
        """Rows of the whole head; a collective where only the ranks together know them."""
        weight = self._weight()
        rows = weight.shape[0]  # of a DTensor the shape is that of the whole
        if hasattr(weight, "device_mesh") or self.group is None or rows == self.vocab_size:
            return int(rows)
        return VocabShard.of(rows, self.group, weight.device).total

    def shard(self) -> VocabShard | None:
        """Which rows this rank holds; None where it holds all. A collective of the group."""
        rows = self.weight.shape[0]
        if self.group is None and not self._replicated():
            raise ProbeError(
                "the head is sharded over ranks and was not gathered: give the model to "
                "UpdateProbe, which does"
            )
        if self.group is None or (rows == self.vocab_size and self._replicated()):
            return None
        return VocabShard.of(rows, self.group, self.weight.device)

    def low_rank(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What adapters of the head add to the logits; see `adapter.low_rank`."""
        return low_rank(self.module, hidden, exclusive=self.exclusive)

    def _weight(self) -> Tensor:
        """W as the module holds it."""
        module = base_of(self.module)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            raise ProbeError(
                f"the head ({type(module).__name__}) must have a plain floating-point `weight` "
                "of shape (vocab, hidden); quantized heads are not supported"
            )
        return weight

    def _replicated(self) -> bool:
        """Whether every rank of the group holds all rows."""
        placements = getattr(self._weight(), "placements", ())
        return not any(placement.is_shard() for placement in placements)

    def read(
        self,
        hidden: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
        entropy: bool = False,
        workers: int = 1,
    ) -> Readout:
        """Read the policy from hidden states; see `readout`.

        Where the head is tensor-parallel all its ranks call this together.
        """
        return readout(
            hidden,
            self.weight,
            ids,
            temperature=temperature,
            token_chunk=token_chunk,
            vocab_chunk=vocab_chunk,
            entropy=entropy,
            workers=workers,
            **self._how(hidden),
        )

    def read_logits(
        self,
        hidden: Tensor,
        logits: Tensor,
        ids: Tensor,
        *,
        temperature: float,
        token_chunk: int,
        vocab_chunk: int,
        rows: Tensor | None = None,
        entropy: bool = False,
        workers: int = 1,
    ) -> Readout:
        """Read the policy where its logits exist already; see `readout.read_logits`.

        Parameters
        ----------
        hidden : Tensor, shape (token, hidden)
            What enters the head.
        logits : Tensor, shape (position, vocab)
            What the head's module made of it, before scale and bound; this rank's ids where the
            head is tensor-parallel, whose ranks call this together.
        ids : Tensor of int, shape (token, id)
            As in `readout`.
        rows : Tensor of int, shape (token,), optional
            Positions of the tokens; by default they are the positions.
        temperature, token_chunk, vocab_chunk, entropy, workers
            As in `readout`.

        Returns
        -------
        Readout
            Of these tokens.
        """
        return read_logits(
            hidden,
            self.weight,
            logits,
            ids,
            rows=rows,
            temperature=temperature,
            token_chunk=token_chunk,
            vocab_chunk=vocab_chunk,
            entropy=entropy,
            workers=workers,
            **self._how(hidden),
        )

    def _how(self, hidden: Tensor) -> dict[str, Any]:
        """What of the head a readout must know beside the weight."""
        return {
            "shard": self.shard(),
            "bias": self.bias,
            "scale": self.scale,
            "softcap": self.softcap,
            "low_rank": self.low_rank(hidden),
            "exclusive": self.exclusive,
        }

    def own_logits(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits that the model gave at some positions, over all ids.

        Parameters
        ----------
        logits : Tensor, shape (…, vocab)
            The model's output, perhaps this rank's ids only.
        rows : Tensor of int, shape (token,)
            Positions, counted along the flattened leading axes.

        Returns
        -------
        Tensor, shape (token, vocab)
            Of the whole vocabulary; a collective where the logits are sharded.
        """
        logits = whole(logits)
        found = logits.reshape(-1, logits.shape[-1])[rows]
        shard = self.shard()
        if shard is None or found.shape[1] == self.vocab_size:
            return found
        return shard.gather(found)

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
