"""Nested observations, and a mapping for each step, are stored as flat columns and given back nested if asked."""

import gymnasium
import numpy as np
import pytest

import ringmap
from ringmap.data import (
    EPISODE_DATA_KEY,
    ConcatDataset,
    GoalDataset,
    OfflineToOnlineReplayBuffer,
    convert,
    load_dataset,
)
from ringmap.errors import InputError
from ringmap.storage.columns.values import flattened, nested

T = 6
LEFT = np.arange(T * 12, dtype=np.uint8).reshape(T, 2, 2, 3)
STATE = np.arange(T * 2, dtype=np.float32).reshape(T, 2)
ACTION = np.arange(T, dtype=np.float32)[:, None]
FLAT = {"obs/camera/left": LEFT, "obs/state": STATE, "action": ACTION}
WAYS = {
    "mappings": {"obs": {"camera": {"left": LEFT}, "state": STATE}, "action": ACTION},
    "a mapping per step": {
        "obs": [{"camera": {"left": LEFT[t]}, "state": STATE[t]} for t in range(T)],
        "action": list(ACTION),
    },
    "both": {"obs": {"camera": [{"left": LEFT[t]} for t in range(T)], "state": list(STATE)}, "action": ACTION},
    "partly flat": {"obs": {"camera": {"left": LEFT}}, "obs/state": STATE, "action": ACTION},
}


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            equal(found[name], value)
        else:
            assert np.asarray(found[name]).dtype == value.dtype and np.array_equal(found[name], value)


@pytest.fixture
def buf():
    made = ringmap.ReplayBuffer(100, seed=0)
    made.write_episode({**WAYS["mappings"], EPISODE_DATA_KEY: {"seed": 3}})
    return made


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_one(way):
    buf = ringmap.ReplayBuffer(100, history_len=2, seed=0)
    buf.write_episode(WAYS[way])
    equal(buf.load_episode(0), FLAT)
    equal(buf.load_episode(0, nest=True), WAYS["mappings"])
    buf.write_episode(FLAT)  # of one schema
    equal(buf.load_episode(1), FLAT)


def test_steps_that_are_appended(tmp_path):
    buf = ringmap.ReplayBuffer(100)
    episode = buf.begin_episode()
    for t in range(T):
        episode.append({"obs": {"camera": {"left": LEFT[t]}, "state": STATE[t]}, "action": ACTION[t]})
    episode.finish()
    equal(buf.load_episode(0), FLAT)


def test_all_that_gives_back(buf):
    whole = WAYS["mappings"]
    view = buf.view()
    for found in (buf, view, ConcatDataset([buf]), GoalDataset(buf, seed=0), ConcatDataset([view])):
        equal(found.load_episode(0, nest=True), whole)
    (episode,) = buf.episodes(nest=True)
    assert episode.pop(EPISODE_DATA_KEY) == {"seed": 3}
    equal(episode, whole)
    for batch in (buf.sample(4, nest=True), view.sample(4, nest=True)):
        assert batch["obs"]["camera"]["left"].shape[-3:] == (2, 2, 3) and len(batch.ids) == 4
    assert ConcatDataset([buf]).sample(4, nest=True)["obs"]["state"].shape[-1] == 2
    mix = OfflineToOnlineReplayBuffer(buf, online_storage=buf, batch_size=4, seed=0)
    assert mix.sample(nest=True)["obs"]["camera"]["left"].shape == (4, 2, 2, 3)
    assert "obs/state" in mix.sample()


def test_transitions_are_given_back_nested():
    buf = ringmap.TransitionReplayBuffer(50, {"state": (2,)}, seed=0)
    for t in range(T):
        buf.add({"state": STATE[t]}, ACTION[t], t, {"state": STATE[t] + 2}, t == T - 1)
    (episode,), (flat,) = buf.episodes(nest=True), buf.episodes()
    np.testing.assert_array_equal(episode["obs"]["state"], flat["obs/state"])
    assert episode.keys() - {"obs"} == flat.keys() - {"obs/state"}


def test_what_is_given_back_nested_can_be_written_again(buf, tmp_path):
    convert(buf, tmp_path / "set.h5", progress=False)
    turned = load_dataset(tmp_path / "set.h5", layout="CHW")
    episode = turned.load_episode(0, nest=True)
    assert episode["obs"]["camera"]["left"].shape == (T, 3, 2, 2)
    again = ringmap.ReplayBuffer(100)
    again.write_episode(episode)
    equal(again.load_episode(0), FLAT)


def test_a_schema_a_filter_and_an_update_are_nested_too():
    schema = {"obs": {"state": ((2,), "f4"), "value": ringmap.Column((), "f4", mutable=True)}}
    buf = ringmap.ReplayBuffer(
        100,
        schema=schema,
        seed=0,
        key_filter=lambda c: {n: v for n, v in c.items() if n != "obs/x"},
    )
    buf.write_episode({"obs": {"state": STATE, "x": STATE}})
    buf.update(buf.sample(4).ids, {"obs": {"value": np.full(4, 2.5)}})
    assert set(buf.load_episode(0, nest=True)["obs"]["value"].tolist()) <= {0.0, 2.5}
    space = gymnasium.spaces.Dict(obs=gymnasium.spaces.Dict(state=gymnasium.spaces.Box(-1, 1, (2,))))
    assert ringmap.ReplayBuffer(100, schema=space).column_names == ["obs/state"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"obs": {"a": STATE}, "obs/a": STATE}, "two values would be the column 'obs/a'"),
        ({"obs/a": STATE, "obs": {"a": STATE}}, "two values would be the column 'obs/a'"),
        ({"obs": {"a/b": STATE}}, "obs: key 'a/b' holds a slash"),
        ({"obs/a": {"b": STATE}}, "key 'obs/a' holds a slash"),
        ({"obs": {1: STATE}}, "obs: keys are strings"),
        ({"obs": {"": STATE}}, "obs: keys are strings, and not empty"),
        ({"obs": {}, "x": STATE}, "obs has no leaves"),
        ({"obs": [{"a": 1}, {"b": 1}]}, r"obs: step 1 has \['b'\], and step 0 \['a'\]"),
        ({"obs": [{"a": 1}, 2]}, r"obs: step 1 has int, and step 0 \['a'\]"),
        ({"obs": {"a": STATE, "b": STATE[1:]}}, "column 'obs/b' has 5 steps, expected 6 as in 'obs/a'"),
    ],
)
def test_what_has_no_one_meaning_is_refused(given, message):
    buf = ringmap.ReplayBuffer(100)
    with pytest.raises(InputError, match=message):
        buf.write_episode(given)
    assert buf.num_episodes == 0 and buf.schema is None


def test_columns_of_which_one_would_hold_another_are_not_nested():
    buf = ringmap.ReplayBuffer(100)
    buf.write_episode({"obs": STATE, "obs/a": STATE})
    with pytest.raises(InputError, match="there is a column 'obs', and another one in it, 'obs/a'"):
        buf.load_episode(0, nest=True)
    with pytest.raises(InputError, match="there is a column 'a/b', and another one in it"):
        nested({"a/b/c": 1, "a/b": 2})


def test_columns_that_are_flat_cost_nothing():
    flat = {"a": STATE, "b": 1.0, "c": np.float32(2)}
    assert flattened(flat, "here") is flat
