"""The episode sampler: every episode is equally likely, then every clip in it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ringmap.clips.clip_range import ClipRange, HasClipRange
from ringmap.clips.samplers.base import Array, DrawingSampler, Seed, window_of
from ringmap.errors import InputError, NoClipsError, NotFoundError
from ringmap.storage.read.marked import mark_file, marked
from ringmap.storage.sidecars.marks import MARKS, checked_flags

__all__ = ["EpisodeSampler"]

_TRIES = 8


class EpisodeSampler(DrawingSampler):
    """Draw an episode uniformly, then a clip of it uniformly: short episodes count as much as long ones.

    Episodes too short for a clip are never drawn.

    Args:
        rng: the generator, or its seed; None makes a new one.
        drop: flags; an episode that has one of them is never drawn, from the draw after it was marked on (`ringmap.Marks`).
        marks: the file of marks, or a directory with one. By default the one in the buffer's directory, which may come later.

    Raises:
        InputError: a flag is no word; from a draw: the buffer is in RAM, and there is no `marks`.
        NotFoundError: from a draw: `marks` is not there.
        CorruptError: from a draw: the marks can't be read.
        NoClipsError: from a draw: all episodes are dropped, or too short.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=1000, sampler=EpisodeSampler(0))
        >>> for number, length in enumerate([10, 900]):
        ...     buf.write_episode({"number": np.full(length, number)})
        >>> bool(0.4 < buf.sample(1000)["number"].mean() < 0.6)
        True
    """

    any_order = True

    def __init__(
        self,
        rng: Seed = None,
        *,
        drop: str | Iterable[str] = (),
        marks: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(rng)
        self._drop = frozenset(checked_flags(drop, "EpisodeSampler"))
        self._path = None if marks is None else os.path.abspath(marks)
        if marks is not None and not self._drop:
            raise InputError(
                "EpisodeSampler: marks without drop change nothing; give drop=['bad'], say"
            )
        self._known: _Dropped | None = None

    def __call__(self, step: int, buffer: HasClipRange, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size log episodes); O(episodes) where most are too short.

        Raises:
            InputError: the buffer does not know where its episodes begin.
        """
        window = window_of(self, buffer, history_len)
        if not window.has_episodes:
            raise InputError(
                f"EpisodeSampler: {type(buffer).__name__} stores transitions of many lanes, and no episodes; draw "
                "with another sampler"
            )
        with window.lock:
            starts, lengths = window.live.starts, window.live.lengths
            whole = window.index.whole if window.index.is_joined else None
            if whole is not None:
                starts, lengths = whole.places, whole.lengths
            names = starts if whole is None else whole.names
            dropped = self._dropped(window) if self._drop else names[:0]
            chosen = self.rng.integers(0, len(lengths), batch_size)
            for _ in range(_TRIES):
                refused = window.in_episodes(lengths[chosen]) == 0
                if len(dropped):
                    refused |= np.isin(names[chosen], dropped)
                if not refused.any():
                    break
                chosen[refused] = self.rng.integers(0, len(lengths), int(refused.sum()))
            else:
                good = (window.in_episodes(lengths) > 0) & ~np.isin(names, dropped)
                long_enough = np.flatnonzero(good)
                if not len(long_enough):
                    raise NoClipsError(
                        f"EpisodeSampler: each episode that is long enough has a flag of {sorted(self._drop)}; collect more, or drop less"
                    )
                chosen = long_enough[self.rng.integers(0, len(long_enough), batch_size)]
            steps = self.rng.integers(0, window.in_episodes(lengths[chosen]))
            anchors = starts[chosen] + steps + window.before
            if whole is not None:
                anchors = whole.positions(anchors)
            ids: Array = window.ids(anchors)
        return ids

    def _dropped(self, window: ClipRange) -> Array:
        """Return the positions of the episodes that are not drawn. One system call while the file stays as it is."""
        source = window.source
        path = self._path
        if path is None:
            if source.disk.volatile:
                raise InputError("EpisodeSampler: a buffer in RAM has no marks beside it; give marks=FILE")  # fmt: skip
            path = os.path.join(source.folder, MARKS)
        elif os.path.isdir(path):
            path = os.path.join(path, MARKS)
        file = mark_file(source, path)
        signature = file.signature()
        if not signature and self._path is not None:
            raise NotFoundError(
                f"EpisodeSampler: {path}: there are no marks; mark an episode first, or check its spelling"
            )
        known = self._known
        moment = source.manifest.uuid, signature, window.live.era
        if known is None or known.moment != moment or known.again_at not in (None, source.head):
            every = file.read()
            mine = marked(source, every)
            found = sorted(at for at, mark in mine.items() if self._drop.intersection(mark.flags))
            later = any(at >= source.head for at in every)  # marked by a reader that knows more
            known = _Dropped(moment, source.head if later else None, np.array(found, np.int64))
            self._known = known
        return known.positions


class _Dropped(NamedTuple):
    """The dropped episodes of a ring: valid while its UUID, the file and its era, and its head unless `again_at` is None, are the same."""

    moment: tuple[bytes, tuple[int, ...], int]
    again_at: int | None
    positions: Array
