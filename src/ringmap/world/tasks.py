"""Tasks from a dataset: where each environment starts, and its goal.

    episode   . . . [start ......... start + offset] . .
                     first row: init    last row: goal

    init, goal ─► reset options, callables        goal ─► overlaid on the infos

Images are as they are stored, (H, W, C), whatever order the dataset returns.
Not here: running them (rollout.py), scoring (evaluating.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.arguments import whole
from ringmap.datasets.episode import stored_layout
from ringmap.errors import InputError
from ringmap.formats.media.images import is_frame, resample_of, resized
from ringmap.world.infos import Row
from ringmap.world.pool import options_of
from ringmap.world.rollout import Stage, Turn

__all__ = ["Task", "Tasks", "checked_mode"]

Array = np.ndarray[Any, np.dtype[Any]]

WHERE = "World.evaluate"
_MODES = ("auto", "wait")
_LIFTED = {"action", "reward", "terminated", "truncated", "step_idx", "id", "goal", "pixels"}


def checked_mode(reset_mode: str | None, default: str) -> str:
    """Return the reset mode."""
    mode = default if reset_mode is None else reset_mode
    if mode not in _MODES:
        raise InputError(f"{WHERE}: reset_mode must be one of {_MODES}, got {reset_mode!r}")
    return mode


class Tasks:
    """One task for each environment of a world; the arguments are those of `World.evaluate`."""

    def __init__(
        self,
        world: Stage,
        dataset: Any,
        episodes_idx: Any,
        start_steps: Any,
        goal_offset: Any,
        eval_budget: Any,
        reset_mode: str | None,
        callables: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        if checked_mode(reset_mode, "wait") != "wait":
            raise InputError(
                f"{WHERE}: a run from a dataset has one task for each environment: reset_mode must be 'wait'"
            )
        needs = {"episodes_idx": episodes_idx, "start_steps": start_steps, "goal_offset": goal_offset}
        for name, value in needs.items():
            if value is None:
                raise InputError(f"{WHERE}: a run from a dataset needs {name}")
        numbers = [whole(WHERE, "each of episodes_idx", i) for i in episodes_idx]
        starts = [whole(WHERE, "each of start_steps", i) for i in start_steps]
        offset = whole(WHERE, "goal_offset", goal_offset)
        self.budget = None if eval_budget is None else whole(WHERE, "eval_budget", eval_budget)
        count = len(numbers)
        if count != world.num_envs:
            raise InputError(
                f"{WHERE}: {count} episodes_idx for {world.num_envs} environments; make a world with num_envs={count}"
            )
        if len(starts) != count:
            raise InputError(f"{WHERE}: {len(starts)} start_steps, expected {count}: one per episode")
        if offset < 1 or (self.budget is not None and self.budget < 1):
            raise InputError(
                f"{WHERE}: goal_offset and eval_budget must be positive, got {goal_offset} and {eval_budget}"
            )
        world.check_ready(WHERE)
        self._world, self._callables = world, callables or ()
        self.each = [task_of(dataset, number, start, offset) for number, start in zip(numbers, starts, strict=True)]
        self.goals = {env: self._goal_of(task) for env, task in enumerate(self.each)}
        self._calls = [calls_of(self._callables, task) for task in self.each]

    def turns(self, seed: int | None, options: Any) -> list[Turn]:
        """Return a turn for each, whose reset options start it."""
        world, count = self._world, len(self.each)
        shared = options_of(options, count, WHERE)
        each = [dict((shared[i] if isinstance(shared, list) else shared) or {}) for i in range(count)]
        if world.envs.has_reset_options:
            asked = [{"init": task.start, "goal": task.goal} for task in self.each]
            hooks = world.envs.call("reset_options_from_dataset", asked)
            each = [{**own, **hook} for own, hook in zip(each, hooks, strict=True)]
        elif not self._callables:
            raise InputError(
                f"{WHERE}: {world.env_name} has no reset_options_from_dataset(init, goal), so it can't be put "
                "where an episode was; give it one, or pass callables="
            )
        return [Turn(k, None if seed is None else seed + k, each[k]) for k in range(count)]

    def prepared(self, mask: Array) -> None:
        """Make the calls after a reset; what the dataset says of the start then holds."""
        if not self._callables:
            return
        envs = self._world.envs
        for k, spec in enumerate(self._callables):
            envs.call(spec["method"], [calls[k] for calls in self._calls])
        known = [
            {name: task.start[name] for name, here in row.items() if _says(task, name, here)}
            for task, row in zip(self.each, envs.rows, strict=True)
        ]
        envs.render_again(mask, known)

    def _goal_of(self, task: Task) -> Row:
        """Return the overlay on the infos: `goal`, the goal's pixels, and `goal_<column>`."""
        world, row = self._world, Row()
        for name in task.columns:
            value = np.asarray(task.goal[name])
            if name != "pixels":
                row[f"goal_{name}"] = value
                continue
            if is_frame(value) and world.image_shape is not None:
                value = resized(value, world.image_shape, resample_of(world.image_resample))
            row["goal"] = value if world.goal_transform is None else np.asarray(world.goal_transform(value))
        return row


@dataclass(slots=True)
class Task:
    """A stretch of an episode: where an environment starts, and where it is to get."""

    episode: int
    columns: dict[str, Array]  # its rows, dense, images (H, W, C)
    start: dict[str, Any]  # the first row, and the episode's data
    goal: dict[str, Any]  # the last row


def task_of(dataset: Any, number: int, start: int, offset: int) -> Task:
    """Read a task: steps `start` to `start + offset` of episode `number`, and its data."""
    lengths = dataset.lengths
    if not -len(lengths) <= number < len(lengths):
        raise InputError(f"{WHERE}: episodes_idx: {number} is out of range for {len(lengths)} episodes")
    length = int(lengths[number])
    if not 0 <= start < length:
        raise InputError(f"{WHERE}: start_steps: step {start} is out of range for episode {number} of {length} steps")
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
    return Task(
        number,
        columns,
        {**data, **{name: values[0] for name, values in columns.items()}},
        {**data, **{name: values[-1] for name, values in columns.items()}},
    )


def calls_of(callables: Sequence[Mapping[str, Any]], task: Task) -> list[dict[str, Any]]:
    """Return the arguments of each call for one environment."""
    there = {**{f"goal_{name}": value for name, value in task.goal.items()}, **task.start}
    if "pixels" in task.goal:
        there.setdefault("goal", task.goal["pixels"])
    made = []
    for spec in callables:
        if not isinstance(spec, Mapping) or "method" not in spec:
            raise InputError(f"{WHERE}: callables: expected {{'method': name, 'args': {{...}}}}, got {spec!r}")
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


def _says(task: Task, name: str, here: Any) -> bool:
    """Return whether the dataset says what an info is at the start of a task."""
    there = task.columns.get(name)
    return (
        name not in _LIFTED
        and isinstance(here, np.ndarray)
        and there is not None
        and here.shape == there.shape[1:]
        and here.dtype == there.dtype
    )
