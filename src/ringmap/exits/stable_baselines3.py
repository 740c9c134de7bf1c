"""Replay buffers of Stable-Baselines3 whose transitions are on a ring.

    add(obs, next_obs, ...)   ->  one call of TransitionReplayBuffer, lane i is environment i
    sample: call t, lane e    ->  transition  t * n_envs + e  of the newest `buffer_size * n_envs`, oldest first

Stable-Baselines3's own code draws `t` and `e` from its own generator, and counts calls modulo `buffer_size` in `pos`.

Invariants: the same calls and the same seed give the batches of Stable-Baselines3's own buffers; what `add` returned
from survives a kill; a pickle of a buffer on disk holds its path, not its transitions.
Not here: the ring (buffers/transitions).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ringmap.buffers.transitions.buffer import TransitionReplayBuffer
from ringmap.errors import InputError, LockedError, NotFoundError, ReplacedError
from ringmap.extras import require
from ringmap.storage.columns.values import as_array
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import local_path
from ringmap.storage.records.manifest import read_manifest

require("sb3", "ringmap.sb3")

from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.her import her_replay_buffer as her
from stable_baselines3.her.goal_selection_strategy import (
    KEY_TO_GOAL_STRATEGY,
    GoalSelectionStrategy,
)

__all__ = ["DictReplayBuffer", "HerReplayBuffer", "ReplayBuffer"]

Array = np.ndarray[Any, np.dtype[Any]]

_EXACT_LANES = 256
"""Up to as many lanes `TransitionReplayBuffer` evicts row by row."""

_READ_ROWS = 4096
"""Transitions that are read at once where all are."""


class ReplayBuffer(buffers.ReplayBuffer):
    """Stable-Baselines3's `ReplayBuffer`, on a ring.

    Args:
        buffer_size: transitions; as in Stable-Baselines3, `buffer_size // n_envs` calls of `add` are kept.
        observation_space: of one environment.
        action_space: of one environment.
        device: where batches go.
        n_envs: environments of a call.
        optimize_memory_usage: must be False: each observation is stored once in any case.
        handle_timeout_termination: whether an episode that ended by `TimeLimit.truncated` bootstraps.
        path: directory of the buffer; None for RAM. An existing buffer is opened with all its transitions.
        n_steps: rewards summed per transition; batches have `discounts` then.
        gamma: the discount of these sums.
        frame_stack: K, for observations of `VecFrameStack`, shape `(K, ...)`: each frame is stored once.
        padding_type: what such a stack has before an episode's first frame: "zero", as `VecFrameStack`, or "reset".
        storage: how columns are stored, as for `ringmap.ReplayBuffer`.
        durability: "process" or "power", as for `ringmap.ReplayBuffer`.
        sync_every_s: seconds between background syncs.

    Raises:
        MissingExtraError: stable-baselines3 is not installed.
        InputError: an argument is wrong, or contradicts a value fixed on disk.
        LockedError: another process writes the buffer at `path`.

    `pos` and `full` count as in Stable-Baselines3. Its arrays, such as `observations`, are not there: `transitions` is
    the ring, with `sample`, `pass_sampler` and live readers.

    Cost: `add` is one write; a batch is one gather per column.

    Processes and threads: one writer; a pickle (`save_replay_buffer`) of a buffer on disk opens it as the writer when
    it is first used.
        It makes nothing: where its ring is not, or another one is, loading it raises NotFoundError or ReplacedError.

    Source: Stable-Baselines3, Replay buffers (`common/buffers.py`).

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> buf = ReplayBuffer(1000, Box(-1, 1, (3,)), Discrete(2), device="cpu", path="runs/dqn")
        >>> for t in range(5):
        ...     buf.add(np.full((1, 3), t), np.full((1, 3), t + 1), np.array([1]), np.ones(1), np.array([False]), [{}])
        >>> batch = buf.sample(4)
        >>> batch.observations.shape, batch.rewards.shape
        (torch.Size([4, 3]), torch.Size([4, 1]))
        >>> bool((batch.next_observations == batch.observations + 1).all())
        True
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        path: str | os.PathLike[str] | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        frame_stack: int | None = None,
        padding_type: str = "zero",
        storage: Any = "memmap",
        durability: str = "process",
        sync_every_s: float = 30.0,
    ) -> None:
        if optimize_memory_usage:
            raise InputError(
                f"{type(self).__name__}: optimize_memory_usage=True is not needed: each observation is stored once; "
                "leave it out"
            )
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma = n_steps, gamma
        # `buffer_size` as it is, not rounded to whole calls: the next run may have another number of environments.
        capacity = max(buffer_size, n_envs)
        if n_envs > _EXACT_LANES:  # of a full ring a whole call may be missing
            capacity += n_envs
        self._options = {
            "capacity": capacity,
            "path": None if path is None else local_path(path),
            "n_step": n_steps,
            "gamma": gamma,
            "frame_stack": frame_stack,
            "padding_type": padding_type,
            "storage": storage,
            "durability": durability,
            "sync_every_s": sync_every_s,
        }
        self._ring: TransitionReplayBuffer | None = None
        self._open()

    @property
    def transitions(self) -> TransitionReplayBuffer:
        """The ring with the transitions."""
        return self._open() if self._ring is None else self._ring

    def _open(self) -> TransitionReplayBuffer:
        """Make the ring, or open the one that is there. A pickle opens the one that it was made of, and makes none."""
        self._refuse_another()
        shapes, space = self.obs_shape, self.observation_space
        seen: Any = (shapes, space.dtype)
        if isinstance(shapes, dict):
            seen = {name: (shape, space[name].dtype) for name, shape in shapes.items()}
        make = partial(
            TransitionReplayBuffer,
            obs_shape=seen,
            action_shape=(self.action_dim,),
            device=None,
            extra=self._beside,
            action_dtype=self._maybe_cast_dtype(self.action_space.dtype),
            **self._options,
        )
        try:
            self._ring = ring = make()
        except LockedError:  # by the buffer that `load_replay_buffer` has dropped, which holds itself
            gc.collect()
            self._ring = ring = make()
        # Lanes of an earlier process have ended, which the first observations need not show. Stacks show it.
        self._fresh = bool(len(ring)) and self._options["frame_stack"] is None
        calls = min(len(ring) // self.n_envs, self.buffer_size)
        self.full = calls == self.buffer_size
        self.pos = 0 if self.full else calls
        return ring

    _uuid: bytes | None = None
    """Of the ring that a pickle points to."""

    def _refuse_another(self) -> None:
        """Raise NotFoundError or ReplacedError unless the ring that a pickle points to is where it was."""
        if self._uuid is None:
            return
        path, name = self._options["path"], type(self).__name__
        moved = (
            "if the run was moved, make the model with replay_buffer_kwargs={'path': ...}, which opens the ring that "
            "is there, and load no buffer"
        )
        try:
            found = read_manifest(Disk(), path).uuid
        except NotFoundError:
            raise NotFoundError(f"{name}: a saved buffer points to its ring, and none is at {path}; {moved}") from None
        if found != self._uuid:
            raise ReplacedError(f"{name}: a saved buffer points to its ring, and another one is at {path}; {moved}")

    _beside: Mapping[str, Any] | None = None
    """Further columns of the ring."""

    def _values_beside(self) -> Mapping[str, Any] | None:
        """Return their values for the next call."""
        return None

    # -- writing -----------------------------------------------------------------------------

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Store one step of every environment.

        Args:
            obs: `(n_envs, ...)`, a dict of these for a Dict space.
            next_obs: the observations after the step, at the end of an episode its last one.
            action: `(n_envs, ...)`.
            reward: `(n_envs,)`.
            done: `(n_envs,)`: the episode ended, in whichever way.
            infos: of each environment; `TimeLimit.truncated` is used.

        Raises:
            InputError: a shape does not fit, or a dtype can't hold a value. Nothing was changed.
            EnvironmentFault: the disk is full or fails. Nothing was changed.
        """
        ring, where = self.transitions, f"{type(self).__name__}.add"
        ended, cut_off = np.asarray(done, np.bool_), np.zeros(self.n_envs, np.bool_)
        if self.handle_timeout_termination:
            cut_off[:] = [info.get("TimeLimit.truncated", False) for info in infos]
        ring.add(
            self._shaped(obs),
            as_array(action, f"{where}: action", "env").reshape(self.n_envs, self.action_dim),
            reward,
            self._shaped(next_obs),
            ended & ~cut_off,
            truncated=cut_off,
            extra=self._values_beside(),
            fresh=np.ones(self.n_envs, np.bool_) if self._fresh else None,
        )
        self._fresh = False
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _shaped(self, obs: Any) -> Any:
        """Return observations as the ring takes them: those of Discrete spaces have an axis more."""
        where = f"{type(self).__name__}.add: observation"
        if isinstance(self.obs_shape, dict):
            return {
                name: as_array(obs[name], f"{where} {name!r}", "env").reshape(self.n_envs, *shape)
                for name, shape in self.obs_shape.items()
            }
        return as_array(obs, where, "env").reshape(self.n_envs, *self.obs_shape)

    def reset(self) -> None:
        """Drop all transitions."""
        self.transitions.clear()
        super().reset()

    # -- reading -----------------------------------------------------------------------------

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions with replacement, by NumPy's global generator, as Stable-Baselines3 does.

        Args:
            batch_size: B.
            env: a `VecNormalize` that normalizes the batch. With `n_steps > 1` it normalizes the sums of rewards.

        Returns:
            `ReplayBufferSamples`, or `DictReplayBufferSamples`: tensors `(B, ...)` on `device`.
        """
        self.transitions  # noqa: B018 - opened, it knows how many calls there are
        return super(buffers.ReplayBuffer, self).sample(batch_size, env)

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        env_inds = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))  # noqa: NPY002 - as Stable-Baselines3
        return self._samples(self._read(batch_inds, env_inds), env)

    def _read(self, batch_inds: Array, env_inds: Array) -> dict[str, Any]:
        """Return the transitions of these calls and lanes, by name."""
        ring, calls = self.transitions, self.size()
        if self.full:
            batch_inds = (batch_inds - self.pos) % calls
        ids = len(ring) + (batch_inds - calls) * self.n_envs + env_inds
        found: dict[str, Any] = ring[ids]
        return found

    def _samples(self, rows: dict[str, Any], env: Any) -> Any:
        """Return transitions in Stable-Baselines3's form."""
        made = {
            "observations": self._tensors(self._normalize_obs(rows["observations"], env)),
            "actions": self._tensors(rows["actions"]),
            "next_observations": self._tensors(self._normalize_obs(rows["next_observations"], env)),
            "dones": self._tensors(rows["dones"][:, None]),
            "rewards": self._tensors(self._normalize_reward(rows["rewards"][:, None], env)),
        }
        if "discounts" in rows:
            made["discounts"] = self._tensors(rows["discounts"][:, None])
        is_nested = isinstance(made["observations"], dict)
        return (DictReplayBufferSamples if is_nested else ReplayBufferSamples)(**made)

    def _tensors(self, values: Any) -> Any:
        if isinstance(values, dict):
            return {name: self.to_torch(leaf, copy=False) for name, leaf in values.items()}
        return self.to_torch(values, copy=False)  # a batch is a copy already

    # -- state -------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and release the files and the lock."""
        if self._ring is not None:
            self._ring.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle path and settings, after a flush; a buffer in RAM pickles its transitions."""
        state = dict(self.__dict__)
        if self._options["path"] is not None:
            if self._ring is not None:
                self._ring.flush()
                state["_uuid"] = read_manifest(Disk(), self._options["path"]).uuid
            state["_ring"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._refuse_another()


class DictReplayBuffer(ReplayBuffer, buffers.DictReplayBuffer):
    """Stable-Baselines3's `DictReplayBuffer`, on a ring: for Dict observations. Arguments as of `ReplayBuffer`."""


class _Leaf:
    """A column of a `HerReplayBuffer`, read by call and lane as its array would be."""

    def __init__(self, buffer: HerReplayBuffer, *names: str) -> None:
        self._buffer, self._names = buffer, names

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        found: Any = self._buffer.rows_at(index[0], index[1])
        for name in self._names:
            found = found[name]
        return found


class HerReplayBuffer(her.HerReplayBuffer, DictReplayBuffer):
    """Stable-Baselines3's `HerReplayBuffer`, on a ring: hindsight goals, by its own code.

    Args:
        buffer_size: as for `ReplayBuffer`.
        observation_space: with the keys `observation`, `achieved_goal`, `desired_goal`.
        action_space: as for `ReplayBuffer`.
        env: the environment, whose `compute_reward` is called.
        device: where batches go.
        n_envs: environments of a call; those of a buffer on disk stay as many.
        optimize_memory_usage: must be False.
        handle_timeout_termination: as for `ReplayBuffer`.
        n_sampled_goal: transitions with a new goal for each real one.
        goal_selection_strategy: "future", "final" or "episode".
        copy_info_dict: must be False: infos are not stored.
        options: of `ReplayBuffer`: path, storage, durability, sync_every_s.

    Raises:
        InputError: an argument is wrong, or the buffer on disk has another number of environments.

    Where an episode begins is stored with each transition. An episode that a kill cut off counts as one that ended
    there.

    Cost: opening reads all transitions, for where their episodes begin; 16 bytes of memory for each.
    """

    _beside = MappingProxyType({"lane": ((), "i4"), "episode_step": ((), "i8")})
    _newest_read: tuple[Array, Array, dict[str, Any]] | None = None

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        env: Any,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        if copy_info_dict:
            raise InputError(
                f"{where}: copy_info_dict=True, but infos are not stored; give compute_reward what it needs in the "
                "observation"
            )
        refused = {"n_steps", "gamma", "frame_stack"} & options.keys()
        if refused:
            raise InputError(f"{where}: {sorted(refused)} can't be combined with hindsight goals")
        if isinstance(goal_selection_strategy, str):
            goal_selection_strategy = KEY_TO_GOAL_STRATEGY.get(goal_selection_strategy.lower())
        if not isinstance(goal_selection_strategy, GoalSelectionStrategy):
            raise InputError(f"{where}: goal_selection_strategy must be one of {list(KEY_TO_GOAL_STRATEGY)}")
        self.env, self.copy_info_dict = env, False
        self.goal_selection_strategy, self.n_sampled_goal = goal_selection_strategy, n_sampled_goal
        self.her_ratio = 1 - 1 / (n_sampled_goal + 1)
        DictReplayBuffer.__init__(
            self,
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )

    def _open(self) -> TransitionReplayBuffer:
        ring = super()._open()
        self._forget()
        calls, lanes = self.size(), np.arange(self.n_envs)
        self.ep_start = np.zeros((self.buffer_size, self.n_envs), np.int64)
        self.ep_length = np.zeros_like(self.ep_start)
        self._current_ep_start = np.full(self.n_envs, self.pos, np.int64)
        since = np.empty((calls, self.n_envs), np.int64)
        most = max(1, _READ_ROWS // self.n_envs)
        for first in range(0, calls, most):
            part = since[first : first + most]
            at = np.arange(first, first + len(part)) - calls
            rows = ring[len(ring) + (at[:, None] * self.n_envs + lanes).reshape(-1)]
            if (rows["lane"].reshape(part.shape) != lanes).any():
                self._refuse_lanes(ring)
            part[:] = rows["episode_step"].reshape(part.shape)
        for lane in lanes:
            begins = np.flatnonzero(since[:, lane] == 0)
            for start, stop in zip(begins, [*begins, calls][1:], strict=True):
                self.ep_start[start:stop, lane] = start
                self.ep_length[start:stop, lane] = stop - start
        return ring

    def _refuse_lanes(self, ring: TransitionReplayBuffer) -> None:
        ring.close()
        raise InputError(
            f"{type(self).__name__}: {ring.path} was filled by another number of environments than "
            f"n_envs={self.n_envs}; use as many, or another path"
        )

    def _values_beside(self) -> Mapping[str, Any]:
        steps = (self.pos - self._current_ep_start) % self.buffer_size
        return {"lane": np.arange(self.n_envs), "episode_step": steps}

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Store one step of every environment; as for `ReplayBuffer`."""
        self.transitions  # noqa: B018 - opened, it knows where episodes begin
        self._forget()
        super().add(obs, next_obs, action, reward, done, infos)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions of episodes that ended, a part of them with new goals.

        Args:
            batch_size: B.
            env: a `VecNormalize` that normalizes the batch.

        Raises:
            RuntimeError: no episode has ended.
        """
        self.transitions  # noqa: B018 - opened, it knows where episodes begin
        return super().sample(batch_size, env)

    def reset(self) -> None:
        """Drop all transitions."""
        DictReplayBuffer.reset(self)
        self.ep_length[:], self._current_ep_start[:] = 0, 0
        self._forget()

    # What Stable-Baselines3's code reads, as it reads its arrays.

    def _get_real_samples(self, batch_indices: Array, env_indices: Array, env: Any = None) -> Any:
        return self._samples(self.rows_at(batch_indices, env_indices), env)

    def rows_at(self, batch_inds: Array, env_inds: Array) -> dict[str, Any]:
        """Return the transitions of these calls and lanes, by name; those of the last call are kept."""
        known = self._newest_read
        if known is None or known[0] is not batch_inds or known[1] is not env_inds:
            self._newest_read = known = batch_inds, env_inds, self._read(batch_inds, env_inds)
        return known[2]

    def _forget(self) -> None:
        self._newest_read = None

    @property
    def observations(self) -> dict[str, _Leaf]:
        """Observations by key, read by call and lane."""
        return {name: _Leaf(self, "observations", name) for name in self.obs_shape}

    @property
    def next_observations(self) -> dict[str, _Leaf]:
        """Next observations by key, read by call and lane."""
        return {name: _Leaf(self, "next_observations", name) for name in self.obs_shape}

    @property
    def actions(self) -> _Leaf:
        """Actions, read by call and lane."""
        return _Leaf(self, "actions")

    @property
    def dones(self) -> _Leaf:
        """Whether transitions ended an episode, but not by a timeout; read by call and lane."""
        return _Leaf(self, "dones")

    @property
    def timeouts(self) -> Array:
        """Zeros: `dones` are without timeouts."""
        return np.broadcast_to(np.float32(0), (self.buffer_size, self.n_envs))

    # -- state -------------------------------------------------------------------------------

    def truncate_last_trajectory(self) -> None:
        """Count episodes that have not ended as ended here; they bootstrap."""
        self.transitions  # noqa: B018 - opened, it knows where episodes begin
        for lane in np.flatnonzero(self._current_ep_start != self.pos):
            self._compute_episode_length(int(lane))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle path and settings; the environment is given anew by `set_env`."""
        state = DictReplayBuffer.__getstate__(self)
        del state["env"]
        state["_newest_read"] = None
        if state["_ring"] is None:  # read again when it is opened
            for name in ("ep_start", "ep_length", "_current_ep_start"):
                state.pop(name, None)
        return state
