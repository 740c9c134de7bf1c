"""The npz format: a folder of .npz files, one an episode, as `np.savez` writes them. Read-only.

    DIR/episode_0.npz   actions (T, ...)      a column: it has a row for each step
                        observations (T + 1, ...)      two columns, now and next
                        success ()            data of the episode: all else
    DIR/episode_1.npz   ...                   episodes in the order of the names, numbers in them by their value

T is the number of rows of `action` or `reward`, if there is one, else that of all arrays. Names of offline RL
(`observations`, `terminals`) become those that columns have here; any other name stays.
Not here: arrays of many episodes (`ringmap.datasets.arrays`), archives that our writers make (common/npz.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.facts import REWARDS, name_among
from ringmap.datasets.arrays import NAMES
from ringmap.errors import InputError
from ringmap.formats.common.npz import open_members, shapes_in
from ringmap.formats.common.source import EpisodeSource, damage_named, offsets_of
from ringmap.formats.common.transitions import next_of
from ringmap.formats.common.untrusted import check_row, refuse_elsewhere
from ringmap.storage.columns.schema import ColumnSpec, Schema

__all__ = ["NpzSource"]

Array = np.ndarray[Any, np.dtype[Any]]

_SUFFIX = ".npz"


class NpzSource(EpisodeSource):
    """The columns of a folder of .npz files, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        InputError: it is a file, or it is not known how many steps an episode has.
        CorruptError: a file is damaged.

    Cost: opening reads the headers of all files; a read loads whole episodes, which are kept.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if os.path.isfile(self.path):
            raise InputError(
                f"{self.path}: is one .npz file; give the folder of files with an episode each, or, of arrays with "
                "many episodes, from_arrays(np.load(path))"
            )
        names = [n for n in os.listdir(self.path) if n.endswith(_SUFFIX) and not n.startswith(".")]
        self._files = [os.path.join(self.path, name) for name in sorted(names, key=_by_number)]
        self._members: list[Arrays] = []
        for file in self._files:
            with damage_named(file):
                refuse_elsewhere(self.path, file)
                self._members.append(_renamed(file, shapes_in(file)))
        files = zip(self._files, self._members, strict=True)
        self.lengths = np.array([_steps(file, arrays) for file, arrays in files], np.int32)
        self.offsets = offsets_of(self.lengths)
        self.unsupported: dict[str, str] = {}
        self.episode_columns: list[str] = []
        self._after: list[str] = []
        specs = []
        for name in dict.fromkeys(name for arrays in self._members for name in arrays):
            specs += self._columns_of(name)
        self.schema = Schema(tuple(specs))
        if self._after and name_among(REWARDS, self.schema.names):
            self.reward_at = "same"  # it stands between two observations

    def _columns_of(self, name: str) -> list[ColumnSpec]:
        """Return the columns that a name stands for: one, now and next, or none where it is data of episodes, or not
        supported."""
        there = [n for n, arrays in enumerate(self._members) if name in arrays]
        _, shape, dtype = self._members[there[0]][name]
        more = {
            self._members[n][name].shape[0] - int(self.lengths[n]) if self._members[n][name].shape else -1
            for n in there
        }
        kinds = {_kind(self._members[n][name]): n for n in there}
        if any(self._members[n][name].dtype.hasobject for n in there):
            self.unsupported[name] = "of Python objects, which are not loaded"
        elif len(more) > 1 or more.isdisjoint({0, 1}):
            self.episode_columns.append(name)
        elif len(there) < len(self._files):
            lacks = next(n for n in range(len(self._files)) if n not in there)
            self.unsupported[name] = f"not in all files: {self._files[lacks]} lacks it"
        elif len(kinds) > 1:
            first, other = list(kinds.values())[:2]
            self.unsupported[name] = (
                f"of {dtype} {shape[1:]} in {self._files[first]}, and another shape or dtype in {self._files[other]}"
            )
        elif more == {1} and any(next_of(name) in arrays for arrays in self._members):
            self.unsupported[name] = f"one row longer than the episode, and {next_of(name)!r} is there too"
        else:
            check_row(self._files[0], name, int(np.prod(shape[1:])) * dtype.itemsize)
            dtype = np.dtype("U") if dtype.kind == "U" else dtype.newbyteorder("=")
            spec = ColumnSpec(name, shape[1:], dtype)  # text is of any width
            if more == {0}:
                return [spec]
            self._after.append(name)
            return [spec, ColumnSpec(next_of(name), shape[1:], dtype)]
        return []

    def _load(self, file: Any, number: int, columns: Sequence[str]) -> dict[str, Array]:
        after = [n for n in self._after if n in columns or next_of(n) in columns]
        names = [n for n in self._members[number] if n in columns and n not in self._after]
        arrays = self._arrays(number, [*names, *after])
        for name in after:
            rows = arrays[name]
            arrays[name], arrays[next_of(name)] = rows[:-1], rows[1:]
        return arrays

    def _arrays(self, number: int, names: list[str]) -> dict[str, Array]:
        file = self._files[number]
        theirs = [self._members[number][name].name for name in names]
        arrays = dict(zip(names, open_members(file, theirs), strict=True))
        self._refuse_newer(file)
        return arrays

    def _episode_data(self, handle: Any, episode: int) -> dict[str, Any]:
        names = [name for name in self.episode_columns if name in self._members[episode]]
        arrays = self._arrays(episode, names)
        return {name: value if value.ndim else value.item() for name, value in arrays.items()}


class Stored(NamedTuple):
    """An array of a file: its name there, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Arrays = dict[str, Stored]
"""The arrays of a file, by the names that they have here."""


def _renamed(file: str, shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Arrays:
    arrays: Arrays = {}
    for name, (shape, dtype) in shapes.items():
        own = NAMES.get(name, name)
        if own in arrays:
            raise InputError(f"{file}: {name!r} and {arrays[own].name!r} are the same column; remove one")
        arrays[own] = Stored(name, shape, dtype)
    return arrays


def _steps(file: str, arrays: Arrays) -> int:
    """Return how many steps an episode has."""
    rows = {name: stored.shape[0] for name, stored in arrays.items() if stored.shape}
    for name in ("action", *REWARDS):
        if name in rows:
            return rows[name]
    if len(set(rows.values())) != 1:
        raise InputError(
            f"{file}: how many steps are these? There is no 'action' and no 'reward', and the arrays have {rows} rows; "
            "name one so, or load them yourself (from_arrays)"
        )
    return next(iter(rows.values()))


def _kind(stored: Stored) -> tuple[Any, ...]:
    dtype = stored.dtype.newbyteorder("=")
    return stored.shape[1:], "U" if dtype.kind == "U" else dtype


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    """Return what sorts episode_2 before episode_10."""
    parts = re.split(r"([0-9]+)", name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
