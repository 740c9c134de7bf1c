"""What a buffer does on a volume, and what it must show after each cut of it.

    Script life     random calls of tests/faults/crash/cases.py (episodes, streams, clear, flush, reopening), and what
                    each prefix of the log may show
    Transitions     add, priorities, flush, reopening of a TransitionReplayBuffer

Each life has `live(mounted, disk)`, once, and `judge(mounted, disk, prefix)` for the disk that a cut left. Both run in
processes of their own, so what `live` returns is the life as it can be pickled: what it knows, and nothing open.

Not here: where it is cut and how often (campaign.py).
"""

import bisect
import functools
import os
import random

import numpy as np

from ringmap import TransitionReplayBuffer, Zarr
from ringmap.samplers import PrioritizedSampler
from tests.disks import Through
from tests.faults.crash import cases
from tests.faults.crash.cases import Case, Expect, Session, draw_step
from tests.faults.crash.transitions import by_record

WIDTHS = (5, 700, 5000)
"""Bytes of a row's noise: many rows to a sector, rows across sectors, rows across pages."""


_SMALL = "which carries the small state, is damaged"
"""What `check` says at level process, until the next commit, of a `clear` whose own blob a cut took."""


@functools.lru_cache(maxsize=4096)
def _rows(width, number, length):
    t = np.arange(length)
    obs = np.stack([np.full(length, number), t], axis=1).astype(np.int32)
    noise = (number * 37 + t[:, None] * 11 + np.arange(width) * 53) % 251 + 1
    return {"obs": obs, "noise": noise.astype(np.uint8)}


class Script:
    """Random calls, of a seed. `start`, of the life of another: what may be there when it begins."""

    def __init__(self, seed, power, storage, start=None):
        self.rng = random.Random(seed)
        self.case = Case.draw(seed, power, storage, count=24)
        self.width = self.rng.choice(WIDTHS)
        self.expects = []
        self.marks = [(0, 0)]  # (position of the log, sequence number that a cut from there on must show)

    def recover_if_stale(self, patch):
        """Make the package and the cases use these sizes."""
        self.case.recover_if_stale(patch)
        patch.setattr(cases, "rows_of", functools.partial(_rows, self.width))

    def _session(self, mounted, disk, expect, cut):
        session = Session(self.case, mounted.root, {}, 0, expect, cut)
        session.disk = disk
        session.power = expect.power
        return session

    def live(self, mounted, disk):
        self.session = session = self._session(mounted, disk, Expect(self.case.power), False)
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
            store = session.buf.engine.owned
            self.marks.append((len(session.disk.log), store.seq if session.power else store.files.state.synced))

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
        after.rng, after.case, after.width = rng, self.case, self.width
        session = after.session = self._session(mounted, disk, expect, True)
        session.open()
        found = session.buf.engine.owned.seq
        least = self.marks[bisect.bisect_right(self.marks, prefix, key=lambda m: m[0]) - 1][1]
        assert found >= least, f"sequence number {found}, {least} was durable"
        findings = session.buf.check()
        assert [one for one in findings if session.power or _SMALL not in one.what] == [], findings
        after.told = bool(findings)
        after.marks = [(0, least), (len(disk.log), found)]
        if goes_on:
            after._run(session, [draw_step(rng, self.case.max_steps, self.case.spare) for _ in range(4)])
        after._run(session, [("write", self.case.spare), ("reopen", "kill"), ("write", 1)])
        session.do_sample()
        assert session.buf.check() == []
        return after._let_go(session)


class Transitions:
    """Two lanes of steps into a small ring with priorities, at level power or process."""

    lanes, capacity, calls = 2, 24, 40

    def __init__(self, seed, power, storage):
        self.rng = random.Random(seed)
        self.power = power
        self.storage = {"memmap": "memmap", "zarr": Zarr("lz4", 5)}.get(storage, {"actions": Zarr("none", 3)})
        self.given = {}  # transition -> every priority it was ever given
        self.tops = {1.0}  # every one that was the highest for a while: what a new one gets
        self.stored = 0
        self.facts = [(0, 0, 0)]  # (position, calls that must be there, calls that may be)

    def recover_if_stale(self, patch):
        """Nothing to change: the sizes are its own."""

    def _open(self, mounted, disk):
        kind = Through(TransitionReplayBuffer, disk)
        return kind(
            self.capacity,
            (3,),
            device=None,
            path=os.path.join(mounted.root, "buf"),
            seed=3,
            sampler=PrioritizedSampler(alpha=0.0, rng=0),
            storage=self.storage,
            sync_every_s=0,
            durability="power" if self.power else "process",
        )

    def _add(self, buf, number):
        def seen(at):
            lane = np.arange(self.lanes)
            return np.stack([lane, lane * 0 + at, lane * 1000 + at], axis=1).astype(np.float32)

        last = number % 7 == 6
        buf.add(
            seen(number),
            np.full(self.lanes, number),
            np.full(self.lanes, number / 4),
            seen(number + (0.5 if last else 1)),
            np.zeros(self.lanes, bool),
            truncated=np.full(self.lanes, last),
        )

    def live(self, mounted, disk):
        self._start(mounted, disk, 0)
        self._go_on(self.calls)
        return self._stop()

    def _start(self, mounted, disk, stored):
        self._disk, self._at = disk, mounted
        self.buf, self.stored = self._open(mounted, disk), stored

    def _note(self, durable, possible):
        self.facts.append((len(self._disk.log), durable, possible))

    def _go_on(self, calls):
        for _ in range(calls):
            way = self.rng.random()
            durable = self.facts[-1][1]
            if way < 0.6 or not self.stored:
                self._note(durable, self.stored + 1)
                self._add(self.buf, self.stored)
                self.stored += 1
                self._note(self.stored if self.power else durable, self.stored)
            elif way < 0.8:
                batch = self.buf.sample(min(6, len(self.buf)))
                self._judge_batch(batch)
                fresh = {}
                for one, at in zip(batch["ids"], batch["observations"], strict=True):
                    key = (int(at[0]), int(at[1]))
                    value = np.float32(key[1] + 1 + key[0] / 2 + self.rng.randrange(8) / 64)
                    if self.tops == {1.0}:
                        value = np.float32(1e6)
                        self.tops.add(1e6)
                    self.given.setdefault(key, set()).add(float(value))
                    fresh[int(one)] = value
                self.buf.update_priorities(list(fresh), np.array(list(fresh.values())))
            elif way < 0.93:
                self.buf.flush()
                self._note(self.stored, self.stored)
            else:
                self.buf.close()
                self._note(self.stored, self.stored)
                self.buf = self._open(self._at, self._disk)

    def _stop(self):
        """Let go as a kill does."""
        self.buf._ring.buffer.engine.owned.abandon()
        self.buf = self._disk = self._at = None
        return self

    @property
    def moments(self):
        return [at for at, *_ in self.facts]

    def _judge_batch(self, batch):
        at, after = batch["observations"], batch["next_observations"]
        number = at[:, 1]
        lane = at[:, 0]
        assert (at[:, 2] == lane * 1000 + number).all(), "an observation of two steps"
        assert (batch["actions"] == number).all(), "the action of another step"
        assert (batch["rewards"] == number / 4).all(), "the reward of another step"
        led = number + np.where(number % 7 == 6, 0.5, 1)
        assert (after[:, 0] == lane).all(), "a next observation of another lane"
        assert (after[:, 1] == led).all(), (
            f"next observations of another step: {after[:, 1][after[:, 1] != led]} for {led[after[:, 1] != led]}"
        )

    def judge(self, mounted, disk, prefix, goes_on=False):
        at = bisect.bisect_right(self.facts, prefix, key=lambda fact: fact[0]) - 1
        least = self.facts[at][1]
        most = self.facts[min(at + 1, len(self.facts) - 1)][2]
        buf = self._open(mounted, disk)
        seen = []
        for actions in by_record(buf, "actions"):
            number = int(actions[0])
            assert (actions == [number] * self.lanes).all(), "half a call, or one of two"
            seen.append(number)
        assert seen == sorted(set(seen)), f"calls out of order: {seen}"
        assert all(number < most for number in seen), f"{seen}, {most} were begun"
        room = self.capacity // self.lanes
        needed = set(range(max(0, most - room), least))
        assert needed <= set(seen), f"{sorted(needed - set(seen))} are gone, {least} were durable"
        if self.power and seen:
            assert seen == list(range(seen[0], seen[-1] + 1)), f"a hole in {seen}"
        if len(seen) > 1 or self.power:  # what the only call led to may be lost, and then nothing can be drawn
            self._judge_batches(buf)
        findings = [one for one in buf.check() if self.power or "successors" not in one.file]
        assert findings == [], findings
        first = most + 7  # numbers that no priority was ever given to
        for number in range(first, first + 3):
            self._add(buf, number)
            self._judge_batches(buf)
        assert (found := buf.check()) == [], found
        buf.flush()
        buf.close()
        return None

    def _judge_batches(self, buf):
        for _ in range(3 if len(buf) else 0):
            batch = buf.sample(min(16, len(buf)))
            self._judge_batch(batch)
            self._judge_priorities(buf, batch)

    def _judge_priorities(self, buf, batch):
        leaves = buf.sampler.kept_priorities()
        values = leaves.values[batch["ids"] % len(leaves.values)]
        for value, at in zip(values, batch["observations"], strict=True):
            known = self.given.get((int(at[0]), int(at[1])), set()) | self.tops
            assert float(value) in known, f"priority {value} of {at}, which was never given"


LIVES = {"memmap": Script, "zarr": Script, "mixed": Script, "transitions": Transitions}


def new_life(seed, power, what):
    """Return a life: one of `LIVES`; transitions take turns with the storages."""
    if what == "transitions":
        return Transitions(seed, power, ("memmap", "zarr", "mixed")[seed % 3])
    return Script(seed, power, what)
