"""What test_file_systems.py runs to fill a file system: python -m tests.faults.filesystems.fill FOLDER DURABILITY."""

import errno
import os
import sys

import numpy as np

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, SyncFailedError

STEPS, WIDTH = 64, 16_384


def rows(number):
    noise = np.random.default_rng(number).integers(0, 256, (STEPS, WIDTH), dtype=np.uint8)
    return {"number": np.full(STEPS, number), "obs": noise}


def numbers_of(buffer):
    found = []
    for episode in buffer.episodes():
        number = int(episode["number"][0])
        assert np.array_equal(episode["obs"], rows(number)["obs"])
        found.append(number)
    return found


def main(folder, durability):
    path, ballast = f"{folder}/buf", f"{folder}/ballast"
    with open(ballast, "wb") as file:
        file.write(os.urandom(100 << 20))
    buffer = ReplayBuffer(1 << 17, path=path, durability=durability, sync_every_s=0)
    full, ends = None, []
    for number in range(1000):
        try:
            buffer.write_episode(rows(number))
        except EnvironmentFault as error:
            assert error.errno == errno.ENOSPC, error
            ends.append(type(error).__name__)
            full = number
            if isinstance(error, SyncFailedError):  # its fate is open
                buffer.engine.source.abandon()
                buffer = ReplayBuffer.open(path, mode="r+")
            break
    stored = numbers_of(buffer)
    assert stored in (list(range(full)), list(range(full + 1)))
    os.remove(ballast)
    os.sync()
    buffer.write_episode(rows(777))
    assert numbers_of(buffer) == [*stored, 777]
    try:
        buffer.snapshot(f"{folder}/copy")
        ends.append("snapshot made")
        assert ringmap.check(f"{folder}/copy") == []
    except EnvironmentFault as error:
        assert error.errno == errno.ENOSPC, error
        ends.append("no room for a snapshot")
        assert sorted(os.listdir(folder)) == ["buf"]
    assert buffer.check() == []
    buffer.close()
    print(f"full after {full} episodes, {ends}")


if __name__ == "__main__":
    main(*sys.argv[1:])
