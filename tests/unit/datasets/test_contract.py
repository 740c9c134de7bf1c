"""`DatasetTests` over all that is a dataset: the sources of other libraries' sets, rings in every way to open one,
views, fleets, goals."""

from typing import ClassVar

import numpy as np
import pytest

from ringmap.data import GoalDataset, ReplayBuffer, ShardedReplayBuffer, get_format, load_dataset
from ringmap.datasets.stored import StoredDataset
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.testing.datasets import DatasetTests
from tests.unit.formats.others import OtherOptions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Renamed:
    """The columns of a source that the suite knows, under its names."""

    def __init__(self, source, names):
        self.source, self.names, self.path = source, names, source.path
        specs = {spec.name: spec for spec in source.schema.columns}
        self.schema = Schema(tuple(ColumnSpec(n, specs[o].shape, specs[o].dtype) for n, o in names.items()))
        self.lengths, self.offsets, self.episode_columns = source.lengths, source.offsets, []

    def windows(self, columns, starts, length, stride=1):
        found = self.source.windows([self.names[n] for n in columns], starts, length, stride)
        return {name: found[self.names[name]] for name in columns}

    def episode_data(self, episode):
        return {}

    def close(self):
        self.source.close()


def steps(episode):
    """An episode whose rows are steps already: each with the observation that followed."""
    found = {"action": episode["action"], "reward": episode["reward"]}
    for name in ("where", "pixels"):
        rows = episode[name]
        found[f"obs/{name}"] = rows
        found[f"next_obs/{name}"] = np.concatenate([rows[1:], rows[-1:]])
    return found


class Theirs(OtherOptions, DatasetTests):
    """A set in another library's layout, written by our writer."""

    def open(self, tmp_path, episodes, **options):
        pytest.importorskip(self.needs)
        path = tmp_path / "set-v0"
        with get_format(self.name).open_writer(path, reward_at="same", **self.how) as writer:
            writer.write_episodes(map(steps, episodes))
        source = load_dataset(path, format=self.name).source
        return StoredDataset(Renamed(source, self.names), **options)


class TestLeRobot(Theirs):
    name, needs, how = "lerobot", "av", {"videos": False}
    names: ClassVar = {
        "pixels": "observation.images.pixels",
        "action": "action",
        "reward": "next.reward",
        "where": "observation.where",
    }


class TestMinari(Theirs):
    name, needs, how = "minari", "minari", {}
    names: ClassVar = {
        "pixels": "observation/pixels",
        "action": "action",
        "reward": "reward",
        "where": "observation/where",
    }


class TestRobomimic(Theirs):
    name, needs, how = "robomimic", "h5py", {}
    names: ClassVar = {"pixels": "obs/pixels", "action": "action", "reward": "reward", "where": "obs/where"}


class TestRingmap(OtherOptions, DatasetTests):
    """A ring's directory as a dataset."""

    def open(self, tmp_path, episodes, **options):
        with ReplayBuffer(100, path=tmp_path / "ring") as buf:
            buf.write_episodes(episodes)
        return load_dataset(tmp_path / "ring", **options)


class Rings(DatasetTests):
    """What hands out rows as they are stored, pictures with their channels last."""

    is_live = True

    @pytest.mark.parametrize("start", ["fork"])  # loading/ starts them in every way
    def test_data_loader(self, tmp_path, start):
        super().test_data_loader(tmp_path, start)

    def check_images(self, got, stored):
        assert np.array_equal(got, stored)


class TestBufferInRam(Rings):
    def open(self, tmp_path, episodes, num_steps=1, frameskip=1, transform=None):
        buf = ReplayBuffer(100, num_steps, frameskip, transform=transform)
        buf.write_episodes(episodes)
        return buf


class TestReader(Rings):
    def open(self, tmp_path, episodes, num_steps=1, frameskip=1, transform=None):
        with ReplayBuffer(100, path=tmp_path / "ring") as buf:
            buf.write_episodes(episodes)
        buf.close()
        return ReplayBuffer.open(tmp_path / "ring", history_len=num_steps, frameskip=frameskip, transform=transform)


class TestView(Rings):
    def open(self, tmp_path, episodes, num_steps=1, frameskip=1, transform=None):
        buf = ReplayBuffer(100, num_steps, frameskip, transform=transform)
        buf.write_episodes(episodes)
        return buf.view()


class TestFleet(Rings):
    """Rings whose names are in the order of the episodes."""

    def open(self, tmp_path, episodes, num_steps=1, frameskip=1, transform=None):
        for number, part in enumerate((episodes[:2], episodes[2:3], episodes[3:])):
            with ReplayBuffer(100, path=tmp_path / f"fleet/{number}") as buf:
                buf.write_episodes(part)
            buf.close()
        return ShardedReplayBuffer(tmp_path / "fleet", history_len=num_steps, frameskip=frameskip, transform=transform)


class TestGoal(Rings):
    adds = frozenset({"goal"})

    def open(self, tmp_path, episodes, num_steps=1, frameskip=1, transform=None):
        buf = ReplayBuffer(100, num_steps, frameskip, transform=transform)
        buf.write_episodes(episodes)
        return GoalDataset(buf, (0, 0, 0, 1), goal_keys={"where": "goal"}, seed=0)
