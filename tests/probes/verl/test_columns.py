"""Columns of logits that a tensor-parallel engine has in parts, on two ranks over gloo."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deltad.probes import ProbeError
from deltad.probes.verl.columns import Layout, read_logits, readout_of, unpack
from tests.probes.verl.verl_here import imported

pytestmark = pytest.mark.verl

VOCAB, PADDED, TOP_K = 11, 16, 3
LENGTHS, PROMPTS = (5, 4), (2, 1)


def micro_batch() -> Any:
    """Two sequences as an engine has them, and their top-K."""
    random = torch.Generator().manual_seed(3)
    tensordict_utils = imported("verl.utils.tensordict_utils")

    def nest(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    ids = [torch.randint(VOCAB, (length,), generator=random) for length in LENGTHS]
    listed = [
        torch.stack([torch.randperm(VOCAB, generator=random)[:TOP_K] for _ in row]) for row in ids
    ]
    return tensordict_utils.get_tensordict(
        {
            "input_ids": nest(ids),
            "prompts": nest([row[:at] for row, at in zip(ids, PROMPTS, strict=True)]),
            "responses": nest([row[at:] for row, at in zip(ids, PROMPTS, strict=True)]),
            "teacher_ids": nest(listed),
            "teacher_logprobs": nest([torch.zeros(row.shape) for row in listed]),
        }
    )


def logits() -> torch.Tensor:
    random = torch.Generator().manual_seed(4)
    return torch.randn(1, sum(LENGTHS), PADDED, generator=random) * 3


def megatron_on_two_ranks() -> None:
    """Of Megatron what the layout asks for: the vocabulary's group, and thd without padding."""
    state, util = ModuleType("megatron.core.parallel_state"), ModuleType("verl.models.mcore.util")
    state.get_tensor_model_parallel_group = lambda: dist.group.WORLD  # type: ignore[attr-defined]
    util.preprocess_thd_engine = (  # type: ignore[attr-defined]
        lambda nested, pre_process: (nested.values()[None], None, None)
    )
    util.preprocess_bshd_engine = None  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core", "verl.models.mcore"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[state.__name__] = state
    sys.modules[util.__name__] = util


def one_rank(rank: int, store: Path) -> None:
    """Read this rank's half of the padded vocabulary."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    megatron_on_two_ranks()
    part = logits()[..., rank * PADDED // 2 : (rank + 1) * PADDED // 2]
    found = read_logits(part.bfloat16(), micro_batch(), Layout("thd"), vocab_size=VOCAB)
    report = {name: values.tolist() for name, values in found.items()}
    store.with_suffix(f".{rank}").write_text(json.dumps(report))
    dist.destroy_process_group()


def test_vocabulary_shards_give_the_columns_of_the_whole(tmp_path: Path) -> None:
    """Forked after the imports; the padding of the vocabulary takes no part."""
    data = micro_batch()
    context = multiprocessing.get_context("fork")
    store = tmp_path / "store"
    ranks = [context.Process(target=one_rank, args=(rank, store)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0, 0]
    truth = logits().bfloat16()[0, :, :VOCAB].double().log_softmax(-1)
    following = torch.roll(data["input_ids"].values(), -1, 0)
    expected = {
        **{
            f"deltad_id_{index}": truth.gather(1, data["teacher_ids"].values()[:, index, None])[
                :, 0
            ]
            for index in range(TOP_K)
        },
        f"deltad_id_{TOP_K}": truth.gather(1, following[:, None])[:, 0],
        "deltad_collision": truth.exp().square().sum(1),
        "deltad_entropy": -(truth.exp() * truth).sum(1),
    }
    for rank in range(2):
        found = json.loads(store.with_suffix(f".{rank}").read_text())
        assert set(found) == set(expected)
        for name, values in expected.items():
            assert torch.tensor(found[name]).shape == (1, sum(LENGTHS))
            torch.testing.assert_close(
                torch.tensor(found[name][0]).double(), values, rtol=0, atol=2e-6
            )


def test_columns_come_back_as_what_predicts_the_responses() -> None:
    data = micro_batch()
    found = read_logits(logits(), data, Layout(), vocab_size=VOCAB)
    output = {
        name: torch.nested.nested_tensor_from_jagged(values[0], data["input_ids"].offsets())
        for name, values in found.items()
    }
    laid = unpack({"log_probs": None, **output}, data)
    truth = logits()[0, :, :VOCAB].double().log_softmax(-1)
    at = [range(1, 4), range(5, 8)]  # the last of the prompt and on, but the last of the sequence
    for row, positions in enumerate(at):
        response = data["responses"].unbind()[row]
        expected = torch.stack([truth[j, k] for j, k in zip(positions, response, strict=True)])
        torch.testing.assert_close(laid.logprob[row].double(), expected, rtol=0, atol=2e-6)
        assert laid.topk is not None
        listed = data["teacher_ids"].values()[list(positions)]
        torch.testing.assert_close(
            laid.topk[row].double(), truth[list(positions)].gather(1, listed), rtol=0, atol=2e-6
        )
    read = readout_of(laid, torch.tensor([[True] * 3, [True, False, True]]))
    assert read.logprobs.shape == (5, TOP_K + 1)
    assert laid.collision is not None
    assert read.collision is not None
    assert read.collision[-1] == laid.collision[1, 2].double()


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ProbeError, match=r"shape \(1, 8, 16\) for \(1, 9\) positions"):
        read_logits(logits()[:, 1:], micro_batch(), Layout(), vocab_size=VOCAB)
    with pytest.raises(ProbeError, match="logits of 16 ids and the vocabulary has 17"):
        read_logits(logits(), micro_batch(), Layout(), vocab_size=17)
    with pytest.raises(ProbeError, match="did not hand over its logits"):
        unpack({"log_probs": None}, micro_batch())
