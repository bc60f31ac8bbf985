"""What importing `deltad.probes.verl` changes in verl, and how to undo it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from deltad.probes.errors import ProbeError

from .when_imported import forget, when_imported

ENGINES: Final = "verl.workers.engine.base"
LOSSES_OF_VERL: Final = "verl.trainer.ppo.core_algos"
AGENT_LOOPS: Final = "verl.experimental.agent_loop.single_turn_agent_loop"

_SESSION: Final = "_deltad_session"
_ORIGINAL: Final = "_deltad_original"


def install() -> None:
    """Change verl as soon as the modules in question are imported.

    `BaseEngine.train_batch`, which every training engine shares, is wrapped; the policy losses
    and the agent loop are registered. Nothing of verl is imported for it.
    """
    when_imported(ENGINES, wrap_engines)
    when_imported(LOSSES_OF_VERL, _register_losses)
    when_imported(AGENT_LOOPS, _register_agent_loop)


def uninstall() -> None:
    """Take the wrapper off again, and forget what waits; the names stay registered."""
    forget()
    module = sys.modules.get(ENGINES)
    if module is not None and is_wrapped(module):
        module.BaseEngine.train_batch = getattr(module.BaseEngine.train_batch, _ORIGINAL)


def is_wrapped(module: ModuleType) -> bool:
    """Whether verl's engines have the wrapper."""
    return hasattr(module.BaseEngine.train_batch, _ORIGINAL)


def wrap_engines(module: ModuleType) -> None:
    """Wrap `train_batch` of every engine.

    Parameters
    ----------
    module : module
        `verl.workers.engine.base`.

    Raises
    ------
    ProbeError
        verl's engines are not as this version of deltad knows them.
    """
    engine: Any = getattr(module, "BaseEngine", None)
    missing = [
        name for name in ("train_batch", "infer_batch") if not callable(getattr(engine, name, None))
    ]
    if missing:
        raise ProbeError(
            f"{module.__name__}.BaseEngine has no {' and no '.join(missing)}: this version of "
            "deltad knows verl 0.9"
        )
    if is_wrapped(module):
        return
    original: Callable[..., Any] = engine.train_batch

    @functools.wraps(original)
    def train_batch(self: Any, data: Any, loss_function: Any) -> Any:
        return session_of(self).train_batch(functools.partial(original, self), data, loss_function)

    setattr(train_batch, _ORIGINAL, original)
    engine.train_batch = train_batch


def session_of(engine: Any) -> Any:
    """The engine's session, begun with its first optimizer step."""
    found = engine.__dict__.get(_SESSION)
    if found is None:
        from .session import EngineSession
        from .settings import Settings

        found = EngineSession(engine, Settings.from_environment())
        engine.__dict__[_SESSION] = found
    return found


def _register_losses(module: ModuleType) -> None:
    """Register the policy losses."""
    from .policy_losses import register_losses

    register_losses(module)


def _register_agent_loop(module: ModuleType) -> None:
    """Register `deltad_rescored`."""
    from .rescored import register_agent_loop

    register_agent_loop()
