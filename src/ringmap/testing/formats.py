"""The conformance suite of a format: inherit it, name the format, and pytest does the rest.

    class TestMine(FormatTests):
        name = "mine"
        suffix = ".mine"

It inherits `DatasetTests`: what a format has written must be a dataset like any other.
Not here: registration, errors of one format alone.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ringmap.buffers.replay import ReplayBuffer
from ringmap.datasets.base import Dataset
from ringmap.datasets.episode import stored_layout
from ringmap.errors import ReplacedError
from ringmap.formats.base import EPISODE_DATA_KEY, Format, Writer
from ringmap.formats.catalog.convert import convert
from ringmap.formats.registry import detect_format, get_format
from ringmap.testing.datasets import DatasetTests, Episode, make_episode, make_episodes
from ringmap.testing.kills import Outcome, killed_after, reason_why_not

__all__ = ["FormatTests"]

Array = np.ndarray[Any, np.dtype[Any]]

NAMES = (
    "plain",
    "obs/pixels",
    "..",
    ".",
    "état",
    "a b%2F",
    "x" * 300,
    "ep_len",
    "ep_offset",
    "\n",
    "a\\b",
)

VALUES: dict[str, Array] = {
    "bool": np.array([True, False, True]),
    "int8": np.array([-128, 0, 127], np.int8),
    "int64": np.array([-(2**63), 2**53 + 1, 2**63 - 1], np.int64),
    "uint16": np.array([0, 1, 2**16 - 1], np.uint16),
    "uint64": np.array([0, 2**53 + 1, 2**64 - 1], np.uint64),
    "float16": np.array([np.nan, -np.inf, 6.1e-5], np.float16),
    "float32": np.array([np.nan, np.inf, 1e-45], np.float32),
    "float64": np.array([np.nan, -0.0, 5e-324], np.float64),
    "complex64": np.array([1 + 2j, complex(np.nan, 1), -0.0], np.complex64),
    "complex128": np.array([1 + 2j, np.inf, 1e308j], np.complex128),
    "text": np.array(["", "naïve 🙂", "a\0b"], "U9"),
    "text of surrogates": np.array(["\ud800x", "\ufdd0y", "\\n\n"], "U4"),
    "bytes": np.array([b"", b"\xff\0\xfe", b"abc"], "S5"),
    "date": np.array(["2024-02-29T12:00:00.000001", "NaT", "1677-10-01"], "M8[ns]"),
    "duration": np.array([1, -(2**62), 0], "m8[us]"),
    "matrix": np.arange(36, dtype=np.float32).reshape(3, 3, 4),
    "four axes of float": np.arange(36, dtype=np.float32).reshape(3, 2, 2, 3),
    "nothing": np.zeros((3, 0, 2), np.float32),
    "scalar in a box": np.arange(3).reshape(3, 1),
    "grey image": np.arange(90, dtype=np.uint8).reshape(3, 6, 5, 1),
    "depth image": np.arange(90, dtype=np.uint16).reshape(3, 6, 5, 1) * 700,
    "clear image": (np.arange(360) % 256).astype(np.uint8).reshape(3, 6, 5, 4),
    "odd image": np.random.default_rng(0).integers(0, 255, (3, 97, 61, 3), np.uint8),
}
"""One array of three steps per dtype and shape that a buffer can hold."""

_MISFITS: list[tuple[Episode, str]] = [
    ({"reward": None}, "reward"),
    ({"extra": np.zeros(4)}, "extra"),
    ({"action": np.zeros((4, 3), np.float32)}, "action"),
    ({"reward": np.zeros(1)}, "reward"),
    ({"reward": 1.0}, "scalar"),
    ({"reward": np.array(["a"] * 4)}, "reward"),
    ({"action": np.full((4, 2), 0.1)}, "action"),
    ({"where": np.full((4, 2), 0.5)}, "where"),
    ({"where": [[1, 2], [3], [4], [5]]}, "where"),
    ({"where": [object()] * 4}, "where"),
]
"""Changes of an episode that do not fit the ones before it, and what their refusal names."""


class FormatTests(DatasetTests):
    """What every format owes. Subclass it, set `name` and `suffix`, and whatever does not hold."""

    name: ClassVar[str]
    """The name of the registered format."""
    suffix: ClassVar[str]
    """The end of the path of a dataset, by which the format knows it; "" for none."""
    writer_options: ClassVar[dict[str, Any]] = {}
    """Options of the writer."""
    values: ClassVar[dict[str, Array]] = VALUES
    """A column of three steps for each kind of value that the format holds: a part of what a buffer can."""
    names: ClassVar[tuple[str, ...]] = NAMES
    """Names that a column may have."""
    keeps_facts: ClassVar[bool] = True
    """Whether a dataset says its rate, and where its rewards stand, if its source did."""
    at_risk: ClassVar[int] = 0
    """How many of the newest episodes a kill may cost: 0, or the bound that the docs name."""

    kill_places: ClassVar[int] = 4
    """Before how many system calls that change a file the default tests kill a writer, evenly."""
    reading_changes: ClassVar[bool] = False
    """Whether a reader finishes what a killed writer left, and so has to be allowed to write."""

    @property
    def format(self) -> type[Format]:
        """The format under test."""
        return get_format(self.name)

    def path(self, folder: Path) -> Path:
        """Return where a dataset goes."""
        return folder / f"made{self.suffix}"

    def write(self, path: Path, episodes: Iterable[Episode], **options: Any) -> Path:
        """Write episodes in one block."""
        with self.format.open_writer(path, **{**self.writer_options, **options}) as writer:
            for episode in episodes:
                writer.write_episode(episode)
        return path

    def open(self, tmp_path: Path, episodes: list[Episode], **options: Any) -> Dataset:
        """Write these episodes, and open them."""
        return self.read(self.write(self.path(tmp_path), episodes), **options)

    def read(self, path: Path, **options: Any) -> Dataset:
        """Open a dataset, as `load_dataset` does."""
        dataset: Dataset = self.format.open_dataset(path, **options)
        return dataset

    def check(self, path: Path, episodes: list[Episode]) -> None:
        """Assert that exactly these episodes are at a path."""
        dataset = self.read(path)
        assert dataset.lengths.tolist() == [len(e["where"]) for e in episodes]
        for number, stored in enumerate(episodes):
            got = dataset.load_episode(number)
            assert np.array_equal(got["where"], stored["where"])
            assert np.array_equal(got["action"], stored["action"])
            self.check_images(got["pixels"], stored["pixels"])
        _close(dataset)

    # -- contract ----------------------------------------------------------------------------

    def test_protocol(self, tmp_path: Path) -> None:
        """The writer is a `Writer`, the path is detected, nothing else is left beside it."""
        path = self.path(tmp_path)
        assert isinstance(self.format.open_writer(path), Writer)
        self.write(path, make_episodes())
        assert detect_format(path) is self.format
        assert os.listdir(tmp_path) == [path.name]

    def test_outside_of_a_block(self, tmp_path: Path) -> None:
        """Writing before and after the block is refused."""
        writer = self.format.open_writer(self.path(tmp_path), **self.writer_options)
        with pytest.raises(RuntimeError, match="outside of a `with` block"):
            writer.write_episode(make_episode(0, 3))
        with writer:
            writer.write_episode(make_episode(0, 3))
        with pytest.raises(RuntimeError, match="outside of a `with` block"):
            writer.write_episode(make_episode(0, 3))

    # -- lossless ----------------------------------------------------------------------------

    def test_values_come_back(self, tmp_path: Path) -> None:
        """Each dtype and shape comes back equal, dtype and all, and is written again as it was."""
        for kind, rows in self.values.items():
            print(kind)  # where this fails, the last one is at fault
            folder = tmp_path / kind
            folder.mkdir()
            if self.mean_error and "image" in kind:
                self._only_the_shape_comes_back(folder, rows)
            else:
                turned = "image" in kind  # nothing else looks otherwise in another layout
                self._rows_come_back(folder, rows, ("CHW", "HWC") if turned else ("CHW",))

    def _rows_come_back(self, tmp_path: Path, rows: Array, layouts: tuple[str, ...]) -> None:
        path = self.write(
            self.path(tmp_path), [{"x": rows, "where": np.zeros((3, 2))}, {"x": rows[:1], "where": np.zeros((1, 2))}]
        )
        for layout in layouts:
            dataset = self.read(path, layout=layout)
            episode = dataset.load_episode(0)
            _same(np.asarray(stored_layout(episode)["x"]), rows)
            _same(dataset.get_col_data("x"), np.concatenate([rows, rows[:1]]))
            _close(dataset)
            again = self.write(tmp_path / f"{layout}{self.suffix}", [episode])
            copy = self.read(again)
            _same(copy.get_col_data("x"), rows)
            _close(copy)

    def _only_the_shape_comes_back(self, tmp_path: Path, rows: Array) -> None:
        dataset = self.read(self.write(self.path(tmp_path), [{"x": rows}]), layout="HWC")
        got = np.asarray(dataset.load_episode(0)["x"])
        assert got.dtype == rows.dtype
        assert got.shape == rows.shape

    def test_text_of_any_length(self, tmp_path: Path) -> None:
        """No episode says how long text may be: a later one has longer text, also in a later session, and where texts
        are in rows of several."""
        if "text" not in self.values:
            return
        texts = [[""], ["é", "a" * 300], ["b", "\0inner"], ["c" * 5000]]
        episodes = [
            {
                "task": text,
                "both": [["x", word] for word in text],
                "where": np.zeros((len(text), 2)),
            }
            for text in texts
        ]
        path = self.write(self.path(tmp_path), episodes[:2])
        for episode in episodes[2:]:
            self.write(path, [episode], mode="append")
        dataset = self.read(path)
        for number, episode in enumerate(episodes):
            got = dataset.load_episode(number)
            assert np.asarray(got["task"]).tolist() == episode["task"]
            assert np.asarray(got["both"]).tolist() == episode["both"]
        words = [word for text in texts for word in text]
        assert dataset.get_col_data("task").tolist() == words
        assert dataset.get_row_data([5, 0, 2])["task"].tolist() == [words[5], "", words[2]]
        _close(dataset)

    def test_names_come_back(self, tmp_path: Path) -> None:
        """Any string is a column name, order included; nothing is written outside the dataset."""
        home = tmp_path / "a" / "b"
        home.mkdir(parents=True)
        episode = {name: np.full(3, i) for i, name in enumerate(self.names)}
        dataset = self.read(self.write(self.path(home), [episode]))
        assert dataset.column_names == list(self.names)
        got = dataset.load_episode(0)
        assert all(np.array_equal(got[name], episode[name]) for name in episode)
        assert os.listdir(tmp_path) == ["a"]
        assert os.listdir(tmp_path / "a") == ["b"]
        assert os.listdir(home) == [self.path(home).name]

    def test_lists_and_tensors(self, tmp_path: Path) -> None:
        """Per-step lists, arrays and tensors are written alike."""
        import torch

        bulk = make_episode(0, 4)
        lists = {name: list(rows) for name, rows in make_episode(1, 4).items()}
        tensors = {name: torch.from_numpy(rows) for name, rows in make_episode(2, 4).items()}
        path = self.write(self.path(tmp_path), [bulk, lists, tensors])
        self.check(path, [make_episode(i, 4) for i in range(3)])

    def test_images_are_turned(self, tmp_path: Path) -> None:
        """Channels come first, unless asked otherwise, in clips and episodes; nothing else is turned."""
        floats = np.arange(36, dtype=np.float32).reshape(3, 2, 2, 3)
        path = self.write(self.path(tmp_path), [make_episode(0, 3) | {"floats": floats}])
        first, stored = self.read(path), self.read(path, layout="HWC")
        assert tuple(first[0]["pixels"].shape) == (1, 3, 12, 10)
        assert tuple(stored[0]["pixels"].shape) == (1, 12, 10, 3)
        assert tuple(stored.load_episode(0)["pixels"].shape) == (3, 12, 10, 3)
        assert np.array_equal(first.load_episode(0)["floats"], floats)
        with pytest.raises(ValueError, match="layout"):
            self.read(path, layout="WHC")

    def test_episode_data(self, tmp_path: Path) -> None:
        """Episode data comes back, type and all; None where an episode has none."""
        super().test_episode_data(tmp_path / "none")
        if not self.format.supports_episode_data:
            return
        data: dict[str, Any] = {
            "seed": 2**70,
            "name": "ünï\0",
            "blob": b"\0\xff" * 50_000,
            "ratio": -0.1,
            "flag": True,
            "none": None,
            "goal": np.arange(12, dtype=np.float16).reshape(3, 4),
            "scalar": np.float32(0.1),
        }
        episodes = make_episodes((2, 3, 1))
        episodes[1][EPISODE_DATA_KEY] = data
        episodes[2][EPISODE_DATA_KEY] = {"late": 1, "seed": 5}
        dataset = self.open(tmp_path, episodes)
        assert "_episode_data" not in dataset.column_names
        assert dataset.episode_column_names == [*data, "late"]
        got = dataset.get_episode_data([1, 0, 2, 1])
        assert got["seed"] == [2**70, None, 5, 2**70]
        assert got["late"] == [None, None, 1, None]
        for name, value in data.items():
            assert type(got[name][0]) is type(value)
            assert np.array_equal(got[name][3], value)
        assert got["goal"][0].dtype == np.float16
        assert dataset.get_episode_data(-1)["seed"] == [5]

    def test_facts_and_origins(self, tmp_path: Path) -> None:
        """A copy has the rate, where rewards stand and, with data of episodes, which episodes these are."""
        buffer = ReplayBuffer(max_steps=20, fps=10, reward_at="same")
        for episode in make_episodes((3, 4)):
            buffer.write_episode(episode)
        path = self.path(tmp_path)
        buffer.dump(path, self.name, progress=False, **self.writer_options)
        dataset = self.read(path)
        if self.keeps_facts:
            assert (dataset.fps, dataset.reward_at) == (10, "same")
        if self.format.supports_episode_data:
            assert not [name for name in dataset.episode_column_names if name.startswith("_")]
            for got, given in zip(dataset.origins(), buffer.origins(), strict=True):
                assert np.array_equal(got, given)
        _close(dataset)

    # -- modes -------------------------------------------------------------------------------

    def test_empty(self, tmp_path: Path) -> None:
        """No episodes make a valid, empty dataset, that can be appended to, or overwritten."""
        path = self.write(self.path(tmp_path), [])
        dataset = self.read(path)
        assert len(dataset) == len(dataset.lengths) == 0
        with pytest.raises(IndexError, match="empty"):
            dataset[0]
        _close(dataset)
        self.write(path, make_episodes(), **({} if self.format.appends else {"mode": "overwrite"}))
        self.check(path, make_episodes())

    def test_empty_episodes(self, tmp_path: Path) -> None:
        """An episode without steps changes nothing, and does not lock the schema."""
        other: Episode = {"something": []}
        path = self.write(self.path(tmp_path), [{}, other, make_episode(0, 3), {"action": []}])
        self.check(path, [make_episode(0, 3)])

    def test_append(self, tmp_path: Path) -> None:
        """Appending is the default, in the same block or later; of a format that can't, the default mode is "error"."""
        path = self.path(tmp_path)
        if not self.format.appends:
            self.write(path, make_episodes())
            with pytest.raises(ValueError, match="merge"):
                self.write(path, [make_episode(7, 4)], mode="append")
            with pytest.raises(FileExistsError, match="merge"):
                self.write(path, [make_episode(7, 4)])
            self.check(path, make_episodes())
            return
        for episode in make_episodes():
            self.write(path, [episode])
        self.check(path, make_episodes())

    def test_overwrite(self, tmp_path: Path) -> None:
        """The new dataset takes the old one's place when the block ends, and not before."""
        path = self.write(self.path(tmp_path), make_episodes())
        with self.format.open_writer(path, mode="overwrite", **self.writer_options) as writer:
            writer.write_episode({"other": [1.0]})
            self.check(path, make_episodes())
        assert self.read(path).column_names == ["other"]
        assert os.listdir(tmp_path) == [path.name]

    def test_overwritten_while_open(self, tmp_path: Path) -> None:
        """A dataset that is open while it is overwritten gives what it opened, or refuses as ReplacedError."""
        path = self.write(self.path(tmp_path), make_episodes((5, 3)))
        used, fresh = self.read(path), self.read(path)
        _ = used[0]
        pickled = pickle.dumps(used)
        self.write(path, [make_episode(n, n) for n in (7, 8, 9)], mode="overwrite")
        for dataset in (used, fresh, pickle.loads(pickled)):
            for number in range(2):
                with contextlib.suppress(ReplacedError):
                    got, stored = dataset.load_episode(number), make_episode(number, (5, 3)[number])
                    assert np.array_equal(got["where"], stored["where"])
                    self.check_images(got["pixels"], stored["pixels"])
            _close(dataset)

    def test_overwrite_fails(self, tmp_path: Path) -> None:
        """A block that ends with an exception leaves the old dataset, and no traces."""
        path = self.write(self.path(tmp_path), make_episodes())
        with pytest.raises(KeyboardInterrupt):
            self.write(path, _interrupted(make_episode(7, 4)), mode="overwrite")
        self.check(path, make_episodes())
        assert os.listdir(tmp_path) == [path.name]

    def test_error_mode(self, tmp_path: Path) -> None:
        """`error` makes a dataset, and refuses to touch one."""
        path = self.write(self.path(tmp_path), make_episodes(), mode="error")
        with (
            pytest.raises(FileExistsError, match="already exists"),
            self.format.open_writer(path, mode="error", **self.writer_options),
        ):
            pass
        self.check(path, make_episodes())
        with pytest.raises(ValueError, match="write mode"):
            self.format.open_writer(path, mode="replace", **self.writer_options)

    def test_an_exception_keeps_what_was_written(self, tmp_path: Path) -> None:
        """Appending that ends with an exception keeps the episodes before it."""
        path = self.path(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            self.write(path, _interrupted(make_episode(0, 3)))
        self.check(path, [make_episode(0, 3)])

    # -- episodes that do not fit ------------------------------------------------------------

    @pytest.mark.parametrize("later", [False, True], ids=["same block", "appended to"])
    def test_misfit(self, tmp_path: Path, later: bool) -> None:
        """A misfit is a ValueError that names its column; not a byte changes, and writing goes on."""
        path = self.path(tmp_path)
        if later:
            if not self.format.appends:
                pytest.skip("the format does not append")
            self.write(path, [make_episode(0, 3)])
        with self.format.open_writer(path, **self.writer_options) as writer:
            if not later:
                writer.write_episode(make_episode(0, 3))
            for change, message in _MISFITS:
                print(change)  # where this fails, the last one is at fault
                changed = make_episode(9, 4) | change
                before = _bytes_below(tmp_path)
                with pytest.raises(ValueError, match=message):
                    writer.write_episode({k: v for k, v in changed.items() if v is not None})
                assert _bytes_below(tmp_path) == before
            writer.write_episode(make_episode(1, 5))
        self.check(path, [make_episode(0, 3), make_episode(1, 5)])

    def test_the_first_episode_is_checked(self, tmp_path: Path) -> None:
        """A first episode whose columns differ in length is refused: the dataset that it was to replace stays, and one
        that fits is the first."""
        odd = make_episode(0, 3) | {"where": make_episode(0, 4)["where"]}
        path = self.write(self.path(tmp_path), make_episodes())
        with pytest.raises(ValueError, match="where"):
            self.write(path, [odd], mode="overwrite")
        self.check(path, make_episodes())
        with self.format.open_writer(path, mode="overwrite", **self.writer_options) as writer:
            with pytest.raises(ValueError, match="where"):
                writer.write_episode(odd)
            writer.write_episode(make_episode(1, 5))
        self.check(path, [make_episode(1, 5)])

    def test_values_that_fit(self, tmp_path: Path) -> None:
        """Another dtype is taken where every value stays equal."""
        first, second = make_episode(0, 3), make_episode(1, 3)
        second["where"] = second["where"].astype(np.float32)
        second["action"] = second["action"].astype(np.float64)
        self.check(self.write(self.path(tmp_path), [first, second]), make_episodes((3, 3)))

    # -- kill -9 -----------------------------------------------------------------------------

    def test_killed_at_25_of_30(self, tmp_path: Path) -> None:
        """A killed writer leaves every episode whose write had returned; an append goes on, or a copy has them."""
        path = self.path(tmp_path)
        episodes = make_episodes(tuple(range(3, 33)))
        returned = self.kill_while_writing(path, episodes, after=25)
        assert 25 <= returned < 30
        kept = len(self.read(path).lengths)
        assert returned - self.at_risk <= kept <= returned + 1
        self.check(path, episodes[:kept])
        self.go_on(path, episodes, kept)

    @pytest.mark.parametrize("kept", [0, 2], ids=["made", "extended"])
    def test_killed_between_system_calls(self, tmp_path: Path, kept: int) -> None:
        """Killed before any system call that changes a file, of a library too, a writer loses nothing."""
        if kept and not self.format.appends:
            pytest.skip("the format does not append")
        if reason := reason_why_not():
            pytest.skip(reason)
        assert self.losses(tmp_path, kept, self.kill_places)[1] == []

    def losses(
        self, tmp_path: Path, kept: int, places: int | None = None, stop: bool = False
    ) -> tuple[int, list[tuple[int, str, str]]]:
        """Kill a writer that makes a dataset, or extends one of `kept` episodes, and look at what is left.

        Args:
            tmp_path: an empty folder.
            kept: episodes that are there.
            places: how many system calls to kill before, evenly, the last one first; None: all of them.
            stop: whether one loss is enough.

        Returns:
            How many there are, and of each at which something was lost: its number, its name, and what.
        """
        episodes = self.episodes_to_kill()
        (tmp_path / "kept").mkdir()
        if kept:
            self.write(self.path(tmp_path / "kept"), episodes[:kept])
        work, told, fresh = tmp_path / "work", tmp_path / "told", not self.survives_forks
        path = self.path(work)
        run = functools.partial(_write_and_note, self.name, path, self.writer_options, episodes[kept:], told)

        def killed(at: int) -> Outcome:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(tmp_path / "kept", work)
            told.write_bytes(b"")
            return killed_after(at, run, fresh=fresh)

        whole = len(killed(1 << 30).calls)
        lost = []
        for at in range(whole - 1, -1, -1 if places is None else whole // -places):
            outcome = killed(at)
            try:
                self._check_killed(path, episodes, kept + told.stat().st_size)
            except (AssertionError, LookupError, OSError, ValueError) as error:
                lost.append((at, outcome.calls[-1], f"{type(error).__name__}: {error}"))
                if stop:
                    break
        return whole, lost

    def go_on(self, path: Path, episodes: list[Episode], kept: int) -> None:
        """Write what a killed writer did not, and assert that all is there; where nothing is appended, a copy has what
        was."""
        if self.format.appends:
            self.write(path, episodes[kept:])
            self.check(path, episodes)
            assert not [name for name in os.listdir(path.parent) if name.startswith(".")]
            return
        copied = self.path(path.parent / "copied")
        convert(
            path,
            copied,
            dest_format=self.name,
            source_format=self.name,
            progress=False,
            **self.writer_options,
        )
        self.check(copied, episodes[:kept])
        shutil.rmtree(copied.parent)

    def episodes_to_kill(self) -> list[Episode]:
        """Return the episodes that a killed writer writes: a format that wants other columns overrides this, and
        `check`."""
        episodes = make_episodes((2, 3, 1, 2))
        if self.format.supports_episode_data:
            return [e | {EPISODE_DATA_KEY: {"n": i}} for i, e in enumerate(episodes)]
        return episodes

    def _check_killed(self, path: Path, episodes: list[Episode], sure: int) -> None:
        """Assert that what a killed writer left is readable as it is, and that the next one goes on."""
        before = _bytes_below(path.parent)
        found = len(self.read(path).lengths) if sure or path.exists() else 0
        assert sure <= found <= sure + 1, f"{found} episodes, {sure} were written"
        if found:
            self.check(path, episodes[:found])
        if not self.reading_changes:
            assert _bytes_below(path.parent) == before
        if path.exists():
            self.go_on(path, episodes, found)
        else:
            self.write(path, episodes)
        if self.format.appends and "n" in episodes[0].get(EPISODE_DATA_KEY, {}):
            assert self.read(path).get_episode_data()["n"] == list(range(len(episodes)))

    def kill_while_writing(self, path: Path, episodes: list[Episode], after: int) -> int:
        """Write in a child; SIGKILL it after `after` episodes; return how many writes returned."""
        context = multiprocessing.get_context("fork" if self.survives_forks else "spawn")
        told, telling = context.Pipe(duplex=False)
        args = (self.name, path, self.writer_options, episodes, after + 3, telling)
        child = context.Process(target=_write_and_tell, args=args)  # type: ignore[attr-defined]
        child.start()
        telling.close()
        seen = 0
        while seen < after:
            seen += len(told.recv_bytes())
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        with contextlib.suppress(EOFError):
            while True:
                seen += len(told.recv_bytes())
        told.close()
        return seen


def _write_and_tell(
    name: str, path: Path, options: dict[str, Any], episodes: list[Episode], most: int, telling: Any
) -> None:
    """Write in a child, and tell of each episode."""
    with get_format(name).open_writer(path, **options) as writer:
        for number, episode in enumerate(episodes):
            writer.write_episode(episode)
            telling.send_bytes(b".")
            if number + 1 == most:  # slower than the parent: it must die in here
                signal.pause()


def _write_and_note(name: str, path: Path, options: dict[str, Any], episodes: list[Episode], told: Path) -> None:
    """Write episodes, and note in a file that each was written."""
    with get_format(name).open_writer(path, **options) as writer, open(told, "ab", 0) as file:
        for episode in episodes:
            writer.write_episode(episode)
            file.write(b".")


def _interrupted(episode: Episode) -> Iterator[Episode]:
    yield episode
    raise KeyboardInterrupt


def _same(got: Array, stored: Array) -> None:
    if got.dtype.kind == stored.dtype.kind == "U":  # as wide as the longest that is read
        assert got.shape == stored.shape
        assert got.tolist() == stored.tolist()
        return
    assert got.dtype == stored.dtype
    assert got.shape == stored.shape
    assert got.tobytes() == stored.tobytes()  # tells -0.0 from 0.0, and takes NaN for NaN


def _bytes_below(folder: Path) -> dict[str, bytes]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def _close(dataset: Any) -> None:
    if hasattr(dataset, "close"):
        dataset.close()
