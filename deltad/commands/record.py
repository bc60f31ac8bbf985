"""Commands that record and train: `record`, `train` and `reproduce`.

What a recipe or a training is made of are the fields of a dataclass, and each field is an option.
The recipes are imported when one is asked for; torch only when it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import signal
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, NamedTuple

import typer

from .analysis import DRAWN
from .looking import follow
from .options import (
    BOOTSTRAP_SEED,
    QUIET,
    Call,
    Command,
    Option,
    TextGroup,
    command,
    names,
    output,
    place,
    switch,
)
from .terminal import OptionError, Status, check_output, complain, must_be_folder, sink

LADDER_TOKENS: Final = 64
"""Tokens per step whose own gradients the ladder takes, unless a number is given."""

WATCH_SECONDS: Final = 2.0
"""Between two looks of `--watch`."""

SEEDS: Final = Option("--seeds", int, "Record the seeds from 0 to one below this number.",
                      shown="61", min=1)  # fmt: skip
WORKERS: Final = Option("--workers", int, "Worker processes; 0 works in this one.",
                        shown="as many as cores", min=0)  # fmt: skip
RESUME: Final = switch("--resume", "Record what is missing in a dump of the same recipe.")
TRAINED: Final = {
    "tiny": ("the tiny model of chained sums", "fp32"),
    "smollm2": ("a real language model", "check"),
}
"""What a recipe trains, and a training in `data_training/` to show."""


class Recipes(NamedTuple):
    """A command of commands, one per recipe, made when it is asked for."""

    summary: str
    make: Callable[[str], Command]

    def build(self, name: str) -> Any:
        """The group as typer has it."""
        from deltad.probes.recipes import RECIPES

        commands = {recipe: self.make(recipe).build(recipe) for recipe in RECIPES}
        return TextGroup(name=name, help=self.summary, commands=commands, rich_markup_mode=None)


def _recording(recipe: str) -> Command:
    """The command that records a recipe."""
    from deltad.probes.recipes import RECIPES

    kind = RECIPES[recipe]
    fields = _field_options(kind, dataclasses.fields(kind), {})

    def run(call: Call) -> None:
        tokens = LADDER_TOKENS if call.ladder and call.ladder_tokens is None else call.ladder_tokens
        chosen = kind.variant(call.variant, **call.given(fields))
        _record(call, chosen, call.run, call.store, vectors=call.vectors, ladder_tokens=tokens)

    options = (
        Option("RUN", place, "Folder of the dump, or its URL.", ...),
        Option("--variant", tuple(kind.variants), "Set of fields; single options win over it."),
        SEEDS._replace(shown=str(kind.default_seeds)), WORKERS, RESUME,
        Option("--store", ("above", "all", "near", "outside", "disagreement"),
               "Store tokens with D > 0.05 or all; or read after the step, and store, only those "
               "with D > 0.01, outside the region, or where ratio and prediction disagree: faster.",
               "above"),
        Option("--vectors", ("all", "near"), "Keep the top-K log-probs of every token stored, or "
               "where D >= 0.01 and of a hundredth of the rest.", "all"),
        switch("--ladder", "Measure the ladder of each step: where the sign of ΔD is lost."),
        Option("--ladder-tokens", int, "Tokens per step whose own and whose sequence's gradient "
               "the ladder takes.", shown=f"{LADDER_TOKENS} with --ladder", min=0),
        QUIET, *fields,
    )  # fmt: skip
    variants = "; ".join(f"{name}: {text}" for name, text in kind.variants_help.items())
    example = f"Example: deltad record {recipe} RUN --seeds 1"
    return Command(run, options, f"{inspect.getdoc(kind)}\n\nVariants. {variants}.\n\n{example}")


def _training(recipe: str) -> Command:
    """The command that trains by a recipe."""
    from deltad.probes.recipes import RECIPES
    from deltad.probes.training import DEFAULTS, Training
    from deltad.probes.training.options import own_fields, world_fields

    fields = _field_options(Training, own_fields(), DEFAULTS[recipe])
    fields += _field_options(RECIPES[recipe], world_fields(recipe), {})
    options = (
        Option("RUN", place, "Folder of the training.", ...),
        Option("--masks", names, "Criteria to train with, or none.", shown="six"),
        SEEDS._replace(help="Train the seeds from 0 to one below this number.", shown="8"),
        WORKERS, RESUME,
        switch("--watch", "Show the steps as they are made, as deltad watch does."),
        Option("--against", [place], "Show this training next to it; may be given several times."),
        Option("--baseline", str, "Mask to compare with.", metavar="NAME",
               shown="ratio, or the first there is"),
        switch("--by-batch", "In files, one row per rollout batch of every run."),
        BOOTSTRAP_SEED, *output(DRAWN), *fields,
    )  # fmt: skip
    what, shown = TRAINED[recipe]
    text = f"""Train {what} by GRPO, a run for every mask and seed, and compare them.

Each rollout batch is sampled from the present policy and gone through once, an optimizer step per
minibatch, with the mask in the loss. RUN gets the log, the steps (which deltad watch RUN follows)
and checkpoints. A finished RUN is only shown: accuracy by mask with intervals and paired
differences; -o draws the curves.

Example: deltad train {recipe} data_training/{recipe}/{shown}"""
    return Command(lambda call: _train(call, recipe, call.given(fields)), options, text, DRAWN)


RECORD: Final = Recipes(
    "Record a dump of real updates by a recipe: RUN, then the recipe's fields as options.",
    _recording,
)
TRAIN: Final = Recipes(
    "Train by GRPO with masks, by a recipe, and compare them; or show a finished training.",
    _training,
)


def _record(call: Call, recipe: Any, run: Path, store: str, **how: Any) -> None:
    """Record a dump."""
    from deltad.analysis.result import counted
    from deltad.probes.recipes import record

    with _ending(f"complete seeds are in {run}"):
        done = record(
            recipe, run, seeds=call.seeds, workers=call.workers, resume=call.resume, store=store,
            quiet=call.quiet, **how,
        )  # fmt: skip
    call.note(f"{counted(len(done), 'seed')} recorded into {run}")


def _train(call: Call, recipe: str, chosen: Mapping[str, Any]) -> None:
    """Train unless RUN is finished and nothing else is asked for; print how the masks compare."""
    run = call.run
    if call.by_batch and call.form in ("png", "pdf", "svg"):
        raise OptionError("`--by-batch` is for tables: leave it out to draw the curves")
    if call.output is not None:
        check_output(call.output, call.against)
    for other in call.against:
        must_be_folder(other)
    from deltad.analysis.tables.training import training_table

    if chosen or call.resume or call.masks or call.seeds or not _finished(run):
        from deltad.analysis.result import counted
        from deltad.probes.training import DEFAULT_SEEDS, MASKS, Training, train

        with _ending(f"what is trained is in {run}"), _watching(run, call.watch):
            done = train(
                Training.of(recipe, **chosen), run, masks=call.masks or MASKS,
                seeds=call.seeds or DEFAULT_SEEDS, workers=call.workers, resume=call.resume,
                quiet=call.quiet or call.watch,
            )  # fmt: skip
        call.note(f"{counted(len(done), 'run')} trained into {run}")
    table = training_table(
        [run, *call.against], baseline=call.baseline or "", bootstrap_seed=call.bootstrap_seed
    )
    call.write(table.batches if call.by_batch else table)


@command(
    Option("-o --output", Path, "Where everything goes.", "deltad-figure4", metavar="DIR"),
    SEEDS,
    Option("--base", int, "Which of the ten shipped base models to start from.", 0, min=0),
    WORKERS, RESUME, QUIET,
)  # fmt: skip
def reproduce(call: Call) -> None:
    """Record the recipe tiny, print its table for all protocols and draw Figure 4: minutes.

    DIR gets dump/, table.txt, table.json, figure4.png and figure4.pdf.

    Example: deltad reproduce --seeds 2 -o small
    """
    from deltad.analysis.result import form_of
    from deltad.analysis.tables.rates import protocol_table
    from deltad.dumps import Dump
    from deltad.probes.recipes import TinyRecipe

    folder = call.output
    _record(call, TinyRecipe(base=call.base), folder / "dump", store="above")
    found = protocol_table(Dump.open(folder / "dump"))
    typer.echo(found.text(), nl=False)
    for name in ("table.txt", "table.json", "figure4.png", "figure4.pdf"):
        result = found.tables[0] if name.startswith("figure4") else found
        with sink(folder / name) as file:
            file.write(result.form(form_of(name)))
    call.note(f"the dump, tables and figures are in {folder}")


def _finished(run: Path) -> bool:
    """Whether a folder holds trainings, all of them gone to their end."""
    from deltad.analysis.question import QuestionError
    from deltad.analysis.tables.training import training_table
    from deltad.dumps import DumpError

    if not run.is_dir():
        return False
    try:
        return all(each.complete for each in training_table([run]).runs)
    except (QuestionError, DumpError):
        return False


@contextlib.contextmanager
def _ending(kept: str) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM or a failed worker into a sentence that says what is kept."""
    from deltad.probes.recipes import WorkerError

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (KeyboardInterrupt, WorkerError) as error:
        failed = isinstance(error, WorkerError)
        complain(f"{error if failed else 'interrupted'}; {kept}: give --resume to go on")
        raise typer.Exit(Status.BAD_CONTENT if failed else Status.INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _watching(run: Path, watch: bool) -> Iterator[None]:
    """Redraw the steps of a run while the block trains."""
    if not watch:
        yield
        return
    from rich.console import Console

    from deltad.analysis.tables.steps import StepFiles, StepTable

    files, over = StepFiles(run), threading.Event()
    console = Console(stderr=True, highlight=False, markup=False)

    def look() -> None:
        follow(files, lambda *size: StepTable.from_files(files), console, WATCH_SECONDS, over)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _field_options(
    kind: type[Any], fields: Iterable[dataclasses.Field[Any]], defaults: Mapping[str, Any]
) -> list[Option]:
    """An option per field of a dataclass, with its help; without a default, None is not given."""
    hints = typing.get_type_hints(kind)
    found = []
    for each in fields:
        flag, value = each.name.replace("_", "-"), _kind(hints[each.name])
        flags = f"--{flag}/--no-{flag}" if value is bool else f"--{flag}"
        usual = defaults.get(each.name, each.default)
        shown = ",".join(usual) if isinstance(usual, tuple) else str(usual).replace("None", "none")
        found.append(Option(flags, value, each.metadata["help"], shown=shown))
    return found


def _kind(hint: Any) -> Any:
    """The kind of an option's value, of a field's type."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return names
    if isinstance(hint, UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint
