"""Lance: the conformance suite, and what is its own."""

import os

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap.data import get_format, load_dataset
from ringmap.errors import InputError, RoleError
from ringmap.formats.lance import lance
from ringmap.testing.formats import FormatTests

pytestmark = pytest.mark.usefixtures("workers_end_soon")


class TestLance(FormatTests):
    name = "lance"
    suffix = ".lance"
    survives_forks = False


def test_a_forked_process_is_refused_every_time(monkeypatch):
    lance()
    monkeypatch.setattr("ringmap.formats.lance._used_by", os.getpid() + 1)  # as after a fork
    for _ in range(2):
        with pytest.raises(RoleError, match="multiprocessing_context='spawn'"):
            lance()


def test_forked_workers_say_what_to_do(tmp_path):
    path = tmp_path / "made.lance"
    with get_format("lance").open_writer(path) as writer:
        writer.write_episode({"x": [0.0, 1.0, 2.0], "action": [0, 1, 2]})
    dataset = load_dataset(path)
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RoleError, match="multiprocessing_context='spawn'"):
        list(loader)
    assert len(list(DataLoader(dataset))) == 3


@pytest.mark.parametrize("name", ["_rowid", "_rowaddr", "episode_idx", "step_idx"])
def test_a_column_may_have_a_name_of_lances_own(tmp_path, name):
    with get_format("lance").open_writer(tmp_path / "set.lance") as writer:
        writer.write_episode({name: [3, 1, 2], "x": [0.5, 1.5, 2.5]})
    episode = load_dataset(tmp_path / "set.lance").load_episode(0)
    assert episode[name].tolist() == [3, 1, 2] and episode["x"].tolist() == [0.5, 1.5, 2.5]


def test_their_layout_rounds_fractions_alone(tmp_path):
    """`compat=True` refuses what float32 does not hold, all of it at once."""
    rows = {
        "obs": [0.1, 0.2],
        "count": [2**24 + 1, 0],
        "far": [1e300, 0],
        "wave": [1j, 0],
        "when": np.zeros(2, "M8[s]"),
    }
    with get_format("lance").open_writer(tmp_path / "set.lance", compat=True) as writer:
        with pytest.raises(InputError, match=r"drop=\['count', 'far', 'wave', 'when'\]"):
            writer.write_episode(rows)
        writer.write_episode({"obs": rows["obs"], "count": [2**24, 0], "name": ["a", "b"]})
    got = load_dataset(tmp_path / "set.lance", output="numpy").load_episode(0)
    assert got["obs"].tolist() == [[np.float32(0.1)], [np.float32(0.2)]]
    assert got["count"].tolist() == [[2**24], [0]]
