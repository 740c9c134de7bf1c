"""`ReplayBuffer` as ApexRL means it: transitions, for DQN and SAC."""

from ringmap.buffers.transitions.buffer import TransitionReplayBuffer as ReplayBuffer

__all__ = ["ReplayBuffer"]
