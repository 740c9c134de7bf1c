import numpy as np
import pytest

from ringmap import World
from ringmap.data import ReplayBuffer, get_format, list_formats, load_dataset
from ringmap.errors import InputError
from ringmap.formats.media.images import resized
from ringmap.policy import BasePolicy, ExpertPolicy, RandomPolicy
from ringmap.world.envs.two_room import TwoRoom

SHAPE = (32, 32)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Noisy expert episodes, in a buffer."""
    with World("ringmap/TwoRoom-v1", 3, SHAPE, max_episode_steps=40) as world:
        world.set_policy(ExpertPolicy(noise=0.3, seed=0))
        buf = ReplayBuffer(max_steps=2000, path=tmp_path_factory.mktemp("stored") / "buffer")
        world.collect(writer=buf, episodes=6, seed=0, options={"variation": ["all"]})
    yield buf
    buf.close()


def by_hand(seeds, choose, max_steps):
    """Roll out without any of ours: success, return and length of each seed."""
    found = []
    for seed in seeds:
        env = TwoRoom(render_mode=None)
        env.reset(seed=seed)
        total, won, t = 0.0, False, 0
        while t < max_steps and not won:
            _, reward, won, _, _ = env.step(choose(env))
            total, t = total + np.float32(reward), t + 1
        found.append((won, total, t))
    return found


@pytest.mark.parametrize("num_envs", [1, 4, 7])
@pytest.mark.parametrize("limit", [13, 100])
def test_the_same_as_a_loop_by_hand(num_envs, limit):
    expected = by_hand(range(42, 62), lambda env: env.expert_action(), limit)
    with World("swm/TwoRoom-v1", num_envs, SHAPE, max_episode_steps=limit) as world:
        world.set_policy(ExpertPolicy())
        results = world.evaluate(episodes=20, seed=42)
    won, returns, lengths = (list(v) for v in zip(*expected, strict=True))
    assert results["episode_successes"].tolist() == won
    assert results["episode_lengths"].tolist() == lengths
    assert np.allclose(results["episode_returns"], returns)
    assert results["success_rate"] == 100 * np.mean(won)
    assert results["seeds"] == list(range(42, 62))
    assert (0 < results["success_rate"] < 100) == (limit == 13)


def test_without_a_seed_and_none_at_all(make):
    world = make("ringmap/TwoRoom-v1", 2, SHAPE, max_episode_steps=3, policy=RandomPolicy())
    assert world.evaluate(episodes=5)["seeds"] is None
    assert len(world.evaluate(episodes=5)["episode_lengths"]) == 5
    assert world.evaluate(episodes=0)["success_rate"] == 0


def test_wait_plays_one_in_each(make):
    world = make("ringmap/TwoRoom-v1", 3, SHAPE, max_episode_steps=30, policy=ExpertPolicy())
    auto = world.evaluate(episodes=3, seed=1)
    wait = world.evaluate(episodes=3, seed=1, reset_mode="wait")
    assert wait["episode_lengths"].tolist() == auto["episode_lengths"].tolist()
    assert len(world.evaluate(episodes=2, reset_mode="wait")["episode_lengths"]) == 2
    with pytest.raises(InputError, match="at most 3"):
        world.evaluate(episodes=4, reset_mode="wait")


def test_success_is_what_the_env_says_else_terminated(make):
    world = make(kind="discrete", num_envs=2)  # says nothing; odd episodes are terminated
    world.set_policy(RandomPolicy(seed=0))
    results = world.evaluate(episodes=30, seed=0)
    assert results["episode_successes"].tolist() == (results["episode_lengths"] % 2 == 1).tolist()
    assert 0 < results["success_rate"] < 100


class Still(BasePolicy):
    """Does nothing, and keeps what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def get_action(self, infos):
        self.seen.append({name: np.copy(values) for name, values in infos.items()})
        return np.zeros((self.env.num_envs, 2), np.float32)


def dataset_of(stored, kind, tmp_path, **options):
    if kind == "buffer":
        return ReplayBuffer.open(stored.path, **options)
    stored.dump(tmp_path / f"dataset.{kind}", format=kind)
    return load_dataset(tmp_path / f"dataset.{kind}", format=kind, **options)


LOSSLESS = ["buffer", *(n for n in list_formats() if n in ("hdf5", "lance") and get_format(n))]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_from_a_dataset(make, stored, tmp_path, kind):
    dataset = dataset_of(stored, kind, tmp_path)
    world = make("ringmap/TwoRoom-v1", 3, SHAPE, max_episode_steps=50)
    policy = Still()
    world.set_policy(policy)
    task = {"episodes_idx": [4, 0, 4], "start_steps": [0, 2, 3], "goal_offset": 6}
    results = world.evaluate(dataset=dataset, **task, eval_budget=5)
    assert results["episode_lengths"].tolist() == [5, 5, 5]
    for env, (number, start) in enumerate(zip([4, 0, 4], [0, 2, 3], strict=True)):
        episode = stored.load_episode(number)
        for seen in policy.seen:
            assert np.array_equal(seen["state"][env, 0], episode["state"][start])
            assert np.array_equal(seen["pixels"][env, 0], episode["pixels"][start])
            assert np.array_equal(seen["goal"][env, 0], episode["pixels"][start + 6])
            assert np.array_equal(seen["goal_state"][env, 0], episode["state"][start + 6])
    world.set_policy(ExpertPolicy())
    results = world.evaluate(dataset=dataset, **task, eval_budget=20)
    assert results["success_rate"] == 100
    assert (results["episode_lengths"] <= 8).all()
    assert world.evaluate(dataset=dataset, **task, eval_budget=1)["success_rate"] < 100
    dataset.close()


def test_a_dataset_with_frameskip(make, stored):
    dataset = ReplayBuffer.open(stored.path, frameskip=4)
    world = make("ringmap/TwoRoom-v1", 2, SHAPE)
    policy = Still()
    world.set_policy(policy)
    last = int(stored.lengths[1]) - 1
    world.evaluate(dataset=dataset, episodes_idx=[0, 1], start_steps=[1, last - 5], goal_offset=5, eval_budget=1)
    for env, start in enumerate((1, last - 5)):
        episode = stored.load_episode(env)
        assert np.array_equal(policy.seen[0]["state"][env, 0], episode["state"][start])
        assert np.array_equal(policy.seen[0]["goal_state"][env, 0], episode["state"][start + 5])


class Plain(TwoRoom):
    """Without the hook: it has to be called."""

    reset_options_from_dataset = property()  # hasattr says no

    def put(self, where, aim, calls=1):
        where += 0  # its own copy: nobody else minds
        self.state, self.goal_state = where, aim
        self.calls = calls


def test_callables(make, stored, monkeypatch):
    import gymnasium

    monkeypatch.setitem(gymnasium.registry, "Plain-v0", gymnasium.envs.registration.EnvSpec("Plain-v0", Plain))
    world = make("Plain-v0", 2, SHAPE)
    policy = Still()
    world.set_policy(policy)
    task = {"episodes_idx": [2, 3], "start_steps": [1, 0], "goal_offset": 4, "eval_budget": 2}
    with pytest.raises(InputError, match="has no reset_options_from_dataset"):
        world.evaluate(dataset=stored, **task)
    args = {
        "where": {"value": "state", "in_dataset": True},
        "aim": {"value": "goal_state", "in_dataset": True},
        "calls": {"value": 7, "in_dataset": False},
    }
    world.evaluate(dataset=stored, **task, callables=[{"method": "put", "args": args}])
    for env, (number, start) in enumerate(((2, 1), (3, 0))):
        episode = stored.load_episode(number)
        assert world.envs._crew.envs[env].unwrapped.calls == 7
        for seen in policy.seen:
            assert np.array_equal(seen["state"][env, 0], episode["state"][start])
        # Drawn anew after the call, in the colors of this episode.
        shown = TwoRoom()
        shown.reset(seed=0, options={"state": episode["state"][start]})

        picture = resized(shown.render(), SHAPE, 2)
        assert np.array_equal(policy.seen[0]["pixels"][env, 0], picture)
    for spec, message in (
        ({"args": {}}, "expected {'method'"),
        ({"method": "put", "args": {"where": 3}}, "argument 'where' must be"),
        ({"method": "put", "args": {"where": {"value": "stat", "in_dataset": True}}}, "no 'stat'; there are"),
    ):
        with pytest.raises(InputError, match=message):
            world.evaluate(dataset=stored, **task, callables=[spec])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"episodes_idx": [0, 1]}, "2 episodes_idx for 3 environments"),
        ({"start_steps": [0]}, "1 start_steps, expected 3"),
        ({"start_steps": [0, 0, 999]}, "step 999 is out of range for episode 2"),
        ({"episodes_idx": [0, 1, 6]}, "6 is out of range for 6 episodes"),
        ({"goal_offset": 500}, "goal_offset=500 from step 0 is beyond episode 0"),
        ({"goal_offset": None}, "needs goal_offset"),
        ({"goal_offset": 0}, "must be positive"),
        ({"eval_budget": 0}, "must be positive"),
        ({"reset_mode": "auto"}, "must be 'wait'"),
        ({"reset_mode": "never"}, r"must be one of \('auto', 'wait'\), got 'never'"),
        ({"episodes": 3}, "only one of them"),
        ({"dataset": None}, "pass episodes="),
        ({"video": "videos"}, "add_pixels=True"),
    ],
)
def test_bad_calls(make, stored, change, message):
    world = make("ringmap/TwoRoom-v1", 3, None if "video" in change else SHAPE, policy=Still())
    task = {"dataset": stored, "episodes_idx": [0, 1, 2], "start_steps": [0, 0, 0], "goal_offset": 3, "eval_budget": 2}
    with pytest.raises(InputError, match=message):
        world.evaluate(**{**task, **change})
    assert world.policy.seen == []


def frames_of(path):
    av = pytest.importorskip("av", reason="PyAV is not installed (the extra video)")
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_videos_of_episodes(make, tmp_path):
    pytest.importorskip("av", reason="PyAV is not installed (the extra video)")
    world = make("ringmap/TwoRoom-v1", 2, (33, 47), max_episode_steps=30, policy=ExpertPolicy())
    results = world.evaluate(episodes=3, seed=0, video=tmp_path / "videos")
    assert sorted(p.name for p in (tmp_path / "videos").iterdir()) == [f"episode_{k}.mp4" for k in range(3)]
    for k, length in enumerate(results["episode_lengths"]):
        frames = frames_of(tmp_path / f"videos/episode_{k}.mp4")
        assert len(frames) == length + 1
        env = TwoRoom()
        env.reset(seed=k)
        for frame in frames:
            small = resized(env.render(), (33, 47), 2)
            shown = frame[: 33 * 6 : 6, : 47 * 6 : 6]
            assert np.abs(shown.astype(int) - small).mean() < 6, "another picture"
            env.step(env.expert_action())


def test_videos_beside_a_dataset(make, stored, tmp_path):
    pytest.importorskip("av", reason="PyAV is not installed (the extra video)")
    world = make("ringmap/TwoRoom-v1", 2, SHAPE, image_transform=lambda picture: picture / 255, policy=Still())
    world.evaluate(
        dataset=stored, episodes_idx=[1, 2], start_steps=[0, 2], goal_offset=5, eval_budget=8, video=tmp_path
    )
    for env, start in enumerate((0, 2)):
        episode = stored.load_episode(env + 1)["pixels"].astype(int)
        frames = frames_of(tmp_path / f"env_{env}.mp4")
        assert len(frames) == 9
        for t, frame in enumerate(frames):
            small = frame[::6, ::6].astype(int)
            agent, there, goal = small[:, :32], small[:, 33:65], small[:, 66:98]
            for panel, step in ((agent, start), (there, start + min(t, 5)), (goal, start + 5)):
                assert np.abs(panel[:, :31] - episode[step][:, :31]).mean() < 8


def test_a_missing_extra_is_named(make, tmp_path, monkeypatch):
    import sys

    from ringmap.errors import MissingExtraError

    monkeypatch.setitem(sys.modules, "av", None)
    world = make("ringmap/TwoRoom-v1", 1, SHAPE, policy=ExpertPolicy())
    with pytest.raises(MissingExtraError, match=r"ringmap\[video\]"):
        world.evaluate(episodes=1, video=tmp_path)
