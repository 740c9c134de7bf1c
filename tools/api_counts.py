"""How much of ringmap a user can see: names, parameters, methods and properties.

    python -m tools.api_counts              a table of all faces
    python -m tools.api_counts --names      each class with its own, and each function

A name of several faces counts once. A method or property counts once, in the class that defines it; `**options` that
are typed count as all that they accept. Not here: what is private, and what a class has from Python or another library.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

FACES = ["", "data", "policy", "samplers", "sb3", "grain", "ray", "buffer.replay_buffer", "buffer.rollout_buffer"]


def faces() -> dict[str, ModuleType]:
    """Return the modules that users import, those that are installed."""
    return {face or "ringmap": importlib.import_module(f"ringmap.{face}".rstrip(".")) for face in FACES}


def named(modules: dict[str, ModuleType]) -> dict[str, Any]:
    """Return what the faces name: name -> class, function or value; modules are left out."""
    found: dict[str, Any] = {}
    for face, module in modules.items():
        for name in module.__all__:
            try:
                value = getattr(module, name)
            except ImportError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            if not inspect.ismodule(value) and not any(value is other for other in found.values()):
                found[name if name not in found else f"{face}.{name}"] = value
    return found


def parameters(function: Any) -> list[str]:
    """Return what a function takes, `self` left out; typed `**options` as all that they accept."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    names: list[str] = []
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = typing.get_args(_hints(function).get(name))
            options = _hints(hint[0]) if hint else {}
            names += list(options) or [f"**{name}"]
        else:
            names.append(name)
    return names


def _hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of)
    except (NameError, TypeError, AttributeError):
        return {}


def members(cls: type) -> Iterator[tuple[type, str, Any]]:
    """Yield (defining class, name, member) of what a class of ringmap shows, bases of other libraries left out."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != "ringmap":
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") and (
                callable(member) or isinstance(member, (property, classmethod, staticmethod))
            ):
                yield base, name, member


def count(values: dict[str, Any]) -> dict[str, int]:
    """Return the sums over names: names, parameters (of constructors and functions), methods, properties."""
    seen: set[tuple[type, str]] = set()
    sums = {"names": len(values), "parameters": 0, "methods": 0, "parameters of methods": 0, "properties": 0}
    for value in values.values():
        if not isinstance(value, type):
            sums["parameters"] += len(parameters(value)) if callable(value) else 0
            continue
        if not issubclass(value, BaseException):
            sums["parameters"] += len(parameters(value))
        for base, name, member in members(value):
            if (base, name) in seen or isinstance(member, type):
                continue
            seen.add((base, name))
            if isinstance(member, property) or hasattr(member, "func"):
                sums["properties"] += 1
            else:
                sums["methods"] += 1
                sums["parameters of methods"] += len(parameters(getattr(member, "__func__", member)))
    return sums


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.api_counts", description=__doc__.split("\n")[0])
    parser.add_argument("--names", action="store_true", help="each class with its own")
    given = parser.parse_args()
    modules = faces()
    rows = {name: count(named({name: module})) for name, module in modules.items()}
    rows["ringmap, ringmap.data"] = count(named({name: modules[name] for name in ("ringmap", "data")}))
    rows["all"] = count(named(modules))
    heads = list(rows["all"])
    print("| face |", " | ".join(heads), "|\n|", " --- |" * (len(heads) + 1))
    for face, sums in rows.items():
        print("|", face, "|", " | ".join(str(sums[head]) for head in heads), "|")
    if given.names:
        for name, value in sorted(named(modules).items()):
            if isinstance(value, type):
                own = sorted({member for _, member, _ in members(value)})
                print(f"\n{name}({', '.join(parameters(value))})\n    {', '.join(own)}")
            elif callable(value):
                print(f"\n{name}({', '.join(parameters(value))})")


if __name__ == "__main__":
    main()
