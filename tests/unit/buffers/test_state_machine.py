"""The buffer against a plain list, through whatever may come: a state machine.

Every step of every episode carries its number, so that what is read proves itself. Changes to
the disk (or to the files in RAM) fail, are interrupted, or are where the power of SIGKILL would
have struck: then the directory is copied as it stands and the copy is opened.
"""

import errno
import os
import pickle
import shutil
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ringmap import ReplayBuffer, Zarr
from ringmap.buffers.replay import EPISODE_DATA_KEY
from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    InputError,
    NoClipsError,
    RoleError,
    SyncFailedError,
)
from ringmap.storage.columns.zarr import ChunkCache, ZarrColumn
from ringmap.storage.commit.store import Store
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk, MemoryFile
from ringmap.storage.records.state import StateFile
from ringmap.storage.ring.ring import Ring
from tests.disks import Through, ram_folder
from tests.unit.buffers.steps import clip, columns, prove, same

# -- faults ------------------------------------------------------------------------------------


class Fault:
    """What happens at the `at`-th change from now on, once.

    Args:
        at: 1 for the next change.
        act: called with (change, path, details); it may raise.
    """

    def __init__(self, at, act):
        self.left, self.act = at, act
        self.where = None

    def hit(self, change, path, *details):
        self.left -= 1
        if self.left == 0:
            self.where = change, os.path.basename(path)
            self.act(change, path, *details)


def raising(error):
    def act(change, path, *details):
        raise error

    return act


class FaultyDisk(Disk):
    """The real disk with a fault; `rebooted` gives it another boot id."""

    def __init__(self, rebooted=False):
        super().__init__()
        self.fault, self.rebooted = None, rebooted

    def before(self, change, path, *details):
        if self.fault is not None:
            self.fault.hit(change, path, *details)

    def boot_id(self):
        return b"\7" * 16 if self.rebooted else super().boot_id()


def faulty_ram(stack, holder):
    """Make each change to a file in RAM ask `holder.fault` first."""

    def asking(change, real):
        def asked(self, *args, **options):
            if holder.fault is not None:
                path = self.path if isinstance(self, MemoryFile) else args[0]
                holder.fault.hit(change, path)
            return real(self, *args, **options)

        return asked

    for owner, name in (
        (MemoryFile, "write"),
        (MemoryDisk, "create"),
        (MemoryDisk, "make_folder"),
        (MemoryDisk, "rename"),
        (MemoryDisk, "remove"),
    ):
        stack.enter_context(mock.patch.object(owner, name, asking(name, getattr(owner, name))))


class Holder:
    fault = None


# -- the model ---------------------------------------------------------------------------------


class Model:
    """What is stored, as a list of `(start, number, length, data)`."""

    def __init__(self, max_steps, spare, head=0, episodes=()):
        self.max_steps, self.spare, self.head = max_steps, spare, head
        self.episodes = list(episodes)

    def copy(self):
        return Model(self.max_steps, self.spare, self.head, self.episodes)

    def written(self, number, length, data):
        """Return the model after one more episode."""
        new = self.copy()
        new.episodes.append((self.head, number, length, data))
        new.head += length
        while sum(e[2] for e in new.episodes) > self.max_steps:
            new.episodes.pop(0)
        return new

    def retired(self, length):
        """Return the model after the retirement that makes room for an episode longer than the spare rows."""
        new = self.copy()
        need = self.head + length - self.max_steps - self.spare
        tail = self.episodes[0][0] if self.episodes else self.head
        if need > tail:
            new.episodes = [e for e in self.episodes if e[0] >= need]
        return new

    def cleared(self):
        new = self.copy()
        new.episodes = []
        return new

    def plain(self):
        return [e[1:] for e in self.episodes]


def observe(buf):
    """Return what a buffer holds as `[(number, length, data)]`, every row checked."""
    found = []
    for one in buf.episodes():
        data = one.pop(EPISODE_DATA_KEY, {})
        number, length = int(one["episode"][0]), len(one["episode"])
        same({name: np.array(v) for name, v in one.items()}, columns(number, 0, length))
        found.append((number, length, data))
    return found


class Counts:
    """How much ran, over all examples of a run."""

    examples = steps = faults = crashes = 0


# -- the machine -------------------------------------------------------------------------------

STORAGES = [
    "memmap",
    "memmap",
    "zarr",
    Zarr("lz4", 3),
    {"obs/x": Zarr("none", 2), "action": Zarr("lz4", 5)},
]
lengths = st.one_of(st.integers(1, 6), st.integers(1, 24))
datas = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"n": st.integers(0, 3)}, optional={"text": st.text(max_size=3)}),
)
ats = st.one_of(st.integers(1, 8), st.integers(1, 30))
errors = st.sampled_from(["ENOSPC", "EIO", "interrupt"])
calls = st.sampled_from(["write", "write", "write", "clear", "flush", "append", "finish", "finish"])


def error_of(name):
    return (
        KeyboardInterrupt() if name == "interrupt" else OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    )


class BufferMachine(RuleBasedStateMachine):
    """What RAM and disk have in common."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.next_number = 0
        self.recordings, self.doubtful = [], set()
        self.counter = 0
        self.saved = {0}  # what a kill may take the counter back to
        Counts.examples += 1

    def teardown(self):
        if hasattr(self, "buf"):
            self.buf.close()
        self.stack.close()

    @initialize(
        max_steps=st.integers(1, 24),
        spare=st.integers(1, 8),
        history=st.integers(1, 3),
        skip=st.integers(1, 2),
        options=st.fixed_dictionaries(
            {
                "durability": st.sampled_from(["process", "process", "power"]),
                "interrupted": st.sampled_from(["drop", "keep"]),
                "storage": st.sampled_from(STORAGES),
            }
        ),
        schema=st.booleans(),
    )
    def begin(self, max_steps, spare, history, skip, options, schema):
        self.model = Model(max_steps, spare)
        self.shown = [self.model]
        self.options = {"history_len": history, "frameskip": skip, "sync_every_s": 0, **options}
        self.keep = options["interrupted"] == "keep"
        given = {"schema": columns(0, 0, 1)} if schema else {}
        self.buf = self.make(max_steps=max_steps, spare_rows=spare, seed=0, **self.options, **given)

    @property
    def span(self):
        return self.options["history_len"] * self.options["frameskip"]

    def number(self):
        self.next_number += 1
        return self.next_number

    # -- calls, with and without a fault -------------------------------------------------------

    def call(self, kind, length, data, which):
        """Return `(work, models that may be there if it is cut short, the model after it)`."""
        before = self.model
        if kind == "append" and self.recordings:
            recording, number = self.recordings[which % len(self.recordings)]
            count = recording.num_steps
            if count < before.max_steps:
                step = {name: v[0] for name, v in columns(number, count, count + 1).items()}
                return lambda: recording.append(step), [], before
        if kind == "finish" and self.recordings:
            recording, number = self.recordings[which % len(self.recordings)]
            count = recording.num_steps
            after = before.written(number, count, data) if count else before
            work = lambda: recording.finish(terminated=True, episode_data=data)  # noqa: E731
            return work, [before.retired(count)] if count else [], after
        if kind == "clear":
            return self.buf.clear, [], before.cleared() if before.episodes else before
        if kind == "flush":
            return self.buf.flush, [], before
        length = min(length, before.max_steps)
        number = self.number()
        given = columns(number, 0, length)
        if data:
            given[EPISODE_DATA_KEY] = data
        return (
            lambda: self.buf.write_episode(given),
            [before.retired(length)],
            before.written(number, length, data),
        )

    def settle_on(self, models):
        """Take the first model that agrees with the buffer."""
        found = observe(self.buf)
        for model in models:
            if model.plain() == found:
                self.model = model
                return
        raise AssertionError(f"found {found}, expected one of {[m.plain() for m in models]}")

    def drop_finished(self):
        """Forget recordings that have ended."""
        self.recordings = [(r, n) for r, n in self.recordings if not r._ended]

    def returned(self, kind, before, between=()):
        """Note what a call that returned has stored, and what readers may see of it."""
        self.drop_finished()
        if kind == "flush" or self.model is not before:
            self.saved = {self.counter}
        self.published([*self.shown, *between])

    def published(self, or_else=()):
        """Note what readers may see: the newest state, unless state.bin could not be written."""
        hidden = self.buf.engine.owned.files.unpublished
        self.shown = [self.model, *or_else] if hidden else [self.model]

    @rule(kind=calls, length=lengths, data=datas, which=st.integers(0, 9))
    def do(self, kind, length, data, which):
        before = self.model
        work, _, after = self.call(kind, length, data, which)
        work()
        self.model = after
        self.returned(kind, before)

    @rule(
        kind=calls,
        length=lengths,
        data=datas,
        which=st.integers(0, 9),
        at=ats,
        error=errors,
        again=st.one_of(st.none(), st.integers(1, 12)),
    )
    def cut_short(self, kind, length, data, which, at, error, again):
        """An I/O error or Ctrl-C in the middle of a call, Ctrl-C once more in the middle of the recovery."""
        before = self.model
        work, between, after = self.call(kind, length, data, which)
        finishing = [r for r, n in self.recordings]
        appending = {finishing[which % len(finishing)].id} if kind == "append" and finishing else set()
        fault = Fault(at, raising(error_of(error)))
        self.faulted(fault)
        poisoned = raised = False
        try:
            work()
        except KeyboardInterrupt:
            raised = True
        except EnvironmentFault as caught:
            raised, poisoned = True, isinstance(caught, SyncFailedError)
        finally:
            self.faulted(None)
        Counts.faults += fault.where is not None
        if not raised:
            self.model = after
            self.doubtful -= appending
            self.returned(kind, before, between)
            return
        self.doubtful |= appending
        if again is not None and not poisoned:
            self.faulted(Fault(again, raising(KeyboardInterrupt())))
            try:
                self.buf.num_episodes  # noqa: B018 - recovers
            except KeyboardInterrupt:
                pass
            finally:
                self.faulted(None)
        if poisoned:
            self.reopen_poisoned([before, after, *between])
        elif error == "interrupt":
            self.settle_on([before, after, *between])
        else:
            self.settle_on([before, *between])
        self.saved = {self.counter} if self.model is after is not before else {*self.saved, self.counter}
        self.published([*self.shown, *between])
        if kind == "finish" and finishing and not poisoned:
            self.finish_again(after)

    def finish_again(self, after):
        """What was cut short is called again: stored once in the end."""
        ended = [r for r, n in self.recordings if r._ended]
        self.drop_finished()
        for recording, number in list(self.recordings):
            if recording.id in self.buf.engine.owned.carried.get("finished", []):
                recording.finish()
        for recording in ended:
            with pytest.raises(RoleError):
                recording.finish()
        self.drop_finished()

    @rule(steps=st.integers(0, 4))
    def begin_recording(self, steps):
        if len(self.recordings) < 3:
            self.recordings.append((self.buf.begin_episode(), self.number()))
            for _ in range(min(steps, self.model.max_steps)):
                self.call("append", 1, {}, len(self.recordings) - 1)[0]()
            self.published(self.shown)

    @precondition(lambda self: self.recordings)
    @rule(which=st.integers(0, 9))
    def abandon(self, which):
        recording, _ = self.recordings.pop(which % len(self.recordings))
        recording.abandon()

    @rule(wrong=st.sampled_from(["scalar", "unequal", "schema", "shape", "cast", "long", "data"]))
    def refused(self, wrong):
        given = columns(77, 0, min(3, self.model.max_steps))
        count = len(given["step"])
        given |= {
            "scalar": {"step": 3},
            "unequal": {"step": np.zeros(count + 1, np.int32)},
            "schema": {"more": np.zeros(count)},
            "shape": {"action": np.zeros((count, 3))},
            "cast": {"step": np.full(count, 0.5)},
            "long": columns(77, 0, self.model.max_steps + 1),
            "data": {EPISODE_DATA_KEY: {"x": object()}},
        }[wrong]
        if not self.buf.column_names and wrong in ("schema", "shape", "cast"):
            return
        with pytest.raises(InputError):
            self.buf.write_episode(given)

    @rule(batch=st.integers(1, 9), history=st.one_of(st.none(), st.integers(1, 4)))
    def sample(self, batch, history):
        size, skip = history or self.options["history_len"], self.options["frameskip"]
        stored = {number: length for _, number, length, _ in self.model.episodes}
        self.counter += 1
        if any(length >= size * skip for length in stored.values()):
            prove(self.buf.sample(batch, history), stored, size, skip)
        else:
            with pytest.raises(NoClipsError):
                self.buf.sample(batch, history)

    @rule()
    def every_clip(self):
        history, skip = self.options["history_len"], self.options["frameskip"]
        expected = [
            (i, number, start)
            for i, (_, number, length, _) in enumerate(self.model.episodes)
            for start in range(length - self.span + 1)
        ]
        assert list(self.buf.clip_indices) == [(i, start) for i, _, start in expected]
        for got, (_, number, start) in zip(
            self.buf.__getitems__(range(len(expected))) if expected else [], expected, strict=True
        ):
            same(got, clip(number, start, history, skip))

    @invariant()
    def agrees(self):
        if not hasattr(self, "buf"):
            return
        Counts.steps += 1
        buf, episodes = self.buf, self.model.episodes
        sizes = [length for _, _, length, _ in episodes]
        assert buf.lengths.tolist() == sizes
        assert buf.num_steps_stored == sum(sizes) <= buf.max_steps
        assert buf.offsets.tolist() == [sum(sizes[:i]) for i in range(len(sizes))]
        assert len(buf) == sum(max(0, n - self.span + 1) for n in sizes)
        assert observe(buf) == self.model.plain()
        assert buf.engine.reader.index.check() == []
        assert buf.state_dict()["step"] == self.counter
        names = list(dict.fromkeys(name for *_, data in episodes for name in data))
        assert buf.episode_column_names == names


class RamMachine(BufferMachine):
    def __init__(self):
        super().__init__()
        self.holder = Holder()
        faulty_ram(self.stack, self.holder)

    def make(self, **options):
        return ReplayBuffer(**options)

    def faulted(self, fault):
        self.holder.fault = fault

    @precondition(lambda self: not self.recordings)
    @rule()
    def pickle_it(self):
        self.buf = pickle.loads(pickle.dumps(self.buf))
        self.model.episodes = relaid(self.model)
        self.model.head = sum(e[2] for e in self.model.episodes)


def relaid(model):
    """Lay the episodes end to end from position 0: a pickled copy is a new ring."""
    start, laid = 0, []
    for _, number, length, data in model.episodes:
        laid.append((start, number, length, data))
        start += length
    return laid


class DiskMachine(BufferMachine):
    def __init__(self):
        super().__init__()
        self.folder = self.stack.enter_context(ram_folder())
        self.disk = FaultyDisk()
        self.cls = Through(ReplayBuffer, self.disk)
        self.readers = []
        self.crashes = 0

    def teardown(self):
        for reader, _ in self.readers:
            reader.close()
        super().teardown()

    def make(self, **options):
        return self.cls(path=os.path.join(self.folder, "buf"), **options)

    def faulted(self, fault):
        self.disk.fault = fault

    def streams(self, appending=None):
        """Return `(id, number, steps)` of what is being recorded; `steps` is a set where it is open.

        The step of an append that failed or was killed may be there, whole, or not.
        """
        found = []
        for i, (recording, number) in enumerate(self.recordings):
            count = recording.num_steps
            open_end = recording.id in self.doubtful or i == appending
            found.append((recording.id, number, {count, count + 1} if open_end else {count}))
        return found

    def outcomes(self, models, streams):
        """Return the models that an opening may come to, which deals with streams left open."""
        found = []
        for model in models:
            held = {number for _, number, _, _ in model.episodes}  # finished, and not yet unlinked
            made = [model]
            for _, number, counts in sorted(streams):
                if self.keep and number not in held:
                    made = [m.written(number, n, {}) if n else m for m in made for n in counts]
            found += made
        return found

    def open_again(self, models):
        """Open the directory anew; it must agree with one of the models."""
        streams, self.recordings, self.doubtful = self.streams(), [], set()
        self.buf = self.make(max_steps=self.model.max_steps, **self.options)
        self.settle_on(self.outcomes(models, streams))
        self.counter = self.buf.state_dict()["step"]
        self.saved = {self.counter}
        self.published()

    def reopen_poisoned(self, models):
        counters = {*self.saved, self.counter}
        self.buf.close()
        self.open_again(models)
        assert self.counter in counters

    @rule(background=st.booleans())
    def reopen(self, background):
        if background:
            self.buf.engine.owned.sync_behind()
        counter = self.counter
        self.buf.close()
        before = self.model
        self.open_again([before])
        assert self.counter == counter, "a clean close stores the sampling state"

    @rule(at=ats, error=errors)
    def reopen_cut_short(self, at, error):
        """An I/O error or Ctrl-C in the middle of an opening: the next one finds the same."""
        counter = self.counter
        self.buf.close()
        streams, before = self.streams(), self.model
        fault = Fault(at, raising(error_of(error)))
        self.faulted(fault)
        try:
            self.buf = self.make(max_steps=self.model.max_steps, **self.options)
        except (KeyboardInterrupt, EnvironmentFault):
            pass
        finally:
            self.faulted(None)
        self.buf.close()
        Counts.faults += fault.where is not None
        self.recordings, self.doubtful = [], set()
        self.buf = self.make(max_steps=self.model.max_steps, **self.options)
        self.settle_on(self.outcomes([before], streams))
        assert self.buf.state_dict()["step"] == counter
        self.saved = {counter}
        self.published()

    # -- a kill --------------------------------------------------------------------------------

    @rule(
        kind=calls,
        length=lengths,
        data=datas,
        which=st.integers(0, 9),
        at=ats,
        torn=st.booleans(),
        rebooted=st.booleans(),
        twice=st.one_of(st.none(), st.integers(1, 12)),
    )
    def killed(self, kind, length, data, which, at, torn, rebooted, twice):
        """The directory as a kill at the n-th change would leave it, opened elsewhere; killed again there."""
        count = len(self.recordings)
        before, streams = (
            self.model,
            self.streams(which % count if count and kind == "append" else None),
        )
        work, between, after = self.call(kind, length, data, which)
        saved = {*self.saved, self.counter}
        copied = self.copying(at, torn)
        self.faulted(copied)
        try:
            work()
        finally:
            self.faulted(None)
        self.model = after
        self.returned(kind, before)
        if copied.where is None:
            return
        Counts.crashes += 1
        models = self.outcomes([before, after, *between], streams)
        self.open_copy(copied.folder, models, saved, rebooted, twice)

    def copying(self, at, torn):
        """Return a fault that copies the directory; with `torn`, half of what is written gets there too."""
        self.crashes += 1
        target = os.path.join(self.folder, f"killed{self.crashes}")
        source = os.path.join(self.folder, "buf")

        def act(change, path, *details):
            shutil.copytree(source, target)
            if torn and change == "write":
                offset, data = details
                half = bytes(memoryview(data).cast("B"))[: max(1, memoryview(data).nbytes // 2)]
                with open(target + path[len(source) :], "r+b") as file:
                    file.seek(offset)
                    file.write(half)

        fault = Fault(at, act)
        fault.folder = target
        return fault

    def open_copy(self, folder, models, counters, rebooted, twice):
        disk = FaultyDisk(rebooted)
        cls = Through(ReplayBuffer, disk)
        if twice is not None:
            again = Fault(twice, raising(KeyboardInterrupt()))
            disk.fault = again
            try:
                cls(max_steps=self.model.max_steps, path=folder, **self.options).close()
            except KeyboardInterrupt:
                pass
            finally:
                disk.fault = None
        buf = cls(max_steps=self.model.max_steps, path=folder, **self.options)
        try:
            found = observe(buf)
            assert found in [m.plain() for m in models], (found, [m.plain() for m in models])
            assert buf.state_dict()["step"] in counters
            assert buf.engine.reader.index.check() == []
            buf.write_episode(columns(999, 0, 1))
            assert observe(buf)[-1] == (999, 1, {})
        finally:
            buf.close()
            shutil.rmtree(folder)

    # -- readers -------------------------------------------------------------------------------

    def seen(self, reader):
        """Return the model that a reader which has just caught up agrees with."""
        found = observe(reader)
        for model in self.shown:
            if model.plain() == found:
                return model
        raise AssertionError(f"found {found}, expected one of {[m.plain() for m in self.shown]}")

    @rule()
    def open_reader(self):
        if len(self.readers) < 2:
            reader = self.cls.open(self.buf.path)
            self.readers.append((reader, self.seen(reader)))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 1), way=st.sampled_from(["refresh", "sample"]))
    def refresh(self, which, way):
        i = which % len(self.readers)
        reader, _ = self.readers[i]
        if way == "sample" and all(e for e in self.clips_of(*self.shown)):
            stored = {e[1]: e[2] for model in self.shown for e in model.episodes}
            prove(reader.sample(6), stored, self.options["history_len"], self.options["frameskip"])
        else:
            reader.refresh()
        self.readers[i] = reader, self.seen(reader)
        assert reader.engine.reader.index.check() == []

    def clips_of(self, *models):
        """Return how many clips each model has."""
        return [sum(max(0, e[2] - self.span + 1) for e in m.episodes) for m in models]

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 1))
    def look_at_what_may_be_gone(self, which):
        """Without a refresh: the length stands still, and every clip is one that lives."""
        i = which % len(self.readers)
        reader, known = self.readers[i]
        size = len(reader)
        assert [size] == self.clips_of(known)
        stored = {e[1]: e[2] for m in (known, *self.shown) for e in m.episodes}
        try:
            found = reader.__getitems__(range(size)) if size else []
        except NoClipsError:
            assert 0 in self.clips_of(*self.shown)
            return
        for one in found:
            prove(
                {name: v[None] for name, v in one.items()},
                stored,
                self.options["history_len"],
                self.options["frameskip"],
            )

    @precondition(lambda self: self.readers)
    @rule()
    def close_reader(self):
        reader, _ = self.readers.pop()
        reader.close()


# -- runs --------------------------------------------------------------------------------------


def run(machine, parent, **options):
    for name in ("examples", "steps", "faults", "crashes"):
        setattr(Counts, name, 0)
    run_state_machine_as_test(machine, settings=settings(parent, **options))


@pytest.mark.parametrize("machine", [RamMachine, DiskMachine])
def test_against_a_list(machine):
    examples = settings.default.max_examples * 3 // 10
    run(machine, settings.default, max_examples=examples)
    assert Counts.examples >= examples
    assert Counts.steps > 10 * examples
    assert Counts.faults > examples // 3
    assert Counts.crashes > examples // 3 or machine is RamMachine


@pytest.mark.campaign
@pytest.mark.parametrize("machine", [RamMachine, DiskMachine])
def test_campaign(machine, capsys):
    profile = settings.get_profile("campaign")
    run(machine, profile, max_examples=profile.max_examples // 5)
    with capsys.disabled():
        print(
            f"\n{machine.__name__}: {Counts.examples} examples, {Counts.steps} steps, "
            f"{Counts.faults} errors and interrupts, {Counts.crashes} kills"
        )


# -- controls: a planted fault, and the machine finds it ---------------------------------------


def settle_later(self):
    """Memory is left as an interrupt left it, until the next write."""


def never_told(self, state, _real=StateFile.write):
    if state.generation % 5:
        _real(self, state)


def without(name, _real=Store.commit_now):
    """Return a commit that does not store what it has as `name`."""
    return lambda self, files, new, stored=None: _real(self, files, new._replace(**{name: None}), stored)


# Each control is a planted fault and a script of the machine's own rules that must stumble over it.


def begun(machine, **options):
    options = {"durability": "process", "interrupted": "drop", **options}
    machine.begin(max_steps=10, spare=2, history=1, skip=1, options=options, schema=True)


def kill_while_finishing(machine):
    begun(machine, interrupted="keep")
    for at in range(1, 13):
        machine.begin_recording(3)
        machine.killed("finish", 1, {}, 0, at, torn=False, rebooted=False, twice=None)


def kill_after_sampling(machine):
    begun(machine)
    machine.do("write", 3, {}, 0)
    machine.sample(2, None)
    machine.do("write", 3, {}, 0)
    machine.killed("write", 3, {}, 0, 1, torn=False, rebooted=False, twice=None)


def kill_while_writing(machine):
    begun(machine)
    for at in range(1, 25):
        machine.killed("write", 5, {}, 0, at % 8 + 1, torn=True, rebooted=False, twice=None)


def interrupt_while_writing(machine):
    begun(machine)
    for at in range(1, 25):
        machine.cut_short("write", 4, {}, 0, at, "interrupt", None)
        machine.agrees()


def read_compressed_after_each_write(machine):
    read_after_each_write(machine, storage=Zarr("lz4", 3))


def reopen_after_each_write(machine):
    begun(machine, storage="zarr")
    for _ in range(5):
        machine.do("write", 2, {}, 0)
        machine.reopen(False)


def never_expiring(cache, chunk, position):
    """Return the rows of a chunk as they were when it was read first, for whatever position."""
    return cache._chunks.get(chunk, (None,))[0]


def carrying_nothing(self, chunk, begin, end, live):
    return np.zeros((self._steps, self._row), np.uint8)


def read_after_each_write(machine, **options):
    begun(machine, **options)
    machine.open_reader()
    for _ in range(10):
        machine.do("write", 2, {}, 0)
        machine.refresh(0, "refresh")
        machine.sample(8, None)


PLANTED = {
    "a finished stream is not named by its commit": (
        DiskMachine,
        kill_while_finishing,
        (Store, "commit_now", without("finished")),
    ),
    "the sampling state does not ride along": (
        DiskMachine,
        kill_after_sampling,
        (Store, "commit_now", without("small")),
    ),
    "rows that are live are overwritten": (
        DiskMachine,
        kill_while_writing,
        (Ring, "overwritten", lambda self, head: head - self.rows - 3),
    ),
    "an interrupt leaves memory stale": (
        RamMachine,
        interrupt_while_writing,
        (Store, "recover_if_stale", settle_later),
    ),
    "readers are not always told": (
        DiskMachine,
        read_after_each_write,
        (StateFile, "write", never_told),
    ),
    "a decoded chunk is served for ever": (
        DiskMachine,
        read_compressed_after_each_write,
        (ChunkCache, "get", never_expiring),
    ),
    "rows that share a chunk are not carried over": (
        DiskMachine,
        reopen_after_each_write,
        (ZarrColumn, "_stored", carrying_nothing),
    ),
}


def hide_the_newest_state(machine):
    begun(machine)
    for at in range(1, 13):
        machine.cut_short("write", 2, {}, 0, at, "ENOSPC", None)
        machine.begin_recording(0)
        machine.open_reader()
        machine.agrees()
        machine.close_reader()
        machine.abandon(0)


def play(machine, script):
    played = machine()
    try:
        script(played)
        played.agrees()
    finally:
        played.teardown()


@pytest.mark.parametrize("planted", PLANTED)
def test_control_the_machine_finds(planted):
    machine, script, fault = PLANTED[planted]
    play(machine, script)
    with mock.patch.object(*fault), pytest.raises((AssertionError, CorruptError)):
        play(machine, script)


def test_what_the_campaign_found():
    """Beginning a recording writes nothing, so readers are still shown what was before a hidden commit."""
    play(DiskMachine, hide_the_newest_state)
