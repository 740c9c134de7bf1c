"""Computed columns against plain loops over Python lists."""

import pickle

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips import rewards
from ringmap.clips.bounds import Bounds
from ringmap.clips.items import Items
from ringmap.data import Computed, Hindsight, Index, NStep, ReturnToGo, Sequences, TimeToEnd, Window
from ringmap.errors import InputError
from ringmap.testing import ComputedTests
from tests.tiers import few

PLACES = ["next", "same"]


def fill(buf, rng, episodes=14):
    """Write random episodes; return those that are still stored, oldest first."""
    made = []
    for number in range(episodes):
        length = int(rng.integers(1, 15))
        reward = rng.normal(size=length)
        if buf.reward_at == "next":
            reward[0] = np.nan
        ends = np.zeros(length, bool)
        ends[-1] = rng.random() < 0.5
        made.append(
            {
                "reward": reward,
                "terminated": ends,
                "obs": np.arange(length) + 100 * number,
                "achieved_goal": rng.normal(size=(length, 2)),
                "desired_goal": np.full((length, 2), 99.0),
            }
        )
        buf.write_episode(made[-1])
    return made[-buf.num_episodes :]


def rewards_after(episode, t, place):
    """Return the rewards of the actions at t, t + 1, ..., one by one."""
    first = t + 1 if place == "next" else t
    return episode["reward"][first:].tolist()


def return_to_go(episode, t, place, gamma):
    found = 0.0
    for reward in reversed(rewards_after(episode, t, place)):
        found = reward + gamma * found
    return found


def n_step(episode, t, place, n, gamma):
    """Return the sum, the discount and the number of steps, step by step."""
    length, total, factor, count = len(episode["reward"]), 0.0, 1.0, 0
    ended = bool(episode["terminated"][-1])
    for reward in rewards_after(episode, t, place)[:n]:
        if place == "same" and t + count == length - 1 and not ended:
            break  # what follows is not stored
        total += factor * reward
        factor *= gamma
        count += 1
    reached_end = t + count >= (length - 1 if place == "next" else length)
    return total, 0.0 if reached_end and ended else factor, count


def items_of(buf, view):
    """Yield the number of each item, its episode's number and its step."""
    yield from ((i, ep, t) for i, (ep, t) in enumerate(view.clip_indices))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("storage", few(["memmap", "zarr", "ram"]))
def test_sums_are_those_of_the_plain_loop(home, place, storage):
    """ReturnToGo, NStep, TimeToEnd and Index at every step of rings that wrap."""
    options = {} if storage == "ram" else {"path": home / "ring", "storage": storage}
    buf = ReplayBuffer(60, spare_rows=15, seed=0, reward_at=place, **options)
    rng = np.random.default_rng(0)
    window = {
        "return": ReturnToGo(),
        "discounted": ReturnToGo(0.9),
        "around": ReturnToGo(offsets=[-2, 0, 1]),
        "sum": NStep(3, 0.9, next=["obs"]),
        "far": NStep(20, 0.5),
        "left": TimeToEnd(),
        "at": Index(),
    }
    for _ in range(6):
        kept = fill(buf, rng)
        view = buf.view(window=window)
        batch = view[list(range(len(view)))]
        for i, ep, t in items_of(buf, view):
            one, length = kept[ep], len(kept[ep]["reward"])
            np.testing.assert_allclose(batch["return"][i], return_to_go(one, t, place, 1.0), atol=1e-12)
            np.testing.assert_allclose(batch["discounted"][i], return_to_go(one, t, place, 0.9), atol=1e-12)
            for k, offset in enumerate((-2, 0, 1)):
                inside = 0 <= t + offset < length
                assert batch["around_is_pad"][i, k] == (not inside)
                want = return_to_go(one, t + offset, place, 1.0) if inside else 0.0
                np.testing.assert_allclose(batch["around"][i, k], want, atol=1e-12)
            for name, n, gamma in (("sum", 3, 0.9), ("far", 20, 0.5)):
                total, discount, count = n_step(one, t, place, n, gamma)
                np.testing.assert_allclose(batch[name][i], total, atol=1e-12)
                np.testing.assert_allclose(batch[f"{name}_discount"][i], discount)
                assert batch[f"{name}_steps"][i] == count
            reached = min(t + int(batch["sum_steps"][i]), length - 1)
            assert batch["next_obs"][i] == one["obs"][reached]
            assert batch["left"][i] == length - 1 - t
            assert (batch["at_episode"][i], batch["at_step"][i]) == (ep, t)
    buf.close()


def slow_reward(achieved, goal):
    return -np.abs(achieved - goal).sum(1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_takes_goals_of_its_own_episode(place, strategy):
    """Every goal was achieved in the same episode, where the strategy says; its reward is that of the step after."""
    buf = ReplayBuffer(200, seed=0, reward_at=place)
    kept = fill(buf, np.random.default_rng(1))
    view = buf.view(window={"her": Hindsight(slow_reward, strategy, k=4), "at": Index()})
    many = np.tile(np.arange(len(view)), 30).tolist()
    batch = view[many]
    share = batch["her"].mean()
    assert 0.6 < share < 0.85
    for i in range(len(many)):
        one, t = kept[batch["at_episode"][i]], int(batch["at_step"][i])
        goal, length = batch["desired_goal"][i], len(one["reward"])
        if not batch["her"][i]:
            assert (goal == 99).all()
            step = min(t + (place == "next"), length - 1)
            np.testing.assert_array_equal(batch["her_reward"][i], one["reward"][step])
            continue
        steps = np.flatnonzero((one["achieved_goal"] == goal).all(1))
        assert len(steps) == 1, "the goal of another episode"
        assert {"future": steps[0] > t, "final": steps[0] == length - 1}.get(strategy, True)
        want = slow_reward(one["achieved_goal"][None, t + 1], goal[None])[0]
        np.testing.assert_allclose(batch["her_reward"][i], want)


@pytest.mark.parametrize("frameskip", [1, 2])
def test_sequences_say_where_episodes_begin_and_end(frameskip):
    """The flags and ids come where they are not stored, and follow the episode."""
    buf = ReplayBuffer(200, frameskip=frameskip, seed=0, reward_at="next")
    kept = fill(buf, np.random.default_rng(2))
    view = buf.view(window=Sequences(4, burn_in=1))
    span = 3 * frameskip
    assert list(view.clip_indices) == [(e, t) for e, k in enumerate(kept) for t in range(len(k["obs"]) - span)]
    for i, (ep, t) in enumerate(view.clip_indices):
        one, item, steps = kept[ep], view[i], np.arange(t, t + span + 1, frameskip)
        last = len(one["obs"]) - 1
        np.testing.assert_array_equal(item["obs"], one["obs"][steps])
        np.testing.assert_array_equal(item["is_first"], steps == 0)
        np.testing.assert_array_equal(item["is_last"], steps == last)
        np.testing.assert_array_equal(item["is_terminal"], (steps == last) & one["terminated"][-1])
        assert item["is_burn_in"].tolist() == [True, False, False, False]
        np.testing.assert_array_equal(item["step_id"], buf.offsets[ep] + steps)


def test_sums_are_kept_once_and_go_with_their_episode():
    """A known episode is read once; what takes its rows is read again."""
    buf = ReplayBuffer(40, spare_rows=40, seed=0, reward_at="same")
    column, reads = ReturnToGo(), []
    right = Bounds.read
    buf.write_episode({"reward": np.ones(20)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bounds, "read", lambda self, *args: reads.append(1) or right(self, *args))
        for _ in range(5):
            assert set(buf.sample(16, window={"r": column})["r"]) <= set(range(1, 21))
        assert len(reads) == 1
        for value in (2.0, 3.0, 4.0):
            buf.write_episode({"reward": np.full(20, value)})
            last = buf.view(window={"r": column})
            assert last[len(last) - 20]["r"] == 20 * value
    assert pickle.loads(pickle.dumps(column)).compute


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at_once", [rewards._MOST, 1000])
def test_sums_of_long_episodes(monkeypatch, gamma, place, at_once):
    """Sums of thousands of steps are those of the plain loop, although their factors would vanish; also where each
    episode has more rewards than are read at once."""
    monkeypatch.setattr(rewards, "_MOST", at_once)
    buf, rng = ReplayBuffer(6000, seed=0, reward_at=place), np.random.default_rng(0)
    episodes = [{"reward": rng.normal(size=n) * 10.0 ** rng.integers(-3, 3, n)} for n in (2500, 1, 3000)]
    for episode in episodes:
        buf.write_episode(episode)
    batch = buf.view(window={"r": ReturnToGo(gamma)})[list(range(5501))]
    want = []
    for episode in episodes:
        given = episode["reward"].tolist()
        given = [*given[1:], 0.0] if place == "next" else given
        total, sums = 0.0, []
        for reward in reversed(given):
            total = reward + gamma * total
            sums.append(total)
        want += sums[::-1]
    np.testing.assert_allclose(batch["r"], want, rtol=1e-11, atol=1e-11)


def test_sums_of_two_buffers_are_kept_side_by_side():
    """One column over two buffers, and over a writer and its reader, reads each episode once for each."""
    column, reads = ReturnToGo(), []
    right = Bounds.read
    buffers = [ReplayBuffer(40, seed=0, reward_at="same") for _ in range(2)]
    for number, buf in enumerate(buffers):
        buf.write_episode({"reward": np.full(20, number + 1.0)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bounds, "read", lambda self, *args: reads.append(1) or right(self, *args))
        for _ in range(3):
            for number, buf in enumerate(buffers):
                found = buf.view(window={"r": column})[[0, 19]]["r"]
                assert found.tolist() == [20 * (number + 1), number + 1]
    assert len(reads) == 2


def test_sums_follow_where_rewards_stand():
    """`reward_at` is assigned after sums were kept; a view keeps what it was made with."""
    buf = ReplayBuffer(40, seed=0, reward_at="next")
    buf.write_episode({"reward": np.array([1.0, 2.0, 4.0])})
    window = {"r": ReturnToGo()}
    before = buf.view(window=window)
    assert before[[0, 1, 2]]["r"].tolist() == [6, 4, 0]
    buf.reward_at = "same"
    after = buf.view(window=window)
    for _ in range(2):
        assert after[[0, 1, 2]]["r"].tolist() == [7, 6, 4]
        assert before[[0, 1, 2]]["r"].tolist() == [6, 4, 0]


def test_a_function_gets_whole_columns():
    """It is called once for a batch, after all other columns."""
    buf, sizes = ReplayBuffer(40, seed=0), []
    buf.write_episode({"obs": np.arange(10)})

    def double(batch):
        sizes.append(len(batch["obs"]))
        return batch["obs"] * 2 + batch["left"][:, None]

    window = {"obs": Window([0, 1]), "twice": double, "left": TimeToEnd()}
    batch = buf.sample(5, window=window)
    np.testing.assert_array_equal(batch["twice"], batch["obs"] * 2 + batch["left"][:, None])
    assert sizes == [5]


class Loud(Computed):
    """Fails over rows that were overwritten."""

    def reads(self, schema):
        return ("obs",)

    def compute(self, items):
        values, _ = items.take("obs", items.step)
        if (values != self.expected(items)).any():
            raise ZeroDivisionError("over torn rows")
        return values

    def expected(self, items):
        return items.position % 10


def test_an_error_over_rows_that_are_overwritten_is_dropped():
    """The items are drawn and computed again; an error over whole rows is the caller's."""
    buf = ReplayBuffer(20, spare_rows=20, seed=0)
    for _ in range(2):
        buf.write_episode({"obs": np.arange(10)})
    column, writes = Loud(), []
    right = column.expected

    def expected(items):
        if not writes:
            writes.append(1)
            for _ in range(3):
                buf.write_episode({"obs": np.arange(10)})
            raise ZeroDivisionError("over torn rows")
        return right(items)

    column.expected = expected
    batch = buf.sample(32, window={"x": column})
    assert (batch["x"] == batch["obs"]).all()
    assert len(batch["x"]) == 32
    assert buf.num_redraws > 0
    column.expected = lambda items: items.position + 1000
    with pytest.raises(ZeroDivisionError):
        buf.sample(4, window={"x": column})


class TestReturnToGo(ComputedTests):
    def make(self):
        return ReturnToGo(0.9)


class TestNStep(ComputedTests):
    def make(self):
        return NStep(3, 0.9, next=["obs"])


class TestTimeToEnd(ComputedTests):
    def make(self):
        return TimeToEnd()


class TestIndex(ComputedTests):
    def make(self):
        return Index()


class TestHindsight(ComputedTests):
    is_random = True

    def make(self):
        return Hindsight(slow_reward, "final", k=3)


# -- controls -----------------------------------------------------------------------------------


class NextEpisode(Computed):
    """Takes a row without asking where the episode ends."""

    def reads(self, schema):
        return ("obs",)

    def compute(self, items):
        return items.rows.take("obs", items.position + 1, items.start)


class BatchMean(Computed):
    """Mixes the items of a batch."""

    def compute(self, items):
        return items.step - items.step.mean()


@pytest.mark.parametrize("flawed", [NextEpisode, BatchMean])
def test_control_the_suite_finds_flawed_columns(flawed):
    class Suite(ComputedTests):
        def make(self):
            return flawed()

    with pytest.raises(AssertionError):
        Suite().test_an_item_does_not_depend_on_others()


def test_control_a_slipped_reward_is_found(home, monkeypatch):
    """The sum test fails if rewards are read one row early."""
    monkeypatch.setattr(Items, "reward_at", property(lambda self: "same"))
    with pytest.raises(AssertionError):
        test_sums_are_those_of_the_plain_loop(home, "next", "ram")


def test_control_a_wrong_end_is_found(home, monkeypatch):
    """The sum test fails if truncation counts as termination."""
    monkeypatch.setattr(Items, "terminated", property(lambda self: np.ones(len(self), bool)))
    with pytest.raises(AssertionError):
        test_sums_are_those_of_the_plain_loop(home, "next", "ram")


# -- bad input ----------------------------------------------------------------------------------


def stored(**options):
    buf = ReplayBuffer(100, seed=0, **options)
    buf.write_episode(
        {
            "reward": np.ones(9),
            "pixels": np.zeros((9, 2, 2), "u1"),
            "achieved_goal": np.zeros((9, 2)),
            "desired_goal": np.zeros((9, 3)),
        }
    )
    return buf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NStep(0), "n must be positive"),
        (lambda: NStep(3, 1.5), r"gamma must lie in \[0, 1\]"),
        (lambda: ReturnToGo(-1), r"gamma must lie in \[0, 1\]"),
        (lambda: ReturnToGo(offsets=[]), "is empty"),
        (lambda: Hindsight(slow_reward, "past"), "strategy must be"),
        (lambda: Hindsight(3), "reward_fn must be a function"),
        (lambda: Hindsight(slow_reward, k=-1), "k must not be negative"),
        (lambda: Sequences(0), "length must be positive"),
        (lambda: Sequences(4, burn_in=4), "leaves nothing"),
    ],
)
def test_what_can_not_be_made(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"r": ReturnToGo()}, "pass reward_at='next' if"),
        ({"r": NStep(3, of="rewards")}, "'rewards' that is not stored, but 'reward' is"),
        ({"h": Hindsight(slow_reward, goal="goal")}, "'goal' that is not stored"),
    ],
)
def test_what_can_not_be_computed(window, message):
    with pytest.raises(InputError, match=message):
        stored().sample(2, window=window)


def test_rewards_of_several_numbers_and_goals_of_other_shapes():
    buf = stored(reward_at="same")
    with pytest.raises(InputError, match="one number per step, but column 'pixels'"):
        buf.sample(2, window={"r": ReturnToGo(of="pixels")})
    with pytest.raises(InputError, match="an achieved goal can't be a goal"):
        buf.sample(2, window={"h": Hindsight(slow_reward)})
    wrong = Hindsight(lambda achieved, goal: 0.0, "final", k=1e9, goal="achieved_goal")
    with pytest.raises(InputError, match=r"reward_fn returned shape \(\)"):
        buf.sample(20, window={"h": wrong})
