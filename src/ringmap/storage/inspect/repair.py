"""Repair: a lenient opening for writing. What is whole is kept, the rest is dropped and named.

    findings -> lost records become dropped ones, bad episodes are flagged     decided in memory
             -> table, records, columns, manifest, state.bin                   written in place, what differs

       7        8    9       10              7        8     9      10
    [ep 0..20] [??] [??] [ep 35..50]  ->  [ep 0..20][20..35][35..35][ep 35..50]
                                                    dropped  dropped

Positions never move, and no file is moved, linked or renamed over another. A file that is something else by its bytes
is named, and nothing is changed.

Invariants: the writer's lock is held while anything is changed; deciding changes nothing, and a dry run and the real
one list the same; episodes are only ever dropped, and before what they lack is given back its size: a repair that is
killed leaves what opening refuses as before, or serves as before without the dropped ones, and the next repair
finishes. Open readers are stopped first, by an invalid slot in `state.bin`; where a file that they may have open was
made anew, they stay so: `state.bin` is made anew, too.
Not here: what is wrong (check.py), the end, which is that of each opening for writing (commit/files.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from ringmap.errors import CorruptError, EnvironmentFault, SyncFailedError
from ringmap.storage.columns.rows import Rows
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.disk.checksums import SLOT_NBYTES
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.disk.paths import (
    COLUMNS,
    DATA,
    LOCK,
    MANIFEST,
    MARKS,
    OPEN,
    STATE,
    STEPS,
    TABLE,
    Paths,
    local_path,
)
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.inspect.check import Scan
from ringmap.storage.inspect.snapshot import refuse_target, workplace
from ringmap.storage.read.reader import HELD_S
from ringmap.storage.read.recovery import Progress, SmallState, breaks_of, find, refuse_impossible
from ringmap.storage.records.blobs import decode_blob
from ringmap.storage.records.manifest import Manifest, refuse_links
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import (
    DROPPED,
    EPISODE,
    LAST_ORDINAL,
    MOST_U4,
    EpisodeTable,
    Record,
    are_live,
    next_ordinals,
)
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS

__all__ = ["Action", "copy_repaired", "repair", "repair_folder"]

_BLOCK, _PAGE = 1 << 20, 4096
_TRIES = 5

_NOTICED_S = 5 * HELD_S
"""For so long no writer may follow where `state.bin` was lost: until its readers have seen that it is gone."""

Work = Callable[[], None]

_ELSEWHERE = "or repair a copy of what is whole elsewhere: ringmap.repair(path, to=...)"


@dataclass(frozen=True, slots=True)
class Action:
    """Something that repair does, or would do.

    `file`: the file that it changes, relative to the buffer's directory; `what`: what it does to it;
    `seq`: the record that it concerns, if it concerns one; `episodes`, `steps`: how much is lost by it,
    where a lost record counts as an episode, as nothing tells what it was.
    """

    file: str
    what: str
    seq: int | None = None
    episodes: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def repair(
    path: str | os.PathLike[str],
    dry_run: bool = True,
    progress: Progress | None = None,
    to: str | os.PathLike[str] | None = None,
) -> list[Action]:
    """Repair the buffer at `path`: every whole episode stays, the others are dropped.

    Look at the dry run first, and put back from a backup what you can: a column that is missing
    costs every episode, and once they are dropped they don't come back.

    Args:
        path: its directory.
        dry_run: change nothing, and return what would be done.
        progress: called with `(done, of)` episodes while they are verified.
        to: a directory, new or empty, for a copy that is repaired, while `path` is only read: for a disk that is
            mounted read-only, or that is failing. What can't be read counts as damaged.

    Returns:
        What was done, or would be, in order; the same for both. Empty for a sound buffer.

    Raises:
        LockedError: a writer is at it.
        ExistsError, InputError: no copy can go to `to`.
        UnknownFormatError: no buffer is there, nor the remains of one.
        NewerVersionError: it is from a newer ringmap.
        CorruptError: it can't be repaired, and why: a file is something else by its bytes (another buffer's, or two
            exchanged their names), or the manifest is lost and the columns do not say enough.
        EnvironmentFault: the disk is full, fails, or can't be written to. Fix it, and repair again; or give `to`.

    Cost: reads every live byte once. Writes in place what differs; a column that is missing is made anew, sparse. With
        `to`, copies all that is stored, by sharing its blocks where the file system can.

    Processes and threads: takes the writer's lock. Open readers go on with what is left, or stop with an error and are
        to be opened again; none is served a row that is not its episode's.

    Example:
        >>> import numpy as np, os, ringmap
        >>> with ringmap.ReplayBuffer(max_steps=100, path="hurt") as buf:
        ...     for number in range(3):
        ...         buf.write_episode({"obs": np.full(20, number)})
        >>> buf.close()
        >>> with open("hurt/columns/000-obs.npy", "r+b") as file:
        ...     _ = file.seek(4096 + 25 * 8), file.write(b"?")
        >>> for action in ringmap.repair("hurt", dry_run=False):
        ...     print(action)
        episodes.npy: drop the episode of record 2: columns/000-obs.npy: rows of record 2 (positions 20 to 40) are
        damaged manifest.json: write it again: 2 episodes
        state.bin: show readers the repaired state
        >>> [int(episode["obs"][0]) for episode in ringmap.ReplayBuffer.open("hurt").episodes()]
        [0, 2]
    """
    folder = local_path(path)
    if to is not None:
        return copy_repaired(Disk(), folder, local_path(to), dry_run, progress)
    return repair_folder(Disk(), folder, dry_run, progress)


def repair_folder(disk: Disk, folder: str, dry_run: bool, progress: Progress | None = None) -> list[Action]:
    """Repair the buffer in `folder` of a disk; see `repair`."""
    refuse_links(disk, folder)
    if dry_run:
        planned = list[Action]()
        for _ in range(_TRIES):  # what a writer changes meanwhile is no damage
            before, planned = planned, Plan(disk, folder, progress).actions
            if planned in ([], before) or disk.system.is_locked(Paths(folder).lock) is False:
                break
        return planned
    refuse_foreign(Scan(disk, folder))  # before the lock leaves a file in a directory that is not ours
    said, then = "what is not damaged is as it was", "free space or fix the disk, and repair again: it goes on"
    with clear_errors("ringmap.repair", folder, lambda: said, then):
        lock = WriterLock(disk, Paths(folder).lock, folder)
        try:
            lock.acquire()
        except EnvironmentFault as error:
            raise EnvironmentFault(error.errno, f"{error.strerror}; {_ELSEWHERE}") from error
        try:
            plan = Plan(disk, folder, progress)
            for what in plan.scan.unreadable:  # what the disk gives another time may be whole
                raise EnvironmentFault(errno.EIO, f"ringmap.repair: {what}; fix the disk, {_ELSEWHERE}")
            plan.carry_out()
            return plan.actions
        finally:
            lock.release()


def refuse_foreign(scan: Scan) -> None:
    """Raise CorruptError if a file is something else by its bytes."""
    for name, what in scan.foreign.items():
        raise CorruptError(
            f"{scan.path(name)}: {what}; put each file back under its own name, or move this one away, and repair "
            "again: nothing was changed"
        )


class Plan:
    """What a repair does: decided in memory, then held against what an opening accepts. `actions`: in words.

    Raises:
        CorruptError: the buffer can't be repaired.
    """

    def __init__(self, disk: Disk, folder: str, progress: Progress | None) -> None:
        self.disk, self.paths = disk, Paths(folder)
        self.actions: list[Action] = []
        self._shapes: list[Work] = []  # done before the records are written
        self._files: list[Work] = []
        self._changed = set[int]()  # the numbers of the records that are written
        self._renews = False  # whether a file that readers may have open is made anew
        self.scan = scan = Scan(disk, folder)
        refuse_foreign(scan)
        self._findings = scan.findings(progress)
        if self._findings:
            self._decide()

    def _act(
        self, file: str, what: str, seq: int | None = None, episodes: int = 0, steps: int = 0, work: Work | None = None
    ) -> None:
        self.actions.append(Action(file, what, seq, episodes, steps))
        if work is not None:
            (self._shapes if file in (TABLE, DATA, OPEN, COLUMNS) else self._files).append(work)

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self) -> None:
        scan, disk = self.scan, self.disk
        self._manifest = manifest = self._fixed_manifest()
        self.records = scan.records.copy()
        dropped = self._drop()
        for name in (DATA, OPEN, *([COLUMNS] if scan.has_columns else [])):
            if not disk.exists(path := scan.path(name)):
                self._act(name, "make the folder", work=partial(disk.make_folder, path))
        for index, file in enumerate(manifest.files if scan.has_columns else ()):
            column = manifest.column(index, disk, self.paths.columns)
            if scan.is_gone(index):
                self._make_anew(file, column.create)
            elif file in scan.faults:
                self._act(file, "give it its size, header and label back", work=column.repair)
        self._decide_beside(dropped)
        self._decide_table(manifest)
        faults = {finding.file for finding in self._findings}
        if self.actions or {MANIFEST, STATE} & faults or next(scan.small_states()).fault:
            self._decide_manifest(manifest, MANIFEST in faults)
            self._act(STATE, "show readers the repaired state")

    def _fixed_manifest(self) -> Manifest:
        """Return the manifest, or raise if nothing tells what it was."""
        scan, path = self.scan, self.paths.manifest
        refuse_foreign(scan)  # segments are looked at where a blob is missing
        if scan.manifest is None:
            raise CorruptError(
                f"{path}: can't be made again, the other files do not say enough; put it back from a backup, or, "
                "if nothing was stored, remove the directory"
            )
        count = len(scan.manifest.files)
        blobs = (scan.blob(Record.of(row)) for row in scan.live()[::-1] if scan.is_made_again)
        if (blob := next(filter(None, blobs), None)) is not None:  # of the newest that is whole
            with contextlib.suppress(ValueError):
                count = len(decode_blob(blob)[0])
        if count != len(scan.manifest.files):
            raise CorruptError(
                f"{path}: can't be made again: {count} columns were stored, and the files of "
                f"{len(scan.manifest.files)} are there; put it or the missing ones back from a backup"
            )
        return scan.manifest

    def _make_anew(self, name: str, create: Work) -> None:
        """Make a file as at birth, in the place of nothing, a link, a pipe or an empty folder."""

        def work() -> None:
            self.disk.discard(self.scan.path(name))
            create()

        self._act(name, "make it anew, empty", work=work)
        self._renews = True

    def _put(self, record: Record) -> None:
        self.records[record.seq - self.scan.reached.first] = (*record, 0)
        self._changed.add(record.seq)

    def _drop(self) -> set[int]:
        """Flag the records of episodes that are not whole; return their numbers."""
        scan, why = self.scan, dict[int, str]()
        first, dropped = scan.reached.first, set[int]()
        for index, file in enumerate(scan.fixed.files if scan.has_columns else ()):
            if scan.is_gone(index):
                why.update(dict.fromkeys(map(int, scan.live()["seq"]), f"{file}: {scan.faults[file][0]}"))
        for finding in self._findings:
            if finding.seq is not None and scan.valid[finding.seq - first]:
                why.setdefault(finding.seq, str(finding))
        for seq, fault in sorted(why.items()):
            record = Record.of(self.records[seq - first])
            if record.kind == EPISODE:
                self._put(record._replace(flags=record.flags | DROPPED))
                dropped.add(seq)
                self._act(TABLE, f"drop the episode of record {seq}: {fault}", seq, 1, record.length)
            else:
                self._put(record._replace(blob_segment=0, blob_offset=0, blob_size=0, blob_sum=0))
                self._act(TABLE, f"go back to the small state before record {seq}: {fault}", seq)
        for seq in set(scan.flagged) - dropped:
            self._changed.add(seq)
            self._act(TABLE, f"clear the damaged flag of record {seq}: its episode is whole", seq)
        return dropped

    def _decide_beside(self, dropped: set[int]) -> None:
        """Repair sidecars, cut files of steps, and unlink links that lie in the place of segments."""
        scan, newest = self.scan, self.scan.newest(dropped)
        for sidecar in SIDECARS:
            name = sidecar.names[0]
            if not scan.sidecar_faults(sidecar, newest):
                continue
            if way := sidecar.repair(scan.home, newest):
                self._act(name, way[0], work=way[1])
                self._renews = True
            elif name != MARKS:  # which people wrote
                self._unlink(name, "remove it: nothing in it is whole, or it is of another buffer")
        for finding in self._findings:
            name, folder = finding.file, finding.file.removesuffix(f"/{STEPS}")
            if name.startswith(f"{DATA}/") and "expected a regular file" in finding.what:
                self._unlink(name, "remove it: nothing of the buffer is in it")
            elif name.startswith(f"{OPEN}/") and folder != name:
                steps = scan.steps_in(folder)
                if steps.heading is None:
                    self._unlink(folder, "remove it: no step in it can be read")
                else:
                    what = f"cut it after its {steps.count} whole steps"
                    self._act(name, what, work=partial(self.disk.extend, scan.path(name), steps.nbytes))

    def _unlink(self, name: str, what: str) -> None:
        if not self.disk.is_folder(self.scan.path(name)) or name.startswith(f"{OPEN}/"):
            self._act(name, what, work=partial(self.disk.discard, self.scan.path(name)))

    def _decide_table(self, manifest: Manifest) -> None:
        """Put dropped records in the places of lost ones. What comes of it, an opening must accept: records that
        contradict each other, though their checksums hold, were forged, and none of them is believed."""
        scan, path, slots = self.scan, self.paths.table, manifest.table_slots
        if not self.disk.is_file(path):
            self._make_anew(TABLE, partial(EpisodeTable.create, self.disk, path, slots))
        elif TABLE in scan.faults:
            again = partial(EpisodeTable.create, self.disk, path, slots)
            self._act(TABLE, "give it its size and header back", work=again)
        for first, last in scan.lost():
            self._fill(first, last)
        state = scan.reached.seq, scan.reached.tail, scan.reached.head
        try:
            refuse_impossible(self.records, state, manifest.max_steps, slots, path)
            for number, what in breaks_of(self.records):  # of chains, too
                raise CorruptError(f"{path}: record {number} {what}")
        except CorruptError as error:
            raise CorruptError(
                f"{str(error).partition(';')[0]}, though checksums hold: no accident does this, and nothing was "
                "changed; put the file back from a backup"
            ) from None

    def _fill(self, first: int, last: int) -> None:
        """Put dropped records in the places of records `[first, last]`: the first has all steps between its neighbours,
        unless they are more than a record can say."""
        reached, before = self.scan.reached, None
        if first > reached.first:
            before = Record.of(self.records[first - 1 - reached.first])
        elif first > 1:
            before = self.scan.table.read(first - 1)
        # What the next one calls live: with the tail of the one before, more than max_steps might be.
        after = Record.of(self.records[last + 1 - reached.first]) if last < reached.seq else None
        tail, first_live = (reached.tail, reached.first) if after is None else (after.tail, after.first)
        stop = reached.head if after is None else after.start
        at = min(reached.tail if before is None else before.head, stop)
        ordinal, moment = (0, 0) if before is None else (before.next_ordinal, before.time)
        if after is None:  # no ordinal that one of them may have given is given again: each has a step
            ordinal += reached.head if before is None else stop - at
        what = f"what positions {at} to {stop} stored is lost"
        numbers = f"records {first} to {last}" if first < last else f"record {first}"
        count = last + 1 - first
        self._act(TABLE, f"put a dropped episode in the place of {numbers}: {what}", first, count, stop - at)
        for seq in range(first, last + 1):
            length = min(stop - at, MOST_U4)
            self._put(Record(seq, at, tail, first_live, length=length, ordinal=ordinal, time=moment, flags=DROPPED))
            at = Position(at + length)

    def _decide_manifest(self, manifest: Manifest, is_wrong: bool) -> None:
        """Write the manifest again if it is wrong, if episodes are lost, or to have an older small state."""
        scan, reached = self.scan, self.scan.reached
        fault = next(scan.small_states()).fault
        small = next((small for small in scan.small_states() if not small.fault), SmallState({}, 0))
        if not (is_wrong or self._changed or fault):
            return
        count = int(are_live(self.records, reached.tail).sum())
        if fault:
            self._act(MANIFEST, f"go back to the small state of record {small.seq}: {fault}")
        counts = {"count": count, "first": reached.first, "tail": reached.tail, "head": reached.head}
        carried = {"seq": reached.seq, "state": small.state}
        manifest = replace(manifest, table={**counts, "seq": reached.seq}, carried=carried)
        what = f"write it again: {count} episodes"
        if scan.is_made_again:
            given = int(next_ordinals(self.records[-1:])[0]) if len(self.records) else 0
            if given < LAST_ORDINAL // 2:  # more than any number of power cuts can have left out
                manifest = replace(manifest, ordinal=given + (1 << 32))
            what = f"make it again from the other files: {count} episodes; settings (history_len ...) are lost"
        self._manifest = manifest
        self._act(MANIFEST, what)

    # -- writing -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Write what differs, in place, in the order of every opening: `state.bin` last, in a new era."""
        if not self.actions:
            return
        self._renews |= not self.disk.is_file(self.paths.state)
        self._stop_readers()
        for work in self._shapes:
            work()
        self._write_records()
        for work in self._files:
            work()
        for folder in filter(self.disk.is_folder, (self.paths.columns, self.paths.data, self.paths.open)):
            self.disk.sync_folder(folder)
        if any(action.file == MANIFEST for action in self.actions):
            if not self.disk.is_file(self.paths.manifest):
                self.disk.discard(self.paths.manifest)  # a link, a pipe, an empty folder
            self.disk.replace_file(self.paths.manifest, self._manifest.encode())
        self._show(self._manifest)

    def _stop_readers(self) -> None:
        """Invalidate the older slot of `state.bin`: an open reader stops, and a writer's opening takes the other."""
        if self.disk.is_file(self.paths.state) and self.scan.shown is not None:
            with closing(self.disk.open(self.paths.state, write=True)) as file:
                at = (self.scan.shown.generation + 1) % 2 * SLOT_NBYTES
                if at < file.size():
                    file.write(bytes(min(StateFile.form.size + 8, file.size() - at)), at)

    def _write_records(self) -> None:
        """Write the records that differ, durably, before any file is given the size of rows that it lacks."""
        fixed = self._manifest.table_slots, self._manifest.uuid
        with closing(EpisodeTable.open(self.disk, self.paths.table, *fixed, True, False)) as table:
            for seq in sorted(self._changed):
                table.write(Record.of(self.records[seq - self.scan.reached.first]))
            table.sync()

    def _show(self, manifest: Manifest) -> None:
        """Do what ends every opening for writing: sync, then show the state, of an era that no reader has seen. The
        boot id is left out: the next writer makes durable what no sync covers."""
        disk, scan, path = self.disk, self.scan, self.paths.state
        if self._renews:
            disk.discard(path)
            disk.create(path, StateFile.nbytes).close()
        elif StateFile.faults(disk, path):
            disk.extend(path, StateFile.nbytes)
        known = [state for state in scan.states if state is not None]
        rows: Rows | None = None
        files = CommitFiles(disk, self.paths, manifest, power=False, mapped=False)
        try:
            found = find(files.table, None, None, manifest, self.paths.table)
            # Without a valid state nothing tells the last era; the clock is ahead of any count of openings.
            found.era = max((state.era for state in known), default=time.time_ns())
            found.generation = max((state.generation for state in known), default=1)
            found.synced = min(found.seq, max((state.synced for state in known), default=0))
            found.unsynced = found.unsynced[(found.unsynced["seq"] > found.synced) & (not scan.clean)]
            if scan.has_columns and manifest.schema is not None:
                columns = manifest.columns(disk, self.paths.columns)
                rows = Rows(manifest.schema, columns, manifest.ring).open(write=True, head=0, mapped=False)
            files.restore_carried(found, manifest.carried)
            files.restore(found, rows, {}, trusted=False)
            if self._renews and scan.shown is None and not disk.volatile:  # else its invalid slot has stopped them
                time.sleep(_NOTICED_S)
        except SyncFailedError as error:
            raise OSError(error.errno, os.strerror(error.errno or errno.EIO), self.paths.folder) from error
        finally:
            files.close()
            if rows is not None:
                rows.close()


# -- to another place ------------------------------------------------------------------------------


def copy_repaired(disk: Disk, folder: str, to: str, dry_run: bool, progress: Progress | None = None) -> list[Action]:
    """Repair a copy of the buffer in `folder`, which is only read; see `repair`."""
    where = "ringmap.repair"
    refuse_links(disk, folder)
    refuse_target(folder, disk, os.path.realpath(to), where)
    first = [Action(".", f"copy what can be read to {to}")]
    plan = Plan(disk, folder, progress)
    if dry_run:
        return first + plan.actions
    with workplace(folder, disk, to, where) as beside:
        _copy_files(disk, folder, beside, shares=not plan.scan.unreadable)
        plan = Plan(disk, beside, progress)
        plan.carry_out()
        return first + plan.actions


def _copy_files(disk: Disk, folder: str, target: str, shares: bool) -> None:
    """Copy the regular files of a folder, and of those in it."""
    for name in disk.names(folder):
        source, path = os.path.join(folder, name), os.path.join(target, name)
        if disk.is_folder(source):
            disk.make_folder(path)
            _copy_files(disk, source, path, shares)
        elif disk.is_file(source) and name != LOCK:
            _copy_file(disk, source, path, shares)
    disk.sync_folder(target)


def _copy_file(disk: Disk, source: str, target: str, shares: bool) -> None:
    """Copy a file: its blocks shared where they can be read and the file system can, else its holes as holes. A page
    that can't be read becomes zeros, which no checksum takes for rows."""
    with closing(disk.open(source)) as old:
        new = disk.share(old, target) if shares else None
        if new is None:
            new, at = disk.create(target, old.size()), 0
            while (at := max(at, old.next_data(at))) < old.size():
                new.write(_readable(old, at, _BLOCK), at)
                at += _BLOCK
        with closing(new):
            new.sync()


def _readable(file: File, at: int, size: int) -> bytes:
    """Return some bytes of a file, with zeros in the place of pages that can't be read."""
    try:
        return file.read(size, at)
    except OSError:
        pages = range(at, min(at + size, file.size()), _PAGE) if size > _PAGE else ()
        return b"".join(_readable(file, page, _PAGE).ljust(_PAGE, b"\0") for page in pages)[: file.size() - at]
