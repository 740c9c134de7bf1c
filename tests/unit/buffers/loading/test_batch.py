"""The list that `__getitems__` returns: B clips for whoever looks, one block for the default collate."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate

from ringmap.datasets.batch import Clip, ClipBatch
from tests.unit.buffers.loading.conftest import prove


def batch_of(size=4):
    return ClipBatch({"a": np.arange(size * 2).reshape(size, 2), "b": np.ones((size, 1))}, size)


def test_it_is_a_list_of_clips():
    batch = batch_of()
    assert isinstance(batch, list)
    assert len(batch) == 4
    assert [clip["a"].tolist() for clip in batch] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert batch[-1]["a"].tolist() == batch[1:][2]["a"].tolist() == [6, 7]
    assert isinstance(batch[0], dict)
    assert list(zip(*[clip.values() for clip in batch], strict=True))[1][0].tolist() == [1]


@pytest.mark.parametrize(
    "use",
    [
        lambda batch: list(batch),
        lambda batch: batch.copy(),
        lambda batch: batch[:],
        lambda batch: [*batch],
        lambda batch: batch.__add__([]),
        lambda batch: sorted(batch, key=lambda clip: clip["a"][0]),
        lambda batch: list(reversed(batch))[::-1],
        lambda batch: pickle.loads(pickle.dumps(batch)),
        copy.copy,
        copy.deepcopy,
        tuple,
        lambda batch: [batch.pop(0) for _ in range(4)],
        lambda batch: list(filter(None, batch)),
        lambda batch: [batch[i] for i in range(len(batch))],
    ],
)
def test_every_use_sees_all_clips(use):
    assert [clip["a"][0] for clip in use(batch_of())] == [0, 2, 4, 6]


def test_it_is_whole_until_it_is_changed():
    batch = batch_of()
    assert batch.whole
    batch[0]  # what default_collate looks at
    assert batch.whole
    batch[0]["a"] = np.zeros(2)
    assert not batch.whole
    other = batch_of()
    other.append(Clip(a=np.zeros(2), b=np.ones(1)))
    assert len(other) == 5
    assert not other.whole


def test_collated_it_is_what_default_collate_makes_of_plain_clips(buffer):
    ids = [0, 5, 3, 3]
    got = default_collate(buffer.__getitems__(ids))
    expected = default_collate([buffer[i] for i in ids])
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name].dtype == values.dtype
        assert torch.equal(got[name], values)


def test_a_changed_batch_is_collated_as_it_was_changed(buffer):
    clips = buffer.__getitems__([0, 1])
    for number, clip in enumerate(clips):
        clip["more"] = number
    assert default_collate(clips)["more"].tolist() == [0, 1]
    clips = buffer.__getitems__([0, 1])
    clips[0]["pixels"] = clips[0]["pixels"] * 0
    clips[1]["pixels"] = clips[1]["pixels"] * 0
    assert not default_collate(clips)["pixels"].any()


def test_inside_other_datasets(buffer):
    one = Subset(buffer, [4, 2, 9])
    assert len(prove(default_collate(one.__getitems__([0, 2])))) == 2
    two = ConcatDataset([buffer, buffer])
    assert prove(default_collate([two[1], two[len(buffer) + 1]]))[0] == prove(default_collate([buffer[1]]))[0]


def test_what_a_transform_returns_is_collated_as_ever(buffer):
    buffer.transform = lambda clip: {
        "sum": torch.tensor(float(clip["action"].sum())),
        "n": 3,
        "s": "x",
    }
    got = default_collate(buffer.__getitems__([0, 1]))
    assert got["sum"].shape == (2,)
    assert got["n"].tolist() == [3, 3]
    assert got["s"] == ["x", "x"]
    buffer.transform = lambda clip: (clip["place"], 1)
    assert default_collate(buffer.__getitems__([0, 1]))[0].shape == (2, 3, 2)


class Marked(torch.Tensor):
    """A tensor whose type means something to a collate function."""


def test_types_that_somebody_registered_are_collated_their_way(buffer):
    from torch.utils.data._utils.collate import collate, default_collate_fn_map

    buffer.transform = lambda clip: {
        "marked": torch.tensor(clip["action"]).as_subclass(Marked),
        "set": {clip["place"][0, 1]},
        "x": clip["place"],
    }
    mine = {
        Marked: lambda values, *, collate_fn_map=None: ("marked", len(values)),
        set: lambda values, *, collate_fn_map=None: sorted(int(v) for s in values for v in s),
    }
    clips = buffer.__getitems__([0, 1])
    got = collate(clips, collate_fn_map={**mine, **default_collate_fn_map})
    assert got["marked"] == ("marked", 2)
    assert got["set"] == [0, 1]
    assert got["x"].shape == (2, 3, 2)
