"""A pass: each clip of one moment once, in an order that can be saved and resumed.

    pass 0                        pass 1
    pin -> order -> ids ......... pin -> order -> ids
                  ^ taken

Invariants: the length and the clips of a pass do not change while it runs; the order follows from
seed and number of the pass.
Not here: reading (engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.lookup import ClipBuffer
from ringmap.clips.gather import PINNED
from ringmap.errors import InputError

__all__ = ["PassSampler"]

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 4096
_GONE = 2 * PINNED - 1  # a position beyond all others: its clip is redrawn


class Moment(Protocol):
    """The clips of one moment: a view."""

    @property
    def mark(self) -> Any:
        """What names the moment, in JSON."""
        ...

    def __len__(self) -> int:
        """Return the number of clips."""
        ...

    def finder(self, mark: Any, count: int) -> Callable[[Array], Array]:
        """Return what finds the clips of the moment of that mark, which had `count` of them: ids -> positions, -1 for an evicted one."""
        ...


class PassBuffer(ClipBuffer, Protocol):
    """A buffer that passes are made over."""

    def moment(self) -> Moment:
        """Return a view of the clips that a pass over this buffer has now."""
        ...


class PassSampler:
    """Order the clips of a buffer for a DataLoader: made by `buffer.pass_sampler()`.

    Its ids are positions on the ring (PINNED + position), so that all workers, also persistent ones, read the clips that the
    pass began with. To resume a pass after a restart:

        state = {"sampler": sampler.state_dict(taken=batches * batch_size), ...}     # when saving
        sampler.load_state_dict(state["sampler"])                                    # before the next `for`

    Args:
        buffer: the buffer to read.
        shuffle: a new order for each pass; False: oldest first.
        seed: of the orders.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100)
        >>> buf.write_episode({"obs": np.arange(6)})
        >>> sampler = buf.pass_sampler(seed=1)
        >>> sorted(int(buf[i]["obs"][0]) for i in sampler)
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, buffer: PassBuffer, shuffle: bool = True, seed: int = 0) -> None:
        if seed < 0:
            raise InputError(f"ReplayBuffer.pass_sampler: seed must not be negative, got {seed}")
        self._buffer = buffer
        self.shuffle = shuffle
        self.seed = seed
        self._pass = 0
        self._taken = 0
        self._restored: tuple[Any, int, int] | None = None  # mark of the moment, clips, taken
        self._now: tuple[Any, int] | None = None  # mark, clips

    def __len__(self) -> int:
        """Return the clips of the current pass; between passes, the clips that exist now."""
        if self._restored is not None:
            return self._restored[1]
        if self._now is None or self._taken == self._now[1]:
            return len(self._buffer)
        return self._now[1]

    def __iter__(self) -> Iterator[int]:
        buffer = self._buffer
        if self._restored is None:
            self._pass += self._now is not None
            buffer.engine.refresh()
        view = buffer.moment()
        mark, count, taken = view.mark, len(view), 0
        if self._restored is not None:
            mark, count, taken = self._restored
        find = view.finder(mark, count)
        self._restored, self._now, self._taken = None, (mark, count), taken
        number = self._pass
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, number]).permutation(count)
        for begin in range(taken, count, _CHUNK):
            found = find(order[begin : begin + _CHUNK])
            places = np.where(found < 0, _GONE, found + PINNED)
            for place in places.tolist():
                if self._pass == number:
                    self._taken += 1
                yield place

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the pass of this sampler, and its place in the pass.

        Args:
            taken: clips of this pass that the training loop has received: batches times batch size. None: all
                that were given to the loader, whose workers are some batches ahead of the loop.
        """
        mark, count, had = self._restored or (*(self._now or (0, 0)), self._taken)
        had = had if taken is None else int(taken)
        if not 0 <= had <= count:
            raise InputError(
                f"PassSampler.state_dict: taken must lie between 0 and {count}, got {taken}"
            )
        return {
            "shuffle": self.shuffle, "seed": self.seed, "pass": self._pass,
            "head": mark, "clips": count, "taken": had,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned: the next pass is the rest of that one.

        Clips that were evicted since are redrawn.
        """
        self.shuffle, self.seed = bool(state["shuffle"]), int(state["seed"])
        self._pass, self._now = int(state["pass"]), None
        mark, clips, taken = state["head"], int(state["clips"]), int(state["taken"])
        if taken == clips:  # the pass had ended, or has not begun
            self._pass += clips > 0
            self._restored = None
        else:
            self._restored = mark, clips, taken
