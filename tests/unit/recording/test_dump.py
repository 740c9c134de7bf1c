"""Dumps: when, of which buffer, where to, and what may be replaced."""

import os

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import ExistsError, LockedError
from ringmap.recording import ReplayBufferCollectionWrapper, dumping
from tests.unit.recording.reading import full_buffer
from tests.unit.recording.scripted import Scripted
from tests.unit.recording.test_construction import vector


def play(env, count=12):
    env.reset()
    for i in range(count):
        env.step(np.full(env.num_envs, i))


def lengths(path):
    reader = ReplayBuffer.open(path)
    try:
        return reader.lengths.tolist()
    finally:
        reader.close()


@pytest.mark.parametrize("home", ["ram", "disk"])
def test_at_the_end_of_each_episode_the_newest_takes_the_place_of_the_last(tmp_path, home):
    buf = ReplayBuffer(1000, path=None if home == "ram" else tmp_path / "buf")
    env = ReplayBufferCollectionWrapper(vector(2), buf, dump_on_episode_end=True, dump_path=tmp_path / "deep" / "dump")
    env.reset()
    assert not (tmp_path / "deep").exists(), "a reset is no end"
    seen = 0
    for i in range(20):
        env.step(np.full(2, i))
        if buf.num_episodes > seen:
            seen = buf.num_episodes
            assert lengths(tmp_path / "deep" / "dump") == buf.lengths.tolist()
    assert seen > 2
    assert os.listdir(tmp_path / "deep") == ["dump"], "nothing is left beside it"


def test_an_interrupted_episode_is_no_end_but_a_reset_is_a_boundary(tmp_path):
    buf = ReplayBuffer(1000)
    end = ReplayBufferCollectionWrapper(Scripted(), buf, dump_on_episode_end=True, dump_path=tmp_path / "end")
    end.reset()
    end.reset()
    other = ReplayBuffer(1000)
    boundary = ReplayBufferCollectionWrapper(
        vector(2, "Disabled"), other, dump_on_reset_boundary=True, dump_path=tmp_path / "reset"
    )
    boundary.reset()
    assert not (tmp_path / "reset").exists(), "nothing was recorded yet"
    while not other.num_episodes:
        *_, terminated, truncated, _ = boundary.step(np.zeros(2, int))
        if not other.num_episodes:
            boundary.reset(mask=terminated | truncated | np.array([True, False]))
    boundary.reset()
    assert lengths(tmp_path / "reset") == other.lengths.tolist() != []
    assert not (tmp_path / "end").exists()


@pytest.mark.parametrize("mode", ["shared", "per_env"])
def test_a_reset_before_anything_was_recorded_leaves_an_older_dump_alone(tmp_path, mode):
    def make():
        bufs = [ReplayBuffer(1000) for _ in range(1 if mode == "shared" else 2)]
        env = vector(2, "Disabled")
        return ReplayBufferCollectionWrapper(env, bufs, mode, dump_on_reset_boundary=True, dump_path=tmp_path / "d")

    def dumped():
        places = [tmp_path / "d"] if mode == "shared" else [tmp_path / "d" / f"env_{i}" for i in range(2)]
        return [(lengths(place), os.stat(place).st_ino) for place in places]

    env = make()
    env.reset()
    env.step(np.zeros(2, int))
    env.reset()
    kept = dumped()
    assert all(found for found, _ in kept)
    env.reset()
    assert dumped() == kept, "nothing new, nothing written"
    again = make()
    again.reset()
    again.reset()
    assert dumped() == kept, "another session has recorded nothing yet"
    again.step(np.zeros(2, int))
    again.set_replay_buffers([ReplayBuffer(1000) for _ in kept], finalize_old_segments=True, dump_old=True)
    kept = dumped()
    again.reset()
    assert dumped() == kept, "the new buffers have taken nothing"


def test_each_buffer_has_a_folder_of_its_own(tmp_path):
    bufs = [ReplayBuffer(1000), ReplayBuffer(1000)]
    env = ReplayBufferCollectionWrapper(vector(2), bufs, dump_on_episode_end=True, dump_path=tmp_path / "d")
    play(env)
    assert sorted(os.listdir(tmp_path / "d")) == ["env_0", "env_1"]
    for i, buf in enumerate(bufs):
        reader = ReplayBuffer.open(tmp_path / "d" / f"env_{i}")
        assert reader.num_episodes == buf.num_episodes > 0
        assert {int(obs[0, 0]) for obs in (reader.load_episode(k)["obs"] for k in range(reader.num_episodes))} == {i}


def test_a_buffer_s_own_path_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(ReplayBuffer, "snapshot", lambda *_: pytest.fail("a copy of itself"))
    buf = ReplayBuffer(1000, path=tmp_path / "buf")
    play(ReplayBufferCollectionWrapper(vector(2), buf, dump_on_episode_end=True, dump_path=tmp_path / "." / "buf"))
    bufs = [ReplayBuffer(1000, path=tmp_path / "all" / f"env_{i}") for i in range(2)]
    play(ReplayBufferCollectionWrapper(vector(2), bufs, dump_on_episode_end=True, dump_path=tmp_path / "all"))
    assert bufs[0].num_episodes


def test_the_path_may_be_assigned(tmp_path):
    buf = ReplayBuffer(1000)
    env = ReplayBufferCollectionWrapper(vector(1), buf, dump_on_reset_boundary=True, dump_path=tmp_path / "a")
    env.reset()
    env.step([0])
    env.reset()
    env.dump_path = tmp_path / "b"
    assert env.dump_path == tmp_path / "b"
    env.reset()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    with pytest.raises(ValueError, match="needs a path"):
        env.dump_path = None


def test_what_is_no_buffer_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("too")
    for name in ("mine", "file"):
        buf = ReplayBuffer(1000)
        env = ReplayBufferCollectionWrapper(vector(1), buf, dump_on_episode_end=True, dump_path=tmp_path / name)
        with pytest.raises(ExistsError, match="is no buffer; choose another dump_path"):
            play(env)
        assert buf.num_episodes == 1, "the episode is stored all the same"
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"
    assert (tmp_path / "file").read_text() == "too"


def test_a_buffer_that_somebody_writes_stays(tmp_path):
    live = ReplayBuffer(100, path=tmp_path / "live")
    live.write_episode({"x": [1]})
    env = ReplayBufferCollectionWrapper(
        vector(1), ReplayBuffer(1000), dump_on_episode_end=True, dump_path=tmp_path / "live"
    )
    with pytest.raises(LockedError, match="is being written"):
        play(env)
    live.write_episode({"x": [2]})
    assert lengths(tmp_path / "live") == [1, 1]


def test_without_an_exchange_by_the_system_two_renames_do(tmp_path, monkeypatch):
    monkeypatch.setattr(dumping, "exchange", lambda *_: False)
    buf = ReplayBuffer(1000)
    env = ReplayBufferCollectionWrapper(vector(1), buf, dump_on_episode_end=True, dump_path=tmp_path / "d")
    play(env, 20)
    assert lengths(tmp_path / "d") == buf.lengths.tolist()
    assert os.listdir(tmp_path) == ["d"]


def test_what_a_killed_dump_left_is_in_nobodys_way(tmp_path):
    buf = ReplayBuffer(1000)
    env = ReplayBufferCollectionWrapper(vector(1), buf, dump_on_episode_end=True, dump_path=tmp_path / "d")
    play(env)
    (tmp_path / ".d.dump").mkdir()
    (tmp_path / ".d.dump" / "half").write_text("")
    play(env)
    assert lengths(tmp_path / "d") == buf.lengths.tolist()
    assert os.listdir(tmp_path) == ["d"]


def test_transitions_are_saved(tmp_path):
    buf = TransitionReplayBuffer(100, (3,), obs_dtype=np.int32, device=None)
    env = ReplayBufferCollectionWrapper(vector(2), buf, dump_on_episode_end=True, dump_path=tmp_path / "d")
    play(env)
    env.set_replay_buffers(TransitionReplayBuffer(100, (3,), obs_dtype=np.int32), dump_old=True)
    saved = TransitionReplayBuffer.open(tmp_path / "d", device=None)
    assert len(saved) == len(buf) > 0


def test_a_dump_follows_even_where_the_step_was_refused(tmp_path):
    buf = full_buffer("box")

    def refuse(raw):
        if raw["env_index"] == 1:
            raise ValueError("planted")
        return {name: raw[name] for name in ("obs", "t")}

    class Builder:
        transform = staticmethod(refuse)

    buf = ReplayBuffer(1000)
    env = ReplayBufferCollectionWrapper(
        vector(2), buf, transition_builder=Builder(), dump_on_episode_end=True, dump_path=tmp_path / "d"
    )
    env.reset()
    while not buf.num_episodes:
        with pytest.raises(ValueError, match="planted"):
            env.step(np.zeros(2, int))
    assert lengths(tmp_path / "d") == buf.lengths.tolist()
