"""Masked values are refused by everything that stores, before anything changes; without a mask they are plain
arrays."""

import numpy as np
import pytest

import ringmap
from ringmap.data import DistillationBuffer
from ringmap.errors import InputError

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)
SCHEMA = {"obs": ((2,), "f4"), "value": ringmap.Column((2,), "f4", mutable=True)}


def buffer():
    made = ringmap.ReplayBuffer(100, schema=SCHEMA, seed=0)
    made.write_episode({"obs": ROWS})
    return made


def episode(buf, obs):
    buf.write_episode({"obs": obs})


def as_list(buf, obs):
    buf.write_episode({"obs": list(obs)})


def data(buf, obs):
    buf.write_episode({"obs": ROWS, "_episode_data": {"goal": obs}})


def opened(buf, obs):
    with_one = buf.begin_episode()
    try:
        with_one.append({"obs": obs[1]})
        with_one.finish()
    finally:
        with_one.abandon()


def update(buf, obs):
    buf.update(buf.sample(3).ids, {"value": obs})


def join(buf, obs):
    buf.write_episodes([{"obs": obs}, {"obs": obs}])


def transitions(_, obs):
    made = ringmap.TransitionReplayBuffer(20, (2,), device=None)
    made.add(obs, np.zeros(3, np.int64), np.zeros(3), obs, np.zeros(3, bool))
    assert len(made) == 3


def steps(_, obs):
    made = ringmap.OfflineToOnlineReplayBuffer(buffer(), online_capacity=20, batch_size=2)
    made.extend({"obs": obs})


def rollout(_, obs):
    made = ringmap.RolloutBuffer(3, 1, (2,), (), device="cpu")
    made.add(obs, None, *[np.zeros(3, np.float32)] * 5)


def student(_, obs):
    DistillationBuffer(20).add(obs, np.zeros((3, 1), np.float32))


@pytest.mark.parametrize(
    "store",
    [episode, as_list, data, opened, update, join, transitions, steps, rollout, student],
)
def test_a_masked_value_is_refused_and_a_sound_one_taken(store):
    buf = buffer()
    before = buf.num_episodes, buf.num_steps_stored
    with pytest.raises(InputError, match=r"masked, \d of \d values are.*\.filled"):
        store(buf, np.ma.masked_array(ROWS, ROWS == 3))
    assert (buf.num_episodes, buf.num_steps_stored) == before
    store(buf, np.ma.masked_array(ROWS, False))
    if buf.num_episodes > before[0]:
        assert type(buf.load_episode(1)["obs"]) is np.ndarray


def test_the_step_is_named():
    with pytest.raises(InputError, match="column 'obs': step 1 is masked, 1 of 6 values"):
        episode(buffer(), np.ma.masked_array(ROWS, ROWS == 3))
