"""A ring whose columns are larger than the memory that a process may allocate: its rows are mapped, never allocated."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from ringmap import ReplayBuffer

MOST = 1 << 30
resource.setrlimit(resource.RLIMIT_DATA, (MOST, MOST))
with_rows = {"pixels": np.full((8, 64, 64, 3), 7, np.uint8), "action": np.arange(8.0)}
buf = ReplayBuffer(1_000_000, path=sys.argv[1], history_len=2)
buf.write_episode(with_rows)
for reader in (buf, ReplayBuffer.open(sys.argv[1])):
    batch = reader.sample(4)
    assert batch["pixels"].shape == (4, 2, 64, 64, 3) and (batch["pixels"] == 7).all()
    assert (reader.load_episode(0)["action"] == np.arange(8)).all()
try:
    np.empty(2 * MOST, np.uint8)  # the control: the limit holds
except MemoryError:
    print("mapped")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of data is Linux's")
def test_rows_are_mapped_not_allocated(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "ring"], capture_output=True, text=True
    )
    assert done.stdout == "mapped\n", done.stderr[-2000:]
