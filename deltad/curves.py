"""The log of a training: what each rollout batch and the steps through it came to.

A line a rollout batch, of sums and counts only, so that lines can be added up; `CURVES` says
which quotients of them a person looks at. Trainings write it and analysis reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from deltad._checks import parse_json
from deltad.dumps import DumpError
from deltad.dumps.storage import read_bytes

TRAINING: Final = "_training"
"""Folder in RUN for the log of a training; dataset readers skip names that begin with `_`."""

FORMAT: Final = 1

_OPTIONS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "recipe": str,
    "precision": str,
    "divergence": str,
    "threshold": (int, float),
    "top_k": int,
    "batches": int,
}
"""Options that a reader of curves needs, with their types."""

_DIGITS: Final = 9
"""Significant digits that a line keeps of a sum."""


@dataclass(frozen=True)
class Curve:
    """A quotient of two sums of a line.

    Attributes
    ----------
    name : str
        As tables and files call it.
    above, below : str
        The sums that it is the quotient of.
    label : str
        For an axis, with the unit.
    meaning : str
        One sentence.
    """

    name: str
    above: str
    below: str
    label: str
    meaning: str


CURVES: Final[Mapping[str, Curve]] = MappingProxyType(
    {
        curve.name: curve
        for curve in (
            Curve(
                "accuracy", "correct", "samples", "held-out accuracy",
                "Share of right answers to held-out prompts, each sampled several times (avg@n).",
            ),
            Curve(
                "reward", "reward", "responses", "training reward",
                "Mean reward of the responses of the rollout batch, before any step through it.",
            ),
            Curve(
                "length", "length", "responses", "response length (tokens)",
                "Mean length of those responses, in tokens.",
            ),
            Curve(
                "cut_fraction", "cut", "responses", "responses cut off",
                "Share of those responses that did not end by themselves.",
            ),
            Curve(
                "mixed_fraction", "mixed", "groups", "groups of mixed rewards",
                "Share of groups whose rewards differ; the others push nothing.",
            ),
            Curve(
                "ppo_kl", "kl", "tokens", "PPO-KL (nats)",
                "Mean of log μ − log π over the response tokens, before each one's step.",
            ),
            Curve(
                "masked_fraction", "masked", "tokens", "clip fraction: tokens masked",
                "Share of response tokens that the mask in use drops.",
            ),
            Curve(
                "clip_fraction", "clipped", "clip_tokens", "tokens beyond the clip range",
                "Share of response tokens that clip-higher would drop, whatever the mask in use.",
            ),
            Curve(
                "outside_fraction", "outside", "tokens", "tokens outside the region",
                "Share of response tokens with top-K D above the threshold, before their step.",
            ),
            Curve(
                "disagreement_fraction", "disagreement", "tokens", "tokens in disagreement",
                "Share of response tokens outside that exactly one of ratio and prediction masks.",
            ),
            Curve(
                "increase_fraction", "outside_increase", "outside_determined",
                "outside, with ΔD > 0",
                "Share of the determined tokens outside whose D grew in their step.",
            ),
            Curve(
                "delta_d", "delta_d", "tokens", "ΔD (nats)",
                "Mean of D after minus D before a token's step, over the response tokens.",
            ),
            Curve(
                "delta_d_outside", "delta_d_outside", "outside", "ΔD of tokens outside (nats)",
                "The same over the tokens outside.",
            ),
            Curve(
                "entropy", "entropy", "tokens", "entropy (nats)",
                "Mean entropy of the policy at the response tokens, before their step.",
            ),
        )
    }
)  # fmt: skip
"""Every curve by name, in the order in which tables have them."""


@dataclass(frozen=True)
class BatchLine:
    """One rollout batch of one run, or, after the last, a line with the last evaluation alone.

    Attributes
    ----------
    mask, seed
        Which run.
    batch : int
        Number of the rollout batch, from 0.
    step : int
        Optimizer steps made before it: where its reward, length and accuracy stand. The sums
        over tokens are of the steps through it.
    sums : mapping of str to float
        What `CURVES` are quotients of; without those that were not taken.
    """

    mask: str
    seed: int
    batch: int
    step: int
    sums: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Every curve; NaN where there is nothing to divide by.

        Examples
        --------
        >>> BatchLine("ratio", 0, 0, 0, {"reward": 3, "responses": 4}).values()["reward"]
        0.75
        """
        found = {}
        for name, curve in CURVES.items():
            below = self.sums.get(curve.below, 0.0)
            found[name] = self.sums.get(curve.above, 0.0) / below if below else math.nan
        return found

    def to_json(self) -> str:
        """One line of JSON, without its end."""
        sums = {name: _short(value) for name, value in self.sums.items()}
        place = {"mask": self.mask, "seed": self.seed, "batch": self.batch, "step": self.step}
        return json.dumps({**place, "sums": sums}, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> BatchLine:
        """Read what `to_json` made.

        Raises
        ------
        ValueError
            Not such a line.
        """
        try:
            found = parse_json(text)
            places = {name: found[name] for name in ("seed", "batch", "step")}
            if wrong := [name for name, value in places.items() if type(value) is not int]:
                raise ValueError(f"`{wrong[0]}` must be a whole number")
            sums = {str(name): float(value) for name, value in found["sums"].items()}
            mask = str(found["mask"])
            if not mask.isprintable():
                raise ValueError(f"`mask` must be printable, found {mask!r}")
            if bad := [name for name, value in sums.items() if not math.isfinite(value)]:
                raise ValueError(f"`{bad[0]}` must be finite, found {sums[bad[0]]}")
            if "outside" in sums:  # older lines took every ΔD for determined
                sums.setdefault("outside_determined", sums["outside"])
            return cls(mask=mask, **places, sums=sums)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a line of a training is malformed: {error!r}") from error


def log_path(run: Path, mask: str, seed: int) -> Path:
    """Where the lines of one mask and seed lie."""
    return run / TRAINING / f"mask={mask}" / f"seed={seed}.jsonl"


def options_path(run: Path) -> Path:
    """Where the options of a training lie."""
    return run / TRAINING / "run.json"


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The whole lines of one file, in order; half a line at its end is left alone.

    Raises
    ------
    DumpError
        A whole line that is none of a training, of another run, or out of order; says which.
    OSError
        The file cannot be read.
    """
    text = read_bytes(path)
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            found = BatchLine.from_json(line)
        except ValueError as error:
            raise DumpError(path, f"line {number}: {error}") from error
        if (f"mask={found.mask}", f"seed={found.seed}") != (path.parent.name, path.stem):
            raise DumpError(path, f"line {number}: is of {found.mask}, seed {found.seed}")
        if found.batch != number - 1:
            raise DumpError(
                path, f"line {number}: must be of batch {number - 1}, found {found.batch}"
            )
        yield found


def read_options(run: Path) -> dict[str, Any]:
    """The options of a training.

    Raises
    ------
    DumpError
        There are none, or they are of another format.
    """
    path = options_path(run)
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError as error:
        raise DumpError(run, f"holds no training: there is no {path}") from error
    except ValueError as error:
        raise DumpError(path, f"is not JSON ({error})") from error
    if (
        not isinstance(found, dict)
        or found.get("format") != FORMAT
        or not isinstance(found.get("options"), dict)
    ):
        raise DumpError(path, f"must hold the options of a training, of format {FORMAT}")
    for name, kind in _OPTIONS.items():
        value = found["options"].get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise DumpError(path, f"option `{name}` is missing or of another type, found {value!r}")
    return found


def _short(value: float) -> float:
    """A sum with the digits that a line keeps; whole numbers as such."""
    kept = float(f"{value:.{_DIGITS}g}")
    return int(kept) if kept.is_integer() else kept
