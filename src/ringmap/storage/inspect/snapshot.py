"""A snapshot: a copy of a buffer as of one commit, made while its writer goes on.

    look -> copy rows [tail, head)  -> look again -> what came in meanwhile: copy that -> look again ...
            all of them, or reflinks                  little, and less each time

A row that is still live at a look was not overwritten before it. So of the rows copied before a look, those that are
still live are whole. Only rows copied since the previous look, and retired at this one, may be torn. The copy is
complete, and holds the state at the start of the round, if there are none, or if their episodes are whole by their
checksums. A fast writer could make
rounds endless: on the writer's own handle, no other thread writes during the last one.

    .NAME.ringmap-unfinished/    columns, segments, table, state, manifest -> synced -> renamed to NAME

Invariants: the source is only read; nothing is at the target before all of it is there and synced; what is in the
copy was one committed state. It has a UUID of its own, which labels, records and states carry.
Not here: what is copied in a round (copying.py), the place and the name (workplace.py), how a disk shares bytes
(system.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ringmap.errors import (
    CorruptError,
    LappedError,
)
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect.copying import Copy, Kept, Look, StartOver, look
from ringmap.storage.inspect.workplace import workplace
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader
from ringmap.storage.records.names import LOCK

__all__ = ["snapshot"]

_TRIES = 10
_LITTLE_NBYTES = 4 << 20
"""What is left to copy when a writer may be kept waiting for it: a millisecond or two."""


def snapshot(
    source: Handle,
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
    own = "" if source.disk.volatile else source.folder
    with workplace(own, disk, folder, where) as beside, _followed(source) as followed:
        _make(followed, disk, beside, where, kept or {})


@contextlib.contextmanager
def _followed(source: Handle) -> Iterator[Handle]:
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


def _make(source: Handle, disk: Disk, beside: str, where: str, kept: Kept) -> None:
    """Make the copy in the empty directory `beside`, whole and synced."""
    for _ in range(_TRIES):
        copy = Copy(source, disk, beside)
        try:
            copy.finish(_follow(source, copy, where), kept)
            return
        except StartOver:
            for name in set(disk.names(beside)) - {LOCK}:
                disk.discard(os.path.join(beside, name))
        finally:
            copy.close()
    raise LappedError(f"{where}: {source.folder}: writers opened the buffer again and again")


def _follow(source: Handle, copy: Copy, where: str) -> Look:
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
                raise CorruptError(f"{source.folder}: {copy.missing}; run ringmap.check on the buffer")
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
                raise CorruptError(f"{writer.folder}: {copy.missing}; run ringmap.check on the buffer")
            done.append(now)
        except OSError as error:  # of the copy's disk: no word on what the writer stores
            done.append(error)

    writer.exclusively(where, last_round)
    if isinstance(done[0], OSError):
        raise done[0]
    return done[0]
