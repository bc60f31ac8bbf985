"""Figures of results that are already computed; nothing is counted or estimated here.

matplotlib is imported when something is drawn, and without pyplot, so that no global state
is read or changed. Each module draws one kind of result; `style` is common to all.
"""

from __future__ import annotations

from .rates import draw_contracting, draw_delta_d, draw_paired_rates, figure4
from .style import COLOURS, ENDINGS, colour_of, figure_format, save_figure

__all__ = [
    "COLOURS",
    "ENDINGS",
    "colour_of",
    "draw_contracting",
    "draw_delta_d",
    "draw_paired_rates",
    "figure4",
    "figure_format",
    "save_figure",
]
