"""Salvage: which episodes of a damaged buffer are whole, and the metadata that says so.

    findings -> drops, lost records   -> a new table, in RAM
             -> a new manifest, a new state
             -> what lies elsewhere, what is cut, what nothing names

       7        8    9       10              7        8     9      10
    [ep 0..20] [??] [??] [ep 35..50]  ->  [ep 0..20][20..35][35..35][ep 35..50]
                                                    dropped  dropped

Positions never move: a dropped episode keeps its record, flagged, and a lost record is replaced by a dropped one that
reaches from one neighbour to the next. So rows stay where they are, and columns are only moved or completed.

Invariants: deciding changes nothing; what an opening reads is written beside and read back by the code that opening
uses, before anything is replaced; a file that may be somebody else's is set aside, never overwritten.
Not here: what is wrong (faults.py), how files are replaced (swap.py).
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, DamageError, EnvironmentFault, NewerVersionError
from ringmap.storage.columns.rows import combine
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryFile
from ringmap.storage.inspect.faults import (
    FRESH,
    NO_FILE,
    ORPHAN,
    faults_in,
    home_of,
    orphans_in,
    sidecar_faults,
    stream_of,
)
from ringmap.storage.inspect.identity import decode
from ringmap.storage.inspect.raw_files import Part, words_of
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.inspect.swap import Swap, free_aside
from ringmap.storage.read.recovery import Progress, breaks_of, find
from ringmap.storage.records.kinds import TRANSITIONS
from ringmap.storage.records.manifest import Manifest, read_limit
from ringmap.storage.records.names import (
    COLUMNS,
    DATA,
    MANIFEST,
    OPEN,
    SALVAGE,
    SALVAGED,
    STATE,
    STREAM,
    TABLE,
)
from ringmap.storage.records.state import NO_BOOT, State, StateFile
from ringmap.storage.records.table import (
    DROPPED,
    EPISODE,
    LAST_ORDINAL,
    MANY,
    MOST_U4,
    PART,
    EpisodeTable,
    Record,
    next_ordinals,
)
from ringmap.storage.ring.links import NONE
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS

__all__ = ["Action", "Salvage", "longest_rise"]

Array = np.ndarray[Any, np.dtype[Any]]


_MENDED = ("tail", "first", "time", "ordinal", "behind", "chain", "step", "previous")
"""Fields of a record that its neighbours know."""


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


class Salvage:
    """What is kept of a buffer, and how.

    Args:
        disk: where the buffer is.
        folder: its directory.
        progress: called while episodes are verified.

    Attributes:
        actions: what is to be done, in words.
        swap: what is replaced.

    Raises:
        CorruptError: the buffer can't be mended.
    """

    def __init__(self, disk: Disk, folder: str, progress: Progress | None) -> None:
        self.survey = survey = Scan(disk, folder)
        self.files, self.parts = survey.files, survey.parts
        self.actions: list[Action] = []
        self.swap = Swap(self.files)
        self._data: dict[str, bytes] = {}  # what is written beside
        self._made: dict[str, Callable[[str], None]] = {}
        try:
            self.findings = list(faults_in(survey, progress))
            if self.findings:
                self.manifest = self._refuse_hopeless()
                self.table, self._table_changed = survey.table, False
                self._decide()
            if self.actions:
                self._opened(self._data, self.table)  # raises where an opening would
        finally:
            survey.close()

    def carry_out(self) -> None:
        """Write the new files beside, read them back, and put them in place."""
        if not self.actions:
            return
        try:
            self.swap.begin()
            for name, make in self._made.items():
                make(self._beside(name))
            for name, data in self._data.items():
                with closing(self.files.disk.create(self._beside(name))) as file:
                    file.write(data, 0)
                    file.sync()
            self.verify()
            self.swap.carry_out()
        except BaseException:
            if not self.swap.began:
                self.swap.undo()
            raise

    def _beside(self, name: str) -> str:
        return self.files.path(self.swap.inside(name))

    def verify(self) -> None:
        """Read what was written, and raise EnvironmentFault unless it is what was decided."""
        disk, manifest = self.files.disk, self.manifest
        read = {name: disk.read_file(self._beside(name), read_limit()) for name in self._data}
        try:
            table = self.table
            if TABLE in self._made:
                path = self._beside(TABLE)
                table = EpisodeTable.open(disk, path, table.slots, manifest.uuid, False, mapped=False)
            if self._opened(read, table) == self._opened(self._data, self.table):
                return
            what = f"{self._beside('')}: is not what was written there"
        except DamageError as error:
            what = str(error)
        raise EnvironmentFault(
            errno.EIO,
            f"{what}; the disk does not keep what is written to it, and no file of the buffer was replaced: "
            "mend a copy of what is whole elsewhere, ringmap.repair(path, to=...)",
        )

    def _opened(self, data: dict[str, bytes], table: EpisodeTable) -> list[Any]:
        """Return what an opening takes from a manifest, a state and a table, by its own code."""
        manifest, path = self.manifest, self.files.path(TABLE)
        if MANIFEST in data:
            manifest = Manifest.decode(data[MANIFEST], self.files.path(MANIFEST))
        states = MemoryFile(STATE, 0)
        states.write(data[STATE], 0)
        shown = StateFile(states, manifest.uuid).slots()
        found = find(table, shown[0], None, manifest, path)
        return [
            manifest.encode(),
            shown,
            found.seq,
            found.first,
            found.tail,
            found.head,
            bytes(table.read_range(found.first, found.seq)[0]),
        ]

    def _act(self, file: str, what: str, seq: int | None = None, episodes: int = 0, steps: int = 0) -> None:
        self.actions.append(Action(file, what, seq, episodes, steps))

    def _refuse_hopeless(self) -> Manifest:
        path, manifest = self.files.path(MANIFEST), self.parts.manifest
        if isinstance(self.survey.refused, NewerVersionError):
            raise self.survey.refused
        if manifest is None:
            raise CorruptError(
                f"{path}: can't be made again, the other files do not say enough; put it back from a backup, or, "
                "if nothing was stored, remove the directory"
            )
        for row in self.survey.live()[-8:] if self.parts.columns else ():
            record = Record.of(row)
            sums = self.survey.sums_in(self.survey.blob(record) or b"")
            if len(sums) != len(manifest.files) and combine(sums) == record.rows_sum:
                raise CorruptError(
                    f"{path}: can't be made again: {len(sums)} columns were stored, and the files of "
                    f"{len(manifest.files)} are there; put it or the missing ones back from a backup"
                )
        return manifest

    def _decide(self) -> None:
        dropped = self._drop()
        for name in (DATA, OPEN, *([COLUMNS] if self.parts.columns else [])):
            if not self.files.disk.exists(self.files.path(name)):
                self._act(name, "make the folder")
                self.swap.step("make", name)
        self._put_back()
        for index, part in enumerate(self.parts.columns):
            self._complete_column(index, part)
        self._clean_up(dropped)
        lost = self._complete_table(dropped)
        small = next(self.survey.small_states())
        files = {finding.file for finding in self.findings}
        if self.actions or small.fault or files & {MANIFEST, STATE}:
            self._write_manifest(dropped | lost, small.fault)
            self._write_state()

    # -- episodes ----------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        self.table.write(record)
        self._table_changed = True

    def _drop(self) -> set[int]:
        """Flag the records of episodes that are not whole; return their numbers."""
        survey, why, dropped = self.survey, dict[int, str](), set[int]()
        for part in self.parts.columns:
            if part.at is None:
                lost = f"{part.file}: {part.faults[0]}"
                why.update(dict.fromkeys(map(int, survey.live()["seq"]), lost))
        gaps = {seq for first, last in survey.broken() for seq in range(first, last + 1)}
        for finding in self.findings:
            if finding.seq is not None and finding.seq not in gaps:
                why.setdefault(finding.seq, str(finding))
        misflagged = survey.misflagged()
        for seq, fault in sorted(why.items()):
            self._give_up(seq, fault, dropped)
        for seq in misflagged:
            record = self.table.read(seq)
            if record is not None and seq not in dropped:
                self._write(replace(record, flags=record.flags & ~DROPPED))
                self._act(TABLE, f"mend the flag of record {seq}: its episode is whole", seq)
        return dropped

    def _give_up(self, seq: int, fault: str, dropped: set[int]) -> None:
        """Flag an episode's record, or forget the blob of one that stores none."""
        record = self.table.read(seq)
        if record is None:
            return  # a writer took its place: this is a dry run beside it
        if record.kind == EPISODE:
            self._write(replace(record, flags=record.flags | DROPPED))
            dropped.add(seq)
            self._act(TABLE, f"drop the episode of record {seq}: {fault}", seq, 1, record.length)
        else:
            self._write(record.without_blob())
            self._act(TABLE, f"go back to the small state before record {seq}: {fault}", seq)

    # -- files -------------------------------------------------------------------------------

    def _put_back(self) -> None:
        """Put back what lies under another name, and set aside what lies there instead."""
        parts, files, again = self.parts, self.files, (MANIFEST, TABLE, STATE)
        named = [parts.manifest_part, parts.table, parts.state, *parts.columns]
        wanted: dict[str, str | None] = {part.file: part.at for part in named}
        wanted.update(self.survey.find_segments())
        moves = {file: at for file, at in wanted.items() if at is not None and at != file}
        for file, at in wanted.items():
            path = files.path(file)
            if at == file or file in moves.values():
                continue
            if not files.is_part(file) and not (
                files.disk.is_folder(path) or (file.endswith(".zarr") and files.disk.exists(path))
            ):
                continue  # a link to a file is replaced; one to a folder would be in the way
            if file == MANIFEST and files.is_file(file) and not self._is_foreign(file):
                continue
            self._set_aside(file)
        for file, at in moves.items():
            self._act(file, f"put it back from {at}")
            taken = self.swap.take(at)
            if file not in again:  # those are written anew
                self.swap.step("rename", taken, file)

    def _set_aside(self, name: str) -> None:
        aside = free_aside(self.files, name)
        self._act(name, f"set aside what lies there, as {aside}")
        self.swap.move(name, aside)

    def _is_foreign(self, name: str) -> bool:
        manifest = decode(self.files, name)[0]
        return manifest is not None and manifest.uuid != self.manifest.uuid

    def _complete_column(self, index: int, part: Part) -> None:
        one, disk = self.manifest.column(index), self.files.disk
        if not one.is_known:
            raise CorruptError(f"{self.files.path(part.file)}: {part.faults[0]}: nothing can be mended")
        if part.at is None:
            name = f"column-{index}"
            self._act(part.file, "make it anew, empty")
            self._made[name] = lambda path: one.at(disk, path).create()
            self.swap.step("rename", self.swap.inside(name), part.file)
        elif words_of(one.at(disk, self.files.path(part.at)).faults):
            self._act(part.file, "give it its size, header and label back")
            self.swap.step("column", index)

    def _clean_up(self, dropped: set[int]) -> None:
        """Mend sidecars and streams, and remove what nothing names."""
        newest, home = self.survey.newest(dropped), home_of(self.survey)
        for sidecar in SIDECARS:
            name = sidecar.names[0]
            if sidecar_faults(self.survey, sidecar, newest):
                if mend := sidecar.mend(home, newest):
                    self._act(name, mend[0])
                    self.swap.step("sidecar", name)
                else:
                    self._set_aside(name)
        for finding in self.findings:
            name, folder = finding.file, finding.file.removesuffix(f"/{STREAM}")
            if name in (SALVAGE, SALVAGED):  # which is removed when the next one begins
                self._act(name, "remove it: nothing names it")
            elif finding.what.endswith(NO_FILE):
                self._set_aside(name)
            elif finding.what == ORPHAN or name.endswith(FRESH):
                self._remove(name, "remove it: nothing names it")
            elif name.startswith(f"{OPEN}/") and folder != name:
                stream = stream_of(self.survey, folder)
                if stream is None or not stream.fault:
                    continue
                if stream.heading is None:
                    self._act(name, "remove it: no step in it can be read")
                    self.swap.step("remove", folder)
                else:
                    self._act(name, f"cut it after its {stream.count} whole steps")
                    self.swap.step("resize", name, stream.nbytes)

    def _remove(self, name: str, what: str) -> None:
        self._act(name, what)
        self.swap.step("remove", name)

    # -- table, manifest, state --------------------------------------------------------------

    def _complete_table(self, dropped: set[int]) -> set[int]:
        """Fill the gaps in the table; return the numbers of the records filled in."""
        survey, part, reached = self.survey, self.parts.table, self.survey.reached
        slots, disk = self.manifest.table_slots, self.files.disk
        if self.table.slots != slots:
            raise CorruptError(
                f"{self.files.path(MANIFEST)}: says that the table has {slots} slots, for which there is no memory: it "
                "is damaged; put it back from a backup"
            )
        runs = self._fillers(dropped)
        for number in survey.strays:
            self.table.zero(number % slots)
            self._table_changed = True
            self._act(TABLE, f"wipe the slot of record {number}: it can't be of this ring", number)
        path = self.files.path(part.at or TABLE)
        if part.at is None:
            self._act(TABLE, "make it anew, empty")
        elif words_of(lambda: EpisodeTable.faults(disk, path, slots)):
            self._act(TABLE, "give it its size and header back")
        elif part.at == TABLE:
            path = ""
        for run in runs:
            first, last = run[0], run[-1]
            for record in run:
                self._write(record)
            numbers = f"records {first.seq} to {last.seq}" if len(run) > 1 else f"record {first.seq}"
            steps = f"positions {first.start} to {last.head}"
            what = f"put a dropped episode in the place of {numbers}: what {steps} stored is lost"
            self._act(TABLE, what, first.seq, len(run), last.head - first.start)
        lost = {record.seq for run in runs for record in run}
        newest = self.table.read(reached.seq) if reached.seq not in lost else None
        if newest is not None and newest.first != reached.first:
            self._write(replace(newest, first=reached.first))
            what = f"let record {newest.seq} name the oldest live one: {reached.first}"
            self._act(TABLE, what, newest.seq)
        for name in orphans_in(survey, lost) if lost else []:
            self._remove(name, "remove it: no record names it any more")
        if path or self._table_changed:
            self._made[TABLE] = partial(self.table.save, disk)
            self._put(TABLE, keeps=not path)
        return lost

    def _put(self, name: str, keeps: bool) -> None:
        """Put a file that is written beside in place: over what lies there, or into it."""
        self.swap.step("overwrite" if keeps else "rename", self.swap.inside(name), name)

    def _fillers(self, dropped: set[int]) -> list[list[Record]]:
        """Return runs of dropped records that take the places of those that are lost."""
        reached, found = self.survey.reached, []
        records, kept = self._in_order(dropped)
        stored = self.survey.records
        changed = {name: kept & (records[name] != stored[name]) for name in _MENDED}
        for row in records[np.logical_or.reduce(list(changed.values()))]:
            seq = int(row["seq"])
            record = self.table.read(seq)
            if record is not None:
                values: dict[str, Any] = {name: int(row[name]) for name in _MENDED}
                self._write(replace(record, **values))
                at = seq - reached.first
                what = " and ".join(name for name in _MENDED if changed[name][at])
                self._act(TABLE, f"mend {what} of record {seq}: its episode is whole", seq)
        lost = ~kept
        for run in np.split(np.arange(len(records)), np.flatnonzero(np.diff(lost)) + 1):
            if not len(run) or not lost[run[0]]:
                continue
            before, after = None, None
            if run[0] > 0:
                before = Record.of(records[run[0] - 1])
            elif reached.first > 1:
                before = self.table.read(reached.first - 1)
            if run[-1] + 1 < len(records):
                after = Record.of(records[run[-1] + 1])
            stop = after.start if after is not None else reached.head
            start = min(before.head if before is not None else reached.tail, stop)
            # What the next one calls live: with the tail of the one before, more than max_steps might be.
            tail, first = (reached.tail, reached.first) if after is None else (after.tail, after.first)
            numbers = [reached.first + int(i) for i in run]
            begun = len(numbers)
            if self.manifest.kind == TRANSITIONS:  # each row may have begun an episode
                begun += stop - (0 if before is None else before.head)
            ordinal, time = _counted_between(before, after, numbers, begun)
            made, at = [], start
            for number in numbers:  # the first has all steps, unless they are more than a record can say
                length = min(stop - at, MOST_U4)
                made.append(Record(number, at, tail, first, length=length, ordinal=ordinal, time=time, flags=DROPPED))
                at = Position(at + length)
            found.append(made)
        return found

    def _in_order(self, dropped: set[int]) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Return the records, and which of them stay: the valid ones, whose flags are right by now.

        Where these contradict each other, the whole episodes stay. Their rows prove where they start
        and end, but not their tails: those that are out of order become that of the next one.
        """
        survey, records, newest = self.survey, self.survey.records.copy(), self.survey.reached
        records["flags"] &= ~np.uint8(DROPPED)  # a damaged one contradicts no other record
        kept = np.ones(len(records), np.bool_)
        for first, last in survey.broken():
            kept[first - newest.first : last + 1 - newest.first] = False
        if not self._breaks(records, kept):
            return records, kept
        whole = np.isin(records["seq"], [n for n in survey.live()["seq"] if n not in dropped])
        head = 0
        for i in np.flatnonzero(kept):
            kept[i] = whole[i] and head <= records["start"][i]
            if kept[i]:
                head = records["start"][i] + records["length"][i]
        numbers = np.flatnonzero(kept)
        fits = records["tail"][numbers] <= np.minimum(records["start"][numbers], newest.tail)
        right = set(longest_rise(numbers[fits].tolist(), records["tail"]))
        tail, oldest = newest.tail, newest.first
        for i in numbers[::-1].tolist():
            if i in right:
                tail, oldest = records["tail"][i], records["first"][i]
            else:
                records["tail"][i], records["first"][i] = tail, oldest
        self._count_again(records, kept)
        while found := self._breaks(records, kept):  # of a chain: what does not fit is lost
            kept[[seq - newest.first for seq, _ in found]] = False
        return records, kept

    @staticmethod
    def _breaks(records: Array, kept: Array) -> list[tuple[int, str]]:
        runs = np.split(np.arange(len(records)), np.flatnonzero(np.diff(kept)) + 1)
        return [one for run in runs if len(run) and kept[run[0]] for one in breaks_of(records[run])]

    @staticmethod
    def _count_again(records: Array, kept: Array) -> None:
        """Give records whose time or ordinal is out of order those that lie between their neighbours', and those of no
        chain no place in one."""
        numbers, nexts = np.flatnonzero(kept), next_ordinals(records)
        on_time = set(longest_rise(numbers.tolist(), records["time"]))
        counted = set(longest_rise(numbers.tolist(), nexts))
        time, ordinal = 0, 0
        for i in numbers.tolist():
            row = records[i]
            if i not in on_time:
                row["time"] = time
            if not row["part"] & PART:
                row["chain"], row["step"], row["previous"] = NONE, 0, NONE
                behind = int(row["kind"] == EPISODE)
                if row["part"] & MANY and row["behind"] <= row["length"]:
                    behind = int(row["behind"])
                if i not in counted or row["behind"] != behind:
                    row["ordinal"], row["behind"] = ordinal, behind
                nexts[i] = row["ordinal"] + behind
            time, ordinal = row["time"], nexts[i]

    def _write_manifest(self, lost: set[int], fault: str) -> None:
        """Write the manifest again if it is wrong, or to have an older small state if the newest one has a `fault`."""
        reached, manifest, said = self.survey.reached, self.manifest, self.manifest.table
        stale = said.get("seq") == reached.seq and said.get("first") != reached.first
        stale |= said.get("seq", 0) > reached.seq
        has_fault = any(finding.file == MANIFEST for finding in self.findings)
        if not (lost or stale or fault or has_fault):
            return
        count = sum(int(seq) not in lost for seq in self.survey.live()["seq"])
        counts = {
            "count": count,
            "first": reached.first,
            "tail": reached.tail,
            "head": reached.head,
            "seq": reached.seq,
        }
        carried = dict(self.survey.carried)
        if fault:
            older = next(small for small in self.survey.small_states() if not small.fault)
            carried = {"seq": reached.seq, "state": older.state}
            self._act(MANIFEST, f"go back to the small state of record {older.seq}: {fault}")
        manifest = replace(manifest, table=counts, carried=carried).with_sizes()
        what = f"write it again: {count} episodes"
        if self.parts.manifest_part.at is None:
            newest = self.table.read(reached.seq) if reached.seq else None
            given = 0 if newest is None else newest.next_ordinal
            if given < LAST_ORDINAL // 2:  # more than any number of power cuts can have left out
                manifest = replace(manifest, ordinal=given + (1 << 32))
            what = f"make it again from the other files: {count} episodes; settings (history_len ...) are lost"
        self.manifest = manifest
        self._act(MANIFEST, what)
        self._data[MANIFEST] = manifest.encode()
        self._put(MANIFEST, keeps=False)

    def _write_state(self) -> None:
        """Write both states, of an era that no reader has seen, so that each looks at everything anew.

        The boot id is left out: the next writer verifies, and makes durable, what no sync vouches for.
        """
        reached, part = self.survey.reached, self.parts.state
        known = [state for state in self.survey.states if state is not None]
        # Without a valid state nothing tells the last era; the clock is ahead of any count of openings.
        era = max((state.era for state in known), default=time.time_ns())
        generation = max((state.generation for state in known), default=0)
        mark = min(reached.seq, max((state.mark for state in known), default=0))
        data = MemoryFile(STATE, StateFile.nbytes)
        StateFile(data, self.manifest.uuid).write_both(
            State(generation + 1, reached.seq, reached.first, reached.tail, reached.head, mark, era + 1, NO_BOOT)
        )
        faults = words_of(lambda: StateFile.faults(self.files.disk, self.files.path(STATE)))
        self._act(STATE, "show readers the repaired state")
        self._data[STATE] = data.read(StateFile.nbytes, 0)
        self._put(STATE, keeps=part.at == STATE and not faults)


def _counted_between(before: Record | None, after: Record | None, numbers: list[int], begun: int) -> tuple[int, int]:
    """Return ordinal and time of the dropped records that replace those of these numbers.

    An ordinal that one of them may have given must not be given again. `begun`: how many they gave at most.
    """
    time = 0 if before is None else before.time
    if after is not None:
        begins = after.kind == EPISODE and after.chain in (NONE, after.start)
        begins &= after.behind == 1 or bool(after.part & MANY)
        return after.ordinal if begins else after.next_ordinal, time
    if before is not None:
        return before.next_ordinal + begun, time
    return max(numbers[-1], begun), time


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
