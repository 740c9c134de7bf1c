"""Reads the words that the codes of text columns stand for, episode by episode.

    position -> the record that has it -> its blob -> words -> string
                    |                                  |
                    live episodes, in memory           kept for the next read, within a bound

Invariants: a code is looked up in the words of its own record. A row that was overwritten during its copy may get any
string: the look after the copy drops it. One that is live has its string, or is damaged.
Not here: how words are packed (columns/text.py); rows that are not committed, which have words of their own.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ringmap.errors import ClosedError, CorruptError
from ringmap.storage.columns.text import decoded
from ringmap.storage.read.read_live import Live, is_live
from ringmap.storage.records.blobs import Segments, decode_words
from ringmap.storage.records.table import Record
from ringmap.storage.ring.live import LiveEpisodes
from ringmap.storage.ring.ring import Position

__all__ = ["KEPT_NBYTES", "Texts"]

Array = np.ndarray[Any, np.dtype[Any]]

KEPT_NBYTES = 16 << 20
"""Bytes of words that a handle keeps, about: those of the newest reads, and half as many of those before."""

_WORD_NBYTES = 64
"""Of a string, beside its characters."""

_NOWHERE = -1


class Recorded(Live, Protocol):
    """A source of rows that has the records of its episodes: see `Handle`."""

    folder: str
    live: LiveEpisodes
    segments: Segments

    @property
    def memory(self) -> AbstractContextManager[Any]:
        """The lock of what is known of the episodes."""

    def episode_from(self, position: Position, stop: int) -> tuple[Position, Record | None] | None:
        """Return the start of the first episode from a position on, and its record, None if it was evicted
        meanwhile."""

    def blob_of(self, record: Record) -> bytes | None:
        """Return the blob of a record."""


class Texts:
    """The words of a handle's records.

    Args:
        handle: whose rows are read. It is not kept alive.
    """

    def __init__(self, handle: Recorded) -> None:
        self._handle = weakref.ref(handle)
        # By era, too: then other records may start at known positions. Without a lock: two threads at once at worst
        # read words twice.
        self._new: dict[tuple[int, int], list[str]] = {}
        self._old: dict[tuple[int, int], list[str]] = {}
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
            self._refuse_live(handle, flat[bad & (names.take(of) != _NOWHERE)])
        return texts.reshape(codes.shape)

    def _records(self, handle: Recorded, positions: Array) -> tuple[int, Array, Array]:
        """Return the era, the starts of the records that have these positions, each once, and which of them is that of
        each position."""
        with handle.memory:
            live = handle.live
            era = live.era
            if not len(live):
                starts = np.full(len(positions), _NOWHERE)
            else:
                at = live.starts.searchsorted(positions, side="right") - 1
                starts, lengths = live.starts.take(at), live.lengths.take(at)
                starts = np.where((positions >= starts) & (positions < starts + lengths), starts, _NOWHERE)
        names, of = np.unique(starts, return_inverse=True)
        return era, names, of.reshape(-1)

    def _words(self, handle: Recorded, era: int, start: int) -> list[str]:
        """Return the words of the record that starts at a position; none if it was evicted meanwhile."""
        if start == _NOWHERE:
            return []
        key = era, start
        words = self._new.get(key)
        if words is not None:
            return words
        words = self._old.get(key)
        if words is None:
            words = self._read(handle, Position(start))
        if words:
            nbytes = sum(map(len, words)) + _WORD_NBYTES * len(words)
            if self._nbytes + nbytes > KEPT_NBYTES:
                self._old, self._new, self._nbytes = self._new, {}, 0
            self._new[key] = words
            self._nbytes += nbytes
        return words

    def _read(self, handle: Recorded, start: Position) -> list[str]:
        found = handle.episode_from(start, start + 1)
        record = None if found is None else found[1]
        if record is None:
            return []
        blob = handle.blob_of(record)
        if blob is None:
            self._refuse_live(handle, np.array([start]))
            return []
        try:
            return decode_words(blob)
        except ValueError as error:
            raise CorruptError(
                f"{handle.segments.path(record.blob_segment)}: words of record {record.seq}: {error}; run "
                "ringmap.check and ringmap.repair on the buffer"
            ) from None

    def _refuse_live(self, handle: Recorded, positions: Array) -> None:
        """Raise if one of these rows, whose text is not known, was not evicted meanwhile."""
        if len(positions) and is_live(handle, int(positions.max())):
            raise CorruptError(
                f"{handle.folder}: text of the step at position {int(positions.max())} is damaged or missing; run "
                "ringmap.check and ringmap.repair on the buffer"
            )
