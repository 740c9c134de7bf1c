"""Videos of the episodes of an evaluation: what each frame shows.

Not here: encoding (formats/media/), which episodes there are (rollout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.formats.media.films import FilmWriter, open_film
from ringmap.formats.media.images import is_frame, resample_of, resized, shown
from ringmap.storage.disk.paths import local_path
from ringmap.world.infos import Row
from ringmap.world.rollout import Turn
from ringmap.world.tasks import Task

__all__ = ["FPS", "Beside", "EpisodeVideos", "alone"]

Array = np.ndarray[Any, np.dtype[Any]]


FPS = 15


class EpisodeVideos:
    """A watcher that records each turn into a separate video file."""

    def __init__(self, folder: Path, stem: str, picture: Callable[[Turn, Row], Array]) -> None:
        self._folder, self._stem, self._picture = local_path(folder), stem, picture
        self._open: dict[int, FilmWriter] = {}

    def __enter__(self) -> EpisodeVideos:
        return self

    def __exit__(self, *_: object) -> None:
        for film in self._open.values():
            film.close()

    def began(self, turn: Turn, row: Row) -> None:
        """Begin a file, with the first frame."""
        picture = self._picture(turn, row)  # before a file is created: the row may have no frame
        path = Path(self._folder) / f"{self._stem}_{turn.number}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open.setdefault(turn.number, open_film(str(path), FPS)).show(picture)

    def stepped(self, turn: Turn, row: Row) -> None:
        """Add a frame."""
        self._open[turn.number].show(self._picture(turn, row))

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        """Finish the file."""
        self._open.pop(turn.number).close()


def alone(turn: Turn, row: Row) -> Array:
    """Return the frame of the agent."""
    return frame_of(row)


class Beside:
    """Three panels: what the agent does, what the dataset did at that step, and the goal."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks

    def __call__(self, turn: Turn, row: Row) -> Array:
        """Return the panels side by side."""
        frame = frame_of(row)
        frames = self._tasks[turn.number].columns["pixels"]
        others = frames[min(turn.length, len(frames) - 1)], frames[-1]
        shape = (frame.shape[0], frame.shape[1])
        panels = [frame, *(resized(as_frame(f), shape, resample_of(None)) for f in others)]
        line = np.full((shape[0], 1, 3), 255, np.uint8)
        return np.concatenate([panels[0], line, panels[1], line, panels[2]], axis=1)


def frame_of(row: dict[str, Any]) -> Array:
    """Return the frame that an environment's row shows, uint8 (H, W, 3).

    Raises:
        InputError: it shows none.
    """
    for name in (
        "_pixels",
        "pixels",
        *sorted(n for n in row if n.startswith(("_pixels.", "pixels."))),
    ):
        value = row.get(name)
        if isinstance(value, np.ndarray):
            return as_frame(value)
    raise InputError("World.evaluate: a video needs pixels; make the world with add_pixels=True")


def as_frame(picture: Array) -> Array:
    """Return a picture as uint8 (H, W, 3).

    Raises:
        InputError: it is none.
    """
    if not is_frame(picture):
        raise InputError(f"World.evaluate: a video needs uint8 pictures (H, W, 3), got {picture.dtype} {picture.shape}")
    return shown(picture)
