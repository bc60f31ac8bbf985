"""Figure 4 of the paper for any dump, and its parts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltad.analysis import paper
from deltad.analysis.pairs import SIDES
from deltad.analysis.result import DASH, counted, number, p_value, title, unit, with_interval
from deltad.analysis.tables.rates import RateTable

from . import style
from .style import SMALL, Floats, Shown, draw, draw_points, folded, label_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIED: Final = "#999999"
_PAPER: Final[dict[str, Any]] = {
    "marker": "D", "markersize": 6, "markerfacecolor": "white", "markeredgecolor": "#333333",
    "markeredgewidth": 1.2, "linestyle": "none", "zorder": 5,
    "label": f"reported in the paper ({paper.FIGURE})",
}  # fmt: skip
_BINS_A_SIDE: Final = 12
_LINEAR_DECADES: Final = 0.5  # room for the labels on both sides of 0
_HEADROOM: Final = 1.6  # the legend stands above the histograms
_ORDER: Final = ("baseline", "criterion")  # of the places, from left to right


@draw.register(RateTable)
def figure4(table: RateTable) -> Figure:
    """Draw the paper's Figure 4 for one dump: ΔD of kept tokens, and unsafe-keep rates by seed.

    Parameters
    ----------
    table : RateTable
        Counts and ΔD by seed.

    Returns
    -------
    Figure
        Three axes: distribution of ΔD, contracting fractions, paired rates.
    """
    size = "no seeds"
    if table.seeds:
        each, outside, apart = (
            DASH if math.isnan(value := table.per_seed(name)) else f"{value:.{digits}f}"
            for name, digits in (("tokens", 0), ("outside", 1), ("disagreement", 1))
        )
        size = (
            f"{counted(len(table.seeds), 'seed')}; a seed has {each} tokens, {outside} outside, "
            f"{apart} in disagreement"
        )
    head = f"{title(table.question)} · protocol {table.question.protocol}"
    figure = style.new_figure(7.4, 4.4, head, size)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(3.4, 1))
    draw_delta_d(table, ax=figure.add_subplot(grid[0, 0]))
    draw_contracting(table, ax=figure.add_subplot(grid[1, 0]))
    rates = draw_paired_rates(table, ax=figure.add_subplot(grid[:, 1]), legend=False)
    style.legend_below(figure, rates)
    style.name_panels(figure)
    return figure


def draw_delta_d(table: RateTable, *, ax: Axes | None = None) -> Axes:
    """Draw the distribution of ΔD over the disagreement tokens that each criterion keeps.

    Parameters
    ----------
    table : RateTable
        ΔD by side.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A stepped histogram per criterion; heights are shares of what that criterion keeps.

    Notes
    -----
    The axis is linear near 0 and logarithmic beyond. No bin holds both signs; tokens with
    ΔD = 0 are in no bin, and their number is in the legend.
    """
    ax = ax or _new_axes()
    sizes = np.abs(np.concatenate([table.delta_d[side] for side in SIDES]))
    moved = sizes[sizes > 0]
    if len(moved):
        linear, edges = _edges(moved)
        ax.set_xscale("symlog", linthresh=linear, linscale=_LINEAR_DECADES)
        for side in SIDES:
            _histogram(table, side, edges, ax)
        ax.set_xlim(edges[0], edges[-1])
        ax.set_ylim(0, _HEADROOM * ax.get_ylim()[1])
        ax.legend(fontsize=SMALL, frameon=False, loc="upper left", borderaxespad=0.3)
        ax.axvline(0, 0, 1 / _HEADROOM, color="black", linewidth=0.8, zorder=0)
    else:
        ax.set_xlim(-1, 1)
        ax.set_xticks([0])
        ax.set_yticks([])
        style.say(ax, "ΔD = 0 on every kept token" if len(sizes) else "no disagreement token")
    nats = f",{unit(table.question)}" if unit(table.question) else ""
    words = f"← contracts      ΔD = D after − D before{nats}      moves out →"
    label_axes(ax, words, "share of kept disagreement tokens")
    return ax


def draw_contracting(table: RateTable, *, ax: Axes | None = None) -> Axes:
    """Draw the pooled contracting fraction of each criterion, and the paper's.

    Parameters
    ----------
    table : RateTable
        Counts by seed.
    ax : Axes, optional
        Drawn into; a new one otherwise.

    Returns
    -------
    Axes
        A point with its interval per criterion; a diamond where the paper reports the pair.
    """
    ax = ax or _new_axes()
    names, colours = zip(*(_name_and_colour(table, side) for side in _ORDER), strict=True)
    for place, side in enumerate(_ORDER):
        share = table.side(side).contractions
        draw_points(ax, [place], [share], colours[place], upright=False, seeds=False)
    if paper.compares_with_paper(table.question):
        ax.plot([paper.CONTRACTING_FRACTIONS[side] for side in _ORDER], [-0.3, 1.3], **_PAPER)
    ax.set_xlim(-0.03, 1.03)
    ax.set_ylim(-0.7, 1.7)
    ax.set_yticks([0, 1], [folded(name, 22) for name in names])
    label_axes(ax, "contracting fraction: share with ΔD < 0, pooled", "")
    return ax


def draw_paired_rates(table: RateTable, *, ax: Axes | None = None, legend: bool = True) -> Axes:
    """Draw the unsafe-keep rates of both criteria, a line per seed, with means and the paper's.

    Parameters
    ----------
    table : RateTable
        Counts by seed.
    ax : Axes, optional
        Drawn into; a new one otherwise.
    legend : bool
        Under the axes.

    Returns
    -------
    Axes
        Lines in the criterion's colour where its rate is lower, in the baseline's where it is
        higher, grey where tied; a seed with one rate is a point without a line.
    """
    ax = ax or _new_axes()
    ours, theirs = table.criterion.rates, table.baseline.rates
    paired = table.paired
    names, colours = zip(*(_name_and_colour(table, side) for side in _ORDER), strict=True)
    for chosen, colour, label in (
        (ours < theirs, colours[1], f"lower: {paired.lower}"),
        (ours == theirs, _TIED, f"tied: {paired.tied}"),
        (ours > theirs, colours[0], f"higher: {paired.higher}"),
    ):
        if chosen.any():
            both = np.stack([theirs[chosen], ours[chosen]])
            ax.plot([0, 1], both, "o-", ms=2.5, lw=0.8, color=colour, alpha=0.45)
            words = f"{label} of {counted(paired.seeds, 'seed')}"
            ax.plot([], [], color=colour, linewidth=1.5, label=words)
    alone = np.isnan(ours) != np.isnan(theirs)
    if alone.any():
        words = f"only one has a rate: {counted(int(alone.sum()), 'seed')}"
        places, both = np.repeat([0, 1], alone.sum()), np.concatenate([theirs[alone], ours[alone]])
        ax.plot(places, both, "o", ms=3.5, mfc="white", mec=_TIED, mew=0.8, label=words)
    for place, side, colour in zip((-0.16, 1.16), _ORDER, colours, strict=True):
        draw_points(ax, [place], [Shown.of(table.side(side))], colour, seeds=False)
    reported = paper.compares_with_paper(table.question)
    if reported:
        ax.plot([-0.34, 1.34], [paper.UNSAFE_KEEP_RATES[side] for side in _ORDER], **_PAPER)
    words = "mean over seeds (b: pooled), 95 % bootstrap"
    ax.plot([], [], "o-", ms=4, lw=1.5, color="black", label=words)
    base = table.disagreement.increase_rate
    if not math.isnan(base):
        words = f"base rate of the disagreement set, {number(base)}"
        ax.axhline(base, color="black", linewidth=0.8, linestyle=":", label=words)
    ax.set_xlim(-0.55, 1.55)
    ax.set_ylim(-0.04, 1.2)
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_xticks([0, 1], [folded(name) for name in names])
    label_axes(ax, "", "unsafe-keep rate: share with ΔD > 0")
    words = (
        f"difference {with_interval(paired.difference, paired.difference_ci95, signed=True)}\n"
        f"sign test p = {p_value(paired.sign_test_p)}"
    )
    if reported:
        words += f" (paper: {paper.SEEDS_LOWER} of {paper.SEEDS} lower)"
    ax.text(0.5, 0.985, words, transform=ax.transAxes, ha="center", va="top", fontsize=SMALL)
    if legend:
        ax.legend(fontsize=SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return ax


def _new_axes() -> Axes:
    """Axes of a figure of their own."""
    return style.new_figure(4, 3.6).add_subplot()


def _name_and_colour(table: RateTable, side: str) -> tuple[str, str]:
    """Of the criterion or the baseline."""
    name = table.question.names[SIDES.index(side)]
    return name, style.colours_of(table.question.names)[name]


def _edges(moved: Floats) -> tuple[float, Floats]:
    """Where the axis turns linear, and bin edges that look evenly spaced on it, 0 among them."""
    top = float(moved.max()) * 1.0001
    # A power of ten that most tokens exceed, within four decades of the top.
    linear = max(10.0 ** math.floor(math.log10(np.quantile(moved, 0.2))), top / 1e4)
    linear = min(linear, top / 10)
    steps = min(_BINS_A_SIDE, 2 + int(math.sqrt(len(moved)) / 2))
    width = math.log10(top / linear) / steps
    near = np.linspace(0, linear, 1 + max(1, round(_LINEAR_DECADES / width)))
    side = np.concatenate([near, np.geomspace(linear, top, steps + 1)[1:]])
    return linear, np.concatenate([-side[:0:-1], side])


def _histogram(table: RateTable, side: str, edges: Floats, ax: Axes) -> None:
    """One criterion's ΔD as shares by bin, its contracting fraction in the legend."""
    delta_d, kept = table.delta_d[side], table.side(side)
    name, colour = _name_and_colour(table, side)
    moved = delta_d[delta_d != 0]
    fraction = with_interval(kept.contracting_fraction, kept.contracting_fraction_ci95)
    label = folded(f"{name}: {counted(kept.kept, 'token')} kept", 54)
    label += f"\ncontracting {fraction}"
    if len(moved) < len(delta_d):
        label += f", ΔD = 0 on {len(delta_d) - len(moved)}"
    if kept.undetermined:
        label += f"\n{kept.undetermined} undetermined, in no rate"
    shares = np.histogram(moved, edges)[0] / max(1, len(delta_d))
    dashes: Any = "-" if side == "criterion" else (0, (3, 1))
    ax.stairs(shares, edges, fill=True, color=colour, alpha=0.18)
    ax.stairs(shares, edges, color=colour, linewidth=1.4, linestyle=dashes, label=label)
