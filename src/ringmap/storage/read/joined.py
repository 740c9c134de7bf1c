"""Reads episodes whose parts are stored apart, joined.

    name -> its parts, as of now -> their records -> rows, each verified -> one array per column
                                                  -> data: of the last part, or of the record that ended the chain

Invariants: what is returned was live during the read; parts that are evicted meanwhile are left out, with those before
them. Not here: which parts make an episode (ring/links.py), clips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.ring import Ordinal

__all__ = ["FIRST_STEP", "joined_data", "read_joined", "read_pieces"]

Array = np.ndarray[Any, np.dtype[Any]]

FIRST_STEP = "first_step"
"""The key in the data of an episode whose oldest parts were evicted. Its value is the number of evicted steps."""


def read_joined(source: Handle, name: int) -> tuple[list[Array], dict[str, Any]] | None:
    """Return all steps of an episode, one array per column, and its data; None if the whole episode was evicted.

    Raises:
        CorruptError: rows differ from what was stored.
    """
    found = None
    for found in read_pieces(source, name):  # noqa: B007 - the last one is what was not evicted
        pass
    return found


def read_pieces(source: Handle, name: int, most: float = math.inf) -> Iterator[tuple[list[Array], dict[str, Any]]]:
    """Yield the steps of the episode of this name in pieces of whole parts, each with the data of the episode and the
    number of steps before it; one piece, if it fits in `most` steps. If parts are evicted meanwhile, a piece begins
    after them.

    Raises:
        CorruptError: rows differ from what was stored.
    """
    with source.memory:
        found = _find(source, name)
        if found is None:
            return
        ordinals, _, end = found
        records = [source.live_record(ordinal) for ordinal in ordinals]
    newest = records[-1]
    data = end or ({} if newest is None else source.data_of(newest))
    steps: list[list[Array]] = []
    first_step = count = 0
    for record in (*records, None):
        read = None if record is None else source.read_record(record)
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


def _joined(steps: list[list[Array]]) -> list[Array]:
    return [np.concatenate(v) for v in zip(*steps, strict=True)] if len(steps) > 1 else steps[0]


def joined_data(source: Handle, name: int) -> dict[str, Any] | None:
    """Return the data of the episode of this name; None if all of it was evicted."""
    with source.memory:
        found = _find(source, name)
    if found is None:
        return None
    ordinals, first_step, end = found
    data = end or source.read_data(ordinals[-1])
    return None if data is None else _with_first_step(data, first_step)


def _find(source: Handle, name: int) -> tuple[list[Ordinal], int, dict[str, Any]] | None:
    """Return the ordinals of the parts of an episode, how many steps were before, and the data of a record that ended
    it later."""
    live = source.live
    whole = live.whole
    number = int(whole.find(np.array([name]))[0])
    if number < 0:
        return None
    ordinals = [Ordinal(live.first + index) for index in whole.parts_of(number).tolist()]
    seq = 0 if live.links is None else live.links.ended.get(name, 0)
    record = source.table.read(seq) if seq else None
    end = {} if record is None or record.length else source.data_of(record)
    return ordinals, int(whole.first_steps[number]), end


def _with_first_step(data: dict[str, Any], first_step: int) -> dict[str, Any]:
    """Return the data of an episode, with the number of its steps that were evicted, if some were."""
    return {**data, FIRST_STEP: first_step} if first_step else data
