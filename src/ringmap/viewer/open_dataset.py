"""A place that was opened: one reader, the index of its episodes, and their table, of one place or of several.

    source (sources.py) -> OpenDataset: state, columns, thumbnail
                               |
    spans -> EpisodeIndex: ids, lengths   known at once; returns, ends and data are read in the background, oldest
                               |          first, 1,000 episodes at a time: `done` of them are known
                               v
    ring a   0  1  2  3    JoinedTable    age:   3  2  1  0      the newest has age 0
    ring b         0  1        -->             1  0
    table    a0 a1 a2 b0 a3 b1            by age: episodes carry no time, so the newest of each ring stand together

Invariants: what is known of episodes that stay stays known; an episode that can't be read is noted, and the next one is
read; row i of a table is the same episode in all answers of one `version`.
Not here: which places there are (places.py, library.py), conditions (clips/where.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.clips.where import Condition, Values
from ringmap.datasets.episode_table import ENDED, OUTCOMES, OWN, EpisodeTable, end_of_chunk, in_order, outcomes
from ringmap.datasets.marks import Mark
from ringmap.errors import ClipIndexError, InputError, RingmapError
from ringmap.fleet.weights import POLICY_STEP
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.inspect.describe import Facts, writer_of
from ringmap.viewer.drawing import GoneError, kind_of, plain, thumbnail
from ringmap.viewer.places import Place
from ringmap.viewer.sources import Source

__all__ = ["EpisodeIndex", "JoinedTable", "OpenDataset", "Part", "RequestCounter", "described", "idle_s"]


Array = np.ndarray[Any, np.dtype[Any]]

_SHOWN_ROWS = 1000


class OpenDataset:
    """A place that was opened.

    Args:
        place: where.
        source: its episodes.
        marks: the file of marks; None: beside the data.
        requests: the requests that the index waits for.
    """

    def __init__(
        self,
        place: Place,
        source: Source,
        marks: str | None = None,
        requests: RequestCounter | None = None,
    ) -> None:
        self.place, self.source = place, source
        self._marks = marks
        self._marks_seen: tuple[int, ...] = ()
        self.marks_problem: str | None = None
        self.can_mark = True
        """Whether there is a place for marks."""
        self._followed = source.moment()
        self.index = EpisodeIndex(source, requests)
        self.table = JoinedTable([Part(place.key, os.path.basename(place.path), self.index)])
        self._played: tuple[int, int | None] = -1, None
        self._lock = threading.RLock()
        self._poll_marks()
        self._now = self._poll()

    def state(self) -> dict[str, Any]:
        """Return what is stored now, without looking for more."""
        return self._now

    def follow(self) -> dict[str, Any]:
        """Poll for what is new, bring the index up to date, and return what is stored."""
        with self._lock:
            self.source.refresh()
            self._poll_marks()
            if (moment := self.source.moment()) != self._followed:
                self.index.follow()
                self._followed = moment
            self._now = self._poll()
            return self._now

    def mark(self, name: int, flags: list[str] | None, note: str | None) -> dict[str, Any]:
        """Mark an episode, and return its row of the table."""
        with self._lock:
            try:
                with self.source.marks(self._marks) as marks:
                    marks.set(name, flags=flags, note=note)
            except ClipIndexError:
                raise GoneError("this episode was evicted") from None
            self.follow()
            return self.index.row(self.source.number_of(name))

    def _poll_marks(self) -> None:
        """Read the marks where the file has changed."""
        try:
            with self.source.marks(self._marks) as marks:
                if (seen := marks.signature()) != self._marks_seen:
                    self.index.mark(marks.all())
                    self._marks_seen = seen
            self.marks_problem = None
        except InputError:
            self.can_mark = False
        except (RingmapError, OSError) as error:
            self.marks_problem = str(error)
            self._marks_seen = ()
            self.index.mark({})

    def _poll(self) -> dict[str, Any]:
        ids, path = self.index.ids, self.place.path
        ring = self.source.ring()
        if ring and path:
            writer = writer_of(path)
            ring["writer"] = {"alive": writer.alive, "pid": writer.pid, "host": writer.host}
        return {
            "episodes": len(ids),
            "steps": int(self.index.lengths.sum()),
            "first": str(ids[0]) if len(ids) else None,
            "last": str(ids[-1]) if len(ids) else None,
            "version": self.index.version,
            "indexed": self.index.done,
            "live": self.source.is_live,
            "marked": self.index.num_marked(),
            "marks_problem": self.marks_problem,
            **ring,
        }

    def thumbnail(self, name: int | None) -> bytes | None:
        """Return a small picture of an episode, by default the newest; None if it has none. Of transitions it is the
        newest one."""
        specs = [c for c in self.source.columns if kind_of(c)[0] == "picture"]
        if not specs:
            return None
        spec = next((s for s in specs if s.name == "pixels"), specs[0])
        if name is None and self._now["episodes"] is None:
            newest = self.source.newest(spec.name, 1)
            return thumbnail(newest[0]) if len(newest) else None
        ids, lengths = self.index.ids, self.index.lengths
        if not len(ids):
            return None
        row = len(ids) - 1 if name is None else self.source.number_of(name)
        if row >= len(ids) or not lengths[row]:
            return None
        middle = int(lengths[row]) // 2
        read = self.source.read(int(ids[row]), middle, middle + 1, [spec.name])
        return thumbnail(read[spec.name][0])

    def facts(self) -> Facts | None:
        """Return what a ring's directory says; None of a dataset, and of a ring in RAM."""
        return self.source.facts()

    @property
    def has_pictures(self) -> bool:
        """Whether a column holds pictures."""
        return any(kind_of(c)[0] == "picture" for c in self.source.columns)

    def newest_policy(self) -> int | None:
        """Return the step of the policy that played the newest episode, or transition, None if it is not stored with
        it."""
        if self._now["episodes"] is None:
            if POLICY_STEP not in (c.name for c in self.source.columns):
                return None
            steps = self.source.newest(POLICY_STEP, 1).reshape(-1)
            return int(steps[0]) if len(steps) and steps.dtype.kind in "iu" else None
        ids = self.index.ids
        newest = int(ids[-1]) if len(ids) else -1
        if newest != self._played[0]:
            value = self.source.data(newest).get(POLICY_STEP)
            self._played = newest, int(value) if isinstance(value, int | np.integer) else None
        return self._played[1]

    def columns(self, facts: Facts | None) -> list[dict[str, Any]]:
        """Describe the columns; of small ones the range of the newest steps. Reads up to 1,000 steps."""
        stored = {} if facts is None else {c.name: " ".join((c.storage, *c.codecs)) for c in facts.columns}
        found = []
        for spec in self.source.columns:
            told = described(spec)
            if stored:
                told["storage"] = stored.get(spec.name, "")
            if told["lines"] and (span := self._range(spec.name)) is not None:
                told["range"] = span
            found.append(told)
        return found

    def _range(self, column: str) -> list[float] | None:
        values = np.empty(0)
        with contextlib.suppress(RingmapError, OSError, ValueError):
            values = np.asarray(self.source.newest(column, _SHOWN_ROWS), np.float64).reshape(-1)
        values = values[np.isfinite(values)]
        return [float(values.min()), float(values.max())] if len(values) else None

    def close(self) -> None:
        """End the index, and close the source."""
        self.index.close()
        self.source.close()


def described(spec: ColumnSpec) -> dict[str, Any]:
    """Return what is said of a column; `lines`: how many of a chart it is."""
    kind, reason = kind_of(spec)
    return {
        "name": spec.name,
        "dtype": str(spec.dtype),
        "shape": list(spec.shape),
        "kind": kind,
        "reason": reason,
        "row_nbytes": spec.row_nbytes,
        "lines": math.prod(spec.shape) if kind == "lines" else 0,
    }


def idle_s(folder: str) -> float | None:
    """Return the seconds since the newest commit: a commit writes into the table of episodes."""
    with contextlib.suppress(OSError):
        return max(0.0, time.time() - os.stat(os.path.join(folder, "episodes.npy")).st_mtime)
    return None


_RING = "ring"
_BINS, _STRIDES = 40, 300


@dataclass(frozen=True, slots=True)
class Part:
    """A place whose episodes are in the table: its key, what it is called, its index."""

    key: str
    name: str
    index: EpisodeIndex


class JoinedTable:
    """The episodes of one place, or of several.

    Args:
        parts: the places.
        is_fleet: whether each row says which place it is of.
    """

    def __init__(self, parts: Sequence[Part], is_fleet: bool = False) -> None:
        self._lock = threading.RLock()
        self._is_fleet = is_fleet
        self._parts = tuple(parts)
        self._version = 0
        self._seen: tuple[Any, ...] = ()
        self._counts: list[int] | None = None
        self._starts: Array = np.zeros(1, np.int64)
        self._order: Array | None = None
        self._chosen: tuple[Any, Array] | None = None

    def set_parts(self, parts: Sequence[Part]) -> None:
        """Show these places from now on."""
        with self._lock:
            self._parts = tuple(parts)

    def start(self) -> None:
        """Build the indices, if they are not being built yet."""
        for part in self._parts:
            part.index.start()

    @property
    def version(self) -> int:
        """Differs after each change."""
        with self._held() as version:
            return version

    @contextlib.contextmanager
    def _held(self) -> Iterator[int]:
        """Let nothing change; the rows are those of now."""
        with self._lock, contextlib.ExitStack() as held:
            for part in self._parts:
                held.enter_context(part.index.lock)
            seen = tuple((part.key, id(part.index), part.index.version) for part in self._parts)
            if seen != self._seen:
                self._seen = seen
                self._version += 1
                self._place([len(part.index.ids) for part in self._parts])
            yield self._version

    def _place(self, counts: list[int]) -> None:
        if counts == self._counts:
            return
        self._counts = counts
        self._starts = np.cumsum([0, *counts])
        self._order = None
        if len(counts) > 1:
            ages = np.concatenate([np.arange(count, 0, -1) for count in counts])
            self._order = np.argsort(-ages, kind="stable")

    def _found(self, row: int) -> tuple[Part, int]:
        """Return the part that holds a row, and the row's number in that part."""
        at = row if self._order is None else int(self._order[row])
        place = int(np.searchsorted(self._starts, at, side="right")) - 1
        return self._parts[place], at - int(self._starts[place])

    # -- questions ---------------------------------------------------------------------------

    def choose(self, where: str, sort: str, descending: bool) -> Array:
        """Return the rows that meet a condition, in an order. O(episodes log episodes), remembered until something
        changes.
        """
        with self._held() as version:
            key = where, sort, descending, version
            if self._chosen is not None and self._chosen[0] == key:
                return self._chosen[1]
            count = int(self._starts[-1])
            if not where.strip() and sort == "episode":
                rows = np.arange(count)
            else:
                names = self.names
                rows = np.flatnonzero(Condition(where, "filter").select(names, self.values, count))
                if sort != "episode":
                    values = self.values(sort) if sort in names else None
                    if values is None:
                        raise InputError(f"sort: no value {sort!r}; there are {names}")
                    rows = in_order(rows, values, descending)
            if sort == "episode" and descending:
                rows = rows[::-1]
            self._chosen = key, rows
            return rows

    def rows(self, start: int, count: int, where: str, sort: str, descending: bool) -> dict[str, Any]:
        """Return rows of the table, and how much of it is known."""
        with self._held() as version:
            rows = self.choose(where, sort, descending)
            names = (name for part in self._parts for name in part.index.data_names)
            return {
                "total": int(self._starts[-1]),
                "matching": len(rows),
                "indexed": self.done,
                "version": version,
                "marked": self.num_marked,
                "names": [n for n in dict.fromkeys(names) if n != _RING or not self._is_fleet],
                "rows": [self._row(row) for row in rows[start : start + count].tolist()],
            }

    def _row(self, row: int) -> dict[str, Any]:
        part, number = self._found(row)
        return {"p": part.key, "ring": part.name, **part.index.row(number)}

    @property
    def done(self) -> int:
        """The number of episodes that are known."""
        return sum(part.index.done for part in self._parts)

    @property
    def num_marked(self) -> int:
        """The number of marked episodes."""
        return sum(part.index.num_marked() for part in self._parts)

    def spread(self) -> dict[str, Any]:
        """Return lengths, returns, and where they are known the steps of the policies: over time, oldest first, and as
        histograms."""
        with self._held():
            found = {name: self.values(name) for name in ("length", "return", POLICY_STEP)}
        return {name.replace("_", " "): _spread(values.numbers) for name, values in found.items() if values is not None}

    # -- columns -----------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names that conditions and orders may use."""
        names = (name for part in self._parts for name in part.index.names)
        return list(dict.fromkeys([*names, _RING] if self._is_fleet else names))

    def values(self, name: str) -> Values | None:
        """Return a value of each row, by one of `names`; None if no episode has it."""
        counts = [len(part.index.ids) for part in self._parts]
        found: list[Values | None] = [part.index.values(name) for part in self._parts]
        if name == _RING and self._is_fleet:
            found = [Values.same(part.name, n) for part, n in zip(self._parts, counts, strict=True)]
        if all(values is None for values in found):
            return None
        return found[0] if len(found) == 1 else Values.joined(found, counts, self._order)


def _spread(values: Array) -> dict[str, Any] | None:
    """Return least, mean, most, a histogram, and means over time, None where nothing is known."""
    known = np.isfinite(values)
    finite = values[known]
    if not len(finite):
        return None
    counts, edges = np.histogram(finite, min(_BINS, max(1, len(np.unique(finite[:1000])))))
    strides = np.linspace(0, len(values), min(_STRIDES, len(values)) + 1).astype(int)
    at = np.unique(strides)[:-1]
    sizes = np.add.reduceat(known.astype(np.float64), at)
    means = np.add.reduceat(np.where(known, values, 0.0), at) / np.maximum(sizes, 1)
    return {
        "least": float(finite.min()),
        "mean": float(finite.mean()),
        "most": float(finite.max()),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
        "at": at.tolist(),
        "means": [mean if size else None for mean, size in zip(means.tolist(), sizes.tolist(), strict=True)],
    }


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
