"""The recording wrapper: one name in front of environments of both kinds.

    ReplayBufferCollectionWrapper(env, buffers)
        gymnasium.Env               ─► RecordedEnv: a batch of one
        gymnasium.vector.VectorEnv  ─► RecordedVectorEnv

Invariants: the agent sees exactly what the environment returned; buffers are swapped whole or not at all.
Not here: rows (recorder.py), when one begins or ends an episode (slots.py), what a dump is (dumping.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat, TypedDict, Unpack, overload

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from ringmap.errors import ClosedError, InputError, RoleError
from ringmap.fleet.pace import Pace, checked_pace
from ringmap.fleet.weights import Weights
from ringmap.recording.adapters import Sink, Sinks
from ringmap.recording.deferred_errors import Faults
from ringmap.recording.dumping import dump, place_of
from ringmap.recording.hooks import Hooks
from ringmap.recording.keys import Keys
from ringmap.recording.recorder import Recorder
from ringmap.recording.slots import NEXT_STEP, WAITING
from ringmap.storage.disk.paths import refuse_address

__all__ = ["RecordedEnv", "RecordedVectorEnv", "ReplayBufferCollectionWrapper"]

if TYPE_CHECKING:

    class _VectorWrapper(VectorWrapper[Any, Any, Any, Any, Any]): ...
else:  # which takes no parameters at run time before Gymnasium 1.3
    _VectorWrapper = VectorWrapper

log = logging.getLogger("ringmap")

WHERE = "ReplayBufferCollectionWrapper"

Row = tuple[Any, Any, Any, Any, dict[str, Any]]
_MODES = ("auto", "shared", "per_env")


class Recording:
    """Buffers, and the recording into them; the wrapper of an environment comes after it.

    Not one class with `ReplayBufferCollectionWrapper`: type checkers would take the type of what that makes from this
    `__init__`, not from its `__new__`, which says which of the two wrappers it is.
    """

    env: Any

    def __init__(
        self,
        env: Any,
        replay_buffers: Any,
        replay_mode: str = "auto",
        transition_builder: Any = None,
        validate_transition: bool = False,
        dump_on_episode_end: bool = False,
        dump_on_reset_boundary: bool = False,
        dump_path: str | os.PathLike[str] | None = None,
        *,
        context_fn: Callable[..., Any] | None = None,
        stream: bool = False,
        commit_every: int | None = None,
        autoreset_mode: AutoresetMode | None = None,
        weights: Weights | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._num_slots: int | None = getattr(env, "num_envs", None) if isinstance(env, VectorEnv) else None
        buffers = _listed(replay_buffers)
        self._replay_mode = _resolved(replay_mode, self._num_slots, len(buffers), WHERE)
        if (dump_on_episode_end or dump_on_reset_boundary) and dump_path is None:
            raise InputError(f"{WHERE}: dump_on_... needs a dump_path")
        mode = _autoreset_of(env) if autoreset_mode is None else autoreset_mode
        if not isinstance(mode, AutoresetMode):
            raise InputError(
                f"{WHERE}: the autoreset mode must be one of gymnasium.vector.AutoresetMode, got {mode!r}; name it "
                "with autoreset_mode="
            )
        if weights is not None and (not isinstance(weights, Weights) or weights.model is None):
            raise InputError(
                f"{WHERE}: weights= must be a ringmap.Weights with the model that acts, ringmap.Weights(path, model), "
                f"got {weights!r}"
            )
        single = self._num_slots is None
        spaces = (
            (env.observation_space, env.action_space)
            if single
            else (env.single_observation_space, env.single_action_space)
        )
        self._keys = Keys(*spaces, context_fn is not None, WHERE)
        self._hooks = Hooks(self._keys, transition_builder, validate_transition, context_fn)
        self._makes = Sinks(self._keys, self._hooks.builds, bool(stream), commit_every, checked_pace(pace, WHERE))
        self._dumps_at_end, self._dumps_at_reset = bool(dump_on_episode_end), bool(dump_on_reset_boundary)
        if dump_path is not None:
            refuse_address(dump_path)
        self._dump_path = dump_path
        self._dumped: dict[str, int] = {}  # place -> what was stored by then
        self._buffers = buffers
        self._recorder = Recorder(
            self._num_slots or 1, mode.value, self._keys, self._sinks(buffers), self._hooks, weights
        )
        super().__init__(env)  # type: ignore[call-arg]  # Gymnasium's wrapper comes next

    # -- buffers -----------------------------------------------------------------------------

    @property
    def replay_buffers(self) -> list[Any]:
        """The buffers, a list of one in mode "shared"."""
        return list(self._buffers)

    @property
    def replay_mode(self) -> str:
        """ "shared" or "per_env"."""
        return self._replay_mode

    @property
    def dump_path(self) -> str | os.PathLike[str] | None:
        """Where dumps go; may be assigned.

        Raises:
            InputError: None, while a dump flag needs it.
        """
        return self._dump_path

    @dump_path.setter
    def dump_path(self, path: str | os.PathLike[str] | None) -> None:
        if path is None and (self._dumps_at_end or self._dumps_at_reset):
            raise InputError(f"{WHERE}.dump_path: None, but dump_on_... needs a path")
        if path is not None:
            refuse_address(path)
        self._dump_path = path

    def set_replay_buffers(
        self,
        replay_buffers: Any,
        *,
        replay_mode: str | None = None,
        require_same_space: bool = True,
        allow_mid_episode: bool = False,
        finalize_old_segments: bool = False,
        dump_old: bool = False,
    ) -> list[Any]:
        """Record into other buffers from now on.

        An open episode is split: its rows so far go to its old buffer, as an interrupted episode, and the rest, from
        its newest observation on, to the new one. With any of the last three arguments that is allowed.

        Args:
            replay_buffers: as for the constructor.
            replay_mode: another mode; None keeps the current mode.
            require_same_space: whether the new buffers must have the same columns as the old ones.
            allow_mid_episode: split open episodes.
            finalize_old_segments: split open episodes.
            dump_old: dump the old buffers to `dump_path` once they have all their rows; splits open episodes.

        Returns:
            The old buffers, a list.

        Raises:
            InputError: (ValueError) the buffers do not fit the mode, or the environment, or have other columns.
            RoleError: (RuntimeError) an episode is open and none of the three permissions is given; `dump_old` without
                `dump_path`; a step was begun by `step_async`. Nothing has changed.
            EnvironmentFault: the disk is full or fails. The old buffers stay.
        """
        where = f"{WHERE}.set_replay_buffers"
        recorder = self._recorder
        buffers = _listed(replay_buffers)
        mode = _resolved(replay_mode or self._replay_mode, self._num_slots, len(buffers), where)
        sinks = self._sinks(buffers)
        if require_same_space:
            for new in sinks:
                for old in recorder.sinks:
                    if new.layout != old.layout:
                        raise InputError(
                            f"{where}: the new buffer has columns {_shown(new)}, the old one {_shown(old)}; pass "
                            "require_same_space=False if that is meant"
                        )
        open_ = recorder.open_slots
        if open_ and not (allow_mid_episode or finalize_old_segments or dump_old):
            raise RoleError(
                f"{where}: episodes of envs {open_} are open in the old buffers; pass finalize_old_segments=True or "
                "allow_mid_episode=True to split them, or swap between episodes"
            )
        if recorder.is_pending:
            raise RoleError(f"{where}: a step is under way; call step_wait first")
        if dump_old and self._dump_path is None:
            raise RoleError(f"{where}: dump_old=True needs a dump_path; assign it first")
        recorder.split()
        if dump_old:
            self._dump(range(len(self._buffers)), where)
        before, self._buffers, self._replay_mode = self._buffers, buffers, mode
        recorder.install(sinks)
        self._dumped = {}
        return before

    buffer_swap = set_replay_buffers

    def _sinks(self, buffers: list[Any]) -> list[Sink]:
        sinks = [self._makes.of(buffer) for buffer in buffers]
        for sink in sinks:
            self._hooks.check(sink)
        return sinks

    # -- dumps -------------------------------------------------------------------------------

    def _dump(self, slots: Any, where: str, if_new: bool = False) -> None:
        """Dump the buffers of some slots; with `if_new` only those with new data since their last dump."""
        assert self._dump_path is not None
        shared = self._replay_mode == "shared"
        for slot in [0] if shared else slots:
            place = place_of(self._dump_path, None if shared else slot)
            sink = self._recorder.sinks[slot]
            if not if_new or sink.num_stored != self._dumped.get(place, 0):
                dump(sink, place, where)
                self._dumped[place] = sink.num_stored

    def _stepped(self, row: tuple[Any, Any, Any, Any, Any]) -> None:
        """Record a step; a dump follows even if a part of it was refused."""
        ended: list[int] = []
        try:
            self._recorder.step(*row, ended)
        finally:
            if ended and self._dumps_at_end:
                self._dump(ended, f"{WHERE}: dump_on_episode_end")

    def _was_reset(self, chosen: list[int], obs: Any, infos: Any, options: Any, seeds: Any) -> None:
        try:
            self._recorder.reset(chosen, obs, infos, options, seeds)
        finally:
            if self._dumps_at_reset:
                self._dump(chosen, f"{WHERE}: dump_on_reset_boundary", if_new=True)

    def _failed(self, error: BaseException, chosen: list[int] | None = None) -> None:
        """Record that the environment raised."""
        for other in self._recorder.lost(chosen):
            error.add_note(f"{WHERE}: {type(other).__name__}: {other}")

    @contextlib.contextmanager
    def _losing(self, chosen: list[int] | None = None) -> Iterator[None]:
        """Record that the environment raised in the `with` block; steps, which are frequent, do without."""
        try:
            yield
        except BaseException as error:
            self._failed(error, chosen)
            raise

    def _finish(self) -> None:
        """Store open episodes as interrupted, at the end of the wrapper's life."""
        faults = Faults()
        self._recorder.finish(faults)
        for error in [e for e in faults.errors if isinstance(e, ClosedError)]:
            log.warning("%s.close: %s: its open episodes are not stored", WHERE, error)
            faults.errors.remove(error)
        faults.throw()


class _Options(TypedDict, total=False):
    """Options of the constructor."""

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


class RecordedEnv(ReplayBufferCollectionWrapper, gymnasium.Wrapper[Any, Any, Any, Any]):
    """Records a `gymnasium.Env`; made by `ReplayBufferCollectionWrapper`."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; an open episode ends as interrupted."""
        with self._losing():
            obs, info = self.env.reset(seed=seed, options=options)
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


class RecordedVectorEnv(ReplayBufferCollectionWrapper, _VectorWrapper):
    """Records a `gymnasium.vector.VectorEnv`; made by `ReplayBufferCollectionWrapper`."""

    _reset_asked: tuple[Any, Any, Any] | None = None

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
        with self._losing(asked[0]):
            obs, infos = self.env.reset(seed=seed, options=options)
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
        with self._losing():
            begin(actions)

    def step_wait(self, **options: Any) -> Row:
        """Return the rows of the step that `step_async` began.

        Args:
            options: `timeout`, as the environment takes it.
        """
        with self._losing(None if self._recorder.is_pending else []):
            row: Row = self.env.step_wait(**options)
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
        with self._losing([] if asked is None else asked[0]):
            obs, infos = self.env.reset_wait(**options)
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


def _autoreset_of(env: Any) -> Any:
    """Return what an environment says of how it resets itself."""
    if isinstance(env, VectorEnv):
        return (env.metadata or {}).get("autoreset_mode")
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            return AutoresetMode.NEXT_STEP
        env = env.env
    return AutoresetMode.DISABLED


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


def _shown(sink: Sink) -> str:
    kind = "transitions of " if sink.by_step else ""
    return f"{kind}{'any' if sink.columns is None else [str(spec) for spec in sink.columns]}"


def _listed(buffers: Any) -> list[Any]:
    """Return one buffer, or several, as a list."""
    return list(buffers) if isinstance(buffers, list | tuple) else [buffers]


def _resolved(mode: str, num: int | None, count: int, where: str) -> str:
    """Return how many buffers go with `num` environments (None: a single one, no vector): "shared", one for all, or
    "per_env", one for each.
    """
    if mode not in _MODES:
        raise InputError(f"{where}: replay_mode must be one of {_MODES}, got {mode!r}")
    envs = "a single environment" if num is None else f"{num} environments"
    if mode == "auto":
        if count == 1:
            return "shared"
        if num is not None and num > 1 and count == num:
            return "per_env"
        raise InputError(f"{where}: {count} buffers for {envs}; expected 1{'' if num in (None, 1) else f', or {num}'}")
    if mode == "shared" and count != 1:
        raise InputError(f"{where}: replay_mode='shared' takes one buffer, got {count}")
    if mode == "per_env" and (num is None or count != num):
        raise InputError(
            f"{where}: replay_mode='per_env' takes a vector environment and a buffer for each, got {count} for {envs}"
        )
    return mode
