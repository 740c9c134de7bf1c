"""Small sound buffers and datasets, which the makers then do harm to.

Each is made once by `sound(kind, path)`, and copied for every case.
"""

import io
import json
import os

import numpy as np

from tests.unit.formats.rlds import fixture

STEPS = (5, 3, 7)


def episodes(steps=STEPS):
    """Return episodes whose bytes follow from their number."""
    made = []
    for number, length in enumerate(steps):
        rng = np.random.default_rng(number)
        made.append(
            {
                "pixels": rng.integers(0, 256, (length, 8, 8, 3), np.uint8),
                "action": rng.random((length, 2), np.float32),
                "_episode_data": {"seed": number, "goal": np.arange(3.0)},
            }
        )
    return made


def buffer(path, **options):
    from ringmap import ReplayBuffer

    buf = ReplayBuffer(40, path=path, seed=0, **options)
    for episode in episodes():
        buf.write_episode(episode)
    buf.flush()
    buf.close()


def streaming(path):
    """A buffer that was killed while an episode was being recorded."""
    from ringmap import ReplayBuffer

    buf = ReplayBuffer(40, path=path, seed=0, sync_every_s=0)
    for episode in episodes():
        buf.write_episode(episode)
    buf.flush()
    stream = buf.begin_episode()
    for t in range(3):
        stream.append({"pixels": np.full((8, 8, 3), t, np.uint8), "action": np.full(2, t, np.float32)})
    stream._file.close()
    buf.engine.owned.abandon()


def packed(codecs):
    """Return what makes a buffer whose pixels are in chunks."""

    def make(path):
        from ringmap import Zarr

        buffer(path, storage={"pixels": Zarr(codecs, 4)})

    return make


def transitions(path):
    from ringmap import TransitionReplayBuffer
    from ringmap.samplers import PrioritizedSampler

    buf = TransitionReplayBuffer(64, (4,), device=None, path=path, seed=0, sampler=PrioritizedSampler(), sync_every_s=0)
    for t in range(20):
        buf.add(np.full(4, t), 1, 0.5, np.full(4, t + 1), t % 7 == 6)
    buf.flush()
    buf.close()


def stored(name, **options):
    """Return what makes a dataset of a format."""

    def make(path):
        from ringmap.data import get_format

        with get_format(name).open_writer(path, **options) as writer:
            writer.write_episodes(episodes())

    return make


def exported(name):
    """Return what makes a dataset of a format with a layout of its own."""

    def make(path):
        from ringmap.data import ReplayBuffer, convert

        buf = ReplayBuffer(max_steps=100, reward_at="next")
        for length in (5, 8, 6):
            rows = np.ones((length, 2), np.float32)
            buf.write_episode({"obs": rows, "action": rows, "reward": np.zeros(length, np.float32)})
        convert(buf, path, dest_format=name, progress=False)

    return make


def in_folder(path):
    """An HDF5 file in a folder."""
    os.mkdir(path)
    stored("hdf5")(os.path.join(path, "data.h5"))


def lerobot(path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        os.makedirs(os.path.join(path, folder))
    info = {
        "codebase_version": "v3.0",
        "fps": 10,
        "total_episodes": 3,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            "pixels": {"dtype": "image", "shape": [8, 8, 3], "names": ["height", "width", "channels"]},
            "action": {"dtype": "float32", "shape": [2]},
            "task_index": {"dtype": "int64", "shape": [1]},
        },
    }
    with open(os.path.join(path, "meta/info.json"), "w") as file:
        json.dump(info, file)
    pq.write_table(pa.table({"task_index": [0], "task": ["push"]}), os.path.join(path, "meta/tasks.parquet"))
    rows = [
        {"episode_index": n, "length": length, "tasks": ["push"], "data/chunk_index": 0, "data/file_index": 0}
        for n, length in enumerate(STEPS)
    ]
    pq.write_table(
        pa.Table.from_pylist(rows),
        os.path.join(path, "meta/episodes/chunk-000/file-000.parquet"),
    )
    made = episodes()

    def png(frame):
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": None}

    table = pa.table(
        {
            "pixels": [png(frame) for e in made for frame in e["pixels"]],
            "action": pa.array([a.tolist() for e in made for a in e["action"]], pa.list_(pa.float32())),
            "task_index": [0] * sum(STEPS),
            "episode_index": [n for n, length in enumerate(STEPS) for _ in range(length)],
        }
    )
    pq.write_table(table, os.path.join(path, "data/chunk-000/file-000.parquet"))


def minari(path):
    """What minari writes, by hand: the package, its environment and its warnings are not needed for it."""
    import h5py

    os.makedirs(os.path.join(path, "data"))
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0] * 2, "high": [1.0] * 2}
    described = {
        "total_episodes": 2,
        "total_steps": 6,
        "data_format": "hdf5",
        "dataset_id": "hostile/test-v0",
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box),
        "minari_version": "0.5.3",
    }
    with open(os.path.join(path, "data/metadata.json"), "w") as file:
        json.dump(described, file)
    with h5py.File(os.path.join(path, "data/main_data.hdf5"), "w") as file:
        for number in range(2):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "total_steps": 3, "seed": number})
            group["observations"] = np.zeros((4, 2), np.float32)
            group["actions"] = np.zeros((3, 2), np.float32)
            group["rewards"] = np.zeros(3)
            group["terminations"] = np.array([False, False, True])
            group["truncations"] = np.zeros(3, bool)
            group.create_group("infos")


def rollout(path):
    buf = empty_rollout()
    import torch

    for _ in range(4):
        flat = torch.zeros(2)
        buf.add(torch.zeros(2, 3), None, torch.zeros(2, 2), flat, flat, flat, flat)
    buf.save(path)


def empty_rollout():
    from ringmap import RolloutBuffer

    return RolloutBuffer(2, 4, (3,), (2,), seed=0)


def rlds(path):
    """What TFDS wrote."""
    fixture("tfrecord", path)


KINDS = {
    "buffer": buffer,
    "streaming": streaming,
    "packed": packed("zstd"),
    "plain": packed("none"),
    "transitions": transitions,
    "folder": stored("folder", image_format="png"),
    "hdf5": stored("hdf5"),
    "hdf5 in a folder": in_folder,
    "zarr": stored("zarr"),
    "lance": stored("lance"),
    "video": stored("video", lossless=True),
    "lerobot": lerobot,
    "minari": minari,
    "robomimic": exported("robomimic"),
    "parquet": exported("parquet"),
    "rlds": rlds,
    "rollout": rollout,
}

SUFFIX = {"hdf5": ".h5", "robomimic": ".hdf5", "lance": ".lance", "rollout": ".pt"}

NEEDS = {"video": "av", "lerobot": "av", "minari": "minari", "parquet": "pyarrow"}
"""Packages that not every installation has."""
