"""Tasks from a dataset: where an environment starts, and its goal.

    episode   . . . [start ......... start + offset] . .
                     first row: init    last row: goal

Images are as they are stored, (H, W, C), whatever order the dataset returns.
Not here: running them (evaluating.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.datasets.image_axes import stored_layout
from ringmap.errors import InputError
from ringmap.formats.media.images import is_frame, resample_of, resized
from ringmap.world.infos import Row
from ringmap.world.rollout import Stage

__all__ = ["Task", "calls_of", "goal_of", "says", "task_of"]

Array = np.ndarray[Any, np.dtype[Any]]

WHERE = "World.evaluate"


@dataclass(slots=True)
class Task:
    """A stretch of an episode: where an environment starts, and where it is to get."""

    episode: int
    columns: dict[str, Array]  # its rows, dense, images (H, W, C)
    start: dict[str, Any]  # the first row, and the episode's data
    goal: dict[str, Any]  # the last row


def task_of(dataset: Any, number: int, start: int, offset: int) -> Task:
    """Read a task: steps `start` to `start + offset` of episode `number`, and its data.

    Raises:
        InputError: there is no such episode or step, or the goal lies beyond the episode.
    """
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


def goal_of(world: Stage, task: Task) -> Row:
    """Return the overlay on the infos: `goal`, the goal's pixels, and `goal_<column>`."""
    row: Row = {}
    for name in task.columns:
        if name == "pixels":
            picture = np.asarray(task.goal[name])
            if is_frame(picture) and world.image_shape is not None:
                picture = resized(picture, world.image_shape, resample_of(world.image_resample))
            transform = world.goal_transform
            row["goal"] = picture if transform is None else np.asarray(transform(picture))
        else:
            row[f"goal_{name}"] = np.asarray(task.goal[name])
    return row


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


_LIFTED = {"action", "reward", "terminated", "truncated", "step_idx", "id", "goal", "pixels"}


def says(task: Task, name: str, row: Row) -> bool:
    """Return whether the dataset says what an info is at the start of a task."""
    here, there = row[name], task.columns.get(name)
    return (
        name not in _LIFTED
        and isinstance(here, np.ndarray)
        and there is not None
        and here.shape == there.shape[1:]
        and here.dtype == there.dtype
    )
