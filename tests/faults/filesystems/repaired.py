"""What test_file_systems.py runs to repair a mounted buffer: python -m tests.faults.filesystems.repaired MOUNT.

Beside a reader, on a full disk, through a link, and where nothing can be written. Prints what became of the reader.
"""

import errno
import os
import subprocess
import sys
import tempfile

import numpy as np

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault

STEPS, WIDTH, ROWS = 20, 256, 200

READER = """
import sys
from ringmap import ReplayBuffer
from ringmap.errors import RingmapError

reader = ReplayBuffer.open(sys.argv[1], seed=0)
reader.sample(8)
print("open", flush=True)
for line in sys.stdin:
    try:
        batch = reader.sample(64)
    except RingmapError as error:
        print(type(error).__name__, flush=True)
        continue
    ok = (batch["obs"] == batch["number"][..., None] % 251).all() and not set(batch["number"].ravel()) & {5, 7}
    print("whole" if ok else "FOREIGN", flush=True)
"""


def rows(number):
    return {"number": np.full(STEPS, number), "obs": np.full((STEPS, WIDTH), number % 251, np.uint8)}


def numbers_in(path):
    with ReplayBuffer.open(path) as buffer:
        found = [int(episode["number"][0]) for episode in buffer.episodes()]
    buffer.close()
    return found


def damage(path):
    """Flip a bit in rows of episode 5, and lose the record of episode 7."""
    for name, at in (("columns/001-obs.npy", 4096 + (5 * STEPS + 3) * WIDTH), ("episodes.npy", 4096 + 8 * 128 + 9)):
        with open(os.path.join(path, name), "r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 4]))


def fill(path):
    """Take all room that is left."""
    with open(os.path.join(path, "lost+found"), "wb") as file:  # a name that a buffer's directory may have
        try:
            while True:
                file.write(os.urandom(1 << 20))
                file.flush()
        except OSError as error:
            assert error.errno == errno.ENOSPC, error


def main(mount):
    buffer = ReplayBuffer(ROWS, path=mount, seed=0)
    for number in range(8):
        buffer.write_episode(rows(number))
    buffer.close()
    whole = [0, 1, 2, 3, 4, 6]
    is_free = not os.path.exists(os.path.join(mount, "lost+found"))
    command = [sys.executable, "-c", READER, mount]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout.readline() == "open\n"
    said = []
    damage(mount)

    def look():
        reader.stdin.write("look\n")
        reader.stdin.flush()
        said.append(reader.stdout.readline().strip())

    if is_free:
        fill(mount)
        try:
            ringmap.repair(mount, dry_run=False)
        except EnvironmentFault as error:
            assert error.errno == errno.ENOSPC, error
            said.append("full")
        os.remove(os.path.join(mount, "lost+found"))
    with tempfile.TemporaryDirectory() as beside:
        link = os.path.join(beside, "link")
        os.symlink(mount, link)
        subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
        try:
            ringmap.repair(link, dry_run=False)
            assert not ringmap.repair(link)
        except EnvironmentFault as error:
            assert "to=..." in str(error), error
            said.append("read-only")
        ringmap.repair(link, dry_run=False, to=os.path.join(beside, "copy"))
        assert numbers_in(os.path.join(beside, "copy")) == whole
        subprocess.run(["mount", "-o", "remount,rw", mount], check=True)
        ringmap.repair(link, dry_run=False)
    assert ringmap.check(mount) == []
    assert numbers_in(mount) == whole
    look()
    with ReplayBuffer.open(mount, mode="r+") as buffer:
        for number in range(100, 130):
            buffer.write_episode(rows(number))
            look()
        assert buffer.check() == []
    buffer.close()
    reader.stdin.close()
    reader.wait()
    assert "FOREIGN" not in said
    print(sorted(set(said)))


if __name__ == "__main__":
    main(*sys.argv[1:])
