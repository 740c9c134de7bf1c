"""Where an item stands: its episode, its step, and how far it is from the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.clips.items import Computed, Items

__all__ = ["Index", "TimeToEnd"]

Array = np.ndarray[Any, np.dtype[Any]]


class Index(Computed):
    """Say which step each item is: columns `<name>_episode`, `_step`, `_position`, `_ring` and `_id`, int64 `(B,)`.

    The episode of an item of a view is its number in the view, for life. Of a buffer it is the number among those
    stored when the batch was read, oldest first, which changes when older ones are evicted; `get_episode_data` takes
    the numbers of the last batch as they were then. The position, where the anchor stands on its ring, is the same for
    life. The ring is the `number` of one of the `shards` of a `ShardedReplayBuffer`, 0 where there is one ring only.
    The id is that of `batch.ids`, which
    `update_priorities` and `update` take: a column stays with a batch that is collated, or moved to a device.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0)
        >>> for length in (3, 4):
        ...     buf.write_episode({"obs": np.arange(length)})
        >>> batch = buf.view(window={"at": Index()})[[0, 6]]
        >>> batch["at_episode"].tolist(), batch["at_step"].tolist(), batch["at_id"].tolist()
        ([0, 1], [0, 3], [0, 6])
    """

    def adds(self, name: str) -> tuple[str, ...]:
        """Return the names of its columns."""
        return tuple(f"{name}_{what}" for what in ("episode", "step", "position", "ring", "id"))

    def compute(self, items: Items) -> dict[str, Array]:
        """Return the columns. O(B log episodes)."""
        values = items.episode, items.step, items.position.copy(), items.ring, items.anchor_ids
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
