"""Where no thread can start (a limit on processes): reading goes on without, and a call that stores is refused."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_NPROC")

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


def test_reading_goes_on_and_writing_is_refused(fast):
    fast.chmod(0o777)
    home = fast / "home"
    home.mkdir()
    home.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", CODE, str(home / "buf")], capture_output=True, text=True, timeout=120)
    if "threads start" in done.stdout:
        pytest.skip("this kernel does not hold processes to RLIMIT_NPROC")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")
