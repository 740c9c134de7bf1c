"""Reads one batch from several rings: side by side where their columns are mapped, else ring by ring.

    side by side   ring numbers -> places     [2 0 2 1 0]           one table
                   positions    -> slots      slot + place * stride   one modulo, then one take for each column
                                                                      (columns/rows.py)
    after          states of all rings: as they were at the last look at their tails?     then one comparison with these
                   tails
    ring by ring   anchors                    [a0 a1 a2 a3 a4]      ring 0: 1, 4 · ring 1: 3 · ring 2: 0, 2

Invariants: a tail counts only while the state of its ring is the one that was shown before the tail was read, and for
`HELD_S` seconds at most, as where a reader validates a copy itself; a ring whose tail can't be read has lost every row.
A clip is in the place in which it was asked for; one counts only if it is live once all rings were copied.
Not here: which rings are open (buffers/sharded/rings.py), what is read at the slots (gather.py), what becomes of lost
clips, and of a ring that fails (buffers/sharded/reader.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.cut import Cut, Steps
from ringmap.clips.items import Numbers
from ringmap.errors import ClosedError, DamageError, ReplacedError
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.rows import AdjacentRows, Rows
from ringmap.storage.columns.text import put
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.checksums import GENERATION, SLOT_NBYTES
from ringmap.storage.read.handle import Handle, Pulse
from ringmap.storage.read.read_live import lost
from ringmap.storage.read.reader import HELD_S
from ringmap.storage.records.state import StateFile
from ringmap.storage.ring.arrays import all_true, lowest
from ringmap.storage.ring.ring import NOWHERE

__all__ = ["RING_FAULTS", "AdjacentRings", "Ends", "Piece", "States", "gather_many", "groups"]

Array = np.ndarray[Any, np.dtype[Any]]

RING_FAULTS = (ReplacedError, ClosedError, DamageError, OSError)
"""What a ring that is gone or damaged raises: the others can still be read."""

_NOT_SEEN = object()
"""Differs from every state: a ring whose tail is read at each look."""


class _Tails(NamedTuple):
    """The tails of the rings, as of the states that were seen before; all are read again at `until`, in monotonic
    seconds.

    `sweep`: these states seen at once; None: each must be looked at.
    """

    sweep: bytes | None
    seen: list[Any]
    tails: Array
    until: float


class _Memory(NamedTuple):
    """What the rings have in memory: whether the same rows as at first, and whether no episode in parts."""

    as_of: object
    is_current: bool
    are_whole: bool


class Ends(NamedTuple):
    """Where the rings end in memory.

    `keys`: newest record and era; `stops`: where the newest episodes end; `dense`: whether the episodes lie end to end;
    `is_dense`: whether all do.
    """

    as_of: object
    keys: list[tuple[int, int]]
    stops: Array
    dense: list[bool]
    is_dense: bool


class States:
    """The states of some rings, seen in one sweep: their state files, of two slots each, are mapped side by side.

    As of `StateFile.generations`: while the bytes stay the same, no ring has shown a later state; rows that are loaded
    before are loaded before the generations.

    Args:
        rings: the rings.
    """

    def __init__(self, rings: Sequence[Handle]) -> None:
        size = StateFile.nbytes
        room = rings[0].disk.system.room(len(rings) * size) if rings else None
        self._words: Array | None = None
        if room is not None and all(ring.map_state(room, n * size) for n, ring in enumerate(rings)):
            self._words = room.bytes.view(np.uint64)[GENERATION :: SLOT_NBYTES // 8]

    def generations(self) -> bytes | None:
        """Return what changes with each state that a ring shows, without a system call; None if each ring must be
        asked."""
        words = self._words
        return None if words is None else words.tobytes()


class AdjacentRings:
    """Rings that are read as one.

    Args:
        readers: of the rings, by their numbers.
        pulse: of all their sources.
        seen: the rows of each, in the same order; None: it has none yet.
        rows: those of the rings that have some, side by side; without columns if they can't be.
    """

    def __init__(
        self, readers: Mapping[int, Any], pulse: Pulse, seen: Sequence[Rows | None], rows: AdjacentRows
    ) -> None:
        self._pulse = pulse
        self._all = [reader.source for reader in readers.values()]
        self._rows = list(seen)
        self.rows = rows
        held = {n: reader for (n, reader), own in zip(readers.items(), seen, strict=True) if own is not None}
        self.readers: list[Any] = list(held.values())
        self.sources = [reader.source for reader in self.readers]
        self.plans: dict[int, Any] = {}
        """What a reader keeps for these rows, by the identity of a cut, which it keeps too, or by 0."""
        self._lives = [source.live for source in self.sources]
        self._place = np.full(max(held, default=0) + 2, -1)
        self._place[list(held)] = np.arange(len(held))
        laps = [rows.ring.rows for rows in self._rows if rows is not None]
        self._laps = np.array(laps)
        self._lap = laps[0] if len(set(laps)) == 1 else 0
        """That of all rings; 0: they differ."""
        self._generations = [source.generations for source in self.sources]
        self._states = States(self.sources)
        never = [_NOT_SEEN] * len(held)
        self._known = _Tails(None, never, np.full(len(held), NOWHERE), 0.0)
        self._memory = _Memory(None, False, False)
        self._ends: Ends | None = None

    @classmethod
    def of(cls, readers: Mapping[int, Any], pulse: Pulse) -> AdjacentRings:
        """Return these rings, ring number -> reader, side by side.

        Raises:
            ClosedError, OSError: a ring can't be read any more.
        """
        sources = [reader.source for reader in readers.values()]
        seen = [source.rows for source in sources]  # once: another thread may open some
        rows = [own for own in seen if own is not None]
        found = AdjacentRows.of(rows) if rows else None
        return cls(readers, pulse, seen, found or AdjacentRows({}, 0, ()))

    @property
    def is_current(self) -> bool:
        """Whether these are the rows that the rings have now."""
        return self._look().is_current

    @property
    def is_readable(self) -> bool:
        """Whether there are rows, all columns can be read at once, and no episode is in parts."""
        return bool(self.rows.by_name) and self._look().are_whole

    def _look(self) -> _Memory:
        """Look at the memory of all rings, if that of any changed."""
        known, last = self._memory, self._pulse.last
        if known.as_of is last:
            return known
        is_current = all(source.rows is rows for source, rows in zip(self._all, self._rows, strict=True))
        found = self._memory = _Memory(last, is_current, all(live.links is None for live in self._lives))
        return found

    # -- places -------------------------------------------------------------------------------

    def places(self, numbers: Array) -> Array | None:
        """Return the place among these rings of each ring number, at least one; None if one is not among them."""
        found = self._place.take(numbers, 0, None, "clip")  # one that is too large finds the last entry
        return None if lowest(found) < 0 else found

    def laps(self, places: Array) -> int | Array:
        """Return how many rows the ring at each place has; one number if all have as many."""
        return self._lap or self._laps.take(places)

    def first_rows(self, places: Array) -> int | Array:
        """Return the row of slot 0 of the ring at each place; 0 if there is one ring."""
        stride = self.rows.stride
        return places * stride if stride else 0

    def slots(self, steps: Steps, anchors: Array, places: Array) -> Array:
        """Return the rows `(B, n)` of steps around anchors, all of whose steps lie in their episodes."""
        laps, first = self.laps(places), self.first_rows(places)
        slots = steps.slots(anchors, laps if isinstance(laps, int) else laps[:, None])
        if not isinstance(first, int):
            slots += first[:, None]
        return slots

    @property
    def head(self) -> int:
        """The head of a single ring; 0 of several: see `Column.take`."""
        return self.sources[0].head if len(self.sources) == 1 else 0

    # -- validation --------------------------------------------------------------------------------

    def ends(self) -> Ends:
        """Return what the rings hold in memory now. Only those are looked at whose memory changed."""
        known, last = self._ends, self._pulse.last
        if known is not None and known.as_of is last:
            return known
        count = len(self.sources)
        keys = [(-1, -1)] * count if known is None else known.keys.copy()
        stops = np.zeros(count, np.int64) if known is None else known.stops.copy()
        dense = [False] * count if known is None else known.dense.copy()
        for place, (source, live) in enumerate(zip(self.sources, self._lives, strict=True)):
            if keys[place] == (source.seq, live.era):
                continue
            with thread.searching, source.lock:
                keys[place] = source.seq, live.era
                stops[place] = live.stop
                dense[place] = live.is_dense
        found = self._ends = Ends(last, keys, stops, dense, all(dense))
        return found

    def lost(self, places: Array, oldest: Array, good: Array | None = None) -> Array | None:
        """Validate a copy: return which rows may have been overwritten during their copy, bool `(B,)`, None for none.

        Call it once the copy is complete. All rows of a ring whose tail can't be read are lost: who reads it alone
        learns why.

        Args:
            places: of the rings.
            oldest: the position of the oldest row of each, `(B,)`.
            good: as for `read_live.lost`.
        """
        live: Array = oldest >= self._tails().tails.take(places)
        if self._pulse.is_broken:
            live[:] = False
        if good is not None:
            live &= good
        return None if all_true(live) else ~live

    def _tails(self) -> _Tails:
        sweep = self._states.generations()
        known, now = self._known, time.monotonic()
        is_due = now >= known.until
        if not is_due and sweep is not None and sweep == known.sweep:
            return known
        seen = [generations() for generations in self._generations]
        if not is_due and seen == known.seen:
            return known
        tails, kept = known.tails.copy(), list[Any](seen)
        for place, (before, generations) in enumerate(zip(known.seen, seen, strict=True)):
            if generations is None:
                kept[place] = _NOT_SEEN
            elif not is_due and generations == before:
                continue
            try:
                # The state was seen before this: one that comes in between differs from it at the next look.
                tails[place] = self.sources[place].shown_tail()
            except RING_FAULTS:
                tails[place], kept[place], sweep = NOWHERE, _NOT_SEEN, None
        until = now + HELD_S if is_due else known.until
        found = self._known = _Tails(sweep, kept, tails, until)
        return found


class Piece(NamedTuple):
    """The clips of a batch that one ring holds.

    `number`: of the ring; `places`: in the batch, rising; `anchors`: positions on its ring; `cut`: what they hold, as
    this ring computes it; `numbers`: of its episodes, where the cut needs them.
    """

    number: int
    reader: Any  # its ClipReader
    places: Array
    anchors: Array
    cut: Cut
    numbers: Numbers | None = None


def groups(keys: Array) -> list[tuple[int, Array]]:
    """Return each distinct key, and where it stands, rising. O(n log n).

    Example:
        >>> [(key, places.tolist()) for key, places in groups(np.array([2, 0, 2]))]
        [(0, [1]), (2, [0, 2])]
    """
    if not len(keys):
        return []
    order = keys.argsort(kind="stable")
    ranked = keys.take(order)
    ends = (ranked[1:] != ranked[:-1]).nonzero()[0] + 1
    bounds = [0, *ends.tolist(), len(keys)]
    firsts = ranked.take(bounds[:-1]).tolist()
    return [(key, order[a:b]) for key, (a, b) in zip(firsts, pairwise(bounds), strict=True)]


def gather_many(
    pieces: Sequence[Piece],
    size: int,
    batch: dict[str, Array],
    threads: int,
    fail: Callable[[Piece, Exception], None],
) -> list[Array]:
    """Copy the clips of all pieces into a batch; return the places of those that are still to be read.

    Args:
        pieces: of the batch.
        size: of the batch.
        batch: column -> `(size, ...)`; a missing column is made.
        threads: maximum number of threads for the copy.
        fail: called with a piece whose ring is gone or damaged; all its places are returned.

    Cost: two copies of the rows, one if there is one piece.
    """
    bad, good = list[Array](), list[Piece]()
    for piece in pieces:
        is_whole = len(piece.places) == size  # and needs no second copy
        try:
            out = batch if batch and is_whole else None
            found, gone = piece.reader.once(piece.anchors, piece.cut, out, threads, numbers=piece.numbers)
        except RING_FAULTS as error:
            fail(piece, error)
            bad.append(piece.places)
            continue
        good.append(piece)
        if gone is not None:
            bad.append(piece.places[gone])
        for name, values in found.items():
            into = batch.get(name)
            if into is values:
                continue
            if into is None and is_whole:
                batch[name] = values
                continue
            is_other = into is not None and into.dtype != values.dtype and values.dtype.kind != "U"
            if into is None or is_other or into.shape[1:] != values.shape[1:]:
                into = empty((size, *values.shape[1:]), values.dtype)
            batch[name] = put(into, piece.places, values)
    for piece in good if len(pieces) > 1 else ():  # while the others were copied, its clips may have gone
        try:
            gone = lost(piece.reader.source, piece.anchors)
        except RING_FAULTS as error:
            fail(piece, error)
            bad.append(piece.places)
        else:
            if gone is not None:
                bad.append(piece.places[gone])
    return [np.unique(np.concatenate(bad))] if bad else bad
