"""Text and dates in a `DataLoader` are a list of B, each of T, whatever is read."""

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import ReplayBuffer
from ringmap.data import ConcatDataset, GoalDataset, MergeDataset, Window, load_dataset

KINDS = {
    "ring": lambda buf, path: buf,
    "view": lambda buf, path: buf.view(),
    "file": lambda buf, path: load_dataset(path, num_steps=3),
    "arrays": lambda buf, path: load_dataset(path, num_steps=3, output="numpy"),
    "transform": lambda buf, path: load_dataset(path, num_steps=3, transform=dict),
    "selected": lambda buf, path: load_dataset(path, num_steps=3, where="length > 0"),
    "concat of rings": lambda buf, path: ConcatDataset([buf]),
    "concat": lambda buf, path: ConcatDataset([load_dataset(path, num_steps=3)]),
    "merge of rings": lambda buf, path: MergeDataset([buf, buf]),
    "goals": lambda buf, path: GoalDataset(load_dataset(path, num_steps=3), goal_keys={"x": "goal"}),
}


@pytest.fixture
def stored(tmp_path):
    with ReplayBuffer(100, 3, path=tmp_path / "ring", seed=0) as buf:
        for n in range(2):
            text = [f"{n}{t}" for t in range(5)]
            date = np.arange(5).astype("M8[s]")
            buf.write_episode({"x": np.arange(5), "text": text, "bytes": np.array(text, "S"), "date": date})
        buf.dump(tmp_path / "a.h5", progress=False)
        yield buf, tmp_path / "a.h5"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_text_is_a_list_of_batch_size(stored, kind, workers):
    dataset = KINDS[kind](*stored)
    batch = next(iter(DataLoader(dataset, batch_size=2, num_workers=workers)))
    assert batch["x"].shape == (2, 3)
    assert batch["text"] == [["00", "01", "02"], ["01", "02", "03"]]
    assert batch["bytes"] == [[b"00", b"01", b"02"], [b"01", b"02", b"03"]]
    assert [[d.second for d in dates] for dates in batch["date"]] == [[0, 1, 2], [1, 2, 3]]
    if "goals" in kind:
        return
    for window, text in (
        ({"text": Window([0, 1])}, [["00", "01"], ["01", "02"]]),
        ({"x": Window([0, 1])}, ["00", "01"]),
    ):
        batch = next(iter(DataLoader(dataset.view(window), batch_size=2, num_workers=workers)))
        assert batch["text"] == text
        assert len(batch["date"]) == 2
