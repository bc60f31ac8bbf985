"""Real updates on a small machine, ready to run.

`record(RECIPES["tiny"](), "run")` records a dump; the command `deltad record` does the same.
Nothing here imports torch before it runs.
"""

from __future__ import annotations

from .recipe import Recipe as Recipe
from .recipe import RecipeError as RecipeError
from .record import record as record
from .smollm2 import SmolLM2Recipe as SmolLM2Recipe
from .tiny import TinyRecipe as TinyRecipe
from .workers import WorkerError as WorkerError

RECIPES: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in (TinyRecipe, SmolLM2Recipe)}
"""Every recipe by name."""

__all__ = [
    "RECIPES",
    "Recipe",
    "RecipeError",
    "SmolLM2Recipe",
    "TinyRecipe",
    "WorkerError",
    "record",
]
