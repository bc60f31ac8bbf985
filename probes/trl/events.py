"""When the trainer begins, steps and saves: callbacks get neither batch nor trainer."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback


class Listener(Protocol):
    """What hears of a trainer's events; steps are numbered by the trainer."""

    def begin(self, step: int) -> None:
        """Training begins at this step."""

    def step_begins(self, step: int) -> None:
        """A step begins."""

    def before_step(self) -> None:
        """The optimizer is about to step."""

    def step_ends(self) -> None:
        """A step is over."""

    def saved(self) -> None:
        """A checkpoint was saved."""


class Events(TrainerCallback):
    """Hands the trainer's events on.

    Parameters
    ----------
    listener : Listener
        Who hears of them.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer is there, and no step was made."""
        self._listener.begin(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before a step's first micro-batch."""
        self._listener.step_begins(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All gradients of a step are there."""
        self._listener.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights are new; also where the step was skipped."""
        self._listener.step_ends()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint is complete."""
        self._listener.saved()
