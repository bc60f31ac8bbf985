"""What the plugin is told: environment variables, which every worker of a cluster can be given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from deltad._checks import parse_json
from deltad.dumps.storage import place
from deltad.dumps.writer import Existing
from deltad.probes.errors import ProbeError

PREFIX: Final = "DELTAD_VERL_"
"""What the names of all variables begin with."""

ReadFrom = Literal["auto", "hidden", "logits"]
"""Where log-probs are read; see `Settings`."""

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "existing": get_args(Existing),
    "readout": get_args(ReadFrom),
}
_LEAST: Final[Mapping[str, int]] = {
    "seed": 0,
    "every": 1,
    "steps_per_file": 1,
    "topk": 1,
}


@dataclass(frozen=True)
class Settings:
    """What is recorded and how; each field is the variable `DELTAD_VERL_<FIELD>`.

    Attributes
    ----------
    run : Path, optional
        RUN, the folder of the dump; a relative one is taken from the worker's own directory.
        Without it nothing is recorded.
    seed : int
        Independent repetition, a folder of the dump.
    arm : str
        Name of the update that is applied.
    every : int
        Every n-th optimizer step is recorded.
    steps_per_file : int
        Recorded steps that a file holds. Ray ends its workers without notice, and what is not in
        a complete file is lost then.
    existing : {"refuse", "append", "replace"}
        What to do where files of this seed and rank exist; a resumed training appends, and its
        steps are numbered on.
    readout : {"auto", "hidden", "logits"}
        "logits": what the engine made, in its precision. "hidden": what enters the head, and a
        float32 head over it. "auto": hidden where the engine rounds logits to half precision and
        its head can be found, else logits.
    topk : int
        K that `deltad_rescored` asks the rollout server for.
    rules : tuple of str
        Rules of the user's, `FILE.py:NAME` with commas between, that become policy losses.
    behavior : mapping
        JSON object, added to the dump's metadata on the behaviour policy: what the trainer's
        workers cannot know, such as engine and precision.

    Raises
    ------
    ProbeError
        A variable that does not exist, or a value that is not possible.
    """

    run: Path | None = None
    seed: int = 0
    arm: str = "actual"
    every: int = 1
    steps_per_file: int = 1
    existing: Existing = "refuse"
    readout: ReadFrom = "auto"
    topk: int = 20
    rules: tuple[str, ...] = ()
    behavior: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read the variables.

        Parameters
        ----------
        environment : mapping of str to str, optional
            By default that of the process.

        Returns
        -------
        Settings
            Defaults where a variable is not set or empty.

        Examples
        --------
        >>> Settings.from_environment({"DELTAD_VERL_RUN": "run", "DELTAD_VERL_EVERY": "10"}).every
        10
        """
        given = os.environ if environment is None else environment
        names = {PREFIX + each.name.upper(): each.name for each in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in given.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in names:
                raise ProbeError(
                    f"there is no environment variable {variable}; those of the plugin are "
                    f"{', '.join(names)}"
                )
            if text:
                values[names[variable]] = _value(variable, names[variable], text)
        return cls(**values)


def _value(variable: str, name: str, text: str) -> Any:
    """Make of one variable's text what the field holds."""
    if name in _LEAST:
        number = int(text) if text.strip().lstrip("-").isdigit() else None
        if number is None or number < _LEAST[name]:
            raise ProbeError(
                f"{variable} must be an integer of at least {_LEAST[name]}, got {text!r}"
            )
        return number
    if name in _CHOICES and text not in _CHOICES[name]:
        raise ProbeError(f"{variable} must be one of {', '.join(_CHOICES[name])}, got {text!r}")
    if name == "behavior":
        return _object(variable, text)
    if name == "rules":
        return tuple(each.strip() for each in text.split(",") if each.strip())
    return place(text) if name == "run" else text


def _object(variable: str, text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ProbeError(f"{variable} must be a JSON object, got {text!r} ({error})") from error
    if not isinstance(found, dict):
        raise ProbeError(f"{variable} must be a JSON object, got {text!r}")
    return found
