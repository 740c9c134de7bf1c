"""A snapshot: a copy of a buffer as of one commit, made while its writer goes on.

    look -> copy rows [tail, head)  -> look again -> what came in meanwhile: copy that -> look again ...
            all of them, or reflinks                  little, and less each time

Rows that are live at a look were untouched until then. So what was copied before it is whole, as far as it is live
still; only of what was copied since the look before may a part have been overwritten. A round ends it if nothing
of that was retired, or the episodes that were are whole by their checksums: the copy is the state that the round
began with. On the writer's own handle the last round keeps writing out, so that there is a last one.

    .NAME.ringmap-unfinished/    columns, segments, table, state, manifest -> synced -> renamed to NAME

Invariants: the source is only read; nothing is at the target before all of it is there and synced; what is in the
copy was one committed state. It has a UUID of its own, which labels, records and states carry.
Not here: what is copied in a round (copying.py), how a disk shares bytes (system.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ringmap.errors import (
    CorruptError,
    ExistsError,
    InputError,
    LappedError,
    LockedError,
)
from ringmap.storage.commit.create import make_folder
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.advice import clear_errors
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.inspect.copying import Anew, Copy, Kept, Look, look
from ringmap.storage.read.reader import Reader
from ringmap.storage.read.source import Source
from ringmap.storage.records.layout import LOCK, NAMES, Paths

__all__ = ["snapshot"]

_TRIES = 10
_LITTLE_NBYTES = 4 << 20
"""What is left to copy when a writer may be kept waiting for it: a millisecond or two."""


def snapshot(
    source: Source,
    disk: Disk,
    folder: str,
    where: str,
    kept: Kept | None = None,
) -> None:
    """Make a copy of a buffer at `folder`; see `ReplayBuffer.snapshot`.

    Args:
        source: the buffer, open for writing or reading.
        disk: where the copy goes.
        folder: its directory, absolute.
        where: the method to name in an error.
        kept: what the handle has in memory of its sidecars.
    """
    folder = os.path.realpath(folder)
    _refuse(source, disk, folder, where)
    beside = os.path.join(
        os.path.dirname(folder), f".{os.path.basename(folder)}.ringmap-unfinished"
    )
    said = f"nothing is at {folder}, and the buffer is as it was"
    with clear_errors(where, folder, lambda: said):
        make_folder(disk, os.path.dirname(folder))
        with _workplace(disk, beside, folder, where), _followed(source) as followed:
            _refuse(source, disk, folder, where)  # another one may have come first
            _make(followed, disk, beside, where, kept or {})
            disk.rename(beside, folder)
            try:
                disk.sync_folder(os.path.dirname(folder))
            except OSError:  # it may be there after a power cut, or not: better not
                disk.remove_folder(folder)
                raise


def _refuse(source: Source, disk: Disk, folder: str, where: str) -> None:
    """Raise unless a copy may go there."""
    own = os.path.realpath(source.folder)
    if not source.disk.volatile and (folder == own or folder.startswith(own + os.sep)):
        raise InputError(f"{where}: {folder} lies inside the buffer itself; choose a path outside")
    if not disk.exists(folder):
        return
    if not disk.is_folder(folder) or disk.names(folder):
        raise ExistsError(
            f"{where}: something is at {folder} already; expected a directory that is new or empty"
        )
    if os.path.ismount(folder):
        raise InputError(
            f"{where}: {folder} is a mount point, which nothing can be renamed to; name a directory in it"
        )


@contextlib.contextmanager
def _workplace(disk: Disk, beside: str, folder: str, where: str) -> Iterator[None]:
    """Hold an empty directory under the temporary name, and leave nothing there if the block fails."""
    with contextlib.suppress(FileExistsError):
        disk.make_folder(beside)
    lock = WriterLock(disk, Paths(beside).lock, beside)
    try:
        lock.acquire()
    except LockedError:
        raise LockedError(
            f"{where}: a snapshot to {folder} is being made by {describe(holder_of(Paths(beside).lock))}; "
            "wait for it, or choose another path"
        ) from None
    except BaseException:
        if set(disk.names(beside)) <= {LOCK}:
            disk.remove_folder(beside)
        raise
    try:
        left = set(disk.names(beside)) - {LOCK}
        if foreign := left - NAMES:
            raise ExistsError(
                f"{where}: {beside} holds something that no snapshot left there ({', '.join(sorted(foreign)[:3])}); "
                "move it away"
            )
        try:
            for name in left:  # of a try that was killed
                disk.discard(os.path.join(beside, name))
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # what stays goes with the next try
                disk.remove_folder(beside)
            raise
    finally:
        lock.release()


@contextlib.contextmanager
def _followed(source: Source) -> Iterator[Source]:
    """Lend what follows the writer: the writer itself, or a reader whose catching up no one else sees."""
    if not isinstance(source, Reader):
        yield source
        return
    source.disk.check_held("ReplayBuffer.snapshot")
    with contextlib.closing(
        Reader(source.disk, source.folder, mapped=source.mapped, uuid=source.manifest.uuid)
    ) as reader:
        yield reader


# -- following the writer --------------------------------------------------------------------------


def _make(source: Source, disk: Disk, beside: str, where: str, kept: Kept) -> None:
    """Make the copy in the empty directory `beside`, whole and synced."""
    for _ in range(_TRIES):
        copy = Copy(source, disk, beside)
        try:
            copy.finish(_follow(source, copy, where), kept)
            return
        except Anew:
            for name in set(disk.names(beside)) - {LOCK}:
                disk.discard(os.path.join(beside, name))
        finally:
            copy.close()
    raise LappedError(f"{where}: {source.folder}: writers opened the buffer again and again")


def _follow(source: Source, copy: Copy, where: str) -> Look:
    """Copy round by round until the copy is whole; return the state that it is."""
    writer = source if isinstance(source, Store) and source.writable_here else None
    if writer is not None:  # says now if this handle may not keep writing out
        writer.exclusively(where, lambda _: None)
    now, left = look(source), float("inf")
    for _ in range(_TRIES):
        if copy.take(now):
            then = look(source)
            if copy.is_whole(now, then):
                return now
        else:
            then = look(source)
            if then.seq == now.seq and then.era == now.era:
                raise CorruptError(
                    f"{source.folder}: {copy.missing}; run ringmap.check on the buffer"
                )
        todo = copy.left(then)
        if writer is not None and (todo < _LITTLE_NBYTES or todo > left / 2):
            return _finish_alone(writer, copy, where)
        now, left = then, todo
    if writer is not None:
        return _finish_alone(writer, copy, where)
    raise LappedError(
        f"{where}: the writer of {source.folder} overtook this reader {_TRIES} times in a row; raise max_steps, or "
        "call it on the writer's own handle"
    )


def _finish_alone(writer: Store, copy: Copy, where: str) -> Look:
    """Copy the rest while nobody writes."""
    done: list[Look | OSError] = []

    def last_round(_: Any) -> None:
        try:
            now = look(writer)
            if not copy.take(now):
                raise CorruptError(
                    f"{writer.folder}: {copy.missing}; run ringmap.check on the buffer"
                )
            done.append(now)
        except OSError as error:  # of the copy's disk: no word on what the writer stores
            done.append(error)

    writer.exclusively(where, last_round)
    if isinstance(done[0], OSError):
        raise done[0]
    return done[0]
