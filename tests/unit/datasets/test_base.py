"""`Dataset` and its layouts; the suite runs on the smallest subclass there is, and on theirs."""

import copy
import pickle

import numpy as np
import pytest

from ringmap.data import Dataset, load_dataset
from ringmap.datasets.episode import EpisodeDict, stored_layout, to_channels_first, to_channels_last
from ringmap.datasets.stored import StoredDataset
from ringmap.formats.hdf5 import HDF5Writer
from ringmap.testing.datasets import DatasetTests, make_episode, make_episodes


class Plain(Dataset):
    """The smallest subclass: arrays in memory, images turned, nothing else supplied."""

    def __init__(self, episodes, **options):
        self.episodes = episodes
        lengths = [len(e["where"]) for e in episodes]
        super().__init__(lengths, np.cumsum([0, *lengths[:-1]]), **options)

    @property
    def column_names(self):
        return ["pixels", "action", "reward", "where"]

    def _load_slice(self, ep, start, end):
        length = len(self.episodes[ep]["where"])
        if not 0 <= start <= end <= length:
            raise IndexError(f"steps [{start}, {end}) of {length}")
        steps = {name: rows[start:end].copy() for name, rows in self.episodes[ep].items()}
        steps["pixels"] = to_channels_first(steps["pixels"])
        steps = EpisodeDict(steps, ["pixels"])
        return self.transform(steps) if self.transform else steps


class TestPlain(DatasetTests):
    def open(self, tmp_path, episodes, **options):
        return Plain(episodes, **options)


class Strided(Plain):
    """As subclasses written for stable-worldmodel are: `_load_slice` strides by itself."""

    def _load_slice(self, ep, start, end):
        steps = super()._load_slice(ep, start, end)
        return {n: v if n == "action" else v[:: self.frameskip] for n, v in steps.items()}


def test_subclasses_that_stride_by_themselves():
    options = {"num_steps": 2, "frameskip": 3}
    ours, theirs = Plain(make_episodes(), **options), Strided(make_episodes(), **options)
    assert len(ours) == len(theirs) == 6
    for one, other in zip(ours, theirs, strict=False):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_suite_catches_a_clip_that_leaves_its_episode(tmp_path):
    class Leaks(Plain):
        def _locate(self, ids):
            episodes, starts = super()._locate(ids)
            return episodes, np.maximum(starts - 1, 0)

    class Suite(DatasetTests):
        def open(self, tmp_path, episodes, **options):
            return Leaks(episodes, **options)

    with pytest.raises(AssertionError):
        Suite().test_clips(tmp_path, 2, 1)


def test_what_a_subclass_must_supply():
    bare = Dataset([2], [0])
    for call in (lambda: bare.column_names, lambda: bare[0], lambda: bare.load_episode(0)):
        with pytest.raises(NotImplementedError, match="must supply"):
            call()
    with pytest.raises(NotImplementedError, match="can't merge"):
        bare.merge_col(["a"], "b")
    with pytest.raises(ValueError, match="2 lengths but 1 offsets"):
        Dataset([1, 2], [0])


def test_lengths_can_not_be_changed_from_outside():
    dataset = Plain(make_episodes())
    with pytest.raises(ValueError, match="read-only"):
        dataset.lengths[0] = 100
    assert dataset.lengths.dtype == np.int32
    assert dataset.offsets.dtype == np.int64


def test_changing_num_steps_changes_the_clips():
    dataset = Plain(make_episodes())
    assert len(dataset) == 24
    dataset.num_steps = 5
    assert dataset.span == 5
    assert len(dataset) == 1 + 5 + 3


def test_scalar_actions_are_folded_to_two_axes(tmp_path):
    with HDF5Writer(tmp_path / "a.h5") as writer:
        writer.write_episode({"action": np.arange(6), "grid": np.arange(24).reshape(6, 2, 2)})
    dataset = load_dataset(tmp_path / "a.h5", num_steps=3)
    assert dataset[0]["action"].tolist() == [[0], [1], [2]]
    assert dataset.load_episode(0)["action"].shape == (6,)
    dataset.frameskip, dataset.num_steps = 2, 2
    assert dataset[1]["action"].tolist() == [[1, 2], [3, 4]]
    assert dataset[1]["grid"].shape == (2, 2, 2)


def test_gaps_between_episodes():
    """Offsets need not follow each other: a row is where the episode says it is."""

    class Sparse(Plain):
        def __init__(self):
            super().__init__(make_episodes((2, 3)))
            self._offsets = np.array([10, 0])

    dataset = Sparse()
    assert dataset.get_row_data([11, 2])["where"].tolist() == [[0, 1], [1, 2]]
    with pytest.raises(IndexError):
        dataset.get_row_data(5)


# -- axis order ------------------------------------------------------------------------------------


def test_the_order_of_axes_is_remembered():
    frames = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    episode = EpisodeDict({"pixels": to_channels_first(frames), "x": [1, 2]}, ["pixels"])
    assert episode["pixels"].shape == (2, 3, 4, 5)
    for made in (
        episode,
        episode.copy(),
        copy.copy(episode),
        copy.deepcopy(episode),
        pickle.loads(pickle.dumps(episode)),
    ):
        stored = stored_layout(made)
        assert type(stored) is dict
        assert np.array_equal(stored["pixels"], frames)
        assert stored["x"] == [1, 2]
    assert episode["pixels"].shape == (2, 3, 4, 5)


@pytest.mark.parametrize("episode", [{}, {"pixels": np.zeros((2, 3, 4, 5))}, EpisodeDict({"x": [1]})])
def test_nothing_to_undo(episode):
    assert stored_layout(episode) is episode


def test_lists_and_tensors_are_turned_back():
    import torch

    frames = np.arange(120, dtype=np.uint8).reshape(2, 4, 5, 3)
    turned = to_channels_first(torch.from_numpy(frames))
    assert turned.shape == (2, 3, 4, 5)
    assert np.array_equal(to_channels_last(turned), frames)
    assert np.array_equal(to_channels_last(list(turned)), frames)
    assert np.array_equal(np.stack(to_channels_last([np.asarray(t) for t in turned])), frames)


# -- StoredDataset ---------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    with HDF5Writer(tmp_path / "a.h5") as writer:
        for number, length in enumerate((5, 3)):
            extra = {
                "task": np.full(length, f"task {number}", "U12"),
                "stamp": np.arange(length).astype("M8[s]"),
                "depth": np.zeros((length, 6, 5, 1), np.float32),
            }
            writer.write_episode(make_episode(number, length) | extra)
    return tmp_path / "a.h5"


def test_tensors(path):
    import torch

    episode = load_dataset(path).load_episode(0)
    assert isinstance(episode, EpisodeDict)
    assert episode.channels_first == {"pixels"}
    kinds = {n: v.dtype if isinstance(v, torch.Tensor) else v.dtype.str for n, v in episode.items()}
    assert kinds == {
        "pixels": torch.uint8,
        "action": torch.float32,
        "reward": torch.float64,
        "where": torch.int64,
        "task": "<U6",  # as wide as the longest that is read
        "stamp": "<M8[s]",
        "depth": torch.float32,
    }
    assert episode["depth"].shape == (5, 6, 5, 1)  # float: no image, never turned


def test_text_goes_through_a_data_loader(path):
    from torch.utils.data import DataLoader

    dataset = load_dataset(path, num_steps=2, keys_to_load=["task", "where"])
    assert dataset[4]["task"] == ["task 1", "task 1"]
    batch = next(iter(DataLoader(dataset, batch_size=6)))
    assert batch["task"] == [["task 0"] * 2] * 4 + [["task 1"] * 2] * 2


@pytest.mark.parametrize("layout", ["CHW", "HWC"])
@pytest.mark.parametrize(
    "transform",
    [None, dict, lambda steps: steps, lambda steps: {n: v for n, v in steps.items() if n != "reward"}],
    ids=["none", "dict", "same", "new"],
)
def test_episodes_can_be_written_again_whatever_the_layout(path, tmp_path, layout, transform):
    dataset = load_dataset(path, layout=layout, transform=transform)
    again = tmp_path / "again.h5"
    with HDF5Writer(again) as writer:
        for i in range(2):
            writer.write_episode(dataset.load_episode(i))
        columns = dataset.load_episode(0)
        writer.write_episode(
            {n: v for n, v in make_episode(2, 4).items() if n in columns}
            | {"task": ["x"] * 4, "stamp": np.zeros(4, "M8[s]"), "depth": np.zeros((4, 6, 5, 1), "f4")}
        )
    stored = load_dataset(again).get_col_data("pixels")
    assert stored.shape == (12, 12, 10, 3)
    assert np.array_equal(stored[:8], dataset.get_col_data("pixels"))


def test_a_transform_that_makes_other_images_is_taken_at_its_word(path):
    dataset = load_dataset(path, transform=lambda s: {"pixels": s["pixels"].float() / 255})
    assert load_dataset(path).load_episode(0).channels_first == {"pixels"}
    assert dataset.load_episode(0).channels_first == set()
    back = load_dataset(path, transform=lambda s: {"pixels": s["pixels"].permute(0, 2, 3, 1)})
    assert back.load_episode(0).channels_first == set()


def test_keys(path):
    dataset = load_dataset(path, keys_to_load=["where", "action"], keys_to_cache=["where"])
    assert dataset.column_names == ["where", "action"]
    assert set(dataset[0]) == {"where", "action"}
    plain = load_dataset(path, num_steps=2)
    cached = load_dataset(path, num_steps=2, keys_to_cache=plain.column_names)
    for one, other in zip(plain, cached, strict=False):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    cached.get_col_data("where")[:] = -1
    cached[0]["where"][:] = -1
    assert cached[0]["where"].tolist() == [[0, 0], [0, 1]]
    for option in ("keys_to_load", "keys_to_cache"):
        with pytest.raises(KeyError, match="no column 'nope'"):
            load_dataset(path, **{option: ["nope"]})


def test_merge_col(path):
    dataset = load_dataset(path, num_steps=2)
    dataset.merge_col(["action", "reward"], "both")
    assert dataset.get_dim("both") == 3
    assert dataset[-1]["both"].tolist() == [[1, 1, 1.001], [1, 2, 1.002]]
    dataset.merge_col("act|whe", "matched")
    assert dataset.get_dim("matched") == 4
    assert dataset.get_row_data(7)["matched"].tolist() == [1, 2, 1, 2]
    assert dataset.load_episode(1)["both"].shape == (3, 3)
    assert pickle.loads(pickle.dumps(dataset))[0]["both"].shape == (2, 3)
    assert dataset.schema.names[-2:] == ["both", "matched"]
    merged = load_dataset(path, keys_to_merge={"wide": ["pixels", "pixels"]})
    assert merged[0]["wide"].shape == (1, 12, 10, 6)  # six channels: no image
    dataset.merge_col(["pixels", "pixels"], "tall", dim=1)
    assert dataset[0]["tall"].shape == (2, 3, 24, 10)
    for source, message in (
        (["nope"], "no column 'nope'"),
        ("zzz", "no column matches"),
        (["pixels", "where"], "do not join"),
    ):
        with pytest.raises(ValueError, match=message):
            dataset.merge_col(source, "x")
    with pytest.raises(ValueError, match="axis 0 is time"):
        dataset.merge_col(["where", "where"], "x", dim=0)


def test_slices_outside_the_episode(path):
    dataset = load_dataset(path)
    assert isinstance(dataset, StoredDataset)
    for ep, start, end in ((0, 0, 6), (0, -1, 2), (0, 3, 2), (2, 0, 1)):
        with pytest.raises(IndexError):
            dataset._load_slice(ep, start, end)


def test_closed_datasets_open_again(path):
    dataset = load_dataset(path)
    dataset.close()
    dataset.close()
    assert dataset[0]["where"].tolist() == [[0, 0]]
    assert dataset.path == str(path)
