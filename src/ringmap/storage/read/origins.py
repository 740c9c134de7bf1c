"""Origins: what each live episode was first stored as, by which it is the same in every copy.

    episode of this ring             its lineage, its ordinal
    episode copied from elsewhere    "<32 hexadecimal digits of a lineage>-<ordinal>", in its data under `_origin`

Invariants: an origin is of the moment of one search of memory, in the order of the episodes there.
Not here: who copies an episode and its origin; how ordinals are given (commit/store.py).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ringmap.storage.records.table import COPIED
from ringmap.storage.ring.ring import Ordinal, Position

__all__ = ["ORIGIN_KEY", "Origins", "origin_in", "origin_of", "origins_at"]

Array = np.ndarray[Any, np.dtype[Any]]

ORIGIN_KEY = "_origin"
"""The name in episode data."""

_ORIGIN = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")


def origin_in(data: Any) -> tuple[bytes, int] | None:
    """Return the lineage and the ordinal that episode data name; None if they name none."""
    found = _ORIGIN.fullmatch(data) if isinstance(data := data.get(ORIGIN_KEY), str) else None
    return None if found is None else (bytes.fromhex(found[1]), int(found[2]))


def origin_of(lineage: bytes, ordinal: int) -> str:
    """Return an origin in the form that `origin_in` reads."""
    return f"{lineage.hex()}-{ordinal}"


def origins_at(handle: Any, names: Array) -> tuple[Array, Array, Array]:
    """Return lineages and ordinals of the episodes that begin at these positions, as `Handle.origins`, and which of
    them are stored."""
    with handle.memory:
        live = handle.live
        here = live.names
        lineages, ordinals = handle.origins()
        at = np.minimum(here.searchsorted(names), max(0, len(here) - 1))
        if not len(here):
            return np.zeros((len(names), 16), np.uint8), np.zeros(len(names), np.uint64), np.zeros(len(names), np.bool_)
        return lineages[at], ordinals[at], here[at] == names


class Origins:
    """The origins of a handle's episodes; those that stand in episode data are read once."""

    def __init__(self) -> None:
        self._era = -1
        self._read: dict[int, tuple[bytes, int] | None] = {}

    def of(self, handle: Any) -> tuple[Array, Array]:
        """Return lineages, uint8 `(n, 16)`, and ordinals, uint64 `(n,)`; see `Handle.origins`."""
        with handle.memory:
            live = handle.live
            if live.era != self._era:
                self._era, self._read = live.era, {}
            starts, found = live.starts, live.origins.copy()
            copied = found < 0
            ended: dict[int, int] = {}
            if live.links is not None:
                whole = live.whole
                firsts = whole.in_order[whole.parts]
                lasts = whole.in_order[np.append(whole.parts[1:], len(whole.in_order))[: len(whole)] - 1]
                ended = live.links.ended
                starts, copied, found = whole.names, copied[lasts], found[firsts]
            else:
                starts = starts.copy()
        found[found < 0] = ~found[found < 0]
        lineages = np.empty((len(found), 16), np.uint8)
        lineages[:] = np.frombuffer(handle.manifest.lineage, np.uint8)
        for name, seq in ended.items():
            record = handle.table.read(seq)
            if record is not None and not record.length and record.part & COPIED:
                copied |= starts == name
        names = starts[copied].tolist()
        for at, name in zip(np.flatnonzero(copied).tolist(), names, strict=True):
            if name not in self._read:
                self._read[name] = self._origin_of(handle, name)
            origin = self._read[name]
            if origin is not None:
                lineages[at], found[at] = np.frombuffer(origin[0], np.uint8), origin[1]
        if len(self._read) > 2 * len(names) + 64:
            self._read = {name: self._read[name] for name in names}
        return lineages, found.astype(np.uint64)

    @staticmethod
    def _origin_of(handle: Any, name: int) -> tuple[bytes, int] | None:
        """Return what the data of the episode of this name say; None if it was evicted meanwhile."""
        with handle.memory:
            live = handle.live
            if live.links is None:
                ordinal = live.ordinal_from(Position(name))
                if ordinal == live.last or live.start(Ordinal(ordinal)) != name:
                    return None
            else:
                number = int(live.whole.find(np.array([name]))[0])
                if number < 0:
                    return None
                ordinal = Ordinal(live.first + int(live.whole.parts_of(number)[-1]))
                end = handle.table.read(live.links.ended.get(name, 0))
                if end is not None and not end.length and (data := handle.data_of(end)):
                    return origin_in(data)  # a record without rows, which ended it, has its data
        data = handle.read_data(ordinal)
        return None if data is None else origin_in(data)
