"""The other samplers: frequencies against what they promise, with a control; epochs; options."""

import pickle

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import InputError
from ringmap.samplers import (
    EpisodeSampler,
    EpochSampler,
    Linear,
    MixtureSampler,
    RecencySampler,
    UniformSampler,
)
from tests.unit.clips.samplers import chi_squared

LENGTHS = [3, 40, 1, 12, 5]


def filled(sampler, history_len=1, max_steps=100):
    buf = ReplayBuffer(max_steps, history_len, sampler=sampler)
    for number, length in enumerate(LENGTHS):
        buf.write_episode({"episode": np.full(length, number), "step": np.arange(length)})
    return buf


def ids(buf, times=64):
    return np.concatenate([buf.sampler(i, buf, 1000, buf.history_len) for i in range(times)])


def test_uniform_over_clips():
    """61 clips: 60 degrees of freedom, deviation 11."""
    counts = np.bincount(ids(filled(UniformSampler(0))), minlength=61)
    assert chi_squared(counts, np.full(61, 1 / 61)) < 60 + 4 * 11


@pytest.mark.parametrize("history", [1, 4, 10])
def test_uniform_over_episodes_then_over_their_clips(history):
    buf = filled(EpisodeSampler(0), history)
    clips = [max(0, n - history + 1) for n in LENGTHS]
    long_enough = sum(n > 0 for n in clips)
    chances = np.concatenate([np.full(n, 1 / n / long_enough) for n in clips if n])
    counts = np.bincount(ids(buf), minlength=len(chances))
    degrees = len(chances) - 1
    assert chi_squared(counts, chances) < degrees + 4 * np.sqrt(2 * degrees)
    assert chi_squared(counts, np.full(len(chances), 1 / len(chances))) > 1000  # a control


def test_one_long_episode_among_many_short_ones_is_found():
    buf = ReplayBuffer(3000, 50, sampler=EpisodeSampler(0))
    for _ in range(1000):
        buf.write_episode({"step": np.arange(2)})
    buf.write_episode({"step": np.arange(60)})
    assert set(ids(buf, 1).tolist()) == set(range(11))


def test_exponential_recency():
    buf = filled(RecencySampler(half_life=10, rng=0))
    chances = 0.5 ** (np.arange(61)[::-1] / 10)
    chances /= chances.sum()
    counts = np.bincount(ids(buf), minlength=61)
    assert chi_squared(counts, chances) < 60 + 4 * 11
    assert chi_squared(counts, chances[::-1]) > 1000


def test_a_window_of_the_newest():
    counts = np.bincount(ids(filled(RecencySampler(window=20, rng=0))), minlength=61)
    assert not counts[:41].any()
    assert chi_squared(counts[41:], np.full(20, 1 / 20)) < 19 + 4 * 6.2
    wide = np.bincount(ids(filled(RecencySampler(window=1000, rng=0))), minlength=61)
    assert chi_squared(wide, np.full(61, 1 / 61)) < 60 + 4 * 11


def test_a_mixture_draws_by_weight():
    mixed = MixtureSampler([(UniformSampler(0), 3), (RecencySampler(window=20, rng=0), 1)], rng=0)
    chances = np.full(61, 0.75 / 61)
    chances[41:] += 0.25 / 20
    counts = np.bincount(ids(filled(mixed)), minlength=61)
    assert chi_squared(counts, chances) < 60 + 4 * 11
    assert chi_squared(counts, np.full(61, 1 / 61)) > 1000


def test_a_mixture_does_not_sort_its_parts():
    mixed = MixtureSampler([(UniformSampler(0), 1), (RecencySampler(window=1, rng=0), 1)], rng=0)
    newest = ids(filled(mixed), 1) == 60
    assert 400 < newest.sum() < 600
    assert abs(newest[:500].sum() - newest[500:].sum()) < 100


# -- epochs --------------------------------------------------------------------------------------


def test_each_clip_once_in_an_epoch():
    buf = filled(EpochSampler(seed=1), history_len=2)
    size = len(buf)
    drawn = np.concatenate([buf.sampler(i, buf, 7, 2) for i in range(size)])
    for epoch in range(7):
        assert sorted(drawn[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert not np.array_equal(drawn[:size], drawn[size : 2 * size])


def test_an_epoch_resumes_where_it_was(tmp_path):
    options = {"max_steps": 100, "path": tmp_path / "buf", "sync_every_s": 0}
    buf = ReplayBuffer(**options, sampler=EpochSampler(seed=1))
    buf.write_episode({"step": np.arange(60)})
    first = [buf.sample(8)["step"][:, 0] for _ in range(3)]
    buf.close()
    buf = ReplayBuffer(**options, sampler=EpochSampler())
    rest = [buf.sample(12)["step"][:, 0] for _ in range(3)]
    assert sorted(np.concatenate(first + rest).tolist()) == list(range(60))
    assert buf.sampler.left == 0
    buf.close()


def test_what_comes_in_belongs_to_the_next_epoch_and_what_goes_is_left_out():
    buf = ReplayBuffer(30, sampler=EpochSampler(seed=1))
    for number in range(3):
        buf.write_episode({"id": 10 * number + np.arange(10)})
    first = buf.sample(5)["id"][:, 0]
    buf.write_episode({"id": 30 + np.arange(10)})  # evicts 0 to 9
    rest = []
    while buf.sampler.left:
        rest += buf.sample(1)["id"][:, 0].tolist()
        if buf.sampler.epoch:
            break
    this_epoch = rest if buf.sampler.epoch == 0 else rest[:-1]
    assert sorted(this_epoch) == sorted(set(range(10, 30)) - set(first.tolist()))
    buf = ReplayBuffer(30, sampler=buf.sampler)


def test_the_order_follows_from_seed_and_epoch():
    one, same, other = (filled(EpochSampler(seed)) for seed in (1, 1, 2))
    a, b, c = (buf.sampler(0, buf, 61, 1) for buf in (one, same, other))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


def test_an_epoch_is_of_clips_of_one_length(tmp_path):
    path = tmp_path / "buf"
    buf = ReplayBuffer(100, 1, path=path, sampler=EpochSampler(1), sync_every_s=0)
    buf.write_episode({"id": np.arange(10)})
    buf.sample(4)
    with pytest.raises(InputError, match="clips of 3 steps, but 6 clips of 1 are left"):
        buf.sampler(1, buf, 4, 3)
    buf.close()
    buf = ReplayBuffer(100, 1, path=path, sampler=EpochSampler(), sync_every_s=0)
    with pytest.raises(InputError, match="clips of 3 steps, but 6 clips of 1 are left"):
        buf.sampler(1, buf, 4, 3)
    buf.sample(6)
    assert sorted(buf.sampler(2, buf, 8, 3)) == list(range(8))
    buf.close()


def test_an_epoch_is_of_one_set_of_clips(tmp_path):
    """The sides of a split, and their buffer, share a sampler; another view of the same episodes has the same clips."""
    buf = ReplayBuffer(1000, sampler=EpochSampler(1))
    for number in range(10):
        buf.write_episode({"id": 10 * number + np.arange(10)})
    sides = buf.split(0.5, seed=3)
    for one, other in (sides, sides[::-1], (sides[0], buf), (sides[1], buf), (buf, sides[0]), (buf, sides[1])):
        seen = one.sample(12)["id"].ravel().tolist()
        for _ in range(2):
            with pytest.raises(
                InputError, match=rf"{len(one) - 12} of {len(one)} clips are left of an epoch of others"
            ):
                other.sample(4)
        while buf.sampler.left:
            seen += one.sample(min(4, buf.sampler.left))["id"].ravel().tolist()
        assert sorted(seen) == sorted(i for ep in range(len(one.lengths)) for i in one.load_episode(ep)["id"].tolist())
    seen = []
    for _ in range(10):
        seen += buf.view().sample(5)["id"].ravel().tolist() + buf.sample(5)["id"].ravel().tolist()
        buf.write_episode({"id": np.full(10, -1)})  # of the next epoch
    assert sorted(seen) == list(range(100))


def test_what_a_view_moves_to_belongs_to_the_next_epoch():
    buf = ReplayBuffer(1000, sampler=EpochSampler(1))
    buf.write_episode({"id": np.arange(20)})
    view = buf.view(live=True)
    buf.write_episode({"id": 20 + np.arange(20)})
    seen = view.sample(5)["id"].ravel().tolist()
    assert view.refresh()
    seen += view.sample(15)["id"].ravel().tolist()
    assert sorted(seen) == list(range(20))
    assert buf.sampler.left == 0
    assert sorted(view.sample(40)["id"].ravel().tolist()) == list(range(40))


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecencySampler(), "half_life= or window="),
        (lambda: RecencySampler(half_life=1, window=1), "not both"),
        (lambda: RecencySampler(half_life=0), "half_life must be a positive number"),
        (lambda: RecencySampler(window=2.5), "window must be positive"),
        (lambda: EpochSampler(-1), "seed"),
        (lambda: Linear(0, 1, 0), "Linear: steps must be a positive number, got 0"),
        (lambda: Linear(0, 1, -3), "Linear: steps"),
        (lambda: Linear(0, float("nan"), 3), "Linear: stop must be a finite number"),
        (lambda: MixtureSampler([]), "weights"),
        (lambda: MixtureSampler([(UniformSampler(0), -1)]), "weights"),
        (lambda: MixtureSampler([(UniformSampler(0), 0)]), "not all 0"),
        (lambda: MixtureSampler([(3, 1)]), "sampler must be callable, got 3"),
        (lambda: MixtureSampler([UniformSampler(0)]), "pairs"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("sampler", [EpisodeSampler(0), EpochSampler(0)])
def test_a_stranger_s_buffer_is_refused_where_more_is_needed(sampler):
    class Theirs:
        def num_valid_ends(self, history_len=None):
            return 5

    assert len(UniformSampler(0)(0, Theirs(), 3, 1)) == 3
    with pytest.raises(InputError, match="draws from buffers of ringmap, got Theirs"):
        sampler(0, Theirs(), 3, 1)


def test_another_mixture_begins_anew_at_opening(tmp_path, caplog):
    options = {"max_steps": 100, "path": tmp_path / "buf", "sync_every_s": 0}
    one = (UniformSampler(0), 1)
    buf = ReplayBuffer(**options, sampler=MixtureSampler([one], rng=0))
    buf.write_episode({"step": np.arange(60)})
    buf.sample(8)
    buf.close()
    buf = ReplayBuffer(**options, sampler=MixtureSampler([one, one], rng=0))
    assert "its sampler begins anew" in caplog.text
    buf.sample(8)
    buf.close()


def test_another_sampler_s_state_is_not_taken_over_at_opening(tmp_path):
    options = {"max_steps": 100, "path": tmp_path / "buf", "sync_every_s": 0}
    buf = ReplayBuffer(**options, sampler=EpochSampler(seed=9))
    buf.write_episode({"step": np.arange(60)})
    buf.sample(8)
    buf.close()
    buf = ReplayBuffer(**options, sampler=RecencySampler(window=3, rng=0))
    assert buf.sample(8)["step"].min() >= 57
    buf.close()


def test_an_epoch_goes_on_in_a_copy_that_comes_to_know_the_clips_after_an_eviction():
    buf = ReplayBuffer(30, sampler=EpochSampler(seed=1))
    for number in range(3):
        buf.write_episode({"id": 10 * number + np.arange(10)})
    first = buf.sample(5)["id"][:, 0].tolist()
    buf.write_episode({"id": 30 + np.arange(10)})  # evicts 0 to 9
    buf.sampler = pickle.loads(pickle.dumps(buf.sampler))
    rest = []
    while buf.sampler.left:
        rest += buf.sample(1)["id"][:, 0].tolist()
    assert sorted(set(rest) & set(range(10, 30))) == sorted(set(range(10, 30)) - set(first))
