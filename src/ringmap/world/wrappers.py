"""The wrapper of an environment whose info contains everything, at every reset and step.

    env ─► does the observation fit its space? ─► observation, action, reward, ... ─► pixels ─► goal's picture

An info at time t holds what is seen at t, and the action, reward and flags that led there:
at a reset there is no such action, so `action` and `reward` are NaN (integers: 0).
Not here: stacking (infos.py), the order in which rows are stored (episodes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ringmap.arguments import integer
from ringmap.errors import InputError, RolloutError
from ringmap.formats.media.images import is_frame, resample_of, resized
from ringmap.storage.columns.values import as_array
from ringmap.world.actions import blank_action
from ringmap.world.infos import as_scalar

__all__ = ["MegaWrapper", "parts_of", "shape_of"]

Info = dict[str, Any]
ImageTransform = Callable[[Any], Any]

OWN_NAMES = frozenset({"action", "reward", "terminated", "truncated", "step_idx", "id", "render_time"})
"""What an info has of ours, beside the parts of an action."""


class MegaWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks each observation, and puts everything into the info; renders, and resizes pictures.

    The info gets the `observation` (a dict's keys by name), `action`, `reward`, `terminated`, `truncated`, `step_idx`,
    and `id`, a random int64 per episode, which the seeds of the resets decide. The environment's generator is left
    alone, so that an episode is the same as without this wrapper. With `image_shape` it gets `pixels`, what
    `render()` returns, uint8 (H, W, 3), resized (a dict of pictures as `pixels.<key>`; with a transform, the one before
    it as `_pixels`), and the picture `goal` is resized, too.

    These names are ours: a part of the observation that has one of them is put there as `observation.<name>`, and an
    info that has one of them, or that of a part, as `info.<name>`. An observation without the shape or the dtype of its
    space is refused; its bounds are not checked, as many correct environments exceed theirs by a rounding error.

    Args:
        env: an environment.
        image_shape: (H, W) of pixels and goal; None adds no pixels and leaves the goal alone.
        image_transform: applied to the pixels.
        goal_transform: applied to the goal's picture.
        image_resample: PIL's filter, by name or constant; None: bilinear.
        separate_goal: treat `goal` as a goal, with `goal_transform`; otherwise as one more picture,
            with `image_transform`.
        add_pixels: render.

    Raises:
        InputError: `image_shape` is no (H, W), or there is no such filter.

    Source: stable-worldmodel, World guide ("MegaWrapper").

    Example:
        >>> from ringmap.world.envs.two_room import TwoRoom
        >>> env = MegaWrapper(TwoRoom(), image_shape=(32, 32))
        >>> _, info = env.reset(seed=0)
        >>> info["pixels"].shape, info["goal"].shape, info["reward"], info["action"]
        ((32, 32, 3), (32, 32, 3), np.float32(nan), array([nan, nan], dtype=float32))
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        image_shape: tuple[int, int] | None = None,
        image_transform: ImageTransform | None = None,
        goal_transform: ImageTransform | None = None,
        image_resample: str | int | None = None,
        separate_goal: bool = True,
        add_pixels: bool = True,
    ) -> None:
        super().__init__(env)
        self._shape = None if image_shape is None else shape_of(image_shape, "MegaWrapper: image_shape")
        self._resample, self._transform = resample_of(image_resample), image_transform
        self._goal_transform = goal_transform if separate_goal else image_transform
        self._draws = add_pixels and image_shape is not None
        self._blank = parts_of("action", blank_action(env.action_space), env.action_space)
        self._ours = OWN_NAMES.union(self._blank)
        self._names: dict[Any, Any] = {}
        """Info, under its own name, to the name that it is put under."""
        self._ids = np.random.default_rng()

    def reset(self, **options: Any) -> tuple[Any, Info]:
        """Reset, and fill the info."""
        observation, info = self.env.reset(**options)
        misfit(observation, self.env.observation_space, "observation")
        self._step = 0
        if options.get("seed") is not None:
            self._ids = np.random.default_rng(options["seed"])
        self._id = np.int64(self._ids.integers(0, np.iinfo(np.int64).max))
        return observation, self._filled(observation, info, self._blank, np.float32(np.nan), False, False)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Step, and fill the info."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        misfit(observation, self.env.observation_space, "observation")
        self._step += 1
        taken = parts_of("action", action, self.env.action_space)
        number = as_scalar("reward", reward, np.float32)
        terminated = bool(as_scalar("terminated", terminated, np.bool_))
        truncated = bool(as_scalar("truncated", truncated, np.bool_))
        info = self._filled(observation, info, taken, number, terminated, truncated)
        return observation, reward, terminated, truncated, info

    def _filled(
        self, observation: Any, info: Mapping[str, Any], action: Info, reward: Any, terminated: bool, truncated: bool
    ) -> Info:
        ours = {
            **action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "step_idx": np.int64(self._step),
            "id": self._id,
        }
        parts = parts_of("observation", observation, self.env.observation_space, prefix=False)
        if not self._ours.isdisjoint(parts) or (self._draws and any(map(_is_drawn, parts))):
            renamed = {self._name_of_part(name): part for name, part in parts.items()}
            if len(renamed) < len(parts):
                raise RolloutError(f"two parts of the observation would have one name: {list(renamed)}; rename one")
            parts = renamed
        names = self._names
        for name in info:
            if name not in names:
                names[name] = f"info.{name}" if self._is_ours(name) else name
        theirs = {f"info.{name}" if name in parts else names[name]: value for name, value in info.items()}
        filled = {**theirs, **parts, **ours}
        if len(filled) < len(info) + len(parts) + len(ours):
            raise RolloutError(
                f"two values would have one name in the info: the info has {list(info)}, the observation "
                f"{list(parts)}, and ours are {list(ours)}; rename one in the environment, or by a wrapper "
                "(pre_wrappers=)"
            )
        if self._draws:
            filled |= self.shown_again()
        if self._shape is not None and is_frame(filled.get("goal")):
            goal = resized(np.asarray(filled["goal"]), self._shape, self._resample)
            filled["goal"] = goal if self._goal_transform is None else self._goal_transform(goal)
        return filled

    def _is_ours(self, name: Any) -> bool:
        return name in self._ours or (self._draws and isinstance(name, str) and _is_drawn(name))

    def _name_of_part(self, name: str) -> str:
        return f"observation.{name}" if self._is_ours(name) else name

    @property
    def observation_names(self) -> frozenset[str]:
        """The names that the parts of the observation are put under."""
        blank = blank_action(self.env.observation_space)
        parts = parts_of("observation", blank, self.env.observation_space, prefix=False)
        return frozenset(map(self._name_of_part, parts))

    def shown_again(self) -> Info:
        """Return the pictures of what the environment shows now, without a step."""
        if not self._draws:
            return {}
        start = time.perf_counter()
        shown = self.env.render()
        made: Info = {"render_time": time.perf_counter() - start}
        frames: Mapping[Any, Any] = shown if isinstance(shown, Mapping) else {None: shown}
        for key, frame in frames.items():
            name = "pixels" if key is None else f"pixels.{key}"
            if not is_frame(frame):
                got = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
                raise RolloutError(
                    f"{name}: render() with render_mode={self.env.render_mode!r} gave {got}, expected a uint8 "
                    "array (H, W, 3); make the world with a render_mode that draws, or with add_pixels=False"
                )
            assert self._shape is not None
            picture = resized(frame, self._shape, self._resample)
            if self._transform is not None:
                made[f"_{name}"] = picture
                picture = self._transform(picture)
            made[name] = picture
        return made

    def info_nbytes(self) -> int:
        """Return about how many bytes the large arrays of an info take."""
        height, width = self._shape or (0, 0)
        space = self.env.observation_space
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else (space,)
        observed = sum(
            int(np.prod(p.shape, dtype=np.int64)) * p.dtype.itemsize
            for p in parts
            if p.shape is not None and p.dtype is not None
        )
        return 3 * height * width * 3 + observed  # pixels, the same untransformed, goal


def _is_drawn(name: str) -> bool:
    """Tell whether a picture that is rendered may have this name."""
    return name.removeprefix("_").partition(".")[0] == "pixels"


def misfit(value: Any, space: Any, what: str) -> None:
    """Raise if a value does not have the structure, shape or dtype of its space."""
    if isinstance(space, spaces.Dict):
        names = set(value) if isinstance(value, Mapping) else None
        if names != set(space.spaces):
            got = type(value).__name__ if names is None else sorted(names)
            raise RolloutError(
                f"the {what} contradicts its space: expected a dict of {sorted(space.spaces)}, got {got}"
            )
        for name, part in space.spaces.items():
            misfit(value[name], part, f"{what} {name!r}")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
            raise RolloutError(f"the {what} contradicts its space: expected a tuple, {space}")
        for i, part in enumerate(space.spaces):
            misfit(value[i], part, f"{what} [{i}]")
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        array = np.asarray(value)
        if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise RolloutError(
                f"the {what} contradicts its space: expected {space.dtype} {space.shape}, got "
                f"{array.dtype} {array.shape}; mend the environment or its observation_space"
            )


def parts_of(name: str, value: Any, space: Any, prefix: bool = True) -> Info:
    """Return a value under its name, and the parts of a Dict or Tuple space under theirs; lists become arrays where the
    space has a dtype. Names of a Dict's parts begin with that of the whole, with `prefix`.
    """
    if isinstance(value, np.ndarray):
        return {name: value}
    parts: Iterable[tuple[str, Any, Any]]
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        parts = ((str(key), part, space.spaces.get(key)) for key, part in value.items())
    elif isinstance(space, spaces.Tuple) and isinstance(value, tuple | list):
        parts = ((str(i), part, space.spaces[i]) for i, part in enumerate(value))
        prefix = True
    else:
        is_list = isinstance(value, list | tuple) and getattr(space, "dtype", None) is not None
        return {name: as_array(value, name, "item") if is_list else value}
    made: Info = {}
    for key, part, inner in parts:
        found = parts_of(f"{name}.{key}" if prefix else key, part, inner)
        if not made.keys().isdisjoint(found):
            raise RolloutError(
                f"two parts of the {name} would have one name: {sorted(made.keys() & found)}; rename one in the "
                "environment, or by a wrapper (pre_wrappers=)"
            )
        made |= found
    return made


def shape_of(given: Any, what: str) -> tuple[int, int]:
    """Return (H, W)."""
    try:
        height, width = map(integer, given)
    except (TypeError, ValueError):
        height = width = None
    if not height or not width or height < 1 or width < 1:
        raise InputError(f"{what} must be (H, W), two positive integers, got {given!r}")
    return height, width
