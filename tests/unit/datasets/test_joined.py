"""MergeDataset and ConcatDataset: the conformance suite over parts, and what is their own."""

import numpy as np
import pytest

from ringmap.data import (
    ConcatDataset,
    Dataset,
    GoalDataset,
    MergeDataset,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    load_dataset,
)
from ringmap.datasets import joined
from ringmap.datasets.episode import stored_layout
from ringmap.errors import InputError
from ringmap.formats.hdf5 import HDF5Writer
from ringmap.testing.datasets import DatasetTests, make_episode, make_episodes
from tests.unit.formats.others import OtherOptions


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
    two = load_dataset(write(tmp_path / "2.h5", [{"x": np.ones(1), "_episode_data": {"name": "n"}}]))
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
    for both in (ConcatDataset([load_dataset(path)]), MergeDataset([load_dataset(path)])):
        buf.extend_from(both)
    assert buf.lengths.tolist() == [3, 2, 3, 2]
    assert np.array_equal(buf.load_episode(3)["pixels"], make_episode(1, 2)["pixels"])


def test_concat_refuses_other_columns(tmp_path):
    """By name, when the parts are joined, or when a buffer gets its first episode."""

    def file(name, **columns):
        return load_dataset(write(tmp_path / name, [columns]))

    one = file("1.h5", x=np.zeros(2), task=["a", "b"])
    assert ConcatDataset([one, file("2.h5", task=["longer", "b"], x=np.ones(2))]).column_names == ["x", "task"]
    for others, text in (
        ({"x": np.zeros(2)}, "dataset 1 has no column 'task', which dataset 0 has"),
        ({"x": np.zeros(2), "task": ["a", "b"], "y": np.zeros(2)}, "dataset 0 has no column 'y', which dataset 1 has"),
        ({"x": np.zeros(2, "f4"), "task": ["a", "b"]}, r"'x' is float32 \(\) in dataset 1, but float64"),
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


# -- pictures of a file, and of a live buffer ------------------------------------------------------


def frames(number, **more):
    """A square picture with as many channels as sides: its shape says nothing of its axes."""
    rng = np.random.default_rng(number)
    return {
        "pixels": rng.integers(0, 256, (5, 4, 4, 4), np.uint8),
        "depth": rng.integers(0, 1 << 16, (5, 6, 3, 1), np.uint16),
        "x": np.arange(5) + 10 * number,
        **more,
    }


def first(rows):
    return np.moveaxis(rows, -1, -3)


def square(tmp_path, layouts):
    """Parts of one episode each: a file in a layout, a live buffer, a dataset of another library's kind."""
    parts = []
    for number, layout in enumerate(layouts):
        rows = frames(number)
        if layout in ("CHW", "HWC"):
            path = write(tmp_path / f"{number}.h5", [rows])
            parts.append(load_dataset(path, num_steps=2, layout=layout, output="numpy"))
        elif layout == "live":
            parts.append(ReplayBuffer(9, history_len=2))
            parts[-1].write_episode(rows)
        else:
            parts.append(Plain(rows))
    return parts


class Plain(Dataset):
    """It says nothing of its columns."""

    column_names = ["pixels", "depth", "x"]  # noqa: RUF012

    def __init__(self, rows):
        super().__init__([5], [0], num_steps=2)
        self.rows = rows

    def _load_slice(self, ep, start, end):
        return {name: values[start:end] for name, values in self.rows.items()}


LAYOUTS = [
    ("CHW", "live"),
    ("live", "CHW"),
    ("HWC", "CHW", "plain"),
    ("plain", "live", "CHW"),
    ("HWC", "live", "plain"),
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=" ".join)
def test_parts_agree_on_the_axes_of_pictures(tmp_path, layouts):
    """All come channels first if one part's do, however they are read, and are stored as they were."""
    both = ConcatDataset(square(tmp_path, layouts))
    wanted = [frames(number) for number in range(len(layouts))]
    turn = first if "CHW" in layouts else np.asarray
    kinds = {"joined": both, "nested": ConcatDataset([both]), "side by side": MergeDataset([both])}
    kinds["goals"] = GoalDataset(both, (0, 0, 0, 1), goal_keys={"pixels": "goal"})
    for kind, dataset in kinds.items():
        print(kind)
        for number, rows in enumerate(wanted):
            clip = dataset[4 * number + 2]
            view = dataset.view(columns=["pixels", "depth"])[4 * number + 2]
            chunk = dataset.load_chunk([number], [0], [5])[0]
            for name in ("pixels", "depth"):
                assert np.array_equal(clip[name], turn(rows[name])[2:4])
                assert np.array_equal(view[name], turn(rows[name])[2:4])
                assert np.array_equal(chunk[name], turn(rows[name]))
                assert np.array_equal(dataset.load_episode(number)[name], turn(rows[name]))
                assert np.array_equal(stored_layout(dataset.load_episode(number))[name], rows[name])
                assert np.array_equal(dataset.get_row_data(5 * number + 1)[name], rows[name][1])
            alone = dataset.take([number])  # of one part
            assert np.array_equal(alone[2]["pixels"], turn(rows["pixels"])[2:4])
        again = ReplayBuffer(99)
        again.extend_from(dataset)
        for number, rows in enumerate(wanted):
            assert np.array_equal(again.load_episode(number)["pixels"], rows["pixels"])
    assert np.array_equal(kinds["goals"][6]["goal"][0], turn(wanted[1]["pixels"])[3])


def test_columns_side_by_side_agree(tmp_path):
    """A file's pictures come channels first, so those of a buffer beside it do."""
    rows = frames(0)
    file = load_dataset(write(tmp_path / "a.h5", [{"pixels": rows["pixels"]}]))
    live = ReplayBuffer(9)
    live.write_episode({"depth": rows["depth"], "x": rows["x"]})
    for parts in ([file, live], [live, file]):
        both = MergeDataset(parts)
        assert np.array_equal(both[3]["pixels"], first(rows["pixels"])[3:4])
        assert np.array_equal(both[3]["depth"], first(rows["depth"])[3:4])
        assert np.array_equal(both.view(columns=["depth"])[3]["depth"], first(rows["depth"])[3:4])
        assert stored_layout(both.load_episode(0))["depth"].shape == rows["depth"].shape


def test_a_transform_that_turns_is_left_alone(tmp_path):
    """A buffer whose own transform puts channels first agrees with a file as it is; one that only scales is turned."""
    file, live = square(tmp_path, ("CHW", "live"))
    rows = frames(1)
    turned = ReplayBuffer(9, history_len=2, transform=lambda d: {**d, "depth": first(d["depth"]) / 2})
    scaled = ReplayBuffer(9, history_len=2, transform=lambda d: {**d, "depth": d["depth"] / 2})
    for buffer in (turned, scaled):
        buffer.write_episode(rows)
        assert np.array_equal(ConcatDataset([file, buffer])[5]["depth"], first(rows["depth"])[1:3] / 2)


def test_a_mix_of_two_layouts_is_refused(tmp_path):
    """Square pictures of as many channels look alike in both."""
    rows = frames(0)
    live = ReplayBuffer(99, history_len=2)
    live.write_episode(rows)
    for layout in ("CHW", "HWC"):
        (tmp_path / layout).mkdir()
        file = square(tmp_path / layout, (layout,))[0]
        mix = OfflineToOnlineReplayBuffer(file, online_storage=live, batch_size=8)
        if layout == "HWC":
            assert mix.sample()["pixels"].shape == (8, 2, 4, 4, 4)
            continue
        with pytest.raises(InputError, match=r"'pixels' comes with its channels first.*layout='HWC'"):
            mix.sample()


def test_control_parts_are_not_asked(tmp_path, monkeypatch):
    """Where nobody asks the parts, a batch has pictures of both kinds, of one shape."""
    monkeypatch.setattr(joined._Joined, "picture_axes", lambda self: {})
    both = ConcatDataset(square(tmp_path, ("CHW", "live")))
    assert np.array_equal(both[1]["pixels"], first(frames(0)["pixels"])[1:3])
    assert np.array_equal(both[5]["pixels"], frames(1)["pixels"][1:3])
