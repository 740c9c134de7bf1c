"""Forks while chunks are decoded: no child hangs, and none that dies takes a lock along."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks.harness.proof import Episodes, num_torn
from ringmap import ReplayBuffer, Zarr
from tests import ROOT
from tests.busy import busy, held
from tests.tiers import few
from tests.unit.buffers.processes import Child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")

STORAGES = {
    "lz4": Zarr("lz4", 6),
    "zstd": Zarr("zstd", 16),
}


def filled(path, storage):
    buf = ReplayBuffer(64, 2, path=path, spare_rows=16, seed=0, sync_every_s=0, storage=storage)
    made = Episodes(512, 8)
    for number in range(30):
        buf.write_episode(made(number, 8))
    return buf


def sound(buf, rounds):
    return all(num_torn(buf.sample(32)) == 0 for _ in range(rounds))


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
@pytest.mark.parametrize("mode", few(["r+", "r"]))
def test_a_session_forks_while_its_threads_decode(fast, storage, mode):
    writer = filled(fast / "buf", storage)
    buf = writer if mode == "r+" else ReplayBuffer.open(fast / "buf", seed=0)

    def decode():
        assert sound(buf, 1), "torn"

    with busy(decode, decode):
        children = [Child(lambda _: sound(buf, 3)) for _ in range(3)]
        assert [child.result() for child in children] == [True] * 3
    assert sound(buf, 2)
    buf.close()
    writer.close()


HOLDS = """
import os, signal, sys
import numcodecs.blosc as blosc
from ringmap import ReplayBuffer
from benchmarks.harness.proof import Episodes
buf = ReplayBuffer.open(sys.argv[1], "r+")
made = Episodes(512, 8)
buf.write_episode(made(30, 8))
lock = blosc.get_mutex()
child = os.fork()
if not child:
    lock.acquire()  # as in the middle of a chunk
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
if "careless" in sys.argv:
    blosc.use_threads = None
signal.alarm(3 if 'careless' in sys.argv else 60)  # its own action: the process is killed
buf.write_episode(made(31, 8))
print("zarr" in sys.modules)
"""


@pytest.mark.parametrize("careless", [False, True])
def test_a_forked_child_that_is_killed_in_mid_chunk_takes_no_lock_along(fast, careless):
    """numcodecs guards Blosc's threads by a lock that forked processes share; `careless` is the control."""
    filled(fast / "buf", Zarr("lz4", 6)).close()
    words = [sys.executable, "-c", HOLDS, str(fast / "buf"), *["careless"] * careless]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if careless:
        assert done.returncode == -signal.SIGALRM, done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_no_lock_of_a_compressed_column_is_held_in_a_child():
    """A child of a buffer in RAM recovers its own copy: it takes the locks that a thread of its parent's had."""
    buf = filled(None, "zarr")
    column = next(iter(buf.engine.owned.rows.by_name.values()))

    def child(_):
        column.sync()
        return sound(buf, 2)

    with held(column._lock):
        assert Child(child).result() is True
