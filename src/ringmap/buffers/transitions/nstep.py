"""Transitions read from rows: sums of n rewards, and the observation after the last of these steps.

    position p, lanes N:   p -> p + N -> p + 2N          n_step = 3: r + gamma r' + gamma^2 r''
                                         \\__ its next observation: row p + 3N, or a separately stored one

A sum ends where an episode ends, and where a lane breaks.

Invariants: a transition is returned with the next observation that it was added with; one that was evicted before it was
read whole is redrawn.
Not here: which transitions are drawn (buffer.py), next observations without a row (next_observations.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ringmap.buffers.steps import StepRing
from ringmap.buffers.transitions.columns import TransitionColumns
from ringmap.buffers.transitions.next_observations import NextObservations
from ringmap.storage.read.handle import Handle
from ringmap.storage.read.read_live import lost, read_again

__all__ = ["TransitionReader"]

Array = np.ndarray[Any, np.dtype[Any]]


class _Found(NamedTuple):
    """Transitions, flat by leaf; which have a next observation (None: all); which end in the newest call, as of `head`."""

    batch: dict[str, Array]
    good: Array | None
    newest: Array
    head: int


@dataclass(frozen=True)
class TransitionReader:
    """Reads transitions of `n_step` steps, discounted by `gamma`."""

    ring: StepRing
    columns: TransitionColumns
    following: NextObservations
    n_step: int
    gamma: float

    def read(self, positions: Array) -> dict[str, Array]:
        """Return the transitions at these positions, flat; an evicted one is redrawn, and `positions` shows it.

        Raises:
            LappedError: the writer overtook this reader ten times in a row without progress.
        """
        source = self.ring.engine.source
        found = self._gather(source, positions)
        bad = lost(source, positions, found.good)
        if bad is not None:
            self._read_again(source, found, positions, bad)
        return found.batch

    def _read_again(self, source: Handle, found: _Found, positions: Array, bad: Array) -> None:
        engine = self.ring.engine
        newest, head = found.newest, found.head

        def gather(which: Array) -> Array | None:
            nonlocal head
            again = self._gather(source, positions[which])
            for name, values in again.batch.items():
                found.batch[name][which] = values
            newest[which], head = again.newest, again.head
            return again.good

        def redraw(which: Array) -> Array:
            at = positions[which]
            # A step of the newest call, read while another call came, has a following row now.
            stays = newest[which] & (at >= source.tail) & (source.head != head)
            gone = np.flatnonzero(~stays)
            at[gone] = self.ring.draw(len(gone), engine.rng)
            engine.reader.num_redraws += len(gone)
            return at

        advice = "raise capacity, or ask for smaller batches"
        read_again(source, positions, bad, gather, redraw, source.folder, advice)

    def led_to(self, head: int) -> dict[str, Array] | None:
        """Return the next observations of the call that ended at `head`, by leaf, from what was stored since; None if evicted."""
        source = self.ring.engine.source
        source.refresh()
        rows = source.rows
        assert rows is not None
        last = np.array([head - 1])
        count = abs(int(rows.take("lanes", last)[0]))
        if not 0 < count <= self.ring.capacity or head - count < source.newest_tail():
            return None
        positions = np.arange(head - count, head)
        found = replace(self, n_step=1)._gather(source, positions)
        if lost(source, positions, found.good) is not None:
            return None
        return {name: found.batch[f"next_{name}"] for name in self.columns.observed}

    def _gather(self, source: Handle, positions: Array) -> _Found:
        rows, observed = source.rows, self.columns.observed
        assert rows is not None
        with source.memory:
            head, live = source.head, source.live
            stop: int = head
            if len(live):  # else another thread cleared the buffer meanwhile
                stop = live.start(live.newest) + live.length(live.newest)
            dense = live.is_dense
        is_single = self.n_step == 1
        names = ["lanes", *observed, "actions", "rewards", *(["dones"] if is_single else [])]
        batch = dict(zip(names, rows.take_all(names, positions, head), strict=True))
        lanes = np.abs(batch.pop("lanes")).astype(np.int64)

        def take(name: str, at: Array) -> Array:
            return rows.take_all([name], at, head)[0]

        def next_of(at: Array, names: list[str]) -> tuple[Array, list[Array]]:
            """Tell which rows have a following row that is their next observation; return columns of these."""
            after = at + lanes
            inside = after < stop  # rows damaged by a power cut may lie beyond
            where = after if inside.all() else np.where(inside, after, at)
            then, *values = rows.take_all(["lanes", *names], where, head)
            found: Array = inside & (then == lanes)
            return (found if dense else found & _are_live(source, after)), values

        rewards = batch["rewards"].astype(np.float64)
        last, discounts = positions.copy(), np.full(len(positions), self.gamma)
        for power in range(1, self.n_step):
            ended = (
                take("dones", last)
                | take("truncated", last)
                | (last < positions + (power - 1) * lanes)
            )
            on = ~ended & next_of(last, [])[0]
            if not on.any():
                break
            last = np.where(on, last + lanes, last)
            rewards[on] += self.gamma**power * take("rewards", last[on])
            discounts[on] *= self.gamma
        batch["rewards"] = rewards.astype(np.float32)
        dones = batch["dones"] if is_single else take("dones", last)
        batch["dones"] = dones.astype(np.float32)
        if self.n_step > 1:
            batch["discounts"] = discounts.astype(np.float32)
        on, following = next_of(last, observed)
        batch |= {f"next_{name}": values for name, values in zip(observed, following, strict=True)}
        good = None
        if not on.all():
            good = on.copy()
            for i in np.flatnonzero(~on).tolist():
                led_to = self.following.at(source, int(last[i]), head)
                if led_to is not None:
                    good[i] = True
                    for name in observed:
                        batch[f"next_{name}"][i] = led_to[name]
        return _Found(batch, good, last + lanes >= stop, head)


def _are_live(source: Handle, positions: Array) -> Array:
    """Tell which positions are stored: repairs and power cuts leave gaps."""
    with source.memory:
        starts, lengths = source.live.starts, source.live.lengths
        if not len(starts):
            return np.zeros(len(positions), np.bool_)
        index = np.maximum(starts.searchsorted(positions, side="right") - 1, 0)
        live: Array = (positions >= starts[index]) & (positions < starts[index] + lengths[index])
        return live
