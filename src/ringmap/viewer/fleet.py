"""A fleet: the rings of a folder, in total and one by one, and the pace that their collectors and learners keep.

    runs/replay/collector-0  -> OpenDataset  \\
    runs/replay/collector-1  -> OpenDataset   >  one table of episodes, one line for each ring
    runs/replay/collector-2  -> damaged /   (a line with its problem; the others go on)
    runs/replay/pace         -> Pace

Invariants: a ring is read by its own `OpenDataset`, which its own page uses, too; what is wrong with one ring is said
in its line. Not here: which rings there are (find.py), who opens them (library.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ringmap.errors import RingmapError
from ringmap.fleet.pace import Pace
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.viewer.find import Place
from ringmap.viewer.open_dataset import OpenDataset, idle_s
from ringmap.viewer.table import EpisodeTable, Part

__all__ = ["Fleet"]

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
        self._table = EpisodeTable([], is_fleet=True)
        self._rings, self._opened = rings, opened
        self._lock = threading.RLock()
        self._here: list[OpenDataset] | None = None
        self._columns: set[ColumnSpec] = set()
        self._known: dict[str, tuple[str, float]] = {}  # by key: name, and when it was there last

    @property
    def table(self) -> EpisodeTable:
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
