"""Every dataset is drawn from as a view is: `dataset[ids]`, `sample`, `batches`."""

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ringmap.data import Window
from ringmap.errors import ClipIndexError, InputError, NoClipsError, SubscriptError
from tests.unit.datasets.test_where import KINDS, LENGTHS, episode, h5, loaded

ROWS = [x for number in range(6) for x in episode(number)["x"].tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_dataset(tmp_path, kind):
    dataset = KINDS[kind](tmp_path)
    batch = dataset[[5, 0, -1]]
    assert np.asarray(batch["x"]).reshape(-1).tolist() == [ROWS[i] for i in (5, 0, -1)]
    assert all(len(values) == 3 for values in batch.values())
    assert len(dataset[np.empty(0, np.int64)]["x"]) == 0
    drawn = [dataset.sample(400), *dataset.batches(200, steps=2)]
    assert [len(batch["x"]) for batch in drawn] == [400, 200, 200]
    assert {int(x) for batch in drawn for x in np.ravel(batch["x"])} == set(ROWS)
    assert not np.array_equal(drawn[1]["x"], drawn[2]["x"])
    view = dataset.view({"x": Window([0, 1])}, where="length > 3")
    assert np.asarray(view[[0, 3]]["x"]).tolist() == [[0, 1], [200, 201]]
    assert set(np.ravel(np.asarray(view.sample(300)["x"])[:, 0]).tolist()) == {
        x for n in (0, 2, 4) for x in episode(n)["x"].tolist()[:-1]
    }


def test_what_can_not_be_drawn(tmp_path):
    dataset = loaded(h5(tmp_path))
    with pytest.raises(InputError, match="batch_size must be positive"):
        dataset.sample(0)
    with pytest.raises(InputError, match="batch_size must be positive"):
        dataset.batches(-1)
    with pytest.raises(NoClipsError, match="longest"):
        loaded(tmp_path / "a.h5", num_steps=100).sample(2)
    with pytest.raises(SubscriptError, match=r"dataset\[list\(range"):
        dataset[0:2]
    with pytest.raises(InputError, match="a list of integers"):
        dataset[[True, False]]
    assert dataset[[]].keys() == dataset[[0]].keys()


NO_NUMBERS = {
    "mask": ([True, False, True, False, True, False], InputError),
    "array": (np.arange(6) == 2, InputError),
    "text": (["1"], InputError),
    "fraction": ([1.5], InputError),
    "beyond": (np.array([2**64 - 1], np.uint64), ClipIndexError),
}


@pytest.mark.parametrize("given", NO_NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_means_none(tmp_path, kind, given):
    dataset, (wrong, error) = KINDS[kind](tmp_path), NO_NUMBERS[given]
    chunk = np.zeros(len(wrong), np.int64), np.ones(len(wrong), np.int64)
    for call in (
        lambda: dataset[wrong],
        lambda: dataset.get_episode_data(wrong),
        lambda: dataset.get_row_data(wrong),
        lambda: dataset.view().take(wrong),
        lambda: dataset.load_chunk(wrong, *chunk),
        lambda: dataset.load_chunk([0] * len(wrong), wrong, chunk[1]),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("kind", ["file", "concat", "a user's"])
def test_a_loader_may_ask_for_batches(tmp_path, kind):
    """`DataLoader(dataset, batch_size=None, sampler=BatchSampler(...))`."""
    dataset = KINDS[kind](tmp_path)
    sampler = BatchSampler(SequentialSampler(dataset), 8, drop_last=False)
    found = [b["x"] for b in DataLoader(dataset, batch_size=None, sampler=sampler)]
    assert np.concatenate([np.ravel(x) for x in found]).tolist() == ROWS
    assert len(found) == -(-sum(LENGTHS) // 8)
