"""Modes: how many buffers go with how many environments.

    "shared"     one buffer, whole episodes of all environments
    "per_env"    a buffer for each environment of a vector environment
    "auto"       one buffer: shared; as many as environments, and more than one: per_env

Not here: what goes into them (adapters.py).
"""

from __future__ import annotations

from typing import Any

from ringmap.errors import InputError

__all__ = ["listed", "resolved"]

_MODES = ("auto", "shared", "per_env")


def listed(given: Any) -> list[Any]:
    """Return the buffers that were given, one or several, as a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def resolved(mode: str, num: int | None, count: int, where: str) -> str:
    """Return "shared" or "per_env".

    Args:
        mode: as it was asked for.
        num: environments; None for a single one that is no vector.
        count: buffers.
        where: the method to name in an error.

    Raises:
        InputError: the buffers do not fit the mode.
    """
    if mode not in _MODES:
        raise InputError(f"{where}: replay_mode must be one of {_MODES}, got {mode!r}")
    envs = "a single environment" if num is None else f"{num} environments"
    if mode == "auto":
        if count == 1:
            return "shared"
        if num is not None and num > 1 and count == num:
            return "per_env"
        raise InputError(
            f"{where}: {count} buffers for {envs}; expected 1{'' if num in (None, 1) else f', or {num}'}"
        )
    if mode == "shared" and count != 1:
        raise InputError(f"{where}: replay_mode='shared' takes one buffer, got {count}")
    if mode == "per_env" and (num is None or count != num):
        raise InputError(
            f"{where}: replay_mode='per_env' takes a vector environment and a buffer for each, got {count} for {envs}"
        )
    return mode
