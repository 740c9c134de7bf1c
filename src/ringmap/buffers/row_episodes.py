"""The rows of a mix, cut into episodes where they end.

    rows          r0 r1 r2 | r3 | r4 ..        | a flag says so, or the next row does not begin with what a row led to
    columns       those of the rows: obs, action, reward, next_obs, ...; an action's reward is in its row

Rows of several environments that were added in turn do not go on from each other: where rows have next observations,
each is an episode of its own then, never one of rows that do not belong together.

Invariants: each row that counts is in one episode, once, in the order in which they came.
Not here: the ring (steps.py), batches of rows (offline_to_online/).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringmap.buffers.reopened import Reopened
from ringmap.buffers.steps import StepRing
from ringmap.errors import InputError, LappedError, ReplacedError, UnknownColumnError
from ringmap.storage.columns.schema import Schema

__all__ = ["RowSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_FLAGS = ("terminated", "truncated", "done", "dones")
_NEXT = ("next_", "next/")


class RowSource:
    """The rows of a ring as they are now, as `StoredDataset` reads them.

    Args:
        ring: the ring, or its directory.

    Raises:
        InputError: no column tells where an episode ends.
        NotFoundError, UnknownFormatError, CorruptError: there is no such ring at the path.

    Cost: reads the flags of all rows, and their observations if they have next ones.
    """

    reward_at = "same"

    def __init__(self, ring: StepRing | str | os.PathLike[str]) -> None:
        self._held = Reopened(ring, StepRing.open)
        self.episode_columns = list[str]()
        self.path = str(self._ring.path or "a ring of rows in RAM")
        self._ring.engine.commit_pending("episode_dataset")
        self._ring.buffer.refresh()
        self.schema = self._ring.schema or Schema(())
        self._positions = self._ring.ids()
        ends = self._ends()
        self.lengths = np.diff(np.concatenate([[0], np.flatnonzero(ends) + 1])).astype(np.int32)
        self.offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    @property
    def _ring(self) -> StepRing:
        """The ring, opened again after `close`."""
        return self._held()

    def _ends(self) -> Array:
        """Tell after which rows an episode ends."""
        names, at = set(self.schema.names), self._positions
        ends = np.zeros(len(at), np.bool_)
        if not len(at):
            return ends
        later = [f"next/{flag}" for flag in _FLAGS if f"next/{flag}" in names]
        flags = later or [flag for flag in _FLAGS if flag in names]
        pairs = [
            (name, name.removeprefix(prefix))
            for prefix in _NEXT
            for name in self.schema.names
            if name.startswith(prefix)
            and name.removeprefix(prefix) in names
            and name.removeprefix(prefix) not in (*_FLAGS, "reward")
        ]
        if not flags and not pairs:
            raise InputError(
                f"{self.path}: no column of its rows, {self.schema.names}, tells where an episode ends (terminated, "
                "truncated, done, or "
                "next observations); read them as rows: for batch in OfflineToOnlineReplayBuffer.open(path, "
                "offline).rows()"
            )
        for flag in flags:
            ends |= self._ring.column(flag, at).reshape(len(at), -1).any(1)
        for name, first in pairs:
            led_to, begun = self._ring.column(name, at[:-1]), self._ring.column(first, at[1:])
            if led_to.dtype == begun.dtype and led_to.shape == begun.shape:
                same = [a.tobytes() == b.tobytes() for a, b in zip(led_to, begun, strict=True)]
                ends[:-1] |= ~np.array(same, np.bool_)
        ends[:-1] |= np.diff(at) != 1
        ends[-1] = True
        return ends

    def windows(self, columns: Sequence[str], starts: Array, length: int, stride: int = 1) -> dict[str, Array]:
        """Read rows `s, s + stride, ... < s + length` of these columns for each s of `starts`.

        Raises:
            ReplacedError: rows were evicted since, or the path now holds something else.
        """
        for name in columns:
            if name not in self.schema.names:
                raise UnknownColumnError(f"{self.path}: no column {name!r}; there are {self.schema.names}")
        rows = np.asarray(starts, np.int64)[:, None] + np.arange(0, length, stride)
        at, specs = self._positions[rows.reshape(-1)], {s.name: s for s in self.schema.columns}
        try:
            return {n: self._ring.column(n, at).reshape(*rows.shape, *specs[n].shape) for n in columns}
        except LappedError:
            raise ReplacedError(
                f"{self.path}: rows were evicted since its episodes were looked up; look them up again"
            ) from None

    def episode_data(self, episode: int) -> dict[str, Any]:
        """Return {}: rows have no data of episodes."""
        return {}

    def close(self) -> None:
        """Close the directory, if it was opened here; the next read opens it again."""
        self._held.close()
