"""The recording wrapper around a vector environment.

Not here: buffers and rows (base.py, recorder.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper

from ringmap.errors import InputError
from ringmap.recording.base import WHERE, Recording
from ringmap.recording.slots import NEXT_STEP, WAITING

__all__ = ["VectorRecording"]

if TYPE_CHECKING:

    class _VectorWrapper(VectorWrapper[Any, Any, Any, Any, Any]): ...
else:  # which takes no parameters at run time before Gymnasium 1.3
    _VectorWrapper = VectorWrapper

Row = tuple[Any, Any, Any, Any, dict[str, Any]]


class VectorRecording(Recording, _VectorWrapper):
    """Steps a `gymnasium.vector.VectorEnv`, and records it."""

    _reset_asked: tuple[Any, Any, Any] | None = None

    @staticmethod
    def _mode_of(env: Any) -> Any:
        return (env.metadata or {}).get("autoreset_mode")

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None, mask: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset environments; their open episodes end as interrupted.

        Args:
            seed: as the environment takes it.
            options: likewise; `reset_mask` in it says which are reset.
            mask: `(num_envs,)` bool, another way to say it.
        """
        options, asked = self._asked(seed, options, mask, "reset")
        try:
            obs, infos = self.env.reset(seed=seed, options=options)
        except BaseException as error:
            self._failed(error, asked[0])
            raise
        self._take_reset(asked, obs, infos)
        return obs, infos

    def step(self, actions: Any) -> Row:
        """Step all environments.

        Raises:
            RoleError: (RuntimeError) one was not reset.
        """
        self._recorder.act(actions)
        try:
            row: Row = self.env.step(actions)
        except BaseException as error:
            self._failed(error)
            raise
        self._take(row)
        return row

    def step_async(self, actions: Any) -> None:
        """Begin a step of an `AsyncVectorEnv`."""
        begin = self.env.step_async
        if self._recorder.is_pending:
            begin(actions)  # raises: the actions of the step under way are the ones to record
            return
        self._recorder.act(actions)
        try:
            begin(actions)
        except BaseException as error:
            self._failed(error)
            raise

    def step_wait(self, **options: Any) -> Row:
        """Return the rows of the step that `step_async` began.

        Args:
            options: `timeout`, as the environment takes it.
        """
        try:
            row: Row = self.env.step_wait(**options)
        except BaseException as error:
            if self._recorder.is_pending:
                self._failed(error)
            raise
        self._take(row)
        return row

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None, mask: Any = None) -> None:
        """Begin a reset of an `AsyncVectorEnv`; see `reset`."""
        options, asked = self._asked(seed, options, mask, "reset_async")
        self.env.reset_async(seed=seed, options=options)
        self._reset_asked = asked

    def reset_wait(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Return the result of the reset that `reset_async` began.

        Args:
            options: `timeout`, as the environment takes it.
        """
        asked = self._reset_asked
        try:
            obs, infos = self.env.reset_wait(**options)
        except BaseException as error:
            if asked is not None:
                self._failed(error, asked[0])
            raise
        assert asked is not None
        self._reset_asked = None
        self._take_reset(asked, obs, infos)
        return obs, infos

    def close(self, **options: Any) -> None:
        """Store what is open as interrupted, and close the environments."""
        try:
            if not self.closed:
                self._finish()
        finally:
            super().close(**options)

    def __del__(self) -> None:
        """Do nothing: Gymnasium 1.0 would call `close`, and an interpreter that exits can't write."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped environment: `call`, `get_attr`, `envs`."""
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    def _take(self, row: Row) -> None:
        *rest, infos = row
        self._stepped((*rest, self._sound(infos)))

    def _sound(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Return the infos without final observations that are the memory of the next episode's first ones.

        SyncVectorEnv keeps what an environment returned, not a copy: one that reuses its array has written over it.
        """
        if "final_obs" not in infos:
            return infos
        base = self.unwrapped
        if not isinstance(base, SyncVectorEnv):
            return infos
        sound = infos["final_obs"].copy()
        for slot, final in enumerate(sound):
            if final is not None and _shared(final, base._env_obs[slot]):
                sound[slot] = None
        return {**infos, "final_obs": sound}

    def _take_reset(self, asked: Any, obs: Any, infos: dict[str, Any]) -> None:
        recorder, base = self._recorder, self.unwrapped
        # Without shared memory, AsyncVectorEnv forgets a reset that was due only in its own reset of the next step.
        twice = isinstance(base, AsyncVectorEnv) and not base.shared_memory and recorder.slots.mode == NEXT_STEP
        due = [slot for slot in asked[0] if twice and recorder.slots.state[slot] == WAITING]
        try:
            self._was_reset(asked[0], obs, infos, *asked[1:])
        finally:
            recorder.lost(due)

    def _asked(
        self, seed: Any, options: dict[str, Any] | None, mask: Any, method: str
    ) -> tuple[dict[str, Any] | None, tuple[list[int], Any, list[Any]]]:
        """Return the options for the environment, and (which are reset, options, a seed for each)."""
        num = self.num_envs
        where = f"{WHERE}.{method}"
        if mask is not None:
            if options is not None and "reset_mask" in options:
                raise InputError(f"{where}: give mask, or reset_mask in the options, not both")
            mask = np.asarray(mask)
            if mask.shape != (num,) or not mask.any():
                raise InputError(f"{where}: mask must be ({num},) and name at least one environment, got {mask!r}")
            options = {**(options or {}), "reset_mask": mask.astype(np.bool_)}
        chosen = np.ones(num, np.bool_)
        if options is not None and "reset_mask" in options:
            # Read now: SyncVectorEnv removes it from this dict.
            chosen = np.asarray(options["reset_mask"])
            if chosen.shape != (num,) or chosen.dtype != np.bool_:
                chosen = np.zeros(num, np.bool_)  # the environment refuses it, and resets none
        rest = None if options is None else {k: v for k, v in options.items() if k != "reset_mask"}
        if seed is None or isinstance(seed, int | np.integer):
            seeds = [None if seed is None else int(seed) + i for i in range(num)]
        else:
            seeds = list(seed)
        return options, (np.flatnonzero(chosen).tolist(), rest, seeds)


def _shared(one: Any, other: Any) -> bool:
    """Return whether two observations have an array in common."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return any(_shared(one[name], other[name]) for name in one if name in other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return any(map(_shared, one, other))
    arrays = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return arrays and np.shares_memory(one, other)
