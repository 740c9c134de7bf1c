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
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.clips.where import Values
from ringmap.datasets.episode_table import ENDED, OUTCOMES, OWN, EpisodeTable, end_of_chunk, outcomes
from ringmap.datasets.marks import Mark
from ringmap.errors import RingmapError
from ringmap.viewer.limits import GoneError
from ringmap.viewer.sources import Source
from ringmap.viewer.values import plain

__all__ = ["EpisodeIndex", "RequestCounter"]

Array = np.ndarray[Any, np.dtype[Any]]

_OWN = (*OWN, "damaged")
_NUMBERS = (int, float, np.integer, np.floating)
_MOST_NAMES = 64
"""Names of episode data that are columns; others are shown with the episode alone."""
_BREATH = 16
"""Episodes between two pauses, in which requests are answered."""
_WAY_S = 0.25
_TURN_S = 0.001
"""Pause after each turn: the lock is not fair, and without a pause the same thread takes it again."""


class RequestCounter:
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
        requests: what it gives way to.
    """

    def __init__(self, source: Source, requests: RequestCounter | None = None) -> None:
        self.source, self._requests = source, requests or RequestCounter()
        self.lock = threading.RLock()
        self.version = 1
        self.done = 0
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._chosen: tuple[Any, Array] | None = None
        self.table = EpisodeTable(*source.spans(), _MOST_NAMES)
        self.damaged: dict[int, str] = {}

    @property
    def ids(self) -> Array:
        """What the episodes are called, rising."""
        return self.table.ids

    @property
    def lengths(self) -> Array:
        """Steps of each."""
        return self.table.lengths

    @property
    def marks(self) -> Mapping[int, Mark]:
        """Marks of episodes."""
        return self.table.marks

    def mark(self, marks: dict[int, Mark]) -> None:
        """Take over the marks of episodes."""
        with self.lock:
            if marks != self.table.marks:
                self.table.marks = marks
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
            if np.array_equal(ids, self.ids) and np.array_equal(lengths, self.lengths):
                return
            drop = int(np.searchsorted(self.ids, ids[0])) if len(ids) else len(self.ids)
            known = self.table.follow(ids, lengths)
            if known is None:
                marks, self.table = self.table.marks, EpisodeTable(ids, lengths, _MOST_NAMES)
                self.table.marks, self.damaged, self.done = marks, {}, 0
            else:
                self.done = min(max(0, self.done - drop), known)
                if self.damaged and len(ids):
                    self.damaged = {n: why for n, why in self.damaged.items() if n >= ids[0]}
            self.version += 1
        self._wake.set()

    def _build(self) -> None:
        while not self._stop:
            try:
                if not self._requests.turn.acquire(timeout=_WAY_S):
                    continue
                try:
                    is_more = not self._stop and self._next()
                finally:
                    self._requests.turn.release()
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
        stop = end_of_chunk(lengths, first)
        names = ids[first:stop]
        found, damaged = self._read(ids, lengths, first, stop)
        data: list[tuple[int, dict[str, Any]]] = []
        for row, name in enumerate(names.tolist()):
            if self._stop:
                return False
            if row % _BREATH == _BREATH - 1:
                time.sleep(0.0005)
                self._requests.give_way()
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
            self.table.put_outcomes(at, *found)
            for row, values in data:  # integers of any size and infinities, which a browser gets as texts
                put = {n: v if isinstance(v, _NUMBERS) else plain(v) for n, v in values.items()}
                self.table.put(at + row, put)
            self.damaged.update(damaged)
            self.done = at + len(names)
            self.version += 1
        return True

    def _read(
        self, ids: Array, lengths: Array, first: int, stop: int
    ) -> tuple[tuple[Array | None, Array | None], dict[int, str]]:
        """Return the returns and the endings of episodes, and what is wrong with which."""
        known = {n for names in OUTCOMES.values() for n in names}
        columns = [
            c.name
            for c in self.source.columns
            if c.name in known and math.prod(c.shape) == 1 and c.dtype.kind in "biuf"
        ]
        if not columns:
            return (None, None), {}
        sizes = lengths[first:stop]
        row = int(lengths[:first].sum())
        damaged: dict[int, str] = {}
        if self.source.number_of(int(ids[first])) != first:
            raise GoneError("the numbers have changed")
        try:
            parts = self.source.rows(row, int(sizes.sum()), columns)
        except (RingmapError, OSError):
            parts = self._one_by_one(ids[first:stop].tolist(), sizes.tolist(), columns, damaged)
        if self.source.number_of(int(ids[first])) != first:
            raise GoneError("the numbers have changed")
        return outcomes(parts, sizes), damaged

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

    # -- questions ---------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names that conditions and orders may use."""
        return [*_OWN, *self.data_names]

    @property
    def data_names(self) -> list[str]:
        """Names of episode data that are columns."""
        return list(self.table.data)

    def values(self, name: str) -> Values | None:
        """Return a value of each episode, by one of `names`; None if no episode has it."""
        if name == "damaged":
            return Values(np.isin(self.ids, list(self.damaged)).astype(np.float64))
        return self.table.values(name)

    def num_marked(self) -> int:
        """Return the number of marked episodes. O(marks log episodes)."""
        return int(np.isin(list(self.marks), self.ids).sum()) if self.marks else 0

    def row(self, i: int) -> dict[str, Any]:
        """Return one row."""
        name, known = int(self.ids[i]), i < self.done
        total, mark, data = float(self.table.returns[i]), self.marks.get(name), self.table.data
        return {
            "id": str(name),
            "episode": i,
            "length": int(self.lengths[i]),
            "known": known,
            "return": total if math.isfinite(total) else None,
            "ended": ENDED[int(self.table.ended[i])] or "",
            "damaged": self.damaged.get(name),
            "flags": list(mark.flags) if mark else [],
            "note": mark.note if mark else "",
            "data": {n: plain(v) for n, c in data.items() if (v := c.get(i)) is not None},
        }
