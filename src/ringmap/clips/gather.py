"""Gathers batches of clips: numbers to positions to rows, each copied once.

    numbers -> ClipIndex -> positions (B,) -> slots (B, H) -> one take per column
                                  ^                                 |
                                  +---- redraw those evicted <---- look again

Invariants: a clip is returned only if a look after the copy shows that its rows were live
during the copy; a clip that was evicted meanwhile is redrawn uniformly, and counted.
Not here: which clips are requested (samplers), what is done with a batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringmap.clips.index import ClipIndex, why_no_clips
from ringmap.clips.threads import SPLIT_NBYTES, take
from ringmap.errors import NoClipsError
from ringmap.storage.columns.readahead import Readahead
from ringmap.storage.columns.rows import Rows
from ringmap.storage.disk.forks import Forkable
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import lost, read_again
from ringmap.storage.ring.integers import ClipNumber, Position

__all__ = ["PINNED", "ClipReader", "Pinned"]

Array = np.ndarray[Any, np.dtype[Any]]

PINNED = 1 << 62
"""An id of PINNED + p means the clip that starts at position p of the ring, in every process and at any time."""


class Pinned:
    """Clip numbers `[base, end)` of one span, as of one moment of one numbering; see `SpanIndex`.

    They are the clips of the newest episodes that start before position `head`, in any numbering.
    """

    __slots__ = ("base", "end", "head", "numbering")

    def __init__(
        self, base: ClipNumber, end: ClipNumber, numbering: object, head: Position
    ) -> None:
        self.base, self.end, self.numbering, self.head = base, end, numbering, head

    @property
    def count(self) -> int:
        """Number of clips."""
        return self.end - self.base


class ClipReader(Forkable):
    """Reads clips of a source, also while a writer in any thread or process fills it.

    Args:
        source: the open buffer.
        rng: redraws clips that were evicted before they could be read.
    """

    def __init__(self, source: Handle, rng: np.random.Generator) -> None:
        self.source = source
        self.rng = rng
        self.index = ClipIndex(source.live)
        self.num_redraws = 0
        self.watch = Readahead(source.disk.system)

    def pin(self, span: int) -> Pinned:
        """Return the clips that exist now. O(1) when nothing changed."""
        with self.source.memory:
            index = self.index.of(span)
            return Pinned(index.base, index.end, index.numbering, self.source.head)

    def at(
        self, positions: Array, history_len: int, frameskip: int,
        out: dict[str, Array] | None = None, threads: int = 1, asked: bool = False,
    ) -> dict[str, Array]:  # fmt: skip
        """Return the clips that start at these positions, column -> `(B, history, ...)`.

        Args:
            positions: int64 `(B,)`, where clips started at the last look; updated with the redrawn ones.
            history_len: H, observations per clip.
            frameskip: K, stride between them; `action` is dense, `(B, H, K * action)`.
            out: column -> array to fill and return, of exactly that shape and dtype, C-contiguous.
            threads: maximum number of threads for the copy.
            asked: whether `want` was already called for them.

        Raises:
            NoClipsError: no clip is left to draw.
            LappedError: the writer overtook this reader ten times in a row without progress.
        """
        source = self.source
        if source.rows is None:  # nothing was ever stored
            if len(positions):
                self._redraw(len(positions), history_len * frameskip)
            return {}
        batch = self._gather(positions, history_len, frameskip, out, threads, asked)
        bad = lost(source, positions)
        if bad is not None:
            self._read_again(batch, positions, bad, history_len, frameskip)
        return batch

    def _read_again(
        self, batch: dict[str, Array], positions: Array, bad: Array, history_len: int, frameskip: int
    ) -> None:  # fmt: skip
        """Redraw the bad clips of a batch, and read them."""

        def gather(which: Array) -> None:
            for name, values in self._gather(positions[which], history_len, frameskip).items():
                batch[name][which] = values

        def redraw(which: Array) -> Array:
            return self._redraw(len(which), history_len * frameskip)

        advice = "raise max_steps, or ask for smaller batches"
        read_again(self.source, positions, bad, gather, redraw, self.source.folder, advice)

    def draw(self, count: int, span: int, rng: np.random.Generator) -> Array | None:
        """Return the positions of `count` clips drawn uniformly, or None when there are none."""
        with self.source.memory:
            index = self.index.of(span)
            base, end = index.base, index.end
            return index.positions(rng.integers(base, end, count)) if end > base else None

    def starts(self, positions: Array, span: int) -> Array:
        """Tell for each position whether a clip of `span` steps starts there. O(B log episodes)."""
        with self.source.memory:
            starts, lengths = self.source.live.starts, self.source.live.lengths
            if not len(starts):
                return np.zeros(len(positions), np.bool_)
            episodes = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
            steps = positions - starts.take(episodes)
            found: Array = (steps >= 0) & (steps + span <= lengths.take(episodes))
            return found

    def starting(self, positions: Array, span: int) -> Array:
        """Return the positions; one where no clip of `span` steps starts is redrawn. O(B log episodes)."""
        good = self.starts(positions, span)
        return positions if good.all() else self._replaced(positions, ~good, span)

    def pin_before(self, head: Position, count: int, span: int) -> Pinned:
        """Return the `count` clips of the episodes that start before position `head`: the moment of another process."""
        with self.source.memory:
            index = self.index.of(span)
            end = index.end_before(head)
            return Pinned(ClipNumber(end - count), end, index.numbering, head)

    def place(self, numbers: Array, pinned: Pinned, span: int) -> Array:
        """Return where the clips with these numbers start; an evicted one is redrawn."""
        source = self.source
        with source.memory:
            index = self.index.of(span)
            if index.numbering is not pinned.numbering:  # other numbers, the same positions
                numbers = numbers + (index.end_before(pinned.head) - pinned.end)
            gone = (numbers < index.base) | (numbers >= index.end)
            if not gone.any():
                return index.positions(numbers)
            kept = numbers[~gone]
            positions = np.empty(len(numbers), np.int64)
            if len(kept):
                positions[~gone] = index.positions(kept)
        source.refresh()  # they are drawn from the newest state
        return self._replaced(positions, gone, span)

    def _replaced(self, positions: Array, gone: Array, span: int) -> Array:
        """Return the positions with those that are gone redrawn."""
        positions = positions.copy()
        positions[gone] = self._redraw(int(gone.sum()), span)
        return positions

    def _redraw(self, count: int, span: int) -> Array:
        """Return the positions of `count` clips drawn uniformly from the newest state."""
        positions = self.draw(count, span, self.rng)
        if positions is None:
            with self.source.memory:
                lengths = self.source.live.lengths
                why = f"no clips of {span} steps are left: all were evicted or cleared; collect more first"
                if len(lengths):
                    why = why_no_clips(lengths, span)
            raise NoClipsError(f"{self.source.folder}: {why}")
        self.num_redraws += count
        return positions

    def _gather(
        self, positions: Array, history_len: int, frameskip: int,
        out: dict[str, Array] | None = None, threads: int = 1, asked: bool = False,
    ) -> dict[str, Array]:  # fmt: skip
        rows, head = self.source.rows, self.source.head  # before any row is read
        assert rows is not None
        sparse = _slots(positions, history_len, frameskip, rows.ring.rows)
        if threads > 1 and sparse.size * frameskip * rows.row_nbytes < SPLIT_NBYTES:
            threads = 1
        if rows.large:
            if not asked:
                self._want(rows, positions, sparse, history_len * frameskip)
            self.watch.begin()
        batch: dict[str, Array] = {}
        for name, column in rows.by_name.items():
            slots, into = sparse, None if out is None else out.get(name)
            if name == "action":
                span, shape = history_len * frameskip, column.spec.shape
                if frameskip > 1:
                    slots = _slots(positions, span, 1, rows.ring.rows)
                if into is not None:
                    into = into.reshape(len(positions), span, *shape)
                taken = (
                    take(column, slots, into, threads, head)
                    if threads > 1
                    else column.take(slots, into, head)
                )
                width = math.prod(shape) * frameskip
                batch[name] = taken.reshape(len(positions), history_len, width)
            elif threads > 1:
                batch[name] = take(column, slots, into, threads, head)
            else:
                batch[name] = column.take(slots, into, head)
        if rows.large:
            self.watch.end()
        return batch

    def want(self, positions: Array, history_len: int, frameskip: int) -> None:
        """Ask the disk for clips that are to be read soon, if that pays off."""
        rows = self.source.rows
        if rows is not None and rows.large:
            sparse = _slots(positions, history_len, frameskip, rows.ring.rows)
            self._want(rows, positions, sparse, history_len * frameskip)

    def _want(self, rows: Rows, positions: Array, sparse: Array, span: int) -> None:
        """Ask for all columns before any of them is touched."""
        if self.watch.is_cold:
            for name in rows.large:
                dense = name == "action" and sparse.shape[1] < span
                slots = _slots(positions, span, 1, rows.ring.rows) if dense else sparse
                rows.by_name[name].want(slots)


def _slots(positions: Array, count: int, stride: int, rows: int) -> Array:
    """Return the slots `(B, count)` of `count` positions from each of `positions` on."""
    slots = (positions % rows)[:, None]
    if count > 1:
        slots = slots + np.arange(0, count * stride, stride)
        # A span is at most as long as the ring, so one lap back is enough; a second modulo costs 4 times as much.
        np.subtract(slots, rows, out=slots, where=slots >= rows)
    return slots
