"""A buffer of episodes under the harness: what its calls make true, and what each crash may then show.

    Case       sizes, level and steps, all drawn from a seed
    Session    runs steps; knows, for each length of its log, what a crash there may show; others of
               its kind, of other buffers: transitions.py, priorities.py, labels.py

An episode is `(number, length)` and its rows follow from that, so that each byte proves itself.
"""

import contextlib
import errno
import functools
import itertools
import logging
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ringmap import ReplayBuffer, Zarr
from ringmap.errors import (
    EnvironmentFault,
    NoClipsError,
    NotFoundError,
    RingmapError,
    SyncFailedError,
    UnknownFormatError,
)
from ringmap.storage.read.episodes import origins
from tests.disks import Cut, Through, undisturbed
from tests.faults.crash.harness import Origins, Subject, Watcher

# -- episodes --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def rows_of(number, length):
    """Return the columns of an episode."""
    t = np.arange(length)
    obs = np.stack([np.full(length, number), t], axis=1).astype(np.int32)
    noise = (number * 37 + t[:, None] * 11 + np.arange(5) * 53) % 251 + 1
    return {"obs": obs, "noise": noise.astype(np.uint8)}


def episode(number, length):
    """Return an episode as it is written."""
    return {**rows_of(number, length), "_episode_data": {"number": number}}


def look(buf):
    """Return the stored episodes as `((number, length), ...)`, having compared every byte twice."""
    seen = []
    names = buf.column_names if buf.num_episodes else []
    quick = {name: buf.get_col_data(name) for name in names}  # no checksum is looked at here
    at = 0
    for steps in buf.episodes():
        length, number = len(steps["obs"]), int(steps["obs"][0][0])
        data = steps.get("_episode_data", {}).get("number")
        assert data in (None, number), f"data of {data} with the rows of {number}"
        for name, expected in rows_of(number, length).items():
            served = quick[name][at : at + length]
            assert (served == expected).all(), f"wrong bytes in {name} of {number}: {served}"
            assert (steps[name] == expected).all(), f"wrong bytes in {name} of {number}"
        seen.append((number, length))
        at += length
    assert [length for _, length in seen] == buf.lengths.tolist()
    return tuple(seen)


def ordinals_in(store, numbers):
    """Return number -> ordinal of the stored episodes, of which these are the numbers, in order."""
    found = origins(store)[1].tolist()
    assert len(found) == len(numbers)
    return dict(zip(numbers, found, strict=True))


def sampling_of(buf):
    state = buf.state_dict()
    return state["step"], state["rng"]["state"]["state"]


def size_of(episodes):
    return sum(length for _, length in episodes)


class Reports:
    """Counts the episodes of one store that are reported as dropped, ahead of filters that drop what is logged."""

    def __init__(self, where):
        self.where = where
        self.filters = logging.getLogger("ringmap").filters
        self.count = 0

    def filter(self, record):
        self.count += "dropped a damaged episode" in record.msg and self.where in record.getMessage()
        return True

    def __enter__(self):
        self.filters.insert(0, self)
        return self

    def __exit__(self, *_):
        self.filters.remove(self)


# -- what a crash may show ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Expect:
    """What may be there after a crash. A state is a tuple of episodes, oldest first.

    `newest`: what a kill may show, and at level power a cut: the last acknowledged state, or one
    of the call under way. `states`: what a cut may show at level process, but for the
    episodes in `droppable`, which no completed sync covers. `streams`: (number, steps that
    must be kept, steps that may be) of each episode that was being streamed; `ended`: of each that
    was finished since the last completed sync, and that a cut at level process may bring back. `also`: what
    a session of another buffer expects besides.
    """

    power: bool
    born: bool = False
    newest: frozenset = frozenset([()])
    states: frozenset = frozenset([()])
    droppable: frozenset = frozenset()
    newest_samplings: frozenset = frozenset()
    samplings: frozenset = frozenset()
    streams: tuple = ()
    ended: tuple = ()
    also: Any = None

    def streams_after(self, cut):
        """Return the streams that an opening may find."""
        return self.streams if self.power or not cut else (*self.streams, *self.ended)

    def shown(self):
        """Return the numbers of the episodes that somebody may have seen by now."""
        return {number for state in self.states | self.newest for number, _ in state}

    def numbers(self):
        """Return the numbers of all episodes that may be there: later ones are of calls that a crash undid."""
        return self.shown() | {number for number, *_ in (*self.streams, *self.ended)}

    def most_given(self, ordinals):
        """Return the greatest ordinal, by number, of the episodes that somebody may have seen by now: none of them is
        given again."""
        return max((ordinals[number] for number in self.shown() & ordinals.keys()), default=-1)

    def judge(self, seen, dropped, sampling, cut, max_steps):
        """Raise unless `seen` may be there, with so many reported as dropped (None: nobody counted)."""
        numbers = [number for number, _ in seen]
        assert len(set(numbers)) == len(numbers), f"stored twice: {seen}"
        strict = self.power or not cut
        for state in self.newest if strict else self.states:
            if self._fits(state, seen, dropped, strict, max_steps):
                break
        else:
            allowed = sorted(self.newest if strict else self.states)
            raise AssertionError(
                f"shows {seen}, dropped {dropped}; expected one of {allowed}, less {sorted(self.droppable)}, "
                f"streams {self.streams_after(cut)}, strict {strict}"
            )
        samplings = self.newest_samplings if strict else self.samplings
        if sampling is not None and self.born:
            assert sampling in samplings, f"sampling {sampling[0]}, expected {sorted(samplings)}"

    def _fits(self, state, seen, dropped, strict, max_steps):
        droppable = frozenset() if strict else self.droppable
        stored_numbers = {number for number, _ in state}
        streams = {n: s for n, *s in self.streams_after(not strict) if n not in stored_numbers}
        kept = tuple(e for e in seen if e[0] in streams)
        stored = seen[: len(seen) - len(kept)]
        if seen[len(stored) :] != kept or stored != tuple(e for e in state if e in stored):
            return False
        if not all(streams[n][0] * strict <= length <= streams[n][1] for n, length in kept):
            return False
        missing = [e for e in state if e not in stored]
        lost = [e for e in missing if e[0] not in droppable]
        absent = [(n, low) for n, (low, _) in streams.items() if strict and low and n not in dict(kept)]
        evicted = lost == missing[: len(lost)]
        if kept or (streams and not strict):  # one that is kept (and lost since) evicts the oldest
            return evicted and all(size_of(seen) + low > max_steps for _, low in absent)
        room = 0  # rows that were made free for what is not to be seen (yet)
        if streams and not absent:  # a stream that may be kept; a long one retires others first
            room = max(high for _, high in streams.values())
        elif dropped and seen and seen[-1][0] in droppable:
            room = seen[-1][1]  # lost rows, and kept from its stream: twice in the ring for a while
        if room and evicted and lost and size_of(seen) + lost[-1][1] + room > max_steps:
            return True
        # Lost, and then evicted by a group whose rows were not: only a recovery saw it.
        passed = sum(number < state[0][0] for number in droppable) if state else 0
        reported = dropped is None or len(missing) <= dropped <= len(missing) + len(streams) + passed
        return not lost and not absent and reported


# -- cases -------------------------------------------------------------------------------------------


STORAGES = {"memmap": "memmap", "zarr": Zarr("lz4", 3), "mixed": {"noise": Zarr("none", 2)}}
"""Ways to store columns: chunks are small, so that episodes share them and the ring ends in mid-chunk."""


SCHEMA = {"obs": ((2,), "int32"), "noise": ((5,), "uint8")}


@dataclass(frozen=True)
class Case:
    """A small buffer and what is done to it. `warm`: episodes written before anything is explored."""

    power: bool
    steps: tuple
    max_steps: int = 8
    spare: int = 3
    slots: int = 0
    segment: int = 700
    keep: bool = False
    warm: int = 0
    storage: str = "memmap"
    given: tuple = ()
    """Steps that are done before anything is explored; their writer is killed."""
    schema: Any = None

    @classmethod
    def draw(cls, seed, power, storage="memmap", count=9, step=None):
        step = step or draw_step
        rng = random.Random(seed)
        max_steps, spare = rng.randint(6, 16), rng.randint(2, 6)
        return cls(
            power,
            tuple(step(rng, max_steps, spare) for _ in range(count)),
            max_steps,
            spare,
            slots=rng.choice([0, 0, 1, 2]),
            segment=rng.choice([1, 700, 1500]),
            keep=rng.random() < 0.4,
            warm=rng.choice([0, 0, 5, 12, 30]),
            storage=storage,
        )

    def recover_if_stale(self, monkeypatch):
        """Make the package use this case's small sizes."""
        from ringmap.storage.read import recovery
        from ringmap.storage.records import manifest
        from ringmap.storage.records.blobs import Segments

        monkeypatch.setattr(manifest, "SPARE_SLOTS", self.slots)
        monkeypatch.setattr(Segments.__init__, "__defaults__", (self.segment,))
        monkeypatch.setattr(recovery, "mapped", lambda work, items, count, name: map(work, items))  # no threads
        undisturbed(monkeypatch.setattr, peeks=2)


def draw_step(rng, max_steps, spare):
    kind = rng.choices(
        [
            "write",
            "unsynced",
            "sample",
            "clear",
            "flush",
            "sync",
            "sync_write",
            "reopen",
            "begin",
            "append",
            "finish",
            "abandon",
        ],
        [10, 2, 3, 1.5, 1.5, 3, 1, 3, 1, 4, 2, 0.5],
    )[0]
    length = rng.randint(1, spare) if rng.random() < 0.7 else rng.randint(1, max_steps)
    fault = None
    if rng.random() < 0.2:
        what = rng.choice(["interrupt", "ENOSPC", "EIO", "partial", "die", "sync"])
        fault = (what, rng.randint(1, 3) if what == "sync" else rng.randint(1, 12))
    if kind in ("write", "unsynced"):
        return kind, length, fault
    if kind == "sync_write":
        return kind, length, rng.randint(1, 5)
    if kind == "reopen":
        return kind, rng.choice(["close", "kill"]), rng.random() < 0.15, fault
    if kind in ("sample", "begin"):
        return (kind,)
    return kind, fault


class Torn(Exception):
    """A reader can't even begin, as state.bin is torn: a writer mends it."""


class Session(Subject):
    """A buffer of episodes."""

    depth, looks = 2, 0.4
    has_groups = False
    """Whether a writer's opening stores rows that a reader does not see yet."""
    lags = False
    """Whether a call's sampling state may be stored with a later commit."""

    def __init__(self, case, root, tree, boot, expect, cut=True, fresh=True, cheats=None):
        super().__init__(case, root, tree, boot, expect, cut, fresh, cheats)
        self.streams = {}
        self.abandoned = {}  # streams whose end may not be on the disk
        self.ended = {}  # likewise, of those that were finished
        self.appended = {}  # a step may be there though its append was interrupted
        self.numbers = itertools.count(1 + max(expect.numbers(), default=0))
        self.first_looks = {}  # number -> changes before the look that first saw it

    @classmethod
    def nothing(cls, case):
        return Expect(case.power)

    @classmethod
    def make_small(cls, patch, case):
        case.recover_if_stale(patch)

    def inherit(self, before, expect, boots):
        self.power = expect.power
        known = before.origins.seen_of(expect.numbers() - before.given_after(expect))
        self.origins = Origins(known, expect.most_given(known) if boots and self.cut else -1)

    def given_after(self, expect):
        """Return the numbers of the episodes whose ordinals were given behind a recovery in the middle of a call, for a
        crash in that call that comes before it: the recovery put a manifest with the jump first."""
        place = next((place for place, one in self.expects if one is expect), 0)
        puts = [at for at, change in enumerate(self.disk.log) if change[0] == "rename" and at >= place]
        fresh = self.first_looks.keys() - self.origins.earlier.keys()
        return {number for number in fresh if puts and self.first_looks[number] > puts[0]}

    draw_step = staticmethod(draw_step)
    where = ""
    """What the folder of its rows has in its path, if there are others."""

    def make(self):
        """Open the buffer."""
        kind = Through(ReplayBuffer, self.disk)
        return kind(
            self.case.max_steps,
            path=self.path,
            seed=7,
            storage=STORAGES[self.case.storage],
            spare_rows=self.case.spare,
            durability=self.level,
            sync_every_s=0,
            interrupted="keep" if self.case.keep else "drop",
            schema=self.case.schema,
        )

    @classmethod
    def make_reader(cls, root, disk):
        """Open it as a reader."""
        kind = Through(ReplayBuffer, disk)
        return kind.open(f"{root}/buf", "r")

    @staticmethod
    def store_of(buf):
        """Return what stores its rows."""
        return buf.engine.owned

    @classmethod
    def is_torn(cls, buf):
        """Tell whether a slot of state.bin is torn, so that a reader must wait for a writer."""
        return None in cls.store_of(buf)._state_file.slots()

    @classmethod
    def look_at(cls, buf):
        """Return the stored episodes, having compared every byte."""
        return look(buf)

    def put(self, number, length):
        """Store an episode."""
        self.buf.write_episode(episode(number, length))

    def put_unsynced(self, number, length):
        """Store an episode without a sync."""
        self.buf.write_episode(episode(number, length), sync=False)

    @property
    def is_durable(self):
        """Whether a power cut loses no call that returned."""
        return self.power and not self.store_now.is_unsynced

    def sampling(self):
        return sampling_of(self.buf)

    def judge_also(self, before):
        """Judge what an opening shows besides the episodes; return what is to be expected of it from now on."""
        return before.also

    @classmethod
    def judge_reader(cls, buf, expect, cut):
        """Judge what a reader shows besides the episodes."""

    def flushed(self, expect):
        """Return what is expected once all was forced to the disk."""
        return expect

    def read(self):
        """Open as a reader and judge; None where nothing was born."""
        expect, cut = self.now, self.cut
        try:
            buf = self.make_reader(self.root, Watcher(self.disk.system.boot))
        except Torn:
            return None
        except (NotFoundError, UnknownFormatError):
            if expect.born:
                raise
            return None
        torn = self.is_torn(buf)
        try:
            seen = self.look_at(buf)
            if not torn:
                self.judge_reader(buf, expect, cut)
        except RingmapError:
            if not torn:  # a writer mends it
                raise
            return None
        finally:
            buf.close()
        optional = tuple((number, 0, high) for number, _, high in expect.streams)
        newest = expect.newest if cut else expect.newest | expect.states  # as far as state.bin tells
        replace(expect, streams=optional, newest=newest).judge(seen, None, None, cut, self.case.max_steps)
        return seen

    def agree(self, shown, seen):
        expect = self.expects[0][1]
        kept = {s[0] for s in expect.streams_after(True)} & {e[0] for e in seen}
        if shown is not None and not kept and not self.has_groups:
            assert shown == seen, f"a reader saw {shown}, the writer {seen}"

    def look(self, kept=()):
        seen = self.look_at(self.buf)
        self.origins.see(self.ordinals(seen), kept)
        for number, _ in seen:
            self.first_looks.setdefault(number, len(self.disk.log))
        return seen

    def ordinals(self, seen):
        """Return number -> ordinal of episodes."""
        return ordinals_in(self.store_now, [number for number, _ in seen])

    @property
    def store_now(self):
        return self.store_of(self.buf)

    def open_streams(self, also=None):
        """Return the streams as `Expect` has them; `also`: number -> (low, high)."""
        if not self.case.keep:
            return ()
        found = {n: (s.num_steps, max(s.num_steps, self.appended.get(n, 0))) for n, s in self.streams.items()}
        found |= {n: (0, high) for n, high in self.abandoned.items()} | (also or {})
        return tuple((n, low, high) for n, (low, high) in sorted(found.items()))

    def end_stream(self, number):
        """Note that a stream is stored, if it is one."""
        stream = self.streams.pop(number, None)
        if stream is not None and self.case.keep and not self.power:
            self.ended[number] = max(stream.num_steps, self.appended.get(number, 0))

    def ended_streams(self):
        return tuple((number, 0, high) for number, high in sorted(self.ended.items()))

    # -- opening and the end --

    def open(self, fault=None, power=None):
        """Open what is there, as a restarted program does, and judge what it shows."""
        before = self.now
        self.power = self.power if power is None else power
        if before.power and not self.power:  # what was streamed is stored at the new level
            optional = tuple((number, 0, high) for number, _, high in before.streams)
            before = replace(before, streams=optional)
        self.during(before)
        self.arm(fault)
        try:
            with Reports(self.where) as reports:
                self.buf = self.make()
        except (EnvironmentFault, KeyboardInterrupt, Cut):
            if not self.was_planted(fault):
                raise
            self.lift()
            self.fresh = False
            return self.open()
        self.lift(returned=True)
        kept = [number for number, *_ in (*before.streams, *before.ended)]
        sampling, seen = self.sampling(), self.look(kept)
        dropped = reports.count if self.fresh else None
        before.judge(seen, dropped, sampling, self.cut, self.case.max_steps)
        also = self.judge_also(before)
        if {e[0] for e in seen} & {s[0] for s in before.streams_after(self.cut)}:
            self.buf.flush()  # what was kept of a stream is not synced yet, as if just written
        self.streams, self.abandoned, self.ended, self.fresh = {}, {}, {}, True
        one, sampled = frozenset([seen]), frozenset([sampling])
        self.after(Expect(self.power, True, one, one, frozenset(), sampled, sampled, also=also))
        self.opened()
        return seen

    def arm(self, fault):
        """Let a call go wrong: `(what, at)`."""
        super().arm(None)
        if fault is not None:
            what, at = fault
            error = {"interrupt": KeyboardInterrupt("planted"), "die": Cut("planted")}.get(
                what,
                OSError(errno.EIO if what in ("EIO", "sync") else errno.ENOSPC, "planted", "planted"),
            )
            only = "sync" if what == "sync" else None
            self.disk.fail(at, error, only=only, partial=what == "partial")

    # -- calls --

    def call(
        self,
        do,
        ends=None,
        middles=(),
        number=None,
        fault=None,
        carries=True,
        syncs=False,
        streams=None,
        others=(),
    ):
        """Make one call, and note what may be seen during it and after it. Returns whether it returned.

        Args:
            do: the call.
            ends: the states that it may end in; None for the one there is.
            middles: states on the way.
            number: of the episode that it stores, or of the last one.
            others: of those before that one.
            fault: what is to go wrong, see `arm`.
            carries: whether the sampling state is stored with it.
            syncs: whether all that was there at its begin is on the disk at its end.
            streams: what may be there of streams meanwhile, number -> (low, high).
        """
        before, seq = self.now, self.store_now.seq
        sampled = frozenset([self.sampling()] if carries else [])
        fresh = frozenset() if number is None else frozenset([number, *others])
        during = replace(
            before,
            newest=before.newest | set(ends or ()) | set(middles),
            states=before.states | set(ends or ()) | set(middles),
            droppable=before.droppable | fresh,
            newest_samplings=before.newest_samplings | sampled,
            samplings=before.samplings | sampled,
            streams=self.open_streams(streams),
        )
        place = len(self.expects)
        self.during(during)
        self.arm(fault)
        try:
            do()
        except SyncFailedError:
            self.lift()
            self.close()
            self.open()
            return False
        except (EnvironmentFault, KeyboardInterrupt):
            if not self.was_planted(fault):
                raise
            self.lift()
            if self.struck is not None and self.struck.at % 2:  # a call comes first, or a look
                self.buf.flush()
            seen = self.look()
            assert seen in during.newest, f"{seen} after a fault, expected one of {during.newest}"
            if number in dict(seen):
                self.end_stream(number)
            self.after(
                replace(
                    during,
                    power=self.is_durable,
                    newest=frozenset([seen]),
                    streams=self.open_streams(streams),
                    ended=self.ended_streams(),
                )
            )
            return False
        except Cut:
            self.lift()
            self.kill()
            self.open()
            return False
        self.lift(returned=True)
        seen = self.look()
        one = frozenset([seen])
        assert one <= (before.newest if ends is None else set(ends)), f"{seen} after the call, expected {ends}"
        if number is not None:
            self.end_stream(number)
            if number not in dict(seen):  # there was nothing to sync, so nothing was written meanwhile
                sampled = frozenset()
        during = replace(  # known only now: where exactly it led
            during,
            newest=before.newest | one | set(middles),
            states=before.states | one | set(middles),
        )
        self.expects[place] = self.expects[place][0], during
        kept = sampled if sampled and not self.lags else before.newest_samplings | sampled
        done = replace(during, power=self.is_durable, newest=one, newest_samplings=kept)
        if syncs:
            synced = self.store_now.files.state.synced >= seq
            assert synced or syncs != "surely", "flush returned, and nothing was synced"
            if synced:
                self.abandoned.clear()
                self.ended.clear()
                late = fresh & {e[0] for e in seen}  # stored while the sync ran
                done = replace(
                    done,
                    states=before.newest | one if late else one,
                    droppable=late,
                    samplings=before.newest_samplings | done.newest_samplings,
                )
        self.after(replace(done, streams=self.open_streams(), ended=self.ended_streams()))
        return True

    def store(self, do, number, length, fault=None, **options):
        """Make a call that stores an episode, evicting what no longer fits."""
        (now,) = self.now.newest
        rests = {now[i:] for i in range(len(now) + 1)}
        ends = {(*r, (number, length)) for r in rests if size_of(r) + length <= self.case.max_steps}
        middles = rests if length > self.case.spare else ()
        return self.call(do, ends | options.pop("ends", set()), middles, number, fault=fault, **options)

    def close(self, fault=None):
        """Close; whatever that raises, the buffer is closed then."""
        before = self.now
        sampled = frozenset([self.sampling()])
        during = replace(
            before,
            newest_samplings=before.newest_samplings | sampled,
            samplings=before.samplings | sampled,
        )
        self.during(during)
        self.arm(fault)
        poisoned = self.store_now.files.poison is not None
        try:
            self.buf.close()
        except (EnvironmentFault, KeyboardInterrupt, Cut):
            if not self.was_planted(fault):
                raise
            if self.blows:
                self.lift()
                self.buf.close()
        else:
            if not poisoned:
                self.after(
                    replace(
                        before,
                        states=before.newest,
                        droppable=frozenset(),
                        samplings=sampled,
                        newest_samplings=sampled,
                        ended=(),
                    )
                )
                self.after(self.flushed(self.now))
        self.lift()
        self.kill()

    def settle(self):
        reader = None if self.has_groups else self.make_reader(self.root, Watcher(self.disk.system.boot))
        self.run([("write", 1)])
        if reader is not None:
            reader.refresh()
            assert self.look_at(reader) == self.look()
            reader.close()
        self.run([("reopen",)])
        assert self.buf.check() == []
        assert_tidy(self.store_now.paths.folder)

    # -- steps --

    def play(self, rng):
        self.run([("write", 1 + i % self.case.spare) for i in range(self.case.warm)])
        if self.case.given:
            self.run([*self.case.given, ("reopen", "kill")])
        self.explored_from = len(self.disk.log) if self.case.warm or self.case.given else 0
        self.prepared()
        self.run(self.case.steps)

    def prepared(self):
        """Nothing: what is explored begins."""

    def go_on(self, rng):
        self.run([self.draw_step(rng, self.case.max_steps, self.case.spare) for _ in range(3)])
        self.run([("write", 1 + self.case.spare // 2), ("reopen", "kill"), ("write", 1)])

    def run(self, steps):
        """Make the calls of a script."""
        for step in steps:
            self.trace.append((len(self.disk.log), *step))
            getattr(self, "do_" + step[0])(*step[1:])

    def do_write(self, length, fault=None):
        number = next(self.numbers)
        self.store(lambda: self.put(number, length), number, length, fault)

    def do_unsynced(self, length, fault=None):
        """At level power, write an episode that a later sync makes durable."""
        number, now = next(self.numbers), self.now
        if now.power:
            self.after(
                replace(now, power=False, states=now.newest, droppable=frozenset(), samplings=now.newest_samplings)
            )
        self.store(lambda: self.put_unsynced(number, length), number, length, fault)

    def do_sample(self):
        self.arm(None)
        try:
            with contextlib.suppress(NoClipsError):
                self.buf.sample(2)
        except KeyboardInterrupt:
            if not self.was_planted(None):
                raise
        self.lift()

    def do_clear(self, fault=None):
        self.call(self.buf.clear, {()}, fault=fault, carries=len(self.store_now.live) > 0)

    def do_flush(self, fault=None):
        if self.call(self.buf.flush, fault=fault, syncs="surely"):
            self.after(self.flushed(self.now))

    def do_sync(self, fault=None):
        self.call(self.store_now.sync_behind, fault=fault, carries=False, syncs=True)

    def do_sync_write(self, length, at):
        """Write an episode while a background sync is at its `at`-th sync."""
        number = next(self.numbers)
        left = itertools.count(1)

        def hook(change, path):
            ours = path.endswith("state.bin")  # the last one, when no other call is let in any more
            if change in ("sync", "sync_folder") and not ours and next(left) == at:
                self.disk.hook = None
                with ThreadPoolExecutor(1) as writer:  # the thread that syncs may not write
                    writer.submit(self.put, number, length).result()

        def do():
            self.disk.hook = hook
            try:
                self.store_now.sync_behind()
            finally:
                self.disk.hook = None

        self.store(do, number, length, ends=set(self.now.newest), syncs=True)

    def do_reopen(self, how="close", flip=False, fault=None):
        if how == "close":
            self.close(fault)
            fault = None
        else:
            self.kill()
        self.open(fault, power=not self.power if flip else None)

    def do_begin(self):
        if len(self.streams) < 2:
            self.streams[next(self.numbers)] = self.buf.begin_episode()

    def do_append(self, fault=None):
        if not self.streams:
            self.do_begin()
        number, stream = sorted(self.streams.items())[-1]
        steps = stream.num_steps
        if steps < self.case.max_steps:
            row = {name: v[steps] for name, v in rows_of(number, steps + 1).items()}
            also = {number: (steps, steps + 1)}
            self.appended[number] = steps + 1
            self.call(lambda: stream.append(row), fault=fault, carries=False, streams=also)

    def do_finish(self, fault=None):
        for number, stream in sorted(self.streams.items())[:1]:
            if steps := stream.num_steps:
                self.store(
                    partial(stream.finish, episode_data={"number": number}),
                    number,
                    steps,
                    fault,
                    streams={number: (steps, steps)},
                )

    def do_abandon(self, fault=None):
        if not self.streams:
            return
        number, stream = max(self.streams.items())
        del self.streams[number]
        self.abandoned[number] = self.appended.get(number, 0)
        gone = self.call(stream.abandon, fault=fault, carries=False) and fault is None
        if gone and self.power:  # a disk that fails to remove it may bring it back
            del self.abandoned[number]
            self.after(replace(self.now, streams=self.open_streams()))


def assert_tidy(folder):
    """Fail if something is left that no record names: a stream, a segment, a torn record, a file that is half made."""
    table = np.load(os.path.join(folder, "episodes.npy"), mmap_mode="r")
    used = np.flatnonzero(table.view(np.uint8).reshape(len(table), -1).any(axis=1))
    assert (table["seq"][used] % len(table) == used).all(), "a torn record is left in the table"
    records = table[used]
    live = records[records["seq"] >= records[np.argmax(records["seq"])]["first"]]
    segments = {int(name.split(".")[0]) for name in os.listdir(os.path.join(folder, "data"))}
    assert segments <= {*live["blob_segment"].tolist()}, f"segments that no record names: {segments}"
    assert os.listdir(os.path.join(folder, "open")) == []
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert not left, left
