"""What a reader of engine responses raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deltad._checks import printable
from deltad.probes.errors import ProbeError


class EngineError(ProbeError):
    """An engine's response is not what its format promises.

    Attributes
    ----------
    engine : str
        Which format was read.
    request : str or None
        The request's own id, or its place among those given.
    position : int or None
        Token within the response, from 0.
    reason : str
        What must hold, what came and what to do.
    """

    def __init__(
        self, engine: str, reason: str, *, request: str | None = None, position: int | None = None
    ) -> None:
        place = [engine]
        if request is not None:
            place.append(f"request {request}")
        if position is not None:
            place.append(f"position {position}")
        super().__init__(printable(f"{', '.join(place)}: {reason}"))
        self.engine = engine
        self.request = request
        self.position = position
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what the constructor takes, so that worker processes can raise it."""
        return _again, (self.engine, self.reason, self.request, self.position)


@contextmanager
def formed(engine: str, request: str | None = None) -> Iterator[None]:
    """Say of what cannot be made an array of numbers that the response has not its form.

    Parameters
    ----------
    engine, request
        As in `EngineError`.

    Raises
    ------
    EngineError
        In the place of what NumPy and Python raise of ragged, absent or non-numeric columns.
    """
    try:
        yield
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        if isinstance(error, ProbeError):
            raise
        raise EngineError(
            engine, f"the columns must be full and of numbers, got something else: {error}",
            request=request,
        ) from error  # fmt: skip


def _again(engine: str, reason: str, request: str | None, position: int | None) -> EngineError:
    """Build an error from positional arguments."""
    return EngineError(engine, reason, request=request, position=position)
