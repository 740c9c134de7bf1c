"""Check: what is wrong with a buffer's directory, named file by file.

Works on a directory that nobody has open, on one that a live writer is filling, on one whose
writer was killed, and on one so damaged that it can't be opened. Takes no lock, writes nothing.

Invariants, of which each finding is a breach:

manifest.json   JSON whose checksum holds, of a version that we know; another file knows its uuid; no record that it
                counts is newer than the table
episodes.npy    its size and header; records [first, seq] are whole; an opening takes them; it reaches whatever was
                synced
state.bin       its size; both slots are whole; the newer one shows what the record of that number says; the newest
                record is shown, or the one before it
columns/        each file is there, with its size, header and label; rows of every live episode
                match the checksum in its record
data/           the blob of every live episode, and of the newest record, matches its checksum and
                decodes; the newest small state makes sense
sidecars        if one is there: what its own `Sidecar.faults` says
open/           the frames of an episode being recorded are whole, but for one that was cut at the end
all over        nothing lies there that is not part of a buffer; no file is another one by its bytes

A writer that goes on meanwhile makes findings that are none. It never breaks one thing twice: numbers of records are
never used again. So what is found counts if two more looks find the same.
Rows of an open group are neither a finding nor lost: a commit stores them, or the next opening for writing
(describe.py counts them).
Until a record is stored, `columns/` counts only if a schema was given: else it is made again.
Not here: how each breach is found (scan.py), mending (repair.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from ringmap.errors import NewerVersionError, UnreleasedVersionError
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import FINE, MANIFEST, SIGNS, Paths, local_path
from ringmap.storage.disk.system import clear_error
from ringmap.storage.inspect.scan import Finding, Scan
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.recovery import Progress
from ringmap.storage.records.manifest import links_in
from ringmap.storage.records.table import are_live

__all__ = ["Finding", "check", "check_folder", "check_ring", "check_source", "rings_below"]

_LOOKS = 2
"""So many more looks must find the same."""


def check(path: str | os.PathLike[str], progress: Progress | None = None) -> list[Finding]:
    """Return what is wrong with the buffer at `path`, or with each buffer directly below it; empty when all are sound.

    Args:
        path: its directory, or the directory of a fleet. Files of the latter are named from there; a ring that can't be
            read stands by its name, with the reason.
        progress: called with `(done, of)` episodes, now and then.

    Raises:
        UnknownFormatError: no buffer is there, nor the remains of one.

    Cost: reads every live byte once, in plain reads; 128 bytes of memory per record.

    Processes and threads: reads only, and takes no lock. A writer may be at work: what it evicts
    meanwhile is no finding.

    Example:
        >>> import numpy as np, ringmap
        >>> with ringmap.ReplayBuffer(max_steps=100, path="sound") as buf:
        ...     buf.write_episode({"obs": np.zeros((30, 3), np.float32)})
        >>> ringmap.check("sound")
        []
        >>> with open("sound/columns/000-obs.npy", "r+b") as file:
        ...     _ = file.seek(4096), file.write(b"?")
        >>> for finding in ringmap.check("sound"):
        ...     print(finding)
        columns/000-obs.npy: rows of record 1 (positions 0 to 30) are damaged
    """
    disk, folder = Disk(), local_path(path)
    if not (names := rings_below(disk, folder)):
        return check_folder(disk, folder, progress)
    return [found for name in names for found in check_ring(disk, folder, name, progress)]


def check_ring(disk: Disk, fleet: str, name: str, progress: Progress | None = None) -> list[Finding]:
    """Return what is wrong with one of the buffers below a directory; files are named from there."""
    folder = os.path.join(fleet, name)
    try:
        found = check_folder(disk, folder, progress)
    except OSError as error:  # the others are to be checked, too
        return [Finding(name, str(clear_error(error, "check", folder)))]
    return [replace(finding, file=f"{name}/{finding.file}") for finding in found]


def rings_below(disk: Disk, folder: str) -> list[str]:
    """Return the names of the buffers directly below a directory that is none itself; [] if there are none.

    One that can't be looked at may be a buffer.
    """
    if not disk.is_folder(folder) or _has_signs(disk, folder):
        return []
    found = []
    for name in sorted(set(disk.names(folder)) - FINE):
        try:
            is_there = _has_signs(disk, os.path.join(folder, name))
        except OSError:
            is_there = True
        if is_there:
            found.append(name)
    return found


def _has_signs(disk: Disk, folder: str) -> bool:
    return any(disk.exists(os.path.join(folder, sign)) for sign in SIGNS)


def check_source(source: Handle, faults: list[str]) -> list[Finding]:
    """Return what is wrong with an open buffer: with its files, and with what is in memory.

    Args:
        source: the buffer, in RAM or in a directory.
        faults: what an index over it found wrong with itself, in words.
    """
    findings = check_folder(source.disk, source.folder)
    known = {finding.seq for finding in findings}
    memory = [*faults, *_memory_faults(source, known)]
    return [*findings, *(Finding("memory", fault) for fault in memory)]


def check_folder(disk: Disk, folder: str, progress: Progress | None = None) -> list[Finding]:
    """Return what is wrong with the buffer in `folder` of a disk."""
    if links := links_in(disk, folder):  # of what lies behind them nothing can be said
        what = "is {}, expected a folder: what leads elsewhere is not followed"
        paths = [os.path.join(folder, name) for name in links]
        return [Finding(n, what.format(disk.kind(p) or "a file")) for n, p in zip(links, paths, strict=True)]
    try:
        found = Scan(disk, folder).findings(progress)
        for _ in range(_LOOKS if found else 0):
            again = Scan(disk, folder).findings(None, {one.seq for one in found if one.seq is not None})
            found = [one for one in found if one in again]
    except (NewerVersionError, UnreleasedVersionError) as error:
        return [Finding(MANIFEST, str(error).removeprefix(f"{Paths(folder).manifest}: "))]
    return found


def _memory_faults(source: Handle, known: set[int | None]) -> Iterator[str]:
    with thread.searching, source.lock:
        live, seq, first, tail, head = source.live, source.seq, source.first, source.tail, source.head
        starts, lengths, steps = live.starts.tolist(), live.lengths.tolist(), live.num_steps
        wrong = [] if live.links is None else live.whole.check()
        pending, committed = source.pending, source.committed_head
    if steps != sum(lengths):
        yield f"{steps} steps are counted, but the episodes have {sum(lengths)}"
    if min(lengths, default=1) <= 0 or any(i + n > j for i, n, j in zip(starts, lengths, starts[1:], strict=False)):
        yield "episodes are empty, out of order or overlap"
    yield from wrong
    if head - tail > source.manifest.max_steps + (0 if pending is None else pending.count):
        yield f"{head - tail} steps are live, expected at most max_steps={source.manifest.max_steps}"
    if not seq:
        return
    records, valid = source.table.read_range(first, seq)
    oldest = max(tail, source.newest_tail())
    records = records[valid & are_live(records, oldest)]
    stored = {start: (length, number) for start, length, number in records[["start", "length", "seq"]].tolist()}
    known_here = {i: n for i, n in zip(starts, lengths, strict=True) if oldest <= i < committed}
    for start, (_, number) in stored.items():
        if start not in known_here and number not in known:
            yield f"the episode of record {number} is stored, but not in memory"
    for start, length in known_here.items():
        if start not in stored or stored[start][0] != length:
            yield f"an episode of {length} steps at position {start} is in memory, but not stored"
