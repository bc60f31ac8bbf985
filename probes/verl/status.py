"""Whether verl has the plugin, found out by asking verl itself."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from deltad.probes.errors import ProbeError, first_line

from .plugin import ENGINES, LOSSES_OF_VERL, is_wrapped
from .policy_losses import LOSSES
from .settings import Settings

MODULE: Final = "deltad.probes.verl"
NAME: Final = "deltad"


@dataclass(frozen=True)
class Status:
    """What was found.

    Attributes
    ----------
    loaded : bool
        Whether a worker of verl started in this environment has the plugin.
    lines : tuple of str
        What was looked at, a sentence each.
    """

    loaded: bool
    lines: tuple[str, ...]

    def text(self) -> str:
        """All lines, the verdict first."""
        verdict = "the plugin is loaded" if self.loaded else "the plugin is NOT loaded"
        return "\n".join([verdict, *(f"  {line}" for line in self.lines)]) + "\n"


def status() -> Status:
    """Look at how verl would load the plugin, load it, and look at what it changed.

    Returns
    -------
    Status
        verl hides why a plugin failed to load (it logs it at the level DEBUG); here it is said.
    """
    lines: list[str] = []
    try:
        lines.append(f"verl {version('verl')} is installed")
    except PackageNotFoundError:
        return Status(False, ("verl is not installed: pip install 'deltad[verl]'",))
    announced, how = _announced()
    lines.append(how)
    try:
        settings = Settings.from_environment()
        run = settings.run or "nothing is recorded: DELTAD_VERL_RUN is not set"
        lines.append(f"records to: {run}")
    except ProbeError as error:
        return Status(False, (*lines, first_line(error)))
    try:
        engines = importlib.import_module(ENGINES)
        losses = importlib.import_module(LOSSES_OF_VERL)
    except Exception as error:  # whatever verl's own imports raise
        lines.append(f"verl's engines cannot be imported: {type(error).__name__}: {error}")
        return Status(False, tuple(lines))
    wrapped = is_wrapped(engines)
    lines.append(
        "training engines are watched" if wrapped else f"{ENGINES}.BaseEngine is not wrapped"
    )
    known = [name for name in LOSSES if name in losses.POLICY_LOSS_REGISTRY]
    lines.append(f"policy losses: {', '.join(known) or 'none'}")
    return Status(announced and wrapped and len(known) == len(LOSSES), tuple(lines))


def _announced() -> tuple[bool, str]:
    """Whether verl is told to import the plugin, and how."""
    named = [each.strip() for each in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")]
    if MODULE in named:
        return True, f"verl imports it by VERL_USE_EXTERNAL_MODULES={','.join(named)}"
    found = [each for each in entry_points(group="verl.plugins") if each.name == NAME]
    if not found:
        return False, (
            f"no entry point {NAME!r} in the group verl.plugins: install deltad with pip, or set "
            f"VERL_USE_EXTERNAL_MODULES={MODULE}"
        )
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip()
    allowed = policy.lower() == "auto" or NAME in {each.strip() for each in policy.split(",")}
    if not allowed:
        return (
            False,
            f"verl passes the entry point over: VERL_USE_EXTERNAL_PLUGINS={policy}",
        )
    return True, f"verl imports it by the entry point {NAME} = {found[0].value}"
