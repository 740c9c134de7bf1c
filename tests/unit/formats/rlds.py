"""Makes the RLDS fixtures: what the writer of TensorFlow Datasets wrote, packed as text.

    python -m tests.unit.formats.rlds tfrecord > tests/unit/formats/rlds-tfrecord.txt
    python -m tests.unit.formats.rlds array_record > tests/unit/formats/rlds-array_record.txt

Made once, with tfds-nightly 4.9.9.dev202510250044, TensorFlow 2.21.0, array_record 0.8.6 and Pillow 13.
"""

import base64
import contextlib
import io
import lzma
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

STEPS = (4, 1, 6, 3, 2)
"""Of each episode. The last two are the split `test`, and the first one ends in a terminal step."""

LARGE = np.uint64(2**64 - 5)


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


def episode(number):
    """Return the steps of an episode, column -> array: what the writer was given."""
    steps = STEPS[number]
    rng = np.random.default_rng(number)
    now = np.arange(steps)
    return {
        "observation": {
            "image": rng.integers(0, 256, (steps, 8, 6, 3), np.uint8),
            "wrist": (now[:, None, None, None] * 9 + np.arange(12 * 3).reshape(12, 1, 3) * np.ones((1, 10, 1))).astype(
                np.uint8
            ),
            "grey": rng.integers(0, 256, (steps, 4, 5, 1), np.uint8),
            "depth": rng.normal(size=(steps, 4, 5, 1)).astype(np.float32),
            "depth_mm": rng.integers(0, 1 << 16, (steps, 4, 5, 1), np.uint16),
            "state": rng.normal(size=(steps, 3)).astype(np.float32).astype(np.float64),
            "text": np.array([f"é {number} {'x' * t}" for t in range(steps)]),
        },
        "action": {
            "arm": rng.normal(size=(steps, 2, 2)).astype(np.float32),
            "open": rng.random(steps) < 0.5,
            "mode": rng.integers(0, 3, steps),
            "pair": rng.integers(-(2**62), 2**62, (steps, 2)),
        },
        "codes": rng.integers(0, 256, (steps, 5), np.uint8),
        "small": rng.integers(-(2**15), 2**15, (steps, 2), np.int16),
        "packed": rng.integers(0, 256, (steps, 2, 3), np.uint8),
        "bits": np.full(steps, LARGE) - now.astype(np.uint64),
        "reward": rng.normal(size=steps).astype(np.float32),
        "discount": np.ones(steps, np.float32),
        "is_first": now == 0,
        "is_last": now == steps - 1,
        "is_terminal": (now == steps - 1) & (number == 0),
    }


def data(number):
    """Return what holds for an episode as a whole."""
    return {
        "episode_metadata": {
            "path": f"/é/{number}",
            "number": number,
            "goal": np.arange(3, dtype=np.float32) + number,
            "words": ["go"] * number,
            "map": np.full((3, 4, 3), number, np.uint8),
        }
    }


def flat(tree, prefix=""):
    """Return the leaves of a nested dict by path."""
    found = {}
    for name, value in tree.items():
        inner = flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
        found |= inner
    return found


def jpeg(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    buffer.seek(0)
    return buffer


def step_of(columns, t):
    """Return a step as TFDS is given it."""
    if isinstance(columns, dict):
        return {n: jpeg(v[t]) if n == "wrist" else step_of(v, t) for n, v in columns.items()}
    return str(columns[t]) if columns.dtype.kind == "U" else columns[t]


def build(folder, kind):
    """Write the data set, in the files of a kind."""
    import tensorflow_datasets as tfds

    f = tfds.features

    class Robot(tfds.core.GeneratorBasedBuilder):
        """Steps of no robot."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            steps = {
                "observation": {
                    "image": f.Image(shape=(8, 6, 3)),
                    "wrist": f.Image(encoding_format="jpeg"),
                    "grey": f.Image(shape=(4, 5, 1)),
                    "depth": f.Image(shape=(4, 5, 1), dtype=np.float32),
                    "depth_mm": f.Image(shape=(4, 5, 1), dtype=np.uint16),
                    "state": f.Tensor(shape=(3,), dtype=np.float64),
                    "text": f.Text(),
                },
                "action": {
                    "arm": f.Tensor(shape=(2, 2), dtype=np.float32),
                    "open": np.bool_,
                    "mode": f.ClassLabel(names=["a", "b", "c"]),
                    "pair": f.Sequence(np.int64, length=2),
                },
                "codes": f.Tensor(shape=(5,), dtype=np.uint8),
                "small": f.Tensor(shape=(2,), dtype=np.int16, encoding="bytes"),
                "packed": f.Tensor(shape=(2, 3), dtype=np.uint8, encoding="zlib"),
                "bits": np.uint64,
                "reward": np.float32,
                "discount": f.Scalar(dtype=np.float32),
                "is_first": np.bool_,
                "is_last": np.bool_,
                "is_terminal": np.bool_,
                "any": f.Sequence(np.int64),
            }
            metadata = {
                "path": f.Text(),
                "number": np.int64,
                "goal": f.Tensor(shape=(None,), dtype=np.float32),
                "words": f.Sequence(f.Text()),
                "map": f.Image(shape=(3, 4, 3)),
            }
            features = f.FeaturesDict({"steps": f.Dataset(steps), "episode_metadata": metadata})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            last = len(STEPS) - 2
            return {
                "train": self._generate_examples(range(last)),
                "test": self._generate_examples(range(last, len(STEPS))),
            }

        def _generate_examples(self, numbers):
            for number in numbers:
                columns = episode(number)
                steps = [{**step_of(columns, t), "any": [t] * t} for t in range(STEPS[number])]
                yield number, {"steps": steps, **data(number)}

    builder = Robot(data_dir=folder, file_format=kind)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))


def fixture(kind, folder):
    """Put the data set of a kind in a folder, and return its path."""
    unpack((Path(__file__).parent / f"rlds-{kind}.txt").read_text(), folder)
    return Path(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        with contextlib.redirect_stdout(sys.stderr):
            build(home, sys.argv[1])
        sys.stdout.write(pack(Path(home) / "robot" / "1.0.0"))
