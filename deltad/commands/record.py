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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from .analysis import DRAWN
from .lazy import LightGroup, made
from .options import Call, Quiet, as_place, listed, output_group, settled
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

Seeds = Annotated[
    int | None, typer.Option(min=1, help="Record the seeds from 0 to one below this number.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=0, help="Worker processes; 0 works in this one.", show_default="as many as cores"
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Record what is missing in a dump of the same recipe.")
]
Folder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of the dump, or its URL.", show_default=False,
                   parser=as_place),
]  # fmt: skip


class _RecipeCommands(LightGroup):
    """A command per recipe, made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the recipes."""
        return list(RECIPE_NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make the command of a recipe."""
        return self.command_of(cmd_name) if cmd_name in RECIPE_NAMES else None

    def command_of(self, recipe: str) -> Any:
        """The command of a recipe."""
        raise NotImplementedError


class RecordCommands(_RecipeCommands):
    """`deltad record RECIPE RUN`: options are the fields of the recipe's dataclass."""

    def command_of(self, recipe: str) -> Any:
        """The command that records a recipe."""
        from deltad.probes.recipes import RECIPES

        kind = RECIPES[recipe]
        own = _record_options(kind)

        def command(**values: Any) -> None:
            mine = {name: values.pop(name) for name in own}
            fields = _given(kind, values)
            record_dump(kind.variant(mine.pop("variant"), **fields), mine.pop("run"), **mine)

        doc = (inspect.getdoc(kind) or "").replace("\n\n", "\0").replace("\n", " ")
        variants = "; ".join(f"{name}: {text}" for name, text in kind.variants_help.items())
        example = f"Example: deltad record {recipe} RUN --seeds 1"
        text = f"{doc}\n\nVariants. {variants}.\n\n{example}".replace("\0", "\n\n")
        return made(recipe, _function(command, own, _fields(kind, "Recipe")), help=text)


class TrainCommands(_RecipeCommands):
    """`deltad train RECIPE RUN`: options are the fields of `Training` and of the recipe's world."""

    def command_of(self, recipe: str) -> Any:
        """The command that trains by a recipe."""
        from deltad.probes.recipes import RECIPES
        from deltad.probes.training import DEFAULTS, Training
        from deltad.probes.training.options import own_fields, world_fields

        own = _train_options()
        mine = {entry.name for entry in own_fields()}
        world = {entry.name for entry in world_fields(recipe)}
        fields = [
            *_fields(Training, "Training", mine, DEFAULTS[recipe]),
            *_fields(RECIPES[recipe], "Model and prompts", world),
        ]

        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in own}
            chosen = {name: value for name, value in values.items() if value is not None}
            run_training(lambda: Training.of(recipe, **chosen), fresh=bool(chosen), **given)

        shown = {"tiny": "fp32", "smollm2": "check"}
        what = {"tiny": "the tiny model of chained sums", "smollm2": "a real language model"}
        text = (
            f"Train {what[recipe]} by GRPO, a run for every mask and seed, and compare them.\n\n"
            "Each rollout batch is sampled from the present policy and gone through once, an "
            "optimizer step per minibatch, with the mask in the loss. RUN gets the log, the steps "
            "(which deltad watch RUN follows) and checkpoints. A finished RUN is only shown: "
            "accuracy by mask with intervals and paired differences; -o draws the curves.\n\n"
            f"Example: deltad train {recipe} data_training/{recipe}/{shown[recipe]}"
        )
        return made(recipe, _function(command, own, fields), help=text)


def record_dump(
    recipe: Recipe,
    folder: Path,
    *,
    ladder: bool = False,
    ladder_tokens: int | None = None,
    quiet: bool = False,
    **how: Any,
) -> None:
    """Record a dump; an interruption or a failed seed ends the command with a sentence.

    Parameters
    ----------
    recipe, folder, **how
        As `deltad.probes.recipes.record` takes them.
    ladder, ladder_tokens
        Whether the ladder is measured, and with the gradients of how many tokens per step;
        giving the number asks for the ladder.
    quiet
        No progress bar and no notes.

    Raises
    ------
    typer.Exit
        Interrupted (130) or failed (1), after the sentence was printed.
    """
    from deltad.probes.recipes import record

    tokens = LADDER_TOKENS if ladder and ladder_tokens is None else ladder_tokens
    with _ending(f"complete seeds are in {folder}"):
        done = record(recipe, folder, ladder_tokens=tokens, quiet=quiet, **how)
    note(f"{len(done)} seeds recorded into {folder}", quiet=quiet)


def run_training(
    training: Callable[[], Any],
    *,
    run: Path,
    masks: str | None,
    seeds: int | None,
    workers: int | None,
    resume: bool,
    watch: bool,
    against: list[Path] | None,
    baseline: str,
    by_batch: bool,
    bootstrap_seed: int,
    fresh: bool,
    **shared: Any,
) -> None:
    """Train, or look at a finished RUN, and print how the masks compare.

    Parameters
    ----------
    training
        Makes the options of the training.
    run, masks, seeds, workers, resume
        As `deltad.probes.training.train` takes them; masks with commas between.
    watch
        Show the steps in place of the progress bar.
    against, baseline, by_batch, bootstrap_seed
        Other trainings to show, the mask to compare with, and one row per rollout batch in files.
    fresh
        Whether options of the training were given, so that a finished RUN is no answer.
    **shared
        The options of the output.

    Raises
    ------
    typer.Exit
        Interrupted (130) or failed (1), after the sentence was printed.
    """
    call = Call(shared, [run])
    call.form = settled(call, DRAWN)
    if by_batch and call.form in ("png", "pdf", "svg"):
        raise OptionError("`--by-batch` is for tables: leave it out to draw the curves")
    for other in against or ():
        check_output(call.output, other)
        if not other.is_dir():
            raise OptionError(f"{other} {'is no folder' if other.exists() else 'does not exist'}")
    from deltad.analysis.tables.training import training_table

    asked = fresh or resume or masks is not None or seeds is not None
    if asked or not _finished(run):
        from deltad.probes.training import DEFAULT_SEEDS, MASKS, train

        quiet = call.quiet or watch
        with _ending(f"what is trained is in {run}"), _watching(run, watch):
            done = train(
                training(), run, masks=tuple(listed(masks or ",".join(MASKS), "--masks")),
                seeds=DEFAULT_SEEDS if seeds is None else seeds, workers=workers, resume=resume,
                quiet=quiet,
            )  # fmt: skip
        note(f"{len(done)} runs trained into {run}", quiet=call.quiet)
    table = training_table(
        [run, *(against or ())], baseline=baseline, bootstrap_seed=bootstrap_seed
    )
    call.write(table.batches if by_batch else table)


def reproduce(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where everything goes.")
    ] = Path("deltad-figure4"),
    seeds: Seeds = None,
    base: Annotated[
        int, typer.Option(min=0, max=9, help="Which of the ten shipped base models to start from.")
    ] = 0,
    workers: Workers = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Record the recipe tiny, print its table for all protocols and draw Figure 4: minutes.

    DIR gets dump/, table.txt, table.json, figure4.png and figure4.pdf. Without --seeds 61.

    Example: deltad reproduce --seeds 2 -o small
    """
    from deltad.analysis.result import form_of
    from deltad.analysis.tables.rates import protocol_table
    from deltad.dumps import Dump
    from deltad.probes.recipes import TinyRecipe

    run = output / "dump"
    record_dump(
        TinyRecipe(base=base), run, seeds=seeds, workers=workers, resume=resume, store="above",
        quiet=quiet,
    )  # fmt: skip
    found = protocol_table(Dump.open(run))
    typer.echo(found.text(), nl=False)
    for name in ("table.txt", "table.json", "figure4.png", "figure4.pdf"):
        result = found.tables[0] if name.startswith("figure4") else found
        with sink(output / name) as file:
            file.write(result.form(form_of(name)))
    note(f"the dump, tables and figures are in {output}", quiet=quiet)


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


Options = Mapping[str, tuple[Any, Any]]
_REQUIRED: Final = inspect.Parameter.empty


def _record_options(recipe: type[Recipe]) -> Options:
    """Annotation and default of what a record command takes in addition to the fields."""
    option = typer.Option
    ladder_help = "Measure the ladder of each step: where the sign of ΔD is lost."
    tokens_help = "Tokens per step whose own and whose sequence's gradient the ladder takes."
    store_help = (
        "Store tokens with D > 0.05 or all; or read after the step, and store, only those with "
        "D > 0.01, outside the region, or where ratio and prediction disagree: faster."
    )
    topk_help = (
        "Keep the top-K log-probs of every token stored, or where D >= 0.01 and of a hundredth of "
        "the rest."
    )
    variant = option(
        metavar="|".join(recipe.variants), help="Set of fields; single options win over it."
    )
    seeds = option(
        min=1, help="Record the seeds from 0 to one below this number.",
        show_default=str(recipe.default_seeds),
    )  # fmt: skip
    store = option(metavar="above|all|near|outside|disagreement", help=store_help)
    tokens = option(min=0, help=tokens_help, show_default=f"{LADDER_TOKENS} with --ladder")
    return {
        "run": (Folder, _REQUIRED),
        "variant": (Annotated[str | None, variant], None),
        "seeds": (Annotated[int | None, seeds], None),
        "workers": (Workers, None),
        "resume": (Resume, False),
        "store": (Annotated[str, store], "above"),
        "vectors": (Annotated[str, option(metavar="all|near", help=topk_help)], "all"),
        "ladder": (Annotated[bool, option("--ladder", help=ladder_help)], False),
        "ladder_tokens": (Annotated[int | None, tokens], None),
        "quiet": (Quiet, False),
    }


def _train_options() -> Options:
    """Annotation and default of what a training's command takes in addition to the fields."""
    option = typer.Option
    run = typer.Argument(
        metavar="RUN", help="Folder of the training.", show_default=False, parser=as_place
    )
    masks = option(metavar="RULE,…", help="Criteria to train with, or none.", show_default="six")
    seeds = option(min=1, help="Train the seeds from 0 to one below this number.", show_default="8")
    watch = option("--watch", help="Show the steps as they are made, as deltad watch does.")
    against = option(
        metavar="RUN", help="Show this training next to it; may be given several times.",
        parser=as_place, show_default=False,
    )  # fmt: skip
    baseline = option(
        metavar="NAME", help="Mask to compare with.", show_default="ratio, or the first there is"
    )
    by_batch = option("--by-batch", help="In files, one row per rollout batch of every run.")
    draws = option(min=0, help="Seed of the intervals' random numbers.")
    return {
        "run": (Annotated[Path, run], _REQUIRED),
        "masks": (Annotated[str | None, masks], None),
        "seeds": (Annotated[int | None, seeds], None),
        "workers": (Workers, None),
        "resume": (Resume, False),
        "watch": (Annotated[bool, watch], False),
        "against": (Annotated[list[Path] | None, against], None),
        "baseline": (Annotated[str, baseline], ""),
        "by_batch": (Annotated[bool, by_batch], False),
        "bootstrap_seed": (Annotated[int, draws], 0),
        **output_group(DRAWN),
    }


def _function(
    command: Callable[..., None], own: Options, fields: Collection[inspect.Parameter]
) -> Callable[..., None]:
    """A function whose parameters are a command's own options, then the fields."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in own.items()
    ]
    parameters += fields
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _fields(
    kind: type[Any],
    panel: str,
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[inspect.Parameter]:
    """A parameter per field of a dataclass, with help from there; None stands for not given."""
    found = []
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        if only is not None and each.name not in only:
            continue
        annotation, metavar = _kind(hints[each.name])
        default = defaults.get(each.name, each.default)
        shown = ",".join(default) if isinstance(default, tuple) else default
        option = typer.Option(
            metavar=metavar, help=each.metadata["help"],
            show_default="none" if shown is None else str(shown), rich_help_panel=panel,
        )  # fmt: skip
        found.append(
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=None,
                annotation=Annotated[annotation | None, option],
            )
        )  # fmt: skip
    return found


def _given(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given; lists are written with commas."""
    hints = typing.get_type_hints(kind)
    return {
        name: tuple(listed(str(value), f"--{name.replace('_', '-')}"))
        if typing.get_origin(hints[name]) is tuple
        else value
        for name, value in values.items()
        if value is not None
    }


def _kind(hint: Any) -> tuple[Any, str | None]:
    """Type of an option's text, and its metavar."""
    if typing.get_origin(hint) is Literal:
        return str, "|".join(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return str, "NAME,…"
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None)), None
    return hint, None
