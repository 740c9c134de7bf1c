"""The page on errors: each message that it has is raised by the class that it names, and by a call here."""

import errno
import json
import os
import pickle
import re

import gymnasium
import h5py
import numpy as np
import pytest
from torch.utils.data import DataLoader

import ringmap
from ringmap import ReplayBuffer, ReplayBufferCollectionWrapper, TransitionReplayBuffer, errors
from ringmap.data import ShardedReplayBuffer, get_format, load_dataset
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.checksums import encode_signed
from ringmap.storage.disk.files import Disk
from tests import ROOT

ROW = re.compile(r"^\| `(?P<message>.*?)` \| (?P<classes>`\w+Error`.*?|`EnvironmentFault`) \| ", re.M)


def rows(text):
    """Return each message of the page as a pattern, with the classes that raise it."""
    found = {}
    for row in ROW.finditer(text):
        pattern = ".*".join(map(re.escape, row["message"].split("...")))
        found[pattern] = re.findall(r"\w+", row["classes"])
    return found


class FaultyDisk(Disk):
    fault = None

    def before(self, change, path, *details):
        if self.fault and change == self.fault[0] and self.fault[2] in path:
            raise OSError(self.fault[1], os.strerror(self.fault[1]), path)


class Fragile(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        raise OSError("the robot is unplugged")


def raised():
    """Yield what each call raises."""

    def error(call, *args, **options):
        with pytest.raises(errors.RingmapError) as caught:
            call(*args, **options)
        return caught.value

    buf = ReplayBuffer(max_steps=512, path="runs/demo", history_len=4)
    buf.write_episode({"obs": np.zeros((50, 3), np.float32), "reward": np.zeros(50, np.uint8)})
    for obs, reward in (
        (np.zeros((900, 3)), np.zeros(900)),
        (np.zeros((10, 3)), np.zeros(9)),
        (np.zeros((2, 3)), [1.0, 300.7]),
    ):
        yield error(buf.write_episode, {"obs": obs, "reward": reward})
    yield error(buf.write_episode, {"obs": np.zeros((10, 3))})
    narrow = ReplayBuffer(max_steps=9, schema={"task": ((), "U4")})
    yield error(narrow.write_episode, {"task": ["long text"]})
    yield error(buf.get_col_data, "pixels")
    yield error(lambda: buf[47])
    yield error(lambda: buf[0:3])
    yield error(buf.view, anchors=lambda data: True)
    yield error(ReplayBuffer(max_steps=512).sample, 8)
    yield error(ringmap.TransitionReplayBuffer(8, (1,), device=None).sample, 2)
    yield error(buf.sample, 8, history_len=60)
    yield error(ReplayBuffer.open, "runs/demo", mode="r+")

    reader = ReplayBuffer.open("runs/demo")
    yield error(reader.clear)
    look = reader.engine.owned.newest_tail

    def too_slow():
        buf.write_episode({"obs": np.zeros((512, 3)), "reward": np.zeros(512)})
        return look()

    reader.engine.owned.newest_tail = too_slow
    yield error(reader.sample, 8)
    episode = buf.begin_episode()
    episode.abandon()
    yield error(episode.append, {"obs": np.zeros(3), "reward": 0})
    buf.close()
    yield error(buf.sample, 8)
    yield error(ReplayBuffer, max_steps=1000, path="runs/demo")
    with ReplayBuffer.open("runs/demo") as reader:
        reader.dump("demo.h5", "hdf5")
        yield error(reader.dump, "demo.h5", "hdf5", mode="error")
        yield error(reader.dump, "demos.hdf5", "robomimic", mode="append")
        reader.dump("demo.zarr")
        dataset = load_dataset("demo.zarr", output="numpy")
        reader.dump("demo.zarr", mode="overwrite")
        yield error(lambda: dataset[0])
    with h5py.File("demo.h5", "r+") as file:
        file["pose"] = np.zeros(512, [("x", "f4"), ("y", "f4")])
    yield error(load_dataset, "demo.h5")
    writer = ReplayBuffer.open("runs/demo", mode="r+")
    os.rename("runs/demo", "runs/aside")
    ReplayBuffer(max_steps=512, path="runs/demo").close()
    yield error(writer.flush)
    error(writer.close)
    os.rename("runs/demo", "runs/other")
    os.rename("runs/aside", "runs/demo")

    ram = ReplayBuffer(max_steps=100)
    ram.write_episode({"obs": np.zeros((20, 3))})
    fork = {"multiprocessing_context": "fork", "persistent_workers": True}
    loader = DataLoader(ram, batch_size=4, num_workers=1, **fork)
    assert len(list(loader)) == 5
    ram.write_episode({"obs": np.zeros((20, 3))})
    yield error(list, loader)
    copy = pickle.loads(pickle.dumps(PrioritizedSampler()))
    yield error(copy.begin_in_worker, np.random.SeedSequence(0))

    env = ReplayBufferCollectionWrapper(gymnasium.make("CartPole-v1"), ReplayBuffer(max_steps=100))
    yield error(env.step, 0)
    env.reset(seed=0)
    env.step(0)
    yield error(env.set_replay_buffers, ReplayBuffer(max_steps=100))
    gymnasium.registry.pop("Mine/Fragile-v0", None)
    gymnasium.register("Mine/Fragile-v0", entry_point=Fragile)
    with ringmap.World("Mine/Fragile-v0", num_envs=2, add_pixels=False) as world:
        world.set_policy(ringmap.policy.RandomPolicy(seed=0))
        yield error(world.collect, writer=ReplayBuffer(max_steps=100), episodes=3, seed=7)

    yield error(ReplayBuffer.open, "nowhere")
    yield error(ringmap.check, "nowhere")
    yield error(load_dataset, "nothing/here")
    with open("runs/notes.txt", "w") as file:
        file.write("not a buffer")
    yield error(ReplayBuffer, max_steps=512, path="runs/notes.txt")
    yield error(ReplayBuffer, max_steps=512, path="runs")
    dated = ReplayBuffer(max_steps=9)
    rows = {"obs": np.zeros(3), "action": np.zeros(3), "when": np.zeros(3, "M8[s]")}
    dated.write_episode({**rows, "_episode_data": {"goal": 2**70}})
    yield error(dated.dump, "runs/dated.h5", "robomimic")
    yield error(get_format("rlds").open_writer, "runs/copy")
    yield from of_the_disk(error)
    yield from of_a_fleet(error)
    yield from of_damage(error)


def of_the_disk(error):
    disk = FaultyDisk()
    small = ReplayBuffer(max_steps=100, path="runs/small", spare_rows=10, disk=disk)
    for _ in range(3):
        small.write_episode({"obs": np.zeros(30)})
    disk.fault = ("write", errno.ENOSPC, "columns/")
    yield error(small.write_episode, {"obs": np.zeros(8)})
    disk.fault = ("write", errno.EIO, "columns/")
    yield error(small.write_episode, {"obs": np.zeros(80)})
    disk.fault = ("sync", errno.EIO, "")
    yield error(small.flush)
    disk.fault = None
    small.close()


def of_a_fleet(error):
    for number in range(3):
        with ReplayBuffer(max_steps=100, path=f"runs/fleet/{number}", seed=0) as ring:
            ring.write_episode({"obs": np.zeros(30)})
    look = Disk._stat

    def refused(disk, path):
        if "fleet/1/" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return look(disk, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Disk, "_stat", refused)
        yield error(ShardedReplayBuffer, "runs/fleet")


def of_damage(error):
    row = int(np.load("runs/demo/episodes.npy", mmap_mode="r")["start"].max()) % 1024
    with open("runs/demo/columns/000-obs.npy", "r+b") as file:
        file.seek(4096 + 12 * row)
        file.write(b"\1")
    with ReplayBuffer.open("runs/demo") as reader:
        yield error(reader.load_episode, -1)
    os.truncate("runs/demo/columns/001-reward.npy", 6000)
    yield error(ReplayBuffer.open, "runs/demo")
    TransitionReplayBuffer(9, (2,), path="runs/single").close()
    yield error(ReplayBuffer.open, "runs/single")
    with open("runs/other/manifest.json") as file:
        text = file.read()
    body = {key: value for key, value in json.loads(text).items() if key != "checksum"}
    versions = (encode_signed({**body, "version": version}).decode() for version in (4, 2))
    for changed in (text.replace('"max_steps": 512', '"max_steps": 9999'), *versions):
        with open("runs/other/manifest.json", "w") as file:
            file.write(changed)
        yield error(ReplayBuffer.open, "runs/other")


def unmatched(page):
    """Return the errors that no row of the page is for, and the rows that no error is for."""
    wanted = rows(page)
    unseen, strangers = {(p, name) for p, names in wanted.items() for name in names}, []
    for error in raised():
        said = str(error).replace(os.getcwd() + os.sep, "")
        name = type(error).__name__
        fits = {(p, n) for p, n in unseen if n == name and re.fullmatch(p, said, re.DOTALL)}
        unseen -= fits
        if not any(re.fullmatch(p, said, re.DOTALL) and name in wanted[p] for p in wanted):
            strangers.append(f"{name}: {said}")
    return strangers, unseen


def test_each_message_is_raised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")
    assert unmatched((ROOT / "docs/reference/errors.md").read_text()) == ([], set())


@pytest.mark.slow
def test_control(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("runs")
    page = (ROOT / "docs/reference/errors.md").read_text()
    page = page.replace("47 clips` | `ClipIndexError`", "48 clips` | `ClipIndexError`")
    strangers, unseen = unmatched(page)
    assert strangers == ["ClipIndexError: ReplayBuffer: clip 47 is out of range for 47 clips"]
    assert [name for _, name in unseen] == ["ClipIndexError"]
