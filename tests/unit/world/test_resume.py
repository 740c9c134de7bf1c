"""A collection that is killed goes on: every seed once, every episode as an uninterrupted run gives it."""

import itertools
import json
import os
import random

import numpy as np
import pytest

from ringmap.buffers import engine
from ringmap.data import ReplayBuffer, get_format, list_formats, load_dataset
from ringmap.errors import InputError
from ringmap.policy import RandomPolicy
from ringmap.storage.records.blobs import Segments
from ringmap.world.progress import Progress, identity_of
from tests.tiers import few
from tests.unit.world.collector import collect, killed_after, world_of
from tests.unit.world.test_rows import by_seed


def uninterrupted(episodes, num_envs):
    """Return the episodes that a run gives which nobody kills, by seed."""
    world = world_of(num_envs, RandomPolicy(seed=9))
    buf = ReplayBuffer(max_steps=50 * episodes)
    world.collect(writer=buf, episodes=episodes, seed=100, options={"variation": ["agent.color"]})
    world.close()
    return by_seed(buf)


@pytest.mark.parametrize("most", [3, pytest.param(int(os.environ.get("KILLS", 20)), marks=pytest.mark.campaign)])
@pytest.mark.parametrize("max_steps", [5000, 60], ids=["room for all", "most evicted"])
def test_killed_and_resumed(tmp_path, max_steps, most):
    path, episodes, rng = tmp_path / "buffer", 8 * most, random.Random(max_steps)
    kills, stored = 0, {}
    expected = uninterrupted(episodes, num_envs=2)
    while kills < most:
        kills += killed_after(rng.randint(10, 130), path, episodes, max_steps, 3)
        stored |= left_in(path, stored)
    collect(path, episodes, max_steps, 3)
    stored |= left_in(path, stored)
    if max_steps > 1000:
        assert stored == expected
    else:
        newest = ReplayBuffer.open(path)
        assert 0 < newest.num_episodes < 5
        assert all(expected[seed] == episode for seed, episode in stored.items())
        newest.close()
    buf = ReplayBuffer.open(path, mode="r+")
    assert buf.notes["collections"]["100"]["watermark"] == episodes
    before = buf.num_episodes
    buf.close()
    collect(path, episodes, max_steps, 3)  # there is nothing left to do
    buf = ReplayBuffer.open(path)
    assert buf.num_episodes == before
    assert committed(path) == episodes, "an episode was collected twice, or not at all"
    buf.close()


def left_in(path, known):
    """Return what a killed collector left, by seed; what was seen before must be unchanged."""
    if not (path / "manifest.json").exists():
        return {}
    buf = ReplayBuffer.open(path)
    found = by_seed(buf)
    buf.close()
    assert all(known.get(seed, episode) == episode for seed, episode in found.items())
    return found


def committed(path):
    """Return how many episodes were ever committed: the table counts them, evicted or not."""
    table = np.load(path / "episodes.npy", mmap_mode="r")
    return int((table["kind"][table["seq"] > 0] == 1).sum())


LOSSY = {"folder", "video"}
THEIRS = {"lerobot", "minari", "robomimic"}  # of columns of their own: tests/peers
RESUMABLE = [
    name
    for name in list_formats()
    if get_format(name).can_write() and get_format(name).supports_episode_data and name not in THEIRS
]


@pytest.mark.parametrize("format", few(RESUMABLE, 2))
def test_a_file_goes_on(tmp_path, format):
    """Interrupted by an error, where a kill would do the same to any format that keeps its promise."""
    expected = uninterrupted(8, num_envs=2)
    path = tmp_path / f"runs/file.{'h5' if format == 'hdf5' else format}"

    class Stops(RandomPolicy):
        left = 40

        def get_action(self, infos):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().get_action(infos)

    def run(policy):
        world = world_of(2, policy)
        world.collect(path, 8, seed=100, options={"variation": ["agent.color"]}, format=format, resume=True)
        world.close()

    with pytest.raises(KeyboardInterrupt):
        run(Stops(seed=9))
    dataset = load_dataset(path, layout="HWC")
    assert 0 < len(dataset.lengths) < 8
    dataset.close()
    run(RandomPolicy(seed=9))
    run(RandomPolicy(seed=9))
    dataset = load_dataset(path, layout="HWC")
    again = ReplayBuffer(max_steps=1000)
    for i in range(len(dataset.lengths)):
        data = {n: v[0] for n, v in dataset.get_episode_data(i).items() if n != "collection"}
        steps = {n: np.asarray(v) for n, v in dataset.load_episode(i).items()}
        again.write_episode({**steps, "_episode_data": data})
    dataset.close()
    found = by_seed(again)
    if format in LOSSY:
        for episode in (*found.values(), *expected.values()):
            images = [n for n, v in episode.items() if n != "data" and v[0] == "|u1" and len(v[1]) == 4]
            assert images
            for name in images:
                episode[name] = episode[name][:2]
    assert found == expected
    world = world_of(1, RandomPolicy(seed=9))
    with pytest.raises(InputError, match=r"another collection with seed 100; .*episodes: 8 there, 9 now"):
        world.collect(path, 9, seed=100, options={"variation": ["agent.color"]}, format=format, resume=True)
    world.close()


def test_a_killed_file_goes_on(tmp_path):
    path = tmp_path / "file.h5"
    assert killed_after(60, path, 12, 0, 2)
    collect(path, 12, 0, 2)
    dataset = load_dataset(path)
    assert sorted(dataset.get_episode_data()["seed"]) == list(range(100, 112))


def test_what_differs_is_said(make):
    world = make("ringmap/TwoRoom-v1", max_episode_steps=3, policy=RandomPolicy(seed=0))
    buf = ReplayBuffer(max_steps=1000)
    world.collect(writer=buf, episodes=4, seed=5, resume=True)
    for changed, message in {
        "episodes": ({"episodes": 6}, "episodes: 4 there, 6 now"),
        "options": ({"options": {"variation": ["all"]}}, "options: None there, '{\"variation"),
    }.values():
        with pytest.raises(InputError, match="another collection with seed 5.*" + message):
            world.collect(writer=buf, **{"episodes": 4, "seed": 5, "resume": True, **changed})
    other = make("RingmapTest/Proof-v0", policy=RandomPolicy(seed=0))
    with pytest.raises(InputError, match="env: 'ringmap/TwoRoom-v1' there, 'RingmapTest/Proof-v0' now"):
        other.collect(writer=buf, episodes=4, seed=5, resume=True)
    assert buf.num_episodes == 4
    world.collect(writer=buf, episodes=2, seed=50, resume=True)  # another one beside it
    world.collect(writer=buf, episodes=4, seed=5, resume=True)
    assert sorted(buf.get_episode_data()["seed"]) == [5, 6, 7, 8, 50, 51]


def test_a_dropped_episode_is_collected_again(make, tmp_path, monkeypatch):
    """What a power cut took, the opening drops, and the progress knows."""
    world = make("ringmap/TwoRoom-v1", num_envs=1, max_episode_steps=3, policy=RandomPolicy(seed=0))
    path = tmp_path / "buffer"
    buf = ReplayBuffer(max_steps=1000, path=path, sync_every_s=0)
    world.collect(writer=buf, episodes=4, seed=0, resume=True)
    before = by_seed(buf)
    buf.engine.owned.abandon()  # as a kill leaves it: no sync vouches for anything
    rows = np.load(next((path / "columns").glob("*-state.npy")), mmap_mode="r+")
    rows[5] = 0.123  # a row of the second episode never reached the disk
    rows.flush()
    monkeypatch.setattr(engine.DISK.system, "boot_id", lambda: b"another boot ..."[:16])
    buf = ReplayBuffer(max_steps=1000, path=path)
    assert sorted(buf.get_episode_data()["seed"]) == [0, 2, 3]
    assert [data["seed"] for data in buf.dropped_episode_data()] == [1]
    assert buf.notes["collections"]["0"]["watermark"] == 4  # it counts, unless one looks
    world.collect(writer=buf, episodes=4, seed=0, resume=True)
    assert by_seed(buf) == before
    world.collect(writer=buf, episodes=4, seed=0, resume=True)
    assert buf.num_episodes == 4
    buf.close()


def test_no_seed_is_given_twice_two_laps_later(make, tmp_path, monkeypatch):
    """The episode that stored the progress, and the segment of it, are gone."""
    monkeypatch.setattr(Segments.__init__, "__defaults__", (2000,))
    world, path = make("ringmap/TwoRoom-v1", num_envs=1, max_episode_steps=3), tmp_path / "buffer"
    policy = RandomPolicy(seed=0)
    world.set_policy(policy)
    buf = ReplayBuffer(max_steps=16, path=path)
    actions = itertools.count(1)

    def four_episodes(infos, get_action=policy.get_action):
        if next(actions) > 12:
            raise KeyboardInterrupt
        return get_action(infos)

    with monkeypatch.context() as during:
        during.setattr(policy, "get_action", four_episodes)
        with pytest.raises(KeyboardInterrupt):
            world.collect(writer=buf, episodes=6, seed=0, resume=True)
    assert sorted(buf.get_episode_data()["seed"]) == [0, 1, 2, 3]
    rows = buf.load_episode(0)
    for _ in range(24):
        buf.write_episode({**rows, "_episode_data": {"seed": -1}})
    buf.engine.owned.abandon()
    buf = ReplayBuffer.open(path, mode="r+")
    world.collect(writer=buf, episodes=6, seed=0, resume=True)
    assert [seed for seed in buf.get_episode_data()["seed"] if seed >= 0] == [4, 5]
    buf.close()


def test_notes_are_committed_with_their_episode(tmp_path):
    path = tmp_path / "buffer"
    buf = ReplayBuffer(max_steps=4, path=path)
    buf.write_episode({"x": [1.0, 2.0]}, notes={"a": 1})
    buf.write_episode({"x": [1.0, 2.0]})
    with pytest.raises(InputError):
        buf.write_episode({"x": [1.0, "no"]}, notes={"a": 2})
    buf.write_episode({"x": [1.0, 2.0]}, notes={"b": [2]})
    assert buf.notes == {"a": 1, "b": [2]}
    buf.notes["b"].append(3)
    assert buf.notes == {"a": 1, "b": [2]}
    buf.engine.owned.abandon()
    buf = ReplayBuffer.open(path, mode="r+")
    assert buf.notes == {"a": 1, "b": [2]}
    assert buf.dropped_episode_data() == []
    buf.close()


def test_old_progress_is_forgotten(make, monkeypatch):
    from ringmap.world import collecting

    monkeypatch.setattr(collecting, "_NOTES_MAX", 3)
    world = make("ringmap/TwoRoom-v1", num_envs=1, max_episode_steps=1, policy=RandomPolicy(seed=0))
    buf = ReplayBuffer(max_steps=100)
    for seed in (10, 20, 30, 40):
        world.collect(writer=buf, episodes=1, seed=seed, resume=True)
    assert list(buf.notes["collections"]) == ["20", "30", "40"]


def test_progress_arithmetic(rng):
    identity = identity_of("env", 3, 50, {"state": np.float32([0.5, 1])})
    progress, model = Progress(identity), set()
    for k in rng.permutation(50).tolist():
        progress.add(k)
        model.add(k)
        kept = json.loads(json.dumps(progress.as_json()))
        again = Progress.resumed(kept, identity, "here", "there")
        assert [j for j in range(50) if j in again] == sorted(model)
        assert again.missing() == sorted(set(range(50)) - model)
        assert len(again) == len(model)
        assert kept["watermark"] == min([*set(range(50)) - model, 50])
    assert identity_of("env", 3, 50, {"x": np.zeros(500)})["options"].startswith("xxh3 ")
    assert identity_of("env", 3, 50, {"x": np.zeros(500)}) != identity_of("env", 3, 50, {"x": np.ones(500)})
