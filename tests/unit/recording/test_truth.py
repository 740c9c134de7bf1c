"""What an environment did, step by step, against what the buffers hold: every mode, space and reset."""

import itertools

import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import Autoreset
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringmap import ReplayBuffer
from ringmap.recording import ReplayBufferCollectionWrapper
from tests.tiers import few
from tests.unit.recording.reading import assert_holds, assert_transitions, full_buffer, transition_buffer
from tests.unit.recording.scripted import KINDS, Model, Scripted, code, numbers

MODES = ("NextStep", "SameStep", "Disabled")


class Refusing:
    """A builder that hands on what it gets, but refuses steps that lead to some observations."""

    def __init__(self, kind, faulty, names):
        self.kind, self.faulty, self.names, self.calls = kind, set(faulty), names, 0

    def transform(self, raw):
        self.calls += 1
        if raw["info/number"] in self.faulty:
            raise ValueError("planted")
        return {name: raw[name] for name in self.names}


def make(vector, num, mode, kind, script, reuse, copy=True):
    """Return the environment of a script: "single", "sync" or "async"."""
    if vector == "single":
        env = Scripted(0, kind, script, reuse)
        return Autoreset(env) if mode == "NextStep" else env
    fns = [lambda i=i: Scripted(i, kind, script, reuse) for i in range(num)]
    made = SyncVectorEnv if vector == "sync" else AsyncVectorEnv
    return made(fns, autoreset_mode=AutoresetMode(mode), copy=copy)


def play(env, model, ops, single):
    """Play a script on a wrapped environment and on the model; what raises is counted, and the run goes on."""
    errors = 0

    def calling(call, *args, **options):
        nonlocal errors
        try:
            return call(*args, **options)
        except ValueError as error:
            assert "planted" in str(error) or "validate" in str(error), error
            errors += 1

    calling(env.reset, seed=1)
    model.reset(np.ones(model.num, bool))
    due = []
    for kind, value in ops:
        if kind == "reset" or (due and single):
            calling(env.reset)
            model.reset(np.ones(model.num, bool))
            due = []
        elif kind == "mask" or due:
            mask = np.array([bool(value >> i & 1) or i in due for i in range(model.num)])
            if single or not mask.any():
                continue
            if value & 1:
                calling(env.reset, mask=mask)
            else:
                calling(env.reset, options={"reset_mask": mask.copy()})
            model.reset(mask)
            due = []
        else:
            actions = [(value * 37 + i * 11) % 1000 for i in range(model.num)]
            calling(env.step, actions[0] if single else np.array(actions))
            due = model.step(actions)
    return errors


ops = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 999)),
        st.tuples(st.just("step"), st.integers(0, 999)),
        st.tuples(st.just("step"), st.integers(0, 999)),
        st.tuples(st.just("mask"), st.integers(1, 15)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=40,
)
scripts = st.fixed_dictionaries(
    {
        "ops": ops,
        "vector": st.sampled_from(["single", "sync", "sync"]),
        "num": st.integers(1, 4),
        "mode": st.sampled_from(MODES),
        "kind": st.sampled_from(KINDS),
        "script": st.integers(0, 1000),
        "reuse": st.booleans(),
        "copy": st.booleans(),
        "stream": st.booleans(),
        "per_env": st.booleans(),
        "faulty": st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)), max_size=3),
    }
)


def check(ops, vector, num, mode, kind, script, reuse, copy, stream, per_env, faulty):
    """Play a script into buffers of every kind, each by its own wrapper, and compare with the model."""
    if vector == "single":
        num, mode = 1, "Disabled" if mode == "SameStep" else mode
    reuse = reuse and mode != "SameStep"  # Gymnasium itself overwrites the final observation then
    refused = {code(*place) for place in faulty if place[0] < num}

    def wrapped(buffers, **options):
        env = make(vector, num, mode, kind, script, reuse, copy)
        return ReplayBufferCollectionWrapper(env, buffers, **options), Model(num, mode, script, options_faulty)

    single = vector == "single"
    # Whole episodes: all keys, streamed or not, in one buffer or one for each.
    options_faulty = ()
    split = per_env and not single
    buffers = [full_buffer(kind) for _ in range(num if split else 1)]
    env, model = wrapped(buffers, replay_mode="per_env" if split else "shared", stream=stream)
    assert play(env, model, ops, single) == 0
    env.close()
    model.close()
    for i, buf in enumerate(buffers):
        assert_holds(kind, buf, [e for e in model.stored if not split or e.env == i])
    # Without a schema.
    plain = ReplayBuffer(5000)
    env, model = wrapped(plain)
    assert play(env, model, ops, single) == 0
    assert_holds(kind, plain, model.stored)  # not closed: what is open is not there
    env.env.close()
    # Transitions.
    if kind != "tuple":
        steps = transition_buffer(kind)
        env, model = wrapped(steps)
        assert play(env, model, ops, single) == 0
        env.close()
        assert_transitions(kind, steps, model.transitions)
    # A builder that raises, and a run that goes on.
    options_faulty = refused
    built = ReplayBuffer(
        5000,
        schema={"number": ((), np.int64), "info/number": ((), np.int64), "action": ((), np.int64), "t": ((), np.int64)},
    )
    builder = Refusing(kind, refused, ["info/number", "action", "t"])

    class Numbered:
        def transform(self, raw):
            made = builder.transform(raw)
            flat = {}
            _walk(flat, "obs", raw["obs"])
            made["number"] = numbers(kind, {name: [value] for name, value in flat.items()})[0]
            return made

    env, model = wrapped(built, transition_builder=Numbered(), stream=stream)
    # The builder needs info/number among its raw values: the schema asks for it.
    errors = play(env, model, ops, single)
    env.close()
    model.close()
    assert errors <= model.errors and bool(errors) == bool(model.errors)
    assert built.num_episodes == len(model.stored)
    for number, expected in enumerate(model.stored):
        got = built.load_episode(number)
        assert got["number"].tolist() == expected.obs[:-1]
        assert got["info/number"].tolist() == expected.obs[1:]
        assert got["action"].tolist() == expected.actions
        assert got["t"].tolist() == list(range(len(expected.actions)))


def _walk(found, name, value):
    if isinstance(value, dict):
        for key, inner in value.items():
            _walk(found, f"{name}/{key}", inner)
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):
            _walk(found, f"{name}/{i}", inner)
    else:
        found[name] = value


STEPS = [("step", i) for i in range(30)]
BASE = {
    "ops": STEPS,
    "vector": "sync",
    "num": 3,
    "mode": "NextStep",
    "kind": "box",
    "script": 1,
    "reuse": True,
    "copy": False,
    "stream": False,
    "per_env": False,
    "faulty": [(1, 0, 1), (2, 1, 2), (0, 0, 3)],
}


@pytest.mark.slow
@settings(max_examples=60)
@given(scripts)
@example(BASE)
@example(BASE | {"mode": "SameStep"})
@example(BASE | {"mode": "Disabled"})
def test_random_scripts(script):
    check(**script)


@pytest.mark.campaign
@settings(settings.get_profile("campaign"), max_examples=10_000)
@given(scripts)
def test_ten_thousand_random_scripts(script):
    check(**script)


MIXED = [op for i in range(12) for op in (("step", i), ("step", i + 50), ("step", i + 90), ("mask", 1 + i % 7))]


VECTORS = ["single", "sync"]
EVERY_WAY = [
    pytest.param(*way, marks=() if sum(at) % 2 == 0 else pytest.mark.campaign)
    for way, at in zip(
        itertools.product(VECTORS, MODES, KINDS),
        itertools.product(range(len(VECTORS)), range(len(MODES)), range(len(KINDS))),
        strict=True,
    )
]


@pytest.mark.parametrize(("vector", "mode", "kind"), few(EVERY_WAY, 6))
def test_every_mode_and_space(vector, mode, kind):
    for ops in (STEPS, [*MIXED, ("reset", 0), *STEPS]):
        check(**BASE | {"vector": vector, "mode": mode, "kind": kind, "ops": ops})


@pytest.mark.parametrize(("mode", "kind"), few([("NextStep", "box"), ("SameStep", "dict"), ("Disabled", "tuple")]))
def test_worker_processes(mode, kind):
    check(
        **BASE
        | {"vector": "async", "num": 2, "mode": mode, "kind": kind, "ops": [*MIXED[:16], ("reset", 0), *STEPS[:8]]}
    )


@pytest.mark.campaign
@settings(settings.get_profile("campaign"), max_examples=40)
@given(scripts)
def test_random_scripts_in_worker_processes(script):
    check(**script | {"vector": "async"})
