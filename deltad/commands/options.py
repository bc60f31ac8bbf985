"""Options as data, those that commands share, and what a command is called with.

A command is a function of a `Call` and some groups of options, its own first; the call has the
value of each as an attribute, and knows the question, the dump and the output.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from .terminal import Bar, OptionError, check_output, is_url, note, progress_bar, sink

if TYPE_CHECKING:
    from deltad.analysis.backends import Backend
    from deltad.analysis.question import Question
    from deltad.analysis.result import Result
    from deltad.dumps import Dump


def as_place(text: str) -> Path:
    """Give the folder that an argument names, or what a URL stands for."""
    if "://" not in text:
        return Path(text)
    from deltad.dumps.storage import place

    return place(text)


class Option(NamedTuple):
    """An option of a command: its type, its default, and how typer is to show and read it."""

    kind: Any
    default: Any
    names: tuple[str, ...]
    how: dict[str, Any]


Group = Mapping[str, Option]
"""Options by the name of their value in a `Call`; `by_seed` is `--by-seed` unless it says other."""


def option(kind: Any, default: Any, help: str, *names: str, **how: Any) -> Option:
    """Describe an option; `names` and `how` are those of `typer.Option`."""
    return Option(kind, default, names, {"help": help, **how})


def flag(name: str) -> str:
    """An option as it is written."""
    return "--" + name.replace("_", "-")


def argument(kind: Any, help: str, metavar: str = "RUN") -> Any:
    """Annotation of the places that a command is given."""
    return Annotated[
        kind, typer.Argument(metavar=metavar, help=help, show_default=False, parser=as_place)
    ]


RUN: Final = argument(Path, "Folder of a dump, or its URL.")
RUN_OR_SHARDS: Final = argument(
    list[Path], "Folder of a dump, or its URL; or all shards of one table."
)

REGION: Final[Group] = {
    "threshold": option(
        float | None, None, "δ ≥ 0 of the region: nats for KL, a probability for TV.",
        show_default="0.15",
    ),
    "divergence": option(str, "kl", "Divergence of the region.", metavar="kl|tv"),
}  # fmt: skip
PAIR: Final[Group] = {
    "criterion": option(
        str, "", "Criterion in question. A name, or FILE.py:NAME for a rule of your own.",
        metavar="RULE", show_default="predictive-<divergence>-aggregated",
    ),
    "baseline": option(
        str, "ratio", "Criterion that it is compared with, likewise.", metavar="RULE"
    ),
}  # fmt: skip
PROTOCOL: Final[Group] = {
    "protocol": option(
        str, "", "Which update ΔD is measured under: one arm's, or each criterion's own.",
        metavar="shared:ARM|own", show_default="shared:none, or the only arm",
    ),
}  # fmt: skip
RECOMPUTE: Final[Group] = {
    "recompute": option(bool, False, "Recompute D and Ḋ from the stored log-probs."),
}
BOOTSTRAP: Final[Group] = {
    "bootstrap_seed": option(int, 0, "Seed of the intervals' random numbers.", min=0),
}
COUNTING: Final[Group] = {
    "on": option(str, "local", "Count on this machine, or on Ray.", metavar="local|ray"),
    "address": option(
        str | None, None, "Of the Ray cluster, or auto.", metavar="HOST:PORT",
        show_default="RAY_ADDRESS, else one is started on this machine",
    ),
    "shard": option(
        str | None, None,
        "Read only the I-th of N shards, into a .parquet file by -o; give this command all N "
        "files in place of RUN to get the table.",
        metavar="I/N", show_default=False,
    ),
    **RECOMPUTE,
    **BOOTSTRAP,
}  # fmt: skip
BY: Final[Group] = {
    "by": option(
        str, "", "Tell the tokens outside apart by advantage, position, state, entropy, "
        "divergence, ratio, tail or token.", metavar="WHAT,…", show_default=False,
    ),
    "bins": option(int | None, None, "With --by: bins by quantile.", min=1, show_default="4"),
}  # fmt: skip
SEEDS: Final[Group] = {
    "seed": option(list[int] | None, None, "Only this seed; may be given several times."),
}
QUIET: Final[Group] = {"quiet": option(bool, False, "No progress bar and no notes.")}


def criteria(help: str, shown: str | bool = False) -> Group:
    """The option that lists rules."""
    return {"criteria": option(str, "", help, metavar="RULE,…", show_default=shown)}


def output(forms: Sequence[str]) -> Group:
    """The options of a command that writes a result in some forms, the first by default."""
    return {
        "output": option(
            Path | None, None, "Write there, in the form that the ending stands for.",
            "-o", "--output", metavar="FILE",
        ),
        "form": option(
            str, "", "Form of the output.", "--format", metavar="|".join(forms),
            show_default=f"by the ending of FILE, else {forms[0]}",
        ),
        "wide": option(bool, False, "Text in lines as wide as they need."),
        **QUIET,
    }  # fmt: skip


@dataclass
class Call:
    """One call of a command: the values of its options, and what they ask for.

    Attributes
    ----------
    values : dict
        Values of the options; each is an attribute too.
    run : sequence of Path
        RUN, or shards.
    form : str
        Of the output, settled before any work.
    """

    values: dict[str, Any]
    run: Sequence[Path] = ()
    form: str = ""
    _dump: Dump | None = None
    _backend: Backend | None = None
    _open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None

    def listed(self, name: str) -> list[str]:
        """The names in a comma-separated option; an empty one between commas is refused."""
        names = [each.strip() for each in self.values[name].split(",")]
        if names == [""]:
            return []
        if not all(names):
            raise OptionError(
                f"`{flag(name)}` must be names with single commas between them, got "
                f"{self.values[name]!r}"
            )
        return names

    def only_with(self, option: str, *others: str) -> None:
        """Refuse options that mean nothing without another one."""
        for name in others:
            if self.values[name] not in (None, "") and not self.values[option]:
                raise OptionError(f"`{flag(name)}` goes with `{flag(option)}`")

    def given(self, *names: str) -> dict[str, Any]:
        """The values of some options by name, of those that the command has and that are set."""
        return {name: self.values[name] for name in names if self.values.get(name) is not None}

    @property
    def question(self) -> Question:
        """What the shared options ask."""
        from deltad.analysis.question import Question

        return Question(**self.given(*REGION, *PAIR, *PROTOCOL))

    @property
    def dump(self) -> Dump:
        """RUN, opened; of shards the dump that their footers describe."""
        if self._dump is None:
            self._dump, self._backend = self._opened()
            if unfinished := self._dump.unfinished_text:
                note(unfinished, quiet=self.quiet)
        return self._dump

    @contextlib.contextmanager
    def counting(self, *arms: str) -> Iterator[dict[str, Any]]:
        """How a function is to count some arms, by default all, under a progress bar."""
        dump = self.dump
        if self.shard is not None:
            from deltad.analysis.shards import ShardWriter, ShardWritten, Share

            file = self._open.enter_context(sink(self.output))
            self._open.enter_context(contextlib.suppress(ShardWritten))  # so the file is kept
            self._backend = ShardWriter(Share.parse(self.shard), file, dump, self._backend)
        rows = sum(part.rows for arm in arms or dump.arms for part in dump.files(arm))
        with self.progress(rows) as bar:
            yield {
                "backend": self._backend,
                "recompute": self.recompute,
                "bootstrap_seed": self.bootstrap_seed,
                "progress": bar.advance,
            }

    @contextlib.contextmanager
    def progress(self, total: int | None = None, unit: str = "rows") -> Iterator[Bar]:
        """A progress bar while the block runs."""
        with progress_bar(total, unit, quiet=self.quiet) as bar:
            yield bar

    def write(self, result: Result) -> None:
        """Write a result in the form asked for."""
        how = {"wide": self.wide} if self.form == "text" else {}
        with sink(self.output) as file:
            file.write(result.form(self.form, **how))

    def settle(self, forms: Sequence[str]) -> None:
        """Settle the form of output: as asked, by the file's ending, or the first.

        Raises
        ------
        OptionError
            A form that the command does not know, or a file that cannot be written.
        """
        output, asked = self.output, self.values["form"]
        for run in self.run:
            check_output(output, run)
        if self.values.get("shard") is not None:
            if output is None or output.suffix.lower() != ".parquet":
                raise OptionError("`--shard` writes a file: give `-o FILE.parquet`")
        elif asked:
            if asked not in forms:
                raise OptionError(f"`--format` must be one of {', '.join(forms)}, got {asked!r}")
            self.form = asked
        elif output is None:
            self.form = forms[0]
        else:
            from deltad.analysis.result import form_of

            self.form = form_of(output, forms)
        if self.form in ("parquet", "png", "pdf") and output is None and sys.stdout.isatty():
            raise OptionError(f"{self.form} is not for a terminal: name a file by -o")

    def _opened(self) -> tuple[Dump, Backend | None]:
        """The dump and where to count."""
        from deltad.dumps import Dump

        on, address = self.values.get("on", "local"), self.values.get("address")
        if on not in ("local", "ray"):
            raise OptionError(f"`--on` must be local or ray, got {on!r}")
        if on == "local" and address is not None:
            raise OptionError("`--address` is of a Ray cluster: give `--on ray` too")
        first = self.run[0]
        if "shard" in self.values and not is_url(first) and first.is_file():
            from deltad.analysis.shards import Shards

            shards = Shards(self.run)
            return shards.dump, shards
        if len(self.run) > 1:
            raise OptionError(f"RUN must be one folder, or shards: {first} is no file")
        try:
            dump = Dump.open(first)
        except FileNotFoundError as error:
            raise OptionError(f"{first} does not exist") from error
        if on == "local":
            return dump, None
        from deltad.analysis.backends import BackendError, RayBackend

        try:
            return dump, self._open.enter_context(RayBackend(address))
        except BackendError as error:
            raise OptionError(str(error)) from error


@dataclass(frozen=True)
class Command:
    """A command: what it does with a `Call`, its options and its help.

    Attributes
    ----------
    function : callable
        Takes the call; its docstring is the help, with an "Example: " at the end.
    options : mapping of str to Option
        In the order of the help.
    run : annotation, optional
        Of RUN; None for a command without.
    forms : tuple of str
        Forms of its output, the default first; empty where it writes none.
    """

    function: Callable[[Call], None]
    options: Group
    run: Any = RUN
    forms: tuple[str, ...] = ()

    def for_typer(self) -> Callable[..., None]:
        """A function whose signature has the options."""

        def called(run: Any = (), **values: Any) -> None:
            # CPython 3.11 takes a third longer for it where its frames begin a new chunk of memory
            # halfway through, as they do at the depth where a wing would import it.
            import numpy  # noqa: F401

            call = Call(values, run if isinstance(run, list | tuple) else (run,))
            with call._open:
                if self.forms:
                    call.settle(self.forms)
                self.function(call)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = []
        if self.run is not None:
            parameters.append(inspect.Parameter("run", keyword, annotation=self.run))
        for name, (kind, default, names, how) in self.options.items():
            read: Any = Annotated[kind, typer.Option(*(names or (flag(name),)), **how)]
            parameters.append(inspect.Parameter(name, keyword, default=default, annotation=read))
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        called.__doc__ = self.function.__doc__
        return called


def command(
    *groups: Group, run: Any = RUN, forms: Sequence[str] = ()
) -> Callable[[Callable[[Call], None]], Command]:
    """Make a command of a function; of two options of one name the first is taken."""
    options: dict[str, Option] = {}
    for group in (*groups, output(forms) if forms else {}):
        for name, each in group.items():
            options.setdefault(name, each)
    return lambda function: Command(function, options, run, tuple(forms))
