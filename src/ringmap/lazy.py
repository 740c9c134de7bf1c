"""Modules that only name things, each loaded from its home when it is first used.

    ringmap/data.py     __getattr__, __dir__, __all__ = attach(__name__, __file__)
    ringmap/data.pyi    from ringmap.formats.catalog.load import load_dataset

The stub beside the module is the one list of names: type checkers read it, and `attach` does. So `import ringmap`
takes next to no time, and what is not used need not be installed.
Not here: which names a module has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["attach"]


def attach(name: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module.

    Args:
        name: the module's `__name__`.
        file: the module's `__file__`; beside it lies the stub, `.pyi`, with imports `from HOME import NAME, ...`.

    Raises:
        AttributeError: from `__getattr__`: the stub has no such name.

    Cost: the stub is read once.

    Source: SPEC 1 of Scientific Python. Its package, lazy_loader, takes homes inside the module's own package only.
    """
    with open(os.path.splitext(file)[0] + ".pyi", encoding="utf-8") as stub:
        homes = _homes(stub.read().partition("__all__")[0])

    def load(wanted: str) -> Any:
        if wanted not in homes:
            raise AttributeError(f"module {name!r} has no attribute {wanted!r}")
        home = homes[wanted]
        submodule = f"{home}.{wanted}"
        value = import_module(submodule) if home == name else getattr(import_module(home), wanted)
        vars(sys.modules[name])[wanted] = value  # the next lookup is a plain one
        return value

    def names() -> list[str]:
        special = [n for n in vars(sys.modules[name]) if n.startswith("__") and n.endswith("__")]
        return sorted({*special, *homes})

    return load, names, sorted(homes)


def _homes(imports: str) -> dict[str, str]:
    """Return name -> home of `from HOME import NAME, ...` statements; the module `ast` takes 3 ms to import."""
    found: dict[str, str] = {}
    for statement in imports.split("from ")[1:]:
        home, _, names = statement.partition(" import ")
        found |= dict.fromkeys(names.strip(" (,)\n").replace(",", " ").split(), home)
    return found
