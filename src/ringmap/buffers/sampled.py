"""Clips of a buffer that may be written meanwhile: by id, by draw, by pass.

    ids      -> Lookup -> Engine.clips            __getitem__, __getitems__ (a DataLoader)
    sampler  -> Engine.draw -> Engine.read        sample, batches

Invariants: the ids of a reader stand still until it is refreshed; a worker counts as the process that owns
its loader does; what is evicted between its draw and its copy is drawn anew, and counted.
Not here: writing (replay.py), roles and draws (engine.py), pinned views (view.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.buffers.batch import Batch
from ringmap.buffers.engine import Engine
from ringmap.buffers.lookup import Lookup
from ringmap.buffers.options import positive
from ringmap.buffers.passes import PassSampler
from ringmap.buffers.prefetch import Batches
from ringmap.buffers.view import BufferView, split
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.gather import PINNED
from ringmap.clips.index import ClipPairs
from ringmap.clips.samplers.base import Sampler
from ringmap.datasets.base import Dataset, clip_id, clip_ids
from ringmap.errors import ClipIndexError, InputError
from ringmap.storage.ring.integers import ClipId

__all__ = ["DefaultSampler", "Sampled"]

Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[dict[str, Any]], dict[str, Any]]


class Sampled(Dataset):
    """What a buffer offers to those who read clips: a subclass supplies the engine."""

    engine: Engine
    """What the buffer stands on: for those who build a buffer of their own."""

    @property
    def threads(self) -> int | None:
        """Threads that copy a large batch; None: as many as there are cores for this process. May be assigned."""
        return self.engine.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self.engine.threads = threads

    @property
    def sampler(self) -> Any:
        """What `sample` draws with: the callable that was given, or a `DefaultSampler`. May be assigned."""
        given = self.engine.sampler.given
        return DefaultSampler(self) if given is None else given

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        self.engine.use(None if isinstance(sampler, DefaultSampler) else sampler)

    # -- ids ---------------------------------------------------------------------------------

    @property
    def clip_indices(self) -> Sequence[tuple[int, int]]:
        """The `(episode, first step)` of every clip, oldest first: a lazy sequence, no memory per clip."""
        source = self.engine.source
        return ClipPairs(self.engine.reader.index, self.span, source.memory)

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips of `history_len` observations: ids run over `[0, n)`. O(1)."""
        history = self.num_steps if history_len is None else history_len
        positive("ReplayBuffer.num_valid_ends", "history_len", history)
        span = history * self.frameskip
        return self.engine.pin(span, shared=span == self.span).count

    def __len__(self) -> int:
        return self.num_valid_ends() or self._no_length()

    def clip_window(self, history_len: int) -> ClipRange:
        """Return the clips of `history_len` observations that there are now, for samplers. O(1)."""
        return self.engine.window(history_len * self.frameskip)

    @property
    def num_redraws(self) -> int:
        """Clips drawn anew so far because they were evicted before they could be read, by DataLoader workers too."""
        return self.engine.num_redraws

    def refresh(self) -> bool:
        """Show a reader the newest state; tell whether anything changed. A writer is always up to date."""
        return self.engine.refresh()

    # -- clips -------------------------------------------------------------------------------

    @property
    def _lookup(self) -> Lookup:
        return Lookup(self.engine, self.transform, self.num_steps, self.frameskip)

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
            return self._lookup.mapping(clip_ids(idx, "ReplayBuffer"))
        number = clip_id(idx, "ReplayBuffer", has_batches=True)
        if number < PINNED:
            size = self.num_valid_ends()
            if not -size <= number < size:
                raise ClipIndexError(
                    f"ReplayBuffer: clip {number} is out of range for {size} clips"
                    if size
                    else f"ReplayBuffer: empty: {self._why_no_clips()}"
                )
            number = ClipId(number % size)
        return self._lookup.one(number)

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips, transformed: what PyTorch's DataLoader calls.

        One that was evicted since its id was drawn is drawn anew and counted, so that a pass goes
        on whatever is written meanwhile. What comes is a list of clips over one block of rows, which
        `default_collate` takes as it is; in a worker the block is shared memory that is used again.
        """
        return self._lookup.several(clip_ids(indices, "ReplayBuffer"))

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
        return Batches(
            self.sample, self._drawn_ahead, batch_size, steps, prefetch, to, device, pin_memory
        )

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
        positions, weigh = self.engine.draw(self, batch_size, history, self.frameskip, step)
        columns = self.engine.read(positions, history, self.frameskip, into)
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
        self.engine.source  # noqa: B018 - a closed one says so
        return self.engine.sampler.update_priorities(ids, values)

    def _drawn_ahead(self, batch_size: int, count: int | None) -> Iterator[Batch[Any]]:
        """Yield what `sample(batch_size)` would, each drawn, and asked of the disk, before the last one is read."""
        engine, history, skip = self.engine, self.num_steps, self.frameskip
        positions, weigh = engine.draw(self, batch_size, history, skip)
        reader = engine.reader
        reader.want(positions, history, skip)
        for number in itertools.count(1):
            failed: BaseException | None = None
            try:
                if number != count:
                    following = engine.draw(self, batch_size, history, skip)
                    reader.want(following[0], history, skip)
            except BaseException as error:  # it is the next one's, not this one's
                failed = error
            columns = engine.read(positions, history, skip, asked=True)
            yield Batch(columns, positions, weigh and weigh(positions))
            if failed is not None:
                raise failed
            positions, weigh = following

    def _why_no_clips(self) -> str:
        return self.engine.why_no_clips(self.num_steps, self.frameskip)

    def state_dict(self) -> dict[str, Any]:
        """Return the sampling state (counter, generator, and the sampler's own), to go beside a checkpoint."""
        return self.engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on sampling where `state_dict` was taken.

        Raises:
            InputError: it is no such state, or that of a buffer with another sampler. Nothing was changed.
        """
        self.engine.load_state_dict(state)

    def _fitting(self, out: Mapping[str, Array], size: int, history: int) -> dict[str, Array]:
        """Return `out` if a batch fits into it just so."""
        rows = self.engine.source.rows
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
        return self._buffer.engine.rng.integers(0, buffer.num_valid_ends(history_len), batch_size)
