"""The episode sampler: every episode is equally likely, then every clip in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.clip_range import ClipRange
from ringmap.clips.marks import Mark, MarkFile, marked
from ringmap.clips.samplers.base import Array, DrawingSampler, Seed, window_of
from ringmap.clips.where import Condition, Values
from ringmap.errors import ArgumentTypeError, InputError, NoClipsError, NotFoundError
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.paths import MARKS, local_path

__all__ = ["EpisodeSampler"]

_TRIES = 8
_NAMES = ("flags", "note")


class EpisodeSampler(DrawingSampler):
    """Draw an episode uniformly, then a clip of it uniformly: short episodes count as much as long ones.

    Episodes too short for a clip are never drawn.

    Args:
        rng: the generator, or its seed; None makes a new one.
        where: a condition on the marks of an episode (`ringmap.Marks`), `flags` and `note`, such as `not flags contains
            bad`: only what meets it is drawn, from the draw after it was marked on. `view(where=)` takes conditions on
            all else.
        marks: the file of marks, or a directory with one. By default the one in the buffer's directory, which may come
            later.

    Raises:
        InputError: the condition can't be parsed, or names something else; from a draw: the buffer is in RAM, and there
            is no `marks`; or sequences have `across=True`.
        NotFoundError: from a draw: `marks` is not there.
        CorruptError: from a draw: the marks can't be read.
        NoClipsError: from a draw: no episode that is long enough meets the condition.

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
        where: str = "",
        marks: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(rng)
        if not isinstance(where, str):
            raise ArgumentTypeError(
                "EpisodeSampler: where= takes a condition on marks, such as 'not flags contains bad', got "
                f"{where!r:.80}; a function of an episode's data is for view(where=)"
            )
        self._condition = Condition(where, "EpisodeSampler")
        others = [name for name in self._condition.names if name not in _NAMES]
        if others:
            raise InputError(
                f"EpisodeSampler: where= takes conditions on 'flags' and 'note', got {others}; draw from "
                f"view(where={where!r})"
            )
        self._where = where.strip()
        self._path = None if marks is None else local_path(marks)
        if marks is not None and not self._where:
            raise InputError(
                "EpisodeSampler: marks without where change nothing; give where='not flags contains bad', say"
            )
        self._known: _Chosen | None = None

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
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
        if self._where and window.index.across:
            raise InputError(
                "EpisodeSampler: a sequence with across=True runs on into the next episode, which may not meet "
                f"where={self._where!r}; use across=False"
            )
        wanted = self._chosen(window) if self._where else None
        with thread.searching, window.lock:
            starts, lengths = window.live.starts, window.live.lengths
            whole = window.index.whole if window.index.is_joined else None
            if whole is not None:
                starts, lengths = whole.places, whole.lengths
            names = starts if whole is None else whole.names
            chosen = self.rng.integers(0, len(lengths), batch_size)
            for _ in range(_TRIES):
                refused = window.in_episodes(lengths[chosen]) == 0
                if wanted is not None:
                    refused |= ~wanted.has(names[chosen])
                if not refused.any():
                    break
                chosen[refused] = self.rng.integers(0, len(lengths), int(refused.sum()))
            else:
                good = window.in_episodes(lengths) > 0
                if wanted is not None:
                    good &= wanted.has(names)
                long_enough = np.flatnonzero(good)
                if not len(long_enough):
                    raise NoClipsError(
                        f"EpisodeSampler: no episode that is long enough meets {self._where!r}; collect more, or ask "
                        "for less"
                    )
                chosen = long_enough[self.rng.integers(0, len(long_enough), batch_size)]
            steps = self.rng.integers(0, window.in_episodes(lengths[chosen]))
            anchors = starts[chosen] + steps + window.before
            if whole is not None:
                anchors = whole.positions(anchors)
            ids: Array = window.ids(anchors)
        return ids

    def _meets(self, marks: Sequence[Mark]) -> Array:
        """Return of each mark whether it meets the condition, and last whether an episode without one does."""
        columns = {
            "flags": [*(" ".join(mark.flags) for mark in marks), ""],
            "note": [*(mark.note for mark in marks), ""],
        }
        return self._condition.select(_NAMES, lambda name: Values.of(columns[name]), len(marks) + 1)

    def _chosen(self, window: ClipRange) -> _Chosen:
        """Return which episodes are drawn. One system call while the file stays as it is."""
        source = window.source
        path = self._path
        if path is None:
            if source.disk.volatile:
                raise InputError("EpisodeSampler: a buffer in RAM has no marks beside it; give marks=FILE")
            path = os.path.join(source.folder, MARKS)
        elif os.path.isdir(path):
            path = os.path.join(path, MARKS)
        file = MarkFile.of(source, path)
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
            *each, others = self._meets(list(mine.values())).tolist()
            found = sorted(at for at, meets in zip(mine, each, strict=True) if meets != others)
            later = any(at >= source.head for at in every)  # marked by a reader that knows more
            at_head = source.head if later else None
            known = _Chosen(moment, at_head, np.array(found, np.int64), others)
            self._known = known
        return known


class _Chosen(NamedTuple):
    """The episodes of a ring that are drawn: valid while its UUID, the file and its era, and its head unless `again_at`
    is None, are the same.

    `others`: whether all but those at `positions` are, else these.
    """

    moment: tuple[bytes, tuple[int, ...], int]
    again_at: int | None
    positions: Array
    others: bool

    def has(self, names: Array) -> Array:
        """Return which of these episodes are drawn."""
        listed: Array = np.isin(names, self.positions)
        return np.not_equal(listed, self.others)
