"""Hugging Face's datasets reads the Parquet files that we wrote, from disk and as a stream."""

import numpy as np
import pytest

pytest.importorskip("datasets", reason="datasets is not installed (extra exits)")

import datasets

from ringmap.data import ReplayBuffer, convert, get_format, load_dataset, to_datasets
from ringmap.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # what datasets says is not for us to mend


@pytest.fixture
def buf(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    made = ReplayBuffer(1000, path=tmp_path / "ring")
    for length in (4, 2, 7):
        made.write_episode(
            {
                "pixels": rng.integers(0, 256, (length, 40, 32, 3), np.uint8),
                "mask": rng.integers(0, 256, (length, 16, 16, 1), np.uint8),
                "obs/matrix": rng.normal(size=(length, 2, 3)).astype(np.float32),
                "half": rng.normal(size=length).astype(np.float16),
                "flag": rng.random(length) < 0.5,
                "count": rng.integers(0, 9, (length, 2), np.uint16),
                "task": np.array([f"naïve {i}" for i in range(length)], "U9"),
                "when": np.arange(length).astype("M8[us]"),
                "_episode_data": {"seed": length},
            }
        )
    yield made
    made.close()


def check(rows, buf):
    rows, at = list(rows), 0
    assert len(rows) == buf.num_steps_stored == 13
    for number, length in enumerate(buf.lengths.tolist()):
        episode = buf.load_episode(number)
        for step in range(length):
            row = rows[at]
            assert (row["episode_index"], row["step_index"]) == (number, step)
            for name in ("pixels", "mask"):
                given = episode[name][step]
                assert np.array_equal(np.asarray(row[name]).reshape(given.shape), given)
            for name in ("obs/matrix", "half", "flag", "count"):
                assert np.array_equal(np.asarray(row[name], episode[name].dtype), episode[name][step])
            assert row["task"] == episode["task"][step]
            assert np.datetime64(row["when"]) == episode["when"][step]
            at += 1


@pytest.mark.parametrize("streaming", [False, True])
def test_their_reader_opens_our_files(tmp_path, buf, streaming):
    path = tmp_path / "rows"
    convert(buf, path, dest_format="parquet", progress=False)
    files = str(path / "data-*.parquet")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=streaming)
    assert isinstance(rows.features["pixels"], datasets.Image)
    assert rows.features["obs/matrix"] == datasets.List(datasets.List(datasets.Value("float32"), length=3), length=2)
    check(rows, buf)


def test_a_table_in_memory(tmp_path, buf):
    held = to_datasets(buf)
    check(held, buf)
    assert held.features == to_datasets(dumped(buf, tmp_path / "copy.h5")).features
    arrays = held.with_format("numpy")[:4]
    assert np.array_equal(arrays["obs/matrix"], buf.load_episode(0)["obs/matrix"])
    with pytest.raises(InputError, match="no episodes"):
        to_datasets(ReplayBuffer(10))


def dumped(buf, path):
    buf.dump(path, format="hdf5")
    return load_dataset(path, output="numpy", layout="HWC")


def test_appended_files_are_of_the_same_features(tmp_path, buf):
    path = tmp_path / "rows"
    convert(buf, path, dest_format="parquet", progress=False)
    with get_format("parquet").open_writer(path) as writer:
        writer.write_episode(buf.load_episode(1))
    assert load_dataset(path).lengths.tolist() == [4, 2, 7, 2]
    assert load_dataset(path).get_episode_data()["seed"] == [4, 2, 7, None]
    rows = datasets.load_dataset("parquet", data_files=str(path / "data-*.parquet"), split="train")
    assert rows["episode_index"][-2:] == [3, 3] and len(rows) == 15


def test_a_table_has_no_place_for_data_of_episodes(buf):
    buf.write_episode({**buf.load_episode(0), "_episode_data": {"seed": 1, "room": "left"}})
    with pytest.raises(InputError, match=r"'room'.*drop=\['room'\]"):
        to_datasets(buf)
    assert "pixels" not in to_datasets(buf, drop=["room", "pixels"]).column_names
