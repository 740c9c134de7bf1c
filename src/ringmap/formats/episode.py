"""An episode before it is written to a dataset: the key of its data, its writers, and the write modes.

Not here: formats (base.py), the columns of an episode (checked_episode.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from ringmap.errors import InputError

__all__ = [
    "EPISODE_DATA_KEY",
    "WRITE_MODES",
    "Writer",
    "split_episode_data",
    "validate_write_mode",
]

EPISODE_DATA_KEY = "_episode_data"
"""The reserved key of an episode: a mapping of values that are constant within it."""

WRITE_MODES = ("append", "overwrite", "error")
"""What a writer does if a dataset exists: extend it (the default), replace it, or refuse."""


@runtime_checkable
class Writer(Protocol):
    """An object that episodes can be written to: a format's writer, or a buffer.

    Outside a `with` block a format's writer raises `RuntimeError`.
    """

    def __enter__(self) -> Self:
        """Open for writing."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, and never swallow the exception."""
        ...

    def write_episode(self, ep_data: Mapping[str, Any]) -> None:
        """Write one whole episode: column -> per-step list, or array of shape (T, ...)."""
        ...

    def write_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Write episodes one by one."""
        ...


def validate_write_mode(mode: str) -> str:
    """Return `mode` if it is one of `WRITE_MODES`.

    Raises:
        InputError: it is not.
    """
    if mode not in WRITE_MODES:
        raise InputError(f"write mode must be one of {WRITE_MODES}, got {mode!r}")
    return mode


def split_episode_data(ep_data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `(per-step columns, values constant within the episode)` of an episode.

    Raises:
        InputError: the episode, or the value under `_episode_data`, is not a mapping.

    Example:
        >>> split_episode_data({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        ({'reward': [0.0, 1.0]}, {'seed': 7})
    """
    if not isinstance(ep_data, Mapping):
        raise InputError(
            f"an episode is a mapping of column -> one value per step, got {type(ep_data).__name__}; of a list of "
            "steps make {name: [step[name] for step in steps] for name in steps[0]}"
        )
    columns = {name: value for name, value in ep_data.items() if name != EPISODE_DATA_KEY}
    constant = ep_data.get(EPISODE_DATA_KEY)
    if constant is None:
        return columns, {}
    if not isinstance(constant, Mapping):
        raise InputError(
            f"{EPISODE_DATA_KEY!r} must be a mapping of name -> value constant within the episode, "
            f"got {type(constant).__name__}"
        )
    return columns, dict(constant)
