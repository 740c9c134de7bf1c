"""Sessions on a buffer that is drawn from by priority: each clip's priority proves whose it is.

No two updates give the same priority, so one that stands says which clip it was given to, and when.
"""

import os
from dataclasses import replace

import numpy as np

from ringmap import ReplayBuffer
from ringmap.errors import NoClipsError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.sidecars import priorities
from tests.disks import Through
from tests.faults.crash.cases import STORAGES, Session, draw_step, look

STEPS = ("write", "sample", "clear", "flush", "sync", "sync_write", "reopen")


def draw(rng, max_steps, spare):
    """Draw a step; every third one is an update of priorities."""
    if rng.random() < 0.35:
        fault = None
        if rng.random() < 0.2:
            fault = rng.choice(["interrupt", "ENOSPC", "partial", "die", "EIO"]), rng.randint(1, 3)
        return "update", rng.random(), fault
    while True:
        step = draw_step(rng, max_steps, spare)
        if step[0] in STEPS:
            return step


def make_small(patch):
    """Make the file small, so that its log is full soon."""
    patch.setattr(priorities, "_PAGE", 64)
    patch.setattr(priorities, "_LOG_LEAST", 192)
    patch.setattr(priorities, "_PIECE", 8)


def clips_of(episodes):
    return [(number, t) for number, length in episodes for t in range(length)]


def priorities_in(buf):
    """Return clip -> priority of all that are stored."""
    clips = clips_of(look(buf))
    sampler = buf.sampler
    if not clips:
        return {}
    sampler(0, buf, 1, 1)  # without a note in the buffer's own state
    assert sampler.check() == []
    state = sampler.state_dict()
    at = buf.clip_window(1).positions(np.arange(len(clips))) - state["low"]
    return dict(zip(clips, state["values"][at].tolist(), strict=True))


class Kept:
    """What is known of priorities: `now`, clip -> those that a kill may show; `ever`, that a cut may; `first`, what a
    clip that nobody updated may have; `durable`, clips whose priority was synced: a cut may leave any other one as a
    new clip; `loose`: a sync failed, after which a kill and a cut may leave no leaves at all."""

    def __init__(self, now=None, ever=None, first=(1.0,), latest=4096.0, loose=False, durable=frozenset()):
        self.now, self.ever, self.first, self.latest = (
            now or {},
            ever or {},
            frozenset(first),
            latest,
        )
        self.loose, self.durable = loose, durable

    def given(self, clips, values):
        """Return what is known while an update is under way, and after it."""
        now, ever = dict(self.now), dict(self.ever)
        for clip, value in zip(clips, values, strict=True):
            ever[clip] = self.ever.get(clip, self.first) | {value}
            now[clip] = frozenset([value])
        stays = dict(zip(clips, values, strict=True))  # of a clip named twice the last value counts
        first = self.first | {max([*stays.values(), 1.0])}
        latest = min([self.latest, *values])
        during = {c: self.now.get(c, self.first) | now[c] for c in now}
        rest = first, latest, self.loose, self.durable
        return Kept(during, ever, *rest), Kept(now, ever, *rest)

    def fault(self, clip, value, cut):
        allowed = (self.ever if cut else self.now).get(clip, self.first)
        if value in allowed or (cut and (self.loose or clip not in self.durable) and value in self.first):
            return None
        return f"clip {clip} has priority {value}, expected one of {sorted(allowed)}"

    def seen(self, found):
        now = {clip: frozenset([value]) for clip, value in found.items()}
        ever = {c: self.ever.get(c, self.first) | now[c] for c in now}
        return Kept(now, self.ever | ever, self.first, self.latest, self.loose, self.durable)

    def synced(self):
        """Return what is known once all was forced to the disk: a cut shows no older ones."""
        return Kept(self.now, dict(self.now), self.first, self.latest, self.loose, frozenset(self.now))

    def failed(self):
        """Return what is known once a sync may have failed."""
        return Kept(self.now, self.ever, self.first, self.latest, True, self.durable)


class PrioritySession(Session):
    """A session on a buffer with a `PrioritizedSampler`. `Expect.also`: a `Kept`."""

    draw_step = staticmethod(draw)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.now.also is None:
            self.expects[0] = 0, replace(self.now, also=Kept())

    @classmethod
    def make_small(cls, patch, case):
        super().make_small(patch, case)
        make_small(patch)

    @classmethod
    def suited(cls, case):
        return replace(case, keep=False)

    def make(self):
        kind = Through(ReplayBuffer, self.disk)
        return kind(
            self.case.max_steps,
            path=os.path.join(self.root, "buf"),
            seed=7,
            storage=STORAGES[self.case.storage],
            sampler=PrioritizedSampler(rng=0),
            spare_rows=self.case.spare,
            durability="power" if self.power else "process",
            sync_every_s=0,
        )

    @classmethod
    def make_reader(cls, root, disk):
        kind = Through(ReplayBuffer, disk)
        return kind.open(os.path.join(root, "buf"), "r", sampler=PrioritizedSampler(rng=0))

    @classmethod
    def judge_reader(cls, buf, expect, cut):
        cls.compare(priorities_in(buf), expect.also, True)

    @staticmethod
    def compare(found, kept, cut):
        for clip, value in found.items():
            fault = kept.fault(clip, value, cut)
            assert fault is None, fault

    def judge_also(self, before):
        found = priorities_in(self.buf)
        self.compare(found, before.also, self.cut)
        return before.also.seen(found)

    def flushed(self, expect):
        return replace(expect, also=expect.also.synced())

    def do_sample(self):
        try:
            self.buf.sample(2)
        except NoClipsError:
            return
        found = priorities_in(self.buf)
        self.compare(found, self.now.also, False)

    def call(self, do, *args, fault=None, **options):
        if fault is not None and fault[0] in ("EIO", "ENOSPC", "partial", "sync"):
            self.after(replace(self.now, also=self.now.also.failed()))
        return super().call(do, *args, fault=fault, **options)

    def do_update(self, which, fault=None):
        """Update two clips, and one that was evicted, if there is any."""
        clips = clips_of(self.look())
        if not clips:
            return
        before = self.now
        priorities_in(self.buf)
        chosen = [clips[int(which * len(clips))], clips[int(which * 7919) % len(clips)]]
        places = self.buf.clip_window(1).positions(np.array([clips.index(c) for c in chosen]))
        rows = self.store_now.ring.rows
        gone = places[places >= rows] - rows  # the clips that were in these very places before
        known = before.also
        values = [known.latest - 1 - i for i in range(len(chosen))]
        asked = np.concatenate([places, gone]), values + [0.5] * len(gone)
        during, after = known.given(chosen, values)
        if fault is not None:
            during, after = during.failed(), after.failed()
        self.after(replace(before, also=during))
        done = self.call(lambda: self.buf.update_priorities(*asked), fault=fault, carries=False)
        if done:
            self.compare(priorities_in(self.buf), after, False)
            self.after(replace(self.now, also=after))
        elif self.now.also.now == during.now:
            self.compare(priorities_in(self.buf), during, False)
