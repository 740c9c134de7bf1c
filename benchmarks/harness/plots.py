"""Pictures of tables: bars side by side, ours in another colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.table import Table

__all__ = ["rates", "shares"]

OURS = "ringmap"
"""How the rows begin that are in the colour of the house."""

_WIDTH, _DPI, _SMALL = 5.2, 140, 8
"""Inches, and points of letters: as large as text on a page, and legible on a phone, where a plot is half as wide."""


def rates(path: Path, table: Table, panels: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Draw a panel of bars for each mapping of name -> rate.

    Args:
        path: of the picture.
        table: gets a note where there is nothing to draw with.
        panels: title -> name -> rate.
        unit: of the rates.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        table.notes.append("no plot: matplotlib is not installed")
        return
    heights = [0.36 * len(bars) + 0.3 for bars in panels.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.3), layout="constrained")
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, bars) in zip(every, panels.items(), strict=True):
        names = sorted(bars, key=lambda name: bars[name])
        colours = ["tab:blue" if name.startswith(OURS) else "0.7" for name in names]
        drawn = axes.barh(range(len(names)), [bars[n] for n in names], 0.4, color=colours)
        axes.bar_label(drawn, [f"{bars[name]:,.0f}" for name in names], padding=3, fontsize=_SMALL)
        for at, name in enumerate(names):  # above its bar: beside it, a phone has no room
            axes.text(0, at + 0.22, name, fontsize=_SMALL, va="bottom")
        axes.margins(x=0.15, y=0.01)
        axes.set_ylim(-0.3, len(names) - 0.2)
        axes.set_title(title, fontsize=_SMALL + 1.5, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.xaxis.set_visible(False)
        axes.yaxis.set_visible(False)
    figure.supxlabel(unit, fontsize=_SMALL)
    figure.savefig(path, dpi=_DPI)


def shares(path: Path, table: Table, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each name, cut into its parts: name -> part -> milliseconds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        table.notes.append("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(_WIDTH, 0.9 + 0.4 * len(bars)), layout="constrained")
    axes = figure.subplots()
    names = list(bars)[::-1]
    ends = dict.fromkeys(names, 0.0)
    for part in dict.fromkeys(part for parts in bars.values() for part in parts):
        widths = [bars[name].get(part, 0) for name in names]
        axes.barh(names, widths, left=list(ends.values()), label=part)
        ends = {name: ends[name] + width for name, width in zip(names, widths, strict=True)}
    axes.tick_params(labelsize=_SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms per batch", fontsize=_SMALL)
    axes.legend(fontsize=_SMALL, frameon=False)
    figure.savefig(path, dpi=_DPI)
