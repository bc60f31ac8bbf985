"""Figures of results that are already computed; nothing is counted or estimated here.

matplotlib is imported when something is drawn, and without pyplot, so that no global state is
read or changed. Each module registers what it draws with `draw`, by the class of the result.
"""

from __future__ import annotations

from . import curves as curves
from . import estimates as estimates
from .figure4 import draw_contracting, draw_delta_d, draw_paired_rates, figure4
from .style import COLOURS, colours_of, draw, figure_bytes, save_figure

__all__ = [
    "COLOURS",
    "colours_of",
    "draw",
    "draw_contracting",
    "draw_delta_d",
    "draw_paired_rates",
    "figure4",
    "figure_bytes",
    "save_figure",
]
