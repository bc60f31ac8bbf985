"""Training with a mask, `deltad train`, and looking at trainings, `deltad curves`.

The options of `train` are the fields of a dataclass; torch is imported when it runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .fields import field_parameters, parsed
from .lazy import LightGroup, made
from .options import DRAWN_FORMATS, BootstrapSeed, Output, Quiet, format_option, write_result
from .places import as_place
from .recipes import FAILED, RECIPE_NAMES, Resume, Workers
from .terminal import (
    INTERRUPTED,
    OptionError,
    check_output,
    chosen_form,
    complain,
    note,
    termination_as_interruption,
)

if TYPE_CHECKING:
    from deltad.probes.training import Training

WATCH_SECONDS: Final = 2.0
"""Between two looks of `--watch`."""

HELP: Final = """Train {what} by GRPO, a run for every mask and seed.

Each rollout batch is sampled from the present policy and gone through once, an optimizer step a
minibatch, with the mask in the loss. RUN gets the log (which deltad curves RUN shows), the steps
(which deltad watch RUN follows) and checkpoints.
"""


class TrainCommands(LightGroup):
    """A command a recipe, made from the fields of `Training` and of the recipe's world."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the recipes."""
        return list(RECIPE_NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make the command of a recipe."""
        if cmd_name not in RECIPE_NAMES:
            return None
        what = {"tiny": "the tiny model of chained sums", "smollm2": "a real language model"}
        text = HELP.format(what=what[cmd_name])
        return made(cmd_name, _train_command(cmd_name), help=text)


def _train_command(recipe: str) -> Callable[..., None]:
    """Make a function whose parameters are the options."""
    from deltad.probes.recipes import RECIPES
    from deltad.probes.training import DEFAULTS, Training
    from deltad.probes.training.options import own_fields, world_fields

    own = {entry.name for entry in own_fields()}
    world = {entry.name for entry in world_fields(recipe)}

    def command(**values: Any) -> None:
        mine = {name: values.pop(name) for name in _own_parameters()}
        given = {name: value for name, value in values.items() if value is not None}
        run_training(Training.of(recipe, **given), **mine)

    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in _own_parameters().items()
    ]
    parameters += field_parameters(Training, panel="Training", only=own, defaults=DEFAULTS[recipe])
    parameters += field_parameters(RECIPES[recipe], panel="Model and prompts", only=world)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _own_parameters() -> dict[str, tuple[Any, Any]]:
    """Annotation and default of what a training's command takes beside the fields."""
    from deltad.probes.training import DEFAULT_SEEDS, MASKS

    run = typer.Argument(
        metavar="RUN", help="Folder of the training.", show_default=False, parser=as_place
    )
    masks = typer.Option(
        metavar="NAME,NAME", help="Criteria to train with, none among them.", show_default="six"
    )
    seeds = typer.Option(min=1, help="Train the seeds from 0 to one below this number.")
    watch = typer.Option("--watch", help="Show the steps as they are made, as deltad watch does.")
    show = typer.Option("--show", help="Print the table of deltad curves at the end.")
    return {
        "run": (Annotated[Path, run], inspect.Parameter.empty),
        "masks": (Annotated[str, masks], ",".join(MASKS)),
        "seeds": (Annotated[int, seeds], DEFAULT_SEEDS),
        "workers": (Workers, None),
        "resume": (Resume, False),
        "watch": (Annotated[bool, watch], False),
        "show": (Annotated[bool, show], False),
        "quiet": (Quiet, False),
    }


def run_training(
    training: Training,
    *,
    run: Path,
    masks: str,
    seeds: int,
    workers: int | None,
    resume: bool,
    watch: bool,
    show: bool,
    quiet: bool,
) -> None:
    """Train; an interruption or a failed run ends the command with a sentence.

    Parameters
    ----------
    training, run, masks, seeds, workers, resume, quiet
        See `deltad.probes.training.train`; masks with commas between.
    watch
        Show the steps in place of the progress bar.
    show
        Print the table at the end.

    Raises
    ------
    typer.Exit
        Interrupted (130) or failed (1), after the sentence was printed.
    """
    from deltad.probes.recipes import WorkerError
    from deltad.probes.training import train

    names = parsed(_Masks, "masks", masks)
    try:
        with termination_as_interruption(), _watching(run, watch):
            done = train(
                training,
                run,
                masks=names,
                seeds=seeds,
                workers=workers,
                resume=resume,
                quiet=quiet or watch,
            )
    except KeyboardInterrupt:
        complain(f"interrupted; what is trained is in {run}: give --resume to go on")
        raise typer.Exit(INTERRUPTED) from None
    except WorkerError as error:
        complain(f"{error}; other runs are kept in {run}: give --resume to go on")
        raise typer.Exit(FAILED) from None
    note(f"{len(done)} runs trained into {run}", quiet=quiet)
    if show:
        from deltad.analysis.training import training_table

        write_result(training_table([run]), "text", None)


class _Masks:
    """Says how the option `--masks` is written."""

    masks: tuple[str, ...]


@contextmanager
def _watching(run: Path, watch: bool) -> Iterator[None]:
    """Redraw the steps of a run while the block trains."""
    if not watch:
        yield
        return
    from rich.console import Console
    from rich.live import Live

    from deltad.analysis.step_files import StepFiles
    from deltad.analysis.watch import StepTable

    console = Console(stderr=True, highlight=False, markup=False)
    files, over = StepFiles(run), threading.Event()

    def look(live: Live) -> None:
        while not over.wait(WATCH_SECONDS):
            if files.refresh():
                live.update(StepTable.from_files(files, width=console.width).text(), refresh=True)

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        thread = threading.Thread(target=look, args=(live,), name="deltad watches", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def curves(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Folders of trainings, or URLs.",
            show_default=False,
            parser=as_place,
        ),
    ],
    output: Output = None,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Mask that it is compared with.",
            show_default="ratio, or the first there is",
        ),
    ] = "",
    batches: Annotated[
        bool,
        typer.Option(
            "--batches", help="In files, a row a rollout batch of every run, with all curves."
        ),
    ] = False,
    bootstrap_seed: BootstrapSeed = 0,
    form: Annotated[str, format_option(*DRAWN_FORMATS)] = "",
) -> None:
    """Show trainings: accuracy by mask with intervals and paired differences, or their curves.

    A .png, .pdf or .svg holds the curves of accuracy, reward, length, PPO-KL, tokens masked and
    outside with bands over seeds; of several RUNs side by side.
    """  # fmt: skip
    form = chosen_form(form, output, DRAWN_FORMATS)
    for run in runs:
        check_output(output, run)
        if not run.is_dir():
            raise OptionError(f"{run} {'is no folder' if run.exists() else 'does not exist'}")
    from deltad.analysis.training import training_table

    table = training_table(runs, baseline=baseline, bootstrap_seed=bootstrap_seed)
    if batches and form in ("png", "pdf", "svg"):
        raise OptionError("`--batches` is for tables: leave it out to draw the curves")
    write_result(table.batches if batches else table, form, output)
