"""`ringmap preview`: pictures of episodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import typer

from ringmap.cli.console import clean, count, show
from ringmap.cli.options import Force, Place
from ringmap.cli.resolve import episodes_at, free_path
from ringmap.errors import InputError
from ringmap.formats.media.images import axes_of, enlarged, sheet, shown, spread
from ringmap.formats.media.videos import write_video
from ringmap.storage.disk.paths import refuse_address

Array = np.ndarray[Any, np.dtype[Any]]

Output = Annotated[
    str,
    typer.Option("--output", "-o", metavar="FILE", help="What to write: a .png, or an .mp4 (extra video)."),
]
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
