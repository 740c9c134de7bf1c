"""A disk lost the newest state, and the next writer continues from an earlier one, while other threads read.

What a thread looked up before may be rows of other episodes by now: it is lost, also when another thread has moved the
reader to the new timeline meanwhile.
"""

import contextlib
import threading

import numpy as np
import pytest

from ringmap import Marks, ReplayBuffer
from ringmap.data import ReturnToGo, ShardedReplayBuffer
from ringmap.errors import NoClipsError
from ringmap.samplers import EpisodeSampler
from ringmap.storage.columns.memmap import HEADER_NBYTES, AdjacentColumn, MemmapColumn
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Pulse
from ringmap.storage.records.table import RECORD
from tests.disks import Through
from tests.faults.crash.recording import Machine
from tests.unit.buffers.sharded.striking import Striking, always_look
from tests.unit.buffers.steps import episode, prove

AFTER = {0: 5, 1: 5, 2: 5, 3: 5, 7: 3, 8: 3}
"""Episode -> length in the new history; the old one had episode 4, of 6 steps, in the place of the last two."""


def ended(*calls):
    """Run calls in another thread, one after the other, and wait for it."""
    other = threading.Thread(target=lambda: [call() for call in calls])
    other.start()
    other.join()


class Ring:
    """A ring whose newest episode gets lost. `path`: its directory."""

    def __init__(self, path):
        self.path = path
        self.writer = ReplayBuffer(40, 2, path=path, sync_every_s=0, reward_at="same")
        for number, length in enumerate([5, 5, 5, 5, 6]):
            self.writer.write_episode(episode(number, length))

    def break_timeline(self):
        """Lose the newest record, and write two episodes in its place."""
        store = self.writer.engine.owned
        table, slot = store.table, store.seq
        store.abandon()
        with open(self.path / "episodes.npy", "r+b") as file:
            file.seek(HEADER_NBYTES + slot % table.slots * RECORD.itemsize)
            file.write(bytes(RECORD.itemsize))
        self.writer = Through(ReplayBuffer, Disk(Machine(2))).open(self.path, "r+")
        for number in (7, 8):
            self.writer.write_episode(episode(number, 3))


@pytest.fixture
def ring(tmp_path):
    made = Ring(tmp_path / "fleet/0")
    yield made
    made.writer.close()


@pytest.fixture
def reader(ring):
    with contextlib.closing(ReplayBuffer.open(ring.path, seed=0)) as opened:
        yield opened


def crossing(buf):
    """Return the id of the clip where the last two episodes will meet: steps 2 and 3 of episode 4."""
    number = len(buf) - 3
    assert buf[number]["step"].tolist() == [2, 3]
    return number


def refuse_nothing(monkeypatch):
    monkeypatch.setattr(Pulse, "is_broken", False)


def test_a_clip_is_drawn_anew(ring, reader, monkeypatch):
    number = crossing(reader)
    Striking(monkeypatch, MemmapColumn, lambda: ended(ring.break_timeline, reader.refresh), 1)
    clip = reader[number]
    assert len(set(clip["episode"].tolist())) == 1
    assert np.diff(clip["step"]).tolist() == [1]
    assert reader.num_redraws == 1
    prove(reader.sample(30), AFTER, 2)
    assert reader.num_redraws == 1  # nothing counts as lost for ever


def test_control_without_the_break_a_clip_is_of_two_episodes(ring, reader, monkeypatch):
    refuse_nothing(monkeypatch)
    number = crossing(reader)
    Striking(monkeypatch, MemmapColumn, lambda: ended(ring.break_timeline, reader.refresh), 1)
    assert reader[number]["episode"].tolist() == [7, 8]


@pytest.fixture
def fleet(ring, tmp_path, monkeypatch):
    always_look(monkeypatch)
    with contextlib.closing(ReplayBuffer(40, 2, path=tmp_path / "fleet/1", reward_at="same")) as other:
        other.write_episode(episode(20, 4))
        with contextlib.closing(ShardedReplayBuffer(tmp_path / "fleet", seed=0, wait_s=0)) as buf:
            yield buf


def lost_in_views(ring, buf):
    """Draw from views whose newest episode gets lost; return which episodes came."""
    whole = buf.view()
    views = [whole, whole.take(range(4)), whole.take([4])]
    before = [view.num_valid_ends() for view in views]
    ring.break_timeline()
    buf.refresh()
    assert [view.num_valid_ends() for view in views] == [before[0] - 5, before[1], 0]
    with pytest.raises(NoClipsError):
        views[2].sample(1)
    with pytest.raises(NoClipsError):
        views[2][2]  # the steps there are of two episodes by now, and nothing comes in its place
    return {number for view in views[:2] for number, _ in prove(view.sample(200), {**AFTER, 20: 4}, 2)}


def test_a_view_does_not_hold_what_is_in_the_place_of_a_lost_episode(ring, reader):
    assert lost_in_views(ring, reader) == {0, 1, 2, 3}


def test_a_view_of_many_rings_does_not_hold_it_either(ring, fleet):
    assert lost_in_views(ring, fleet) == {0, 1, 2, 3, 20}


def test_a_mark_of_a_lost_episode_is_none_of_what_is_in_its_place(ring, reader):
    reader.sampler = EpisodeSampler(0, where="not flags contains bad")
    Marks(reader).set(20, flags="bad")
    assert {number for number, _ in prove(reader.sample(100), dict.fromkeys(range(5), 6), 2)} == {0, 1, 2, 3}
    ring.break_timeline()
    assert {number for number, _ in prove(reader.sample(200), AFTER, 2)} == {*AFTER}


def clips_of_fleet(buf):
    """Return ids of clips of both rings; the first is that where two episodes will meet."""
    ids = np.array([buf.shards[0].clips - 3, len(buf) - 1])
    assert buf[ids]["step"].tolist() == [[2, 3], [2, 3]]
    return ids


def test_a_clip_of_many_rings_is_drawn_anew(ring, fleet, monkeypatch):
    ids = clips_of_fleet(fleet)
    Striking(monkeypatch, AdjacentColumn, lambda: ended(ring.break_timeline, fleet.refresh), 1)
    prove(fleet[ids], {**AFTER, 20: 4}, 2)
    redrawn = fleet.num_redraws
    assert redrawn >= 1
    prove(fleet.sample(60), {**AFTER, 20: 4}, 2)
    assert fleet.num_redraws == redrawn


def test_control_of_many_rings(ring, fleet, monkeypatch):
    refuse_nothing(monkeypatch)
    ids = clips_of_fleet(fleet)
    Striking(monkeypatch, AdjacentColumn, lambda: ended(ring.break_timeline, fleet.refresh), 1)
    assert fleet[ids]["episode"].tolist() == [[7, 8], [20, 20]]


def test_a_thread_that_never_refreshed_reads_all_episodes(ring, reader):
    assert len(list(reader.episodes())) == 5
    ended(ring.break_timeline, reader.refresh)
    found = [(int(e["episode"][0]), len(e["step"])) for e in reader.episodes()]
    assert found == list(AFTER.items())
    ended(reader.refresh)
    assert reader.load_episode(-1)["episode"].tolist() == [8, 8, 8]
    assert reader.load_steps(4, 0, 2)["episode"].tolist() == [7, 7]


def test_an_episode_that_is_read_meanwhile_is_not_the_old_one(ring, reader, monkeypatch):
    real = MemmapColumn.read
    left = [lambda: ended(ring.break_timeline, reader.refresh)]

    def read(column, slot, count):
        while left:
            left.pop()()
        return real(column, slot, count)

    monkeypatch.setattr(MemmapColumn, "read", read)
    found = [(int(e["episode"][0]), len(e["step"])) for e in reader.episodes()]
    assert (4, 6) not in found
    assert set(found) <= set(AFTER.items())


def test_returns_are_not_those_of_the_old_history(ring, reader):
    window = {"togo": ReturnToGo(of="step")}

    def returns():
        view = reader.view(window=window)
        batch = view[range(len(view))]
        return {
            (int(n), int(s)): float(r)
            for n, s, r in zip(batch["episode"].ravel(), batch["step"].ravel(), batch["togo"].ravel(), strict=True)
        }

    assert returns()[4, 0] == 15
    ring.break_timeline()
    reader.refresh()
    found = returns()
    assert {key: value for key, value in found.items() if key[0] == 7} == {(7, 0): 3, (7, 1): 3, (7, 2): 2}
