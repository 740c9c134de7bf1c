"""Clips of a source that may be written meanwhile: by id, by draw, by pass.

    ids      -> pinned moment -> ClipReader    __getitem__, __getitems__ (a DataLoader)
    sampler  -> ids           -> ClipReader    sample, batches
    PINNED + position         -> ClipReader    pass_sampler, views: one clip, whatever its id is by now

Invariants: the ids of a reader stand still until it is refreshed; a worker counts as the process that owns
its loader does; what is evicted between its draw and its copy is drawn anew, and counted.
Not here: writing and roles (replay.py), pinned views (view.py).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.buffers.batch import Batch
from ringmap.buffers.beacon import Beacon
from ringmap.buffers.options import check_whole, positive
from ringmap.buffers.passes import PassSampler
from ringmap.buffers.prefetch import Batches
from ringmap.buffers.view import BufferView, split
from ringmap.clips.gather import PINNED, ClipReader, Pinned
from ringmap.clips.index import ClipPairs, why_no_clips
from ringmap.clips.samplers.base import (
    BaseSampler,
    Sampler,
    Weigh,
    as_sampler,
    generator,
    ids_of,
)
from ringmap.clips.window import Window
from ringmap.datasets.base import Dataset, clip_id, clip_ids
from ringmap.datasets.batch import ClipBatch, Layout, worker
from ringmap.datasets.to_loader import as_clip, as_mapping, of_columns, room
from ringmap.errors import ClipIndexError, InputError, NoClipsError, RingmapError, StaleCopyError
from ringmap.storage.advice import clear_reads
from ringmap.storage.forks import Forkable
from ringmap.storage.source import Source
from ringmap.storage.system import cores

__all__ = ["DefaultSampler", "Sampled"]

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[dict[str, Any]], dict[str, Any]]

_NEWEST, _STANDS = 0, 1


class Sampled(Forkable, Dataset):
    """What a buffer offers to those who read clips.

    A subclass supplies `_source`, and calls `_sample_from` when it has opened or reopened one.
    """

    threads: int | None = None
    _clip_reader: ClipReader
    _beacon: Beacon
    _told: tuple[int, ...] = ()
    _fetcher: Any = None
    _copied: int | None = None
    _told_redraws = 0
    _draws_as: int | None = None

    def _sampling_with(self, sampler: Sampler | None, seed: int | None) -> None:
        self._sampler: BaseSampler = (
            _NONE if sampler is None else as_sampler(sampler, "ReplayBuffer")
        )
        self._rng = generator(seed, "ReplayBuffer", "seed")
        self._counter = 0
        self._draws = self._draws_stored = 0
        self._pins: dict[int, Pinned] = {}

    def _sample_from(self, source: Source) -> None:
        self._clip_reader = ClipReader(source, self._rng)
        self._pins = {}

    @property
    def _source(self) -> Source:
        raise NotImplementedError

    @property
    def sampler(self) -> Any:
        """What `sample` draws with: the callable that was given, or a `DefaultSampler`. May be assigned."""
        given = self._sampler.given
        return DefaultSampler(self) if given is None else given

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        self._source  # noqa: B018 - a closed one says so
        new: BaseSampler = _NONE
        if sampler is not None and not isinstance(sampler, DefaultSampler):
            new = as_sampler(sampler, "ReplayBuffer")
        if new.given is not self._sampler.given:
            self._sampler.close()
        self._sampler = new
        self._attach_sampler()

    def _attach_sampler(self) -> None:
        """Let a sampler that keeps something for each clip begin with what is stored now."""
        if self._source.writable:
            self._sampler.attach(self._source)

    # -- ids ---------------------------------------------------------------------------------

    @property
    def clip_indices(self) -> Sequence[tuple[int, int]]:
        """The `(episode, first step)` of every clip, oldest first: a lazy sequence, no memory per clip."""
        source = self._source
        return ClipPairs(self._clip_reader.index, self.span, source.memory)

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips of `history_len` observations: ids run over `[0, n)`. O(1)."""
        history = self.num_steps if history_len is None else history_len
        positive("ReplayBuffer.num_valid_ends", "history_len", history)
        return self._pin(history * self.frameskip).count

    def __len__(self) -> int:
        return self.num_valid_ends() or self._no_length()

    def clip_window(self, history_len: int) -> Window:
        """Return the clips of `history_len` observations that there are now, for samplers. O(1)."""
        source = self._source
        with source.memory:
            index = self._clip_reader.index.of(history_len * self.frameskip)
            return Window(source, index, index.base, index.end)

    def _pin(self, span: int) -> Pinned:
        """Return which clips there are: of a writer now, of a reader when it was last refreshed.

        A reader moves on inside when it redraws; its length and ids must not. A worker counts as the
        process that owns the loader.
        """
        source = self._source
        if source.writable:
            return self._clip_reader.pin(span)
        beacon = self._beacon
        if not beacon.is_mine:
            if worker() is not None and span == self.span:
                return self._pin_as_told(beacon, span)
            beacon = self._beacon = Beacon() if worker() is None else beacon
        pinned = self._pins.get(span)  # another thread may drop it meanwhile
        if pinned is None:
            with source.memory:  # or another thread's moment could be told after ours
                self._pins[span] = pinned = self._clip_reader.pin(span)
                if beacon.is_mine and span == self.span:
                    beacon.tell(_STANDS, pinned.head, pinned.count)
        return pinned

    def _pin_as_told(self, beacon: Beacon, span: int) -> Pinned:
        told = beacon.told()
        turn, how, head, count = told[:4]
        if not turn or how == _NEWEST:
            self._clip_reader.source.refresh()
            return self._clip_reader.pin(span)
        pinned = self._pins.get(span)
        if told != self._told or pinned is None:
            self._told = told
            if self._clip_reader.source.head < head:
                self._clip_reader.source.refresh()
            self._pins[span] = pinned = self._clip_reader.pin_before(head, count, span)
        return pinned

    @property
    def num_redraws(self) -> int:
        """Clips drawn anew so far because they were evicted before they could be read, by DataLoader workers too."""
        return self._clip_reader.num_redraws + (
            self._beacon.counted() if self._beacon.is_mine else 0
        )

    def refresh(self) -> bool:
        """Show a reader the newest state; tell whether anything changed. A writer is always up to date."""
        self._pins.clear()
        return self._source.refresh()

    # -- clips -------------------------------------------------------------------------------

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """Return one clip, transformed: observations `(history, ...)`, `action` `(history, -1)`.

        With a list of B ids: the batch, column -> `(B, history, ...)`, as `DataLoader(buf, batch_size=None,
        sampler=BatchSampler(...))` asks for it.

        Raises:
            ClipIndexError: the id is out of range, or the buffer is empty. Negative ids count from
                the end.
            InputError: the ids of a list are no integers.
            SubscriptError: (an InputError) it is neither an integer nor a list.
        """
        if np.ndim(idx):
            return self._mapping(clip_ids(idx, "ReplayBuffer"), self.num_steps, self.frameskip)
        number = clip_id(idx, "ReplayBuffer", has_batches=True)
        if number < PINNED:
            size = self.num_valid_ends()
            if not -size <= number < size:
                raise ClipIndexError(
                    f"ReplayBuffer: clip {number} is out of range for {size} clips"
                    if size
                    else f"ReplayBuffer: empty: {self._why_no_clips()}"
                )
            number %= size
        return self._clip(number, self.num_steps, self.frameskip)

    def _clip(self, number: int, history: int, skip: int) -> dict[str, Any]:
        block = self._columns(np.array([number]), history, skip)
        clip = {name: values[0] for name, values in block.items()}
        return clip if self.transform is None else self.transform(clip)

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips, transformed: what PyTorch's DataLoader calls.

        One that was evicted since its id was drawn is drawn anew and counted, so that a pass goes
        on whatever is written meanwhile. What comes is a list of clips over one block of rows, which
        `default_collate` takes as it is; in a worker the block is shared memory that is used again.
        """
        return self._clips_of(clip_ids(indices, "ReplayBuffer"), self.num_steps, self.frameskip)

    def _clips_of(self, ids: Array, history: int, skip: int) -> list[Any]:
        if self.transform is not None:
            batch = ClipBatch(self._columns(ids, history, skip), len(ids))
            return [as_clip(self.transform(dict(clip))) for clip in batch]
        room = self._room(len(ids), history, skip)
        return of_columns(self._columns(ids, history, skip, room), len(ids))

    def _mapping(self, ids: Array, history: int, skip: int) -> dict[str, Any]:
        if self.transform is None:
            # In no slot: a dataset around us may keep it, and the loop writes into what it gets.
            return as_mapping(self._columns(ids, history, skip))
        clips = self._clips_of(ids, history, skip)
        return {n: np.stack([clip[n] for clip in clips]) for n in clips[0]} if clips else {}

    def _room(self, size: int, history: int, skip: int) -> dict[str, Array] | None:
        """Return where to gather a batch of `size` clips: None unless this process is a worker."""
        schema = self._source.schema
        if schema is None or worker() is None:
            return None
        shapes: Layout = {s.name: ((size, history, *s.shape), s.dtype) for s in schema.columns}
        if "action" in shapes:
            shape, dtype = shapes["action"]
            shapes["action"] = (size, history, math.prod(shape[2:]) * skip), dtype
        return room(shapes)

    def _columns(
        self, ids: Array, history: int, skip: int, out: dict[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return the clips with these ids as one block; out of range or evicted: drawn anew."""
        source, span = self._source, history * skip
        if source.disk.volatile:
            self._check_copy()
        if len(ids) and ids.max() >= PINNED:
            return self._read(self._known(ids - PINNED, span), history, skip, out)
        pinned = self._pin(span)
        ids = np.where(ids < 0, ids + pinned.count, ids)
        if not pinned.count or (len(ids) and ids.max() >= pinned.count):
            # Its own look may be older than that of the process that drew the ids.
            self.refresh()
            pinned = self._pin(span)
        positions = self._clip_reader.place(ids + pinned.base, pinned, span)
        return self._read(positions, history, skip, out)

    def _read(
        self, positions: Array, history: int, skip: int, out: dict[str, Array] | None = None,
        asked: bool = False,
    ) -> dict[str, Array]:  # fmt: skip
        threads = self.threads or _threads_here()
        try:
            batch = self._clip_reader.at(positions, history, skip, out, threads, asked)
        except (OSError, ValueError):
            self._source  # noqa: B018 - if another thread closed it meanwhile, this says so
            with clear_reads("ReplayBuffer", self._clip_reader.source.folder):
                raise
        self._count_redraws()
        return batch

    def _count_redraws(self) -> None:
        """Let the process that owns the loader know of redraws in this worker."""
        redraws = self._clip_reader.num_redraws
        if redraws != self._told_redraws:
            self._told_redraws = redraws
            if not self._beacon.is_mine and worker() is not None:
                self._beacon.count(redraws)

    def _known(self, positions: Array, span: int) -> Array:
        """Return the positions, -1 for one where no clip starts by now: it is drawn anew.

        Beyond what is stored, or of a pass of shorter clips: one of `span` steps would reach into the next episode.
        """
        source = self._source
        if source.rows is None or (len(positions) and positions.max() + span > source.head):
            self.refresh()
        return self._clip_reader.starting(positions, span)

    def _check_copy(self) -> None:
        """Raise in a persistent worker that would go on serving an old copy of a buffer in RAM."""
        beacon = self._beacon
        if beacon.is_mine or worker() is None:
            return
        fetcher, turn = _fetcher(), beacon.told()
        if self._fetcher is None:
            self._fetcher = fetcher
            if self._copied is None:
                self._copied = self._source.seq
        elif fetcher is not self._fetcher and turn[0] and turn[4] != self._copied:  # another pass
            raise StaleCopyError(
                "ReplayBuffer: this worker has a copy of a buffer in RAM from when it started, and the buffer was "
                "written since; make the loader with persistent_workers=False, or give the buffer a path="
            )

    def _tell_copies(self, seq: int) -> None:
        """Tell copies of a buffer in RAM how far the original is."""
        if self._beacon.is_mine:
            self._beacon.tell(_NEWEST, 0, 0, seq)

    # -- passes, views, batches --------------------------------------------------------------

    def pass_sampler(self, shuffle: bool = True, seed: int = 0) -> PassSampler:
        """Return a sampler for a DataLoader over this buffer that pins one state for each pass.

        `DataLoader(buf, sampler=buf.pass_sampler(), batch_size=64, num_workers=2)` hands out each clip that there
        was when the pass began exactly once, whatever is written meanwhile (one that is evicted before it is
        read is drawn anew). The plain `shuffle=True` asks for `len(buf)` again at the end of a pass.

        Args:
            shuffle: a new order for each pass; False: oldest first.
            seed: of the orders; the same for the same seed and pass.
        """
        return PassSampler(self, shuffle, seed)

    def view(self) -> BufferView:
        """Return a dataset of what is stored now: its ids stand still, in every process that it is sent to.

        Cost: 12 bytes for each stored episode; no rows are copied, and none kept from eviction.
        """
        return BufferView.of(self)

    def split(self, train: float = 0.9, seed: int = 0) -> tuple[BufferView, BufferView]:
        """Return two views that share no episode: `train` of the episodes, and the rest.

        Args:
            train: share of the stored episodes, rounded, in the first view.
            seed: which ones; an episode's rank among the others depends on it alone.
        """
        return split(self.view(), train, seed)

    def batches(
        self, batch_size: int, steps: int | None = None, prefetch: int = 2, to: str = "numpy",
        device: Any = None, pin_memory: bool = False,
    ) -> Batches:  # fmt: skip
        """Return an endless iterator over `sample(batch_size)`, the next batches gathered while one is used.

        Args:
            batch_size: B, clips.
            steps: batches until it ends; None: never.
            prefetch: batches gathered ahead by a background thread; 0: none, and no thread.
            to: "numpy" arrays or "torch" tensors.
            device: where tensors go.
            pin_memory: whether they go there from page-locked memory, without keeping the model waiting.

        Raises:
            InputError: an argument is wrong. What `sample` raises comes out of the iterator.

        Example:
            >>> from ringmap import ReplayBuffer
            >>> buf = ReplayBuffer(max_steps=100, seed=0)
            >>> buf.write_episode({"obs": np.arange(50)})
            >>> with buf.batches(8, steps=3) as batches:
            ...     [batch["obs"].shape for batch in batches]
            [(8, 1), (8, 1), (8, 1)]
        """
        return Batches(self, batch_size, steps, prefetch, to, device, pin_memory)

    def sample(
        self, batch_size: int, history_len: int | None = None, step: int | None = None,
        *, out: Mapping[str, Array] | None = None,
    ) -> Batch[Array]:  # fmt: skip
        """Draw a batch of clips through the sampler.

        Args:
            batch_size: B, clips.
            history_len: H, observations per clip; None for the buffer's own.
            step: handed to the sampler; None uses the internal counter, and advances it.
            out: column -> array to fill and return, of just the shape and dtype that would come, C-contiguous,
                such as an earlier batch; columns that it lacks come in new arrays.

        Returns:
            column -> `(B, H, ...)` array; `action` `(B, H, -1)`. `transform` is not applied. Its attribute `ids`, int64
            `(B,)`, is for `update_priorities`; `weights`, float32 `(B,)`, is for losses, None if the sampler weighs nothing.

        Raises:
            InputError: a size is not positive, or the sampler's result has not shape `(B,)`.
            ClipIndexError: the sampler returned an id that is out of range.
            NoClipsError: no clip is stored.
            LappedError: the writer overtook this reader, ten times in a row without progress.

        Cost: O(B log episodes), one copy of the rows.
        """
        history = self.num_steps if history_len is None else history_len
        positive("ReplayBuffer.sample", "batch_size", batch_size)
        positive("ReplayBuffer.sample", "history_len", history)
        into = None if out is None else self._fitting(out, batch_size, history)
        positions, weigh = self._draw(batch_size, history, step)
        columns = self._read(positions, history, self.frameskip, into)
        return Batch(columns, positions, weigh and weigh(positions))

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Give clips their priorities: `sampler.update_priorities`, of a sampler that has them.

        Args:
            ids: of the clips: `batch.ids`.
            values: their priorities.

        Returns:
            For how many clips: one that was evicted is passed over.

        Raises:
            InputError: the sampler does not draw by priority.
        """
        self._source  # noqa: B018 - a closed one says so
        return self._sampler.update_priorities(ids, values)

    def _drawn_ahead(self, batch_size: int, count: int | None) -> Iterator[Batch[Any]]:
        """Yield what `sample(batch_size)` would, each drawn, and asked of the disk, before the last one is read."""
        reader, history, skip = self._clip_reader, self.num_steps, self.frameskip
        positions, weigh = self._draw(batch_size, history, None)
        reader.want(positions, history, skip)
        for number in itertools.count(1):
            failed: BaseException | None = None
            try:
                if number != count:
                    following = self._draw(batch_size, history, None)
                    reader.want(following[0], history, skip)
            except BaseException as error:  # it is the next one's, not this one's
                failed = error
            columns = self._read(positions, history, skip, asked=True)
            yield Batch(columns, positions, weigh and weigh(positions))
            if failed is not None:
                raise failed
            positions, weigh = following

    def _draw(self, batch_size: int, history: int, step: int | None) -> tuple[Array, Weigh | None]:
        """Return the positions of the next batch, drawn through the sampler, and what weighs it."""
        self._pins.clear()
        try:
            self._source.refresh()
        except OSError:
            self._source  # noqa: B018 - as in `_read`
            raise
        self._draw_apart()
        self._draws += 1
        if step is None:
            step = self._counter
            self._counter += 1
        reader, span = self._clip_reader, history * self.frameskip
        sampler = self._sampler
        if sampler.given is None:
            positions = reader.draw(batch_size, span, self._rng)
            if positions is None:
                raise self._no_clips(span)
            return positions, None
        # One that answers at once keeps the writer waiting: what it has drawn is not evicted, nor renumbered, meanwhile.
        # It is in the middle of a draw then, and knows of one draw.
        self._source.refuse_if_held("ReplayBuffer.sample")
        with self._source.memory if sampler.is_quick else contextlib.nullcontext():
            positions = self._ask_positions(sampler, step, batch_size, history)
            return positions, sampler.weigh()

    def _ask_positions(
        self, sampler: BaseSampler, step: int, batch_size: int, history: int
    ) -> Array:
        reader, span = self._clip_reader, history * self.frameskip
        pinned = reader.pin(span)
        if not pinned.count:
            raise self._no_clips(span)
        try:
            ids = ids_of(sampler, step, self, batch_size, history, "ReplayBuffer.sample")
            numbers = ids + pinned.base
        except (LookupError, ValueError) as error:
            if isinstance(error, RingmapError) or reader.pin(span).count:
                raise
            raise self._no_clips(
                span
            ) from error  # they were cleared while it drew: it had nothing to draw from
        # The sampler may have seen, and asked for, what came meanwhile.
        newest = reader.pin(span)
        wrong = (numbers < pinned.base) | (numbers >= newest.end)
        if wrong.any() and newest.era == pinned.era:
            raise ClipIndexError(
                f"ReplayBuffer.sample: the sampler returned id {int(numbers[wrong][0]) - pinned.base}, which is "
                f"out of range for {newest.end - pinned.base} clips"
            )
        return reader.place(numbers, pinned, span)

    def _draw_apart(self) -> None:
        """Draw in a worker what no other worker does: a copy of a buffer in RAM brings the generator along."""
        info = worker()
        if info is not None and self._draws_as != info.seed:
            self._draws_as = info.seed
            self._rng = self._clip_reader.rng = np.random.default_rng(info.seed)

    def _no_clips(self, span: int) -> NoClipsError:
        return NoClipsError(f"ReplayBuffer.sample: {self._why_no_clips(span)}")

    def _why_no_clips(self, span: int | None = None) -> str:
        source = self._source
        with source.memory:
            return why_no_clips(source.live.lengths, span or self.span, self.frameskip)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampling state (counter, generator, and the sampler's own), to go beside a checkpoint."""
        state: dict[str, Any] = {"step": self._counter, "rng": self._rng.bit_generator.state}
        kept = self._sampler.state_dict()
        return state if kept is None else {**state, "sampler": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on sampling where `state_dict` was taken.

        Raises:
            InputError: it is no such state, or that of a buffer with another sampler. Nothing was changed.
        """
        check_whole("load_state_dict", state, ("rng", "step"))
        self._source  # noqa: B018 - a fork makes another generator
        if "sampler" in state:
            self._sampler.load_state_dict(state["sampler"])
        self._draw_apart()
        self._rng.bit_generator.state = state["rng"]
        self._counter = int(state["step"])
        self._draws += 1

    def _fitting(self, out: Mapping[str, Array], size: int, history: int) -> dict[str, Array]:
        """Return `out` if a batch fits into it just so."""
        rows = self._source.rows
        for name, array in out.items():
            column = None if rows is None else rows.by_name.get(name)
            if column is None:
                raise InputError(
                    f"ReplayBuffer.sample: out has a column {name!r} that the buffer has not"
                )
            spec, shape = column.spec, (size, history, *column.spec.shape)
            if name == "action":
                shape = (size, history, math.prod(spec.shape) * self.frameskip)
            good = (
                isinstance(array, np.ndarray) and array.flags.c_contiguous and array.flags.writeable
            )
            if not good or array.shape != shape or array.dtype != spec.dtype:
                got = (
                    f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array)
                )
                raise InputError(
                    f"ReplayBuffer.sample: out[{name!r}] must be a C-contiguous array {spec.dtype} {shape}, got {got}"
                )
        return dict(out)


class _NoSampler(BaseSampler):
    """What a buffer has that was given none: it draws from the generator of the buffer."""

    given = None

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        ids: Array = buffer._rng.integers(0, buffer.num_valid_ends(history_len), batch_size)
        return ids


_NONE = _NoSampler()


class DefaultSampler:
    """Draw uniformly from the buffer's own generator: what `buffer.sampler` is until another is assigned.

    Called as any sampler, it returns ids. Called with `shuffle=` or `seed=` alone it is `buffer.pass_sampler`.
    """

    def __init__(self, buffer: Sampled) -> None:
        self._buffer = buffer

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return ids for `(step, buffer, batch_size, history_len)`, a sampler for a DataLoader otherwise."""
        if len(args) < 4 and "batch_size" not in options:
            return self._buffer.pass_sampler(*args, **options)
        return self._ids(*args, **options)

    def _ids(self, step: int, buffer: Sampled, batch_size: int, history_len: int) -> Array:
        return self._buffer._rng.integers(0, buffer.num_valid_ends(history_len), batch_size)


@functools.lru_cache(maxsize=1)
def _threads_of(pid: int) -> int:
    info = worker()
    return max(1, cores() // (1 if info is None else info.num_workers))


def _threads_here() -> int:
    """Return the threads that gather in this process: workers share the cores."""
    return _threads_of(os.getpid())


def _fetcher() -> Any:
    """Return what PyTorch's worker reads this batch with: another object for each pass."""
    frame = sys._getframe(1)
    for _ in range(12):
        found = frame.f_locals.get("self") if frame.f_code.co_name == "fetch" else None
        if found is not None:
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
