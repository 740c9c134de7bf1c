"""The recording wrapper: one name in front of environments of both kinds.

    ReplayBufferCollectionWrapper(env, buffers)
        gymnasium.Env               ─► RecordedEnv         (single.py)
        gymnasium.vector.VectorEnv  ─► RecordedVectorEnv   (vector.py)

    here: which buffer is whose, swapping, dumping        recorder.py: rows

Invariants: what the agent sees is what the environment returned; buffers are swapped whole or not at all.
Not here: when a row begins or ends an episode (slots.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv

from ringmap.errors import ClosedError, InputError, RoleError
from ringmap.recording.dumping import dump, place_of
from ringmap.recording.faults import Faults
from ringmap.recording.hooks import Hooks
from ringmap.recording.keys import Keys
from ringmap.recording.modes import listed, resolved
from ringmap.recording.recorder import Recorder
from ringmap.recording.sinks import Sink, sink_of

if TYPE_CHECKING:
    from ringmap.recording.single import RecordedEnv
    from ringmap.recording.vector import RecordedVectorEnv

__all__ = ["ReplayBufferCollectionWrapper"]

log = logging.getLogger("ringmap")

_WHERE = "ReplayBufferCollectionWrapper"


class _Options(TypedDict, total=False):
    """_Options of the constructor."""

    transition_builder: Any
    validate_transition: bool
    dump_on_episode_end: bool
    dump_on_reset_boundary: bool
    dump_path: str | os.PathLike[str] | None
    context_fn: Callable[..., Any] | None
    stream: bool
    autoreset_mode: AutoresetMode | None


class _Recording:
    """What both kinds share: buffers, swapping, dumps."""

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
        autoreset_mode: AutoresetMode | None = None,
    ) -> None:
        self._num_slots: int | None = getattr(env, "num_envs", None) if isinstance(env, VectorEnv) else None  # fmt: skip
        buffers = listed(replay_buffers)
        self._replay_mode = resolved(replay_mode, self._num_slots, len(buffers), _WHERE)
        if (dump_on_episode_end or dump_on_reset_boundary) and dump_path is None:
            raise InputError(f"{_WHERE}: dump_on_... needs a dump_path")
        mode = self._mode_of(env) if autoreset_mode is None else autoreset_mode
        if not isinstance(mode, AutoresetMode):
            raise InputError(
                f"{_WHERE}: the autoreset mode must be one of gymnasium.vector.AutoresetMode, got {mode!r}; name it with "
                "autoreset_mode="
            )
        single = self._num_slots is None
        spaces = (env.observation_space, env.action_space) if single else (env.single_observation_space, env.single_action_space)  # fmt: skip
        self._keys = Keys(*spaces, context_fn is not None, _WHERE)
        self._hooks = Hooks(self._keys, transition_builder, validate_transition, context_fn)
        self._stream = bool(stream)
        self._dumps_at_end, self._dumps_at_reset = bool(dump_on_episode_end), bool(dump_on_reset_boundary)  # fmt: skip
        self._dump_path = dump_path
        self._dumped: dict[str, int] = {}  # place -> what was stored by then
        self._buffers = buffers
        self._recorder = Recorder(
            self._num_slots or 1, mode.value, self._keys, self._sinks(buffers), self._hooks
        )
        super().__init__(env)  # type: ignore[call-arg]  # Gymnasium's wrapper comes next

    @staticmethod
    def _mode_of(env: Any) -> Any:
        raise NotImplementedError

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
            raise InputError(f"{_WHERE}.dump_path: None, but dump_on_... needs a path")
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

        An episode that is open is split: its rows so far go to its old buffer, as an interrupted episode, and the rest, from its
        newest observation on, to the new one. With any of the last three arguments that is allowed.

        Args:
            replay_buffers: as for the constructor.
            replay_mode: another mode; None keeps the one there is.
            require_same_space: whether the new buffers must have the same columns as the old ones.
            allow_mid_episode: split open episodes.
            finalize_old_segments: split open episodes.
            dump_old: dump the old buffers to `dump_path` once they have all there is for them; splits open episodes.

        Returns:
            The old buffers, a list.

        Raises:
            InputError: (ValueError) the buffers do not fit the mode, or the environment, or have other columns.
            RoleError: (RuntimeError) an episode is open and none of the three permissions is given; `dump_old` without `dump_path`;
                a step was begun by `step_async`. Nothing was changed.
            EnvironmentFault: the disk is full or fails. The old buffers stay.
        """
        where = f"{_WHERE}.set_replay_buffers"
        recorder = self._recorder
        buffers = listed(replay_buffers)
        mode = resolved(replay_mode or self._replay_mode, self._num_slots, len(buffers), where)
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
        sinks = [sink_of(b, self._keys, self._hooks.builds, self._stream) for b in buffers]
        for sink in sinks:
            self._hooks.check(sink)
        return sinks

    # -- dumps -------------------------------------------------------------------------------

    def _dump(self, slots: Any, where: str, if_new: bool = False) -> None:
        """Dump the buffers of some slots; with `if_new` only those that took something since they were dumped there."""
        assert self._dump_path is not None
        shared = self._replay_mode == "shared"
        for slot in [0] if shared else slots:
            place = place_of(self._dump_path, None if shared else slot)
            stored = self._recorder.sinks[slot].num_stored
            if not if_new or stored != self._dumped.get(place, 0):
                dump(self._buffers[slot], place, where)
                self._dumped[place] = stored

    def _stepped(self, row: tuple[Any, Any, Any, Any, Any]) -> None:
        """Record a step; a dump follows even where something in it was refused."""
        ended: list[int] = []
        try:
            self._recorder.step(*row, ended)
        finally:
            if ended and self._dumps_at_end:
                self._dump(ended, f"{_WHERE}: dump_on_episode_end")

    def _was_reset(self, chosen: list[int], obs: Any, infos: Any, options: Any, seeds: Any) -> None:
        try:
            self._recorder.reset(chosen, obs, infos, options, seeds)
        finally:
            if self._dumps_at_reset:
                self._dump(chosen, f"{_WHERE}: dump_on_reset_boundary", if_new=True)

    def _failed(self, error: BaseException, chosen: list[int] | None = None) -> None:
        """Take note that the environment raised."""
        for other in self._recorder.lost(chosen):
            error.add_note(f"{_WHERE}: {type(other).__name__}: {other}")

    def _finish(self) -> None:
        """Store what is open as interrupted, at the end of the wrapper's life."""
        faults = Faults()
        self._recorder.finish(faults)
        for error in [e for e in faults.found if isinstance(e, ClosedError)]:
            log.warning("%s.close: %s: its open episodes are not stored", _WHERE, error)
            faults.found.remove(error)
        faults.throw()


class ReplayBufferCollectionWrapper(_Recording):
    """Records what happens in an environment into replay buffers, and changes nothing that the agent sees.

    A `gymnasium.Wrapper` around a `gymnasium.Env`, a `gymnasium.vector.VectorWrapper` around a vector environment.

    Episode buffers (`ReplayBuffer`) get each finished episode in one commit, T + 1 rows for T steps, as
    `World.collect` writes them: the action stands at the observation at which it was taken, a reward at the observation that it
    came with. Transition buffers (`TransitionReplayBuffer`) get a row per step. The buffer's schema says
    which keys: `obs, next_obs, action` (a Dict or Tuple: `obs/<key>`), `reward, terminated, truncated, done, context, env_index,
    episode_id, t, is_first, is_last, info/<name>`. One without a schema gets obs, action, reward, terminated, truncated.

    A reset, of all or by a mask, ends the open episodes of its slots as interrupted: neither terminated nor truncated.
    So does `close`. An episode without a step is not stored.

    Args:
        env: the environment.
        replay_buffers: a buffer, or one for each environment of a vector environment.
        replay_mode: "shared": one buffer for all. "per_env": one for each. "auto": what fits.
        transition_builder: makes the columns of a step. A function of the keyword arguments `cached_obs,
            cached_context, action, next_obs, reward, terminated, truncated, env_index, rb_single_space`, or an object with
            `transform(dict) -> dict`. Episodes then have a row per step.
        validate_transition: check each transition against the spaces. One that is not in them raises, is not
            stored, and ends its episode, as interrupted; the next row begins another one.
        dump_on_episode_end: dump the buffer when an episode of it was terminated or truncated.
        dump_on_reset_boundary: dump it at each reset before which something was recorded since the last dump.
        dump_path: where to; in mode "per_env" a folder, with `env_<i>` for each buffer. May be assigned.
        context_fn: `(info, options, seed) -> context`, called when an episode begins, for the key `context`. An
            environment that resets by itself has neither options nor seed.
        stream: put each row on disk as it comes: killed, a buffer opened with interrupted="keep" has what was seen.
        autoreset_mode: Gymnasium's `AutoresetMode`; by default what the environment's metadata says.

    Raises:
        InputError: (ValueError) buffers that do not fit the mode or the environment, or a dump flag without `dump_path`.
        ReadOnlyError: a buffer was opened for reading.

    Cost: a copy of each batch per step, and one commit for each finished episode.

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
            from ringmap.recording.vector import RecordedVectorEnv as kind
        elif isinstance(env, gymnasium.Env):
            from ringmap.recording.single import RecordedEnv as kind
        else:
            raise InputError(
                f"{_WHERE}: expected a gymnasium.Env or a gymnasium.vector.VectorEnv, got {type(env).__name__}"
            )
        return object.__new__(kind)

    @overload
    @classmethod
    def shared(
        cls, env: gymnasium.Env[Any, Any], replay_buffer: Any, **options: Unpack[_Options]
    ) -> RecordedEnv: ...
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


def _shown(sink: Sink) -> str:
    kind = "transitions of " if sink.by_step else ""
    return f"{kind}{'any' if sink.columns is None else [str(spec) for spec in sink.columns]}"
