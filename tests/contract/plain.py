"""A ring as plain lists of rows: what every way to read a buffer is compared with. Imports NumPy, and nothing of
ringmap.

    write, append, commit, update  ->  parts, oldest first  ->  episodes  ->  clip, window, n_step, return_to_go

Invariant: a step keeps its position for life; whole parts are evicted, the oldest first.
Not here: how a buffer is read (reads.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["PlainEpisode", "PlainRing"]

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]


@dataclass
class _Part:
    """What one commit stored: `step` is the number of steps of its chain before it."""

    start: int
    rows: Columns
    chain: int | None = None
    step: int = 0
    lane: int | None = None
    is_pending: bool = False

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))


@dataclass
class PlainEpisode:
    """The stored steps of one episode.

    `name`: the position of its first step, also if that was evicted; `first_step`: how many steps were evicted;
    `positions`: of its steps; `lane`: None without one; `reward_at`: "next" or "same".
    """

    name: int
    first_step: int
    positions: Array
    rows: Columns
    lane: int | None
    is_open: bool
    reward_at: str

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def terminated(self) -> bool:
        """Whether its last stored step is a terminal one."""
        return bool(self.rows["terminated"][-1]) if "terminated" in self.rows else False

    def real(self, column: str) -> tuple[int, int]:
        """Return the first step at which a column has a value, and one past the last."""
        if self.reward_at == "next" and column == "reward" and not self.first_step:
            return 1, len(self)
        if self.reward_at == "next" and column == "action" and not self.is_open:
            return 0, len(self) - 1
        return 0, len(self)

    def clip(self, step: int, history: int, frameskip: int = 1) -> Columns:
        """Return a clip: every `frameskip`-th row, and all actions, folded."""
        stop = step + history * frameskip
        found = {name: rows[step:stop:frameskip] for name, rows in self.rows.items()}
        if "action" in found:
            found["action"] = self.rows["action"][step:stop].reshape(history, -1)
        return found

    def window(self, column: str, step: int, offsets: Sequence[int]) -> tuple[Array, Array]:
        """Return rows around a step, moved to the nearest that has a value; and which were moved."""
        first, stop = self.real(column)
        wanted = step + np.asarray(offsets)
        near = np.clip(np.clip(wanted, first, max(first, stop - 1)), 0, len(self) - 1)
        return self.rows[column][near], (wanted < first) | (wanted >= stop)

    def n_step(self, step: int, n: int, gamma: float) -> tuple[float, float, int]:
        """Return the sum of the next rewards, the discount, and how many steps were summed."""
        ahead = 1 if self.reward_at == "next" else 0
        last = len(self) - 1 - step + (0 if ahead else int(self.terminated))
        count = min(n, last)
        rewards = self.rows["reward"][step + ahead : step + ahead + count]
        total = sum(gamma**k * float(reward) for k, reward in enumerate(rewards))
        return total, 0.0 if self.terminated and count == last else gamma**count, count

    def return_to_go(self, step: int, gamma: float) -> float:
        """Return the discounted sum of all rewards from a step on."""
        rewards = self.rows["reward"][step + (self.reward_at == "next") :]
        return sum(gamma**k * float(reward) for k, reward in enumerate(rewards))


@dataclass
class PlainRing:
    """What a buffer of `max_steps` holds, in the order of commits.

    Example:
        >>> ring = PlainRing(5, "same")
        >>> for length in (3, 4):
        ...     position = ring.write({"x": np.arange(length)})
        >>> [(episode.name, episode.rows["x"].tolist()) for episode in ring.episodes()]
        [(3, [0, 1, 2, 3])]
    """

    max_steps: int
    reward_at: str
    head: int = 0
    parts: list[_Part] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    """Names of the episodes in parts that have ended."""

    def write(self, rows: Mapping[str, Any], chain: int | None = None, step: int = 0, lane: int | None = None) -> int:
        """Store a whole episode, or a part of a chain (the position of its first step); return its position."""
        self.commit()
        part = _Part(self.head, _arrays(rows), chain, step, lane)
        self.parts.append(part)
        self.head += len(part)
        self._evict()
        return part.start

    def append(self, rows: Mapping[str, Any]) -> None:
        """Store rows that are committed later."""
        added = _arrays(rows)
        if not self.parts or not self.parts[-1].is_pending:
            self.parts.append(_Part(self.head, added, is_pending=True))
        else:
            part = self.parts[-1]
            part.rows = {name: np.concatenate([part.rows[name], added[name]]) for name in added}
        self.head = self.parts[-1].start + len(self.parts[-1])

    def commit(self) -> None:
        """Commit the rows that were appended."""
        if self.parts and self.parts[-1].is_pending:
            self.parts[-1].is_pending = False
            self._evict()

    def _evict(self) -> None:
        while self.parts and self.head - self.parts[0].start > self.max_steps:
            del self.parts[0]

    def update(self, positions: Array, column: str, values: Array) -> None:
        """Change rows of a column."""
        for position, value in zip(positions.tolist(), values, strict=True):
            for part in self.parts:
                if part.start <= position < part.start + len(part):
                    part.rows[column][position - part.start] = value

    def episodes(self, pending: bool = True) -> list[PlainEpisode]:
        """Return what is stored, in the order in which it began; without rows that are not committed, if `pending` is
        False."""
        chains: dict[int, list[_Part]] = {}
        for part in self.parts:
            if pending or not part.is_pending:
                name = part.start if part.chain is None else part.chain
                chains.setdefault(name, []).append(part)
        found = []
        for name, parts in sorted(chains.items()):
            first = parts[0]
            positions = np.concatenate([np.arange(p.start, p.start + len(p)) for p in parts])
            rows = {column: np.concatenate([p.rows[column] for p in parts]) for column in first.rows}
            is_open = first.chain is not None and name not in self.ended
            found.append(PlainEpisode(name, first.step, positions, rows, first.lane, is_open, self.reward_at))
        return found


def _arrays(rows: Mapping[str, Any]) -> Columns:
    return {name: np.array(values) for name, values in rows.items()}
