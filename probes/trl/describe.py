"""What a dump of a TRL training says about itself."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

from deltad.dumps import Metadata
from deltad.masks import rule

from .loss import MaskedLoss

_SETTINGS = (
    "loss_type", "num_generations", "num_iterations", "steps_per_generation", "epsilon",
    "epsilon_high", "delta", "beta", "importance_sampling_level", "scale_rewards",
    "mask_truncated_completions", "top_entropy_quantile", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_completion_length",
)  # fmt: skip


def describe(
    trainer: Any,
    vocab_size: int,
    readout: Mapping[str, Any],
    *,
    top_k: int,
    behavior: str,
    loss: MaskedLoss | None,
    ladder: Mapping[str, Any],
) -> Metadata:
    """Metadata of the dump.

    Parameters
    ----------
    trainer : trl.GRPOTrainer
        In training.
    vocab_size : int
        n.
    readout : mapping
        How the policy was read, as the probe tells it.
    top_k : int
        K.
    behavior : {"engine", "policy"}
        Where μ comes from.
    loss : MaskedLoss or None
        What stands in the place of TRL's clip.
    ladder : mapping
        How the ladder was measured; empty without one.

    Returns
    -------
    Metadata
        The trainer's settings are under the key `trainer`.
    """
    args, config = trainer.args, trainer.model.config
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    settings = {name: _plain(getattr(args, name)) for name in _SETTINGS if hasattr(args, name)}
    return Metadata(
        top_k=top_k,
        vocab_size=vocab_size,
        temperature=float(trainer.temperature),
        model=str(getattr(config, "_name_or_path", "") or type(trainer.model).__name__),
        tokenizer=str(getattr(trainer.processing_class, "name_or_path", "")),
        behavior=_behavior(trainer, behavior),
        readout=readout,
        update=_update(trainer, loss)
        | {
            "optimizer": type(optimizer).__name__,
            "lr": args.learning_rate,
            "batch": args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * trainer.accelerator.num_processes,
        },
        versions={
            name: importlib.metadata.version(name)
            for name in ("trl", "transformers", "accelerate", "torch", "numpy")
        }
        | {"python": platform.python_version()},
        ranks=trainer.accelerator.num_processes,
        extra={"trainer": settings} | ({"ladder": dict(ladder)} if ladder else {}),
    )


def _behavior(trainer: Any, behavior: str) -> dict[str, Any]:
    """Key `behavior`."""
    engine = behavior == "engine"
    colocate = engine and trainer.vllm_mode == "colocate"
    cut = {
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
    }
    free = (
        (trainer.top_p or 1.0) >= 1.0
        and (trainer.top_k or 0) <= 0
        and not trainer.min_p
        and trainer.repetition_penalty == 1.0
    )
    if engine:
        mode = "processed_logprobs" if colocate else "unknown"
    else:
        mode = "processed_logprobs" if free else "temperature alone, before what cuts the sampling"
    args = trainer.args
    return {
        "engine": "vllm" if engine else "transformers",
        "source": "engine" if engine else "the policy, read again when it had generated",
        "sampler": "vllm" if trainer.use_vllm else "transformers",
        "precision": str(trainer.model.dtype).removeprefix("torch.") if not engine else "engine's",
        "staleness": (
            f"{args.num_iterations} iterations over {args.steps_per_generation} micro-batches a "
            f"generation, {args.gradient_accumulation_steps} a step"
        ),
        "logprobs_mode": mode,
        "support": "union",
        **cut,
    }


def _update(trainer: Any, loss: MaskedLoss | None) -> dict[str, Any]:
    """The mask that is applied."""
    if loss is None:
        return {"mask": f"trl-{trainer.loss_type}", "epsilon": [
            trainer.epsilon_low, trainer.epsilon_high]}  # fmt: skip
    return {
        "mask": rule(loss.criterion).name,
        "threshold": loss.threshold,
        "divergence": loss.family,
        "ratio_cap": loss.ratio_cap,
        "parameters": dict(loss.parameters),
    }


def _plain(value: Any) -> Any:
    """What JSON knows."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
