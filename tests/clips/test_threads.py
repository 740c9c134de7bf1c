"""A gather over several threads: whichever part fails, nobody writes into the caller's arrays any more."""

import threading

import numpy as np
import pytest

from ringmap.clips.threads import SPLIT_NBYTES, take
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk.memory import MemoryDisk

PARTS, ROWS = 4, 64
SPEC = ColumnSpec("x", (SPLIT_NBYTES // ROWS // 8 * PARTS,), np.dtype("<i8"))


@pytest.fixture
def column():
    disk = MemoryDisk()
    MemmapColumn.create(disk, "x.npy", SPEC, ROWS, {})
    made = MemmapColumn.open(disk, "x.npy", SPEC, ROWS, {}, True, 0)
    made.write(0, np.broadcast_to(np.arange(ROWS)[:, None], (ROWS, *SPEC.shape)).copy())
    return made


def slots():
    return np.arange(ROWS)[:, None]


def test_parts_are_one_gather(column):
    got = take(column, slots(), None, PARTS, ROWS)
    np.testing.assert_array_equal(got[:, 0, 0], np.arange(ROWS))


@pytest.mark.parametrize("bad", [[1], [0], [3], [0, 1], [1, 2, 3]], ids=str)
def test_an_error_comes_once_all_parts_are_done(column, monkeypatch, bad):
    """The parts that do not fail begin to copy when the others have failed: the call waits for them, and the first error wins."""
    failed, kept, done = threading.Semaphore(0), MemmapColumn.take, set()
    out = np.zeros((ROWS, 1, *SPEC.shape), "<i8")

    def failing(self, slots, out=None, head=0):
        part = slots[0, 0] * PARTS // ROWS
        if part in bad:
            failed.release()
            raise OSError(f"part {part}")
        for _ in bad:
            assert failed.acquire(timeout=60)
        for _ in bad:
            failed.release()
        for _ in range(20 if part else 1):  # the others long after the caller is done with its own
            taken = kept(self, slots, out, head)
        done.add(part)
        return taken

    monkeypatch.setattr(MemmapColumn, "take", failing)
    with pytest.raises(OSError, match=f"part {bad[0]}"):
        take(column, slots(), out, PARTS, ROWS)
    assert done == set(range(PARTS)) - set(bad)
