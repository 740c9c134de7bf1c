"""XXH3 of many records, against xxhash itself."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ringmap.storage.disk import checksums
from ringmap.storage.disk.checksums import ROW_NBYTES, xxh3_64_of_rows
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.records.table import RECORD, EpisodeTable, Record

rows = st.binary(min_size=ROW_NBYTES, max_size=ROW_NBYTES)
seeds = st.integers(0, 2**64 - 1)


def by_xxhash(raw, seed):
    return [xxhash.xxh3_64_intdigest(row, seed) for row in raw]


def in_bulk(raw, seed):
    return xxh3_64_of_rows(np.frombuffer(b"".join(raw), "<u8").reshape(-1, 15), seed).tolist()


@given(raw=st.lists(rows, max_size=5), seed=seeds)
def test_equal_to_xxhash(raw, seed):
    assert in_bulk(raw, seed) == by_xxhash(raw, seed)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
def test_equal_at_the_edges(seed):
    raw = [bytes(ROW_NBYTES), b"\xff" * ROW_NBYTES, bytes(range(ROW_NBYTES))]
    raw += [bytes(i) + b"\x01" + bytes(ROW_NBYTES - 1 - i) for i in range(ROW_NBYTES)]
    assert in_bulk(raw, seed) == by_xxhash(raw, seed)


def test_blocks_and_columns_beyond_the_row_make_no_difference(rng, monkeypatch):
    words = rng.integers(0, 2**64, (1000, 16), np.uint64)
    expected = by_xxhash([row[:15].tobytes() for row in words], 7)
    for block in (1, 7, 999, 1000, 1001):
        monkeypatch.setattr(checksums, "BLOCK", block)
        assert xxh3_64_of_rows(words, 7).tolist() == expected


@pytest.mark.parametrize("at", [0, 1, 64, 100, 127])
def test_control_another_secret_is_caught(monkeypatch, at):
    secret = bytearray(checksums._SECRET)
    secret[at] ^= 1
    monkeypatch.setattr(checksums, "_SECRET", bytes(secret))
    raw = [bytes(range(ROW_NBYTES))]
    assert in_bulk(raw, 0) != by_xxhash(raw, 0)


def a_table(slots, stored):
    disk = MemoryDisk()
    EpisodeTable.create(disk, "RAM/t.npy", slots)
    table = EpisodeTable.open(disk, "RAM/t.npy", slots, bytes(range(16)), write=True)
    for seq in range(1, stored + 1):
        table.write(Record(seq, 3 * seq, 3, 0, 1, blob_sum=seq * 2**40))
    return table, disk.open("RAM/t.npy")


@pytest.mark.parametrize("stored", [0, 1, 600, 1300, 3000])
def test_a_table_read_in_bulk_is_as_one_read_record_by_record(monkeypatch, rng, stored):
    table, file = a_table(1200, stored)
    for slot in rng.integers(0, 1200, 20):
        file.write(b"\x5a", 4096 + int(slot) * RECORD.itemsize + int(rng.integers(0, 128)))
    found = []
    for few in (0, 10**9):
        monkeypatch.setattr("ringmap.storage.records.table._FEW", few)
        for block in (64, 16_384):
            monkeypatch.setattr("ringmap.storage.records.table.BLOCK", block)
            found.append(
                [
                    *(part.tolist() for part in table.scan()),
                    *(part.tolist() for part in table.read_range(max(1, stored - 1199), stored)),
                    *(part.tolist() for part in table.read_range(max(1, stored - 1100), stored)),
                ]
            )
    assert all(one == found[0] for one in found)
    _, valid, slots = table.scan()
    assert slots[valid].tolist() == [
        slot for slot in range(1200) if any(table.read(seq) is not None for seq in range(slot, stored + 1, 1200) if seq)
    ]
