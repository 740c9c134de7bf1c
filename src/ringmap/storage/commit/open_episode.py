"""An open episode: each step is on disk as soon as it is appended.

Finishing is one ordinary commit, whose blob names the id, and then the file is removed. A power cut may undo the
removal until the folder `open/` is synced. So later commits carry the id until then, and a recovery
never stores an episode twice.

An episode that is committed in parts has a file for each part, and frame 0 names the chain.

Invariants: the first truncated or damaged frame ends the episode; steps fit the schema
before they are written.
Not here: how a commit works (commit.py), what its file holds (records/step_file.py).
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ringmap.errors import CorruptError, InputError, ReplacedError, RingmapError, RoleError
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.text import Words
from ringmap.storage.columns.values import NUMBERS, as_array, flattened
from ringmap.storage.commit.commit import Commit, NewRecord
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import clear_reads
from ringmap.storage.read.episodes import FIRST_STEP
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.step_file import End, Heading, StepFile, StoredSteps, read_steps
from ringmap.storage.records.table import INTERRUPTED, TERMINATED, TRUNCATED, PartOf
from ringmap.storage.ring.ring import Ordinal

__all__ = ["OpenEpisode", "finish_open"]

Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger("ringmap")

_BEGIN = "ReplayBuffer.begin_episode"
_MOST_DATA = 1 << 20
_BEGUN: End = (0, 0, 0)


class OpenEpisode:
    """An episode being recorded, made by `ReplayBuffer.begin_episode`.

    Args:
        store: the target.
        casting: how values may be converted, as for the buffer.
        key_filter: the buffer's, applied to each step.
        small: given notes or None, provides the buffer's small state for a commit.
        commit_every: commit this many steps at a time, as parts of one episode; None: the episode is committed when it
            ends.
        episode_data: of the episode, as far as it is known: it is stored with each part, too.
        lane: of the parts, 0 or more: episodes of one lane follow each other in `Sequences(..., across=True)`.

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
        small: Callable[[Mapping[str, Any] | None], AbstractContextManager[Mapping[str, Any] | None]],
        commit_every: int | None = None,
        episode_data: Mapping[str, Any] | None = None,
        lane: int = 0,
    ) -> None:
        self._small = small
        self._every = commit_every
        self._data = dict(episode_data or {})
        self._check_data(self._data, _BEGIN)
        self._encoded = encode_data(self._data, _BEGIN)
        if commit_every is not None and len(self._encoded) > _MOST_DATA:
            raise InputError(
                f"{_BEGIN}: episode_data of {len(self._encoded)} bytes would be stored with each part; give at most "
                f"{_MOST_DATA} bytes here, and the rest to finish"
            )
        self._part = self._upcoming = PartOf(lane=lane)
        """The part that is being recorded, for an episode of parts, and the one after its commit."""
        self.id = uuid.uuid4().hex
        self._store = store
        self._casting = casting
        self._filter = key_filter
        self._schema: Schema | None = None
        self._file: StepFile | None = None
        self._words = Words()
        self._end: End = _BEGUN
        """Of the file, as `StepFile.write` returns it."""
        self._ended = False

    @property
    def num_steps(self) -> int:
        """Number of appended steps."""
        return self._part.step + self._pending

    @property
    def _pending(self) -> int:
        """Number of steps that are not committed."""
        return max(0, self._end[1] - 1)

    def _check_data(self, data: Mapping[str, Any], where: str) -> None:
        if self._every is not None and FIRST_STEP in data:
            raise InputError(
                f"{where}: episode data {FIRST_STEP!r} is what the data of an episode in parts have once its oldest "
                "steps were evicted: rename it"
            )

    def append(self, step: Mapping[str, Any]) -> None:
        """Add one step: column -> its value at this step (no time axis); nested values as for `write_episode`.

        Raises:
            InputError: the step does not fit the schema, or the episode would exceed max_steps. With `commit_every` an
                episode may be longer than the buffer, which keeps its newest parts.
            EnvironmentFault: the disk is full or fails; the steps before this one stay.

        Cost: one write; at durability="power" one sync. Each `commit_every`-th call commits.
        """
        where = "OpenEpisode.append"
        self._exclusively(where, lambda files: self._append(files, step, where))

    def _exclusively(self, where: str, work: Callable[[CommitFiles], None]) -> None:
        """Do work on the part that is open now, while other writing calls are kept out."""

        def whole(files: CommitFiles) -> None:
            if self._ended:
                raise RoleError(f"{where}: this episode has ended; call begin_episode for the next one")
            self._go_on()
            work(files)

        self._store.exclusively(where, whole)

    def _append(self, files: CommitFiles, step: Mapping[str, Any], where: str) -> None:
        columns = {n: _one_step(n, v, where) for n, v in flattened(step, where).items()}
        if self._filter is not None:
            columns = self._filter(columns)
        if not columns:
            raise InputError(f"{where}: the step has no columns")
        schema = self._schema or self._store.schema or Schema.of(as_columns(columns, where))
        fitted = schema.fit(columns, self._casting, where)
        if self._every is None and self.num_steps >= self._store.ring.max_steps:
            raise InputError(
                f"{where}: the episode exceeds max_steps={self._store.ring.max_steps}; raise max_steps, or "
                "finish it and begin another"
            )
        self._words.refuse_large([fitted[name] for name in schema.texts], where)
        file = self._begin(schema) if self._file is None else self._file
        for name in schema.texts:
            fitted[name] = self._words.encode(fitted[name])
        before = self._end
        end = file.write(before, b"".join([a.tobytes() for a in fitted.values()]), self._words)
        if self._store.power:
            file.sync()
        self._end = end
        if self._every is not None and self._pending >= self._every:
            try:
                self._commit(files, self._part, 0, self._encoded, where)
            except (OSError, RingmapError):
                self._end = before  # nothing was stored by this call
                raise
            self._go_on()

    def _go_on(self) -> None:
        """Begin the next part, if this one is committed: also by a call that was interrupted since."""
        if self._every is None or self.id not in self._store.carried.get("finished", []):
            return
        file, upcoming = self._file, self._upcoming
        fresh, words = uuid.uuid4().hex, Words()
        self._part = upcoming  # no call from here on, so no interrupt comes in between
        self.id = fresh
        self._file, self._words, self._end = None, words, _BEGUN
        if file is not None:
            file.close()
            _remove(self._store.disk, file.folder)

    def finish(
        self,
        terminated: bool = False,
        truncated: bool = False,
        episode_data: Mapping[str, Any] | None = None,
        *,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """End the episode and commit it whole, or what is left of it. With no steps, nothing is stored.

        Args:
            terminated: whether it ended in a terminal state.
            truncated: whether it was cut off.
            episode_data: values that are constant in the episode, as for `write_episode`; they join those that it began
                with.
            notes: as for `write_episode`.

        Raises:
            InputError: the schema was fixed to another one meanwhile.
            EnvironmentFault: the disk is full or fails; call this again when it is repaired.
            CorruptError: the steps on disk are not all that were appended.
        """
        where = "OpenEpisode.finish"

        def work(files: CommitFiles) -> None:
            self._check_data(episode_data or {}, where)
            data = encode_data({**self._data, **(episode_data or {})}, where) if self.num_steps else b""
            flags = TERMINATED * bool(terminated) | TRUNCATED * bool(truncated)
            last = None if self._every is None else self._part._replace(is_last=True)
            # An interrupted call may have stored it or not: `carried` knows, since a recovery came before this.
            if self._pending and self.id not in self._store.carried.get("finished", []):
                self._commit(files, last, flags, data, where, notes)
            elif last is not None and not self._pending:
                self._end_chain(files, flags, data, notes)
            self._remove()

        self._exclusively(where, work)

    def _commit(
        self,
        files: CommitFiles,
        part: PartOf | None,
        flags: int,
        data: bytes,
        where: str,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Commit the steps in the file."""
        store, count = self._store, self._pending
        folder = self._folder
        steps = _read_steps(store.disk, folder, store.ring.max_steps)
        if steps is None or steps.count < count:
            raise CorruptError(
                f"{where}: {folder} holds {steps.count if steps else 0} whole steps, but {count} were appended: the "
                "file was damaged meanwhile; abandon the episode"
            )
        # An interrupted append may have left one more step.
        schema, arrays = _as_stored(store, steps, count, self._casting, where)
        self._upcoming = self._part.next(store.head, count, store.next_ordinal)
        with self._small(notes) as small:
            one = NewRecord(count, data, flags, part)
            store.commit_now(files, Commit([one], where, schema, arrays, small=small, finished=self.id))

    def _end_chain(
        self, files: CommitFiles, flags: int, data: bytes = b"", notes: Mapping[str, Any] | None = None
    ) -> None:
        """End the episode where its newest part ends, unless it has ended or has no part."""
        store, part = self._store, self._part
        chains = store.live.links
        if part.number and (chains is None or part.chain not in chains.ended):
            with self._small(notes) as small:
                store.commit_now(files, Commit.of_end(part, flags, store.folder, data, small))

    def abandon(self) -> None:
        """End the episode without storing it. Parts that are committed stay: the episode ends with them, as
        interrupted."""
        where, store = "OpenEpisode.abandon", self._store
        if self._ended:
            return
        if not store.writable_here:
            store.exclusively(where, lambda _: None)  # raises with the reason
        if self._every is not None and not store.is_poisoned:  # else the next opening does it
            self._exclusively(where, lambda files: self._end_chain(files, INTERRUPTED))
        # A power cut must not bring it back: interrupted="keep" would store it.
        store.alone(where, lambda: self._remove(durably=store.power))

    def __enter__(self) -> OpenEpisode:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Finish, or abandon after an exception."""
        if self._ended:
            return
        if kind is None:
            self.finish()
        elif self._store.writable_here:  # else the file is not ours: a forked child's parent continues it
            self.abandon()

    @property
    def _folder(self) -> str:
        return os.path.join(self._store.paths.open, self.id)

    def _begin(self, schema: Schema) -> StepFile:
        store, folder, is_part = self._store, self._folder, self._every is not None
        store.disk.discard(folder)  # of an append that a full disk refused
        file = StepFile(store.disk, folder)
        try:
            end = file.begin(Heading(schema, self._part if is_part else None, self._encoded if is_part else b""))
            if store.power:
                file.sync()
        except BaseException:
            file.close()
            raise
        self._schema, self._end = schema, end
        self._file = file  # last: from here on the episode counts as begun
        return file

    def _remove(self, durably: bool = False) -> None:
        if self._file is not None:
            self._file.close()  # no other thread or handler uses it: every use goes through the gate
            _remove(self._store.disk, self._folder, durably)
        self._ended = True  # last: an interrupted call is repeated


def finish_open(store: Store, keep: bool) -> None:
    """Process episodes that a killed process left open: drop them, or keep the steps seen, flagged as interrupted.
    Those whose parts are committed end as interrupted."""
    disk = store.disk
    with clear_reads("ReplayBuffer", store.folder):
        for name in disk.names(store.paths.open):
            folder = os.path.join(store.paths.open, name)
            if keep and name not in store.carried.get("finished", []):
                steps = _read_steps(disk, folder, store.ring.max_steps)
                if steps is not None and steps.heading is not None:
                    part, data = steps.heading.part, steps.heading.data
                    try:
                        schema, arrays = _as_stored(store, steps, steps.count, "safe", folder)
                    except InputError as error:
                        log.warning("%s: interrupted episode dropped: %s", folder, error)
                    else:
                        one = NewRecord(steps.count, data, INTERRUPTED, part and _last_part(store, part))
                        store.commit(Commit([one], folder, schema, arrays, finished=name))
                        log.info("%s: kept %d steps of an interrupted episode", store.folder, steps.count)
            _remove(disk, folder)
        _end_chains(store)


def _last_part(store: Store, part: PartOf) -> PartOf:
    """Return the part as the last one of its chain; as the only one, if the part before it was lost."""
    known = _upcoming_parts(store).get(part.chain)
    return (known if known and known.step == part.step else PartOf(lane=part.lane))._replace(is_last=True)


def _upcoming_parts(store: Store) -> dict[int, PartOf]:
    """Return for each chain that has not ended the part that would come next."""
    live, upcoming = store.live, dict[int, PartOf]()
    for number in np.flatnonzero(live.whole.is_open).tolist() if live.links is not None else ():
        record = store.live_record(Ordinal(live.first + int(live.whole.parts_of(number)[-1])))
        part = None if record is None else PartOf.of(record)
        if record is not None and part is not None:
            # The newest counts: a part that was dropped leaves two episodes of one chain.
            upcoming[record.chain] = part.next(record.start, record.length, record.ordinal)
    return upcoming


def _end_chains(store: Store) -> None:
    """End the chains that a killed process left open, as interrupted."""
    for part in _upcoming_parts(store).values():
        store.commit(Commit.of_end(part, INTERRUPTED, store.folder))


def _remove(disk: Disk, folder: str, durably: bool = False) -> None:
    try:
        disk.discard(folder)
        if durably:
            disk.sync_folder(os.path.dirname(folder))
    except (OSError, ReplacedError) as error:
        log.warning("%s: can't be removed (%s); the next opening does it", folder, error)


def _as_stored(store: Store, steps: StoredSteps, count: int, casting: str, where: str) -> tuple[Schema, list[Array]]:
    """Return the first `count` steps, fitted to the schema that was fixed since they were appended."""
    assert steps.heading is not None
    schema, arrays, locked = steps.heading.schema, [a[:count] for a in steps.arrays()], store.schema
    if locked is None or locked == schema:
        return schema, arrays
    return locked, list(locked.fit(dict(zip(schema.names, arrays, strict=True)), casting, where).values())


def _read_steps(disk: Disk, folder: str, max_steps: int) -> StoredSteps | None:
    """Return the whole steps of an open episode, or None without any."""
    steps = read_steps(disk, folder, max_steps)
    if steps.fault:
        log.warning("%s: %s; the %d steps before it count", folder, steps.fault, steps.count)
    return steps if steps.count else None


def _one_step(name: Any, value: Any, where: str) -> Array:
    if type(value) in NUMBERS:
        value = np.asarray(value)
    elif type(value) is not np.ndarray:
        value = as_array(value, f"{where}: column {name!r}", "item")
    step: Array = value[None]
    return step
