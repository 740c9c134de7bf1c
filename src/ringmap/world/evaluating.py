"""Evaluating: how often a policy succeeds.

    turns ─► roll ─┬─ scores: success, return and length of each
                   └─ videos: an mp4 of each

Invariants: every episode that is started counts, and counts once.
Not here: the loop (rollout.py), tasks from a dataset (tasks.py), encoding (formats/media/).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.formats.media.images import is_frame, resample_of, resized, shown
from ringmap.formats.media.videos import VideoWriter, open_video
from ringmap.storage.disk.paths import local_path
from ringmap.world.infos import Row
from ringmap.world.pool import options_of
from ringmap.world.rollout import Stage, Turn, Watcher, bar_of, count_of, roll
from ringmap.world.tasks import Task, Tasks, checked_mode

__all__ = ["fresh_turns", "score"]

Array = np.ndarray[Any, np.dtype[Any]]

WHERE = "World.evaluate"
FPS = 15


def fresh_turns(world: Stage, episodes: Any, seed: int | None, options: Any, reset_mode: str | None) -> list[Turn]:
    """Return the turns of fresh episodes, as `World.evaluate` is asked for them."""
    count = count_of(episodes, WHERE)
    if checked_mode(reset_mode, "auto") == "wait" and count > world.num_envs:
        raise InputError(
            f"{WHERE}: reset_mode='wait' plays one episode in each of {world.num_envs} environments, so "
            f"episodes={count} would never be reached; ask for at most {world.num_envs}, or for 'auto'"
        )
    world.check_ready(WHERE)
    shared = options_of(options, world.num_envs, WHERE)
    return [Turn(k, None if seed is None else seed + k, shared) for k in range(count)]


def score(
    world: Stage,
    turns: Sequence[Turn],
    video: str | os.PathLike[str] | None,
    progress: bool,
    tasks: Tasks | None = None,
) -> dict[str, Any]:
    """Run turns, and score them; see `World.evaluate`."""
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(bar_of(f"evaluate {world.env_name}", len(turns), progress))
        scores = _Scores(len(turns), bar)
        watchers: list[Watcher] = [scores]
        if video is not None:
            watchers.append(stack.enter_context(_Videos(video, None if tasks is None else tasks.each)))
        if tasks is None:
            roll(world, turns, watchers)
        else:
            roll(world, turns, watchers, budget=tasks.budget, prepared=tasks.prepared, overlay=tasks.goals)
    return {
        "success_rate": float(100 * scores.successes.mean()) if len(turns) else 0.0,
        "episode_successes": scores.successes,
        "episode_returns": scores.returns,
        "episode_lengths": scores.lengths,
    }


class _Scores:
    """A watcher that notes success, return and length of each turn."""

    def __init__(self, count: int, bar: Any) -> None:
        self.successes = np.zeros(count, bool)
        self.returns = np.zeros(count, np.float64)
        self.lengths = np.zeros(count, np.int64)
        self._bar = bar
        self._newest: dict[int, Row] = {}

    def began(self, turn: Turn, row: Row) -> None:
        pass

    def stepped(self, turn: Turn, row: Row) -> None:
        self._newest[turn.number] = row

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        success = self._newest.pop(turn.number).get("is_success")
        self.successes[turn.number] = turn.terminated if success is None else bool(np.all(success))
        self.returns[turn.number] = turn.total
        self.lengths[turn.number] = turn.length
        self._bar.update()


class _Videos:
    """A watcher that records each turn as a video into a folder; with tasks of a dataset in three panels: what the
    agent does, what the dataset did at that step, the goal."""

    def __init__(self, folder: str | os.PathLike[str], tasks: Sequence[Task] | None) -> None:
        self._folder, self._tasks = local_path(folder), tasks
        self._open: dict[int, VideoWriter] = {}
        if any("pixels" not in task.columns for task in tasks or ()):
            raise InputError(f"{WHERE}: a video shows the dataset's pixels; it has no column 'pixels'")

    def __enter__(self) -> _Videos:
        return self

    def __exit__(self, *_: object) -> None:
        for video in self._open.values():
            video.close()

    def began(self, turn: Turn, row: Row) -> None:
        picture = self._picture(turn, row)  # before a file is created: the row may have no frame
        os.makedirs(self._folder, exist_ok=True)
        stem = "episode" if self._tasks is None else "env"
        path = os.path.join(self._folder, f"{stem}_{turn.number}.mp4")
        self._open.setdefault(turn.number, open_video(path, FPS)).show(picture)

    def stepped(self, turn: Turn, row: Row) -> None:
        self._open[turn.number].show(self._picture(turn, row))

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        self._open.pop(turn.number).close()

    def _picture(self, turn: Turn, row: Row) -> Array:
        """Return the frame that an environment's row shows, uint8 (H, W, 3); beside those of its task."""
        names = "_pixels", "pixels", *sorted(n for n in row if n.startswith(("_pixels.", "pixels.")))
        pictures = [row[name] for name in names if isinstance(row.get(name), np.ndarray)]
        if not pictures:
            raise InputError(f"{WHERE}: a video needs pixels; make the world with add_pixels=True")
        frame = _frame(pictures[0])
        if self._tasks is None:
            return frame
        frames = self._tasks[turn.number].columns["pixels"]
        shape = (frame.shape[0], frame.shape[1])
        line = np.full((shape[0], 1, 3), 255, np.uint8)
        there, goal = (
            resized(_frame(f), shape, resample_of(None))
            for f in (frames[min(turn.length, len(frames) - 1)], frames[-1])
        )
        return np.concatenate([frame, line, there, line, goal], axis=1)


def _frame(picture: Array) -> Array:
    """Return a picture as uint8 (H, W, 3)."""
    if not is_frame(picture):
        raise InputError(f"{WHERE}: a video needs uint8 pictures (H, W, 3), got {picture.dtype} {picture.shape}")
    return shown(picture)
