"""Threads that share a reader refresh it at the same time."""

import numpy as np
import pytest

from ringmap import ReplayBuffer
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
        owner, name = (
            (reader._state_file, "look") if when == "looked" else (reader.table, "read_range")
        )
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
        with reader.memory:
            reader.live.extend(records["start"], records["length"])
            reader.seq, reader._shown = shown.seq, shown
        return True

    monkeypatch.setattr(Reader, "_follow", trusting)
    Meanwhile(monkeypatch, reader, "read", reader.refresh)
    buffer.refresh()
    monkeypatch.setattr(Reader, "_follow", follow)
    assert buffer.lengths.tolist() != writer.lengths.tolist()
    buffer.close()
