"""Samplers without weights: every clip is equally likely, or new ones more than old ones; or each once per epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.arguments import count, positive, positive_real
from ringmap.clips.clip_range import ClipRange
from ringmap.clips.draws import integers
from ringmap.clips.index import SpanIndex
from ringmap.clips.samplers.base import Array, BaseSampler, DrawingSampler, HasClips, Seed, check_state, windows_of
from ringmap.errors import InputError
from ringmap.storage.disk.calls import thread
from ringmap.storage.ring.ring import Position

__all__ = ["EpochSampler", "RecencySampler", "UniformSampler", "uniform"]


def uniform(rng: np.random.Generator, buffer: HasClips, batch_size: int, history_len: int) -> Array:
    """Return ids drawn uniformly, with replacement. A buffer without a sampler draws positions instead:
    `ClipReader.draw`."""
    return integers(rng, 0, buffer.num_valid_ends(history_len), batch_size)


class UniformSampler(DrawingSampler):
    """Draw clips uniformly, with replacement, from its own generator.

    Args:
        rng: the generator, or its seed; None makes a new one.

    Example:
        >>> import numpy as np
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100, sampler=UniformSampler(0))
        >>> buf.write_episode({"obs": np.arange(10)})
        >>> buf.sample(4)["obs"].shape
        (4, 1)
    """

    any_order = True

    def __call__(self, step: int, buffer: HasClips, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size)."""
        return uniform(self.rng, buffer, batch_size, history_len)


class RecencySampler(DrawingSampler):
    """Draw recent clips: with exponentially decreasing probability, or from the newest clips only.

    The age of a clip is the number of newer clips.

    Args:
        half_life: age at which a clip is drawn half as often; exponential.
        window: draw uniformly from this many newest clips, and no others.
        rng: the generator, or its seed; None makes a new one.

    Raises:
        InputError: neither or both of `half_life` and `window`, or a value that is not positive.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=1000, sampler=RecencySampler(window=100, rng=0))
        >>> buf.write_episode({"step": np.arange(1000)})
        >>> int(buf.sample(500)["step"].min()) >= 900
        True
    """

    by_age = True

    def __init__(self, half_life: float | None = None, window: int | None = None, rng: Seed = None) -> None:
        super().__init__(rng)
        if (half_life is None) == (window is None):
            raise InputError("RecencySampler: give half_life= or window=, and not both")
        where = "RecencySampler"
        self.half_life = None if half_life is None else positive_real(where, "half_life", half_life)
        self.window = None if window is None else positive(where, "window", window)

    def __call__(self, step: int, buffer: HasClips, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size)."""
        count = buffer.num_valid_ends(history_len)
        if self.window is not None:
            return self.rng.integers(max(0, count - self.window), count, batch_size)
        assert self.half_life is not None
        # The inverse of 1 - q**age, truncated at the oldest clip: no mass is lost, and no draw is rejected.
        log_q = -np.log(2.0) / self.half_life
        reached = self.rng.random(batch_size) * -np.expm1(log_q * count)
        ages = np.floor(np.log1p(-reached) / log_q).astype(np.int64)
        ids: Array = count - 1 - np.minimum(ages, count - 1)
        return ids


class EpochSampler(BaseSampler):
    """Draw each clip that exists when an epoch begins exactly once, then begin the next epoch.

    Clips written meanwhile belong to the next epoch; clips evicted meanwhile, or of a ring that left, are left out. A
    batch at the end of an epoch is filled up from the next one. Over many rings an epoch is that of all. A buffer and
    its views share their sampler: an epoch of one is drawn to its end before that of another begins.

    Args:
        seed: of the orders: the same for the same seed, epoch and number of clips. A DataLoader worker that draws has
            epochs of its own, in an order of its own.

    Raises:
        InputError: an invalid seed; from a draw, another `history_len`, or clips of another view, such as the other
            side of a split, in the middle of an epoch. Views of transitions are not told apart.

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
        self._taken = self._count = self._span = 0
        self._rings: list[tuple[str, int, int]] = []
        """The clips of the epoch: of each ring its uuid, the position before which their episodes begin, and how
        many."""
        self._indexes: list[SpanIndex] = []
        """Indexes of the clips of the epoch, ring by ring, as they were seen last."""
        self._oldest: dict[str, Position] = {}
        """Of each ring of whole episodes, by uuid, the first step of the oldest clip when the epoch began; the head of
        such is one past that of the newest."""
        self._order: Array | None = np.empty(0, np.int64)

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:
        """Begin an epoch of this worker's own."""
        self._worker = seeds.generate_state(4).tolist()
        self._rings, self._taken, self._count = [], 0, 0
        self._indexes, self._oldest, self._order = [], {}, None

    @property
    def left(self) -> int:
        """Clips of this epoch that have not been drawn yet."""
        return self._count - self._taken

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids. O(batch_size log episodes); O(clips) where an epoch begins."""
        windows = windows_of(self, buffer, history_len)
        span = windows[0].index.span if windows else 0
        if self.left and self._span not in (0, span):
            raise InputError(
                f"EpochSampler: clips of {span} steps, but {self.left} clips of {self._span} are left of this epoch; "
                "draw these first, or give each length a sampler of its own"
            )
        if self.left and self._indexes != [window.index for window in windows]:
            self._refuse_others(windows)
        ids = np.empty(0, np.int64)
        while len(ids) < batch_size:
            if not self.left:
                self._begin(windows)
                if not self.left:  # all clips were cleared meanwhile
                    break
            ids = np.concatenate([ids, self._take(windows, batch_size - len(ids))])
        return ids

    def _refuse_others(self, windows: Sequence[ClipRange]) -> None:
        """Raise if the clips are not those of the epoch under way, as far as its oldest and newest clip tell."""
        epoch = {uuid: (head, clips) for uuid, head, clips in self._rings}
        for window in windows:
            uuid = window.source.manifest.uuid.hex()
            oldest = self._oldest.get(uuid)
            if oldest is None:
                continue
            head, clips = epoch[uuid]
            with thread.searching, window.lock:
                end = window.end_before(Position(head))
                if window.index.is_joined or window.head < head or end <= window.base:
                    continue
                is_same = _first_step(window, end - 1) == head - 1
                if window.source.tail <= oldest:  # none was evicted since
                    is_same &= end - window.base == clips
            if not is_same:
                raise InputError(
                    f"EpochSampler: {self.left} of {self._count} clips are left of an epoch of others, of this buffer "
                    "or another view of it, such as the other side of a split; draw these first, or go through each "
                    "view by a DataLoader with shuffle=True"
                )
        self._indexes = [window.index for window in windows]

    def _begin(self, windows: Sequence[ClipRange]) -> None:
        rings, oldest = list[tuple[str, int, int]](), dict[str, Position]()
        for window in windows:
            uuid, index = window.source.manifest.uuid.hex(), window.index
            with thread.searching, window.lock:
                head = window.head
                if window.has_episodes and not index.is_joined and index.base <= window.base < window.end:
                    # Not that of the ring: a view may follow it later, and another thread write meanwhile.
                    head = Position(_first_step(window, window.end - 1) + 1)
                    oldest[uuid] = _first_step(window, window.base)
                rings.append((uuid, head, window.count))
        self._count = 0  # an interrupt leaves no part of an epoch
        self._indexes, self._oldest = [window.index for window in windows], oldest
        self._rings, self._taken, self._order, self._span = rings, 0, None, windows[0].index.span if windows else 0
        self.epoch += 1
        self._count = sum(clips for *_, clips in rings)

    def _take(self, windows: Sequence[ClipRange], count: int) -> Array:
        """Return the ids of the next `count` clips of the epoch, without evicted ones."""
        if self._order is None:
            seed = [self.seed, self.epoch, *self._worker]
            self._order = np.random.default_rng(seed).permutation(self._count)
        taken = self._order[self._taken : self._taken + count]
        self._taken += len(taken)
        if len(windows) == len(self._rings) == 1:  # maybe of a copy, which has a uuid of its own
            window, (_, head, clips) = windows[0], self._rings[0]
            with thread.searching, window.lock:
                ids: Array = taken + (window.end_before(Position(head)) - clips - window.base)
            return ids[ids >= 0]
        stops = np.cumsum([clips for *_, clips in self._rings], dtype=np.int64).tolist()
        by_uuid = {uuid: (head, clips, stop) for (uuid, head, clips), stop in zip(self._rings, stops, strict=True)}
        ids, first = np.full(len(taken), -1), 0
        for window in windows:
            head, clips, stop = by_uuid.get(window.source.manifest.uuid.hex(), (0, 0, 0))
            mine = (taken < stop) & (taken >= stop - clips)
            with thread.searching, window.lock:
                found = taken[mine] + (window.end_before(Position(head)) - stop - window.base)
            ids[mine] = np.where((found >= 0) & (found < window.count), found + first, -1)
            first += window.count
        return ids[ids >= 0]

    def small_state(self) -> dict[str, Any]:
        """Return the state that a buffer stores with its commits: JSON, and small."""
        return {
            "kind": type(self).__name__,
            "seed": self.seed,
            "epoch": self.epoch,
            "rings": [list(ring) for ring in self._rings],
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
        names = "seed", "epoch", "taken", "span"
        try:
            seed, epoch, taken, span = (int(state[n]) for n in names)
            rings = [(str(uuid), int(head), int(count)) for uuid, head, count in state["rings"]]
            own = [int(number) for number in state.get("worker", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{type(self).__name__}.load_state_dict: expected integers {names}, and rings, got {state!r} "
                f"({error!r}). Nothing was changed"
            ) from None
        self.seed, self.epoch, self._rings = seed, epoch, rings
        self._count = sum(clips for *_, clips in rings)
        self._taken, self._span, self._worker = taken, span, own
        self._indexes, self._oldest, self._order = [], {}, None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the order, which seed and epoch determine, and what belongs to this process."""
        return {**self.__dict__, "_indexes": [], "_order": None}


def _first_step(window: ClipRange, number: int) -> Position:
    """Return the position of the first step of a clip. Holds the lock."""
    return Position(int(window.index.positions(np.array([number]))[0]))
