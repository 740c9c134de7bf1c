"""What a rollout needs of a world: its environments, and the policy that acts in them.

Not here: the world itself (world.py), the loop (rollout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ringmap.world.pool import EnvPool

__all__ = ["Stage"]

Array = np.ndarray[Any, np.dtype[Any]]


class Stage(Protocol):
    """A `World`, as far as collecting and evaluating use it."""

    env_name: str
    num_envs: int
    image_shape: tuple[int, int] | None
    image_resample: str | int | None
    goal_transform: Callable[[Any], Any] | None
    envs: EnvPool

    def check_ready(self, where: str) -> None:
        """Raise RoleError unless there is a policy."""
        ...

    def act(self, mask: Array) -> list[Any]:
        """Return the policy's action for each environment, checked for those of `mask`."""
        ...
