"""Methods of one object stood around, and put back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class Patches:
    """Wrappers around methods of objects; the classes stay as they are."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str, Callable[..., Any], Any]] = []

    def around(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Let `wrapper(original, *args, **kwargs)` be called for `owner.name(*args, **kwargs)`.

        Parameters
        ----------
        owner : object
            Of which the attribute is set; its class is not touched.
        name : str
            A method.
        wrapper : callable
            Takes what was there before as its first argument.

        Returns
        -------
        callable
            What was there before.
        """
        original = getattr(owner, name)
        before = vars(owner).get(name)

        @functools.wraps(original)
        def standing(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, standing)
        self._placed.append((owner, name, standing, before))
        return original  # type: ignore[no-any-return]

    def restore(self) -> None:
        """Put back what was there, where nobody has wrapped it once more since."""
        for owner, name, standing, before in reversed(self._placed):
            if vars(owner).get(name) is not standing:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._placed.clear()


def undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Take TRL's profiling off a bound method, which would log a call that is not the trainer's."""
    function = getattr(method, "__func__", None)
    if function is None:
        return method
    return functools.partial(inspect.unwrap(function), method.__self__)  # type: ignore[attr-defined]
