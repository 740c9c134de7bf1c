from ringmap.ray.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
