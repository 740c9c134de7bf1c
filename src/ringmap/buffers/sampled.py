"""Clips of a buffer, also while it is written: by id, by draw, by pass.

    ids               -> lookup -> Engine.anchors, read    __getitem__, __getitems__ (a DataLoader)
    ClipReader.draw   -> positions -> Engine.read          sample, batches, without a sampler
    a sampler -> ids  -> positions -> Engine.read          sample, batches, with one

Invariants: the ids of a reader do not change until it is refreshed; a worker counts clips as the process that owns
its loader does; a clip that is evicted between its draw and its copy is redrawn, and counted; equal requests over the
same columns have the same cut.
Not here: writing (replay.py), roles and draws (engine.py), pinned views (view.py), what a request means
(clips/window.py).
"""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers import lookup
from ringmap.buffers.base import RingBuffer
from ringmap.buffers.batch import Batch
from ringmap.buffers.episodes import evicted
from ringmap.buffers.lookup import Clips, fitting
from ringmap.buffers.passes import PassBuffer
from ringmap.buffers.prefetch import Batches, drawn_ahead
from ringmap.buffers.rings import Ring
from ringmap.buffers.sources import BufferSource, store_episodes
from ringmap.buffers.view import BufferView
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.facts import Facts, check_fps
from ringmap.clips.gather import PINNED
from ringmap.clips.index import ClipPairs
from ringmap.clips.samplers.base import Sampler
from ringmap.clips.samplers.uniform import uniform
from ringmap.clips.window import Wanted, WindowSpec, check_anchors, tell_no_lanes, warn_unreached
from ringmap.datasets.base import Dataset, Where, clip_id, clip_ids
from ringmap.errors import ClipIndexError, InputError, NoClipsError
from ringmap.fleet.pace import Pace
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.catalog.convert import copy_episodes
from ringmap.formats.registry import resolve_format
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.values import nested
from ringmap.storage.disk.system import memory_left
from ringmap.storage.read.episodes import FIRST_STEP
from ringmap.storage.ring.ring import ClipId

__all__ = ["ClipsOfCut", "Cuts", "DefaultSampler", "Sampled"]


Array = np.ndarray[Any, np.dtype[Any]]
Transform = Callable[[dict[str, Any]], dict[str, Any]]


class Sampled(RingBuffer, PassBuffer, Dataset):
    """The methods of a buffer that read clips: a subclass supplies the engine."""

    pace: Pace | None = None
    """What every batch waits for, if `sample` names no other."""
    _cuts: Cuts | None = None

    @property
    def clips(self) -> Clips:
        """What finds and reads clips: the engine."""
        return self.engine

    @property
    def history_len(self) -> int:
        """Observations per clip; `num_steps` is another name for it."""
        return self.num_steps

    @property
    def schema(self) -> Schema | None:
        """The columns with their per-step shapes and dtypes; None before the first episode, unless a schema was
        given."""
        return self.engine.schema

    @property
    def offsets(self) -> Array:
        """First row of each episode, counted from the oldest stored step, ring by ring; int64. O(episodes)."""
        lengths = self.lengths.astype(np.int64)
        return np.cumsum(lengths) - lengths

    @property
    def threads(self) -> int | None:
        """Number of threads that copy a large batch; None: the number of cores for this process. May be assigned."""
        return self.engine.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self.engine.threads = threads

    @property
    def sampler(self) -> Any:
        """The sampler of `sample`: the given callable, or a `DefaultSampler`. May be assigned."""
        given = self.engine.sampler.given
        return DefaultSampler(self) if given is None else given

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        self.engine.use(None if isinstance(sampler, DefaultSampler) else sampler)

    # -- ids ---------------------------------------------------------------------------------

    @property
    def clip_indices(self) -> Sequence[tuple[int, int]]:
        """The `(episode, first step)` of every clip, oldest first, by the number of the clip: a lazy sequence, no
        memory per clip.

        Of the ids of a batch `locate` says the same.
        """
        source = self.engine.source
        return ClipPairs(self.engine.reader.index, self.span, source.lock)

    def locate(self, ids: Any) -> tuple[Array, Array]:
        """Return in which episodes steps are, by number, and which steps they are there, both int64 `(B,)`.

        Args:
            ids: of steps, as in `batch.ids`, a column `<name>_id` of `Index`, or `step_id` of `Sequences`.

        Raises:
            ClipIndexError: a step was evicted, or never was there.

        Example:
            >>> from ringmap import ReplayBuffer
            >>> buf = ReplayBuffer(max_steps=100, history_len=2)
            >>> for length in (3, 4):
            ...     buf.write_episode({"obs": np.arange(length)})
            >>> episodes, steps = buf.locate(buf[[0, 3]].ids)
            >>> episodes.tolist(), steps.tolist(), buf.clip_indices[3]
            ([0, 1], [0, 1], (1, 1))
        """
        self.engine.episodes_only("locate")
        return lookup.locate(self, ids, f"{type(self).__name__}.locate")

    @property
    def cut(self) -> Cut:
        """What a clip holds: `num_steps` observations, every `frameskip`-th step."""
        return Cut.clip(self.num_steps, self.frameskip)

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of clips of `history_len` observations: ids are in `[0, n)`. O(1)."""
        history = self.num_steps if history_len is None else history_len
        history = positive("ReplayBuffer.num_valid_ends", "history_len", history)
        cut = Cut.clip(history, self.frameskip)
        return self.engine.count(cut, shared=cut.span == self.span)

    @property
    def num_unreachable_steps(self) -> int:
        """Number of stored steps that are in no clip: most often their episodes are too short for one. O(episodes)."""
        return self.cut.unreached(self.lengths)

    def __len__(self) -> int:
        return self.num_valid_ends() or self._no_length()

    def clip_window(self, history_len: int) -> ClipRange:
        """Return the clips of `history_len` observations that exist now, for samplers. O(1)."""
        length = positive(f"{type(self).__name__}.clip_window", "history_len", history_len)
        return self.engine.window(Cut.clip(length, self.frameskip))

    def clip_windows(self, history_len: int) -> list[ClipRange]:
        """Return the same ring by ring: the ids of the clips of each follow those of the one before."""
        length = positive(f"{type(self).__name__}.clip_windows", "history_len", history_len)
        return self.engine.windows(Cut.clip(length, self.frameskip))

    @property
    def holds_episodes(self) -> bool:
        """Whether its rows are steps of episodes; False for a fleet of transitions."""
        return self.engine.holds_episodes

    def mix_source(self, items: Mapping[str, Any]) -> BufferSource:
        """Return what draws clips, or with `items` windows, for a mix."""
        clip = None if items else (self.num_steps, self.frameskip)
        return BufferSource(self, partial(self.sample, **items), clip, store=store_episodes)

    # -- clips -------------------------------------------------------------------------------

    def __getitem__(self, idx: Any) -> dict[str, Any]:
        """Return one clip, transformed: observations `(history, ...)`, `action` `(history, -1)`.

        With a list of B ids, returns the batch, column -> `(B, history, ...)`. `DataLoader(buf, batch_size=None,
        sampler=BatchSampler(...))` asks for batches in this form.

        Raises:
            ClipIndexError: the id is out of range, or the buffer is empty. Negative ids count from
                the end.
            InputError: the ids of a list are not integers.
            SubscriptError: (an InputError) the index is neither an integer nor a list.
        """
        if np.ndim(idx):
            return lookup.mapping(self, clip_ids(idx, "ReplayBuffer"))
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
        return lookup.one(self, number)

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        """Return several clips, transformed. PyTorch's DataLoader calls this method.

        A clip that was evicted since its id was drawn is redrawn and counted, so that a pass continues
        while the buffer is written; the collated batch has the `ids` of what came, and `redrawn` marks it. Returns a
        list of clips over one block of rows, which `default_collate` accepts; in a worker the block is shared memory
        that is reused.
        """
        return lookup.several(self, clip_ids(indices, "ReplayBuffer"))

    # -- what is stored ----------------------------------------------------------------------

    def _rings(self, what: str) -> tuple[Ring, ...]:
        """Return the rings, which hold episodes; `what`: the method to name."""
        self.engine.episodes_only(what)
        return self.engine.all_rings()

    @property
    def num_episodes(self) -> int:
        """Number of stored episodes."""
        return sum(ring.num_episodes for ring in self._rings("num_episodes"))

    @property
    def num_steps_stored(self) -> int:
        """Number of stored steps; of transitions those that count."""
        self.engine.check_open()
        return sum(ring.num_steps for ring in self.engine.rings)  # of those that are open, whatever others say

    def count_rows(self) -> int:
        """Return the number of rows, which are the stored steps."""
        return self.num_steps_stored

    @property
    def lengths(self) -> Array:
        """Steps of each episode, oldest first, ring by ring, int32. Makes a copy: O(episodes)."""
        found = [ring.lengths for ring in self._rings("lengths")]
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, np.int32), *found])

    @property
    def episode_column_names(self) -> list[str]:
        """Names of the episode data of the stored episodes, in order of first use.

        Cost: reads the blob of every episode, once per state.
        """
        self.engine.episodes_only("get_episode_data")
        rings = self.engine.rings_to_read()
        return list(dict.fromkeys(name for ring in rings for name in ring.episodes.data_names()))

    def get_episode_data(self, idx: int | Sequence[int] | Array | None = None) -> dict[str, list[Any]]:
        """Return values constant within an episode: name -> one value per requested episode, None where it has none.

        Args:
            idx: an episode, several (duplicates are allowed), or None for all. Numbers that are all in the last batch
                of this handle (`<name>_episode` of a column `Index`) mean the episodes of that batch, whatever was
                written since.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted, or its ring is away.

        Cost: reads the data of these episodes alone.
        """
        where, engine = f"{type(self).__name__}.get_episode_data", self.engine
        engine.episodes_only("get_episode_data")
        if idx is None:
            return engine.data(engine.names_of(None, where), None)
        numbers = np.asarray(idx).reshape(-1)
        names = engine.names_in_batch(numbers)
        if names is None:
            names = engine.names_of(numbers, where)
        return engine.data(names, lambda place: evicted(where, int(numbers[place])))

    def _home(self, episode: int, what: str) -> tuple[Ring, int]:
        """Return the ring of an episode, and its number in there; `what`: the method to name."""
        self.engine.episodes_only(what)
        rings = self.engine.rings_to_read()
        local = operator.index(episode)
        if len(rings) == 1:
            return rings[0], local
        local = self._episode_number(local)
        for ring in rings:
            count = ring.num_episodes
            if local < count:
                return ring, local
            local -= count
        raise evicted(f"{type(self).__name__}.{what}", episode)

    def _named(self, ring: Ring, steps: Sequence[Array]) -> dict[str, Array]:
        schema = ring.source.schema
        assert schema is not None
        found = dict(zip(schema.names, steps, strict=True))
        return {name: found[name] for name in self.column_names}

    def episodes(self, *, nest: bool = False) -> Iterator[dict[str, Any]]:
        """Yield every episode, oldest first, ring by ring, as column -> list of per-step arrays (copies).

        The key `_episode_data` is included when the episode has data. Rows are verified by their checksum. An
        episode that is evicted meanwhile is left out.

        Args:
            nest: as for `load_episode`.

        Raises:
            CorruptError: rows differ from what was stored.
        """
        self.engine.episodes_only("episodes")
        rings = self.engine.rings_to_read()
        each = (
            {n: v if n == EPISODE_DATA_KEY else list(v) for n, v in one.items()}
            for ring in rings
            for one in ring.episodes.each()
        )
        return (nested(one, f"{type(self).__name__}.episodes") for one in each) if nest else each

    def load_episode(self, episode_idx: int, *, nest: bool = False) -> dict[str, Any]:
        """Return one episode, every column dense `(T, ...)`, verified by its checksum.

        Args:
            episode_idx: its number.
            nest: return the columns `obs/a`, `obs/b` as `{"obs": {"a": ..., "b": ...}}`.

        Raises:
            InputError: `nest`, and a column has the name of what would hold another one.
            ClipIndexError: there is no such episode.
            CorruptError: its rows differ from what was stored.
        """
        where = f"{type(self).__name__}.load_episode"
        ring, local = self._home(episode_idx, "load_episode")
        episode = self._named(ring, ring.episodes.one(local, where))
        return nested(episode, where) if nest else episode

    def load_steps(
        self, episode_idx: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return steps `[start, end)` of one episode, every column dense `(end - start, ...)`.

        Args:
            episode_idx: its number.
            start: its first step to return.
            end: one past the last.
            columns: names of those to read; None: all.

        Raises:
            ClipIndexError: there are no such steps.
            UnknownColumnError: there is no such column.
        """
        if columns is None:
            return self._load_slice(episode_idx, start, end)
        for name in columns:
            self._check_column(name, "load_steps")
        ring, local = self._home(episode_idx, "load_steps")
        steps = ring.episodes.steps(local, start, end, f"{type(self).__name__}.load_steps", list(columns))
        return dict(zip(columns, steps, strict=True))

    def _load_slice(self, ep: int, start: int, end: int) -> dict[str, Array]:
        ring, local = self._home(ep, "load_episode")
        return self._named(ring, ring.episodes.steps(local, start, end, type(self).__name__))

    def episode_data(self, episode_idx: int) -> dict[str, Any]:
        """Return the values that are constant within one episode; {} if it has none. Reads its data alone.

        Raises:
            ClipIndexError: there is no such episode.
        """
        ring, local = self._home(episode_idx, "episode_data")
        return ring.episodes.data_of(local, f"{type(self).__name__}.episode_data")

    def dump(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        mode: str = "overwrite",
        *,
        progress: bool = True,
        fps: Any = None,
        drop: str | Iterable[str] = (),
        **writer_options: Any,
    ) -> None:
        """Write the stored episodes as a regular dataset, episode by episode, in the memory that the longest one takes.

        An episode in parts is written as one if it fits twice into the memory that is left; otherwise as several
        episodes, each with the data of the episode and `first_step`, the number of steps before it, and a warning says
        so. One that has not ended is written as far as it is stored.

        Args:
            path: target; existing data stay until the new dataset is complete.
            format: name of a registered format; None: the suffix of `path` decides (.h5, .zarr, .lance), or the
                existing data.
            mode: "overwrite", "append" or "error".
            progress: show a progress bar if the export takes a while.
            fps: steps per second of the dataset, where that is to be another rate than the buffer's.
            drop: names of columns, and of data of episodes, to leave out. What the format can't hold has to be here:
                but for it, and for `seed` and `policy_step`, which `World` adds, nothing is left out.
            writer_options: passed to the format's writer.

        Raises:
            InputError: an unknown format or mode, a format that is read-only, or an unknown suffix; the format can't
                hold a column, or data of an episode: all of them are named, with the `drop=` that would do, and nothing
                was written; `path` is appended to, and has another rate, or rewards that stand elsewhere.
            FileExistsError: mode="error" and the target exists.
        """
        self.engine.episodes_only("dump")
        where = f"{type(self).__name__}.dump"
        chosen, options = resolve_format(path, format, mode=mode, where=where), {**writer_options, "mode": mode}
        told = Facts(fps=check_fps(where, fps))
        copy_episodes([(repr(self), self)], path, chosen, progress, where, options, told, drop)

    def each_episode(self, with_data: bool, is_live: bool = False) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the columns and the data of every episode, verified; see `Dataset.each_episode`, and `dump` of one that
        does not fit into memory."""
        self.engine.episodes_only("episodes")
        schema = self.engine.schema
        row_nbytes = sum(spec.row_nbytes for spec in schema.columns) if schema is not None else 0
        most = max(2.0, memory_left() / 2 / max(1, row_nbytes))

        def tell(before: int, number: int, length: int) -> None:
            warnings.warn(
                f"{type(self).__name__}: episode {before + number} of {length} steps ({length * row_nbytes >> 20} MiB) "
                f"does not fit into memory twice: it is copied as several episodes of up to {int(most / 2)} steps, "
                f"with {FIRST_STEP!r} in their data",
                stacklevel=2,
            )

        rings = self.engine.rings_to_read()
        firsts = accumulate((ring.num_episodes for ring in rings), initial=0)
        for ring, first in zip(rings, list(firsts), strict=False):
            for episode in ring.episodes.each(most, partial(tell, first), with_data):
                data = episode.pop(EPISODE_DATA_KEY, {})
                yield episode, data if with_data else {}

    # -- passes, views, batches --------------------------------------------------------------

    def view(
        self,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
        *,
        where: Where | None = None,
        live: bool = False,
        at: Mapping[str, Any] | None = None,
    ) -> BufferView:
        """Return a dataset of what is stored now: its ids do not change, in any process that receives it.

        A live view moves to what is stored now at its `refresh()`, and where a pass of its own `pass_sampler()` begins;
        nothing else moves it, neither `len` nor a draw. It selects by `where` anew each time.

        Args:
            window: as for `sample`: one item per anchor.
            columns: as for `sample`.
            anchors: as for `sample`. It changes the items and their number alone.
            drop_all_padded: as for `sample`.
            where: the episodes to keep, numbered from 0 (`source_episodes` has their numbers before): a condition such
                as `"return > 100 and not flags contains bad"`, or a function of an episode's data (a dict) that tells
                whether the episode is wanted. An episode that is still being recorded is not selected before it ends.
            live: whether the view moves.
            at: the `moment` of another view, whose episodes and ids this one has, whatever was evicted since.

        An item whose episode was evicted is replaced by another one of the view. An episode that is still being
        recorded has the items
        that it had: their padding, and columns that are computed up to its end, are those of when they are read.

        Raises:
            InputError: as for `sample`; `at` with `where` or `live`, or of another buffer; over many rings, a window
                with across=True.
            NoClipsError: a window over a buffer that has no columns yet.

        Cost: 12 bytes for each stored episode; no rows are copied or protected from eviction. `where` reads the data of
        every
            episode, and of `return` and `ended` the columns behind them.
        """
        wanted = self._wanted(None, window, columns, anchors, drop_all_padded)
        caller = f"{type(self).__name__}.view"
        cut = None if wanted.is_plain else self._cut_of(wanted, caller)[0]
        return BufferView.asked(self, cut, where, live, at, caller)

    def take(self, episodes: Sequence[int] | Array) -> BufferView:
        """Return a view of some of the episodes that are stored now, as `Dataset.take`."""
        return self.view().take(episodes)

    def pinned(self) -> BufferView:
        """Return a view of what is stored now."""
        return BufferView.of_pass(self)

    def origins(self) -> tuple[Array, Array]:
        """Return what each episode was first stored as; see `Dataset.origins`."""
        return self.view().origins()

    def split(
        self,
        train: float | Sequence[float] = 0.9,
        seed: int = 0,
        *,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
        where: Where | None = None,
    ) -> tuple[BufferView, ...]:
        """Return views that share no episode: `train` of the episodes, and the rest; see `Dataset.split`.

        Args:
            train: the share of the first view, or the shares of all, such as `[0.8, 0.1, 0.1]`.
            seed: of the choice.
            window: as for `view`.
            columns: as for `view`.
            anchors: as for `view`.
            drop_all_padded: as for `view`.
            where: as for `view`.
        """
        made = self.view(window, columns, anchors, drop_all_padded, where=where)
        return made.split(train, seed)

    def batches(
        self,
        batch_size: int,
        steps: int | None = None,
        prefetch: int = 2,
        to: str = "numpy",
        device: Any = None,
        pin_memory: bool = False,
        *,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
    ) -> Batches:
        """Return an endless iterator over `sample(batch_size)`, the next batches gathered while one is used.

        Args:
            batch_size: B, clips.
            steps: batches until it ends; None: never.
            prefetch: batches gathered ahead by a background thread; 0: none, and no thread.
            to: "numpy" arrays or "torch" tensors.
            device: where tensors go.
            pin_memory: whether they go there from page-locked memory, so that the model does not wait.
            window: as for `sample`.
            columns: as for `sample`.
            anchors: as for `sample`.
            drop_all_padded: as for `sample`.

        Raises:
            InputError: an argument is wrong. Errors of `sample` are raised by the iterator.

        Example:
            >>> from ringmap import ReplayBuffer
            >>> buf = ReplayBuffer(max_steps=100, seed=0)
            >>> buf.write_episode({"obs": np.arange(50)})
            >>> with buf.batches(8, steps=3) as batches:
            ...     [batch["obs"].shape for batch in batches]
            [(8, 1), (8, 1), (8, 1)]
        """
        wanted = self._wanted(None, window, columns, anchors, drop_all_padded)
        cut, clips = self._cut_of(wanted, "ReplayBuffer.batches")

        def sample(size: int) -> Batch[Array]:
            return self._sample(cut, clips, size)

        def ahead(size: int, count: int | None) -> Iterator[Batch[Any]]:
            draw = partial(self.engine.draw, clips, size, cut)
            return map(self.engine.shown, drawn_ahead(self.clips, draw, cut, count))

        pace = self._checked_pace(self.pace, "ReplayBuffer.batches")
        wait = None if pace is None else partial(pace.draw, int(batch_size) * cut.widest)
        return Batches(
            sample,
            ahead,
            batch_size,
            steps,
            prefetch,
            to,
            device,
            pin_memory,
            wait=wait,
            hand_out=self.engine.hand_out,
        )

    def sample(
        self,
        batch_size: int,
        history_len: int | None = None,
        step: int | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
        pace: Pace | None = None,
        nest: bool = False,
    ) -> Batch[Array]:
        """Draw a batch of clips through the sampler.

        Args:
            batch_size: B, clips.
            history_len: H, observations per clip; None for the buffer's own.
            step: passed to the sampler; None uses the internal counter, and advances it.
            out: column -> array to fill and return, of exactly the shape and dtype of the result, C-contiguous,
                such as an earlier batch; missing columns are returned in new arrays.
            window: name -> `Window`, the steps of that column around a step t; `Computed`; or a function of the batch
                that returns a column. In place of `history_len`: a column without a window comes at t alone.
            columns: names of the columns to read; None: all.
            anchors: the steps t to leave out at the ends of episodes: `slice(2, -7)` the first 2 and the last 7.
            drop_all_padded: whether to leave out steps t at which a padded column would be padding alone. Where the
                offsets of a window have gaps, episodes shorter than the widest gap have no anchors then.
            pace: waits while the learner is too far ahead of the collectors; counts B times the most steps of a column.
                Of a ring in its directory.
            nest: return the columns `obs/a`, `obs/b` as `{"obs": {"a": ..., "b": ...}}`.

        Returns:
            column -> `(B, H, ...)` array; `action` `(B, H, -1)`; with a window of n offsets `(B, n, ...)`, without one
            `(B, ...)`. `transform` is not applied. The attribute `ids`, int64 `(B,)`, is for `update_priorities`;
            `weights`, float32 `(B,)`, is for losses, or None if the sampler has no weights; `redrawn`, bool `(B,)`,
            marks clips that came in place of others, evicted before they were read.

        Raises:
            InputError: a size is not positive, or the sampler's result does not have shape `(B,)`.
            ClipIndexError: the sampler returned an id that is out of range.
            NoClipsError: no clip is stored.
            LappedError: the writer overtook this reader for 5 s without progress.

        Cost: O(B log episodes), and one copy of the rows.
        """
        batch_size = positive("ReplayBuffer.sample", "batch_size", batch_size)
        pace = self._checked_pace(pace or self.pace, "ReplayBuffer.sample")
        if window is None and columns is None and anchors is None and not drop_all_padded:
            history = self.num_steps if history_len is None else history_len
            history = positive("ReplayBuffer.sample", "history_len", history)
            cut = Cut.clip(history, self.frameskip)
            if pace is not None:
                pace.draw(batch_size * cut.widest)
                self.engine.refresh()  # what it waited for
            batch = self._sample(cut, self, batch_size, step, out)
            if not self._told_short:
                self._told_short = True
                warn_unreached(self._anchor_lengths(), self.cut, "ReplayBuffer.sample")
            return batch.like(nested(batch, "ReplayBuffer.sample")) if nest else batch
        wanted = self._wanted(history_len, window, columns, anchors, drop_all_padded)
        counted = 0
        if pace is not None and self.engine.schema is None:  # until then nothing is known of a window
            pace.draw(batch_size)
            self.engine.refresh()
            counted = batch_size
            wanted = self._wanted(history_len, window, columns, anchors, drop_all_padded)
        cut, clips = self._cut_of(wanted, "ReplayBuffer.sample")
        if pace is not None and (count := batch_size * cut.widest - counted):
            pace.draw(count)
            self.engine.refresh()
        batch = self._sample(cut, clips, batch_size, step, out)
        return batch.like(nested(batch, "ReplayBuffer.sample")) if nest else batch

    def _checked_pace(self, pace: Pace | None, where: str) -> Pace | None:
        """Return a pace that counts this buffer."""
        if pace is not None:
            self.engine.check_pace(pace, where)
        return pace

    def _wanted(
        self,
        history_len: int | None,
        window: WindowSpec | None,
        columns: Iterable[str] | None,
        anchors: slice | None,
        drop_all_padded: bool,
    ) -> Wanted:
        check_anchors(type(self).__name__, anchors)
        history = self.num_steps if history_len is None else history_len
        history = positive("ReplayBuffer.sample", "history_len", history)
        if window is not None and history_len is not None:
            raise InputError(
                f"ReplayBuffer.sample: history_len={history_len} and a window contradict; a window says which steps of "
                "each column an item holds"
            )
        if columns is not None and not isinstance(columns, str):
            columns = tuple(columns)
        return Wanted(history, self.frameskip, window, columns, anchors, drop_all_padded, self.fps, self.reward_at)

    def cut_of(
        self,
        history_len: int | None = None,
        window: WindowSpec | None = None,
        columns: Iterable[str] | None = None,
        anchors: slice | None = None,
        drop_all_padded: bool = False,
    ) -> Cut:
        """Return what an item of `sample` with these arguments holds, and which steps are its anchors.

        Raises:
            InputError: as for `sample`.
            NoClipsError: a window over a buffer that has no columns yet.
        """
        wanted = self._wanted(history_len, window, columns, anchors, drop_all_padded)
        return self._cut_of(wanted, "ReplayBuffer.sample")[0]

    def _cut_of(self, wanted: Wanted, where: str) -> tuple[Cut, Any]:
        """Return the cut of a request, and what a sampler receives in place of this buffer."""
        if self._cuts is None:
            self._cuts = Cuts()
        schema = self.engine.schema
        if schema is None and not wanted.is_plain:
            self.engine.refresh()
            schema = self.engine.schema
        if not wanted.is_plain:
            self.engine.episodes_only(f"{where.rpartition('.')[2]}(window=, columns=, anchors=)")
        return self._cuts.of(self, wanted, schema, where)

    def _sample(
        self,
        cut: Cut,
        clips: Any,
        size: int,
        step: int | None = None,
        out: Mapping[str, Array] | None = None,
    ) -> Batch[Array]:
        into = None if out is None else fitting(out, self.engine, size, cut)
        positions, crossing, weigh = self.engine.draw(clips, size, cut, step)
        asked, numbers = positions.copy(), self.engine.numbering(cut)
        columns = self.engine.read(positions, cut, into, crossing=crossing, numbers=numbers)
        numbered = None if numbers is None else numbers.table()
        batch = Batch(columns, positions, weigh and weigh(positions), asked, numbered)
        self.engine.hand_out(batch)
        return self.engine.shown(batch)

    def update_priorities(self, ids: Any, values: Any) -> int:
        """Set the priorities of clips: `sampler.update_priorities`, for a sampler with priorities.

        Args:
            ids: of the clips: `batch.ids`.
            values: their priorities.

        Returns:
            The number of clips updated: evicted clips are skipped.

        Raises:
            InputError: the sampler does not draw by priority.
        """
        self.engine.check_open()
        return self.engine.sampler.update_priorities(ids, values)

    def _why_no_clips(self) -> str:
        return self.engine.why_no_clips(self.cut)


class DefaultSampler:
    """Draw uniformly with the buffer's own generator: the value of `buffer.sampler` until another is assigned.

    Called like any sampler, it returns ids. Called with only `shuffle=` or `seed=`, it is `buffer.pass_sampler`.
    """

    def __init__(self, buffer: Sampled) -> None:
        self._buffer = buffer

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return ids for `(step, buffer, batch_size, history_len)`, and otherwise a sampler for a DataLoader."""
        if len(args) < 4 and "batch_size" not in options:
            return self._buffer.pass_sampler(*args, **options)
        return self._ids(*args, **options)

    def _ids(self, step: int, buffer: Sampled, batch_size: int, history_len: int) -> Array:
        return uniform(self._buffer.engine.rng, buffer, batch_size, history_len)


_MOST = 32


class ClipsOfCut:
    """The clips of a cut, as a sampler sees them: a stand-in for the buffer, which it is in all other ways."""

    def __init__(self, buffer: Any, cut: Cut) -> None:
        self._buffer = weakref.ref(buffer)
        self._cut = cut

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of anchors, whatever the history."""
        count: int = self._of.engine.count(self._cut, shared=False)
        return count

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Return the anchors that exist now."""
        found: ClipRange = self._of.engine.window(self._cut)
        return found

    def clip_windows(self, history_len: int = 1) -> list[ClipRange]:
        """Return the same, ring by ring."""
        found: list[ClipRange] = self._of.engine.windows(self._cut)
        return found

    @property
    def _of(self) -> Any:
        return self._buffer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._of, name)


class Cuts:
    """The cuts of one buffer.

    Args:
        buffer: the buffer, or a view: what `ClipsOfCut` stands in for.
    """

    def __init__(self) -> None:
        self._told_lanes = False
        self._known: dict[tuple[Any, ...], tuple[Schema, Cut, ClipsOfCut]] = {}

    def of(self, buffer: Any, wanted: Wanted, schema: Schema | None, where: str) -> tuple[Cut, Any]:
        """Return the cut of a request, and what a sampler receives in place of the buffer.

        Raises:
            InputError: the request is wrong.
            NoClipsError: nothing is stored, so that there are no columns to check it against.
        """
        if wanted.is_plain:
            if wanted.drop_all_padded:
                raise InputError(f"{where}: drop_all_padded is for padded columns; pass window=")
            return Cut.clip(wanted.history, wanted.frameskip), buffer
        try:
            key = wanted.key
        except AttributeError:
            raise InputError(
                f"{where}: window must be a mapping of columns to Window(...), or Sequences(...), got {wanted.window!r}"
            ) from None
        found = self._known.get(key)
        if found is None or found[0] is not schema:
            if schema is None:
                raise NoClipsError(f"{where}: nothing is stored yet; collect first")
            cut = wanted.cut(where, schema)
            if len(self._known) >= _MOST:
                self._known.pop(next(iter(self._known)))
            found = self._known[key] = schema, cut, ClipsOfCut(buffer, cut)
            warn_unreached(buffer.lengths, cut, where)
            if cut.across and not self._told_lanes and not buffer.engine.has_lanes:
                self._told_lanes = True
                tell_no_lanes(where)
        return found[1], found[2]
