"""The face of ringmap's policies, loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmap.faces import lazily

if TYPE_CHECKING:
    from ringmap.world.policies import (
        BasePolicy,
        ExpertPolicy,
        FeedForwardPolicy,
        FunctionPolicy,
        RandomPolicy,
    )

__all__ = ["BasePolicy", "ExpertPolicy", "FeedForwardPolicy", "FunctionPolicy", "RandomPolicy"]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, "ringmap.world.policies"))
