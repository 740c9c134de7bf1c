"""What a buffer does on a volume, and what it must show after each cut of it.

A life is a script of random calls of a subject of tests/faults/crash: episodes (streams, clear, flush, reopening),
transitions, priorities; it knows what each prefix of the log may show. It has `live(mounted, disk)`, once, and
`judge(mounted, disk, prefix)` for the disk that a cut left. Both run in processes of their own, so what `live` returns
is the life as it can be pickled: what it knows, and nothing open.

Not here: where it is cut and how often (campaign.py).
"""

import bisect
import functools
import random

import numpy as np

from tests.faults.crash import cases
from tests.faults.crash.cases import Case, Session
from tests.faults.crash.priorities import PrioritySession
from tests.faults.crash.transitions import TransitionSession

WIDTHS = (5, 700, 5000)
"""Bytes of a row's noise: many rows to a sector, rows across sectors, rows across pages."""


_SMALL = "which carries the small state, is damaged"
"""What `check` says at level process, until the next commit, of a `clear` whose own blob a cut took; and of successors
that one took."""


@functools.lru_cache(maxsize=4096)
def _rows(width, number, length):
    t = np.arange(length)
    obs = np.stack([np.full(length, number), t], axis=1).astype(np.int32)
    noise = (number * 37 + t[:, None] * 11 + np.arange(width) * 53) % 251 + 1
    return {"obs": obs, "noise": noise.astype(np.uint8)}


class Script:
    """Random calls of a subject, of a seed."""

    def __init__(self, seed, power, kind, storage):
        self.rng, self.kind = random.Random(seed), kind
        self.case = kind.suited(Case.draw(seed, power, storage, count=24, step=kind.draw_step))
        self.width = self.rng.choice(WIDTHS)
        self.expects = []
        self.marks = [(0, 0)]  # (position of the log, sequence number that a cut from there on must show)

    def recover_if_stale(self, patch):
        """Make the package and the cases use these sizes."""
        self.kind.make_small(patch, self.case)
        patch.setattr(cases, "rows_of", functools.partial(_rows, self.width))

    def _session(self, mounted, disk, expect, cut):
        session = self.kind(self.case, mounted.root, {}, 0, expect, cut)
        session.disk = disk
        session.power = expect.power
        return session

    def live(self, mounted, disk):
        self.session = session = self._session(mounted, disk, self.kind.nothing(self.case), False)
        session.open()
        self._run(session, [("write", 1 + i % self.case.spare) for i in range(self.case.warm)])
        self._run(session, self.case.steps)
        return self._let_go(session)

    def _let_go(self, session):
        session.kill()
        self.expects, self.session = session.expects, None
        return self

    def _run(self, session, steps):
        for step in steps:
            session.run([step])
            store = session.store_now
            self.marks.append((len(session.disk.log), store.seq if session.is_durable else store.files.state.synced))

    @property
    def moments(self):
        """Where in the log a call began or returned."""
        return [at for at, _ in self.expects]

    def judge(self, mounted, disk, prefix, goes_on=False):
        """Judge a cut disk; return the life that went on there, to be cut again, or None."""
        expect = next(e for at, e in reversed(self.expects) if at <= prefix)
        rng = random.Random(prefix)
        if rng.random() < 0.4:
            self._session(mounted, disk, expect, True).read()
        after = Script.__new__(Script)
        after.rng, after.kind, after.case, after.width = rng, self.kind, self.case, self.width
        session = after.session = self._session(mounted, disk, expect, True)
        session.open()
        found = session.store_now.seq
        least = self.marks[bisect.bisect_right(self.marks, prefix, key=lambda m: m[0]) - 1][1]
        assert found >= least, f"sequence number {found}, {least} was durable"
        findings = session.buf.check()
        known = [one for one in findings if _SMALL in one.what or "successors" in one.file]
        assert findings == ([] if session.power else known), findings
        after.told = bool(findings)
        after.marks = [(0, least), (len(disk.log), found)]
        if goes_on:
            after._run(session, [self.kind.draw_step(rng, self.case.max_steps, self.case.spare) for _ in range(4)])
        after._run(session, [("write", self.case.spare), ("reopen", "kill"), ("write", 1)])
        session.do_sample()
        assert session.buf.check() == []
        return after._let_go(session)


LIVES = {
    "memmap": (Session, "memmap"),
    "zarr": (Session, "zarr"),
    "mixed": (Session, "mixed"),
    "transitions": (TransitionSession, "zarr"),
    "priorities": (PrioritySession, "memmap"),
}


def new_life(seed, power, what):
    """Return a life: one of `LIVES`."""
    return Script(seed, power, *LIVES[what])
