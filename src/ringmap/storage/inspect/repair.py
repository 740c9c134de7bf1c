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
Not here: what is wrong (scan.py), the end, which is that of each opening for writing (commit/files.py).
"""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, EnvironmentFault, NewerVersionError, SyncFailedError
from ringmap.storage.columns.rows import Rows
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.directory import refuse_links
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.disk.paths import (
    COLUMNS,
    DATA,
    LOCK,
    MANIFEST,
    MARKS,
    OPEN,
    STATE,
    STREAM,
    TABLE,
    Paths,
    local_path,
)
from ringmap.storage.disk.system import clear_errors
from ringmap.storage.disk.two_slots import SLOT_NBYTES
from ringmap.storage.inspect.scan import ORPHAN, Scan
from ringmap.storage.inspect.snapshot import refuse_target, workplace
from ringmap.storage.read.reader import HELD_S
from ringmap.storage.read.recovery import Progress, RecoveredState, breaks_of, live_records
from ringmap.storage.records.manifest import TRANSITIONS, Manifest
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import (
    DROPPED,
    EPISODE,
    LAST_ORDINAL,
    MANY,
    MOST_U4,
    PART,
    RECORD,
    EpisodeTable,
    Record,
    are_live,
    next_ordinals,
)
from ringmap.storage.ring.links import NONE
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS

__all__ = ["Action", "copy_repaired", "longest_rise", "repair", "repair_folder"]

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK, _PAGE = 1 << 20, 4096
_LOOKS = 5

_NOTICED_S = 5 * HELD_S
"""For so long no writer may follow where `state.bin` was lost: until its readers have looked for it."""

Work = Callable[[], None]

_SHAPES, _FILES, _MANIFEST, _REMOVALS = range(4)
"""When a file is changed. Records are written after the first: before any column has the size of rows that it lacks."""

_ELSEWHERE = "or mend a copy of what is whole elsewhere: ringmap.repair(path, to=...)"


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
    """Mend the buffer at `path`: every whole episode stays, the others are dropped.

    Look at the dry run first, and put back from a backup what you can: a column that is missing
    costs every episode, and once they are dropped they don't come back.

    Args:
        path: its directory.
        dry_run: change nothing, and return what would be done.
        progress: called with `(done, of)` episodes while they are verified.
        to: a directory, new or empty, for a copy that is mended, while `path` is only read: for a disk that is
            mounted read-only, or that is failing. What can't be read counts as damaged.

    Returns:
        What was done, or would be, in order; the same for both. Empty for a sound buffer.

    Raises:
        LockedError: a writer is at it.
        ExistsError, InputError: no copy can go to `to`.
        UnknownFormatError: no buffer is there, nor the remains of one.
        NewerVersionError: it is from a newer ringmap.
        CorruptError: it can't be mended, and why: a file is something else by its bytes (another buffer's, or two
            exchanged their names), or the manifest is lost and the columns do not say enough.
        EnvironmentFault: the disk is full, fails, or can't be written to. Mend it, and repair again; or give `to`.

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
    """Mend the buffer in `folder` of a disk; see `repair`."""
    refuse_links(disk, folder)
    if dry_run:
        for _ in range(_LOOKS):  # what a writer changes meanwhile is no damage
            with closing(Plan(disk, folder, progress)) as plan:
                if not (plan.actions and plan.scan.has_moved()):
                    break
        return plan.actions
    with closing(Scan(disk, folder)) as scan:  # before the lock leaves a file in a directory that is not ours
        _refuse_foreign(scan)
    said, then = "what is not damaged is as it was", "free space or mend the disk, and repair again: it goes on"
    with clear_errors("ringmap.repair", folder, lambda: said, then):
        lock = WriterLock(disk, Paths(folder).lock, folder)
        try:
            lock.acquire()
        except EnvironmentFault as error:
            raise EnvironmentFault(error.errno, f"{error.strerror}; {_ELSEWHERE}") from error
        try:
            with closing(Plan(disk, folder, progress)) as plan:
                plan.refuse_unreadable()
                plan.carry_out()
                return plan.actions
        finally:
            lock.release()


def _refuse_foreign(scan: Scan) -> None:
    for name, what in scan.foreign.items():
        raise CorruptError(
            f"{scan.path(name)}: {what}; put each file back under its own name, or move this one away, and repair "
            "again: nothing was changed"
        )


class Plan:
    """What a repair does: decided in memory, by the code of opening where that says the same.

    Args:
        disk: where the buffer is.
        folder: its directory.
        progress: called while episodes are verified.

    Attributes:
        actions: what is to be done, in words.

    Raises:
        CorruptError: the buffer can't be mended.
    """

    def __init__(self, disk: Disk, folder: str, progress: Progress | None) -> None:
        self.disk, self.paths = disk, Paths(folder)
        self.actions: list[Action] = []
        self._work: tuple[list[Work], ...] = ([], [], [], [])
        self._renews = False  # whether a file that readers may have open is made anew
        self.scan = scan = Scan(disk, folder)
        try:
            _refuse_foreign(scan)
            self._findings = list(scan.findings(progress))
            if self._findings:
                self._decide(self._refuse_hopeless())
        except BaseException:
            scan.close()
            raise

    def close(self) -> None:
        """Release the files."""
        self.scan.close()

    def refuse_unreadable(self) -> None:
        """Raise if the disk did not give all that is stored: what it gives another time may be whole."""
        for what in self.scan.unreadable:
            raise EnvironmentFault(errno.EIO, f"ringmap.repair: {what}; mend the disk, {_ELSEWHERE}")

    def _act(
        self, file: str, what: str, seq: int | None = None, episodes: int = 0, steps: int = 0, work: Work | None = None
    ) -> None:
        self.actions.append(Action(file, what, seq, episodes, steps))
        if work is not None:
            when = _SHAPES if file in (TABLE, DATA, OPEN, COLUMNS) else _MANIFEST if file == MANIFEST else _FILES
            self._work[_REMOVALS if what.startswith("remove") else when].append(work)

    # -- deciding ----------------------------------------------------------------------------------

    def _refuse_hopeless(self) -> Manifest:
        scan, path = self.scan, self.paths.manifest
        _refuse_foreign(scan)  # segments are looked at where a blob is missing
        if isinstance(scan.refused, NewerVersionError):
            raise scan.refused
        if scan.manifest is None:
            raise CorruptError(
                f"{path}: can't be made again, the other files do not say enough; put it back from a backup, or, "
                "if nothing was stored, remove the directory"
            )
        for row in scan.live()[-8:] if scan.has_columns else ():
            count = scan.num_sums(Record.of(row))
            if count is not None and count != len(scan.manifest.files):
                raise CorruptError(
                    f"{path}: can't be made again: {count} columns were stored, and the files of "
                    f"{len(scan.manifest.files)} are there; put it or the missing ones back from a backup"
                )
        return scan.manifest

    def _decide(self, manifest: Manifest) -> None:
        scan, disk = self.scan, self.disk
        self.records, self._manifest = scan.records.copy(), manifest
        dropped = self._drop()
        for name in (DATA, OPEN, *([COLUMNS] if scan.has_columns else [])):
            if not disk.exists(path := scan.path(name)):
                self._act(name, "make the folder", work=partial(disk.make_folder, path))
        for index, file in enumerate(manifest.files if scan.has_columns else ()):
            column = manifest.column(index, disk, self.paths.columns)
            if scan.is_gone(index):
                self._make_anew(file, column.create)
            elif file in scan.faults:
                self._act(file, "give it its size, header and label back", work=column.mend)
        self._decide_beside(dropped)
        lost = self._complete(dropped)
        small = next(scan.small_states())
        files = {finding.file for finding in self._findings}
        if self.actions or small.fault or files & {MANIFEST, STATE}:
            self._decide_manifest(manifest, dropped | lost, small.fault)
            self._act(STATE, "show readers the repaired state")

    def _make_anew(self, name: str, create: Work) -> None:
        """Make a file as at birth, in the place of nothing, a link, a pipe or an empty folder."""

        def work() -> None:
            self.disk.discard(self.scan.path(name))
            create()

        self._act(name, "make it anew, empty", work=work)
        self._renews = True

    def _at(self, seq: int) -> Any:
        return self.records[seq - self.scan.reached.first]

    def _drop(self) -> set[int]:
        """Flag the records of episodes that are not whole; return their numbers."""
        scan, why = self.scan, dict[int, str]()
        for index, file in enumerate(scan.fixed.files if scan.has_columns else ()):
            if scan.is_gone(index):
                why.update(dict.fromkeys(map(int, scan.live()["seq"]), f"{file}: {scan.faults[file][0]}"))
        gaps = {seq for first, last in scan.broken() for seq in range(first, last + 1)}
        for finding in self._findings:
            if finding.seq is not None and finding.seq not in gaps:
                why.setdefault(finding.seq, str(finding))
        dropped = set[int]()
        for seq, fault in sorted(why.items()):
            row = self._at(seq)
            if row["kind"] == EPISODE:
                row["flags"] |= DROPPED
                dropped.add(seq)
                self._act(TABLE, f"drop the episode of record {seq}: {fault}", seq, 1, int(row["length"]))
            else:
                for name in ("blob_segment", "blob_offset", "blob_size", "blob_sum"):
                    row[name] = 0
                self._act(TABLE, f"go back to the small state before record {seq}: {fault}", seq)
        flags = self.records["flags"] & DROPPED
        for row in self.records[scan.valid & (flags != 0) & (flags != DROPPED)]:
            seq = int(row["seq"])
            self._at(seq)["flags"] &= ~np.uint8(DROPPED)
            self._act(TABLE, f"mend the flag of record {seq}: its episode is whole", seq)
        return dropped

    def _decide_beside(self, dropped: set[int]) -> None:
        """Mend sidecars, cut streams, and unlink links that lie in the place of segments."""
        scan, newest = self.scan, self.scan.newest(dropped)
        for sidecar in SIDECARS:
            name = sidecar.names[0]
            if not scan.sidecar_faults(sidecar, newest):
                continue
            if mend := sidecar.mend(scan.home, newest):
                self._act(name, mend[0], work=mend[1])
                self._renews = True
            elif name != MARKS:  # which people wrote
                self._unlink(name, "remove it: nothing in it is whole, or it is of another buffer")
        for finding in self._findings:
            name, folder = finding.file, finding.file.removesuffix(f"/{STREAM}")
            if finding.what == ORPHAN:
                self._unlink(name, "remove it: nothing names it")
            elif name.startswith(f"{DATA}/") and "expected a regular file" in finding.what:
                self._unlink(name, "remove it: nothing of the buffer is in it")
            elif name.startswith(f"{OPEN}/") and folder != name and (stream := scan.stream_of(folder)):
                if stream.fault and stream.heading is None:
                    self._unlink(folder, "remove it: no step in it can be read")
                elif stream.fault:
                    what = f"cut it after its {stream.count} whole steps"
                    self._act(name, what, work=partial(self.disk.extend, scan.path(name), stream.nbytes))

    def _unlink(self, name: str, what: str) -> None:
        if not self.disk.is_folder(self.scan.path(name)) or name.startswith(f"{OPEN}/"):
            self._act(name, what, work=partial(self.disk.discard, self.scan.path(name)))

    def _complete(self, dropped: set[int]) -> set[int]:
        """Put dropped records in the places of lost ones; return the numbers of these."""
        scan, reached, table = self.scan, self.scan.reached, (self.disk, self.paths.table, self.scan.table.slots)
        runs = self._fillers(self._in_order(dropped))
        for number in scan.strays:
            self._act(TABLE, f"wipe the slot of record {number}: it can't be of this ring", number)
        if not self.disk.is_file(self.paths.table):
            self._make_anew(TABLE, partial(EpisodeTable.create, *table))
        elif TABLE in scan.faults:
            self._act(TABLE, "give it its size and header back", work=partial(EpisodeTable.mend, *table))
        for run in runs:
            first, last = run[0], run[-1]
            numbers = f"records {first.seq} to {last.seq}" if len(run) > 1 else f"record {first.seq}"
            steps = f"positions {first.start} to {last.head}"
            what = f"put a dropped episode in the place of {numbers}: what {steps} stored is lost"
            self._act(TABLE, what, first.seq, len(run), last.head - first.start)
            for record in run:
                self._put(record)
        lost = {record.seq for run in runs for record in run}
        if reached.seq and (newest := self._at(reached.seq))["first"] != reached.first:
            newest["first"] = reached.first
            what = f"let record {reached.seq} name the oldest live one: {reached.first}"
            self._act(TABLE, what, reached.seq)
        for name in scan.orphans(lost) if lost else []:
            self._unlink(name, "remove it: no record names it any more")
        return lost

    def _put(self, record: Record) -> None:
        self.records[record.seq - self.scan.reached.first] = (*record, 0)

    def _in_order(self, dropped: set[int]) -> Array:
        """Tell which records stay: the valid ones. Where these contradict each other, as only forged ones do, the whole
        episodes stay.

        Their rows prove where they start and end, but not their tails, times and ordinals: those that are out of order
        follow from the newest state and from their neighbours.
        """
        scan, reached, records = self.scan, self.scan.reached, self.records.copy()
        records["flags"] &= ~np.uint8(DROPPED)  # a dropped episode contradicts no other record
        kept = scan.valid.copy()
        if not _breaks(records, kept):
            return kept
        kept &= np.isin(records["seq"], list(set(scan.live()["seq"].tolist()) - dropped))
        at, tails = np.flatnonzero(kept), records["tail"][kept]
        if (np.diff(tails) < 0).any() or (tails > np.minimum(records["start"][kept], reached.tail)).any():
            records["tail"][at], records["first"][at] = reached.tail, reached.first
        records["time"][at] = np.minimum.accumulate(records["time"][at][::-1])[::-1]
        _count_again(records, at)
        while found := _breaks(records, kept):  # of a chain: what does not fit is lost
            kept[[seq - reached.first for seq, _ in found]] = False
        records["flags"] = self.records["flags"]
        if (records[kept] != self.records[kept]).any():
            self._act(TABLE, "let records whose episodes are whole not contradict each other: by the newest state")
        self.records[kept] = records[kept]
        return kept

    def _fillers(self, kept: Array) -> list[list[Record]]:
        """Return runs of dropped records that take the places of those that are lost."""
        records, reached, found = self.records, self.scan.reached, list[list[Record]]()
        for run in np.split(np.arange(len(records)), np.flatnonzero(np.diff(kept)) + 1):
            if not len(run) or kept[run[0]]:
                continue
            before = Record.of(records[run[0] - 1]) if run[0] else None
            if before is None and reached.first > 1:
                before = self.scan.table.read(reached.first - 1)
            after = Record.of(records[run[-1] + 1]) if run[-1] + 1 < len(records) else None
            stop = after.start if after is not None else reached.head
            at = min(before.head if before is not None else reached.tail, stop)
            # What the next one calls live: with the tail of the one before, more than max_steps might be.
            tail, first = (reached.tail, reached.first) if after is None else (after.tail, after.first)
            numbers = [reached.first + int(i) for i in run]
            begun = len(numbers)
            if self.scan.fixed.kind == TRANSITIONS:  # each row may have begun an episode
                begun += stop - (0 if before is None else before.head)
            ordinal, moment = _counted_between(before, after, numbers, begun)
            made = list[Record]()
            for number in numbers:  # the first has all steps, unless they are more than a record can say
                length = min(stop - at, MOST_U4)
                made.append(Record(number, at, tail, first, length=length, ordinal=ordinal, time=moment, flags=DROPPED))
                at = Position(at + length)
            found.append(made)
        return found

    def _decide_manifest(self, manifest: Manifest, lost: set[int], fault: str) -> None:
        """Write the manifest again if it is wrong, or to have an older small state if the newest one has a `fault`."""
        scan, reached, said = self.scan, self.scan.reached, manifest.table
        stale = said.get("seq") == reached.seq and said.get("first") != reached.first
        stale |= said.get("seq", 0) > reached.seq
        if not (lost or stale or fault or any(finding.file == MANIFEST for finding in self._findings)):
            return
        count = int(are_live(self.records, reached.tail).sum())
        counts = {"first": reached.first, "tail": reached.tail, "head": reached.head, "seq": reached.seq}
        carried = dict(scan.carried)
        if fault:
            older = next(small for small in scan.small_states() if not small.fault)
            carried = {"seq": reached.seq, "state": older.state}
            self._act(MANIFEST, f"go back to the small state of record {older.seq}: {fault}")
        manifest = replace(manifest, table={"count": count, **counts}, carried=carried)
        what = f"write it again: {count} episodes"
        if scan.is_made_again:
            given = int(next_ordinals(self.records[-1:])[0]) if len(self.records) else 0
            if given < LAST_ORDINAL // 2:  # more than any number of power cuts can have left out
                manifest = replace(manifest, ordinal=given + (1 << 32))
            what = f"make it again from the other files: {count} episodes; settings (history_len ...) are lost"
        self._manifest = manifest
        self._act(MANIFEST, what, work=self._write_manifest)

    # -- writing -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Write what differs, in place, in the order of every opening: `state.bin` last, in a new era."""
        if not self.actions:
            return
        self._renews |= not self.disk.is_file(self.paths.state)
        self._stop_readers()
        for when, works in enumerate(self._work):
            for work in works:
                work()
            if when == _SHAPES:
                self._write_records(self._manifest)
            elif when == _FILES:
                for folder in filter(self.disk.is_folder, (self.paths.columns, self.paths.data, self.paths.open)):
                    self.disk.sync_folder(folder)
        self._show(self._manifest)

    def _write_manifest(self) -> None:
        if not self.disk.is_file(self.paths.manifest):
            self.disk.discard(self.paths.manifest)  # a link, a pipe, an empty folder
        self.disk.replace_file(self.paths.manifest, self._manifest.encode())

    def _stop_readers(self) -> None:
        """Invalidate the older slot of `state.bin`: an open reader stops, and a writer's opening takes the other."""
        if self.disk.is_file(self.paths.state) and self.scan.shown is not None:
            with closing(self.disk.open(self.paths.state, write=True)) as file:
                at = (self.scan.shown.generation + 1) % 2 * SLOT_NBYTES
                if at < file.size():
                    file.write(bytes(min(StateFile.form.size + 8, file.size() - at)), at)

    def _write_records(self, manifest: Manifest) -> None:
        """Write the records that differ, and wipe those that can't be of this ring; durably, before any file is given
        the size of rows that it lacks."""
        scan = self.scan
        path = self.paths.table
        with closing(EpisodeTable.open(self.disk, path, manifest.table_slots, manifest.uuid, True, False)) as table:
            before, after = (r.view("<u8").reshape(len(r), RECORD.itemsize // 8) for r in (scan.records, self.records))
            for row in self.records[~scan.valid | (before != after).any(axis=1)]:
                table.write(Record.of(row))
            for number in scan.strays:
                table.zero(number % table.slots)
            table.sync()

    def _show(self, manifest: Manifest) -> None:
        """Do what ends every opening for writing: sync, then show the state, of an era that no reader has seen. The
        boot id is left out: the next writer makes durable what no sync vouches for."""
        disk, scan, path = self.disk, self.scan, self.paths.state
        if self._renews:
            disk.discard(path)
            disk.create(path, StateFile.nbytes).close()
        elif StateFile.faults(disk, path):
            disk.extend(path, StateFile.nbytes)
        known, reached = [state for state in scan.states if state is not None], scan.reached
        rows: Rows | None = None
        files = CommitFiles(disk, self.paths, manifest, power=False, mapped=False)
        try:
            state = reached.seq, reached.tail, reached.head
            mark = min(reached.seq, max((state.mark for state in known), default=0))
            found = RecoveredState(
                reached.seq,
                reached.first,
                reached.tail,
                reached.head,
                mark,
                # Without a valid state nothing tells the last era; the clock is ahead of any count of openings.
                max((state.era for state in known), default=time.time_ns()),
                max((state.generation for state in known), default=1),
                scan.clean,
                live_records(files.table, reached.first, state, manifest.max_steps, self.paths.table),
                self.records[:0] if scan.clean else self.records[self.records["seq"] > mark],
            )
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


def _breaks(records: Array, kept: Array) -> list[tuple[int, str]]:
    """Return where records that stay, and follow each other, contradict each other."""
    runs = np.split(np.arange(len(records)), np.flatnonzero(np.diff(kept)) + 1)
    return [one for run in runs if len(run) and kept[run[0]] for one in breaks_of(records[run])]


def _count_again(records: Array, at: Array) -> None:
    """Give records whose ordinal is out of order one that lies between their neighbours', and those of no chain no
    place in one."""
    nexts, ordinal = next_ordinals(records), np.int64(0)
    counted = set(longest_rise(at.tolist(), nexts))
    for i in at.tolist():
        row = records[i]
        if not row["part"] & PART:
            row["chain"], row["step"], row["previous"] = NONE, 0, NONE
            behind = int(row["behind"]) if row["part"] & MANY and row["behind"] <= row["length"] else 1
            if i not in counted or row["behind"] != behind:
                row["ordinal"], row["behind"] = ordinal, behind
            nexts[i] = row["ordinal"] + behind
        ordinal = nexts[i]


def _counted_between(before: Record | None, after: Record | None, numbers: list[int], begun: int) -> tuple[int, int]:
    """Return ordinal and time of the dropped records that replace those of these numbers.

    An ordinal that one of them may have given must not be given again. `begun`: how many they gave at most.
    """
    moment = 0 if before is None else before.time
    if after is not None:
        begins = after.kind == EPISODE and after.chain in (NONE, after.start)
        begins &= after.behind == 1 or bool(after.part & MANY)
        return after.ordinal if begins else after.next_ordinal, moment
    if before is not None:
        return before.next_ordinal + begun, moment
    return max(numbers[-1], begun), moment


def longest_rise(at: list[int], values: Array) -> list[int]:
    """Return the longest part of the indices `at`, in order, whose values never fall. O(n log n).

    Example:
        >>> longest_rise([0, 1, 2, 4], np.array([3, 9, 4, 0, 4]))
        [0, 2, 4]
    """
    lows: list[int] = []  # of all parts of each length, the lowest last value
    ends: list[tuple[int, Any]] = []  # of the same part: its last index, and the part before it
    for i in at:
        n = bisect_right(lows, int(values[i]))
        lows[n : n + 1] = [int(values[i])]
        ends[n : n + 1] = [(i, ends[n - 1] if n else None)]
    part, found = ends[-1] if ends else None, list[int]()
    while part is not None:
        found.append(part[0])
        part = part[1]
    return found[::-1]


# -- to another place ------------------------------------------------------------------------------


def copy_repaired(disk: Disk, folder: str, to: str, dry_run: bool, progress: Progress | None = None) -> list[Action]:
    """Mend a copy of the buffer in `folder`, which is only read; see `repair`."""
    where = "ringmap.repair"
    refuse_links(disk, folder)
    refuse_target(folder, disk, os.path.realpath(to), where)
    first = [Action(".", f"copy what can be read to {to}")]
    with closing(Plan(disk, folder, progress)) as plan:
        planned = plan.actions
    if dry_run:
        return first + planned
    with workplace(folder, disk, to, where) as beside:
        _copy_files(disk, folder, beside, shares=not plan.scan.unreadable)
        with closing(Plan(disk, beside, progress)) as plan:
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
            new, at, size = disk.create(target, old.size()), 0, _BLOCK
            while (at := max(at, old.next_data(at))) < old.size():
                try:
                    data = old.read(size, at)
                except OSError:
                    at, size = (at, _PAGE) if size > _PAGE else (at + _PAGE, _PAGE)
                    continue
                if not data:  # it was cut meanwhile
                    break
                new.write(data, at)
                at, size = at + len(data), _BLOCK
        with closing(new):
            new.sync()
