"""The rate of a source, steps per second, is that of each copy, or the call refuses: no export plays at another
speed."""

import json
import os
from fractions import Fraction

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.clips.facts import Facts
from ringmap.data import (
    ConcatDataset,
    MergeDataset,
    Window,
    convert,
    get_format,
    list_formats,
    load_dataset,
    merge,
)
from ringmap.errors import InputError
from ringmap.formats.base import Format
from ringmap.formats.common.writer import EpisodeWriter
from tests.unit.formats.others import NAMES, OTHERS, OURS

FORMATS = [name for name in [*OURS, *OTHERS] if name in list_formats()]

NTSC = Fraction(30000, 1001)
RATES = {
    "12.5": (12.5, Fraction(25, 2)),
    "29.97": (29.97, Fraction(2997, 100)),
    "ntsc": (NTSC, NTSC),
    "np.int64(10)": (np.int64(10), 10),
    "np.float32(20)": (np.float32(20), 20),
    "np.float32(29.97)": (np.float32(29.97), Fraction(2997, 100)),
    "np.float16(0.1)": (np.float16(0.1), Fraction(1, 10)),
    "a third": (Fraction(1, 3), Fraction(1, 3)),
    "1e-5": (1e-5, Fraction(1, 100_000)),
    "text": ("30000/1001", NTSC),
}


def episode(number=0, pictures=False):
    x = 10.0 * number + np.arange(5)
    steps = {
        "obs": x[:, None],
        "action": x[:, None] + 0.5,
        "reward": x,
        "terminated": np.arange(5) == 4,
    }
    if pictures:
        steps["camera"] = np.full((5, 16, 16, 3), number, np.uint8)
    return steps


def ring(path=None, fps=None, count=2, pictures=False):
    buf = ReplayBuffer(100, path=path, reward_at="next", seed=0, fps=fps)
    for number in range(count):
        buf.write_episode(episode(number, pictures))
    return buf


def place(tmp_path, name, folder="out"):
    (tmp_path / folder).mkdir(exist_ok=True)
    return tmp_path / folder / NAMES.get(name, f"a.{name}")


def rate_at(path, name=None):
    found = load_dataset(path, format=name, output="numpy")
    assert found.fps is None or type(found.fps) is Fraction
    return found.fps


WAYS = {
    "dump": lambda buf, path, name, **o: buf.dump(path, name, progress=False, **o),
    "convert": lambda buf, path, name, **o: convert(buf.path, path, dest_format=name, progress=False, **o),
    "convert, some": lambda buf, path, name, **o: convert(
        buf, path, dest_format=name, where="length > 0", progress=False, **o
    ),
    "merge": lambda buf, path, name, **o: merge([buf, buf.path], path, dest_format=name, progress=False, **o),
}


CASES = [("dump", name) for name in FORMATS]
CASES += [(way, name) for way in WAYS if way != "dump" for name in ("hdf5", "lerobot") if name in FORMATS]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_copy_has_the_rate_of_its_source(tmp_path, way, name):
    path, last = place(tmp_path, name), place(tmp_path, "hdf5", "last")
    rate = 15 if name == "lerobot" else NTSC
    with ring(tmp_path / "ring", rate) as buf:
        WAYS[way](buf, path, name)
        assert rate_at(path, name) == rate
        if name == "lerobot":
            assert json.loads((path / "meta/info.json").read_text())["fps"] == 15
        named = place(tmp_path, name, "named")
        WAYS[way](buf, named, name, fps=np.float32(20))
        assert rate_at(named, name) == 20
    if way == "dump":
        convert(path, last, progress=False)
        assert rate_at(last) == rate
        back = ReplayBuffer(100)
        back.extend_from(load_dataset(path, format=name, output="numpy"))
        assert back.fps == rate


@pytest.mark.parametrize(("given", "kept"), RATES.values(), ids=RATES)
def test_every_kind_of_number_is_one_rate_everywhere(tmp_path, given, kept):
    with ring(tmp_path / "ring", given) as buf:
        assert (buf.fps, type(buf.fps)) == (kept, Fraction)
    with ReplayBuffer.open(tmp_path / "ring") as again:
        assert again.fps == kept
        again.dump(tmp_path / "a.h5", progress=False)
    assert rate_at(tmp_path / "ring") == rate_at(tmp_path / "a.h5") == kept
    assert json.loads((tmp_path / "ring/manifest.json").read_text())["fps"] == "{}/{}".format(
        *Fraction(kept).as_integer_ratio()
    )
    assert load_dataset(tmp_path / "a.h5", fps=given).fps == kept
    convert(tmp_path / "a.h5", tmp_path / "b.h5", fps=given, progress=False)
    assert rate_at(tmp_path / "b.h5") == kept
    second = float(1 / Fraction(kept))
    view = load_dataset(tmp_path / "a.h5", window={"obs": Window(seconds=[0.0, second])}, output="numpy")
    assert view[0]["obs"].ravel().tolist() == [0.0, 1.0]
    buf = ReplayBuffer(100)
    buf.fps = given
    assert buf.fps == kept


@pytest.mark.parametrize("name", [name for name in ("video", "lerobot") if name in FORMATS])
@pytest.mark.parametrize(("given", "kept"), RATES.values(), ids=RATES)
def test_every_rate_has_its_film_frame_by_frame(tmp_path, name, given, kept):
    writer = get_format(name)
    if name == "lerobot" and Fraction(kept).denominator != 1:
        with pytest.raises(InputError, match="LeRobot's rate is an integer"):
            writer.open_writer(tmp_path / "set", fps=given)
        return
    options = {"lossless": True} if name == "video" else {"final_row": False, "reward_at": "same"}
    with writer.open_writer(tmp_path / "set", fps=given, **options) as writer:
        frames = np.arange(40, dtype=np.uint8)[:, None, None, None] * np.ones((16, 16, 3), np.uint8)
        writer.write_episode({"camera": 6 * frames, "action": np.arange(40.0), "reward": np.zeros(40)})
    found = load_dataset(tmp_path / "set", output="numpy", layout="HWC")
    assert found.fps == kept
    camera = next(n for n in found.column_names if "camera" in n)
    seen = found.load_episode(0)[camera][:, 0, 0, 0].astype(int)
    assert np.abs(seen - 6 * np.arange(40)).max() <= (0 if name == "video" else 2)


@pytest.mark.parametrize(
    "bad", [0, -1, True, np.nan, np.inf, "fast", "10", "1/0", [10], 1j, np.datetime64(1, "s"), None]
)
def test_what_is_no_rate_is_refused(tmp_path, bad):
    if bad is None:
        assert ReplayBuffer(100, fps=None).fps is None
        return
    out = tmp_path / "out.h5"
    calls = [
        lambda: ReplayBuffer(100, path=tmp_path / "ring", fps=bad),
        lambda: convert(ring(), out, fps=bad, progress=False),
        lambda: merge([ring()], out, fps=bad, progress=False),
        lambda: ring().dump(out, fps=bad),
        lambda: setattr(ReplayBuffer(100), "fps", bad),
    ]
    calls += [lambda n=n: get_format(n).open_writer(out, fps=bad) for n in ("video", "lerobot") if n in FORMATS]
    for call in calls:
        with pytest.raises(InputError, match="fps must be a positive number of steps per second"):
            call()
    assert not out.exists()


def test_two_rates_are_refused_unless_one_is_named(tmp_path):
    ten, ntsc, unknown = ring(tmp_path / "one", 10), ring(tmp_path / "two", 29.97), ring()
    exact, out = ring(fps=NTSC), tmp_path / "out.h5"
    said = "10/1 steps per second, and .* 2997/100"
    with pytest.raises(InputError, match=said):
        merge([ten, ntsc], out, progress=False)
    with pytest.raises(InputError, match=said):
        ConcatDataset([ten, ntsc])
    with pytest.raises(InputError, match=said):
        MergeDataset([ten, ntsc], [["obs"], ["reward"]])
    with pytest.raises(InputError, match="2997/100 steps per second, and .* 10/1|argument has 2997"):
        ReplayBuffer(100, path=tmp_path / "one", fps=29.97)
    with pytest.raises(InputError, match=said):
        ten.extend_from(ntsc)
    assert ten.num_episodes == 2 and not out.exists()
    merge([ten, ntsc], out, fps=10, progress=False)
    assert rate_at(out) == 10
    with pytest.raises(InputError, match=said):
        convert(ntsc, out, mode="append", progress=False)
    assert len(load_dataset(out).lengths) == 4
    convert(ntsc, out, mode="append", fps=10, progress=False)
    convert(unknown, out, mode="append", progress=False)
    assert rate_at(out) == 10 and len(load_dataset(out).lengths) == 8
    merge([ntsc, exact, unknown], tmp_path / "same.h5", progress=False)
    assert rate_at(tmp_path / "same.h5") == Fraction(2997, 100)
    assert ConcatDataset([unknown, ntsc, exact]).fps == Fraction(2997, 100)
    named = [load_dataset(tmp_path / n, fps=10, output="numpy") for n in ("one", "two")]
    assert ConcatDataset(named).fps == 10
    for buf in (ten, ntsc):
        buf.close()
    both = tmp_path / "fleet"
    both.mkdir()
    for name in ("one", "two"):
        (tmp_path / name).rename(both / name)
    with pytest.raises(InputError, match=said):
        load_dataset(both)
    assert load_dataset(both, fps=12.5).fps == 12.5


@pytest.mark.parametrize("name", [name for name in OURS if name in list_formats()])
def test_a_writer_that_was_killed_has_said_its_rate(tmp_path, name):
    """The log has it, before the dataset does; what follows has the same, and another rate changes nothing."""
    path = place(tmp_path, name)
    writer = get_format(name).open_writer(path)
    writer.expect_facts(Facts("same", NTSC), "a test")
    with writer:
        writer.write_episode(episode(0, pictures=True))
        if name != "hdf5":  # whose file can't be read meanwhile
            assert rate_at(path, name) == NTSC
    other = get_format(name).open_writer(path)
    other.expect_facts(Facts("same", Fraction(10)), "a test")
    with pytest.raises(InputError, match="30000/1001 steps per second, and .* 10/1"):
        other.__enter__()
    with get_format(name).open_writer(path) as writer:
        writer.write_episode(episode(1, pictures=True))
    found = load_dataset(path, format=name, output="numpy")
    assert (found.fps, found.reward_at, len(found.lengths)) == (NTSC, "same", 2)


def test_a_dataset_without_a_rate_says_that_it_takes_none(tmp_path):
    ring().dump(tmp_path / "a.h5", progress=False)
    with pytest.warns(UserWarning, match="does not say how many steps are a second"):
        convert(ring(fps=10), tmp_path / "a.h5", mode="append", progress=False)
    assert rate_at(tmp_path / "a.h5") is None


class ToldWriter(EpisodeWriter):
    def export(self, episodes, path):
        os.mkdir(path)
        writer = get_format("hdf5").open_writer(f"{path}/inside.h5")
        writer.expect_facts(self.facts, "Told")
        with writer:
            writer.write_episodes(episodes)


class Told(Format):
    """Somebody's format, which stores the rate."""

    name = "told"
    writer = ToldWriter

    @classmethod
    def detect(cls, path):
        return str(path).endswith(".told")

    @classmethod
    def open_reader(cls, path, **options):
        return load_dataset(f"{path}/inside.h5", **options)


def test_an_export_of_somebody_elses_gets_the_rate(tmp_path):
    writer = Told.open_writer(tmp_path / "a.told")
    writer.expect_facts(Facts("next", NTSC), "a test")
    with writer:
        writer.write_episode(episode())
    assert Told.open_reader(tmp_path / "a.told").fps == NTSC


def test_lerobot_takes_integers_only(tmp_path):
    if "lerobot" not in FORMATS:
        pytest.skip("needs pyarrow and PyAV")
    for rate in (12.5, 29.97):
        with pytest.raises(InputError, match="LeRobot's rate is an integer.*say which"):
            ring(fps=rate).dump(tmp_path / "set", "lerobot", progress=False)
    assert not (tmp_path / "set").exists()
    ring(fps=29.97).dump(tmp_path / "set", "lerobot", fps=30, progress=False)
    assert rate_at(tmp_path / "set") == 30
