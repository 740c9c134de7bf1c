"""Rings that nobody writes are removed: by name, by age, by a budget; readers lose their clips as by an eviction."""

import logging
import os
import pickle
import shutil

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.buffers.episodes import StoredEpisodes
from ringmap.buffers.sharded.numbers import apart
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import InputError, LockedError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.files import Disk
from ringmap.storage.inspect.describe import nbytes_of
from tests.buffers.steps import prove
from tests.tiers import few


def open_all(fleet, **options):
    return ShardedReplayBuffer(fleet.folder, **{"history_len": 3, "seed": 0, "wait_s": 0, **options})


def names(buf):
    return [shard.name for shard in buf.shards]


def age(fleet, name, seconds):
    """Let the last commit of a ring be so long ago."""
    table = fleet.folder / name / "episodes.npy"
    then = os.stat(table).st_mtime - seconds
    os.utime(table, (then, then))


@pytest.fixture
def closed(three):
    """The three rings, which nobody writes."""
    for writer in three.writers.values():
        writer.close()
    return three


def test_by_name(closed):
    buf, other = open_all(closed), open_all(closed)
    ids = other.sample(200).ids
    buf.retire("b")
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
    with pytest.raises(LockedError, match=r"retire: .*a is written by process \d+"):
        buf.retire("a")
    assert sorted((three.folder / "a").rglob("*")) == before
    three.write("a", 10)
    assert buf.refresh()
    assert names(buf) == ["a", "b", "c"]
    with pytest.raises(InputError, match=r"no ring 'd'; there are \['a', 'b', 'c'\]"):
        buf.retire("d")


def test_one_that_can_not_be_read(closed):
    (closed.folder / "b" / "state.bin").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="goes on without .*/b: "):
        buf = open_all(closed, on_bad="skip")
    assert buf.shards[1].problem is not None
    buf.retire("b")
    assert not (closed.folder / "b").exists()
    assert [shard.name for shard in buf.shards] == ["a", "c"]


def test_a_name_can_be_used_again(closed):
    buf = open_all(closed)
    buf.retire("b")
    with ReplayBuffer(100, path=closed.folder / "b") as again:
        again.write_episode({k: v for k, v in next(iter(open_all(closed).episodes())).items() if not k.startswith("_")})
    buf.refresh()
    assert names(buf) == ["a", "b", "c"]
    assert [ring.number for ring in buf.engine.each()] == [0, 2, 3]


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
        open_all(closed).retire("b")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] in (9 << 8, 0)
    buf = open_all(closed)
    assert [shard.problem for shard in buf.shards] == [None] * len(buf.shards)
    if (closed.folder / "b").exists():
        assert buf.num_episodes == whole
        buf.retire("b")
    else:
        assert names(buf) == ["a", "c"]
        with ReplayBuffer(100, path=closed.folder / "b"):
            pass
        buf.refresh()
        buf.retire("b")
    assert sorted(path.name for path in closed.folder.iterdir()) == ["a", "c"]


def test_after_some_time(closed, caplog):
    age(closed, "a", 50)
    age(closed, "c", 500)
    with caplog.at_level(logging.INFO, "ringmap"):
        buf = open_all(closed, retire_after={"idle_s": 100})
        buf.sample(10)
        assert names(buf) == ["a", "b"]
    assert "removed the ring c: retire_after={'idle_s': 100}" in caplog.text
    age(closed, "a", 100)
    buf.sample(10)  # within the same second
    assert names(buf) == ["a", "b"]
    assert buf.refresh()
    assert names(buf) == ["b"]


def test_after_so_many_steps(fleet):
    for name in "abc":
        fleet.ring(name)
        fleet.write(name, 10)
    for name in "ab":
        fleet.writers[name].close()
    buf = open_all(fleet, retire_after={"steps": 100})
    buf.refresh()
    for _ in range(5):
        fleet.write("c", 20)
    buf.refresh()
    assert names(buf) == ["a", "b", "c"]
    fleet.write("c", 1)
    buf.refresh()
    assert names(buf) == ["c"]  # which has a writer


def test_a_budget_takes_the_oldest_first(closed):
    age(closed, "b", 30)
    age(closed, "c", 20)
    taken = {name: nbytes_of(closed.folder / name) for name in "abc"}
    buf = open_all(closed, retire_after={"nbytes": taken["a"] + taken["c"]})
    buf.refresh()
    assert names(buf) == ["a", "c"]


def test_a_ring_with_a_writer_is_never_due(three):
    for name in "abc":
        age(three, name, 1000)
    buf = open_all(three, retire_after={"idle_s": 10, "steps": 1, "nbytes": 1})
    buf.refresh()
    assert names(buf) == ["a", "b", "c"]


def test_copies_remove_nothing(closed):
    buf = open_all(closed, retire_after={"idle_s": 100})
    for name in "abc":
        age(closed, name, 1000)
    copy = pickle.loads(pickle.dumps(buf))
    copy.refresh()
    assert names(copy) == ["a", "b", "c"]
    pid = os.fork()
    if not pid:
        buf.refresh()
        os._exit(0)
    os.waitpid(pid, 0)
    assert sorted(path.name for path in closed.folder.iterdir()) == ["a", "b", "c"]


def test_its_priorities_go_with_it(closed, tmp_path):
    state = tmp_path / "learner"
    buf = open_all(closed, sampler=PrioritizedSampler(), state=state)
    buf.sample(10)
    uuid = buf.engine.rings.numbers.uuids[1].hex()
    assert (state / uuid / "priorities.bin").exists()
    buf.retire("b")
    assert not (state / uuid / "priorities.bin").exists()
    assert set(apart(buf.sample(500).ids)[0].tolist()) == {0, 2}
    buf.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must name limits"),
        ({"idle": 3}, "among idle_s, steps, nbytes"),
        ({"idle_s": 0}, r"retire_after\['idle_s'\] must be a positive number, got 0"),
        ({"steps": True}, "positive number"),
        (5, "must name limits"),
    ],
)
def test_arguments(three, given, message):
    with pytest.raises(InputError, match=message):
        open_all(three, retire_after=given)


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
    from ringmap.buffers.sharded import retiring

    class NoLock(retiring.WriterLock):
        def acquire(self):
            pass

    monkeypatch.setattr(retiring, "WriterLock", NoLock)
    open_all(three).retire("a")
    assert not (three.folder / "a").exists()
    with pytest.raises(Exception, match="replaced|removed|gone|moved"):
        three.write("a", 10)
    shutil.rmtree(three.folder / "retired", ignore_errors=True)
    np.testing.assert_equal(len(open_all(three).shards), 2)
