"""Sessions on a `DistillationBuffer`: rows, and labels that are given again.

Each `add` is one episode, of an actor of its own. A relabelling gives its rows a number that no other relabelling
gives, and the round: a row whose label and `label_round` are of two relabellings says so.
"""

import contextlib
import os
from dataclasses import replace

import numpy as np

from ringmap import DistillationBuffer, ReplayBuffer
from ringmap.errors import CorruptError, NoClipsError
from ringmap.storage.records.manifest import DISTILLATION
from tests.faults.crash.cases import Session, Torn, draw_step

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


def label_of(number, round):
    """Return the label that relabelling number `number` gives in a round; 0 are the first labels."""
    return number * 1000 + round


def look(buf):
    """Return the groups of rows as `((number, length), ...)`, and (number, t) -> the number of its relabelling, of the
    rows in the window."""
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
        given, rounds = rows["teacher_actions"], rows["label_round"]
        assert (given % 1000 == rounds).all(), f"labels of {number} are {given}, of rounds {rounds}"
        labels |= {(number, t): int(label) for t, label in zip(seen[:, 1].tolist(), given // 1000, strict=True)}
    assert sum(min(n, 10**6) for _, n in groups) >= len(buf)
    return tuple(groups), labels


class LabelSession(Session):
    """A session on a `DistillationBuffer`. `Expect.also`: row -> labels that a kill may show, and that a cut may."""

    draw_step = staticmethod(draw)
    has_groups = True
    lags = True  # it joins with the commit of rows of earlier calls

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
            rows = ReplayBuffer.open(path, kind=DISTILLATION, disk=disk)
            torn = None in rows.engine.owned._state_file.slots()
            rows.close()
            if torn:
                raise Torn from error
            raise

    @staticmethod
    def store_of(buf):
        return buf._ring.buffer.engine.owned

    def ordinals(self, seen):
        return {}  # it stores rows, not episodes

    @classmethod
    def look_at(cls, buf):
        return look(buf)[0]

    def put(self, number, length):
        self.buf.add(
            rows_of(number, length, self.buf.round),
            np.full(length, label_of(0, self.buf.round)),
            actor_id=np.full(length, number),
            dones=np.arange(length) == length - 1,
        )
        self.buf._ring.engine.commit_pending("a test")  # a commit for each call, as the model has it

    def sampling(self):
        state = self.buf.state_dict()
        return max(0, state["round"]), state["version"], repr(state["rng"])

    @staticmethod
    def compare(labels, expected):
        for row, label in labels.items():
            allowed = expected.get(row, {0})
            assert label in allowed, f"row {row} has label {label}, expected one of {allowed}"

    @staticmethod
    def after_a_cut(ever):
        """Return what rows may have, given their labels since the last sync: of three or more, the synced one was
        written over, and the others may be torn."""
        return {row: labels | {0} if len(labels) > 2 else labels for row, labels in ever.items()}

    @classmethod
    def judge_reader(cls, buf, expect, cut):
        now, ever = expect.also
        if cut and not expect.power:
            now = cls.after_a_cut(ever)
        cls.compare(look(buf)[1], now)

    def judge_also(self, before):
        labels = look(self.buf)[1]
        now, ever = before.also
        self.compare(labels, self.after_a_cut(ever) if self.cut and not before.power else now)
        for name in os.listdir(self.root):
            if name.startswith("copy") and not name.endswith(".saving"):
                with DistillationBuffer.open(os.path.join(self.root, name), retention="fifo") as copy:
                    found = copy.check()
                    assert not found, found
                    look(copy)
                copy.close()
        shown = {row: {label} for row, label in labels.items()}
        now, ever = now | shown, ever | {row: ever.get(row, {0}) | shown[row] for row in shown}
        return now, ever if not self.cut else now

    def flushed(self, expect):
        now, _ = expect.also
        return replace(expect, also=(now, now))

    def do_sample(self):
        with contextlib.suppress(NoClipsError):
            self.buf.batch(2)

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
        rows = [tuple(row) for p in parts for row in self.buf.rows(p)["student_observations"][:, :2].tolist()]
        self.newest_label += 1
        label, before = self.newest_label, self.now
        now, ever = before.also
        now, ever = ({**of, **{row: of.get(row, {0}) | {label} for row in rows}} for of in (now, ever))
        self.after(replace(before, also=(now, ever)))
        done = self.call(
            lambda: self.buf.relabel(parts, lambda rows: np.full(len(rows["ids"]), label_of(label, self.buf.round))),
            fault=fault,
            carries=False,
        )
        if not done and self.now.also[0] is not now:  # opened again: judged there
            return
        labels = look(self.buf)[1]
        self.compare(labels, now)
        if done:
            assert all(labels[row] == label for row in rows), f"{labels}, expected {label} of {rows}"
        now = now | {row: {of} for row, of in labels.items()} if done else now
        self.after(replace(self.now, also=(now, ever)))

    def do_save(self, fault=None):
        self.saved += 1
        path = os.path.join(self.root, f"copy{self.saved}-{len(self.disk.log)}")
        if self.buf._ring.schema is None:
            return
        if self.call(lambda: self.buf.save(path), fault=fault, carries=False):
            assert os.path.exists(path)
