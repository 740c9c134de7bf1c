"""Makes the fixtures of the current format version, of memmaps and of compressed columns:

python -m tests.released.make > tests/released/format-1.txt
python -m tests.released.make zarr > tests/released/format-1-zarr.txt
"""

import base64
import io
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from ringmap import ReplayBuffer, Zarr

LENGTHS = [3, 5, 1, 4, 2]
MAX_STEPS = 10
STORAGES = {"memmap": "memmap", "zarr": {"état/x": Zarr("zstd", 4), "action": Zarr("lz4", 3)}}
"""The column `word` can't be compressed."""


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


def make(folder, storage="memmap"):
    with ReplayBuffer(
        MAX_STEPS, 2, path=folder, spare_rows=4, seed=7, sync_every_s=0, storage=STORAGES[storage]
    ) as buf:
        for number, length in enumerate(LENGTHS):
            buf.write_episode(episode(number, length))
        buf.sample(2)
        buf.write_episode(episode(len(LENGTHS), 2))
        buf.close()


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
        make(Path(home) / "buf", *sys.argv[1:])
        sys.stdout.write(pack(Path(home) / "buf"))
