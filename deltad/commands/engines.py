"""Where a command counts: this machine, a Ray cluster, or a share of the work on each machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .terminal import OptionError

if TYPE_CHECKING:
    from deltad.analysis.engine import Engine

ENGINES: Final = ("local", "ray")

EngineName = Annotated[
    str,
    typer.Option("--engine", metavar="|".join(ENGINES), help="Count on this machine, or on Ray."),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Of the Ray cluster, or auto.",
        show_default="RAY_ADDRESS, else one is started on this machine",
    ),
]
ShareText = Annotated[
    str | None,
    typer.Option(
        "--share",
        metavar="I/N",
        help="Count the I-th of N shares only, into FILE, for `deltad merge`.",
        show_default=False,
    ),
]


@contextlib.contextmanager
def engine_of(name: str, address: str | None) -> Iterator[Engine | None]:
    """Open the engine that the options name, and close it at the end of the block.

    Parameters
    ----------
    name : str
        One of `ENGINES`.
    address : str, optional
        Of a Ray cluster.

    Yields
    ------
    Engine or None
        None for this machine's cores.

    Raises
    ------
    OptionError
        No such engine, an address that none needs, or the engine cannot do the work.
    """
    if name not in ENGINES:
        raise OptionError(f"`--engine` must be one of {', '.join(ENGINES)}, got {name!r}")
    if name == "local":
        if address is not None:
            raise OptionError("`--address` is of a Ray cluster: give `--engine ray` too")
        yield None
        return
    from deltad.analysis.ray_engine import EngineError, RayEngine

    try:
        with RayEngine(address) as engine:
            yield engine
    except EngineError as error:
        raise OptionError(str(error)) from error
