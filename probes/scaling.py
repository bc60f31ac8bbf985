"""Steps that a gradient scaler skips, in which no hook of the optimizer fires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ProbeError


class ScalerWatch:
    """Stands around `scaler.step`, to tell the steps that it skips.

    Parameters
    ----------
    scaler : GradScaler, or None or False
        What to stand around; nothing is done without one.
    is_ours : callable
        Whether an optimizer that the scaler is given is the one to look at.
    steps : callable
        Number of steps of that optimizer so far.
    skipped : callable
        Called after a step that did not come.
    """

    def __init__(
        self,
        scaler: Any,
        *,
        is_ours: Callable[[Any], bool],
        steps: Callable[[], int],
        skipped: Callable[[], None],
    ) -> None:
        self._scaler = scaler
        self._is_ours = is_ours
        self._steps = steps
        self._skipped = skipped
        self._original: Callable[..., Any] | None = None

    def install(self) -> None:
        """Put the watch in place."""
        if self._scaler:
            self._original = self._scaler.step
            self._scaler.step = self._step

    def remove(self) -> None:
        """Take it away, unless somebody else has stood around it since."""
        if self._original is not None:
            if self._scaler.__dict__.get("step") == self._step:
                del self._scaler.step
            self._original = None

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, and see whether the optimizer did."""
        if self._original is None:
            raise ProbeError("the probe is no longer in place")
        before = self._steps()
        result = self._original(optimizer, *args, **kwargs)
        if self._is_ours(optimizer) and self._steps() == before:
            self._skipped()
        return result
