"""How many copies a value needs that is written over: a model of one row, without any file.

A row has `copies` places. An update writes one of them; a kill may tear that write, and a power cut may lose, keep or
tear every write since the last sync. Each rule for the place to write is tried with all scripts of updates and syncs,
crashed everywhere:

    a kill may show    the newest value whose update returned, or the one under way
    a cut may show     a value at least as new as the one that was newest at the last sync

Two copies can't hold both without a sync in the middle of an update; three can.
"""

import itertools

import pytest

TORN = None


class Row:
    """`durable[i]`, and all that a cut may leave there: `pending[i]`; `cached[i]`: what every process sees."""

    def __init__(self, copies):
        self.durable, self.cached = [0] * copies, [0] * copies
        self.pending = [[] for _ in range(copies)]
        self.value = self.synced = self.num_syncs = 0

    def write(self, place):
        self.value += 1
        self.cached[place] = self.value
        self.pending[place].append(self.value)

    def sync(self):
        self.durable, self.pending = list(self.cached), [[] for _ in self.cached]
        self.synced, self.num_syncs = self.value, self.num_syncs + 1

    def cuts(self):
        """Return the values that are newest and whole on each disk that a cut may leave."""
        places = zip(self.durable, self.pending, strict=True)
        fates = [[kept, *writes, *([TORN] if writes else [])] for kept, writes in places]
        return {newest(disk) for disk in itertools.product(*fates)}


def newest(copies):
    return max((value for value in copies if value is not TORN), default=-1)


def oldest(row):
    return row.cached.index(min(row.cached))


def oldest_unless_durable(row):
    """Never write over the newest value that a sync has made durable."""
    keep = row.durable.index(max(row.durable))
    return min((i for i in range(len(row.cached)) if i != keep), key=lambda i: row.cached[i])


def oldest_after_a_sync(row):
    """Write over the oldest one, but sync first if a cut could then leave nothing whole."""
    place = oldest(row)
    if row.durable[place] == max(row.durable) and any(row.pending):
        row.sync()
    return place


def faults(copies, rule, length=6):
    """Return the first script that shows a wrong value after a kill, and after a cut; and the most syncs that updates
    made."""
    after_kill = after_cut = ""
    syncs = 0
    for size in range(1, length + 1):
        for script in map("".join, itertools.product("US", repeat=size)):
            row = Row(copies)
            for step in script[:-1]:
                row.write(rule(row)) if step == "U" else row.sync()
            if script[-1] == "S":
                continue
            returned = row.value
            place = rule(row)
            syncs = max(syncs, row.num_syncs - script.count("S"))
            low = row.synced
            torn = [TORN if i == place else value for i, value in enumerate(row.cached)]
            if newest(torn) != returned:
                after_kill = after_kill or script
            row.write(place)
            if not row.cuts() <= set(range(low, row.value + 1)):
                after_cut = after_cut or script
    return after_kill, after_cut, syncs


@pytest.mark.parametrize(
    ("copies", "rule", "expected"),
    [
        (1, oldest, ("U", "U", 0)),
        (2, oldest, ("", "UU", 0)),
        (2, oldest_unless_durable, ("UU", "", 0)),
        (2, oldest_after_a_sync, ("", "", 5)),
        (3, oldest, ("", "UUU", 0)),
        (3, oldest_unless_durable, ("", "", 0)),
    ],
)
def test_what_a_crash_may_show(copies, rule, expected):
    assert faults(copies, rule) == expected
