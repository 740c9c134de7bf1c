"""Keys: the columns that a buffer may request, and whether an environment can provide them.

    obs, next_obs, action     one column, or one per leaf of a Dict or Tuple space: obs/camera/left, action/0
    reward, terminated, truncated, done, env_index, episode_id, t, is_first, is_last
    context, context/<key>    what `context_fn` returned at the reset
    info/<name>               a value of the info; of a dict in it: info/<name>/<key>

Invariants: a checked column can be filled at every row, except with values that its dtype does not hold.
Not here: the rows (open_episodes.py), the buffers (adapters.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from ringmap.errors import InputError
from ringmap.storage.columns.schema import TEXT, ColumnSpec

__all__ = ["COUNTS", "FLAGS", "Keys", "Leaf", "bounds_of", "leaves_of", "nested"]

Array = np.ndarray[Any, np.dtype[Any]]

FLAGS = ("terminated", "truncated", "done", "is_first", "is_last")
COUNTS = ("env_index", "episode_id", "t")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a nested observation or action: its column, and where it lies in the whole."""

    name: str
    path: tuple[Any, ...]
    space: Any
    shape: tuple[int, ...]
    """Of one value."""
    dtype: np.dtype[Any]
    """As the space says."""

    def of(self, whole: Any) -> Any:
        """Return this leaf of a value, or of a batch of values."""
        for key in self.path:
            whole = whole[key]
        return whole


def leaves_of(name: str, space: Any, where: str) -> list[Leaf]:
    """Return the leaves of a space."""
    found: list[Leaf] = []

    def walk(name: str, path: tuple[Any, ...], part: Any) -> None:
        if isinstance(part, spaces.Dict):
            for key, inner in part.spaces.items():
                walk(f"{name}/{key}", (*path, key), inner)
        elif isinstance(part, spaces.Tuple):
            for i, inner in enumerate(part.spaces):
                walk(f"{name}/{i}", (*path, i), inner)
        elif isinstance(part, spaces.Text):
            found.append(Leaf(name, path, part, (), TEXT))
        elif getattr(part, "shape", None) is None or getattr(part, "dtype", None) is None:
            raise InputError(
                f"{where}: {name!r} is of {part}, which has no fixed shape and dtype; wrap the environment so that "
                "it has (gymnasium.spaces.utils.flatten_space), or record by World.collect"
            )
        else:
            found.append(Leaf(name, path, part, tuple(part.shape), np.dtype(part.dtype)))

    walk(name, (), space)
    names = [leaf.name for leaf in found]
    if len(set(names)) < len(names):
        raise InputError(f"{where}: two parts of {space} would have one column: {names}")
    return found


def nested(leaves: Iterable[Leaf], space: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return the whole of which these are the leaves: dicts and tuples as the space has them."""
    by_path = {leaf.path: values[prefix + leaf.name] for leaf in leaves}

    def build(part: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(part, spaces.Dict):
            return {key: build(inner, (*path, key)) for key, inner in part.spaces.items()}
        if isinstance(part, spaces.Tuple):
            return tuple(build(inner, (*path, i)) for i, inner in enumerate(part.spaces))
        return by_path[path]

    return build(space, ())


def bounds_of(space: Any) -> tuple[int, int] | None:
    """Return the least and the greatest value of a space of integers; None where it does not say."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.start.min()), int((space.start + space.nvec).max() - 1)
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    if isinstance(space, spaces.Box) and space.dtype is not None and space.dtype.kind in "iu":
        low, high = int(space.low.min()), int(space.high.max())
        whole = np.iinfo(space.dtype)
        if space.dtype.itemsize > 2 and (low, high) == (whole.min, whole.max):
            return None  # unbounded: these numbers are not real bounds
        return low, high
    return None


class Keys:
    """What one environment can fill; the spaces are of one environment."""

    def __init__(self, observation_space: Any, action_space: Any, has_context: bool, where: str) -> None:
        self.where = where
        self.has_context = has_context
        self.observation_space, self.action_space = observation_space, action_space
        self.obs = leaves_of("obs", observation_space, where)
        self.action = leaves_of("action", action_space, where)
        self.known: dict[str, tuple[tuple[int, ...], np.dtype[Any], Any]] = {}
        for leaf in self.obs:
            self.known[leaf.name] = self.known[f"next_{leaf.name}"] = (
                leaf.shape,
                leaf.dtype,
                leaf.space,
            )
        for leaf in self.action:
            self.known[leaf.name] = leaf.shape, leaf.dtype, leaf.space
        self.known["reward"] = (), np.dtype(np.float64), None
        self.known |= {name: ((), np.dtype(np.bool_), None) for name in FLAGS}
        self.known |= {name: ((), np.dtype(np.int64), None) for name in COUNTS}

    def default(self) -> tuple[ColumnSpec, ...]:
        """Return the columns of a buffer without a schema: those that `World.collect` would give it."""
        leaves = [ColumnSpec(x.name, x.shape, x.dtype) for x in (*self.obs, *self.action)]
        flags = [ColumnSpec(name, (), np.dtype(np.bool_)) for name in ("terminated", "truncated")]
        return (*leaves, ColumnSpec("reward", (), np.dtype(np.float32)), *flags)

    def check(self, columns: Iterable[ColumnSpec], casting: str, whose: str) -> None:
        """Raise unless each of these columns can be filled."""
        for spec in columns:
            name = spec.name
            if name.startswith("info/"):
                continue
            if name.split("/")[0] == "context":
                if not self.has_context:
                    raise InputError(
                        f"{self.where}: {whose} asks for {name!r}, but Gymnasium has no contexts; pass "
                        "context_fn(info, options, seed)"
                    )
                continue
            if name not in self.known:
                raise InputError(
                    f"{self.where}: {whose} asks for {name!r}, which this environment does not have; known are "
                    f"{[*self.known]}, context, info/<name>; make a buffer with a schema of these, or pass a "
                    "transition_builder that makes its columns"
                )
            shape, dtype, space = self.known[name]
            if shape != spec.shape:
                raise InputError(
                    f"{self.where}: {whose} has {name!r} of shape {spec.shape}, but it comes in shape {shape}"
                )
            if not _holds(spec.dtype, dtype, bounds_of(space), casting):
                raise InputError(
                    f"{self.where}: {whose} has {name!r} of {spec.kind}, which can't hold what comes: {space or dtype}"
                )


def _holds(column: Any, source: Any, bounds: tuple[int, int] | None, casting: str) -> bool:
    """Return whether a column's dtype can hold the values of a source; single values are checked when they come."""
    if column.kind == "U":  # one that fixes a width refuses a longer text when it comes
        return bool(source.kind == "U")
    if column.kind not in "biufc":
        return False
    if casting == "unsafe" or source.kind == "b" or column.kind in "fc":
        return source.kind != "c" or column.kind == "c" or casting == "unsafe"
    if source.kind not in "iu":
        return False
    if bounds is None:
        return column.kind in "iu"
    low, high = bounds
    if column.kind == "b":
        return low >= 0 and high <= 1
    return low >= int(np.iinfo(column).min) and high <= int(np.iinfo(column).max)
