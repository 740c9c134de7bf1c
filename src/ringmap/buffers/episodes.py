"""Stored episodes, read whole: steps by row, episodes by ordinal, and their data.

Invariants: what is returned was live during the whole read; an episode read whole is verified
by its checksum.
Not here: clips (clips/gather.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.datasets.base import in_range
from ringmap.errors import ClipIndexError
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.storage.disk.calls import thread
from ringmap.storage.read.episodes import (
    FIRST_STEP,
    ORIGIN_KEY,
    joined_data,
    origin_of,
    origins,
    read_joined,
    read_pieces,
)
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import is_live, read_whole
from ringmap.storage.records.blobs import decode_blob, decode_data, is_shown
from ringmap.storage.records.table import DROPPED, END, EPISODE, INTERRUPTED, PART, Record, are_live
from ringmap.storage.ring.ring import Ordinal, Position

__all__ = ["StoredChain", "StoredEpisodes", "evicted"]

Array = np.ndarray[Any, np.dtype[Any]]


class StoredChain(NamedTuple):
    """An episode that was recorded in parts.

    `name`: the position of its first step; `data`: the newest of its data; `is_whole`: whether it was finished, and no
    part that was stored after its oldest one is lost.
    """

    name: int
    data: dict[str, Any]
    is_whole: bool


class StoredEpisodes:
    """Reads whole episodes of a source, even while a writer fills it."""

    def __init__(self, source: Handle) -> None:
        self._source = source
        self._names = _Names(source.live.era)
        self._names_at_end: dict[int, tuple[str, ...]] = {}

    def each(
        self, most: float = math.inf, tell: Callable[[int, int], None] | None = None, with_origins: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield every episode, oldest first, as arrays; an episode that is evicted meanwhile is left out.

        Args:
            most: steps; an episode that is stored in parts comes in pieces of half as many if it has more.
            tell: called with the number of an episode that comes in pieces, and its steps.
            with_origins: whether its data say what it was first stored as, for a copy.

        Iterates by position, which never changes: ordinals are assigned again when a refresh finds that the writer
        restarted.
        """
        source = self._source
        lineages, ordinals, names = origins(source) if with_origins else (None, None, None)
        with thread.searching, source.lock:
            live = source.live
            now, lengths, in_parts = live.names.copy(), live.whole_lengths, live.links is not None
            length_of = dict(zip(now.tolist(), lengths.tolist(), strict=True)) if in_parts else {}
        for number, name in enumerate((now if names is None else names).tolist()):
            if length_of.get(name, 0) > most:
                if tell is not None:
                    tell(number, length_of[name])
                pieces = read_pieces(source, name, most / 2)
            else:
                pieces = read_pieces(source, name)
            for steps, data in pieces:
                if lineages is not None and ordinals is not None:
                    data.setdefault(ORIGIN_KEY, origin_of(lineages[number].tobytes(), int(ordinals[number])))
                yield self._as_dict(steps, data)

    def _as_dict(self, steps: list[Array], data: dict[str, Any]) -> dict[str, Any]:
        source = self._source
        columns = source.schema.names if source.schema is not None else []
        episode: dict[str, Any] = dict(zip(columns, steps, strict=True))
        if data:
            episode[EPISODE_DATA_KEY] = data
        return episode

    def one(self, index: int, where: str) -> list[Array]:
        """Return all steps of episode `index`, one array per column, verified."""
        source = self._source
        with thread.searching, source.lock:
            name = int(source.live.names[source.number(index, where)])
        joined = read_joined(source, name)
        if joined is None:
            raise evicted(where, index)
        return joined[0]

    def spans(self) -> tuple[Array, Array]:
        """Return the positions of the first steps of all episodes, and their lengths, at one moment. O(episodes)."""
        source = self._source
        with thread.searching, source.lock:
            live = source.live
            starts = live.names.copy()
            return starts, live.whole_lengths.astype(np.int64)

    def number_of(self, position: int, where: str) -> int:
        """Return the number of the episode that is named by the position of its first step. O(log episodes)."""
        source = self._source
        with thread.searching, source.lock:
            live = source.live
            starts = live.names
            number = int(np.searchsorted(starts, position))
            if number < len(starts) and starts[number] == position:
                return number
        raise ClipIndexError(
            f"{where}: no stored episode begins at position {position}; it was evicted, or never was there"
        )

    def steps(self, index: int, start: int, end: int, where: str, names: Sequence[str] | None = None) -> list[Array]:
        """Return steps `[start, end)` of episode `index`, one array per column: all of them, or those of `names`."""
        source = self._source
        places: Array | None = None
        with thread.searching, source.lock:
            if source.live.links is None:
                ordinal = Ordinal(source.live.first + source.number(index, where))
                position, length = source.live.start(ordinal), source.live.length(ordinal)
            else:
                whole, number = source.live.whole, source.number(index, where)
                length = int(whole.lengths[number])
                places = whole.places[number] + np.arange(start, end)
        if not 0 <= start <= end <= length:
            raise ClipIndexError(
                f"{where}: steps [{start}, {end}) are out of range for episode {index} of {length} steps"
            )
        if places is not None:
            return self._at(whole.positions(places), where, index, names)
        if names is not None:
            return self._at(np.arange(position + start, position + end), where, index, names)
        rows, position = source.rows, Position(position + start)
        assert rows is not None
        steps = rows.take(list(rows.by_name), range(position, position + end - start))
        if not is_live(source, position):
            raise evicted(where, index)
        return steps

    def _at(self, positions: Array, where: str, index: int, names: Sequence[str] | None) -> list[Array]:
        """Return the rows at rising positions, of episode `index`."""
        source = self._source
        assert source.rows is not None
        chosen = source.rows.schema.names if names is None else names
        steps = source.rows.take(chosen, positions)
        if len(positions) and not is_live(source, int(positions[0])):
            raise evicted(where, index)
        return steps

    def rows(self, numbers: Any, names: Sequence[str], where: str) -> dict[str, Array]:
        """Return steps by row (None: all; negative: from the end), columns `names`. O(episodes + rows)."""
        source = self._source
        rows, schema = source.rows, source.schema
        if rows is None:  # a reader opens them when the first episode exists
            if numbers is not None:
                in_range(numbers, 0, "row", where)
            specs = schema.columns if schema is not None else ()
            return {s.name: np.empty((0, *s.shape), s.dtype) for s in specs if s.name in names}

        def read() -> tuple[Array, dict[str, Array]]:
            if source.live.links is not None:
                with thread.searching, source.lock:
                    whole = source.live.whole
                total = int(whole.lengths.sum())
                places = np.arange(total) if numbers is None else in_range(numbers, total, "row", where)
                positions = whole.positions(places)
                return positions, dict(zip(names, rows.take(names, positions), strict=True))
            with thread.searching, source.lock:
                starts = source.live.starts.copy()
                lengths = source.live.lengths.astype(np.int64)
            offsets = np.cumsum(lengths) - lengths
            if numbers is None:
                positions = np.repeat(starts - offsets, lengths) + np.arange(int(lengths.sum()))
            else:  # the meaning of a number, and its range, must come from the same moment
                wanted = in_range(numbers, int(lengths.sum()), "row", where)
                episodes = np.searchsorted(offsets, wanted, side="right") - 1
                positions = starts[episodes] + wanted - offsets[episodes]
            return positions, dict(zip(names, rows.take(names, positions), strict=True))

        return read_whole(source, read, source.folder, "raise max_steps")

    def data_names(self) -> list[str]:
        """Return the names of the episode data of all episodes that users see. Reads each blob once: O(episodes written
        since)."""
        live, names = self._source.live, self._names
        if names.era != live.era or live.last < names.last:
            names = self._names = _Names(live.era)
            self._names_at_end = {}
        with thread.searching, self._source.lock:
            first = max(names.last, live.first)
            starts = live.starts[first - live.first :].tolist()
        for ordinal, start in enumerate(starts, first):
            names.add(Ordinal(ordinal), tuple(self._source.data_at(start) or ()))
        found = names.since(live.first)
        if live.links is not None:
            found = self._with_ends(found, live.links.ended)
        return [name for name in found if is_shown(name)]

    def _with_ends(self, names: list[str], ended: dict[int, int]) -> list[str]:
        """Return the names with those in records that ended a chain later, and that of the steps that were evicted."""
        source, known = self._source, dict[int, tuple[str, ...]]()
        with thread.searching, source.lock:
            whole = source.live.whole
            seqs = [ended[name] for name in whole.names.tolist() if name in ended]
        for seq in seqs:
            if (kept := self._names_at_end.get(seq)) is None:
                record = source.table.read(seq)
                is_apart = record is not None and not record.length
                kept = tuple(source.data_of(record)) if record and is_apart else ()
            known[seq] = kept
        self._names_at_end = known
        is_cut = bool((whole.first_steps > 0).any())
        every = (*names, *(name for names in known.values() for name in names))
        return list(dict.fromkeys((*every, FIRST_STEP) if is_cut else every))

    def dropped_data(self) -> list[dict[str, Any] | None]:
        """Return the data of dropped episodes whose place is among the live ones. O(live), vectorised."""
        source = self._source
        with thread.searching, source.lock:
            first, last, tail = source.first, source.seq, source.tail
        if not last:
            return []
        records, valid = source.table.read_range(max(1, first), last)
        gone = valid & (records["kind"] == EPISODE) & (records["flags"] & DROPPED != 0)
        found: list[dict[str, Any] | None] = []
        for row in records[gone & (records["start"] >= tail)]:
            blob = source.blob_of(Record.of(row))
            try:
                found.append(None if blob is None else decode_data(decode_blob(blob)[2]))
            except ValueError:  # it was dropped because it is not valid
                found.append(None)
        return found

    def chains(self) -> list[StoredChain]:
        """Return the chains that have live parts, by name. O(live records), vectorised, and one blob for each chain."""
        source = self._source
        if source.live.links is None:
            return []
        with thread.searching, source.lock:
            first, last, tail = source.first, source.seq, source.tail
        records, valid = source.table.read_range(max(1, first), last)
        records = records[valid & (records["part"] & PART != 0)]
        is_live = are_live(records, tail)
        is_lost = (records["kind"] == EPISODE) & ~is_live & (records["start"] >= tail)
        found = []
        for name in np.unique(records["chain"][is_live]).tolist():
            mine = records["chain"] == name
            ends = mine & (records["part"] & END != 0)
            is_finished = ends.any() and not (records["flags"][ends] & INTERRUPTED).any()
            data = dict[str, Any]()
            for row in records[mine & ~is_lost][::-1]:
                data = data or source.data_of(Record.of(row))
            found.append(StoredChain(name, data, bool(is_finished and not is_lost[mine].any())))
        return found

    def data_of(self, index: int, where: str) -> dict[str, Any]:
        """Return the data of episode `index` that users see, which may be {}."""
        found = self._data_named(int(self.names_of(index, where)[0]))
        if found is None:
            raise evicted(where, index)
        return found

    def names_of(self, idx: Any, where: str) -> Array:
        """Return the names of episodes, the positions of their first steps, by their numbers now (None: all).
        O(asked)."""
        source = self._source
        with thread.searching, source.lock:
            live = source.live
            names = live.names
            if idx is None:
                return names.copy()
            return names[in_range(idx, len(names), "episode", where)]

    def data(self, names: Array, evicted: Callable[[int], Exception] | None) -> dict[str, list[Any]]:
        """Return name -> one value per episode, None where an episode has no value. Reads the data of these episodes
        alone.

        Args:
            names: of the episodes: the positions of their first steps.
            evicted: returns the error for one that was evicted, given its place among them; None: it has no values.
        """
        every = list[dict[str, Any]]()
        for place, name in enumerate(names.tolist()):
            found = self._data_named(name)
            if found is None and evicted is not None:
                raise evicted(place)
            every.append(found or {})
        known = dict.fromkeys(name for data in every for name in data)
        return {name: [data.get(name) for data in every] for name in known}

    def _data_named(self, name: int) -> dict[str, Any] | None:
        """Return the data of an episode that users see, parts joined; None if it was evicted."""
        found = joined_data(self._source, name)
        return found and {name: value for name, value in found.items() if is_shown(name)}


class _Names:
    """The names in the data of the live episodes: for each set of names, the episodes that have exactly these."""

    def __init__(self, era: int) -> None:
        self.era = era
        self.last = 0
        self._episodes: dict[tuple[str, ...], deque[int]] = {}

    def add(self, ordinal: Ordinal, names: tuple[str, ...]) -> None:
        self.last = ordinal + 1
        if names:
            self._episodes.setdefault(names, deque()).append(ordinal)

    def since(self, first: Ordinal) -> list[str]:
        """Return the names in use from episode `first` on, in order of first use."""
        for names, ordinals in list(self._episodes.items()):
            while ordinals and ordinals[0] < first:
                ordinals.popleft()
            if not ordinals:
                del self._episodes[names]
        in_order = sorted(self._episodes, key=lambda names: self._episodes[names][0])
        return list(dict.fromkeys(name for names in in_order for name in names))


def evicted(where: str, episode: int) -> ClipIndexError:
    """Return the error of a call that asked for an episode that is gone."""
    return ClipIndexError(f"{where}: episode {episode} was evicted by the writer; call refresh() and ask again")
