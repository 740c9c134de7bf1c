"""The open rings of a buffer, as its engine reads them.

    Rings                                                              those that a buffer was given, for life
      Ring    source (files) · reader (clips) · episodes (read whole)

Invariants: of ring 0 an id is the position itself, and the ring of a buffer of its own is ring 0; a fork replaces a
ring by another one.
Not here: rings that come and go (sharded/rings.py), clips (clips/).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ringmap.buffers.episodes import StoredEpisodes
from ringmap.buffers.moments import RingEpisodes
from ringmap.clips.cut import Cut
from ringmap.clips.gather import ClipReader
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.system import clear_reads
from ringmap.storage.read.episodes import origins_at
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.links import NONE
from ringmap.storage.ring.ring import Position

if TYPE_CHECKING:
    from ringmap.storage.inspect.check import Finding

__all__ = ["Ring", "Rings"]

Array = np.ndarray[Any, np.dtype[Any]]

_STEP = Cut.clip(1)


@dataclass(slots=True)
class Ring:
    """One open ring.

    `number`: see numbers.py; `name`: as users know it; `uuid`: the same in all its copies, b"" of one in RAM, which
    nothing names; `reader`: of its clips, or its transitions; `episodes`: read whole.
    """

    number: int
    name: str
    uuid: bytes
    source: Handle
    reader: ClipReader
    episodes: StoredEpisodes
    is_checked: bool = False
    """Whether it was compared with others: what its writer fixes with the first episode is not known before."""

    @classmethod
    def of(cls, number: int, name: str, source: Handle, reader: ClipReader) -> Self:
        """Return a ring that was opened."""
        uuid = b"" if source.disk.volatile else source.manifest.uuid
        return cls(number, name, uuid, source, reader, StoredEpisodes(source))

    @property
    def folder(self) -> str:
        """Its directory."""
        return self.source.folder

    @property
    def num_episodes(self) -> int:
        """Number of stored episodes."""
        source = self.source
        with thread.searching, source.lock:
            return source.live.num_episodes

    @property
    def num_steps(self) -> int:
        """Number of stored steps; of transitions those that count."""
        return self.source.live.num_steps if self.reader.capacity is None else self.reader.pin(_STEP).count

    @property
    def low(self) -> Position:
        """The position of the oldest step that counts: rows of transitions are stored for longer."""
        return self.source.tail if self.reader.capacity is None else self.reader.window(_STEP).low

    @property
    def lengths(self) -> Array:
        """Steps of each episode, oldest first, int32, a copy."""
        source = self.source
        with thread.searching, source.lock:
            lengths: Array = source.live.whole_lengths.copy()
        return lengths

    @property
    def has_lanes(self) -> bool:
        """Whether a lane is known of every stored episode."""
        source = self.source
        with thread.searching, source.lock:
            return source.live.links is not None and NONE not in source.live.whole.lanes

    def pinned(self) -> RingEpisodes:
        """Return the episodes that count now; of transitions those that were committed together. O(episodes)."""
        source, reader = self.source, self.reader
        low = None if reader.capacity is None else reader.window(_STEP).low
        with thread.searching, source.lock:
            live = source.live
            if live.links is not None:
                whole = live.whole
                return RingEpisodes(whole.names, whole.lengths, (whole, np.arange(len(whole))))
            if low is None:
                return RingEpisodes(live.starts.copy(), live.lengths)
            stops = live.starts + live.lengths
            kept = stops > low
            starts = np.maximum(live.starts[kept], low)
            return RingEpisodes(starts, stops[kept] - starts)

    def pinned_episodes(self) -> RingEpisodes:
        """Return the episodes that count now; of transitions those of the environments, named by their ordinals.
        O(episodes), or O(transitions)."""
        if self.reader.capacity is None:
            return self.pinned()
        whole = self.reader.whole_episodes()
        return RingEpisodes(whole.names, whole.lengths, (whole, np.arange(len(whole))))

    def origins(self, names: Array) -> tuple[Array, Array]:
        """Return lineages and ordinals of episodes, as a view names them."""
        if self.reader.capacity is None:
            return origins_at(self.source, names)[:2]
        lineage = np.frombuffer(self.source.manifest.lineage, np.uint8)
        return np.broadcast_to(lineage, (len(names), 16)), names.astype(np.uint64)

    def check(self, faults: Sequence[str] = ()) -> list[Finding]:
        """Return the faults of the ring; empty when sound. Reads all rows. `faults`: of what else is in memory."""
        from ringmap.storage.inspect.check import check_source  # here: an opening needs none of what this imports

        source = self.source
        with thread.searching, source.lock:
            found = self.reader.index.check()
        with clear_reads("ReplayBuffer.check", source.folder):
            return check_source(source, [*found, *faults])

    def close(self) -> None:
        """Close the files of a ring that is only read."""
        if self.source.is_open:
            self.source.close()


class Rings:
    """The rings that a buffer was given, which stay open as long as it is.

    Args:
        rings: in the order of their numbers.
    """

    columns: Any = None
    """The columns of transitions; None for rings of episodes, and while no columns are known."""

    def __init__(self, rings: tuple[Ring, ...]) -> None:
        self._rings, self._changes = rings, np.zeros(len(rings), np.int64)
        self._seen: list[Any] = []
        self.is_written = any(ring.source.writable for ring in rings)
        """Whether this process writes one of them."""
        self.lock = threading.RLock()
        """Held where moments and draws of many rings are counted."""

    @property
    def open(self) -> tuple[Ring, ...]:
        """The rings, in the order of their numbers: another tuple when others are open."""
        return self._rings

    @property
    def changes(self) -> Array:
        """How often each of them changed, at most."""
        lives = [ring.source.live for ring in self._rings]
        now = [(live.era, live.first, live.last, live.num_steps) for live in lives]
        if now != self._seen:
            self._seen, self._changes = now, self._changes + 1
        return self._changes

    @property
    def uuids(self) -> list[bytes]:
        """What names the rings, by their numbers."""
        return [ring.uuid for ring in self._rings]

    @property
    def n_step(self) -> int:
        """Number of rewards summed per transition."""
        return 1

    @property
    def why(self) -> str:
        """What is wrong with the rings that can't be read, for the end of a sentence; "" if there are none."""
        return ""

    @property
    def where(self) -> str:
        """Where they are, in words."""
        return ", ".join(ring.folder for ring in self._rings)

    @property
    def path(self) -> Path | None:
        """The directory that users know them by; None: there is none, or not one."""
        source = self._rings[0].source
        return None if source.disk.volatile else Path(source.folder)

    def of(self, number: int) -> Ring | None:
        """Return an open ring by its number; None: it is away."""
        return self._rings[number] if 0 <= number < len(self._rings) else None

    def number_of(self, uuid: bytes) -> int | None:
        """Return the number of the ring with this uuid; None: it is none of these."""
        return next((ring.number for ring in self._rings if ring.uuid == uuid), None)

    def follow(self, scan: bool = False) -> bool:
        """Catch up with every ring; tell whether anything changed. `scan`: whether to look for new ones."""
        changed = [ring.source.refresh() for ring in self._rings]
        return any(changed)

    def report(self) -> None:
        """Say what is wrong with rings that are not open: here all are."""

    def drop(self, ring: Ring, error: Exception) -> None:
        """Raise the error of a ring: the buffer can't go on without it."""
        raise error
