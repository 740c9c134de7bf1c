"""The conformance suite of a dataset: inherit it, say how to open one, and pytest does the rest.

    class TestMine(DatasetTests):
        def open(self, tmp_path, episodes, **options):
            ...store `episodes` below tmp_path, and return the dataset...

Every step carries the numbers of its episode and of itself, so that a clip proves itself.
Not here: writing (`ringmap.testing.formats`).
"""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ringmap.datasets.base import Dataset
from ringmap.errors import RoleError

__all__ = ["DatasetTests", "Episode", "make_episode", "make_episodes"]

Array = np.ndarray[Any, np.dtype[Any]]
Episode = dict[str, Any]

LENGTHS = (5, 1, 9, 2, 7)


def make_episode(number: int, length: int) -> Episode:
    """Return an episode whose every step says which it is.

    Shapes: `where` (T, 2) int64 holds (episode, step), `action` (T, 2) float32 the same, `reward`
    (T,) float64 `episode + step / 1000`, `pixels` (T, 12, 10, 3) uint8 a smooth picture of its own.
    """
    where = np.stack([np.full(length, number), np.arange(length)], axis=1)
    row, col = np.mgrid[0:12, 0:10]
    phase = (13 * number + 3 * np.arange(length))[:, None, None] / 20
    shade = 128 + 60 * np.sin((row + col) / 8 + phase)
    return {
        "pixels": np.stack([shade, shade / 2 + 90, 255 - shade], axis=-1).astype(np.uint8),
        "action": where.astype(np.float32),
        "reward": number + np.arange(length) / 1000,
        "where": where,
    }


def make_episodes(lengths: tuple[int, ...] = LENGTHS) -> list[Episode]:
    """Return one episode per length."""
    return [make_episode(number, length) for number, length in enumerate(lengths)]


class DatasetTests:
    """What every dataset owes. Subclass it and define `open`."""

    mean_error = 0.0
    """How far off `pixels` may come back on average, in units of 255 (JPEG, H.264); 0: not at all."""
    survives_forks: ClassVar[bool] = True
    """Whether a forked process can read, and write, after its parent did; where not, its reads raise RoleError."""
    is_live: ClassVar[bool] = False
    """Whether it is a ring, or over one: a batch may replace ids that are not there, and `transform` sees items alone,
    with their actions folded."""
    adds: ClassVar[frozenset[str]] = frozenset()
    """Columns of an item that the episodes do not have."""

    def open(self, tmp_path: Path, episodes: list[Episode], **options: Any) -> Dataset:
        """Return a dataset of these episodes (images as given: (T, H, W, C))."""
        raise NotImplementedError

    def check_images(self, got: Any, stored: Array) -> None:
        """Assert that handed-out images, (T, C, H, W), are those that were stored."""
        images = np.asarray(got)
        assert images.dtype == np.uint8
        turned = stored.transpose(0, 3, 1, 2)
        assert images.shape == turned.shape
        if not self.mean_error:
            assert np.array_equal(images, turned)
        elif images.size:
            assert np.abs(images.astype(float) - turned).mean() <= self.mean_error

    # -- the episode table -------------------------------------------------------------------

    def test_table(self, tmp_path: Path) -> None:
        """Lengths, offsets and column names are those of the episodes."""
        dataset = self.open(tmp_path, make_episodes())
        assert dataset.lengths.tolist() == list(LENGTHS)
        assert dataset.offsets.tolist() == [0, 5, 6, 15, 17]
        assert sorted(dataset.column_names) == ["action", "pixels", "reward", "where"]
        assert "episodes" in repr(dataset)

    def test_column_names_are_the_callers_own(self, tmp_path: Path) -> None:
        """Changing the returned list changes nothing."""
        dataset = self.open(tmp_path, make_episodes())
        dataset.column_names.clear()
        assert len(dataset.column_names) == 4

    # -- clips -------------------------------------------------------------------------------

    @pytest.mark.parametrize(("num_steps", "frameskip"), [(1, 1), (3, 1), (2, 3), (1, 2), (10, 1)])
    def test_clips(self, tmp_path: Path, num_steps: int, frameskip: int) -> None:
        """Each clip lies in one episode; observations are strided, actions dense and folded."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=num_steps, frameskip=frameskip)
        span = num_steps * frameskip
        pairs = [(e, s) for e, n in enumerate(LENGTHS) for s in range(n - span + 1)]
        assert dataset.span == span
        assert list(dataset.clip_indices) == pairs
        assert len(dataset) == len(pairs)
        for clip, (episode, start) in zip(dataset.__getitems__(list(range(len(pairs)))), pairs, strict=True):
            stored = make_episode(episode, LENGTHS[episode])
            rows = slice(start, start + span, frameskip)
            dense = stored["action"][start : start + span].reshape(num_steps, -1)
            assert set(clip) == set(stored) | self.adds
            assert np.array_equal(clip["where"], stored["where"][rows])
            assert np.array_equal(clip["reward"], stored["reward"][rows])
            assert np.array_equal(clip["action"], dense)
            self.check_images(clip["pixels"], stored["pixels"][rows])

    def test_one_clip_is_a_batch_of_one(self, tmp_path: Path) -> None:
        """`ds[i]` equals `ds.__getitems__([..., i, ...])`, in any order, with repeats."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=2)
        ids = [7, 0, 7, len(dataset) - 1, -1]
        for one, many in zip([dataset[i] for i in ids], dataset.__getitems__(ids), strict=True):
            assert set(one) == set(many)
            assert all(np.array_equal(one[name], many[name]) for name in one)
        assert dataset.__getitems__([]) == []

    def test_index_kinds(self, tmp_path: Path) -> None:
        """NumPy integers are ids too; negative ids count from the end."""
        dataset = self.open(tmp_path, make_episodes())
        assert np.array_equal(dataset[-1]["where"], [[4, 6]])
        assert np.array_equal(dataset[int(np.int64(2))]["where"], dataset[np.int64(2)]["where"])

    def test_clips_are_copies(self, tmp_path: Path) -> None:
        """Writing into one clip changes neither another nor the next read."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=2)
        first, second = dataset.__getitems__([0, 1])
        first["where"][:] = -1
        assert np.array_equal(second["where"], [[0, 1], [0, 2]])
        assert np.array_equal(dataset[0]["where"], [[0, 0], [0, 1]])

    @pytest.mark.parametrize("index", [24, -25, 10**6])
    def test_clip_out_of_range(self, tmp_path: Path, index: int) -> None:
        """An id beyond the clips is an IndexError, alone and in a batch; a ring, which may have evicted it, may replace
        it in a batch."""
        dataset = self.open(tmp_path, make_episodes())
        assert len(dataset) == 24
        with pytest.raises(IndexError, match="out of range"):
            dataset[index]
        if not self.is_live:
            with pytest.raises(IndexError, match="out of range"):
                dataset.__getitems__([0, index])
            return
        with contextlib.suppress(IndexError):
            first, other = dataset.__getitems__([0, index])
            assert np.array_equal(first["where"], [[0, 0]])
            assert tuple(np.asarray(other["where"])[0].tolist()) in set(dataset.clip_indices)

    def test_no_clips(self, tmp_path: Path) -> None:
        """A dataset whose episodes are all too short is empty, and says so."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=50)
        assert len(dataset) == 0
        assert list(dataset.clip_indices) == []
        with pytest.raises(IndexError, match="empty"):
            dataset[0]

    @pytest.mark.parametrize("option", ["num_steps", "frameskip"])
    def test_sizes_are_positive(self, tmp_path: Path, option: str) -> None:
        """Zero steps or frames are refused."""
        with pytest.raises(ValueError, match="must be positive"):
            self.open(tmp_path, make_episodes(), **{option: 0})

    def test_transform(self, tmp_path: Path) -> None:
        """It sees every clip and episode, with actions still unfolded; of a ring every clip alone, as it is
        returned."""

        def mark(steps: Episode) -> Episode:
            assert steps["action"].ndim == 2
            assert steps["action"].shape[1] == (4 if self.is_live else 2)
            return {"where": steps["where"] + 100, "action": steps["action"]}

        dataset = self.open(tmp_path, make_episodes(), num_steps=2, frameskip=2, transform=mark)
        assert set(dataset[0]) == {"where", "action"} | self.adds
        assert np.array_equal(dataset[0]["where"], [[100, 100], [100, 102]])
        assert dataset[0]["action"].shape == (2, 4)
        first = 1 if self.is_live else 101
        assert np.array_equal(dataset.load_episode(1)["where"], [[first, first - 1]])

    # -- episodes ----------------------------------------------------------------------------

    def test_load_episode(self, tmp_path: Path) -> None:
        """It is whole and dense whatever the clip settings, in any order, from the end too."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=2, frameskip=3)
        for number in (4, 0, 2, -1):
            stored = make_episodes()[number]
            got = dataset.load_episode(number)
            assert all(np.array_equal(got[n], stored[n]) for n in ("where", "action", "reward"))
            assert np.asarray(got["reward"]).dtype == np.float64
            self.check_images(got["pixels"], stored["pixels"])
        for number in (5, -6):
            with pytest.raises(IndexError):
                dataset.load_episode(number)

    def test_load_chunk(self, tmp_path: Path) -> None:
        """Chunks are dense; their actions are folded by frameskip; an empty one is fine."""
        dataset = self.open(tmp_path, make_episodes(), frameskip=2)
        chunks = dataset.load_chunk(np.array([2, 0, 3]), np.array([1, 0, 1]), np.array([7, 2, 1]))
        assert [np.asarray(c["where"]).tolist() for c in chunks] == [
            [[2, t] for t in range(1, 7)],
            [[0, 0], [0, 1]],
            [],
        ]
        assert [tuple(c["action"].shape) for c in chunks] == [(3, 4), (1, 4), (0, 0)]
        with pytest.raises(IndexError):
            dataset.load_chunk([0], [0], [6])
        with pytest.raises(IndexError):
            dataset.load_chunk([0], [-2], [2])
        with pytest.raises(ValueError, match="frameskip"):
            dataset.load_chunk([0], [0], [3])

    def test_episode_data(self, tmp_path: Path) -> None:
        """Without any, there are no names; a wrong number is an IndexError all the same."""
        dataset = self.open(tmp_path, make_episodes())
        assert dataset.episode_column_names == []
        assert dataset.get_episode_data() == {}
        assert dataset.get_episode_data([0, 0, -1]) == {}
        with pytest.raises(IndexError):
            dataset.get_episode_data([5])

    # -- columns and rows --------------------------------------------------------------------

    def test_columns(self, tmp_path: Path) -> None:
        """A whole column is an array in stored order."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=2)
        episodes = make_episodes()
        for name in ("where", "action", "reward", "pixels"):
            stored = np.concatenate([episode[name] for episode in episodes])
            column = dataset.get_col_data(name)
            assert isinstance(column, np.ndarray)
            assert column.dtype == stored.dtype
            assert column.shape == stored.shape
            if name != "pixels" or not self.mean_error:
                assert np.array_equal(column, stored)
        assert [dataset.get_dim(n) for n in ("where", "reward", "pixels")] == [2, 1, 360]
        with pytest.raises(KeyError, match="nothing"):
            dataset.get_col_data("nothing")
        with pytest.raises(KeyError, match="nothing"):
            dataset.get_dim("nothing")

    def test_rows(self, tmp_path: Path) -> None:
        """Rows come in the order asked for, repeats and negative ones included."""
        dataset = self.open(tmp_path, make_episodes())
        rows = dataset.get_row_data([16, 0, 5, 5, -1])
        assert rows["where"].tolist() == [[3, 1], [0, 0], [1, 0], [1, 0], [4, 6]]
        assert rows["pixels"].shape == (5, 12, 10, 3)
        one = dataset.get_row_data(6)
        assert one["where"].tolist() == [2, 0]
        assert one["reward"] == 2.0
        for wrong in (24, [-25]):
            with pytest.raises(IndexError):
                dataset.get_row_data(wrong)

    # -- processes ---------------------------------------------------------------------------

    def test_pickle(self, tmp_path: Path) -> None:
        """A copy reads the same, before and after the original has read."""
        dataset = self.open(tmp_path, make_episodes(), num_steps=2)
        for _ in range(2):
            copy = pickle.loads(pickle.dumps(dataset))
            assert np.array_equal(copy[3]["where"], dataset[3]["where"])
            assert len(copy) == len(dataset)

    @pytest.mark.parametrize("start", ["fork", "forkserver"])
    def test_data_loader(self, tmp_path: Path, start: str) -> None:
        """Workers, forked and started anew, return every clip once, in order; what survives no fork refuses it."""
        from torch.utils.data import DataLoader

        dataset = self.open(tmp_path, make_episodes(), num_steps=2)
        _ = dataset[0]  # the parent's handle is open when the workers start
        loader: Any = DataLoader(
            dataset,
            batch_size=4,
            num_workers=2 if start == "fork" else 1,
            multiprocessing_context=start,
        )
        if start == "fork" and not self.survives_forks:
            with pytest.raises(RoleError):  # not a worker that hangs or crashes
                list(loader)
            return
        got = np.concatenate([np.asarray(batch["where"]) for batch in loader])
        pairs = np.array(list(dataset.clip_indices))
        assert np.array_equal(got[:, 0], pairs)
        assert np.array_equal(got[:, 1], pairs + np.array([0, 1]))
