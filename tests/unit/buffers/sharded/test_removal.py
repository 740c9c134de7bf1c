"""Rings that nobody writes are removed: by name; readers lose their clips as by an eviction."""

import os
import shutil

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.buffers.episodes import StoredEpisodes
from ringmap.buffers.rings import apart, remove_ring
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import InputError, LockedError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.files import Disk
from tests.tiers import few
from tests.unit.buffers.steps import prove


def open_all(fleet, **options):
    return ShardedReplayBuffer(fleet.folder, **{"history_len": 3, "seed": 0, "wait_s": 0, **options})


def names(buf):
    return [shard.name for shard in buf.shards]


@pytest.fixture
def closed(three):
    """The three rings, which nobody writes."""
    for writer in three.writers.values():
        writer.close()
    return three


def test_by_name(closed):
    buf, other = open_all(closed), open_all(closed)
    ids = other.sample(200).ids
    buf.remove_ring("b")
    assert names(buf) == ["a", "c"]
    assert sorted(path.name for path in closed.folder.iterdir()) == ["a", "c"]
    del closed.model["b"]
    prove(buf.sample(300), closed.lengths, 3)
    # Another reader redraws what it asks for, and goes on.
    from ringmap.clips.gather import PINNED

    lost = ids[apart(ids)[0] == 1]
    other.refresh()
    asked = other.engine.anchors(lost + PINNED, other.cut)
    clips = other.engine.replaced(asked, other.cut)
    assert 1 not in apart(clips)[0]
    prove(other.sample(300), closed.lengths, 3)
    assert other.num_redraws >= len(lost)


def test_a_ring_that_is_written_stays(three):
    buf = open_all(three)
    before = sorted((three.folder / "a").rglob("*"))
    with pytest.raises(LockedError, match=r"remove_ring: .*a is written by process \d+"):
        buf.remove_ring("a")
    assert sorted((three.folder / "a").rglob("*")) == before
    three.write("a", 10)
    assert buf.refresh()
    assert names(buf) == ["a", "b", "c"]
    with pytest.raises(InputError, match=r"no ring 'd'; there are \['a', 'b', 'c'\]"):
        buf.remove_ring("d")


def test_one_that_can_not_be_read(closed):
    (closed.folder / "b" / "state.bin").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="goes on without .*/b: "):
        buf = open_all(closed, on_bad="skip")
    assert buf.shards[1].problem is not None
    buf.remove_ring("b")
    assert not (closed.folder / "b").exists()
    assert [shard.name for shard in buf.shards] == ["a", "c"]


def test_a_name_can_be_used_again(closed):
    buf = open_all(closed)
    buf.remove_ring("b")
    with ReplayBuffer(100, path=closed.folder / "b") as again:
        again.write_episode({k: v for k, v in next(iter(open_all(closed).episodes())).items() if not k.startswith("_")})
    buf.refresh()
    assert names(buf) == ["a", "b", "c"]
    assert [ring.number for ring in buf.engine.rings] == [0, 2, 3]


@pytest.mark.parametrize("change", few(range(1, 12), 5))
def test_a_kill_leaves_the_ring_or_none(closed, change):
    """Killed before each change: the ring is whole, or no reader finds it; the next call ends what was begun."""
    whole = open_all(closed).num_episodes
    pid = os.fork()
    if not pid:
        left = change

        def before(self, what, path, *details):
            nonlocal left
            left -= 1
            if not left:
                os._exit(9)

        Disk.before = before
        open_all(closed).remove_ring("b")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] in (9 << 8, 0)
    buf = open_all(closed)
    assert [shard.problem for shard in buf.shards] == [None] * len(buf.shards)
    if (closed.folder / "b").exists():
        assert buf.num_episodes == whole
        buf.remove_ring("b")
    else:
        assert names(buf) == ["a", "c"]
        with ReplayBuffer(100, path=closed.folder / "b"):
            pass
        buf.refresh()
        buf.remove_ring("b")
    assert sorted(path.name for path in closed.folder.iterdir()) == ["a", "c"]


def test_it_is_away_for_good_before_anything_of_it_is_deleted_and_then_it_is_no_ring_first(closed, monkeypatch):
    changes = []

    def before(self, what, path, *details):
        changes.append((what, os.path.relpath(path, closed.folder)))

    monkeypatch.setattr(Disk, "before", before)
    remove_ring(str(closed.folder / "b"), "test")
    at = next(number for number, (what, _) in enumerate(changes) if what == "rename")
    synced = changes.index(("sync_folder", "."), at)
    deleted = [path for _, path in changes[synced + 1 :] if path.startswith("removed/b/")]
    assert deleted[0] == "removed/b/manifest.json"
    assert not [path for _, path in changes[at + 1 : synced] if path.startswith("removed/b/")]


def test_what_a_killed_call_left_is_deleted_and_what_another_deletes_stays(closed):
    left, other = closed.folder / "removed" / "b", closed.folder / "removed" / "z"
    for folder in (left, other):
        folder.mkdir(parents=True)
        (folder / "table.bin").write_bytes(b"x")
    buf = open_all(closed)
    buf.remove_ring("b")
    assert not left.exists()
    assert other.exists()
    assert names(buf) == ["a", "c"]


def test_its_priorities_go_with_it(closed, tmp_path):
    state = tmp_path / "learner"
    buf = open_all(closed, sampler=PrioritizedSampler(), state=state)
    buf.sample(10)
    uuid = buf.engine.members.numbers.uuids[1].hex()
    assert (state / uuid / "priorities.bin").exists()
    buf.remove_ring("b")
    assert not (state / uuid / "priorities.bin").exists()
    assert set(apart(buf.sample(500).ids)[0].tolist()) == {0, 2}
    assert uuid not in buf.state_dict()["sampler"]["rings"]
    buf.close()


def test_shards_say_which_weights_played(fleet, monkeypatch):
    fleet.ring("a")
    fleet.write("a", 5, {"policy_step": 3})
    fleet.write("a", 5, {"policy_step": 7})
    fleet.ring("b")
    fleet.write("b", 5)
    fleet.ring("c")
    buf = open_all(fleet)
    assert [shard.policy_step for shard in buf.shards] == [7, None, None]
    # Of each ring the data of one episode are read. The names of all cost O(episodes).
    read = []
    monkeypatch.setattr(StoredEpisodes, "data_names", lambda self: read.append(self) or [])
    assert [shard.policy_step for shard in buf.shards] == [7, None, None]
    assert read == []
    assert buf.episode_column_names == []
    assert read != []  # control


def test_the_control_of_the_lock(three, monkeypatch):
    """Without the lock a ring is taken from its writer."""
    from ringmap.buffers import rings

    class NoLock(rings.WriterLock):
        def acquire(self):
            pass

    monkeypatch.setattr(rings, "WriterLock", NoLock)
    open_all(three).remove_ring("a")
    assert not (three.folder / "a").exists()
    with pytest.raises(Exception, match="replaced|removed|gone|moved"):
        three.write("a", 10)
    shutil.rmtree(three.folder / "removed", ignore_errors=True)
    np.testing.assert_equal(len(open_all(three).shards), 2)
