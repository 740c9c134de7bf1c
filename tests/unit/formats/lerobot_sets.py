"""Makes the LeRobot fixtures: what LeRobotDataset of a release wrote, packed as text.

    python -m venv made && made/bin/pip install "lerobot[dataset]==0.6.1"          # of Python 3.12
    PYTHONPATH=. made/bin/python -m tests.unit.formats.lerobot_sets > tests/unit/formats/lerobot-0.6.1.txt

Made once, with lerobot 0.4.0, 0.4.4, 0.5.1 and 0.6.1 (unpacked from their wheels), datasets 4.8.5, PyArrow 26, PyAV
15.1, NumPy 2.2 and Python 3.12. To that of 0.6.1 the annotation pipeline's columns are added in its way: `pa.array` of
its rows, and `write_table_one_row_group_per_episode`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.unit.formats.rlds import pack

LENGTHS = (3, 2)
TASKS = ("push", "pülls")
FPS = 10

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "observation.images.top": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    "observation.images.left": {"dtype": "image", "shape": (3, 8, 10), "names": ["c", "h", "w"]},
    "observation.images.right": {"dtype": "image", "shape": (3, 8, 10), "names": None},
    "observation.images.wrist": {"dtype": "image", "shape": (8, 10, 3), "names": ["height", "width", "channel"]},
    "grid": {"dtype": "float64", "shape": (2, 3), "names": None},
    "count": {"dtype": "int64", "shape": (1,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": ["dx", "dy"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "word": {"dtype": "string", "shape": (1,), "names": None},
}


def steps(number):
    """Return an episode as it was given, column -> array; pictures have their channels last."""
    count = LENGTHS[number]
    t = np.arange(count)
    shade = (40 * number + 10 * t).astype(np.uint8)
    noise = np.random.default_rng(number).integers(0, 256, (count, 8, 10, 3), np.uint8)
    return {
        "observation.state": np.stack([t + 0.5, -t], 1).astype(np.float32),
        "observation.images.top": np.broadcast_to(shade[:, None, None, None], (count, 64, 96, 3)),
        "observation.images.left": noise,
        "observation.images.right": 255 - noise,
        "observation.images.wrist": noise // 2,
        "grid": np.arange(count * 6).reshape(count, 2, 3) / 7,
        "count": t + (1 << 53) + 1,
        "action": np.stack([t, t * 2], 1).astype(np.float32),
        "next.reward": t.astype(np.float32),
        "next.done": t == count - 1,
        "word": np.array([f"é{number}{'x' * i}" for i in range(count)]),
    }


def add_annotations(root):
    """Add the columns of dtype `language`."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq
    from lerobot.datasets.io_utils import write_table_one_row_group_per_episode
    from lerobot.datasets.language import language_feature_info

    (path,) = Path(root).glob("data/*/*.parquet")
    table = pq.read_table(path)
    said = {"role": "user", "content": "reach", "style": "subtask", "camera": None, "tool_calls": None}
    columns = {
        "language_persistent": pa.array([[said | {"timestamp": 0.0}]] * len(table)),
        "language_events": pa.array([[said]] + [[]] * (len(table) - 1)),
    }
    for name, values in columns.items():
        table = table.append_column(name, values)
    write_table_one_row_group_per_episode(table, path)
    info = Path(root, "meta/info.json")
    found = json.loads(info.read_text())
    for name, feature in language_feature_info().items():
        found["features"][name] = feature | {"shape": list(feature["shape"])}
    info.write_text(json.dumps(found, indent=4))


def main():
    import importlib.metadata

    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    release = importlib.metadata.version("lerobot")
    with tempfile.TemporaryDirectory() as home:
        root = Path(home, "set")
        made = LeRobotDataset.create("me/set", fps=FPS, features=FEATURES, root=root, use_videos=True)
        for number, count in enumerate(LENGTHS):
            episode = steps(number)
            for t in range(count):
                frame = {n: v[t] if v[t].ndim else np.atleast_1d(v[t]) for n, v in episode.items()}
                made.add_frame(frame | {"word": str(episode["word"][t]), "task": TASKS[number]})
            made.save_episode()
        if hasattr(made, "finalize"):
            made.finalize()
        if release.startswith("0.6"):
            add_annotations(root)
        sys.stdout.write(pack(root))


if __name__ == "__main__":
    main()
