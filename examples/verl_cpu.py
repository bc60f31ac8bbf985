"""What it takes to run verl's FSDP2 engine on a CPU: for `verl_ppo.py` and for tests.

verl has no platform for a CPU; this one is enough for training. On GPUs none of it is needed.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any

import torch

VOCAB, TOP_K = 96, 20


def use_cpu() -> None:
    """Give verl a platform that is what its CUDA platform is, but of the CPU and over gloo."""
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}  # the engine's, not ours
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {name: os.environ.get(name, value) for name, value in alone.items()}

    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import PlatformRegistry

    answers: dict[str, Any] = {
        "device_name": "cpu",
        "vendor_name": "nvidia",  # what the engine is registered for
        "device_module": _Device(),
        "is_available": lambda _: True,
        "current_device": lambda _: torch.device("cpu"),
        "device_count": lambda _: 1,
        "communication_backend_name": lambda _: "gloo",
        "nvtx_range": lambda *_: contextlib.nullcontext(),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), lambda *_: None),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda *_: None),
        "set_allocator_settings": lambda *_: None,
    }
    PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (PlatformCUDA,), answers))


def tiny_model(folder: str) -> str:
    """Save a model of 19 thousand random parameters; gives the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,  # large enough for policies that are peaked
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def worker(
    folder: str,
    *,
    loss_mode: str = "vanilla",
    lr: float = 3e-3,
    precision: str = "fp32",
    actor: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> Any:
    """verl's training worker with its FSDP2 engine, built as its PPO trainer builds it."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        PolicyLossConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=folder,
                load_tokenizer=False,
                use_remove_padding=False,  # packing needs flash attention
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": "eager"},
                **(model or {}),
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=4,
                mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32"},
                **(engine or {}),
            ),
            optimizer_config=FSDPOptimizerConfig(lr=lr, lr_warmup_steps=0, total_training_steps=99),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        **{"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0, **(actor or {})},
    )
    made.set_loss_fn(partial(ppo_loss, config=config))
    return made


@torch.no_grad()
def rollout(folder: str, *, seed: int = 0, groups: int = 4, per_group: int = 4) -> Any:
    """A batch as verl's trainer hands it to its worker, sampled from the saved model.

    With the top-K of the behaviour policy where `deltad_rescored` puts it; the reward is an even
    last token.
    """
    from transformers import Qwen3ForCausalLM
    from verl.utils import tensordict_utils as tu

    policy: Any = Qwen3ForCausalLM.from_pretrained(folder)
    policy.eval()
    random = torch.Generator().manual_seed(seed)

    def nest(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    prompts, responses, logprobs, topk, names = [], [], [], [], []
    for group in range(groups):
        length = int(torch.randint(2, 6, (1,), generator=random))
        prompt = torch.randint(0, VOCAB, (length,), generator=random)
        for _ in range(per_group):
            ids = prompt
            for _ in range(int(torch.randint(3, 13, (1,), generator=random))):
                chances = policy(ids[None]).logits[0, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(chances, 1, generator=random)])
            each = policy(ids[None]).logits[0].log_softmax(-1)
            prompts.append(prompt)
            responses.append(ids[length:])
            logprobs.append(each[length - 1 : -1].gather(1, ids[length:, None])[:, 0])
            topk.append(each.topk(TOP_K))
            names.append(f"prompt {seed}.{group}")
    rewards = torch.tensor([float(row[-1] % 2 == 0) for row in responses]).view(groups, per_group)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    ones = [torch.ones_like(row) for row in responses]
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    return tu.get_tensordict(
        {
            "prompts": nest(prompts),
            "responses": nest(responses),
            "input_ids": nest(whole),
            "position_ids": nest([torch.arange(len(row)) for row in whole]),
            "response_mask": nest(ones),
            "loss_mask": nest(ones),
            "advantages": nest([row * each for row, each in zip(ones, advantages, strict=True)]),
            "old_log_probs": nest(logprobs),
            "rollout_log_probs": nest(logprobs),
            "teacher_ids": nest([each.indices.int() for each in topk]),
            "teacher_logprobs": nest([each.values for each in topk]),
            "uid": names,
        },
        non_tensor_dict={
            "temperature": 1.0,
            "global_batch_size": len(names) // 2 * int(os.environ["WORLD_SIZE"]),
            "mini_batch_size": len(names) // 2 * int(os.environ["WORLD_SIZE"]),
            "epochs": 1,
            "seed": 0,
            "dataloader_kwargs": {"shuffle": False},
            "calculate_entropy": False,
            "compute_loss": True,
        },
    )


class _Device:
    """`torch.cpu`, with what verl asks of `torch.cuda`: memory is not counted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        return lambda *_, **__: {"mem_get_info": (1 << 34, 1 << 34), "get_device_name": "CPU"}.get(
            name, 0
        )
