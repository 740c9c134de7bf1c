"""How many copies a value needs that is written over: a model of one row, without any file.

A row has `copies` places. An update writes one of them; a kill may tear that write, and a power cut may lose, keep or
tear every write since the last sync. Each rule for the place to write is tried with all scripts, crashed everywhere: of
updates (U) and syncs (S), and of updates that return after a sync of their own (P) and those that are interrupted
before it (I).

    a kill may show        the newest value whose update returned, or the one under way
    a cut at "power"       a value at least as new as the newest one whose update returned
    a cut at "process"     any earlier value: nothing to prove

Two copies hold all of these, if what an interrupted update left is synced before the next one begins.
"""

import itertools

import pytest

TORN = None


class Row:
    """`durable[i]`, and all that a cut may leave there: `pending[i]`; `cached[i]`: what every process sees."""

    def __init__(self, copies):
        self.durable, self.cached = [0] * copies, [0] * copies
        self.pending = [[] for _ in range(copies)]
        self.value = self.synced = 0

    def write(self, place):
        self.value += 1
        self.cached[place] = self.value
        self.pending[place].append(self.value)

    def sync(self):
        self.durable, self.pending = list(self.cached), [[] for _ in self.cached]
        self.synced = self.value

    def cuts(self):
        """Return the values that are newest and whole on each disk that a cut may leave."""
        places = zip(self.durable, self.pending, strict=True)
        fates = [[kept, *writes, *([TORN] if writes else [])] for kept, writes in places]
        return {newest(disk) for disk in itertools.product(*fates)}


def newest(copies):
    return max((value for value in copies if value is not TORN), default=-1)


def oldest(row):
    return row.cached.index(min(row.cached))


def after_a_kill(copies, length=6):
    """Return the first script of updates and syncs after which a kill in an update shows a wrong value."""
    for size in range(length):
        for script in map("".join, itertools.product("US", repeat=size)):
            row = Row(copies)
            for step in script:
                row.write(oldest(row)) if step == "U" else row.sync()
            place = oldest(row)
            torn = [TORN if i == place else value for i, value in enumerate(row.cached)]
            if newest(torn) != row.value:
                return script + "U"
    return ""


def after_a_cut(copies, syncs_first, length=6):
    """Return the first script of updates at "power" after which a cut in an update shows a wrong value."""
    for size in range(length):
        for script in map("".join, itertools.product("PI", repeat=size)):
            row = Row(copies)
            for step in [*script, ""]:
                if syncs_first and any(row.pending):
                    row.sync()
                row.write(oldest(row))
                if step == "P":
                    row.sync()
            if not row.cuts() <= set(range(row.synced, row.value + 1)):
                return script + "P"
    return ""


@pytest.mark.parametrize(("copies", "expected"), [(1, "U"), (2, "")])
def test_what_a_kill_may_show(copies, expected):
    assert after_a_kill(copies) == expected


@pytest.mark.parametrize(("copies", "syncs_first", "expected"), [(1, True, "P"), (2, False, "IP"), (2, True, "")])
def test_what_a_cut_may_show(copies, syncs_first, expected):
    assert after_a_cut(copies, syncs_first) == expected
