"""Where no thread can start (a limit on processes): reading goes on without, and a call that stores is refused."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from ringmap import Column, ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import EnvironmentFault

CODE = """
import importlib, logging, os, resource, sys, threading
import numpy as np
from ringmap import ReplayBuffer, check
from ringmap.errors import EnvironmentFault
from ringmap.storage.inspect import check as _
from ringmap.storage.inspect import snapshot as _
from ringmap.storage.inspect import check as _
import ringmap.buffers.prefetch
from ringmap.formats.media import images

path = sys.argv[1]
episode = lambda k: {"obs": np.full((40, 64, 64, 3), k, np.uint8)}


def use(path, alone):
    buf = ReplayBuffer.open(path, threads=4, seed=0)
    assert buf.sample(256)["obs"].nbytes > 1 << 21
    with buf.batches(4, steps=3) as batches:
        assert len(list(batches)) == 3
    assert buf.check() == []
    buf.snapshot(path + "-copy")
    assert images.in_threads(lambda n: n + 1, list(range(100)), 1) == list(range(1, 101))
    buf.close()
    buf.engine.disk.system.boot_id = lambda: b"another boot" + bytes(4)  # every episode is verified
    again = ReplayBuffer.open(path, mode="r+", sync_every_s=30)
    try:
        again.write_episode(episode(2))
    except EnvironmentFault as error:
        assert alone and "ulimit -u" in str(error) and "nothing was stored" in str(error), error
    else:
        assert not alone
    assert again.num_episodes == 2 - alone
    again.close()
    assert check(path) == []


for name in (path, path + "-first"):
    with ReplayBuffer(400, path=name, sync_every_s=0) as given:
        given.write_episode(episode(7))
    given.close()
    os.system("chmod -R a+rwX " + name)

# What the calls import is imported now: who is not root may not read the files of the modules.
told, says = os.pipe()
if os.fork() == 0:
    known = set(sys.modules)
    use(path + "-first", False)
    os.write(says, " ".join(set(sys.modules) - known).encode())
    os._exit(0)
os.close(says)
for name in sorted(os.read(told, 1 << 16).decode().split()):
    importlib.import_module(name)

resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # root is above the limit
try:
    threading.Thread(target=print).start()
except RuntimeError as error:
    assert "can't start new thread" in str(error), error
else:
    print("threads start")
    sys.exit()
logging.basicConfig(stream=sys.stdout, format="%(message)s")
use(path, True)
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_NPROC")
def test_reading_goes_on_and_writing_is_refused(fast):
    fast.chmod(0o777)
    home = fast / "home"
    home.mkdir()
    home.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", CODE, str(home / "buf")], capture_output=True, text=True, timeout=120)
    if "threads start" in done.stdout:
        pytest.skip("this kernel does not hold processes to RLIMIT_NPROC")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")


def none_starts(self):
    raise RuntimeError("can't start new thread")


def test_an_update_that_is_refused_changed_nothing(tmp_path, monkeypatch):
    schema = {"x": ((), "i8"), "label": Column((), "i8", mutable=True)}
    with ReplayBuffer(10, schema=schema, path=tmp_path / "buf", sync_every_s=0) as buf:
        buf.write_episode({"x": np.arange(3), "label": np.arange(3)})
    buf.close()
    with ReplayBuffer.open(tmp_path / "buf", "r+", sync_every_s=600) as buf:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_starts)
            with pytest.raises(EnvironmentFault, match="nothing was stored"):
                buf.update([1], {"label": [7]})
        assert buf.get_col_data("label").tolist() == [0, 1, 2]
        buf.update([1], {"label": [8]})
        assert buf.get_col_data("label").tolist() == [0, 8, 2]
    buf.close()


def test_a_call_that_is_refused_begins_no_group(tmp_path, monkeypatch):
    """Else the next one would find it, and leave it to nobody to commit in time."""
    one = np.ones((1, 1), np.float32)

    def add():
        buf.add(one, one, np.ones(1), one, np.zeros(1, bool))

    with TransitionReplayBuffer(100, (1,), path=tmp_path / "buf", device=None, sync_every_s=0) as buf:
        add()
    buf.close()
    with TransitionReplayBuffer.open(tmp_path / "buf", "r+", device=None, sync_every_s=0) as buf:
        store = buf.engine.owned
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_starts)
            with pytest.raises(EnvironmentFault, match="nothing was stored"):
                add()
        assert (len(buf), store.pending, os.listdir(store.paths.open)) == (1, None, [])
        add()
        assert type(store).commit_behind in store._background._due
        assert len(buf) == 2
    buf.close()
