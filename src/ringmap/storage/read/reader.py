"""The reader: follows a writer in another process, and never writes.

    peek at state.bin -> read the new records -> peek again

Invariants: memory holds a committed state of the writer; a record counts only with
its checksum and its number, or where its neighbours say the same; gathered rows count only if the
tail that is read afterwards is not beyond them (the caller does this, with `newest_tail`).
Not here: sampling, redraws.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, EnvironmentFault, LappedError, ReplacedError
from ringmap.storage.columns.rows import Rows
from ringmap.storage.columns.schema import Schema
from ringmap.storage.disk.calls import refuse_nested, thread
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import holder_of
from ringmap.storage.disk.system import Room
from ringmap.storage.read.handle import Handle, Timeline
from ringmap.storage.read.read_live import Tries
from ringmap.storage.read.recovery import (
    Progress,
    bad_episodes,
    find,
    is_clean,
    is_next,
    live_records,
)
from ringmap.storage.records.manifest import hold, read_manifest
from ringmap.storage.records.state import State, StateFile
from ringmap.storage.records.table import EpisodeTable, Record
from ringmap.storage.ring.ring import Position

__all__ = ["Reader"]

Array = np.ndarray[Any, np.dtype[Any]]

HELD_S = 0.1
"""Seconds between two looks at whether the directory is still at its path. Until the next one a reader shows what was
there."""

_BETWEEN = State(era=-1)
"""The state while memory changes: an interrupt leaves this value, and the next peek reads the whole state again."""


def _own(record: Record) -> tuple[int, ...]:
    """Return fields that differ between any two records of a buffer: no place in a segment is written twice."""
    place = record.blob_segment, record.blob_offset, record.blob_sum
    return record.start, record.length, record.rows_sum, *place


class Reader(Handle):
    """A live view of a buffer that another handle may be writing.

    Args:
        disk: the disk that holds it.
        folder: its directory.
        progress: called while episodes are verified after a reboot.
        mapped: whether to read through maps, where a bad sector or a truncated file causes SIGBUS.
        uuid: of the expected buffer, if this handle replaces another one; None: any.

    Raises:
        ReplacedError: the buffer there is not `uuid`.
        UnknownFormatError, CorruptError, NewerVersionError: not a buffer, or a damaged one.
        EnvironmentFault: a network file system with the writer on another host.

    Cost: opening reads the records of the live episodes once; 20 bytes of private memory each.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        progress: Progress | None = None,
        mapped: bool = True,
        uuid: bytes | None = None,
    ) -> None:
        refuse_nested("ReplayBuffer.open")
        disk = hold(disk, folder)
        super().__init__(disk, folder, read_manifest(disk, folder), mapped)
        if uuid not in (None, self.manifest.uuid):
            raise ReplacedError(
                f"{folder}: another buffer is there than the one that this handle is a copy of (uuid "
                f"{self.manifest.uuid.hex()}, expected {bytes(uuid or b'').hex()}); open the buffer where it is now"
            )
        self._progress = progress
        self._refuse_distant_writer()
        manifest = self.manifest
        self.table = EpisodeTable.open(disk, self.paths.table, manifest.table_slots, manifest.uuid, False, self.mapped)
        self._state_file = StateFile.open(disk, self.paths.state, manifest.uuid, write=False, mapped=self.mapped)
        self._peeked: tuple[tuple[int, int] | None, State] = None, State()
        self._copies_up = disk.system.copies_up(folder)
        self._held_until = self._same_until = 0.0
        self._shown = State()
        self._newest: Record | None = None
        self._lost: bytes | None = None
        self._load()

    def _refuse_distant_writer(self) -> None:
        if not self.disk.system.is_network(self.folder):
            return
        holder = holder_of(self.paths.lock)
        if holder.get("host") not in (None, socket.gethostname()):
            raise EnvironmentFault(
                f"{self.folder}: lies on a network file system and was last written by host {holder['host']}: "
                "its page cache is not ours, so a reader here could be served torn rows; read on that host, "
                "or dump the buffer and read the dump"
            )

    def _load(self) -> None:
        """Read the whole state again. O(records).

        Raises:
            NewerVersionError: its writer began to use a feature that this release does not know.
        """
        tries = Tries(self.retry_s)
        while tries.again():
            shown, data = self._state_file.peek()
            shown = shown or self._state_file.newest(data)
            self._read_manifest_again()  # after the peek: a writer replaces it before it begins an era
            self._lost = None if shown or StateFile.witnesses_commits(data) else data
            boot = self.disk.boot_id()
            if shown is not None and is_clean(shown, boot):
                self._refuse_old_state(shown, data)
                if self._follow(shown, shown.first, anew=True):
                    return
                continue
            # No sync covers what is on the disk: examine it as a recovery would, and use what is whole.
            found = find(self.table, shown, boot, self.manifest, self.paths.table)
            if self._changed(data):
                continue  # a writer is opening it at this moment
            if found.seq and self.rows is None:
                self._open_rows(found.head)
            bad: dict[int, str] = {}
            if self.rows is not None:
                behind = found.doubtful()
                bad = bad_episodes(behind, self.rows, self.segments, self._progress)
            if self._changed(data):
                continue
            found.drop(bad)
            with thread.searching, self.lock:
                self._change_to(shown or State(), found.live.newest, self._apply, found, found.live, True)
            return
        raise self._lapped("opening", tries)

    def _read_manifest_again(self) -> None:
        manifest = read_manifest(self.disk, self.folder)
        if manifest.uuid != self.manifest.uuid:
            raise ReplacedError(f"{self.folder}: another buffer's manifest is there now; open the buffer again")
        self.manifest = manifest

    def _refuse_old_state(self, shown: State, data: bytes) -> None:
        """Raise if more is stored than the one commit that a killed writer may not have shown."""
        newer = self.manifest.witness
        if self.table.read(shown.seq + 2) is not None:
            newer = shown.seq + 2
        if newer > shown.seq and not self._changed(data):
            raise CorruptError(
                f"{self.paths.state}: shows record {shown.seq}, but record {newer} is stored: an old copy; "
                "run ringmap.check on the buffer"
            )

    def _changed(self, data: bytes) -> bool:
        return self._state_file.data() != data

    def recover_if_stale(self) -> None:
        """Read the whole state again if an interrupt came while memory changed."""
        if self._shown is _BETWEEN:
            with thread.searching, self.lock:  # unless another thread is changing it
                is_torn = self._shown is _BETWEEN
            if is_torn:
                self._load()

    def refresh(self) -> bool:
        """Catch up with the writer; tell whether anything changed. O(new episodes).

        Raises:
            ReplacedError: the directory was replaced.
            LappedError: the writer overtook this reader repeatedly.
        """
        self._check_held()
        changed = self._catch_up()
        self.pulse.begin()
        return changed

    def _catch_up(self) -> bool:
        tries: Tries | None = None
        while True:
            shown = self._peek()
            if shown.seq == self._shown.seq and shown.era == self._shown.era:
                return False
            if shown.era != self._shown.era:
                self._load()
                return True
            if self._follow(shown, max(self.seq + 1, shown.first), anew=False):
                return True
            tries = tries or Tries(self.retry_s)
            if not tries.again():
                raise self._lapped("refresh", tries)

    def generations(self) -> tuple[int, int] | None:
        """Return what changes with each state that is shown, without a system call; None where that can't be told."""
        return self._state_file.generations()

    def map_state(self, room: Room, at: int) -> bool:
        """Map the state file into a room; False where `generations` returns None."""
        return self._state_file.map_into(room, at)

    def _check_held(self) -> None:
        """Raise if the directory was replaced, or `state.bin` in it, whose file would never change again; by system
        calls, but at most once in `HELD_S` seconds if the state is mapped."""
        now = time.monotonic()
        if now >= self._same_until:
            if self._state_file.is_replaced(self.disk):
                self.disk.check_held("ReplayBuffer")
                raise ReplacedError(
                    f"{self.paths.state}: was removed, or made anew by ringmap.repair, since the buffer was opened; "
                    "open it again"
                )
            self._same_until = now + HELD_S
        if now >= self._held_until:
            self.disk.check_held("ReplayBuffer")
            if self._copies_up:
                self._refuse_copied()
            if self._state_file.generations() is not None:
                self._held_until = now + HELD_S

    def _refuse_copied(self) -> None:
        """Raise if a writer made overlayfs copy the state file: its number may be the same, so the content is
        compared."""
        if self._state_file.is_copied(self.disk):
            raise ReplacedError(
                f"{self.folder}: lies on overlayfs (a container's layers), and a writer has opened it since: that "
                "copied its files up from "
                "a lower layer, and the maps of this reader are of those before. Open it again; or keep buffers on a "
                "volume"
            )

    def _peek(self) -> State:
        """Return the newest state that was shown, without a system call if that is the one of the last time."""
        generations = self._state_file.generations()  # before the state: one that is shown after it counts as new
        before, shown = self._peeked
        if generations is not None and generations == before:
            return shown
        if self._copies_up:
            self._refuse_copied()
        # A disk had lost it when this reader looked at the records. A writer's opening makes both slots whole before it
        # writes a row: while the file is unchanged, no process has written since.
        if self._lost is not None and self._state_file.data() == self._lost:
            newest: State | None = self._shown
        else:
            newest = self._state_file.peek()[0]
        if newest is None:
            raise CorruptError(
                f"{self.paths.state}: stays torn: its writer was killed in mid-write; open the buffer for "
                "writing once, which repairs it"
            )
        self._peeked = generations, newest
        return newest

    def shown_tail(self) -> Position:
        """Return the position below which rows may have been overwritten by now. Without a system call, if the state is
        mapped.

        Raises:
            ReplacedError: the directory was replaced.
            CorruptError: state.bin stays torn, so the tail is unknown.
        """
        self._check_held()
        shown = self._peek()
        # The state found after a reboot may differ from the one still shown.
        if shown is self._shown or shown == self._shown:
            return self.tail
        if shown.era != self._shown.era and not self._is_stored_still():
            return max(self.head, shown.tail)  # nothing that was known is certain
        return shown.tail

    def _is_stored_still(self) -> bool:
        """Tell whether another writer, which opened the buffer since, continued after the newest record known here.

        If not, it found an earlier state, as after a failed sync, and writes other episodes to the same positions.
        """
        known = self._newest
        record = None if known is None else self.table.read(known.seq)
        return known is None or (record is not None and _own(record) == _own(known))

    def _follow(self, shown: State, fresh: int, anew: bool) -> bool:
        """Read records `[fresh, shown.seq]` into memory; False if the writer was faster."""
        if not anew and shown.first <= shown.seq + 1 < fresh:
            return False  # another thread was, and knows more than was shown at the peek
        if shown.seq and self.rows is None:
            if not anew:
                self._read_manifest_again()  # the first episode fixed the columns
            self._open_rows(shown.head)
        if not anew and shown.seq == fresh and self._follow_one(shown):
            return True
        state = shown.seq, shown.tail, shown.head
        found = live_records(self.table, fresh, state, self.manifest.max_steps, self.paths.table)
        if found.bad or not found.hashed:
            again = self._state_file.peek()[0]
            if again is None or again.era != shown.era:
                return False
            if found.bad:
                if again.first > found.bad:
                    return False
                raise CorruptError(
                    f"{self.paths.table}: record {found.bad} is damaged; run ringmap.check on the buffer"
                )
            if again.seq + 1 - self.table.slots >= fresh:  # its slot may have been taken for that number
                return False

        with thread.searching, self.lock:
            if not anew and (
                shown.era != self._shown.era or shown.seq < self.seq or fresh != max(self.seq + 1, shown.first)
            ):
                return False  # another thread was faster, or a signal handler
            if anew and self.rows is not None:
                self.rows.forget()
            newest = found.newest or (None if anew else self._newest)
            self._change_to(shown, newest, self._apply, shown, found, anew)
        return True

    def _follow_one(self, shown: State) -> bool:
        """Take the single record that came since the last peek; False if it is not the plain next episode."""
        record = self.table.read(shown.seq)
        if record is None or record.tail != shown.tail or record.start + record.length != shown.head:
            return False
        with thread.searching, self.lock:
            known = shown.era == self._shown.era and shown.seq == self.seq + 1
            limits = self.manifest.max_steps, self.table.slots
            if not known or not is_next(record, self.tail, self.head, self.next_ordinal, self.time, *limits):
                return False
            self._change_to(shown, record, self._apply_next, record)
        return True

    def _change_to(self, shown: State, newest: Record | None, apply: Callable[..., None], *args: Any) -> None:
        """Change memory to the shown state, whose newest record is known, by `apply(*args)`. Holds `lock`."""
        if shown.era != self._shown.era and not self._is_stored_still():
            self.pulse.break_timeline()
            self.timeline = Timeline()
            self.segments.forget()
        self._shown = _BETWEEN
        apply(*args)
        self._newest = newest
        self._shown = shown
        self.pulse.beat()

    def _open_rows(self, head: int) -> None:
        manifest = self.manifest
        if manifest.schema is None:
            raise CorruptError(f"{self.paths.manifest}: names no columns, but episodes are stored; put it back")
        columns = manifest.columns(self.disk, self.paths.columns)
        self._adopt(Rows(manifest.schema, columns, manifest.ring).open(write=False, head=head, mapped=self.mapped))

    @property
    def schema(self) -> Schema | None:
        """The columns, once an episode was stored or a schema was given."""
        known = self.rows is not None or self.manifest.locked_by_argument
        return self.manifest.schema if known else None

    def _lapped(self, what: str, tries: Tries) -> LappedError:
        return LappedError(f"{self.folder}: {what}: the writer overtook this reader {tries}; raise max_steps")

    def close(self) -> None:
        """Release all files. A running read keeps them, or raises ClosedError."""
        super().close()
        self._state_file.close()
