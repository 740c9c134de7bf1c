"""`RolloutBuffer` as ApexRL means it: on-policy steps, for PPO."""

from ringmap.buffers.rollout import RolloutBuffer

__all__ = ["RolloutBuffer"]
