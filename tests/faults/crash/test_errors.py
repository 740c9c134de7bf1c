"""Errors of the disk: at each change that a call makes, once and for good, a full and a failing disk.

The call raises a clear error and the buffer is as before it; the call works when it is made
again on a mended disk; readers go on; nothing leaks. After a failed sync the writer refuses to
go on until the buffer is opened again. A control per promise breaks it, and must be caught.
"""

import contextlib
import errno
import gc
import itertools
import math
import os
import random
import shutil
import tempfile
import time

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import EnvironmentFault, RingmapError, SyncFailedError
from ringmap.storage.commit import store
from ringmap.storage.commit.files import CommitFiles
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.lock import WriterLock
from ringmap.storage.records.blobs import Segments
from tests.disks import Cut, Through
from tests.faults.crash.cases import STORAGES, episode, look, rows_of, sampling_of
from tests.faults.crash.recording import RecordingDisk
from tests.faults.crash.test_power import _quiet, base
from tests.tiers import few

__all__ = ["_quiet", "base"]

MAX_STEPS, SPARE = 8, 3
LEVELS = pytest.mark.parametrize("power", [False, True], ids=["process", "power"])


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """Let zarr-python open what it keeps for good: the loop that its codecs run in."""
    with ReplayBuffer(4, storage="zarr") as buf:
        buf.write_episode({"x": [1]})


class World:
    """A folder, its disk, and the buffer in it."""

    storage = "memmap"

    def __init__(self, base, power, keep=False):
        self.root = tempfile.mkdtemp(dir=base)
        self.power, self.keep = power, keep
        self.path = os.path.join(self.root, "buf")
        self.disk = RecordingDisk(self.root)
        self.kind = Through(ReplayBuffer, self.disk)
        self.buf = self.stream = None

    def open(self):
        self.buf = self.kind(
            MAX_STEPS,
            path=self.path,
            seed=7,
            spare_rows=SPARE,
            sync_every_s=0,
            storage=STORAGES[self.storage],
            durability="power" if self.power else "process",
            interrupted="keep" if self.keep else "drop",
        )

    def write(self, *lengths):
        """Write episodes, numbered from 1 on."""
        for length in lengths:
            number = 1 + max((e[0] for e in look(self.buf)), default=0)
            self.buf.write_episode(episode(number, length))

    def interrupt(self):
        """Leave the memory stale, as Ctrl-C in the middle of a write does."""
        self.disk.fail(2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            self.write(2)
        self.disk.lift()

    def append(self, steps=1):
        if self.stream is None:
            self.stream = self.buf.begin_episode()
        for t in range(self.stream.num_steps, self.stream.num_steps + steps):
            self.stream.append({name: values[t] for name, values in rows_of(50, t + 1).items()})

    def finish(self):
        self.stream.finish(episode_data={"number": 50})

    def kill(self):
        if self.buf is not None and self.buf.engine.owned.is_open:
            self.disk.fail(1, Cut(), sticky=True)
            self.buf.engine.owned.abandon()
            self.disk.lift()
        self.buf = self.stream = None

    def reboot(self):
        self.kill()
        self.disk.system.boot += 1

    @property
    def is_open(self):
        return self.buf is not None and self.buf.engine.owned.is_open

    @property
    def poisoned(self):
        return self.is_open and self.buf.engine.owned.files.poison is not None


def filled(world):
    world.open()
    world.write(2, 2, 2, 2, 2, 2)
    world.buf.sample(2)


def streaming(world):
    filled(world)
    world.append(2)


def streamed(world):
    world.keep = True
    streaming(world)
    world.kill()


SCENARIOS = {  # what is done before the disk fails, and the call that meets it
    "birth": (lambda w: None, World.open),
    "first episode": (World.open, lambda w: w.write(2)),
    "commit": (lambda w: (w.open(), w.write(2), w.buf.sample(2)), lambda w: w.write(2)),
    "eviction": (filled, lambda w: w.write(3)),
    "long episode": (filled, lambda w: w.write(7)),
    "clear": (filled, lambda w: w.buf.clear()),
    "flush": (filled, lambda w: w.buf.flush()),
    "background sync": (filled, lambda w: w.buf.engine.owned.sync_behind()),
    "close": (filled, lambda w: w.buf.close()),
    "opening": (lambda w: (filled(w), w.kill()), World.open),
    "opening after a reboot": (lambda w: (filled(w), w.reboot()), World.open),
    "recovery in mid-process": (lambda w: (filled(w), w.interrupt()), lambda w: w.write(2)),
    "first append": (filled, World.append),
    "append": (streaming, World.append),
    "finish": (streaming, World.finish),
    "abandon": (streaming, lambda w: w.stream.abandon()),
    "opening that drops a stream": (lambda w: (streaming(w), w.kill()), World.open),
    "opening that keeps a stream": (streamed, World.open),
}


def descriptors():
    """Return what this process has open, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def leaked(before):
    """Return what is open now and was not before; what was garbage then may be gone."""
    return descriptors().items() - before.items()


def normal(base, name, power):
    """Return what the buffer shows before the call and after it, on a disk without faults."""
    prepare, call = SCENARIOS[name]
    world = World(base, power)
    prepare(world)
    before = look(world.buf) if world.buf is not None else None
    call(world)
    if not world.is_open:
        world.open()
    after = look(world.buf)
    world.kill()
    shutil.rmtree(world.root)
    return after if before is None else before, after


def strike(base, name, power, before, after, at, error, sticky, partial):
    """Let the `at`-th change of a call fail, and check all that was promised. False: it has fewer."""
    prepare, call = SCENARIOS[name]
    open_at_first = descriptors()
    world = World(base, power)
    disk = world.disk
    prepare(world)
    reader = world.kind.open(world.path, "r") if world.is_open else None
    disk.fail(at, OSError(error, os.strerror(error), world.path), sticky, partial=partial)
    fault = None
    try:
        call(world)
    except EnvironmentFault as raised:
        fault = type(raised), raised.errno, str(raised)
    if not disk.struck:
        disk.lift()
        assert fault is None
        if reader is not None:
            reader.close()
        world.kill()
        shutil.rmtree(world.root)
        return False

    rests = {before[i:] for i in range(len(before) + 1)} if name == "long episode" else {before}
    sync_failed = fault is not None and issubclass(fault[0], SyncFailedError)
    if fault is not None:
        assert fault[1] == error, fault
        assert world.root in fault[2], fault
        assert "planted" not in fault[2]
        assert any(word in fault[2] for word in ("again", "choose", "fix")), fault
    if world.is_open:
        seen = look(world.buf)  # while the disk still fails
        allowed = {after} if fault is None else rests | ({after} if sync_failed else set())
        assert seen in allowed, f"{seen} after {fault}, expected one of {allowed}"
    if reader is not None:
        reader.refresh()
        shown = look(reader)
        assert shown in rests | {after}
        if shown:
            reader.sample(4)
    disk.lift()

    if world.poisoned:
        with pytest.raises(SyncFailedError, match=r"open it again"):
            world.write(1)
        world.buf.close()
    elif fault is not None and name != "close":  # mended, the same call works
        call(world)
        assert look(world.buf) == after
    if not world.is_open:
        world.open()
        assert look(world.buf) in rests | {after}
    if world.stream is not None and name in ("append", "first append") and not sync_failed:
        steps = 1 if name == "first append" else 3
        if world.stream._store is world.buf.engine.owned:
            world.finish()
            assert look(world.buf)[-1] == (50, steps)
    world.write(2)
    last, sampling = look(world.buf), sampling_of(world.buf)
    assert last[-1][1] == 2
    if reader is not None:
        reader.refresh()
        assert look(reader) == last
        reader.close()
    world.kill()
    world.open()
    assert look(world.buf) == last
    assert sampling_of(world.buf) == sampling
    world.buf.close()
    left = set(os.listdir(world.path)) | set(os.listdir(os.path.join(world.path, "open")))
    assert left <= {"lock", "manifest.json", "episodes.npy", "state.bin", "columns", "data", "open"}
    world.buf = world.stream = reader = None
    shutil.rmtree(world.root)
    if leaked(open_at_first):
        gc.collect()  # slow once there is much in memory
    assert not leaked(open_at_first), "a descriptor leaks"
    return True


def strikes(base, name, power, faults, every=1):
    """Let changes of a call fail, one after the other; returns how many cases there were.

    `every`: only each so many of them; each fault, and each level, begins at another one.
    """
    before, after = normal(base, name, power)
    return strikes_of(base, name, power, before, after, faults, every)


def strikes_of(base, name, power, before, after, faults, every):
    cases = 0
    for number, (error, sticky, partial) in enumerate(faults):
        first = 1 + (number * every // len(faults) + power) % every
        for at in itertools.count(first, every):
            if not strike(base, name, power, before, after, at, error, sticky, partial):
                break
            cases += 1
    return cases


SOME = [(errno.ENOSPC, True, False), (errno.EIO, False, True)]
EVERY = 3  # of the changes; each fault and level begins at another one, and the campaign takes all
ALL = list(itertools.product((errno.ENOSPC, errno.EIO), (False, True), (False, True)))


PLANTED_IN = {"commit", "opening", "finish", "eviction"}
"""The calls of the controls below: these run at both levels by default, each of the others at one of them."""
AT_LEVELS = [
    pytest.param(
        name,
        power,
        marks=() if name in PLANTED_IN or power == bool(i % 2) else pytest.mark.campaign,
    )
    for i, name in enumerate(sorted(SCENARIOS))
    for power in (False, True)
]


@pytest.mark.parametrize(("name", "power"), few(AT_LEVELS, 5))
def test_changes_fail(base, name, power):
    nothing_to_sync = name == "background sync" and power
    assert strikes(base, name, power, SOME, EVERY) >= 1 * (not nothing_to_sync)


COMPRESSED = [
    ("eviction", False, "zarr"),
    ("background sync", False, "mixed"),
    ("first episode", True, "mixed"),
    ("long episode", True, "zarr"),
]


@pytest.mark.parametrize(("name", "power", "storage"), few(COMPRESSED))
def test_changes_of_compressed_columns_fail(base, monkeypatch, name, power, storage):
    monkeypatch.setattr(World, "storage", storage)
    assert strikes(base, name, power, SOME, EVERY) >= 2


@pytest.mark.slow
@LEVELS
@pytest.mark.parametrize("segment", [1])
def test_changes_fail_with_a_segment_per_commit(base, monkeypatch, power, segment):
    monkeypatch.setattr(Segments.__init__, "__defaults__", (segment,))
    for name in ("eviction", "long episode", "clear", "flush", "background sync"):
        strikes(base, name, power, SOME, EVERY)


@pytest.mark.campaign
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("segment", [1, 1 << 20])
def test_all_errors(base, monkeypatch, capsys, storage, segment):
    """Of every call, or of as many, drawn by SEED, as there is time for: LASTS_S."""
    cases = 0
    lasts_s, began = float(os.environ.get("LASTS_S", "inf")), time.monotonic()
    calls = list(itertools.product(SCENARIOS, (False, True)))
    if lasts_s < math.inf:
        random.Random(os.environ.get("SEED", "1")).shuffle(calls)
    monkeypatch.setattr(World, "storage", storage)
    monkeypatch.setattr(Segments.__init__, "__defaults__", (segment,))
    for name, power in calls:
        cases += strikes(base, name, power, ALL)
        if time.monotonic() - began > lasts_s:
            break
    with capsys.disabled():
        print(f"\n{storage}, segments of {segment}: {cases:,} errors, one per change, kind and level; violations: 0")


def test_a_failed_sync_stops_the_writer(base):
    """Linux marks the pages of a failed sync as clean: a second try would lie."""
    world = World(base, True)
    filled(world)
    before = look(world.buf)
    world.disk.fail(1, OSError(errno.EIO, "bad sector"), only="sync")
    with pytest.raises(SyncFailedError, match="bad sector") as caught:
        world.write(2)
    assert isinstance(caught.value, OSError)
    world.disk.lift()
    syncs = len([e for e in world.disk.log if e[0] == "sync"])
    for call in (lambda: world.write(1), world.buf.clear, world.buf.flush):
        with pytest.raises(SyncFailedError, match="bad sector"):
            call()
    assert len([e for e in world.disk.log if e[0] == "sync"]) == syncs
    assert look(world.buf) == before
    world.buf.close()
    world.open()
    world.write(2)
    assert look(world.buf)[-1][1] == 2
    world.buf.close()


def test_nothing_of_a_refused_episode_stays(base):
    """Room that a refused write took is used by the next one: it does not add up."""
    world = World(base, False)
    filled(world)
    segments = os.path.join(world.path, "data")
    world.disk.fail(1, OSError(errno.ENOSPC, "full"), sticky=True, only="write")
    for _ in range(20):
        with pytest.raises(EnvironmentFault):
            world.buf.write_episode(episode(99, 2))
    world.disk.lift()
    world.write(2)
    world.buf.flush()
    assert len(os.listdir(segments)) <= 3
    world.buf.close()


# -- controls ------------------------------------------------------------------------------------------


def untranslated(error, *_):
    return error


def failing_after_the_record(self, state):
    self.state_file.write(state)
    self.state = state


def forgetful(append):
    def wrong(self, *args):
        try:
            append(self, *args)
        except OSError:
            self.state = self.state  # swallowed: the caller goes on as if it were stored

    return wrong


def retrying(self, error):
    raise EnvironmentFault(error.errno, f"{self.paths.folder}: {error}; call it again") from error


def leaking(self):
    if not self.path.endswith(("episodes.npy", "steps.bin")):
        LAST_USER_GONE(self)


def put_once(self, path, beside, data, synced):
    if beside.endswith("next.tmp"):
        file = self.create(beside)
        file.write(data, 0)
        file.close()
        self.rename(beside, path)
    else:
        PUT(self, path, beside, data, synced)


def put_by_removing(self, path, beside, data, synced):
    if beside.endswith("next.tmp") and self.exists(path):
        self.remove(path)
    PUT(self, path, beside, data, synced)


def first_line(error):
    line, *_ = str(error).partition("\n")
    return f"{type(error).__name__}: {line}"


LAST_USER_GONE, PUT = File.__del__, Disk.put
TRUSTED = property(lambda self: False, lambda self, value: None)
CONTROLS = {  # what is planted, and a call in which the sample above catches it
    "errors of the system come out as they are": (store, "clear_error", untranslated, "commit"),
    "an error after the record is raised": (
        CommitFiles,
        "_publish",
        failing_after_the_record,
        "commit",
    ),
    "an error at the record is swallowed": (
        CommitFiles,
        "append",
        forgetful(CommitFiles.append),
        "commit",
    ),
    "a failed sync may be tried again": (CommitFiles, "poisoned", retrying, "commit"),
    "files stay open": (File, "__del__", leaking, "commit"),
    "the lock stays": (WriterLock, "release", lambda self: None, "opening"),
    "memory is trusted after an error": (Store, "_stale", TRUSTED, "finish"),
}
CHUNK_CONTROLS = {
    "what a failed write left stands in the way": (Disk, "put", put_once, "eviction"),
    "a chunk is removed before the new one is there": (Disk, "put", put_by_removing, "eviction"),
    "files stay open": (File, "__del__", leaking, "commit"),
}


@pytest.mark.parametrize(("name", "storage"), [(n, "memmap") for n in CONTROLS] + [(n, "zarr") for n in CHUNK_CONTROLS])
def test_control(base, monkeypatch, name, storage):
    monkeypatch.setattr(World, "storage", storage)
    *planted, call = (CONTROLS if storage == "memmap" else CHUNK_CONTROLS)[name]
    expected = {power: normal(base, call, power) for power in (True, False)}
    monkeypatch.setattr(*planted, raising=False)
    for power, (before, after) in expected.items():
        try:
            strikes_of(base, call, power, before, after, SOME, EVERY)
        except (AssertionError, RingmapError, OSError, pytest.fail.Exception) as caught:
            print(f"{name}: caught in {call}: {first_line(caught)}")
            return
    pytest.fail(f"{name}: nothing was noticed")


def test_a_reader_needs_no_room(base):
    """A reader opens, samples and refreshes on a disk that refuses every change."""
    world = World(base, False)
    filled(world)
    world.disk.fail(1, OSError(errno.EROFS, "read-only"), sticky=True)
    reader = world.kind.open(world.path, "r")
    assert look(reader) == look(world.buf)
    assert np.isin(reader.sample(8)["obs"][:, 0, 0], [e[0] for e in look(reader)]).all()
    reader.close()
    world.disk.lift()
    world.kill()
