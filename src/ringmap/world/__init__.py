"""Environments in a pool, rolled out into buffers and datasets; names are loaded when first used.

World ── policy.get_action(infos) ──► EnvPool ──► MegaWrapper(env), ...
  │                                     │
  │◄──────────── infos ─────────────────┘
  ├─ collect ──► ReplayBuffer, or the writer of a format
  └─ evaluate ─► success rate, videos
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap.world.pool import EnvPool
    from ringmap.world.world import World
    from ringmap.world.wrappers import (
        AddPixels,
        CheckObservation,
        LiftToInfo,
        MegaWrapper,
        ResizeGoal,
    )

__all__ = [
    "AddPixels",
    "CheckObservation",
    "EnvPool",
    "LiftToInfo",
    "MegaWrapper",
    "ResizeGoal",
    "World",
]

_HOMES = {
    "AddPixels": "ringmap.world.wrappers",
    "CheckObservation": "ringmap.world.wrappers",
    "EnvPool": "ringmap.world.pool",
    "LiftToInfo": "ringmap.world.wrappers",
    "MegaWrapper": "ringmap.world.wrappers",
    "ResizeGoal": "ringmap.world.wrappers",
    "World": "ringmap.world.world",
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
