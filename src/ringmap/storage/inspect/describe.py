"""Describe a buffer for people: what its directory says, without opening it.

    manifest -> what is fixed      reader -> what is stored now      lock file -> who writes

Invariants: takes no lock, writes nothing; what is stored is one committed state.
Not here: what is wrong with it (check.py), what its rows mean (buffers/).
"""

from __future__ import annotations

import contextlib
import os
import socket
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.storage.commit.commit import NUMBERS
from ringmap.storage.commit.create import sizes_when_full
from ringmap.storage.commit.group import follows
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import holder_of
from ringmap.storage.disk.paths import Paths, local_path
from ringmap.storage.read.reader import Reader
from ringmap.storage.records.manifest import TRANSITIONS, VERSION, Manifest
from ringmap.storage.records.step_file import read_steps

__all__ = ["ColumnFacts", "Commits", "Facts", "WriterFacts", "commits_of", "facts_of", "nbytes_of", "writer_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_TRIES = 10


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """A column: its name, dtype and per-step shape, how it is stored, and by which codecs."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: str
    codecs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriterFacts:
    """Who has a buffer open for writing.

    `alive`: whether somebody has; None where nothing tells: on another host, or on a system that does not show
    its locks. `pid`, `host`, `since`: who had it open last; None if nobody ever did.
    """

    alive: bool | None
    pid: int | None
    host: str | None
    since: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is fixed, and what is stored.

    `steps_written`: ever, so that `steps_written - steps` are gone: evicted, cleared or dropped; `commits`: ever;
    `nbytes`: what the directory takes on the disk; `nbytes_full`: about what it takes once the ring is full, if
    what comes with the steps (episode data, what is noted of each commit) goes on as it did; None before there are
    columns; `settings`: as of the last flush; `lengths`: steps of each episode; `pending`: rows of an open group, which
    come with its commit, and are not among `steps`; `kind`: what the rows are; `capacity`: how many of the newest
    count.
    """

    version: int
    uuid: str
    max_steps: int
    spare: int
    settings: dict[str, Any]
    columns: tuple[ColumnFacts, ...]
    lengths: Array
    steps: int
    steps_written: int
    commits: int
    nbytes: int
    nbytes_full: int | None
    writer: WriterFacts
    pending: int = 0
    kind: str = "episodes"
    capacity: int = 0


def facts_of(path: str | os.PathLike[str], reader: Reader | None = None) -> Facts:
    """Return what the directory at `path` says of the buffer in it.

    Args:
        path: the directory.
        reader: an open one, which stays open: it says what it knows by now.

    Raises:
        NotFoundError, UnknownFormatError: there is none.
        CorruptError, NewerVersionError, EnvironmentFault: it can't be read.

    Cost: O(episodes), as opening a reader, unless one is given; rows are not read.

    Example:
        >>> import numpy as np, ringmap
        >>> buf = ringmap.ReplayBuffer(max_steps=50, path="seen")
        >>> for number in range(4):
        ...     buf.write_episode({"obs": np.zeros((20, 3), np.float32)})
        >>> facts = facts_of("seen")
        >>> facts.steps, facts.steps_written, facts.columns[0].shape, facts.writer.alive
        (40, 80, (3,), True)
        >>> buf.close()
        >>> facts_of("seen").writer.alive
        False
    """
    disk, folder = Disk(), local_path(path)
    with closing(Reader(disk, folder)) if reader is None else nullcontext(reader) as opened:
        manifest = opened.manifest
        with thread.searching, opened.lock:
            lengths = np.array(opened.live.whole_lengths, np.int64)
            head, commits = opened.head, opened.seq
        pending = _pending_in(opened)
    specs = () if manifest.schema is None else manifest.schema.columns
    columns = tuple(
        ColumnFacts(spec.name, spec.kind, spec.shape, way.backend, (way.options["codecs"],) if way.options else ())
        for spec, way in zip(specs, manifest.choices, strict=True)
        if (manifest.kind, spec.name) != (TRANSITIONS, NUMBERS)
    )
    steps, nbytes = int(lengths.sum()), nbytes_of(folder)
    full = None if manifest.schema is None else _nbytes_full(folder, manifest, steps, nbytes)
    return Facts(
        VERSION,
        manifest.uuid.hex(),
        manifest.max_steps,
        manifest.spare,
        manifest.settings if manifest.fps is None else {**manifest.settings, "fps": manifest.fps},
        columns,
        lengths,
        steps,
        head,
        commits,
        nbytes,
        full,
        writer_of(folder, disk),
        pending,
        manifest.kind,
        manifest.capacity,
    )


def _pending_in(reader: Reader) -> int:
    """Return how many rows of an open group are stored and not committed yet: its writer commits them soon; if it was
    killed, the next opening for writing does."""
    disk, folder = reader.disk, reader.paths.open
    for _ in range(_TRIES):  # a writer may be going on
        newest = reader.table.read(reader.seq) if reader.seq else None
        groups = []
        for name in disk.names(folder):
            with contextlib.suppress(FileNotFoundError):  # a writer may remove it meanwhile
                steps = read_steps(disk, os.path.join(folder, name), reader.manifest.spare)
                groups += [] if steps.after is None else [steps]
        rows = [steps.count for steps in groups if steps.after == follows(newest)]
        if rows or not groups or not reader.refresh():
            return sum(rows)
    return 0


def _nbytes_full(folder: str, manifest: Manifest, steps: int, nbytes: int) -> int:
    """Return about what the directory takes when the ring is full: never less than now."""
    fixed = sizes_when_full(manifest)
    growing = nbytes_of(Paths(folder).data)
    more = growing * (manifest.max_steps - steps) // steps if steps else 0
    beside = nbytes - sum(nbytes_of(os.path.join(folder, name)) for name in fixed)
    return max(nbytes, sum(fixed.values()) + beside + more)


def writer_of(folder: str, disk: Disk | None = None) -> WriterFacts:
    """Return who has the buffer in a directory open for writing, as the kernel and the lock file say. O(locks)."""
    disk, path = disk or Disk(), Paths(folder).lock
    said = holder_of(path)
    pid, host, since = said.get("pid"), said.get("host"), said.get("since")
    here = host in (None, socket.gethostname())
    alive = disk.system.is_locked(path) if here else None
    if alive is None and (not said or (here and isinstance(pid, int) and not _runs(pid))):
        alive = False
    return WriterFacts(
        alive,
        pid if isinstance(pid, int) else None,
        None if host is None else str(host),
        None if since is None else str(since),
    )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def nbytes_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes that a file, or a folder with all in it, takes on the disk; holes take none.

    What can't be looked at, or is gone meanwhile, counts nothing. Links are not followed.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    else:
        paths = [os.path.realpath(path)]
    total = 0
    for each in paths:
        with contextlib.suppress(OSError):
            total += os.lstat(each).st_blocks * 512
    return total


@dataclass(frozen=True, slots=True)
class Commits:
    """Commits in order, as far as the table has them: by steps written, how many were live after each.

    `written`: steps ever written, of each; `live`: positions from the oldest live step to the newest, of each;
    `evicted`: positions given up by it.
    """

    written: Array
    live: Array
    evicted: Array


def commits_of(path: str | os.PathLike[str]) -> Commits:
    """Return the commits whose records the table still has: those of all live steps, and some before.

    Raises:
        NotFoundError, UnknownFormatError, CorruptError, NewerVersionError, EnvironmentFault: as `facts_of`.

    Cost: reads the table once: 128 bytes for each commit.

    Example:
        >>> import numpy as np, ringmap
        >>> buf = ringmap.ReplayBuffer(max_steps=50, path="seen")
        >>> for number in range(4):
        ...     buf.write_episode({"obs": np.zeros((20, 3), np.float32)})
        >>> commits = commits_of("seen")
        >>> commits.written.tolist(), commits.live.tolist(), commits.evicted.tolist()
        ([20, 40, 60, 80], [20, 40, 40, 40], [0, 0, 20, 20])
    """
    with closing(Reader(Disk(), local_path(path))) as reader:
        records, valid = reader.table.read_range(max(1, reader.seq + 1 - reader.table.slots), reader.seq)
    if not valid.all():  # before a gap lie commits of long ago
        records = records[int(np.flatnonzero(~valid)[-1]) + 1 :]
    heads, tails = records["start"] + records["length"], records["tail"]
    return Commits(heads, heads - tails, np.diff(tails, prepend=tails[:1]))
