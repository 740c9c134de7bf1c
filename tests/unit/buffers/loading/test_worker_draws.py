"""Draws by workers: with a sampler, too, each worker draws for itself, and the seeds decide what."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import RoleError
from ringmap.samplers import (
    EpisodeSampler,
    EpochSampler,
    MixtureSampler,
    PrioritizedSampler,
    RecencySampler,
    UniformSampler,
)
from tests.tiers import few


class Own:
    """A user's sampler."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def begin_in_worker(self, seeds):
        self.rng = np.random.default_rng(seeds)

    def __call__(self, step, buffer, batch_size, history_len):
        return self.rng.integers(0, buffer.num_valid_ends(history_len), batch_size)


SAMPLERS = {
    "none": lambda: None,
    "uniform": lambda: UniformSampler(0),
    "generator": lambda: UniformSampler(np.random.default_rng(0)),
    "recency": lambda: RecencySampler(half_life=500, rng=0),
    "episodes": lambda: EpisodeSampler(0),
    "epochs": lambda: EpochSampler(seed=0),
    "mixture": lambda: MixtureSampler([(EpochSampler(0), 1), (UniformSampler(0), 1)], rng=0),
    "own": lambda: Own(0),
}


class Stream(IterableDataset):
    def __init__(self, draw, batches=4):
        self.draw, self.batches = draw, batches

    def __iter__(self):
        for _ in range(self.batches):
            yield self.draw()


class Drawn:
    """Draws the numbers of steps; a worker that is not forked gets it pickled."""

    def __init__(self, data):
        self.data = data

    def __call__(self):
        batch = self.data.sample(8)
        return np.asarray(batch["step" if "step" in batch else "observations"]).ravel()


def ring(path=None, sampler=None, seed=0, first=0):
    buf = ReplayBuffer(5000, path=path, sampler=sampler, seed=seed)
    for number in range(20):
        buf.write_episode({"step": first + np.arange(100 * number, 100 * number + 100)})
    return buf


def batches_of(data, seed, method="fork", persistent=False, passes=1):
    torch.manual_seed(seed)
    loader = DataLoader(
        Stream(Drawn(data)),
        None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    found = [tuple(batch.tolist()) for _ in range(passes) for batch in loader]
    if persistent:
        loader._iterator._shutdown_workers()
    return found


def prove_apart(data, **options):
    """No batch comes twice, in no worker and no pass; the same seed gives the same batches."""
    first = batches_of(data, 1, passes=2, **options)
    assert len(set(first)) == len(first) == 16
    again = batches_of(data, 1, **options)
    assert again == first[:8]


@pytest.mark.parametrize("kind", few(SAMPLERS, 3))
def test_each_worker_draws_for_itself(tmp_path, kind):
    with ring(tmp_path / "ring", SAMPLERS[kind]()) as buf:
        prove_apart(buf)
        of_seeds = {*batches_of(buf, 1)}
        assert not {*batches_of(buf, 2)} & of_seeds
    buf.close()
    buf = ring(tmp_path / "other", SAMPLERS[kind](), seed=1)
    assert not {*batches_of(buf, 1)} & of_seeds, "the buffer's seed decides, too"
    buf.close()


def test_workers_that_go_on_to_the_next_pass(tmp_path):
    buf = ring(tmp_path / "ring", RecencySampler(half_life=500, rng=0))
    prove_apart(buf, persistent=True)
    buf.close()


@pytest.mark.parametrize("path", [None, pytest.param("ring", marks=pytest.mark.slow)])
def test_workers_that_are_not_forked(tmp_path, path):
    buf = ring(path and tmp_path / path, UniformSampler(0))
    prove_apart(buf, method="forkserver")
    buf.close()


def test_views_fleets_and_transitions(tmp_path):
    for number in range(3):
        ring(tmp_path / "fleet" / str(number), first=number * 10_000).close()
    fleet = ShardedReplayBuffer(tmp_path / "fleet", sampler=UniformSampler(0), seed=0)
    steps = TransitionReplayBuffer(1000, (1,), device=None, path=tmp_path / "steps", sampler=UniformSampler(0), seed=0)
    for t in range(900):
        steps.add(np.full(1, t), 0, 0.0, np.full(1, t + 1), False)
    steps.flush()
    buf = ring(tmp_path / "ring", UniformSampler(0))
    for data in (buf.view(), fleet, fleet.view(), steps):
        prove_apart(data)
    fleet.sampler = None
    for data in (fleet, fleet.view()):
        prove_apart(data)
    for data in (buf, fleet, steps):
        data.close()


def test_the_rings_of_a_fleet_are_drawn_from_apart(tmp_path):
    """Each ring's clips came from the same random numbers: as many clips of each ring, at the same steps."""
    for number in range(2):
        ring(tmp_path / "fleet" / str(number), first=number * 10_000).close()
    with ShardedReplayBuffer(tmp_path / "fleet", seed=0) as fleet:
        for batch in batches_of(fleet.view(), 1):
            one, other = ({step % 10_000 for step in batch if step // 10_000 == n} for n in (0, 1))
            assert len(one & other) <= 1


def test_a_sampler_that_is_made_in_a_worker_keeps_its_draws_apart(tmp_path):
    buf = ring(tmp_path / "ring")

    def begin(number):
        torch.utils.data.get_worker_info().dataset.draw.data.sampler = UniformSampler(0)

    torch.manual_seed(0)
    loader = DataLoader(Stream(Drawn(buf)), None, num_workers=2, worker_init_fn=begin)
    found = [tuple(batch.tolist()) for batch in loader]
    assert len(set(found)) == len(found)
    buf.close()


@pytest.mark.parametrize(
    ("kind", "method"),
    few(
        [
            ("alone", "fork"),
            ("mixture", "fork"),
            ("fleet", "fork"),
            ("view", "fork"),
            ("fleet", "forkserver"),
            ("view", "forkserver"),
        ],
        4,
    ),
)
def test_a_worker_does_not_draw_by_the_priorities_of_its_owner(tmp_path, kind, method):
    """It never sees `update_priorities`."""
    sampler = PrioritizedSampler(rng=0)
    if kind == "mixture":
        sampler = MixtureSampler([(sampler, 1), (UniformSampler(0), 1)], rng=0)
    buf = ring(tmp_path / "rings" / "one", None if kind == "fleet" else sampler)
    data = buf
    if kind == "fleet":
        data = ShardedReplayBuffer(tmp_path / "rings", sampler=sampler, seed=0)
    if kind == "view":
        data = buf.view()
    data.sample(8)
    with pytest.raises(RoleError, match=r"priorities.*batches\(\)"):
        batches_of(data, 1, method)
    clips = DataLoader(data, 8, num_workers=1, multiprocessing_context=method)
    assert len(next(iter(clips))["step"]) == 8, "by id is no draw by priority"
    data.sample(8)
    if kind == "fleet":
        data.close()
    buf.close()


class Learner(IterableDataset):
    """Owns its priorities: it opens the ring in the worker."""

    def __init__(self, path):
        self.path = path

    def __iter__(self):
        with ReplayBuffer.open(self.path, sampler=PrioritizedSampler(rng=0), seed=0) as buf:
            batch = buf.sample(64)
            values = np.where(batch["step"].ravel() == batch["step"].ravel()[0], 1e6, 1e-3)
            buf.update_priorities(batch.ids, values)
            yield int(np.unique_counts(buf.sample(64)["step"]).counts.max())


def test_a_worker_that_opens_the_ring_itself_owns_its_priorities(tmp_path):
    ring(tmp_path / "ring").close()
    (most,) = DataLoader(Learner(tmp_path / "ring"), None, num_workers=1)
    assert most > 4
