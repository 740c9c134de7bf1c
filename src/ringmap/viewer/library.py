"""The places that are shown, opened when they are first asked for: one reader, one index and one follower each.

    key -> Place -> Opened: source, index, state

Invariants: a source is opened once, and closed with the library; a given buffer is never closed.
Not here: requests (app.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.buffers.located import DATASET, EPISODES
from ringmap.buffers.sharded.buffer import ShardedReplayBuffer
from ringmap.errors import ClipIndexError, ClosedError, InputError, NotFoundError, RingmapError
from ringmap.storage.inspect.describe import Facts, facts_of, nbytes_of
from ringmap.viewer.drawing import kind_of, thumbnail
from ringmap.viewer.find import FLEET, PROBLEM, Place, find
from ringmap.viewer.index import AtWork, EpisodeIndex
from ringmap.viewer.limits import GoneError
from ringmap.viewer.sources import DatasetSource, RingSource, Source
from ringmap.viewer.values import plain

__all__ = ["Library", "Opened"]

_AGAIN_S = 2.0
_SHOWN_ROWS = 1000
_PREPARED = 16


class Opened:
    """A place that was opened.

    Args:
        place: where.
        source: its episodes.
        marks: the file of marks; None: beside the data.
        at_work: the requests that the index waits for.
    """

    def __init__(
        self,
        place: Place,
        source: Source,
        marks: str | None = None,
        at_work: AtWork | None = None,
    ) -> None:
        self.place, self.source = place, source
        self._marks = marks
        self._marks_seen: tuple[int, ...] = ()
        self.marks_problem: str | None = None
        self.can_mark = True
        """Whether there is a place for marks."""
        self._followed = source.moment()
        self.index = EpisodeIndex(source, at_work)
        self._lock = threading.RLock()
        self._look_at_marks()
        self._now = self._look()

    def state(self) -> dict[str, Any]:
        """Return what is stored now, without looking for more."""
        return self._now

    def follow(self) -> dict[str, Any]:
        """Look for what is new, bring the index up to date, and return what is stored."""
        with self._lock:
            self.source.refresh()
            self._look_at_marks()
            if (moment := self.source.moment()) != self._followed:
                self.index.follow()
                self._followed = moment
            self._now = self._look()
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

    def _look_at_marks(self) -> None:
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

    def _look(self) -> dict[str, Any]:
        ids, source = self.index.ids, self.source
        state: dict[str, Any] = {
            "episodes": len(ids), "steps": int(self.index.lengths.sum()),
            "first": str(ids[0]) if len(ids) else None, "last": str(ids[-1]) if len(ids) else None,
            "version": self.index.version, "indexed": self.index.done, "live": source.is_live, "marked": self.index.num_marked(), "marks_problem": self.marks_problem,
        }  # fmt: skip
        if isinstance(source, RingSource):
            buffer = source.buffer
            tail, head, commits = source.moment()
            state |= {
                "tail": tail, "head": head, "commits": commits, "max_steps": buffer.max_steps,
                "redraws": buffer.num_redraws, "columns": len(source.columns),
            }  # fmt: skip
        return state

    def thumbnail(self, name: int | None) -> bytes | None:
        """Return a small picture of an episode, by default the newest; None if it has none."""
        specs = [c for c in self.source.columns if kind_of(c)[0] == "picture"]
        ids, lengths = self.index.ids, self.index.lengths
        if not specs or not len(ids):
            return None
        spec = next((s for s in specs if s.name == "pixels"), specs[0])
        row = len(ids) - 1 if name is None else self.source.number_of(name)
        if row >= len(ids) or not lengths[row]:
            return None
        middle = int(lengths[row]) // 2
        read = self.source.read(int(ids[row]), middle, middle + 1, [spec.name])
        return thumbnail(read[spec.name][0])

    def close(self) -> None:
        """End the index, and close the source."""
        self.index.close()
        self.source.close()


class Library:
    """The places below some paths, and buffers that were given.

    Args:
        paths: where to look.
        given: name -> a buffer or dataset of this process.
        marks: the file of all marks; None: beside the data.
        read_only: whether marks can't be changed.

    Raises:
        NotFoundError: a path is not there.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        given: dict[str, Source] | None = None,
        marks: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.paths = list(paths)
        self.marks, self.read_only = marks, read_only
        self._is_closed = False
        self.at_work = AtWork()
        """The requests that are being answered: indices wait for them."""
        self._lock = threading.RLock()
        self._opened: dict[str, Opened] = {}
        self._problems: dict[str, tuple[float, RingmapError | OSError]] = {}
        self._given: list[Place] = []
        for number, (name, source) in enumerate((given or {}).items()):
            kind = EPISODES if source.is_live else DATASET
            place = Place(f"given{number}", "", name, kind)
            self._given.append(place)
            self._opened[place.key] = Opened(place, source, marks, self.at_work)
        self._places: dict[str, Place] = {}
        self._looked = 0.0
        self.places(check=True)

    def places(self, check: bool = False) -> list[Place]:
        """Return all places; looks for new ones, at most every two seconds."""
        with self._lock:
            if check or time.monotonic() - self._looked > _AGAIN_S:
                try:
                    found = find(self.paths)
                except NotFoundError:
                    if check:
                        raise
                    found = []
                self._places = {place.key: place for place in [*self._given, *found]}
                self._looked = time.monotonic()
            return list(self._places.values())

    def place(self, key: str) -> Place:
        """Return a place.

        Raises:
            NotFoundError: there is no such place.
        """
        with self._lock:
            found = self._places.get(key)
            if found is None:
                self.places()
                found = self._places.get(key)
        if found is None:
            raise NotFoundError(
                "there is nothing of that name; it may be gone: look at the start page"
            )
        return found

    def open(self, key: str) -> Opened:
        """Return a place, opened.

        Raises:
            RingmapError: it can't be read.
            InputError: it has no episodes.
        """
        place = self.place(key)
        with self._lock:
            if key in self._opened:
                return self._opened[key]
            if self._is_closed:
                raise ClosedError("view: the server has ended")
            if place.kind == PROBLEM:
                raise InputError(f"{place.name}: {place.problem}")
            if place.kind not in (EPISODES, DATASET):
                raise InputError(f"{place.name}: {place.kind}: its episodes can't be listed here")
            source: Source = (
                RingSource(place.path) if place.kind == EPISODES else DatasetSource(place.path)
            )
            try:
                opened = Opened(place, source, self.marks, self.at_work)
            except BaseException:
                source.close()
                raise
            self._opened[key] = opened
            return opened

    @property
    def num_open(self) -> int:
        """The number of places that are open."""
        return len(self._opened)

    def prepare(self) -> None:
        """Open the first places in a thread of its own, so that the first page need not wait for them."""

        def work() -> None:
            for place in self.places()[:_PREPARED]:
                if place.kind in (EPISODES, DATASET) and not self._is_closed:
                    with contextlib.suppress(RingmapError, OSError):  # its page says so
                        self.open(place.key)

        threading.Thread(target=work, daemon=True, name="ringmap-view-prepare").start()

    def brief(self, place: Place) -> dict[str, Any]:
        """Return a line about a place for the start page; a problem if it can't be read."""
        return self._brief(place)[0]

    def _brief(self, place: Place) -> tuple[dict[str, Any], Facts | None]:
        facts = None
        told: dict[str, Any] = {
            "key": place.key, "name": place.name, "kind": place.kind, "format": place.format,
            "problem": place.problem, "rings": list(place.rings),
        }  # fmt: skip
        if place.problem is not None:
            return told, None
        try:
            if place.kind in (EPISODES, DATASET):
                opened = self.open(place.key)
                told |= opened.follow()
                told["columns"] = [c.name for c in opened.source.columns]
                told["thumbnail"] = any(kind_of(c)[0] == "picture" for c in opened.source.columns)
                if isinstance(opened.source, RingSource):
                    facts = opened.source.facts()
            elif place.kind != FLEET:
                facts = facts_of(_main_of(place))
            if place.path:
                told["nbytes"] = nbytes_of(place.path)
            if place.kind == FLEET:
                states = [self.open(key).follow() for key in place.rings if key in self._places]
                told |= {name: sum(s[name] for s in states) for name in ("episodes", "steps")}
                told["committed_s"] = min(
                    (s for key in place.rings if (s := _idle_s(self.place(key).path)) is not None),
                    default=None,
                )
            if facts is not None and place.path:
                told |= {
                    "writer": _writer(facts),
                    "steps": facts.steps,
                    "max_steps": facts.max_steps,
                }
                told["committed_s"] = _idle_s(_main_of(place))
        except (RingmapError, OSError) as error:
            told["problem"] = str(error)
        return told, facts

    def describe(self, key: str) -> dict[str, Any]:
        """Return what a place's own page shows beside its episodes."""
        place = self.place(key)
        told, facts = self._brief(place)
        if place.kind == FLEET:
            return {**told, **self._fleet(place)}
        if place.kind in (EPISODES, DATASET):
            opened = self.open(key)
            told["can_mark"] = opened.can_mark and not self.read_only
            told["columns"] = _columns(opened)
            told["code"] = _code(place)
            if facts is not None:
                kept = {c.name: " ".join((c.storage, *c.codecs)) for c in facts.columns}
                for column in told["columns"]:
                    column["storage"] = kept.get(column["name"], "")
                told |= {
                    "uuid": facts.uuid, "version": facts.version, "nbytes": facts.nbytes,
                    "nbytes_full": facts.nbytes_full, "settings": plain(facts.settings), "spare": facts.spare,
                    "pending": facts.pending,
                }  # fmt: skip
        elif facts is not None:
            told["columns"] = [
                {"name": c.name, "dtype": c.dtype, "shape": list(c.shape), "kind": "none", "storage": " ".join((c.storage, *c.codecs))}
                for c in facts.columns
            ]  # fmt: skip
        return told

    def _fleet(self, place: Place) -> dict[str, Any]:
        with contextlib.closing(ShardedReplayBuffer(place.path, wait_s=0)) as buffer:
            shards = buffer.shards
        keys = {self.place(key).path: key for key in place.rings if key in self._places}
        rings, policies = [], list[int]()
        for shard in shards:
            key = keys.get(os.path.realpath(shard.path))
            policy = None
            if key is not None and shard.problem is None:
                with contextlib.suppress(RingmapError, OSError):
                    policy = self._newest_policy(self.open(key))
            if policy is not None:
                policies.append(policy)
            alive = None if shard.writer is None else shard.writer.alive
            rings.append({
                "key": key, "name": shard.name, "episodes": shard.episodes, "steps": shard.steps, "written": shard.written,
                "alive": alive, "idle_s": shard.idle_s, "problem": shard.problem, "policy_step": policy,
            })  # fmt: skip
        return {
            "shards": rings, "episodes": sum(s.episodes for s in shards), "steps": sum(s.steps for s in shards),
            "written": sum(s.written for s in shards), "staleness": max(policies) - min(policies) if policies else None,
            "code": f"from ringmap.data import ShardedReplayBuffer\n\nbuf = ShardedReplayBuffer({place.path!r})\nbatch = buf.sample(32)",
        }  # fmt: skip

    @staticmethod
    def _newest_policy(opened: Opened) -> int | None:
        """Return the step of the policy that played the newest episode of a ring, if it is stored with it."""
        opened.follow()
        if not len(opened.index.ids):
            return None
        value = opened.source.data(int(opened.index.ids[-1])).get("policy_step")
        return int(value) if isinstance(value, int | np.integer) else None

    def close(self) -> None:
        """Close all that was opened."""
        self._is_closed = True
        with self._lock:
            for opened in self._opened.values():
                opened.close()
            self._opened.clear()


def _main_of(place: Place) -> str:
    rows = os.path.join(place.path, "rows")
    return rows if place.kind == "distillation" and os.path.isdir(rows) else place.path


def _writer(facts: Any) -> dict[str, Any]:
    return {"alive": facts.writer.alive, "pid": facts.writer.pid, "host": facts.writer.host}


def _idle_s(folder: str) -> float | None:
    """Return the seconds since the newest commit: a commit writes into the table of episodes."""
    with contextlib.suppress(OSError):
        return max(0.0, time.time() - os.stat(os.path.join(folder, "episodes.npy")).st_mtime)
    return None


def _columns(opened: Opened) -> list[dict[str, Any]]:
    """Return the columns; of small ones the range of the newest steps."""
    source, lengths = opened.source, opened.index.lengths
    found = []
    newest = opened.index.ids[-20:].tolist()
    for spec in source.columns:
        kind, reason = kind_of(spec)
        told: dict[str, Any] = {
            "name": spec.name, "dtype": str(spec.dtype), "shape": list(spec.shape), "kind": kind, "reason": reason,
            "row_nbytes": spec.row_nbytes,
        }  # fmt: skip
        if kind == "lines":
            parts, left = [], _SHOWN_ROWS
            with contextlib.suppress(RingmapError, OSError, ValueError):
                for row in range(len(lengths) - 1, len(lengths) - 1 - len(newest), -1):
                    count = min(left, int(lengths[row]))
                    if count > 0:
                        read = source.read(int(opened.index.ids[row]), 0, count, [spec.name])
                        parts.append(np.asarray(read[spec.name], np.float64).reshape(-1))
                        left -= count
            values = np.concatenate(parts) if parts else np.empty(0)
            values = values[np.isfinite(values)]
            if len(values):
                told["range"] = [float(values.min()), float(values.max())]
        found.append(told)
    return found


def _code(place: Place) -> str:
    if not place.path:
        return ""
    if place.kind == EPISODES:
        return f"from ringmap.data import ReplayBuffer\n\nbuf = ReplayBuffer.open({place.path!r})\nbatch = buf.sample(32)"
    return f"from ringmap.data import load_dataset\n\ndataset = load_dataset({place.path!r})\nepisode = dataset.load_episode(0)"
