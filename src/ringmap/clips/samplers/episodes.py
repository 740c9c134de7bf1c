"""The episode sampler: every episode is equally likely, then every clip in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.clip_range import ClipRange
from ringmap.clips.marks import MARK_NAMES, Mark, MarkFile, marked
from ringmap.clips.samplers.base import Array, DrawingSampler, Seed, windows_of
from ringmap.clips.where import Condition, Values
from ringmap.errors import ArgumentTypeError, InputError, NoClipsError, NotFoundError
from ringmap.storage.disk.calls import thread
from ringmap.storage.disk.paths import MARKS, local_path
from ringmap.storage.ring.arrays import all_true
from ringmap.storage.ring.links import WholeEpisodes

__all__ = ["EpisodeSampler"]

_TRIES = 8


class EpisodeSampler(DrawingSampler):
    """Draw an episode uniformly, of all rings, then a clip of it uniformly: short episodes count as much as long ones.

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
        others = [name for name in self._condition.names if name not in MARK_NAMES]
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
        self._known: dict[bytes, _Chosen] = {}
        self._counts: dict[bytes, tuple[object, int]] = {}

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size log episodes); O(episodes) where most are too short.

        Raises:
            InputError: the buffer does not know where its episodes begin.
        """
        windows = windows_of(self, buffer, history_len)
        for window in windows:
            self._check(window, buffer)
        if len(windows) == 1:
            return self._drawn(windows[0], batch_size)
        sizes = np.array([self._drawable(window) for window in windows], np.float64)
        if not sizes.any():
            raise self._none()
        ids, first = list[Array](), 0
        for window, share in zip(windows, self.rng.multinomial(batch_size, sizes / sizes.sum()).tolist(), strict=True):
            ids.append((self._drawn_within(window, share) if share else np.empty(0, np.int64)) + first)
            first += window.count
        return np.concatenate(ids)[self.rng.permutation(batch_size)]

    def _check(self, window: ClipRange, buffer: Any) -> None:
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

    def _none(self) -> NoClipsError:
        return NoClipsError(
            f"EpisodeSampler: no episode that is long enough meets {self._where!r}; collect more, or ask for less"
        )

    def _drawable(self, window: ClipRange) -> int:
        """Return how many episodes of a ring can be drawn. O(episodes) where that changed."""
        wanted, live = self._chosen(window) if self._where else None, window.live
        with thread.searching, window.lock:
            source, chosen = window.source.manifest.uuid, None if wanted is None else id(wanted)
            now = live, window.anchors, live.era, live.first, live.last, live.num_steps, chosen, wanted
            known = self._counts.get(source)
            if known is None or known[0] != now:
                names, _, lengths, _ = _episodes_of(window)
                known = self._counts[source] = now, int(_good(window, names, lengths, wanted).sum())
        return known[1]

    def _drawn_within(self, window: ClipRange, size: int) -> Array:
        """Return the ids of clips of one ring as it was counted: another thread may have looked at it since, and the
        clips of newer episodes are no ids here."""
        ids = self._drawn(window, size)
        for _ in range(_TRIES):
            others = (ids < 0) | (ids >= window.count)
            if not others.any():
                return ids
            ids[others] = self._drawn(window, int(others.sum()))
        others = (ids < 0) | (ids >= window.count)
        of = ids[~others] if not others.all() else np.arange(max(1, window.count))
        ids[others] = self.rng.choice(of, int(others.sum()))
        return ids

    def _drawn(self, window: ClipRange, size: int) -> Array:
        """Return the ids of clips of one ring."""
        wanted = self._chosen(window) if self._where else None
        with thread.searching, window.lock:
            names, starts, lengths, whole = _episodes_of(window)
            chosen = self.rng.integers(0, len(lengths), size)
            for _ in range(_TRIES):
                good = _good(window, names[chosen], lengths[chosen], wanted)
                if all_true(good):
                    break
                refused = ~good
                chosen[refused] = self.rng.integers(0, len(lengths), int(refused.sum()))
            else:
                long_enough = np.flatnonzero(_good(window, names, lengths, wanted))
                if not len(long_enough):
                    raise self._none()
                chosen = long_enough[self.rng.integers(0, len(long_enough), size)]
            steps = self.rng.integers(0, window.in_episodes(lengths[chosen]))
            anchors = starts[chosen] + steps + window.before
            if whole is not None:
                anchors = whole.positions(anchors)
            ids: Array = window.ids(anchors)
        return ids

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the counts of episodes, which a copy counts for itself."""
        return {**self.__dict__, "_counts": {}}

    def _meets(self, marks: Sequence[Mark]) -> Array:
        """Return of each mark whether it meets the condition, and last whether an episode without one does."""
        columns = {
            "flags": [*(" ".join(mark.flags) for mark in marks), ""],
            "note": [*(mark.note for mark in marks), ""],
        }
        return self._condition.select(MARK_NAMES, lambda name: Values.of(columns[name]), len(marks) + 1)

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
        known = self._known.get(source.manifest.uuid)
        moment = source.manifest.uuid, signature, window.live.era
        if known is None or known.moment != moment or known.again_at not in (None, source.head):
            every = file.read()
            mine = marked(source, every)
            *each, others = self._meets(list(mine.values())).tolist()
            found = sorted(at for at, meets in zip(mine, each, strict=True) if meets != others)
            later = any(at >= source.head for at in every)  # marked by a reader that knows more
            at_head = source.head if later else None
            known = _Chosen(moment, at_head, np.array(found, np.int64), others)
            self._known[source.manifest.uuid] = known
        return known


def _episodes_of(window: ClipRange) -> tuple[Array, Array, Array, WholeEpisodes | None]:
    """Return the names, places and lengths of the episodes of a ring, and what leads from places to positions; None:
    they are positions. Holds the lock."""
    if window.index.is_joined:
        whole = window.index.whole
        return whole.names, whole.places, whole.lengths, whole
    return window.live.starts, window.live.starts, window.live.lengths, None


def _good(window: ClipRange, names: Array, lengths: Array, wanted: _Chosen | None) -> Array:
    """Return which episodes have a clip, and are wanted."""
    found = window.in_episodes(lengths) > 0
    return found if wanted is None else found & wanted.has(names)


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
