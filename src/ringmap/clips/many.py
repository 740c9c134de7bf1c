"""Gathers one batch from many rings: each column of each ring once, into its places in the batch.

    anchors of a batch     which ring each is on
    [a0 a1 a2 a3 a4]       [2  0  2  1  0]
      pieces               ring 0: places 1, 4 · ring 1: place 3 · ring 2: places 0, 2
                           slots of all anchors at once; then for each piece and column one take

Invariants: a clip is in the place in which it was asked for; one counts only if the tail of its own ring after the copy
tells that its rows were live meanwhile (storage/read/read_live.py), else its place is returned as bad.
Not here: what is drawn in place of a bad clip, what becomes of a ring that fails (buffers/sharded/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.adjacent import RING_FAULTS
from ringmap.clips.cut import Cut, Places, places_of
from ringmap.clips.gather import ClipReader
from ringmap.clips.items import Numbers
from ringmap.storage.columns.copying import SPLIT_NBYTES, empty, take, together
from ringmap.storage.columns.rows import Rows
from ringmap.storage.columns.text import put
from ringmap.storage.read.read_live import is_live, lost

__all__ = ["RING_FAULTS", "Piece", "are_plain", "gather_many", "groups"]

Array = np.ndarray[Any, np.dtype[Any]]

_APART_NBYTES = 1 << 12
"""Bytes of a clip from which it is copied to its place by a call of its own: the call takes as long as a second copy of
so many."""

_Made = tuple[str, Places, Array, bool]
"""A column of a batch: its name, where all clips are in the order of the pieces, the array to copy them to, and whether
that is in
the same order: small clips are copied piece after piece, and all put into their places by one take. Large ones go there
at once."""


class Piece(NamedTuple):
    """The clips of a batch that one ring holds.

    `number`: of the ring; `places`: in the batch, rising; `anchors`: positions on its ring; `cut`: what they hold, as
    this ring computes it; `numbers`: of its episodes, where the cut needs them.
    """

    number: int
    reader: ClipReader
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
    cut: Cut,
    size: int,
    batch: dict[str, Array],
    threads: int,
    fail: Callable[[Piece, Exception], None],
) -> list[Array]:
    """Copy the clips of all pieces into a batch; return the places of those that are still to be read.

    Args:
        pieces: of the batch.
        cut: what the clips hold.
        size: of the batch.
        batch: column -> `(size, ...)`; a missing column is made.
        threads: maximum number of threads for the copy.
        fail: called with a piece whose ring is gone or damaged; all its places are returned.

    Cost: one copy of the rows, two of small ones; about 3 us for each piece, and 2 us for each of its columns.
    """
    if are_plain(pieces, cut):
        return _gather_plain(pieces, cut, size, batch, threads, fail)
    if len(pieces) > 1:
        gathered = pieces[0].reader.read_together(pieces, size, batch, threads, fail)
        if gathered is not None:
            return gathered
    bad = []
    for piece in pieces:
        is_whole = len(piece.places) == size  # and needs no second copy
        try:
            out = batch if batch and is_whole else None
            found, gone = piece.reader.once(piece.anchors, piece.cut, out, threads, numbers=piece.numbers)
        except RING_FAULTS as error:
            fail(piece, error)
            bad.append(piece.places)
            continue
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
    return bad


def are_plain(pieces: Sequence[Piece], cut: Cut) -> bool:
    """Tell whether the rows of all clips follow from their anchors alone."""
    if cut.needs_bounds or not all(piece.reader.is_plain for piece in pieces):
        return False
    sources = [piece.reader.source for piece in pieces]
    if not all(source.live.links is None and source.rows is not None for source in sources):
        return False
    rows = sources[0].rows if sources else None
    return rows is None or not cut.held(rows.texts)  # text has a width of its own in each ring


def _gather_plain(
    pieces: Sequence[Piece],
    cut: Cut,
    size: int,
    batch: dict[str, Array],
    threads: int,
    fail: Callable[[Piece, Exception], None],
) -> list[Array]:
    """Do what `gather_many` does, for clips whose steps all lie in one episode: slots are computed for all rings at
    once."""
    if not pieces:
        return []
    all_rows = [piece.reader.source.rows for piece in pieces]
    first = all_rows[0]
    assert first is not None
    plan = pieces[0].reader.plan_of(cut, first)
    counts = [len(piece.places) for piece in pieces]
    sizes = [rows.ring.rows for rows in all_rows if rows is not None]
    laps: int | Array = sizes[0]
    if len(set(sizes)) > 1:
        laps = np.repeat(np.array(sizes), counts)[:, None]
    anchors = np.concatenate([piece.anchors for piece in pieces])
    covered = [rows is not None and rows.is_covered for rows in all_rows]
    places = []
    for steps, is_alone in plan.steps:
        at = anchors[:, None] + steps.array if any(covered) else None
        places.append(places_of(steps.slots(anchors, laps), None, at, is_alone))
    made: list[_Made] = []
    ranked: list[tuple[Array, Array]] = []
    nbytes = 0
    for name, column, taken, number, _ in plan.columns:
        spec = column.spec
        into = batch.get(name)
        if into is None:
            into = batch[name] = empty(taken.shape(size, spec), spec.dtype)
        where = places[number]
        slots = where[0]
        whole = into.reshape(size, *slots.shape[1:], *spec.shape)
        clip_nbytes = spec.row_nbytes * (slots.size // max(1, len(slots)))
        nbytes += clip_nbytes
        is_ranked = len(pieces) > 1 and (
            clip_nbytes < _APART_NBYTES or any(covered) or not first.by_name[name].is_quick_apart
        )
        if is_ranked:
            beside = np.empty((len(anchors), *whole.shape[1:]), whole.dtype)
            ranked.append((beside, whole))
            whole = beside
        made.append((name, where, whole, is_ranked))
    if nbytes * len(anchors) < SPLIT_NBYTES:
        threads = 1
    at_once, faults = min(threads, len(pieces)), dict[int, Exception]()
    stops = np.cumsum(counts).tolist()

    def copy(part: int) -> None:
        for which in range(part, len(pieces), at_once):
            rows, stop = all_rows[which], stops[which]
            assert rows is not None
            try:
                _copy(pieces[which], rows, made, stop - counts[which], stop, threads)
            except RING_FAULTS as error:
                faults[which] = error

    together([partial(copy, part) for part in range(at_once)])
    if ranked:
        ranks = np.concatenate([piece.places for piece in pieces])
        if len(ranks) == size:
            order = np.empty(size, np.int64)
            order[ranks] = np.arange(size)
            for beside, whole in ranked:
                beside.take(order, 0, whole, "clip")
        else:
            for beside, whole in ranked:
                whole[ranks] = beside
    bad = []
    lowest = np.minimum.reduceat(anchors, [0, *stops[:-1]]).tolist()
    for which, piece in enumerate(pieces):
        try:
            if which in faults:
                raise faults[which]
            if is_live(piece.reader.source, lowest[which]):
                continue
            gone = lost(piece.reader.source, piece.anchors)
        except RING_FAULTS as error:
            fail(piece, error)
            bad.append(piece.places)
        else:
            if gone is not None:
                bad.append(piece.places[gone])
    return bad


def _copy(piece: Piece, rows: Rows, made: list[_Made], start: int, stop: int, threads: int) -> None:
    """Copy the clips of one piece into their places."""
    reader, places = piece.reader, piece.places
    large, head = bool(rows.large), reader.source.head
    if large:
        reader.watch.begin()
    for name, (every, _, positions), whole, is_ranked in made:
        column, slots = rows.by_name[name], every[start:stop]
        is_whole = len(places) == len(whole)  # all of the batch, in order
        into = whole[start:stop] if is_ranked else whole if is_whole else None
        if positions is not None:
            values = rows.take([name], positions[start:stop], head, [into], threads, slots)[0]
            if into is None:
                whole[places] = values
        elif into is not None:
            take(column, slots, into, threads if is_whole else 1, head)
        elif not column.is_quick_apart:
            whole[places] = column.take(slots, None, head)
        else:
            copy = column.take
            for at, place in enumerate(places.tolist()):  # slices: a value of one step is no array
                copy(slots[at : at + 1], whole[place : place + 1], head)
    if large:
        reader.watch.end()
