"""What test_file_systems.py runs in a file system of its own: everything that a buffer asks of one.

    python -m tests.faults.filesystems.life FOLDER

Prints one line of JSON.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import LockedError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from tests.disks import Through

STEPS, WIDTH = 50, 4096

READER = """
import sys
import numpy as np
from ringmap import ReplayBuffer

reader = ReplayBuffer.open(sys.argv[1], seed=0)
print("open", flush=True)
for line in sys.stdin:
    reader.refresh()
    batch = reader.sample(32)
    assert (batch["obs"] == batch["number"][..., None] % 251).all()
    print(int(reader.load_episode(-1)["number"][0]), flush=True)
"""


def rows(number):
    return {
        "number": np.full(STEPS, number),
        "obs": np.full((STEPS, WIDTH), number % 251, np.uint8),
    }


class Noting(System):
    shared = 0

    def share(self, source, fd):
        done = super().share(source, fd)
        self.shared += done
        return done


Buffer = Through(ReplayBuffer, Disk(Noting()))


def used(folder):
    os.sync()
    stat = os.statvfs(folder)
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def numbers_of(path):
    with ReplayBuffer.open(path) as buffer:
        numbers = []
        for episode in buffer.episodes():
            number = int(episode["number"][0])
            assert all(np.array_equal(episode[name], values) for name, values in rows(number).items())
            numbers.append(number)
    buffer.close()
    return numbers


def killed_while_writing(path, durability):
    """Write in a child until it is killed; return how many episodes it said it had stored."""
    out, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        buffer = ReplayBuffer(1000, path=path, durability=durability)
        number = int(buffer.load_episode(-1)["number"][0]) if buffer.num_episodes else -1
        while True:
            number += 1
            buffer.write_episode(rows(number))
            os.write(told, number.to_bytes(8, "little"))
    os.close(told)
    stored = [os.read(out, 8) for _ in range(30)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(out, 8):
        stored.append(more)
    os.close(out)
    return int.from_bytes(stored[-1], "little")


def main(folder):
    folder, found = Path(folder), {}
    path = folder / "buf"
    for durability in ("process", "power"):
        last = killed_while_writing(path, durability)
        numbers = numbers_of(path)
        assert numbers[-1] in (last, last + 1), (numbers, last)
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert ringmap.check(path) == []

    buffer = Buffer(1000, path=path, sync_every_s=0)
    try:
        ReplayBuffer.open(path, mode="r+")
        raise AssertionError("two writers")
    except LockedError:
        pass
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout.readline() == "open\n"
    for number in range(numbers[-1] + 1, numbers[-1] + 60):  # a map shows at once what was written
        buffer.write_episode(rows(number))
        reader.stdin.write("look\n")
        reader.stdin.flush()
        assert int(reader.stdout.readline()) == number
    reader.stdin.close()
    assert reader.wait() == 0

    buffer.flush()
    before, begun = used(folder), time.perf_counter()
    buffer.snapshot(folder / "copy")
    found["snapshot_ms"] = round((time.perf_counter() - begun) * 1e3, 1)
    found["snapshot_nbytes"] = used(folder) - before
    found["live_nbytes"] = buffer.num_steps_stored * (WIDTH + 8)
    found["columns shared"] = Buffer.disk.system.shared
    kept = numbers_of(folder / "copy")
    assert ringmap.check(folder / "copy") == []
    with ReplayBuffer.open(folder / "copy", mode="r+") as copied:
        for other in range(5000, 5030):
            copied.write_episode(rows(other))
        assert copied.check() == []
    copied.close()
    assert numbers_of(path) == kept, "what is written to the copy shows in the copy only"
    for number in range(numbers[-1] + 60, numbers[-1] + 90):
        buffer.write_episode(rows(number))
    assert buffer.check() == []
    assert numbers_of(folder / "copy")[-1] == 5029
    with ReplayBuffer.open(path, reads="pread") as other:
        other.sample(64)
    other.close()
    buffer.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
