"""The episodes of a dataset as a table, and which of them are wanted: `return > 100 and not flags contains bad`.

    number  length  return  ended        flags  note    the data of each episode
    0       31      12.5    terminated   bad            seed 7, task lift

Numbers and lengths are known at once; returns and ends come from the rows of rewards and flags, data from each episode,
and only of names that are asked for, 1,000 episodes at a time.
Invariants: row i of every column belongs to `ids[i]`; an eviction drops rows in front, new episodes add rows at the
end, and what is known of the others stays; an episode that is evicted while it is read is not stored.
Not here: the grammar of conditions (clips/where.py), marks (marks.py), how a table is shown (cli/, viewer/).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ringmap.clips.facts import REWARDS, TERMINATED, TRUNCATED, name_among
from ringmap.clips.marks import MARK_NAMES
from ringmap.clips.where import Condition, Values
from ringmap.datasets.marks import Mark, Marks
from ringmap.errors import ArgumentTypeError, ClipIndexError, InputError

__all__ = ["AT_ONCE", "ENDED", "OUTCOMES", "OWN", "EpisodeTable", "choose", "end_of_chunk", "in_order", "outcomes"]

Array = np.ndarray[Any, np.dtype[Any]]

ENDED = (None, "terminated", "truncated")
OWN = ("episode", "length", "return", "ended", *MARK_NAMES)
"""The names that every episode has, whatever its data are called."""

OUTCOMES = {"return": REWARDS, "ended": (*TERMINATED, *TRUNCATED)}
"""A value of an episode -> the names of the columns, one number a step, that it comes from."""

AT_ONCE, _MOST_ROWS = 1000, 500_000


class EpisodeTable:
    """What is known of episodes.

    Args:
        ids: what each is called by its marks, rising.
        lengths: steps of each.
        most_names: of episode data that are columns, for a table that is shown; None: all that are put.
    """

    def __init__(self, ids: Array, lengths: Array, most_names: int | None = None) -> None:
        count = len(ids)
        self._most_names, self._others = most_names, dict[str, None]()
        self.ids, self.lengths = ids, lengths
        self.returns, self.ended = np.full(count, np.nan), np.zeros(count, np.int8)
        self.data: dict[str, Values] = {}
        self.marks: Mapping[int, Mark] = {}
        self.outcomes: set[str] = set()
        """The names of `OUTCOMES` whose columns `read` found."""

    def follow(self, ids: Array, lengths: Array) -> int | None:
        """Take over what there is now, if it is what was there without its first episodes, with others at the end.

        Returns:
            From which episode on something is not known; None if they are other episodes.
        """
        drop = int(np.searchsorted(self.ids, ids[0])) if len(ids) else len(self.ids)
        kept = len(self.ids) - drop
        if kept > len(ids) or not np.array_equal(self.ids[drop:], ids[:kept]):
            return None
        grown = np.flatnonzero(self.lengths[drop:] != lengths[:kept])
        add, known = len(ids) - kept, int(grown[0]) if len(grown) else kept
        self.ids, self.lengths = ids, lengths
        self.returns = np.concatenate([self.returns[drop:], np.full(add, np.nan)])
        self.returns[known:] = np.nan
        self.ended = np.concatenate([self.ended[drop:], np.zeros(add, np.int8)])
        for column in self.data.values():
            column.keep(drop, add)
        return known

    def put(self, row: int, data: Mapping[str, Any]) -> None:
        """Set the data of an episode."""
        for name, value in data.items():
            if name in OWN or (name not in self.data and len(self.data) == self._most_names):
                continue
            self.data.setdefault(name, Values.none(len(self.ids))).put(row, value)

    def put_outcomes(self, first: int, returns: Array | None, ended: Array | None) -> None:
        """Set the returns and the ends of episodes, as `outcomes` returns them."""
        if returns is not None:
            self.returns[first : first + len(returns)] = returns
        if ended is not None:
            self.ended[first : first + len(ended)] = ended

    @property
    def names(self) -> list[str]:
        """The names that conditions and orders may use."""
        return [*OWN, *{**self.data, **self._others}]

    def values(self, name: str) -> Values | None:
        """Return a value of each episode, by one of `names`; None if no episode has it."""
        count = len(self.ids)
        if name == "episode":
            return Values(np.arange(count, dtype=np.float64))
        if name == "length":
            return Values(np.asarray(self.lengths, np.float64))
        if name == "return":
            return Values(self.returns)
        if name == "ended":
            return Values(np.full(count, np.nan), np.array(ENDED, object)[self.ended])
        if name in MARK_NAMES:
            texts = np.full(count, "", object)
            rows = {int(one): row for row, one in enumerate(self.ids)} if self.marks else {}
            for at, mark in self.marks.items():
                if at in rows:
                    texts[rows[at]] = " ".join(mark.flags) if name == "flags" else mark.note
            return Values(np.full(count, np.nan), texts)
        return self.data.get(name)

    def read(self, dataset: Any, asked: Collection[str], take: Callable[[int, Any], None] | None = None) -> Array:
        """Read what is asked for: names of `OUTCOMES`, and others of episode data, which become columns.

        Args:
            dataset: whose episodes keep their numbers (`Dataset.pinned`).
            asked: the names.
            take: called with the number of each episode, and its data, if there are names of data.

        Returns:
            Which episodes are still stored, bool `(n,)`.
        """
        count = len(self.ids)
        stored, columns = np.ones(count, np.bool_), [n for kind in OUTCOMES if kind in asked for n in OUTCOMES[kind]]
        wanted, first = set(asked) - set(OWN), 0
        while first < count and (columns or wanted):
            stop = end_of_chunk(self.lengths, first)
            if columns:
                for at, end, rows in _read(partial(dataset.stored_rows, names=columns), first, stop, stored):
                    found = outcomes(rows, self.lengths[at:end])
                    self.outcomes |= {kind for kind, values in zip(OUTCOMES, found, strict=True) if values is not None}
                    self.put_outcomes(at, *found)
            reads = _read(lambda a, b: dataset.get_episode_data(np.arange(a, b)), first, stop, stored)
            for at, end, data in reads if wanted else ():
                for number in range(at, end):
                    mine = {name: value for name, of in data.items() if (value := of[number - at]) is not None}
                    self._others |= {name: None for name in mine if name not in OWN}
                    self.put(number, {name: mine[name] for name in wanted & mine.keys()})
                    if take is not None:
                        take(number, mine)
            first = stop
        return stored


def _read(
    read: Callable[[int, int], Any], first: int, stop: int, stored: Array
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield `(first, stop, what was read)` of episodes; one by one where some were evicted, which are not `stored`."""
    try:
        found = read(first, stop)
    except ClipIndexError:
        if stop == first + 1:
            stored[first] = False
            return
        for number in range(first, stop):
            yield from _read(read, number, number + 1, stored)
        return
    yield first, stop, found


def end_of_chunk(lengths: Array, first: int) -> int:
    """Return the episode after the last of those that are read together from one on: 1,000, or 500,000 rows."""
    sizes = np.cumsum(lengths[first : first + AT_ONCE])
    return first + max(1, int(np.searchsorted(sizes, _MOST_ROWS, side="right")))


def outcomes(rows: Mapping[str, Array], sizes: Array) -> tuple[Array | None, Array | None]:
    """Return the sums of rewards, and how episodes ended, as numbers in `ENDED`; None where no column tells.

    Args:
        rows: column -> its rows of these episodes, end to end; what is no number for each step is passed over.
        sizes: steps of each.
    """
    rows = {n: v.reshape(-1) for n, v in rows.items() if v.size == len(v) and v.dtype.kind in "biuf"}
    starts, filled = np.cumsum(sizes) - sizes, np.flatnonzero(sizes)
    returns = ended = None
    if (reward := name_among(REWARDS, rows)) is not None:
        returns = np.zeros(len(sizes))
        if len(filled):  # the row of a reset has no reward: NaN
            values = np.nan_to_num(rows[reward].astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
            returns[filled] = np.add.reduceat(values, starts[filled])
    for code, names in ((2, TRUNCATED), (1, TERMINATED)):
        if (name := name_among(names, rows)) is not None:
            ended = np.zeros(len(sizes), np.int8) if ended is None else ended
            last = rows[name][starts[filled] + sizes[filled] - 1]
            ended[filled[(last != 0) & (last == last)]] = code  # of what is damaged it is NaN
    return returns, ended


def in_order(rows: Array, values: Values, descending: bool) -> Array:
    """Sort rows: numbers before texts; those without a value last; equal ones by age."""
    numbers, texts = values.numbers[rows], values.texts
    by_number: Array = rows[np.argsort(-numbers if descending else numbers, kind="stable")]
    if texts is None:
        return by_number
    count = len(rows) - int(np.isnan(numbers).sum())
    others = by_number[count:].tolist()
    by_text = sorted((row for row in others if texts[row]), key=lambda row: texts[row], reverse=descending)
    without = [row for row in others if not texts[row]]
    return np.concatenate([by_number[:count], np.array([*by_text, *without], np.int64)])


def choose(
    dataset: Any,
    where: str | Callable[[dict[str, Any]], Any],
    marks: str | os.PathLike[str] | None,
    caller: str,
) -> Array:
    """Return the numbers of the episodes that are wanted; one that is evicted meanwhile is not.

    Args:
        dataset: whose episodes keep their numbers (`Dataset.pinned`).
        where: a `Condition` over the names of `OWN` and of episode data; or a function of the data of an episode, a
            dict with None for what it lacks.
        marks: the file of marks, by default the one beside the data.
        caller: to name in an error.

    Cost: reads the episode data if they are asked for; the rewards or ends of all episodes if `return` or `ended` is.
    """
    lengths = np.asarray(dataset.lengths, np.int64)
    table = EpisodeTable(np.arange(len(lengths)), lengths)
    if callable(where):
        wanted, none = np.zeros(len(lengths), np.bool_), dict.fromkeys(dataset.episode_column_names)

        def take(number: int, data: dict[str, Any]) -> None:
            wanted[number] = _truth(where({**none, **data}), caller)

        return np.flatnonzero(table.read(dataset, ["data"], take) & wanted)
    if not isinstance(where, str):
        raise ArgumentTypeError(
            f"{caller}= takes a condition, such as 'return > 100', or a function of an episode's data, got "
            f"{where!r:.80}"
        )
    condition = Condition(where, caller)
    if not set(MARK_NAMES).isdisjoint(condition.names):
        of = Marks(dataset, marks)
        table.ids, table.marks = of.names(), of.all()
    stored = table.read(dataset, condition.names)
    if not len(lengths):  # no episode has a name yet: none is wanted
        return np.empty(0, np.int64)
    for kind in set(OUTCOMES) & set(condition.names) - table.outcomes:
        raise InputError(f"{caller}: {kind!r} needs one of the columns {list(OUTCOMES[kind])}, and none is stored")
    return np.flatnonzero(condition.select(table.names, table.values, len(lengths)) & stored)


def _truth(answer: Any, caller: str) -> bool:
    try:
        return bool(answer)
    except (TypeError, ValueError):
        raise InputError(f"{caller}: the function returned {answer!r:.80}, expected True or False") from None
