"""A plain DataLoader, in every way that it is called: each batch against the truth."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from tests.unit.buffers.loading.conftest import end, everything, prove


def as_it_is(clip):
    return clip


def with_tensors(clip):
    return {name: torch.from_numpy(np.array(values)) for name, values in clip.items()}


def by_hand(clips):
    assert all(isinstance(clip, dict) for clip in clips)
    return {name: torch.stack([torch.as_tensor(clip[name]) for clip in clips]) for name in clips[0]}


def wrapped(clips):
    return default_collate(clips)


TRANSFORMS, COLLATES = [None, as_it_is, with_tensors], [None, by_hand, wrapped]
ALONE = [
    (None, 0, False, pin, transform, collate)
    for pin, transform, collate in itertools.product([False, True], TRANSFORMS, COLLATES)
]
FORKED = [  # each value with each value of every other column
    ("disk" if i in (2, 3, 7, 8) else "ram", "fork", 1 + i % 2, i // 2 % 2 == 1, i in (1, 3, 8), transform, collate)
    for i, (transform, collate) in enumerate(itertools.product(TRANSFORMS, COLLATES))
]
STARTED = {  # what costs a start of processes, once: from a fork server with every buffer
    "ram": [("forkserver", 1, False, False, with_tensors, wrapped)],
    "disk": [
        ("spawn", 1, True, True, with_tensors, by_hand),
        ("forkserver", 2, False, True, as_it_is, None),
    ],
}
CASES = FORKED + [(stored, *case) for stored in STARTED for case in [*ALONE, *STARTED[stored]]]


def test_the_cases_have_every_pair():
    for one, other in itertools.combinations([0, *range(2, 7)], 2):
        pairs = {(case[one], case[other]) for case in FORKED}
        assert len(pairs) == len({p[0] for p in pairs}) * len({p[1] for p in pairs})


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # without a GPU it does nothing, and says so
@pytest.mark.parametrize(
    ("buffer", "method", "workers", "persistent", "pin", "transform", "collate"),
    CASES,
    indirect=["buffer"],
)
def test_each_clip_once_and_as_it_was_written(buffer, method, workers, persistent, pin, transform, collate):
    buffer.transform = transform
    torch.manual_seed(0)
    loader = DataLoader(
        buffer,
        batch_size=16,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=persistent,
        pin_memory=pin,
        collate_fn=collate,
    )
    for _ in range(2):
        found = [clip for batch in loader for clip in prove(batch)]
        assert sorted(found) == everything(buffer)
    end(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_batch_sampler(buffer, workers):
    torch.manual_seed(0)
    sampler = BatchSampler(RandomSampler(buffer), 16, drop_last=False)
    loader = DataLoader(buffer, batch_size=None, sampler=sampler, num_workers=workers)
    found = [clip for batch in loader for clip in prove(batch)]
    assert sorted(found) == everything(buffer)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_users_own_to_write_into(disk, workers):
    loader = DataLoader(disk, batch_size=16, num_workers=workers)
    kept = []
    for batch in loader:
        prove(batch)
        batch["pixels"].zero_()
        kept.append(batch)
    assert all(not batch["pixels"].any() for batch in kept)
    assert sorted(clip for batch in loader for clip in prove(batch)) == everything(disk)


def test_a_collate_fn_that_keeps_clips_in_the_worker(disk):
    """What somebody still holds in the worker is not written over."""
    loader = DataLoader(disk, batch_size=8, num_workers=1, collate_fn=Keeping())
    for before, now in loader:
        prove(now)
        if before is not None:
            prove(before)


class Keeping:
    """Hands out each batch twice: now, and with the next one."""

    def __init__(self):
        self.before = None

    def __call__(self, clips):
        before, self.before = self.before, clips
        return (None if before is None else default_collate(list(before)), default_collate(clips))


class Caching(torch.utils.data.Dataset):
    """Keeps in the worker what it was given."""

    def __init__(self, buffer):
        self.buffer, self.kept = buffer, {}

    def __getitem__(self, ids):
        key = tuple(ids)
        if key not in self.kept:
            self.kept[key] = self.buffer[ids]
        return self.kept[key]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_keeps_what_it_was_given(disk, workers):
    """What the loop writes into its batches does not get into the worker's."""
    ids = [[0, 1, 2], [3, 4, 5]]
    loader = DataLoader(
        Caching(disk),
        batch_size=None,
        sampler=ids,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for _ in range(3):
        for batch in loader:
            prove(batch)
            if workers:
                batch["pixels"].zero_()
    end(loader)
