"""What needs neither torch nor Lance, in one pass: `.ci/versions` runs it with old and new releases of the rest."""

import asyncio
from contextlib import closing

import gymnasium
import h5py
import numpy as np
import pytest
import zarr
from zarr.buffer import default_buffer_prototype

import ringmap
from ringmap.data import ReplayBuffer, get_format, list_formats, load_dataset
from ringmap.errors import CorruptError
from ringmap.formats.zarr.store import InsideStore
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.columns.zarr import NAMED, Codec
from tests.zarr_chunks import ByZarr

STORAGES = {
    "memmap": "memmap",
    **{name: ringmap.Zarr(codecs=name) for name in NAMED},
    "mixed": {"pixels": "zarr", "state": ringmap.Zarr(chunk_steps=4)},
}


def episode(number, steps=5):
    rng = np.random.default_rng(number)
    return {
        "pixels": rng.integers(0, 256, (steps, 8, 8, 3), np.uint8),
        "state": rng.normal(size=(steps, 3)).astype("f4"),
        "done": rng.integers(0, 2, steps).astype(bool),
        "action": rng.normal(size=(steps, 2)),
    }


def same(found, number):
    expected = episode(number)
    return all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_a_buffer_keeps_its_episodes(tmp_path, storage):
    path = tmp_path / "replay"
    with closing(ReplayBuffer(max_steps=30, history_len=2, path=path, storage=storage)) as buf:
        for number in range(9):
            buf.write_episode(episode(number))
    with closing(ReplayBuffer(max_steps=30, history_len=2, path=path, storage=storage)) as again:
        assert [same(again.load_episode(n), 3 + n) for n in range(6)] == [True] * 6
        assert again.sample(batch_size=8)["pixels"].shape == (8, 2, 8, 8, 3)
    assert ringmap.check(path) == []


@pytest.mark.parametrize("name", NAMED)
def test_every_zarr_reads_and_writes_the_chains_with_names(name):
    for dtype in ("u1", "?", "f4", "c16"):
        spec = ColumnSpec("x", (3,), np.dtype(dtype))
        rows = np.arange(4 * spec.row_nbytes, dtype=np.uint8).reshape(4, -1) % 2
        ways = Codec(name, spec, 4), ByZarr(name, spec, 4)
        for one, other in (ways, ways[::-1]):
            out = np.full_like(rows, 3)
            other.decode(one.encode(rows), out)
            assert np.array_equal(out, rows)


def test_hdf5_and_zarr_and_folders_hold_the_episodes(tmp_path):
    buf = ReplayBuffer(max_steps=30)
    for number in range(4):
        buf.write_episode(episode(number))
    for name, path in (("hdf5", "d.h5"), ("zarr", "d.zarr"), ("folder", "d")):
        buf.dump(tmp_path / path, format=name)
        dataset = load_dataset(tmp_path / path, format=name)
        assert dataset.lengths.tolist() == [5] * 4
        assert np.array_equal(dataset.get_col_data("state")[5:10], episode(1)["state"])
        assert get_format(name).name in list_formats()
    with h5py.File(tmp_path / "d.h5") as file:
        plain = zarr.open_group(tmp_path / "d.zarr", mode="r")
        assert np.array_equal(file["pixels"][:], plain["data/pixels"][:])


def test_no_way_to_read_leaves_the_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0").symlink_to(tmp_path / "secret")
    store, kinds = InsideStore(tmp_path / "in", read_only=True), default_buffer_prototype()
    with pytest.raises(CorruptError):
        store.get_sync("0", prototype=kinds)
    for asked in (store.get("0", kinds), store.get_partial_values(kinds, [("0", None)])):
        with pytest.raises(CorruptError):
            asyncio.run(asked)


@pytest.mark.parametrize("storage", ["memmap", "zarr"])
def test_environments_are_recorded(tmp_path, storage):
    class Walk(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 99, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.at = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.at += 1
            return np.full(1, self.at, np.float32), 1.0, self.at == 4, False, {}

    buf = ReplayBuffer(max_steps=100, path=tmp_path / "one", storage=storage)
    with buf, ringmap.ReplayBufferCollectionWrapper(Walk(), buf) as env:
        for _ in range(3):
            env.reset()
            while not env.step(1)[2]:
                pass
        assert buf.load_episode(2)["obs"].ravel().tolist() == [0, 1, 2, 3, 4]
    many = ReplayBuffer(max_steps=100)
    envs = ringmap.ReplayBufferCollectionWrapper(gymnasium.vector.SyncVectorEnv([Walk, Walk]), many)
    envs.reset()
    for _ in range(10):
        envs.step(np.array([0, 1]))
    assert many.num_episodes == 4
    envs.close()
