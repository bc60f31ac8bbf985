"""Commands that record: `record`, whose options are a recipe's fields, and `reproduce`.

The recipes are imported when one is asked for; torch only when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .fields import field_parameters, parsed
from .lazy import LightGroup, made
from .options import Quiet
from .places import as_place
from .rates import ALL_PROTOCOLS, figure4, table
from .terminal import INTERRUPTED, complain, note, termination_as_interruption

if TYPE_CHECKING:
    from deltad.probes.recipes import Recipe

RECIPE_NAMES: Final = ("tiny", "smollm2")
FAILED: Final = 1

LADDER_TOKENS: Final = 64
"""Tokens a step whose own gradients the ladder takes, unless a number is given."""

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


class RecipeCommands(LightGroup):
    """A command a recipe, made from the fields of its dataclass."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the recipes."""
        return list(RECIPE_NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make the command of a recipe."""
        if cmd_name not in RECIPE_NAMES:
            return None
        from deltad.probes.recipes import RECIPES

        recipe = RECIPES[cmd_name]
        return made(cmd_name, _record_command(recipe), help=_help(recipe))


def record_dump(
    recipe: Recipe,
    folder: Path,
    *,
    seeds: int | None,
    workers: int | None,
    resume: bool,
    store: str,
    quiet: bool,
    vectors: str = "all",
    ladder: bool = False,
    ladder_tokens: int | None = None,
) -> None:
    """Record a dump; an interruption or a failed seed ends the command with a sentence.

    Parameters
    ----------
    recipe, folder, seeds, workers, resume, store, quiet, vectors
        See `deltad.probes.recipes.record`.
    ladder, ladder_tokens
        Whether the ladder is measured, and with the gradients of how many tokens a step; giving
        the number asks for the ladder.

    Raises
    ------
    typer.Exit
        Interrupted (130) or failed (1), after the sentence was printed.
    """
    from deltad.probes.recipes import WorkerError, record

    try:
        with termination_as_interruption():
            done = record(
                recipe,
                folder,
                seeds=seeds,
                workers=workers,
                resume=resume,
                store=store,
                vectors=vectors,
                ladder_tokens=LADDER_TOKENS if ladder and ladder_tokens is None else ladder_tokens,
                quiet=quiet,
            )
    except KeyboardInterrupt:
        complain(f"interrupted; complete seeds are in {folder}: give --resume to go on")
        raise typer.Exit(INTERRUPTED) from None
    except WorkerError as error:
        complain(f"{error}; other seeds are kept in {folder}: give --resume to go on")
        raise typer.Exit(FAILED) from None
    note(f"{len(done)} seeds recorded into {folder}", quiet=quiet)


def _help(recipe: type[Recipe]) -> str:
    """Text of a recipe's command."""
    doc = (inspect.getdoc(recipe) or "").replace("\n\n", "\0").replace("\n", " ")
    doc = doc.replace("\0", "\n\n")
    variants = "\n".join(f"- {name}: {text}" for name, text in recipe.variants_help.items())
    return f"{doc}\n\nVariants:\n\n{variants}"


def _record_command(recipe: type[Recipe]) -> Callable[..., None]:
    """Make a function whose parameters are the options: those of `record`, then the fields."""

    def command(**values: Any) -> None:
        own = {name: values.pop(name) for name in _own_parameters(recipe)}
        given = {
            name: parsed(recipe, name, value) for name, value in values.items() if value is not None
        }
        record_dump(recipe.variant(own.pop("variant"), **given), own.pop("run"), **own)

    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in _own_parameters(recipe).items()
    ]
    parameters += field_parameters(recipe, panel="Recipe")
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _own_parameters(recipe: type[Recipe]) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of what a record command takes beside the recipe's fields."""
    run = typer.Argument(
        metavar="RUN",
        help="Folder of the dump, or its URL.",
        show_default=False,
        parser=as_place,
    )
    variant = typer.Option(
        metavar="|".join(recipe.variants), help="Set of fields; single options win over it."
    )
    seeds = typer.Option(
        min=1,
        help="Record the seeds from 0 to one below this number.",
        show_default=str(recipe.default_seeds),
    )
    ladder = typer.Option(
        "--ladder", help="Measure the ladder of each step: where the sign of ΔD is lost."
    )
    ladder_tokens = typer.Option(
        min=0,
        help="Tokens a step whose own and whose sequence's gradient the ladder takes.",
        show_default=f"{LADDER_TOKENS} with --ladder",
    )
    store = typer.Option(
        metavar="above|all|near|outside|disagreement",
        help="Store tokens with D > 0.05 or all; or read after the step, and store, only those "
        "with D > 0.01, outside the region, or where ratio and prediction disagree: faster.",
    )
    vectors = typer.Option(
        metavar="all|near",
        help="Keep the top-K vectors of every token stored, or where D >= 0.01 and of a "
        "hundredth of the rest.",
    )
    return {
        "run": (Annotated[Path, run], inspect.Parameter.empty),
        "variant": (Annotated[str | None, variant], None),
        "seeds": (Annotated[int | None, seeds], None),
        "workers": (Workers, None),
        "resume": (Resume, False),
        "store": (Annotated[str, store], "above"),
        "vectors": (Annotated[str, vectors], "all"),
        "ladder": (Annotated[bool, ladder], False),
        "ladder_tokens": (Annotated[int | None, ladder_tokens], None),
        "quiet": (Quiet, False),
    }


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
    """
    from deltad.probes.recipes import TinyRecipe

    run = output / "dump"
    record_dump(
        TinyRecipe(base=base),
        run,
        seeds=seeds,
        workers=workers,
        resume=resume,
        store="above",
        quiet=quiet,
    )
    for file, form in ((None, "text"), (output / "table.txt", ""), (output / "table.json", "")):
        table(run, file, protocol=ALL_PROTOCOLS, form=form, quiet=True)
    figure4(run, [output / "figure4.png", output / "figure4.pdf"], quiet=quiet)
    note(f"the dump, tables and figures are in {output}", quiet=quiet)
