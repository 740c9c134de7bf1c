"""Transitions as episodes: of each lane, from one ending to the next, with the next observation of the last, against a
plain model."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest

from ringmap import ReplayBuffer, ReplayBufferCollectionWrapper, TransitionReplayBuffer
from ringmap.data import convert, load_dataset
from ringmap.errors import ReplacedError
from tests.unit.buffers.transitions.reference import Life, Reference, StackedLife


def expected(reference):
    """Return the episodes of all transitions that count, as rows, in the order of their last ones; and which lack their
    front."""
    low, steps = max(0, len(reference.steps) - reference.capacity), reference.steps
    led_by = {s["following"]: n for n, s in enumerate(steps) if s["following"] is not None}

    def goes_on(number):
        before = led_by.get(number)
        return before is not None and not (steps[before]["done"] or steps[before]["truncated"])

    episodes, of = [], {}
    for number in range(low, len(steps)):
        if goes_on(number) and led_by[number] in of:
            of[number] = of[led_by[number]]
        else:
            of[number] = []
            episodes.append(of[number])
        of[number].append(number)
    episodes.sort(key=lambda numbers: numbers[-1])
    return [rows_of([steps[n] for n in numbers]) for numbers in episodes]


def rows_of(steps):
    return {
        "obs": np.stack([*(s["obs"] for s in steps), steps[-1]["next"]]),
        "action": np.array([*(s["action"] for s in steps), 0]),
        "reward": np.array([np.nan, *(s["reward"] for s in steps)], np.float32),
        "terminated": np.array([False, *(s["done"] for s in steps)]),
        "truncated": np.array([False, *(s["truncated"] for s in steps)]),
    }


def same(episodes, models):
    assert len(episodes) == len(models)
    for episode, model in zip(episodes, models, strict=True):
        assert list(episode) == list(model)
        for name, values in model.items():
            found = np.asarray(episode[name])
            assert found.dtype == values.dtype or name == "action", name
            assert found.astype(values.dtype).tobytes() == values.tobytes(), name


def loaded(dataset):
    return [dict(dataset.load_episode(i)) for i in range(len(dataset.lengths))]


@pytest.mark.parametrize("size", [None, 3])
def test_in_every_process_and_format(size, tmp_path):
    """A writer with pending rows, a reader, one opened again, a copy: the same, and so is what they write."""
    life = Life(0, dtype=np.uint8) if size is None else StackedLife(0, size)
    shape = life.shape if size is None else (size, *life.shape)
    reference, path = Reference(40), tmp_path / "ring"
    buf = TransitionReplayBuffer(
        40,
        shape,
        device=None,
        obs_dtype=np.uint8,
        path=path,
        sync_every_s=0,
        n_step=3,
        frame_stack=size,
    )
    for _ in range(60):
        step = life.step(2)
        buf.add(*step[:5], truncated=step[5])
        reference.add(*step)
    models = expected(reference)
    before = buf.episode_dataset()
    elsewhere = pickle.loads(pickle.dumps(before))
    loaded_here = load_dataset(path, output="numpy")
    for one in (before, elsewhere, copy.copy(before), loaded_here):
        same(loaded(one), models)
        assert one.reward_at == "next"
    buf.dump(tmp_path / "dumped.h5", progress=False)
    convert(buf, tmp_path / "converted.h5", progress=False)
    convert(path, tmp_path / "of-path.h5", progress=False)
    for name in ("dumped", "converted", "of-path"):
        same(loaded(load_dataset(tmp_path / f"{name}.h5", output="numpy")), models)
    cut = [bool(one.get("_episode_data")) for one in buf.episodes()]
    assert before.get_episode_data().get("front_evicted", [None] * len(cut)) == [c or None for c in cut]
    buf.close()
    with TransitionReplayBuffer.open(path, "r+", device=None) as again:
        same(loaded(again.episode_dataset()), models)
        while again.rows.oldest < 300:
            step = life.step(2)
            again.add(*step[:5], truncated=step[5])
        with pytest.raises(ReplacedError, match="look them up again"):
            loaded(elsewhere)


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_equal_what_a_buffer_of_episodes_records(mode):
    """The same environments recorded both ways, autoreset and time limits included: the same episodes, in the same
    order."""

    def recorded(buffer):
        envs = gym.make_vec(
            "CartPole-v1",
            num_envs=3,
            vectorization_mode="sync",
            max_episode_steps=20,
            vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode[mode]},
        )
        envs = ReplayBufferCollectionWrapper(envs, buffer)
        envs.action_space.seed(0)
        envs.reset(seed=0)
        for _ in range(150):
            envs.step(envs.action_space.sample())
        envs.close()

    episodes = ReplayBuffer(2000, reward_at="next")
    steps = TransitionReplayBuffer(2000, (4,), device=None)
    recorded(episodes)
    recorded(steps)
    ended = [one for one in steps.episodes() if one["terminated"][-1] or one["truncated"][-1]]
    whole = [one for one in loaded(episodes) if one["terminated"][-1] or one["truncated"][-1]]
    assert len(whole) > 12
    same(ended, whole)


def test_nested_and_critic_observations_and_extras_keep_their_names():
    buf = TransitionReplayBuffer(
        50, {"cam": (2,), "pos": (1,)}, critic_obs_shape=(3,), device=None, extra={"mu": (2,), "reward": ()}
    )
    for t in range(3):
        now, then = ({"cam": np.full(2, x), "pos": np.full(1, x)} for x in (t, t + 1))
        extra = {"mu": np.full(2, t), "reward": t}
        buf.add(now, t, t, then, t == 2, np.full(3, t), np.full(3, t + 1), extra=extra)
    (episode,) = buf.episodes()
    assert list(episode) == [
        "obs/cam",
        "obs/pos",
        "critic_obs",
        "action",
        "reward",
        "terminated",
        "truncated",
        "mu",
        "extra/reward",
    ]
    for name in ("obs/cam", "obs/pos", "critic_obs"):
        assert [float(row[0]) for row in episode[name]] == [0, 1, 2, 3]
    np.testing.assert_array_equal(episode["mu"], [[0, 0], [1, 1], [2, 2], [np.nan, np.nan]])
    np.testing.assert_array_equal(episode["extra/reward"], [0, 1, 2, np.nan])
