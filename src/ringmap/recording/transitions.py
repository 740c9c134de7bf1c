"""Transitions: one step per slot, computed from its newest rows.

    rows t, t+1 of a slot ─► (obs, action, reward, next_obs, ...) ─┬─ hooks: built, checked
                                                                   ├─ a batch of them ─► RowSink
                                                                   └─ row t, complete now ─► a stream

Invariants: a cut slot has no transition in this step; all other slots have one.
Not here: whole episodes (recorder.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.recording.adapters import EpisodeSink, RowSink, Sink
from ringmap.recording.deferred_errors import Faults
from ringmap.recording.hooks import Hooks
from ringmap.recording.open_episodes import OpenRows
from ringmap.recording.slots import Slots
from ringmap.storage.columns.values import as_array

__all__ = ["Ending", "Transitions"]

Array = np.ndarray[Any, np.dtype[Any]]
Values = dict[str, Any]


class Ending(dict[str, Any]):
    """The values that `OpenRows.cut` needs in addition to the rows of an episode.

    Args:
        slot: whose.
        slots: their states.
        contexts: one per slot.
        last: the number of its last row; None while it goes on.
        terminated: how it ended.
        truncated: likewise.
    """

    def __init__(
        self,
        slot: int,
        slots: Slots,
        contexts: Sequence[Any],
        last: int | None = None,
        terminated: bool = False,
        truncated: bool = False,
    ) -> None:
        super().__init__(
            last=last,
            terminated=terminated,
            truncated=truncated,
            done=terminated or truncated,
            is_last=True,
            env_index=slot,
            episode_id=int(slots.episode[slot]),
        )
        self._context = contexts[slot]

    def __missing__(self, name: str) -> Any:
        return _part(self._context, name)


class Transitions:
    """The steps of all slots.

    Args:
        rows: of the open episodes.
        slots: their states, as they were before this row.
        by_slot: the sink of each slot.
        hooks: builder and validator.
        contexts: one per slot.
        data: of the open episode of each slot.
        infos: columns of values out of infos.
    """

    def __init__(
        self,
        rows: OpenRows,
        slots: Slots,
        by_slot: Sequence[Sink],
        hooks: Hooks,
        contexts: Sequence[Any],
        data: Sequence[Mapping[str, Any]],
        infos: Sequence[str],
    ) -> None:
        self._rows, self._slots, self._by_slot = rows, slots, by_slot
        self._hooks, self._contexts, self._data, self._infos = hooks, contexts, data, infos
        self._built: list[list[Values]] = [[] for _ in by_slot]
        self._hooked = hooks.builds or hooks.validates
        self._sinks = list(dict.fromkeys(by_slot))
        self._numbers = [list(by_slot[:s]).count(sink) for s, sink in enumerate(by_slot)]
        """The number of each slot among those of its sink."""
        self._idle = not self._hooked and all(isinstance(s, EpisodeSink) and not s.stream for s in by_slot)

    def built(self, slot: int) -> list[Values]:
        """Return the built rows of a slot's open episode, and forget them."""
        found, self._built[slot] = self._built[slot], []
        return found

    def take(self, terminated: Array, truncated: Array, faults: Faults) -> None:
        """Build, check, hand on and stream the newest steps of the slots that took one."""
        if self._idle:
            return
        where = self._hooks.keys.where
        built: dict[int, Values] = {}
        playing = self._slots.playing
        if self._hooked:
            for slot in playing:
                if slot not in faults.cut:
                    with faults.cutting(
                        slot, f"{where}: env {slot}: this step is not stored, its episode ends before it"
                    ):
                        raw = self._raw(slot, bool(terminated[slot]), bool(truncated[slot]))
                        built[slot] = self._hooks.build(raw, self._contexts[slot], self._by_slot[slot])
        for sink in self._sinks:
            mine = [s for s in playing if self._by_slot[s] is sink and s not in faults.cut]
            if isinstance(sink, RowSink) and mine:
                try:
                    taken = np.array(mine)
                    batch = self._batch(sink, taken, built, terminated, truncated)
                    sink.add(batch, self._slots.steps[taken] == 0, [self._numbers[s] for s in mine])
                except Exception as error:
                    faults.cut.update(mine)
                    faults.note(error, f"{where}: envs {mine}: this step is not stored")
            elif isinstance(sink, EpisodeSink) and sink.stream:
                for slot in mine:
                    with faults.cutting(
                        slot, f"{where}: env {slot}: this step is not stored, its episode ends before it"
                    ):
                        sink.append(
                            slot, built[slot] if self._hooks.builds else self._row(slot, sink), self._data[slot]
                        )
            elif self._hooks.builds:
                for slot in mine:
                    self._built[slot].append(built[slot])

    def _row(self, slot: int, sink: Sink) -> Values:
        """Return the row before the newest: its action has been taken, so it is complete."""
        row = int(self._rows.at[slot]) - 1
        ending = Ending(slot, self._slots, self._contexts)
        rows = self._rows.cut(slot, row, row + 1, sink.names, ending)
        return {name: values[0] for name, values in rows.items()}

    def _raw(self, slot: int, terminated: bool, truncated: bool) -> Values:
        """Return the step of a slot by flat keys, copies."""
        rows, keys, one = self._rows, self._hooks.keys, np.array([slot])
        raw: Values = {}
        for leaf in keys.obs:
            raw[leaf.name] = rows.newest(leaf.name, one, 1)[0]
            raw[f"next_{leaf.name}"] = rows.newest(leaf.name, one)[0]
        for leaf in keys.action:
            raw[leaf.name] = rows.newest(leaf.name, one, 1)[0]
        steps = int(self._slots.steps[slot])
        raw |= {
            "reward": float(rows.newest("reward", one)[0]),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated or truncated,
            "env_index": slot,
            "episode_id": int(self._slots.episode[slot]),
            "t": steps,
            "is_first": steps == 0,
            "is_last": terminated or truncated,
        }
        for name in self._infos:
            raw[name] = rows.newest(name, one)[0]
        return raw

    def _batch(
        self, sink: RowSink, slots: Array, built: Mapping[int, Values], terminated: Array, truncated: Array
    ) -> Values:
        """Return the steps of some slots, column -> `(n, ...)`."""
        if self._hooks.builds:
            made = [built[slot] for slot in slots.tolist()]
            return {name: np.stack([row[name] for row in made]) for name in made[0]}
        rows, batch, steps = self._rows, Values(), self._slots.steps[slots]
        done = terminated[slots] | truncated[slots]
        plain = {
            "terminated": terminated[slots],
            "truncated": truncated[slots],
            "done": done,
            "is_last": done,
            "is_first": steps == 0,
            "t": steps,
            "env_index": slots,
            "episode_id": self._slots.episode[slots],
        }
        for name in sink.names:
            kind = name.partition("/")[0]
            if name in plain:
                batch[name] = plain[name]
            elif kind == "next_obs":
                batch[name] = rows.newest(name.removeprefix("next_"), slots)
            elif kind == "context":
                parts = [as_array(_part(self._contexts[slot], name), name, "item") for slot in slots.tolist()]
                batch[name] = np.stack(parts)
            else:
                batch[name] = rows.newest(name, slots, 1 if kind in ("obs", "action") else 0)
        return batch


def _part(context: Any, name: str) -> Any:
    """Return a context, or a part of it, by the name of its column.

    Raises:
        InputError: there is none.
    """
    try:
        for key in name.split("/")[1:]:
            context = context[key]
    except (KeyError, IndexError, TypeError):
        context = None
    if context is None:
        raise InputError(f"column {name!r}: context_fn returned nothing of it for this episode")
    return context
