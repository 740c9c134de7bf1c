"""A close while others read: they finish with the rows that they began with, or raise ClosedError; no descriptor
stays."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import ClosedError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from tests.faults.crash.cases import STORAGES, episode, look
from tests.tiers import few

ROWS = 4


class Meddler(System):
    """Does something at the n-th read of a file, between the call and the read itself."""

    left, meddle = 0, None

    def _now(self):
        self.left -= 1
        if self.left == 0:
            meddle, self.meddle = self.meddle, None
            meddle()

    def pread(self, fd, size, offset):
        self._now()
        return super().pread(fd, size, offset)

    def pread_into(self, fd, room, offset):
        self._now()
        return super().pread_into(fd, room, offset)


def filled(path, storage, **options):
    with ReplayBuffer(60, path=path, spare_rows=12, storage=STORAGES[storage], sync_every_s=0) as made:
        for k in range(1, 10):
            made.write_episode(episode(k, 3 + k % 4))
    seen = look(made)
    made.close()
    return seen


def opened_as(path, role, reads):
    return ReplayBuffer.open(path, mode="r+" if role == "writer" else "r", reads=reads, seed=0)


READS = {
    "sample": lambda buf: [tuple(row) for row in buf.sample(16)["obs"][:, 0].tolist()],
    "read": look,
    "data": lambda buf: buf.get_episode_data([0, 3])["number"],
    "rows": lambda buf: buf.get_row_data(np.arange(9))["obs"].tolist(),
    "load": lambda buf: buf.load_episode(2)["obs"].tolist(),
}


@pytest.mark.parametrize("role", ["writer", "reader"])
@pytest.mark.parametrize("reads", few(["map", "pread"]))
@pytest.mark.parametrize("storage", ["memmap", "zarr"])
def test_closed_at_any_read_of_a_file(fast, monkeypatch, storage, role, reads):
    """Whatever was closed is opened by somebody else at once, under the same number: a file of 0xEE."""
    seen, foreign = filled(fast / "buf", storage), fast / "foreign"
    foreign.write_bytes(b"\xee" * (1 << 20))
    system = Meddler()
    monkeypatch.setattr("ringmap.buffers.engine.DISK", Disk(system))
    struck_in = []
    for what, read in READS.items():
        with_it = opened_as(fast / "buf", role, reads)
        right = read(with_it)
        with_it.close()
        for at in range(1, 40, 2):
            buf, taken = opened_as(fast / "buf", role, reads), []

            def meddle(buf=buf, taken=taken):
                closes = threading.Thread(target=buf.close)
                closes.start()
                closes.join()
                taken.extend(os.open(foreign, os.O_RDONLY) for _ in range(12))

            system.left, system.meddle = at, meddle
            try:
                got = read(buf)
            except ClosedError:
                pass
            else:
                if what == "sample":
                    assert {k for k, _ in got} <= {k for k, *_ in seen}, (what, at)
                    assert all(t < dict(seen)[k] for k, t in got)
                else:
                    assert got == right, (what, at)
            for fd in taken:
                os.close(fd)
            struck, system.meddle, system.left = system.meddle is None, None, 0
            buf.close()
            if not struck:
                break
        struck_in += [what] * (at > 1)
    assert {"read", "data", "load"} <= set(struck_in)


@pytest.mark.parametrize("role", ["writer", "reader"])
@pytest.mark.parametrize(("storage", "reads"), [("memmap", "map"), ("memmap", "pread"), ("zarr", "map")])
def test_threads_read_while_it_is_closed(fast, role, storage, reads):
    seen = dict(filled(fast / "buf", storage))
    foreign = fast / "foreign"
    foreign.write_bytes(b"\xee" * (1 << 20))
    wrong = []

    def watch(buf, which):
        try:
            while True:
                for k, t in READS[which](buf) if which == "sample" else []:
                    if t >= seen.get(k, 0):
                        wrong.append((which, k, t))
                if which == "data" and READS[which](buf) != [1, 4]:
                    wrong.append(which)
                if which == "read" and len(look(buf)) != 9:
                    wrong.append(which)
        except ClosedError:
            return
        except BaseException as error:
            wrong.append((which, repr(error)))

    for _ in range(4):
        buf = opened_as(fast / "buf", role, reads)
        threads = [threading.Thread(target=watch, args=(buf, w)) for w in ("sample", "data", "read")]
        batches = buf.batches(4)
        next(batches)
        for thread in threads:
            thread.start()
        buf.close()
        taken = [os.open(foreign, os.O_RDONLY) for _ in range(12)]
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        with pytest.raises((ClosedError, StopIteration)):
            while True:
                next(batches)
        batches.close()
        for fd in taken:
            os.close(fd)
    assert wrong == []


@pytest.mark.parametrize("role", ["writer", "reader"])
@pytest.mark.parametrize("reads", ["map", "pread"])
def test_no_descriptor_stays(fast, role, reads):
    filled(fast / "buf", "mixed")
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    buf = opened_as(fast / "buf", role, reads)
    for read in READS.values():
        read(buf)
    if role == "writer":
        buf.write_episode(episode(20, 5))
    assert len(os.listdir("/proc/self/fd")) > len(before)
    buf.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    with open("/proc/self/maps") as maps:
        assert str(fast / "buf") not in maps.read()
    for read in READS.values():
        with pytest.raises(ClosedError):
            read(buf)


AT_EXIT = """
import multiprocessing
from torch.utils.data import DataLoader
from ringmap import ReplayBuffer
writer = ReplayBuffer(40, path={path!r})
writer.write_episode({{"obs": list(range(20))}})
reader = ReplayBuffer.open({path!r}, reads="pread")
loader = DataLoader(reader, batch_size=4, num_workers=1)
batches = iter(loader)
next(batches)
reader.get_episode_data()
kept = reader.batches(4)
next(kept)
"""


@pytest.mark.slow
def test_an_interpreter_that_ends_is_quiet(fast):
    pytest.importorskip("torch")
    code = AT_EXIT.format(path=str(fast / "buf"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
