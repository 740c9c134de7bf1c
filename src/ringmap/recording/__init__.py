"""Recording wrappers for Gymnasium: what happens in an environment, in our buffers; loaded when first used.

agent ── actions ──► ReplayBufferCollectionWrapper ── the same ──► env
      ◄── rows ────            │                   ◄── rows ──
                               └─ whole episodes, or transitions ─► buffers
"""

from ringmap.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
