"""An open episode: each step is on disk as soon as it is appended.

    open/<id>/steps.bin   [frame 0: columns][frame 1: step 0][frame 2: step 1] ...
    frame                 size (4 bytes), xxh3 of the payload seeded with its number (8), payload

Finishing is one ordinary commit, whose blob names the id, and then the file is removed. A power cut may undo the
removal until the folder `open/` is synced. So later commits carry the id until then, and a recovery
never stores an episode twice.

Invariants: the first truncated or damaged frame ends the episode; steps fit the schema
before they are written.
Not here: how a commit works (store.py), how the file is read back (stream_file.py).
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import CorruptError, InputError, ReplacedError, RoleError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.commit.commit_files import CommitFiles
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.advice import clear_reads
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.names import STREAM
from ringmap.storage.records.stream_file import FRAME, read_stream
from ringmap.storage.records.table import INTERRUPTED, TERMINATED, TRUNCATED

__all__ = ["OpenEpisode", "finish_open"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")


class OpenEpisode:
    """An episode being recorded, made by `ReplayBuffer.begin_episode`.

    Args:
        store: the target.
        casting: how values may be converted, as for the buffer.
        key_filter: the buffer's, applied to each step.
        small: provides the buffer's small state for the commit that ends the episode.

    Processes and threads: several may be open; each is used by one thread at a time.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100)
        >>> episode = buf.begin_episode()
        >>> for t in range(3):
        ...     episode.append({"obs": np.full(2, t, np.float32), "action": t})
        >>> episode.finish(terminated=True)
        >>> buf.num_episodes, buf.lengths.tolist()
        (1, [3])
    """

    def __init__(
        self,
        store: Store,
        casting: str,
        key_filter: Callable[[dict[str, Any]], dict[str, Any]] | None,
        small: Callable[[], AbstractContextManager[Mapping[str, Any] | None]] = nullcontext,
    ) -> None:
        self._small = small
        self.id = uuid.uuid4().hex
        self._store = store
        self._casting = casting
        self._filter = key_filter
        self._folder = os.path.join(store.paths.open, self.id)
        self._schema: Schema | None = None
        self._file: File | None = None
        # Bytes and frames that count: set together, so that an interrupt can't come in between.
        self._end = (0, 0)
        self._ended = False

    @property
    def num_steps(self) -> int:
        """Number of appended steps."""
        return max(0, self._end[1] - 1)

    def append(self, step: Mapping[str, Any]) -> None:
        """Add one step: column -> its value at this step (no time axis).

        Raises:
            InputError: the step does not fit the schema, or the episode would exceed max_steps.
            EnvironmentFault: the disk is full or fails; the steps before this one stay.

        Cost: one write; at durability="power" one sync.
        """
        where = "OpenEpisode.append"
        self._check_open(where)
        self._store.exclusively(where, lambda _: self._append(step, where))

    def _append(self, step: Mapping[str, Any], where: str) -> None:
        self._check_open(where)  # once more: a handler may have come first
        columns = {name: _one_step(name, value, where) for name, value in step.items()}
        if self._filter is not None:
            columns = self._filter(columns)
        arrays = as_columns(columns, where)
        if not arrays:
            raise InputError(f"{where}: the step has no columns")
        schema = self._schema or self._store.schema or Schema.of(arrays)
        fitted = schema.fit(arrays, self._casting, where)
        if self.num_steps >= self._store.ring.max_steps:
            raise InputError(
                f"{where}: the episode exceeds max_steps={self._store.ring.max_steps}; raise max_steps, or "
                "finish it and begin another"
            )
        if self._file is None:
            self._begin(schema)
        assert self._file is not None
        payload = b"".join(a.tobytes() for a in fitted.values())
        self._end = self._write(self._file, payload, self._end)

    def finish(
        self,
        terminated: bool = False,
        truncated: bool = False,
        episode_data: Mapping[str, Any] | None = None,
    ) -> None:
        """End the episode and commit it whole. With no steps, nothing is stored.

        Raises:
            InputError: the schema was fixed to another one meanwhile.
            EnvironmentFault: the disk is full or fails; call this again when it is repaired.
            CorruptError: the steps on disk are not all that were appended.
        """
        where = "OpenEpisode.finish"
        self._check_open(where)
        self._store.exclusively(
            where,
            lambda files: self._finish(files, terminated, truncated, episode_data, where),
        )

    def _finish(
        self, files: CommitFiles, terminated: bool, truncated: bool, episode_data: Mapping[str, Any] | None,
        where: str,
    ) -> None:  # fmt: skip
        self._check_open(where)  # once more: a handler may have come first
        store = self._store
        # An interrupted call may have stored it or not: `carried` knows, since a recovery came before this.
        if self.num_steps and self.id not in store.carried.get("finished", []):
            data = encode_data(dict(episode_data or {}), where)
            steps = _read_steps(store.disk, self._folder, store.ring.max_steps)
            if steps is None or len(steps[1][0]) < self.num_steps:
                raise CorruptError(
                    f"{where}: {self._folder} holds {len(steps[1][0]) if steps else 0} whole steps, but "
                    f"{self.num_steps} were appended: the file was damaged meanwhile; abandon the episode"
                )
            schema = steps[0]
            arrays = [
                a[: self.num_steps] for a in steps[1]
            ]  # an interrupted append may have left one more step
            flags = TERMINATED * bool(terminated) | TRUNCATED * bool(truncated)
            schema, arrays = _as_stored(store, schema, arrays, self._casting, where)
            with self._small() as small:
                store.commit_within(files, schema, arrays, data, flags, where, self.id, small)
        self._remove()

    def abandon(self) -> None:
        """End the episode without storing it."""
        where = "OpenEpisode.abandon"
        if not self._ended:
            self._check_open(where)
            # A power cut must not bring it back: interrupted="keep" would store it.
            self._store.alone(where, lambda: self._remove(durably=self._store.power))

    def __enter__(self) -> OpenEpisode:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Finish, or abandon after an exception."""
        if self._ended:
            return
        if kind is None:
            self.finish()
        elif (
            self._store.writable_here
        ):  # else the stream is not ours: a forked child's parent continues it
            self.abandon()

    def _check_open(self, where: str) -> None:
        if self._ended:
            raise RoleError(f"{where}: this episode has ended; call begin_episode for the next one")
        if not self._store.writable_here:
            self._store.exclusively(where, lambda _: None)  # raises with the reason

    def _begin(self, schema: Schema) -> None:
        disk = self._store.disk
        disk.remove_folder(self._folder)  # of an append that a full disk refused
        disk.make_folder(self._folder)
        file = disk.create(os.path.join(self._folder, STREAM))
        described = [[s.name, list(s.shape), s.dtype.str] for s in schema.columns]
        try:
            end = self._write(file, json.dumps(described).encode(), (0, 0))
            if self._store.power:
                disk.sync_folder(self._folder)
                disk.sync_folder(self._store.paths.open)
        except BaseException:
            file.close()
            raise
        self._schema, self._end = schema, end
        self._file = file  # last: from here on the stream counts as begun

    def _write(self, file: File, payload: bytes, end: tuple[int, int]) -> tuple[int, int]:
        """Write a frame after `(bytes, frames)` and return the new end."""
        size, frames = end
        frame = FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload, seed=frames)) + payload
        file.write(frame, size)
        if self._store.power:
            file.sync()
        return size + len(frame), frames + 1

    def _remove(self, durably: bool = False) -> None:
        if self._file is not None:
            self._file.close()  # no other thread or handler uses it: every use goes through the gate
            _remove(self._store.disk, self._folder, durably)
        self._ended = True  # last: an interrupted call is repeated


def finish_open(store: Store, keep: bool) -> None:
    """Process episodes that a killed process left open: drop them, or keep the steps seen.

    A kept episode is flagged as interrupted, neither terminated nor truncated.
    """
    disk = store.disk
    with clear_reads("ReplayBuffer", store.folder):
        for name in disk.names(store.paths.open):
            folder = os.path.join(store.paths.open, name)
            if keep and name not in store.carried.get("finished", []):
                steps = _read_steps(disk, folder, store.ring.max_steps)
                if steps is not None:
                    try:
                        schema, arrays = _as_stored(store, *steps, "safe", folder)
                    except InputError as error:
                        log.warning("%s: interrupted episode dropped: %s", folder, error)
                    else:
                        store.commit(schema, arrays, b"", INTERRUPTED, where=folder, finished=name)
                        log.info(
                            "%s: kept %d steps of an interrupted episode",
                            store.folder,
                            len(arrays[0]),
                        )
            _remove(disk, folder)


def _remove(disk: Disk, folder: str, durably: bool = False) -> None:
    try:
        disk.remove_folder(folder)
        if durably:
            disk.sync_folder(os.path.dirname(folder))
    except (OSError, ReplacedError) as error:
        log.warning("%s: can't be removed (%s); the next opening does it", folder, error)


def _as_stored(
    store: Store, schema: Schema, arrays: list[Array], casting: str, where: str
) -> tuple[Schema, list[Array]]:
    """Fit the steps to the schema that was fixed since they were appended."""
    locked = store.schema
    if locked is None or locked == schema:
        return schema, arrays
    return locked, list(
        locked.fit(dict(zip(schema.names, arrays, strict=True)), casting, where).values()
    )


def _read_steps(disk: Disk, folder: str, max_steps: int) -> tuple[Schema, list[Array]] | None:
    """Return the schema and the whole steps of an open episode, or None without any."""
    path = os.path.join(folder, STREAM)
    if not disk.is_folder(folder) or not disk.is_file(path):  # links lead elsewhere
        return None
    stream = read_stream(disk, path, max_steps)
    if stream.fault:
        log.warning("%s: %s; the %d steps before it count", path, stream.fault, len(stream.steps))
    return (stream.schema, stream.arrays()) if stream.schema and stream.steps else None


def _one_step(name: Any, value: Any, where: str) -> Array:
    try:
        return np.asarray(value.detach() if hasattr(value, "detach") else value)[None]
    except (TypeError, ValueError, RuntimeError) as error:  # ragged; a tensor that NumPy can't hold
        raise InputError(f"{where}: column {name!r}: {error}") from None
