"""A batch brings its own ids and weights: each clip carries its place in its data, so that ids prove themselves."""

import copy
import pickle

import numpy as np
import pytest
import torch

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers.batch import Batch
from ringmap.samplers import (
    EpochSampler,
    Linear,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)

HISTORY = 3


def filled(sampler=None, path=None, steps=400):
    buf = ReplayBuffer(steps, HISTORY, seed=0, sampler=sampler, path=path, sync_every_s=0)
    for at in range(0, steps, 40):
        buf.write_episode({"place": np.arange(at, at + 40)})
    return buf


def places(batch):
    return np.asarray(batch["place"][:, 0])


# -- of the batch, whatever was drawn since --------------------------------------------------------


@pytest.mark.parametrize("to", ["numpy", "torch"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_priorities_go_to_the_clips_of_the_batch(tmp_path, where, to):
    """With 50 batches drawn ahead: what each re-prioritises by its ids are its own clips, and no others."""
    sampler = PrioritizedSampler(rng=0)
    buf = filled(sampler, None if where == "memory" else tmp_path / "buf")
    expected, other = {}, 0
    with buf.batches(16, steps=60, prefetch=50, to=to) as batches:
        for number, batch in enumerate(batches):
            other += (places(batch) != batch.ids).any() or (batch.ids.shape != sampler.ids.shape)
            values = np.full(16, 1.0 + number)
            assert buf.update_priorities(batch.ids, values) == 16
            expected |= dict.fromkeys(places(batch).tolist(), 1.0 + number)
    assert other == 0
    kept = sampler.kept_priorities().values
    assert {place: kept[place] for place in expected} == expected


def test_the_weights_are_those_of_the_draw():
    """Each batch weighs by the step and the priorities that it was drawn with, not by those of a later draw."""
    sampler = PrioritizedSampler(alpha=1.0, beta=Linear(0.0, 1.0, 20), eps=1e-3, rng=0)
    buf = filled(sampler)
    buf.sample(1)
    priorities = np.random.default_rng(1).random(400).astype(np.float32)
    buf.update_priorities(np.arange(400), priorities)
    with buf.batches(32, steps=20, prefetch=10) as batches:
        for step, batch in enumerate(batches, start=1):
            masses = priorities[batch.ids] + 1e-3
            expected = masses ** -Linear(0.0, 1.0, 20)(step)
            np.testing.assert_allclose(batch.weights, expected / expected.max(), rtol=1e-4)


@pytest.mark.parametrize(
    "sampler",
    [
        None,
        UniformSampler(0),
        RecencySampler(window=50, rng=0),
        EpochSampler(0),
        lambda step, buf, size, h: np.arange(size),
    ],
    ids=["default", "uniform", "recency", "epochs", "a function"],
)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_ids_are_there_without_priorities_and_weights_are_not(sampler, prefetch):
    buf = filled(sampler)
    with buf.batches(8, steps=3, prefetch=prefetch) as batches:
        for batch in batches:
            assert batch.ids.dtype == np.int64
            np.testing.assert_array_equal(batch.ids, places(batch))
            assert batch.weights is None
            assert list(batch) == ["place"]


def test_a_mixture_weighs_all_alike():
    buf = filled(MixtureSampler([(UniformSampler(0), 1), (PrioritizedSampler(rng=0), 1)], rng=0))
    for batch in buf.batches(8, steps=3):
        np.testing.assert_array_equal(batch.ids, places(batch))
        assert batch.weights.tolist() == [1.0] * 8


def test_a_sampler_of_others_that_has_weights():
    def draw(step, buffer, size, history):
        draw.weights = np.full(size, step + 1.0)
        return np.arange(size)

    with filled(draw).batches(4, steps=5, prefetch=3) as batches:
        assert [batch.weights.tolist() for batch in batches] == [[n + 1.0] * 4 for n in range(5)]


def test_what_was_drawn_anew_has_the_id_of_what_came(monkeypatch):
    buf = filled(PrioritizedSampler(rng=0))
    at, kept = 400, buf.engine.reader._gather

    def evicting(*args, **options):
        nonlocal at
        if at < 800:
            at += 40
            buf.write_episode({"place": np.arange(at - 40, at)})
        return kept(*args, **options)

    monkeypatch.setattr(buf.engine.reader, "_gather", evicting)
    for _ in range(8):
        batch = buf.sample(64)
        np.testing.assert_array_equal(batch.ids, places(batch))
        assert (np.diff(batch["place"], axis=1) == 1).all()
        assert np.isfinite(batch.weights).all()
    assert buf.num_redraws > 0


def test_tensors_have_tensors_as_weights():
    buf = filled(PrioritizedSampler(rng=0))
    for batch in buf.batches(8, steps=2, to="torch", device="cpu"):
        assert isinstance(batch["place"], torch.Tensor)
        assert isinstance(batch.weights, torch.Tensor)
        assert batch.weights.dtype == torch.float32
        assert isinstance(batch.ids, np.ndarray)
        assert buf.update_priorities(torch.from_numpy(batch.ids), torch.ones(8)) == 8


def test_transitions_bring_theirs():
    buf = TransitionReplayBuffer(64, (1,), sampler=PrioritizedSampler(rng=0), seed=0)
    for t in range(64):
        buf.add(np.full(1, t), 0, 0.0, np.full(1, t + 1), False)
    first, second = buf.sample(8), buf.sample(8)
    for batch in (first, second):
        assert batch.ids.tolist() == batch["observations"][:, 0].tolist() == batch["ids"].tolist()
        assert torch.equal(batch.weights, batch["weights"])
    assert buf.update_priorities(first.ids, np.ones(8)) == 8
    buf.sampler = None
    batch = buf.sample(8, to="numpy")
    assert batch.ids.tolist() == batch["observations"][:, 0].tolist()
    assert batch.weights is None


# -- a plain dict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [lambda b: pickle.loads(pickle.dumps(b)), copy.copy, copy.deepcopy, Batch.copy, lambda b: b.mapped(np.copy)],
    ids=["pickle", "copy", "deepcopy", "dict.copy", "mapped"],
)
def test_copies_keep_what_is_beside_the_columns(made):
    batch = filled(PrioritizedSampler(rng=0)).sample(4)
    copied = made(batch)
    assert type(copied) is Batch
    assert copied.keys() == batch.keys()
    np.testing.assert_array_equal(copied["place"], batch["place"])
    np.testing.assert_array_equal(copied.ids, batch.ids)
    np.testing.assert_array_equal(copied.weights, batch.weights)


def test_it_is_a_dict_to_those_who_want_one():
    batch = filled().sample(4)
    assert isinstance(batch, dict)
    assert {**batch}.keys() == dict(batch).keys() == {"place"}
    batch["mine"] = 1
    assert batch.pop("mine") == 1
    filled().sample(4, out=batch)
