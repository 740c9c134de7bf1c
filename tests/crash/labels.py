"""Sessions on a `DistillationBuffer`: two rings in one directory, rows and their later labels.

Each `add` is one episode, of an actor of its own. A relabelling gives every row of an episode one label
that no other relabelling gives, so an episode with two labels says that it was torn.
"""

import contextlib
import os
from dataclasses import replace

import numpy as np

from ringmap import DistillationBuffer, ReplayBuffer
from ringmap.errors import CorruptError, NoClipsError, RingmapError
from ringmap.storage.records.manifest import DISTILLATION
from tests.crash.cases import Session, Torn, draw_step

STEPS = ("write", "sample", "flush", "sync", "sync_write", "reopen")


def draw(rng, max_steps, spare):
    """Draw a step; every third one is about labels or rounds."""
    fault = None
    if rng.random() < 0.2:
        what = rng.choice(["interrupt", "ENOSPC", "partial", "die", "EIO"])
        fault = what, rng.randint(1, 12)
    kind = rng.choices(["relabel", "round", "save", ""], [3, 1, 0.5, 9])[0]
    if kind == "relabel":
        return kind, rng.random(), fault
    if kind:
        return kind, fault
    while True:
        step = draw_step(rng, max_steps, spare)
        if step[0] in STEPS:
            return (step[0], min(step[1], spare), *step[2:]) if "write" in step[0] else step


def rows_of(number, length, round):
    t = np.arange(length)
    noise = (number * 37 + t[:, None] * 11 + np.arange(3) * 53) % 251
    seen = np.concatenate([np.stack([t * 0 + number, t, t * 0 + round], 1), noise], 1)
    return seen.astype(np.int32)


def look(buf):
    """Return the groups of rows as `((number, length), ...)`, and number -> label of the rows in the window."""
    if buf._ring.schema is None:
        return (), {}
    groups = []
    for rows in buf._ring.buffer.episodes():
        seen = np.stack(rows["student_observations"])
        number, _, round = seen[0, :3].tolist()
        assert (seen == rows_of(number, len(seen), round)).all(), f"wrong rows of {number}"
        assert set(rows["round"]) == {round}
        assert set(rows["actor_id"]) == {number}
        groups.append((number, len(seen)))
    lengths, labels = dict(groups), {}
    for ids in buf.episodes():
        rows = buf.rows(ids)
        seen = rows["student_observations"]
        number, _, round = seen[0, :3].tolist()
        whole = rows_of(number, lengths[number], round)
        assert (seen == whole[-len(seen) :]).all(), f"wrong rows of {number}: {seen}"
        found = set(rows["teacher_actions"].tolist())
        assert len(found) == 1, f"episode {number} is relabelled in part: {rows['teacher_actions']}"
        labels[number] = found.pop()
    assert sum(min(n, 10**6) for _, n in groups) >= len(buf)
    return tuple(groups), labels


class LabelSession(Session):
    """A session on a `DistillationBuffer`. `Expect.also`: number -> labels that a kill may show, and that a cut may."""

    draw_step = staticmethod(draw)
    has_groups = True
    lags = True  # it joins with the commit of rows of earlier calls
    where = os.sep + "rows"

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.now.also is None:
            self.expects[0] = 0, replace(self.now, also=({}, {}))
        known = [label for of in self.now.also for labels in of.values() for label in labels]
        self.newest_label = max(known, default=0)
        self.saved = 0

    @classmethod
    def suited(cls, case):
        return replace(case, max_steps=2 * case.spare, keep=False)

    def make(self):
        return DistillationBuffer(
            self.case.spare,
            path=os.path.join(self.root, "buf"),
            seed=7,
            retention="fifo",
            durability="power" if self.power else "process",
            sync_every_s=0,
            disk=self.disk,
        )

    @classmethod
    def make_reader(cls, root, disk):
        path = os.path.join(root, "buf")
        try:
            return DistillationBuffer.open(path, "r", retention="fifo", disk=disk)
        except CorruptError as error:
            rows = ReplayBuffer.open(os.path.join(path, "rows"), kind=DISTILLATION, disk=disk)
            torn = None in rows.engine.owned._state_file.slots()
            rows.close()
            if torn:
                raise Torn from error
            raise

    @classmethod
    def is_torn(cls, buf):
        try:
            buf._rows._find_log()
        except RingmapError:
            return True
        log = buf._rows.log
        torn = log is not None and None in log.log.engine.owned._state_file.slots()
        return torn or super().is_torn(buf)

    @staticmethod
    def store_of(buf):
        return buf._ring.buffer.engine.owned

    def ordinals(self, seen):
        return {}  # it stores rows, not episodes

    @classmethod
    def look_at(cls, buf):
        return look(buf)[0]

    def abandon(self):
        super().abandon()
        if self.buf._rows.log is not None:
            self.buf._rows.log.log.engine.owned.abandon()

    def put(self, number, length):
        self.buf.add(
            rows_of(number, length, self.buf.round),
            np.zeros(length, np.int64),
            actor_id=np.full(length, number),
            dones=np.arange(length) == length - 1,
        )
        self.buf._ring.engine.commit_pending("a test")  # a commit for each call, as the model has it

    def sampling(self):
        state = self.buf.state_dict()
        return max(0, state["round"]), state["version"], repr(state["rng"])

    @staticmethod
    def compare(labels, expected):
        for number, label in labels.items():
            allowed = expected.get(number, {0})
            assert label in allowed, f"episode {number} has label {label}, expected one of {allowed}"

    @classmethod
    def judge_reader(cls, buf, expect, cut):
        now, ever = expect.also
        if cut and not expect.power:
            now = {n: labels | {0} for n, labels in ever.items()}
        cls.compare(look(buf)[1], now)

    def judge_also(self, before):
        labels = look(self.buf)[1]
        now, ever = before.also
        expected = ever if self.cut and not before.power else now
        log = self.buf._rows.log
        if expected is ever and log is not None and log.log.engine.owned.tail:
            # The log has lapped: an older label may have gone before the newer ones were on the disk.
            expected = {n: labels | {0} for n, labels in ever.items()}
        self.compare(labels, expected)
        for name in os.listdir(self.root):
            if name.startswith("copy") and not name.endswith(".saving"):
                with DistillationBuffer.open(os.path.join(self.root, name), retention="fifo") as copy:
                    assert copy.check() == []
                    look(copy)
                copy.close()
        now = {number: {label} for number, label in labels.items()}
        return now, {n: ever.get(n, {0}) | now[n] for n in now} if not self.cut else now

    def flushed(self, expect):
        now, _ = expect.also
        return replace(expect, also=(now, now))

    def do_sample(self):
        with contextlib.suppress(NoClipsError):
            self.buf.batch(2)

    def do_sync(self, fault=None):
        super().do_sync(fault)
        if self.buf is not None and self.buf._rows.log is not None and fault is None:
            self.buf._rows.log.log.engine.owned.sync_behind()
            self.after(self.flushed(self.now))

    def do_round(self, fault=None):
        before = self.now
        state = self.sampling()
        begun = state[0] + 1, state[0] + 1, state[2]
        if self.buf.state_dict()["round"] < 0:
            begun = 0, 0, state[2]
        both = frozenset([state, begun])
        self.after(
            replace(
                before,
                newest_samplings=before.newest_samplings | both,
                samplings=before.samplings | both,
            )
        )
        if self.call(self.buf.start_round, fault=fault, syncs="surely"):
            assert self.sampling() == begun
            one = frozenset([begun])
            self.after(replace(self.now, newest_samplings=one, samplings=one))

    def do_relabel(self, which, fault=None):
        """Relabel some episodes, from one on."""
        _, labels = look(self.buf)
        parts = self.buf.episodes()
        if not parts:
            return
        parts = parts[int(which * len(parts)) :]
        numbers = [int(self.buf.rows(p[:1])["student_observations"][0, 0]) for p in parts]
        # A cut may bring rows back into the window, which no relabelling met: those of whole episodes only.
        lengths = dict(self.look())
        whole = [n for n in range(len(parts)) if len(parts[n]) == lengths[numbers[n]]]
        parts, numbers = [parts[n] for n in whole], [numbers[n] for n in whole]
        self.newest_label += 1
        label, before = self.newest_label, self.now
        now, ever = before.also
        now, ever = ({**of, **{n: of.get(n, {0}) | {label} for n in numbers}} for of in (now, ever))
        self.after(replace(before, also=(now, ever)))
        done = self.call(
            lambda: self.buf.relabel(parts, lambda rows: np.full(len(rows["ids"]), label)),
            fault=fault,
            carries=False,
        )
        if not done and self.now.also[0] is not now:  # opened again: judged there
            return
        labels = look(self.buf)[1]
        self.compare(labels, now)
        if done:
            assert all(labels[n] == label for n in numbers), f"{labels}, expected {label} of {numbers}"
        now = now | {n: {of} for n, of in labels.items()} if done else now
        self.after(replace(self.now, also=(now, ever)))

    def do_save(self, fault=None):
        self.saved += 1
        path = os.path.join(self.root, f"copy{self.saved}-{len(self.disk.log)}")
        if self.buf._ring.schema is None:
            return
        if self.call(lambda: self.buf.save(path), fault=fault, carries=False):
            assert os.path.exists(path)
