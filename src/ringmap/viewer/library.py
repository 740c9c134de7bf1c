"""The places that are shown, opened when they are first asked for; of a fleet its rings, in total and one by one.

    key -> Place -> OpenDataset: source, index, table, state       a ring, a dataset
                 -> Fleet: the rings of a folder                   one table of episodes, one line for each ring

Invariants: a source is opened once, and closed with the library, or when its directory is gone or damaged; a given
buffer is never closed; a ring of a fleet is read by its own `OpenDataset`, and what is wrong with it is said in its
line.
Not here: which places there are (places.py), requests (app.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringmap.buffers.opening import DATASET
from ringmap.errors import ClosedError, InputError, NotFoundError, ReplacedError, RingmapError
from ringmap.fleet.pace import Pace
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.paths import local_path
from ringmap.storage.inspect.describe import Facts, facts_of, nbytes_of
from ringmap.storage.records.manifest import DISTILLATION
from ringmap.viewer.drawing import plain
from ringmap.viewer.open_dataset import JoinedTable, OpenDataset, Part, RequestCounter, idle_s
from ringmap.viewer.places import FLEET, PROBLEM, Place, find
from ringmap.viewer.sources import DatasetSource, RingSource, Source, TransitionSource

__all__ = ["SOURCES", "Fleet", "Library"]


_AGAIN_S = 2.0
_TIMES = 10
"""Looking for places, and opening one that failed, waits this many times as long as it took: it may be slow."""
_PREPARED = 16
SOURCES = {source.kind: source for source in (RingSource, TransitionSource, DatasetSource)}
"""By kind of place: what reads it."""


class Library:
    """The places below some paths, and buffers that were given.

    Args:
        paths: where to look.
        given: name -> a buffer or dataset of this process.
        marks: the file of all marks; None: beside the data.
        read_only: whether marks can't be changed.

    Raises:
        NotFoundError: a path, or the folder of `marks`, is not there.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        given: dict[str, Source] | None = None,
        marks: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.paths = list(paths)
        folder = os.path.dirname(local_path(marks or ""))
        if marks is not None and not os.path.isdir(folder):
            raise NotFoundError(f"view: --marks {marks}: there is no folder {folder}; make it first")
        self.marks, self.read_only = marks, read_only
        self._is_closed = False
        self.requests = RequestCounter()
        """The requests that are being answered: indices wait for them."""
        self._lock = threading.RLock()
        self._opened: dict[str, OpenDataset] = {}
        self._fleets: dict[str, Fleet] = {}
        self._failed: dict[str, tuple[float, Exception]] = {}
        """By key: until when it is not tried again, and why."""
        self._given: list[Place] = []
        for number, (name, source) in enumerate((given or {}).items()):
            place = Place(f"given{number}", "", name, source.kind)
            self._given.append(place)
            self._opened[place.key] = OpenDataset(place, source, marks, self.requests)
        self._places: dict[str, Place] = {}
        self._poll_at = 0.0
        self.places(check=True)

    def places(self, check: bool = False) -> list[Place]:
        """Return all places; looks for new ones, every two seconds or less often."""
        with self._lock:
            start = time.monotonic()
            if check or start > self._poll_at:
                try:
                    found = find(self.paths, {fleet.path for fleet in self._fleets.values()})
                except NotFoundError:
                    if check:
                        raise
                    found = []
                self._places = {place.key: place for place in [*self._given, *found]}
                kinds = {key: place.kind for key, place in self._places.items()}
                for key, opened in list(self._opened.items()):
                    if kinds.get(key) != opened.place.kind:  # it is gone, damaged, or another one
                        self._opened.pop(key).close()
                self._poll_at = _later(start)
            return list(self._places.values())

    def place(self, key: str) -> Place:
        """Return a place."""
        with self._lock:
            found = self._places.get(key)
            if found is None:
                self.places()
                found = self._places.get(key)
        if found is None:
            raise NotFoundError("there is nothing of that name; it may be gone: look at the start page")
        return found

    def open(self, key: str) -> OpenDataset:
        """Return a ring or dataset, opened."""
        place = self.place(key)
        if place.kind == PROBLEM:
            raise InputError(str(place.problem))
        with self._lock:
            if key in self._opened:
                return self._opened[key]
            if self._is_closed:
                raise ClosedError("view: the server has ended")
            if place.kind == FLEET:
                raise InputError(f"{place.name}: is a fleet; an episode is in one of its rings")
            if place.kind not in SOURCES:
                raise InputError(f"{place.name}: {place.kind}: its episodes can't be listed here")
            start = time.monotonic()
            until, why = self._failed.get(key, (0.0, None))
            if why is not None and start < until:
                raise why.with_traceback(None)
            try:
                self._opened[key] = opened = self._made(place)
            except (RingmapError, OSError) as error:
                is_there = os.path.lexists(place.path)
                why = error if is_there else NotFoundError(f"{place.name}: was removed or renamed")
                self._failed[key] = _later(start), why
                raise why from None
            return opened

    def _made(self, place: Place) -> OpenDataset:
        source: Source = SOURCES[place.kind](place.path)
        try:
            return OpenDataset(place, source, self.marks, self.requests)
        except BaseException:
            source.close()
            raise

    def shown(self, key: str) -> OpenDataset | Fleet:
        """Return a place with a table of episodes: a ring, a dataset or a fleet."""
        return self._fleet(key) if self.place(key).kind == FLEET else self.open(key)

    def _fleet(self, key: str) -> Fleet:
        path = self.place(key).path
        with self._lock:
            if self._is_closed:
                raise ClosedError("view: the server has ended")
            fleet = self._fleets.get(key)
            if fleet is None:
                fleet = Fleet(path, lambda: self._rings(key), self._polled)
                self._fleets[key] = fleet
        return fleet

    def _rings(self, key: str) -> list[Place]:
        self.places()
        with self._lock:
            found = [self._places.get(ring) for ring in self.place(key).rings]
        return [place for place in found if place is not None]

    def _polled(self, key: str) -> OpenDataset:
        """Return a ring or dataset, followed; opened again, if its directory was replaced."""
        opened = self.open(key)
        try:
            opened.follow()
        except ReplacedError:
            if not opened.place.path:  # it was given
                raise
            with self._lock:
                self._opened.pop(key, None)
            opened.close()
            opened = self.open(key)
        return opened

    def follow(self, key: str) -> dict[str, Any]:
        """Poll for what is new in a place, and return what is stored."""
        if self.place(key).kind == FLEET:
            return self._fleet(key).follow()
        return self._polled(key).state()

    @property
    def num_open(self) -> int:
        """The number of places that are open."""
        return len(self._opened)

    def prepare(self) -> None:
        """Open the first places in a thread of its own, so that the first page need not wait for them."""

        def work() -> None:
            for place in self.places()[:_PREPARED]:
                if place.kind in SOURCES and not self._is_closed:
                    with contextlib.suppress(RingmapError, OSError):  # its page says so
                        self.open(place.key)

        threading.Thread(target=work, daemon=True, name="ringmap-view-prepare").start()

    def brief(self, place: Place) -> dict[str, Any]:
        """Return a line about a place for the start page; a problem if it can't be read."""
        return self._brief(place)[0]

    def _brief(self, place: Place) -> tuple[dict[str, Any], Facts | None]:
        facts = None
        told: dict[str, Any] = {
            "key": place.key,
            "name": place.name,
            "kind": place.kind,
            "format": place.format,
            "problem": place.problem,
            "rings": list(place.rings),
        }
        if place.problem is not None:
            return told, None
        try:
            if place.kind in SOURCES:
                told |= self.follow(place.key)
                opened = self.open(place.key)
                told["columns"] = [c.name for c in opened.source.columns]
                told["thumbnail"] = opened.has_pictures
                facts = opened.facts()
            elif place.kind == FLEET:
                told |= self.follow(place.key)
                told["thumbnail"] = self._fleet(place.key).has_pictures
                told["columns"] = self._fleet(place.key).column_names
            else:
                facts = facts_of(place.path)
            if place.path:
                told["nbytes"] = nbytes_of(place.path)
            if facts is not None and place.path:
                told = {"steps": facts.steps, "max_steps": facts.max_steps - facts.spare} | told
                told.setdefault("writer", _writer(facts))
                told["committed_s"] = idle_s(place.path)
        except (RingmapError, OSError) as error:
            told["problem"] = str(error)
        return told, facts

    def describe(self, key: str) -> dict[str, Any]:
        """Return what a place's own page shows beside its episodes."""
        place = self.place(key)
        told, facts = self._brief(place)
        told["code"] = _code(place)
        told["short"] = os.path.basename(place.path)
        with self._lock:
            above = [p for p in self._places.values() if place.key in p.rings]
        told["fleet"] = {"key": above[0].key, "name": above[0].name} if above else None
        if place.kind == FLEET:
            fleet = self._fleet(key)
            told["can_mark"] = fleet.can_mark and not self.read_only
            told["columns"] = fleet.columns()
        elif place.kind in SOURCES:
            opened = self.open(key)
            told["can_mark"] = opened.can_mark and not self.read_only
            told["columns"] = opened.columns(facts)
            if facts is not None:
                told |= {
                    "uuid": facts.uuid,
                    "version": facts.version,
                    "nbytes": facts.nbytes,
                    "nbytes_full": facts.nbytes_full,
                    "settings": plain(facts.settings),
                    "spare": facts.spare,
                    "pending": facts.pending,
                }
        elif facts is not None:
            told["columns"] = [
                {
                    "name": c.name,
                    "dtype": c.dtype,
                    "shape": list(c.shape),
                    "kind": "none",
                    "storage": " ".join((c.storage, *c.codecs)),
                }
                for c in facts.columns
            ]
        return told

    def close(self) -> None:
        """Close all that was opened."""
        self._is_closed = True
        with self._lock:
            for opened in self._opened.values():
                opened.index.stop()  # all at once: they take turns
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()


def _writer(facts: Any) -> dict[str, Any]:
    return {"alive": facts.writer.alive, "pid": facts.writer.pid, "host": facts.writer.host}


def _code(place: Place) -> str:
    """Return the Python lines that open a place."""
    if not place.path:
        return ""
    if place.kind == DATASET:
        opened = f"dataset = load_dataset({place.path!r})"
        return f"from ringmap.data import load_dataset\n\n{opened}\nepisode = dataset.load_episode(0)"
    draw = "batch" if place.kind == DISTILLATION else "sample"
    return f"import ringmap\n\nbuf = ringmap.open({place.path!r})\nbatch = buf.{draw}(32)"


def _later(start: float) -> float:
    """Return when something that began then, and has just ended, is done again."""
    now = time.monotonic()
    return now + max(_AGAIN_S, _TIMES * (now - start))


_REMEMBERED_S = 60.0
"""How long a ring that is gone is named."""
_FAULTS = (RingmapError, OSError, ValueError, MemoryError)
"""What a ring may raise, however hostile it is: the others go on."""
_COUNTS = ("episodes", "steps", "max_steps", "written", "redraws")


class Fleet:
    """The rings of a folder.

    Args:
        path: the folder.
        rings: returns the places of the rings that are there now.
        opened: returns a ring by its key, polled just now, or raises what is wrong with it.
    """

    def __init__(self, path: str, rings: Callable[[], list[Place]], opened: Callable[[str], OpenDataset]) -> None:
        self.path = path
        self._table = JoinedTable([], is_fleet=True)
        self._rings, self._opened = rings, opened
        self._lock = threading.RLock()
        self._here: list[OpenDataset] | None = None
        self._columns: set[ColumnSpec] = set()
        self._known: dict[str, tuple[str, float]] = {}  # by key: name, and when it was there last

    @property
    def table(self) -> JoinedTable:
        """The episodes of all rings."""
        self._polled()
        return self._table

    def _polled(self) -> list[OpenDataset]:
        """Return the rings that can be read, as of the last poll."""
        with self._lock:
            if self._here is None:
                self.follow()
            return self._here or []

    def follow(self) -> dict[str, Any]:
        """Poll at each ring for what is new, and return what is stored: in `shards` ring by ring."""
        with self._lock:
            lines, opened = self._poll_rings()
            self._leave_others_out(lines, opened)
            self._here = list(opened.values())
            lines += self._gone({line["key"] for line in lines})
            self._table.set_parts([Part(o.place.key, _name(o.place), o.index) for o in self._here])
            return self._total(lines)

    def _poll_rings(self) -> tuple[list[dict[str, Any]], dict[str, OpenDataset]]:
        lines, opened = [], dict[str, OpenDataset]()
        for place in self._rings():
            self._known[place.key] = _name(place), time.monotonic()
            line = _line(place.key, _name(place))
            try:
                one = self._opened(place.key)
                line |= self._poll(one)
                opened[place.key] = one
            except _FAULTS as error:
                line["problem"] = str(error)
            lines.append(line)
        return lines, opened

    def _leave_others_out(self, lines: list[dict[str, Any]], opened: dict[str, OpenDataset]) -> None:
        """Leave out rings whose columns are not those of the ones before them."""
        columns = {key: found for key, one in opened.items() if (found := set(one.source.columns))}
        if columns and self._columns not in columns.values():
            self._columns = next(iter(columns.values()))
        for line in lines:
            if differ := columns.get(line["key"], self._columns) ^ self._columns:
                names = ", ".join(sorted({column.name for column in differ}))[:200]
                line |= _line(line["key"], line["name"], f"has other columns than the rings before it: {names}")
                del opened[line["key"]]

    def _gone(self, there: set[str]) -> list[dict[str, Any]]:
        """Name the rings that were there not long ago."""
        last = time.monotonic() - _REMEMBERED_S
        self._known = {key: told for key, told in self._known.items() if told[1] > last}
        gone = [name for key, (name, _) in self._known.items() if key not in there]
        return [_line(None, name, "the ring was removed or renamed") for name in gone]

    def _poll(self, opened: OpenDataset) -> dict[str, Any]:
        state, path = opened.state(), opened.place.path
        idle = idle_s(path)
        policy = None
        with contextlib.suppress(*_FAULTS):  # an episode of it is damaged, or gone
            policy = opened.newest_policy()
        return {
            "episodes": state["episodes"],
            "steps": state["steps"],
            "max_steps": state["max_steps"],
            "written": state["head"],
            "redraws": state["redraws"],
            "writer": state["writer"],
            "idle_s": None if idle is None else _rounded(idle),
            "policy_step": policy,
            "marks_problem": state["marks_problem"],
        }

    def _total(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        writers = [line["writer"]["alive"] for line in lines if line["problem"] is None]
        policies = [p for line in lines if (p := line["policy_step"]) is not None]
        idle = [s for line in lines if (s := line["idle_s"]) is not None]
        marks = [f"{line['name']}: {why}" for line in lines if (why := line.get("marks_problem"))]
        newest = self._newest()
        return {
            **{name: _sum([line[name] for line in lines]) for name in _COUNTS},
            "shards": lines,
            "writers": sum(alive is True for alive in writers),
            "live": True,
            "version": self._table.version,
            "indexed": self._table.done,
            "marked": self._table.num_marked,
            "marks_problem": "; ".join(marks) or None,
            "committed_s": min(idle, default=None),
            "last": None if newest is None else f"{newest.place.key}-{newest.state()['head']}",
            "policy_step": max(policies, default=None),
            "staleness": max(policies) - min(policies) if policies else None,
            "pace": self._poll_pace(),
        }

    def _poll_pace(self) -> dict[str, Any] | None:
        """Return how far either side is ahead; None if the fleet keeps no pace."""
        try:
            pace = Pace.kept_at(self.path)
            if pace is None:
                return None
            inserted, drawn = pace.inserted, pace.drawn
            new = inserted - pace.min_steps
            ahead, slack = pace.samples_per_insert * new - drawn, pace.slack_drawn
            if not (math.isfinite(ahead) and math.isfinite(slack)):
                return {"problem": f"{pace!r}: its numbers are too large"}
            return {
                "samples_per_insert": pace.samples_per_insert,
                "min_steps": pace.min_steps,
                "inserted": inserted,
                "drawn": drawn,
                "ratio": drawn / new if new > 0 else None,
                "ahead": ahead,
                "slack": slack,
                "learner": pace.has_learner,
            }
        except (*_FAULTS, OverflowError) as error:
            return {"problem": str(error)}

    def _newest(self) -> OpenDataset | None:
        """Return the ring with steps that was committed to last."""
        filled = [one for one in self._polled() if one.state()["steps"]]
        return min(filled, key=lambda one: idle_s(one.place.path) or 0.0, default=None)

    @property
    def has_pictures(self) -> bool:
        """Whether a column holds pictures."""
        return any(opened.has_pictures for opened in self._polled())

    @property
    def column_names(self) -> list[str]:
        """Names of the columns, none before the first episode."""
        filled = (opened.source.columns for opened in self._polled())
        return [column.name for column in next(filter(None, filled), ())]

    @property
    def can_mark(self) -> bool:
        """Whether there is a place for marks."""
        return any(opened.can_mark for opened in self._polled())

    def thumbnail(self) -> bytes | None:
        """Return a small picture of the newest episode, as of the last poll; None if it has none."""
        newest = self._newest()
        return None if newest is None else newest.thumbnail(None)

    def columns(self) -> list[dict[str, Any]]:
        """Describe the columns, with the range of the newest steps of all rings. Reads up to 1,000 steps of each."""
        found: dict[str, dict[str, Any]] = {}
        for opened in self._polled():
            facts = None
            with contextlib.suppress(*_FAULTS):
                facts = opened.facts()
            for told in opened.columns(facts):
                known = found.setdefault(told["name"], told)
                spans = [span for span in (known.get("range"), told.get("range")) if span]
                if spans:
                    known["range"] = [min(s[0] for s in spans), max(s[1] for s in spans)]
        return list(found.values())


def _name(place: Place) -> str:
    return os.path.basename(place.path)


def _line(key: str | None, name: str, problem: str | None = None) -> dict[str, Any]:
    """Return what is said of a ring before it was polled, or where it can't be read."""
    return {
        "key": key,
        "name": name,
        "problem": problem,
        "policy_step": None,
        "idle_s": None,
        **dict.fromkeys(_COUNTS, 0),
    }


def _sum(counts: list[int | None]) -> int | None:
    """Return the sum; None where a ring has no such number: one of transitions has no episodes."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _rounded(seconds: float) -> int:
    """Return seconds as coarse as a page shows them: it is told of what has changed."""
    by = 1 if seconds < 120 else 60 if seconds < 7200 else 3600
    return int(seconds) // by * by
