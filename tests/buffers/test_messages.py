"""What a call that goes wrong says: where, what, expected and got, and what to do."""

import logging
import pickle

import numpy as np
import pytest
from torch.utils.data import DataLoader

from ringmap import ReplayBuffer
from ringmap.data import load_dataset
from ringmap.errors import ClipIndexError, NoClipsError


def episode(steps):
    return {"obs": np.zeros((steps, 2), np.float32), "action": np.zeros((steps, 1), np.float32)}


# -- episodes that are too short -----------------------------------------------------------------

TOO_SHORT = (
    r"no clip of 16 steps \(history_len=8 \* frameskip=2\) fits: the longest stored episode \(of 3\) has 7 steps; "
    "choose history_len=3 or less, or collect longer episodes"
)


@pytest.fixture
def short():
    buf = ReplayBuffer(1000, history_len=8, frameskip=2, seed=0)
    buf.write_episodes(map(episode, (5, 7, 3)))
    return buf


def test_too_short_episodes_name_the_longest_and_what_would_fit(short):
    uniform = lambda step, buf, size, history: np.zeros(size, np.int64)  # noqa: E731
    own = ReplayBuffer(1000, 8, 2, uniform)
    own.write_episodes(map(episode, (5, 7, 3)))
    for call in (
        lambda: short.sample(4),
        lambda: own.sample(4),
        lambda: next(iter(short.batches(4, prefetch=0))),
    ):
        with pytest.raises(NoClipsError, match=f"^ReplayBuffer.sample: {TOO_SHORT}$"):
            call()
    with pytest.raises(
        NoClipsError, match=r"^RAM: no clip of 16 steps .* choose a smaller history_len"
    ):
        short.__getitems__([0])
    with pytest.raises(ClipIndexError, match=f"^ReplayBuffer: empty: {TOO_SHORT}$"):
        short[0]
    with pytest.raises(ClipIndexError, match=f"^BufferView: empty: {TOO_SHORT}$"):
        short.view()[0]
    with pytest.raises(NoClipsError, match=r"history_len=9 \* .* choose history_len=3 or less"):
        short.sample(4, history_len=9)


def test_what_is_suggested_fits(short):
    assert short.sample(4, history_len=3)["obs"].shape == (4, 3, 2)
    wide = ReplayBuffer(1000, history_len=2, frameskip=9)
    wide.write_episode(episode(7))
    with pytest.raises(NoClipsError, match="choose frameskip=7 or less"):
        wide.sample(1)


def test_an_empty_buffer_says_to_collect(short):
    short.clear()
    with pytest.raises(NoClipsError, match=r"\(0 episodes\); collect more first"):
        short.sample(4)


def test_a_shuffling_loader_over_too_short_episodes_says_so_once_in_the_log(
    short, caplog, tmp_path
):
    short.dump(tmp_path / "short.h5", "hdf5", progress=False)
    for dataset, option in (
        (short, "history_len"), (short.view(), "history_len"),
        (load_dataset(tmp_path / "short.h5", num_steps=8, frameskip=2), "num_steps"),
    ):  # fmt: skip
        caplog.clear()
        for _ in range(2):
            with pytest.raises(ValueError, match="num_samples=0"):  # PyTorch's
                DataLoader(dataset, shuffle=True)
        (line,) = caplog.records
        assert line.levelno == logging.WARNING
        assert line.name == "ringmap"
        assert f"len() is 0: no clip of 16 steps ({option}=8" in line.getMessage()
        assert "has 7 steps" in line.getMessage()


def test_the_length_of_what_has_no_episodes_is_0_without_a_word(caplog):
    buf = ReplayBuffer(1000, history_len=8)
    assert len(buf) == 0
    assert not caplog.records
    buf.write_episode(episode(8))
    assert len(pickle.loads(pickle.dumps(buf))) == 1
    assert not caplog.records
