"""TwoRoom: a point in two rooms has to get through the door to its goal; drawn with NumPy.

    +-------+-------+      state   (x, y) in [0, 1], y downward
    |       |    x  |      action  (dx, dy) in [-1, 1], times SPEED
    |  o       <-   |      o agent, x goal; a picture of the agent at its goal is the goal
    |       |       |
    +-------+-------+

Invariants: a reset's seed and options, and the actions, decide everything, to the last bit.
Not here: sizes of pixels beyond its own (wrappers.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ringmap.errors import InputError

__all__ = ["TwoRoom"]

Array = np.ndarray[Any, np.dtype[Any]]

SPEED = 0.05
RADIUS = 0.045
WALL = 0.5
THICK = 0.02
DOOR = 0.1
"""Half the height of the door."""
NEAR = 0.05

_DEFAULTS: dict[str, Any] = {
    "agent.color": np.array([214, 39, 40], np.uint8),
    "floor.color": np.array([240, 240, 235], np.uint8),
    "wall.color": np.array([40, 50, 70], np.uint8),
    "door.position": np.array([0.5], np.float32),
}


class TwoRoom(gymnasium.Env[dict[str, Array], Array]):
    """A small goal-conditioned environment with pixels.

    Args:
        render_mode: "rgb_array" draws, None does not.
        size: of the picture, in pixels.

    Reset options: `state`, `goal_state` (each `(x, y)`); `variation`, names of what is drawn at random
    ("all" for all of it), and `variation_values`, name -> value. Names: see `variation_space`.

    The reward is minus the distance to the goal; an episode ends with success within 0.05 of it.

    Example:
        >>> env = TwoRoom()
        >>> observation, info = env.reset(seed=0)
        >>> for t in range(100):
        ...     observation, reward, terminated, truncated, info = env.step(env.expert_action())
        ...     if terminated:
        ...         break
        >>> info["is_success"], info["goal"].shape
        (True, (64, 64, 3))
    """

    metadata = {  # noqa: RUF012 - as Gymnasium declares it
        "render_modes": ["rgb_array"],
        "render_fps": 15,
    }

    def __init__(self, render_mode: str | None = "rgb_array", size: int = 64) -> None:
        if render_mode not in (None, "rgb_array"):
            raise InputError(f"TwoRoom: render_mode must be 'rgb_array' or None, got {render_mode!r}")
        self.render_mode = render_mode
        self.size = size
        place = spaces.Box(0, 1, (2,), np.float32)
        self.observation_space: Any = spaces.Dict({"state": place, "goal_state": place})
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        color = spaces.Box(0, 255, (3,), np.uint8)
        self.variation_space = spaces.Dict(
            {
                "agent": spaces.Dict({"color": color}),
                "floor": spaces.Dict({"color": color}),
                "wall": spaces.Dict({"color": color}),
                "door": spaces.Dict({"position": spaces.Box(0.2, 0.8, (1,), np.float32)}),
            }
        )
        self.variation = dict(_DEFAULTS)
        self.state = self.goal_state = np.zeros(2, np.float32)
        grid = (np.arange(size, dtype=np.float32) + 0.5) / size
        self._x, self._y = np.meshgrid(grid, grid)

    # -- Gymnasium ---------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Put agent and goal into different rooms, or where `options` say."""
        super().reset(seed=seed)
        options = options or {}
        self._vary(options.get("variation", ()), options.get("variation_values") or {})
        side = int(self.np_random.integers(2))
        places = self.np_random.uniform((0.1, 0.1), (0.4, 0.9), (2, 2)).astype(np.float32)
        places[1 - side, 0] = 1 - places[1 - side, 0]
        self.state = self._place(options.get("state", places[0]), "state")
        self.goal_state = self._place(options.get("goal_state", places[1]), "goal_state")
        self._background = self._rooms()
        self._goal_picture = self._drawn(self.goal_state)
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Move, as far as the walls allow."""
        move = np.clip(np.asarray(action, np.float32), -1, 1) * np.float32(SPEED)
        self.state = self._moved(self.state, move)
        distance = self._distance()
        return self._observation(), -distance, distance < NEAR, False, self._info()

    def render(self) -> Array | None:
        """Return the picture, uint8 (size, size, 3)."""
        return None if self.render_mode is None else self._drawn(self.state)

    # -- hooks -------------------------------------------------------------------------------

    def expert_action(self) -> Array:
        """Return the expert's action: to the door, through it, to the goal."""
        x, y = (float(v) for v in self.state)
        target = self.goal_state.astype(np.float64)
        door = float(self.variation["door.position"][0])
        side, goal_side = x > WALL, float(self.goal_state[0]) > WALL
        if side != goal_side:
            before = WALL + (0.08 if side else -0.08)
            beyond = WALL + (-0.08 if side else 0.08)
            ready = abs(y - door) < DOOR - RADIUS
            target = np.array([beyond if ready else before, door])
        elif abs(x - WALL) < THICK + RADIUS and abs(y - door) < DOOR:
            target = np.array([WALL + (0.08 if side else -0.08), y])  # out of the doorway first
        move = (target - (x, y)) / SPEED
        return (move / max(1.0, float(np.abs(move).max()))).astype(np.float32)

    def get_episode_data(self) -> dict[str, Any]:
        """Return what is constant within the episode: the variation."""
        return {name: value.copy() for name, value in self.variation.items()}

    def reset_options_from_dataset(self, init: Mapping[str, Any], goal: Mapping[str, Any]) -> dict[str, Any]:
        """Return reset options that start at a state of an episode, with a later state as the goal."""
        known = {name: init[name] for name in _DEFAULTS if name in init}
        return {"state": init["state"], "goal_state": goal["state"], "variation_values": known}

    # -- inside ------------------------------------------------------------------------------

    def _observation(self) -> dict[str, Array]:
        return {"state": self.state.copy(), "goal_state": self.goal_state.copy()}

    def _info(self) -> dict[str, Any]:
        return {"goal": self._goal_picture.copy(), "is_success": self._distance() < NEAR}

    def _distance(self) -> float:
        return float(np.linalg.norm((self.state - self.goal_state).astype(np.float64)))

    def _place(self, given: Any, what: str) -> Array:
        place = np.array(given, np.float32)
        if place.shape != (2,) or not ((place >= 0) & (place <= 1)).all():
            raise InputError(f"TwoRoom.reset: {what} must be (x, y) in [0, 1], got {given!r}")
        return place

    def _vary(self, names: Sequence[str] | str, values: Mapping[str, Any]) -> None:
        self.variation = dict(_DEFAULTS)
        names = [names] if isinstance(names, str) else list(names)
        if "all" in names:
            names = list(_DEFAULTS)
        for name in [*names, *values]:
            if name not in _DEFAULTS:
                raise InputError(f"TwoRoom.reset: no variation {name!r}; there are {list(_DEFAULTS)}")
        for name in names:
            group, key = name.split(".")
            space: Any = self.variation_space[group][key]  # type: ignore[index]
            if space.dtype.kind == "u":
                drawn = self.np_random.integers(space.low, space.high, dtype=space.dtype, endpoint=True)
            else:
                drawn = self.np_random.uniform(space.low, space.high).astype(space.dtype)
            self.variation[name] = drawn
        for name, value in values.items():
            like = _DEFAULTS[name]
            self.variation[name] = np.asarray(value).astype(like.dtype).reshape(like.shape)

    def _moved(self, state: Array, move: Array) -> Array:
        x, y = state + move
        low, high = np.float32(RADIUS), np.float32(1 - RADIUS)
        y = min(max(y, low), high)
        x = min(max(x, low), high)
        door = self.variation["door.position"][0]
        near, reach = THICK + RADIUS, DOOR - RADIUS
        if abs(y - door) > reach:
            inside = abs(x - WALL) < near
            # In the doorway; an agent that slides along its side is a rounding error too far.
            if abs(state[1] - door) <= reach + 1e-5 and abs(state[0] - WALL) < near:
                if inside:
                    y = min(max(y, door - reach), door + reach)
            elif inside or (x > WALL) != (state[0] > WALL):
                x = WALL + near if state[0] > WALL else WALL - near
        return np.array([x, y], np.float32)

    def _rooms(self) -> Array:
        wall = np.abs(self._x - WALL) < THICK
        wall &= np.abs(self._y - self.variation["door.position"][0]) > DOOR
        edge = np.minimum(np.minimum(self._x, 1 - self._x), np.minimum(self._y, 1 - self._y))
        solid = (wall | (edge < THICK))[..., None]
        picture: Array = np.where(solid, self.variation["wall.color"], self.variation["floor.color"])
        return picture

    def _drawn(self, state: Array) -> Array:
        picture = self._background.copy()
        # Only the square around the agent: the rest of the picture is the background's.
        low = np.maximum(((state - RADIUS) * self.size).astype(int) - 1, 0)
        high = np.minimum(((state + RADIUS) * self.size).astype(int) + 2, self.size)
        part = slice(low[1], high[1]), slice(low[0], high[0])
        apart = np.hypot(self._x[part] - state[0], self._y[part] - state[1])
        covered = np.clip((RADIUS - apart) * self.size + 0.5, 0, 1)[..., None]
        shown = picture[part] * (1 - covered) + self.variation["agent.color"] * covered
        picture[part] = shown.round().astype(np.uint8)
        return picture
