"""Transitions of many lanes, for DQN, SAC and their kin."""
