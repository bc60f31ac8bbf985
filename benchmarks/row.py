"""One line of the benchmark: a goal, what was measured, whether it was met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """A goal and its figure.

    Attributes
    ----------
    id : str
        Of the goal and its case, unique: "R1 bf16 H1024".
    what : str
        What was measured against what, in words.
    limit : float
        The goal.
    figure : float or None
        What was measured; None where it could not be.
    unit : str
        Of both: "×" for a ratio of two things timed in one run, "MB", "nats", "%" …
    at_least : bool
        Whether more is better; the goal is otherwise met at `limit` or below.
    spread : tuple of float, optional
        Smallest and largest ratio of a round.
    note : str
        Why there is no figure, which peer was reimplemented, the absolute times.
    """

    id: str
    what: str
    limit: float
    figure: float | None
    unit: str = "×"
    at_least: bool = False
    spread: tuple[float, float] | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; None where there is no figure."""
        if self.figure is None:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    @property
    def goal(self) -> str:
        """The goal with its sign and unit."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:.4g} {self.unit}".rstrip()

    def to_json_object(self) -> dict[str, object]:
        """As `--json` writes it."""
        return {
            "id": self.id,
            "what": self.what,
            "goal": self.goal,
            "limit": self.limit,
            "at_least": self.at_least,
            "figure": self.figure,
            "unit": self.unit,
            "spread": None if self.spread is None else list(self.spread),
            "met": self.met,
            "note": self.note,
        }

    @classmethod
    def from_json_object(cls, found: dict[str, Any]) -> Row:
        """Read what `to_json_object` gave."""
        fields = {key: value for key, value in found.items() if key not in ("goal", "met")}
        spread = fields.pop("spread")
        return cls(**fields, spread=None if spread is None else (spread[0], spread[1]))

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """As a row of a table: id, what, goal, figure, met, note."""
        figure = (
            "not measured" if self.figure is None else f"{self.figure:.3g} {self.unit}".rstrip()
        )
        if self.spread is not None:
            figure += f" [{self.spread[0]:.3g}, {self.spread[1]:.3g}]"
        met = {True: "yes", False: "no", None: "–"}[self.met]
        return self.id, self.what, self.goal, figure, met, self.note


def missing(id: str, what: str, limit: float, why: str, **options: bool | str) -> Row:
    """A goal that cannot be measured here, and why."""
    unit, at_least = str(options.get("unit", "×")), bool(options.get("at_least", False))
    return Row(id=id, what=what, limit=limit, figure=None, unit=unit, at_least=at_least, note=why)


def asked(prefixes: tuple[str, ...], *families: str) -> bool:
    """Whether rows of any of the families ("R1", "R2") are wanted.

    A prefix may be shorter or longer than a family's: "R", "R1 bf16 H1024". Without prefixes all
    are.
    """
    return not prefixes or any(
        family.startswith(prefix) or prefix.startswith(family)
        for family in families
        for prefix in prefixes
    )
