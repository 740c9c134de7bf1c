"""Handle: the part that a writer and a reader of a buffer share: looking up and reading.

    ordinal -> LiveEpisodes -> position -> Rows          (steps)
    ordinal -> EpisodeTable -> Record -> Segments        (episode data, and the words of text columns)

Invariants: `lock` is held while live episodes change or are searched; rows are gathered
without it, and a caller that gathers validates them by `newest_tail` afterwards. A search or a change never begins
another one, and calls nobody's code: it has the mark of its thread (disk/calls.py), so that a handler is refused.
A closed handle keeps its rows, table and segments, which raise ClosedError: `rows` is
None only if nothing was ever stored.
Not here: writing (store.py), following a writer (reader.py), clips.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ringmap.errors import ClipIndexError, ClosedError, CorruptError
from ringmap.storage.columns.rows import PendingRows, Rows, sum_of
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import Words, decoded, unpack
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import Paths
from ringmap.storage.disk.system import Room
from ringmap.storage.read.read_live import RETRY_S, is_live
from ringmap.storage.read.recovery import LiveRecords, RecoveredState, bad_rows, small_state_of
from ringmap.storage.records.blobs import Segments, decode_blob, decode_data
from ringmap.storage.records.manifest import Manifest, read_manifest
from ringmap.storage.records.state import State
from ringmap.storage.records.table import END, EpisodeTable, Record
from ringmap.storage.ring.links import NO_PART, NONE
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import NOWHERE, ORIGIN, Ordinal, Position
from ringmap.storage.sidecars import Home
from ringmap.storage.sidecars.values import MutableValues

__all__ = ["Handle", "Pulse", "Timeline", "tail_of"]

Array = np.ndarray[Any, np.dtype[Any]]

KEPT_NBYTES = 16 << 20
"""Bytes of words that a handle keeps, about: beyond that it begins anew."""

_WORD_NBYTES = 64
"""Of a string, beside its characters."""


class Pulse:
    """When the memory of some handles changed: `last` is another object after each change of any of them.

    After a failed sync the next writer may continue from an earlier state, and store other episodes at the same
    positions: the timeline breaks. A thread that looked up positions before that reads them again, from the new state.
    """

    __slots__ = ("_known", "broke", "last")

    def __init__(self) -> None:
        self.last = object()
        self.broke: object | None = None
        """Another object after each break; None before the first."""
        self._known = threading.local()

    def beat(self) -> None:
        """Record a change. Threads need no lock: an object is never made twice, as a number would be."""
        self.last = object()

    def break_timeline(self) -> None:
        """Record that the timeline breaks. Call it before memory changes."""
        self.broke = object()

    def begin(self) -> None:
        """Record that this thread holds no positions, and looks them up from now on."""
        if self.broke is not None:
            self._known.broke = self.broke

    @property
    def is_broken(self) -> bool:
        """Whether the timeline broke since this thread began."""
        broke = self.broke
        return broke is not None and getattr(self._known, "broke", None) is not broke


class Timeline:
    """As long as it is that of a handle, the same rows stand at the same positions; see `Pulse`."""

    __slots__ = ("__weakref__",)


class Handle:
    """An open buffer, for reading: the base of `Reader` and of the writer, `Store`."""

    writable = False
    retry_s = RETRY_S
    """Seconds for which a read is tried again, without progress, while a writer overwrites what it reads."""

    def __init__(self, disk: Disk, folder: str, manifest: Manifest, mapped: bool = True) -> None:
        self.disk = disk
        self.folder = folder
        self.paths = Paths(folder)
        self.manifest = manifest
        self.mapped = mapped or disk.volatile  # in RAM, the map is the array itself
        self.live = LiveEpisodes(np.empty(0), np.empty(0))
        self.lock = threading.Lock()
        self.pulse = Pulse()
        """Beats when a reader's live episodes or rows change. Handles that are read as one share it."""
        self.timeline = Timeline()
        self.rows: Rows | None = None
        self.values: MutableValues | None = None
        self.known_origins: dict[int, dict[int, tuple[bytes, int] | None]] = {}
        """Era -> the origins that episode data name, by name; see `origins`."""
        self.table: EpisodeTable
        self.segments = Segments(disk, self.paths.data)
        self.is_open = True
        self.seq = 0
        self.first = 1
        self.tail = ORIGIN
        self.head = ORIGIN
        self.next_ordinal = 0
        """The ordinal of the next episode that begins."""
        self.time = 0
        """That of the newest record."""

    @property
    def schema(self) -> Schema | None:
        """The columns, once an episode was stored or a schema was given."""
        return self.manifest.schema

    @property
    def pending(self) -> PendingRows | None:
        """Rows that this handle shows and that are not committed yet; None for none. A reader has none."""
        return None

    @property
    def committed_head(self) -> Position:
        """One past the newest committed row: where `pending` begins, or else `head`."""
        return self.head

    @property
    def home(self) -> Home:
        """The directory, in the form that sidecars need."""
        manifest = self.manifest
        return Home(self.disk, self.folder, manifest.uuid, manifest.rows, manifest.schema)

    @property
    def is_poisoned(self) -> bool:
        """Whether a sync failed, so that this handle no longer writes. Always False for a reader."""
        return False

    def closed(self, where: str) -> ClosedError:
        """Return the error of a call on a closed buffer."""
        if self.disk.volatile:
            return ClosedError(
                f"{where}: the buffer in RAM is closed, and its rows are gone; make another one, or give it a path"
            )
        return ClosedError(f"{where}: the buffer {self.folder} is closed; open it again")

    def is_idle(self, wait_s: float) -> bool:
        """Whether no thread writes now, or none does within so many seconds. A reader has no such calls."""
        return True

    def recover_if_stale(self) -> None:
        """Make memory agree with the files if an interrupt separated them."""

    def generations(self) -> tuple[int, int] | None:
        """Return what changes with each state that is shown; None if only `refresh` can tell."""
        return None

    def map_state(self, room: Room, at: int) -> bool:
        """Map the file that `generations` looks at into a room, from its byte `at` on; False if there is none."""
        return False

    def refresh(self) -> bool:
        """Catch up with the writer; tell whether anything changed."""
        return False

    def shown_tail(self) -> Position:
        """Return the position below which rows may have been overwritten by now, if the timeline did not break."""
        return self.tail

    def newest_tail(self) -> Position:
        """Return the position below which rows that this thread looked up may have been overwritten by now.

        Raises:
            ClosedError, ReplacedError, CorruptError: it is not known.
        """
        tail = self.shown_tail()
        # After the tail: a timeline breaks before memory changes.
        return NOWHERE if self.pulse.broke is not None and self.pulse.is_broken else tail

    def _apply(self, state: State | RecoveredState, found: LiveRecords, anew: bool) -> None:
        """Move memory to a state, given its live records if `anew`, else those that came since. Holds `lock`."""
        if anew:
            self.live.clear()
        else:
            self.live.evict_before(state.tail)
        self.live.extend(found.starts, found.lengths, found.parts, found.origins)
        for chain, seq in found.ends:
            self.live.end(chain, seq)
        self.seq, self.first, self.tail, self.head = state.seq, state.first, state.tail, state.head
        if found.newest is not None:  # no number is given again
            self.next_ordinal = max(self.next_ordinal, found.newest.next_ordinal)
            self.time = max(self.time, found.newest.time)

    def _apply_next(self, record: Record) -> None:
        """Move memory to the state after the next record. Holds `lock`."""
        self.live.evict_before(record.tail)
        start, length, part = record.start, record.length, record.part
        if length and start >= self.head:  # else they are the rows of a group, which were shown already
            self.live.append(start, length, record.origin, record.link if part else NO_PART)
        if part & END:
            self.live.end(record.chain, record.seq)
        self.seq, self.first, self.tail, self.head = record.seq, record.first, record.tail, Position(start + length)
        self.next_ordinal, self.time = record.next_ordinal, record.time

    def _open_values(self, rows: Rows | None) -> None:
        """Open the newer values of mutable columns, where there are such columns, so that reads of these rows find
        them."""
        if self.values is None and rows is not None and rows.schema.mutable.columns:
            self.values = MutableValues(self.home, self.writable, self.mapped, tail_of(self))
            rows.show(changes=self.values)

    def stored(self, positions: Array) -> Array | None:
        """Tell which positions, at least one, are those of stored steps, bool `(n,)`; None for all. Holds `lock`, or
        the writer's lock."""
        live = self.live
        if live.is_dense:
            first = live.start(Ordinal(live.first))
            steps = (positions - first).view(np.uint64)  # a negative one is huge
            if steps.max() < live.stop - first:
                return None
        return live.has(positions)

    def number(self, index: int, where: str) -> int:
        """Return the number of episode `index` (negative: from the end), parts joined. Holds `lock`."""
        count = self.live.num_episodes
        if not -count <= index < count:
            raise ClipIndexError(f"{where}: episode {index} is out of range for {count} episodes")
        return index % count

    def record_of(self, ordinal: Ordinal) -> Record | None:
        """Return the record of a live episode, or None when it was evicted meanwhile. O(log episodes)."""
        return self.table.find(self.live.start(ordinal), self.first, self.seq)

    def blob_of(self, record: Record) -> bytes | None:
        """Return the blob of a record, or None if it was deleted."""
        return self.segments.blob_of(record)

    def _adopt(self, rows: Rows) -> None:
        """Read from these columns, from now on."""
        rows.show(words=Texts(self))
        self._open_values(rows)
        self.rows = rows  # last: who reads many rings as one looks at once for what lies over the files

    def read_record(self, record: Record | None) -> tuple[list[Array], dict[str, Any], Record] | None:
        """Return all steps of a record's episode, its data and the record; None when it was evicted meanwhile.

        Raises:
            CorruptError: the rows differ from what was stored.
        """
        if record is None:
            return None
        rows = self.rows
        assert rows is not None
        steps = rows.read(record.start, record.length)
        sums = [sum_of(values) for values in steps]  # as they were stored
        rows.renew(record.start, steps)
        blob = self.blob_of(record)
        if not is_live(self, record.start):
            return None
        fault = bad_rows(record, rows.schema.names, sums, blob)
        if fault is not None:
            raise CorruptError(f"{self.folder}: {fault}; run ringmap.check and ringmap.repair on the buffer")
        return self._with_words(steps, blob, record), self._data_in(blob, record), record

    def _with_words(self, steps: list[Array], blob: bytes | None, record: Record) -> list[Array]:
        """Return the rows of a record with strings in place of their codes."""
        schema = self.schema
        if schema is None or not schema.texts or blob is None:
            return steps
        try:
            words = Words(unpack(decode_blob(blob)[3]))
            columns = zip(schema.columns, steps, strict=True)
            return [words.decode(values) if spec.is_text else values for spec, values in columns]
        except ValueError as error:
            raise self.undecodable("text", record, error) from None

    def undecodable(self, what: str, record: Record, error: ValueError) -> CorruptError:
        """Return the error of what can't be decoded in the blob of a record."""
        return CorruptError(
            f"{self.segments.path(record.blob_segment)}: {what} of record {record.seq}: {error}; run ringmap.check "
            "and ringmap.repair on the buffer"
        )

    def data_of(self, record: Record) -> dict[str, Any]:
        """Return the data in the blob of a record; {} if it was deleted."""
        blob = self.blob_of(record)
        return {} if blob is None else self._data_in(blob, record)

    @property
    def carried(self) -> dict[str, Any]:
        """The small state that commits carry, by section, as of the newest record that is known here. Reads the
        manifest and a blob.

        Raises:
            CorruptError: it is not valid.
        """
        kept = read_manifest(self.disk, self.folder).carried
        found = small_state_of(self.seq, self.table, self.blob_of, kept)
        if found.fault:
            raise CorruptError(f"{self.folder}: {found.fault}; run ringmap.check on the buffer")
        return found.state

    def data_at(self, start: Position) -> dict[str, Any] | None:
        """Return the data of the episode that starts at a position, or None when it was evicted meanwhile."""
        record = self.record_at(start)
        if record is None:
            return None
        blob, live = self.blob_of(record), is_live(self, start)
        if blob is None and not live:
            return None
        return self._data_in(blob, record)

    def live_record(self, ordinal: Ordinal) -> Record | None:
        """Return the record of an episode, or None when it was evicted meanwhile.

        Raises:
            CorruptError: it is damaged.
        """
        with thread.searching, self.lock:
            if not self.live.first <= ordinal < self.live.last:
                return None
            start = self.live.start(ordinal)
        return self.record_at(start)

    def record_at(self, start: Position) -> Record | None:
        """Return the record of the episode that starts at a position, as `live_record` does."""
        first, last = self.first, self.seq  # in this order: there may be more records than these meanwhile, not fewer
        record = self.table.find(start, first, last)
        if record is None and is_live(self, start):
            record = self.table.search(start, first, last)
            if record is None and is_live(self, start):
                raise CorruptError(f"{self.paths.table}: a live record is damaged; run ringmap.check on the buffer")
        return record

    def _data_in(self, blob: bytes | None, record: Record) -> dict[str, Any]:
        try:
            if blob is None:
                raise ValueError("damaged or missing")
            return decode_data(decode_blob(blob)[2])
        except ValueError as error:
            raise self.undecodable("data", record, error) from None

    def close(self) -> None:
        """Release all files. A running read keeps them, or raises ClosedError."""
        if self.rows is not None:
            self.rows.close()
        if self.values is not None:
            self.values.close()
        self.segments.close()
        self.table.close()
        self.is_open = False
        self.disk.let_go()


class Texts:
    """The words that the codes of text columns stand for, record by record.

        position -> the record that has it -> its blob -> words -> string; words are kept for the next read, in a bound

    A row that was overwritten during its copy may get any string: validation drops it.

    Args:
        handle: whose rows are read. It is not kept alive.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = weakref.ref(handle)
        # By era, too: then other records may start at known positions. Without a lock: two threads at once at worst
        # read words twice.
        self._known: dict[tuple[int, int], list[str]] = {}
        self._nbytes = 0

    def __call__(self, positions: Array, codes: Array) -> Array:
        """Return the strings of rows, given their positions and their codes `(*positions.shape, ...)`.

        Raises:
            CorruptError: the words of a live row are damaged, or its code is none of them.

        Cost: O(rows log episodes), and for each record whose words are not kept one read of its blob.
        """
        handle = self._handle()
        if handle is None:
            raise ClosedError("text: the buffer was closed meanwhile; open it again")
        flat = positions.reshape(-1)
        era, names, of = self._records(handle, flat)
        tables = [self._words(handle, era, name) for name in names.tolist()]
        rows = codes.reshape(len(flat), *codes.shape[positions.ndim :])
        texts, bad = decoded(rows, of, tables)
        if bad.any():
            self._refuse_live(handle, flat[bad & (names.take(of) != NONE)])
        return texts.reshape(codes.shape)

    def _records(self, handle: Handle, positions: Array) -> tuple[int, Array, Array]:
        """Return the era, the starts of the records that have these positions, each once, and which of them is that of
        each position."""
        with thread.searching, handle.lock:
            live = handle.live
            era = live.era
            if not len(live):
                starts = np.full(len(positions), NONE)
            else:
                _, steps, lengths = live.locate(positions)
                starts = np.where((steps >= 0) & (steps < lengths), positions - steps, NONE)
        names, of = np.unique(starts, return_inverse=True)
        return era, names, of.reshape(-1)

    def _words(self, handle: Handle, era: int, start: int) -> list[str]:
        """Return the words of the record that starts at a position; none if it was evicted meanwhile."""
        if start == NONE:
            return []
        key = era, start
        if (known := self._known.get(key)) is not None:
            return known
        words = self._read(handle, Position(start))
        if words:
            self._nbytes += sum(map(len, words)) + _WORD_NBYTES * len(words)
            if self._nbytes > KEPT_NBYTES:
                self._known, self._nbytes = {}, 0
            self._known[key] = words
        return words

    def _read(self, handle: Handle, start: Position) -> list[str]:
        record = handle.record_at(start)
        if record is None:
            return []
        blob = handle.blob_of(record)
        if blob is None:
            self._refuse_live(handle, np.array([start]))
            return []
        try:
            return unpack(decode_blob(blob)[3])
        except ValueError as error:
            raise handle.undecodable("words", record, error) from None

    def _refuse_live(self, handle: Handle, positions: Array) -> None:
        """Raise if one of these rows, whose text is not known, was not evicted meanwhile."""
        if len(positions) and is_live(handle, int(positions.max())):
            raise CorruptError(
                f"{handle.folder}: text of the step at position {int(positions.max())} is damaged or missing; run "
                "ringmap.check and ringmap.repair on the buffer"
            )


def tail_of(handle: Handle) -> Callable[[], int]:
    """Return a function that returns the position below which rows may have been overwritten by now. It does not keep
    the handle."""
    known = weakref.ref(handle)

    def tail() -> int:
        alive = known()
        return 0 if alive is None else alive.shown_tail()

    return tail
