"""Where rewards stand, and how many steps are a second, is known on every way from one dataset to another, or refused:
no export gives an action another's reward, or plays at another speed."""

import json
import os
from fractions import Fraction

import numpy as np
import pytest

from ringmap import ReplayBuffer, World, policy
from ringmap.clips.facts import Facts
from ringmap.data import (
    ConcatDataset,
    MergeDataset,
    NStep,
    Sequences,
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
ROWS = 5

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


def episode(number, reward_at, pictures=False):
    """Return five rows; of "next" the first reward and the last action are none."""
    x = 10.0 * number + np.arange(ROWS)
    steps = {"obs": x[:, None].copy(), "action": x[:, None] + 0.5, "reward": x + 0.25}
    if reward_at == "next":
        steps["reward"] = np.r_[np.nan, x[:-1] + 0.25]
        steps["action"][-1] = np.nan
    if pictures:
        steps["camera"] = np.full((ROWS, 16, 16, 3), number, np.uint8)
    return {**steps, "terminated": np.arange(ROWS) == ROWS - 1}


def wanted(count, reward_at):
    """Return each step (observation, its action, the reward of that action): all rows, or all but the last."""
    steps = range(ROWS - (reward_at == "next"))
    return [(x, x + 0.5, x + 0.25) for n in range(count) for x in (10.0 * n + t for t in steps)]


def steps_of(dataset):
    """Return the same of a dataset, as its `reward_at` says."""
    found, late = [], dataset.reward_at == "next"
    names = {n.replace("next.", ""): n for n in dataset.column_names}
    observation = next(n for n in ("obs", "obs/flat", "observation", "observation.state") if n in names)
    for number in range(len(dataset.lengths)):
        rows = {n: np.asarray(v) for n, v in dataset.load_episode(number).items()}
        columns = [rows[names[n]].reshape(-1) for n in (observation, "action", "reward")]
        count = len(columns[0]) - late
        found += zip(*(c[late * (n == 2) :][:count].tolist() for n, c in enumerate(columns)), strict=True)
    return found


def ring(path=None, reward_at="next", fps=None):
    buf = ReplayBuffer(100, path=path, reward_at=reward_at, seed=0, fps=fps)
    for number in range(2):
        buf.write_episode(episode(number, reward_at))
    return buf


def place(tmp_path, name, folder="out"):
    (tmp_path / folder).mkdir(exist_ok=True)
    return tmp_path / folder / NAMES.get(name, f"a.{name}")


def opened(path, name=None):
    return load_dataset(path, format=name, output="numpy")


def rate_at(path, name=None):
    found = opened(path, name)
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
CASES += [(way, name) for way in WAYS if way != "dump" for name in ("hdf5", "robomimic", "lerobot") if name in FORMATS]


@pytest.mark.parametrize("reward_at", ["next", "same"])
@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_copy_has_the_rewards_of_its_actions_and_the_rate(tmp_path, way, name, reward_at):
    path, rate, count = place(tmp_path, name), 15 if name == "lerobot" else NTSC, 4 if way == "merge" else 2
    with ring(tmp_path / "ring", reward_at, rate) as buf:
        if (name, reward_at) == ("minari", "same"):
            with pytest.raises(InputError, match="final_row=True"):
                WAYS[way](buf, path, name)
            assert not path.exists()
            return
        WAYS[way](buf, path, name)
        if reward_at == "next":
            WAYS[way](buf, named := place(tmp_path, name, "named"), name, fps=np.float32(20))
            assert rate_at(named, name) == 20
    found = opened(path, name)
    assert found.reward_at == ("same" if name in OTHERS else reward_at) and found.fps == rate
    steps = wanted(2, reward_at) * (count // 2)
    assert steps_of(found) == steps
    if name == "lerobot":
        assert json.loads((path / "meta/info.json").read_text())["fps"] == 15
    back = ReplayBuffer(100)
    back.extend_from(found)
    assert back.reward_at == found.reward_at and back.fps == rate and steps_of(back) == steps
    if way == "dump":  # from file to file
        for last in ("hdf5", "robomimic") if name in ("hdf5", "zarr") else ("hdf5",):
            copy = place(tmp_path, last, "last")
            convert(path, copy, dest_format=last, source_format=name, progress=False)
            assert steps_of(opened(copy, last)) == steps and rate_at(copy, last) == rate


def test_next_observations_say_what_followed(tmp_path):
    """Then each row is a step, whatever its rewards are called, and Minari has them all."""
    buf = ReplayBuffer(100, reward_at="same")
    rows = episode(0, "same")
    buf.write_episode({**rows, "next_obs": rows["obs"] + 1})
    for name in OTHERS:
        if name in list_formats():
            buf.dump(place(tmp_path, name), name, progress=False)
            assert steps_of(opened(place(tmp_path, name), name)) == wanted(1, "same"), name


@pytest.mark.parametrize("name", [name for name in OTHERS if name in list_formats()])
def test_rewards_of_unknown_place_are_not_guessed(tmp_path, name):
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        writer.write_episode(episode(0, "next"))
    path = place(tmp_path, name)
    with pytest.raises(InputError, match="reward_at="):
        convert(tmp_path / "a.h5", path, dest_format=name, progress=False)
    assert not path.exists()
    convert(tmp_path / "a.h5", path, dest_format=name, reward_at="next", progress=False)
    assert steps_of(opened(path, name)) == wanted(1, "next")
    told = load_dataset(tmp_path / "a.h5", reward_at="next", output="numpy")
    convert(told, path, dest_format=name, mode="overwrite", progress=False)
    assert steps_of(opened(path, name)) == wanted(1, "next")


def test_what_stands_elsewhere_is_not_mixed(tmp_path):
    one, two = ring(tmp_path / "one", "next"), ring(tmp_path / "two", "same")
    unknown = ReplayBuffer(100)
    unknown.write_episode(episode(0, "same"))
    out = tmp_path / "out.h5"
    for parts, text in (([one, two], "stand at 'same'"), ([one, unknown], "not known where")):
        with pytest.raises(InputError, match=text):
            merge(parts, out, progress=False)
        assert not out.exists()
    merge([one, unknown], out, reward_at="next", progress=False)
    assert load_dataset(out).reward_at == "next" and len(load_dataset(out).lengths) == 3
    for part, text in ((two, "'same'"), (unknown, "not known")):
        with pytest.raises(InputError, match=text):
            convert(part, out, mode="append", progress=False)
        with pytest.raises(InputError, match=text):
            one.extend_from(part)
        assert len(load_dataset(out).lengths) == 3 and one.num_episodes == 2
    with pytest.raises(InputError, match="dataset 1 has its rewards at 'same'"):
        ConcatDataset([one, two])
    assert ConcatDataset([one, one.view()]).reward_at == "next"
    assert ConcatDataset([one, unknown]).reward_at is None
    assert MergeDataset([two, two], [["obs"], ["reward"]]).reward_at == "same"
    assert MergeDataset([unknown, two.take([0])], [["obs"], ["reward"]]).reward_at == "same"


@pytest.mark.parametrize("name", [name for name in OURS if name in list_formats()])
def test_a_writer_that_was_killed_has_said_both(tmp_path, name):
    """The log has them, before the dataset does; what follows has the same, and what differs changes nothing."""
    path = place(tmp_path, name)
    writer = get_format(name).open_writer(path)
    writer.expect_facts(Facts("same", NTSC), "a test")
    with writer:
        writer.write_episode(episode(0, "same", pictures=True))
        if name != "hdf5":  # whose file can't be read meanwhile
            assert (opened(path, name).reward_at, rate_at(path, name)) == ("same", NTSC)
    for other, message in (
        (Facts("next"), "reward_at='next'"),
        (Facts("same", Fraction(10)), "30000/1001 steps per second, and .* 10/1"),
    ):
        writer = get_format(name).open_writer(path)
        writer.expect_facts(other, "a test")
        with pytest.raises(InputError, match=message):
            writer.__enter__()
    with get_format(name).open_writer(path) as writer:
        writer.write_episode(episode(1, "same", pictures=True))
    found = opened(path, name)
    assert (found.fps, found.reward_at, len(found.lengths)) == (NTSC, "same", 2)


def test_what_a_world_collects_says_where(tmp_path):
    world = World("CartPole-v1", num_envs=1, image_shape=(8, 8), max_episode_steps=5)
    world.set_policy(policy.RandomPolicy(seed=0))
    world.collect(tmp_path / "a.h5", episodes=1, seed=0, format="hdf5")
    world.close()
    assert load_dataset(tmp_path / "a.h5").reward_at == "next"


@pytest.mark.parametrize("name", ["hdf5", *OTHERS])
@pytest.mark.parametrize("reward_at", ["next", "same"])
def test_sums_and_ends_of_a_copy_are_those_of_the_ring(tmp_path, name, reward_at):
    """Whatever the columns are called: an episode that terminated has no value beyond its last reward."""
    if name not in list_formats() or (name, reward_at) == ("minari", "same"):
        return
    with ring(tmp_path / "ring", reward_at) as buf:
        buf.dump(place(tmp_path, name), name, progress=False)
        whole = buf.view({"sum": NStep(2, gamma=0.5)})
        wanted = [{n: whole[i][n] for n in ("sum", "sum_discount", "sum_steps")} for i in range(len(whole))]
    copy = opened(place(tmp_path, name), name)
    rows = int(copy.lengths[0])
    reward = "reward" if "reward" in copy.column_names else "next.reward"
    items = list(copy.view({"sum": NStep(2, gamma=0.5, of=reward)}))
    steps = [wanted[ROWS * n + t] for n in range(2) for t in range(rows)]  # without those of a last row
    assert [{n: item[n] for n in steps[0]} for item in items] == steps
    assert items[ROWS - 1 - (reward_at == "next")]["sum_discount"] == 0
    for across in (False, True):
        (item,) = (
            list(copy.take([0]).view(Sequences(rows)))
            if not across
            else [copy.view(Sequences(2 * rows, across=True))[0]]
        )
        ends = [t % rows == rows - 1 for t in range(len(item["is_last"]))]
        assert item["is_terminal"].tolist() == item["is_last"].tolist() == ends


@pytest.mark.parametrize(("given", "kept"), RATES.values(), ids=RATES)
def test_every_kind_of_number_is_one_rate_everywhere(tmp_path, given, kept):
    with ring(tmp_path / "ring", fps=given) as buf:
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
    ten, ntsc, unknown = ring(tmp_path / "one", fps=10), ring(tmp_path / "two", fps=29.97), ring()
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
        writer.write_episode(episode(0, "next"))
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
