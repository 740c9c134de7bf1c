"""Checksums of many records, against those of one."""

import pytest

from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.records.table import DROPPED, RECORD, EpisodeTable, Record


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
    for slot in rng.integers(0, 1200, 20) if stored > 1200 else ():  # dropped, which no checksum covers
        file.write(bytes([DROPPED]), 4096 + int(slot) * RECORD.itemsize + RECORD.fields["flags"][1])
    found = []
    for block in (64, 16_384):
        monkeypatch.setattr("ringmap.storage.records.table._BLOCK", block)
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
