"""Gaps: records of the table that are lost, and what takes their place.

       7        8    9       10              7        8     9      10
    [ep 0..20] [??] [??] [ep 35..50]  ->  [ep 0..20][20..35][35..35][ep 35..50]
                                                    dropped  dropped

Start and length follow from the neighbours, so that whole episodes on both sides stay where
they are and the numbers run without a gap.

Invariants: a record that is valid stays as it is, unless it contradicts one that is vouched
for by the checksum of its rows.
Not here: writing them (mending.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ringmap.storage.commit.recovery import broken_order
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.records.table import DROPPED, Record

__all__ = ["missing_records"]


def missing_records(survey: Scan, dropped: set[int]) -> list[list[Record]]:
    """Return runs of dropped records that take the places of those that are lost.

    Args:
        survey: the buffer.
        dropped: numbers of the episodes that are not whole.
    """
    reached, records, lost = survey.reached, survey.records, ~_kept(survey, dropped)
    found = []
    for run in np.split(np.arange(len(records)), np.flatnonzero(np.diff(lost)) + 1):
        if not len(run) or not lost[run[0]]:
            continue
        before, after = None, None
        if run[0] > 0:
            before = Record.of(records[run[0] - 1])
        elif reached.first > 1:
            before = survey.table.read(reached.first - 1)
        if run[-1] + 1 < len(records):
            after = Record.of(records[run[-1] + 1])
        stop = after.start if after is not None else reached.head
        start = min(before.head if before is not None else reached.tail, stop)
        # What the next one calls live: with the tail of the one before, more than max_steps might be.
        tail, first = (reached.tail, reached.first) if after is None else (after.tail, after.first)
        numbers = [reached.first + int(i) for i in run]
        made = [Record(n, stop, 0, tail, first, flags=DROPPED) for n in numbers]
        made[0] = replace(made[0], start=start, length=stop - start)
        found.append(made)
    return found


def _kept(survey: Scan, dropped: set[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which records stay: the valid ones; where these contradict each other, those of whole episodes."""
    records = survey.records.copy()
    records["flags"] &= ~np.uint8(DROPPED)  # a damaged one contradicts no other record
    kept = np.ones(len(records), np.bool_)
    for first, last in survey.broken():
        kept[first - survey.reached.first : last + 1 - survey.reached.first] = False
    runs = np.split(np.arange(len(records)), np.flatnonzero(np.diff(kept)) + 1)
    if not any(broken_order(records[run]) for run in runs if len(run) and kept[run[0]]):
        return kept
    whole = np.isin(records["seq"], [n for n in survey.live()["seq"] if n not in dropped])
    head, tail = 0, 0
    for i in np.flatnonzero(kept):
        record = Record.of(records[i])
        fits = head <= record.start and tail <= record.tail <= min(
            record.start, survey.reached.tail
        )
        kept[i] = whole[i] and fits
        if kept[i]:
            head, tail = record.head, record.tail
    return kept
