"""The options that commands share, composed once, and what is done with them.

`command` makes a command of a function: its own keyword parameters come first, then the groups
that it asks for, and the function gets a `Call` that knows the question, the dump and the output.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

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


def option(kind: Any, default: Any, *names: str, **how: Any) -> tuple[Any, Any]:
    """Annotation and default of an option."""
    return Annotated[kind, typer.Option(*names, **how)], default


Group = Mapping[str, tuple[Any, Any]]

RUN: Final = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Folder of a dump, or its URL.", show_default=False,
                   parser=as_place),
]  # fmt: skip
RUN_OR_SHARDS: Final = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Folder of a dump, or its URL; or all shards of one table.",
                   show_default=False, parser=as_place),
]  # fmt: skip

REGION: Final[Group] = {
    "threshold": option(
        float | None, None, show_default="0.15",
        help="δ ≥ 0 of the region: nats for KL, a probability for TV.",
    ),
    "divergence": option(str, "kl", metavar="kl|tv", help="Divergence of the region."),
}  # fmt: skip
PAIR: Final[Group] = {
    "criterion": option(
        str, "", metavar="RULE", show_default="predictive-<divergence>-aggregated",
        help="Criterion in question. A name, or FILE.py:NAME for a rule of your own.",
    ),
    "baseline": option(
        str, "ratio", metavar="RULE", help="Criterion that it is compared with, likewise."
    ),
}  # fmt: skip
PROTOCOL: Final[Group] = {
    "protocol": option(
        str, "", metavar="shared:ARM|own", show_default="shared:none, or the only arm",
        help="Which update ΔD is measured under: one arm's, or each criterion's own.",
    ),
}  # fmt: skip
COUNTING: Final[Group] = {
    "on": option(str, "local", metavar="local|ray", help="Count on this machine, or on Ray."),
    "address": option(
        str | None, None, metavar="HOST:PORT", help="Of the Ray cluster, or auto.",
        show_default="RAY_ADDRESS, else one is started on this machine",
    ),
    "shard": option(
        str | None, None, metavar="I/N", show_default=False,
        help="Read only the I-th of N shards, into a .parquet file by -o; give this command all "
        "N files in place of RUN to get the table.",
    ),
    "recompute": option(
        bool, False, "--recompute", help="Recompute D and Ḋ from the stored log-probs."
    ),
    "bootstrap_seed": option(
        int, 0, "--bootstrap-seed", min=0, help="Seed of the intervals' random numbers."
    ),
}  # fmt: skip
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar and no notes.")]
QUIET: Final[Group] = {"quiet": (Quiet, False)}


def output_group(forms: Sequence[str]) -> Group:
    """The options of a command that writes a result in some forms, the first by default."""
    return {
        "output": option(
            Path | None, None, "-o", "--output", metavar="FILE",
            help="Write there, in the form that the ending stands for.",
        ),
        "form": option(
            str, "", "--format", metavar="|".join(forms), help="Form of the output.",
            show_default=f"by the ending of FILE, else {forms[0]}",
        ),
        "wide": option(bool, False, "--wide", help="Text in lines as wide as they need."),
        **QUIET,
    }  # fmt: skip


@dataclass
class Call:
    """One call of a command: what the shared options ask.

    Attributes
    ----------
    values : dict
        Values of the shared options.
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

    @property
    def question(self) -> Question:
        """What the shared options ask."""
        from deltad.analysis.question import Question
        from deltad.masks import DEFAULT_THRESHOLD

        given = {
            name: self.values[name]
            for name in ("divergence", "criterion", "baseline", "protocol")
            if name in self.values
        }
        threshold = self.values.get("threshold")
        return Question(DEFAULT_THRESHOLD if threshold is None else threshold, **given)

    @property
    def dump(self) -> Dump:
        """RUN, opened; of shards the dump that their footers describe."""
        if self._dump is None:
            self._dump, self._backend = self._opened()
            if (unfinished := self._dump.unfinished_text) and not self.quiet:
                note(unfinished, quiet=False)
        return self._dump

    @property
    def counting(self) -> dict[str, Any]:
        """How a counting function is to count: `backend`, `recompute`, `bootstrap_seed`."""
        dump = self.dump
        if self.shard is not None:
            from deltad.analysis.shards import ShardWriter, ShardWritten, Share

            file = self._open.enter_context(sink(self.output))
            self._open.enter_context(contextlib.suppress(ShardWritten))  # so the file is kept
            self._backend = ShardWriter(Share.parse(self.shard), file, dump, self._backend)
        return {
            "backend": self._backend,
            "recompute": self.recompute,
            "bootstrap_seed": self.bootstrap_seed,
        }

    @contextlib.contextmanager
    def progress(self, total: int | None = None, unit: str = "rows") -> Iterator[Bar]:
        """A progress bar while the block runs."""
        with progress_bar(total, unit, quiet=self.quiet) as bar:
            yield bar

    def write(self, result: Result) -> None:
        """Write a result in the form asked for."""
        with sink(self.output) as file:
            file.write(
                result.form(self.form, **({"wide": self.wide} if self.form == "text" else {}))
            )

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


def command(
    *groups: Group, run: Any = RUN, forms: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[[], Callable[..., None]]]:
    """Make a command of a function of a `Call` and its own options.

    Parameters
    ----------
    *groups : mapping of str to (annotation, default)
        Shared options.
    run : annotation, optional
        Of RUN.
    forms : sequence of str
        Forms of its output, the default first.
    """

    def made(function: Callable[..., None]) -> Callable[[], Callable[..., None]]:
        def build() -> Callable[..., None]:
            """The function that typer makes a command of; only when it is asked for."""
            own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
            taken = {each.name for each in own}
            shared: dict[str, tuple[Any, Any]] = {}
            for group in (*groups, *([output_group(forms)] if forms else [])):
                shared |= {name: each for name, each in group.items() if name not in taken}

            def called(**values: Any) -> None:
                where = values.pop("run", ())
                call = Call({name: values.pop(name) for name in shared}, _places(where))
                with call._open:
                    call.form = settled(call, forms) if forms else ""
                    function(call, **values)

            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters = [inspect.Parameter("run", keyword, annotation=run)]
            parameters += own
            parameters += [
                inspect.Parameter(name, keyword, default=default, annotation=annotation)
                for name, (annotation, default) in shared.items()
            ]
            called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            called.__annotations__ = {each.name: each.annotation for each in parameters}
            called.__doc__, called.__name__ = function.__doc__, function.__name__
            return called

        build.builds_command = True  # type: ignore[attr-defined]
        return build

    return made


def listed(text: str, option: str) -> list[str]:
    """The names in a comma-separated option.

    Raises
    ------
    OptionError
        An empty name between commas.
    """
    if not text:
        return []
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OptionError(f"`{option}` must be names with single commas between them, got {text!r}")
    return names


def rows_of(dump: Dump, arms: Iterable[str]) -> int:
    """Rows of some arms."""
    return sum(part.rows for arm in arms for part in dump.files(arm))


def _places(run: Any) -> Sequence[Path]:
    """RUN as a sequence."""
    return run if isinstance(run, list | tuple) else (run,)


def settled(call: Call, forms: Sequence[str]) -> str:
    """The form of output: as asked, by the file's ending, or the first.

    Raises
    ------
    OptionError
        A form that the command does not know, or a file that cannot be written.
    """
    output, asked = call.output, call.values["form"]
    for run in call.run:
        check_output(output, run)
    if call.values.get("shard") is not None:
        if output is None or output.suffix.lower() != ".parquet":
            raise OptionError("`--shard` writes a file: give `-o FILE.parquet`")
        return ""
    if asked:
        if asked not in forms:
            raise OptionError(f"`--format` must be one of {', '.join(forms)}, got {asked!r}")
        return str(asked)
    if output is None:
        if forms[0] == "parquet" and sys.stdout.isatty():
            raise OptionError("Parquet is not for a terminal: name a file by -o")
        return forms[0]
    from deltad.analysis.result import form_of

    return form_of(output, forms)
