"""A pace of the whole buffer: every batch waits for it, and counts."""

import pickle

import pytest
from torch.utils.data import DataLoader

from ringmap import Pace, ReplayBuffer
from ringmap.data import ShardedReplayBuffer, Window
from ringmap.errors import InputError


@pytest.fixture
def paced(three):
    # One thread collects and draws: the slack is for all that it draws after its last commit.
    with Pace(three.folder, samples_per_insert=4, min_steps=20, slack=10) as pace:
        with pace.insert(1):
            pass
        buf = ShardedReplayBuffer(three.folder, history_len=3, pace=pace, wait_s=0, seed=0)
        yield buf, pace
        buf.close()


def test_every_batch_counts(paced):
    buf, pace = paced
    buf.sample(8)
    assert pace.drawn == 24
    buf.sample(8, window={"obs/x": Window(range(5))})
    assert pace.drawn == 64
    with buf.batches(8, prefetch=3) as batches:
        for number in range(1, 4):
            next(batches)
            assert pace.drawn == 64 + 24 * number
    with buf.batches(8, prefetch=0) as batches:
        next(batches)
    assert pace.drawn == 160
    buf[0], buf[[1, 2]]
    assert pace.drawn == 169
    for _, batch in zip(range(2), DataLoader(buf, batch_size=10), strict=False):
        assert batch["step"].shape == (10, 3)
    assert pace.drawn in (229, 259)  # zip may ask for a third


def test_a_worker_does_not_count(paced):
    buf, pace = paced
    loader = DataLoader(buf, batch_size=10, num_workers=1)
    with pytest.raises(InputError, match=r"gathers ahead.*pace.over\(loader, num_steps\)"):
        next(iter(loader))
    assert pace.drawn == 0


def test_batches_wait_before_the_first_is_drawn(fleet):
    fleet.ring("a")
    pace = Pace(fleet.folder, samples_per_insert=4, min_steps=20, slack=1, timeout_s=0.01)
    buf = ShardedReplayBuffer(fleet.folder, pace=pace, wait_s=0, seed=0)
    with pace, buf, buf.batches(8) as batches:  # nothing is stored: a thread would have failed
        fleet.write("a", 25)
        assert next(batches)["step"].shape == (8, 1)
        assert pace.drawn == 8


def test_the_pace_travels_with_a_copy(paced):
    buf, pace = paced
    copy = pickle.loads(pickle.dumps(buf))
    assert (copy.pace.path, copy.pace.min_steps) == (pace.path, 20)
    copy.close()
    with ReplayBuffer.open(pace.path + "/a") as ring:
        ring.pace = pace
        assert pickle.loads(pickle.dumps(ring)).pace.path == pace.path


def test_the_pace_of_a_call_stands_in_for_it(three):
    with Pace(three.folder, 4, 20) as own, Pace(three.folder, 4, 20, rank=1) as other:
        for pace in (own, other):
            with pace.insert(1):
                pass
        buf = ShardedReplayBuffer(three.folder, history_len=3, pace=own, wait_s=0, seed=0)
        buf.sample(8, pace=other)
        names = [path.name for path in (three.folder / "pace").glob("learner-*")]
        assert (own.drawn, names) == (24, ["learner-1.lock"])
        buf.close()
