"""The recording wrapper: one name in front of environments of both kinds.

    ReplayBufferCollectionWrapper(env, buffers)
        gymnasium.Env               ─► RecordedEnv         its steps: single.py
        gymnasium.vector.VectorEnv  ─► RecordedVectorEnv   its steps: vector.py

    buffers, swapping, dumping: base.py        rows: recorder.py

Not here: anything but the choice between the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from ringmap.errors import InputError
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import Weights
from ringmap.recording.base import WHERE, Recording
from ringmap.recording.single import SingleRecording
from ringmap.recording.vector import VectorRecording

__all__ = ["RecordedEnv", "RecordedVectorEnv", "ReplayBufferCollectionWrapper"]


class _Options(TypedDict, total=False):
    """_Options of the constructor."""

    transition_builder: Any
    validate_transition: bool
    dump_on_episode_end: bool
    dump_on_reset_boundary: bool
    dump_path: str | os.PathLike[str] | None
    context_fn: Callable[..., Any] | None
    stream: bool
    commit_every: int | None
    autoreset_mode: AutoresetMode | None
    weights: Weights | None
    pace: Pace | None


class ReplayBufferCollectionWrapper(Recording):
    """Records the steps of an environment into replay buffers, and changes nothing that the agent sees.

    A `gymnasium.Wrapper` around a `gymnasium.Env`, a `gymnasium.vector.VectorWrapper` around a vector environment.

    Episode buffers (`ReplayBuffer`) get each finished episode in one commit, T + 1 rows for T steps, as
    `World.collect` writes them: the action stands at the observation at which it was taken, a reward at the observation
    that it came with. Transition buffers (`TransitionReplayBuffer`) get a row per step. The buffer's schema says
    which keys: `obs, next_obs, action` (a Dict or Tuple: `obs/<key>`), `reward, terminated, truncated, done, context,
    env_index, episode_id, t, is_first, is_last, info/<name>`. One without a schema gets obs, action, reward,
    terminated, truncated.

    A reset, of all or by a mask, ends the open episodes of its slots as interrupted: neither terminated nor truncated.
    So does `close`. An episode without a step is not stored.

    Args:
        env: the environment.
        replay_buffers: a buffer, or one for each environment of a vector environment.
        replay_mode: "shared": one buffer for all. "per_env": one for each. "auto": what fits.
        transition_builder: makes the columns of a step. A function of the keyword arguments `cached_obs,
            cached_context, action, next_obs, reward, terminated, truncated, env_index, rb_single_space`, or an object
            with `transform(dict) -> dict`. Episodes then have a row per step.
        validate_transition: check each transition against the spaces. One that is not in them raises, is not
            stored, and ends its episode, as interrupted; the next row begins another one.
        dump_on_episode_end: dump the buffer when an episode of it was terminated or truncated.
        dump_on_reset_boundary: dump it at each reset before which something was recorded since the last dump.
        dump_path: where to; in mode "per_env" a folder, with `env_<i>` for each buffer. May be assigned.
        context_fn: `(info, options, seed) -> context`, called when an episode begins, for the key `context`. An
            environment that resets by itself has neither options nor seed.
        stream: put each row on disk as it comes: killed, a buffer opened with interrupted="keep" has what was seen.
        commit_every: commit this many rows of an open episode at a time, so that they can be drawn before it ends, and
            other processes see them; an episode may then be longer than the buffer, or endless. As for
            `ReplayBuffer.begin_episode`. Each row goes to disk as it comes, as with `stream`. For buffers of episodes.
        autoreset_mode: Gymnasium's `AutoresetMode`; by default what the environment's metadata says.
        weights: where a learner publishes the policy, with the model that acts: `ringmap.Weights(path, model)`. The
            newest is loaded into that model whenever an episode begins. Each episode has `policy_step` in its data: the
            step of the weights that chose its first action, -1 if none were published; with several environments, later
            actions may come from newer ones. Transition buffers have no episode data; they get none of that.
        pace: wait before a commit while the collectors are too far ahead of the learners. For buffers in its directory.

    Raises:
        InputError: (ValueError) buffers that do not fit the mode or the environment, or a dump flag without
            `dump_path`; `weights` without a model; a buffer that `pace` does not count.
        ReadOnlyError: a buffer was opened for reading.

    Cost: a copy of each batch per step, and one commit for each finished episode; short ones that end at one step share
    their writes.

    Processes and threads: as the environment; the buffers' readers may be anywhere.

    Source: UniEnv, ReplayBufferCollectionWrapper (reference page).

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=10_000)
        >>> envs = ReplayBufferCollectionWrapper(gymnasium.make_vec("CartPole-v1", num_envs=4), buf)
        >>> _ = envs.reset(seed=0)
        >>> _ = envs.action_space.seed(0)
        >>> for _ in range(100):
        ...     _ = envs.step(envs.action_space.sample())
        >>> buf.num_episodes > 4, buf.column_names
        (True, ['obs', 'action', 'reward', 'terminated', 'truncated'])
        >>> envs.close()
    """

    @overload
    def __new__(
        cls,
        env: gymnasium.Env[Any, Any],
        replay_buffers: Any,
        replay_mode: str = ...,
        **options: Unpack[_Options],
    ) -> RecordedEnv: ...
    @overload
    def __new__(
        cls,
        env: VectorEnv[Any, Any, Any],
        replay_buffers: Any,
        replay_mode: str = ...,
        **options: Unpack[_Options],
    ) -> RecordedVectorEnv: ...
    def __new__(cls, env: Any, *_: Any, **__: Any) -> Any:
        """Make the wrapper that fits the environment."""
        if cls is not ReplayBufferCollectionWrapper:
            return object.__new__(cls)
        kind: Any
        if isinstance(env, VectorEnv):
            kind = RecordedVectorEnv
        elif isinstance(env, gymnasium.Env):
            kind = RecordedEnv
        else:
            raise InputError(
                f"{WHERE}: expected a gymnasium.Env or a gymnasium.vector.VectorEnv, got {type(env).__name__}"
            )
        return object.__new__(kind)

    @overload
    @classmethod
    def shared(cls, env: gymnasium.Env[Any, Any], replay_buffer: Any, **options: Unpack[_Options]) -> RecordedEnv: ...
    @overload
    @classmethod
    def shared(
        cls, env: VectorEnv[Any, Any, Any], replay_buffer: Any, **options: Unpack[_Options]
    ) -> RecordedVectorEnv: ...
    @classmethod
    def shared(cls, env: Any, replay_buffer: Any, **options: Any) -> Any:
        """Record all environments into one buffer.

        Args:
            env: the environment.
            replay_buffer: the buffer.
            options: as for the constructor.
        """
        return cls(env, replay_buffer, "shared", **options)

    @classmethod
    def per_env(
        cls,
        env: VectorEnv[Any, Any, Any],
        replay_buffers: Sequence[Any],
        **options: Unpack[_Options],
    ) -> RecordedVectorEnv:
        """Record each environment into a buffer of its own.

        Args:
            env: the vector environment.
            replay_buffers: one for each.
            options: as for the constructor.
        """
        return cls(env, replay_buffers, "per_env", **options)


class RecordedEnv(ReplayBufferCollectionWrapper, SingleRecording):
    """Records a `gymnasium.Env`; made by `ReplayBufferCollectionWrapper`."""


class RecordedVectorEnv(ReplayBufferCollectionWrapper, VectorRecording):
    """Records a `gymnasium.vector.VectorEnv`; made by `ReplayBufferCollectionWrapper`."""
