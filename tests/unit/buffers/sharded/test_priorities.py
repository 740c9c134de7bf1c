"""Priorities over all rings, against their definition; what the learner's directory keeps."""

import os
import pickle
import signal

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.buffers.rings import apart, joined
from ringmap.buffers.sharded import priorities
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import InputError, LockedError
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.files import Disk
from tests.unit.buffers.processes import Child
from tests.unit.buffers.steps import columns, prove

HISTORY = 3


def opened(fleet, state=None, rng=0, **options):
    sampler = PrioritizedSampler(alpha=options.pop("alpha", 0.7), rng=rng)
    given = {"history_len": HISTORY, "seed": 0, "wait_s": 0, "sampler": sampler, **options}
    return ShardedReplayBuffer(fleet.folder, state=state, **given)


def test_the_sampler_of_a_fleet_stands_for_it(three):
    """What the caller made, and what `buf.sampler` is, takes priorities and state as the buffer does."""
    sampler = PrioritizedSampler(rng=0)
    buf = opened(three, sampler=sampler)
    batch = buf.sample(50)
    assert sampler.update_priorities(batch.ids, np.full(50, 1e-9)) > 0
    assert not set(buf.sample(300).ids.tolist()) & set(batch.ids.tolist())
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    again = opened(three, sampler=(other := PrioritizedSampler(rng=5)))
    other.load_state_dict(state)
    np.testing.assert_array_equal(again.sample(100).ids, buf.sample(100).ids)
    buf.close()
    del buf
    with pytest.raises(InputError, match="update_priorities: no clip was drawn"):
        sampler.update_priorities(batch.ids, np.ones(50))
    with ReplayBuffer(100, sampler=other, seed=0) as ring:  # of one ring from here on
        ring.write_episode(columns(0, 0, 50))
        assert other.update_priorities(ring.sample(5).ids, np.ones(5)) == 5
    again.close()


def all_ids(buf):
    """Return the ids of all clips, as a batch has them."""
    found = []
    for ring in buf.engine.rings:
        live = ring.source.live
        for start, length in zip(live.starts.tolist(), live.lengths.tolist(), strict=True):
            found.append(joined(ring.number, np.arange(start, start + length - HISTORY + 1)))
    return np.concatenate(found)


def shares(buf, ids, draws=40_000):
    """Return how often each of these clips is drawn."""
    drawn = buf.sample(draws).ids
    assert np.isin(drawn, ids).all()
    return (drawn[:, None] == ids).sum(0) / draws


def near(found, expected, draws=40_000):
    """Tell whether frequencies are within five standard deviations."""
    return (np.abs(found - expected) <= 5 * np.sqrt(expected / draws) + 1e-9).all()


def expected(values, alpha=0.7, eps=1e-6):
    masses = (np.asarray(values, np.float32).astype(float) + eps) ** alpha
    return masses / masses.sum()


def test_draws_are_in_proportion_over_all_rings(three):
    buf = opened(three)
    prove(buf.sample(500), three.lengths, HISTORY)
    ids = all_ids(buf)
    assert near(shares(buf, ids), expected(np.ones(len(ids))))
    values = np.random.default_rng(0).exponential(1, len(ids))
    assert buf.update_priorities(ids, values) == len(ids)
    assert near(shares(buf, ids), expected(values))
    batch = buf.sample(500)
    prove(batch, three.lengths, HISTORY)
    chance = expected(values)[np.searchsorted(ids, batch.ids)]
    weights = (len(ids) * chance) ** -0.4
    np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-5)
    assert buf.engine.sampler.check() == []


@pytest.mark.parametrize("how", ["take", "split"])
def test_draws_of_a_view_are_in_proportion_over_its_clips(three, how):
    buf = opened(three)
    buf.sample(1)
    every = all_ids(buf)
    values = np.random.default_rng(0).exponential(1, len(every))
    buf.update_priorities(every, values)
    view = buf.split(0.6, seed=1)[0] if how == "split" else buf.view().take([1, 2, 6])
    mine = np.isin(every, view.positions(np.arange(len(view))))
    for _ in range(2):
        drawn = view.sample(40_000)
        assert near(
            (drawn.ids[:, None] == every).sum(0) / 40_000,
            np.where(mine, expected(values * 1.0) / expected(values)[mine].sum(), 0),
        )
        chance = expected(values[mine])[np.searchsorted(every[mine], drawn.ids)]
        weights = (mine.sum() * chance) ** -0.4
        np.testing.assert_allclose(drawn.weights, weights / weights.max(), rtol=1e-5)
        assert buf.update_priorities(every, values) == len(every), "those of other clips, too"
        assert near(shares(buf, every), expected(values))
        assert buf.update_priorities(every, values) == len(every)
    if how == "take":
        three.write("a", 190)  # evicts its own first episodes
        kept = mine & (apart(every)[0] != 0)
        drawn = view.sample(40_000)
        assert near((drawn.ids[:, None] == every[kept]).sum(0) / 40_000, expected(values[kept]))
    assert buf.engine.sampler.check() == []


def test_each_ring_s_evictions_are_followed(three):
    buf = opened(three, alpha=1.0)
    buf.sample(1)
    ids = all_ids(buf)
    buf.update_priorities(ids, np.full(len(ids), 0.5))
    for _ in range(40):  # ring "a" evicts all that it had
        three.write("a", 12)
    gone = ids[apart(ids)[0] == 0]
    batch = buf.sample(2000)
    prove(batch, three.lengths, HISTORY)
    assert not np.isin(batch.ids, gone).any()
    assert buf.update_priorities(gone, np.ones(len(gone))) == 0
    now = all_ids(buf)
    new = apart(now)[0] == 0
    # Those of "a" are new, with the highest priority so far, which is 1.
    assert near(shares(buf, now), expected(np.where(new, 1.0, 0.5), alpha=1.0))


def test_a_new_clip_gets_the_highest_priority_of_all_rings(three):
    buf = opened(three, alpha=1.0)
    buf.sample(1)
    ids = all_ids(buf)
    buf.update_priorities(ids[-1:], [40.0])  # of ring "c"
    three.write("a", HISTORY)
    buf.sample(1)
    now = all_ids(buf)
    values = np.where(np.isin(now, ids[:-1]), 1.0, 40.0)
    assert (values == 40).sum() == 2
    assert near(shares(buf, now), expected(values, alpha=1.0))


def test_a_ring_that_joins_and_one_that_leaves(three):
    import shutil

    buf = opened(three, alpha=1.0)
    ids = buf.sample(200).ids
    three.ring("d")
    three.write("d", 20)
    buf.refresh()
    assert 3 in apart(buf.sample(500).ids)[0]
    shutil.rmtree(three.folder / "b")
    buf.refresh()
    of_b = ids[apart(ids)[0] == 1]
    assert buf.update_priorities(of_b, np.ones(len(of_b))) == 0
    assert set(apart(buf.sample(2000).ids)[0].tolist()) == {0, 2, 3}


# -- the learner's directory ----------------------------------------------------------------


def learner(child, fleet, state):
    buf = opened(fleet, state)
    buf.sample(1)
    ids = all_ids(buf)
    values = np.random.default_rng(2).exponential(1, len(ids))
    buf.update_priorities(ids, values)
    child.say("done")
    signal.pause()


def test_priorities_survive_a_kill_of_the_learner(three, tmp_path):
    child = Child(lambda child: learner(child, three, tmp_path / "learner"))
    try:
        assert child.hear() == "done"
    finally:
        child.kill()
    three.write("b", HISTORY)  # while no learner is there
    buf = opened(three, tmp_path / "learner")
    buf.sample(1)
    ids = all_ids(buf)
    old = apart(ids)
    new = (old[0] == 1) & (old[1] >= buf.engine.rings[1].source.head - HISTORY)
    assert new.sum() == 1
    values = np.random.default_rng(2).exponential(1, len(ids) - 1).astype(np.float32)
    known = np.empty(len(ids))
    known[~new] = values
    known[new] = max(1.0, values.max())
    assert near(shares(buf, ids), expected(known))
    # The control: a learner without a directory begins again.
    assert near(shares(opened(three), ids), expected(np.ones(len(ids))))


def test_the_rings_are_not_written_to(three, tmp_path):
    before = sorted(str(path) for path in three.folder.rglob("*"))
    buf = opened(three, tmp_path / "learner")
    batch = buf.sample(10)
    buf.update_priorities(batch.ids, np.ones(10))
    buf.flush()
    buf.close()
    assert sorted(str(path) for path in three.folder.rglob("*")) == before


def test_one_learner_at_a_time(three, tmp_path):
    first = opened(three, tmp_path / "learner")
    with pytest.raises(LockedError, match=r"state=.*learner is held by process .*; give each learner its own"):
        opened(three, tmp_path / "learner")
    first.close()
    opened(three, tmp_path / "learner").close()


def test_a_copy_begins_with_what_is_stored_and_writes_nothing(three, tmp_path):
    buf = opened(three, tmp_path / "learner", alpha=1.0)
    buf.sample(1)
    ids = all_ids(buf)
    values = np.random.default_rng(3).exponential(1, len(ids))
    buf.update_priorities(ids, values)
    copy = pickle.loads(pickle.dumps(buf))
    assert near(shares(copy, ids), expected(values, alpha=1.0))
    copy.update_priorities(ids, np.ones(len(ids)))
    assert near(shares(copy, ids), expected(np.ones(len(ids)), alpha=1.0))
    copy.close()
    buf.close()
    again = opened(three, tmp_path / "learner", alpha=1.0)
    assert near(shares(again, ids), expected(values, alpha=1.0))


def test_a_forked_child_keeps_what_its_parent_knew(three, tmp_path):
    buf = opened(three, tmp_path / "learner", alpha=1.0)
    buf.sample(1)
    ids = all_ids(buf)
    values = np.where(apart(ids)[0] == 2, 1000.0, 0.0)
    buf.update_priorities(ids, values)
    pid = os.fork()
    if not pid:
        drawn = set(apart(buf.sample(100).ids)[0].tolist())
        buf.update_priorities(ids, np.ones(len(ids)))
        buf.close()
        os._exit(0 if drawn == {2} else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert near(shares(buf, ids), expected(values, alpha=1.0))
    with pytest.raises(LockedError):  # the child did not release the lock
        opened(three, tmp_path / "learner")


def test_after_a_reboot_they_begin_again(three, tmp_path, monkeypatch):
    state = tmp_path / "learner"
    buf = opened(three, state)
    buf.sample(1)
    ids = all_ids(buf)
    buf.update_priorities(ids, np.random.default_rng(4).exponential(1, len(ids)))
    buf.close()
    boot = Disk().boot_id()
    monkeypatch.setattr(priorities.Disk, "boot_id", lambda self: b"another")
    monkeypatch.setattr("ringmap.storage.read.reader.is_clean", lambda shown, _: True)
    assert boot != b"another"
    assert near(shares(opened(three, state), ids), expected(np.ones(len(ids))))


def test_a_damaged_file_begins_again(three, tmp_path, caplog):
    state = tmp_path / "learner"
    buf = opened(three, state)
    buf.sample(1)
    ids = all_ids(buf)
    buf.update_priorities(ids, np.full(len(ids), 3.0))
    buf.close()
    victim = sorted(state.glob("*/priorities.bin"))[0]
    victim.write_bytes(bytes(victim.stat().st_size))
    buf = opened(three, state)
    prove(buf.sample(100), three.lengths, HISTORY)
    assert "nothing in it is valid" in caplog.text


def test_a_state_dict_has_all_priorities(three):
    buf = opened(three)
    buf.sample(1)
    ids = all_ids(buf)
    values = np.random.default_rng(5).exponential(1, len(ids))
    buf.update_priorities(ids, values)
    state = pickle.loads(pickle.dumps(buf.state_dict()))
    before = buf.sample(100)
    again = opened(three, rng=9)
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.sample(100).ids, before.ids)
    assert near(shares(again, ids), expected(values))
    again.load_state_dict(state)  # also into one that has drawn
    np.testing.assert_array_equal(again.sample(100).ids, before.ids)


# -- what is refused ------------------------------------------------------------------------


def test_what_is_refused(three, tmp_path):
    rank = PrioritizedSampler(kind="rank")
    with pytest.raises(InputError, match="kind='rank'.* can't span rings.*kind='proportional'"):
        ShardedReplayBuffer(three.folder, sampler=rank, wait_s=0)
    buf = opened(three)
    with pytest.raises(InputError, match="can't span rings"):
        buf.sampler = rank
    with pytest.raises(InputError, match="state=.* is a ring; give a directory of the learner's"):
        opened(three, three.folder / "a")
    with pytest.raises(InputError, match="no clip was drawn with this sampler yet"):
        buf.update_priorities([1], [1.0])
    buf.sample(4)
    with pytest.raises(InputError, match=r"ShardedReplayBuffer\.update_priorities: priorities"):
        buf.update_priorities([1], [-1.0])
    with pytest.raises(InputError, match="does not draw by priority"):
        ShardedReplayBuffer(three.folder, wait_s=0).update_priorities([1], [1.0])


def test_a_refused_one_leaves_no_lock(three, tmp_path):
    with pytest.raises(InputError):
        ShardedReplayBuffer(three.folder, sampler=PrioritizedSampler(kind="rank"), state=tmp_path / "learner")
    opened(three, tmp_path / "learner").close()
