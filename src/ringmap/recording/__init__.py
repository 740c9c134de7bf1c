"""Recording wrappers for Gymnasium: they store the steps of an environment in buffers; loaded when first used.

agent ── actions ──► ReplayBufferCollectionWrapper ── the same ──► env
      ◄── rows ────            │                   ◄── rows ──
                               └─ whole episodes, or transitions ─► buffers
"""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
