"""Values that are constant within an episode: stored, evicted, cleared and reopened with it."""

import numpy as np
import pytest
import torch

from ringmap import ReplayBuffer
from ringmap.buffers.replay import EPISODE_DATA_KEY
from ringmap.errors import ClipIndexError, InputError
from ringmap.storage.read.handle import Handle
from tests.unit.buffers.steps import columns, episode, stored


def test_it_is_no_column(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5, {"seed": 3}))
    assert EPISODE_DATA_KEY not in buf.column_names
    assert EPISODE_DATA_KEY not in buf[0]
    assert EPISODE_DATA_KEY not in buf.sample(2)
    assert EPISODE_DATA_KEY not in buf.load_episode(0)
    assert stored(buf) == [0]


def test_lists_and_tensors_come_back_as_arrays(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5, {"a": [1, 2], "b": torch.ones(2, dtype=torch.float64)}))
    data = buf.get_episode_data(0)
    assert data["a"][0].tolist() == [1, 2]
    assert (data["b"][0].dtype, data["b"][0].tolist()) == (np.float64, [1, 1])


@pytest.mark.parametrize(
    "wrong",
    [3, "ab", [("a", 1)], {"a": object()}, {"a": {"b": 1}}, {3: 1}],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_mapping_of_values_is_refused(buffer, wrong):
    buf = buffer(max_steps=20)
    with pytest.raises(InputError, match="episode.data"):
        buf.write_episode({**columns(0, 0, 5), EPISODE_DATA_KEY: wrong})
    assert (buf.num_episodes, buf.column_names) == (0, [])


def test_an_episode_without_any_has_none(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5))
    buf.write_episode({**episode(1, 5), EPISODE_DATA_KEY: {}})
    assert (buf.episode_column_names, buf.get_episode_data()) == ([], {})
    assert all(EPISODE_DATA_KEY not in one for one in buf.episodes())


def test_names_are_the_union_first_seen_first_and_missing_is_none(buffer):
    buf = buffer(max_steps=20)
    buf.write_episode(episode(0, 5, {"seed": 1, "goal": "a"}))
    buf.write_episode(episode(1, 5))
    buf.write_episode(episode(2, 5, {"mood": b"x", "goal": "b"}))
    assert buf.episode_column_names == ["seed", "goal", "mood"]
    assert buf.get_episode_data() == {
        "seed": [1, None, None],
        "goal": ["a", None, "b"],
        "mood": [None, None, b"x"],
    }


def test_asked_episodes_in_any_order_duplicates_welcome(buffer):
    buf = buffer(max_steps=20)
    for number in range(4):
        buf.write_episode(episode(number, 5, {"n": number}))
    assert buf.get_episode_data(2) == {"n": [2]}
    assert buf.get_episode_data(-1) == {"n": [3]}
    assert buf.get_episode_data([3, 0, 0, -2]) == {"n": [3, 0, 0, 2]}
    assert buf.get_episode_data(np.array([1, 1])) == {"n": [1, 1]}
    assert buf.get_episode_data([]) == {}
    for wrong in (4, -5, [0, 4]):
        with pytest.raises(ClipIndexError, match="out of range for 4 episodes"):
            buf.get_episode_data(wrong)


def test_it_is_evicted_and_cleared_with_its_episode(buffer):
    buf = buffer(max_steps=20)
    for number in range(9):
        buf.write_episode(episode(number, 5, {"n": number, f"only {number}": True}))
        numbers = list(range(max(0, number - 3), number + 1))
        assert buf.get_episode_data()["n"] == numbers
        assert buf.episode_column_names == [
            "n",
            f"only {numbers[0]}",
            *(f"only {n}" for n in numbers[1:]),
        ]
    buf.clear()
    assert (buf.episode_column_names, buf.get_episode_data()) == ([], {})
    buf.write_episode(episode(9, 5))
    assert buf.get_episode_data() == {}


def test_large_data_goes_with_its_segment(disk_buffer, home):
    """Segments hold 4 MiB or so each; those of evicted episodes are deleted, the others are all read."""
    buf = disk_buffer(max_steps=20)
    big = np.random.default_rng(0).bytes(1 << 20)
    for number in range(40):
        buf.write_episode(episode(number, 5, {"n": number, "big": big[number:]}))
        if number % 10 == 9:
            buf.flush()
    assert buf.get_episode_data()["big"] == [big[n:] for n in range(36, 40)]
    held = sum(path.stat().st_size for path in (home / "buf/data").iterdir())
    assert held < 16 << 20, "of 40 MiB written, what lives and what waits for a sync"
    buf.close()
    again = disk_buffer(max_steps=20)
    assert again.get_episode_data()["n"] == [36, 37, 38, 39]


def test_each_blob_is_read_once_for_the_names(tmp_path, monkeypatch):
    """After a write, what one episode holds costs one blob, and the names of all one more: not all of them again."""
    read = []
    real = Handle.data_at
    monkeypatch.setattr(Handle, "data_at", lambda self, o: read.append(o) or real(self, o))
    with ReplayBuffer(40, path=tmp_path / "buf") as buf:
        for number in range(30):
            buf.write_episode({"x": [1, 2], "_episode_data": {f"n{number % 25}": number, "all": 1}})
            assert buf.get_episode_data([-1])["all"] == [1]
            assert "all" in buf.episode_column_names
        assert len(read) == 2 * 30
        assert buf.num_episodes == 20
        names = ["n10", "all", *[f"n{n}" for n in range(11, 25)], *[f"n{n}" for n in range(5)]]
        assert buf.episode_column_names == names
        buf.clear()
        assert buf.episode_column_names == []
    buf.close()
