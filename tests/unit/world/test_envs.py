"""The environments that come along, and real ones of others."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ringmap import World
from ringmap.data import ReplayBuffer
from ringmap.errors import MissingExtraError
from ringmap.policy import RandomPolicy
from ringmap.world.envs import register
from ringmap.world.envs.two_room import DOOR, RADIUS, THICK, WALL, TwoRoom
from tests.unit.world.test_rows import by_seed


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_room_keeps_gymnasiums_contract():
    check_env(TwoRoom(), skip_render_check=True)


@pytest.mark.slow
def test_nobody_walks_through_a_wall(rng):
    env = TwoRoom(render_mode=None)
    crossings = 0
    for seed in range(200):
        env.reset(seed=seed, options={"variation": ["door.position"]})
        door = float(env.variation["door.position"][0])
        for _ in range(80):
            before = env.state
            # Toward the wall, mostly: that is where it may go wrong.
            pull = np.sign(WALL - before[0]) * (rng.random() < 0.8)
            env.step(np.array([pull, rng.uniform(-1, 1)], np.float32))
            x, y = env.state
            assert min(x, y) >= RADIUS - 1e-6
            assert max(x, y) <= 1 - RADIUS + 1e-6
            if abs(x - WALL) < THICK + RADIUS - 1e-6:
                assert abs(y - door) <= DOOR - RADIUS + 1e-6, "inside the wall"
            assert np.abs(env.state - before).max() < 0.0501, "it jumped"
            if (before[0] > WALL) != (x > WALL):
                crossings += 1
                assert max(abs(y - door), abs(before[1] - door)) <= DOOR, "through the wall"
    assert crossings > 20


def test_the_expert_arrives_from_everywhere(rng):
    env = TwoRoom(render_mode=None)
    for seed in range(200):
        env.reset(seed=seed, options={"variation": ["door.position"]})
        if seed % 2:  # anywhere but in the wall, the same room included
            places = rng.uniform(0.06, 0.42, (2, 2)) + rng.integers(0, 2, (2, 2)) * (0.5, 0)
            env.reset(seed=seed, options={"state": places[0], "goal_state": places[1], "variation": ["door.position"]})
        for _ in range(60):
            _, _, arrived, _, info = env.step(env.expert_action())
            if arrived:
                break
        assert arrived
        assert info["is_success"]


def test_the_goal_is_a_picture_of_being_there():
    env = TwoRoom()
    _, info = env.reset(seed=4)
    env.reset(seed=4, options={"state": env.goal_state})
    assert np.array_equal(env.render(), info["goal"])


def test_ids():
    register()
    register()
    for name in ("ringmap/TwoRoom-v1", "swm/TwoRoom-v1"):
        assert isinstance(gymnasium.make(name).unwrapped, TwoRoom)
    assert {"ringmap/PushT-v1", "swm/PushT-v1"} <= set(gymnasium.registry)


def collected(name, num_envs, workers=0, steps=20, **options):
    shape = (32, 32) if options.get("add_pixels", True) else None
    with World(name, num_envs, shape, max_episode_steps=steps, workers=workers, **options) as world:
        world.set_policy(RandomPolicy(seed=0))
        buf = ReplayBuffer(max_steps=2000)
        world.collect(writer=buf, episodes=4, seed=0)
    return buf


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_classic_control(name, monkeypatch):
    pytest.importorskip("pygame", reason="pygame is not installed (the extra demo)")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    alone, several, workers = collected(name, 1), collected(name, 3), collected(name, 4, workers=2)
    assert by_seed(alone) == by_seed(several) == by_seed(workers)
    pixels = alone.get_col_data("pixels")
    assert pixels.shape[1:] == (32, 32, 3)
    assert len({frame.tobytes() for frame in pixels}) > 10


def has_push_t():
    try:
        import gym_pusht  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.skipif(has_push_t(), reason="gym-pusht is installed")
def test_push_t_names_its_extra():
    with pytest.raises(MissingExtraError, match=r"ringmap\[pusht\]"):
        World("swm/PushT-v1", 1, (32, 32))


push_t = pytest.mark.skipif(not has_push_t(), reason="gym-pusht is not installed (the extra pusht)")


@push_t
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:pkg_resources")
def test_push_t():
    alone, workers = collected("swm/PushT-v1", 1), collected("swm/PushT-v1", 4, workers=2)
    assert by_seed(alone) == by_seed(workers)
    assert alone.get_col_data("state").shape[1:] == (5,)
