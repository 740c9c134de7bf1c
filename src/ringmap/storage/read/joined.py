"""Reads episodes whose parts are stored apart, joined.

    name -> its parts, as of now -> their records -> rows, each verified -> one array per column
                                                  -> data: of the last part, or of the record that ended the chain

Invariants: what is returned was live during the read; parts that are evicted meanwhile are left out, with those before them.
Not here: which parts make an episode (ring/chains.py), clips.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.storage.read.handle import Handle
from ringmap.storage.ring.integers import Ordinal

__all__ = ["FIRST_STEP", "joined_data", "read_joined"]

Array = np.ndarray[Any, np.dtype[Any]]

FIRST_STEP = "first_step"
"""In the data of an episode of which parts were evicted: how many of its steps."""


def read_joined(source: Handle, name: int) -> tuple[list[Array], dict[str, Any]] | None:
    """Return all steps of the episode of this name, one array per column, and its data; None if all of it was evicted.

    Raises:
        CorruptError: rows differ from what was stored.
    """
    with source.memory:
        found = _find(source, name)
        if found is None:
            return None
        ordinals, _, end = found
        records = [source.live_record(ordinal) for ordinal in ordinals]
    steps: list[list[Array]] = []
    data, first_step = dict[str, Any](), 0
    for record in records:
        read = source.read_record(record)
        if read is None or record is None:
            steps.clear()
            continue
        if not steps:
            first_step = record.step
        steps.append(read[0])
        data = read[1]
    if not steps:
        return None
    joined = [np.concatenate(v) for v in zip(*steps, strict=True)] if len(steps) > 1 else steps[0]
    return joined, _with_first_step(end or data, first_step)


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
    """Return the ordinals of the parts of an episode, how many steps were before, and the data of a record that ended it later."""
    live = source.live
    whole = live.whole
    number = int(whole.find(np.array([name]))[0])
    if number < 0:
        return None
    ordinals = [Ordinal(live.first + index) for index in whole.parts_of(number).tolist()]
    seq = 0 if live.chains is None else live.chains.ended.get(name, 0)
    record = source.table.read(seq) if seq else None
    end = {} if record is None or record.length else source.data_of(record)
    return ordinals, int(whole.first_steps[number]), end


def _with_first_step(data: dict[str, Any], first_step: int) -> dict[str, Any]:
    """Return the data of an episode, with the number of its steps that were evicted, if some were."""
    return {**data, FIRST_STEP: first_step} if first_step else data
