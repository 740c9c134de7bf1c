"""Gathers one batch from many rings, ring by ring, where these can't lie side by side (adjacent.py).

    anchors of a batch     which ring each is on
    [a0 a1 a2 a3 a4]       [2  0  2  1  0]
      pieces               ring 0: places 1, 4 · ring 1: place 3 · ring 2: places 0, 2

Invariants: a clip is in the place in which it was asked for; one counts only if it is live once all rings were copied
(storage/read/read_live.py), else its place is returned as bad.
Not here: what is drawn in place of a bad clip, what becomes of a ring that fails (buffers/sharded/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.adjacent import RING_FAULTS
from ringmap.clips.cut import Cut
from ringmap.clips.gather import ClipReader
from ringmap.clips.items import Numbers
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.text import put
from ringmap.storage.read.read_live import lost

__all__ = ["RING_FAULTS", "Piece", "gather_many", "groups"]

Array = np.ndarray[Any, np.dtype[Any]]


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
