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
