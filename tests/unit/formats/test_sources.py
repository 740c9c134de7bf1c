"""A source of somebody else's: what it says of itself, and what it loads, are held to each other."""

import os
import pickle
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap.data import EpisodeSource, Format, convert, load_dataset
from ringmap.errors import CorruptError, InputError, ReplacedError

LENGTHS = [np.int64(4), np.int64(0), np.int64(6)]


class Numbers(EpisodeSource):
    """A file of one number, with which the rows begin."""

    lengths_said, rows_more = LENGTHS, 0

    def __init__(self, path):
        super().__init__(path)
        columns = {"obs": ((np.int64(2),), "float32"), "step": ((), np.int64), "word": ((), str)}
        self.describe(self.lengths_said, columns, ["seed"])

    def _load(self, file, number, columns):
        with open(self.path) as text:
            begin = int(text.read())
        steps = np.arange(LENGTHS[number] + self.rows_more)
        words = np.array([f"{number}" * (step + 1) for step in steps.tolist()], str)
        return {"obs": np.full((len(steps), 2), begin, np.float32), "step": steps + 100 * number, "word": words}

    def _episode_data(self, handle, episode):
        return {"seed": np.uint8(episode)}


class Said(Format):
    name, source = "numbers", Numbers


def opened(path, source=Numbers, **options):
    path.write_text("1")
    return type("Other", (Said,), {"source": source}).open_reader(path, output="numpy", **options)


def test_text_of_any_length_and_numbers_of_numpy(tmp_path):
    dataset = opened(tmp_path / "set")
    assert dataset.lengths.tolist() == [4, 0, 6]
    assert dataset.load_episode(np.uint8(2))["word"].tolist() == ["2" * n for n in range(1, 7)]
    assert dataset[np.int64(9)]["word"] == ["222222"]
    assert [len(word) for word in dataset.get_col_data("word").tolist()] == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    convert(dataset, tmp_path / "copy.h5", progress=False)
    copy = load_dataset(tmp_path / "copy.h5", output="numpy")
    for number, of in enumerate((0, 2)):
        for name, rows in dataset.load_episode(of).items():
            assert np.array_equal(copy.load_episode(number)[name], rows)
    assert copy.get_episode_data()["seed"] == [0, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers(tmp_path, workers):
    dataset = opened(tmp_path / "set", num_steps=2, keys_to_load=["obs", "step"])
    loader = DataLoader(dataset, batch_size=3, num_workers=workers)
    found = np.concatenate([batch["step"].numpy() for batch in loader])
    assert found[:, 0].tolist() == [0, 1, 2, 200, 201, 202, 203, 204]


@pytest.mark.parametrize("is_pickled", [False, True])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_file_that_is_written_over_is_refused(tmp_path, is_pickled, is_in_place):
    dataset = opened(tmp_path / "set")
    assert dataset[0]["obs"].tolist() == [[1, 1]]
    if is_pickled:
        dataset = pickle.loads(pickle.dumps(dataset))
    time.sleep(0.02)
    other = tmp_path / ("set" if is_in_place else "other")
    other.write_text("2")
    os.replace(other, tmp_path / "set")
    with pytest.raises(ReplacedError, match="load it again"):
        dataset[0]


@pytest.mark.parametrize("more", [-1, 1])
def test_an_episode_of_another_length_is_damage(tmp_path, more):
    dataset = opened(tmp_path / "set", type("Numbers", (Numbers,), {"rows_more": more}))
    with pytest.raises(CorruptError, match=rf"column 'obs' has {4 + more} rows in episode 0, expected 4"):
        dataset.load_episode(0)


@pytest.mark.parametrize("lengths", [4, [4.0], [-1, 4], [[4, 3]], [2**31], [2**70], ["4"], [True], [None]])
def test_what_is_no_length_is_refused(tmp_path, lengths):
    with pytest.raises(InputError, match=r"^Numbers\.describe: lengths must be a whole number for each episode"):
        opened(tmp_path / "set", type("Numbers", (Numbers,), {"lengths_said": lengths}))
