"""A data source of grain over a buffer, a view or a dataset.

    source(buf)[i]   ->  clip i as NumPy arrays; i counts the clips that existed when the source was made

Invariants: the length never changes; a worker that gets the source pickled reads the same clips.
Not here: grain, which is not needed: a source is any object with `__len__` and `__getitem__`.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from ringmap.datasets.base import LoaderDataset, as_dataset

__all__ = ["Source", "source"]

Array = np.ndarray[Any, np.dtype[Any]]


class Source:
    """A `RandomAccessDataSource` of grain. `source` makes it.

    Processes and threads: threads may read at once; pickled, it takes its data along, as a `DataLoader` would.
    """

    def __init__(self, clips: Any) -> None:
        self._clips = clips

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self._clips)

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, Array]:
        """Return a clip: column -> array. One that was evicted meanwhile is redrawn."""
        clip = self._clips[record_key.__index__()]
        return {name: np.asarray(values) for name, values in clip.items()}

    def __repr__(self) -> str:
        return f"Source({self._clips!r})"


def source(data: Any) -> Source:
    """Return a data source for `grain.DataLoader` and `grain.MapDataset.source`.

    Args:
        data: a buffer, a fleet or a live view, whose clips of this moment are pinned; a view, or any dataset.

    Returns:
        Clips as NumPy arrays, in the order of their ids.

    Raises:
        InputError: it has no items by number, as a mix of offline and online data.

    Cost: a clip at a time, as grain asks for them: one gather per column and clip. A `DataLoader` of PyTorch, or
        `buf.batches`, gathers whole batches.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100)
        >>> buf.write_episode({"obs": np.arange(10)})
        >>> clips = source(buf)
        >>> len(clips), clips[9]["obs"].tolist()
        (10, [9])
    """
    if isinstance(data, LoaderDataset):
        return Source(data.pinned())
    as_dataset(data, "grain.source: the data")
    return Source(data)
