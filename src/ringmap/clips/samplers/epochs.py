"""The sampler without replacement: each clip once per epoch, then all again in another order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringmap.arguments import count
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.samplers.base import Array, BaseSampler, check_state, window_of
from ringmap.errors import InputError
from ringmap.storage.disk.calls import thread
from ringmap.storage.ring.ring import Position

__all__ = ["EpochSampler"]


class EpochSampler(BaseSampler):
    """Draw each clip that exists when an epoch begins exactly once, then begin the next epoch.

    Clips written meanwhile belong to the next epoch; clips evicted meanwhile are left out. A
    batch at the end of an epoch is filled up from the next one.

    Args:
        seed: of the orders: the same for the same seed, epoch and number of clips. A DataLoader worker that draws has
            epochs of its own, in an order of its own.

    Raises:
        InputError: an invalid seed; from a draw, another `history_len` in the middle of an epoch.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, sampler=EpochSampler(seed=0))
        >>> buf.write_episode({"step": np.arange(6)})
        >>> sorted(int(s) for _ in range(3) for s in buf.sample(2)["step"].ravel())
        [0, 1, 2, 3, 4, 5]
    """

    any_order = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = count("EpochSampler", "seed", seed)
        self.epoch = -1
        self._worker: list[int] = []
        self._taken = 0
        self._head = self._count = self._span = 0
        self._order: Array | None = np.empty(0, np.int64)

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:
        """Begin an epoch of this worker's own."""
        self._worker = seeds.generate_state(4).tolist()
        self._count = self._taken = 0
        self._order = None

    @property
    def left(self) -> int:
        """Clips of this epoch that have not been drawn yet."""
        return self._count - self._taken

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size log episodes); O(clips) where an epoch begins."""
        window = window_of(self, buffer, history_len)
        span = window.index.span
        if self.left and self._span not in (0, span):
            raise InputError(
                f"EpochSampler: clips of {span} steps, but {self.left} clips of {self._span} are left of this epoch; "
                "draw these first, or give each length a sampler of its own"
            )
        with thread.searching, window.lock:
            ids = np.empty(0, np.int64)
            while len(ids) < batch_size:
                if not self.left:
                    self._begin(window)
                ids = np.concatenate([ids, self._take(window, batch_size - len(ids))])
        return ids

    def _begin(self, window: ClipRange) -> None:
        self.epoch += 1
        self._head, self._count, self._taken, self._order = window.head, window.count, 0, None
        self._span = window.index.span

    def _take(self, window: ClipRange, count: int) -> Array:
        """Return the ids of the next `count` clips of the epoch, without evicted ones."""
        if self._order is None:
            seed = [self.seed, self.epoch, *self._worker]
            self._order = np.random.default_rng(seed).permutation(self._count)
        taken = self._order[self._taken : self._taken + count]
        self._taken += len(taken)
        ids: Array = taken + (window.end_before(Position(self._head)) - self._count - window.base)
        return ids[ids >= 0]

    def small_state(self) -> dict[str, Any]:
        """Return the state that a buffer stores with its commits: JSON, and small."""
        return {
            "kind": type(self).__name__,
            "seed": self.seed,
            "epoch": self.epoch,
            "head": self._head,
            "clips": self._count,
            "taken": self._taken,
            "span": self._span,
            "worker": self._worker,
        }

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `small_state` returned, with the rest of its epoch.

        Raises:
            InputError: the state belongs to another sampler.
        """
        check_state(self, state)
        names = "seed", "epoch", "head", "clips", "taken"
        try:
            seed, epoch, head, count, taken = (int(state[n]) for n in names)
            span = int(state.get("span", 0))
            own = [int(number) for number in state.get("worker", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{type(self).__name__}.load_state_dict: expected integers {names}, got {state!r} ({error!r}). Nothing "
                "was changed"
            ) from None
        self.seed, self.epoch, self._head, self._count = seed, epoch, head, count
        self._taken, self._span, self._worker = taken, span, own
        self._order = None

    state_dict = small_state
    load_state_dict = load_small_state

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the order, which seed and epoch determine."""
        return {**self.__dict__, "_order": None}
