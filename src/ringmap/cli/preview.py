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
from ringmap.formats.media.images import enlarged, rgb

Array = np.ndarray[Any, np.dtype[Any]]

Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", help="What to write: a .png, or an .mp4 (extra video)."
    ),
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
    typer.Option("--episode", "-e", metavar="N", help="An episode, 0 the oldest, -1 the newest. May be given again; by default the newest 4."),
]  # fmt: skip
Frames = Annotated[
    int, typer.Option("--frames", metavar="N", min=1, help="Of each episode, on a contact sheet.")
]
Fps = Annotated[
    int, typer.Option("--fps", metavar="N", min=1, help="Frames per second, of a video.")
]

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
            raise InputError(
                f"preview: --episode {wanted}: {path} has {count(number, 'episode')}, 0 to {number - 1}"
            )
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
    pictures = [n for n in names if _as_pictures(np.asarray(first[n])) is not None]
    if not pictures:
        raise InputError(
            f"preview: {path} has no pictures (uint8, height x width x 1, 3 or 4); its columns are {names}"
        )
    return "pixels" if "pixels" in pictures else str(pictures[0])


def _as_pictures(values: Array) -> Array | None:
    """Return frames (T, H, W, 3), or None for values that are no pictures."""
    if values.dtype != np.uint8 or values.ndim not in (3, 4) or 0 in values.shape:
        return None
    if values.ndim == 3:
        values = values[..., None]
    elif values.shape[-1] not in (1, 3, 4) and values.shape[1] in (1, 3):
        values = np.moveaxis(values, 1, -1)
    if values.shape[-1] not in (1, 3, 4) or min(values.shape[1:3]) < 2:
        return None
    return rgb(values)


def _frames(dataset: Any, episode: int, name: str) -> Array:
    frames = _as_pictures(np.asarray(dataset.load_episode(episode)[name]))
    if frames is None:
        raise InputError(
            f"preview: column {name!r} holds no pictures (uint8, height x width x 1, 3 or 4)"
        )
    return frames


def _sheet(target: str, dataset: Any, chosen: Sequence[int], name: str, most: int) -> int:
    """Write a contact sheet; return how many frames it shows."""
    from PIL import Image, ImageDraw

    lengths, strips = dataset.lengths, []
    for number in chosen:
        found = _frames(dataset, number, name)
        at = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).round().astype(int))
        strips.append((number % len(lengths), len(found), enlarged(found[at], _SMALLEST)))
    height, width = strips[0][2].shape[1:3]
    caption = 14
    columns = max(len(frames) for _, _, frames in strips)
    sheet = Image.new(
        "RGB",
        (columns * (width + _GAP) + _GAP, len(strips) * (height + caption + _GAP) + _GAP),
        "white",
    )
    pen = ImageDraw.Draw(sheet)
    for row, (number, length, frames) in enumerate(strips):
        top = _GAP + row * (height + caption + _GAP)
        pen.text((_GAP, top), clean(f"episode {number}, {count(length, 'step')}"), fill="black")
        for i, frame in enumerate(frames):
            sheet.paste(Image.fromarray(frame), (_GAP + i * (width + _GAP), top + caption))
    sheet.save(target, format="PNG")
    return sum(len(frames) for _, _, frames in strips)


def _video(target: str, dataset: Any, chosen: Sequence[int], name: str, fps: int) -> int:
    """Write a video; return how many frames it has."""
    from pathlib import Path

    from ringmap.world.episode_videos import open_film, show_in

    parts = [_frames(dataset, number, name) for number in chosen]
    with open_film(Path(target), fps) as film:
        for frames in parts:
            for frame in frames:
                show_in(film, frame)
    return sum(map(len, parts))
