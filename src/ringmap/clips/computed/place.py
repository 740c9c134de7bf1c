"""Where an item stands: its episode, its step, and how far it is from the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.clips.items import Computed, Items

__all__ = ["Index", "TimeToEnd"]

Array = np.ndarray[Any, np.dtype[Any]]


class Index(Computed):
    """Say which step each item is: columns `<name>_episode`, `_step`, `_position` and `_ring`, int64 `(B,)`.

    The episode of an item of a view is its number in the view, for life; -1 for an item that was redrawn from another. Of a buffer
    it is the number among those stored now, oldest first, which changes when older ones are evicted. The position, where the
    anchor stands on the ring, is the same for life; so it is in `batch.ids`. The ring is 0, where a buffer has one only.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0)
        >>> for length in (3, 4):
        ...     buf.write_episode({"obs": np.arange(length)})
        >>> batch = buf.view(window={"at": Index()})[[0, 6]]
        >>> batch["at_episode"].tolist(), batch["at_step"].tolist(), batch["at_position"].tolist()
        ([0, 1], [0, 3], [0, 6])
    """

    def adds(self, name: str) -> tuple[str, ...]:
        """Return the names of its columns."""
        return tuple(f"{name}_{what}" for what in ("episode", "step", "position", "ring"))

    def compute(self, items: Items) -> dict[str, Array]:
        """Return the columns. O(B log episodes)."""
        values = (items.episode, items.step, items.position.copy(), np.zeros(len(items), np.int64))
        return dict(zip(self.adds(items.name), values, strict=True))


class TimeToEnd(Computed):
    """Count the steps from each anchor to the last stored step of its episode, int64 `(B,)`.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0)
        >>> buf.write_episode({"obs": np.arange(4)})
        >>> buf.view(window={"left": TimeToEnd()})[[0, 1, 2, 3]]["left"].tolist()
        [3, 2, 1, 0]
    """

    def compute(self, items: Items) -> Array:
        """Return the column. O(B)."""
        return items.length - 1 - items.step
