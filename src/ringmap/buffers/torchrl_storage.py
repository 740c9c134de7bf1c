"""A TorchRL storage over a ring: TorchRL's samplers, writers and losses on rows that survive the process.

    TorchRL's index  i = (position - base) % max_size         position: of the row on the ring, for life
                     |
    RoundRobinWriter writes only at the cursor, the index of the next position

Invariants: the rows are the newest `max_size`; no row is overwritten: a write at any index other than the cursor is
refused. Not here: the ring (steps.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.buffers.base import episode_ring_of
from ringmap.buffers.batch import as_tensordict
from ringmap.buffers.replay import ReplayBuffer
from ringmap.buffers.steps import StepRing
from ringmap.errors import ClipIndexError, InputError, RoleError
from ringmap.extras import require
from ringmap.storage.columns.values import flat, is_tensordict

__all__ = ["to_torchrl", "torchrl_storage"]

Array = np.ndarray[Any, np.dtype[Any]]

_WHERE = "torchrl_storage"


def torchrl_storage(buf: ReplayBuffer | StepRing) -> Any:
    """Return a TorchRL `Storage` over the rows of a buffer.

    Rows of the buffer are in the storage, and rows that TorchRL writes are in the buffer, with `path=`, live readers
    and both durability levels. The keys of nested TensorDicts are joined by slashes.

    Args:
        buf: a `ReplayBuffer`, whose steps are the rows, or a `StepRing`. Of a ReplayBuffer the newest 15/16 of
            `max_steps` rows are in the storage, so that TorchRL's batches evict row by row. Where episodes longer than
            1/16 of it were
            written by other means, rows may be evicted earlier: `len` still counts their indices, and `get` returns
            another row, drawn uniformly, in place of an evicted one. A sampler of slices needs a ring that TorchRL
            fills, or short episodes.

    Returns:
        A `torchrl.data.replay_buffers.Storage`, of CPU tensors. Pass `writer=storage.writer()` to TorchRL's
        buffer if rows are already stored: its own writer begins at index 0.

    Raises:
        MissingExtraError: torchrl is not installed.
        InputError: not such a buffer, or a ring of a single step.

    Cost: that of the buffer: a write is a commit, a read is a gather per column.

    Processes and threads: a storage over a reader reads the state of its last refresh.

    Source: TorchRL, Storage (reference page).
    """
    ring = episode_ring_of(buf)
    if ring is None:
        raise InputError(f"{_WHERE}: expected a ReplayBuffer or a StepRing, got {type(buf).__name__}")
    return _storage_class()(StepRing.over(ring, _WHERE))


def to_torchrl(buf: ReplayBuffer | StepRing, **options: Any) -> Any:
    """Return a TorchRL `TensorDictReplayBuffer` whose rows are those of a buffer, for samplers, losses and collectors.

    A collector that gets it as `replay_buffer=` writes its batches into the ring, after the rows that are there.

    Args:
        buf: as for `torchrl_storage`.
        options: of TorchRL's class: `sampler`, `batch_size`, `priority_key`, ...

    Raises:
        MissingExtraError: torchrl is not installed.
        InputError: not such a buffer, or an option is a storage or a writer.

    Cost: that of `torchrl_storage`.
    """
    taken = [name for name in ("storage", "writer") if name in options]
    if taken:
        raise InputError(f"to_torchrl: {taken} can't be chosen: the rows are the ring's; use torchrl_storage")
    require("torchrl", "to_torchrl")
    from torchrl.data import TensorDictReplayBuffer

    storage = torchrl_storage(buf)
    return TensorDictReplayBuffer(storage=storage, writer=storage.writer(), **options)


@functools.cache
def _storage_class() -> Any:
    """Return the class, made when TorchRL is first asked for: importing it takes seconds."""
    require("torchrl", _WHERE)
    import torch
    from tensordict import lazy_stack
    from torchrl.data import LazyStackStorage, RoundRobinWriter
    from torchrl.data.replay_buffers import Storage

    # TorchRL takes undeclared batches only from classes of its own. Of these the list is the plainest; nothing
    # of it is used.
    class RingStorage(LazyStackStorage):  # type: ignore[misc]
        """Rows of a ring, in the form that TorchRL's components ask for."""

        def __init__(self, ring: StepRing) -> None:
            super().__init__(ring.capacity)
            self.device = torch.device("cpu")
            self.ring = ring
            self._base = ring.oldest
            self._deep = bool(ring.buffer.notes.get("deep"))

        @property
        def buffer(self) -> ReplayBuffer:
            """The buffer that holds the rows."""
            return self.ring.buffer

        @property
        def cursor(self) -> int:
            """The index of the next row."""
            return int((self.ring.added - self._base) % self.max_size)

        @property
        def _last_cursor_index(self) -> int | None:
            """Return the index of the newest row, behind which SliceSampler cuts a full ring: that of the ring, whoever
            wrote it."""
            return (self.cursor - 1) % self.max_size if len(self) else None

        _last_cursor = _last_cursor_index
        """The same in older versions, and for hindsight."""

        @property
        def _mutation_revision(self) -> int:
            """Return a number that grows with each row: what newer versions derived from earlier rows is made again."""
            return int(self.ring.added + self._base)

        def writer(self, **options: Any) -> Any:
            """Return a `RoundRobinWriter` that continues after the stored rows."""
            made = RoundRobinWriter(**options)
            made._cursor = self.cursor
            return made

        def __len__(self) -> int:
            return int(min(self.ring.added - self._base, self.max_size))

        # -- reading

        def get(self, index: Any) -> Any:
            """Return rows by index as a TensorDict, one row without a batch size."""
            single, numbers = _numbers(index, len(self))
            newest = self.ring.added - 1
            positions = newest - (newest - self._base - numbers) % self.max_size
            rows, _ = self.ring.rows_at(positions)
            tensors = {name: torch.from_numpy(values) for name, values in rows.items()}
            made = as_tensordict(tensors, len(numbers), self._deep, _WHERE)
            return made[0] if single else made

        def contains(self, item: Any) -> Any:
            """Tell whether an index has a row, or which of several have."""
            asked = torch.as_tensor(item)
            found = (asked >= -len(self)) & (asked < len(self))
            return bool(found) if asked.ndim == 0 else found

        # -- writing

        def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
            """Store rows at the cursor, in one commit if they are at most a sixteenth of the ring."""
            where = f"{_WHERE}.set"
            single, numbers = _numbers(cursor, self.max_size)
            if isinstance(data, list | tuple):
                data = lazy_stack(list(data))
            if not is_tensordict(data):
                raise InputError(f"{where}: expected a TensorDict, got {type(data).__name__}")
            if single:
                data = data[None]
            count = len(numbers)
            expected = (self.cursor + np.arange(count)) % self.max_size
            if not set_cursor or not np.array_equal(numbers, expected):
                raise InputError(
                    f"{where}: index {numbers[:1].tolist()} is not the cursor, {self.cursor}: rows of a ring are never "
                    "overwritten. Extend the buffer; and if rows were there before it, make it with "
                    "writer=storage.writer()"
                )
            rows, deep = flat(data, where)
            self.ring.add(rows, {"deep": self._deep or deep}, where)
            self._deep = self._deep or deep

        def _empty(self) -> None:
            self.ring.buffer.clear()
            self._base = self.ring.added

        # -- state

        def state_dict(self) -> dict[str, Any]:
            """Return the positions of the rows; for a ring in RAM, the rows as well."""
            state = {"base": self._base, "added": self.ring.added, "deep": self._deep}
            if self.buffer.path is None:
                return {**state, "rows": self.ring.rows(self.ring.ids())}
            return {**state, "path": str(self.buffer.path)}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            """Load rows into an empty ring in RAM; for a ring on disk, verify that its positions are those of the
            state."""
            if "rows" in state:
                self._take_over(state["rows"], state)
            elif state["added"] != self.ring.added:
                raise RoleError(
                    f"{_WHERE}: the state is of {state['path']} after {state['added']} rows, but {self.buffer.path} "
                    f"has {self.ring.added}; load a snapshot of that moment, or leave out the storage's state"
                )
            else:
                self._base, self._deep = state["base"], state["deep"]

        def _take_over(self, rows: Mapping[str, Array], state: Mapping[str, Any]) -> None:
            if len(self.ring):
                raise RoleError(f"{_WHERE}: rows are loaded into an empty ring; this one has rows")
            count = len(next(iter(rows.values()))) if rows else 0
            first = state["added"] - count
            ids = self.ring.add(rows, {"deep": state["deep"]}, f"{_WHERE}.load_state_dict")
            # Each row keeps its index, which the sampler's state refers to.
            self._base = int(ids[0] if count else self.ring.added) - (first - state["base"]) % self.max_size
            self._deep = state["deep"]

        def dumps(self, path: Any) -> None:
            """Write a snapshot of the ring to the folder `ring` below `path`."""
            where = os.path.join(path, "ring")
            self.ring.save(where, {"base": self._base, "deep": self._deep}, f"{_WHERE}.dumps")

        def loads(self, path: Any) -> None:
            """Load the rows of a snapshot into an empty ring."""
            where = os.path.join(path, "ring")
            copied = ReplayBuffer.open(where, mode="r+", kind=self.ring.engine.owned.manifest.kind)
            try:
                notes, rows = copied.notes, StepRing.over(copied, _WHERE)
                rows.capacity = min(self.max_size, copied.max_steps)
                state = {"base": notes["base"], "added": rows.added, "deep": notes["deep"]}
                self._take_over(rows.rows(rows.ids()), state)
            finally:
                copied.close()

        def __getstate__(self) -> dict[str, Any]:
            state: dict[str, Any] = Storage.__getstate__(self)  # a list must not be sent to a spawned process
            return state

        def __repr__(self) -> str:
            return f"RingStorage({len(self)}/{self.max_size} rows of {self.buffer!r})"

    return RingStorage


def _numbers(index: Any, size: int) -> tuple[bool, Array]:
    """Return whether an index is for one row, and the numbers of the rows."""
    if isinstance(index, tuple):
        if len(index) != 1:
            raise InputError(f"{_WHERE}: rows have one axis, got the index {index!r}")
        return _numbers(index[0], size)
    if isinstance(index, slice):
        return False, np.arange(*index.indices(size))
    if isinstance(index, range):
        index = list(index)
    numbers = np.asarray(index.cpu() if hasattr(index, "cpu") else index)
    if numbers.dtype == bool:
        numbers = np.flatnonzero(numbers)
    single = numbers.ndim == 0
    flat_ones = numbers.reshape(-1).astype(np.int64)
    wrong = flat_ones[(flat_ones < -size) | (flat_ones >= size)]
    if len(wrong):
        raise ClipIndexError(f"{_WHERE}: index {wrong[0]} is out of range for {size} rows")
    return single, np.where(flat_ones < 0, flat_ones + size, flat_ones)
