"""Rows stored alone: whatever a kill or a power cut leaves, every call that returned is there, whole and in its place.

Scripts of calls run on a recording disk. After each change of the disk a kill, and several power cuts, are tried: what
is left is opened by the real code, which is killed and cut in its turn. Row number n has n in all its columns and lies
at position n.
"""

import contextlib
import errno
import os
from dataclasses import dataclass, replace

import numpy as np
import pytest

import ringmap
from ringmap import TransitionReplayBuffer
from ringmap.buffers.steps import StepRing
from ringmap.errors import EnvironmentFault, RingmapError
from ringmap.storage.columns.schema import Schema
from ringmap.storage.commit import commit as commit_module
from ringmap.storage.commit import store as store_module
from ringmap.storage.commit.group import OpenGroup
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.records.step_file import StepFile, read_steps
from ringmap.storage.ring.ring import Position
from tests.disks import FaultyDisk, FullDisk, Through, ram_folder
from tests.faults.crash.harness import LEVELS, Draw, Subject, at_length, crash
from tests.tiers import few

__all__ = ["crash"]

SCHEMA = Schema.of({"n": np.zeros((1, 3), np.int64), "byte": np.zeros(1, np.uint8)})


def rows_of(first, count):
    n = np.arange(first, first + count)
    return {"n": np.stack([n, n * 3, n * 5], axis=1), "byte": (n % 251).astype(np.uint8)}


@dataclass(frozen=True)
class Expect:
    """What a crash may show. `low`: rows that must have been stored; `calls`: numbers of rows at which a call ended, or
    may have;
    `synced`: rows that no power cut takes; `gone`: those that an earlier one took."""

    low: int = 0
    calls: frozenset = frozenset([0])
    synced: int = 0
    gone: frozenset = frozenset()


def look(ring, capacity):
    """Return the numbers of the rows, each proven by all its bytes, and compared with its position."""
    ids = ring.ids()
    if not len(ids):
        return []
    rows = ring.rows(ids)
    assert (rows["n"][:, 0] == ids).all(), f"{rows['n'][:, 0]} at positions {ids}"
    for name, expected in rows_of(0, 0).items():
        del expected
        want = rows_of(int(ids[0]), int(ids[-1] - ids[0] + 1))[name][ids - ids[0]]
        assert (rows[name] == want).all(), f"{name} of {ids}"
    assert len(ids) <= capacity
    return ids.tolist()


class Calls:
    """Transitions in place of rows: one call per `append`, whose rows are its lanes; most lanes go on.

    Row n led to `[n, 7]`. It begins with what row n - lanes led to if its lane goes on, else with `[n, 0]`.
    """

    def __init__(self, capacity, path, disk, durability):
        kind = Through(TransitionReplayBuffer, disk)
        self.buf = kind(
            capacity,
            (2,),
            device=None,
            obs_dtype=np.int64,
            path=path,
            durability=durability,
            sync_every_s=0,
            seed=3,
            sampler=lambda step, buffer, size, history_len: np.arange(size),
        )
        self.ring = self.buf._ring
        self.engine, self.buffer, self.close = self.ring.engine, self.buf, self.buf.close
        self.lanes = 0

    @property
    def added(self):
        return self.ring.added

    def ids(self):
        return self.ring.ids()

    def append(self, rows):
        n = rows["n"][:, 0]
        began = np.stack([n, n * 0], 1)
        goes_on = (n % 4 != 0)[:, None]
        obs = np.where(goes_on, np.stack([n - len(n), n * 0 + 7], 1), began)
        if len(n) == 1:  # the way of single steps
            self.buf.add(obs[0], int(n[0]), float(n[0]), np.array([n[0], 7]), False)
        else:
            self.buf.add(obs, n, n.astype(np.float32), np.stack([n, n * 0 + 7], 1), n < 0)

    def look(self, capacity, since):
        """Return the rows, having compared them; those from `since` on with what they led to.

        A power cut may take what the rows before it led to: then others are drawn in their place.
        """
        ids = self.ids()
        proven = ids >= since
        if len(ids):
            assert (self.ring.take("actions", ids) == ids).all()
        if proven.any():
            for n_step in (1, 3):
                self.buf.n_step, self.buf.gamma = n_step, 1.0
                self.buf._set_up(self.ring)
                batch = self.buf.sample(len(ids))
                drawn, after = batch["actions"], batch["next_observations"]
                assert (drawn == ids)[proven].all(), f"{drawn} of {ids}, from {since} on"
                assert (after[:, 1] == 7).all()
                steps = after[:, 0]
                assert (steps == drawn).all() if n_step == 1 else (steps >= drawn).all()
        assert len(ids) <= capacity
        return ids.tolist()


class Session(Subject):
    """A ring of rows."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.since = 0  # what the rows before led to may be lost

    @classmethod
    def nothing(cls, case):
        return Expect()

    def inherit(self, before, expect, boots):
        self.since = before.since

    capacity, group = 11, 5
    of_transitions = False

    def make(self, disk=None):
        if self.of_transitions:
            return Calls(self.capacity, self.path, disk or self.disk, self.level)
        return StepRing(
            self.capacity,
            path=self.path,
            group=self.group,
            schema=SCHEMA,
            durability=self.level,
            sync_every_s=0,
            disk=disk or self.disk,
            seed=3,
        )

    def read(self):
        if not self.cut and not self.of_transitions and os.path.exists(os.path.join(self.path, "manifest.json")):
            with (
                contextlib.suppress(RingmapError),
                contextlib.closing(StepRing.open(self.path, "r", disk=self.disk)) as reader,
            ):
                self.judge(reader, self.now, False, reader=True)

    def open(self):
        expect = self.now
        self.buf = self.make()
        added = self.judge(self.buf, expect, self.cut)
        self.buf.buffer.flush()  # what was taken of a group is not synced yet, as if just written
        gone = frozenset(range(added)) - frozenset(self.buf.ids().tolist())
        self.after(Expect(added, frozenset([added]), added, gone))
        self.opened()

    def judge(self, ring, expect, cut, reader=False):
        if isinstance(ring, Calls):
            if cut and not self.power:
                self.since = ring.added
            seen = ring.look(self.capacity, self.since)
        else:
            seen = look(ring, self.capacity)
        added = ring.added
        assert added in expect.calls or cut or reader, f"{added} rows, calls end at {expect.calls}"
        low = expect.synced if cut and not self.power else expect.low
        if not reader:
            assert added >= low, f"{added} rows, expected at least {low}"
            assert added <= max(expect.calls)
            least = max(added - self.capacity, 0)
            missing = set(range(least, added)) - set(seen) - expect.gone
            assert not missing or (cut and not self.power), f"{missing} are missing"
            assert not {n for n in missing if n < expect.synced}, f"{missing} were synced"
        return added

    def call(self, do, count=0, fault=None, synced=False):
        before = self.now
        end = max(before.calls) + count
        self.during(replace(before, calls=before.calls | {end}))
        returned = self.attempt(do, fault)
        if returned is None:
            return
        added = self.judge(self.buf, self.now, False)
        assert not returned or added == end, f"{added} rows after a call that ended at {end}"
        low = added if synced or self.power else before.synced
        self.after(Expect(added, frozenset([added]), low, before.gone))

    def step(self, rng):
        kind = rng.choices(["append", "flush", "sync", "close", "kill"], [12, 1, 1, 0.7, 0.7])[0]
        ring = self.buf
        if kind == "append":
            count = rng.randint(1, 3)
            rows = rows_of(ring.added, count)
            self.call(lambda: ring.append(rows), count, self.fault(rng))
        elif kind == "flush":
            self.call(ring.buffer.flush, synced=True)
        elif kind == "sync":
            self.call(ring.engine.owned.sync_behind)
        else:
            if kind == "close":
                self.call(ring.buffer.flush, synced=True)
                ring.close()
            else:
                self.kill()
            self.open()


class Transitions(Session):
    of_transitions = True


A_SCRIPT_A_LEVEL = pytest.mark.parametrize(("seed", "power"), [(0, False), (1, True)], ids=["process", "power"])


@A_SCRIPT_A_LEVEL
def test_a_call_that_returned_is_there(crash, power, seed):
    assert crash(Session, Draw(power), seed, samples=0, prefixes=0.1, kills=1).states > 20


@pytest.mark.slow
@A_SCRIPT_A_LEVEL
def test_a_transition_that_was_added_is_there_with_its_next_observation(crash, power, seed):
    assert crash(Transitions, Draw(power), seed, samples=0, prefixes=0.05, kills=1).states > 10


@pytest.mark.campaign
@LEVELS
@pytest.mark.parametrize("session", [Session, Transitions])
def test_of_many_scripts(crash, power, session):
    at_length(lambda seed: crash(session, Draw(power), seed, samples=2, share=0.06, kills=1).states)


def test_a_full_disk_stores_nothing_of_a_call():
    """Whichever change of an append fails, nothing of it counts."""
    with ram_folder() as folder:
        disk = FaultyDisk()
        session = Session(Draw(False), str(folder), {}, 1, Expect(), False)
        ring = session.make(disk)
        for only in ("reserve", "mkdir", "create", "write"):
            disk.fail(1, OSError(errno.ENOSPC, "planted"), only=only)
            with pytest.raises(EnvironmentFault):
                ring.append(rows_of(ring.added, 2))
            disk.lift()
            assert ring.added == 0
            assert look(ring, 11) == []
        ring.append(rows_of(0, 2))
        ring.append(rows_of(2, 2))
        disk.fail(1, OSError(errno.ENOSPC, "planted"), only="write")
        with pytest.raises(EnvironmentFault):
            ring.append(rows_of(4, 1))
        disk.lift()
        assert look(ring, 11) == [0, 1, 2, 3]
        ring.close()


def test_rows_after_a_clear():
    with ram_folder() as folder:
        session = Session(Draw(False), str(folder), {}, 1, Expect(), False)
        ring = session.make()
        ring.append(rows_of(0, 3))
        ring.buffer.clear()
        assert (len(ring), ring.added) == (0, 3)
        ring.append(rows_of(3, 2))
        ring.engine.commit_pending("a test")
        ring.append(rows_of(5, 2))
        assert look(ring, 11) == [3, 4, 5, 6]
        assert ring.buffer.check() == []
        ring.engine.owned.abandon()
        assert ringmap.check(folder / "buf") == []
        with contextlib.closing(StepRing.open(folder / "buf", "r")) as reader:
            assert look(reader, 11) == [3, 4]
        ring = session.make()
        assert look(ring, 11) == [3, 4, 5, 6]
        ring.close()
        assert os.listdir(folder / "buf" / "open") == []


def steps_after_a_shorter_group(folder):
    """Write three calls, then one call of another group over them; return how many rows the file holds."""
    disk = Disk()
    long, short = (OpenGroup(SCHEMA, None, Position(0), 5, [0] * 4) for _ in range(2))
    long.begin(disk, str(folder))
    for n in range(3):
        long.append(list(rows_of(n, 1).values()), 1)
    short.begin(disk, str(folder), long.file)
    short.append(list(rows_of(3, 1).values()), 1)
    found = read_steps(disk, long.file.folder, 16)
    long.file.remove()
    assert found.fault == ""
    return found.count


def test_frames_of_an_earlier_group_are_not_taken(tmp_path):
    assert steps_after_a_shorter_group(tmp_path) == 1


def test_readers_see_rows_with_their_commit():
    with ram_folder() as folder:
        ring = Session(Draw(False), str(folder), {}, 1, Expect(), False).make()
        with contextlib.closing(StepRing.open(folder / "buf", "r")) as reader:
            ring.append(rows_of(0, 1))
            assert (reader.buffer.refresh(), len(reader)) == (False, 0)
            ring.append(rows_of(1, 1))
            assert (len(ring), reader.buffer.refresh(), len(reader)) == (2, False, 0)
            ring.engine.owned.commit_behind()
            assert not reader.buffer.refresh(), "a call would have committed it, and none is late yet"
            ring.engine.owned.pending.begun_at -= 1
            ring.engine.owned.commit_behind()
            assert (reader.buffer.refresh(), look(reader, 11)) == (True, [0, 1])
        ring.append(rows_of(2, 3))
        child = os.fork()
        if not child:  # they were committed before the fork
            os._exit(int(len(ring) != 5))
        assert os.waitpid(child, 0)[1] == 0
        assert look(ring, 11) == [0, 1, 2, 3, 4]
        ring.close()


@pytest.mark.parametrize("call", [lambda ring: ring.add(rows_of(10, 5)), lambda ring: ring.engine.clear("clear")])
def test_a_state_that_cannot_be_written_lags_by_one_record(tmp_path, call):
    """A call commits the open group, and then its own record."""
    path, disk = tmp_path / "buf", FullDisk("write", where="state.bin")
    ring = StepRing(11, path=path, group=5, schema=SCHEMA, sync_every_s=0, disk=disk)
    ring.add(rows_of(0, 5))
    ring.append(rows_of(5, 5))
    disk.full = True
    with pytest.raises(EnvironmentFault, match="state.bin"):
        call(ring)
    ring.engine.owned.abandon()  # as a kill does
    assert ringmap.check(path) == []
    ring = StepRing(11, path=path, group=5, schema=SCHEMA)
    assert look(ring, 11) == list(range(10))
    ring.close()


# -- controls: each guard taken out, and the campaign sees it ----------------------------------------


def any_record(record):
    """Let every group follow every record."""
    return [0, 0, 0, 0]


def commit_nothing_first(self, files, where, small):
    """Remove the file of a group before its commit."""
    if self.pending is not None:
        self.pending.file.remove()
        self.pending.file = None
    COMMIT(self, files, where, small)


COMMIT = Store.commit_group

PLANTED = {
    "any record": (False, [(store_module, "follows", any_record), (commit_module, "follows", any_record)]),
    "not synced": (True, [(StepFile, "sync", lambda self: None)]),
    "file removed first": (False, [(Store, "commit_group", commit_nothing_first)]),
    "left where it is": (False, [(Store, "_finish_groups", lambda self: None)]),
}


@pytest.mark.parametrize("name", few(PLANTED))
def test_the_campaign_sees_a_missing_guard(crash, monkeypatch, name):
    power, planted = PLANTED[name]
    for where, what, instead in planted:
        monkeypatch.setattr(where, what, instead)
    with pytest.raises((AssertionError, RingmapError, OSError)):
        for seed in range(20):
            crash(Session, Draw(power), seed, samples=1, share=0.06, prefixes=0.5, kills=1)
