"""The buffer against a plain list, through whatever calls may come: a state machine.

Every step of every episode carries its number, so that what is read proves itself. What errors, interrupts and kills in
the middle of a call leave is asked in `tests/faults/crash`.
"""

import os
import pickle
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
    InputError,
    NoClipsError,
)
from ringmap.storage.columns.zarr import ChunkCache, ZarrColumn
from ringmap.storage.records.state import StateFile
from tests.disks import ram_folder
from tests.unit.buffers.steps import clip, columns, prove, same

# -- the model ---------------------------------------------------------------------------------


class Model:
    """What is stored, as a list of `(start, number, length, data)`."""

    def __init__(self, max_steps, head=0, episodes=()):
        self.max_steps, self.head, self.episodes = max_steps, head, list(episodes)

    def copy(self):
        return Model(self.max_steps, self.head, self.episodes)

    def written(self, number, length, data):
        """Return the model after one more episode."""
        new = self.copy()
        new.episodes.append((self.head, number, length, data))
        new.head += length
        while sum(e[2] for e in new.episodes) > self.max_steps:
            new.episodes.pop(0)
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
calls = st.sampled_from(["write", "write", "write", "clear", "flush", "append", "finish", "finish"])


class BufferMachine(RuleBasedStateMachine):
    """What RAM and disk have in common."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.recordings, self.next_number, self.counter = [], 0, 0

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
        self.model = Model(max_steps)
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

    def call(self, kind, length, data, which):
        """Make a call, on the buffer and on the model."""
        recording, number = self.recordings[which % len(self.recordings)] if self.recordings else (None, None)
        count = recording.num_steps if recording else 0
        if kind == "append" and recording and count < self.model.max_steps:
            recording.append({name: v[0] for name, v in columns(number, count, count + 1).items()})
        elif kind == "finish" and recording:
            recording.finish(terminated=True, episode_data=data)
            self.recordings.remove((recording, number))
            self.model = self.model.written(number, count, data) if count else self.model
        elif kind == "clear":
            self.buf.clear()
            self.model = self.model.cleared()
        elif kind == "flush":
            self.buf.flush()
        else:
            length, number = min(length, self.model.max_steps), self.number()
            self.buf.write_episode(columns(number, 0, length) | ({EPISODE_DATA_KEY: data} if data else {}))
            self.model = self.model.written(number, length, data)

    @rule(kind=calls, length=lengths, data=datas, which=st.integers(0, 9))
    def do(self, kind, length, data, which):
        self.call(kind, length, data, which)

    @rule(steps=st.integers(0, 4))
    def begin_recording(self, steps):
        if len(self.recordings) < 3:
            self.recordings.append((self.buf.begin_episode(), self.number()))
            for _ in range(min(steps, self.model.max_steps)):
                self.call("append", 1, {}, len(self.recordings) - 1)

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
    def make(self, **options):
        return ReplayBuffer(**options)

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
        self.readers = []

    def teardown(self):
        for reader, _ in self.readers:
            reader.close()
        super().teardown()

    def make(self, **options):
        return ReplayBuffer(path=os.path.join(self.folder, "buf"), **options)

    @rule(background=st.booleans())
    def reopen(self, background):
        """Close the buffer and open it again: what is being recorded is dropped or kept, in the order of its ids."""
        if background:
            self.buf.engine.owned.sync_behind()
        self.buf.close()
        left, self.recordings = sorted((recording.id, recording.num_steps, n) for recording, n in self.recordings), []
        for _, count, number in left if self.keep else ():
            self.model = self.model.written(number, count, {}) if count else self.model
        self.buf = self.make(max_steps=self.model.max_steps, **self.options)

    # -- readers -------------------------------------------------------------------------------

    def seen(self, reader):
        """Return the model that a reader which has just caught up agrees with."""
        assert observe(reader) == self.model.plain()
        return self.model

    @rule()
    def open_reader(self):
        if len(self.readers) < 2:
            reader = ReplayBuffer.open(self.buf.path)
            self.readers.append((reader, self.seen(reader)))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 1), way=st.sampled_from(["refresh", "sample"]))
    def refresh(self, which, way):
        i = which % len(self.readers)
        reader, _ = self.readers[i]
        if way == "sample" and self.clips_of(self.model):
            stored = {e[1]: e[2] for e in self.model.episodes}
            prove(reader.sample(6), stored, self.options["history_len"], self.options["frameskip"])
        else:
            reader.refresh()
        self.readers[i] = reader, self.seen(reader)
        assert reader.engine.reader.index.check() == []

    def clips_of(self, model):
        """Return how many clips a model has."""
        return sum(max(0, e[2] - self.span + 1) for e in model.episodes)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 1))
    def look_at_what_may_be_gone(self, which):
        """Without a refresh: the length stands still, and every clip is one that lives."""
        i = which % len(self.readers)
        reader, known = self.readers[i]
        size = len(reader)
        assert size == self.clips_of(known)
        stored = {e[1]: e[2] for m in (known, self.model) for e in m.episodes}
        try:
            found = reader.__getitems__(range(size)) if size else []
        except NoClipsError:
            assert not self.clips_of(self.model)
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


@pytest.mark.parametrize("machine", [RamMachine, DiskMachine])
def test_against_a_list(machine):
    examples = settings.default.max_examples * 3 // 10
    run_state_machine_as_test(machine, settings=settings(settings.default, max_examples=examples))


@pytest.mark.campaign
@pytest.mark.parametrize("machine", [RamMachine, DiskMachine])
def test_campaign(machine):
    profile = settings.get_profile("campaign")
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=profile.max_examples // 5))


# -- controls: a planted fault, and a script of the machine's own rules that must stumble over it --


def begun(machine, **options):
    options = {"durability": "process", "interrupted": "drop", **options}
    machine.begin(max_steps=10, spare=2, history=1, skip=1, options=options, schema=True)


def reopen_after_each_write(machine):
    begun(machine, storage="zarr", interrupted="keep")
    for _ in range(5):
        machine.call("write", 2, {}, 0)
        machine.sample(2, None)
        machine.begin_recording(2)
        machine.reopen(False)
        machine.agrees()


def read_after_each_write(machine):
    begun(machine, storage=Zarr("lz4", 3))
    machine.open_reader()
    for _ in range(10):
        machine.call("write", 2, {}, 0)
        machine.refresh(0, "refresh")
        machine.sample(8, None)


def never_told(self, state, _real=StateFile.write):
    if state.generation % 5:
        _real(self, state)


PLANTED = {
    "readers are not always told": (read_after_each_write, (StateFile, "write", never_told)),
    "a decoded chunk is served for ever": (
        read_after_each_write,
        (ChunkCache, "get", lambda cache, chunk, position: cache._chunks.get(chunk, (None,))[0]),
    ),
    "rows that share a chunk are not carried over": (
        reopen_after_each_write,
        (ZarrColumn, "_stored", lambda self, *_: np.zeros((self._steps, self._row), np.uint8)),
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_control_the_machine_finds(planted):
    def play():
        machine = DiskMachine()
        try:
            script(machine)
            machine.agrees()
        finally:
            machine.teardown()

    script, fault = PLANTED[planted]
    play()
    with mock.patch.object(*fault), pytest.raises((AssertionError, CorruptError)):
        play()
