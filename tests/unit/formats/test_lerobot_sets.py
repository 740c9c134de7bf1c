"""What LeRobot's releases wrote is read: fixtures of the packages themselves; and what is not supported is named."""

import io
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ringmap.data import detect_format, load_dataset
from ringmap.errors import CorruptError, UnsupportedError
from tests.unit.formats.lerobot_sets import LENGTHS, TASKS, steps
from tests.unit.formats.rlds import unpack

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("av", reason="PyAV is not installed")
pq = pytest.importorskip("pyarrow.parquet")

HERE = Path(__file__).parent
RELEASES = sorted(path.stem.removeprefix("lerobot-") for path in HERE.glob("lerobot-*.txt"))
LANGUAGE = ("language_persistent", "language_events")


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_release_wrote(tmp_path, release):
    unpack((HERE / f"lerobot-{release}.txt").read_text(), tmp_path)
    options = {"layout": "HWC", "output": "numpy"}
    if release.startswith("0.6"):
        with pytest.raises(
            UnsupportedError, match="column 'language_persistent' is of LeRobot's dtype 'language'.*keys_to_load="
        ) as told:
            load_dataset(tmp_path, **options)
        options["keys_to_load"] = [*steps(0), "task", "timestamp"]
        assert all(name in str(told.value) for name in options["keys_to_load"])
    dataset = load_dataset(tmp_path, **options)
    assert detect_format(tmp_path).name == "lerobot" and dataset.lengths.tolist() == list(LENGTHS)
    for number in range(len(LENGTHS)):
        got, given = dataset.load_episode(number), steps(number)
        for name, values in given.items():
            if name == "observation.images.top":  # AV1 is lossy
                assert np.abs(got[name].astype(int) - values).max() <= 3
                continue
            assert got[name].dtype == values.dtype or values.dtype.kind == "U"
            assert np.array_equal(got[name], values), name
        assert got["task"].tolist() == [TASKS[number]] * LENGTHS[number]
        assert np.allclose(got["timestamp"], np.arange(LENGTHS[number]) / 10)
        assert dataset.episode_data(number)["tasks"].tolist() == [TASKS[number]]


def png(shape, mode="PNG"):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels[..., 0] if shape[-1] == 1 else pixels).save(buffer, mode)
    return pixels, buffer.getvalue()


def make(root, features, columns, lengths=(5,), *, groups=True, **info):
    """Write a set by hand: each episode in a row group of its own, or all in one."""
    for folder in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / folder).mkdir(parents=True)
    described = {
        "codebase_version": "v3.0",
        "fps": 10,
        "features": features,
        "video_path": None,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        **info,
    }
    (root / "meta/info.json").write_text(json.dumps(described))
    table = pa.table({**columns, "episode_index": np.repeat(np.arange(len(lengths)), lengths)})
    with pq.ParquetWriter(root / "data/chunk-000/file-000.parquet", table.schema) as writer:
        for number, count in enumerate(lengths) if groups else [(0, len(table))]:
            writer.write_table(table.slice(sum(lengths[:number]), count), row_group_size=len(table))
    rows = [
        {"episode_index": n, "length": c, "data/chunk_index": 0, "data/file_index": 0} for n, c in enumerate(lengths)
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ([3, 8, 10], ["c", "h", "w"]),
        ([3, 8, 10], ["channel", "height", "width"]),
        ([3, 8, 10], None),
        ([8, 10, 3], None),
        ([8, 10, 3], ["height", "width", "rgb"]),
        ([3, 10, 8], ["c", "w", "h"]),
        ([3, 8, 10], ["height", "width", "channels"]),
        ([8, 10, 4], None),
        ([4, 8, 10], ["c", "h", "w"]),
        ([8, 10, 1], None),
        ([8, 10], None),
    ],
)
def test_shapes_of_pictures(tmp_path, shape, names):
    """By the names of the axes, in any order; else by their sizes: LeRobot checks neither."""
    channels = 1 if len(shape) == 2 else next(n for n in shape if n in (1, 3, 4))
    pixels, file = png((8, 10, channels))
    features = {"top": {"dtype": "image", "shape": shape, "names": names}}
    make(tmp_path / "set", features, {"top": [{"bytes": file, "path": None}] * 5})
    got = load_dataset(tmp_path / "set", layout="HWC", output="numpy").load_episode(0)["top"]
    assert got.dtype == np.uint8 and np.array_equal(got, np.stack([pixels] * 5))


def test_what_is_not_supported_is_named(tmp_path):
    """CorruptError is for bytes that are wrong: the rest of a sound set is read."""
    features = {
        "x": {"dtype": "float32", "shape": [2]},
        "long": {"dtype": "float32", "shape": [1]},
        "gap": {"dtype": "float32", "shape": [1]},
        "word": {"dtype": "string", "shape": [1]},
        "ragged": {"dtype": "int64", "shape": [2]},
        "half": {"dtype": "bfloat16", "shape": [1]},
        "cloud": {"dtype": "image", "shape": [2, 3, 8, 10], "names": None},
    }
    columns = {
        "x": pa.array([[1.0, 2.0]] * 5, pa.list_(pa.float32())),
        "long": pa.array([0.1] * 5, pa.float64()),
        "gap": pa.array([1, None, 2, 3, 4], pa.float32()),
        "word": ["a", None, "b", "c", "d"],
        "ragged": [[1, 2], [3], [4, 5, 6], [7, 8], [9, 0]],
        "half": np.zeros(5, np.float16),
        "cloud": [b""] * 5,
        "more": np.arange(5),
    }
    root = make(tmp_path / "set", features, columns)
    with (
        pytest.warns(UserWarning, match="does not describe"),
        pytest.raises(UnsupportedError, match="column 'half' is of LeRobot's dtype 'bfloat16'"),
    ):
        load_dataset(root)
    with pytest.warns(UserWarning, match=r"meta/info.json does not describe them: \['more'\]"):
        dataset = load_dataset(root, keys_to_load=["x"], output="numpy")
    assert dataset.get_col_data("x").tolist() == [[1, 2]] * 5
    for name, message in (
        ("cloud", "expected height, width and channels"),
        ("long", "is of float64, and meta/info.json says float32"),
        ("gap", "has missing values"),
        ("word", "has missing values"),
        ("ragged", "has lists of another length"),
    ):
        with pytest.warns(UserWarning, match="does not describe"), pytest.raises(UnsupportedError, match=message):
            load_dataset(root, keys_to_load=[name], output="numpy").load_episode(0)


@pytest.mark.parametrize("said", [True, False])
def test_rows_stored_with_lance_are_refused_by_name(tmp_path, said):
    """LeRobot says `storage_format`; older sets of lerobot-lancedb have a table beside `meta`, and no `data`."""
    root = tmp_path / "set"
    (root / "meta").mkdir(parents=True)
    (root / "frames.lance").mkdir()
    info = {"codebase_version": "v3.0", "fps": 10, "features": {}} | ({"storage_format": "lance"} if said else {})
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(UnsupportedError, match=r"stored with Lance \(frames.lance\)"):
        load_dataset(root)


@pytest.mark.parametrize("groups", [True, False])
def test_memory_is_that_of_an_episode(tmp_path, groups):
    """Arrays take at most three times their bytes, NumPy's and Arrow's together: also if a row group has many
    episodes."""
    shape, lengths = (48, 64), (300, 200, 300)
    values = np.random.default_rng(0).normal(size=(sum(lengths), *shape)).astype(np.float32)
    lists = pa.array(values.ravel())
    for size in reversed(shape):
        lists = pa.ListArray.from_arrays(np.arange(0, len(lists) + 1, size, dtype=np.int32), lists)
    features = {"x": {"dtype": "float32", "shape": list(shape)}}
    dataset = load_dataset(make(tmp_path / "set", features, {"x": lists}, lengths, groups=groups), output="numpy")
    dataset.load_episode(1)  # imports

    POOLS.append(pa.proxy_memory_pool(pa.default_memory_pool()))
    pa.set_memory_pool(POOLS[-1])
    tracemalloc.start()
    try:
        got = dataset.load_episode(2)["x"]
        peak = tracemalloc.get_traced_memory()[1] + POOLS[-1].max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(pa.system_memory_pool())
    assert np.array_equal(got, values[500:])
    assert peak <= 3 * got.nbytes, f"{peak / got.nbytes:.2f} times"


POOLS = []
"""Kept: an array may outlive its pool's other names."""


def test_rows_of_another_number_are_damage(tmp_path):
    root = make(tmp_path / "set", {"x": {"dtype": "int64", "shape": [1]}}, {"x": np.arange(5)}, (3, 2))
    path = root / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).slice(0, 4), path)
    dataset = load_dataset(root, output="numpy")
    assert dataset.load_episode(0)["x"].tolist() == [0, 1, 2]
    with pytest.raises(CorruptError, match="1 rows of episode 1, expected 2"):
        dataset.load_episode(1)
