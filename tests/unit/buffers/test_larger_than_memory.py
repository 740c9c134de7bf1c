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
in_ram = ReplayBuffer(1_000_000)
for _ in range(2):
    try:
        in_ram.write_episode(with_rows)
    except MemoryError as error:
        print(error)
in_ram.write_episode({"action": np.arange(8.0)})
print(in_ram.num_episodes, in_ram.sample(2)["action"].shape)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of data is Linux's")
def test_rows_are_mapped_and_a_ring_in_ram_is_refused(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "ring"], capture_output=True, text=True)
    mapped, *refused, counts = done.stdout.splitlines() or [done.stderr[-2000:], ""]
    assert mapped == "mapped"
    said = "13,056,008,192 bytes does not fit in memory; give path= to keep the rows in a directory, or lower max_steps"
    assert refused == 2 * [f"a column of {said}"]
    assert counts == "1 (2, 1, 1)"
