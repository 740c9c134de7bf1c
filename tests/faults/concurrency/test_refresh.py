"""Threads that share a reader refresh it at the same time."""

import os
import time

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from ringmap.storage.read.reader import Reader


@pytest.fixture
def writer(fast):
    writer = ReplayBuffer(100, path=fast / "buf", seed=0, sync_every_s=0)
    yield writer
    writer.close()


def write(writer, episodes):
    for _ in range(episodes):
        length = 3 + writer.num_episodes % 4
        writer.write_episode({"x": np.arange(length)})


class Meanwhile:
    """Runs `work` once, when a refresh has looked at state.bin, or has read the new records."""

    def __init__(self, monkeypatch, reader, when, work):
        self.work = work
        if when == "looked":
            self._set(monkeypatch, reader._state_file, "peek")
        else:  # a single record, or several
            self._set(monkeypatch, reader.table, "read")
            self._set(monkeypatch, reader.table, "read_range")

    def _set(self, monkeypatch, owner, name):
        call = getattr(owner, name)

        def and_then(*args):
            found = call(*args)
            work, self.work = self.work, None
            if work is not None:
                work()
            return found

        monkeypatch.setattr(owner, name, and_then, raising=False)


def others(writer, reader, more):
    """Return what another thread does, and the writer before it."""

    def work():
        write(writer, more)
        reader.refresh()

    return work


@pytest.mark.parametrize("when", ["looked", "read"])
@pytest.mark.parametrize("stored", [0, 2, 30])
@pytest.mark.parametrize("fresh", [1, 5, 40])
@pytest.mark.parametrize("more", [0, 1, 7, 40])
def test_another_thread_is_faster(writer, monkeypatch, when, stored, fresh, more):
    write(writer, stored)
    buffer = ReplayBuffer.open(writer.path, seed=0)
    buffer.refresh()
    write(writer, fresh)
    reader = buffer.engine.source
    Meanwhile(monkeypatch, reader, when, others(writer, reader, more))
    buffer.refresh()
    buffer.refresh()
    write(writer, 2)
    buffer.refresh()
    assert buffer.lengths.tolist() == writer.lengths.tolist()
    assert reader.live.starts.tolist() == writer.engine.source.live.starts.tolist()
    assert buffer.engine.reader.index.check() == []
    buffer.close()


def test_control_a_follower_that_trusts_what_it_read(writer, monkeypatch):
    write(writer, 2)
    buffer = ReplayBuffer.open(writer.path, seed=0)
    write(writer, 3)
    reader = buffer.engine.source
    follow = Reader._follow

    def trusting(reader, shown, fresh, anew):
        """Add the records as if nothing had come between: what a lock around the change alone would do."""
        records, _ = reader.table.read_range(fresh, shown.seq)
        with reader.lock:
            reader.live.extend(records["start"], records["length"])
            reader.seq, reader._shown = shown.seq, shown
        return True

    monkeypatch.setattr(Reader, "_follow", trusting)
    Meanwhile(monkeypatch, reader, "read", reader.refresh)
    buffer.refresh()
    monkeypatch.setattr(Reader, "_follow", follow)
    assert buffer.lengths.tolist() != writer.lengths.tolist()
    buffer.close()


# -- looks without a system call ---------------------------------------------------------------------


class Counting(System):
    """The services of this system, which count reads of files."""

    def __init__(self, portable=False):
        super().__init__(portable)
        self.calls = 0

    def pread(self, *args):
        self.calls += 1
        return super().pread(*args)


def calls_of(system, monkeypatch, work):
    """Return how many reads of files, and looks at paths, some work makes."""
    before, looks, stat = system.calls, [], os.stat
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda *args, **options: looks.append(args) or stat(*args, **options))
        work()
    return system.calls - before + len(looks)


@pytest.mark.skipif(not System().loads_are_ordered, reason="this processor does not order loads")
def test_a_look_at_an_idle_writer_makes_no_system_call(writer, monkeypatch):
    write(writer, 3)
    system = Counting()
    with ReplayBuffer.open(writer.path, seed=0, disk=Disk(system)) as reader:
        reader.sample(2)
        monkeypatch.setattr(time, "monotonic", lambda: 0.0)  # no 100 ms pass
        assert calls_of(system, monkeypatch, lambda: reader.sample(2)) == 0
        write(writer, 1)
        assert calls_of(system, monkeypatch, lambda: reader.sample(2)) > 0
        assert reader.num_episodes == 4
        assert calls_of(system, monkeypatch, lambda: reader.sample(2)) == 0


@pytest.mark.parametrize("options", [{"reads": "pread"}, {"portable": True}])
def test_control_a_look_without_a_map(writer, monkeypatch, options):
    write(writer, 3)
    system = Counting(options.pop("portable", False))
    with ReplayBuffer.open(writer.path, seed=0, disk=Disk(system), **options) as reader:
        reader.sample(2)
        assert calls_of(system, monkeypatch, reader.refresh) > 0
        write(writer, 1)
        reader.refresh()
        assert reader.num_episodes == 4


def test_each_kind_of_record_is_followed_one_by_one(writer):
    """A reader that looks after every record has what a reader has that opens then."""
    rng = np.random.default_rng(0)
    follower = ReplayBuffer.open(writer.path, seed=0)
    part = writer.begin_episode(commit_every=2)
    for _ in range(300):
        kind = rng.integers(0, 12)
        if kind == 0:
            writer.clear()
        elif kind < 4:
            part.append({"x": np.int64(kind)})
        elif kind == 4:
            part.finish()
            part = writer.begin_episode(commit_every=2)
        elif kind == 5:  # longer than the spare rows: an episode after a retirement
            writer.write_episode({"x": np.arange(60)})
        else:
            write(writer, 1)
        follower.refresh()
        with ReplayBuffer.open(writer.path, seed=0) as anew:
            assert follower.lengths.tolist() == anew.lengths.tolist()
            one, other = follower.engine.source, anew.engine.source
            assert (one.seq, one.first, one.tail, one.head) == (other.seq, other.first, other.tail, other.head)
            assert one.live.starts.tolist() == other.live.starts.tolist()
            anew.close()
    part.abandon()
    follower.close()


@pytest.mark.skipif(not System().loads_are_ordered, reason="this processor does not order loads")
def test_a_state_that_is_shown_during_a_look_is_new_at_the_next(writer, monkeypatch):
    write(writer, 3)
    with ReplayBuffer.open(writer.path, seed=0) as reader:
        write(writer, 1)
        Meanwhile(monkeypatch, reader.engine.source, "looked", lambda: write(writer, 1))
        reader.refresh()
        assert reader.num_episodes == 4
        reader.refresh()
        assert reader.num_episodes == 5


@pytest.mark.skipif(not System().loads_are_ordered, reason="this processor does not order loads")
def test_control_generations_are_read_after_the_state(writer, monkeypatch):
    def look(self):
        if self._state_file.generations() != self._peeked[0]:
            shown = self._state_file.peek()[0]
            self._peeked = self._state_file.generations(), shown
        return self._peeked[1]

    monkeypatch.setattr(Reader, "_peek", look)
    with pytest.raises(AssertionError):
        test_a_state_that_is_shown_during_a_look_is_new_at_the_next(writer, monkeypatch)


@pytest.mark.parametrize("changed", [{"era": 1}, {"seq": 1}, {"tail": 1}, {"head": 1}], ids=lambda c: next(iter(c)))
def test_a_record_that_the_state_does_not_show_takes_the_whole_examination(writer, changed):
    """As if another thread, or another writer, had been faster."""
    write(writer, 3)
    with ReplayBuffer.open(writer.path, seed=0) as reader:
        write(writer, 1)
        source = reader.engine.source
        shown = source._state_file.peek()[0]
        other = {name: getattr(shown, name) + more for name, more in changed.items()}
        assert not source._follow_one(shown._replace(**other))
        assert reader.num_episodes == 3
        assert source._follow_one(shown)
        assert reader.num_episodes == 4
