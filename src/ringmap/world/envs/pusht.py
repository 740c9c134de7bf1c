"""PushT: a T-shaped block is pushed onto its outline; the physics are those of the gym-pusht package.

What is added: the observation by name (`state`), pictures of a usable size, colors that vary,
and a start and a goal that can be set exactly, so that a run can begin in a dataset.

Not here: the physics (gym_pusht).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.extras import require

__all__ = ["make_push_t"]

Array = np.ndarray[Any, np.dtype[Any]]

COLORS = {"agent.color": (65, 105, 225), "block.color": (119, 136, 153)}
"""Those of gym-pusht."""


def make_push_t(size: int = 224, **options: Any) -> Any:
    """Return the environment.

    Args:
        size: of the picture that it draws, in pixels.
        options: as gym-pusht takes them.

    Reset options: `state` (agent x, y, block x, y, angle) and `goal_pose` (block x, y, angle), each taken
    exactly; `variation`, `variation_values` (see `variation_space`); and those of gym-pusht.

    Raises:
        MissingExtraError: gym-pusht is not installed.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a screen
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    require("pusht", "swm/PushT-v1")
    from gym_pusht.envs import PushTEnv
    from gymnasium import spaces

    class PushT(PushTEnv):  # type: ignore[misc]
        """gym-pusht's environment with `state`, variations, and exact starts and goals."""

        def __init__(self) -> None:
            super().__init__(obs_type="state", visualization_width=size, visualization_height=size, **options)
            plain: Any = vars(self)["observation_space"]
            self.observation_space: Any = spaces.Dict({"state": plain})
            color = spaces.Box(0, 255, (3,), np.uint8)
            self.variation_space = spaces.Dict(
                {
                    "agent": spaces.Dict({"color": color}),
                    "block": spaces.Dict({"color": color}),
                }
            )
            self.variation: dict[str, Array] = {}

        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
            """Reset, then put what `options` name where they say."""
            options = options or {}
            # The marker of the action before would else be in the first picture of an episode.
            self._last_action = None
            observation, info = super().reset(seed=seed, options=options)
            self._vary(options)
            if "goal_pose" in options:
                self.goal_pose = np.asarray(options["goal_pose"], np.float64)
            if "state" in options:
                state = np.asarray(options["state"], np.float64)
                self.agent.position = tuple(state[:2].tolist())
                self.agent.velocity = (0, 0)
                self.block.angle = float(state[4])  # before the position, which it moves
                self.block.position = tuple(state[2:4].tolist())
                self.block.velocity, self.block.angular_velocity = (0, 0), 0.0
                for body in (self.agent, self.block):
                    self.space.reindex_shapes_for_body(body)
                observation, info = self.get_obs(), {**self._get_info(), "is_success": False}
            info["coverage"] = float(self._get_coverage())
            return observation, info

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            """Step, with plain flags."""
            observation, reward, terminated, truncated, info = super().step(action)
            info["is_success"] = bool(info["is_success"])
            return observation, float(reward), bool(terminated), truncated, info

        def get_obs(self) -> dict[str, Array]:
            """Return agent x, y, block x, y and angle, as `state`."""
            return {"state": super().get_obs()}

        def get_episode_data(self) -> dict[str, Any]:
            """Return what is constant within the episode: the variation."""
            return {name: value.copy() for name, value in self.variation.items()}

        def reset_options_from_dataset(self, init: Mapping[str, Any], goal: Mapping[str, Any]) -> dict[str, Any]:
            """Return reset options that start where an episode was; the block's pose there is the goal."""
            known = {name: init[name] for name in COLORS if name in init}
            state = np.asarray(goal["state"])
            return {"state": init["state"], "goal_pose": state[2:], "variation_values": known}

        def _vary(self, options: Mapping[str, Any]) -> None:
            names = options.get("variation", ())
            names = [names] if isinstance(names, str) else list(names)
            if "all" in names:
                names = list(COLORS)
            values = options.get("variation_values") or {}
            for name in [*names, *values]:
                if name not in COLORS:
                    raise InputError(f"PushT.reset: no variation {name!r}; there are {list(COLORS)}")
            self.variation = {name: np.array(c, np.uint8) for name, c in COLORS.items()}
            for name in names:
                self.variation[name] = self.np_random.integers(0, 256, 3, np.uint8)
            for name, value in values.items():
                self.variation[name] = np.asarray(value).astype(np.uint8).reshape(3)
            for body, name in ((self.agent, "agent.color"), (self.block, "block.color")):
                for shape in body.shapes:
                    shape.color = (*self.variation[name].tolist(), 255)

    return PushT()
