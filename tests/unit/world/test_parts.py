"""Collections in parts: the rows are those of whole episodes; a kill in the middle of an episode stores no seed
twice."""

import os
import random
import time

import numpy as np
import pytest

from ringmap.data import ReplayBuffer
from ringmap.errors import InputError, RolloutError
from ringmap.policy import RandomPolicy
from ringmap.storage.commit.store import Store
from ringmap.storage.records.table import DROPPED
from ringmap.world import collecting
from tests.unit.world.collector import collect, killed_after
from tests.unit.world.test_resume import uninterrupted
from tests.unit.world.test_rows import by_seed

EPISODES, ENVS, EVERY = 12, 3, 6


def stored(buf):
    """Return what `by_seed` does, without the name of the collection, and data that are not known."""
    found = by_seed(buf)
    for episode in found.values():
        data = episode["data"].items()
        episode["data"] = {n: v for n, v in data if v != "None" and n != "collection"}
    return found


def is_prefix(one, whole):
    """Whether an episode has the first rows of another, or all without its end, and data that were known."""
    names = set(whole) - {"data"}
    if set(one) - {"data"} != names or not one["data"].items() <= whole["data"].items():
        return False
    return all(
        one[n][0] == whole[n][0] and one[n][1][0] <= whole[n][1][0] and whole[n][2].startswith(one[n][2]) for n in names
    )


@pytest.mark.parametrize("kind", ["box", "discrete", "dict"])
@pytest.mark.parametrize("every", [1, 4, 50])
def test_the_rows_are_those_of_whole_episodes(make, kind, every):
    found = []
    for commit_every in (None, every):
        world = make("RingmapTest/Proof-v0", num_envs=3, kind=kind, policy=RandomPolicy(seed=0))
        buf = ReplayBuffer(max_steps=1000, spare_rows=60)
        world.collect(writer=buf, episodes=9, seed=4, commit_every=commit_every)
        for i, data in enumerate(buf.get_episode_data()["seed"]):
            record = buf.engine.source.live.whole  # all have ended
            assert not record.is_open.any(), (i, data)
        for episode in (episodes := by_seed(buf)).values():
            episode.pop("observation")  # it has the number of the environment, which goes on
            episode.pop("next_observation", None)
        found.append(episodes)
    assert found[0] == found[1]


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("interrupted", ["drop", "keep"])
def test_killed_and_resumed(tmp_path, interrupted, rounds):
    """Twice; in a campaign fifty times, or as often as there is time for: LASTS_S."""
    expected, every = uninterrupted(EPISODES, num_envs=2), 0
    end, seed = time.monotonic() + float(os.environ.get("LASTS_S", "inf")), os.environ.get("SEED", "")
    for round_ in range(rounds):
        if time.monotonic() > end:
            break
        path, rng = tmp_path / f"buffer{round_}", random.Random(f"{interrupted}{round_}{seed}")
        kills, cut = 0, {}
        numbers = (EPISODES, 5000, ENVS, EVERY, interrupted)
        while kills < 3:
            if not killed_after(rng.randint(0, 400), path, *numbers):
                break
            kills += 1
        collect(path, *numbers)
        with ReplayBuffer.open(path) as buf:
            found = stored(buf)
            assert buf.notes["collections"]["100"]["watermark"] == len(expected)
        assert sorted(found) == sorted(expected), "a seed is missing, or was stored twice"
        for seed, episode in found.items():
            if episode != expected[seed]:
                assert is_prefix(episode, expected[seed]), seed
                cut[seed] = episode
        assert kills
        every += kills
        assert not cut or interrupted == "keep"
        collect(path, *numbers)  # there is nothing left to do
        with ReplayBuffer.open(path) as buf:
            assert stored(buf) == found
    print(f"{interrupted}: {every} kills")


class Stops(RandomPolicy):
    """Random, and raises after so many steps."""

    def __init__(self, left, **options):
        super().__init__(**options)
        self.left = left

    def get_action(self, infos):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().get_action(infos)


def collected(make, buf, left=0, **options):
    world = make(
        "ringmap/TwoRoom-v1",
        num_envs=2,
        image_shape=(16, 16),
        max_episode_steps=20,
        policy=Stops(left, seed=9) if left else RandomPolicy(seed=9),
    )
    options = {"commit_every": 4, "resume": True, **options}
    world.collect(writer=buf, episodes=4, seed=100, options={"variation": ["agent.color"]}, **options)


def stop(make, buf, left, **options):
    with pytest.raises(KeyboardInterrupt):
        collected(make, buf, left, **options)


@pytest.mark.parametrize("interrupted", ["drop", "keep"])
def test_an_error_and_the_same_seed_in_one_process(make, interrupted):
    buf = ReplayBuffer(1000, interrupted=interrupted)
    stop(make, buf, 30)
    before = sorted(buf.get_episode_data()["seed"])
    assert before == [100, 101, 102, 103]
    assert not buf.engine.source.live.whole.is_open.any()
    lengths = buf.lengths.tolist()
    collected(make, buf)
    assert sorted(buf.get_episode_data()["seed"]) == before
    assert sorted(lengths) == [8, 8, 21, 21]
    assert sorted(buf.lengths.tolist()) == ([21] * 4 if interrupted == "drop" else sorted(lengths))
    assert buf.notes["collections"]["100"]["watermark"] == 4
    assert len(buf.dropped_episode_data()) == (4 if interrupted == "drop" else 0)  # parts of 4
    assert buf.check() == []
    collected(make, buf, resume=True, commit_every=None)
    assert buf.num_episodes == 4


def test_a_reader_sees_dropped_parts_go(make, tmp_path):
    buf = ReplayBuffer(1000, path=tmp_path / "buf")
    stop(make, buf, 30)
    with ReplayBuffer.open(tmp_path / "buf") as reader:
        assert reader.num_episodes == 4
        names = [chain.name for chain in buf.engine.episodes.chains() if not chain.is_whole]
        buf.engine.drop_chains(names, "here")
        buf.engine.drop_chains(names, "here")
        assert buf.num_episodes == 2
        reader.refresh()
        assert sorted(reader.get_episode_data()["seed"]) == sorted(buf.get_episode_data()["seed"])
        assert reader.lengths.tolist() == [21, 21]
        assert reader.sample(50)["state"].shape[0] == 50
    assert buf.check() == []
    buf.close()


def test_kept_seeds_stay_played_when_they_are_evicted(make):
    buf = ReplayBuffer(60, interrupted="keep")
    stop(make, buf, 30)
    collected(make, buf)
    buf.write_episodes([{n: v[:20] for n, v in buf.load_episode(-1).items()} for _ in range(3)])
    assert buf.get_episode_data()  # of what is left
    before = buf.engine.source.seq
    collected(make, buf)
    assert buf.engine.source.seq == before


def test_a_part_that_is_lost_ends_the_episode(make, tmp_path):
    """A finished episode is collected again if one of its parts was damaged."""
    buf = ReplayBuffer(1000, path=tmp_path / "buf")
    collected(make, buf)
    expected = stored(buf)
    chain = buf.engine.episodes.chains()[1]
    records, _ = buf.engine.source.table.read_range(1, buf.engine.source.seq)
    second = records[(records["chain"] == chain.name) & (records["number"] == 1)]
    assert len(second) == 1
    buf.close()
    buf = ReplayBuffer(1000, path=tmp_path / "buf")
    table, seq = buf.engine.source.table, int(second["seq"][0])
    record = table.read(seq)
    table.write(record._replace(flags=record.flags | DROPPED))
    buf.engine.owned.abandon()
    buf = ReplayBuffer(1000, path=tmp_path / "buf")
    assert buf.num_episodes == 5
    collected(make, buf)
    assert stored(buf) == expected
    buf.close()


def test_without_the_drop_a_seed_is_there_twice(make, monkeypatch):
    """The control of the tests above."""
    monkeypatch.setattr(collecting, "_with_chains", lambda buffer, progress: progress)
    buf = ReplayBuffer(1000)
    stop(make, buf, 30)
    collected(make, buf)
    with pytest.raises(AssertionError):
        by_seed(buf)


def test_without_the_flags_a_seed_is_there_twice(make, monkeypatch):
    monkeypatch.setattr(Store, "drop_chains", lambda self, chains, where: None)
    buf = ReplayBuffer(1000)
    stop(make, buf, 30)
    collected(make, buf)
    with pytest.raises(AssertionError):
        by_seed(buf)


def test_a_learner_draws_before_the_first_episode_ends(make, tmp_path):
    buf = ReplayBuffer(1000, path=tmp_path / "buf", history_len=3)
    stop(make, buf, 12, resume=False)
    with ReplayBuffer.open(tmp_path / "buf", seed=0) as learner:
        assert learner.lengths.tolist() == [8, 8]
        assert sorted(learner.get_episode_data()["seed"]) == [100, 101]
        steps = learner.sample(20)["step_idx"].reshape(20, 3)
        assert (np.diff(steps, axis=1) == 1).all()
    buf.close()


def test_bad_input(make, tmp_path):
    world = make("RingmapTest/Proof-v0", policy=RandomPolicy(seed=0))
    buf = ReplayBuffer(20)
    for wrong, why in ((0, "must be positive"), (-3, "positive"), (21, "don't fit in the 20 spare rows")):
        with pytest.raises(InputError, match=r"^World.collect: commit_every.*" + why):
            world.collect(writer=buf, episodes=1, commit_every=wrong)
    with pytest.raises(InputError, match="for a ReplayBuffer"):
        world.collect(tmp_path / "data.h5", 1, commit_every=4)
    assert not (tmp_path / "data.h5").exists()
    assert buf.num_episodes == 0
    with pytest.raises(InputError, match="another collection with seed 5.*episodes: 2 there, 3 now"):
        world.set_policy(Stops(3, seed=0))
        try:
            world.collect(writer=buf, episodes=2, seed=5, commit_every=1, resume=True)
        except KeyboardInterrupt:
            world.collect(writer=buf, episodes=3, seed=5, commit_every=1, resume=True)


def test_an_environment_that_fails(make):
    world = make("RingmapTest/Faulty-v0", num_envs=1, fault="grows", at=(0, 2), policy=RandomPolicy(seed=0))
    buf = ReplayBuffer(100)
    with pytest.raises(RolloutError, match="changed its shape at step 2"):
        world.collect(writer=buf, episodes=1, seed=1, commit_every=1)
    assert buf.lengths.tolist() == [1]
    assert not buf.engine.source.live.whole.is_open.any()
