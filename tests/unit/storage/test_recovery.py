"""What an opening and a reader examine of records whose checksums hold: anybody may have written them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.errors import RingmapError
from ringmap.storage.read import recovery
from ringmap.storage.read.recovery import breaks_of, refuse_impossible
from ringmap.storage.records.blobs import LARGEST_BLOB, LARGEST_STATE, encode_blob
from ringmap.storage.records.table import (
    COPIED,
    DROPPED,
    END,
    EPISODE,
    MANY,
    MOST,
    PART,
    RECORD,
    RETIRE,
    Record,
)
from ringmap.storage.ring.links import NONE

MAX_STEPS, SLOTS, TAIL, HEAD, ORDINAL, TIME = 20, 30, 100, 115, 44, 99
PLAIN = Record(
    50, HEAD, 103, 41, length=3, blob_segment=1, blob_offset=700, blob_size=90, ordinal=ORDINAL, time=TIME, behind=1
)
"""The record of a plain episode after one that ended at `HEAD`."""

edges = st.sampled_from([-(2**63), -1, 0, 1, 2, 19, 20, 21, 41, 50, 99, 100, 114, 115, 116, MOST - 1, MOST, 2**63 - 1])
numbers = edges | st.integers(90, 140)
changes = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("start", "tail", "step", "chain", "previous", "time"), numbers),
        **dict.fromkeys(("seq", "first", "ordinal"), numbers.filter(lambda n: n >= 0)),
        **dict.fromkeys(
            ("length", "blob_segment", "blob_offset", "blob_size", "behind"), numbers.filter(lambda n: 0 <= n < 2**32)
        ),
        **{name: st.integers(0, 255) for name in ("kind", "flags", "part")},
    },
)


def array_of(record):
    """Return an array of one record."""
    records = np.zeros(1, RECORD)
    for name, value in record._asdict().items():
        records[name] = value
    return records


def passes(record):
    """Tell whether the whole examination takes a record."""
    state = record.seq, record.tail, record.head
    try:
        refuse_impossible(array_of(record), state, MAX_STEPS, SLOTS, "table")
    except RingmapError:
        return False
    return not breaks_of(array_of(record))


def is_plain(record):
    return recovery.is_next(record, TAIL, HEAD, ORDINAL, TIME, MAX_STEPS, SLOTS)


def test_a_plain_episode_is_taken_at_once():
    for record in (PLAIN, PLAIN._replace(part=MANY, behind=3)):
        assert is_plain(record)
        assert passes(record)


@given(changes)
def test_what_is_taken_at_once_passes_the_whole_examination(changed):
    record = PLAIN._replace(**changed)
    if is_plain(record):
        assert passes(record)
        assert record.kind == EPISODE
        assert record.start == HEAD
        assert not record.flags & DROPPED


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": 9},
        {"length": 0},
        {"length": 21, "tail": 120},
        {"tail": 119},
        {"tail": 90},
        {"first": 0},
        {"first": 51},
        {"first": 20},
        {"blob_offset": 1 << 31},
        {"blob_size": LARGEST_BLOB + 1},
        {"start": 118},
        {"part": PART},
        {"part": 16},
        {"part": COPIED | MANY},
        {"part": MANY, "behind": 4},
        {"flags": DROPPED},
        {"time": TIME - 1},
        {"ordinal": ORDINAL - 1},
        {"behind": 0},
        {"chain": 3},
        {"previous": 3},
    ],
)
def test_others_take_the_whole_examination(changed):
    assert not is_plain(PLAIN._replace(**changed))


def test_a_blob_larger_than_any_is_impossible():
    for nbytes in (LARGEST_BLOB, LARGEST_BLOB + 1):
        record = PLAIN._replace(blob_size=nbytes)
        assert passes(record) == (nbytes == LARGEST_BLOB)


@pytest.mark.parametrize("nbytes", [LARGEST_STATE, LARGEST_STATE + 1])
def test_no_small_state_larger_than_any_is_read(nbytes):
    read = []
    found = recovery.small_state_in(PLAIN, encode_blob([], (0, nbytes, 0), b""), read.append)
    assert found.lost
    assert len(read) == (nbytes == LARGEST_STATE)


def test_control_one_that_looks_at_less(monkeypatch):
    def lax(record, tail, head, *rest):
        return record.start == head and record.length > 0

    monkeypatch.setattr(recovery, "is_next", lax)
    with pytest.raises(AssertionError):
        test_what_is_taken_at_once_passes_the_whole_examination()


BREAKS = {
    "starts before the head": ("start", -1),
    "smaller tail": ("tail", -9),
    "damaged flag": ("flags", DROPPED & -DROPPED),
    "earlier time": ("time", -9),
    "counts the ordinals": ("behind", 1),
    "given before": ("ordinal", -1),
    "but names one": ("chain", 1),
}


@pytest.mark.parametrize("what", BREAKS)
def test_each_record_is_compared_with_the_one_before_it(what):
    records = np.zeros(9, RECORD)
    records["seq"], records["kind"], records["length"] = np.arange(1, 10), EPISODE, 5
    records["start"] = np.arange(9) * 5 + 100
    records["tail"] = np.arange(9) + 90
    records["chain"] = records["previous"] = NONE
    records["ordinal"], records["time"], records["behind"] = np.arange(9) + 3, np.arange(9) + 10, 1
    assert breaks_of(records) == []
    name, change = BREAKS[what]
    for at in range(1, 9):
        wrong = records.copy()
        wrong[name][at] = int(wrong[name][at]) + change
        faults = breaks_of(wrong)
        assert any(number == at + 1 and what in fault for number, fault in faults), faults


def chain_of_parts():
    """Return the records of a chain of three parts, with another episode and the record that ends it."""
    made = [
        Record(1, 0, 0, 1, length=3, part=PART, chain=0, behind=1, time=5),
        Record(2, 3, 0, 1, length=2, ordinal=1, behind=1, time=5),
        Record(3, 5, 0, 1, length=4, part=PART, chain=0, step=3, previous=0, number=1, behind=2, time=6),
        Record(4, 9, 0, 1, length=1, part=PART | COPIED, chain=0, step=7, previous=5, number=2, behind=2, time=9),
        Record(5, 10, 0, 1, ordinal=2, part=PART | END, chain=0, step=8, previous=9, number=3, kind=RETIRE, time=9),
    ]
    return np.concatenate([array_of(record) for record in made])


@pytest.mark.parametrize(
    ("at", "name", "value", "what"),
    [
        (2, "previous", 3, "does not follow the part before it"),
        (3, "previous", 0, "does not follow the part before it"),
        (4, "previous", 5, "does not follow the part before it"),
        (2, "previous", NONE, "names an impossible part before it"),
        (0, "previous", 0, "names an impossible part before it"),
        (2, "previous", 5, "names an impossible part before it"),
        (3, "ordinal", 1, "does not follow the part before it"),
        (3, "part", PART | 8, "is part of a chain in an unknown way"),
        (1, "previous", 0, "is no part of a chain, but names one"),
        (4, "behind", 1, "counts the ordinals that were given wrongly"),
        (1, "ordinal", 0, "gives an ordinal that was given before"),
    ],
)
def test_parts_agree(at, name, value, what):
    """A part names the part before it, and has the ordinal of its episode."""
    records = chain_of_parts()
    assert breaks_of(records) == []
    records[name][at] = value
    assert (at + 1, what) in breaks_of(records)
