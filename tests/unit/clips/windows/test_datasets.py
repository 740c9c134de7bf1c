"""Windows over datasets: every format, and what is made of several, against the plain model."""

import logging

import numpy as np
import pytest

from ringmap import ReplayBuffer
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
from ringmap.datasets.windows import DatasetRows
from ringmap.errors import ClipIndexError, InputError
from ringmap.testing import ComputedTests
from tests.tiers import few
from tests.unit.clips.windows import model
from tests.unit.clips.windows.test_property import (
    random_request,
)

FORMATS = {
    "hdf5": "demo.h5",
    "zarr": "demo.zarr",
    "folder": "demo",
    "video": "films",
    "lance": "demo.lance",
    "ringmap": "ring",
}


def written(path, format, episodes):
    """Write episodes at a path in a format."""
    if format == "ringmap":
        with ReplayBuffer(sum(len(e["where"]) for e in episodes), path=path) as buf:
            for episode in episodes:
                buf.write_episode(episode)
        return
    options = {"image_format": "png"} if format == "folder" else {}  # it loses nothing
    with get_format(format).open_writer(path, **options) as writer:
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


def with_images(episodes):
    """Return the same episodes with a column of images, whose values tell episode and step."""
    for number, e in enumerate(episodes):
        red = np.arange(len(e["where"]))[:, None, None, None]
        e["pixels"] = np.concatenate([red, red * 0 + number, red * 0], 3).repeat(8, 1).repeat(6, 2)
        e["pixels"] = (e["pixels"] * 3).astype("u1")
    return episodes


def shown(item, is_turned):
    """Return an item of the model as a dataset shows it: images with their channels in front, or as they are stored."""
    return {n: np.moveaxis(v, -1, -3) if n == "pixels" and is_turned else v for n, v in item.items()}


def check_case(open_dataset, kept, number, count=8, is_turned=False):
    """Compare one random request over a dataset with the model; return how many items were compared."""
    rng = np.random.default_rng([number, 110])
    request = random_request(rng)
    if "pixels" in kept[0] and number % 3:  # the others have them at the anchor alone
        pad = ["edge", "zero", 9, None][rng.integers(4)]
        request["window"]["pixels"] = Window(rng.integers(-3, 4, int(rng.integers(1, 5))), pad=pad)
        if request["columns"] is not None:
            request["columns"] = [*request["columns"], "pixels"]
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
        wanted = model.item(kept[ep], t, request["window"], reward_at, request["columns"])
        model.same(got, shown(wanted, is_turned))
    return count


def episodes_of(seed, most=12):
    rng = np.random.default_rng(seed)
    return [model.episode(ep, int(rng.integers(1, 16))) for ep in range(most)]


@pytest.mark.parametrize("output", ["torch", "numpy"])
@pytest.mark.parametrize("format", few(FORMATS, 2))
def test_windows_over_every_format_are_those_of_the_plain_loop(home, format, output):
    """30 random windows over each format."""
    kept, path = episodes_of(3), home / FORMATS[format]
    written(path, format, kept)

    def opened(request, reward_at):
        return load_dataset(path, output=output, reward_at=reward_at, **request)

    assert sum(check_case(opened, kept, n) for n in range(30 if output == "numpy" else 10)) > 40


@pytest.mark.parametrize(("output", "layout"), [("torch", "CHW"), ("numpy", "HWC")])
@pytest.mark.parametrize("format", few(["hdf5", "ringmap", "zarr", "folder", "lance"], 2))
def test_windows_of_images_over_formats_are_those_of_the_plain_loop(home, format, output, layout):
    """8 random windows with images over each format whose images lose nothing."""
    kept, path = with_images(episodes_of(4)), home / FORMATS[format]
    written(path, format, kept)

    def opened(request, reward_at):
        return load_dataset(path, output=output, layout=layout, reward_at=reward_at, **request)

    compared = sum(check_case(opened, kept, n, is_turned=layout == "CHW") for n in range(8))
    assert compared > 30


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


@pytest.mark.parametrize("kind", few(["cached", "goal", "plain", "merge", "concat"], 2))
def test_windows_over_joined_datasets_are_those_of_the_plain_loop(home, kind):
    kept = episodes_of(5)
    opened = joined(kind, home, kept)
    assert sum(check_case(opened, kept, n) for n in range(40)) > 100


# -- computed columns ---------------------------------------------------------------------------


def closeness(achieved, goal):
    return -np.abs(achieved - goal).sum(1)


COMPUTED = {
    "at": Index(),
    "left": TimeToEnd(),
    "sum": NStep(3, gamma=0.9, next=["obs"]),
    "return": ReturnToGo(0.9),
    "sure": ReturnToGo(offsets=range(-1, 3)),
    "double": lambda batch: batch["obs"] * 2,
}


def same_batches(buf, dataset, window):
    """Compare all items of a dataset with those of a buffer of the same episodes."""
    view = buf.view(window=window)
    ids = list(range(len(view)))
    expected = view[ids]
    items = dataset.__getitems__(ids)
    assert len(dataset) == len(ids)
    assert set(items[0]) == set(expected)
    for i in ids:
        for name, values in expected.items():
            np.testing.assert_array_equal(items[i][name], values[i], err_msg=name)


def test_sums_that_were_kept_follow_reward_at():
    """One column, one dataset, and rewards that stand elsewhere than it said at first."""
    dataset = Plain([{"where": e["obs"], **e} for e in ComputedTests().episodes()])
    shared, found = ReturnToGo(0.9), []
    for place in ("same", "next", "same"):
        dataset.reward_at = place
        for column in (shared, ReturnToGo(0.9)):
            view = dataset.view({"return": column}, ["reward", "return"])
            found.append(np.array([item["return"] for item in view.__getitems__(range(len(view)))]))
    for kept, fresh in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(kept, fresh)
    assert (found[0] != found[2]).any()


@pytest.mark.parametrize("reward_at", ["next", "same"])
@pytest.mark.parametrize("kind", ["hdf5", "plain", "concat", "live"])
def test_computed_columns_are_those_of_a_buffer(home, kind, reward_at):
    episodes = ComputedTests().episodes()
    buf = ReplayBuffer(100, reward_at=reward_at)
    for episode in episodes:
        buf.write_episode(episode)
    written_lives(home / "all.h5", episodes)
    if kind == "hdf5":
        dataset = load_dataset(home / "all.h5", window=COMPUTED, reward_at=reward_at)
        for window in (Sequences(2, burn_in=1), {"again": Hindsight(closeness, "final", k=1e9)}):
            whole = load_dataset(home / "all.h5", window=window, reward_at=reward_at)
            same_batches(buf, whole, window)
    else:
        if kind == "plain":
            dataset = Plain([{"where": e["obs"], **e} for e in episodes])
        elif kind == "concat":
            written_lives(home / "a.h5", episodes[:3])
            written_lives(home / "b.h5", episodes[3:])
            parts = [load_dataset(home / f"{n}.h5", output="numpy") for n in "ab"]
            dataset = ConcatDataset(parts)
        else:
            dataset = ConcatDataset([buf])
        dataset.reward_at = reward_at
        columns = ["obs", "reward", "terminated", "achieved_goal", "desired_goal", *COMPUTED]
        dataset = dataset.view(COMPUTED, columns)
    same_batches(buf, dataset, COMPUTED)
    same_batches(buf, dataset, COMPUTED)  # what was kept of the first pass is right, too


def written_lives(path, episodes):
    with get_format("hdf5").open_writer(path) as writer:
        for episode in episodes:
            writer.write_episode(episode)


def test_sums_over_a_part_that_grows_are_never_old_ones():
    """A buffer that evicts gives its rows other numbers: a sum kept by number would be another episode's."""
    buf = ReplayBuffer(12, spare_rows=4, reward_at="same")
    dataset = ConcatDataset([buf])
    buf.write_episode({"reward": np.zeros(4)})
    view = dataset.view({"return": ReturnToGo()})
    for value in range(1, 8):
        for _ in range(2):
            buf.write_episode({"reward": np.full(4, float(value))})
        assert view.__getitems__([len(view) - 4])[0]["return"] == 4.0 * value


# -- forms --------------------------------------------------------------------------------------


def test_pictures_and_text_come_as_clips_do(tmp_path):
    """Channels first, as tensors; text as Python's own; a transform gets items."""
    import torch

    pixels = np.random.default_rng(0).integers(0, 255, (6, 8, 9, 3)).astype(np.uint8)
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        writer.write_episode({"pixels": pixels, "task": [f"do {i}" for i in range(6)]})
    window = {"pixels": Window(range(-1, 1), pad="edge"), "task": Window([0, 1], pad="edge")}
    dataset = load_dataset(tmp_path / "a.h5", window=window)
    item = dataset[0]
    assert isinstance(item["pixels"], torch.Tensor)
    assert isinstance(item["pixels_is_pad"], torch.Tensor)
    np.testing.assert_array_equal(item["pixels"], pixels[[0, 0]].transpose(0, 3, 1, 2))
    assert item["task"] == ["do 0", "do 1"]
    alone = load_dataset(tmp_path / "a.h5", columns=["task", "pixels"], window={})[2]
    assert alone["task"] == "do 2"
    assert alone["pixels"].shape == (3, 8, 9)
    stored = load_dataset(tmp_path / "a.h5", window=window, layout="HWC", output="numpy")[5]
    np.testing.assert_array_equal(stored["pixels"], pixels[4:6])
    changed = load_dataset(tmp_path / "a.h5", window=window, transform=lambda item: {"sum": item["pixels"].shape})
    assert changed[0] == {"sum": (2, 3, 8, 9)}


def test_clips_of_some_columns(tmp_path):
    """`columns=` without a window: clips as ever, of these columns alone; nothing else is read."""
    episode = {"obs": np.arange(8), "action": np.arange(16).reshape(8, 2), "other": np.ones(8)}
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        writer.write_episode(episode)
    whole = load_dataset(tmp_path / "a.h5", num_steps=2, frameskip=2)
    some = load_dataset(tmp_path / "a.h5", num_steps=2, frameskip=2, columns=["obs", "action"], anchors=slice(1, -4))
    assert list(some.clip_indices) == [(0, 1), (0, 2), (0, 3)]
    for number, clip in enumerate(some):
        assert list(clip) == ["obs", "action"]
        for name, values in clip.items():
            np.testing.assert_array_equal(values, whole[number + 1][name])


def test_episodes_are_chosen_by_their_data(tmp_path):
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        for number in range(4):
            writer.write_episode({"obs": 10 * number + np.arange(3), "_episode_data": {"good": number % 2}})
    dataset = load_dataset(tmp_path / "a.h5", where=lambda data: data["good"])
    assert [int(item["obs"][0]) for item in dataset] == [10, 11, 12, 30, 31, 32]
    window = {"obs": Window([0, 1])}
    dataset = load_dataset(tmp_path / "a.h5", where="good = 1", window=window)
    assert [item["obs"].tolist() for item in dataset] == [[10, 11], [11, 12], [30, 31], [31, 32]]
    goals = GoalDataset(dataset, (0, 0, 0, 1), goal_keys={"obs": "goal"}, seed=0)
    assert [item["goal"].tolist() for item in goals] == [[10], [11], [30], [31]]
    assert len(ConcatDataset([dataset, dataset])) == 8
    assert ConcatDataset([dataset, dataset])[5]["obs"].tolist() == [11, 12]


def test_goals_lie_after_the_anchor(tmp_path):
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        for number in range(5):
            writer.write_episode({"obs": 100 * number + np.arange(6)})
    whole = load_dataset(tmp_path / "a.h5", output="numpy")
    goals = GoalDataset(whole, (0, 0.5, 0.5, 0), goal_keys={"obs": "goal"}, seed=0)
    for view in (
        goals.view({"obs": Window([-1, 0])}),
        GoalDataset(whole.view({"obs": Window([-1, 0])}), (0, 0.5, 0.5, 0), goal_keys={"obs": "goal"}),
    ):
        assert list(view.clip_indices) == [(ep, t) for ep in range(5) for t in range(1, 5)]
        for (ep, t), item in zip(view.clip_indices, view, strict=True):
            assert item["obs"].tolist() == [100 * ep + t - 1, 100 * ep + t]
            assert 100 * ep + t < item["goal"][0] < 100 * ep + 6


def test_joined_views_agree_on_their_anchors(tmp_path):
    written(tmp_path / "a.h5", "hdf5", episodes_of(1))
    one = load_dataset(tmp_path / "a.h5", window={"where": Window([0, 1])}, columns=["where"])
    two = load_dataset(tmp_path / "a.h5", window={"flag": Window([0, 1])}, columns=["flag"])
    assert set(MergeDataset([one, two])[3]) == {"where", "flag"}
    padded = {name: Window([0, 1], pad="edge") for name in ("where", "flag")}
    both = load_dataset(tmp_path / "a.h5", window=padded)
    kept = MergeDataset([both, both], [["where"], ["reward"]])
    assert set(kept[3]) == {"where", "where_is_pad", "reward"}
    other = load_dataset(tmp_path / "a.h5", window={"where": Window([-1, 0])})
    with pytest.raises(InputError, match="other anchors than dataset 0"):
        ConcatDataset([one, other])


def test_a_buffer_on_disk_says_where_its_rewards_stand(tmp_path):
    with ReplayBuffer(50, path=tmp_path / "ring", reward_at="next", fps=10) as buf:
        buf.write_episode({"reward": np.array([np.nan, 1, 2])})
    window = {"return": ReturnToGo(), "reward": Window(seconds=[0.1], pad="zero")}
    dataset = load_dataset(tmp_path / "ring", window=window, output="numpy")
    assert (dataset.fps, dataset.reward_at) == (10, "next")
    assert [float(item["return"]) for item in dataset] == [3, 2, 0]


# -- bad input ----------------------------------------------------------------------------------


def wrong_shape(achieved, goal):
    return closeness(achieved, goal)[:, None]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"window": {"rewrad": Window([0])}}, "'rewrad' .*'reward'"),
        ({"columns": ["obss"]}, "'obss' .*'obs'"),
        ({"window": {"obs": Window([0], pad="nan")}}, "pad='nan', but the column holds int64"),
        ({"window": {"obs": Window([0], pad="zero", mask="reward")}}, "'reward'.* is stored"),
        ({"window": {"again": Hindsight(closeness, goal="gaol")}, "reward_at": "next"}, "'gaol'"),
        ({"window": {"sum": NStep(3)}}, "pass reward_at='next'"),
        ({"window": {"sum": ReturnToGo()}}, "pass reward_at='next'"),
        ({"window": {"obs": [0, 1]}}, "must be a Window"),
        ({"window": [0, 1]}, "must be a mapping"),
        ({"window": {"obs": Window(seconds=[0.1])}}, "pass fps="),
        ({"window": {"obs": Window(seconds=[0.15])}, "fps": 10}, "1.50 steps"),
        ({"anchors": slice(1, 3)}, "anchors must be a slice"),
        ({"drop_all_padded": True}, "drop_all_padded is for padded columns"),
        ({"fps": -1}, "fps must be a positive number"),
        ({"reward_at": "here"}, "reward_at must be one of"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_read(tmp_path, request_, message):
    written_lives(tmp_path / "a.h5", ComputedTests().episodes())
    with pytest.raises(InputError, match=message):
        load_dataset(tmp_path / "a.h5", **request_)


def test_a_reward_function_of_another_shape_is_refused(tmp_path):
    written_lives(tmp_path / "a.h5", ComputedTests().episodes())
    window = {"again": Hindsight(wrong_shape, k=1e9)}
    dataset = load_dataset(tmp_path / "a.h5", window=window, reward_at="next")
    with pytest.raises(InputError, match=r"returned shape \(1, 1\) for 1 goals, expected \(1,\)"):
        dataset[0]


def test_short_episodes_are_never_skipped_in_silence(tmp_path, caplog):
    """A window that most episodes are too short for says so, once; one that none is long enough for says by how
    much."""
    with get_format("hdf5").open_writer(tmp_path / "a.h5") as writer:
        for length in (3, 4, 10):
            writer.write_episode({"obs": np.arange(length)})
    window = {"obs": Window(range(5))}
    with caplog.at_level(logging.WARNING, "ringmap"):
        dataset = load_dataset(tmp_path / "a.h5", window=window)
        assert (len(dataset), len(dataset), dataset.num_unreachable_steps) == (6, 6, 7)
        clips = load_dataset(tmp_path / "a.h5", num_steps=5)
        assert (len(clips), len(clips), clips.num_unreachable_steps) == (6, 6, 7)
    assert [r.message.count("7 of 17 stored steps are in no clip") for r in caplog.records] == [
        1,
        1,
    ]
    none = load_dataset(tmp_path / "a.h5", window={"obs": Window(range(-4, 12))})
    with pytest.raises(ClipIndexError, match=r"16 steps.*\(of 3\) has 10 steps; give the columns a pad="):
        none[0]
    assert none.num_unreachable_steps == 17
    padded = load_dataset(tmp_path / "a.h5", window={"obs": Window(range(-4, 12), pad="edge")})
    assert (len(padded), padded.num_unreachable_steps) == (17, 0)


def as_the_ring_is(folder, copy):
    """Tell whether a copy of an episode that lost its front is read as the ring is: no beginning, and a reward in its
    first row."""
    windows = {"x": Window(range(3)), "reward": Window(range(-1, 2), pad="zero")}, Sequences(3)
    with ReplayBuffer(30, path=folder / "ring", reward_at="next", seed=0) as buf:
        chain = buf.begin_episode(commit_every=3)
        for step in range(24):
            chain.append({"x": step, "reward": step + 0.5})
        chain.finish()
        buf.write_episode({"x": np.arange(100, 112), "reward": np.arange(12) + 0.5})
        assert buf.lengths.tolist() == [18, 12]  # six steps went
        views = [buf.view(window=window) for window in windows]
        expected = [view[np.arange(len(view))] for view in views]
        buf.dump(folder / "copy.h5", progress=False)
        buf.dump(folder / "copy.zarr", progress=False)
    place = {"h5": "copy.h5", "zarr": "copy.zarr"}.get(copy, "ring")
    whole = load_dataset(folder / place, output="numpy", reward_at="next")
    assert whole.first_steps().tolist() == [6, 0]
    assert whole.take([1, 0, 1]).first_steps().tolist() == [0, 6, 0]
    if copy == "taken":
        whole = whole.take([0, 1])
    elif copy == "joined":
        other = load_dataset(folder / "copy.h5", output="numpy").take([1])
        whole = ConcatDataset([whole.take([0]), other])
    elif copy == "merged":
        whole = MergeDataset([whole])
    assert expected[0]["reward"][0].tolist() == [0, 6.5, 7.5]
    assert not expected[1]["is_first"][0, 0]
    same = []
    for window, wanted in zip(windows, expected, strict=True):
        view = whole.view(window=window)
        got = view[np.arange(len(view))]
        names = {"x", "reward", "reward_is_pad", "is_first", "is_last"} & set(wanted)
        same += [np.array_equal(np.asarray(got[n]), np.asarray(wanted[n])) for n in names]
    return all(same)


@pytest.mark.parametrize("copy", ["ring", "h5", "zarr", "taken", "joined", "merged"])
def test_an_episode_that_lost_its_front_has_no_beginning(tmp_path, copy):
    assert as_the_ring_is(tmp_path, copy)


def test_control_of_lost_fronts(tmp_path, monkeypatch):
    monkeypatch.setattr(DatasetRows, "gone", lambda self, episodes: np.zeros(len(episodes), int))
    assert not as_the_ring_is(tmp_path, "h5")
