"""Episodes committed in parts: whatever a kill or a power cut leaves, every part that was committed is there, once, in
its place.

Scripts of calls run on a recording disk. After each change of the disk a kill, and power cuts, are tried: what is left
is opened by the real code, which is killed and cut in its turn. A row carries its episode and its step.
"""

import itertools
import os
import random
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import RingmapError, RoleError
from ringmap.storage.commit import open_episode as open_module
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.open_episode import OpenEpisode
from ringmap.storage.commit.store import Store
from ringmap.storage.read.recovery import breaks_of
from ringmap.storage.records import table as table_module
from ringmap.storage.records.table import DROPPED, PART, RECORD, Record
from tests.disks import Through, ram_folder
from tests.faults.crash.harness import LEVELS, Draw, Subject, at_length, crash
from tests.faults.crash.recording import Always, Model, RecordingDisk, materialise
from tests.tiers import few

__all__ = ["crash"]

MAX_STEPS, SPARE, EVERY = 16, 6, 3
STEPS = 7
COLUMNS = {"number": ((), "i8"), "step": ((3,), "i8")}


def row(number, step):
    return {"number": number, "step": np.array([step, step * 3, number * 7 + step])}


def rows(number, first, stop):
    made = [row(number, step) for step in range(first, stop)]
    return {name: np.stack([one[name] for one in made]) for name in ("number", "step")}


@dataclass(frozen=True)
class Expect:
    """What a crash may show.

    `commits`: `(position, number, first step, stop)` of each part or episode; `low` to
    `high`: how many of them count; `synced`: those that no power cut takes; `streams`: (number, first step, least, most
    steps) of what is being recorded and not committed.
    """

    commits: tuple = ()
    low: int = 0
    high: int = 0
    synced: int = 0
    streams: frozenset = frozenset()


def stored(buf):
    """Return start -> `(number, first step, stop)` of each part, each proven by all its bytes."""
    source = buf.engine.source
    found = {}
    live = source.live
    for start, length in zip(live.starts.tolist(), live.lengths.tolist(), strict=True):
        steps = source.rows.take(list(source.rows.by_name), range(start, start + length))
        values = dict(zip(buf.column_names, steps, strict=True))
        number, first = int(values["number"][0]), int(values["step"][0, 0])
        for name, expected in rows(number, first, first + length).items():
            assert (values[name] == expected).all(), f"wrong bytes in {name} at {start}"
        found[start] = number, first, first + length
    return found


def look(buf):
    """Return what `stored` does, having looked at it in the way of users, too."""
    parts = stored(buf)
    joined = []
    for part in parts.values():
        before = [run for run in joined if run[0] == part[0] and run[2] == part[1]]
        if before:
            before[0][2] = part[2]
        else:
            joined.append(list(part))
    seen = []
    for i in range(buf.num_episodes):
        loaded = buf.load_episode(i)
        number, steps = loaded["number"], loaded["step"][:, 0]
        assert (number == number[0]).all()
        assert (np.diff(steps) == 1).all()
        seen.append([int(number[0]), int(steps[0]), int(steps[-1]) + 1])
    assert sorted(seen) == sorted(joined)
    for span in (2, 5):
        if (buf.lengths >= span).any():
            batch = buf.sample(16, history_len=span)
            assert (np.diff(batch["number"], axis=1) == 0).all()
            assert (np.diff(batch["step"][:, :, 0], axis=1) == 1).all()
    return parts


class Session(Subject):
    """A buffer whose episodes are committed in parts."""

    def __init__(self, case, root, tree, boot, *more, **options):
        super().__init__(case, root, tree, boot, *more, **options)
        self.begin = 0
        self.streams = {}
        self.numbers = itertools.count(1000 * boot)

    @classmethod
    def nothing(cls, case):
        return Expect()

    def make(self):
        return Through(ReplayBuffer, self.disk)(
            MAX_STEPS,
            path=self.path,
            durability=self.level,
            sync_every_s=0,
            seed=3,
            spare_rows=SPARE,
            interrupted="keep" if self.case.keep else "drop",
            schema=COLUMNS,
        )

    def open(self):
        self.buf = self.make()
        assert not self.buf.engine.source.live.whole.is_open.any(), "an episode is open"
        self.judge(self.look(number for number, *_ in self.now.streams), self.now, self.cut, opened=True)
        assert self.buf.check() == []
        self.buf.flush()
        self.streams = {}
        # From here on only what is stored now is known: positions that are empty stay so.
        commits = tuple(sorted((start, *part) for start, part in stored(self.buf).items()))
        self.after(Expect(commits, len(commits), len(commits), len(commits)))
        self.opened()
        self.begin = int(self.buf.engine.source.head)  # also of parts that were dropped

    def look(self, kept=()):
        """Return the parts that are stored; all of an episode have one ordinal."""
        seen = look(self.buf)
        source, found = self.buf.engine.owned, {}
        for number, ordinal in zip(seen.values(), source.live.origins.tolist(), strict=True):
            assert found.setdefault(number[0], ordinal) == ordinal, f"two ordinals: {seen}"
        self.origins.see(found, kept)
        return seen

    def judge(self, seen, expect, cut, opened=False):
        """Raise unless the parts `seen` may be there. Parts are `(start, number, first, stop)` once they were seen."""
        weak = cut and not self.power
        low = expect.synced if weak else expect.low
        most = expect.high
        why = []
        for count in range(low, most + 1):
            known, head = {}, 0
            for start, *part in expect.commits[:count]:
                known[start] = tuple(part)
                head = max(head, start + part[2] - part[1])
            extra = {start: part for start, part in seen.items() if start >= head}
            wrong = {s: p for s, p in seen.items() if s < head and known.get(s) != p}
            if wrong:
                why.append(f"{count}: {wrong} in place of {known}")
                continue
            end = max([head, *[s + p[2] - p[1] for s, p in extra.items()]])
            missing = {s for s in known if end - s <= MAX_STEPS} - set(seen)
            sure = {s for s, *_ in expect.commits[: expect.synced]}
            if missing and (not weak or missing & sure):
                why.append(f"{count}: {missing} of {known} are missing")
                continue
            left = [s for s in expect.streams if s[3]]
            kept = sorted(extra.values())
            if not opened or not self.case.keep:
                if kept:
                    why.append(f"{count}: {kept} from nowhere")
                    continue
                return
            taken = {part[0]: part for part in kept}
            fits = len(taken) == len(kept)
            for number, first, least, steps in left:
                part = taken.pop(number, None)
                if part is None:
                    fits &= weak or least == 0
                else:
                    fits &= part[1] == first and (weak or least <= part[2] - first) and part[2] - first <= steps
            if not fits or taken:
                why.append(f"{count}: kept {kept}, expected {left}")
                continue
            return
        raise AssertionError(f"{seen}: " + "; ".join(why))

    def call(self, do, part=None, also=None, fault=None, adds=0):
        """Make a call that may commit a part, and may change the streams to `also`."""
        before = self.now
        commits, streams = before.commits, before.streams
        if part is not None:
            commits = (*commits[: before.high], (int(self.buf.engine.source.head), *part))
        high = len(commits)
        changed = {s[0]: s for s in streams}
        for number, first, least, most in also or ():
            old = changed.get(number)
            if old is not None and old[1] == first:
                least = min(least, old[2])
            changed[number] = number, first, least, most
        self.during(replace(before, commits=commits, high=high, streams=frozenset(changed.values())))
        returned = self.attempt(do, fault)
        if part is not None and returned:
            head = int(self.buf.engine.source.head)
            assert {head} == set(self.ends(self.now, high)), "a part is missing"
        return bool(returned)

    def settled(self, synced=False):
        """Note what is stored now, after a call."""
        before = self.now
        seen = self.look()
        self.judge(seen, before, False)
        fits = [
            n
            for n in range(before.low, before.high + 1)
            if set(self.ends(before, n)) == {int(self.buf.engine.source.head)}
        ]
        count = fits[-1] if fits else before.high
        known = before.commits[:count]
        self.after(
            Expect(
                known,
                count,
                count,
                count if synced or self.power else min(before.synced, count),
                self.recorded(),
            )
        )

    def ends(self, expect, count):
        return [max([self.begin, *[s + p[2] - p[1] for s, *p in expect.commits[:count]]])]

    def recorded(self):
        return frozenset(
            (number, stream.num_steps - stream._pending, stream._pending, stream._pending + 1)
            for number, stream in self.streams.items()
            if stream._end[1] or stream._part.number
        )

    def step(self, rng):
        kinds = ["append", "begin", "finish", "abandon", "write", "flush", "sync", "close", "kill"]
        kind = rng.choices(kinds, [12, 1, 1.5, 0.5, 1.5, 0.5, 0.5, 0.5, 0.7])[0]
        if kind in ("append", "finish", "abandon") and not self.streams:
            kind = "begin"
        if kind == "begin" and len(self.streams) > 1:
            kind = "append"
        getattr(self, "do_" + kind)(rng)

    def do_begin(self, rng):
        self.streams[next(self.numbers)] = self.buf.begin_episode(commit_every=EVERY)

    def do_append(self, rng):
        number = rng.choice(sorted(self.streams))
        stream = self.streams[number]
        step = stream.num_steps
        first = stream.num_steps - stream._pending
        # More than EVERY, after a call that was interrupted between its step and its commit.
        part = (number, first, step + 1) if step + 1 - first >= EVERY else None
        also = [(number, first, 0, step + 1 - first)]
        self.call(lambda: stream.append(row(number, step)), part, also, self.fault(rng, 9))
        if self.streams.get(number) is stream:
            self.settled()

    def do_finish(self, rng):
        number = rng.choice(sorted(self.streams))
        stream = self.streams[number]
        step, pending = stream.num_steps, stream._pending
        part = (number, step - pending, step) if pending else None
        also = [(number, step - pending, 0, pending + 1)]
        done = self.call(lambda: stream.finish(terminated=True), part, also, self.fault(rng, 9))
        if self.streams.get(number) is not stream:
            return  # it was opened again
        if not done:
            stream.finish(terminated=True)
        del self.streams[number]
        self.settled()
        with pytest.raises(RoleError):
            stream.finish()

    def do_abandon(self, rng):
        number = rng.choice(sorted(self.streams))
        stream = self.streams.pop(number)
        also = [(number, stream.num_steps - stream._pending, 0, stream._pending + 1)]
        self.call(stream.abandon, None, also)
        self.settled()
        if not self.power:  # its removal is not synced
            self.after(replace(self.now, streams=self.now.streams | {also[0]}))

    def do_write(self, rng):
        number, length = next(self.numbers), rng.randint(1, SPARE)
        do = lambda: self.buf.write_episode(rows(number, 0, length))  # noqa: E731
        buf = self.buf
        self.call(do, (number, 0, length), (), self.fault(rng, 9))
        if self.buf is buf:
            self.settled()

    def do_flush(self, rng):
        self.call(self.buf.flush)
        self.settled(synced=True)

    def do_sync(self, rng):
        self.call(self.buf.engine.owned.sync_behind)
        self.settled()

    def do_close(self, rng):
        self.call(self.buf.close)
        self.after(replace(self.now, synced=self.now.high))
        self.open()

    def do_kill(self, rng):
        self.kill()
        self.open()


def drawn(seed, power):
    return Draw(power, 12, keep=bool(seed % 2))


@LEVELS
@pytest.mark.parametrize("seed", few(range(2)))
def test_a_part_that_was_committed_is_there_once(crash, power, seed):
    assert crash(Session, drawn(seed, power), seed, samples=0, prefixes=0.1, share=0.01, kills=1).states > 10


@pytest.mark.campaign
@LEVELS
def test_of_many_scripts(crash, power):
    at_length(lambda seed: crash(Session, drawn(seed, power), seed, samples=2, share=0.06, kills=1).states)


# -- parts that are dropped before their seed is played again -------------------------------------------


def dropped_and_again(folder, power, every, samples=1):
    """Drop what was left of an episode and record it again; cut the power after every change, and look for steps of
    both."""
    path = os.path.join(folder, "script")
    os.mkdir(path)
    disk = RecordingDisk(path, 1, {})
    buf = Through(ReplayBuffer, disk)(
        MAX_STEPS,
        path=os.path.join(path, "buf"),
        durability="power" if power else "process",
        sync_every_s=0,
        spare_rows=SPARE,
        schema=COLUMNS,
    )
    episode = buf.begin_episode(commit_every=EVERY)
    for step in range(STEPS):
        episode.append(row(1, step))
    episode.abandon()
    buf.flush()
    chosen = len(disk.log)
    buf.engine.drop_chains([chain.name for chain in buf.engine.episodes.chains()], "here")
    assert buf.num_episodes == 0
    episode = buf.begin_episode(commit_every=EVERY)
    for step in range(STEPS):
        episode.append(row(2, step))
    episode.finish()
    buf.flush()
    model, rng, both = Model({}), random.Random(every), {0: 0, 1: 0, 2: 0}
    for prefix, change in enumerate(disk.log):
        model.apply(change)
        if prefix < chosen or (prefix % every and prefix + 1 < len(disk.log)):
            continue
        for number, way in enumerate([Always(0), Always(1), *[rng] * samples]):
            tree = model.crash(way)
            tree.get("buf", {}).pop("lock", None)
            root = os.path.join(folder, f"{prefix}-{number}")
            materialise(tree, root)
            with Through(ReplayBuffer, RecordingDisk(root, 2, tree))(
                MAX_STEPS, path=os.path.join(root, "buf"), sync_every_s=0
            ) as left:
                found = {int(e["number"][0]) for e in left.episodes()}
                assert len(found) < 2, f"after {prefix} of {len(disk.log)} changes both are there"
                both[sum(found)] += 1
                assert left.check() == []
                left.close()
            shutil.rmtree(root)
    buf.close()
    return both


@pytest.mark.slow
@LEVELS
def test_a_seed_that_is_played_again_is_not_there_twice(power):
    with ram_folder() as folder:
        assert all(dropped_and_again(folder, power, 3).values())


@pytest.mark.campaign
@LEVELS
def test_a_seed_is_not_there_twice_after_any_cut(power):
    with ram_folder() as folder:
        assert all(dropped_and_again(folder, power, 1, samples=10).values())


@pytest.mark.slow
def test_a_drop_that_is_not_synced_is_seen(monkeypatch):
    """The control: the flags are written after all else."""
    late = []

    def drop_later(self, chains, where):
        records, _ = self.table.read_range(1, self.seq)
        late.extend(records["seq"][records["length"] > 0].tolist())
        self.clear()

    def flush_first(self, *args, **words):
        FLUSH(self, *args, **words)
        for seq in late:
            record = self.table.read(seq)
            self.table.write(record._replace(flags=record.flags | table_module.DROPPED))

    monkeypatch.setattr(Store, "drop_chains", drop_later)
    monkeypatch.setattr(Store, "clear", lambda self: self.live.evict_before(self.head))
    monkeypatch.setattr(Store, "flush", flush_first)
    with ram_folder() as folder, pytest.raises(AssertionError, match="both are there"):
        dropped_and_again(folder, True, 1)


FLUSH = Store.flush


# -- controls: each guard taken out, and the campaign sees it ----------------------------------------


def leave_them_open(monkeypatch):
    """Don't end the episodes that a killed process left open."""
    monkeypatch.setattr(open_module, "_end_chains", lambda store: None)


def forget_the_chain(monkeypatch):
    """Keep the steps of a part as an episode of its own."""
    monkeypatch.setattr(open_module, "_last_part", lambda store, part: table_module.PartOf(is_last=True))


def keep_what_was_committed(monkeypatch):
    """Don't name the file of a part in its commit."""
    real = CommitFiles.carry_finished

    def carry_finished(self, name):
        real(self, name)
        self.carried["finished"].remove(name)
        OpenEpisode.was_committed.add(name)

    def go_on(self):
        if self._every is not None and self.id in OpenEpisode.was_committed:
            self._store.carried.setdefault("finished", []).append(self.id)
            GO_ON(self)
            self._store.carried["finished"].pop()

    monkeypatch.setattr(OpenEpisode, "was_committed", set(), raising=False)
    monkeypatch.setattr(CommitFiles, "carry_finished", carry_finished)
    monkeypatch.setattr(OpenEpisode, "_go_on", go_on)


def forget_the_steps_before(monkeypatch):
    """Commit each part as if it were the first one."""
    real = Store.commit_now

    def commit_now(self, files, new, stored=None):
        records = [
            one._replace(part=one.part and table_module.PartOf(is_last=one.part.is_last)) if one.length else one
            for one in new.records
        ]
        real(self, files, new._replace(records=records), stored)

    monkeypatch.setattr(Store, "commit_now", commit_now)


GO_ON = OpenEpisode._go_on


@pytest.mark.parametrize("plant", [leave_them_open, forget_the_chain, keep_what_was_committed, forget_the_steps_before])
def test_the_campaign_sees_a_missing_guard(crash, monkeypatch, plant):
    plant(monkeypatch)
    with pytest.raises((AssertionError, RingmapError, LookupError)):
        for seed in (1, 3, 5, 7, 9):  # which keep what was appended
            crash(Session, drawn(seed, True), seed, samples=0, prefixes=0.1, share=0, kills=1)


def test_steps_of_a_part_that_was_dropped_may_be_stored_again():
    """A power cut damages a committed part, its steps are kept from their stream: the part is in the table twice, once
    as dropped."""

    def table(flags):
        parts = [
            Record(1, 0, 0, 1, length=3, part=PART, chain=0, behind=1),
            Record(
                2,
                3,
                0,
                1,
                length=3,
                flags=flags,
                part=PART,
                chain=0,
                step=3,
                number=1,
                previous=0,
                behind=1,
            ),
            Record(3, 6, 0, 1, length=3, part=PART, chain=0, step=3, number=1, previous=0, behind=1),
        ]
        made = np.zeros(len(parts), RECORD)
        for row, part in zip(made, parts, strict=True):
            for name, value in part._asdict().items():
                row[name] = value
        return made

    assert breaks_of(table(DROPPED)) == []
    assert breaks_of(table(0)) == [(3, "has steps of its chain that are stored before it")]
