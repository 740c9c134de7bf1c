"""Scan: what a directory holds, whether or not it can be opened, and what is wrong with it.

    manifest.json, or the labels of the columns -> state.bin, episodes.npy -> the newest state -> rows, blobs

Invariants: reads only, and plainly: a map of a bad sector, or of a file that someone cuts, would kill the process;
believes nothing without a checksum, and allocates nothing on the word of a number alone; follows no link.
Not here: what a writer changes meanwhile (check.py looks twice), what is done about it (repair.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from ringmap.errors import DamageError, EnvironmentFault, NewerVersionError, UnknownFormatError, UnreleasedVersionError
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.memmap import HEADER_NBYTES, npy_header, read_label
from ringmap.storage.columns.rows import UNREADABLE, combine
from ringmap.storage.columns.text import unpack
from ringmap.storage.columns.zarr import read_zarr_label
from ringmap.storage.directory import examine
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
    STREAM,
    TABLE,
    WORDS,
    Paths,
)
from ringmap.storage.disk.process import pool
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.read.recovery import (
    Progress,
    SmallState,
    breaks_of,
    find,
    is_clean,
    possible,
    small_state_of,
    small_states,
    why_impossible,
)
from ringmap.storage.records.blobs import LARGEST_BLOB, decode_blob, decode_data, segment_name, segment_number
from ringmap.storage.records.manifest import LARGEST, LAYOUT, VERSION, Manifest
from ringmap.storage.records.state import State, StateFile
from ringmap.storage.records.step_file import StoredSteps, read_steps
from ringmap.storage.records.table import DROPPED, EPISODE, MOST, RECORD, EpisodeTable, Record
from ringmap.storage.ring.ring import ORIGIN, Position
from ringmap.storage.sidecars import SIDECARS, Home, Sidecar

__all__ = ["ORPHAN", "Finding", "Scan"]

Array = np.ndarray[Any, np.dtype[Any]]

ORPHAN = "segment is an orphan: no record names it"

_LOOKS = 50
_BATCH = 256
_LABEL_LIMIT = 1 << 20
_MOST_LOST = 1 << 19
"""Records that can be lost beyond the end of a table that was cut: 64 MiB of them."""


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


@dataclass(frozen=True, slots=True)
class Reached:
    """The newest state that anything vouches for. `by`: the file that does."""

    seq: int = 0
    first: int = 1
    tail: Position = ORIGIN
    head: Position = ORIGIN
    by: str = ""


class _WholeFile:
    """A file as large as it should be: what is missing, or can't be read, is zeros."""

    def __init__(self, path: str, file: File | None, nbytes: int, failed: Callable[[OSError], None]) -> None:
        self.path = path
        self._file, self._nbytes, self._failed = file, nbytes, failed

    def read(self, size: int, offset: int) -> bytes:
        data = b""
        try:
            data = b"" if self._file is None else self._file.read(size, offset)
        except OSError as error:
            self._failed(error)
        return data.ljust(size, b"\0")

    def read_into(self, room: memoryview, offset: int) -> int:
        room[:] = self.read(len(room), offset)
        return len(room)

    def next_data(self, offset: int) -> int:
        if self._file is None or offset >= self._file.size():
            return max(offset, self._nbytes)
        return self._file.next_data(offset)


class Scan:
    """What the directory of a buffer holds.

    Attributes:
        manifest: as it stands there, or as the labels of the columns say that it was; None if nothing does.
        is_made_again: whether the columns had to say it: then settings are lost.
        faults: the faults of each file as a whole, in words.
        foreign: files that are something else by their bytes: of another buffer, or of another name of this one.
        unreadable: what the disk does not give, in words; in its place are zeros.
        states: the two slots of state.bin; `shown`: the newer one that is valid.
        clean: whether the page cache vouches for what is shown.
        reached: the newest state.
        refused: the error with which an opening refuses this table and these states, None if it takes them.
        misled: that the newest record names the wrong one as the oldest, in words; empty if it does not.
        strays: numbers of records beyond the newest state.
        records: a copy of records `[first, seq]`; `valid`: which of them hold.

    Raises:
        UnknownFormatError: no buffer is there, nor the remains of one.
        NewerVersionError, UnreleasedVersionError: it is from another version of ringmap.

    Cost: reads the table; rows and blobs are read by `findings` alone.
    """

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk, self.folder, self.paths = disk, folder, Paths(folder)
        self.is_made_again = False
        self.faults: dict[str, list[str]] = {}
        self.foreign: dict[str, str] = {}
        self.unreadable: list[str] = []
        self.states: tuple[State | None, State | None] = (None, None)
        self.shown: State | None = None
        self.clean = False
        self.reached = Reached()
        self.refused: DamageError | None = None
        self.misled = ""
        self.strays: list[int] = []
        self.records, self.valid = np.empty(0, RECORD), np.empty(0, np.bool_)
        self.has_columns = False
        self._columns: list[Column | None] = []
        self._refuse_others()
        self.labels = {n: label for n in self.names(COLUMNS) if (label := self._label(n)) is not None}
        self.manifest = self._find_manifest()
        if self.manifest is not None:
            self._look(self.manifest)

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

    def _words_of(self, name: str, faults: Callable[[], list[str]]) -> list[str]:
        """Return the faults that a part finds with its own file, or that it can't be read."""
        try:
            return faults()
        except OSError as error:
            self._note(name, error)
            return [f"can't be read: {error.strerror or error}"]
        except NotAFileError as error:
            return [f"is {error.kind}, expected a regular file"]

    def _note(self, name: str, error: OSError) -> None:
        self.unreadable.append(f"{self.path(name)}: {error.strerror or error}")

    def _whole(self, name: str, nbytes: int) -> File:
        file: File | None = None
        try:
            file = self.disk.open(self.path(name))
        except (FileNotFoundError, NotADirectoryError, NotAFileError):
            pass
        except OSError as error:
            self._note(name, error)
        return cast(File, _WholeFile(self.path(name), file, nbytes, lambda error: self._note(name, error)))

    def _open_table(self, slots: int, uuid: bytes) -> EpisodeTable:
        return EpisodeTable(self._whole(TABLE, EpisodeTable.nbytes(slots)), slots, uuid, mapped=False)

    def _read_states(self, uuid: bytes) -> tuple[State | None, State | None]:
        return StateFile(self._whole(STATE, StateFile.nbytes), uuid).slots()

    def _label(self, name: str) -> dict[str, Any] | None:
        """Return what a column's file or folder says of itself."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if self.disk.is_folder(self.path(name)):
                return read_zarr_label(self.read(f"{name}/zarr.json", _LABEL_LIMIT))
            if self.disk.is_file(self.path(name)):
                with contextlib.closing(self.disk.open(self.path(name))) as file:
                    return read_label(file)
        return None

    def whose(self, name: str) -> str:
        """Return, in words, what a file is by its bytes, if that is not what its name says."""
        if label := self._label(name):
            files = [] if self.manifest is None else list(self.manifest.files)
            if name in files and label == self.fixed.label(files.index(name)):
                return ""
            which = "this" if self.manifest and label.get("uuid") == self.manifest.uuid.hex() else "another"
            return f"swapped: it is column {label.get('name')!r} of {which} buffer"
        if self.disk.is_folder(self.path(name)) and not name.endswith(".zarr") and self.disk.names(self.path(name)):
            return "is a folder, expected a file"
        if not self.disk.is_file(self.path(name)):
            return ""
        if name.endswith(".zarr"):
            return "column folder is a file, expected a folder"
        head, slots = self.read(name, HEADER_NBYTES), _slots_for(self.disk.size(self.path(name)))
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
        if self.disk.exists(self.paths.manifest):
            if ours or self._decoded(MANIFEST)[0] is not None:
                return
        else:
            try:
                if examine(self.disk, self.folder) == "buffer":
                    return
            except UnknownFormatError:
                if ours:
                    return
                raise
            except DamageError:
                return
        raise UnknownFormatError(
            f"{self.folder}: no buffer is there; make one with ReplayBuffer(max_steps=..., path=...)"
        )

    def _decoded(self, name: str) -> tuple[Manifest | None, str]:
        """Return the manifest in a file, or None and what is wrong with it."""
        if not self.disk.is_file(self.path(name)):
            return None, "manifest is missing"
        data, path = self.read(name, LARGEST), self.path(name)
        try:
            return Manifest.decode(data, path), ""
        except (NewerVersionError, UnreleasedVersionError):
            if _is_of_another_version(data):
                raise
            return None, "the manifest was edited or damaged: its version is not the one it was written with"
        except DamageError as error:
            return None, str(error).removeprefix(f"{path}: ").partition(";")[0]

    def _find_manifest(self) -> Manifest | None:
        own, fault = self._decoded(MANIFEST)
        if own is None:
            self.faults[MANIFEST], self.is_made_again = [fault], True
            own = self._from_labels()
        elif self.labels and not any(own.label(i) in self.labels.values() for i in range(len(own.files))):
            others = {label.get("uuid") for label in self.labels.values()} - {own.uuid.hex()}
            made = None if others else self._from_labels()
            if own.schema is not None and made is not None:
                self.faults[MANIFEST] = ["contradicts what the columns say of themselves"]
                own, self.is_made_again = made, True
            elif others and not any(self._read_states(own.uuid)):
                self.foreign[MANIFEST] = "belongs to another buffer: no other file here knows its uuid"
        if own is None:
            return None
        path = self.paths.table
        slots = _slots_for(self.disk.size(path)) if self.disk.is_file(path) else 0
        if slots in (0, own.table_slots) or self._words_of(TABLE, partial(EpisodeTable.faults, self.disk, path, slots)):
            return own
        if self._open_table(slots, own.uuid).scan()[1].any():
            said = f"says that the table has {own.table_slots} slots, but it has {slots}"
            self.faults.setdefault(MANIFEST, []).append(said)
            own = replace(own, table_slots=slots)
        return own

    def _from_labels(self) -> Manifest | None:
        """Make a manifest again from the labels of its columns, or None when one is missing. Settings are lost."""
        labels = sorted(self.labels.values(), key=lambda label: str(label.get("column")).zfill(9))
        made = Manifest.of_labels(labels)
        return made if made is not None and set(made.files) == set(self.labels) else None

    # -- the other files -------------------------------------------------------------------------

    def _look(self, manifest: Manifest) -> None:
        disk, counts = self.disk, manifest.table
        self.states = self.look_at_states()
        self.shown = shown = _newest(self.states)
        self.table = self._open_table(manifest.table_slots, manifest.uuid)
        records, whole, at = self.table.scan()
        shown_seqs = [state.seq for state in self.states if state is not None]
        expected = max([*shown_seqs, int(counts.get("seq", 0))])
        has_records = expected > 0 or bool(whole.any())
        if manifest.schema is None and has_records:
            self.faults.setdefault(MANIFEST, []).append("names no columns, but episodes are stored: an old copy")
            made = self._from_labels()
            if made is not None and made.uuid == manifest.uuid:
                known = {n: getattr(made, n) for n in ("schema", "choices", "files")}
                self.manifest = manifest = replace(manifest, **known)
        if faults := self._words_of(STATE, lambda: StateFile.faults(disk, self.paths.state)):
            self.faults[STATE] = faults
        elif shown is None:
            self.faults[STATE] = ["neither state in it is valid: torn, or of another buffer"]
        if faults := self._words_of(TABLE, lambda: EpisodeTable.faults(disk, self.paths.table, manifest.table_slots)):
            self.faults[TABLE] = faults
        elif len(whole) > 1 and not whole.any() and (records["seq"] % manifest.table_slots == at).all():
            self.foreign[TABLE] = "is of another buffer: all records are in their slots, and none is valid"
        # Until a record is stored, columns that no argument fixed are made again by the first episode.
        self.has_columns = manifest.schema is not None and (has_records or manifest.locked_by_argument)
        if self.has_columns:
            self._columns = [self._open_column(i) for i in range(len(manifest.files))]
        ours = [manifest.label(i) for i, column in enumerate(self._columns) if column is None]
        for name in [*self.disk.names(self.folder), *self.names(COLUMNS)] if ours else ():
            if name not in (*NAMES, *manifest.files) and self._label(name) in ours:
                self.foreign[name] = self.whose(name)
        for name in (*self.faults, LOCK, *(self.names(DATA) if self.faults else ())):
            if what := self.whose(name):
                self.foreign[name] = what
        self._find_state(records, whole)

    def _open_column(self, index: int) -> Column | None:
        """Return a column in whatever state it is; None where it lies nowhere, or something else lies there."""
        file, column = self.fixed.files[index], self.fixed.column(index, self.disk, self.path(COLUMNS))
        if faults := self._words_of(file, column.faults):
            self.faults[file] = faults
        if self.labels.get(file) not in (None, column.label):
            self.foreign[file] = self.whose(file)
            return None
        return column if column.exists() else None

    def is_gone(self, index: int) -> bool:
        """Tell whether a column lies nowhere."""
        return self._columns[index] is None

    # -- the newest state ------------------------------------------------------------------------

    def look_at_states(self) -> tuple[State | None, State | None]:
        """Return both slots of state.bin; what stays torn is damage, and no write under way."""
        for _ in range(_LOOKS):
            states = one, other = self._read_states(self.fixed.uuid)
            if one is not None and other is not None and abs(one.generation - other.generation) == 1:
                break
        return states

    def has_moved(self) -> bool:
        """Tell whether a writer has committed since this look."""
        return self.manifest is not None and _newest(self.look_at_states()) != self.shown

    def _find_state(self, records: Array, whole: Array) -> None:
        manifest, boot = self.fixed, self.disk.boot_id()
        self.clean = is_clean(self.shown, boot)
        try:
            found = find(self.table, self.shown, boot, manifest, self.paths.table)
        except DamageError as error:
            self.refused = error
        if self.clean and self.refused is None:  # the state that an opening takes
            reached = Reached(found.seq, found.first, found.tail, found.head, TABLE)
        else:
            reached = self._newest_claim(records[whole & possible(records, manifest.max_steps, self.table.slots)])
        self.reached = reached = self._with_oldest(reached)
        self.strays = [int(number) for number in records["seq"][whole & (records["seq"] > reached.seq)]]
        if reached.seq:
            self.records, self.valid = self.table.read_range(reached.first, reached.seq)
            self.valid &= possible(self.records, manifest.max_steps, self.table.slots)

    def _newest_claim(self, records: Array) -> Reached:
        """Return what the newest record says, unless state.bin or the manifest know of a newer one."""
        manifest, shown, counts, best = self.fixed, self.shown, self.fixed.table, Reached()
        claims = list[tuple[int, Reached]]()  # each with the number of a record that is known to have been stored
        if len(records):
            one = Record.of(records[int(np.argmax(records["seq"]))])
            claims.append((one.seq, Reached(one.seq, one.first, one.tail, one.head, TABLE)))
        if shown is not None:
            need = shown.seq if self.clean else shown.mark
            claims.append((need, Reached(shown.seq, shown.first, shown.tail, shown.head, STATE)))
        if {"seq", "first", "tail", "head"} <= counts.keys():
            tail, head = Position(counts["tail"]), Position(counts["head"])
            claims.append((counts["seq"], Reached(counts["seq"], counts["first"], tail, head, MANIFEST)))
        size = self.disk.size(self.paths.table) if self.disk.is_file(self.paths.table) else 0
        most = min(self.table.slots, max(_slots_for(size), _MOST_LOST))
        for need, claim in claims:  # unless there can't be such a state: only a forger claims it
            fits = claim.seq - most < claim.first <= claim.seq + 1 and claim.seq >= need
            if fits and 0 <= claim.tail <= claim.head <= min(claim.tail + manifest.max_steps, MOST):
                best = claim if need > best.seq else best
        return best

    def _with_oldest(self, reached: Reached) -> Reached:
        """Return a state with the right oldest record, where its neighbours show that the one it names is not."""
        first, tail = reached.first, reached.tail
        while first < reached.seq and (one := self.table.read(first)) and one.start < tail:
            first += 1
        while first > 1 and (one := self.table.read(first - 1)) and one.live and one.start >= tail:
            first -= 1
        if first != reached.first:
            self.misled = f"record {reached.seq} calls record {reached.first} the oldest live one, and {first} is"
        return replace(reached, first=first)

    def live(self) -> Array:
        """Return the valid records of the live episodes, oldest first; a damaged flag drops none."""
        r = self.records
        live = self.valid & (r["kind"] == EPISODE) & (r["flags"] & DROPPED != DROPPED)
        found: Array = r[live & (r["start"] >= self.reached.tail)]
        return found

    def newest(self, without: Collection[int] = ()) -> Record | None:
        """Return the record of the newest live episode, but for those `without`."""
        live = self.live()
        live = live[~np.isin(live["seq"], list(without))]
        return Record.of(live[-1]) if len(live) else None

    # -- findings --------------------------------------------------------------------------------

    def findings(self, progress: Progress | None = None, among: Collection[int] | None = None) -> Iterator[Finding]:
        """Yield what is wrong: all that an opening refuses is among it.

        Args:
            progress: called with `(done, of)` episodes.
            among: numbers of the episodes to verify; None: all.
        """
        sound = True
        for finding in self._findings(progress, among):
            sound = False
            yield finding
        if sound and self.refused is not None:
            yield Finding(TABLE, self._refusal())

    def _refusal(self) -> str:
        said = str(self.refused).removeprefix(f"{self.paths.table}: ")
        return said.removesuffix("; run ringmap.check on the buffer")

    def _findings(self, progress: Progress | None, among: Collection[int] | None) -> Iterator[Finding]:
        for file, faults in self.faults.items():
            if file not in self.foreign:
                yield from (Finding(file, fault) for fault in faults)
        yield from (Finding(file, what) for file, what in self.foreign.items())
        if self.manifest is None:
            what = "can't be made again from the other files, and little can be checked without it"
            yield Finding(MANIFEST, what)
            for name in self.names(COLUMNS):
                if name not in self.labels:
                    yield Finding(name, "its label can't be read either, so nothing tells what it was")
            return
        yield from (Finding(MANIFEST, what) for what in self._of_manifest(self.manifest))
        if STATE not in self.foreign and STATE not in self.faults:
            yield from (Finding(STATE, what) for what in self._of_states())
        if TABLE not in self.foreign:
            yield from self._of_table(self.manifest)
        yield from self._of_rows(progress, among)
        yield from self._of_small_state()
        yield from self._of_streams()
        for sidecar in SIDECARS:
            yield from (Finding(sidecar.names[0], fault) for fault in self.sidecar_faults(sidecar, self.newest()))
        yield from self._of_others(self.manifest)

    def _of_manifest(self, manifest: Manifest) -> Iterator[str]:
        stored, counts, number = self.reached.seq, manifest.table, manifest.table.get("seq", 0)
        if manifest.witness > stored:
            yield f"says that record {manifest.witness} was stored, but record {stored} is the newest"
        record = self.table.read(number) if number else None
        if record is not None and any(counts.get(name) != getattr(record, name) for name in ("first", "tail", "head")):
            yield f"counts disagree with record {number}, which they name"

    def _of_states(self) -> Iterator[str]:
        (one, other), stored = self.states, self.reached.seq
        if one is not None and other is not None and abs(one.generation - other.generation) != 1:
            yield f"generations of its slots are {one.generation} and {other.generation}, expected neighbours"
        for slot, state in enumerate(self.states):
            if state is None:
                yield f"slot {slot} is torn or damaged"
                continue
            need = max(state.mark, state.seq if self.clean else 0)
            if need > stored:
                yield f"slot {slot} shows record {need}, but record {stored} is the newest"
            record = self.table.read(state.seq) if state.seq else None
            if record is not None and (record.first, record.tail, record.head) != (state.first, state.tail, state.head):
                yield f"slot {slot} disagrees with record {state.seq}, which it shows"
        # A kill may come between record and state: one is not shown then. A flush has shown all that it counts.
        least = stored - 1 if self.clean and self.reached.by == TABLE else 0
        if self.shown is not None and self.shown.seq < max(least, self.fixed.table.get("seq", 0)):
            yield f"shows record {self.shown.seq}, but {stored} is stored: an old copy"

    def broken(self) -> list[tuple[int, int]]:
        """Return the runs `(first, last)` of live records that are damaged or missing."""
        numbers = self.reached.first + np.flatnonzero(~self.valid)
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        return [(int(run[0]), int(run[-1])) for run in runs if len(run)]

    def _of_table(self, manifest: Manifest) -> Iterator[Finding]:
        reached = self.reached
        if isinstance(self.refused, NewerVersionError):
            yield Finding(TABLE, self._refusal())
        for first, last in self.broken():
            run = f"record {first} is" if first == last else f"records {first} to {last} are"
            whole = self.table.read(first) if first == last else None
            if whole is not None:  # its checksum holds
                yield Finding(TABLE, why_impossible(whole), first)
                continue
            why = f"; {reached.by} knows of record {reached.seq}" if reached.by != TABLE else ""
            yield Finding(TABLE, f"{run} damaged or missing{why}", first)
        for at in np.split(np.arange(len(self.records)), np.flatnonzero(np.diff(self.valid)) + 1):
            if len(at) and self.valid[at[0]]:
                yield from (Finding(TABLE, f"record {seq} {what}") for seq, what in breaks_of(self.records[at]))
        if (steps := reached.head - reached.tail) > manifest.max_steps:
            yield Finding(TABLE, f"{steps} steps are live, expected at most max_steps={manifest.max_steps}")
        if self.misled:
            yield Finding(TABLE, self.misled)
        for number in self.strays:
            yield Finding(TABLE, f"record {number} can't be of this ring: record {reached.seq} is the newest")

    # -- rows and blobs --------------------------------------------------------------------------

    def _of_rows(self, progress: Progress | None, among: Collection[int] | None) -> Iterator[Finding]:
        """Yield what is wrong with the rows and blobs of live episodes; read in parallel. Columns that lie nowhere are
        left out."""
        for folder in (DATA, OPEN):
            if not self.disk.is_folder(self.path(folder)):
                yield Finding(folder, "folder is missing")
        live = self.live() if self.has_columns else self.records[:0]
        if among is not None:
            live = live[np.isin(live["seq"], list(among))]
        named = set[str]()
        threads = pool(4, "ringmap-check")  # reads and xxhash release the GIL
        with threads or contextlib.nullcontext():
            for at in range(0, len(live), _BATCH):
                batch = [Record.of(row) for row in live[at : at + _BATCH]]
                for found in (threads.map if threads is not None else map)(self._of_episode, batch):
                    yield from found
                    for name in {one.file for one in found if one.file.startswith(DATA)} - named:
                        named.add(name)
                        if what := self.whose(name):
                            self.foreign[name] = what
                            yield Finding(name, what)
                if progress is not None:
                    progress(min(at + _BATCH, len(live)), len(live))

    def _of_episode(self, record: Record) -> list[Finding]:
        """Return what is wrong with the bytes of a live episode."""
        seq, segment, files = record.seq, self.segment_file(record.blob_segment), self.fixed.files
        where = f"of record {seq} (positions {record.start} to {record.head})"
        blob, why = self.blob(record), dict[str, str]()
        sums = [self._sum(i, record, why) for i in range(len(files))]
        known = [total for total in sums if total is not None]
        is_whole = len(known) == len(sums) and combine(known) == record.rows_sum
        if blob is None:
            gone = "damaged" if self.disk.is_file(self.path(segment)) else "gone with its segment"
            found = [Finding(segment, f"blob {where} is {gone}", seq)]
            if len(known) == len(sums) and not is_whole:
                found += [Finding(file, f"rows {where} may be damaged", seq) for file in files]
            return found
        try:
            expected, _, data, packed = decode_blob(blob)
            decode_data(data)
            words = len(unpack(packed))
        except ValueError as error:
            return [Finding(segment, f"blob {where} does not make sense: {error}", seq)]
        if is_whole:  # a reader takes them, whatever the blob says of single columns
            return self._strange_codes(record, words, where)
        if len(expected) != len(sums) or combine(expected) != record.rows_sum:
            return [Finding(TABLE, f"record {seq} and its blob disagree", seq)]
        return [
            Finding(file, f"rows {where} are damaged{why.get(file, '')}", seq)
            for file, total, want in zip(files, sums, expected, strict=True)
            if total is not None and total != want
        ]

    def _strange_codes(self, record: Record, words: int, where: str) -> list[Finding]:
        """Return the columns of text in which a whole episode has codes beyond its words."""
        found, manifest = list[Finding](), self.fixed
        for column, one in zip(self._columns, manifest.schema.columns if manifest.schema else (), strict=True):
            if not one.is_text or column is None:
                continue
            pieces = (
                p for slot, n in manifest.ring.pieces(record.start, record.length) for p in column.pieces(slot, n)
            )
            codes = np.frombuffer(b"".join(p for p in pieces if isinstance(p, bytes)), "<i4")
            if len(codes) and not 0 <= codes.min() <= codes.max() < words:
                what = f"text {where} is not among the {words} words of its commit"
                found.append(Finding(manifest.files[self._columns.index(column)], what, record.seq))
        return found

    def _sum(self, index: int, record: Record, why: dict[str, str]) -> int | None:
        """Return the checksum of an episode's rows in a column; None if it lies nowhere. Note why they can't be
        read."""
        column, total = self._columns[index], xxhash.xxh3_64()
        if column is None:
            return None
        for slot, steps in self.fixed.ring.pieces(record.start, record.length):
            for data in column.pieces(slot, steps):
                if isinstance(data, str):
                    why[self.fixed.files[index]] = f": {data}"
                    if "can't be read: " in data:
                        self.unreadable.append(f"{column.path}: {data}")
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

    def num_sums(self, record: Record) -> int | None:
        """Return how many columns an episode was stored with, as its blob and its record say; None if they do not."""
        with contextlib.suppress(ValueError):
            sums = decode_blob(self.blob(record) or b"")[0]
            return len(sums) if combine(sums) == record.rows_sum else None
        return None

    # -- the small state -------------------------------------------------------------------------

    @property
    def carried(self) -> Mapping[str, Any]:
        """The small state in the manifest; empty if it is damaged, or of a record that is not stored."""
        kept = self.fixed.carried
        ahead = bool(kept) and kept["seq"] > self.reached.seq
        return {} if ahead or self._carried_fault() else kept

    def _carried_fault(self) -> str:
        return small_state_of(0, self.table, self.blob, self.fixed.carried).fault

    def small_states(self) -> Iterator[SmallState]:
        """Yield the small states that an opening may take, the right one first."""
        return small_states(self.reached.seq, self.table, self.blob, self.carried)

    def _of_small_state(self) -> Iterator[Finding]:
        newest = self.table.read(self.reached.seq) if self.reached.seq else None
        if newest is not None and newest.kind != EPISODE and newest.blob_size and self.blob(newest) is None:
            what = f"blob of record {newest.seq}, which carries the small state, is damaged"
            yield Finding(self.segment_file(newest.blob_segment), what, newest.seq)
        small = next(self.small_states())
        carrier = self.table.read(small.seq) if small.fault else None
        if carrier is not None:
            yield Finding(self.segment_file(carrier.blob_segment), small.fault)
        if fault := self._carried_fault():
            yield Finding(MANIFEST, fault)

    # -- what lies beside ------------------------------------------------------------------------

    def stream_of(self, folder: str) -> StoredSteps | None:
        """Return what the stream in a folder of `open/` holds, None when there is none (any more)."""
        path, stream = self.path(f"{folder}/{STREAM}"), None
        for _ in range(3):  # a frame may be under way
            if not (self.disk.is_folder(self.path(folder)) and self.disk.is_file(path)):  # a link leads elsewhere
                return None
            try:
                stream = read_steps(self.disk, path, self.fixed.max_steps)
            except (OSError, NotAFileError):
                return None
            if not stream.fault:
                break
        return stream

    def _of_streams(self) -> Iterator[Finding]:
        for folder in self.names(OPEN):
            stream = self.stream_of(folder)
            if stream is not None and stream.fault:
                what = f"{stream.fault}; the {stream.count} steps before it are whole"
                yield Finding(f"{folder}/{STREAM}", what)

    @property
    def home(self) -> Home:
        """The directory as sidecars know it."""
        manifest = self.fixed
        return Home(self.disk, self.folder, manifest.uuid, manifest.rows, manifest.schema)

    def sidecar_faults(self, sidecar: type[Sidecar], newest: Record | None) -> list[str]:
        """Return what is wrong with a sidecar, in words, given the newest live episode; nothing where there is none."""
        found, home = list[str](), self.home
        for _ in range(3):  # a write may be under way
            faults = partial(sidecar.faults, home, newest)
            found = self._words_of(sidecar.names[0], faults) if sidecar.is_part_of(home) else []
            if not found:
                break
        return found

    def orphans(self, without: Collection[int] = ()) -> list[str]:
        """Return the segments that no record names, but for those `without`, and that are not the newest."""
        records, valid, _ = self.table.scan()
        valid = valid & ~np.isin(records["seq"], list(without))
        live = self.live()
        newest = live["blob_segment"][~np.isin(live["seq"], list(without))].max(initial=0)
        named = set(np.unique(records["blob_segment"][valid]).tolist())
        return [
            name
            for name in self.names(DATA)
            if (number := segment_number(os.path.basename(name))) is not None
            and number < newest
            and number not in named
            and self.disk.is_file(self.path(name))
        ]

    def _of_others(self, manifest: Manifest) -> Iterator[Finding]:
        """Find what is not part of a buffer, and segments that nothing names."""
        for index, file in enumerate(manifest.files if self.has_columns else ()):
            if (column := manifest.column(index, self.disk, self.path(COLUMNS))).exists():
                yield from (Finding(f"{file}/{name}", "is not part of a buffer") for name in column.strays())
        # Where records are lost, the segments that they named are no news.
        orphans = [] if self.broken() else self.orphans()
        columns = self.names(COLUMNS) if self.has_columns else []
        for name in [*self.disk.names(self.folder), *columns, *self.names(DATA), *self.names(OPEN)]:
            path, base = self.path(name), name.rpartition("/")[2]
            if name in NAMES or name in manifest.files or base in FINE or base.startswith(".nfs"):
                continue
            if name.startswith(f"{OPEN}/") and self.disk.is_folder(path):
                inner = [n for n in self.names(name) if n not in (f"{name}/{STREAM}", f"{name}/{WORDS}")]
                yield from (Finding(one, "is not part of a buffer") for one in inner)
            elif name.startswith(f"{DATA}/") and segment_number(base) is not None:
                if self.disk.exists(path) and (kind := self.disk.kind(path)):
                    yield Finding(name, f"is {kind}, expected a regular file: what leads elsewhere is not followed")
                elif name in orphans:
                    yield Finding(name, ORPHAN)
            elif self.disk.exists(path):
                yield Finding(name, "is not part of a buffer")

    def close(self) -> None:
        """Release the files."""
        if self.manifest is not None:
            self.table.close()
        for column in self._columns:
            if column is not None:
                column.close()
        self._columns = [None] * len(self._columns)


def _newest(states: tuple[State | None, State | None]) -> State | None:
    return max((s for s in states if s is not None), key=lambda s: s.generation, default=None)


def _slots_for(nbytes: int) -> int:
    """Return how many records a table of this size has room for."""
    return max(0, nbytes - EpisodeTable.nbytes(0)) // RECORD.itemsize


def _is_of_another_version(data: bytes) -> bool:
    """Tell a manifest of another version from one of ours whose version, or layout, was damaged."""
    body = json.loads(data)
    if type(body.get("version")) is not int:
        return False
    with contextlib.suppress(DamageError):
        Manifest.decode(json.dumps({**body, "version": VERSION, "layout": LAYOUT}).encode(), "")
        return False
    return True
