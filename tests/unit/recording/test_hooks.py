"""Builders, validators and contexts: what they are handed, and what comes of their errors."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.errors import InputError
from ringmap.recording import ReplayBufferCollectionWrapper
from tests.unit.recording.reading import assert_transitions, transition_buffer
from tests.unit.recording.scripted import KINDS, Model, Scripted, code
from tests.unit.recording.test_construction import vector

NINE = {
    "cached_obs",
    "cached_context",
    "action",
    "next_obs",
    "reward",
    "terminated",
    "truncated",
    "env_index",
    "rb_single_space",
}


def drive(env, model, count):
    env.reset(seed=3)
    model.reset(np.ones(model.num, bool))
    for i in range(count):
        actions = [i + k for k in range(model.num)]
        env.step(np.array(actions))
        model.step(actions)


def test_a_function_is_called_with_nine_keywords_for_each_slot():
    buf = ReplayBuffer(1000, schema={"now": ((3,), np.int32), "then": ((3,), np.int32), "reward": ((), np.float32)})
    calls = []

    def build(**given):
        calls.append(given)
        assert set(given) == NINE
        return {"now": given["cached_obs"], "then": given["next_obs"], "reward": given["reward"]}

    contexts = []

    def context_fn(info, options, seed):
        contexts.append((info["number"], options, seed))
        return {"begun_at": info["number"]}

    model = Model(2, "NextStep")
    env = ReplayBufferCollectionWrapper(vector(2), buf, transition_builder=build, context_fn=context_fn)
    drive(env, model, 20)
    env.close()
    model.close()
    rows = [row for step in model.transitions for row in step]
    assert len(calls) == len(rows)
    for got, (now, action, reward, after, terminated, truncated, slot, _, steps) in zip(calls, rows, strict=True):
        number = [(int(o[0]) << 20) + (int(o[1]) << 8) + int(o[2]) for o in (got["cached_obs"], got["next_obs"])]
        assert number == [now, after]
        assert (got["action"], got["reward"], got["terminated"], got["truncated"], got["env_index"]) == (
            action,
            reward,
            terminated,
            truncated,
            slot,
        )
        assert got["cached_context"] == {"begun_at": now - steps}
        assert set(got["rb_single_space"].spaces) == {"now", "then", "reward"}
    assert contexts[:2] == [(code(0, 0, 0), None, 3), (code(1, 0, 0), None, 4)]
    assert all(rest == (None, None) for _, *rest in map(list, contexts[2:]) for rest in [tuple(rest)])
    assert buf.lengths.tolist() == [len(e.actions) for e in model.stored], "a row per step"
    assert [o[2] for o in buf.load_episode(0)["then"].tolist()] == list(range(1, len(model.stored[0].obs)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_transforms_the_raw_dict(kind):
    seen = []

    class Transform:
        def transform(self, raw):
            seen.append(raw)
            return {"t": raw["t"], "obs": raw["obs"] if kind != "tuple" else raw["obs"][0]}

    buf = ReplayBuffer(1000)
    env = ReplayBufferCollectionWrapper(Scripted(kind=kind), buf, transition_builder=Transform())
    env.reset()
    env.step(7)
    env.close()
    assert set(seen[0]) == {
        "obs",
        "next_obs",
        "action",
        "reward",
        "terminated",
        "truncated",
        "done",
        "context",
        "env_index",
        "episode_id",
        "t",
        "is_first",
        "is_last",
    }
    assert env.observation_space.contains(seen[0]["obs"])
    assert env.observation_space.contains(seen[0]["next_obs"])
    assert seen[0]["action"] == 7 and seen[0]["reward"] == 7.5
    names = {"dict": ["t", "obs/in/number", "obs/place"]}.get(kind, ["t", "obs"])
    assert buf.column_names == names, "a mapping becomes columns"


def test_what_a_builder_got_is_its_own():
    kept = []

    class Transform:
        def transform(self, raw):
            kept.append((raw["obs"], raw["obs"].copy()))
            raw["next_obs"][:] = -1
            return {"obs": raw["obs"]}

    env = ReplayBufferCollectionWrapper(Scripted(reuse=True), ReplayBuffer(99), transition_builder=Transform())
    for _ in range(4):
        env.reset()
        env.step(1)
    assert all((a == b).all() for a, b in kept)


def test_a_builder_for_transitions():
    model = Model(2, "SameStep")
    buf = transition_buffer("dict")

    def build(cached_obs, action, next_obs, reward, terminated, truncated, rb_single_space, **_):
        made = {
            "obs": cached_obs,
            "action": action,
            "reward": reward,
            "next_obs": next_obs,
            "terminated": terminated,
            "truncated": truncated,
        }
        assert rb_single_space["obs/in/number"] == spaces.Discrete(1 << 24)
        return made

    env = ReplayBufferCollectionWrapper(
        vector(2, "SameStep", "dict"), buf, transition_builder=build, validate_transition=True
    )
    drive(env, model, 20)
    assert_transitions("dict", buf, model.transitions)


@pytest.mark.parametrize(
    ("made", "fault"),
    [
        ({"x": 9.0}, r"'x' is not in Box\(-1"),
        ({"x": 0.5, "y": 1}, "expected columns"),
        ({}, "expected columns"),
        ({"x": [0.5]}, "'x' is not in"),
        ({"x": "a"}, "of another kind"),
        (None, "returned NoneType"),
    ],
)
def test_what_a_builder_made_is_validated(made, fault):
    class Small(Scripted):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Box(-1, 1, (), np.float32)

    env = Small()
    buf = ReplayBuffer(99, schema={"action": ((), np.float32)})

    def builder(**_):
        return made if made is None else {n.replace("x", "action"): v for n, v in made.items()}

    wrapper = ReplayBufferCollectionWrapper(env, buf, transition_builder=builder, validate_transition=True)
    wrapper.reset()
    with pytest.raises(ValueError, match=fault.replace("'x'", "'action'")):
        wrapper.step(np.float32(0))
    wrapper.close()
    assert buf.num_episodes == 0


class Off(gymnasium.Env):
    """Leaves its observation space at some steps."""

    observation_space, action_space = spaces.Box(0, 100, (1,), np.float32), spaces.Discrete(5)

    def __init__(self, at):
        self.at, self.t = at, 0

    def reset(self, seed=None, options=None):
        self.t = 0
        return np.float32([0]), {}

    def step(self, action):
        self.t += 1
        value = -1 if self.t in self.at else self.t
        return np.float32([value]), 1.0, self.t == 10, False, {}


def test_a_validator_cuts_the_episode_and_the_run_goes_on():
    buf = ReplayBuffer(1000)
    env = ReplayBufferCollectionWrapper(Off({4}), buf, validate_transition=True)
    env.reset()
    errors = []
    for t in range(10):
        try:
            env.step(t % 5)
        except ValueError as error:
            errors.append(t)
            assert "'obs' is not in" in str(error) or "'next_obs' is not in" in str(error)
            assert "its episode ends before it" in error.__notes__[0]
    assert errors == [3, 4], "into the observation, and out of it"
    got = [e for e in buf.episodes()]
    assert [[float(o[0]) for o in e["obs"]] for e in got] == [[0, 1, 2, 3], [5, 6, 7, 8, 9, 10]]
    assert [[int(a) for a in e["action"]] for e in got] == [[0, 1, 2, 0], [0, 1, 2, 3, 4, 0]]
    assert [bool(e["terminated"][-1]) for e in got] == [False, True]


def test_actions_and_rewards_are_validated_too():
    class Odd(Off):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, float("nan") if action == 3 else 1.0, *rest

    env = ReplayBufferCollectionWrapper(Odd(()), ReplayBuffer(99), validate_transition=True)
    env.reset()
    with pytest.raises(ValueError, match="'action' is not in Discrete"):
        env.step(7)
    with pytest.raises(ValueError, match="'reward' is NaN"):
        env.step(3)
    env.step(1)


def test_other_slots_keep_their_step_when_one_is_refused():
    model = Model(3, "NextStep", faulty={code(1, 0, 1), code(1, 1, 1), code(2, 0, 2)})
    buf = ReplayBuffer(1000, schema={"info/number": ((), np.int64)})

    class Builder:
        def transform(self, raw):
            if raw["info/number"] in model.faulty:
                raise KeyError("planted")
            return {"info/number": raw["info/number"]}

    env = ReplayBufferCollectionWrapper(vector(3), buf, transition_builder=Builder())
    env.reset()
    model.reset(np.ones(3, bool))
    for i in range(25):
        try:
            env.step(np.full(3, i))
        except KeyError as error:
            assert "planted" in str(error)
        model.step([i] * 3)
    env.close()
    model.close()
    assert model.errors
    assert [buf.load_episode(i)["info/number"].tolist() for i in range(buf.num_episodes)] == [
        e.obs[1:] for e in model.stored
    ]


def test_contexts_are_columns_constant_in_their_episode():
    schema = {"t": ((), np.int64), "context/size": ((2,), np.float32), "context/name": ((), "U8")}
    buf = ReplayBuffer(1000, schema=schema)
    given = []

    def context_fn(info, options, seed):
        given.append((info["number"], options, seed))
        return {"size": np.full(2, len(given)), "name": f"n{len(given)}"}

    env = ReplayBufferCollectionWrapper(vector(2, "SameStep"), buf, context_fn=context_fn)
    env.reset(seed=[7, None], options={"a": 1})
    for i in range(8):
        env.step(np.full(2, i))
    env.reset(options={"reset_mask": np.array([False, True]), "b": 2})
    env.close()
    assert given[:2] == [(code(0, 0, 0), {"a": 1}, 7), (code(1, 0, 0), {"a": 1}, None)]
    assert given[-1][1:] == ({"b": 2}, None)
    names = set()
    for episode in buf.episodes():
        assert len(set(episode["context/name"])) == 1
        number = int(episode["context/name"][0][1:])
        assert {tuple(v) for v in np.array(episode["context/size"]).tolist()} == {(number, number)}
        names.add(number)
    assert len(names) == buf.num_episodes > 2


def test_contexts_of_two_kinds_do_not_become_one():
    """Episodes that end at one step are stored together: a number would turn into a string that fits."""
    contexts = iter(["first", 7] * 9)
    buf = ReplayBuffer(1000, schema={"t": ((), np.int64), "context": ((), "U8")})
    together = vector(2, "SameStep")
    env = ReplayBufferCollectionWrapper(together, buf, context_fn=lambda *_: next(contexts))
    env.reset(seed=0)
    for one in together.envs:
        one.length, one.ends = 2, True
    env.step(np.zeros(2))
    with pytest.raises(InputError, match="'context'.*another kind"):
        env.step(np.zeros(2))
    assert [list(episode["context"]) for episode in buf.episodes()] == [["first"] * 3]


def test_a_cut_episode_keeps_the_context_of_the_environment_s():
    calls, contexts = [], []

    def context_fn(info, options, seed):
        calls.append(1)
        return len(calls)

    def build(cached_context, next_obs, **_):
        contexts.append(cached_context)
        if next_obs[0] == 2:
            raise ValueError("planted")
        return {"x": cached_context}

    buf = ReplayBuffer(99)
    env = ReplayBufferCollectionWrapper(Off(()), buf, transition_builder=build, context_fn=context_fn)
    env.reset()
    env.step(0)
    with pytest.raises(ValueError, match="planted"):
        env.step(0)
    env.step(0)
    env.close()
    assert contexts == [1, 1, 1] and len(calls) == 1
    assert [e["x"] for e in buf.episodes()] == [[1], [1]]


def test_a_builder_may_use_its_array_again():
    mine = np.zeros(1)

    def build(next_obs, **_):
        mine[:] = next_obs
        return {"x": mine}

    buf = ReplayBuffer(99)
    env = ReplayBufferCollectionWrapper(Off(()), buf, transition_builder=build)
    env.reset()
    for _ in range(10):
        env.step(0)
    assert buf.load_episode(0)["x"][:, 0].tolist() == list(range(1, 11))


def test_a_context_that_fails_or_lacks_a_part_is_an_error_and_the_run_goes_on():
    answers = iter([ZeroDivisionError("planted"), {}, {"x": 1.0}, {"x": 1.0}])

    def context_fn(info, options, seed):
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    buf = ReplayBuffer(99, schema={"context/x": ((), np.float32)})
    env = ReplayBufferCollectionWrapper(vector(1, "Disabled"), buf, context_fn=context_fn)
    with pytest.raises(ZeroDivisionError, match="planted"):
        env.reset()
    with pytest.raises(InputError, match="context_fn returned nothing of it"):
        for _ in range(9):
            *_, terminated, truncated, _ = env.step([1])
    with pytest.raises(RuntimeError, match="ended its episode"):
        env.step([1])
    env.reset()
    env.reset()
    assert buf.num_episodes == 0


def test_an_episode_longer_than_the_buffer_is_cut_there_and_said():
    class Endless(Off):
        def step(self, action):
            obs, *_ = super().step(action)
            return np.float32([self.t]), 1.0, False, False, {}

    for stream in (False, True):
        buf = ReplayBuffer(5, schema={"obs": ((1,), np.float32), "t": ((), int), "is_last": ((), bool)})
        env = ReplayBufferCollectionWrapper(Endless(()), buf, stream=stream)
        env.reset()
        errors = []
        for t in range(9):
            try:
                env.step(0)
            except InputError as error:
                assert "exceeds max_steps=5" in str(error)
                errors.append(t)
            if t == 4:
                assert buf.load_episode(0)["obs"][:, 0].tolist() == [0, 1, 2, 3, 4]
        assert errors == [4]
        assert buf.load_episode(0)["is_last"].tolist() == [False] * 4 + [True]
        env.close()
        assert buf.load_episode(0)["obs"][:, 0].tolist() == [5, 6, 7, 8, 9]
        built = ReplayBuffer(5)
        env = ReplayBufferCollectionWrapper(
            Endless(()), built, stream=stream, transition_builder=lambda **k: {"x": k["next_obs"]}
        )
        env.reset()
        with pytest.raises(InputError, match="exceeds max_steps=5"):
            for _ in range(9):
                env.step(0)
        assert built.load_episode(0)["x"][:, 0].tolist() == [1, 2, 3, 4, 5]


def test_lanes_that_begin_again_at_the_very_same_place_do_not_go_on():
    """A reset that nobody sees in the observation: n-step sums stop there all the same."""

    class Still(Off):
        def step(self, action):
            self.t += 1
            return np.float32([0]), 1.0, False, False, {}

    buf = TransitionReplayBuffer(99, (1,), device=None, n_step=3, gamma=1.0, sampler=lambda s, b, n, h: np.arange(n))
    env = ReplayBufferCollectionWrapper(Still(()), buf)
    for _ in range(3):
        env.reset()
        env.step(0)
        env.step(0)
    assert buf.sample(6)["rewards"].tolist() == [2, 1, 2, 1, 2, 1]


class Names(gymnasium.Env):
    """An info `_x` beside the info `x`."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {"x": 0.0, "_x": False}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 3, False, {"x": float(self.t), "_x": False}


def test_an_info_of_a_single_environment_hides_no_other():
    buf = ReplayBuffer(100, schema={"info/x": ((), "f8")})
    env = ReplayBufferCollectionWrapper(Names(), buf)
    env.reset()
    for _ in range(3):
        env.step(0)
    assert buf.load_episode(0)["info/x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"a": {"b": 1}, "a/b": 2}, "two values would be the column 'a/b'"),
        ({"a": ["x", 1]}, "transition_builder: 'a': item 1 is 1 of int64, and would become"),
        ({"a": np.ma.masked_array([1, 2], [0, 1])}, "transition_builder: 'a': item 1 is masked"),
    ],
)
def test_a_builder_whose_values_would_change_is_refused(made, message):
    env = ReplayBufferCollectionWrapper(Names(), ReplayBuffer(100), transition_builder=lambda **given: made)
    env.reset()
    with pytest.raises(InputError, match=message):
        env.step(0)


class Returning(Names):
    """A step returns what it is given, in the place of one value."""

    def __init__(self, **given):
        self.given = given

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        made = {"reward": reward, "terminated": terminated, "truncated": truncated} | self.given
        return obs, made["reward"], made["terminated"], made["truncated"], info


NO_SCALARS = [
    ("reward", None, "does not fit"),
    ("reward", 2**53 + 1, "does not fit"),
    ("reward", {"a": 1.0}, "can't be converted"),
    ("reward", "1", "is of another kind"),
    ("reward", [1.0, 2.0], r"has shape .*2"),
    ("terminated", None, "does not fit"),
    ("truncated", 0.5, "does not fit"),
    ("truncated", "False", "is of another kind"),
]


@pytest.mark.parametrize(("name", "value", "message"), NO_SCALARS)
def test_rewards_and_flags_that_would_change_are_refused(name, value, message):
    buf = ReplayBuffer(100)
    env = ReplayBufferCollectionWrapper(Returning(**{name: value}), buf)
    env.reset()
    with pytest.raises(InputError, match=f"'{name}'.*{message}"):
        env.step(0)
    env.close()
    assert not buf.num_episodes


def test_rewards_and_flags_of_another_type_are_taken():
    buf = ReplayBuffer(100)
    given = {"reward": np.array([3]), "terminated": np.array([True]), "truncated": 1}
    env = ReplayBufferCollectionWrapper(Returning(**given), buf)
    env.reset()
    env.step(0)
    episode = buf.load_episode(0)
    assert [episode[n][-1] for n in ("reward", "terminated", "truncated")] == [3, True, True]
