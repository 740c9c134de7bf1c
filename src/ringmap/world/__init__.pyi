from ringmap.world.pool import EnvPool
from ringmap.world.world import World
from ringmap.world.wrappers import MegaWrapper

__all__ = [
    "EnvPool",
    "MegaWrapper",
    "World",
]
