"""Read whole episodes and cache them, for files without random access.

Invariants: at most `CACHE_NBYTES`, or one episode, are held.
Not here: how an episode is read (each format).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringmap.errors import UnsupportedError
from ringmap.formats.common.directory import steps_of
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import Schema

__all__ = ["CACHE_NBYTES", "EpisodeCache"]

Array = np.ndarray[Any, np.dtype[Any]]

CACHE_NBYTES = 256 << 20


class EpisodeCache:
    """Episodes by number; the least recently used one is dropped first.

    Args:
        load: episode, names of columns -> column -> array (T, ...), of these columns at least.
    """

    def __init__(self, load: Callable[[int, Sequence[str]], dict[str, Array]]) -> None:
        self._load = load
        self._lock = threading.RLock()
        self._held: OrderedDict[int, dict[str, Array]] = OrderedDict()
        self._nbytes = 0

    def episode(self, number: int, columns: Sequence[str]) -> dict[str, Array]:
        """Return columns of an episode, these at least, if it has them; the caller must not write to them."""
        with self._lock:
            found = self._held.setdefault(number, {})
            self._held.move_to_end(number)
            wanted = [name for name in columns if name not in found]
            if wanted:
                fresh = self._load(number, wanted)
                self._nbytes += sum(v.nbytes for n, v in fresh.items() if n not in found)
                found.update({n: v for n, v in fresh.items() if n not in found})
                while self._nbytes > CACHE_NBYTES and len(self._held) > 1:
                    _, old = self._held.popitem(last=False)
                    self._nbytes -= sum(rows.nbytes for rows in old.values())
            return found

    def windows(
        self, columns: Sequence[str], offsets: Array, starts: Array, length: int, stride: int, schema: Schema
    ) -> dict[str, Array]:
        """Read windows of columns, which may span episodes. Texts are as wide as the widest episode's that is read."""
        rows = steps_of(starts, length, stride)
        flat = rows.ravel()
        specs = {spec.name: spec for spec in schema.columns}
        found = {n: empty((len(flat), *specs[n].shape), specs[n].dtype) for n in columns}
        episodes = np.searchsorted(offsets, flat, side="right") - 1
        for number in np.unique(episodes).tolist():
            there = np.flatnonzero(episodes == number)
            episode = self.episode(number, columns)
            for name in columns:
                if name not in episode:
                    raise UnsupportedError(
                        f"column {name!r} is not in episode {number}; leave it out: keys_to_load=, or the episode: "
                        "where="
                    )
                if found[name].dtype.kind in "SU":  # a narrower array cuts texts
                    wide = np.promote_types(found[name].dtype, episode[name].dtype)
                    found[name] = found[name].astype(wide, copy=False)
                elif not np.can_cast(episode[name].dtype, found[name].dtype):
                    raise UnsupportedError(
                        f"column {name!r} is of {episode[name].dtype} in episode {number}, and of {found[name].dtype} "
                        "in others"
                    )
                steps = flat[there] - offsets[number]
                if there[-1] - there[0] == len(there) - 1:  # straight into its place: no copy between
                    out = found[name][there[0] : there[-1] + 1]
                    np.take(episode[name].astype(out.dtype, copy=False), steps, 0, out, "clip")
                else:
                    found[name][there] = episode[name][steps]
        return {name: v.reshape(*rows.shape, *v.shape[1:]) for name, v in found.items()}
