"""Marks of episodes: flags and a note, kept beside the data.

    Marks(buf).set(position, flags="bad", note="the gripper slips")
    EpisodeSampler(where="not flags contains bad")     convert(..., where="not flags contains bad")     ringmap view

Invariants: the data never change; only marks of stored episodes are returned.
Not here: the file (clips/marks.py), conditions (episode_table.py).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from ringmap.clips.marks import Mark, MarkFile, checked_flags, checked_note, marked, record_key
from ringmap.errors import ClipIndexError, InputError
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import MARKS, local_path

__all__ = ["Mark", "Marks"]

Array = np.ndarray[Any, np.dtype[Any]]


class Marks:
    """The marks of a buffer's or a dataset's episodes.

    An episode of a buffer is named by the position of its first step (`ReplayBuffer.episode_spans`), which no eviction
    changes; one of a dataset by its number, in a dataset of some episodes by the number that it had before
    (`source_episodes`). What a dataset loads, and makes of it, changes no mark.

    Args:
        of: a `ReplayBuffer`, writer or reader, or a dataset.
        path: the file. By default `marks.json` in the buffer's directory, or `NAME.marks.json` beside the dataset. Give
            one where these can't be written. It may hold the marks of several buffers.

    Raises:
        InputError: what is marked is in RAM, and there is no `path`.

    Processes and threads: any number of processes may change the same file; none of them loses a mark.

    Example:
        >>> import tempfile
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(100, path=tempfile.mkdtemp() + "/buf")
        >>> for number in range(3):
        ...     buf.write_episode({"x": np.full(10, number)})
        >>> marks = Marks(buf)
        >>> marks.set(10, flags="bad", note="it slips")
        >>> [(position, mark.flags, mark.note) for position, mark in marks.all().items()]
        [(10, ('bad',), 'it slips')]
    """

    def __init__(self, of: Any, path: str | os.PathLike[str] | None = None) -> None:
        self._of = of
        ask = getattr(of, "marked_ring", None)
        ring = None if ask is None else ask()
        self._source = None if ring is None else ring[0]
        self._keys: dict[int, str | None] = {}
        given = None if path is None else local_path(path)
        if self._source is not None:
            if given is None and self._source.disk.volatile:
                raise InputError("Marks: a buffer in RAM has no place for marks; give one: Marks(buf, path=FILE)")
            self._file = MarkFile.of(self._source, given or os.path.join(self._source.folder, MARKS))
        else:
            at = getattr(of, "path", None)
            if at is None:
                raise InputError(
                    f"Marks: marks are of a ReplayBuffer, or of a dataset with a path, got {type(of).__name__}"
                )
            at = os.path.realpath(at)
            self._file = MarkFile(Disk(), given or f"{at}.{MARKS}", os.path.basename(at))
            self._numbers = {n: i for i, n in enumerate(self._of.source_episodes.tolist())}

    @property
    def path(self) -> str:
        """The file."""
        return self._file.path

    def names(self) -> Array:
        """Return the names of all episodes, int64: their positions, or of a dataset their numbers in the whole of
        it."""
        ring = self._of.marked_ring()
        return self._of.source_episodes if ring is None else np.asarray(ring[1])

    def signature(self) -> tuple[int, ...]:
        """Return what differs after each change of the file. One system call."""
        return self._file.signature()

    def all(self) -> dict[int, Mark]:
        """Return the marks of stored episodes: position (of a dataset: number) -> mark, ascending.

        Raises:
            CorruptError, NewerVersionError: the file can't be read.

        Cost: reads the file; O(marks log episodes). Of a dataset, the first and last step of each marked episode, once.
        """
        found = self._file.read()
        if self._source is not None:
            return marked(self._source, found)
        return {at: mark for at, mark in found.items() if self._key(at) == mark.record}

    def get(self, episode: int) -> Mark | None:
        """Return the mark of an episode, None if it has none."""
        return self.all().get(operator.index(episode))

    def set(self, episode: int, *, flags: str | Iterable[str] | None = None, note: str | None = None) -> None:
        """Mark an episode, durably. A mark without flags and note is removed; marks of evicted episodes go, too.

        Args:
            episode: the position of its first step; of a dataset, its number.
            flags: replace those it has; words of letters, digits and `. _ + -`. None: leave them.
            note: replaces the one it has; up to 4,000 characters. None: leave it.

        Raises:
            ClipIndexError: there is no such episode, or it was evicted.
            InputError: a flag is no word, or a note too long.
            CorruptError: the file can't be read; it is left as it is.
            EnvironmentFault: the place can't be written.
            LockedError: another process has been changing the file for ten seconds.
        """
        at = operator.index(episode)
        words = None if flags is None else checked_flags(flags, "Marks.set")
        text = None if note is None else checked_note(note, "Marks.set")
        if self._source is not None:
            self._source.refresh()
        key = self._key(at)
        if key is None:
            raise ClipIndexError(f"Marks.set: no stored episode is named {at}; see ReplayBuffer.episode_spans")

        def work(mine: dict[int, Mark]) -> None:
            self._prune(mine)
            old = mine.pop(at, Mark(at, key))
            new = Mark(at, key, old.flags if words is None else words, old.note if text is None else text)
            if new.flags or new.note:
                mine[at] = new

        self._file.change(work)

    def remove(self, episode: int) -> None:
        """Remove the mark of an episode; see `set`."""
        self.set(episode, flags=(), note="")

    def _prune(self, mine: dict[int, Mark]) -> None:
        """Drop the marks of episodes that are no longer stored."""
        source = self._source
        if source is None:
            return
        head, kept = source.head, marked(source, mine)
        for at in list(mine):
            if at not in kept and at < head:  # another reader may know a newer episode
                del mine[at]

    def _key(self, at: int) -> str | None:
        """Return what tells an episode from another one of that name; None if there is none."""
        if self._source is not None:
            return record_key(self._source, at)
        if at not in self._keys:
            number = self._numbers.get(at)
            self._keys[at] = None if number is None else self._digest(number)
        return self._keys[at]

    def _digest(self, number: int) -> str:
        """Return the checksum of an episode's length and its first and last step as stored, without pictures."""
        length = int(self._of.lengths[number])
        digest = xxhash.xxh3_64(str(length).encode())
        for t in sorted({0, length - 1}) if length else ():
            steps = self._of.steps_as_stored(number, t, t + 1)
            for name, values in sorted(steps.items()):
                text = values.dtype.kind in "OSUT"
                digest.update(f"{name} {values.tolist() if text else values.dtype}".encode("utf-8", "replace"))
                digest.update(b"" if text else np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()
