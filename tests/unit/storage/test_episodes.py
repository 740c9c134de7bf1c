"""The episode table: records, their checksums, the file."""

import os
import struct
import uuid

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.errors import CorruptError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.records.table import (
    CLEAR,
    DROPPED,
    EPISODE,
    RECORD,
    RETIRE,
    TERMINATED,
    EpisodeTable,
    Record,
)

UUID = uuid.UUID(int=7).bytes
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)

records = st.builds(
    Record,
    seq=st.integers(1, 2**62),
    start=I64,
    length=U32,
    tail=I64,
    first=U64,
    rows_sum=U64,
    blob_segment=U32,
    blob_offset=U32,
    blob_size=U32,
    blob_sum=U64,
    ordinal=U64,
    time=I64,
    chain=I64,
    step=I64,
    previous=I64,
    number=U32,
    lane=U32,
    part=st.integers(0, 255),
    behind=U32,
    kind=st.integers(0, 255),
    flags=st.integers(0, 255),
)


def make_table(slots=16, salt=UUID, disk=None, path="RAM/episodes.npy"):
    disk = disk or MemoryDisk()
    if not disk.exists(path):
        EpisodeTable.create(disk, path, slots)
    return EpisodeTable.open(disk, path, slots, salt, write=True)


def small(seq, start=None, length=3, tail=0, first=1, **more):
    return Record(seq, 3 * seq if start is None else start, tail, first, length=length, **more)


def test_a_record_has_128_bytes_and_none_crosses_a_page():
    assert RECORD.itemsize == 128
    assert 4096 % RECORD.itemsize == 0


def valid_slots(table):
    _, valid, slots = table.scan()
    return slots[valid].tolist()


@given(record=records)
def test_what_was_written_is_read(record):
    table = make_table()
    table.write(record)
    assert table.read(record.seq) == record
    assert table.start_of(record.seq) == record.start
    assert record.head == record.start + record.length


@given(written=st.lists(records, max_size=12))
def test_one_by_one_and_all_at_once_agree_on_every_checksum(written):
    table = make_table()
    for record in written:
        table.write(record)
    everything, valid, slots = table.scan()
    last_in_slot = {record.seq % 16: record for record in written}
    assert valid.all()
    assert slots.tolist() == sorted(last_in_slot)
    for slot, row in zip(slots.tolist(), everything, strict=True):
        record = last_in_slot[slot]
        assert Record.of(row) == record
        found, good = table.read_range(record.seq, record.seq)
        assert good.tolist() == [True]
        assert Record.of(found[0]) == record


def test_every_flipped_byte_is_noticed_by_both():
    disk = MemoryDisk()
    table = make_table(disk=disk)
    for seq in (5, 6, 7):
        table.write(small(seq, rows_sum=2**64 - seq, flags=TERMINATED))
    file = disk.open("RAM/episodes.npy")
    for byte in range(RECORD.itemsize):
        at = 4096 + 6 * 128 + byte
        for bit in (1, 4 if byte == 113 else 128):  # the other bits there say that it was dropped
            old = file.read(1, at)
            file.write(bytes([old[0] ^ bit]), at)
            assert table.read(6) is None, byte
            assert table.read_range(5, 7)[1].tolist() == [True, False, True], byte
            assert valid_slots(table) == [5, 7], byte
            file.write(old, at)
        assert table.read(6) is not None


def test_a_record_counts_in_its_own_slot_under_its_own_number_only():
    disk = MemoryDisk()
    table = make_table(disk=disk)
    table.write(small(3))
    assert table.read(3) is not None
    assert table.read(3 + 16) is None
    assert table.read_range(19, 19)[1].tolist() == [False]
    file = disk.open("RAM/episodes.npy")
    file.write(file.read(128, 4096 + 3 * 128), 4096 + 4 * 128)
    assert table.read(4) is None
    assert valid_slots(table) == [3], "a copy in another slot"


def test_a_slot_is_written_over_a_turn_later():
    table = make_table(slots=4)
    for seq in range(1, 11):
        table.write(small(seq))
    assert [table.read(seq) is not None for seq in range(1, 11)] == [False] * 6 + [True] * 4
    found, valid = table.read_range(7, 10)
    assert valid.all()
    assert found["seq"].tolist() == [7, 8, 9, 10]
    assert table.read_range(6, 9)[1].tolist() == [False, True, True, True]
    for first, last in ((6, 10), (0, 2**62)):
        with pytest.raises(CorruptError, match="do not fit in its 4 slots"):
            table.read_range(first, last)
    assert table.read_range(11, 10)[0].shape == (0,)


def test_an_empty_slot_and_a_wiped_one_hold_nothing():
    table = make_table()
    assert table.read(0) is None
    assert not table.scan()[1].any()
    table.write(small(2))
    assert [table.is_empty(slot) for slot in (1, 2)] == [True, False]
    table.zero(2)
    assert table.is_empty(2)
    assert table.read(2) is None


def test_a_foreign_table_has_no_valid_record():
    disk = MemoryDisk()
    table = make_table(disk=disk)
    for seq in range(1, 9):
        table.write(small(seq))
    other = make_table(salt=uuid.UUID(int=8).bytes, disk=disk)
    assert all(other.read(seq) is None for seq in range(1, 9))
    assert not other.scan()[1].any()


def test_first_live_skips_what_is_evicted_dropped_or_no_episode():
    table = make_table()
    for record in (
        small(1),
        small(2, flags=DROPPED),
        small(3, kind=RETIRE),
        small(4, kind=CLEAR),
        small(5),
        small(6),
    ):
        table.write(record)
    assert table.first_live(1, 7, 0) == 1
    assert table.first_live(1, 7, 4) == 5
    assert table.first_live(1, 7, 3 * 6) == 6
    assert table.first_live(1, 7, 99) == 7
    assert table.first_live(5, 5, 0) == 5
    assert [small(1).live, small(1, flags=DROPPED).live, small(1, kind=CLEAR).live] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("mapped", [True, False])
def test_records_that_were_overwritten_count_as_older_than_all_that_are_left(mapped):
    table = make_table(8)
    for seq in range(1, 20):
        table.write(small(seq))
    if not mapped:
        table._walk = None
    for first in range(1, 13):  # of a reader that looked long ago
        for seq in range(first, 20):
            found = table.find(small(seq).start, first, 19)
            assert found == (small(seq) if seq >= 12 else None), (first, seq)
            if seq >= 12 and first >= 12:
                assert table.search(small(seq).start, first, 19) == found


def test_many_blocks_of_records_at_once():
    table = make_table(slots=20_000)
    for seq in range(1, 19_001):
        table.write(small(seq, rows_sum=seq * 2**40))
    found, valid = table.read_range(1, 19_000)
    assert valid.all()
    assert found["seq"].tolist() == list(range(1, 19_001))
    assert np.count_nonzero(table.scan()[1]) == 19_000


def test_numpy_reads_the_table(tmp_path):
    path = str(tmp_path / "episodes.npy")
    table = make_table(disk=Disk(), path=path)
    table.write(small(3, tail=2, flags=TERMINATED))
    loaded = np.load(path, mmap_mode="r")
    assert loaded.shape == (16,)
    assert loaded.dtype == RECORD
    assert loaded["seq"].tolist() == [0, 0, 0, 3, *[0] * 12]
    assert (loaded["kind"][3], loaded["flags"][3], loaded["tail"][3]) == (EPISODE, TERMINATED, 2)
    table.sync()
    table.close()
    again = EpisodeTable.open(Disk(), path, 16, UUID, write=False)
    assert again.read(3) == small(3, tail=2, flags=TERMINATED)
    with pytest.raises(OSError, match="Bad file"):
        again.write(small(4))
    again.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes, expected"),
        (lambda path: os.truncate(path, path.stat().st_size + 128), "bytes, expected"),
        (lambda path: path.unlink(), "missing"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"seq", b"sec")),
            "header is not that",
        ),
    ],
    ids=["cut", "grown", "missing", "header"],
)
def test_a_damaged_file_is_refused(tmp_path, damage, words):
    path = tmp_path / "episodes.npy"
    EpisodeTable.create(Disk(), str(path), 16)
    assert EpisodeTable.faults(Disk(), str(path), 16) == []
    damage(path)
    with pytest.raises(CorruptError, match=words) as raised:
        EpisodeTable.open(Disk(), str(path), 16, UUID, write=True)
    assert str(path) in str(raised.value)


def test_control_a_checksum_without_some_words_is_caught(monkeypatch):
    """Both sides forget the reserved bytes: then a flip in them goes unnoticed."""
    monkeypatch.setattr("ringmap.storage.records.table._CHECKED", struct.Struct("100s28x"))
    disk = MemoryDisk()
    table = make_table(disk=disk)
    table.write(small(6))
    file = disk.open("RAM/episodes.npy")
    file.write(b"\x01", 4096 + 6 * 128 + 112)
    assert table.read(6) is not None
    assert table.scan()[1].any()
