"""Items that were evicted from a view, in datasets that join several reads to one item: all of an item is of one
step."""

import numpy as np
import pytest

from ringmap.data import (
    ConcatDataset,
    GoalDataset,
    MergeDataset,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    ShardedReplayBuffer,
)
from ringmap.errors import NoClipsError


def written(path, first, count):
    buf = ReplayBuffer(60, 2, path=path, spare_rows=20, seed=0)
    more(buf, first, count)
    return buf


def more(buf, first, count):
    for number in range(first, first + count):
        step = 100 * number + np.arange(10)
        buf.write_episode({"x": step, "y": step, "goal_of": step})


@pytest.fixture(params=["ring", "rings"])
def view(request, tmp_path):
    """A view of some episodes, of which a third is evicted by `view.evict(3)`."""
    bufs = [written(tmp_path / f"{n}", 20 * n, 6) for n in range(1 if request.param == "ring" else 2)]
    whole = bufs[0] if request.param == "ring" else ShardedReplayBuffer(sorted(tmp_path.iterdir()), seed=0)
    made = whole.view()
    made.evict = lambda count: [more(buf, 20 * n + 6, count) for n, buf in enumerate(bufs)]
    yield made
    whole.close()
    for buf in bufs:
        buf.close()


def test_columns_of_two_views_are_of_one_clip(view):
    made = MergeDataset([view, view.take(np.arange(len(view.lengths)))], [["x"], ["y"]])
    before = made.__getitems__(range(len(made)))
    view.evict(3)
    for item, then in zip(made.__getitems__(range(len(made))), before, strict=True):
        np.testing.assert_array_equal(item["x"], item["y"])
        number = int(item["x"][0]) // 100 % 20
        assert 3 <= number < 6
        if int(then["x"][0]) // 100 % 20 >= 3:
            np.testing.assert_array_equal(item["x"], then["x"])
    view.evict(6)
    with pytest.raises(NoClipsError, match="all episodes of the view were evicted"):
        made.__getitems__([0])


def test_a_goal_is_of_the_episode_of_what_came_or_of_one_that_is_stored(view):
    ahead = GoalDataset(view, (0, 0.5, 0.5, 0), goal_keys={"goal_of": "goal"}, seed=0)
    anywhere = GoalDataset(view, (1, 0, 0, 0), goal_keys={"goal_of": "goal"}, seed=0)
    view.evict(3)
    for item in ahead.__getitems__(range(len(ahead))):
        assert item["x"][-1] < item["goal"][0] <= item["x"][0] // 100 * 100 + 9
    goals = [int(item["goal"][0]) for item in anywhere.__getitems__(range(len(anywhere)))]
    assert {goal // 100 % 20 for goal in goals} == {3, 4, 5}
    view.evict(6)
    with pytest.raises(NoClipsError):
        anywhere.__getitems__([0])


def test_what_is_asked_of_any_step_is_asked_of_one_that_is_stored(view):
    goals = GoalDataset(view, goal_keys={})
    view.evict(3)
    assert goals.dataset.get_dim("x") == view.get_dim("y") == 1
    assert len(ConcatDataset([view]).view(columns=["x"])) == len(view)


def test_a_buffer_says_what_its_episodes_are(tmp_path):
    buf = written(tmp_path / "ring", 0, 20)
    for mine, of_view in zip(buf.origins(), buf.view().origins(), strict=True):
        np.testing.assert_array_equal(mine, of_view)
    assert ConcatDataset([buf]).origins()[1].tolist() == buf.origins()[1].tolist() == list(range(14, 20))
    buf.close()


@pytest.mark.parametrize("kind", ["goals", "concat", "merge"])
def test_an_offline_half_draws_items_with_their_goals_not_rows(tmp_path, kind):
    buf = ReplayBuffer(100, path=tmp_path / "ring", spare_rows=20, seed=0)
    more(buf, 0, 10)
    view = buf.view()
    made = {
        "goals": lambda: GoalDataset(view, (0, 1, 0, 0), goal_keys={"goal_of": "goal"}, seed=0),
        "concat": lambda: ConcatDataset([view]),
        "merge": lambda: MergeDataset([view, view.take(np.arange(10))], [["x", "goal_of"], ["y"]]),
    }[kind]()
    goal = {"goal": np.zeros(5)} if kind == "goals" else {}
    mix = OfflineToOnlineReplayBuffer(made, online_capacity=50, batch_size=64, offline_fraction=0.5, seed=0)
    mix.extend({"x": np.full(5, -1), "y": np.full(5, -1), "goal_of": np.full(5, -1), **goal})
    for first in (0, 3):
        seen = set()
        for _ in range(20):
            batch = mix.sample()
            of_dataset = batch["x"] >= 0
            seen |= set((batch["x"][of_dataset] // 100).tolist())
            np.testing.assert_array_equal(batch["y"], batch["x"])
            if kind == "goals":
                ahead = batch["goal"][of_dataset] - batch["x"][of_dataset]
                assert ((ahead > 0) & (ahead < 10)).all()
        assert seen == set(range(first, 10))
        more(buf, 10, 3)
    buf.close()
