"""A gather over several threads: whichever part fails, nobody writes into the caller's arrays any more."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

from ringmap.storage.columns.copying import SPLIT_NBYTES, take
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.disk import process
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.disk.process import begin
from ringmap.storage.disk.system import System

PARTS, ROWS = 4, 64
SPEC = ColumnSpec("x", (SPLIT_NBYTES // ROWS // 8 * PARTS,), np.dtype("<i8"))


@pytest.fixture
def column():
    disk = MemoryDisk()
    made = MemmapColumn(disk, "x.npy", SPEC, ROWS, {})
    made.create()
    made.open(write=True)
    made.write(0, np.broadcast_to(np.arange(ROWS)[:, None], (ROWS, *SPEC.shape)).copy())
    return made


def slots():
    return np.arange(ROWS)[:, None]


def test_parts_are_one_gather(column):
    got = take(column, slots(), None, PARTS, ROWS)
    np.testing.assert_array_equal(got[:, 0, 0], np.arange(ROWS))


@pytest.mark.parametrize("bad", [[1], [0], [3], [0, 1], [1, 2, 3]], ids=str)
def test_an_error_comes_once_all_parts_are_done(column, monkeypatch, bad):
    """The parts that do not fail begin to copy when the others have failed: the call waits for them, and the first
    error wins."""
    failed, kept, copying, done = threading.Semaphore(0), MemmapColumn.take, set(), set()
    out = np.zeros((ROWS, 1, *SPEC.shape), "<i8")

    def failing(self, slots, out=None, head=0):
        part = int(slots[0, 0] * PARTS // ROWS)
        copying.add(part)
        if part in bad:
            failed.release()
            raise OSError(f"part {part}")
        for _ in bad:
            assert failed.acquire(timeout=60)
        for _ in bad:
            failed.release()
        for _ in range(100 if part else 1):  # the others long after the caller is done with its own
            taken = kept(self, slots, out, head)
        done.add(part)
        return taken

    monkeypatch.setattr(MemmapColumn, "take", failing)
    with pytest.raises(OSError, match=f"part {bad[0]}"):
        take(column, slots(), out, PARTS, ROWS)
    assert done == copying - set(bad)  # a part that no thread had begun is left out


def test_a_part_that_no_thread_takes_is_copied_by_the_caller(column):
    """As on a machine that is busy: all other threads have something else to do."""
    go, held = threading.Event(), threading.Semaphore(0)

    def busy():
        held.release()
        assert go.wait(60)

    others = [begin(busy, PARTS - 1) for _ in range(PARTS - 1)]
    for _ in others:
        assert held.acquire(timeout=60)
    try:
        got = take(column, slots(), None, PARTS, ROWS)
    finally:
        go.set()
        for other in others:
            other.drop()
    np.testing.assert_array_equal(got[:, 0, 0], np.arange(ROWS))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_has_helpers_of_its_own():
    """Another thread of the parent may hold the lock of its pool at the fork."""
    assert begin(lambda: 7).end() == 7
    with process._helpers._shutdown_lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            os._exit(begin(lambda: 7).end())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_helpers_that_two_threads_ask_for_at_once_are_one_pool(monkeypatch):
    """The pool that was made first was forgotten, with its threads, or in place of a larger one."""
    made, kept, both = [], process.pool, threading.Barrier(2)

    def slow(count, name):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # until the other thread makes one, too
        made.append(kept(count, name))
        return made[-1]

    monkeypatch.setattr(process, "pool", slow)
    monkeypatch.setattr(process, "_helpers", None)
    monkeypatch.setattr(process, "_count", 0)
    callers = [threading.Thread(target=lambda n=n: begin(int, n).end()) for n in (2, 5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert begin(int, 5).end() == 0
    (left,) = (one for one in made if not one._shutdown)
    assert left is process._helpers
    assert left._max_workers == 5
    left.shutdown()


def test_what_a_helper_reads_from_the_disk_is_counted(monkeypatch):
    """Hints for rows on the disk stopped when helpers alone had read from it."""
    reads = {}
    monkeypatch.setattr(process, "thread_reads", lambda: reads.get(threading.get_ident(), 0))
    began = threading.Event()

    def work():
        began.set()
        reads[threading.get_ident()] = reads.get(threading.get_ident(), 0) + 7
        return threading.get_ident()

    system = System()
    before = system.disk_reads()
    one = begin(work)
    assert began.wait(60)
    assert one.end() != threading.get_ident()
    assert system.disk_reads() == before + 7
