"""From what was read of a step to the files of a dump."""

from __future__ import annotations

import atexit
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
import torch

from deltad.dumps import DumpWriter, Metadata
from deltad.dumps.layout import part_path
from deltad.dumps.storage import open_parquet
from deltad.dumps.unfinished import part_numbers
from deltad.losses import PolicyLogprobs
from deltad.masks import rule
from deltad.probes.rows import behavior_columns, entry_or_scalar, policy_columns

from .columns import readout_of
from .fields import BatchFields
from .policy_losses import LOSSES
from .settings import Settings
from .watched_loss import config_of, loss_mode_of

_PACKAGES: Final = ("verl", "torch", "transformers", "tensordict")


class StepRecorder:
    """Writes the rows of a rank, a file for every few steps.

    Parameters
    ----------
    settings : Settings
        Where to, and how many steps a file.
    rank, ranks : int
        Of this process among those that hold different responses.

    Attributes
    ----------
    first_step : int
        Where the numbering of steps goes on.
    """

    def __init__(self, settings: Settings, *, rank: int, ranks: int) -> None:
        if settings.run is None:
            raise ValueError("`settings.run` must be set where something is recorded")
        self._run = settings.run
        self._settings = settings
        self._rank, self._ranks = rank, ranks
        self._writer: DumpWriter | None = None
        self._steps = 0
        self._existing = settings.existing
        if settings.steps_per_file > 1:
            atexit.register(self.close)  # Ray calls nothing of the kind
        self.first_step = self._last_step() + 1 if settings.existing == "append" else 0

    def write(
        self,
        fields: BatchFields,
        before: PolicyLogprobs,
        after: PolicyLogprobs,
        keep: torch.Tensor,
        *,
        step: int,
        vocab_size: int,
        model: str,
        readout: dict[str, Any],
        update: dict[str, Any],
    ) -> None:
        """Append one step, and complete the file where it is the file's last.

        Parameters
        ----------
        fields : BatchFields
            The rank's batch.
        before, after : PolicyLogprobs, shape (response, token)
            The policy before and after the step.
        keep : Tensor of bool, shape (response, token)
            Tokens whose gradient took part.
        step : int
            Of the optimizer.
        vocab_size, model, readout, update
            For the dump's metadata.

        Raises
        ------
        DumpError
            Values that the dump's contract does not allow.
        """
        rows = behavior_columns(fields.tokens, fields.token_id, step)
        rows["behavior_logprob"] = entry_or_scalar(rows)
        rows["in_loss"] = keep[fields.mask].numpy()
        rows |= policy_columns(readout_of(before, fields.mask), "pre")
        rows |= policy_columns(readout_of(after, fields.mask), "post")
        if self._writer is None:
            metadata = Metadata(
                top_k=fields.top_k,
                vocab_size=vocab_size,
                temperature=fields.temperature,
                model=model,
                tokenizer=model,
                behavior={
                    "support": "union",
                    **fields.behavior,
                    **self._settings.behavior,
                },
                readout=readout,
                update=update,
                versions=_versions(),
                ranks=self._ranks,
            )
            self._writer = DumpWriter(
                self._run,
                arm=self._settings.arm,
                seed=self._settings.seed,
                metadata=metadata,
                rank=self._rank,
                existing=self._existing,
                discard_on_error=True,
            )
            self._existing = "append"
        self._writer.append(rows)
        self._steps += 1
        if self._steps == self._settings.steps_per_file:
            self.close()

    def close(self) -> None:
        """Complete the file that is being written, if there is one."""
        writer, self._writer = self._writer, None
        self._steps = 0
        if writer is not None:
            writer.close()

    def _last_step(self) -> int:
        """Last step in this rank's files; −1 without any."""
        place = {
            "arm": self._settings.arm,
            "seed": self._settings.seed,
            "rank": self._rank,
        }
        last = -1
        for number in part_numbers(self._run, **place):  # type: ignore[arg-type]
            path = part_path(self._run, place["arm"], place["seed"], self._rank, number)  # type: ignore[arg-type]
            with open_parquet(path, ["step"]) as file:
                steps = file.read(columns=["step"])["step"].to_numpy()
            last = max(last, int(np.max(steps, initial=-1)))
        return last


def update_metadata(engine: Any, loss_function: Any) -> dict[str, Any]:
    """What is known of the applied update.

    `mask` is no criterion's name: in training it is decided on the engine's own log-probs and on
    verl's `old_log_probs`, not on what a reader of the dump sees. `in_loss` comes from the
    gradient of the whole loss, so that a KL penalty lets every token take part.
    """
    mode, config, optimizer = (
        loss_mode_of(loss_function),
        config_of(loss_function),
        engine.optimizer_config,
    )
    update = {
        "mask": f"verl: {mode}",
        "in_loss": "the loss's gradient at log π_k is not 0, or Â is",
        "optimizer": getattr(optimizer, "optimizer", None),
        "lr": getattr(optimizer, "lr", None),
    }
    if mode in LOSSES:
        update |= {
            "criterion": rule(LOSSES[mode].criterion).name,
            "divergence": LOSSES[mode].divergence,
        }
    for name in (
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "loss_agg_mode",
        "ppo_mini_batch_size",
        "use_kl_loss",
        "entropy_coeff",
    ):
        update[name] = getattr(config, name, None)
    return update


def _versions() -> dict[str, str]:
    """Of the packages involved."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
