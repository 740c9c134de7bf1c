"""What a copy leaves out by name, and what its target can't hold: refused in one list, before a byte is written.

    each column, each datum of an episode  ->  the writer: None, or why not
                                           ->  one InputError with all of them, and the `drop=` that would do

Invariants: what is neither named by `drop=` nor ours is written or refused, never left out.
Not here: what a format holds (its writer).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ringmap.errors import ArgumentTypeError, InputError
from ringmap.formats.episode import EPISODE_DATA_KEY
from ringmap.storage.read.episodes import FIRST_STEP
from ringmap.storage.records.blobs import is_shown

__all__ = ["KEEP_ALL", "Drop", "Refused", "is_own", "refusal", "refused_where_none_fit"]

OWN_DATA = ("seed", "policy_step", FIRST_STEP)
"""Data of an episode that `World` and `dump` add: left out where a target has no place for them."""


class Refused(dict[str, str]):
    """What can't be held: what it is, and why -> the name of the column, or of the data of episodes."""

    def add(self, name: str, what: str) -> None:
        """Note what can't be held, unless that name is refused already."""
        if name not in self.values():
            self[what] = name


def is_own(name: str) -> bool:
    """Return whether data of this name are ours: left out, not refused, where there is no place for them."""
    return name in OWN_DATA or not is_shown(name)


def refusal(refused: Refused, what: str, where: str) -> InputError:
    """Return the error that lists all that a target can't hold."""
    each, names = "; ".join(refused), list(dict.fromkeys(refused.values()))
    return InputError(
        f"{where}: {what} can't hold {each}; nothing was written. Convert what you need, or leave it out: drop={names}"
    )


def refused_where_none_fit(data: Iterable[str]) -> Refused:
    """Return which data of an episode a format without a place for any refuses: all that are not ours."""
    names = [name for name in data if not is_own(name)]
    return Refused({f"episode data {n!r}: it has no place for any": n for n in names})


class Drop:
    """The columns and data of episodes that a copy leaves out.

    Raises:
        ArgumentTypeError: they are no names.

    Example:
        >>> Drop(["pixels", "goal"], "doc")({"pixels": [0], "reward": [1.0], "_episode_data": {"goal": 3}})
        {'reward': [1.0]}
    """

    def __init__(self, names: str | Iterable[str], where: str) -> None:
        several = [names] if isinstance(names, str) else names
        if isinstance(several, Mapping) or not isinstance(several, Iterable):
            raise ArgumentTypeError(f"{where}: drop= takes a list of names, got {names!r:.80}")
        self._names = {str(name) if isinstance(name, str) else name: None for name in several}  # NumPy's is a str
        if not all(isinstance(name, str) for name in self._names):
            raise ArgumentTypeError(f"{where}: drop= takes names, got {list(self._names)!r:.80}")
        self._where = where

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def names(self) -> list[str]:
        """The names, as they were given."""
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def check(self, columns: Collection[str], data: Callable[[], Iterable[str]]) -> None:
        """Raise InputError if a name is of no column and of no data, or if no column would be left.

        `data` returns the names of data; it is called only if a name is of no column.
        """
        others = [name for name in self._names if name not in columns]
        known = list(data()) if others else []
        unknown = [name for name in others if name not in known]
        if unknown and columns:
            raise InputError(
                f"{self._where}: drop={unknown}: there is no such column and no such data of an episode; the columns "
                f"are {list(columns)}, the data {known}"
            )
        if columns and all(name in self for name in columns):
            raise InputError(f"{self._where}: drop={list(self._names)} leaves no column")

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns, or data of an episode, without those that are left out."""
        return {name: value for name, value in values.items() if name not in self._names}

    def __call__(self, episode: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an episode without what is left out."""
        if not self._names:
            return episode
        left = self.of(episode)
        data = self.of(left.pop(EPISODE_DATA_KEY, None) or {})
        return {**left, EPISODE_DATA_KEY: data} if data else left


KEEP_ALL = Drop((), "")
"""Leaves out nothing."""
