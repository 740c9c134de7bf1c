"""What a format can't hold is refused before it is logged: no bad episode stops the export of the others, or a later
append."""

import os
from importlib import import_module

import numpy as np
import pytest

from ringmap.data import convert, get_format, list_formats, load_dataset
from ringmap.errors import InputError
from ringmap.formats.base import Format
from ringmap.formats.common.writer import EpisodeWriter
from tests.unit.formats.others import NAMES

FORMATS = [name for name in list_formats() if get_format(name).can_write()]
OPTIONS = {
    "lerobot": {"reward_at": "same"},
    "robomimic": {"reward_at": "same"},
    "minari": {"reward_at": "next"},
    "folder": {"image_format": "png"},
    "video": {"lossless": True},
}

DATA = [
    {"x": np.zeros(20_000)},
    {"x": "a\0b"},
    {"x": "ab\0"},
    {"x": np.str_("ab")},
    {"x": np.array("ab")},
    {"x": b"ab\0"},
    {"x": b""},
    {"x": "\ud800"},
    {"x": np.array(["a\0b", "c"])},
    {"x": np.array(["\ud800"])},
    {"x": np.zeros((0, 3))},
    {"x": 1j},
    {"x": None},
    {"x": 2**64},
    {"x": np.datetime64("2020")},
    {"x": "a" * 70_000},
    {"x": np.nan},
    {"x": True},
    {"x": np.float16(1.5)},
    {"": 1},
    {"a\0b": 1},
    {"\ud800": 1},
    {"a/b": 1},
    {".": 1},
    {"a" * 70_000: 1},
    {"num_samples": 7},
    {"id": 7},
    {"total_steps": 9},
    {"seed": "abc"},
    {"seed": 3.5},
    {"seed": True},
    {"seed": 2**63},
    {"seed": np.int64(3)},
    {"seed": np.array([1])},
    {"mask": np.array(["a/b"])},
    {"mask": np.array(["\ud800"])},
    {"mask": np.array([""])},
    {"mask": np.array(["."])},
    {"mask": np.array([3])},
    {"mask": np.array(["b", "ö"])},
]
COLUMNS = [
    {"t": np.array(["a\0b", "ö", ""])},
    {"t": np.array(["\ud800", "b", "c"])},
    {"t": np.array(["ö", "b", "c"])},
    {"a\0b": np.zeros(3)},
    {"\ud800": np.zeros(3)},
    {"/a": np.zeros(3)},
    {"a/": np.zeros(3)},
    {"a//b": np.zeros(3)},
    {".": np.zeros(3)},
    {"a/./b": np.zeros(3)},
    {"x": np.zeros(3), "x/y": np.ones(3)},
    {"actions": np.ones(3)},
    {"rewards": np.ones(3)},
    {"info/x": np.zeros(3), "x": np.ones(3)},
    {"next_info/x": np.arange(3.0)},
    {"obs/x": np.ones(3)},
    {"t": np.array([b"a"] * 3)},
    {"t": np.array([["a", "b"]] * 3)},
]


WRITERS = [
    pytest.param(n, marks=pytest.mark.slow if n in ("zarr", "folder", "video", "parquet") else ()) for n in FORMATS
]
OTHERS = ("robomimic", "minari", "lerobot")


def episode(data=None, columns=None):
    rows = {"obs": np.arange(3.0)[:, None], "action": np.arange(3.0), "reward": np.zeros(3), **(columns or {})}
    return {**rows, "_episode_data": data} if data else rows


def place(tmp_path, name, number=0):
    folder = tmp_path / str(number)
    folder.mkdir(exist_ok=True)
    return folder / NAMES.get(name, f"a.{name}")


def written(writer, rows):
    """Return whether an episode was taken; what a writer refuses, it refuses as wrong input."""
    try:
        writer.write_episode(rows)
    except InputError as error:
        assert "write_episode" in str(error)
        return False
    return True


def same(given, found):
    given, found = np.asarray(given), np.asarray(found)
    kinds = {given.dtype.kind, found.dtype.kind}
    is_float = given.dtype.kind in "fc"
    return (
        given.shape == found.shape
        and (len(kinds) == 1 or kinds == {"i", "u"})
        and np.array_equal(given, found, equal_nan=is_float)
    )


@pytest.mark.parametrize("name", WRITERS)
def test_data_of_an_episode_come_back_equal_or_are_refused_ahead_of_the_log(tmp_path, name):
    sound = {"task": "z"} if name == "lerobot" else {"z": 1}
    chosen, kept = get_format(name), [sound]
    path = place(tmp_path, name)
    with chosen.open_writer(path, **OPTIONS.get(name, {})) as writer:
        writer.write_episode(episode(sound))
        for data in DATA:
            if written(writer, episode(data)):
                kept.append(data)
        writer.write_episode(episode(sound))
    kept.append(sound)
    found = load_dataset(path, format=name, output="numpy")
    assert len(found.lengths) == len(kept)
    if name in ("robomimic", "minari"):
        refused = [data for data in DATA if not any(data is one for one in kept)]
        assert any("x" in one and same(one["x"], "ab") for one in kept), "np.str_ is a text"
        assert any("x" in data and np.asarray(data["x"]).nbytes == 160_000 for data in refused)
    elif name == "lerobot":
        return  # it holds none
    else:
        assert len(kept) == len(DATA) + 2
    for number, wanted in enumerate(kept):
        its = found.source.episode_data(number)
        for key, value in wanted.items():
            assert same(value, its[key]), (key, value, its)
    found.close()
    if chosen.appends:
        with chosen.open_writer(path, mode="append", **OPTIONS.get(name, {})) as writer:
            writer.write_episode(episode(sound))
        assert len(load_dataset(path, format=name).lengths) == len(kept) + 1


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n not in OTHERS[:1] else ()) for n in FORMATS]
)
def test_columns_come_back_equal_or_are_refused_ahead_of_the_log(tmp_path, name):
    chosen = get_format(name)
    for number, columns in enumerate(COLUMNS):
        path = place(tmp_path, name, number)
        with chosen.open_writer(path, **OPTIONS.get(name, {})) as writer:
            taken = written(writer, episode(columns=columns))
            if not taken:
                writer.write_episode(episode())
        found = load_dataset(path, format=name, output="numpy").load_episode(0)
        assert taken or name in OTHERS
        for key, rows in columns.items() if taken else ():
            names = (key, f"info/{key}", f"observation.{key[4:]}", key.replace("/", "."))
            ours = [found[n] for n in names if n in found]
            assert ours and same(rows[: len(ours[0])], ours[0]), (key, rows, found)


@pytest.mark.parametrize("name", [name for name in ("robomimic", "minari") if name in FORMATS])
def test_control_without_the_trial_one_episode_stops_them_all(tmp_path, name, monkeypatch):
    module = import_module(f"ringmap.formats.{name}")
    monkeypatch.setattr(module, "refused_attribute", lambda *_: None)
    writer = get_format(name).open_writer(place(tmp_path, name), **OPTIONS[name])
    with pytest.raises(InputError, match="can't be moved out of"), writer:
        writer.write_episode(episode({"x": "a\0b"}))


class PickyWriter(EpisodeWriter):
    def export(self, episodes, path):
        os.mkdir(path)
        with get_format("hdf5").open_writer(f"{path}/inside.h5") as writer:
            for one in episodes:
                if (one["obs"] == 7).all():
                    raise KeyError("no sevens")
                writer.write_episode(one)


class Picky(Format):
    """Somebody's format, whose export fails at an episode that its writer took."""

    name = "picky"
    writer = PickyWriter

    @classmethod
    def detect(cls, path):
        return str(path).endswith(".picky")

    @classmethod
    def open_reader(cls, path, **options):
        return load_dataset(f"{path}/inside.h5", **options)


def test_an_export_that_fails_says_how_to_go_on(tmp_path):
    path, whole = tmp_path / "a.picky", tmp_path / "whole.h5"
    said = r"3 episodes from number 0 .*no sevens.*where='episode != N'"
    with pytest.raises(InputError, match=said), Picky.open_writer(path) as writer:
        for value in (1.0, 7.0, 2.0):
            writer.write_episode({**episode(), "obs": np.full((3, 1), value)})
    every = Picky.open_dataset(path, layout="HWC", output="numpy")
    convert(every, whole, where="episode != 1", progress=False)
    found = load_dataset(whole, output="numpy")
    assert [found.load_episode(n)["obs"][0, 0] for n in range(2)] == [1, 2]
