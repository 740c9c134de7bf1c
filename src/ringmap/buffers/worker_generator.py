"""The random generator of a buffer: each worker of a `DataLoader` has its own.

Not here: what is drawn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.clips.samplers.base import checked_rng, generator, seed_key
from ringmap.datasets.batch import worker
from ringmap.storage.disk.process import Forkable

__all__ = ["WorkerGenerator"]


class WorkerGenerator(Forkable):
    """One generator, from a seed; a copy in a worker begins with the seed that PyTorch gave the worker, and the given
    one."""

    def __init__(self, seed: int | None = None, where: str = "WorkerGenerator") -> None:
        self._rng, self._where = generator(seed, where, "seed"), where
        self._seed_key = seed_key(seed)
        self._worker: int | None = None

    @property
    def rng(self) -> np.random.Generator:
        """The generator of this process."""
        info = worker()
        if info is not None and self._worker != info.seed:
            self._worker = info.seed
            self._rng = np.random.default_rng([info.seed, self._seed_key])
        return self._rng

    @property
    def state(self) -> dict[str, Any]:
        """Its state, as JSON values; may be assigned."""
        return dict(self.rng.bit_generator.state)

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = checked_rng(self.rng, state, self._where)
