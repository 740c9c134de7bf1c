"""A format of somebody else's that has `export` alone, or `extend` too: it gets a writer that no kill can hurt."""

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from ringmap.data import Dataset, Format, convert, get_format, load_dataset
from ringmap.errors import (
    ClipIndexError,
    CorruptError,
    InputError,
    LockedError,
    NewerVersionError,
    RoleError,
    UnreleasedVersionError,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.registry import FORMATS
from ringmap.testing.datasets import make_episode, make_episodes
from ringmap.testing.formats import VALUES, FormatTests
from tests.unit.formats.others import OtherOptions

EXACT = {name: rows for name, rows in VALUES.items() if rows.dtype.kind not in "mM"}


class Arrays(Dataset):
    """Episodes that were read whole, images turned unless asked otherwise."""

    def __init__(self, episodes, layout="CHW", **options):
        if layout not in ("CHW", "HWC"):
            raise InputError(f"layout {layout!r}")
        self.episodes, self.layout = episodes, layout
        lengths = [len(next(iter(e.values()))) for e in episodes]
        super().__init__(lengths, np.cumsum([0, *lengths])[:-1], **options)

    @property
    def column_names(self):
        return list(self.episodes[0]) if self.episodes else []

    def _load_slice(self, ep, start, end):
        from ringmap.datasets.episode import EpisodeDict

        if not 0 <= start <= end <= self.lengths[ep]:
            raise ClipIndexError(f"episode {ep} has no steps {start} to {end}")
        steps = {name: rows[start:end].copy() for name, rows in self.episodes[ep].items()}
        images = [n for n, v in steps.items() if v.dtype == np.uint8 and v.ndim == 4 and v.shape[-1] in (1, 3)]
        images = images if self.layout == "CHW" else []
        steps |= {name: steps[name].transpose(0, 3, 1, 2) for name in images}
        made = EpisodeDict(steps, frozenset(images))
        return self.transform(made) if self.transform else made


def save(file, episode):
    names = {f"c{i}": name for i, name in enumerate(episode)}
    columns = {key: episode[name] for key, name in names.items()}
    np.savez(file, names=np.array(json.dumps(names)), **columns)


def load(file):
    with np.load(file) as found:
        return {name: found[key] for key, name in json.loads(str(found["names"])).items()}


class BoxWriter(EpisodeWriter):
    def export(self, episodes, path):
        with open(path, "wb") as file:
            file.write(b"%d\n" % sum(1 for _ in episodes))
            for episode in episodes:
                part = file_of(None)
                save(part, episode)
                file.write(b"%d\n" % part.tell() + part.getvalue())


class Box(Format):
    """One file: it can only be written whole."""

    name = "box"
    writer = BoxWriter

    @classmethod
    def detect(cls, path):
        return str(path).endswith(".box")

    @classmethod
    def open_reader(cls, path, **options):
        with open(path, "rb") as file:
            count = int(file.readline())
            return Arrays([load(file_of(file)) for _ in range(count)], **options)


def file_of(file):
    import io

    return io.BytesIO(file.read(int(file.readline())) if file else b"")


class ShelfWriter(EpisodeWriter):
    def export(self, episodes, path):
        Path(path).mkdir()
        self.extend(episodes, path)

    def extend(self, episodes, path):
        first = len(list(Path(path).glob("*.npz")))
        for number, episode in enumerate(episodes, first):
            with open(f"{path}/new", "wb") as file:
                save(file, episode)
            os.rename(f"{path}/new", f"{path}/{number:06}.npz")


class Shelf(Format):
    """A folder with a file per episode: each counts by its own rename."""

    name = "shelf"
    writer = ShelfWriter

    @classmethod
    def detect(cls, path):
        return os.path.isdir(path) and str(path).endswith(".shelf")

    @classmethod
    def open_reader(cls, path, **options):
        return Arrays([load(file) for file in sorted(Path(path).glob("*.npz"))], **options)


@contextlib.contextmanager
def registered():
    try:
        for made in (Box, Shelf):
            FORMATS.add(made)
        yield
    finally:
        for made in (Box, Shelf):
            del FORMATS[made.name]


@pytest.fixture(autouse=True)
def formats():
    with registered():
        yield


class TestBox(OtherOptions, FormatTests):
    name = "box"
    suffix = ".box"
    values: ClassVar = EXACT
    keeps_facts = False


class TestShelf(OtherOptions, FormatTests):
    name = "shelf"
    suffix = ".shelf"
    values: ClassVar = EXACT
    keeps_facts = False


def test_control_forgotten_facts(tmp_path):
    """A format that says it keeps the rate, and does not, fails the suite."""

    class Forgetful(TestShelf):
        keeps_facts = True

    with pytest.raises(AssertionError):
        Forgetful().test_facts_and_origins(tmp_path)


def abandon(path, name, episodes):
    """Write in a child that never ends its block."""
    child = os.fork()
    if child == 0:
        writer = get_format(name).open_writer(path)
        writer.__enter__()
        for episode in episodes:
            writer.write_episode(episode)
        os._exit(0)
    os.waitpid(child, 0)


NAMES = ["box", "shelf", "zarr"]


@pytest.mark.parametrize("name", NAMES)
def test_a_log_beside_a_dataset_that_was_changed_meanwhile(tmp_path, name):
    """Nobody guesses which episodes follow which: readers and writers refuse, and say what to delete."""
    path, other = tmp_path / f"made.{name}", tmp_path / f"other.{name}"
    convert_to(path, name, make_episodes((2, 3)))
    abandon(path, name, [make_episode(2, 4)])
    assert load_dataset(path).lengths.tolist() == [2, 3, 4]
    convert_to(other, name, make_episodes((5, 5, 5)))
    log = next(p for p in tmp_path.rglob("*log") if p.is_file())
    kept = log.read_bytes()
    if other.is_dir():
        (other / log.name).write_bytes(kept)
        path = other
    else:
        os.replace(other, path)
    for use in (load_dataset, lambda p: convert_to(p, name, [])):
        with pytest.raises(CorruptError, match="changed meanwhile.*delete this file") as caught:
            use(path)
        assert "log" in str(caught.value)


def convert_to(path, name, episodes):
    with get_format(name).open_writer(path) as writer:
        writer.write_episodes(episodes)


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_log_of_a_version_that_was_never_released_is_refused_and_kept(tmp_path, name):
    """It began with an episode, where facts about the dataset begin now."""
    path = tmp_path / f"made.{name}"
    abandon(path, name, [make_episode(0, 4)])
    log = next(p for p in tmp_path.rglob("*log") if p.is_file())
    data = log.read_bytes()
    _, *sizes, _ = struct.unpack_from("<8sQQQ", data)
    log.write_bytes(data[32 + sum(sizes) :])
    for use in (load_dataset, lambda p: convert_to(p, name, [])):
        with pytest.raises(UnreleasedVersionError, match="made by an unreleased version"):
            use(path)
    assert log.read_bytes() == data[32 + sum(sizes) :]


@pytest.mark.parametrize("name", NAMES)
def test_a_log_of_a_newer_release(tmp_path, monkeypatch, name):
    path = tmp_path / f"made.{name}"
    with monkeypatch.context() as patch:
        patch.setattr("ringmap.formats.common.log.VERSION", 2)
        abandon(path, name, [make_episode(0, 4)])
    for use in (load_dataset, lambda p: convert_to(p, name, [])):
        with pytest.raises(NewerVersionError, match="version 2 of the log, expected 1"):
            use(path)


@pytest.mark.parametrize("name", [*NAMES, "hdf5"])
def test_a_reader_beside_a_writer(tmp_path, monkeypatch, name):
    """It sees all that was written when it was opened, and keeps seeing it while the log goes over."""
    path = tmp_path / f"made.{name}"
    monkeypatch.setattr("ringmap.formats.common.writer.EpisodeWriter.group_nbytes", 1)
    with get_format(name).open_writer(path) as writer:
        datasets = []
        for number in range(4):
            writer.write_episode(make_episode(number, 3) | {"text": ["é" * number] * 3})
            datasets.append(load_dataset(path))
            check_each(datasets)
        for mode in ("append", "overwrite"):
            with pytest.raises(LockedError), get_format(name).open_writer(path, mode=mode):
                pass
        with pytest.raises(RoleError, match="already open"):
            writer.__enter__()
    check_each(datasets)


def check_each(datasets):
    for number, dataset in enumerate(datasets, 1):
        assert dataset.lengths.tolist() == [3] * number
        wheres = dataset.get_col_data("where")
        assert wheres.tolist() == [[e, t] for e in range(number) for t in range(3)]
        assert dataset.load_episode(number - 1)["text"].tolist() == ["é" * (number - 1)] * 3


def test_a_deleted_dataset_stays_deleted(tmp_path):
    """A log that is beside a file is that file's: a new one of its name does not get its episodes."""
    path = tmp_path / "made.box"
    abandon(path, "box", [make_episode(0, 4)])
    path.unlink()
    convert_to(path, "box", [make_episode(1, 3)])
    assert load_dataset(path).lengths.tolist() == [3]
    assert os.listdir(tmp_path) == ["made.box"]


def test_episode_data_that_it_does_not_hold(tmp_path):
    """All of them are refused by name; those that `World` adds are left out."""
    path, data = tmp_path / "made.box", {"seed": 1, "policy_step": 2, "goal": 3, "room": "left"}
    with get_format("box").open_writer(path) as writer:
        with pytest.raises(ValueError, match=r"'goal'.*'room'.*drop=\['goal', 'room'\]"):
            writer.write_episode({"x": [1.0], "_episode_data": data})
        writer.write_episode({"x": [1.0], "_episode_data": {"seed": 1, "policy_step": 2}})
    assert load_dataset(path).lengths.tolist() == [1]


def test_clips_and_pictures_of_a_log(tmp_path):
    """Clips, workers and whole columns come from both, as if there was no log."""
    import pickle

    path = tmp_path / "made.zarr"
    episodes = make_episodes((5, 4, 6))
    convert_to(path, "zarr", episodes[:1])
    abandon(path, "zarr", episodes[1:])
    whole = tmp_path / "whole.zarr"
    convert_to(whole, "zarr", episodes)
    got, want = (load_dataset(p, num_steps=2, frameskip=2) for p in (path, whole))
    for one in (got, pickle.loads(pickle.dumps(got))):
        assert len(one) == len(want)
        for i in range(len(want)):
            assert all(np.array_equal(one[i][n], want[i][n]) for n in want[i])
        assert np.array_equal(one.get_col_data("pixels"), want.get_col_data("pixels"))
        assert np.array_equal(one.get_row_data([14, 0, 5])["where"], want.get_row_data([14, 0, 5])["where"])
    again = tmp_path / "copy.zarr"
    convert(path, again, progress=False)
    assert load_dataset(again).lengths.tolist() == [5, 4, 6]
