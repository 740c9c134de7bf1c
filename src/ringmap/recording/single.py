"""The recording wrapper around a single environment: a batch of one.

Not here: buffers and rows (base.py, recorder.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from ringmap.recording.base import Recording

__all__ = ["SingleRecording"]


class SingleRecording(Recording, gymnasium.Wrapper[Any, Any, Any, Any]):
    """Steps a `gymnasium.Env`, and records it."""

    @staticmethod
    def _mode_of(env: Any) -> AutoresetMode:
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.Autoreset):
                return AutoresetMode.NEXT_STEP
            env = env.env
        return AutoresetMode.DISABLED

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an open episode ends as interrupted."""
        try:
            obs, info = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._failed(error)
            raise
        self._was_reset([0], _batch(obs, self._keys.observation_space), _infos(info), options, [seed])
        return obs, info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment.

        Raises:
            RoleError: (RuntimeError) it was not reset.
        """
        self._recorder.act(_batch(action, self._keys.action_space))
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except BaseException as error:
            self._failed(error)
            raise
        batch = _batch(obs, self._keys.observation_space)
        self._stepped((batch, np.asanyarray(reward)[None], [terminated], [truncated], _infos(info)))
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Store what is open as interrupted, and close the environment."""
        try:
            self._finish()
        finally:
            super().close()


def _infos(info: Mapping[str, Any]) -> dict[str, Any]:
    # In the infos of vector environments `_x` says which have an x; here it is a name like any other, which would hide
    # x.
    return {
        name: _infos(value) if isinstance(value, Mapping) and name != "final_obs" else [value]
        for name, value in info.items()
        if not (isinstance(name, str) and name.startswith("_") and name[1:] in info)
    }


def _batch(value: Any, space: Any) -> Any:
    """Return a value as a batch of one, nested as its space is; what it holds is checked where it is copied."""
    if type(value) is np.ndarray:
        return value[None]
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping):
        return {name: _batch(part, space.spaces.get(name)) for name, part in value.items()}
    if isinstance(space, spaces.Tuple) and isinstance(value, tuple | list):
        return tuple(map(_batch, value, space.spaces))
    if isinstance(value, list | tuple | str):
        return [value]
    return value[None] if hasattr(value, "detach") else np.asanyarray(value)[None]
