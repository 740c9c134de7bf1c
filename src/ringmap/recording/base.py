"""Shared code of both recording wrappers: the buffers of the slots, swapping, dumps.

Invariants: the agent sees exactly what the environment returned; buffers are swapped whole or not at all.
Not here: when a row begins or ends an episode (slots.py), how the environment is called (single.py, vector.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from ringmap.errors import ClosedError, InputError, RoleError
from ringmap.fleet.pace import Pace
from ringmap.fleet.weights import Weights
from ringmap.recording.adapters import Sink, sink_of
from ringmap.recording.deferred_errors import Faults
from ringmap.recording.dumping import dump, place_of
from ringmap.recording.hooks import Hooks
from ringmap.recording.keys import Keys
from ringmap.recording.recorder import Recorder
from ringmap.storage.disk.paths import refuse_address

__all__ = ["WHERE", "Recording"]

log = logging.getLogger("ringmap")

WHERE = "ReplayBufferCollectionWrapper"

_MODES = ("auto", "shared", "per_env")


class Recording:
    """Buffers, and the recording into them; the wrapper of an environment comes after it."""

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
        mode = self._mode_of(env) if autoreset_mode is None else autoreset_mode
        if not isinstance(mode, AutoresetMode):
            raise InputError(
                f"{WHERE}: the autoreset mode must be one of gymnasium.vector.AutoresetMode, got {mode!r}; name it "
                "with autoreset_mode="
            )
        _check_weights(weights)
        if pace is not None and not isinstance(pace, Pace):
            raise InputError(f"{WHERE}: pace= must be a ringmap.Pace, got {type(pace).__name__}")
        single = self._num_slots is None
        spaces = (
            (env.observation_space, env.action_space)
            if single
            else (env.single_observation_space, env.single_action_space)
        )
        self._keys = Keys(*spaces, context_fn is not None, WHERE)
        self._hooks = Hooks(self._keys, transition_builder, validate_transition, context_fn)
        self._stream, self._commit_every, self._pace = bool(stream), commit_every, pace
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
        sinks = [
            sink_of(b, self._keys, self._hooks.builds, self._stream, self._commit_every, self._pace) for b in buffers
        ]
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

    def _finish(self) -> None:
        """Store open episodes as interrupted, at the end of the wrapper's life."""
        faults = Faults()
        self._recorder.finish(faults)
        for error in [e for e in faults.found if isinstance(e, ClosedError)]:
            log.warning("%s.close: %s: its open episodes are not stored", WHERE, error)
            faults.found.remove(error)
        faults.throw()


def _check_weights(weights: Any) -> None:
    if weights is not None and (not isinstance(weights, Weights) or weights.model is None):
        raise InputError(
            f"{WHERE}: weights= must be a ringmap.Weights with the model that acts, ringmap.Weights(path, model), got "
            f"{weights!r}"
        )


def _shown(sink: Sink) -> str:
    kind = "transitions of " if sink.by_step else ""
    return f"{kind}{'any' if sink.columns is None else [str(spec) for spec in sink.columns]}"


def _listed(given: Any) -> list[Any]:
    """Return the buffers that were given, one or several, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def _resolved(mode: str, num: int | None, count: int, where: str) -> str:
    """Return how many buffers go with how many environments: "shared", one for all, or "per_env", one for each.

    Args:
        mode: as it was asked for.
        num: environments; None for a single one that is no vector.
        count: buffers.
        where: the method to name in an error.

    Raises:
        InputError: the buffers do not fit the mode.
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
