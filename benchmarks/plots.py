"""Pictures of tables: bars side by side, ours in another colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.table import Table

__all__ = ["rates", "shares"]

OURS = "ringmap"
"""How the rows begin that are in the colour of the house."""


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
    rows = max(map(len, panels.values()))
    figure = Figure(
        figsize=(8, 0.7 + 0.34 * rows * len(panels) + 0.4 * len(panels)), layout="constrained"
    )
    every = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, bars) in zip(every, panels.items(), strict=True):
        names = sorted(bars, key=lambda name: bars[name])
        colours = ["tab:blue" if name.startswith(OURS) else "0.7" for name in names]
        drawn = axes.barh(names, [bars[name] for name in names], color=colours)
        axes.bar_label(drawn, [f"{bars[name]:,.0f}" for name in names], padding=3, fontsize="small")
        axes.margins(x=0.15)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.tick_params(axis="y", labelsize="small", length=0)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.xaxis.set_visible(False)
    figure.supxlabel(unit, fontsize="small")
    figure.savefig(path, dpi=90)


def shares(path: Path, table: Table, bars: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each name, cut into its parts: name -> part -> milliseconds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        table.notes.append("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 0.9 + 0.4 * len(bars)), layout="constrained")
    axes = figure.subplots()
    names = list(bars)[::-1]
    ends = dict.fromkeys(names, 0.0)
    for part in dict.fromkeys(part for parts in bars.values() for part in parts):
        widths = [bars[name].get(part, 0) for name in names]
        axes.barh(names, widths, left=list(ends.values()), label=part)
        ends = {name: ends[name] + width for name, width in zip(names, widths, strict=True)}
    axes.tick_params(axis="y", labelsize="small", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms per batch", fontsize="small")
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=90)
