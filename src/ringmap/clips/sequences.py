"""Where steps stand: the episode, step and id of an item, and sequences of steps with flags that tell where episodes
begin and end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.clips.items import Computed, Items
from ringmap.clips.window import Window, WindowMaker
from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema

__all__ = ["Index", "Sequences", "TimeToEnd"]

Array = np.ndarray[Any, np.dtype[Any]]


class Sequences(WindowMaker):
    """A window of the next `length` steps of every column: `sample(window=Sequences(64))`.

    It lies inside one episode; with `across`, it runs on into the next episode, as a recurrent learner that carries its
    state from one
    sequence to the next needs it: all stored steps are used, however short their episodes are, and `is_first` tells
    where to reset.

    Adds the columns `is_first`, `is_last` and `is_terminal`, bool `(B, length)`, where they are not stored: whether a
    step is the first of its episode, the last, and the last of one that terminated. Of an episode in parts, the oldest
    stored step is not the first if there was one before it, and the newest not the last until the episode ends. All
    rows come as they are stored, also the first reward and the last action of an episode, which may be blank. With
    `burn_in`, also `is_burn_in`, True for the first steps.

    `step_id`, int64 `(B, length)`, names each step for `ReplayBuffer.update`. The steps of an episode in parts don't
    stand side by side, so there it is not what counting on from `batch.ids` gives.

    Args:
        length: steps.
        burn_in: number of steps at the start that only warm up a recurrent state.
        across: whether a sequence runs on into the next episode of the same lane, in the order of storage. Lanes are
            known of episodes that were recorded in parts (`commit_every`, by a recording wrapper or a `World`; or
            `lane` of `begin_episode`). Episodes without a lane follow each other, which a log line says once. After an
            episode that has not ended, nothing follows yet.

    Raises:
        InputError: a length that is not positive, or as many steps of burn-in.

    Cost: with `across`, the first draw after a commit joins the stored episodes: 0.4 ms for 1,000 of them, 12 ms for
    100,000.

    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", ICLR 2019, for
    burn-in.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, seed=0)
        >>> buf.write_episode({"obs": np.arange(4)})
        >>> item = buf.view(window=Sequences(3, burn_in=1))[0]
        >>> item["obs"].tolist(), item["is_first"].tolist(), item["is_burn_in"].tolist()
        ([0, 1, 2], [True, False, False], [True, False, False])
    """

    def __init__(self, length: int, burn_in: int = 0, across: bool = False) -> None:
        self.across = bool(across)
        self.length = positive("Sequences", "length", length)
        self.burn_in = 0 if burn_in == 0 else positive("Sequences", "burn_in", burn_in)
        if self.burn_in >= self.length:
            raise InputError(
                f"Sequences: burn_in={burn_in} leaves nothing of {length} steps; it must be smaller than length"
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """A value that equal sequences share."""
        return "Sequences", self.length, self.burn_in, self.across

    def window(self, schema: Schema, where: str, frameskip: int) -> dict[str, Any]:
        """Return the windows of all columns, and what computes the flags."""
        if self.across and frameskip > 1:
            raise InputError(
                f"{where}: Sequences(across=True) with frameskip={frameskip} would miss ends of episodes between its "
                "steps; leave one of them out"
            )
        name = "sequence"
        while name in schema.names:
            name += "_"
        offsets = range(0, self.length * frameskip, frameskip)
        flags = _Flags(offsets, self.burn_in, schema, self.across)
        return {**dict.fromkeys(schema.names, Window(range(self.length), blanks=True)), name: flags}


class _Flags(Computed):
    """The flags and ids of a sequence, where they are not stored."""

    def __init__(self, offsets: range, burn_in: int, schema: Schema, across: bool) -> None:
        self.offsets, self.burn_in, self.across = offsets, burn_in, across
        flags = "is_first", "is_last", "is_terminal"
        self.own = ("step_id", "is_burn_in") if burn_in else ("step_id",)
        self.names = (*(name for name in flags if name not in schema.names), *self.own)

    def check(self, schema: Schema, where: str) -> None:
        for name in self.own:
            if name in schema.names:
                raise InputError(f"{where}: Sequences adds a column {name!r}, and one is stored")

    def adds(self, name: str) -> tuple[str, ...]:
        return self.names

    def compute(self, items: Items) -> dict[str, Array]:
        steps = items.step[:, None] + np.array(self.offsets)
        places = items.origin[:, None] + steps
        is_last = (steps == items.length[:, None] - 1) & ~items.is_open[:, None]
        is_first = steps == 0
        if self.across:
            is_first = items.rows.are_begins(places)
            inner = steps < items.length[:, None] - 1
            is_last[inner] = items.rows.are_begins(places[inner] + 1)
            is_terminal = is_last & items.terminated_at(steps)
        else:
            is_terminal = is_last & items.terminated[:, None]
        made = {
            "is_first": is_first & ((steps > 0) | (items.first_step == 0)[:, None]),
            "is_last": is_last,
            "is_terminal": is_terminal,
            "is_burn_in": np.broadcast_to(np.arange(len(self.offsets)) < self.burn_in, steps.shape).copy(),
            "step_id": items.ids(places),
        }
        return {name: made[name] for name in self.names}


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
