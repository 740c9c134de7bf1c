"""The open rings of a buffer, as its engine reads them; the numbers that ids give them; the episodes of a moment.

    Rings                                                              those that a buffer was given, for life
      Ring    source (files) · reader (clips) · episodes (read whole)

    id, 62 bits   [ ring number: 14 | position on that ring: 48 ]      of ring 0 an id is the position itself

    moment   starts [40, 52, 60]  ->  [40, 12, 8]  ->  "b:KAwI"        as JSON, 1 to 3 bytes for each episode

Invariants: the ring of a buffer of its own is ring 0; a fork replaces a ring by another one; the table of uuids only
grows, and a ring has one number for as long as the table lives, also while it is away; the episodes of a moment are as
they were, whatever was evicted since; a ring is removed under its writer's lock, by a rename before a delete, so that
a kill leaves no half of it at its place.
Not here: rings that come and go (sharded/rings.py), clips (clips/).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ringmap.buffers.episodes import StoredEpisodes
from ringmap.clips.cut import Cut
from ringmap.clips.gather import ClipReader
from ringmap.errors import InputError, LockedError
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import clear_errors, clear_reads
from ringmap.storage.read.episodes import origins_at
from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.links import NONE, Parts, WholeEpisodes
from ringmap.storage.ring.ring import Position

if TYPE_CHECKING:
    from ringmap.storage.inspect.check import Finding

__all__ = [
    "MOST_RINGS",
    "POSITION_BITS",
    "REMOVED",
    "Ring",
    "RingEpisodes",
    "RingNumbers",
    "Rings",
    "apart",
    "episodes_of",
    "idle_s",
    "joined",
    "moment_of",
    "pack",
    "remove_ring",
    "unpack",
]


Array = np.ndarray[Any, np.dtype[Any]]

_STEP = Cut.clip(1)


@dataclass(slots=True)
class Ring:
    """One open ring.

    `number`: in ids; `name`: as users know it; `uuid`: the same in all its copies, b"" of one in RAM, which
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


_OF_PARTS = "ended", "part_starts", "part_lengths", "chains", "steps", "lanes"
_MOST = 1 << 28
"""Integers of one array: no moment has more, whatever its text claims."""


def pack(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return arrays of integers as short texts.

    Example:
        >>> made = pack({"starts": np.array([40, 52, 60])})
        >>> {name: values.tolist() for name, values in unpack(made, ["starts"], "x").items()}
        {'starts': [40, 52, 60]}
    """
    made = {}
    for name, values in arrays.items():
        steps = np.diff(np.asarray(values, np.int64), prepend=np.int64(0))
        low, high = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        dtype = next(t for t in "bhiq" if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
        raw = zlib.compress(steps.astype(f"<{dtype}").tobytes(), 1)
        made[name] = f"{dtype}:{base64.b64encode(raw).decode()}"
    return made


def unpack(texts: Any, names: Iterable[str], where: str) -> dict[str, Array]:
    """Return the arrays that `pack` made texts of, int64."""
    found = {}
    for name in names:
        try:
            dtype, text = texts[name].split(":")
            if dtype not in ("b", "h", "i", "q"):
                raise ValueError(f"type {dtype!r}")
            size = np.dtype(dtype).itemsize
            packed = zlib.decompressobj()
            raw = packed.decompress(base64.b64decode(text, validate=True), _MOST * size)
            if not packed.eof:
                raise ValueError("it is cut off")
            found[name] = np.cumsum(np.frombuffer(raw, f"<{dtype}"), dtype=np.int64)
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            binascii.Error,
            zlib.error,
        ) as error:
            raise InputError(
                f"{where}: the moment has no readable {name!r} ({error}); give what `moment` of a view, or a state, "
                "said"
            ) from None
    return found


class RingEpisodes(NamedTuple):
    """Episodes of one ring, as a view holds them.

    `starts`: their names; `lengths`: their steps; `stored`: their parts joined, and the number of each among these,
    None without parts; `is_part`: whether stored episodes were left out.
    """

    starts: Array
    lengths: Array
    stored: tuple[WholeEpisodes, Array] | None = None
    is_part: bool = False

    @property
    def ended(self) -> Array:
        """Tell of each whether it has ended: bool `(n,)`."""
        if self.stored is None:
            return np.ones(len(self.starts), np.bool_)
        whole, chosen = self.stored
        found: Array = ~whole.is_open[chosen]
        return found

    def frozen(self) -> RingEpisodes:
        """Return these with lengths that no caller, and no ring, changes."""
        if not self.lengths.flags.writeable and self.lengths.dtype == np.int32 and self.lengths.base is None:
            return self
        lengths = np.array(self.lengths, np.int32)
        lengths.flags.writeable = False
        return self._replace(lengths=lengths)

    def take(self, chosen: Array) -> RingEpisodes:
        """Return some of them."""
        stored = self.stored and (self.stored[0], self.stored[1][chosen])
        return RingEpisodes(self.starts[chosen], self.lengths[chosen], stored, True)

    def positions(self, episodes: Array, steps: Array) -> Array:
        """Return the positions on the ring of steps of episodes."""
        if self.stored is not None:
            whole, chosen = self.stored
            return whole.positions(whole.places[chosen[episodes]] + steps)
        found: Array = self.starts[episodes] + steps
        return found

    def steps_of(self, episodes: Array, positions: Array) -> Array:
        """Return which steps of episodes stand at these positions, -1 for none."""
        steps: Array = positions - self.starts[episodes]
        if self.stored is not None:
            whole, chosen = self.stored
            steps = whole.places_at(positions) - whole.places[chosen[episodes]]
        return np.where((steps >= 0) & (steps < self.lengths[episodes]), steps, -1)


def moment_of(uuid: bytes, episodes: RingEpisodes) -> dict[str, Any]:
    """Return the moment of episodes of one ring."""
    arrays = {"starts": episodes.starts, "lengths": episodes.lengths}
    if episodes.stored is not None:
        starts, lengths, parts = episodes.stored[0].parts_in(episodes.stored[1])
        arrays |= {"ended": episodes.ended, "part_starts": starts, "part_lengths": lengths}
        arrays |= {"chains": parts.chains, "steps": parts.steps, "lanes": parts.lanes}
    return {"uuid": uuid.hex(), "is_part": episodes.is_part, **pack(arrays)}


def episodes_of(moment: Any, where: str) -> tuple[bytes, RingEpisodes]:
    """Return the ring that a moment is of, and its episodes."""
    arrays = unpack(moment, ("starts", "lengths"), where)
    starts, lengths = arrays["starts"], arrays["lengths"]
    try:
        uuid, is_part = bytes.fromhex(moment["uuid"]), moment["is_part"]
        fits = len(starts) == len(lengths) and not (lengths < 0).any() and is_part in (True, False)
        stored = None
        if set(moment) != {"uuid", "is_part", "starts", "lengths"}:
            ended, at, sizes, *of_parts = unpack(moment, _OF_PARTS, where).values()
            ended_names = dict.fromkeys(starts[ended.astype(np.bool_)].tolist(), 0)
            fits = fits and len(ended) == len(starts)
            whole = WholeEpisodes(at, sizes, Parts(*of_parts), ended_names)
            stored = whole, whole.find(starts)
            fits = fits and not (stored[1] < 0).any() and np.array_equal(whole.lengths[stored[1]], lengths)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{where}: this is no moment of a view ({error!r})") from None
    if not fits:
        raise InputError(f"{where}: this is no moment of a view: its episodes do not fit")
    return uuid, RingEpisodes(starts, lengths, stored, is_part)


POSITION_BITS = 48
MOST_RINGS = 1 << 14
_POSITION = (1 << POSITION_BITS) - 1


def apart(ids: Array) -> tuple[Array, Array]:
    """Return the ring number and the position of each id.

    Example:
        >>> [part.tolist() for part in apart(np.array([5, (3 << 48) + 7]))]
        [[0, 3], [5, 7]]
    """
    return ids >> POSITION_BITS, ids & _POSITION


def joined(number: int | Array, positions: Array) -> Array:
    """Return the ids of positions on one ring, or each on its own."""
    ids: Array = positions + (number << POSITION_BITS)
    return ids


class RingNumbers:
    """The append-only table of uuids: the number of a ring is its place in it."""

    def __init__(self, uuids: Iterable[bytes] = ()) -> None:
        self.uuids = list(uuids)

    def of(self, uuid: bytes) -> int:
        """Return the number of a ring; a new ring gets the next one."""
        if uuid not in self.uuids:
            if len(self.uuids) == MOST_RINGS:
                raise InputError(
                    f"ShardedReplayBuffer: more than {MOST_RINGS} rings have come and gone; open the buffer again"
                )
            self.uuids.append(uuid)
        return self.uuids.index(uuid)

    def __contains__(self, uuid: bytes) -> bool:
        return uuid in self.uuids


REMOVED = "removed"
"""The folder beside the rings, in which one is deleted."""


def idle_s(ring: Ring) -> float | None:
    """Return how many seconds ago a ring last stored a record, or was made; None if it is gone."""
    try:
        return max(0.0, time.time() - os.stat(ring.source.paths.table).st_mtime)
    except OSError:
        return None


def remove_ring(folder: str, where: str) -> None:
    """Remove the directory of a ring."""
    disk = Disk()
    beside = os.path.join(os.path.dirname(folder), REMOVED)
    target = os.path.join(beside, os.path.basename(folder))
    lock = WriterLock(disk, Paths(folder).lock, folder)
    with clear_errors(where, folder):
        try:
            lock.acquire()
        except LockedError:
            raise LockedError(
                f"{where}: {folder} is written by {describe(holder_of(lock.path))}; a ring is removed once nobody "
                "writes it"
            ) from None
        try:
            make_folder(disk, beside)
            disk.discard(target)  # of a call that was killed
            disk.rename(folder, target)
            disk.sync_folder(os.path.dirname(folder))
        finally:
            lock.release()
        disk.discard(Paths(target).manifest)  # from here on nothing takes it for a ring
        disk.discard(target)
        with contextlib.suppress(OSError):  # another process is deleting one there
            if not disk.names(beside):
                disk.discard(beside)
