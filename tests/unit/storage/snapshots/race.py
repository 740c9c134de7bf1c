"""A flat-out writer that logs every state it commits, and the proof that a snapshot is one of them."""

import contextlib
import multiprocessing
import os
import pickle
import threading

import numpy as np

import ringmap
from benchmarks.harness.proof import Episodes
from benchmarks.harness.race import Ring
from ringmap import ReplayBuffer
from ringmap.storage.commit.store import Store


def state_of(source):
    """Return all that a committed state is: numbers, and where each episode lies."""
    live = source.live
    places = tuple(live.starts.tolist()), tuple(live.lengths.tolist())
    return source.first, source.tail, source.head, *places


@contextlib.contextmanager
def logged():
    """Lend a dict that every commit of this process puts its state into, by number."""
    log, remember = {}, Store._remember

    def remember_and_log(self, record):
        remember(self, record)
        log[self.seq] = state_of(self)

    Store._remember = remember_and_log
    try:
        yield log
    finally:
        Store._remember = remember


def length_of(number, ring):
    return ring.longest - number * 5 % (ring.longest // 2 + 1)


def write_some(buffer, ring, numbers):
    made = Episodes(ring.row_nbytes // 8, ring.longest)
    for number in numbers:
        columns = made(number, length_of(number, ring))
        buffer.write_episode({**columns, "_episode_data": {"number": number}})


def full_buffer(folder, ring, storage="memmap"):
    """Return a buffer that evicts with every episode, and the number of the next one."""
    buffer = ReplayBuffer(
        ring.max_steps,
        ring.history,
        path=folder,
        storage=storage,
        spare_rows=ring.spare,
        seed=0,
        sync_every_s=0,
    )
    count = 4 * ring.max_steps // ring.longest
    write_some(buffer, ring, range(count))
    return buffer, count


def proven(path, ring, log):
    """Return the number of the state that the buffer at `path` is in, having compared every byte of it."""
    assert ringmap.check(path) == []
    made = Episodes(ring.row_nbytes // 8, ring.longest)
    with ReplayBuffer.open(path) as buffer:
        source = buffer.engine.source
        assert state_of(source) == log[source.seq], f"never committed: {source.seq}"
        for i, number in enumerate(buffer.get_episode_data()["number"]):
            expected = made(number, length_of(number, ring))
            for name, values in buffer.load_episode(i).items():
                np.testing.assert_array_equal(values, expected[name])
        seq = source.seq
    buffer.close()
    return seq


def goes_on(path, ring):
    """Open it for writing and write: it is a buffer of its own."""
    with contextlib.closing(ReplayBuffer.open(path, mode="r+")) as buffer:
        before = list(buffer.get_episode_data()["number"])
        write_some(buffer, ring, range(before[-1] + 1, before[-1] + 4))
        assert buffer.get_episode_data()["number"][-4:] == list(range(before[-1], before[-1] + 4))
        assert buffer.check() == []


@contextlib.contextmanager
def a_writer(folder, ring, storage="memmap"):
    """Have another process write without a pause; the dict given holds its log once the block has ended."""
    context = multiprocessing.get_context("forkserver")
    ready, stop = context.Event(), context.Event()
    kept = f"{folder}.log"
    process = context.Process(target=_write, args=(folder, ring, storage, ready, stop, kept))
    process.start()
    log = {}
    try:
        while not ready.wait(0.1):
            assert process.is_alive(), "the writer died"
        yield log
    finally:
        stop.set()
        process.join(60)
    assert process.exitcode == 0
    with open(kept, "rb") as file:
        log |= pickle.load(file)


def _write(folder, ring, storage, ready, stop, kept):
    parent = os.getppid()
    with logged() as log:
        buffer, number = full_buffer(folder, ring, storage)
        ready.set()
        while not stop.is_set() and os.getppid() == parent:
            write_some(buffer, ring, range(number, number + 16))
            number += 16
        buffer.close()
    with open(kept, "wb") as file:
        pickle.dump(log, file)


@contextlib.contextmanager
def a_writing_thread(buffer, ring, number):
    """Have a thread write to `buffer` without a pause."""
    stop, failed = threading.Event(), []

    def write():
        try:
            at = number
            while not stop.is_set():
                write_some(buffer, ring, range(at, at + 16))
                at += 16
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert failed == []


__all__ = [
    "Ring",
    "a_writer",
    "a_writing_thread",
    "full_buffer",
    "goes_on",
    "length_of",
    "logged",
    "proven",
    "state_of",
    "write_some",
]
