"""Commands that are imported when they are asked for, and options that need no pydantic."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from .options import as_place


class Place(NamedTuple):
    """Where a command is, `module:name` of a `Command` or a group, and its line in the help."""

    where: str
    help: str


class LightCommand(TyperCommand):
    """A command whose options are read without pydantic, where they are plain."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Give the options; see `typer.core.TyperCommand.get_params`."""
        return [_without_model(each) for each in super().get_params(ctx)]


class LightGroup(TyperGroup):
    """A group of which the same is true."""

    def __init__(self, **options: Any) -> None:
        """Make the group, with names of commands where the commands would be."""
        super().__init__(**options)
        for name in list(self.list_commands(typer.Context(self))):  # for "did you mean"
            self.commands[name] = TyperCommand(name)

    def get_params(self, ctx: Any) -> list[Any]:
        """Give the options; see `typer.core.TyperGroup.get_params`."""
        return [_without_model(each) for each in super().get_params(ctx)]


class LazyCommands(LightGroup):
    """A group whose `--help` imports none of its commands.

    It lists their lines as they stand in `places`, in plain text: rich takes as long to import
    as everything else that this help needs.
    """

    places: ClassVar[Mapping[str, Place]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands."""
        return list(self.places)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        if cmd_name not in self.places:
            return None
        where, line = self.places[cmd_name]
        module, name = where.split(":")
        found = getattr(importlib.import_module(f"deltad.commands.{module}"), name)
        if isinstance(found, type):
            return typer.main.get_group(
                typer.Typer(cls=found, name=cmd_name, help=line, rich_markup_mode=None)
            )
        return made(cmd_name, found.for_typer())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands, whole lines each."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.help) for name, place in self.places.items()])


def made(name: str, function: Callable[..., None]) -> Any:
    """Make typer's command of a function: parameters are options, its docstring the help."""
    text, _, example = (inspect.getdoc(function) or "").partition("Example: ")
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(
        name, cls=LightCommand, help=text.strip(), epilog=f"Example: {example}" if example else None
    )(function)
    return typer.main.get_command(single)


_NUMBERS: Final[Mapping[Any, re.Pattern[str]]] = {
    int: re.compile(r"[+-]?[0-9]{1,18}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"),
}


_LOOKS: Final = (
    *("parser", "clamp", "exists", "file_okay", "dir_okay"),
    *("writable", "readable", "resolve_path", "allow_dash", "path_type"),
)
"""What an option may ask beside its type and its bounds."""


class _Plain:
    """Reads a text, number or path as it is; leaves everything else to typer.

    Typer 0.29 makes a pydantic model of every option when a command runs, whether it was given or
    not, and importing pydantic takes a third of the time that importing Arrow does.
    """

    def __init__(self, kind: Any, info: Any, model: Callable[[], Any]) -> None:
        self._kind, self._model = kind, model
        self._least = -math.inf if info.min is None else info.min
        self._most = math.inf if info.max is None else info.max

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Give the value; what it cannot be, or may not be, typer says."""
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if not many:
            read = [self._read(value)]
        else:
            read = [self._read(each) for each in value] if type(value) in (list, tuple) else [None]
        if None in read:
            return self._model().coerce(value, param=param, ctx=ctx)
        return read if many else read[0]

    def _read(self, value: Any) -> Any:
        """The value in its type; None where that is not plain."""
        if self._kind is as_place and isinstance(value, str):
            return as_place(value)
        if self._kind in (str, Path):
            return self._kind(value) if isinstance(value, (str, Path)) else None
        pattern = _NUMBERS.get(self._kind)
        if pattern is not None and isinstance(value, str) and pattern.fullmatch(value):
            value = self._kind(value)
        fits = type(value) is self._kind and self._least <= value <= self._most
        return value if fits else None


def _without_model(parameter: Any) -> Any:
    """Let an option of a plain type be read without a model, where typer has one."""
    described = getattr(parameter, "type_descriptor", None)
    model = getattr(parameter, "get_runtime_param", None)
    if described is None or model is None or "get_runtime_param" in vars(parameter):
        return parameter
    hint, info, usual = described.annotation, described.parameter_info, typer.Option()
    if get_origin(hint) is list:
        (hint,) = get_args(hint)
    kind, usual.parser = hint, None
    if hint is Path and info.parser is as_place:
        kind, usual.parser = as_place, as_place
    if hint in (str, Path, bool, *_NUMBERS) and all(
        getattr(info, name) == getattr(usual, name) for name in _LOOKS
    ):
        plain = _Plain(kind, info, model)
        parameter.get_runtime_param = lambda: plain
    return parameter
