"""`RolloutBuffer` as ApexRL means it: on-policy steps, for PPO."""

from ringmap.buffers.rollout.buffer import RolloutBuffer

__all__ = ["RolloutBuffer"]
