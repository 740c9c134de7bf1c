"""GoalDataset: which goals, how often, from which generator."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap.data import ConcatDataset, Dataset, GoalDataset, MergeDataset, ReplayBuffer
from ringmap.errors import InputError
from ringmap.testing.datasets import make_episodes

RANDOM, GEOMETRIC, UNIFORM, CURRENT = np.eye(4).tolist()


class Steps(Dataset):
    """Each step says its episode and its number."""

    column_names = ["pixels", "action"]  # noqa: RUF012

    def _load_slice(self, ep, start, end):
        steps = np.stack([np.full(end - start, ep), np.arange(start, end)], axis=1)
        return {"pixels": steps, "action": steps[:, :1]}


def steps(lengths=(50, 3, 20), **options):
    return Steps(lengths, np.cumsum([0, *lengths[:-1]]), **options)


def drawn(goals, passes=1):
    ids = list(range(len(goals))) * passes
    pairs = np.array(list(goals.clip_indices) * passes)
    found = np.stack([clip["goal_pixels"] for clip in goals.__getitems__(ids)])
    assert found.shape == (len(ids), 1, 2)
    return pairs, found[:, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal_probabilities": (0.5, 0.5)}, "four numbers"),
        ({"goal_probabilities": (0.5, 0.5, 0.5, 0.5)}, "sum to 1"),
        ({"goal_probabilities": (1.5, -0.5, 0, 0)}, "sum to 1"),
        ({"gamma": 1.0}, "gamma"),
        ({"current_goal_offset": 0}, "current_goal_offset"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        GoalDataset(steps(), **options)


@pytest.mark.parametrize(
    ("num_steps", "frameskip", "offset"), [(1, 1, None), (4, 1, None), (3, 2, None), (4, 2, 1), (2, 1, 5)]
)
@pytest.mark.parametrize("kind", [GEOMETRIC, UNIFORM])
def test_future_goals_lie_later_in_the_episode(kind, num_steps, frameskip, offset):
    base = steps(num_steps=num_steps, frameskip=frameskip)
    goals = GoalDataset(base, kind, current_goal_offset=offset, seed=0)
    at = num_steps if offset is None else offset
    kept = [(ep, s) for ep, s in base.clip_indices if s + at * frameskip < base.lengths[ep]]
    assert list(goals.clip_indices) == kept
    pairs, found = drawn(goals, passes=5)
    current = pairs[:, 1] + (at - 1) * frameskip
    assert (found[:, 0] == pairs[:, 0]).all()
    assert (found[:, 1] > current).all()
    assert (found[:, 1] < base.lengths[pairs[:, 0]]).all()
    assert ((found[:, 1] - current) % frameskip == 0).all()


def test_current_goals_keep_every_clip():
    base = steps(num_steps=3, frameskip=2)
    goals = GoalDataset(base, CURRENT, seed=0)
    assert len(goals) == len(base)
    pairs, found = drawn(goals)
    assert (found == pairs + np.array([0, 4])).all()
    far = GoalDataset(base, CURRENT, current_goal_offset=9)
    assert all(s + 16 < base.lengths[ep] for ep, s in far.clip_indices)
    assert len(far) < len(base)


def test_random_goals_come_from_every_step_alike():
    goals = GoalDataset(steps((50, 3, 20)), RANDOM, seed=0)
    _, found = drawn(goals, passes=300)
    flat = found[:, 1] + np.array([0, 50, 53])[found[:, 0]]
    counts = np.bincount(flat, minlength=73)
    assert counts.min() > 0
    expected = len(flat) / 73
    assert ((counts - expected) ** 2 / expected).sum() < 130  # chi-squared, 72 degrees: p < 1e-4


def test_geometric_goals_are_geometric():
    goals = GoalDataset(steps((400,)), GEOMETRIC, gamma=0.8, seed=0)
    pairs, found = drawn(goals, passes=50)
    ahead = (found[:, 1] - pairs[:, 1])[pairs[:, 1] < 300]
    for k in range(1, 6):
        assert abs((ahead == k).mean() - 0.2 * 0.8 ** (k - 1)) < 0.012
    nearest = GoalDataset(steps((400,)), GEOMETRIC, gamma=0, seed=0)
    pairs, found = drawn(nearest)
    assert (found[:, 1] == pairs[:, 1] + 1).all()


def test_kinds_have_their_probabilities():
    goals = GoalDataset(steps((1000,)), (0.3, 0, 0.5, 0.2), seed=1)
    pairs, found = drawn(goals, passes=20)
    assert abs((found[:, 1] == pairs[:, 1]).mean() - 0.2) < 0.01
    late = pairs[:, 1] >= 500  # behind such a clip lies only a random goal
    behind = (found[:, 1] < pairs[:, 1])[late].mean()
    assert abs(behind - 0.3 * (pairs[late, 1] / 1000).mean()) < 0.01


def test_clips_are_those_of_the_dataset():
    base = steps(num_steps=2)
    goals = GoalDataset(base, seed=0)
    ids = {pair: i for i, pair in enumerate(base.clip_indices)}
    for i, pair in enumerate(goals.clip_indices):
        clip = goals[i]
        assert np.array_equal(clip["pixels"], base[ids[pair]]["pixels"])
        assert set(clip) == {"pixels", "action", "goal_pixels"}
    assert np.array_equal(goals[-1]["pixels"], base[ids[goals.clip_indices[-1]]]["pixels"])
    with pytest.raises(IndexError, match="out of range"):
        goals[len(goals)]
    with pytest.raises(IndexError, match="so that a goal can lie after it"):
        GoalDataset(steps((3,), num_steps=3), seed=0)[0]
    assert goals.__getitems__([]) == []


def test_keys():
    goals = GoalDataset(steps(), goal_keys={"action": "wanted"}, seed=0)
    assert set(goals[0]) == {"pixels", "action", "wanted"}
    assert goals[0]["wanted"].shape == (1, 1)
    assert set(GoalDataset(steps(), goal_keys={})[0]) == {"pixels", "action"}
    with pytest.raises(KeyError, match="nothing"):
        GoalDataset(steps(), goal_keys={"nothing": "goal"})[0]


def test_one_seed_one_sequence():
    first, again, other = (drawn(GoalDataset(steps(), seed=s), 2)[1] for s in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    fresh, fresher = (drawn(GoalDataset(steps()), 2)[1] for _ in range(2))
    assert not np.array_equal(fresh, fresher)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_workers_draw_their_own(start):
    """Two workers that read the same clips draw other goals; another pass, others; the same seed, the same."""

    def passes(seed):
        goals = GoalDataset(steps((1000,)), UNIFORM, seed=seed)
        loader = DataLoader(goals, sampler=[0] * 40, batch_size=20, num_workers=2, multiprocessing_context=start)
        return [np.concatenate([b["goal_pixels"][:, 0, 1] for b in loader]) for _ in range(2)]

    first, second = passes(0)
    assert not np.array_equal(first[:20], first[20:])  # one batch from each worker
    assert not np.array_equal(first, second)
    if start == "fork":
        again, _ = passes(0)
        assert np.array_equal(first, again)


def test_over_buffers_and_joined_datasets():
    buf = ReplayBuffer(100, history_len=2)
    goals = GoalDataset(ConcatDataset([buf, MergeDataset([buf])]), UNIFORM, seed=0)
    assert len(goals) == 0
    buf.write_episodes(make_episodes((6, 1, 4)))
    assert len(goals) == 2 * (4 + 2)
    for clip in goals:
        assert clip["goal_pixels"].shape == (1, 12, 10, 3)
    assert goals.column_names == buf.column_names
    assert goals.get_dim("where") == 2
    assert len(goals.get_col_data("where")) == 22
    assert goals.get_row_data(0)["where"].tolist() == [0, 0]
    assert len(goals.load_episode(3)["where"]) == 6
    assert goals.get_episode_data() == {}


@pytest.mark.parametrize("keys", [None, {"pixels": "both", "goal_pixels": "both"}])
def test_a_goal_takes_the_place_of_no_column(keys):
    buf = ReplayBuffer(100)
    buf.write_episode({"pixels": np.arange(5, dtype=np.uint8), "goal_pixels": np.arange(5)})
    goals = GoalDataset(buf, seed=0, goal_keys=keys)
    with pytest.raises(InputError, match=r"the goal of '\w+' would be '\w+', which is a column"):
        goals[0]
    renamed = GoalDataset(buf, seed=0, goal_keys={"pixels": "wanted"})[0]
    assert renamed.keys() == {"pixels", "goal_pixels", "wanted"}
