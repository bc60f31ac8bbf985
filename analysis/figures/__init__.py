"""Figures of results that are already computed; nothing is counted or estimated here.

matplotlib is imported when something is drawn, and without pyplot, so that no global state is read
or changed. A module's figures enter themselves for their class of result: a new one needs
`@draw.register(ItsClass)`.
"""

from __future__ import annotations

from . import curves, estimates
from .figure4 import draw_contracting, draw_delta_d, draw_paired_rates, figure4
from .style import COLOURS, colour_of, draw, figure_bytes, save_figure

__all__ = [
    "COLOURS",
    "colour_of",
    "curves",
    "draw",
    "draw_contracting",
    "draw_delta_d",
    "draw_paired_rates",
    "estimates",
    "figure4",
    "figure_bytes",
    "save_figure",
]
