"""Where a monitor's numbers go: one small interface, and the loggers that people use.

A sink has `log(scalars, step)`. One that would rather have the counts themselves, to add them up
later, has `log_step(step)` instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from deltad.dumps.layout import check_arm
from deltad.dumps.storage import must_be_local, place
from deltad.steps import StepScalars, steps_path


@runtime_checkable
class Sink(Protocol):
    """Takes one step of one arm as named numbers."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Take the numbers of an optimizer step; may raise."""
        ...


@runtime_checkable
class StepSink(Protocol):
    """Takes one step of one arm as counts that can be added up."""

    def log_step(self, step: StepScalars) -> None:
        """Take a step; may raise."""
        ...


AnySink = Sink | StepSink | Callable[[Mapping[str, float], int], object]
"""Whatever a monitor can be given."""


class JsonLines:
    """Appends a line a step to files in RUN, which `deltad watch RUN` follows.

    `RUN/_steps/arm=<name>/seed=<int>/rank-<rank>.jsonl`; dataset readers, and all commands but
    `watch`, pass it over. A line is written at once and flushed, so that a reader never waits
    for half of one for long; after a crash the next line begins on a line of its own. Where a
    step comes twice, the later line counts.

    Parameters
    ----------
    run : str or Path
        RUN, made if need be; a `Recorder` may write its dump there, or nobody.
    """

    def __init__(self, run: str | Path) -> None:
        self.run = place(run)
        must_be_local(self.run, "a monitor's file of lines")

    def log_step(self, step: StepScalars) -> None:
        """Append a step to the file of its arm, seed and (first) rank."""
        check_arm(step.arm)
        path = steps_path(self.run, step.arm, step.seed, step.ranks[0])
        line = json.dumps(step.to_json_object(), allow_nan=False).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            if file.seek(0, 2):
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)


class TensorBoard:
    """Adds each number to a `SummaryWriter` of yours.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Or anything with its `add_scalar` and `flush`.
    """

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add the numbers of a step and flush them."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class Wandb:
    """Logs to a run of Weights & Biases of yours.

    The numbers are plotted over their own axis, `deltad/step`, and so never quarrel with the
    steps of whatever else logs to the run.

    Parameters
    ----------
    run : wandb.Run
        What `wandb.init` returned.
    axis : str
        Name of the axis.
    """

    def __init__(self, run: Any, *, axis: str = "deltad/step") -> None:
        self.run = run
        self.axis = axis
        self._defined: set[str] = set()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step; new names are put onto the axis first."""
        for name in scalars:
            if name not in self._defined:
                self.run.define_metric(name, step_metric=self.axis)
                self._defined.add(name)
        self.run.log({**scalars, self.axis: step})


class Trackio:
    """Logs to a run of trackio of yours, or to the module itself after `trackio.init`.

    Parameters
    ----------
    run : trackio.Run or module
        Anything with `log(metrics, step=...)`.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Log the numbers of a step."""
        self.run.log(dict(scalars), step=step)
