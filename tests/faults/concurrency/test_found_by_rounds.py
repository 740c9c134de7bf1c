"""What two thousand rounds of signals, threads and forks found, each as a case that strikes every time."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.clips.gather import PINNED
from ringmap.errors import ClosedError, RoleError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.commit.background import Background
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.blobs import Segments


def test_a_thread_that_reads_while_a_commit_deletes_a_segment(fast, monkeypatch):
    """At "power" a commit deleted the segments of the episodes that it evicted before its own handle knew of the
    eviction."""
    found = []

    def look(buffer):
        try:
            episodes = list(buffer.episodes())
            found.append(len(episodes))
            buffer.load_episode(0)
        except Exception as error:
            found.append(error)

    class Deletes(Disk):
        def remove(self, path):
            super().remove(path)
            if path.endswith(".bin") and "data" in path:
                with ThreadPoolExecutor(1) as reader:
                    reader.submit(look, buf).result()

    monkeypatch.setattr(Segments.__init__, "__defaults__", (1,))  # a segment for each commit
    buf = ReplayBuffer(30, path=fast / "buf", durability="power", spare_rows=10, disk=Deletes())
    for k in range(12):
        buf.write_episode({"obs": np.full(10, k)})
    buf.close()
    assert found
    assert set(found) == {3}


def test_priorities_given_while_a_thread_writes():
    """The clips that there are were looked up before the lock was taken: those of another moment, by then."""

    class Slow(ReplayBuffer):
        meanwhile = None

        def clip_window(self, history_len):
            window = super().clip_window(history_len)
            if self.meanwhile is not None:
                write, self.meanwhile = self.meanwhile, None
                with ThreadPoolExecutor(1) as writer:
                    writer.submit(write).result()
            return window

    buf = Slow(64, history_len=2, sampler=PrioritizedSampler(rng=0), seed=0, spare_rows=64)
    for k in range(8):
        buf.write_episode({"obs": np.full(8, k)})
    batch = buf.sample(16)

    def write():
        for k in range(40):
            buf.write_episode({"obs": np.full(3 + k % 5, k)})
            buf.sampler.ids  # noqa: B018
            buf.num_valid_ends()

    for _ in range(3):
        buf.meanwhile = write
        buf.update_priorities(batch.ids, np.ones(16))
        assert buf.meanwhile is None
        batch = buf.sample(16)
    assert buf.check() == []


class Interrupted(PrioritizedSampler):
    """A signal handler that samples the same buffer in the middle of each draw, and notes how it was refused."""

    def __init__(self):
        super().__init__(rng=0)
        self.buf, self.refused = None, []

    def weigh(self):
        try:
            self.buf.sample(5)
        except RoleError as error:
            self.refused.append(str(error))
        return super().weigh()


def test_a_handler_that_samples_in_the_middle_of_a_draw():
    """Its draw took the place of the one under way, whose weights were then those of other clips."""
    sampler = Interrupted()
    buf = ReplayBuffer(64, sampler=sampler, seed=0)
    sampler.buf = buf
    buf.write_episode({"obs": np.arange(40)})
    assert buf.sample(12).weights.shape == (12,)
    assert "in the middle of another call of the same thread" in sampler.refused[0]


JOINS_TWICE = """
import linecache, signal, sys
from ringmap import ReplayBuffer

buf = ReplayBuffer(100, path=sys.argv[1])
buf.write_episode({"obs": [1, 2, 3]})
struck = []

def line(frame, event, arg):
    # A handler in the middle of a join: it closes too.
    if linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() == "lock.release()" and not struck:
        struck.append(1)
        buf.close()
    return line

signal.alarm(20)  # a hang ends it
sys.settrace(lambda frame, event, arg: line if frame.f_code.co_name == "_wait_for_tstate_lock" else None)
buf.close()
sys.settrace(None)
print("struck" if struck else "not struck")
"""


def test_a_handler_that_closes_in_the_middle_of_a_close(tmp_path):
    """A thread that waits for the same thread twice, the one wait within the other, waits for ever."""
    done = subprocess.run([sys.executable, "-c", JOINS_TWICE, str(tmp_path / "buf")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "not struck" in done.stdout:
        pytest.skip("this Python waits for threads in another way")
    assert done.stdout == "struck\n"


def test_a_read_that_waits_to_recover_while_another_thread_closes(tmp_path, monkeypatch):
    """What a failed write left was to be recovered; the close had its turn first, and gave the files back."""
    buf = ReplayBuffer(100, path=tmp_path / "buf")
    buf.write_episode({"obs": np.arange(10)})
    store, alone = buf.engine.owned, buf.engine.owned.alone

    def after_a_close(*args):
        monkeypatch.undo()
        store.abandon()
        return alone(*args)

    store._stale = True
    monkeypatch.setattr(store, "alone", after_a_close)
    with pytest.raises(ClosedError):
        buf.sample(2)


class Target:
    """What has nothing to sync."""

    folder = "here"

    def sync_behind(self):
        return None


def syncing(others):
    """Return a target, its background sync, and the thread of that: the one that is not among the others."""
    target = Target()
    sync = Background(target)
    sync.within(3600, type(target).sync_behind)
    (thread,) = set(threading.enumerate()) - others
    return target, sync, thread


def test_the_thread_of_a_sync_ends_with_what_it_syncs():
    """An interrupt may come before anything could tell it to stop."""
    others = set(threading.enumerate())
    target, sync, thread = syncing(others)
    del target
    thread.join(60)
    assert not thread.is_alive()


def test_a_clip_that_is_gone_is_not_read_where_nothing_was_ever_written(tmp_path):
    """It stood at the last row of the ring, whose chunk is missing until the ring is full for the first time."""
    buf = ReplayBuffer(20, path=tmp_path / "buf", storage=ringmap.Zarr(chunk_steps=5), spare_rows=20, seed=0)
    for k in range(3):
        buf.write_episode({"obs": np.arange(10) + 10 * k})
    clips = buf.__getitems__([PINNED + 3, PINNED + 12])
    assert int(clips[0]["obs"][0]) >= 10
    assert int(clips[1]["obs"][0]) == 12
    assert buf.num_redraws == 1
    buf.close()


def test_a_handler_that_samples_transitions_in_the_middle_of_a_draw():
    sampler = Interrupted()
    buf = TransitionReplayBuffer(64, (2,), device=None, sampler=sampler, seed=0)
    sampler.buf = buf
    for k in range(6):
        obs = np.full((4, 2), k, np.float32)
        flags = np.zeros(4)
        buf.add(obs, np.zeros((4, 1), np.float32), flags, obs + 1, flags)
    assert buf.sample(12).weights.shape == (12,)
    assert "TransitionReplayBuffer.sample: called in the middle" in sampler.refused[0]


IMPORTS_NOTHING = """
import sys
import numpy as np
from ringmap import Column, ReplayBuffer

path = sys.argv[1]
schema = {"obs": ((), "i8"), "latent": Column((), "i8", mutable=True), "text": ((), str)}
for storage in ("memmap", "zarr"):
    buf = ReplayBuffer(50, path=f"{path}-{storage}", storage=storage, schema=schema, seed=0)
    known = set(sys.modules)
    buf.write_episode({"obs": np.arange(20), "latent": np.arange(20), "text": np.array(["a", "b"] * 10)})
    buf.update(np.arange(4), {"latent": np.arange(4)})
    buf.sample(4)
    buf.load_episode(0)
    buf.flush()
    buf.close()
    print(sorted(name for name in set(sys.modules) - known if name.startswith(("numpy", "ringmap"))))
"""


def test_no_call_imports_what_a_handler_may_come_in_the_middle_of(tmp_path):
    """A handler that calls the same then meets half a module: `np.unique` imports `numpy.ma` when it is first
    called. A snapshot and a check import their own module, at the first call: a handler that calls one while the same
    is under way is refused anyway."""
    command = [sys.executable, "-c", IMPORTS_NOTHING, str(tmp_path / "buf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr
