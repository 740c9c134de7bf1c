"""What is known of a source's episodes: built in the background, and kept up to date.

    spans -> ids, lengths               known at once
    rows, data -> return, ended, data   read 1,000 episodes at a time, oldest first; `done` of them are known

Invariants: row i of every array belongs to `ids[i]`; an eviction drops rows in front, a commit adds rows at the end,
and what is known of the others stays; an episode that can't be read is noted, and the next one is read.
Not here: reading (sources.py), sorting and filtering (table.py).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import Any

import numpy as np

from ringmap.clips.facts import REWARDS, TERMINATED, TRUNCATED, name_among
from ringmap.clips.where import Values
from ringmap.datasets.choose import ENDED, OWN, mark_values
from ringmap.datasets.marks import Mark
from ringmap.errors import RingmapError
from ringmap.viewer.limits import GoneError
from ringmap.viewer.sources import Source
from ringmap.viewer.values import plain

__all__ = ["AtWork", "EpisodeIndex"]

Array = np.ndarray[Any, np.dtype[Any]]

_OWN = (*OWN, "damaged")
_AT_ONCE, _MOST_ROWS = 1000, 500_000
_BREATH = 16
"""Episodes between two pauses, in which requests are answered."""
_WAY_S = 0.25
_TURN_S = 0.001
"""Pause after each turn: the lock is not fair, and without a pause the same thread takes it again."""
_MOST_NAMES = 64
"""Names of episode data that are columns; others are shown with the episode alone."""


class _Column:
    """One name of the episode data: a number, or a text, of each episode."""

    def __init__(self, count: int) -> None:
        self.numbers = np.full(count, np.nan)
        self.texts: Array | None = None

    def put(self, row: int, value: Any) -> None:
        if isinstance(value, bool | int | float) and abs(value) < 2**53:
            self.numbers[row] = value
            return
        if self.texts is None:
            self.texts = np.full(len(self.numbers), None, object)
        self.texts[row] = value if isinstance(value, str) else str(value)

    def keep(self, drop: int, add: int) -> None:
        self.numbers = np.concatenate([self.numbers[drop:], np.full(add, np.nan)])
        if self.texts is not None:
            self.texts = np.concatenate([self.texts[drop:], np.full(add, None, object)])

    def value(self, row: int) -> Any:
        if self.texts is not None and self.texts[row] is not None:
            return self.texts[row]
        number = float(self.numbers[row])
        if not math.isfinite(number):
            return None
        return int(number) if number == int(number) else number


class AtWork:
    """Counts what is being done for somebody who waits, so that work in the background gives way: they share one
    interpreter.

    `turn`: held by the index that reads, one at a time.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()
        self.turn = threading.Lock()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            if not self._count:
                self._changed.notify_all()

    def give_way(self) -> None:
        """Wait until nothing is being done, but not long."""
        with self._changed:
            if self._count:
                self._changed.wait(_WAY_S)


class EpisodeIndex:
    """What is known of the episodes of a source.

    Args:
        source: what is read.
        at_work: what it gives way to.
    """

    def __init__(self, source: Source, at_work: AtWork | None = None) -> None:
        self.source, self._at_work = source, at_work or AtWork()
        self.lock = threading.RLock()
        self.version = 0
        self.done = 0
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._chosen: tuple[Any, Array] | None = None
        self.marks: dict[int, Mark] = {}
        self._set(*source.spans())

    def _set(self, ids: Array, lengths: Array) -> None:
        count = len(ids)
        self.ids, self.lengths = ids, lengths
        self.returns, self.ended = np.full(count, np.nan), np.zeros(count, np.int8)
        self.data: dict[str, _Column] = {}
        self.damaged: dict[int, str] = {}
        self.done = 0
        self.version += 1

    def mark(self, marks: dict[int, Mark]) -> None:
        """Take over the marks of episodes."""
        with self.lock:
            if marks != self.marks:
                self.marks = marks
                self.version += 1

    def start(self) -> None:
        """Build in a thread of its own, if that does not run yet."""
        with self.lock:
            if self._thread is None and not self._stop:
                self._thread = threading.Thread(target=self._build, daemon=True, name="ringmap-view-index")
                self._thread.start()

    def stop(self) -> None:
        """Let the thread end soon."""
        self._stop = True
        self._wake.set()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self.stop()
        if self._thread is not None:
            self._thread.join(5)

    def follow(self) -> None:
        """Take over what the source has now. O(episodes), vectorised."""
        with self.lock:
            ids, lengths = self.source.spans()
            drop = int(np.searchsorted(self.ids, ids[0])) if len(ids) else len(self.ids)
            kept = len(self.ids) - drop
            if kept > len(ids) or not np.array_equal(self.ids[drop:], ids[:kept]):
                self._set(ids, lengths)
            else:
                grown = np.flatnonzero(self.lengths[drop:] != lengths[:kept])
                add = len(ids) - kept
                if not (drop or add or len(grown)):
                    return
                self.done = max(0, self.done - drop)
                if len(grown):
                    self.done = min(self.done, int(grown[0]))
                self.ids, self.lengths = ids, lengths
                self.returns = np.concatenate([self.returns[drop:], np.full(add, np.nan)])
                self.ended = np.concatenate([self.ended[drop:], np.zeros(add, np.int8)])
                for column in self.data.values():
                    column.keep(drop, add)
                if self.damaged and len(ids):
                    self.damaged = {n: why for n, why in self.damaged.items() if n >= ids[0]}
                self.version += 1
        self._wake.set()

    def _build(self) -> None:
        while not self._stop:
            try:
                if not self._at_work.turn.acquire(timeout=_WAY_S):
                    continue
                try:
                    is_more = not self._stop and self._next()
                finally:
                    self._at_work.turn.release()
                if is_more:
                    time.sleep(_TURN_S)
                else:
                    self._wake.wait()
                    self._wake.clear()
            except (
                RingmapError,
                OSError,
            ):  # its numbers changed, it is gone, or can't be read for now
                with contextlib.suppress(RingmapError, OSError):
                    self.follow()
                self._wake.wait(0.2)
                self._wake.clear()

    def _next(self) -> bool:
        """Read the next episodes; tell whether there were any."""
        with self.lock:
            first, ids, lengths = self.done, self.ids, self.lengths
        if first >= len(ids):
            return False
        stop = min(len(ids), first + _AT_ONCE)
        total = np.cumsum(lengths[first:stop])
        stop = first + max(1, int(np.searchsorted(total, _MOST_ROWS, side="right")))
        names = ids[first:stop]
        found, damaged = self._read(ids, lengths, first, stop)
        data: list[tuple[int, dict[str, Any]]] = []
        for row, name in enumerate(names.tolist()):
            if self._stop:
                return False
            if row % _BREATH == _BREATH - 1:
                time.sleep(0.0005)
                self._at_work.give_way()
            try:
                values = self.source.data(name)
            except GoneError:
                continue
            except (RingmapError, OSError) as error:
                damaged[name] = str(error)
                continue
            if values:
                data.append((row, values))
        with self.lock:
            at = int(np.searchsorted(self.ids, names[0]))
            if self.ids is not ids:  # some were evicted, or came, meanwhile
                same = len(self.ids) >= at + len(names) and np.array_equal(self.ids[at : at + len(names)], names)
                if not same or at != self.done:
                    return True  # once more
            self._take(at, found, data, damaged)
            self.done = at + len(names)
            self.version += 1
        return True

    def _read(
        self, ids: Array, lengths: Array, first: int, stop: int
    ) -> tuple[tuple[Array | None, Array | None], dict[int, str]]:
        """Return the returns and the endings of episodes, and what is wrong with which."""
        specs = {c.name: c for c in self.source.columns}
        scalar = {n for n, c in specs.items() if math.prod(c.shape) == 1 and c.dtype.kind in "biuf"}
        reward = name_among(REWARDS, scalar)
        ends = {code: name_among(names, scalar) for code, names in ((1, TERMINATED), (2, TRUNCATED))}
        columns = [name for name in (reward, *ends.values()) if name is not None]
        if not columns:
            return (None, None), {}
        sizes = lengths[first:stop]
        row = int(lengths[:first].sum())
        damaged: dict[int, str] = {}
        if self.source.number_of(int(ids[first])) != first:
            raise GoneError("the numbers have changed")
        try:
            found = self.source.rows(row, int(sizes.sum()), columns)
            parts = {name: np.asarray(values).reshape(-1) for name, values in found.items()}
        except (RingmapError, OSError):
            parts = self._one_by_one(ids[first:stop].tolist(), sizes.tolist(), columns, damaged)
        if self.source.number_of(int(ids[first])) != first:
            raise GoneError("the numbers have changed")
        starts = np.cumsum(sizes) - sizes
        filled = np.flatnonzero(sizes)
        returns = ended = None
        if reward is not None:
            returns = np.zeros(len(sizes))
            if len(filled):  # the row of a reset has no reward: NaN
                values = np.nan_to_num(parts[reward].astype(np.float64), nan=0.0)
                returns[filled] = np.add.reduceat(values, starts[filled])
        if any(ends.values()):
            ended = np.zeros(len(sizes), np.int8)
            for code, name in reversed(ends.items()):
                if name is not None and len(filled):
                    last = parts[name][starts[filled] + sizes[filled] - 1].astype(np.float64) == 1
                    ended[filled[last]] = code
        return (returns, ended), damaged

    def _one_by_one(
        self, names: list[int], sizes: list[int], columns: list[str], damaged: dict[int, str]
    ) -> dict[str, Array]:
        parts: dict[str, list[Array]] = {name: [] for name in columns}
        for name, size in zip(names, sizes, strict=True):
            try:
                found = self.source.read(name, 0, size, columns)
            except GoneError:
                raise
            except (RingmapError, OSError) as error:
                damaged[name] = str(error)
                found = {column: np.full(size, np.nan) for column in columns}
            for column in columns:
                parts[column].append(np.asarray(found[column], np.float64).reshape(-1))
        return {column: np.concatenate(values) for column, values in parts.items()}

    def _take(
        self,
        at: int,
        found: tuple[Array | None, Array | None],
        data: list[tuple[int, dict[str, Any]]],
        damaged: dict[int, str],
    ) -> None:
        returns, ended = found
        if returns is not None:
            self.returns[at : at + len(returns)] = returns
        if ended is not None:
            self.ended[at : at + len(ended)] = ended
        for row, values in data:
            for name, value in values.items():
                column = self.data.get(name)
                if column is None:
                    if len(self.data) >= _MOST_NAMES:
                        continue
                    column = self.data[name] = _Column(len(self.ids))
                column.put(at + row, plain(value))
        self.damaged.update(damaged)

    # -- questions ---------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names that conditions and orders may use."""
        return [*_OWN, *self.data_names]

    @property
    def data_names(self) -> list[str]:
        """Names of episode data that are columns."""
        return [name for name in self.data if name not in _OWN]

    def values(self, name: str) -> Values | None:
        """Return a value of each episode, by one of `names`; None if no episode has it."""
        count = len(self.ids)
        none = np.full(count, np.nan)
        if name == "episode":
            return Values(np.arange(count, dtype=np.float64))
        if name == "length":
            return Values(self.lengths.astype(np.float64))
        if name == "return":  # of those that are not known yet, none
            return Values(np.where(np.arange(count) < self.done, self.returns, np.nan))
        if name == "ended":
            return Values(none, np.array(ENDED, object)[self.ended])
        if name == "damaged":
            return Values(np.isin(self.ids, list(self.damaged)).astype(np.float64) if self.damaged else np.zeros(count))
        if name in ("flags", "note"):
            return mark_values(self.ids, self.marks)[name]
        column = self.data.get(name)
        return None if column is None else Values(column.numbers, column.texts)

    def num_marked(self) -> int:
        """Return the number of marked episodes. O(marks log episodes)."""
        return int(np.isin(list(self.marks), self.ids).sum()) if self.marks else 0

    def row(self, i: int) -> dict[str, Any]:
        """Return one row."""
        name, known = int(self.ids[i]), i < self.done
        total, mark = float(self.returns[i]), self.marks.get(name)
        return {
            "id": str(name),
            "episode": i,
            "length": int(self.lengths[i]),
            "known": known,
            "return": total if math.isfinite(total) else None,
            "ended": ENDED[int(self.ended[i])],
            "damaged": self.damaged.get(name),
            "flags": list(mark.flags) if mark else [],
            "note": mark.note if mark else "",
            "data": {n: v for n, c in self.data.items() if (v := c.value(i)) is not None},
        }
