"""`ringmap collect`: the command is the call, with a module that lies here."""

import pytest

from ringmap.data import ShardedReplayBuffer

ROOMS = """
import ringmap

POLICY = ringmap.policy.RandomPolicy(seed=0)

def make_world(number):
    return ringmap.World("ringmap/TwoRoom-v1", num_envs=1, add_pixels=False, max_episode_steps=5)
"""


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "rooms", raising=False)
    (tmp_path / "rooms.py").write_text(ROOMS)


def test_collect(cli, rooms):
    words = [
        "rooms:make_world",
        "--path",
        "fleet",
        "--episodes",
        3,
        "--max-steps",
        100,
        "--policy",
        "rooms:POLICY",
        "-O",
        "fps=5",
    ]
    done = cli("collect", *map(str, words), "--collectors", "1")
    assert (done.code, done.err) == (0, "")
    assert done.out == "3 seeds are played, each once; 1 ring in fleet hold 3 episodes, 18 steps.\n"
    buf = ShardedReplayBuffer("fleet")
    assert sorted(buf.get_episode_data()["seed"]) == [0, 1, 2]
    assert buf.fps == 5
    buf.close()
    done = cli("collect", *map(str, words), "--collectors", "2", "--no-resume")
    assert done.code == 2
    assert "hold 3 episodes of a collection with seed 0" in done.err
