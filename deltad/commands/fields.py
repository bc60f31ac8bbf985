"""Options made from the fields of a dataclass: types, bounds and help stand in one place."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Collection, Iterator
from typing import Annotated, Any, Literal

import typer


def field_parameters(
    kind: type[Any],
    *,
    panel: str,
    only: Collection[str] | None = None,
    defaults: typing.Mapping[str, Any] = types.MappingProxyType({}),
) -> Iterator[inspect.Parameter]:
    """A parameter a field of a dataclass; None stands for "not given".

    Parameters
    ----------
    kind : type
        A dataclass whose fields were made by `deltad.probes.recipes.recipe.option`.
    panel : str
        Heading of the options in the help.
    only : collection of str, optional
        Fields wanted; all of them otherwise.
    defaults : mapping of str to Any
        Shown in place of a field's own default.

    Yields
    ------
    inspect.Parameter
        For the signature of a command.
    """
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if only is not None and field.name not in only:
            continue
        annotation, metavar = _kind(hints[field.name])
        default = defaults.get(field.name, field.default)
        shown = ",".join(default) if isinstance(default, tuple) else default
        option = typer.Option(
            metavar=metavar,
            help=field.metadata["help"],
            show_default="none" if shown is None else str(shown),
            rich_help_panel=panel,
        )
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[annotation | None, option],
        )


def parsed(kind: type[Any], name: str, value: Any) -> Any:
    """Value of a field from its option: lists are written with commas."""
    if typing.get_origin(typing.get_type_hints(kind)[name]) is tuple:
        return tuple(part.strip() for part in str(value).split(",") if part.strip())
    return value


def _kind(hint: Any) -> tuple[Any, str | None]:
    """Type of an option's text, and its metavar."""
    if typing.get_origin(hint) is Literal:
        return str, "|".join(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return str, "NAME,NAME"
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None)), None
    return hint, None
