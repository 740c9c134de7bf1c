"""The mixture of samplers: each id of a batch from one of several, by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.clips.samplers.base import Array, Draws, Sampler, Seed, Weigh
from ringmap.errors import InputError
from ringmap.storage.source import Source

__all__ = ["MixtureSampler"]


class MixtureSampler(Draws):
    """Draw each id of a batch from one of several samplers, chosen by weight.

    How many come from each is drawn anew for each batch, so a share of 0.1 of a batch of 4 is no
    rounding away to none. All `weights` of a batch are 1, as a mixture is chosen for what it draws too often.

    Args:
        samplers: `(sampler, weight)` pairs; weights need not add up to 1.
        rng: the generator, or its seed, that chooses between them; None makes a fresh one.

    Raises:
        InputError: no samplers, one that can't be called, or weights that are negative or all 0.

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
            raise InputError(
                f"{where}: expected (sampler, weight) pairs, got {samplers!r}"
            ) from None
        if (
            not len(weights)
            or not np.isfinite(weights).all()
            or (weights < 0).any()
            or not weights.any()
        ):
            raise InputError(
                f"{where}: weights must be finite, not negative, and not all 0; got {weights.tolist()}"
            )
        for sampler in self.samplers:
            if not callable(sampler):
                raise InputError(f"{where}: {sampler!r} is no sampler: it can't be called")
        self.shares = weights / weights.sum()
        self.ids = np.empty(0, np.int64)
        self.weights = np.empty(0, np.float32)
        self.is_quick = all(getattr(sampler, "is_quick", False) for sampler in self.samplers)

    def __call__(self, step: int, buffer: Any, batch_size: int, history_len: int) -> Array:
        """Return `batch_size` ids, those of the samplers in random order. O(batch_size), and what they cost."""
        counts = self.rng.multinomial(batch_size, self.shares)
        parts = []
        for sampler, count in zip(self.samplers, counts, strict=True):
            if count:
                parts.append(np.asarray(sampler(step, buffer, int(count), history_len)))
            elif hasattr(sampler, "follow"):  # what the others drew may be given a priority
                sampler.follow(buffer, history_len)
        ids: Array = np.concatenate(parts)
        return ids[self.rng.permutation(batch_size)]

    def follow(self, buffer: Any, history_len: int) -> None:
        """Let the samplers that keep priorities know of the clips, as a draw would."""
        for sampler in self.samplers:
            if hasattr(sampler, "follow"):
                sampler.follow(buffer, history_len)

    def update_priorities(self, ids: Array, values: Array) -> int:
        """Hand priorities on to the samplers that have them; return to how many clips they were given.

        Raises:
            InputError: none of them has.
        """
        takers: list[Any] = [s for s in self.samplers if hasattr(s, "update_priorities")]
        updated = [sampler.update_priorities(ids, values) for sampler in takers]
        if not updated:
            raise InputError(
                "MixtureSampler.update_priorities: none of its samplers draws by priority"
            )
        return int(max(updated))

    def small_state(self) -> dict[str, Any]:
        """Return the state that a buffer stores with its commits: that of all samplers that have one."""
        parts = [s.small_state() if hasattr(s, "small_state") else None for s in self.samplers]
        return {**super().small_state(), "parts": parts}

    def load_small_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `small_state` was taken."""
        self._load(state, "load_small_state")

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, to go beside a checkpoint."""
        parts = [s.state_dict() if hasattr(s, "state_dict") else None for s in self.samplers]
        return {**super().small_state(), "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._load(state, "load_state_dict")

    def _load(self, state: Mapping[str, Any], how: str) -> None:
        if len(state.get("parts", ())) != len(self.samplers):
            raise InputError(
                f"MixtureSampler.{how}: a state of {len(state.get('parts', ()))} samplers, expected {len(self.samplers)}"
            )
        super().load_small_state(state)
        for sampler, part in zip(self.samplers, state["parts"], strict=True):
            if part is not None:
                getattr(sampler, how)(part)

    def kept_priorities(self) -> Any:
        """Return the priorities of the first sampler that has some, for a copy of the buffer; else None."""
        kept = (s.kept_priorities() for s in self.samplers if hasattr(s, "kept_priorities"))
        return next((leaves for leaves in kept if leaves is not None), None)

    def attach(self, source: Source) -> None:
        """Let the samplers begin with a buffer that was just opened for writing."""
        for sampler in self.samplers:
            if hasattr(sampler, "attach"):
                sampler.attach(source)

    def weigh(self) -> Weigh:
        """Return what weighs a batch: all its clips alike."""
        return self._weighed

    def _weighed(self, positions: Array) -> Array:
        self.ids, self.weights = positions, np.ones(len(positions), np.float32)
        return self.weights

    def flush(self) -> None:
        """Force what the samplers keep in files to the disk itself."""
        for sampler in self.samplers:
            if hasattr(sampler, "flush"):
                sampler.flush()

    def close(self) -> None:
        """Give back what the samplers hold open."""
        for sampler in self.samplers:
            if hasattr(sampler, "close"):
                sampler.close()
