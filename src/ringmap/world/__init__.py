"""Environments in a pool, rolled out into buffers and datasets; names are loaded when first used.

World ── policy.get_action(infos) ──► EnvPool ──► MegaWrapper(env), ...
  │                                     │
  │◄──────────── infos ─────────────────┘
  ├─ collect ──► ReplayBuffer, or the writer of a format
  └─ evaluate ─► success rate, videos
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next lookup is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
