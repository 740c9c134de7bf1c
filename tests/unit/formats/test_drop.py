"""What a target can't hold is refused in one list, before a byte is written; `drop=` leaves out by name, and nothing
else is."""

import os

import numpy as np
import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.buffers.view import BufferView
from ringmap.data import ShardedReplayBuffer, convert, load_dataset, merge
from ringmap.errors import InputError
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.formats.common import writer as writing
from ringmap.formats.registry import FORMATS, describe_formats, get_format
from tests.unit.formats.test_exported import Box, BoxWriter

STEPS = 4


class SheetWriter(BoxWriter):
    def refuses(self, name, rows):
        return None if rows.dtype.kind in "iuf" else "a sheet holds numbers"


class Sheet(Box):
    """A format of a third party that holds numbers, and no data of episodes."""

    name = "sheet"
    appends = False
    writer = SheetWriter

    @classmethod
    def detect(cls, path):
        return str(path).endswith(".sheet")


@pytest.fixture(autouse=True)
def sheet():
    FORMATS["sheet"] = Sheet
    yield
    del FORMATS["sheet"]


def episode(**more):
    rows = {
        "obs": np.arange(2.0 * STEPS).reshape(STEPS, 2),
        "action": np.zeros((STEPS, 2)),
        "reward": np.arange(1.0 * STEPS),
        "when": np.zeros(STEPS, "M8[s]"),
        "wave": np.zeros(STEPS, "c8"),
    }
    return rows | more


DATA = {"seed": 7, "policy_step": 3, "goal": 2**70, "map": np.zeros(20_000), "room": "left"}
TARGETS = {
    "lerobot": ["when", "wave", "goal", "map", "room"],
    "minari": ["when", "goal", "map"],
    "robomimic": ["when", "goal", "map"],
    "sheet": ["when", "wave", "goal", "map", "room"],
    "hdf5": [],
}
NAMES = {"lerobot": "set", "minari": "set-v0", "robomimic": "set.hdf5", "sheet": "set.sheet", "hdf5": "set.h5"}


def ring(folder):
    with ReplayBuffer(50, path=folder, reward_at="next") as buf:
        buf.write_episode(episode())  # the data come with a later episode
        buf.write_episode({**episode(), EPISODE_DATA_KEY: DATA})
    return str(folder)


def by_dump(source, dest, format, drop):
    with ReplayBuffer.open(source, "r") as buf:
        buf.dump(dest, format, progress=False, drop=drop)


def by_fleet(source, dest, format, drop):
    with ShardedReplayBuffer(os.path.dirname(source)) as buf:
        buf.dump(dest, format, drop=drop)


VERBS = {
    "convert": lambda source, dest, format, drop: convert(source, dest, dest_format=format, progress=False, drop=drop),
    "merge": lambda source, dest, format, drop: merge(
        [source, source], dest, dest_format=format, progress=False, drop=drop
    ),
    "dump": by_dump,
    "fleet": by_fleet,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("verb", VERBS)
def test_all_that_does_not_fit_is_said_at_once(tmp_path, verb, target):
    if target in ("lerobot", "minari"):
        pytest.importorskip({"lerobot": "pyarrow", "minari": "minari"}[target])
    out, refused = tmp_path / "out", TARGETS[target]
    out.mkdir()
    source, dest = ring(tmp_path / "rings" / "one"), out / NAMES[target]
    if refused:
        with pytest.raises(InputError) as caught:
            VERBS[verb](source, dest, target, [])
        assert f"drop={refused}" in str(caught.value)
        assert all(f"{name!r}" in str(caught.value) for name in refused)
        assert os.listdir(out) == []
    VERBS[verb](source, dest, target, refused)
    found = load_dataset(dest, format=target)
    assert len(found.lengths) == (4 if verb == "merge" else 2)
    names = {*found.column_names, *found.episode_column_names}
    assert not names & set(refused)
    assert ("seed" in names) == (target not in ("lerobot", "sheet"))
    getattr(found, "close", str)()


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (["rewrad"], r"drop=\['rewrad'\].*'reward'.*'goal'"),
        (["obs", "action", "reward", "when", "wave"], "leaves no column"),
        ([3], "takes names"),
        (7, "takes a list"),
        ({"obs": 1}, "takes a list"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_what_can_not_be_dropped(tmp_path, verb, drop, message):
    source = ring(tmp_path / "rings" / "one")
    with pytest.raises(InputError, match=message):
        VERBS[verb](source, tmp_path / "set.h5", "hdf5", drop)
    assert os.listdir(tmp_path) == ["rings"]


def test_a_column_that_one_source_lacks_is_dropped(tmp_path):
    paths = [tmp_path / f"{n}.h5" for n in range(2)]
    for path, more in zip(paths, ({}, {"extra": np.zeros(STEPS)}), strict=True):
        with get_format("hdf5").open_writer(path) as writer:
            writer.write_episode(episode(**more))
    with pytest.raises(InputError, match="no column 'extra'"):
        merge(paths, tmp_path / "all.h5", progress=False)
    merge(paths, tmp_path / "all.h5", progress=False, drop=np.array(["extra"]))
    assert load_dataset(tmp_path / "all.h5").column_names == list(episode())


def test_values_of_later_episodes_are_looked_at_first(tmp_path):
    """Text with NUL, a clock that drifts: found before the first episode is written."""
    pytest.importorskip("pyarrow")
    path = tmp_path / "out" / "set"
    path.parent.mkdir()
    clock = np.arange(STEPS) / 10
    with ReplayBuffer(50, reward_at="same") as buf:
        for number in range(3):
            said, drift = ["ok", "a\0b"][number == 2], 0.01 * (number == 1)
            buf.write_episode(
                {
                    **episode(said=[said, "long"] * (STEPS // 2), timestamp=clock + drift),
                    EPISODE_DATA_KEY: {"seed": number},
                }
            )
        with pytest.raises(InputError, match=r"'said'.*NUL.*drop=\['when', 'said'\]"):
            buf.dump(path.with_suffix(".hdf5"), "robomimic", progress=False)
        with pytest.raises(InputError, match=r"0\.01 at step 0, .*drop=\['when', 'wave', 'timestamp'\]"):
            buf.dump(path, "lerobot", progress=False, fps=10)
    assert os.listdir(path.parent) == []


def test_control_first_episodes_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.EpisodeWriter, "looks_at_data", False)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_all_that_does_not_fit_is_said_at_once(tmp_path, "convert", "robomimic")


def test_what_holds_all_is_not_read_ahead(tmp_path, monkeypatch):
    source, asked = ring(tmp_path / "ring"), []
    monkeypatch.setattr(ReplayBuffer, "get_episode_data", lambda self, *_: asked.append(1))
    monkeypatch.setattr(ReplayBuffer, "load_episode", lambda self, *_: asked.append(2))
    monkeypatch.setattr(BufferView, "load_episode", lambda self, *_: asked.append(3))
    with ReplayBuffer.open(source, "r") as buf:
        buf.dump(tmp_path / "set.h5", progress=False)
    assert not asked


@pytest.mark.parametrize("target", ["lerobot", "minari", "robomimic"])
@pytest.mark.parametrize("flag", [[0, 0, 0, 2], [0.0, np.nan, 0.0, 1.0]])
def test_a_flag_that_is_none_is_refused(tmp_path, target, flag):
    pytest.importorskip({"lerobot": "pyarrow"}.get(target, "h5py"))
    rows = {name: values for name, values in episode().items() if name in ("obs", "action", "reward")}
    with ReplayBuffer(50, reward_at="next") as buf:
        buf.write_episode({**rows, "terminated": np.array([0, 0, 0, 1], np.asarray(flag).dtype)})
        buf.write_episode({**rows, "terminated": np.array(flag)})
        with pytest.raises(InputError, match=r"'terminated'.*0 or 1, and step [13] has.*drop=\['terminated'\]"):
            buf.dump(tmp_path / NAMES[target], target, progress=False)
        assert os.listdir(tmp_path) == []
        buf.dump(tmp_path / NAMES[target], target, progress=False, drop="terminated")


@pytest.mark.parametrize("name", [f.name for f in describe_formats() if f.writes and f.available])
def test_refusals_are_known_before_anything_is_opened(tmp_path, name):
    writer = get_format(name).open_writer(tmp_path / "set-v0", mode="overwrite")
    rows = {name: values for name, values in episode().items() if name in ("obs", "action", "reward")}
    assert writer.refusals(rows) == {}
    with pytest.raises(ValueError, match="reward"):
        writer.refusals(rows | {"reward": np.zeros(STEPS + 1)})
    assert os.listdir(tmp_path) == []


def test_a_format_that_only_reads_is_named(tmp_path):
    with pytest.raises(ValueError, match="rlds"):
        convert(ring(tmp_path / "ring"), tmp_path / "set", dest_format="rlds", progress=False)
    assert os.listdir(tmp_path) == ["ring"]


# -- LeRobot's own columns ------------------------------------------------------------------------


def lerobot(path, options=(), **more):
    pytest.importorskip("pyarrow")
    rows = {"obs": np.zeros((STEPS, 2)), "action": np.zeros((STEPS, 2))}
    with get_format("lerobot").open_writer(path, fps=10, reward_at="same", **dict(options)) as writer:
        writer.write_episode({**rows, **more})
    return load_dataset(path, output="numpy").load_episode(0)


CLOCK = np.arange(STEPS) / 10


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("timestamp", CLOCK + 2e-4, "0.0002 at step 0"),
        ("timestamp", CLOCK * 3, "0.3.* at step 1, and .* 1 / fps = 0.1"),
        ("timestamp", [0, np.nan, 0.2, 0.3], "nan at step 1"),
        ("timestamp", np.zeros((STEPS, 2)), "a number there"),
        ("index", [5, 3, 8, 1], "no such count"),
        ("frame_index", [0.0, 1, 2, 3], "no such count"),
        ("episode_index", [0, 0, 1, 1], "no such count"),
        ("task", [1, 2, 3, 4], "one text a step"),
    ],
)
def test_a_column_that_lerobot_fills_in_itself(tmp_path, name, rows, message):
    rows = np.asarray(rows)
    with pytest.raises(InputError, match=rf"'{name}'.*{message}.*columns=.*drop=\['{name}'\]"):
        lerobot(tmp_path / "no", **{name: rows})
    got = lerobot(tmp_path / "yes", {"columns": {name: "mine"}}, **{name: rows})
    np.testing.assert_array_equal(got["mine"], rows)
    assert got["mine"].dtype == rows.dtype


def test_counters_are_counted_anew_and_that_is_said(tmp_path, caplog):
    got = lerobot(
        tmp_path / "set",
        timestamp=CLOCK + 5e-5,
        frame_index=np.arange(STEPS),
        index=np.arange(STEPS) + 90,
        episode_index=np.full(STEPS, 6),
    )
    assert [r.getMessage().partition(": LeRobot")[2] for r in caplog.records] == [
        " counts anew: ['timestamp', 'frame_index', 'index', 'episode_index']"
    ]
    assert got["index"].tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(got["timestamp"], CLOCK.astype("f4"))


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        ({"task": 3}, "'task'.*is text"),
        ({"tasks": np.array(["a", "b"])}, "'tasks'.*one task"),
        ({"task": "a", "tasks": "b"}, "'task.*'.*one task"),
        ({"task": "a", "tasks": np.array(["a"])}, None),
    ],
)
def test_an_episode_of_lerobot_has_one_task(tmp_path, data, refused):
    if refused is None:
        assert lerobot(tmp_path / "set", **{EPISODE_DATA_KEY: data})["task"].tolist() == ["a"] * STEPS
        return
    with pytest.raises(InputError, match=refused):
        lerobot(tmp_path / "set", **{EPISODE_DATA_KEY: data})


# -- collections ----------------------------------------------------------------------------------


def collected(path, **options):
    with ringmap.World("ringmap/TwoRoom-v1", 1, (16, 16), max_episode_steps=4) as world:
        world.set_policy(ringmap.policy.RandomPolicy(seed=0))
        world.collect(path, episodes=2, seed=0, progress=False, **options)


def test_a_collection_leaves_out_by_name(tmp_path):
    path = tmp_path / "set.h5"
    collected(path, drop=["pixels", "agent.color"])
    found = load_dataset(path)
    assert "pixels" not in found.column_names
    assert "agent.color" not in found.episode_column_names
    assert "seed" in found.episode_column_names
    found.close()
    with pytest.raises(InputError, match=r"drop=\['pixles'\]"):
        collected(tmp_path / "no.h5", drop="pixles")
    with pytest.raises(InputError, match="can be resumed needs this"):
        collected(tmp_path / "no.h5", drop="seed", resume=True)
    with ReplayBuffer(100) as buf:
        collected(None, writer=buf, drop="pixels", commit_every=2)
        assert "pixels" not in buf.column_names
    assert os.listdir(tmp_path) == ["set.h5"]


def test_a_collection_that_does_not_fit_creates_nothing(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match="agent.color") as caught:
        collected(out / "set.sheet", format="sheet")
    assert os.listdir(out) == []
    drop = eval(str(caught.value).rpartition("drop=")[2].partition("]")[0] + "]")
    collected(out / "set.sheet", format="sheet", drop=drop)
    assert os.listdir(out) == ["set.sheet"]
