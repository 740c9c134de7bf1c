"""Packages that only some users need: which extra brings them, and what is said where one is missing.

    require("torch", "RolloutBuffer")    ->  RolloutBuffer: torch is not installed; pip install "ringmap[torch]"

Invariants: a call that needs an extra asks for it before anything else happens; nothing changes its result by what is
installed.
Not here: imports of the packages, which stay at the call that uses them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ringmap.errors import MissingExtraError

__all__ = ["PACKAGES", "missing", "require"]

PACKAGES = {
    "cli": ("typer", "rich"),
    "datasets": ("datasets",),
    "lance": ("lance", "pyarrow"),
    "lerobot": ("av", "pyarrow"),
    "minari": ("minari",),
    "parquet": ("pyarrow",),
    "plot": ("matplotlib",),
    "pusht": ("gym_pusht",),
    "ray": ("ray",),
    "rlds": ("array_record",),
    "sb3": ("stable_baselines3",),
    "torch": ("torch",),
    "torchrl": ("torchrl", "tensordict"),
    "video": ("av",),
    "view": ("starlette", "uvicorn"),
    "weights": ("safetensors", "torch"),
}
"""Extra -> modules that it brings."""


def missing(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed. Nothing is imported."""
    return [name for name in PACKAGES[extra] if not sys.modules.get(name) and find_spec(name) is None]


def require(extra: str, where: str, instead: str = "") -> None:
    """Raise unless the modules of an extra are installed.

    Args:
        extra: its name in `PACKAGES`.
        where: the call that needs it, or what it makes.
        instead: what else would do, in an error's words.

    Raises:
        MissingExtraError: one is not installed; the message has the command that installs it.
    """
    if lacking := missing(extra):
        raise MissingExtraError(
            f"{where}: {' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed; "
            f'pip install "ringmap[{extra}]"{instead and f", or {instead}"}'
        )
