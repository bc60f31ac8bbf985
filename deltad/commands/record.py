"""Commands that record and train: `record`, `train` and `reproduce`; their options are fields.

The recipes are imported when one is asked for; torch only when it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from .analysis import DRAWN
from .lazy import LightGroup, made
from .options import (
    BOOTSTRAP,
    QUIET,
    Call,
    Command,
    Group,
    argument,
    as_place,
    command,
    flag,
    option,
    output,
)
from .terminal import (
    BAD_CONTENT,
    INTERRUPTED,
    OptionError,
    check_output,
    complain,
    note,
    sink,
    termination_as_interruption,
)

if TYPE_CHECKING:
    from deltad.probes.recipes import Recipe

RECIPE_NAMES: Final = ("tiny", "smollm2")

LADDER_TOKENS: Final = 64
"""Tokens per step whose own gradients the ladder takes, unless a number is given."""

WATCH_SECONDS: Final = 2.0
"""Between two looks of `--watch`."""

DUMP: Final = "Folder of the dump, or its URL."

WORK: Final[Group] = {
    "seeds": option(
        int | None, None, "Record the seeds from 0 to one below this number.", min=1
    ),
    "workers": option(
        int | None, None, "Worker processes; 0 works in this one.", min=0,
        show_default="as many as cores",
    ),
    "resume": option(bool, False, "Record what is missing in a dump of the same recipe."),
}  # fmt: skip
RECORD: Final[Group] = {
    **WORK,
    "store": option(
        str, "above", "Store tokens with D > 0.05 or all; or read after the step, and store, only "
        "those with D > 0.01, outside the region, or where ratio and prediction disagree: faster.",
        metavar="above|all|near|outside|disagreement",
    ),
    "vectors": option(
        str, "all", "Keep the top-K log-probs of every token stored, or where D >= 0.01 and of a "
        "hundredth of the rest.", metavar="all|near",
    ),
    "ladder": option(
        bool, False, "Measure the ladder of each step: where the sign of ΔD is lost."
    ),
    "ladder_tokens": option(
        int | None, None,
        "Tokens per step whose own and whose sequence's gradient the ladder takes.", min=0,
        show_default=f"{LADDER_TOKENS} with --ladder",
    ),
    **QUIET,
}  # fmt: skip
TRAIN: Final[Group] = {
    "masks": option(
        str | None, None, "Criteria to train with, or none.", metavar="RULE,…", show_default="six"
    ),
    **WORK,
    "seeds": option(
        int | None, None, "Train the seeds from 0 to one below this number.", min=1,
        show_default="8",
    ),
    "watch": option(bool, False, "Show the steps as they are made, as deltad watch does."),
    "against": option(
        list[Path] | None, None, "Show this training next to it; may be given several times.",
        metavar="RUN", parser=as_place, show_default=False,
    ),
    "baseline": option(
        str, "", "Mask to compare with.", metavar="NAME",
        show_default="ratio, or the first there is",
    ),
    "by_batch": option(bool, False, "In files, one row per rollout batch of every run."),
    **BOOTSTRAP,
}  # fmt: skip
REPRODUCE: Final[Group] = {
    "output": option(
        Path, Path("deltad-figure4"), "Where everything goes.", "-o", "--output", metavar="DIR"
    ),
    "base": option(
        int, 0, "Which of the ten shipped base models to start from.", min=0, max=9
    ),
    **WORK,
    **QUIET,
}  # fmt: skip


class _RecipeCommands(LightGroup):
    """A command per recipe, made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the recipes."""
        return list(RECIPE_NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make the command of a recipe."""
        if cmd_name not in RECIPE_NAMES:
            return None
        return made(cmd_name, self.command_of(cmd_name).for_typer())

    def command_of(self, recipe: str) -> Command:
        """The command of a recipe."""
        raise NotImplementedError


class RecordCommands(_RecipeCommands):
    """`deltad record RECIPE RUN`: options are the fields of the recipe's dataclass."""

    def command_of(self, recipe: str) -> Command:
        """The command that records a recipe."""
        from deltad.probes.recipes import RECIPES

        kind = RECIPES[recipe]
        fields = _fields(kind, "Recipe")
        variant = option(
            str | None, None, "Set of fields; single options win over it.",
            metavar="|".join(kind.variants),
        )  # fmt: skip
        seeds = RECORD["seeds"]
        seeds = seeds._replace(how={**seeds.how, "show_default": str(kind.default_seeds)})

        def record(call: Call) -> None:
            chosen = kind.variant(call.variant, **_chosen(kind, call, fields))
            tokens = call.ladder_tokens
            if call.ladder and tokens is None:
                tokens = LADDER_TOKENS
            record_dump(
                chosen, call.run[0], call, store=call.store, vectors=call.vectors,
                ladder_tokens=tokens,
            )  # fmt: skip

        doc = (inspect.getdoc(kind) or "").replace("\n\n", "\0").replace("\n", " ")
        variants = "; ".join(f"{name}: {text}" for name, text in kind.variants_help.items())
        example = f"Example: deltad record {recipe} RUN --seeds 1"
        record.__doc__ = f"{doc}\n\nVariants. {variants}.\n\n{example}".replace("\0", "\n\n")
        own, run = {"variant": variant, "seeds": seeds}, argument(Path, DUMP)
        return command(own, RECORD, fields, run=run)(record)


class TrainCommands(_RecipeCommands):
    """`deltad train RECIPE RUN`: options are the fields of `Training` and of the recipe's world."""

    def command_of(self, recipe: str) -> Command:
        """The command that trains by a recipe."""
        from deltad.probes.recipes import RECIPES
        from deltad.probes.training import DEFAULTS, Training
        from deltad.probes.training.options import own_fields, world_fields

        mine = {entry.name for entry in own_fields()}
        world = {entry.name for entry in world_fields(recipe)}
        fields = {
            **_fields(Training, "Training", mine, DEFAULTS[recipe]),
            **_fields(RECIPES[recipe], "Model and prompts", world),
        }

        def train(call: Call) -> None:
            run_training(recipe, call, call.given(*fields))

        shown = {"tiny": "fp32", "smollm2": "check"}
        what = {"tiny": "the tiny model of chained sums", "smollm2": "a real language model"}
        train.__doc__ = (
            f"Train {what[recipe]} by GRPO, a run for every mask and seed, and compare them.\n\n"
            "Each rollout batch is sampled from the present policy and gone through once, an "
            "optimizer step per minibatch, with the mask in the loss. RUN gets the log, the steps "
            "(which deltad watch RUN follows) and checkpoints. A finished RUN is only shown: "
            "accuracy by mask with intervals and paired differences; -o draws the curves.\n\n"
            f"Example: deltad train {recipe} data_training/{recipe}/{shown[recipe]}"
        )
        run = argument(Path, "Folder of the training.")
        return command(TRAIN, output(DRAWN), fields, run=run, forms=DRAWN)(train)


def record_dump(recipe: Recipe, folder: Path, call: Call, **how: Any) -> None:
    """Record a dump; an interruption or a failed seed ends the command with a sentence."""
    from deltad.analysis.result import counted
    from deltad.probes.recipes import record

    with _ending(f"complete seeds are in {folder}"):
        done = record(
            recipe, folder, seeds=call.seeds, workers=call.workers, resume=call.resume,
            quiet=call.quiet, **how,
        )  # fmt: skip
    note(f"{counted(len(done), 'seed')} recorded into {folder}", quiet=call.quiet)


def run_training(recipe: str, call: Call, fields: Mapping[str, Any]) -> None:
    """Train by a recipe, or look at a finished RUN, and print how the masks compare."""
    (run,) = call.run
    if call.by_batch and call.form in ("png", "pdf", "svg"):
        raise OptionError("`--by-batch` is for tables: leave it out to draw the curves")
    against = call.against or ()
    for other in against:
        check_output(call.output, other)
        if not other.is_dir():
            raise OptionError(f"{other} {'is no folder' if other.exists() else 'does not exist'}")
    from deltad.analysis.tables.training import training_table

    asked = fields or call.resume or call.masks is not None or call.seeds is not None
    if asked or not _finished(run):
        from deltad.analysis.result import counted
        from deltad.probes.training import DEFAULT_SEEDS, MASKS, Training, train

        with _ending(f"what is trained is in {run}"), _watching(run, call.watch):
            done = train(
                Training.of(recipe, **fields), run,
                masks=tuple(call.listed("masks") if call.masks else MASKS),
                seeds=DEFAULT_SEEDS if call.seeds is None else call.seeds, workers=call.workers,
                resume=call.resume, quiet=call.quiet or call.watch,
            )  # fmt: skip
        note(f"{counted(len(done), 'run')} trained into {run}", quiet=call.quiet)
    table = training_table(
        [run, *against], baseline=call.baseline, bootstrap_seed=call.bootstrap_seed
    )
    call.write(table.batches if call.by_batch else table)


@command(REPRODUCE, run=None)
def reproduce(call: Call) -> None:
    """Record the recipe tiny, print its table for all protocols and draw Figure 4: minutes.

    DIR gets dump/, table.txt, table.json, figure4.png and figure4.pdf. Without --seeds 61.

    Example: deltad reproduce --seeds 2 -o small
    """
    from deltad.analysis.result import form_of
    from deltad.analysis.tables.rates import protocol_table
    from deltad.dumps import Dump
    from deltad.probes.recipes import TinyRecipe

    run = call.output / "dump"
    record_dump(TinyRecipe(base=call.base), run, call, store="above")
    found = protocol_table(Dump.open(run))
    typer.echo(found.text(), nl=False)
    for name in ("table.txt", "table.json", "figure4.png", "figure4.pdf"):
        result = found.tables[0] if name.startswith("figure4") else found
        with sink(call.output / name) as file:
            file.write(result.form(form_of(name)))
    note(f"the dump, tables and figures are in {call.output}", quiet=call.quiet)


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
    """Turn an interruption, or a failed worker, into a sentence that says what is kept."""
    from deltad.probes.recipes import WorkerError

    try:
        with termination_as_interruption():
            yield
    except KeyboardInterrupt:
        complain(f"interrupted; {kept}: give --resume to go on")
        raise typer.Exit(INTERRUPTED) from None
    except WorkerError as error:
        complain(f"{error}; {kept}: give --resume to go on")
        raise typer.Exit(BAD_CONTENT) from None


@contextlib.contextmanager
def _watching(run: Path, watch: bool) -> Iterator[None]:
    """Redraw the steps of a run while the block trains."""
    if not watch:
        yield
        return
    from rich.console import Console
    from rich.live import Live

    from deltad.analysis.tables.steps import StepFiles, StepTable

    console = Console(stderr=True, highlight=False, markup=False)
    files, over = StepFiles(run), threading.Event()

    def look(live: Live) -> None:
        while not over.wait(WATCH_SECONDS):
            if files.refresh():
                live.update(StepTable.from_files(files).text(width=console.width), refresh=True)

    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        thread = threading.Thread(target=look, args=(live,), name="deltad watches", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _fields(
    kind: type[Any],
    panel: str,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> Group:
    """An option per field of a dataclass, with help from there; None stands for not given."""
    hints = typing.get_type_hints(kind)
    found = {}
    for each in dataclasses.fields(kind):
        if only is not None and each.name not in only:
            continue
        text, metavar = _text(hints[each.name])
        default = defaults.get(each.name, each.default)
        shown = ",".join(default) if isinstance(default, tuple) else default
        names = [flag(each.name) + f"/--no-{each.name}"] if text is bool else []
        found[each.name] = option(
            text | None, None, each.metadata["help"], *names, metavar=metavar,
            show_default="none" if shown is None else str(shown), rich_help_panel=panel,
        )  # fmt: skip
    return found


def _text(hint: Any) -> tuple[Any, str | None]:
    """Type of an option's text, and its metavar."""
    if typing.get_origin(hint) is Literal:
        return str, "|".join(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return str, "NAME,…"
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None)), None
    return hint, None


def _chosen(kind: type[Any], call: Call, fields: Group) -> dict[str, Any]:
    """The fields that were given; lists are written with commas."""
    hints = typing.get_type_hints(kind)
    return {
        name: tuple(call.listed(name)) if typing.get_origin(hints[name]) is tuple else value
        for name, value in call.given(*fields).items()
    }
