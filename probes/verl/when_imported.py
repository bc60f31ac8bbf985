"""Do something to a module as soon as it is imported, and not import it for that."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]
"""What is done with the module."""


def when_imported(name: str, action: Action) -> None:
    """Call `action` with a module: now if it is imported already, else right after its import.

    verl loads its plugins in every process that imports it; most of those never train, and
    importing a training engine there takes seconds and memory.

    Parameters
    ----------
    name : str
        Of the module, dotted.
    action : callable
        Takes the module. What it raises, the import raises.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.waiting.setdefault(name, []).append(action)


def forget() -> None:
    """Drop everything that still waits for an import."""
    _FINDER.waiting.clear()


class _Finder(MetaPathFinder):
    """Finds what the finders after it find, and has the actions done after the import."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Action]] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Answer for the modules that are waited for."""
        if fullname not in self.waiting:
            return None
        actions = self.waiting.pop(fullname)  # so that the search below passes this finder by
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.waiting[fullname] = actions
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(Loader):
    """Loads a module as its own loader does, and then calls the actions."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create it as its own loader does."""
        created: ModuleType | None = self.loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Run it, and then the actions; they wait on if it fails."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for action in _FINDER.waiting.pop(self.name, []):
            action(module)


_FINDER = _Finder()
