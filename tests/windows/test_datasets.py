"""Windows over datasets: every format, and what is made of several, against the plain model."""

import logging
import pickle

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips import cut as cut_module
from ringmap.data import (
    ConcatDataset,
    GoalDataset,
    Hindsight,
    Index,
    MergeDataset,
    NStep,
    ReturnToGo,
    Sequences,
    TimeToEnd,
    Window,
    get_format,
    load_dataset,
)
from ringmap.datasets.base import Dataset
from ringmap.errors import ClipIndexError, InputError
from tests.windows import model
from tests.windows.test_property import (
    blank_action,
    inverted,
    one_after,
    one_before,
    one_early,
    one_late,
    random_request,
    slipped_reward,
)

FORMATS = {
    "hdf5": "demo.h5", "zarr": "demo.zarr", "folder": "demo", "video": "films", "lance": "demo.lance", "ringmap": "ring",
}  # fmt: skip


def written(path, format, episodes):
    """Write episodes at a path in a format."""
    if format == "ringmap":
        with ReplayBuffer(sum(len(e["where"]) for e in episodes), path=path) as buf:
            for episode in episodes:
                buf.write_episode(episode)
        return
    with get_format(format).open_writer(path) as writer:
        for episode in episodes:
            writer.write_episode(episode)


class Plain(Dataset):
    """A dataset that supplies no more than it must."""

    def __init__(self, episodes):
        lengths = np.array([len(e["where"]) for e in episodes])
        super().__init__(lengths, np.cumsum(lengths) - lengths)
        self.episodes = episodes

    @property
    def column_names(self):
        return list(self.episodes[0])

    def _load_slice(self, ep, start, end):
        return {name: values[start:end] for name, values in self.episodes[ep].items()}


def check_case(open_dataset, kept, number, count=8):
    """Compare one random request over a dataset with the model; return how many items were compared."""
    rng = np.random.default_rng([number, 110])
    request = random_request(rng)
    reward_at = [None, "next", "same"][rng.integers(3)]
    view = open_dataset(request, reward_at)
    how = (request["window"], request["anchors"], request["drop_all_padded"], reward_at)
    expected = [(i, t) for i, e in enumerate(kept) for t in model.anchors(len(e["where"]), *how)]
    assert list(view.clip_indices) == expected, request
    assert len(view) == len(expected)
    if not expected:
        with pytest.raises(ClipIndexError):
            view[0]
        return 0
    ids = rng.integers(0, len(expected), count).tolist()
    items = [*view.__getitems__(ids), view[ids[0]]]
    for got, (ep, t) in zip(items, [expected[i] for i in [*ids, ids[0]]], strict=True):
        model.same(got, model.item(kept[ep], t, request["window"], reward_at, request["columns"]))
    return count


def episodes_of(seed, most=12):
    rng = np.random.default_rng(seed)
    return [model.episode(ep, int(rng.integers(1, 16))) for ep in range(most)]


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("format", FORMATS)
def test_windows_over_every_format_are_those_of_the_plain_loop(home, format, output):
    """60 random windows over each format."""
    kept, path = episodes_of(3), home / FORMATS[format]
    written(path, format, kept)

    def opened(request, reward_at):
        return load_dataset(path, output=output, reward_at=reward_at, **request)

    assert sum(check_case(opened, kept, n) for n in range(60 if output == "numpy" else 10)) > 40


@pytest.mark.campaign
@pytest.mark.parametrize("format", FORMATS)
def test_ten_thousand_random_windows_over_formats(home, format):
    """The same, many times over."""
    for seed in range(20):
        kept, path = episodes_of(seed), home / str(seed) / FORMATS[format]
        path.parent.mkdir()
        written(path, format, kept)

        def opened(request, reward_at, path=path):
            return load_dataset(path, output="numpy", reward_at=reward_at, **request)

        assert sum(check_case(opened, kept, 100 * seed + n) for n in range(85)) > 100


def joined(kind, home, kept):
    """Return a function that opens a dataset of this kind over these episodes."""
    written(home / "all.h5", "hdf5", kept)
    whole = load_dataset(home / "all.h5", output="numpy")
    if kind == "plain":
        made = Plain(kept)
    elif kind == "cached":
        made = load_dataset(home / "all.h5", output="numpy", keys_to_cache=["reward", "where"])
    elif kind == "merge":
        written(home / "b.h5", "hdf5", [{n: e[n] for n in ("where", "flag")} for e in kept])
        other = load_dataset(home / "b.h5", output="numpy")
        made = MergeDataset([whole, other], [["reward", "action"], ["where", "flag"]])
    elif kind == "concat":
        buf = ReplayBuffer(200)
        for episode in kept[9:]:
            buf.write_episode(episode)
        written(home / "a.h5", "hdf5", kept[:5])
        first = load_dataset(home / "a.h5", output="numpy")
        made = ConcatDataset([first, Plain(kept[5:9]), buf])
    else:
        made = GoalDataset(whole, (1, 0, 0, 0), goal_keys={}, seed=0)

    def opened(request, reward_at):
        for part in (made, getattr(made, "dataset", made)):
            part.reward_at = reward_at
        return made.view(**request)

    return opened


@pytest.mark.parametrize("kind", ["plain", "cached", "merge", "concat", "goal"])
def test_windows_over_joined_datasets_are_those_of_the_plain_loop(home, kind):
    kept = episodes_of(5)
    opened = joined(kind, home, kept)
    assert sum(check_case(opened, kept, n) for n in range(40)) > 100


@pytest.mark.parametrize(
    "fault", [one_early, one_late, one_before, one_after, inverted, slipped_reward, blank_action]
)
def test_control_a_planted_fault_is_found(home, monkeypatch, fault):
    """An end that is off by one, an inverted mask, a blank that counts as a value: over a file, too."""
    kept = episodes_of(3)
    opened = joined("goal", home, kept)
    right = cut_module.clamp
    monkeypatch.setattr(
        cut_module, "clamp",
        lambda wanted, starts, lengths, first=0, last=0: fault(right, wanted, starts, lengths, first, last),
    )  # fmt: skip
    with pytest.raises((AssertionError, IndexError)):
        for number in range(60):
            check_case(opened, kept, number)
