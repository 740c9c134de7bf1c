"""Evaluating: how often a policy succeeds, in fresh episodes or from the states of a dataset.

    episodes=N           turns with seed + k                     ─┐
    dataset, idx, ...    chunk ─► start: reset options, callables ├─► roll ─► scores, videos
                              └─► goal: laid over the infos      ─┘

Invariants: every episode that is started counts, and counts once.
Not here: the loop (rollout.py), the mp4 file (video.py).
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.datasets.layout import stored_layout
from ringmap.errors import InputError
from ringmap.world.collecting import count_of
from ringmap.world.infos import Row
from ringmap.world.rollout import Turn, Watcher, options_of, roll
from ringmap.world.video import VideoFile, as_frame, frame_of
from ringmap.world.wrappers import is_picture, resample_of, resized

if TYPE_CHECKING:
    from ringmap.world.world import World

__all__ = ["evaluate_dataset", "evaluate_episodes"]

Array = np.ndarray[Any, np.dtype[Any]]

WHERE = "World.evaluate"
_BAR_AFTER_S = 2.0
_MODES = ("auto", "wait")


def checked_mode(given: str | None, default: str) -> str:
    """Return the reset mode.

    Raises:
        InputError: there is none of that name.
    """
    mode = default if given is None else given
    if mode not in _MODES:
        raise InputError(f"{WHERE}: reset_mode must be one of {_MODES}, got {given!r}")
    return mode


def evaluate_episodes(
    world: World, episodes: int, seed: int | None, options: Any, video: Any, reset_mode: str | None,
    progress: bool,
) -> dict[str, Any]:  # fmt: skip
    """Run fresh episodes, and score them."""
    count = count_of(episodes, WHERE)
    if checked_mode(reset_mode, "auto") == "wait" and count > world.num_envs:
        raise InputError(
            f"{WHERE}: reset_mode='wait' plays one episode in each of {world.num_envs} environments, so "
            f"episodes={count} would never be reached; ask for at most {world.num_envs}, or for 'auto'"
        )
    world.check_ready(WHERE)
    first = None if seed is None else operator.index(seed)
    shared = options_of(options, world.num_envs, WHERE)
    turns = [Turn(k, None if first is None else first + k, shared) for k in range(count)]
    with contextlib.ExitStack() as stack:
        scores = _Scores(count, stack.enter_context(_bar(world, count, progress)))
        watchers: list[Watcher] = [scores]
        if video is not None:
            watchers.append(stack.enter_context(_Films(Path(video), "episode", _alone)))
        roll(world.envs, world.act, turns, watchers)
    return scores.result(None if first is None else [first + k for k in range(count)])


def evaluate_dataset(
    world: World, dataset: Any, episodes_idx: Any, start_steps: Any, goal_offset: Any,
    eval_budget: Any, seed: int | None, options: Any, video: Any, reset_mode: str | None,
    callables: Sequence[Mapping[str, Any]] | None, progress: bool,
) -> dict[str, Any]:  # fmt: skip
    """Run one episode per environment from the states of a dataset, and score them."""
    if checked_mode(reset_mode, "wait") != "wait":
        raise InputError(
            f"{WHERE}: a run from a dataset has one task for each environment: reset_mode must be 'wait'"
        )
    given = {"episodes_idx": episodes_idx, "start_steps": start_steps, "goal_offset": goal_offset}
    for name, value in given.items():
        if value is None:
            raise InputError(f"{WHERE}: a run from a dataset needs {name}")
    numbers = [operator.index(i) for i in episodes_idx]
    starts = [operator.index(i) for i in start_steps]
    offset = operator.index(goal_offset)
    budget = None if eval_budget is None else operator.index(eval_budget)
    count = len(numbers)
    if count != world.num_envs:
        raise InputError(
            f"{WHERE}: {count} episodes_idx for {world.num_envs} environments; make a world with num_envs={count}"
        )
    if len(starts) != count:
        raise InputError(f"{WHERE}: {len(starts)} start_steps, expected {count}: one per episode")
    if offset < 1 or (budget is not None and budget < 1):
        raise InputError(
            f"{WHERE}: goal_offset and eval_budget must be positive, got {goal_offset} and {eval_budget}"
        )
    world.check_ready(WHERE)
    tasks = [
        _task(dataset, number, start, offset) for number, start in zip(numbers, starts, strict=True)
    ]
    goals = [_goal_of(world, task) for task in tasks]
    calls = [_calls(callables or (), task) for task in tasks]
    shared = options_of(options, count, WHERE)
    given_options = [
        dict((shared[i] if isinstance(shared, list) else shared) or {}) for i in range(count)
    ]
    if world.envs.has_reset_options:
        asked = [{"init": task.start, "goal": task.goal} for task in tasks]
        hooks = world.envs.call("reset_options_from_dataset", asked)
        given_options = [{**own, **hook} for own, hook in zip(given_options, hooks, strict=True)]
    elif not callables:
        raise InputError(
            f"{WHERE}: {world.env_name} has no reset_options_from_dataset(init, goal), so it can't be put "
            "where an episode was; give it one, or pass callables="
        )

    def prepared(mask: Array) -> None:
        if not callables:
            return
        for k, spec in enumerate(callables):
            world.envs.call(spec["method"], [calls[env][k] for env in range(count)])
        known = [
            {
                name: task.start[name]
                for name in world.envs.rows[env]
                if _says(task, name, world.envs.rows[env])
            }
            for env, task in enumerate(tasks)
        ]
        world.envs.render_again(mask, known)

    turns = [
        Turn(k, None if seed is None else operator.index(seed) + k, given_options[k])
        for k in range(count)
    ]
    with contextlib.ExitStack() as stack:
        scores = _Scores(count, stack.enter_context(_bar(world, count, progress)))
        watchers: list[Watcher] = [scores]
        if video is not None:
            missing = [task.episode for task in tasks if "pixels" not in task.columns]
            if missing:
                raise InputError(
                    f"{WHERE}: a video shows the dataset's pixels; it has no column 'pixels'"
                )
            beside = _Beside(tasks)
            watchers.append(stack.enter_context(_Films(Path(video), "env", beside)))
        roll(
            world.envs, world.act, turns, watchers, budget=budget, prepared=prepared, overlay=goals
        )
    return scores.result([turn.seed for turn in turns] if seed is not None else None)


# -- scores ---------------------------------------------------------------------------------------


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
        row = self._newest.pop(turn.number)
        success = row.get("is_success")
        won = turn.terminated if success is None else bool(np.all(success))
        self.successes[turn.number] = won
        self.returns[turn.number] = turn.total
        self.lengths[turn.number] = turn.length
        self._bar.update()

    def result(self, seeds: list[Any] | None) -> dict[str, Any]:
        return {
            "success_rate": float(100 * self.successes.mean()) if len(self.successes) else 0.0,
            "episode_successes": self.successes,
            "episode_returns": self.returns,
            "episode_lengths": self.lengths,
            "seeds": seeds,
        }


@contextlib.contextmanager
def _bar(world: World, count: int, progress: bool) -> Any:
    from tqdm import tqdm

    with tqdm(
        total=count,
        desc=f"evaluate {world.env_name}",
        unit="ep",
        delay=_BAR_AFTER_S,
        disable=not progress,
    ) as bar:
        yield bar


# -- tasks from a dataset -------------------------------------------------------------------------


@dataclass(slots=True)
class _Task:
    """A stretch of an episode: where an environment starts, and where it is to get."""

    episode: int
    columns: dict[str, Array]  # its rows, dense, images (H, W, C)
    start: dict[str, Any]  # the first row, and the episode's data
    goal: dict[str, Any]  # the last row


def _task(dataset: Any, number: int, start: int, offset: int) -> _Task:
    lengths = dataset.lengths
    if not -len(lengths) <= number < len(lengths):
        raise InputError(
            f"{WHERE}: episodes_idx: {number} is out of range for {len(lengths)} episodes"
        )
    length = int(lengths[number])
    if not 0 <= start < length:
        raise InputError(
            f"{WHERE}: start_steps: step {start} is out of range for episode {number} of {length} steps"
        )
    if start + offset >= length:
        raise InputError(
            f"{WHERE}: goal_offset={offset} from step {start} is beyond episode {number} of {length} steps; "
            f"at most {length - 1 - start} is possible there"
        )
    # A chunk is a multiple of frameskip steps long: take some more before, or after.
    skip = int(getattr(dataset, "frameskip", 1))
    count = -(-(offset + 1) // skip) * skip
    first = max(0, min(start, length - count))
    if first + count > length:
        raise InputError(
            f"{WHERE}: episode {number} of {length} steps has no chunk of {count} steps (a multiple of the dataset's "
            f"frameskip={skip}) around steps {start} to {start + offset}; open the dataset with frameskip=1"
        )
    chunk = stored_layout(dataset.load_chunk([number], [first], [first + count])[0])
    dense = {name: np.asarray(v) for name, v in chunk.items() if name != "action"}
    at = start - first
    columns = {name: v[at : at + offset + 1] for name, v in dense.items() if len(v) == count}
    data = {name: v[0] for name, v in dataset.get_episode_data(number).items() if v[0] is not None}
    return _Task(
        number,
        columns,
        {**data, **{name: values[0] for name, values in columns.items()}},
        {**data, **{name: values[-1] for name, values in columns.items()}},
    )


def _goal_of(world: World, task: _Task) -> Row:
    """Return what is laid over the infos: `goal`, the goal's pixels, and `goal_<column>`."""
    row: Row = {}
    for name in task.columns:
        if name == "pixels":
            picture = np.asarray(task.goal[name])
            if is_picture(picture) and world.image_shape is not None:
                picture = resized(picture, world.image_shape, resample_of(world.image_resample))
            transform = world.goal_transform
            row["goal"] = picture if transform is None else np.asarray(transform(picture))
        else:
            row[f"goal_{name}"] = np.asarray(task.goal[name])
    return row


def _calls(callables: Sequence[Mapping[str, Any]], task: _Task) -> list[dict[str, Any]]:
    """Return the arguments of each call for one environment."""
    there = {**{f"goal_{name}": value for name, value in task.goal.items()}, **task.start}
    if "pixels" in task.goal:
        there.setdefault("goal", task.goal["pixels"])
    made = []
    for spec in callables:
        if not isinstance(spec, Mapping) or "method" not in spec:
            raise InputError(
                f"{WHERE}: callables: expected {{'method': name, 'args': {{...}}}}, got {spec!r}"
            )
        arguments = {}
        for name, given in spec.get("args", {}).items():
            if not isinstance(given, Mapping) or "value" not in given:
                raise InputError(
                    f"{WHERE}: callables: {spec['method']}: argument {name!r} must be "
                    f"{{'value': ..., 'in_dataset': bool}}, got {given!r}"
                )
            value = given["value"]
            if given.get("in_dataset", False):
                if value not in there:
                    raise InputError(
                        f"{WHERE}: callables: {spec['method']}: the dataset has no {value!r}; there are {sorted(there)}"
                    )
                value = copy.deepcopy(there[value])
            arguments[name] = value
        made.append(arguments)
    return made


_LIFTED = {"action", "reward", "terminated", "truncated", "step_idx", "id", "goal", "pixels"}


def _says(task: _Task, name: str, row: Row) -> bool:
    """Tell whether the dataset says what an info is at the start of a task."""
    here, there = row[name], task.columns.get(name)
    return (
        name not in _LIFTED
        and isinstance(here, np.ndarray)
        and there is not None
        and here.shape == there.shape[1:]
        and here.dtype == there.dtype
    )


# -- films ----------------------------------------------------------------------------------------


class _Films:
    """A watcher that films each turn into a file of its own."""

    def __init__(self, folder: Path, stem: str, picture: Callable[[Turn, Row], Array]) -> None:
        self._folder, self._stem, self._picture = folder, stem, picture
        self._open: dict[int, VideoFile] = {}

    def __enter__(self) -> _Films:
        return self

    def __exit__(self, *_: object) -> None:
        for film in self._open.values():
            film.close()

    def began(self, turn: Turn, row: Row) -> None:
        picture = self._picture(turn, row)  # before a file is made: there may be none
        path = Path(os.path.abspath(self._folder)) / f"{self._stem}_{turn.number}.mp4"
        film = self._open[turn.number] = VideoFile(path)
        film.add(picture)

    def stepped(self, turn: Turn, row: Row) -> None:
        self._open[turn.number].add(self._picture(turn, row))

    def ended(self, turn: Turn, data: dict[str, Any] | None) -> None:
        self._open.pop(turn.number).close()


def _alone(turn: Turn, row: Row) -> Array:
    return frame_of(row)


class _Beside:
    """Three panels: what the agent does, what the dataset did at that step, and the goal."""

    def __init__(self, tasks: Sequence[_Task]) -> None:
        self._tasks = tasks

    def __call__(self, turn: Turn, row: Row) -> Array:
        frame = frame_of(row)
        frames = self._tasks[turn.number].columns["pixels"]
        shown = frames[min(turn.length, len(frames) - 1)], frames[-1]
        shape = (frame.shape[0], frame.shape[1])
        panels = [frame, *(resized(as_frame(f), shape, resample_of(None)) for f in shown)]
        line = np.full((shape[0], 1, 3), 255, np.uint8)
        return np.concatenate([panels[0], line, panels[1], line, panels[2]], axis=1)
