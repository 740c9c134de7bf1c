"""Makes the fixtures: what the released formats wrote, packed as text, a few KB each.

    python -m tests.released.make KIND > tests/released/format-1-KIND.txt
    python -m tests.released.make 2-KIND > tests/released/format-2-KIND.txt

KIND is one of `KINDS`, or of `KINDS_2`, which use features of version 2; the memmap ring has no suffix. A fixture is never
made again: it is what a commit wrote.
`format-1.txt` and `format-1-zarr.txt` are of the first release of each, the others of version 1 of commit 94d242e.
`format-1-codecs.txt` has a column for each of `CHAINS`, which could be chosen then.
"""

import base64
import io
import lzma
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from ringmap import ReplayBuffer, Zarr

LENGTHS = [3, 5, 1, 4, 2]
MAX_STEPS = 10
STORAGES = {
    "memmap": "memmap",
    "zarr": {"état/x": Zarr("zstd", 4), "action": Zarr("lz4", 3)},
    "mixed": {"état/x": "zarr"},
}
"""The column `word` can't be compressed."""
FORMATS = {
    "folder": "",
    "hdf5": "data.h5",
    "zarr-data": "data.zarr",
    "lance": "data.lance",
    "video": "data",
}
"""Kind of a dataset -> what lies in the fixture's folder."""
CHAINS = {
    "gzip": [{"name": "gzip", "configuration": {"level": 1}}, {"name": "crc32c"}],
    "zstd": [{"name": "zstd", "configuration": {"level": 1}}],
    "blosc": [{"name": "blosc", "configuration": {"cname": "zlib", "clevel": 2, "shuffle": "bitshuffle"}}],
    "blosc twice": [{"name": "blosc", "configuration": {"cname": "lz4", "clevel": 1, "shuffle": "noshuffle"}}] * 2,
    "lzma": [{"name": "numcodecs.lzma", "configuration": {"preset": 1}}],
    "delta": [{"name": "numcodecs.delta", "configuration": {"dtype": "<i4"}}],
    "transpose": [{"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "crc32c"}],
    "big endian": [{"name": "bytes", "configuration": {"endian": "big"}}],
    "nothing": [],
    "shards": [{"name": "sharding_indexed", "configuration": {
        "chunk_shape": [2, 3], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {"level": 1}}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end"}}],
}  # fmt: skip
"""Column -> codecs of Zarr that are none of the three chains with names."""


def episode(number, length):
    steps = np.arange(length)
    return {
        "état/x": np.stack([steps, steps + number], 1).astype(np.float32),
        "action": (steps + 10 * number).astype(np.int64),
        "word": np.array([f"e{number}s{t}" for t in steps], "U6"),
        "_episode_data": {
            "seed": number,
            "name": f"épisode {number}",
            "goal": np.arange(3.0) * number,
        },
    }


def make(folder, storage="memmap", **options):
    with ReplayBuffer(
        MAX_STEPS, 2, path=folder, spare_rows=4, seed=7, sync_every_s=0, storage=STORAGES[storage], **options
    ) as buf:  # fmt: skip
        for number, length in enumerate(LENGTHS):
            buf.write_episode(episode(number, length))
        buf.sample(2)
        buf.write_episode(episode(len(LENGTHS), 2))
        if options:
            buf.update_priorities(np.array([9, 10, 11]), np.array([3.0, 5.0, 7.0]))
        buf.close()


def prioritized(folder):
    from ringmap.samplers import PrioritizedSampler

    make(folder, sampler=PrioritizedSampler())


def packed_episode(number, length=6):
    rows = (np.arange(length * 3) + 1000 * number).astype(np.int32).reshape(length, 3)
    return {name: rows + at for at, name in enumerate(CHAINS)}


def codecs(folder):
    storage = {name: Zarr(chain, 4) for name, chain in CHAINS.items()}
    with ReplayBuffer(
        15, path=folder, spare_rows=8, seed=0, sync_every_s=0, storage=storage
    ) as buf:
        for number in range(3):
            buf.write_episode(packed_episode(number))
        buf.close()


def streaming(folder):
    """A buffer that was killed while an episode was being recorded."""
    buf = ReplayBuffer(MAX_STEPS, 2, path=folder, spare_rows=4, seed=7, sync_every_s=0)
    buf.write_episode(episode(0, 3))
    buf.flush()
    stream, given = buf.begin_episode(), episode(1, 2)
    for t in range(2):
        stream.append({name: given[name][t] for name in ("état/x", "action", "word")})
    stream._file.close()
    buf.engine.owned.abandon()


def step(t):
    now = np.full((2, 3), t, np.float32) + np.array([[0.0], [100.0]], np.float32)
    done = np.array([t % 5 == 4, t % 3 == 2])
    return now, np.full(2, t), np.full(2, t / 2), now + 1 + done[:, None] / 4, done


def transitions(folder):
    from ringmap import TransitionReplayBuffer
    from ringmap.samplers import PrioritizedSampler

    sampler = PrioritizedSampler()
    with TransitionReplayBuffer(
        24, (3,), device=None, path=folder, seed=0, sampler=sampler, sync_every_s=0
    ) as buf:
        for t in range(20):
            buf.add(*step(t))
        buf.update_priorities(buf.sample(4).ids, np.full(4, 5.0))


def rows(number):
    numbers = np.arange(4) + 4 * number
    return np.stack([numbers, -numbers], 1).astype("f4"), numbers * 10


def distillation(folder):
    from ringmap.data import DistillationBuffer

    with DistillationBuffer(
        40, path=folder, retention="last", keep_rounds=2, seed=0, sync_every_s=0
    ) as buf:
        for number in range(3):
            buf.start_round(policy_version=5 + number)
            for call in range(2):
                buf.add(*rows(2 * number + call), dones=np.full(4, call == 1))
        buf.relabel(np.arange(16, 20), lambda seen: seen["student_observations"][:, 0] * 10 + 1)


def rollout(folder):
    import torch

    from ringmap import RolloutBuffer

    buf = RolloutBuffer(2, 4, (3,), (2,), seed=0)
    for t in range(4):
        flat = torch.full((2,), float(t))
        buf.add(
            torch.full((2, 3), float(t)),
            None,
            torch.full((2, 2), float(t)),
            flat,
            flat * 0,
            flat,
            flat,
        )
    folder.mkdir()
    buf.save(folder / "rollout.pt")


def pictured(number, length):
    frames = np.random.default_rng(number).integers(0, 256, (length, 8, 8, 3), np.uint8)
    given = episode(number, length)
    return {"pixels": frames, "action": given["action"], "x": given["état/x"]}


def dataset(kind, folder):
    from ringmap.data import get_format

    options = {"folder": {"image_format": "png"}, "video": {"lossless": True}}.get(kind, {})
    path = folder / FORMATS[kind]
    path.parent.mkdir(exist_ok=True)
    with get_format(kind.removesuffix("-data")).open_writer(path, **options) as writer:
        writer.write_episodes(pictured(number, length) for number, length in enumerate(LENGTHS))


KINDS = {
    "memmap": make,
    "zarr": partial(make, storage="zarr"),
    "mixed": partial(make, storage="mixed"),
    "prioritized": prioritized,
    "streaming": streaming,
    "transitions": transitions,
    "distillation": distillation,
    "rollout": rollout,
    **{kind: partial(dataset, kind) for kind in FORMATS},
}


def kill(ring):
    """End a writer as a kill does, with its rows pending."""
    store = ring.engine.owned
    assert store.pending.count
    store.abandon()


def groups(folder):
    """Transitions whose writer was killed: 10 calls are committed, and 5 are in an open group, one of them a new episode."""
    from ringmap import TransitionReplayBuffer

    buf = TransitionReplayBuffer(100, (3,), device=None, path=folder, seed=0, sync_every_s=0)
    for t in range(15):
        if t == 10:
            buf.flush()
        buf.add(*step(t))
    kill(buf)


def rows_in_groups(folder):
    """Rows of a student, likewise."""
    from ringmap.data import DistillationBuffer

    buf = DistillationBuffer(40, path=folder, retention="all", seed=0, sync_every_s=0)
    for number in range(6):
        if number == 4:
            buf.flush()
        buf.add(*rows(number))
    kill(buf._ring)


KINDS_2 = {"transitions": groups, "distillation": rows_in_groups}


def pack(folder):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(Path(folder).rglob("*")):
            if path.name != "lock":
                tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
    text = base64.b64encode(lzma.compress(raw.getvalue(), preset=9)).decode()
    return "\n".join(text[i : i + 100] for i in range(0, len(text), 100)) + "\n"


def unpack(text, folder):
    raw = lzma.decompress(base64.b64decode("".join(text.split())))
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        tar.extractall(folder, filter="data")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        makers = KINDS | {f"2-{kind}": make for kind, make in KINDS_2.items()}
        makers[sys.argv[1]](Path(home) / "buf")
        sys.stdout.write(pack(Path(home) / "buf"))
