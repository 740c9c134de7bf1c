"""What an actor did, in memory that it shares with its host: it outlives any death of the actor.

Every writing call has an entry: what, from which tick to which, and how it ended. From these the judge knows what may
be stored:

    DONE      the call returned: it is there, unless capacity or a clear took it
    REFUSED   the call raised an error that promises that nothing was changed: it is not there
    OPEN      the call never ended, or was interrupted: it is there or not

Ticks are handed out one by one, so that two calls overlap exactly if neither ended before the other began.
"""

import itertools
import mmap
import os

import numpy as np

OPEN, DONE, REFUSED = 0, 1, 2
WRITE, CLEAR, SNAPSHOT = 1, 2, 3

_ENTRIES, _FIELDS = 20_000, 6
_NOTES, _NOTE_NBYTES = 64, 6000
_NEVER = 1 << 60

TALLIES = (
    "writes",
    "writes refused",
    "clears",
    "snapshots",
    "flushes",
    "closes",
    "closes refused",
    "streams",
    "reads",
    "read rows",
    "reads refused",
    "signals",
    "raised",
    "forks",
    "replaced",
    "told so",
    "strangers",
    "adds",
    "updates",
    "begun",
)

_CALLS = [TALLIES.index(name) for name in ("writes", "reads", "reads refused", "adds", "flushes", "streams")]


class Ledger:
    """Entries, notes of violations and tallies. Made ahead of the fork.

    No lock: a signal handler may come between any two instructions, and a killed thread keeps what it holds.
    """

    def __init__(self):
        sizes = _ENTRIES * _FIELDS * 8, _NOTES * _NOTE_NBYTES, len(TALLIES) * 8
        block = mmap.mmap(-1, sum(sizes))
        self._entries = np.frombuffer(block, np.int64, _ENTRIES * _FIELDS).reshape(_ENTRIES, _FIELDS)
        self._notes = np.frombuffer(block, np.uint8, sizes[1], sizes[0]).reshape(_NOTES, -1)
        self._tallies = np.frombuffer(block, np.int64, len(TALLIES), sizes[0] + sizes[1])
        self._next, self._tick, self._note = (
            itertools.count(),
            itertools.count(1),
            itertools.count(),
        )

    # -- the actor ---------------------------------------------------------------------------

    def begin(self, kind, number=0, length=0, home=0):
        """Take note that a call begins; return its entry."""
        at = next(self._next)
        assert at < _ENTRIES, "the round is too long for its ledger"
        entry = self._entries[at]
        entry[1:] = number, length, next(self._tick), _NEVER, home << 4 | OPEN
        entry[0] = kind  # last: before, it is no entry
        return entry

    def end(self, entry, how):
        """Take note of how a call ended; one that was interrupted just does not end."""
        if how == OPEN:
            entry[4] = next(self._tick)
            return
        entry[5] = int(entry[5]) & ~15 | how
        entry[4] = next(self._tick)

    def tally(self, what, count=1):
        """Count. Two threads may lose a count: it is told, not judged."""
        self._tallies[TALLIES.index(what)] += count

    def violation(self, judge, text):
        """Note that something is wrong; `judge` is what noticed it."""
        # A forked child's counter goes on where its parent's was: each gets every eighth place from its own on.
        at = (next(self._note) * 8 + os.getpid() % 8) % _NOTES
        data = f"{judge}\n{text}".encode(errors="replace")[: _NOTE_NBYTES - 8]
        self._notes[at, 8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self._notes[at, :8].view(np.int64)[0] = len(data)

    @property
    def done(self):
        """How many calls were made so far, about."""
        return int(self._tallies[_CALLS].sum())

    @property
    def begun(self):
        """Whether the actor has set up its round."""
        return bool(self._tallies[TALLIES.index("begun")])

    # -- the host ----------------------------------------------------------------------------

    @property
    def entries(self):
        """`(kind, number, length, began, ended, how, home)` of each call."""
        used = self._entries[self._entries[:, 0] != 0]
        return [(*map(int, e[:5]), int(e[5]) & 15, int(e[5]) >> 4) for e in used]

    @property
    def violations(self):
        """`(judge, text)` of each violation that the actor noticed."""
        found = []
        for note in self._notes:
            if size := int(note[:8].view(np.int64)[0]):
                judge, _, text = note[8 : 8 + size].tobytes().decode(errors="replace").partition("\n")
                found.append((judge, text))
        return found

    @property
    def tallies(self):
        return dict(zip(TALLIES, self._tallies.tolist(), strict=True))


def faults(entries, stored, max_steps, home=0, began=_NEVER, since=0, slack=0):
    """Return what is wrong with the stored episodes, `(judge, text)`, if these calls were made.

    Args:
        entries: of the ledger.
        stored: `(number, length)` of each episode, oldest first.
        max_steps: of the buffer.
        home: of the buffer: entries of others do not count.
        began: tick; calls that began later do not count (of a snapshot: when it returned).
        since: tick; calls that ended later than this may count or not (of a snapshot: when it began). 0: none.
        slack: rows that may be evicted together, before there is no room for one of them.
    """
    calls = [e for e in entries if e[6] == home and e[3] < began]
    if since:
        calls = [e if e[4] <= since or e[5] == REFUSED else (*e[:4], _NEVER, OPEN, e[6]) for e in calls]
    writes = {e[1]: e for e in calls if e[0] == WRITE}
    clears = [e for e in calls if e[0] == CLEAR and e[5] != REFUSED]
    numbers = [number for number, _ in stored]
    found = []
    for number, length in stored:
        if number not in writes:
            found.append(("extra", f"episode {number} is stored, which no call wrote"))
        elif writes[number][5] == REFUSED:
            found.append(("refused", f"episode {number} is stored, but its call was refused"))
        elif writes[number][2] != length:
            found.append(("torn", f"episode {number} has {length} steps, of {writes[number][2]}"))
    if len(set(numbers)) != len(numbers):
        found.append(("twice", f"stored twice: {sorted(n for n in set(numbers) if numbers.count(n) > 1)}"))
    if found:
        return found
    there = [writes[number] for number in numbers]
    for one, two in itertools.pairwise(there):
        if two[4] < one[3]:
            found.append(("order", f"episode {two[1]} ended before {one[1]} began, and stands behind it"))
    total = sum(e[2] for e in there)
    if total > max_steps:
        found.append(("capacity", f"{total} steps are stored, of {max_steps}"))
    for clear in clears:
        before = [e[1] for e in there if e[4] < clear[3]]
        if clear[5] == DONE and before:
            found.append(("clear", f"{before} are stored, and a clear came after them"))
    first_end = min((e[4] for e in there), default=_NEVER)
    missing = [e for n, e in writes.items() if e[5] == DONE and n not in set(numbers)]
    for write in missing:
        if first_end < write[3]:  # neither capacity nor a clear takes it, and leaves an older one
            found.append(("lost", f"episode {write[1]} was stored, and is gone, but older ones are there"))
            continue
        if any(c[4] > write[3] and c[3] < first_end for c in clears):
            continue
        # What may stand behind it, and be gone as well, or have made its room and not be stored yet.
        rest = (e for n, e in writes.items() if n not in set(numbers) and e[5] != REFUSED)
        after = sum(e[2] for e in rest if e is not write and e[4] > write[3])
        if write[2] + total + after <= max_steps - slack:
            found.append(
                (
                    "lost",
                    f"episode {write[1]} of {write[2]} steps was stored, and is gone: {total} of {max_steps} are",
                )
            )
    return found
