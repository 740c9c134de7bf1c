"""Plots of the tables that stand on the pages: bars side by side as plain SVG, ours in another colour.

`python -m benchmarks.harness.plots`: draw them again from the tables in docs/performance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

__all__ = ["PLOTS", "draw_plots"]


@dataclass(frozen=True)
class Plot:
    """`panels`: how the title of a table begins, a regular expression -> what the panel says.

    `unit`: of what the bars show. `per_call`: so many are in a call, and the bars are a rate; 0: the bars are times.
    """

    unit: str
    per_call: float
    panels: dict[str, str]


_MB = 256 * 4 * 64 * 64 * 3 / 1e6
PLOTS = {
    "sampling": Plot(
        "clips/s, sample(256), one thread",
        256,
        {"one thread: .*pixels": "clips of 4 frames of 64x64x3", "one thread: .*state vectors": "state vectors"},
    ),
    "cold": Plot("MB/s, ring 8 times as large as memory", _MB, {"cold: clips": "random clips from a disk"}),
    "loading": Plot(
        "clips/s, DataLoader(batch_size=256, shuffle=True)",
        256,
        {"a pass of .*num_workers=0\\): clips": "no workers", "a pass of .*num_workers=2": "2 workers"},
    ),
    "storing": Plot("calls per second", 1, {"add a step of 1 lane": "add of a transition"}),
    "growth": Plot("us per batch", 0, {"sample\\(256\\) of state vectors \\(": "sample(256) of state vectors"}),
    "safety": Plot(
        "calls per second",
        1,
        {
            "write_episode, round .*pixels": "write_episode, 200 steps of pixels",
            "write_episode, round .*states": "write_episode, 4 steps of states",
            "sample\\(256\\), clips": "sample(256), clips of pixels",
        },
    ),
}
"""File in docs/assets -> what it shows."""

WIDTH, NAMES, ROW = 720, 330, 18
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def draw_plots(pages: str, folder: Path) -> None:
    """Draw each plot whose tables the pages have."""
    for name, plot in PLOTS.items():
        found = {what: _medians(pages, title) for title, what in plot.panels.items()}
        panels = {what: bars for what, bars in found.items() if bars}
        if panels:
            (folder / f"{name}.svg").write_text(_svg(plot, panels))


def _medians(pages: str, title: str) -> dict[str, float]:
    """Return the seconds of the table whose title begins so."""
    found = re.search(rf"^\*\*{title}[^\n]*\*\*\n\n((?:\|.*\n)+)", pages, re.MULTILINE)
    bars = {}
    for line in found[1].splitlines()[2:] if found else ():
        name, median = line.strip("| ").split(" | ")[:2]
        value, _, unit = median.partition(" ")
        if unit in _SECONDS:
            bars[name] = float(value) * _SECONDS[unit]
    return bars


def _svg(plot: Plot, panels: dict[str, dict[str, float]]) -> str:
    rows, y = [], 8
    for what, medians in panels.items():
        bars = {n: plot.per_call / s if plot.per_call else s * 1e6 for n, s in medians.items()}
        rows.append(f'<text x="8" y="{y + 13}" font-weight="bold">{escape(what)} ({escape(plot.unit)})</text>')
        most = max(bars.values())
        for name, value in bars.items():
            y += ROW
            width = max(1, round((WIDTH - NAMES - 80) * value / most))
            colour = "#2563eb" if name.startswith("ringmap") or not plot.per_call else "#a3a3a3"
            rows.append(
                f'<text x="{NAMES - 8}" y="{y + 13}" text-anchor="end">{escape(_short(name))}</text>'
                f'<rect x="{NAMES}" y="{y + 3}" width="{width}" height="{ROW - 6}" fill="{colour}"/>'
                f'<text x="{NAMES + width + 5}" y="{y + 13}">{value:,.0f}</text>'
            )
        y += ROW + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *rows, "</svg>"]) + "\n"


def _short(name: str) -> str:
    return name if len(name) <= 56 else name[:55] + "…"


def main() -> None:
    """Draw them from the pages as they are."""
    root = Path(__file__).parents[2] / "docs"
    pages = "\n".join(page.read_text() for page in sorted((root / "performance").glob("*.md")))
    draw_plots(pages, root / "assets")


if __name__ == "__main__":
    main()
