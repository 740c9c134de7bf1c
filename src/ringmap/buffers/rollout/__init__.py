"""On-policy steps, for PPO and its kin."""
