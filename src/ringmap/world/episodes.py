"""One episode as it is recorded: rows of infos become columns.

    env     reset      step(a0)    step(a1), ends
    row     0          1           2
    info    blank, o0  a0, o1      a1, o2        the action that led there
    action  a0         a1          blank         moved up by one row: taken at the observation of its row

Which rows are blank is said in datasets/episode.py.

Invariants: every column spans the whole episode.
Not here: who is rolled out (rollout.py), who writes (collecting.py).
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from ringmap.datasets.episode import blank_like, rows_of
from ringmap.errors import RolloutError
from ringmap.world.infos import Row

__all__ = ["EpisodeRows", "Names"]

NOT_RECORDED = {"render_time"}
"""Differs from run to run, where equal seeds are to give equal bytes."""


class Names(NamedTuple):
    """What is an action, and what an observation: these must be stored, while other infos that no column holds are left
    out."""

    actions: frozenset[str]
    observed: frozenset[str] = frozenset()


class EpisodeRows:
    """The rows of one episode, one after the other; errors name it by its label."""

    def __init__(self, names: Names, label: str) -> None:
        self._actions, self._names = names.actions, names
        self._label = label
        self._columns: dict[str, list[Any]] = {}
        self._count = self._held = 0
        self._blanks: dict[str, Any] = {}
        self._left_out: set[str] = set()

    def __len__(self) -> int:
        return self._count

    def add(self, row: Row) -> None:
        """Add the next row: its arrays and strings whose names have no leading underscore.

        A column that the first step brings and the reset has not starts with NaN (integers 0, text "").
        """
        columns = self._columns
        for name, value in row.items():
            if name.startswith("_") or name in NOT_RECORDED:
                continue
            if not isinstance(value, np.ndarray | str):
                self._check_may_go(name, value)
                continue
            held = columns.get(name)
            if held is None:
                if self._count > 1:
                    raise RolloutError(
                        f"{self._label}: info {name!r} appeared first at step {self._count}; a column spans "
                        "the episode: report it from the first step on, or begin its name with '_'"
                    )
                held = columns[name] = [blank_like(value)] * self._count
            elif np.shape(held[-1]) != np.shape(value):
                raise RolloutError(
                    f"{self._label}: info {name!r} changed its shape at step {self._count}, from "
                    f"{np.shape(held[-1])} to {np.shape(value)}; pad it, or begin its name with '_'"
                )
            held.append(value)
        self._count += 1
        self._held += 1
        for name, held in columns.items():
            if len(held) != self._held:
                raise RolloutError(
                    f"{self._label}: info {name!r} is missing at step {self._count - 1}; a column spans the "
                    "episode: report it at every step, or begin its name with '_'"
                )

    def _check_may_go(self, name: str, value: Any) -> None:
        """Raise if a value that no column holds is more than an info; warn of an info, once an episode."""
        for what, names in zip(("observation", "action"), reversed(self._names), strict=True):
            if name in names and not (value is None and what == "action" and not self._count):
                raise RolloutError(
                    f"{self._label}: {name!r} of the {what} is a {type(value).__name__} at step {self._count}, which "
                    "no column holds: return an array, or leave it out of the space by a wrapper (pre_wrappers=)"
                )
        if value is not None and name not in self._left_out:
            self._left_out.add(name)
            warnings.warn(
                f"World: info {name!r} is a {type(value).__name__}, which no column holds, and is left out: give an "
                "array, or begin its name with '_'",
                stacklevel=2,
            )

    def take_oldest(self, ends: bool) -> dict[str, Any]:
        """Return the oldest row that is held, and hold it no longer: column -> its value.

        Args:
            ends: whether it is the last row of the episode; else the next row, which has its action, must be held.
        """
        if self._held == self._count:  # the first row's actions are blank
            self._blanks = {name: self._columns[name][0] for name in self._actions if name in self._columns}
        found = {
            name: held[0] if name not in self._actions else self._blanks[name] if ends else held[1]
            for name, held in self._columns.items()
        }
        for held in self._columns.values():
            del held[0]
        self._held -= 1
        return found

    def columns(self) -> dict[str, list[Any]]:
        """Return the episode, its actions moved to the rows at which they were taken."""
        return {
            name: rows_of("next", values, values[0]) if name in self._actions else values
            for name, values in self._columns.items()
        }
