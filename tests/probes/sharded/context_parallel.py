"""Each rank works on a slice of every sequence; attention gathers keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from deltad.dumps import Dump, Metadata, check_dump
from deltad.probes import ProbeError, Recorder, ResponseTokens, UpdateProbe
from tests.probes.tiny import TOP_K, Batch, Sink, backward

from .small import Block, Output, Small, small
from .training import batches_of, local_weights, same, sgd


class _Gather(torch.autograd.Function):
    """Slices of all ranks in a row; the gradient of each goes back to its rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        every = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
        distributed.all_gather(every, local.contiguous())
        return torch.cat(every, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)
        return gradient.chunk(distributed.get_world_size(), 2)[distributed.get_rank()]


class Sliced(nn.Module):
    """Runs `Small` on this rank's slice of the positions."""

    def __init__(self, model: Small) -> None:
        super().__init__()
        self.inner = model
        self.config = model.config

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head

    def forward(self, input_ids: Tensor) -> Output:
        length = input_ids.shape[1]
        first = distributed.get_rank() * length
        body, whole = self.inner.model, length * distributed.get_world_size()
        x = body.embed_tokens(input_ids) + body.places.weight[first : first + length]
        allowed = torch.ones(whole, whole, dtype=torch.bool).tril()[first : first + length]
        for layer in body.layers:
            x = _block(layer, x, allowed[None, None])  # type: ignore[arg-type]
        return Output(self.inner.lm_head(x))


def _block(block: Block, x: Tensor, allowed: Tensor) -> Tensor:
    parts = block.qkv(block.norm(x)).chunk(3, -1)
    q, k, v = (each.unflatten(-1, (block.heads, -1)).transpose(1, 2) for each in parts)
    gather: Any = _Gather.apply
    k, v = gather(k), gather(v)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    x = x + block.out(mixed.transpose(1, 2).flatten(2))
    found: Tensor = x + block.down(torch.tanh(block.up(x)))
    return found


def _aligned_with_logits(each: Batch) -> tuple[Tensor, ResponseTokens]:
    """This rank's slice of the ids, and of what is known of the tokens after them."""
    tokens, ids = each.tokens, each.ids
    count = tokens.response_mask.long().cumsum(1) - 1
    rank, length = distributed.get_rank(), ids.shape[1] // distributed.get_world_size()
    mine = slice(rank * length, (rank + 1) * length)

    def after(values: Tensor) -> Tensor:
        return values.roll(-1, 1)[:, mine]

    mask = tokens.response_mask.roll(-1, 1)
    mask[:, -1] = False
    return ids[:, mine], ResponseTokens(
        response_mask=mask[:, mine],
        advantages=tokens.advantages,
        behavior_logprobs=after(tokens.behavior_logprobs),
        topk_ids=after(tokens.topk_ids),
        topk_logprobs=after(tokens.topk_logprobs),
        sequence=tokens.sequence,
        group=tokens.group,
        input_ids=after(ids),
        positions=after(count),
        at="logits",
    )


def _loss(logits: Tensor, tokens: ResponseTokens, count: int) -> Tensor:
    assert tokens.input_ids is not None
    taken = logits.log_softmax(-1).gather(2, tokens.input_ids[..., None])[..., 0]
    return -(taken * tokens.response_mask * tokens.advantages[:, None]).sum() / count


def _whole() -> tuple[Sink, Small, list[Batch]]:
    """The same training on whole sequences without padding."""
    model: Small = small()
    (first,), (second,) = batches_of(model, 0, rows=3, length=16)
    sink, optimizer = Sink(), sgd(model)
    with UpdateProbe(model, optimizer, sink) as probe:
        for each in (first, second):
            probe.expect(each.tokens)
            logits = model(each.ids).logits
            taken = logits[:, :-1].log_softmax(-1).gather(2, each.ids[:, 1:, None])[..., 0]
            mask = each.tokens.response_mask[:, 1:]
            weighted = taken * mask * each.tokens.advantages[:, None]
            backward(-weighted.sum() / int(mask.sum()))
            optimizer.step()
            optimizer.zero_grad()
    return sink, model, [first, second]


def slices(out: Path) -> None:
    reference, alone, batches = _whole()
    results = []
    for probed in (True, False):
        model = Sliced(small())
        optimizer = sgd(model)
        about = Metadata(top_k=TOP_K, vocab_size=96)
        recorder = Recorder(
            out / f"RUN{probed}", seed=0, metadata_for={"actual": about}.__getitem__
        )
        probe = UpdateProbe(model, optimizer, recorder, cp_group=distributed.group.WORLD)
        with recorder, probe:
            for each in batches:
                ids, tokens = _aligned_with_logits(each)
                if probed:
                    probe.expect(tokens)
                count = int(each.tokens.response_mask.sum())
                backward(_loss(model(ids).logits, tokens, count))
                for parameter in model.parameters():
                    distributed.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
        results.append(local_weights(model))
    same(*results)
    for name, value in alone.named_parameters():
        torch.testing.assert_close(results[0][f"inner.{name}"], value.detach(), rtol=0, atol=1e-9)
    distributed.barrier()
    if distributed.get_rank():
        return
    assert check_dump(out / "RUNTrue") == []
    found = [batch.columns for batch in Dump.open(out / "RUNTrue").batches("actual", 0)]
    keys = ("step", "sequence", "position")
    order = np.lexsort([np.concatenate([each[key] for each in found]) for key in keys[::-1]])
    expected = np.lexsort([reference.column(key) for key in keys[::-1]])
    for name in reference.calls[0][1]:
        values = np.concatenate([each[name] for each in found])[order]
        np.testing.assert_allclose(
            values, reference.column(name)[expected], rtol=0, atol=1e-6, err_msg=name
        )


def places_are_needed(out: Path) -> None:
    (each,), _ = batches_of(small(), 0)
    with pytest.raises(ProbeError, match="with at='logits' give `input_ids`"):
        ResponseTokens(**{**vars(each.tokens), "at": "logits"})
