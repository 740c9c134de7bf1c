"""A step-wise ring: the newest `capacity` rows that were added, over a buffer of episodes.

    ReplayBuffer, max_steps = capacity + group      [..|g7 g7|g8 g8 g8|g9]
                                                          ^ window: the newest `capacity` rows

Rows come in groups of at most `group`, each one commit (an "episode" to the buffer). The buffer evicts
whole groups, and has room for one more than the window, so that what lies in the window is always there.

Invariants: len == min(rows ever added, capacity), but for what damage took; a row keeps its id, its position
on the ring, for life; no group is longer than the spare rows.
Not here: which rows are drawn, and what they mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.buffers.options import positive
from ringmap.buffers.replay import ReplayBuffer
from ringmap.errors import InputError
from ringmap.storage.ring import spare_rows
from ringmap.storage.schema import Schema, as_columns

__all__ = ["StepRing", "numpy_rows"]

Array = np.ndarray[Any, np.dtype[Any]]


class StepRing:
    """Rows of any columns, each kept until `capacity` newer ones came.

    Args:
        capacity: rows.
        path: directory; None for RAM. One that holds a ring already is opened.
        options: of `ReplayBuffer`: storage, schema, durability, casting, sync_every_s, threads, reads.

    Raises:
        InputError: an argument is wrong, or contradicts what is on disk.

    Cost: an add of up to `group` rows is one commit.

    Example:
        >>> ring = StepRing(4)
        >>> ring.add({"x": np.arange(3)}), ring.add({"x": np.arange(3, 6)})
        (array([0, 1, 2]), array([3, 4, 5]))
        >>> len(ring), ring.rows(ring.ids())["x"].tolist()
        (4, [2, 3, 4, 5])
    """

    def __init__(
        self,
        capacity: int,
        *,
        path: str | os.PathLike[str] | None = None,
        where: str = "StepRing",
        **options: Any,
    ) -> None:
        positive(where, "capacity", capacity)
        self.capacity = int(capacity)
        self.group = spare_rows(self.capacity)
        self.buffer = ReplayBuffer(self.capacity + self.group, path=path, **options)
        noted = self.buffer.notes.get("capacity")
        if noted is not None and noted != self.capacity:  # two may round to one ring
            self.buffer.close()
            raise InputError(
                f"{where}: capacity={capacity}, but the ring on disk has capacity={noted}; there is no resize"
            )

    # -- which rows --------------------------------------------------------------------------

    def __len__(self) -> int:
        return min(self.buffer.num_valid_ends(1), self.capacity)

    @property
    def added(self) -> int:
        """Rows ever added: one past the newest id."""
        return self.buffer._source.head

    @property
    def oldest(self) -> int:
        """The oldest id in the window. O(log groups)."""
        size = len(self)
        return int(self._place(np.zeros(1, np.int64), size)[0]) if size else self.added

    def ids(self) -> Array:
        """Return the ids of all rows in the window, oldest first, int64. O(rows)."""
        size = len(self)
        return self._place(np.arange(size), size)

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Return the ids of `count` rows drawn uniformly from a window that is not empty. O(count log groups)."""
        size = len(self)
        return self._place(rng.integers(0, size, count), size)

    def _place(self, ages: Array, size: int) -> Array:
        """Return the positions of rows counted from the oldest of the newest `size`."""
        buffer = self.buffer
        pinned = buffer._pin(1)
        return buffer._clip_reader.place(ages + (pinned.end - size), pinned, 1)

    def holds(self, ids: Array) -> Array:
        """Tell of each id whether its row is in the window. O(ids log groups)."""
        inside = (ids >= self.oldest) & (ids < self.added)
        found: Array = inside & (self.buffer._clip_reader.starting(ids, 1) >= 0)
        return found

    # -- rows --------------------------------------------------------------------------------

    def rows(self, ids: Array) -> dict[str, Array]:
        """Return rows by id, column -> `(n, ...)`, copies. The ids are in the window.

        One that another thread's add evicts meanwhile is drawn anew, as `ReplayBuffer` does.
        """
        buffer, schema = self.buffer, self.schema
        if schema is None:
            return {}
        found = buffer._read(buffer._known(np.array(ids, np.int64), 1), 1, 1)
        return {spec.name: found[spec.name].reshape(-1, *spec.shape) for spec in schema.columns}

    def column(self, name: str, ids: Array) -> Array:
        """Return one column of rows by id. The ids are in the window."""
        rows = self.buffer._source.rows
        assert rows is not None
        values: Array = rows.by_name[name].take(ids % rows.ring.rows)
        return values

    @property
    def schema(self) -> Schema | None:
        """The columns; None before the first row."""
        return self.buffer._source.schema

    def add(
        self,
        rows: Mapping[str, Any],
        notes: Mapping[str, Any] | None = None,
        where: str = "StepRing.add",
    ) -> Array:
        """Store rows, and return their ids, int64.

        Args:
            rows: column -> `(n, ...)`, lists, arrays or tensors. n = 0: nothing happens.
            notes: as for `ReplayBuffer.write_episode`; they join with the last group.
            where: the method to name in an error.

        Raises:
            InputError: unequal lengths, a schema mismatch, a value that does not fit, more rows than
                `capacity`. Nothing was changed.

        Cost: one commit for each `group` rows; after a kill in the middle of more, the first groups are there.
        """
        buffer = self.buffer
        store = buffer._writer(where)
        arrays = as_columns(numpy_rows(rows), where)
        count = len(next(iter(arrays.values()))) if arrays else 0
        if count > self.capacity:
            raise InputError(
                f"{where}: {count} rows exceed capacity={self.capacity}; raise it, or add fewer at a time"
            )
        store.settle()
        schema = Schema.of(arrays) if store.schema is None else store.schema
        arrays = schema.fit(arrays, buffer.options.casting, where)
        first = self.added
        if not store.seq:
            notes = {**(notes or {}), "capacity": self.capacity}
        for at in range(0, count, self.group):
            part = {name: values[at : at + self.group] for name, values in arrays.items()}
            last = at + self.group >= count
            buffer.write_episode(part, notes=notes if last or not store.seq else None)
        return np.arange(first, first + count)

    # -- whole rings -------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.buffer._closed

    def close(self) -> None:
        """Flush, and give files and lock back."""
        self.buffer.close()

    def copy_to(self, path: str | os.PathLike[str], notes: Mapping[str, Any]) -> None:
        """Write a copy of what is stored to a new directory, with these notes as well.

        Raises:
            ExistsError: something is there.
        """
        self.buffer.snapshot(path)
        copy = ReplayBuffer.open(path, mode="r+")
        try:
            copy.flush(notes={"capacity": self.capacity, **notes})
        finally:
            copy.close()

    @staticmethod
    def capacity_at(path: str | os.PathLike[str], where: str) -> int:
        """Return the capacity of the ring at a path.

        Raises:
            NotFoundError, UnknownFormatError, CorruptError: there is none.
        """
        buffer = ReplayBuffer.open(path, mode="r+")
        try:
            noted = buffer.notes.get("capacity")
        finally:
            buffer.close()
        if noted is None:
            raise InputError(
                f"{where}: {os.fspath(path)} holds a buffer, but not one that takes steps; open it with "
                "ReplayBuffer.open"
            )
        return int(noted)

    def __repr__(self) -> str:
        place = "" if self.buffer.path is None else f", path={str(self.buffer.path)!r}"
        return f"StepRing({len(self)}/{self.capacity} rows{place})"


def numpy_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with tensors of any device as arrays."""
    return {
        name: value.detach().cpu().numpy() if hasattr(value, "detach") else value
        for name, value in rows.items()
    }
