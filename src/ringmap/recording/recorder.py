"""The recorder: rows of steps in, episodes and transitions out.

    act(actions) ─► env.step ─► step(obs, reward, flags, infos)
                                  │ each slot's row, after its last one                open_episodes.py
                                  │ a hook or check that fails cuts its own slot only
                                  ├─ transitions, streamed rows
                                  └─ who ended: the whole episode                      adapters.py
                                finally: the state of every slot matches its environment  slots.py

Invariants: whatever fails in a step, the next row of every slot is recorded correctly; no stored episode
has rows of two episodes, and none has a gap.
Not here: Gymnasium's classes, swapping and dumping (wrapper.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.errors import InputError, RolloutError
from ringmap.fleet.weights import POLICY_STEP, Weights
from ringmap.recording.adapters import EpisodeSink, RowSink, Sink
from ringmap.recording.deferred_errors import Faults
from ringmap.recording.hooks import Hooks
from ringmap.recording.infos import info_of, value_of
from ringmap.recording.keys import COUNTS, FLAGS, Keys
from ringmap.recording.open_episodes import OpenRows, one_behind_the_other
from ringmap.recording.slots import SAME_STEP, Slots
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.columns.text import put
from ringmap.storage.columns.values import as_array, cast
from ringmap.storage.commit.store import JOINED_NBYTES

__all__ = ["Recorder"]

Array = np.ndarray[Any, np.dtype[Any]]
Infos = Mapping[str, Any]
Values = dict[str, Any]
_REWARD, _FLAG = np.dtype(np.float64), np.dtype(np.bool_)


class Recorder:
    """Records `num` slots into one sink for all, or one for each; `mode` is the value of an `AutoresetMode`."""

    def __init__(
        self, num: int, mode: str, keys: Keys, sinks: Sequence[Sink], hooks: Hooks, weights: Weights | None = None
    ) -> None:
        self.num, self.keys, self.hooks, self.where = num, keys, hooks, keys.where
        self.slots = Slots(num, mode)
        self._contexts: list[Any] = [None] * num
        self._weights = weights
        self._data: list[dict[str, Any]] = [{} for _ in range(num)]
        self._everyone = list(range(num))
        self._acted = False
        self._rows: OpenRows | None = None
        self.install(sinks)

    # -- buffers -------------------------------------------------------------------------------

    def install(self, sinks: Sequence[Sink]) -> None:
        """Record into these from now on; an open episode continues with its newest row."""
        self.sinks, before = list(sinks), self._rows
        self._by_slot = list(sinks) if len(sinks) == self.num else [*sinks] * self.num
        episodes = [sink for sink in sinks if isinstance(sink, EpisodeSink)]
        columns = {x.name: ColumnSpec(x.name, x.shape, x.dtype) for x in (*self.keys.obs, *self.keys.action)}
        columns["reward"] = ColumnSpec("reward", (), _REWARD)
        infos = {c.name: c for s in sinks for c in s.columns or () if c.name.startswith("info/")}
        self._infos = sorted(infos)
        rows = OpenRows(self.num, [*columns.values(), *infos.values()], bool(episodes) and not self.hooks.builds)
        if before is not None:
            rows.take(before)
        self._rows = self._open = rows
        self._numbers = self._everyone if len(sinks) == 1 else [0] * self.num
        """The number of each slot among those of its sink."""
        self._built: list[list[Values]] = [[] for _ in self._by_slot]
        self._idle = not (self.hooks.builds or self.hooks.validates) and all(not (s.by_step or s.stream) for s in sinks)
        self._in_parts = [
            slot for slot, sink in enumerate(self._by_slot) if sink.commit_every is not None and rows.history
        ]
        self._limit = min((sink.max_steps for sink in episodes), default=None)

    @property
    def open_slots(self) -> list[int]:
        """Slots whose open episode has a step to store."""
        return [slot for slot in self.slots.playing if self.slots.steps[slot]]

    @property
    def is_pending(self) -> bool:
        """Whether there are actions whose rows have not come yet."""
        return self._acted

    def split(self) -> None:
        """Store open episodes as interrupted; the environments continue, and their next rows are another episode."""
        faults = Faults()
        for slot in self.slots.playing:
            self._end(slot, False, False, faults, close=False)
        self._open.keep_newest([*self._open.arrays])
        self.slots.split()
        self._note_weights(self.slots.playing)
        faults.throw()

    # -- what happens --------------------------------------------------------------------------

    def act(self, actions: Any) -> None:
        """Take the actions of the next step, before the environment does."""
        where = f"{self.where}.step"
        self.slots.check_step(where)
        self._open.put(
            {
                leaf.name: self._fitted(leaf.name, leaf.shape, leaf.dtype, leaf.of(actions), where)
                for leaf in self.keys.action
            }
        )
        self._acted = True

    def step(self, obs: Any, rewards: Any, terminated: Any, truncated: Any, infos: Infos, ended: list[int]) -> None:
        """Take the rows of a step; `ended` takes the slots whose episodes terminated or were truncated."""
        self._acted = False
        try:
            arrived, where = self._arrived(obs), f"{self.where}.step"
            rewards = self._fitted("reward", (), _REWARD, rewards, where)
            terminated = self._fitted("terminated", (), _FLAG, terminated, where)
            truncated = self._fitted("truncated", (), _FLAG, truncated, where)
            over = (terminated | truncated).nonzero()[0].tolist()
        except Exception as error:
            for other in self.lost():
                error.add_note(str(other))
            raise
        rows, slots, faults = self._open, self.slots, Faults()
        done = [slot for slot in over if slots.is_playing(slot)]
        try:
            final = done if slots.mode == SAME_STEP else []
            landing = self._finals(arrived, infos, final, faults) if final else arrived
            rows.advance()
            rows.put({**landing, "reward": rewards})
            if self._infos:
                self._put_infos(infos, set(self._everyone).difference(final), faults)
                self._put_infos(infos.get("final_info", {}), final, faults)
            if self._limit is not None and self._longest() > self._limit:
                self._check_length(faults)
            if not self._idle:
                self._take_step(terminated, truncated, faults)
            many = len(faults.cut.union(done)) > 1
            for slot in sorted(faults.cut):
                rows.at[slot] -= 1
                self._end(slot, False, False, faults, sync=not many)
            whole = [slot for slot in done if slot not in faults.cut]
            for slot in self._end_joined(whole, terminated, truncated) if whole else ():
                self._end(slot, bool(terminated[slot]), bool(truncated[slot]), faults, sync=not many)
            ended += whole
            if many:
                for sink in self.sinks:
                    with faults.collecting("what this step stored may not be durable"):
                        sink.sync()
        except BaseException:
            # An interrupt in the middle: open episodes are abandoned, so that no later rows are joined to them.
            faults.cut.update(slots.playing)
            for slot in self._everyone:
                self._forget(slot)
            raise
        finally:
            begun = slots.advance(over, faults.cut)
            if begun:
                # A cut slot is still in its environment's episode, and keeps its context.
                anew = [slot for slot in begun if slot not in faults.cut or slot in over]
                self._begin(begun, anew, arrived, infos, None, [None] * self.num, faults)
            if self._in_parts:
                rows.drop_stored(self._in_parts)
            if not rows.history:
                rows.keep_newest([leaf.name for leaf in self.keys.obs])
        faults.throw()

    def reset(self, chosen: Sequence[int], obs: Any, infos: Infos, options: Any, seeds: Sequence[Any]) -> None:
        """Take what a reset of the `chosen` slots returned: their open episodes are over, and new ones begin.

        `obs` is the batch of all slots, `seeds` has one for each.
        """
        faults = Faults()
        self._leave(chosen, faults)
        arrived = self._arrived(obs)
        self.slots.reset(chosen)
        self._begin(chosen, chosen, arrived, infos, options, seeds, faults)
        faults.throw()

    def lost(self, chosen: Sequence[int] | None = None) -> list[Exception]:
        """End open episodes after the environment raised, as its state is unknown; return the errors."""
        faults = Faults()
        self._leave(self._everyone if chosen is None else chosen, faults)
        return faults.errors

    def finish(self, faults: Faults) -> None:
        """Store open episodes as interrupted, permanently."""
        self._leave(self._everyone, faults)

    # -- one row ---------------------------------------------------------------------------------

    def _arrived(self, obs: Any) -> dict[str, Array]:
        where = f"{self.where}: observation"
        return {
            leaf.name: self._fitted(leaf.name, leaf.shape, leaf.dtype, leaf.of(obs), where) for leaf in self.keys.obs
        }

    def _fitted(self, name: str, of_one: tuple[int, ...], dtype: np.dtype[Any], value: Any, where: str) -> Array:
        """Return a batch of values in a shape and dtype, as a space says; itself if it has them."""
        shape = (self.num, *of_one)
        if type(value) is np.ndarray and value.dtype == dtype and value.shape == shape:
            return value
        batch = as_array(value, f"{where}: {name!r}", "env")
        if batch.shape != shape:
            if batch.shape[:1] != shape[:1] or batch.size != np.prod(shape, dtype=np.int64):
                raise InputError(f"{where}: {name!r} has shape {batch.shape}, expected {shape}")
            batch = batch.reshape(shape)
        if batch.dtype != dtype:
            batch = cast(batch, dtype, self.sinks[0].casting, f"{where}: {name!r}")
        return batch

    def _finals(self, arrived: dict[str, Array], infos: Infos, done: Sequence[int], faults: Faults) -> dict[str, Array]:
        """Return the rows with the last observations of episodes that ended, in place of the first of the next."""
        landing = {name: values.copy() for name, values in arrived.items()}
        for slot in done:
            with faults.collecting(self._label(slot, "its last step is not stored"), slot):
                final = value_of(infos, "final_obs", slot)
                if final is None:
                    raise RolloutError(
                        f"{self.where}.step: env {slot} ended its episode in autoreset mode SAME_STEP, but the infos "
                        "have no final_obs of it, or its reset wrote over it; let the environment return copies of its "
                        "observations, or name its real mode with autoreset_mode="
                    )
                for leaf in self.keys.obs:
                    value = as_array(leaf.of(final), f"{self.where}.step: final_obs {leaf.name!r} of env {slot}")
                    if value.shape != leaf.shape:
                        raise InputError(
                            f"{self.where}.step: final_obs {leaf.name!r} of env {slot} has shape {value.shape}, "
                            f"expected {leaf.shape}"
                        )
                    fitted = cast(value[None], leaf.dtype, self.sinks[0].casting, f"{self.where}: final_obs")
                    landing[leaf.name] = put(landing[leaf.name], slot, fitted[0, ...])
        return landing

    def _put_infos(self, infos: Infos, slots: Iterable[int], faults: Faults, cuts: bool = True) -> None:
        for slot in slots:
            for name in self._infos:
                value = value_of(infos, name.removeprefix("info/"), slot)
                self._open.put_one(slot, name, None, self.where)
                if value is not None:
                    with faults.collecting(self._label(slot, "this row is not stored"), *([slot] if cuts else ())):
                        self._open.put_one(slot, name, value, f"{self.where}: {name!r}")

    def _longest(self) -> int:
        """Return how many rows the longest open episode would have in its buffer; or more."""
        if self.hooks.builds:
            return int(self.slots.steps.max()) + 1
        return self._open.longest(self._limit or 0)

    def _check_length(self, faults: Faults) -> None:
        for slot in self.slots.playing:
            sink, steps = self._by_slot[slot], int(self.slots.steps[slot])
            length = steps + (1 if self.hooks.builds else 2)
            if length > sink.max_steps:
                with faults.collecting(self._label(slot, "it is stored up to here, and a new one begins"), slot):
                    raise InputError(
                        f"{self.where}.step: the open episode of env {slot} exceeds max_steps={sink.max_steps} of its "
                        "buffer; raise max_steps, or end episodes sooner"
                    )

    # -- one step --------------------------------------------------------------------------------

    def _take_step(self, terminated: Array, truncated: Array, faults: Faults) -> None:
        """Build, check, hand on and stream the newest steps of the slots that took one."""
        about, built = "this step is not stored, its episode ends before it", dict[int, Values]()
        playing = [slot for slot in self.slots.playing if slot not in faults.cut]
        if self.hooks.builds or self.hooks.validates:
            for slot in playing:
                with faults.collecting(self._label(slot, about), slot):
                    raw = self._raw(slot, terminated, truncated)
                    built[slot] = self.hooks.build(raw, self._contexts[slot], self._by_slot[slot])
        for sink in self.sinks:
            mine = [slot for slot in playing if self._by_slot[slot] is sink and slot not in faults.cut]
            if isinstance(sink, RowSink) and mine:
                try:
                    if self.hooks.builds:
                        made = [built[slot] for slot in mine]
                        batch = {name: np.stack([row[name] for row in made]) for name in made[0]}
                    else:
                        batch = self._steps_of(sink.names, np.array(mine), terminated, truncated)
                    sink.add(batch, self.slots.steps[mine] == 0, [self._numbers[slot] for slot in mine])
                except Exception as error:
                    faults.note(error, f"{self.where}: envs {mine}: this step is not stored", *mine)
            elif isinstance(sink, EpisodeSink) and sink.stream:
                for slot in mine:
                    with faults.collecting(self._label(slot, about), slot):
                        # The row before the newest: its action has been taken, so it is complete.
                        row = built[slot] if self.hooks.builds else self._row(slot, sink, int(self._open.at[slot]) - 1)
                        sink.append(slot, row, self._data[slot])
            elif self.hooks.builds:
                for slot in mine:
                    self._built[slot].append(built[slot])

    def _row(self, slot: int, sink: Sink, row: int, ended: tuple[bool, bool] | None = None) -> Values:
        rows = self._open.cut(slot, row, row + 1, sink.names, self._constant, ended)
        return {name: values[0] for name, values in rows.items()}

    def _raw(self, slot: int, terminated: Array, truncated: Array) -> Values:
        """Return the step of a slot by flat keys, copies."""
        names = [*self.keys.known, *self._infos]
        steps = self._steps_of(names, np.array([slot]), terminated, truncated)
        plain = {"reward", *FLAGS, *COUNTS}
        return {name: values[0].item() if name in plain else values[0] for name, values in steps.items()}

    def _steps_of(self, names: Iterable[str], slots: Array, terminated: Array, truncated: Array) -> Values:
        """Return the newest steps of some slots, column -> `(n, ...)`."""
        rows, batch, steps = self._open, Values(), self.slots.steps[slots]
        done = terminated[slots] | truncated[slots]
        plain = {
            "terminated": terminated[slots],
            "truncated": truncated[slots],
            "done": done,
            "is_last": done,
            "is_first": steps == 0,
            "t": steps,
            "env_index": slots,
            "episode_id": self.slots.episode[slots],
        }
        for name in names:
            kind = name.partition("/")[0]
            if name in plain:
                batch[name] = plain[name]
            elif kind == "next_obs":
                batch[name] = rows.newest(name.removeprefix("next_"), slots)
            elif kind == "context":
                parts = [as_array(self._constant(slot, name), name, "item") for slot in slots.tolist()]
                batch[name] = np.stack(parts)
            else:
                batch[name] = rows.newest(name, slots, 1 if kind in ("obs", "action") else 0)
        return batch

    def _constant(self, slot: int, name: str) -> Any:
        """Return a value that is constant in a slot's episode, by the name of its column."""
        if name in ("env_index", "episode_id"):
            return slot if name == "env_index" else int(self.slots.episode[slot])
        part = self._contexts[slot]
        try:
            for key in name.split("/")[1:]:
                part = part[key]
        except (KeyError, IndexError, TypeError):
            part = None
        if part is None:
            raise InputError(f"column {name!r}: context_fn returned nothing of it for this episode")
        return part

    # -- ends and beginnings ---------------------------------------------------------------------

    def _end(
        self, slot: int, terminated: bool, truncated: bool, faults: Faults, close: bool = True, sync: bool = True
    ) -> None:
        """Store the open episode of a slot, with its newest row as the last; one without a step is not stored."""
        sink, rows, ended, is_stored = self._by_slot[slot], self._open, (terminated, truncated), False
        last = int(rows.at[slot])
        try:
            if not isinstance(sink, EpisodeSink):
                return
            with faults.collecting(self._label(slot, "not all of it is stored")):
                if self.hooks.builds:
                    built, self._built[slot] = self._built[slot], []
                    if built and not sink.stream:
                        sink.write({name: [row[name] for row in built] for name in built[0]}, self._data[slot], sync)
                elif last + int(rows.before[slot]) < 1:
                    return
                elif sink.stream:
                    sink.append(slot, self._row(slot, sink, last, ended), self._data[slot])
                else:
                    sink.write(rows.cut(slot, 0, last + 1, sink.names, self._constant, ended), self._data[slot], sync)
                sink.finish(slot, terminated, truncated)
                is_stored = True
            if not is_stored:
                sink.give_up(slot)
        finally:
            if close:
                rows.at[slot] = -1

    def _end_joined(self, slots: Sequence[int], terminated: Array, truncated: Array) -> Sequence[int]:
        """Store the open episodes of slots that end at this step, those of a sink together; return the slots still to
        be ended by `_end`."""
        if len(self.sinks) == 1:
            count = self._write_joined(self.sinks[0], slots, terminated, truncated)
            return slots[count:]
        return [slot for slot in slots if not self._write_joined(self._by_slot[slot], [slot], terminated, truncated)]

    def _write_joined(self, sink: Sink, slots: Sequence[int], terminated: Array, truncated: Array) -> int:
        """Store the open episodes of slots of one sink together; return how many were stored. `_end` stores the rest,
        or says what is wrong."""
        if not sink.joins or self.hooks.builds:
            return 0
        rows = self._open
        lengths = [rows.at.item(slot) + 1 for slot in slots]
        if min(lengths) < 2 or sum(lengths) * rows.row_nbytes > JOINED_NBYTES:
            return 0
        whole = [
            (slot, n, (terminated.item(slot), truncated.item(slot))) for slot, n in zip(slots, lengths, strict=True)
        ]
        try:
            joined = one_behind_the_other(
                [rows.cut(slot, 0, n, sink.names, self._constant, ended) for slot, n, ended in whole]
            )
        except ValueError:  # a context that is missing, or has another shape or kind
            return 0
        data = [self._data[slot] for slot in slots] if self._weights is not None else []
        count = sink.write_joined(joined, lengths, data)
        for slot in slots[:count]:
            rows.at[slot] = -1
        return count

    def _leave(self, chosen: Sequence[int], faults: Faults) -> None:
        """End the open episodes of some slots, whose next row belongs to another episode."""
        self._acted = False
        try:
            for slot in chosen:
                if self.slots.is_playing(slot):
                    self._end(slot, False, False, faults)
        except BaseException:
            for slot in chosen:
                self._forget(slot)
            raise
        finally:
            self._open.at[list(chosen)] = -1
            self.slots.lose(chosen)

    def _forget(self, slot: int) -> None:
        self._open.at[slot] = -1
        self._built[slot] = []
        self._by_slot[slot].give_up(slot)

    def _begin(
        self,
        begun: Sequence[int],
        anew: Sequence[int],
        arrived: dict[str, Array],
        infos: Infos,
        options: Any,
        seeds: Sequence[Any],
        faults: Faults,
    ) -> None:
        """Begin episodes; get the contexts and the newest weights of those that begin in the environment, too."""
        self._open.begin(begun, arrived)
        if self._infos:
            self._put_infos(infos, begun, faults, cuts=False)
        if self.hooks.context_fn is not None:
            first = {n: infos[n] for n in infos if n.lstrip("_") not in ("final_obs", "final_info")}
            for slot in anew:
                self._contexts[slot] = None
                with faults.collecting(self._label(slot, "its episode has no context")):
                    self._contexts[slot] = self.hooks.context_fn(info_of(first, slot), options, seeds[slot])
        if self._weights is not None and anew:
            with faults.collecting(f"{self.where}: the policy of envs {list(anew)} is what it was"):
                self._weights.load_into()
        self._note_weights(begun)

    def _note_weights(self, begun: Iterable[int]) -> None:
        """Name in the data of new episodes the weights that play them."""
        if self._weights is not None:
            for slot in begun:
                self._data[slot] = {POLICY_STEP: self._weights.policy_step}

    def _label(self, slot: int, what: str) -> str:
        return f"{self.where}: env {slot}, episode {self.slots.episode[slot]}: {what}"
