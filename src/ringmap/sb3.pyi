from ringmap.exits.stable_baselines3 import DictReplayBuffer, HerReplayBuffer, ReplayBuffer

__all__ = ["DictReplayBuffer", "HerReplayBuffer", "ReplayBuffer"]
