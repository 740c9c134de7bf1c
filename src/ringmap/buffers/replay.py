"""The replay buffer: a dataset and a writer over one ring, in RAM or in a directory.

    write_episode -> schema -> Store.commit                                             (writer)
    sample        -> positions, drawn at once or by a sampler -> ClipReader -> rows     (dataset)
    []            -> ids -> positions                         -> ClipReader -> rows

Invariants: every method that stores validates all its input before anything changes; every method that reads
returns copies; only the process that opened the buffer writes.
Not here: files and commits (storage/), clip numbers (clips/), formats.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.arguments import count, positive
from ringmap.buffers.base import episode_ring_of
from ringmap.buffers.engine import Engine, door
from ringmap.buffers.options import (
    Options,
    check_reads,
    log_progress,
    must_agree,
    sendable,
    settings_of,
    spare_of,
)
from ringmap.buffers.sampled import Sampled
from ringmap.clips.facts import REWARDS, Facts, check_fps, name_among
from ringmap.clips.facts import TERMINATED as TERMINATED_NAMES
from ringmap.clips.facts import TRUNCATED as TRUNCATED_NAMES
from ringmap.clips.samplers.base import Sampler
from ringmap.datasets.episode import stored_layout
from ringmap.datasets.stored_episodes import episodes_of
from ringmap.errors import ClosedError, InputError, RingmapError, UnknownColumnError
from ringmap.formats.base import EPISODE_DATA_KEY, split_episode_data
from ringmap.formats.catalog.convert import bar
from ringmap.storage.columns.backends import Storage, check_storage, choose
from ringmap.storage.columns.schema import Schema, as_columns
from ringmap.storage.columns.values import as_array, cast, flattened
from ringmap.storage.commit.commit import Commit, NewRecord
from ringmap.storage.commit.create import sizes_when_full
from ringmap.storage.commit.open_episode import OpenEpisode, finish_open
from ringmap.storage.commit.store import JOINED_NBYTES, Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.disk.paths import local_path
from ringmap.storage.disk.system import clear_reads
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.reader import Reader
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.manifest import EPISODES, Kind, Manifest, examine, lineage_of, must_be, read_manifest
from ringmap.storage.records.table import TERMINATED, TRUNCATED

if TYPE_CHECKING:
    from ringmap.storage.inspect.check import Finding

__all__ = ["ReplayBuffer", "updated"]


log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[dict[str, Any]], dict[str, Any]]


class ReplayBuffer(Sampled):
    """A ring of whole episodes that is sampled as clips.

    Without `path` the columns are in RAM. With `path` they are files in that directory, survive the
    process, and other processes can read them while they are written. A path that already holds a buffer
    is opened with all its committed episodes.

    Args:
        max_steps: capacity in steps; the oldest whole episodes are evicted to make room.
        history_len: observations per clip.
        frameskip: stride between the observations of a clip; `action` stays dense.
        sampler: `fn(step, buffer, batch_size, history_len) -> ids`; None draws uniformly.
        transform: dict -> dict, applied to each clip read by index or DataLoader, not to `sample`.
        key_filter: dict -> dict, applied to the per-step columns of each episode written.
        path: directory of the buffer; None for RAM.
        storage: how columns are stored: "memmap", "zarr" (compressed; strings and dates stay memmaps),
            `ringmap.Zarr(...)` with options, or column -> one of these (the rest "memmap").
        schema: fixes the columns at creation: column -> (shape, dtype) or `ringmap.Column`, a Gymnasium space or an
            example episode. Columns that `update` may change need it. Without it, the first episode fixes names, shapes
            and dtypes. Text
            may be of any length, unless the schema names a width: `((), "U40")`.
        durability: "process": a kill of the process loses no write that has returned, and a power cut at
            most those of the last `sync_every_s` seconds. "power": a power cut loses none either.
        casting: "safe" refuses values that the column's dtype can't hold; "unsafe" converts them. Text that a named
            width can't hold is refused by both.
        interrupted: what to do with an episode that `begin_episode` was recording at a kill: "drop" it,
            or "keep" the steps seen.
        seed: of the buffer's own random generator. Used when the buffer is made, not when it is opened later.
        spare_rows: rows beyond `max_steps`; an episode that fits in them commits in one step.
            Default: a sixteenth of max_steps, at least 1024, at most max_steps. Fixed on disk.
        sync_every_s: seconds between background syncs at durability="process".
        threads: number of threads that copy a large batch; None: the number of cores for this process, which DataLoader
            workers share. May be assigned.
        reads: "map": rows are read through maps, which is fastest; a bad sector, or a file that another program
            truncates, then ends the process (SIGBUS). "pread": rows are read by system calls, and both are errors.
            Applies to this handle and its copies, and is not stored; in RAM there is no difference.
        disk: the door to the file system, for tests to replace; None: the system's own. Applies to this handle, not to
            its pickled copies.
        reward_at: where rewards stand: "next": in the row of the step that their action led to (the first row of an
            episode has no reward, the last no action), as `World` and the recording wrapper write them; "same": in the
            row of the action. None: not known. Stored; windows and sums over rewards follow it.
        fps: steps per second, for windows in seconds: a number of Python or NumPy, or a `Fraction`. Kept as
            `Fraction(str(fps))`, in every copy of the episodes. Stored.
        kind: what the rows are, for other buffers that keep theirs in this one; None: episodes. Stored.

    Raises:
        InputError: an argument is wrong, or contradicts a value fixed on disk; another class opens what is there.
        UnknownFormatError: the path is a file or holds something else.
        CorruptError, NewerVersionError: the buffer at the path is damaged, or from a newer version.
        LockedError: another handle is writing to it.
        EnvironmentFault: the disk is full, not writable, or fails.

    Cost: a write is O(1) in the stored episodes, a lookup O(log episodes). Memory: 20 bytes per
    episode; rows are in the page cache (with `path`) or in RAM as they fill.

    Processes and threads: one thread may write while others sample. A forked or unpickled copy
    of a buffer with a path is a live reader.

    Source: stable-worldmodel, Replay Buffer guide.

    Example:
        >>> buf = ReplayBuffer(max_steps=50, history_len=2, seed=0)
        >>> for length in (30, 15, 20):
        ...     buf.write_episode({"obs": np.zeros((length, 3), np.float32), "action": np.zeros((length, 1))})
        >>> buf.lengths.tolist(), len(buf)
        ([15, 20], 33)
        >>> {name: values.shape for name, values in buf.sample(8).items()}
        {'obs': (8, 2, 3), 'action': (8, 2, 1)}
    """

    def __init__(
        self,
        max_steps: int,
        history_len: int = 1,
        frameskip: int = 1,
        sampler: Sampler | None = None,
        transform: Transform | None = None,
        key_filter: Transform | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        storage: Storage = "memmap",
        schema: Any = None,
        durability: str = "process",
        casting: str = "safe",
        interrupted: str = "drop",
        seed: int | None = None,
        spare_rows: int | None = None,
        sync_every_s: float = 30.0,
        threads: int | None = None,
        reads: str = "map",
        disk: Disk | None = None,
        reward_at: str | None = None,
        fps: Fraction | float | None = None,
        kind: Kind | None = None,
    ) -> None:
        where = "ReplayBuffer"
        kind = kind or Kind()
        max_steps = positive(where, "max_steps", max_steps)
        options = Options(history_len, frameskip, durability, casting, interrupted, sync_every_s, reward_at, fps)
        options.check(where)
        check_storage(storage, where)
        if threads is not None:
            threads = positive(where, "threads", threads)
        parsed = None if schema is None else Schema.parse(schema)
        folder, through = ("RAM", MemoryDisk()) if path is None else (local_path(path), door(disk))
        settings = settings_of(options, storage, check_reads(reads, where))
        steps, opened = int(max_steps), list[Handle]()
        with _closed_on_error(opened):
            if examine(through, folder) == "buffer":
                fixed = read_manifest(through, folder)
                must_be(fixed, kind.name, folder, where)
                must_agree(fixed, steps, parsed, storage, spare_rows, where)
                options = options.with_kept(Options.remembered(fixed.settings, folder), where)
                settings = settings_of(options, storage, settings.mapped)
                opened.append(Store.open(through, folder, settings, parsed))
            else:
                spare = spare_of(steps, spare_rows, where)
                lineage = lineage_of(seed, "" if path is None else os.path.basename(folder))
                opened.append(Store.create(through, folder, steps, spare, settings, parsed, kind, lineage))
            self._start(opened[0], options, sampler, transform, key_filter, seed, disk)
        self.engine.threads = threads

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        kind: str = EPISODES,
        **overrides: Any,
    ) -> ReplayBuffer:
        """Open the buffer at `path` with its stored settings.

        Args:
            path: its directory.
            mode: "r" for a live reader, of which there may be any number; "r+" for the writer.
            kind: what the rows are, for other buffers that keep theirs in this one.
            overrides: history_len, frameskip, sampler, transform, key_filter, durability, casting,
                interrupted, sync_every_s, reward_at, fps, threads, reads, disk, seed (of a reader's generator).

        Raises:
            InputError: an unknown mode or override; another class opens what is there.
            UnknownFormatError, CorruptError, NewerVersionError, LockedError, EnvironmentFault: as
                for the constructor.

        Cost: O(episodes) to read their records, 0.1 us each; rows are not read.
        """
        where = "ReplayBuffer.open"
        if mode not in ("r", "r+"):
            raise InputError(f"{where}: mode must be 'r' (read) or 'r+' (write), got {mode!r}")
        calls = {name: overrides.pop(name, None) for name in ("sampler", "transform", "key_filter", "seed", "disk")}
        threads = overrides.pop("threads", None)
        if threads is not None:
            threads = positive(where, "threads", threads)
        mapped = check_reads(overrides.pop("reads", "map"), where)
        known = [field.name for field in fields(Options)]
        for name in overrides:
            if name not in known:
                raise InputError(f"{where}: unknown option {name!r}; known: {[*known, *calls, 'threads', 'reads']}")
        folder, disk = local_path(path), door(calls["disk"])

        def options_of(manifest: Manifest) -> Options:
            must_be(manifest, kind, folder, where)
            options = replace(Options.remembered(manifest.settings, folder), **overrides)
            options.check(where)
            return options

        buffer = cls.__new__(cls)
        opened = list[Handle]()
        with _closed_on_error(opened):
            if mode == "r":
                with clear_reads(where, folder):
                    opened.append(Reader(disk, folder, log_progress, mapped))
                options = options_of(opened[0].manifest)
            else:
                with clear_reads(where, folder):
                    options = options_of(read_manifest(disk, folder))
                opened.append(Store.open(disk, folder, settings_of(options, "memmap", mapped)))
            buffer._start(opened[0], options, **calls)
        buffer.engine.threads = threads
        return buffer

    @staticmethod
    def estimate(
        schema: Any,
        max_steps: int,
        storage: Storage = "memmap",
        spare_rows: int | None = None,
    ) -> dict[str, int]:
        """Return the size of a full buffer in bytes: file -> bytes, and "total". Episode data are not included.

        Args:
            schema: as for the constructor: column -> (shape, dtype), a Gymnasium space or an example episode.
            max_steps: capacity in steps.
            storage: how columns are stored, as for the constructor. The effect of compression is not known
                beforehand: the figure is for rows that can't be compressed.
            spare_rows: rows beyond `max_steps`, as for the constructor.

        Cost: none; no file is made. Files are sparse: they grow to this size as the ring fills for the first time.

        Example:
            >>> ReplayBuffer.estimate({"pixels": ((64, 64, 3), "u1")}, max_steps=1_000_000)["total"] // 10**6
            13192
        """
        where = "ReplayBuffer.estimate"
        max_steps = positive(where, "max_steps", max_steps)
        check_storage(storage, where)
        parsed = Schema.parse(schema)
        spare = spare_of(int(max_steps), spare_rows, where)
        blank = Manifest(bytes(16), int(max_steps), spare)
        sizes = sizes_when_full(blank.with_columns(parsed, choose(storage, parsed, where), locked=True))
        return {**sizes, "total": sum(sizes.values())}

    def _start(
        self,
        source: Handle,
        options: Options,
        sampler: Sampler | None,
        transform: Transform | None,
        key_filter: Transform | None,
        seed: int | None,
        disk: Disk | None,
    ) -> None:
        self._choose(options, transform, key_filter)
        self.engine = Engine(source, sampler, seed, disk=disk)
        if isinstance(source, Store):
            finish_open(source, keep=options.interrupted == "keep")

    def _choose(self, options: Options, transform: Transform | None, key_filter: Transform | None) -> None:
        self.options = options
        self.frameskip = options.frameskip
        self.num_steps = options.history_len
        self.transform = transform
        self.key_filter = key_filter

    # -- roles -------------------------------------------------------------------------------

    @property
    def reads(self) -> str:
        """How rows are read: "map" or "pread"."""
        return "map" if self.engine.owned.mapped else "pread"

    @property
    def max_steps(self) -> int:
        """Capacity in steps."""
        return self.engine.owned.manifest.max_steps

    @property
    def fps(self) -> Fraction | float | None:
        """Steps per second, a `Fraction`, or None where that is not known. May be assigned: a writer stores it at
        once."""
        return self.options.fps

    @fps.setter
    def fps(self, fps: Any) -> None:
        self._set_facts("ReplayBuffer.fps", Facts(self.reward_at, check_fps("ReplayBuffer.fps", fps)))

    @property
    def reward_at(self) -> str | None:
        """Where rewards stand: "next", "same", or None where that is not known. May be assigned: a writer stores it at
        once."""
        return self.options.reward_at

    @reward_at.setter
    def reward_at(self, reward_at: str | None) -> None:
        self._set_facts("ReplayBuffer.reward_at", Facts.named("ReplayBuffer.reward_at", reward_at, self.fps))

    def _set_facts(self, where: str, facts: Facts) -> None:
        if facts == Facts.of(self):
            return
        self.options = replace(self.options, reward_at=facts.reward_at, fps=facts.fps)
        if self.engine.is_writer:
            self.engine.remember(where, {"reward_at": facts.reward_at, "fps": facts.fps})

    def expect_facts(self, facts: Facts, where: str) -> None:
        """Store what is known of the episodes that are about to be written, as far as that is not known of the buffer.

        Args:
            facts: where their rewards stand, and their rate.
            where: what writes them, to name in an error.

        Raises:
            InputError: the buffer has rewards that stand elsewhere, or another rate.
        """
        own = Facts.of(self)
        if None not in (facts.reward_at, own.reward_at) and facts.reward_at != own.reward_at:
            raise InputError(
                f"{where}: it writes rewards at reward_at={facts.reward_at!r}, but the buffer has "
                f"reward_at={own.reward_at!r}; record into another buffer"
            )
        own.refuse_rate(facts, where, "the buffer", "what is to be stored")
        self._set_facts(where, own.over(facts))

    def _expect_those_of(self, dataset: Any, where: str) -> None:
        """Store what a dataset knows of its episodes, before they are written."""
        facts = Facts.of(dataset)
        if (
            facts.reward_at is None
            and self.reward_at is not None
            and len(dataset.lengths)
            and name_among(REWARDS, dataset.column_names)
        ):
            raise InputError(
                f"{where}: the buffer has reward_at={self.reward_at!r}, and it is not known where the rewards of the "
                f"{type(dataset).__name__} stand: say it by load_dataset(..., reward_at=)"
            )
        self.expect_facts(facts, where)

    # -- writing -----------------------------------------------------------------------------

    def write_episode(
        self,
        ep_data: Mapping[str, Any],
        *,
        notes: Mapping[str, Any] | None = None,
        sync: bool = True,
    ) -> None:
        """Store one whole episode, and evict the oldest ones that no longer fit, in one commit.

        Args:
            ep_data: column -> one value per step: a list of per-step arrays, an array `(T, ...)` or a
                tensor; or nested, a mapping of such, or a list of one mapping per step: a slash joins the keys. The key
                `_episode_data` may hold a mapping of values constant within
                the episode: str, bytes, numbers, arrays. An empty episode, or one of length 0, is ignored.
            notes: name -> JSON value, small: they join `notes` with this episode or not at all, and remain
                when it is evicted.
            sync: at durability "power", whether the episode is durable when this returns. False: it survives a kill of
                the process at once, and a power cut from the next `flush` on, or the next episode that is synced; so
                several episodes cost one sync. A power cut before that may lose it, and the episodes that it evicted.

        Raises:
            InputError: a scalar column, unequal lengths, a schema mismatch, a value that does not fit,
                an episode longer than max_steps. Nothing was changed.
            ReadOnlyError, ClosedError: this handle may not write.
            EnvironmentFault: the disk is full or fails. Nothing was changed, except that the oldest
                episodes may be gone if this one is longer than the spare rows.

        Cost: O(1) in the stored episodes, plus the checksum and the write of the rows.
        """
        where = "ReplayBuffer.write_episode"
        if not ep_data:
            return
        store = self.engine.writer(where)
        episode, data = split_episode_data(stored_layout(ep_data))
        if self.key_filter is not None:
            episode = self.key_filter(flattened(episode, where))
        if not episode:
            return
        store.recover_if_stale()
        schema = store.schema
        if schema is None:
            episode = as_columns(episode, where)
            schema = Schema.of(episode)
        rows = schema.fit(episode, self.options.casting, where)
        length = len(next(iter(rows.values())))
        if not length:
            return
        if length > self.max_steps:
            raise InputError(
                f"{where}: episode of {length} steps exceeds max_steps={self.max_steps}; raise max_steps or "
                "split the episode"
            )
        encoded = encode_data(data, where) if data else b""
        flags = _flags(rows, -1)
        with self.engine.committing(notes) as small:
            one = NewRecord(length, encoded, flags)
            store.commit(Commit([one], where, schema, list(rows.values()), small=small, sync=sync))

    def write_joined(
        self,
        rows: Mapping[str, Any],
        lengths: Sequence[int],
        episode_data: Sequence[Mapping[str, Any]] = (),
        *,
        sync: bool = True,
    ) -> int:
        """Store whole episodes whose rows lie one behind the other, with fewer writes than `write_episode` of each.

        Each counts whole or not at all, in order, as if it was stored alone.

        Args:
            rows: column -> array `(sum(lengths), ...)`.
            lengths: steps of each episode, at least 1.
            episode_data: of each episode; none by default.
            sync: as for `write_episode`.

        Returns:
            How many were stored, the first ones. If they are not all, pass the next one to `write_episode`, which
            stores it or raises the error. None are stored while the buffer has no columns, with a `key_filter`, in a
            subclass, and where together they do not fit in the spare rows, or their data in one commit. At durability
            "power" those stored are durable, unless the disk refuses a sync: the next call says so.

        Raises:
            InputError: `episode_data` is not one for each episode.
        """
        where = "ReplayBuffer.write_joined"
        if episode_data and len(episode_data) != len(lengths):
            raise InputError(
                f"{where}: {len(lengths)} lengths, but episode_data of {len(episode_data)} episodes; give one for "
                "each, or none"
            )
        stored: list[NewRecord] = []
        try:
            store = self.engine.writer(where)
            store.recover_if_stale()
            schema, total = store.schema, sum(lengths)
            if schema is None or self.key_filter is not None or total > store.ring.spare:
                return 0
            if type(self).write_episode is not ReplayBuffer.write_episode:
                return 0
            rows = schema.fit(rows, self.options.casting, where)
            arrays = list(rows.values())
            if not len(lengths) or min(lengths) < 1 or len(arrays[0]) != total:
                return 0
            episodes, stop = [], 0
            for number, length in enumerate(lengths):
                stop += length
                data = encode_data(episode_data[number], where) if episode_data else b""
                episodes.append(NewRecord(length, data, _flags(rows, stop - 1)))
            with self.engine.committing() as small:
                store.commit(Commit(episodes, where, schema, arrays, small=small, sync=sync), stored)
        except (OSError, RingmapError):  # `write_episode` says why
            if stored and sync:  # the sync was to come with the last one
                with contextlib.suppress(OSError, RingmapError):
                    self.engine.make_durable(where)
        return len(stored)

    @property
    def notes(self) -> dict[str, Any]:
        """The notes stored with episodes, as of the newest commit, for a reader of its last refresh: name -> JSON
        value."""
        return copy.deepcopy(self.engine.source.carried.get("notes", {}))

    def write_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Store episodes as they arrive, as `write_episode(sync=False)` does. At durability "power" one sync, the last
        step, makes all of them durable.

        Short episodes in a list or a tuple share their writes, as with `write_joined`.
        """
        where = "ReplayBuffer.write_episodes"
        store = self.engine.writer(where)
        runs: Iterable[Sequence[Mapping[str, Any]]] = ([one] for one in episodes)
        if isinstance(episodes, list | tuple):
            runs = _runs(episodes, store.ring.spare)
        try:
            for run in runs:
                if store.schema is None:  # the first one fixes the columns
                    self.write_episode(run[0], sync=False)
                    run = run[1:]
                for episode in run[self._join(run) :]:
                    self.write_episode(episode, sync=False)
        finally:
            self.engine.make_durable(where)

    def _join(self, run: Sequence[Mapping[str, Any]]) -> int:
        """Store episodes of a run together; return how many, as `write_joined` does."""
        if len(run) < 2:
            return 0
        try:
            episodes, data = zip(*map(split_episode_data, run), strict=True)
        except InputError:  # `write_episode` says so, once those before it are stored
            return 0
        rows = {name: np.concatenate([one[name] for one in episodes]) for name in episodes[0]}
        lengths = [len(next(iter(one.values()))) for one in episodes]
        return self.write_joined(rows, lengths, data, sync=False)

    def begin_episode(
        self,
        *,
        commit_every: int | None = None,
        episode_data: Mapping[str, Any] | None = None,
        lane: int = 0,
    ) -> OpenEpisode:
        """Begin an episode whose steps reach the disk as they are appended; see `OpenEpisode`.

        Args:
            commit_every: commit this many steps at a time, so that they can be drawn before the episode ends, and other
                processes see them. They are parts of one episode, which grows, may never end, and may be longer than
                the buffer: its oldest parts go like other episodes, and `first_step` in its data is then how many steps
                went. Clips cross parts. A kill ends the episode with what was committed (and with `interrupted="keep"`
                all that was appended). None: the episode is committed when it ends.
            episode_data: as for `OpenEpisode.finish`, if it is known already. With `commit_every` it is stored with
                each part, and so is there before the episode ends, and after a kill.
            lane: 0 or more: which of several environments, for `commit_every` with `Sequences(..., across=True)`.

        Raises:
            InputError: `commit_every` is not positive, or greater than the spare rows; episode data that can't be
                stored, or, with `commit_every`, more than 1 MiB of them; the lane is no whole number.
        """
        where = "ReplayBuffer.begin_episode"
        store = self.engine.writer(where)
        self.check_commit_every(where, commit_every)
        lane = count(where, "lane", lane)
        if lane >= 1 << 32:
            raise InputError(f"{where}: lane must be an integer below 2**32, got {lane!r}")
        store.disk.check_held(where)
        return OpenEpisode(
            store,
            self.options.casting,
            self.key_filter,
            self.engine.committing,
            None if commit_every is None else int(commit_every),
            episode_data,
            int(lane),
        )

    def check_commit_every(self, where: str, commit_every: int | None) -> None:
        """Raise InputError unless parts of so many steps can be committed to this buffer; None: no parts.

        Args:
            where: the call to name in the error.
            commit_every: as for `begin_episode`.
        """
        if commit_every is None:
            return
        commit_every = positive(where, "commit_every", commit_every)
        spare = self.engine.writer(where).ring.spare
        if commit_every > spare:
            raise InputError(
                f"{where}: commit_every={commit_every} steps don't fit in the {spare} spare rows; choose fewer, or "
                "make the buffer with spare_rows="
            )

    kind = EPISODES

    @property
    def episode_ring(self) -> ReplayBuffer:
        """The buffer itself."""
        return self

    def recorded_by(self, sinks: Any, mix: Any = None) -> Any:
        """Return the sink that fills this buffer with episodes, in the name of the mix that holds it."""
        return sinks.episodes(self, self if mix is None else mix)

    def extend_from(self, dataset: Any) -> None:
        """Store every episode of a dataset or another buffer, episode data included.

        Args:
            dataset: anything with `lengths` and `load_episode(i)`.

        Raises:
            InputError: its rewards stand elsewhere than those of this buffer (`reward_at`), or it is not known where;
                it has another rate (`fps`). Nothing was stored.
        """
        self._expect_those_of(dataset, "ReplayBuffer.extend_from")
        ring = episode_ring_of(dataset)
        found = episodes_of(dataset if ring is None else ring, True)
        each = ({**steps, EPISODE_DATA_KEY: data} for steps, data in found)
        self.write_episodes(bar(each, len(dataset.lengths), "extend_from"))

    def update(self, ids: Any, values: Mapping[str, Any]) -> int:
        """Change values of stored steps, in columns that were made with `ringmap.Column(..., mutable=True)`.

        Each value is old or new as a whole, for readers in other processes, too, and after a kill. At durability
        "process" a power cut may bring back values from before the last sync; at "power" none. `sample`,
        `load_episode`, `dump` and all other reads show the newest values.

        Args:
            ids: of the steps, integers: `batch.ids`, which are the anchors of the batch: a clip's first step, or the
                step t of a window. In an episode that was stored whole the next step has the next number, so
                `batch.ids[:, None] + np.arange(T)` are all steps of clips of T. For episodes in parts take `step_id` of
                `Sequences`.
            values: column -> array or CPU tensor of shape `(*ids.shape, *shape of a step)`. For a step that is named
                twice the last value counts. The other mutable columns keep their values.

        Returns:
            The number of steps updated: steps that were evicted are left out.

        Raises:
            InputError: a column is unknown or not mutable; a value has another shape, or a dtype that does not fit; an
                id is of another buffer. Nothing was changed.
            ReadOnlyError, ClosedError: this handle may not write.
            EnvironmentFault: the disk is full or fails. Nothing was changed, if the disk can still be written at all.

        Cost: one checksum for each step, one write for each run of steps that lie side by side; no commit. At "power"
        one sync.

        Processes and threads: may be called while other threads sample.

        Example:
            >>> from ringmap import Column
            >>> schema = {"obs": ((4,), "float32"), "latent": Column((8,), "float32", mutable=True)}
            >>> buf = ReplayBuffer(max_steps=100, history_len=5, schema=schema, seed=0)
            >>> buf.write_episode({"obs": np.zeros((30, 4), np.float32)})
            >>> batch = buf.sample(16)
            >>> batch["latent"].shape
            (16, 5, 8)
            >>> buf.update(batch.ids[:, None] + np.arange(5), {"latent": batch["latent"] + 1})
            80
        """
        where = "ReplayBuffer.update"
        store = self.engine.writer(where)
        store.recover_if_stale()
        positions, fitted = updated(store.schema, ids, values, self.options.casting, where)
        return store.update(positions, fitted, where)

    def clear(self) -> None:
        """Drop every episode in one commit; columns, schema and the sampling counter remain."""
        self.engine.clear("ReplayBuffer.clear")

    def flush(self, *, notes: Mapping[str, Any] | None = None) -> None:
        """Force all stored data, and the sampling state, to the disk. Does nothing on a reader.

        Args:
            notes: as for `write_episode`; they join `notes` without an episode.

        Raises:
            SyncFailedError: the disk refused; close the buffer and open it again.
            ReadOnlyError: a reader was given notes.
        """
        if self.mode == "r+" or notes:
            self.engine.flush("ReplayBuffer.flush", notes)

    # -- what is stored ----------------------------------------------------------------------

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in order; [] before the first episode."""
        schema = self.engine.source.schema
        return [] if schema is None else schema.names

    def dropped_episode_data(self) -> list[dict[str, Any] | None]:
        """Return the data of episodes that were dropped because their rows were lost, None where the data were lost
        too.

        Covers those among the stored ones, oldest first. A power cut at durability="process" can cause them.
        """
        return self.engine.episodes.dropped_data()

    def episode_spans(self) -> tuple[Array, Array]:
        """Return where each stored episode lies, oldest first: `(positions, lengths)`, int64, both of one moment.

        The position of its first step names an episode for as long as the buffer lives: its number falls with each
        eviction, its position stays. (An episode in parts keeps the position of its very first step.)

        Cost: copies; O(episodes).

        Example:
            >>> buf = ReplayBuffer(max_steps=40)
            >>> for number in range(3):
            ...     buf.write_episode({"obs": np.full(20, number)})
            >>> [values.tolist() for values in buf.episode_spans()]
            [[20, 40], [20, 20]]
        """
        return self.engine.episodes.spans()

    def episode_number(self, position: int) -> int:
        """Return the number that the episode at this position has now; see `episode_spans`. O(log episodes).

        Raises:
            ClipIndexError: it was evicted, or no episode begins there.
        """
        where = "ReplayBuffer.episode_number"
        return self.engine.episodes.number_of(operator.index(position), where)

    def marked_ring(self) -> tuple[Handle, Array]:
        """Return the ring, for `Marks`, and the positions of its episodes."""
        return self.engine.source, self.episode_spans()[0]

    def get_col_data(self, col: str) -> Array:
        """Return a column of all stored steps, oldest first.

        Raises:
            UnknownColumnError: there is no such column.

        Cost: reads and holds the whole column.
        """
        self._check_column(col, "get_col_data")
        return self.engine.episodes.rows(None, [col], "ReplayBuffer.get_col_data")[col]

    def get_row_data(
        self, row_idx: int | Sequence[int] | Array, columns: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return steps by row: row 0 is the oldest stored step. O(episodes + rows).

        Args:
            row_idx: a row, or several.
            columns: names of those to read; None: all.

        Raises:
            ClipIndexError: a row lies outside what is stored. Negative rows count from the end.
            UnknownColumnError: there is no such column.
        """
        for name in columns or ():
            self._check_column(name, "get_row_data")
        names = self.column_names if columns is None else list(columns)
        found = self.engine.episodes.rows(row_idx, names, "ReplayBuffer.get_row_data")
        return {name: v[0] for name, v in found.items()} if np.ndim(row_idx) == 0 else found

    def get_dim(self, col: str) -> int:
        """Return the number of values in one step of a column."""
        self._check_column(col, "get_dim")
        schema = self.engine.source.schema
        assert schema is not None
        shape = next(spec.shape for spec in schema.columns if spec.name == col)
        return int(np.prod(shape, dtype=np.int64))

    # -- export ------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Copy the buffer in its present state to a new buffer, while its writer continues.

        The copy equals one committed state, the newest or one shortly before it, with every episode and the small
        state (sampling, progress) of that commit. Positions are the same; the copy has its own UUID. Priorities are as
        of the last update before the copy was finished. Episodes that are still being recorded are left out. The copy
        is made under a temporary name beside `path`, and appears at `path` whole and durable, or not at all.

        Args:
            path: a directory that does not exist or is empty.

        Raises:
            InputError: a path inside this buffer, or a mount point.
            ExistsError: something is there.
            LockedError: another snapshot to the same path is being made.
            LappedError: the writer overtook this reader repeatedly.
            EnvironmentFault: the disk has no room, or fails. Nothing is left at `path`.
            CorruptError: a file of this buffer is cut or missing.

        Cost: reads and writes the live steps once, and syncs them. Where the file system can share blocks between
            files (btrfs, xfs), it does, and only what was written meanwhile is copied.

        Processes and threads: may be called from a live reader in another process, which takes no lock that slows the
            writer; and on the writer's handle, from any thread: then writing waits while the last few steps are copied.

        Example:
            >>> buf = ReplayBuffer(max_steps=100)
            >>> buf.write_episode({"obs": np.arange(30)})
            >>> buf.snapshot("kept")
            >>> buf.clear()
            >>> ReplayBuffer.open("kept").lengths.tolist()
            [30]
        """
        self.engine.snapshot(path, "ReplayBuffer.snapshot")

    def check(self) -> list[Finding]:
        """Return the faults of the buffer, each finding with its file; empty when sound. Reads all rows."""
        self.engine.check_open()
        return self.engine.rings[0].check(self.engine.sampler.check())

    # -- copies ------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Pickle path and settings; a buffer in RAM pickles its stored episodes. A callable without an importable name
        is refused."""
        cut: dict[str, Any] = {"history_len": self.num_steps, "frameskip": self.frameskip}
        return {
            "options": asdict(replace(self.options, **cut)),
            "transform": sendable("ReplayBuffer", "transform", self.transform),
            "key_filter": sendable("ReplayBuffer", "key_filter", self.key_filter),
            "engine": self.engine.to_send(),
            "pace": self.pace,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._choose(Options(**state["options"]), state["transform"], state["key_filter"])
        self.engine, self.pace = Engine.received(state["engine"]), state["pace"]

    def _card(self) -> dict[str, str]:
        self.engine.check_open()
        return {
            "episodes": f"{self.num_episodes:,}",
            "steps": f"{self.num_steps_stored:,} of {self.max_steps:,}",
            "clips": f"history_len {self.num_steps}, frameskip {self.frameskip}",
            "columns": ", ".join(self.column_names[:20]) or "none yet",
            "path": "RAM" if self.path is None else f"{self.path}, mode {self.mode!r}",
        }

    def __repr__(self) -> str:
        try:
            source = self.engine.source
        except ClosedError:
            return f"ReplayBuffer(closed, path={str(self.path)!r})"
        place = "" if self.path is None else f", path={str(self.path)!r}, mode={self.mode!r}"
        return (
            f"ReplayBuffer(episodes={source.live.num_episodes}, steps={source.live.num_steps}/{self.max_steps}, "
            f"history_len={self.num_steps}, frameskip={self.frameskip}, columns={self.column_names}{place})"
        )


@contextlib.contextmanager
def _closed_on_error(opened: list[Handle]) -> Iterator[None]:
    """Release files and lock if the block fails: no other code could."""
    try:
        yield
    except BaseException:
        for source in opened:
            if isinstance(source, Store):
                source.abandon()
            else:
                source.close()
        raise


def _flags(arrays: Mapping[str, Array], last: int) -> int:
    """Return the flags of an episode whose last row this is."""
    return _at(arrays, TERMINATED_NAMES, last) * TERMINATED + _at(arrays, TRUNCATED_NAMES, last) * TRUNCATED


def _at(arrays: Mapping[str, Array], names: Sequence[str], row: int) -> int:
    """Return 1 if a column of flags, the first of these that there is, has a true value in a row."""
    values = arrays.get(name_among(names, arrays) or "")
    if values is None or values.ndim != 1 or values.dtype.kind not in "biuf":
        return 0
    return int(values.item(row) == 1)


def _runs(episodes: Sequence[Mapping[str, Any]], most: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield episodes in runs that can be stored together: of the same columns, `most` steps, and little size."""
    begin, before, steps, nbytes = 0, None, 0, 0
    for number, episode in enumerate(episodes):
        kind, length, size = _kind_of(episode)
        steps, nbytes = steps + length, nbytes + size
        alike = kind is not None and kind == before and steps <= most and nbytes <= JOINED_NBYTES
        if number > begin and not alike:
            yield episodes[begin:number]
            begin, steps, nbytes = number, length, size
        before = kind
    if len(episodes) > begin:
        yield episodes[begin:]


def _kind_of(episode: Mapping[str, Any]) -> tuple[list[Any] | None, int, int]:
    """Return the columns of an episode, None unless it is a dict of arrays of one length, its steps, and its bytes."""
    if type(episode) is not dict:
        return None, 0, 0
    arrays = {name: value for name, value in episode.items() if name != EPISODE_DATA_KEY}
    if not all(type(value) is np.ndarray and value.ndim for value in arrays.values()):
        return None, 0, 0
    lengths = {len(value) for value in arrays.values()}
    if len(lengths) != 1 or 0 in lengths:
        return None, 0, 0
    kind = [(name, value.dtype, value.shape[1:]) for name, value in arrays.items()]
    return kind, lengths.pop(), sum(value.nbytes for value in arrays.values())


def updated(schema: Schema | None, ids: Any, values: Any, casting: str, where: str) -> tuple[Array, dict[str, Array]]:
    """Return the positions of an update, int64 `(n,)`, and column -> `(n, *shape)` in the column's dtype."""
    positions = _positions(ids, where)
    if not isinstance(values, Mapping) or not values:
        raise InputError(f"{where}: expected column -> values, got {values!r:.80}")
    values = flattened(values, where)
    specs = {spec.name: spec for spec in (schema.columns if schema is not None else ())}
    for name in values:
        if name not in specs:
            raise UnknownColumnError(f"{where}: no column {name!r}; there are {list(specs)}")
        if not specs[name].mutable:
            raise InputError(
                f"{where}: column {name!r} is not mutable; make a new buffer with schema={{..., {name!r}: "
                "ringmap.Column(shape, dtype, mutable=True)}, and fill it with extend_from"
            )
    fitted = {}
    for name, array in as_columns(values, where).items():
        spec = specs[name]
        expected = (*positions.shape, *spec.shape)
        if array.shape != expected:
            raise InputError(
                f"{where}: column {name!r} has shape {array.shape}, expected {expected}: that of the ids "
                f"{positions.shape}, and of a step {spec.shape}"
            )
        rows = array.reshape(positions.size, *spec.shape)
        if rows.dtype != spec.dtype:
            rows = cast(rows, spec.dtype, casting, f"{where}: column {name!r}")
        fitted[name] = rows
    return positions.reshape(-1), fitted


def _positions(ids: Any, where: str) -> Array:
    """Return ids as positions, int64, in their own shape."""
    found = as_array(ids, f"{where}: ids", "id")
    if not found.ndim or (found.dtype.kind not in "iu" and found.size):
        raise InputError(
            f"{where}: expected ids as an array of integers, such as batch.ids, got {found.dtype} {found.shape}"
        )
    return found.astype(np.int64, copy=False)
