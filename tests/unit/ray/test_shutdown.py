"""Buffers that are left open while Ray is shut down, and started again, in a process of their own."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from ringmap import ReplayBuffer

pytest.importorskip("ray")

PROGRAM = """
import sys
import ray, ringmap.ray as rr
from ringmap.errors import ClosedError

path = sys.argv[1]
options = {"address": "local", "num_cpus": 2, "object_store_memory": 100_000_000}
options |= {"include_dashboard": False, "log_to_driver": False}


def start():
    ray.init(**options)
    buf = rr.ReplayBuffer(path, wait_s=90)
    return buf, buf.batches(8)


def refused(call):
    try:
        call()
    except ClosedError as error:
        assert "Ray was shut down, or started again" in str(error), error
    else:
        raise AssertionError(call)


left, ahead = start()
next(ahead)
ray.shutdown()
calls = lambda: left.sample(8), lambda: left.nodes, lambda: len(left), left.refresh, lambda: next(left.batches(8))
for call in calls:
    refused(call)
assert "closed" in repr(left)
assert not ray.is_initialized(), "a call started another Ray"
other, others = start()
refused(lambda: left.sample(8))
left.close()
del left, ahead
for _ in range(3):
    next(others)
ray.shutdown()
other.close()
assert not ray.is_initialized()
print("done")
"""


@pytest.mark.slow
def test_a_buffer_outlives_ray():
    with tempfile.TemporaryDirectory(prefix="rmray") as folder:
        with ReplayBuffer(1000, path=Path(folder) / "0") as ring:
            ring.write_episode({"obs": np.zeros((50, 3), np.float32)})
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True, timeout=240, check=False
        )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr[-3000:]
