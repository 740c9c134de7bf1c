from ringmap.ray.buffer import ReplayBuffer
from ringmap.ray.collect import collect
from ringmap.ray.read import read

__all__ = ["ReplayBuffer", "collect", "read"]
