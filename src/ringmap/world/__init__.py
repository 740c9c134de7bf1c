"""Environments in a pool, rolled out into buffers and datasets; names are loaded when first used.

World ── policy.get_action(infos) ──► EnvPool ──► MegaWrapper(env), ...
  │                                     │
  │◄──────────── infos ─────────────────┘
  ├─ collect ──► ReplayBuffer, or the writer of a format
  └─ evaluate ─► success rate, videos
"""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
