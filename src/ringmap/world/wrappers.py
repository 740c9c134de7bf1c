"""The wrappers: an environment whose info contains everything, at every reset and step.

    env ─► CheckObservation ─► LiftToInfo ─► AddPixels ─► ResizeGoal      (MegaWrapper: all four)
           does it fit its     observation,  render,      goal picture
           space?              reward, ...   resize

An info at time t holds what is seen at t, and the action, reward and flags that led there:
at a reset there is no such action, so `action` and `reward` are NaN (integers: 0).
Not here: stacking (infos.py), the order in which rows are stored (episodes.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ringmap.errors import RolloutError
from ringmap.formats.media.images import is_picture, resample_of, resized
from ringmap.world.actions import blank_action

__all__ = [
    "AddPixels",
    "CheckObservation",
    "LiftToInfo",
    "MegaWrapper",
    "ResizeGoal",
    "named",
]

Array = np.ndarray[Any, np.dtype[Any]]
Info = dict[str, Any]
ImageTransform = Callable[[Any], Any]


class CheckObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Refuses an observation without the shape or the dtype of the observation space.

    Bounds are not checked: many correct environments exceed theirs by a rounding error.
    """

    def reset(self, **options: Any) -> tuple[Any, Info]:
        """Reset and check."""
        observation, info = self.env.reset(**options)
        misfit(observation, self.env.observation_space, "observation")
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Step and check."""
        observation, *rest, info = self.env.step(action)
        misfit(observation, self.env.observation_space, "observation")
        return observation, *rest, info


def misfit(value: Any, space: Any, what: str) -> None:
    """Raise if a value does not have the structure, shape or dtype of its space.

    Raises:
        RolloutError: it does not.
    """
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
    elif isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        array = np.asarray(value)
        if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise RolloutError(
                f"the {what} contradicts its space: expected {space.dtype} {space.shape}, got "
                f"{array.dtype} {array.shape}; mend the environment or its observation_space"
            )


class LiftToInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts everything into the info.

    `observation` (a dict's keys by name), `action`, `reward`, `terminated`, `truncated`, `step_idx`,
    and `id`, a random int64 per episode from the environment's own generator.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._blank = named("action", blank_action(env.action_space))

    def reset(self, **options: Any) -> tuple[Any, Info]:
        """Reset, and lift."""
        observation, info = self.env.reset(**options)
        self._step = 0
        # Drawn for real, not from a copy of the generator: where a reset draws nothing, a copy
        # would give each episode the same id.
        self._id = np.int64(self.env.unwrapped.np_random.integers(0, np.iinfo(np.int64).max))
        lifted = self._lifted(observation, info, self._blank, np.float32(np.nan), False, False)
        return observation, lifted

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Step, and lift."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._step += 1
        taken = named("action", action)
        lifted = self._lifted(
            observation, info, taken, np.float32(reward), bool(terminated), bool(truncated)
        )
        return observation, reward, terminated, truncated, lifted

    def _lifted(
        self, observation: Any, info: Mapping[str, Any], action: Info, reward: Any, terminated: bool,
        truncated: bool,
    ) -> Info:  # fmt: skip
        return {
            **info,
            **named("observation", observation, prefix=False),
            **action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "step_idx": np.int64(self._step),
            "id": self._id,
        }


def named(name: str, value: Any, prefix: bool = True) -> Info:
    """Return a value under its name, and a dict's or tuple's parts under theirs."""
    if isinstance(value, tuple):
        value = {str(i): part for i, part in enumerate(value)}
        prefix = True
    if not isinstance(value, Mapping):
        return {name: value}
    made: Info = {}
    for key, part in value.items():
        made |= named(f"{name}.{key}" if prefix else str(key), part)
    return made


class _Pictures(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Changes the info of each reset and step by what `_shown` makes of it, with pictures of one shape."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        shape: tuple[int, int],
        resample: int | None = None,
        transform: ImageTransform | None = None,
    ) -> None:
        super().__init__(env)
        self._shape, self._transform = shape, transform
        self._resample = resample_of(resample)

    def reset(self, **options: Any) -> tuple[Any, Info]:
        """Reset, and show."""
        observation, info = self.env.reset(**options)
        return observation, self._shown(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, Info]:
        """Step, and show."""
        observation, *rest, info = self.env.step(action)
        return observation, *rest, self._shown(info)

    def _shown(self, info: Info) -> Info:
        raise NotImplementedError(f"{type(self).__name__} must supply _shown")


class AddPixels(_Pictures):
    """Renders into the info: `pixels`, resized to (H, W); a dict of pictures as `pixels.<key>`.

    Args:
        env: one whose `render()` returns a uint8 array (H, W, 3), or a dict of such.
        shape: (H, W).
        resample: PIL's constant of a filter.
        transform: applied to each picture; the one before it is kept as `_pixels`.
    """

    def _shown(self, info: Info) -> Info:
        return {**info, **self.pictures()}

    def pictures(self) -> Info:
        """Return what the environment shows now."""
        start = time.perf_counter()
        shown = self.env.render()
        took = time.perf_counter() - start
        frames = shown if isinstance(shown, Mapping) else {None: shown}
        made: Info = {"render_time": took}
        frame: Any
        for key, frame in frames.items():
            name = "pixels" if key is None else f"pixels.{key}"
            if not is_picture(frame):
                got = (
                    f"{frame.dtype} {frame.shape}"
                    if isinstance(frame, np.ndarray)
                    else type(frame).__name__
                )
                raise RolloutError(
                    f"{name}: render() with render_mode={self.env.render_mode!r} gave {got}, expected a uint8 "
                    "array (H, W, 3); make the world with a render_mode that draws, or with add_pixels=False"
                )
            picture = resized(frame, self._shape, self._resample)
            if self._transform is not None:
                made[f"_{name}"] = picture
                picture = self._transform(picture)
            made[name] = picture
        return made


class ResizeGoal(_Pictures):
    """Resizes the picture `goal` of the info as the pixels are; any other goal is left alone.

    Args:
        env: an environment.
        shape: (H, W).
        resample: PIL's constant of a filter.
        transform: applied to the picture.
    """

    def _shown(self, info: Info) -> Info:
        goal = info.get("goal")
        if not is_picture(goal):
            return info
        picture = resized(np.asarray(goal), self._shape, self._resample)
        return {**info, "goal": picture if self._transform is None else self._transform(picture)}


class MegaWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """All of it: observations checked, everything lifted into the info, pixels and goal drawn.

    Args:
        env: an environment.
        image_shape: (H, W) of pixels and goal; None adds no pixels and leaves the goal alone.
        image_transform: applied to the pixels.
        goal_transform: applied to the goal's picture.
        image_resample: PIL's filter, by name or constant; None: bilinear.
        separate_goal: treat `goal` as a goal, with `goal_transform`; otherwise as one more picture,
            with `image_transform`.
        add_pixels: render.

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
        self._image_shape = image_shape
        self._pixels: AddPixels | None = None
        resample = resample_of(image_resample)
        env = LiftToInfo(CheckObservation(env))
        if image_shape is not None:
            if add_pixels:
                env = self._pixels = AddPixels(env, image_shape, resample, image_transform)
            transform = goal_transform if separate_goal else image_transform
            env = ResizeGoal(env, image_shape, resample, transform)
        super().__init__(env)

    def shown_again(self) -> Info:
        """Return the current info of the environment, without a step."""
        return {} if self._pixels is None else self._pixels.pictures()

    def info_nbytes(self) -> int:
        """Return about how many bytes the large arrays of an info take."""
        height, width = self._image_shape or (0, 0)
        space = self.env.observation_space
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else (space,)
        observed = sum(
            int(np.prod(p.shape, dtype=np.int64)) * p.dtype.itemsize
            for p in parts
            if p.shape is not None and p.dtype is not None
        )
        return 3 * height * width * 3 + observed  # pixels, the same untransformed, goal
