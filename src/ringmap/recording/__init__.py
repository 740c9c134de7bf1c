"""Recording wrappers for Gymnasium: what happens in an environment, in our buffers; loaded when first used.

agent ── actions ──► ReplayBufferCollectionWrapper ── the same ──► env
      ◄── rows ────            │                   ◄── rows ──
                               └─ whole episodes, or transitions ─► buffers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap.recording.wrapper import ReplayBufferCollectionWrapper

__all__ = ["ReplayBufferCollectionWrapper"]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, "ringmap.recording.wrapper"))
