"""Arguments that make no sense: refused by name, before anything is made or changed."""

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
from ringmap.data import ExponentialBeta, LinearBeta
from ringmap.errors import InputError
from ringmap.samplers import PrioritizedSampler


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
    return OfflineToOnlineReplayBuffer(
        offline, **{"online_capacity": 50, "batch_size": 4, **options}
    )


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
)  # fmt: skip
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


def test_a_batch_without_rows_is_checked_as_any_other():
    buf = TransitionReplayBuffer(50, (2,), device=None)
    with pytest.raises(InputError, match="actions"):
        buf.add(np.zeros((0, 2)), [0.5], [], np.zeros((0, 2)), [])
    buf.add(np.zeros((0, 2)), [], [], np.zeros((0, 2)), [])
    assert len(buf) == 0
