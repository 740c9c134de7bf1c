"""Transitions of many lanes, for DQN, SAC and similar algorithms."""
