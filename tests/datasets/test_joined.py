"""MergeDataset and ConcatDataset: the conformance suite over parts, and what is their own."""

import numpy as np
import pytest

from ringmap.data import ConcatDataset, Dataset, MergeDataset, ReplayBuffer, load_dataset
from ringmap.formats.hdf5.writer import HDF5Writer
from ringmap.testing.datasets import DatasetTests, make_episode, make_episodes
from tests.formats.others import OtherOptions


def write(path, episodes):
    with HDF5Writer(path) as writer:
        writer.write_episodes(episodes)
    return path


class TestConcat(OtherOptions, DatasetTests):
    """Three files, one of them empty, seen as one dataset."""

    def open(self, tmp_path, episodes, **options):
        options = dict(options)
        parts = [episodes[:2], [], episodes[2:]]
        paths = [write(tmp_path / f"{i}.h5", part) for i, part in enumerate(parts)]
        return ConcatDataset([load_dataset(path, **options) for path in paths])


class TestMerge(OtherOptions, DatasetTests):
    """Two files, each with half of the columns."""

    def open(self, tmp_path, episodes, **options):
        halves = [("pixels", "action"), ("reward", "where", "action")]
        if "transform" in options:  # it looks at all columns
            halves = [("pixels", "action", "reward", "where"), ("reward",)]
        paths = [
            write(tmp_path / f"{i}.h5", [{name: e[name] for name in half} for e in episodes])
            for i, half in enumerate(halves)
        ]
        keep = options.pop("transform", None)
        parts = [load_dataset(path, **options) for path in paths]
        if keep is not None:
            parts[0].transform = keep
            return MergeDataset(parts[:1], [["where", "action"]])
        return MergeDataset(parts)


@pytest.mark.parametrize("kind", [MergeDataset, ConcatDataset])
def test_nothing_to_join(kind):
    with pytest.raises(ValueError, match="Need at least one dataset"):
        kind([])


@pytest.mark.parametrize("kind", [MergeDataset, ConcatDataset])
def test_parts_cut_differently(kind, tmp_path):
    path = write(tmp_path / "a.h5", make_episodes())
    with pytest.raises(ValueError, match="num_steps=2"):
        kind([load_dataset(path), load_dataset(path, num_steps=2)])


def test_merge_refuses_other_episodes(tmp_path):
    one = write(tmp_path / "1.h5", make_episodes((3, 4)))
    for lengths in ((3,), (4, 3), (7,)):
        other = write(tmp_path / f"{lengths}.h5", make_episodes(lengths))
        with pytest.raises(ValueError, match="dataset 1 has"):
            MergeDataset([load_dataset(one), load_dataset(other)])


def test_merge_takes_the_first_and_what_it_is_told(tmp_path):
    length = 4
    one = write(tmp_path / "1.h5", [{"a": np.zeros(length), "b": np.zeros(length)}])
    two = write(tmp_path / "2.h5", [{"b": np.ones(length), "c": np.ones(length)}])
    parts = [load_dataset(one), load_dataset(two)]
    both = MergeDataset(parts)
    assert both.column_names == ["a", "b", "c"]
    assert [float(both[0][n][0]) for n in "abc"] == [0, 0, 1]
    told = MergeDataset(parts, [["a"], ["b"]])
    assert told.column_names == ["a", "b"]
    assert [float(told[0][n][0]) for n in "ab"] == [0, 1]
    assert float(told.get_col_data("b")[0]) == 1
    assert set(told.get_row_data(0)) == {"a", "b"}
    with pytest.raises(ValueError, match="1 lists for 2 datasets"):
        MergeDataset(parts, [["a"]])
    with pytest.raises(KeyError, match="nothing"):
        MergeDataset(parts, [["a"], ["nothing"]])


def test_concat_follows_a_growing_buffer(tmp_path):
    fixed = load_dataset(write(tmp_path / "a.h5", make_episodes((3,))), num_steps=2)
    buf = ReplayBuffer(100, history_len=2)
    both = ConcatDataset([fixed, buf])
    assert len(both) == 2
    assert list(both.clip_indices) == [(0, 0), (0, 1)]
    buf.write_episode(make_episode(7, 4))
    assert len(both) == 5
    assert list(both.clip_indices)[2:] == [(1, 0), (1, 1), (1, 2)]
    assert np.asarray(both[2]["where"]).tolist() == [[7, 0], [7, 1]]
    assert both.lengths.tolist() == [3, 4]
    assert both.offsets.tolist() == [0, 3]
    assert both.get_row_data([6, 0])["where"].tolist() == [[7, 3], [0, 0]]


class Counted(Dataset):
    """Counts the batches that it was asked for."""

    column_names = ["x"]  # noqa: RUF012
    calls = 0

    def _load_slice(self, ep, start, end):
        return {"x": np.arange(start, end)}

    def __getitems__(self, indices):
        self.calls += 1
        return super().__getitems__(indices)


@pytest.mark.parametrize("kind", [MergeDataset, ConcatDataset])
def test_each_part_is_asked_once_per_batch(kind):
    parts = [Counted([10], [0]), Counted([10], [0])]
    got = kind(parts).__getitems__([9, 0, len(kind(parts)) - 1, 3])
    assert [int(clip["x"][0]) for clip in got] == [9, 0, 9, 3]
    assert [part.calls for part in parts] == [1, 1]


def test_concat_columns_and_episode_data(tmp_path):
    data = [{"x": np.zeros(2), "_episode_data": {"seed": 1}}, {"x": np.zeros(1)}]
    one = load_dataset(write(tmp_path / "1.h5", data))
    two = load_dataset(
        write(tmp_path / "2.h5", [{"x": np.ones(1), "_episode_data": {"name": "n"}}])
    )
    both = ConcatDataset([one, two])
    assert both.episode_column_names == ["seed", "name"]
    assert both.get_episode_data() == {"seed": [1, None, None], "name": [None, None, "n"]}
    assert both.get_episode_data([2, 0]) == {"seed": [None, 1], "name": ["n", None]}
    both.merge_col(["x", "x"], "xx")
    assert both.get_col_data("xx").tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    merged = MergeDataset([load_dataset(tmp_path / "1.h5")])
    merged.merge_col(["x", "x"], "xx")
    assert merged[0]["xx"].tolist() == [[0, 0]]
    assert merged.get_episode_data(0) == {"seed": [1]}
    with pytest.raises(ValueError, match="no single dataset"):
        merged.merge_col(["x", "y"], "z")


def test_episodes_of_parts_are_written_as_they_were_stored(tmp_path):
    """Images keep their order through both kinds."""
    path = write(tmp_path / "1.h5", make_episodes((3, 2)))
    buf = ReplayBuffer(100)
    for joined in (ConcatDataset([load_dataset(path)]), MergeDataset([load_dataset(path)])):
        buf.extend_from(joined)
    assert buf.lengths.tolist() == [3, 2, 3, 2]
    assert np.array_equal(buf.load_episode(3)["pixels"], make_episode(1, 2)["pixels"])


def test_concat_refuses_other_columns(tmp_path):
    """By name, when the parts are joined, or when a buffer gets its first episode."""

    def file(name, **columns):
        return load_dataset(write(tmp_path / name, [columns]))

    one = file("1.h5", x=np.zeros(2), task=["a", "b"])
    assert ConcatDataset([one, file("2.h5", task=["longer", "b"], x=np.ones(2))]).column_names == [
        "x",
        "task",
    ]
    for others, text in (
        ({"x": np.zeros(2)}, "dataset 1 has no column 'task', which dataset 0 has"),
        (
            {"x": np.zeros(2), "task": ["a", "b"], "y": np.zeros(2)},
            "dataset 0 has no column 'y', which dataset 1 has",
        ),
        (
            {"x": np.zeros(2, "f4"), "task": ["a", "b"]},
            r"'x' is float32 \(\) in dataset 1, but float64",
        ),
        ({"x": np.zeros((2, 3)), "task": ["a", "b"]}, r"'x' is float64 \(3,\) in dataset 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ConcatDataset([one, file("other.h5", **others)])
        (tmp_path / "other.h5").unlink()
    buf = ReplayBuffer(10)
    both = ConcatDataset([buf, file("3.h5", x=np.zeros(2))])
    buf.write_episode({"x": np.zeros(2), "y": np.zeros(2)})
    for read in (lambda: both[0], lambda: both.column_names, lambda: both.get_col_data("x")):
        with pytest.raises(ValueError, match="dataset 1 has no column 'y'"):
            read()
