"""What test_file_systems.py runs in a small file system of its own: fill it, make room, go on.

    python -m tests.faults.filesystems.fill FOLDER DURABILITY STORAGE BALLAST

Every byte of a step proves its episode and number. Prints one line of JSON.
"""

import errno
import json
import os
import signal
import sys

import numpy as np

import ringmap
from ringmap import ReplayBuffer, Zarr
from ringmap.errors import EnvironmentFault, SyncFailedError
from ringmap.storage.disk.files import Disk
from tests.unit.buffers.processes import Child

STEPS = 40
STORAGES = {
    "memmap": "memmap",
    "zarr": Zarr("none", 16),
    "mixed": {"number": "zarr", "obs": Zarr("none", 7)},
}
"""What can't be compressed fills the disk as fast."""


class Blind(Disk):
    """A disk that does not know how much room there is: a snapshot finds out."""

    def free(self, path):
        return None


class Filler:
    """A buffer, of which an episode is a `share` of the file system that it fills."""

    def __init__(self, folder, durability, storage, nbytes):
        self.folder, self.path = folder, os.path.join(folder, "buf")
        self.width = max(nbytes >> 11, 1024)
        self.make = {"max_steps": 1 << 17, "path": self.path, "durability": durability, "sync_every_s": 0}
        self.make |= {"storage": STORAGES[storage], "disk": Blind()}
        self.buf = ReplayBuffer(**self.make)

    def rows(self, number):
        noise = np.random.default_rng(number).integers(0, 256, (STEPS, self.width), dtype=np.uint8)
        return {"number": np.full(STEPS, number), "obs": noise}

    def prove(self, buf=None):
        """Compare every stored byte and return the numbers of the episodes."""
        numbers = []
        for episode in (self.buf if buf is None else buf).episodes():
            number = int(episode["number"][0])
            for name, expected in self.rows(number).items():
                assert (episode[name] == expected).all(), f"wrong bytes in {name} of {number}"
            numbers.append(number)
        return numbers

    def fill(self, first):
        """Write until the disk is full; return the first number that found no room."""
        for number in range(first, 100_000):
            before = self.buf.num_episodes
            try:
                self.buf.write_episode(self.rows(number))
            except EnvironmentFault as error:
                assert error.errno == errno.ENOSPC, error
                if isinstance(error, SyncFailedError):  # its fate is open
                    self.buf.engine.source.abandon()
                    self.buf = ReplayBuffer(**self.make)
                    assert self.buf.num_episodes in (before, before + 1)
                    return number + self.buf.num_episodes - before
                assert self.buf.num_episodes == before
                return number
        raise AssertionError("never full")

    def try_to_close(self):
        try:
            self.buf.close()
        except EnvironmentFault as error:
            assert error.errno == errno.ENOSPC, error

    def kill_while_full(self, first):
        """Open in a process that ends by SIGKILL once the disk is full."""

        def work(child):
            self.buf = ReplayBuffer(**self.make)
            self.fill(first)
            child.say("full")
            signal.pause()

        child = Child(work)
        assert child.hear() == "full"
        child.kill()


def main(folder, durability, storage, ballast):
    there = os.path.join(folder, "ballast")
    with open(there, "wb") as file:
        file.write(os.urandom(int(ballast)))
    one = Filler(folder, durability, storage, int(ballast))
    full = one.fill(0)
    stored = list(range(full))
    assert full > 5
    assert one.prove() == stored
    with ReplayBuffer.open(one.path) as reader:
        assert one.prove(reader) == stored
        assert len(reader.sample(16)["number"]) == 16
    for _ in range(10):  # a refused write leaves nothing behind that adds up
        assert one.fill(full) == full
    assert one.prove() == stored
    try:
        one.buf.snapshot(os.path.join(folder, "copy"))  # of holes and reflinks there may be room
        assert ringmap.check(os.path.join(folder, "copy")) == []
    except EnvironmentFault as error:
        assert error.errno == errno.ENOSPC, error
        assert sorted({*os.listdir(folder)} - {"lost+found"}) == ["ballast", "buf"]
    os.remove(there)
    os.sync()
    one.buf.write_episode(one.rows(full))  # room again: the same call works
    assert one.prove() == [*stored, full]
    again = one.fill(full + 1)
    assert again > full + 10, "the room is not used"
    one.try_to_close()
    one.kill_while_full(again)
    with ReplayBuffer.open(one.path) as reader:
        numbers = one.prove(reader)
    assert numbers[:again] == list(range(again))
    one.buf = ReplayBuffer(**one.make)
    assert one.prove() == numbers
    recording, appended = one.buf.begin_episode(), 0
    try:
        for step in range(STEPS):
            recording.append({name: values[step] for name, values in one.rows(777).items()})
            appended += 1
        recording.finish()
    except EnvironmentFault as error:
        assert error.errno == errno.ENOSPC, error
        assert recording.num_steps == appended
        if not isinstance(error, SyncFailedError):
            recording.abandon()
    if not one.buf.engine.owned.is_poisoned:
        assert one.prove() in (numbers, [*numbers, 777])
        assert one.buf.check() == []
    print(json.dumps({"stored while full": full, "after room was made": again}))


if __name__ == "__main__":
    main(*sys.argv[1:])
