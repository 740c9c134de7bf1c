"""The mixture sampler: draws each id of a batch from one of several samplers, by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.clips.draws import Weigh
from ringmap.clips.samplers.base import (
    Array,
    BaseSampler,
    DrawingSampler,
    Sampler,
    Seed,
    as_sampler,
    check_state,
    ids_of,
)
from ringmap.errors import InputError
from ringmap.storage.read.handle import Handle
from ringmap.storage.sidecars.priorities import Leaves

__all__ = ["MixtureSampler"]


class MixtureSampler(DrawingSampler):
    """Draw each id of a batch from one of several samplers, chosen by weight.

    The number from each sampler is drawn for each batch, so a weight of 0.1 with a batch of 4 is not
    rounded to none. All `weights` of a batch are 1, since a mixture is chosen for its bias.

    Args:
        samplers: `(sampler, weight)` pairs; weights need not add up to 1.
        rng: the generator that chooses between them, or its seed; None makes a new one.

    Raises:
        InputError: no samplers, a sampler that can't be called, or weights that are negative or all 0.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> from ringmap.samplers import RecencySampler, UniformSampler
        >>> mixed = MixtureSampler([(UniformSampler(0), 3), (RecencySampler(window=10, rng=0), 1)], rng=0)
        >>> buf = ReplayBuffer(max_steps=1000, sampler=mixed)
        >>> buf.write_episode({"step": np.arange(1000)})
        >>> bool(0.2 < (buf.sample(2000)["step"] >= 990).mean() < 0.3)
        True
    """

    def __init__(self, samplers: Sequence[tuple[Sampler, float]], rng: Seed = None) -> None:
        super().__init__(rng)
        where = "MixtureSampler"
        try:
            self.samplers = [sampler for sampler, _ in samplers]
            weights = np.array([weight for _, weight in samplers], np.float64)
        except (TypeError, ValueError):
            raise InputError(f"{where}: expected (sampler, weight) pairs, got {samplers!r}") from None
        if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.any()):
            raise InputError(f"{where}: weights must be finite, not negative, and not all 0; got {weights.tolist()}")
        for sampler in self.samplers:
            as_sampler(sampler, where)
        self.shares = weights / weights.sum()
        self.ids = np.empty(0, np.int64)
        self.weights = np.empty(0, np.float32)
        self.has_priorities = any(part.has_priorities for part in self._parts)
        self.any_order = all(part.any_order for part in self._parts)
        self.by_age = not self.any_order and all(p.any_order or p.by_age for p in self._parts)

    @property
    def _parts(self) -> list[BaseSampler]:
        return [as_sampler(sampler, "MixtureSampler") for sampler in self.samplers]

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids, in random order of samplers. O(batch_size), plus the cost of the samplers."""
        counts = self.rng.multinomial(batch_size, self.shares)
        drawn = []
        for number, (part, count) in enumerate(zip(self._parts, counts, strict=True)):
            if count:
                where = f"MixtureSampler.samplers[{number}]"
                drawn.append(ids_of(part, step, buffer, int(count), history_len, where))
            else:  # clips that other samplers drew may be given a priority
                part.follow(buffer, history_len)
        ids: Array = np.concatenate(drawn)
        return ids[self.rng.permutation(batch_size)]

    def begin_in_worker(self, seeds: np.random.SeedSequence) -> None:
        """Let this sampler and its parts draw from these seeds, each from others."""
        parts = self._parts
        own, *others = seeds.spawn(1 + len(parts))
        super().begin_in_worker(own)
        for part, their in zip(parts, others, strict=True):
            part.begin_in_worker(their)

    def follow(self, buffer: Any, history_len: int) -> None:
        """Let the samplers with priorities learn of the clips, as a draw would."""
        for part in self._parts:
            part.follow(buffer, history_len)

    def update_priorities(self, ids: Array, values: Array) -> int:
        """Pass priorities to the samplers that have them; return the number of clips updated.

        Raises:
            InputError: none of the samplers has priorities.
        """
        updated = [p.update_priorities(ids, values) for p in self._parts if p.has_priorities]
        if not updated:
            raise InputError("MixtureSampler.update_priorities: none of its samplers draws by priority")
        return max(updated)

    def small_state(self) -> dict[str, Any]:
        """Return the state that a buffer stores with its commits: the states of all samplers with one."""
        return {**super().small_state(), "parts": [part.small_state() for part in self._parts]}

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `small_state` returned."""
        before = [part.small_state() for part in self._parts]
        self._load(state, before, "load_small_state")

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, to store with a checkpoint."""
        return {**super().small_state(), "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned."""
        before = [part.state_dict() for part in self._parts]
        self._load(state, before, "load_state_dict")

    def _load(self, state: Mapping[str, Any], before: list[Any], how: str) -> None:
        """Load the state of the mixture and of its samplers. `before`: their states, to which they go back after an
        error."""
        check_state(self, state)
        parts, kept, own = self._parts, state.get("parts", ()), super().small_state()
        if not isinstance(kept, list | tuple) or len(kept) != len(parts):
            said = len(kept) if isinstance(kept, list | tuple) else repr(kept)
            raise InputError(f"MixtureSampler.{how}: a state of {said} samplers, expected {len(parts)}")
        super().load_small_state(state)

        def load(states: Sequence[Any]) -> None:
            for part, one in zip(parts, states, strict=True):
                if one is not None:
                    check_state(part, one)
                    getattr(part, how)(one)

        try:
            load(kept)
        except BaseException:
            load(before)
            super().load_small_state(own)
            raise

    def kept_priorities(self) -> Leaves | None:
        """Return the priorities of the first sampler that has some, for a copy of the buffer; else None."""
        kept = (part.kept_priorities() for part in self._parts)
        return next((leaves for leaves in kept if leaves is not None), None)

    def attach(self, source: Handle) -> None:
        """Let the samplers begin with a buffer that was just opened for writing."""
        for part in self._parts:
            part.attach(source)

    def weigh(self) -> Weigh:
        """Return equal weights for a batch."""
        return self._weighed

    def _weighed(self, positions: Array) -> Array:
        self.ids, self.weights = positions, np.ones(len(positions), np.float32)
        return self.weights

    def flush(self) -> None:
        """Force data in the samplers' files to the disk."""
        for part in self._parts:
            part.flush()

    def close(self) -> None:
        """Release the samplers' open files."""
        for part in self._parts:
            part.close()

    def check(self) -> list[str]:
        """Return violated invariants of the samplers, in words; empty when sound."""
        return [fault for part in self._parts for fault in part.check()]
