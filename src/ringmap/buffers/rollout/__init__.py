"""On-policy steps, for PPO and similar algorithms."""
