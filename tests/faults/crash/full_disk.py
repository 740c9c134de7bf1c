"""What test_full_disk.py runs inside a small file system of its own: fill it, make room, go on.

    python -m tests.faults.crash.full_disk FOLDER DURABILITY STORAGE

Every byte of a step proves its episode and number. Prints one line of JSON.
"""

import errno
import json
import os
import signal
import sys

import numpy as np

from ringmap import ReplayBuffer, Zarr
from ringmap.errors import EnvironmentFault

STEPS, WIDTH = 40, 1024
STORAGES = {
    "memmap": "memmap",
    "zarr": Zarr("none", 16),
    "mixed": {"number": "zarr", "obs": Zarr("none", 7)},
}
"""What can't be compressed fills the disk as fast."""


def rows(number):
    noise = np.arange(STEPS * WIDTH, dtype=np.uint32).reshape(STEPS, WIDTH) * 31 + number * 7
    return {"number": np.full(STEPS, number), "obs": (noise % 251).astype(np.uint8)}


def prove(buf):
    """Compare every stored byte and return the numbers of the episodes."""
    numbers = []
    for episode in buf.episodes():
        number = int(episode["number"][0])
        for name, expected in rows(number).items():
            assert (episode[name] == expected).all(), f"wrong bytes in {name} of {number}"
        numbers.append(number)
    return numbers


def fill(buf, first):
    """Write until the disk is full; returns the first number that found no room."""
    for number in range(first, 100_000):
        before = buf.num_episodes
        try:
            buf.write_episode(rows(number))
        except EnvironmentFault as error:
            assert error.errno == errno.ENOSPC, error
            assert buf.num_episodes == before
            return number
    raise AssertionError("never full")


def in_a_child_that_is_killed(work):
    """Run `work` in a process that ends by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child failed"


def main(folder, durability, storage):
    path, ballast = os.path.join(folder, "buf"), os.path.join(folder, "ballast")
    with open(ballast, "wb") as file:
        file.write(bytes(1_500_000))
    make = {"max_steps": 1 << 20, "path": path, "durability": durability}
    make["storage"] = STORAGES[storage]

    buf = ReplayBuffer(**make)
    full = fill(buf, 0)
    stored = list(range(full))
    assert full > 5
    assert prove(buf) == stored
    with ReplayBuffer.open(path) as reader:
        assert prove(reader) == stored
        assert len(reader.sample(16)["number"]) == 16
    for _ in range(10):  # a refused write leaves nothing behind that adds up
        assert fill(buf, full) == full
    assert prove(buf) == stored

    os.remove(ballast)
    buf.write_episode(rows(full))  # room again: the same call works
    assert prove(buf) == [*stored, full]
    again = fill(buf, full + 1)
    assert again > full + 10, "the room is not used"
    refused = 0
    try:
        buf.close()
    except EnvironmentFault as error:
        assert error.errno == errno.ENOSPC, error
        refused = 1

    def kill_while_full():
        inner = ReplayBuffer(**make)
        fill(inner, again)

    in_a_child_that_is_killed(kill_while_full)
    with ReplayBuffer.open(path) as reader:
        numbers = prove(reader)
    assert numbers[:again] == list(range(again))
    buf = ReplayBuffer(**make)
    assert prove(buf) == numbers
    recording, appended = buf.begin_episode(), 0
    try:
        for step in range(STEPS):
            recording.append({name: values[step] for name, values in rows(777).items()})
            appended += 1
        recording.finish()
    except EnvironmentFault as error:
        assert error.errno == errno.ENOSPC, error
        assert recording.num_steps == appended
        recording.abandon()
    assert prove(buf) in (numbers, [*numbers, 777])
    assert buf.check() == []
    print(json.dumps({"stored while full": full, "after room was made": again, "close refused": refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
