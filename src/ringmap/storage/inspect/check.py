"""Check: what is wrong with a buffer's directory, named file by file.

    manifest.json, or the labels of the columns -> state.bin, episodes.npy -> the newest state -> rows, blobs

`Scan` is a lenient opening: what must hold is said by the modules of the files, and by an opening (read/recovery.py);
here none stops the others. It works on a directory that nobody has open, on one that a live writer is filling, and on
one so damaged that it can't be opened. Beside what an opening asks, it verifies the rows and the blob of every live
episode, and names what is not part of a buffer, or is another file by its bytes.

A writer that goes on meanwhile makes findings that are none. It never breaks one thing twice: numbers of records are
never used again. So what is found counts if two more scans find the same.
Rows of an open group are neither a finding nor lost: a commit stores them, or the next opening for writing.

Invariants: takes no lock; reads only, and plainly: a map of a bad sector, or of a file that someone cuts, would kill
the process; believes nothing without a checksum, and allocates nothing on the word of a number alone; follows no link.
Not here: what is done about it (repair.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from ringmap.errors import DamageError, EnvironmentFault, NewerVersionError, UnknownFormatError, UnreleasedVersionError
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.memmap import HEADER_NBYTES, npy_header, read_label
from ringmap.storage.columns.rows import UNREADABLE
from ringmap.storage.columns.text import unpack
from ringmap.storage.columns.zarr import read_zarr_label
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.paths import (
    COLUMNS,
    DATA,
    FINE,
    LOCK,
    MANIFEST,
    NAMES,
    OPEN,
    SIGNS,
    STATE,
    STEPS,
    TABLE,
    Paths,
    local_path,
)
from ringmap.storage.disk.process import mapped
from ringmap.storage.disk.system import NotAFileError, clear_error
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.recovery import Progress, SmallState, bad_columns, find, is_clean, possible, small_states
from ringmap.storage.records.blobs import LARGEST_BLOB, decode_blob, decode_data, segment_name, segment_number
from ringmap.storage.records.manifest import LARGEST, Manifest, examine, links_in
from ringmap.storage.records.state import State, StateFile
from ringmap.storage.records.step_file import StoredSteps, read_steps
from ringmap.storage.records.table import DROPPED, EPISODE, MOST, RECORD, EpisodeTable, Record, are_live
from ringmap.storage.ring.ring import Position
from ringmap.storage.sidecars import SIDECARS, Home, Sidecar

__all__ = ["Finding", "Scan", "check", "check_folder", "check_ring", "check_source", "rings_below"]

Array = np.ndarray[Any, np.dtype[Any]]

_PEEKS = 50
_BATCH = 1024
_LABEL_LIMIT = 1 << 20
_MOST_LOST = 1 << 19
"""Records that can be lost beyond the end of a table that was cut: 64 MiB of them."""


_MORE = 2
"""So many more scans must find the same."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    `file`: which file, relative to the buffer's directory, with forward slashes; `what`: what is
    wrong with it; `seq`: the record of the episode that it concerns, if it concerns one.
    """

    file: str
    what: str
    seq: int | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


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
    """Return what is wrong with an open buffer: with its files, and with what is in memory. `faults`: what an index
    over it found wrong with itself, in words."""
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
        for _ in range(_MORE if found else 0):
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


class _WholeFile:
    """A file as large as it should be: what is missing, or can't be read, is zeros."""

    def __init__(self, scan: Scan, name: str, nbytes: int) -> None:
        self.path, self._scan, self._name, self._nbytes = scan.path(name), scan, name, nbytes

    def read(self, size: int, offset: int) -> bytes:
        return self._scan.read(self._name, size, offset).ljust(size, b"\0")

    def read_into(self, room: memoryview, offset: int) -> int:
        room[:] = self.read(len(room), offset)
        return len(room)

    def next_data(self, offset: int) -> int:
        with contextlib.suppress(OSError, NotAFileError), contextlib.closing(self._scan.disk.open(self.path)) as file:
            if offset < file.size():
                return file.next_data(offset)
        return max(offset, self._nbytes)


class Scan:
    """What the directory of a buffer holds.

    Attributes:
        manifest: as it stands there, or as the labels of the columns say that it was; None if nothing does.
        is_made_again: whether the columns had to say it: then settings are lost.
        faults: the faults of each file as a whole, in words.
        foreign: files that are something else by their bytes: of another buffer, or of another name of this one.
        unreadable: what the disk does not give, in words; in its place are zeros.
        states: the two slots of state.bin; `shown`: the newer one that is valid.
        clean: whether the page cache has what is shown: no reboot came since.
        reached: the newest state that the table, state.bin or the manifest names.
        refused: the error with which an opening refuses this table and these states, None if it takes them.
        records: a copy of records `[first, seq]`; `valid`: which of them are whole; `flagged`: the numbers of those
            whose flag "dropped" is damaged, and counts as not set.

    Raises:
        UnknownFormatError: no buffer is there, nor the remains of one.
        NewerVersionError, UnreleasedVersionError: it is from another version of ringmap.

    Cost: reads the table; rows and blobs are read by `findings` alone.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk, self.folder, self.paths = disk, folder, Paths(folder)
        self.is_made_again = self.has_columns = self.clean = False
        self.faults: dict[str, list[str]] = {}
        self.foreign: dict[str, str] = {}
        self.unreadable: list[str] = []
        self.states: tuple[State | None, State | None] = (None, None)
        self.shown: State | None = None
        self.reached = State()
        self.refused: DamageError | None = None
        self.records, self.valid = np.empty(0, RECORD), np.empty(0, np.bool_)
        self.flagged: list[int] = []
        self._columns: list[Column | None] = []
        self._refuse_others()
        self.labels = {n: label for n in self.names(COLUMNS) if (label := self._label(n)) is not None}
        self.manifest = self._find_manifest()
        if self.manifest is not None:
            self._read_files(self.manifest)

    @property
    def fixed(self) -> Manifest:
        """The manifest, for a caller that knows that there is one."""
        assert self.manifest is not None
        return self.manifest

    # -- files -----------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.folder, *name.split("/"))

    def names(self, folder: str) -> list[str]:
        """Return the sorted names of what lies in a folder of the directory, with its own before them."""
        if not self.disk.is_folder(self.path(folder)):  # a link would lead elsewhere
            return []
        return [f"{folder}/{name}" for name in self.disk.names(self.path(folder))]

    def read(self, name: str, size: int, offset: int = 0) -> bytes:
        """Return up to `size` bytes at `offset`; none of a file that is gone or can't be read."""
        try:
            with contextlib.closing(self.disk.open(self.path(name))) as file:
                size = min(size, file.size() - offset)
                return file.read(size, offset) if size > 0 else b""
        except (FileNotFoundError, NotADirectoryError, NotAFileError):
            return b""
        except OSError as error:
            self._note(name, error)
            return b""
        except MemoryError as error:  # no word on whether it is whole
            raise EnvironmentFault(errno.ENOMEM, f"{self.path(name)}: {size:,} bytes do not fit in memory") from error

    def _note(self, name: str, error: OSError) -> None:
        self.unreadable.append(f"{self.path(name)}: {error.strerror or error}")

    def _words_of(self, name: str, faults: Callable[[], list[str]]) -> list[str]:
        """Return the faults that a part finds with its own file, or that it can't be read."""
        try:
            return faults()
        except OSError as error:
            self._note(name, error)
            return [f"can't be read: {error.strerror or error}"]
        except NotAFileError as error:
            return [f"is {error.kind}, expected a regular file"]

    def _read_states(self, uuid: bytes) -> tuple[State | None, State | None]:
        """Return both slots of state.bin; what stays torn is damage, and no write under way."""
        file = StateFile(cast(File, _WholeFile(self, STATE, StateFile.nbytes)), uuid)
        for _ in range(_PEEKS):
            states = file.slots()
            if None not in states:
                break
        return states

    def _label(self, name: str) -> dict[str, Any] | None:
        """Return what a column's file or folder says of itself."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if self.disk.is_folder(self.path(name)):
                return read_zarr_label(self.read(f"{name}/zarr.json", _LABEL_LIMIT))
            if self.disk.is_file(self.path(name)):
                with contextlib.closing(self.disk.open(self.path(name))) as file:
                    return read_label(file)
        return None

    def _note_foreign(self, name: str) -> None:
        if what := self._whose(name):
            self.foreign[name] = what

    def _whose(self, name: str) -> str:
        """Return, in words, what a file is by its bytes, if that is not what its name says."""
        path = self.path(name)
        if label := self._label(name):
            files = [] if self.manifest is None else list(self.manifest.files)
            if name in files and label == self.fixed.label(files.index(name)):
                return ""
            which = "this" if self.manifest and label.get("uuid") == self.manifest.uuid.hex() else "another"
            return f"swapped: it is column {label.get('name')!r} of {which} buffer"
        if self.disk.is_folder(path):
            is_file = not name.endswith(".zarr") and self.disk.names(path)
            return "is a folder, expected a file" if is_file else ""
        if not self.disk.is_file(path):
            return ""
        if name.endswith(".zarr"):
            return "column folder is a file, expected a folder"
        head, slots = self.read(name, HEADER_NBYTES), _slots_for(self.disk.size(path))
        if name != TABLE and slots > 0 and head == npy_header(RECORD.descr, (slots,)):
            return "swapped: it is an episode table"
        if name != STATE and head.startswith(StateFile.magic):
            return "swapped: it is a state file"
        if name != MANIFEST and head.startswith(b"{") and self._decoded(name)[0] is not None:
            return "swapped: it is a manifest"
        return ""

    # -- the manifest ----------------------------------------------------------------------------

    def _refuse_others(self) -> None:
        """Raise unless a buffer, or what is left of one, lies here."""
        ours = (SIGNS - {MANIFEST}) & set(self.disk.names(self.folder))
        try:
            if self.disk.exists(self.paths.manifest):
                found = bool(ours) or self._decoded(MANIFEST)[0] is not None
            else:
                found = examine(self.disk, self.folder) == "buffer"
        except UnknownFormatError:
            if not ours:
                raise
        except DamageError:
            pass
        else:
            if not found:
                raise UnknownFormatError(
                    f"{self.folder}: no buffer is there; make one with ReplayBuffer(max_steps=..., path=...)"
                )

    def _decoded(self, name: str) -> tuple[Manifest | None, str]:
        """Return the manifest in a file, or None and what is wrong with it."""
        path = self.path(name)
        if not self.disk.is_file(path):
            return None, "manifest is missing"
        try:
            return Manifest.decode(self.read(name, LARGEST), path), ""
        except (NewerVersionError, UnreleasedVersionError):
            raise
        except DamageError as error:
            return None, str(error).removeprefix(f"{path}: ").partition(";")[0]

    def _find_manifest(self) -> Manifest | None:
        own, fault = self._decoded(MANIFEST)
        if own is None:
            return self._made_again(fault)
        uuids = {label.get("uuid") for label in self.labels.values()}
        if uuids and own.uuid.hex() not in uuids and not any(self._read_states(own.uuid)):
            self.foreign[MANIFEST] = "belongs to another buffer: no other file here knows its uuid"
        return own

    def _made_again(self, fault: str) -> Manifest | None:
        """Make the manifest, which has a fault, again from the labels of its columns, or return None when one is
        missing. Settings are lost."""
        self.faults[MANIFEST], self.is_made_again = [fault], True
        labels = sorted(self.labels.values(), key=lambda label: str(label.get("column")).zfill(9))
        made = Manifest.of_labels(labels)
        return made if made is not None and set(made.files) == set(self.labels) else None

    # -- the other files -------------------------------------------------------------------------

    def _read_files(self, manifest: Manifest) -> None:
        disk, paths = self.disk, self.paths
        self.states = self._read_states(manifest.uuid)
        self.shown = max(filter(None, self.states), key=lambda state: state.generation, default=None)
        nbytes = EpisodeTable.nbytes(manifest.table_slots)
        file = cast(File, _WholeFile(self, TABLE, nbytes))
        self.table = EpisodeTable(file, manifest.table_slots, manifest.uuid, mapped=False)
        records, whole, at = self.table.scan()
        has_records = bool(whole.any()) or manifest.witness > 0 or any(state and state.seq for state in self.states)
        if manifest.schema is None and has_records:
            made = self._made_again("names no columns, but episodes are stored: an old copy")
            if made is None or made.uuid != manifest.uuid:
                self.manifest = None
                return
            self.manifest = manifest = made
        if faults := self._words_of(STATE, lambda: StateFile.faults(disk, paths.state)):
            self.faults[STATE] = faults
        elif self.shown is None:
            self.faults[STATE] = ["neither state in it is valid: torn, or of another buffer"]
        if faults := self._words_of(TABLE, lambda: EpisodeTable.faults(disk, paths.table, manifest.table_slots)):
            self.faults[TABLE] = faults
        elif len(whole) > 1 and not whole.any() and (records["seq"] % manifest.table_slots == at).all():
            self.foreign[TABLE] = "is of another buffer: all records are in their slots, and none is valid"
        # Until a record is stored, columns that no argument fixed are made again by the first episode.
        self.has_columns = manifest.schema is not None and (has_records or manifest.locked_by_argument)
        if self.has_columns:
            self._columns = [self._open_column(i) for i in range(len(manifest.files))]
        gone = [manifest.label(i) for i, column in enumerate(self._columns) if column is None]
        others = {*self.disk.names(self.folder), *self.names(COLUMNS)} - {*NAMES, *manifest.files} if gone else ()
        misplaced = [name for name in others if self._label(name) in gone]
        for name in (*self.faults, LOCK, *sorted(misplaced), *(self.names(DATA) if self.faults else ())):
            self._note_foreign(name)
        self._find_state(records[whole])

    def _open_column(self, index: int) -> Column | None:
        """Return a column in whatever state it is; None where it lies nowhere, or something else lies there."""
        file, column = self.fixed.files[index], self.fixed.column(index, self.disk, self.paths.columns)
        if faults := self._words_of(file, column.faults):
            self.faults[file] = faults
        if self.labels.get(file) not in (None, column.label):
            self._note_foreign(file)
            return None
        return column if column.exists() else None

    def is_gone(self, index: int) -> bool:
        """Tell whether a column lies nowhere."""
        return self._columns[index] is None

    # -- the newest state ------------------------------------------------------------------------

    def _find_state(self, records: Array) -> None:
        manifest, boot = self.fixed, self.disk.boot_id()
        self.clean = is_clean(self.shown, boot)
        try:
            find(self.table, self.shown, boot, manifest, self.paths.table)
        except DamageError as error:
            self.refused = error
        self.reached = self._newest_claim(records[possible(records, manifest.max_steps, self.table.slots)])
        if self.reached.seq:
            self.records, self.valid = self.table.read_range(self.reached.first, self.reached.seq)
            flags = self.records["flags"]
            damaged = self.valid & (flags & DROPPED != 0) & (flags & DROPPED != DROPPED)
            self.flagged = self.records["seq"][damaged].tolist()
            flags[damaged] &= ~np.uint8(DROPPED)

    def _newest_claim(self, records: Array) -> State:
        """Return what the newest record says, unless state.bin or the manifest know of a newer one."""
        shown, counts, best = self.shown, self.fixed.table, State()
        claims = list[tuple[int, State]]()  # each with the number of a record that is known to have been stored
        if len(records):
            one = Record.of(records[int(np.argmax(records["seq"]))])
            claims.append((one.seq, State(0, one.seq, one.first, one.tail, one.head)))
        if shown is not None:
            claims.append((shown.seq if self.clean else shown.synced, shown))
        if {"seq", "first", "tail", "head"} <= counts.keys():
            tail, head = Position(counts["tail"]), Position(counts["head"])
            claims.append((counts["seq"], State(0, counts["seq"], counts["first"], tail, head)))
        size = self.disk.size(self.paths.table) if self.disk.is_file(self.paths.table) else 0
        most = min(self.table.slots, max(_slots_for(size), _MOST_LOST))
        for need, claim in claims:  # unless there can't be such a state: only a forger claims it
            fits = claim.seq - most < claim.first <= claim.seq + 1 and claim.seq >= need > best.seq
            if fits and 0 <= claim.tail <= claim.head <= min(claim.tail + self.fixed.max_steps, MOST):
                best = claim
        return best

    def live(self) -> Array:
        """Return the whole records of the live episodes, oldest first."""
        records = self.records[self.valid]
        records = records[possible(records, self.fixed.max_steps, self.table.slots)]  # else nothing is read on its word
        found: Array = records[are_live(records, self.reached.tail)]
        return found

    def newest(self, without: Collection[int] = ()) -> Record | None:
        """Return the record of the newest live episode, but for those `without`."""
        live = self.live()
        live = live[~np.isin(live["seq"], list(without))]
        return Record.of(live[-1]) if len(live) else None

    # -- findings --------------------------------------------------------------------------------

    def findings(self, progress: Progress | None = None, among: Collection[int] | None = None) -> list[Finding]:
        """Return what is wrong: all that an opening refuses is among it.

        Args:
            progress: called with `(done, of)` episodes.
            among: numbers of the episodes to verify; None: all.
        """
        found = [Finding(f, what) for f, faults in self.faults.items() if f not in self.foreign for what in faults]
        found += [Finding(file, what) for file, what in self.foreign.items()]
        if self.manifest is None:
            what = "can't be made again from the other files, and little can be checked without it"
            unread = [name for name in self.names(COLUMNS) if name not in self.labels]
            said = "its label can't be read either, so nothing tells what it was"
            return [*found, Finding(MANIFEST, what), *(Finding(name, said) for name in unread)]
        if self.manifest.witness > self.reached.seq:
            what = f"record {self.manifest.witness} was stored, but record {self.reached.seq} is the newest"
            found.append(Finding(MANIFEST, f"says that {what}"))
        if STATE not in self.foreign and STATE not in self.faults:
            found += [Finding(STATE, what) for what in self._of_states()]
        if TABLE not in self.foreign:
            for first, last in self.lost():
                run = f"record {first} is" if first == last else f"records {first} to {last} are"
                found.append(Finding(TABLE, f"{run} damaged or missing", first))
            found += [Finding(TABLE, f"record {number} has a damaged flag") for number in self.flagged]
        found += self._of_rows(progress, among)
        found += self._of_small_state()
        for folder in self.names(OPEN):
            steps = self.steps_in(folder)
            if steps.fault:
                what = f"{steps.fault}; the {steps.count} steps before it are whole"
                found.append(Finding(f"{folder}/{STEPS}", what))
        for sidecar in SIDECARS:
            found += [Finding(sidecar.names[0], fault) for fault in self.sidecar_faults(sidecar, self.newest())]
        found += self._of_others()
        silent = {TABLE, MANIFEST} if self.shown is None else {TABLE, STATE, MANIFEST}  # of whose faults it is one
        if self.refused is not None and not silent & {one.file for one in found}:
            said = str(self.refused).removeprefix(f"{self.paths.table}: ")
            found.append(Finding(TABLE, said.removesuffix("; run ringmap.check on the buffer")))
        return found

    def _of_states(self) -> Iterator[str]:
        for slot, state in enumerate(self.states):
            if state is None:
                yield f"slot {slot} is torn or damaged"
        shown, stored = self.shown, self.reached.seq
        if shown is None:
            return
        record = self.table.read(shown.seq) if shown.seq else None
        # A kill may come between record and state: one is not shown then. A flush has shown all that it counts.
        least = max(stored - 1 if self.clean else 0, self.fixed.table.get("seq", 0))
        if max(shown.synced, shown.seq if self.clean else 0) > stored:
            yield f"shows record {shown.seq}, but record {stored} is the newest"
        elif record is not None and (record.first, record.tail, record.head) != (shown.first, shown.tail, shown.head):
            yield f"disagrees with record {shown.seq}, which it shows"
        elif shown.seq < least:
            yield f"shows record {shown.seq}, but {stored} is stored: an old copy"

    def lost(self) -> list[tuple[int, int]]:
        """Return the runs `(first, last)` of live records that are damaged or missing."""
        numbers = self.reached.first + np.flatnonzero(~self.valid)
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        return [(int(run[0]), int(run[-1])) for run in runs if len(run)]

    # -- rows and blobs --------------------------------------------------------------------------

    def _of_rows(self, progress: Progress | None, among: Collection[int] | None) -> Iterator[Finding]:
        """Yield what is wrong with the rows and blobs of live episodes; read in parallel. Where a column lies nowhere,
        none is whole."""
        for folder in (DATA, OPEN):
            if not self.disk.is_folder(self.path(folder)):
                yield Finding(folder, "folder is missing")
        live = self.live() if self.has_columns and None not in self._columns else self.records[:0]
        if among is not None:
            live = live[np.isin(live["seq"], list(among))]
        segments = set[str]()
        for at in range(0, len(live), _BATCH):
            batch = live[at : at + _BATCH]
            for found in mapped(self._of_episode, batch, 4, "ringmap-check"):  # reads and xxhash release the GIL
                segments |= {one.file for one in found if one.file.startswith(DATA)}
                yield from found
            if progress is not None:
                progress(at + len(batch), len(live))
        for column in self._columns:
            if column is not None:
                column.close()
        for name in sorted(segments):
            self._note_foreign(name)
            if name in self.foreign:
                yield Finding(name, self.foreign[name])

    def _of_episode(self, row: Any) -> list[Finding]:
        """Return what is wrong with the bytes of a live episode."""
        record, why = Record.of(row), dict[int, str]()
        segment, blob = self.segment_file(record.blob_segment), self.blob(record)
        where = f"of record {record.seq} (positions {record.start} to {record.head})"
        bad = bad_columns(record, [self._sum(i, record, why) for i in range(len(self._columns))], blob)
        if blob is None:
            gone = "damaged" if self.disk.is_file(self.path(segment)) else "gone with its segment"
            rows = [Finding(self.fixed.files[i], f"rows {where} may be damaged", record.seq) for i in bad]
            return [Finding(segment, f"blob {where} is {gone}", record.seq), *rows]
        try:
            _, _, data, packed = decode_blob(blob)
            decode_data(data)
            words = len(unpack(packed))
        except ValueError as error:
            return [Finding(segment, f"blob {where} does not make sense: {error}", record.seq)]
        found = {i: f"rows {where} are damaged{why.get(i, '')}" for i in bad} or self._strange_codes(record, words)
        return [Finding(self.fixed.files[i], what, record.seq) for i, what in found.items()]

    def _strange_codes(self, record: Record, words: int) -> dict[int, str]:
        """Return the columns of text in which a whole episode has codes beyond its words."""
        found, schema = dict[int, str](), self.fixed.schema
        for i in [i for i, one in enumerate(schema.columns if schema else ()) if one.is_text]:
            codes = np.frombuffer(b"".join(map(bytes, self._pieces(i, record))), "<i4")
            if len(codes) and not 0 <= codes.min() <= codes.max() < words:
                found[i] = f"text of record {record.seq} is not among the {words} words of its commit"
        return found

    def _pieces(self, index: int, record: Record) -> Iterator[Any]:
        column = self._columns[index]
        assert column is not None
        for slot, steps in self.fixed.ring.pieces(record.start, record.length):
            yield from column.pieces(slot, steps)

    def _sum(self, index: int, record: Record, why: dict[int, str]) -> int:
        """Return the checksum of an episode's rows in a column. Note why they can't be read."""
        total = xxhash.xxh3_64()
        for data in self._pieces(index, record):
            if isinstance(data, str):
                why[index] = f": {data}"
                if "can't be read: " in data:
                    self.unreadable.append(f"{self.path(self.fixed.files[index])}: {data}")
                return UNREADABLE
            total.update(data)
        return total.intdigest()

    def segment_file(self, number: int) -> str:
        """Return the name of a segment."""
        return f"{DATA}/{segment_name(number)}"

    def blob(self, record: Record) -> bytes | None:
        """Return a record's blob, or None when it is not there."""
        if record.blob_size > LARGEST_BLOB:
            return None
        data = self.read(self.segment_file(record.blob_segment), record.blob_size, record.blob_offset)
        whole = len(data) == record.blob_size and xxhash.xxh3_64_intdigest(data) == record.blob_sum
        return data if whole else None

    # -- the small state -------------------------------------------------------------------------

    def small_states(self) -> Iterator[SmallState]:
        """Yield the small states that an opening may take, the right one first."""
        return small_states(self.reached.seq, self.table, self.blob, self.fixed.carried)

    def _of_small_state(self) -> Iterator[Finding]:
        newest = self.table.read(self.reached.seq) if self.reached.seq else None
        if newest is not None and newest.kind != EPISODE and newest.blob_size and self.blob(newest) is None:
            what = f"blob of record {newest.seq}, which carries the small state, is damaged"
            yield Finding(self.segment_file(newest.blob_segment), what, newest.seq)
        small = next(self.small_states())
        if small.fault:
            carrier = None if small.kept else self.table.read(small.seq)
            yield Finding(MANIFEST if carrier is None else self.segment_file(carrier.blob_segment), small.fault)

    # -- what lies beside ------------------------------------------------------------------------

    def steps_in(self, folder: str) -> StoredSteps:
        """Return what the file of steps in a folder of `open/` holds, nothing when there is none (any more)."""
        with contextlib.suppress(OSError, NotAFileError):
            return read_steps(self.disk, self.path(folder), self.fixed.max_steps)
        return StoredSteps()

    @property
    def home(self) -> Home:
        """The directory as sidecars know it."""
        manifest = self.fixed
        return Home(self.disk, self.folder, manifest.uuid, manifest.rows, manifest.schema)

    def sidecar_faults(self, sidecar: type[Sidecar], newest: Record | None) -> list[str]:
        """Return what is wrong with a sidecar, in words, given the newest live episode; nothing where there is none."""
        home = self.home
        is_there = sidecar.is_part_of(home)
        return self._words_of(sidecar.names[0], partial(sidecar.faults, home, newest)) if is_there else []

    def _of_others(self) -> Iterator[Finding]:
        """Find what is not part of a buffer."""
        for file, column in zip(self.fixed.files, self._columns, strict=False):
            if column is not None:
                yield from (Finding(f"{file}/{name}", "is not part of a buffer") for name in column.strays())
        names = [*self.disk.names(self.folder), *self.names(DATA), *self.names(OPEN)]
        names += self.names(COLUMNS) if self.has_columns else []
        for folder in self.names(OPEN):
            if self.disk.is_folder(self.path(folder)):
                names.remove(folder)
                names += [name for name in self.names(folder) if name != f"{folder}/{STEPS}"]
        for name in names:
            folder, _, base = name.rpartition("/")
            known = name in NAMES or name in self.fixed.files or base in FINE or base.startswith(".nfs")
            kind = "missing" if known else self.disk.kind(self.path(name))
            if kind == "missing":
                continue
            if folder != DATA or segment_number(base) is None:
                yield Finding(name, "is not part of a buffer")
            elif kind:
                yield Finding(name, f"is {kind}, expected a regular file: what leads elsewhere is not followed")


def _slots_for(nbytes: int) -> int:
    """Return how many records a table of this size has room for."""
    return max(0, nbytes - EpisodeTable.nbytes(0)) // RECORD.itemsize
