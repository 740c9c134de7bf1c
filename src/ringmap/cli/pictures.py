"""`ringmap preview` and `ringmap plot`: pictures of episodes, and curves of what they were like."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from ringmap.buffers.opening import EPISODES, kind_of
from ringmap.cli.arguments import Force, Place, episodes_at, free_path
from ringmap.cli.console import clean, count, show
from ringmap.cli.episodes import rows_at
from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.formats.media.images import axes_of, enlarged, sheet, shown, spread
from ringmap.formats.media.videos import write_video
from ringmap.storage.disk.paths import refuse_address

Array = np.ndarray[Any, np.dtype[Any]]

Output = Annotated[
    str,
    typer.Option("--output", "-o", metavar="FILE", help="What to write: a .png, or an .mp4 (extra video)."),
]
Drawing = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The PNG to write.")]
Column = Annotated[
    str | None,
    typer.Option(
        "--column",
        metavar="NAME",
        help="The pictures; by default `pixels`, or the first column of such.",
    ),
]
Which = Annotated[
    list[int] | None,
    typer.Option(
        "--episode",
        "-e",
        metavar="N",
        help="An episode, 0 the oldest, -1 the newest. May be given again; by default the newest 4.",
    ),
]
Frames = Annotated[int, typer.Option("--frames", metavar="N", min=1, help="Of each episode, on a contact sheet.")]
Fps = Annotated[int, typer.Option("--fps", metavar="N", min=1, help="Frames per second, of a video.")]

_NEWEST = 4
_SMALLEST = 96
"""A shorter side below this is shown larger, each pixel as a square."""
_GAP = 2


def preview(
    path: Place,
    output: Output = "preview.png",
    column: Column = None,
    episode: Which = None,
    frames: Frames = 8,
    fps: Fps = 15,
    force: Force = False,
) -> None:
    """Show pictures of episodes: a contact sheet, or a video.

    A contact sheet has a row for each episode, with frames from its first to its last. A video shows the episodes one
    after the other.
    """
    kind = os.path.splitext(output)[1].lower()
    if kind not in (".png", ".mp4"):
        raise InputError(f"preview: --output is a .png or an .mp4, got {output}")
    target = free_path(output, "preview", force)
    dataset = episodes_at(path, "preview")
    number = len(dataset.lengths)
    if not number:
        raise InputError(f"preview: {path}: no episodes are stored yet")
    chosen = list(episode) if episode else list(range(max(0, number - _NEWEST), number))
    for wanted in chosen:
        if not -number <= wanted < number:
            raise InputError(f"preview: --episode {wanted}: {path} has {count(number, 'episode')}, 0 to {number - 1}")
    name = _column(dataset, column, path)
    if kind == ".mp4":
        shown = _video(target, dataset, chosen, name, fps)
    else:
        shown = _sheet(target, dataset, chosen, name, frames)
    show(f"wrote {target}: {count(len(chosen), 'episode')}, {count(shown, 'frame')} of {name}")


def _column(dataset: Any, asked: str | None, path: str) -> str:
    names = dataset.column_names
    if asked is not None:
        if asked not in names:
            raise InputError(f"preview: {path} has no column {asked!r}; there are {names}")
        return asked
    first = dataset.load_episode(0)
    pictures = [n for n in names if _is_picture(np.asarray(first[n]))]
    if not pictures:
        raise InputError(
            f"preview: {path} has no pictures (uint8, height x width x 1, 3 or 4); its columns are {names}"
        )
    return "pixels" if "pixels" in pictures else str(pictures[0])


def _is_picture(values: Array) -> bool:
    return axes_of(values.shape[1:], values.dtype) != ""


def _frames(dataset: Any, episode: int, name: str) -> Array:
    frames = np.asarray(dataset.load_episode(episode)[name])
    if not _is_picture(frames):
        raise InputError(f"preview: column {name!r} holds no pictures (uint8, height x width x 1, 3 or 4)")
    return frames


def _sheet(target: str, dataset: Any, chosen: Sequence[int], name: str, most: int) -> int:
    """Write a contact sheet; return how many frames it shows."""
    rows, captions = [], []
    for number in chosen:
        found = _frames(dataset, number, name)
        rows.append([enlarged(shown(found[t]), _SMALLEST) for t in spread(len(found), most)])
        captions.append(clean(f"episode {number % len(dataset.lengths)}, {count(len(found), 'step')}"))
    with open(target, "wb") as file:
        file.write(sheet(rows, captions, _GAP))
    return sum(map(len, rows))


def _video(target: str, dataset: Any, chosen: Sequence[int], name: str, fps: int) -> int:
    """Write a video; return how many frames it has."""
    parts = [_frames(dataset, number, name) for number in chosen]
    refuse_address(target)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    write_video(target, fps, (shown(frame) for frames in parts for frame in frames))
    return sum(map(len, parts))


_MEAN_OVER = 20


def plot(path: Place, output: Drawing = "ringmap.png", force: Force = False) -> None:
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
