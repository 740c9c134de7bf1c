"""`ringmap plot`: how long episodes are, what they return, how the ring filled."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ringmap.buffers.opening import EPISODES, kind_of
from ringmap.cli.console import clean, show
from ringmap.cli.options import Force, Place
from ringmap.cli.resolve import free_path
from ringmap.cli.table import rows_at
from ringmap.errors import InputError
from ringmap.extras import require

Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The PNG to write.")]

_MEAN_OVER = 20


def plot(path: Place, output: Output = "ringmap.png", force: Force = False) -> None:
    """Draw lengths, returns, fill and eviction as a PNG.

    Of a dataset, which evicts nothing, and of a directory of rings: lengths and returns.
    """
    if not output.lower().endswith(".png"):
        raise InputError(f"plot: --output is a .png, got {output}")
    target = free_path(output, "plot", force)
    rows = rows_at(path, "plot")
    if not rows:
        raise InputError(f"plot: {path}: no episodes are stored yet")
    series = [("length, steps", [row["length"] for row in rows])]
    if "return" in rows[0]:
        series.append(("return", [row["return"] for row in rows]))
    commits, most = None, 0
    if kind_of(path, "plot") == EPISODES:
        from ringmap.storage.inspect.describe import commits_of, facts_of

        commits, most = commits_of(path), facts_of(path).max_steps
    _draw(target, path, series, commits, most)
    show(f"wrote {target}")


def _draw(target: str, title: str, series: list[tuple[str, list[float]]], commits: Any, max_steps: int) -> None:
    require("plot", "plot: drawing")
    from matplotlib.figure import Figure

    panels = len(series) + (0 if commits is None else 2)
    figure = Figure(figsize=(8, 2.2 * panels), layout="constrained")
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    # Its own signs are "$...$" and "_"-led names: a path may have both.
    axes[0].set_title(clean(title).replace("$", r"\$"), fontsize="medium")
    for axis, (name, values) in zip(axes, series, strict=False):
        axis.plot(values, ".", markersize=3, alpha=0.5)
        axis.plot(_running_mean(values), linewidth=1.5)
        axis.set_ylabel(name)
        axis.set_xlabel("episode, oldest first")
    if commits is not None:
        filled, evicted = axes[-2:]
        filled.step(commits.written, commits.live, where="post")
        filled.axhline(max_steps, linestyle=":", color="0.5")
        filled.set_ylabel("fill, steps")
        evicted.step(commits.written, commits.evicted.cumsum(), where="post")
        evicted.set_ylabel("evicted, steps")
        for axis in (filled, evicted):
            axis.set_xlabel("steps written")
            axis.set_ylim(bottom=0)
    figure.savefig(target, dpi=120, format="png")


def _running_mean(values: list[float]) -> Any:
    import numpy as np

    sums = np.cumsum(np.asarray(values, np.float64))
    over = np.minimum(np.arange(1, len(values) + 1), _MEAN_OVER)
    before = np.concatenate([np.zeros(min(_MEAN_OVER, len(values))), sums[:-_MEAN_OVER]])
    return (sums - before) / over
