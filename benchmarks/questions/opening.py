"""Opening a buffer of 1,000,000 episodes, within one boot and after a reboot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from benchmarks.harness.data import fill, states
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk

STEPS = 4


class RebootingDisk(Disk):
    """A disk whose machine reboots when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reboot()

    def reboot(self) -> None:
        """Change the boot id."""
        self._boot = os.urandom(16)

    def boot_id(self) -> bytes | None:
        """Return the id of this boot."""
        return self._boot


DISK = RebootingDisk()


def run(place: Place) -> list[Table]:
    """Open it as reader and as writer, in turn."""
    stored, behind = place.size(1_000_000, 2_000, 200_000), place.size(10_000, 100)
    table = Table(f"opening {stored:,} episodes of {STEPS} steps of 64 bytes in 4 columns, to the first length known")
    episodes = states(STEPS)
    with place.folder() as folder:
        path = folder / "buffer"
        buffer = ReplayBuffer(max_steps=stored * STEPS, path=path, disk=DISK, sync_every_s=0)
        fill(buffer, episodes, stored)
        buffer.close()
        times: dict[str, list[float]] = {}
        for _ in range(place.size(11, 2, 5)):
            for name, mode, reboot, cold in (
                ("reader", "r", False, False),
                ("writer", "r+", False, False),
                ("reader after a reboot", "r", True, False),
                ("writer after a reboot", "r+", True, False),
                ("writer after a reboot, nothing in the page cache", "r+", True, True),
            ):
                if reboot:
                    DISK.reboot()
                if cold:
                    _forget(path)
                times.setdefault(name, []).append(_open(path, mode, stored))
                if mode == "r" and reboot:  # a reader writes nothing: the boot is still another one
                    ReplayBuffer.open(path, "r+", disk=DISK).close()
        name = f"writer killed {behind:,} episodes after the last sync, after a reboot"
        times[name] = [_killed(path, episodes, stored, behind) for _ in range(place.size(5, 1, 1))]
    table.add_all(times)
    for row in list(times)[:-1]:
        table.bar(f"{row}, median s", table.times[row]["median"], at_most=0.5)
    processes = {
        "reader": ("r", 0.3),
        "writer": ("r+", 0.4),
        f"writer, after a kill {behind:,} episodes after the last sync": ("r+", 0.5),
    }
    alone = Table(f"{table.title}, in a new process, the import of ringmap included")
    with place.folder() as folder:
        path = folder / "buffer"
        buffer = ReplayBuffer(max_steps=stored * STEPS, path=path, sync_every_s=0)
        fill(buffer, states(STEPS), stored)
        buffer.close()
        taken = {
            name: [_in_a_process(path, mode, behind if "kill" in name else 0) for _ in range(place.size(11, 2, 3))]
            for name, (mode, _) in processes.items()
        }
    alone.add_all(taken)
    for name, (_, most) in processes.items():
        alone.bar(f"{name}, median s", alone.times[name]["median"], at_most=most)
    alone.notes.append("without the start of the interpreter; NumPy is imported with ringmap")
    table.notes.append("an opening after a reboot verifies the rows of what no sync vouches for: the last row has such")
    return [table, alone]


_OPEN = """
import time
began = time.perf_counter()
import sys
from ringmap import ReplayBuffer
buffer = ReplayBuffer.open(sys.argv[1], sys.argv[2])
count = buffer.num_episodes
print(time.perf_counter() - began)
"""

_KILLED = """
import os, sys
from benchmarks.harness.data import fill, states
from ringmap import ReplayBuffer
buffer = ReplayBuffer.open(sys.argv[1], "r+", sync_every_s=0)
fill(buffer, states(int(sys.argv[3])), int(sys.argv[2]))
os.kill(os.getpid(), 9)
"""


def _in_a_process(path: Path, mode: str, behind: int) -> float:
    """Return the seconds of an opening in a new process; with `behind` after a writer of so many episodes was
    killed."""
    if behind:
        subprocess.run([sys.executable, "-c", _KILLED, str(path), str(behind), str(STEPS)], check=False)
    told = subprocess.run(
        [sys.executable, "-c", _OPEN, str(path), mode],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(told.stdout)


def _open(path: Path, mode: str, stored: int) -> float:
    start = perf_counter()
    buffer = ReplayBuffer.open(path, mode, disk=DISK)
    assert buffer.num_episodes == stored
    taken = perf_counter() - start
    buffer.close()
    return taken


def _killed(path: Path, episodes: Iterator[dict], stored: int, behind: int) -> float:
    buffer = ReplayBuffer.open(path, "r+", sync_every_s=0, disk=DISK)
    fill(buffer, episodes, behind)
    buffer.engine.owned.abandon()  # what a kill does: files and lock are gone, nothing is flushed
    DISK.reboot()
    return _open(path, "r+", stored)


def _forget(path: Path) -> None:
    """Let the page cache forget what is on the disk already."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
