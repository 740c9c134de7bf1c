"""What an opening and a reader examine of records whose checksums hold: anybody may have written them."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.errors import RingmapError
from ringmap.storage.read import recovery
from ringmap.storage.read.recovery import refuse_impossible
from ringmap.storage.records.table import DROPPED, EPISODE, MOST, RECORD, Record

MAX_STEPS, SLOTS, TAIL, HEAD = 20, 30, 100, 115
PLAIN = Record(50, HEAD, 3, 103, 41, blob_segment=1, blob_offset=700, blob_size=90)
"""The record of a plain episode after one that ended at `HEAD`."""

edges = st.sampled_from([-(2**63), -1, 0, 1, 2, 19, 20, 21, 41, 50, 99, 100, 114, 115, 116, MOST - 1, MOST, 2**63 - 1])  # fmt: skip
numbers = edges | st.integers(90, 140)
changes = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("start", "length", "tail", "step", "chain"), numbers),
        **{name: numbers.filter(lambda n: n >= 0) for name in ("seq", "first", "blob_segment", "blob_offset", "blob_size")},
        **{name: st.integers(0, 255) for name in ("kind", "flags", "part")},
    },
)  # fmt: skip


def array_of(record):
    """Return an array of one record."""
    records = np.zeros(1, RECORD)
    for name, value in dataclasses.asdict(record).items():
        records[name] = value
    return records


def passes(record):
    """Tell whether the whole examination takes a record."""
    state = record.seq, record.tail, record.head
    manifest = types.SimpleNamespace(max_steps=MAX_STEPS)
    try:
        refuse_impossible(array_of(record), state, manifest, SLOTS, "table")
    except RingmapError:
        return False
    return True


def is_plain(record):
    return recovery.is_next(record, TAIL, HEAD, MAX_STEPS, SLOTS)


def test_a_plain_episode_is_taken_at_once():
    assert is_plain(PLAIN)
    assert passes(PLAIN)


@given(changes)
def test_what_is_taken_at_once_passes_the_whole_examination(changed):
    record = dataclasses.replace(PLAIN, **changed)
    if is_plain(record):
        assert passes(record)
        assert record.kind == EPISODE
        assert record.start == HEAD
        assert not record.flags & DROPPED


@pytest.mark.parametrize(
    "changed",
    [{"kind": 9}, {"length": -1}, {"length": 0}, {"length": 21, "tail": 120}, {"tail": 119}, {"tail": 90}, {"first": 0},
     {"first": 51}, {"first": 20}, {"blob_segment": MOST + 1}, {"blob_offset": 1 << 40}, {"start": 118}, {"part": 1},
     {"flags": DROPPED}],
)  # fmt: skip
def test_others_take_the_whole_examination(changed):
    assert not is_plain(dataclasses.replace(PLAIN, **changed))


def test_control_one_that_looks_at_less(monkeypatch):
    def lax(record, tail, head, max_steps, slots):
        return record.start == head and record.length > 0

    monkeypatch.setattr(recovery, "is_next", lax)
    with pytest.raises(AssertionError):
        test_what_is_taken_at_once_passes_the_whole_examination()


BREAKS = {
    "starts before the head": ("start", -1), "smaller tail": ("tail", -9), "tail beyond its head": ("tail", 10**6),
    "damaged flag": ("flags", DROPPED & -DROPPED),
}  # fmt: skip


@pytest.mark.parametrize("block", [1, 2, 3, 7, 16_384])
@pytest.mark.parametrize("what", BREAKS)
def test_order_is_examined_across_blocks(monkeypatch, block, what):
    """Each record is compared with the one before it, wherever blocks of records meet."""
    monkeypatch.setattr(recovery, "BLOCK", block)
    records = np.zeros(9, RECORD)
    records["seq"], records["kind"], records["length"] = np.arange(1, 10), EPISODE, 5
    records["start"] = np.arange(9) * 5 + 100
    records["tail"] = np.arange(9) + 90
    assert recovery.broken_order(records) == []
    name, change = BREAKS[what]
    for at in range(1, 9):
        wrong = records.copy()
        wrong[name][at] += change
        faults = recovery.broken_order(wrong)
        assert any(f.startswith(f"record {at + 1} ") and what in f for f in faults), faults
