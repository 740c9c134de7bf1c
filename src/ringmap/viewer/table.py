"""The table of a place's episodes: those of one index, or of several, sorted and filtered here, not in the browser.

    ring a   0  1  2  3              age:   3  2  1  0      the newest has age 0
    ring b         0  1     -->             1  0
    table    a0 a1 a2 b0 a3 b1              by age: episodes carry no time, so the newest of each ring stand together

Invariants: row i is the same episode in all answers of one `version`; an index alone is neither copied nor reordered.
Not here: what is known of an episode (index.py), conditions (clips/where.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.clips.where import Condition, Values
from ringmap.errors import InputError
from ringmap.fleet.weights import POLICY_STEP
from ringmap.viewer.index import EpisodeIndex

__all__ = ["EpisodeTable", "Part"]

Array = np.ndarray[Any, np.dtype[Any]]

_RING = "ring"
_BINS, _STRIDES = 40, 300


@dataclass(frozen=True, slots=True)
class Part:
    """A place whose episodes are in the table: its key, what it is called, its index."""

    key: str
    name: str
    index: EpisodeIndex


class EpisodeTable:
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

        Raises:
            InputError: the condition can't be parsed; no such column.
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
                    rows = _sorted(rows, values, descending)
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


def _sorted(rows: Array, values: Values, descending: bool) -> Array:
    """Sort rows: numbers before texts; those without a value last; equal ones by age."""
    numbers, texts = values.numbers[rows], values.texts
    by_number: Array = rows[np.argsort(-numbers if descending else numbers, kind="stable")]
    if texts is None:
        return by_number
    count = len(rows) - int(np.isnan(numbers).sum())
    others = by_number[count:].tolist()
    by_text = sorted((row for row in others if texts[row]), key=lambda row: texts[row], reverse=descending)
    without = [row for row in others if not texts[row]]
    return np.concatenate([by_number[:count], np.array([*by_text, *without], np.int64)])


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
