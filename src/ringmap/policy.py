"""The face of ringmap's policies, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringmap.world.policies import (
        BasePolicy,
        ExpertPolicy,
        FeedForwardPolicy,
        FunctionPolicy,
        RandomPolicy,
    )

__all__ = ["BasePolicy", "ExpertPolicy", "FeedForwardPolicy", "FunctionPolicy", "RandomPolicy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("ringmap.world.policies"), name)
    globals()[name] = value  # the next lookup is a plain one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
