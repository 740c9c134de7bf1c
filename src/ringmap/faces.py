"""A face: a module that only names things, each loaded from its home when it is first used.

    __getattr__, __dir__ = lazily(__name__, {"World": "ringmap.world.world", "data": "ringmap.data"})

So `import ringmap` takes next to no time, and what is not used need not be installed.
Not here: which names a face has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazily"]


def lazily(
    face: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module: it shows its face, and not what it is made with.

    Args:
        face: the module's name.
        homes: name -> module that defines it; or the module of that name itself.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        module = import_module(home)
        value = module if home == f"{face}.{name}" else getattr(module, name)
        vars(sys.modules[face])[name] = value  # the next lookup is a plain one
        return value

    def names() -> list[str]:
        special = [n for n in vars(sys.modules[face]) if n.startswith("__") and n.endswith("__")]
        return sorted({*special, *homes})

    return load, names
