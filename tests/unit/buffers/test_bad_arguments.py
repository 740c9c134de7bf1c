"""Arguments that make no sense: refused by name, before anything is made or changed."""

import copy

import numpy as np
import pytest
import torch

from ringmap import (
    DistillationBuffer,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
    TransitionReplayBuffer,
)
from ringmap.data import ExponentialBeta, LinearBeta, ShardedReplayBuffer
from ringmap.errors import InputError
from ringmap.samplers import EpochSampler, MixtureSampler, PrioritizedSampler, RecencySampler


def transitions(obs_shape=(2,), **options):
    made = TransitionReplayBuffer(50, obs_shape, device=None, **options)
    made.add(np.zeros((10, 2)), np.zeros(10), np.zeros(10), np.ones((10, 2)), np.zeros(10))
    return made


def rollout(**options):
    made = RolloutBuffer(2, 3, (4,), (), **options)
    for _ in range(3):
        made.add(torch.zeros(2, 4), None, *torch.zeros(5, 2))
    return made


def mix(**options):
    offline = ReplayBuffer(100)
    offline.write_episode({"x": np.arange(20)})
    return OfflineToOnlineReplayBuffer(offline, **{"online_capacity": 50, "batch_size": 4, **options})


def students(**options):
    return DistillationBuffer(50, **options)


def state_of_a_prioritized():
    buf = transitions(sampler=PrioritizedSampler(rng=0))
    buf.sample(2)
    return buf.state_dict()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ReplayBuffer(50, seed="a"), "seed"),
        (lambda: ReplayBuffer(50, sampler=5), "sampler must be callable"),
        (lambda: setattr(ReplayBuffer(50), "sampler", 5), "sampler must be callable"),
        (lambda: ReplayBuffer(True), "max_steps"),
        (lambda: ReplayBuffer(50).write_episode([{"x": 1}]), "mapping of column .* got list; of a list of"),
        (lambda: ReplayBuffer(50).load_state_dict({}), r"has no \['rng', 'step'\]"),
        *(
            (lambda o=o: ReplayBuffer(50, **o).num_valid_ends(), "at most 16,777,216")
            for o in ({"frameskip": 2**70}, {"history_len": 2**70}, {"history_len": 2**40, "frameskip": 2**40})
        ),
        (lambda: transitions(seed="a"), "seed"),
        (lambda: transitions(seed=-1), "seed"),
        (lambda: transitions(obs_dtype="U5"), "no dtype of numbers"),
        (lambda: transitions(action_dtype=object), "no dtype of numbers"),
        (lambda: transitions((2.5,)), "expected a shape"),
        (lambda: transitions(sampler=5), "sampler must be callable"),
        (lambda: transitions(gamma=1.5), "gamma must lie between 0 and 1"),
        (lambda: transitions(gamma="0.9"), "gamma must lie between 0 and 1"),
        (lambda: transitions().sample(True), "batch_size"),
        (lambda: transitions().load_state_dict({}), "the state has no"),
        (lambda: transitions().load_state_dict(state_of_a_prioritized()), "that of a sampler"),
        (lambda: rollout(num_privileged_obs="a"), "num_privileged_obs"),
        (lambda: rollout(num_privileged_obs=2.5), "num_privileged_obs"),
        (lambda: rollout(seed="a"), "seed must be an integer"),
        (lambda: rollout().load_state_dict({}), "the state has no"),
        (lambda: rollout().compute_returns_and_advantages(torch.zeros(2), gamma=np.nan), "gamma"),
        (lambda: rollout().compute_returns_and_advantages(torch.zeros(2), gae_lambda=5), "gae_lambda"),
        (lambda: mix(seed="a"), "OfflineToOnlineReplayBuffer: seed"),
        (lambda: mix(seed=-1), "seed"),
        (lambda: mix(transform=3), "transform must be a function"),
        (lambda: mix(provenance=""), "provenance must be a column's name"),
        (lambda: mix(provenance=7), "provenance must be a column's name"),
        (lambda: mix(batch_size=True), "batch_size"),
        (lambda: mix().load_state_dict({}), "the state has no"),
        (lambda: students(beta="x"), "beta"),
        (lambda: students(seed="a"), "DistillationBuffer: seed"),
        (lambda: students().load_state_dict({}), "the state has no"),
        (lambda: LinearBeta("a"), "rounds must be positive"),
        (lambda: LinearBeta(3, start=2), "start must lie between 0 and 1"),
        (lambda: ExponentialBeta("x"), "decay must lie between 0 and 1"),
    ],
)
def test_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_what_looks_alike_is_taken():
    assert transitions(gamma=np.float32(0.5)).gamma == 0.5
    assert len(transitions((np.int64(2),)).sample(np.int64(3))["rewards"]) == 3


def test_a_state_that_is_refused_changes_nothing():
    buf, other = transitions(seed=1), transitions(seed=1)
    with pytest.raises(InputError):
        buf.load_state_dict(state_of_a_prioritized())
    np.testing.assert_array_equal(buf.sample(8).ids, other.sample(8).ids)


def episodes(sampler=None, **options):
    made = ReplayBuffer(100, sampler=sampler, **options)
    made.write_episode({"x": np.arange(30)})
    return made


def fleet(seed, folder):
    if not (folder / "ring").exists():
        ring = episodes(path=folder / "ring", sync_every_s=0)
        ring.close()
    return ShardedReplayBuffer(folder, sampler=PrioritizedSampler(rng=seed))


def mixture(seed):
    parts = EpochSampler(seed), PrioritizedSampler(rng=seed), RecencySampler(window=9, rng=seed)
    return MixtureSampler([(part, 1.0) for part in parts], rng=seed)


STATEFUL = {
    "uniform": lambda seed, _: episodes(seed=seed),
    "prioritized": lambda seed, _: episodes(PrioritizedSampler(rng=seed), seed=seed),
    "mixture": lambda seed, _: episodes(mixture(seed), seed=seed),
    "transitions": lambda seed, _: transitions(sampler=PrioritizedSampler(rng=seed), seed=seed),
    "fleet": fleet,
    "mix": lambda seed, _: OfflineToOnlineReplayBuffer(
        episodes(PrioritizedSampler(rng=seed)), online_storage=episodes(PrioritizedSampler(rng=seed)), seed=seed
    ),
    "students": lambda seed, _: students(seed=seed),
    "rollout": lambda seed, _: rollout(seed=seed),
}


def leaves(state, path=()):
    """Yield the path of each value of a state, however deep."""
    if isinstance(state, dict | list):
        for key in state if isinstance(state, dict) else range(len(state)):
            yield (*path, key)
            yield from leaves(state[key], (*path, key))


def as_lists(state):
    if isinstance(state, dict):
        return {name: as_lists(value) for name, value in state.items()}
    if isinstance(state, list):
        return [as_lists(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_with_one_wrong_value_changes_nothing(kind, tmp_path):
    """Each value of a state, however deep, is missing, text or not a number, and the buffer is as it was."""
    buf, other = (STATEFUL[kind](seed, tmp_path) for seed in (0, 1))
    for _ in range(3):
        if hasattr(other, "sample") and kind != "students":
            batch = other.sample(4)
            if hasattr(other, "update_priorities") and kind not in ("uniform", "mix"):
                other.update_priorities(batch.ids, np.arange(4) + 5.0)
    state, refused = other.state_dict(), 0
    before = as_lists(buf.state_dict())
    for path in leaves(state):
        for wrong in ("missing", "text", float("nan")):
            garbled = copy.deepcopy(state)
            inner = garbled
            for key in path[:-1]:
                inner = inner[key]
            if wrong != "missing":
                inner[path[-1]] = wrong
            elif isinstance(inner, dict):
                del inner[path[-1]]
            else:
                continue
            try:
                buf.load_state_dict(garbled)
            except InputError:
                refused += 1
                assert as_lists(buf.state_dict()) == before, (path, wrong)
            else:
                before = as_lists(buf.state_dict())
    assert refused >= 5
    for one in (buf, other) if kind == "fleet" else ():
        one.close()


def test_a_batch_without_rows_is_checked_as_any_other():
    buf = TransitionReplayBuffer(50, (2,), device=None)
    with pytest.raises(InputError, match="actions"):
        buf.add(np.zeros((0, 2)), [0.5], [], np.zeros((0, 2)), [])
    buf.add(np.zeros((0, 2)), [], [], np.zeros((0, 2)), [])
    assert len(buf) == 0
