"""The rows of open episodes: one block for all slots, cut into episodes when they end.

    row     0     1     2    of slot i
    obs     o0    o1    o2   ┐ a batch is copied in with   the layout of `World.collect`:
    action  a0    a1    --   │ one assignment per leaf,    datasets/episode.py
    reward  --    r1    r2   ┘ each slot at its own row

Text stands in the block as Python's own, so that no row says how long it may be.

Invariants: the block is private: neither the environment's next step nor the agent can change it;
slot i's newest row is `at[i]`, -1 where no episode is open.
Not here: when an episode begins or ends (slots.py), where it goes (adapters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.datasets.episode import blank, rows_of
from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.columns.values import as_array, cast

__all__ = ["OpenRows", "one_behind_the_other"]

Array = np.ndarray[Any, np.dtype[Any]]

Constant = Callable[[int, str], Any]
_ROOM = 32
_AT_THE_END = ("terminated", "truncated", "done", "is_last")


class OpenRows:
    """Rows of `num` slots; without `history` only the newest two of each are kept.

    Cost: memory as for the longest episode that each slot had, touched as it fills.
    """

    def __init__(self, num: int, columns: Sequence[ColumnSpec], history: bool) -> None:
        self.history = history
        self.at = np.full(num, -1, np.int64)
        self.before = np.zeros(num, np.int64)
        """Rows of each slot's open episode that are no longer here."""
        self.blanks = {
            c.name: np.full(c.shape, "", np.object_) if c.dtype.kind == "U" else blank(c.shape, c.dtype)
            for c in columns
        }
        self.row_nbytes = sum(c.row_nbytes for c in columns)
        self._kinds = {c.name: c.name.partition("/")[0] for c in columns}
        self._first = np.arange(num)
        self._most = 0  # no slot is further than this
        self.arrays: dict[str, Array] = {}
        self._make_room(_ROOM)

    def _make_room(self, room: int) -> None:
        num = len(self.at)
        before, self.arrays = self.arrays, {}
        for name, none in self.blanks.items():
            rows = self.arrays[name] = np.empty((num, room, *none.shape), none.dtype)
            for slot in np.flatnonzero(self.at >= 0).tolist() if before else ():
                stop = self.at[slot] + 1  # beyond, a copy would make untouched pages real
                rows[slot, :stop] = before[name][slot, :stop]
        self._room = room
        self._flat = {name: rows.reshape(num * room, *rows.shape[2:]) for name, rows in self.arrays.items()}
        self._scalars = {name: _scalars(rows) for name, rows in self._flat.items()}
        self._first = np.arange(num) * room

    # -- in ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Go on to the next row in every slot; where none was open, to row 0."""
        self._most += 1
        # The last row of a slot is unused: values that are put while no episode is open (at = -1) go there.
        if self._most >= self._room - 1:
            self._most = int(self.at.max()) + 1
            if self._most >= self._room - 1:
                self._make_room(2 * self._room)
        self.at += 1

    def longest(self, enough: int) -> int:
        """Return the rows of the longest open episode; or any number beyond, up to `enough`."""
        if self._most + 1 > enough:
            self._most = max(0, int(self.at.max()))
        return self._most + 1

    def put(self, batch: Mapping[str, Any]) -> None:
        """Copy a batch, column -> `(num, ...)`, into the newest rows."""
        where = self._first + self.at
        for name, values in batch.items():
            flat = self._flat[name]
            if flat.ndim > 1 and flat.dtype == values.dtype and values.flags.c_contiguous:
                # NumPy stores scalars at places three times as fast as rows of several values.
                self._scalars[name][where] = _scalars(values)
            else:
                flat[where] = values

    def put_one(self, slot: int, name: str, value: Any, where: str) -> None:
        """Copy one value into the newest row of a slot, None as a blank."""
        none = self.blanks[name]
        array = none if value is None else as_array(value, where, "item")
        if array.shape != none.shape:
            raise InputError(f"{where} has shape {array.shape}, expected {none.shape}")
        if none.dtype.hasobject and array is not none:
            if array.dtype.kind != "U":
                raise InputError(f"{where} is of {array.dtype}, expected text")
            array = array.astype(np.object_)
        elif array.dtype != none.dtype:
            array = cast(array[None], none.dtype, "safe", where)[0]
        self.arrays[name][slot, self.at[slot]] = array[()]

    def begin(self, slots: Sequence[int], batch: Mapping[str, Array]) -> None:
        """Put slots at their first row, with their values of a batch."""
        for slot in slots:
            self.at[slot] = self.before[slot] = 0
            for name, values in batch.items():
                self.arrays[name][slot, 0] = values[slot]

    def keep_newest(self, names: Sequence[str]) -> None:
        """Make the newest row of each slot its first."""
        open_ = np.flatnonzero(self.at > 0)
        for name in names:
            self.arrays[name][open_, 0] = self.arrays[name][open_, self.at[open_]]
        self.at[open_] = self.before[open_] = 0
        self._most = 0

    def drop_stored(self, slots: Sequence[int]) -> None:
        """Keep the newest row of these slots alone: those before it are stored."""
        for slot in slots:
            at = self.at[slot]
            if at > 0:
                for rows in self.arrays.values():
                    rows[slot, 0] = rows[slot, at]
                self.before[slot] += at
                self.at[slot] = 0

    def take(self, other: OpenRows) -> None:
        """Begin with the newest rows of another; a column that it lacks is blank."""
        open_ = np.flatnonzero(other.at >= 0)
        self.at[open_] = 0
        for name, none in self.blanks.items():
            theirs = other.arrays.get(name)
            alike = theirs is not None and theirs.shape[2:] == none.shape and theirs.dtype == none.dtype
            self.arrays[name][open_, 0] = theirs[open_, other.at[open_]] if alike else none  # type: ignore[index]

    # -- out ---------------------------------------------------------------------------------

    def newest(self, name: str, slots: Any, back: int = 0) -> Array:
        """Return a copy of the newest rows of some slots, or of those `back` rows before."""
        return _shown(self._flat[name][self._first[slots] + self.at[slots] - back])

    def cut(
        self,
        slot: int,
        start: int,
        stop: int,
        names: Sequence[str],
        constant: Constant,
        ended: tuple[bool, bool] | None = None,
    ) -> dict[str, Array]:
        """Return columns of rows `[start, stop)` of a slot's episode: views, good until the slot's next row. `ended`:
        whether row `stop - 1` terminated and truncated the episode; None: it goes on."""
        count, first, whole = stop - start, start + self.before.item(slot), ended is not None
        made: dict[str, Array] = {}
        for name in names:
            kind = self._kinds.get(name)
            if kind is not None:
                made[name] = rows_of(kind, self.arrays[name][slot, start:stop], self.blanks[name], not first, whole)
            elif name in _AT_THE_END:
                made[name] = flags = np.zeros(count, np.bool_)
                if ended is not None:
                    flags[-1] = name == "is_last" or (any(ended) if name == "done" else ended[name == "truncated"])
            elif name.partition("/")[0] == "next_obs":
                now = name.removeprefix("next_")
                made[name] = rows_of(
                    "next", self.arrays[now][slot, start : stop + (not whole)], self.blanks[now], ends=whole
                )
            elif name == "t":
                made[name] = np.arange(first, first + count)
            elif name == "is_first":
                made[name] = np.arange(first, first + count) == 0
            else:
                value = as_array(constant(slot, name), name, "item")
                made[name] = np.broadcast_to(value, (count, *value.shape))
            if made[name].dtype.hasobject:
                made[name] = _shown(made[name])
        return made


def one_behind_the_other(episodes: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """Return the columns of several episodes, as one; raise ValueError where a column differs: it would be converted,
    as if it fitted."""
    if len(episodes) == 1:
        return episodes[0]
    joined = {}
    for name in episodes[0]:
        pieces = [episode[name] for episode in episodes]
        joined[name] = np.concatenate(pieces)
        if len({piece.dtype.kind for piece in pieces}) > 1:
            raise ValueError(f"{name}: of several kinds")
    return joined


def _shown(rows: Array) -> Array:
    """Return rows as a buffer takes them: text as NumPy's strings."""
    return rows.astype(np.str_) if rows.dtype.hasobject else rows


def _scalars(rows: Array) -> Array:
    """Return C-contiguous rows as scalars of as many bytes, a view; rows of no bytes, and text, as they are."""
    count = len(rows)
    nbytes = rows.nbytes // count if count else 0
    if not nbytes or rows.dtype.hasobject:
        return rows
    found: Array = rows.reshape(count, -1).view(f"V{nbytes}")[:, 0]
    return found
