"""The policy from what enters the head, with a float32 head, where the engine rounds its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltad.losses import PolicyLogprobs
from deltad.probes.errors import ProbeError
from deltad.probes.head import Head

from .columns import Columns, Layout, ids_of, pack
from .engines import HALF
from .fields import temperature_of

_CHUNKS: Final = {"token_chunk": 512, "vocab_chunk": 4096}
_CHECKED: Final = 4  # positions at which the readout is held against the engine's own logits


class HiddenReader:
    """Reads the head's input while an engine of FSDP2 makes its forwards.

    The head's weight is whole only while the head runs, so that the policy is read there and
    then; `columns` hands it to the engine when it asks what is to be made of its logits.

    Parameters
    ----------
    engine : FSDPEngine
        verl's.
    layout : Layout
        Of its positions.
    always : bool
        Read also where the head gives logits in full precision.

    Attributes
    ----------
    metadata : dict
        How the policy was read; empty until it was.
    """

    def __init__(self, engine: Any, layout: Layout, *, always: bool) -> None:
        self._always = always
        self._engine = engine
        self._layout = layout
        self._micro_batch: Any = None
        self._found: tuple[PolicyLogprobs, Head, dict[str, Any]] | None = None
        self._verified = False
        self.metadata: dict[str, Any] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Watch the head within the block."""
        engine = self._engine
        forward_step = engine.forward_step

        def step(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._micro_batch = micro_batch
            return forward_step(micro_batch, *args, **kwargs)

        handle = _head_of(engine).register_forward_hook(self._on_head)
        engine.forward_step = step
        try:
            yield
        finally:
            handle.remove()
            del engine.forward_step
            self._micro_batch = self._found = None

    @property
    def has_read(self) -> bool:
        """Whether something was read since the last `columns`."""
        return self._found is not None

    def columns(self, logits: Tensor) -> Columns:
        """What was read for the logits just made, of shape (1, position, vocab)."""
        if self._found is None:
            raise ProbeError("nothing was read since the last logits")
        (found, head, dtypes), self._found = self._found, None
        if not self._verified:
            self._verify(found, head, logits, set(dtypes.values()))
        return pack(found)

    @torch.no_grad()
    def _on_head(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Hook of the head: read what enters it."""
        if not self._always and str(output.dtype).removeprefix("torch.") not in HALF:
            return
        hidden: Tensor = inputs[0].detach()
        data = self._micro_batch
        token_ids, topk_ids = ids_of(data, self._layout, hidden.device)
        hidden = _positions(hidden, data)
        if hidden.shape[0] != token_ids.shape[1]:
            raise ProbeError(
                f"{hidden.shape[0]} hidden states enter the head for {token_ids.shape[1]} "
                "positions: set DELTAD_VERL_READOUT=logits"
            )
        listed = token_ids[0, :, None] if topk_ids is None else topk_ids[0]
        head = Head.of(self._engine.module, head=module)
        read = head.read(
            hidden,
            torch.cat([listed, token_ids[0, :, None]], 1),
            temperature=temperature_of(data),
            entropy=True,
            **_CHUNKS,
        )
        dtypes = {"hidden_dtype": hidden.dtype, "head_dtype": head.weight.dtype}
        self.metadata = {
            **{name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
            "accumulation": "float32",
            "logits_rounded": False,
        }
        found = PolicyLogprobs(
            read.logprobs[None, :, -1],
            None if topk_ids is None else read.logprobs[None, :, :-1],
            *(None if each is None else each[None] for each in (read.collision, read.entropy)),
        )
        self._found = found, head, dtypes

    def _verify(
        self,
        found: PolicyLogprobs,
        head: Head,
        logits: Tensor,
        dtypes: set[torch.dtype],
    ) -> None:
        """Hold the readout against the engine's logits, which are at the temperature already."""
        few = logits[0, :_CHECKED]
        ids, _ = ids_of(self._micro_batch, self._layout, logits.device)
        head.check_against(
            few,
            found.logprob[0, :_CHECKED, None],
            ids[0, :_CHECKED, None],
            temperature=1.0,
            dtypes={*dtypes, logits.dtype},
        )
        self._verified = True


def can_read_hidden(engine: Any) -> bool:
    """Whether an engine lets its head be read: FSDP2 with a head that the model names."""
    return (
        getattr(engine.engine_config, "strategy", None) == "fsdp2" and _head_of(engine) is not None
    )


def _head_of(engine: Any) -> Any:
    """The module that makes the logits, or None."""
    getter = getattr(engine.module, "get_output_embeddings", None)
    return getter() if callable(getter) else None


def _positions(hidden: Tensor, data: Any) -> Tensor:
    """Hidden states one after the other, without the padding of a batch that is not packed."""
    if hidden.shape[0] == 1:
        return hidden[0]
    lengths = data["input_ids"].offsets().diff().to(hidden.device)
    kept = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return hidden[kept]
