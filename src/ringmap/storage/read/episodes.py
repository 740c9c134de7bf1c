"""Whole episodes of a handle, parts joined: their rows, their data, and what they were first stored as.

    name -> its parts, as of now -> their records -> rows, each verified -> one array per column
                                                  -> data: of the last part, or of the record that ended the chain

    episode of this ring             its lineage, its ordinal
    episode copied from elsewhere    "<32 hexadecimal digits of a lineage>-<ordinal>", in its data under `_origin`

Invariants: what is returned was live during the read; parts that are evicted meanwhile are left out, with those before
them; origins are of the moment of one search of memory, in the order of the episodes there.
Not here: which parts make an episode (ring/links.py), clips, how ordinals are given (commit/commit.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ringmap.storage.disk.calls import thread
from ringmap.storage.read.handle import Handle
from ringmap.storage.records.table import COPIED
from ringmap.storage.ring.ring import Position

__all__ = [
    "FIRST_STEP",
    "ORIGIN_KEY",
    "joined_data",
    "origin_in",
    "origin_of",
    "origins",
    "origins_at",
    "read_joined",
    "read_pieces",
]

Array = np.ndarray[Any, np.dtype[Any]]

FIRST_STEP = "first_step"
"""The key in the data of an episode whose oldest parts were evicted. Its value is the number of evicted steps."""

ORIGIN_KEY = "_origin"
"""The key in the data of an episode that was copied into this ring."""

_ORIGIN = re.compile(r"([0-9a-f]{32})-(0|[1-9][0-9]{0,18})")


class _Stored(NamedTuple):
    """An episode as of one moment: where its parts begin, how many steps were before, and the number of the record that
    ended it, 0 for none."""

    starts: list[Position]
    first_step: int
    end: int


def _find(handle: Handle, name: int) -> _Stored | None:
    """Return the episode of a name; None if all of it was evicted. O(log episodes), and what `whole` costs."""
    with thread.searching, handle.lock:
        live = handle.live
        if live.links is None:
            ordinal = live.ordinal_from(Position(name))
            is_there = ordinal < live.last and live.start(ordinal) == name
            return _Stored([Position(name)], 0, 0) if is_there else None
        whole = live.whole
        number = int(whole.find(np.array([name]))[0])
        if number < 0:
            return None
        starts = live.starts[whole.parts_of(number)].tolist()
        return _Stored(starts, int(whole.first_steps[number]), live.links.ended.get(name, 0))


def _end_of(handle: Handle, stored: _Stored) -> dict[str, Any]:
    """Return the data of a record without rows that ended an episode later; {} for none."""
    record = handle.table.read(stored.end) if stored.end else None
    return {} if record is None or record.length else handle.data_of(record)


def read_joined(handle: Handle, name: int) -> tuple[list[Array], dict[str, Any]] | None:
    """Return all steps of an episode that was stored under this name, one array per column, and its data; None if the
    whole episode was evicted.

    Raises:
        CorruptError: rows differ from what was stored.
    """
    if handle.live.links is None:  # its name is where its one record begins
        read = handle.read_record(handle.record_at(Position(name)))
        return None if read is None else read[:2]
    piece = None
    for piece in read_pieces(handle, name):  # noqa: B007 - the last one is what was not evicted
        pass
    return piece


def read_pieces(handle: Handle, name: int, most: float = math.inf) -> Iterator[tuple[list[Array], dict[str, Any]]]:
    """Yield the steps of the episode of this name in pieces of whole parts, each with the data of the episode and the
    number of steps before it; one piece, if it fits in `most` steps. If parts are evicted meanwhile, a piece begins
    after them.

    Raises:
        CorruptError: rows differ from what was stored.
    """
    stored = _find(handle, name)
    if stored is None:
        return
    records = [handle.record_at(start) for start in stored.starts]
    newest, data = records[-1], _end_of(handle, stored)
    if not data and newest is not None and len(records) > 1:  # of a single one it comes with the rows
        data = handle.data_of(newest)
    steps: list[list[Array]] = []
    first_step = count = 0
    for record in (*records, None):
        read = None if record is None else handle.read_record(record)
        if steps and (read is None or count + len(read[0][0]) > most):
            joined, steps, count = _joined(steps), [], 0  # not held twice while the caller writes
            yield joined, _with_first_step(data, first_step)
            del joined
        if read is None or record is None:
            continue
        if not steps:
            first_step = record.step
        steps.append(read[0])
        count += len(read[0][0])
        data = data or read[1]


def _joined(steps: list[list[Array]]) -> list[Array]:
    return [np.concatenate(v) for v in zip(*steps, strict=True)] if len(steps) > 1 else steps[0]


def joined_data(handle: Handle, name: int) -> dict[str, Any] | None:
    """Return the data of the episode of this name; None if all of it was evicted."""
    stored = _find(handle, name)
    if stored is None:
        return None
    data = _end_of(handle, stored) or handle.data_at(stored.starts[-1])
    return None if data is None else _with_first_step(data, stored.first_step)


def _with_first_step(data: dict[str, Any], first_step: int) -> dict[str, Any]:
    """Return the data of an episode, with the number of its steps that were evicted, if some were."""
    return {**data, FIRST_STEP: first_step} if first_step else data


# -- origins -----------------------------------------------------------------------------------


def origin_in(data: Any) -> tuple[bytes, int] | None:
    """Return the lineage and the ordinal that episode data name; None if they name none."""
    found = _ORIGIN.fullmatch(data) if isinstance(data := data.get(ORIGIN_KEY), str) else None
    return None if found is None else (bytes.fromhex(found[1]), int(found[2]))


def origin_of(lineage: bytes, ordinal: int) -> str:
    """Return an origin in the form that `origin_in` reads."""
    return f"{lineage.hex()}-{ordinal}"


def origins(handle: Handle) -> tuple[Array, Array, Array]:
    """Return what the live episodes, oldest first and parts joined, were first stored as: by it, an episode is the same
    wherever it is copied to.

    Returns:
        The lineage of the ring of each, uint8 `(n, 16)`, its ordinal there, uint64 `(n,)`, and its name here.

    Cost: O(episodes); of each episode that was copied into this ring, its data are read once.
    """
    with thread.searching, handle.lock:
        live, ended = handle.live, dict[int, int]()
        names, ordinals = live.names.copy(), live.origins
        is_copied = ordinals < 0
        if live.links is not None:
            whole, ended = live.whole, dict(live.links.ended)
            lasts = whole.in_order[np.append(whole.parts[1:], len(whole.in_order))[: len(whole)] - 1]
            ordinals, is_copied = ordinals[whole.in_order[whole.parts]], is_copied[lasts]
        era = live.era
    ordinals = np.where(ordinals < 0, ~ordinals, ordinals).astype(np.uint64)
    lineages = np.empty((len(names), 16), np.uint8)
    lineages[:] = np.frombuffer(handle.manifest.lineage, np.uint8)
    for name, seq in ended.items():
        record = handle.table.read(seq)
        if record is not None and not record.length and record.part & COPIED:
            is_copied |= names == name
    known, read = handle.known_origins.get(era, {}), dict[int, tuple[bytes, int] | None]()
    for at in is_copied.nonzero()[0].tolist():
        name = int(names[at])
        origin = read[name] = known[name] if name in known else origin_in(joined_data(handle, name) or {})
        if origin is not None:
            lineages[at], ordinals[at] = np.frombuffer(origin[0], np.uint8), origin[1]
    handle.known_origins = {era: read}
    return lineages, ordinals, names


def origins_at(handle: Handle, names: Array) -> tuple[Array, Array, Array]:
    """Return lineages and ordinals of the episodes of these names, as `origins`, and which of them are stored."""
    lineages, ordinals, here = origins(handle)
    if not len(here):
        return np.zeros((len(names), 16), np.uint8), np.zeros(len(names), np.uint64), np.zeros(len(names), np.bool_)
    at = np.minimum(here.searchsorted(names), len(here) - 1)
    return lineages[at], ordinals[at], here[at] == names
