"""What commands are made of: rows of options over a function, whose docstring is the help.

`@command(Option("--bins", int, "Bins by quantile."), *PAIR)` makes a `Command` of the function
below it, which gets a `Call`: the values of the options, and the dump, the question and the output
that they ask for.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from .terminal import Bar, OptionError, check_output, complain, is_url, sink

if TYPE_CHECKING:
    from deltad.analysis.question import Question
    from deltad.analysis.result import Result
    from deltad.analysis.shards import Shards
    from deltad.dumps import Dump


def place(text: str) -> Path:
    """The folder that an argument names, or what a URL stands for."""
    from deltad.dumps import storage

    return storage.place(text)


def names(text: str) -> tuple[str, ...]:
    """The names in a text with commas."""
    found = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(found):
        raise ValueError
    return found


def numbers(text: str) -> tuple[float, ...]:
    """The numbers in a text with commas."""
    return tuple(map(float, names(text)))


KINDS: Final[Mapping[Any, tuple[str, str]]] = {
    str: ("TEXT", "text"),
    int: ("INTEGER", "an integer"),
    float: ("NUMBER", "a number"),
    bool: ("", "on or off"),
    Path: ("FILE", "a file"),
    place: ("RUN", "a folder or a URL"),
    names: ("RULE,…", "names with single commas between them"),
    numbers: ("X,…", "numbers with single commas between them"),
}
"""Kinds of values: what stands for one in the help, and what it must be."""


class Option(NamedTuple):
    """An option, or an argument where the name has no dashes."""

    flags: str  # with spaces between; the value is named after the last
    kind: Any  # one of `KINDS`, a tuple of choices, or a list of one of these if it may be repeated
    help: str
    default: Any = None  # `...` where it must be given
    metavar: str = ""  # what stands for the value, where that of the kind says too little
    shown: str = ""  # the default in words, where the command finds it itself
    needs: str = ""  # another option, or one and its value, without which this means nothing
    min: float | None = None

    @property
    def flag(self) -> str:
        """The option as messages name it."""
        return self.flags.split()[-1].partition("/")[0]

    @property
    def name(self) -> str:
        """The name of its value."""
        return _name(self.flag)

    def parameter(self) -> inspect.Parameter:
        """The parameter that typer makes it of; values are texts there."""
        many = isinstance(self.kind, list)
        kind = self.kind[0] if many else self.kind
        usual = "|".join(kind) if isinstance(kind, tuple) else KINDS[kind][0]
        how: Any = {"metavar": self.metavar or usual or None, "show_default": self.shown or True}
        how["help"] = f"With {self.needs}: {self.help}" if self.needs else self.help
        text: Any = bool if kind is bool else str
        if self.flags.startswith("-"):
            info: Any = typer.Option(*self.flags.split(), min=self.min, **how)
        else:
            text, info = Path, typer.Argument(parser=str, **how)
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if self.default is ... else self.default,
            annotation=Annotated[list[text] if many else text, info],
        )  # fmt: skip

    def read(self, given: Any) -> Any:
        """The value of a text; None, or a sequence of none, where none was given."""
        kind = self.kind
        if isinstance(kind, list):
            return [self._replace(kind=kind[0]).read(each) for each in given or ()]
        if given is None:
            return () if kind in (names, numbers) else None
        fit = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else KINDS[kind][1]
        with contextlib.suppress(ValueError):
            value = kind[kind.index(given)] if isinstance(kind, tuple) else kind(given)
            if self.min is None or value >= self.min:
                return value
            fit = f"at least {self.min}"
        raise OptionError(f"`{self.flag}` must be {fit}, got {given!r}")


def switch(flags: str, help: str) -> Option:
    """An option that is on or off, and off by default."""
    return Option(flags, bool, help, False)


def _name(flag: str) -> str:
    """The name of an option's value."""
    return flag.strip("-").replace("-", "_").lower()


# fmt: off
RUN: Final = Option("RUN", place, "Folder of a dump, or its URL.", ...)
SHARDS: Final = RUN._replace(
    kind=[place], help="Folder of a dump, or its URL; or all shards of one table.")
THRESHOLD: Final = Option(
    "--threshold", float, "δ ≥ 0 of the region: nats for KL, a probability for TV.", shown="0.15")
DIVERGENCE: Final = Option("--divergence", ("kl", "tv"), "Divergence of the region.", "kl")
CRITERION: Final = Option(
    "--criterion", str, "Criterion in question. A name, or FILE.py:NAME for a rule of your own.",
    metavar="RULE", shown="predictive-<divergence>-aggregated")
BASELINE: Final = Option(
    "--baseline", str, "Criterion that it is compared with, likewise.", "ratio", metavar="RULE")
PROTOCOL: Final = Option(
    "--protocol", str, "Which update ΔD is measured under: one arm's, or each criterion's own.",
    metavar="shared:ARM|own", shown="shared:none, or the only arm")
PAIR: Final = (THRESHOLD, DIVERGENCE, CRITERION, BASELINE)
QUESTION: Final = (*PAIR, PROTOCOL)

RECOMPUTE: Final = switch("--recompute", "Recompute D and Ḋ from the stored log-probs.")
BOOTSTRAP_SEED: Final = Option(
    "--bootstrap-seed", int, "Seed of the intervals' random numbers.", 0, min=0)
COUNTING: Final = (
    Option("--on", ("local", "ray"), "Count on this machine, or on Ray.", "local"),
    Option("--address", str, "HOST:PORT of the cluster, or auto.", needs="--on ray",
           metavar="HOST:PORT", shown="RAY_ADDRESS, else one is started on this machine"),
    Option("--shard", str, "Read only the I-th of N shards, into a .parquet file by -o; give this "
           "command all N files in place of RUN to get the table.", metavar="I/N"),
    RECOMPUTE, BOOTSTRAP_SEED,
)
QUIET: Final = switch("--quiet", "No progress bar and no notes.")


def output(forms: Sequence[str]) -> tuple[Option, ...]:
    """The options of a command that writes a result in some forms, the first by default."""
    return (
        Option("-o --output", Path, "Write there, in the form that the ending stands for."),
        Option("--format", tuple(forms), "Form of the output.",
               shown=f"by the ending of FILE, else {forms[0]}"),
        switch("--wide", "Text in lines as wide as they need."),
        QUIET,
    )
# fmt: on


class Call(SimpleNamespace):
    """One call of a command: the options' values as attributes, and what they ask together.

    `form` is that of the output, and `stack` is left when the command is done.
    """

    @property
    def runs(self) -> list[Path]:
        """RUN, or the shards that stand for it."""
        return self.run if isinstance(self.run, list) else [self.run]

    @property
    def question(self) -> Question:
        """What the options of `QUESTION` ask."""
        from deltad.analysis.question import Question

        return Question(**self.given(QUESTION))

    def given(self, options: Iterable[Option]) -> dict[str, Any]:
        """The values of some options, without those that have none."""
        found = {each.name: vars(self).get(each.name) for each in options}
        return {name: value for name, value in found.items() if value not in (None, "", ())}

    @cached_property
    def dump(self) -> Dump:
        """RUN, opened; of shards the dump that their footers describe."""
        from deltad.dumps import Dump

        if self.shards is not None:
            return self.shards.dump
        run, *more = self.runs
        if more:
            raise OptionError(f"RUN must be one folder, or shards: {run} is no file")
        try:
            dump = Dump.open(run)
        except FileNotFoundError as error:
            raise OptionError(f"{run} does not exist") from error
        if dump.unfinished_text:
            self.note(dump.unfinished_text)
        return dump

    @cached_property
    def shards(self) -> Shards | None:
        """Shards of a table where they are given in place of a dump."""
        if not isinstance(self.run, list) or is_url(self.run[0]) or not self.run[0].is_file():
            return None
        from deltad.analysis.shards import Shards

        return Shards(self.run)

    @contextlib.contextmanager
    def counting(self, arms: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
        """What a counting function takes, while a bar shows how far in the rows it is."""
        backend: Any = self.shards
        if backend is None and self.on == "ray":
            from deltad.analysis.backends import BackendError, RayBackend

            try:
                backend = self.stack.enter_context(RayBackend(self.address))
            except BackendError as error:
                raise OptionError(str(error)) from error
        if self.shard is not None:
            from deltad.analysis.shards import ShardWriter, ShardWritten, Share

            file = self.stack.enter_context(sink(self.output))
            self.stack.enter_context(contextlib.suppress(ShardWritten))  # so that the file is kept
            backend = ShardWriter(Share.parse(self.shard), file, self.dump, backend)
        rows = sum(part.rows for arm in arms or self.dump.arms for part in self.dump.files(arm))
        with self.progress(rows) as bar:
            yield {
                "backend": backend,
                "recompute": self.recompute,
                "bootstrap_seed": self.bootstrap_seed,
                "progress": bar.advance,
            }

    @contextlib.contextmanager
    def progress(self, total: int | None = None, unit: str = "rows") -> Iterator[Bar]:
        """A progress bar on standard error while a block runs; none without a terminal."""
        if self.quiet or not sys.stderr.isatty():
            yield Bar()
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), unit, TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            yield Bar(partial(progress.update, progress.add_task(unit, total=total)))

    def note(self, message: str) -> None:
        """Print one line that is good to know."""
        if not self.quiet:
            complain(message, "note")

    def write(self, result: Result) -> None:
        """Write a result in the form asked for."""
        with sink(self.output) as file:
            file.write(result.form(self.form, wide=self.wide))

    def settle_form(self, forms: Sequence[str]) -> str:
        """The form of the output, before any work: as asked, by the file's ending, or the first."""
        if self.output is not None:
            check_output(self.output, self.runs)
        if vars(self).get("shard") is not None:
            if self.output is None or self.output.suffix.lower() != ".parquet":
                raise OptionError("`--shard` writes a file: give `-o FILE.parquet`")
            return ""
        if self.output is not None and not self.format:
            from deltad.analysis.result import form_of

            return form_of(self.output, forms)
        form = self.format or forms[0]
        if form in ("parquet", "png", "pdf") and self.output is None and sys.stdout.isatty():
            raise OptionError(f"{form} is not for a terminal: name a file by -o")
        return form


class _AsGiven:
    """Lets typer give values as they stand on the command line, to be read by `Option.read`.

    Typer 0.29 makes a pydantic model of every option when a command runs, and importing pydantic
    takes a third of the time that importing Arrow does.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Give the options; see `typer.core.TyperCommand.get_params`."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            each.get_runtime_param = lambda: _SAME
        return found


_SAME: Final = SimpleNamespace(coerce=lambda value, param, ctx: value)


class TextCommand(_AsGiven, TyperCommand):
    """A command of typer whose values are texts."""


class TextGroup(_AsGiven, TyperGroup):
    """A group of them."""


Function = Callable[[Call], None]


class Command(NamedTuple):
    """A command: a function, its options, the forms of its output, and its help."""

    function: Function
    options: Sequence[Option]
    help: str
    forms: Sequence[str] = ()

    @property
    def summary(self) -> str:
        """The help's first sentence, for lists of commands."""
        return " ".join(self.help.partition("\n\n")[0].split())

    def run(self, given: Mapping[str, Any]) -> None:
        """Read the options and call the function."""
        values = {each.name: each.read(given[each.name]) for each in self.options}
        for each in self.options:
            if each.needs and values[each.name] not in (None, ()):
                other, _, needed = each.needs.partition(" ")
                found = values[_name(other)]
                if not (found == needed if needed else found):
                    raise OptionError(f"`{each.flag}` goes with `{each.needs}`")
        # CPython 3.11 takes a third longer for it where its frames begin a new chunk of memory
        # halfway through, as they do at the depth where a wing would import it.
        import numpy  # noqa: F401

        with contextlib.ExitStack() as stack:
            call = Call(**values, stack=stack)
            call.form = call.settle_form(self.forms) if self.forms else ""
            self.function(call)

    def build(self, name: str) -> Any:
        """The command as typer has it."""

        def run(**given: Any) -> None:
            self.run(given)

        parameters = [each.parameter() for each in self.options]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        text, _, example = self.help.partition("Example: ")
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(
            name, cls=TextCommand, help=text.strip(), epilog=f"Example: {example}",
            short_help=self.summary,
        )(run)  # fmt: skip
        return typer.main.get_command(app)


def command(*options: Option, forms: Sequence[str] = ()) -> Callable[[Function], Command]:
    """Make a command of a function with a docstring that ends with an example."""
    every = (*options, *(output(forms) if forms else ()))
    return lambda function: Command(function, every, inspect.getdoc(function) or "", forms)
