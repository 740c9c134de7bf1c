"""A place that was opened: one reader, one index, and what is said of both.

    source (sources.py) -> index (index.py) -> table (table.py)
                      and     state, columns, thumbnail

Not here: which places there are (library.py), several as one (fleet.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from typing import Any

import numpy as np

from ringmap.errors import ClipIndexError, InputError, RingmapError
from ringmap.fleet.weights import POLICY_STEP
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.inspect.describe import Facts, writer_of
from ringmap.viewer.drawing import kind_of, thumbnail
from ringmap.viewer.find import Place
from ringmap.viewer.index import EpisodeIndex, RequestCounter
from ringmap.viewer.limits import GoneError
from ringmap.viewer.sources import Source
from ringmap.viewer.table import EpisodeTable, Part

__all__ = ["OpenDataset", "described", "idle_s"]

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
        self.table = EpisodeTable([Part(place.key, os.path.basename(place.path), self.index)])
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
        """Mark an episode, and return its row of the table.

        Raises:
            GoneError: it was evicted.
            InputError, CorruptError, EnvironmentFault, LockedError: see `Marks.set`.
        """
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
