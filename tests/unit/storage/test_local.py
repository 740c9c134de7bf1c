"""An address is no path: wherever a path is taken, it is refused by name, and no folder of that name is made."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ringmap
from ringmap import Marks, ReplayBuffer, World, policy
from ringmap.cli.app import app
from ringmap.data import (
    OfflineToOnlineReplayBuffer,
    ShardedReplayBuffer,
    convert,
    get_cache_dir,
    get_format,
    list_formats,
    load_dataset,
    merge,
    register_dataset,
)
from ringmap.errors import InputError, NotFoundError
from ringmap.formats.catalog import load
from ringmap.storage.disk.paths import local_path

ADDRESSES = [
    "s3://bucket/a",
    "gs://bucket/a",
    "hf://datasets/me/a",
    "https://host/a.h5",
    "file:///tmp/a",
    "S3+x://bucket/a",
    Path("s3://bucket/a"),
]
SCHEMA = {"obs": ((2,), "f4")}


def ring(path=None):
    buf = ReplayBuffer(50, path=path, seed=0)
    buf.write_episode({"obs": np.zeros((4, 2)), "reward": np.zeros(4)})
    return buf


def collected(path):
    world = World("CartPole-v1", num_envs=1, image_shape=(8, 8), max_episode_steps=5)
    try:
        world.set_policy(policy.RandomPolicy(seed=0))
        world.collect(path, episodes=1, seed=0)
    finally:
        world.close()


def transitions(path):
    return ringmap.TransitionReplayBuffer(100, obs_shape=(3,), path=path, device=None)


CALLS = {
    "ReplayBuffer": lambda p: ReplayBuffer(50, path=p),
    "open": ReplayBuffer.open,
    "transitions": transitions,
    "transitions.open": lambda p: ringmap.TransitionReplayBuffer.open(p, device=None),
    "transitions.save": lambda p: transitions(None).save(p),
    "a mix": lambda p: OfflineToOnlineReplayBuffer(p, online_capacity=10, batch_size=2),
    "fleet": lambda p: ShardedReplayBuffer(p, wait_s=0),
    "fleet, a list": lambda p: ShardedReplayBuffer([p], wait_s=0),
    "fleet, state": lambda p: ShardedReplayBuffer("fleet", wait_s=0, state=p),
    "snapshot": lambda p: ring().snapshot(p),
    "dump": lambda p: ring().dump(p, progress=False),
    "dump, hdf5": lambda p: ring().dump(p, "hdf5", progress=False),
    "convert": lambda p: convert(ring(), p, progress=False),
    "convert from": lambda p: convert(p, "out.h5", progress=False),
    "merge": lambda p: merge([ring()], p, dest_format="zarr", progress=False),
    "merge from": lambda p: merge([ring(), p], "out.h5", progress=False),
    "load": load_dataset,
    "load, format": lambda p: load_dataset(p, format="hdf5"),
    "cache": get_cache_dir,
    "marks": lambda p: Marks(ring(), p),
    "check": ringmap.check,
    "repair": ringmap.repair,
    "repair to": lambda p: ringmap.repair("ring", to=p),
    "collect": collected,
    "pace": lambda p: ringmap.Pace(p, samples_per_insert=1, min_steps=1),
    **{
        f"writer of {name}": lambda p, name=name: get_format(name).open_writer(p)
        for name in list_formats()
        if get_format(name).can_write()
    },
    **{
        f"reader of {name}": lambda p, name=name: get_format(name).open_reader(p)
        for name in ("zarr", "folder", "ringmap")
    },
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ring(tmp_path / "ring"):
        pass
    os.makedirs("fleet/a")
    with ring(tmp_path / "fleet" / "b"):
        pass


@pytest.mark.parametrize("call", CALLS)
def test_an_address_is_refused_by_name_and_nothing_is_made(call):
    before = sorted(os.listdir())
    for address in ADDRESSES if call in ("ReplayBuffer", "load", "convert") else ADDRESSES[::6]:
        with pytest.raises(InputError, match=r"is an address \(scheme '[A-Za-z0-9+]+'\), expected the path of a local"):
            CALLS[call](address)
        assert sorted(os.listdir()) == before, address


COMMANDS = [
    "info @",
    "check @",
    "repair @",
    "convert ring @ -f hdf5",
    "convert @ out.h5",
    "dump ring @ -f zarr",
    "merge ring @ -f hdf5",
    "snapshot ring @",
    "episodes @",
    "view @",
    "preview ring -o @x.png",
    "repair ring --to @",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_an_address(command):
    before = sorted(os.listdir())
    done = CliRunner().invoke(app, command.replace("@", "s3://bucket/a").split())
    said = f"{done.output}{done.exception}"
    assert done.exit_code != 0 and "is an address (scheme 's3')" in said.replace("\n", " "), said
    assert sorted(os.listdir()) == before


def test_what_is_a_path_or_an_id_stays_one(tmp_path):
    for path in ("a:/b", "./s3:/b", "12:30/x", "a/s3://b", str(tmp_path / "s3:" / "b"), "C:/ring"):
        assert local_path(path) == os.path.abspath(path)
    with ring("a:/b") as buf:
        assert buf.path == tmp_path / "a:" / "b"
    with pytest.raises(NotFoundError, match="d4rl|D4RL"):
        load_dataset("d4rl:/nowhere/door.hdf5")
    register_dataset("s3", lambda name: name)
    try:
        assert load_dataset("s3://bucket/a") == "//bucket/a"  # a scheme of the user's own
    finally:
        del load._LOADERS["s3"]
