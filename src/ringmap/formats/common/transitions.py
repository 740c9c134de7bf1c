"""Episodes of others' layouts: T steps, each with its observation, its action and what followed.

    rows here     o0 a0 --   o1 a1 r1   ...   oT -- rT          T + 1 rows: the last one is an observation alone
    steps there   o0 a0 r1 o1   o1 a1 r2 o2   ...               T steps

Rows that have `next_obs` beside `obs` are steps already.
Not here: names of columns (each format), blanks (`ringmap.datasets.episode`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringmap.errors import InputError

__all__ = ["OUTCOMES", "Steps", "below", "is_loose_flag", "next_of", "observations_of", "refused_flag"]

Array = np.ndarray[Any, np.dtype[Any]]

_FLAGS = ("terminated", "truncated", "done")
OUTCOMES = ("reward", *_FLAGS)
"""The columns that say what came of a step."""


def below(name: str, columns: Iterable[str], where: str = "") -> list[str]:
    """Return a column and its parts: obs, obs/camera, ...

    Raises:
        InputError: there are none, and `where` names the call.
    """
    found = [n for n in columns if n == name or n.startswith(name + "/")]
    if where and not found:
        raise InputError(f"{where}: no column {name!r}; there are {list(columns)}")
    return found


def next_of(name: str) -> str:
    """Return the name of the column with the observation that followed."""
    return f"next_{name}"


def observations_of(
    chosen: str | list[str] | None, usual: tuple[str, ...], top: str, columns: Iterable[str], where: str
) -> dict[str, str]:
    """Return the columns that are the observation: name here -> name there, which begins with `top`.

    `chosen` is a column with its parts, or a list of columns; None: the first of `usual` that there is. A part of the
    usual observation (obs/arm) keeps its own name there.

    Raises:
        InputError: there is no such column, or two would have one name.
    """
    if chosen is None:
        chosen = next((name for name in usual if below(name, columns)), None)
    if chosen is None:
        raise InputError(
            f"{where}: no column {' or '.join(map(repr, usual))}; say which it is: observation='pixels', or a list; "
            f"there are {list(columns)}"
        )
    found: dict[str, str] = {}
    for name in [chosen] if isinstance(chosen, str) else chosen:
        head, _, rest = name.partition("/")
        part = rest if rest and head in usual else name
        base = top if isinstance(chosen, str) else f"{top}/{part}"
        for old in below(name, columns, where):
            new = base + old[len(name) :]
            if new in found.values():
                raise InputError(f"{where}: column {old!r} would be {new!r}, and so would another one; leave one out")
            found[old] = new
    return found


def refused_flag(name: str, rows: Array) -> str | None:
    """Return why a column can't be a flag of these layouts, None if it can, or is none."""
    if name not in _FLAGS or rows.dtype.kind == "b":
        return None
    is_flag = np.isin(rows, (0, 1)) if rows.dtype.kind in "iuf" else np.zeros(len(rows), bool)
    if is_flag.all():
        return None
    step = int(np.argmin(is_flag.reshape(len(rows), -1).all(axis=1)))
    return f"a flag is 0 or 1, and step {step} has {rows[step].tolist()!r}"


def is_loose_flag(name: str, dtype: np.dtype[Any]) -> bool:
    """Return whether a column is a flag by its name, and may have other values by its dtype."""
    return name in _FLAGS and dtype.kind != "b"


class Steps:
    """The columns of an episode as steps.

    Raises:
        InputError: it has no step; some observations have a next one and others not, or not that of the next row; there
            are rewards or flags, and it is not known where.
    """

    def __init__(
        self,
        columns: Mapping[str, Array],
        observations: list[str],
        reward_at: str | None,
        final_row: bool | None,
        where: str,
    ) -> None:
        self.columns = columns
        given = [name for name in observations if next_of(name) in columns]
        lacking = [name for name in observations if next_of(name) not in columns]
        if given and lacking:
            raise InputError(f"{where}: column {lacking[0]!r} has no column {next_of(lacking[0])!r} beside it")
        for name in given:
            if not _same(columns[name][1:], columns[next_of(name)][:-1]):
                raise InputError(
                    f"{where}: {next_of(name)!r} is not {name!r} one step later, and each observation is stored once; "
                    "split the episode where they part"
                )
        outcomes = [name for name in OUTCOMES if name in columns]
        if reward_at is None and outcomes and not given:
            raise InputError(
                f"{where}: it is not known whether {outcomes[0]!r} stands in the row of the step that its action led "
                "to, or in that of the action: pass reward_at='next' or 'same', or load_dataset(..., reward_at=)"
            )
        final_row = reward_at != "same" if final_row is None else final_row
        self.follows = bool(given)
        """Whether the columns say what followed."""
        self.cut = not given and final_row
        """Whether the last row is an observation alone."""
        self.length = len(next(iter(columns.values()))) - self.cut
        self._late = self.cut and reward_at == "next"
        if self.length < 1:
            raise InputError(
                f"{where}: an episode of one row has no step: T steps have T + 1 observations; add the last "
                "observation as a row, or a column of next observations"
            )

    def now(self, name: str) -> Array:
        """Return a column at the steps, such as observations and actions."""
        return self.columns[name][: self.length]

    def after(self, name: str) -> Array | None:
        """Return a column one step later; None if it is not known at the last step."""
        if self.cut:
            return self.columns[name][1:]
        return self.columns.get(next_of(name))

    def outcome(self, name: str) -> Array:
        """Return a reward or flag: of the step that led to it."""
        rows = self.columns[name]
        rows = rows[1:] if self._late else rows[: self.length]
        return rows.astype(bool) if name in _FLAGS else rows


def _same(left: Array, right: Array) -> bool:
    return np.array_equal(left, right, equal_nan=left.dtype.kind == "f" and right.dtype.kind == "f")
