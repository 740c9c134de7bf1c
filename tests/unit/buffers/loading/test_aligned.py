"""Large arrays of batches begin at multiples of 64 bytes, so that JAX takes them without a copy."""

import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.data import (
    NStep,
    OfflineToOnlineReplayBuffer,
    ShardedReplayBuffer,
    Window,
    convert,
    load_dataset,
)
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.columns import copying

WIDE = 600
"""Floats of a row: 32 of them are more than `LEAST_NBYTES`."""


def misplaced(batch):
    """Return the large columns that begin elsewhere, and how many large ones there are."""
    large, wrong = 0, []
    for name, values in batch.items():
        if isinstance(values, dict):
            more, found = misplaced(values)
            large, wrong = large + more, wrong + found
        elif isinstance(values, torch.Tensor):
            if values.nbytes >= copying.LEAST_NBYTES:
                large += 1
                wrong += [name] * (values.data_ptr() % 64 != 0)
        elif values.nbytes >= copying.LEAST_NBYTES:
            large += 1
            wrong += [name] * (values.ctypes.data % 64 != 0)
    return large, wrong


def check(batch, least=1):
    large, wrong = misplaced(batch)
    assert large >= least
    assert not wrong


def write(buf, lengths=(60, 41)):
    rng = np.random.default_rng(0)
    for length in lengths:
        buf.write_episode(
            {
                "obs": rng.random((length, WIDE), np.float32),
                "action": rng.random((length, WIDE // 2)),
                "reward": np.ones(length, np.float32),
                "terminated": np.arange(length) == length - 1,
            }
        )
    return buf


@pytest.fixture(params=["ram", "path", "pread", "zarr"])
def buf(request, tmp_path):
    kind = request.param
    options = {
        "ram": {},
        "path": {"path": tmp_path / "buf"},
        "pread": {"path": tmp_path / "buf", "reads": "pread"},
        "zarr": {"path": tmp_path / "buf", "storage": "zarr"},
    }[kind]
    with write(ReplayBuffer(200, history_len=2, seed=0, reward_at="same", **options)) as made:
        yield made


def test_samples_batches_and_index_reads(buf):
    for _ in range(4):
        check(buf.sample(32), 2)
        check(buf[list(range(32))], 2)
    check(buf.sample(64, 1), 2)
    with buf.batches(32, steps=3) as batches:
        for batch in batches:
            check(batch, 2)
    with buf.batches(32, steps=2, to="torch") as batches:
        for batch in batches:
            check(batch, 2)
    check(buf.view()[list(range(40))], 2)


def test_windows_masks_and_computed_columns(buf):
    window = {
        "obs": Window(range(-2, 2), pad="zero"),
        "reward": Window(range(2500), pad="edge"),
        "return": NStep(3, next=["obs"]),
        "twice": lambda batch: batch["obs"] * 2,
    }
    batch = buf.sample(32, window=window)
    assert batch["reward_is_pad"].nbytes > copying.LEAST_NBYTES
    check(batch, 5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders(buf, num_workers):
    if buf.path is None and num_workers:
        pytest.skip("a worker has a copy of a buffer in RAM; the others are enough")
    options = {"num_workers": num_workers}
    if num_workers:
        options["multiprocessing_context"] = multiprocessing.get_context("fork")
    for batch in DataLoader(buf, batch_size=32, **options):
        if len(batch["obs"]) == 32:
            check(batch, 2)
    batches = BatchSampler(range(64), 32, drop_last=True)
    for batch in DataLoader(buf, batch_size=None, sampler=batches, **options):
        check(batch, 2)


def test_transformed_clips(tmp_path):
    buf = write(ReplayBuffer(200, transform=lambda clip: {**clip, "obs": clip["obs"] + 1}))
    check(next(iter(DataLoader(buf, batch_size=32))), 2)
    check(buf[list(range(32))], 2)


def test_many_rings(tmp_path):
    for name in ("a", "b"):
        write(ReplayBuffer(200, path=tmp_path / name)).close()
    with ShardedReplayBuffer(tmp_path, history_len=2) as both:
        check(both.sample(64), 2)
        check(both.sample(32, window={"obs": Window(range(-2, 2), pad="zero")}))


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("pending", [False, True])
def test_transitions(n_step, pending, tmp_path):
    buf = TransitionReplayBuffer(100, (WIDE,), device=None, seed=0, n_step=n_step, path=tmp_path / "buf")
    for step in range(90):
        buf.add(np.full(WIDE, step), 0, 0.0, np.full(WIDE, step + 1), step % 30 == 29)
    if not pending:
        buf.flush()
    check(buf.sample(32), 2)
    check(buf[list(range(32))], 2)
    check(next(iter(DataLoader(buf, batch_size=32))), 2)
    buf.close()


def test_stacks():
    buf = TransitionReplayBuffer(100, (4, 21, 31), device=None, seed=0, frame_stack=4, obs_dtype=np.uint8)
    stack = np.zeros((4, 21, 31), np.uint8)
    for step in range(60):
        after = np.concatenate([stack[1:], np.full((1, 21, 31), step + 1, np.uint8)])
        buf.add(stack, 0, 0.0, after, False)
        stack = after
    check(buf.sample(33), 2)


def test_offline_and_online():
    both = OfflineToOnlineReplayBuffer(write(ReplayBuffer(200)), online_capacity=100, seed=0)
    row = {
        "obs": np.zeros(WIDE, np.float32),
        "action": np.zeros(WIDE // 2),
        "reward": 0.0,
        "terminated": False,
    }
    both.extend({name: np.stack([value] * 80) for name, value in row.items()})
    check(both.sample(128), 2)


@pytest.mark.parametrize("name", ["set.h5", "set.zarr"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stored_sets(tmp_path, name, num_workers):
    with write(ReplayBuffer(200)) as buf:
        convert(buf, tmp_path / name)
    data = load_dataset(tmp_path / name, num_steps=2)
    for batch in DataLoader(data, batch_size=32, num_workers=num_workers, drop_last=True):
        check(batch, 2)


def test_weights():
    buf = write(ReplayBuffer(200, sampler=PrioritizedSampler()))
    check({"weights": buf.sample(20_000, 1).weights})


def test_control(monkeypatch):
    """An array that begins 16 bytes later is found."""
    begin = copying.addressof
    monkeypatch.setattr(copying, "addressof", lambda raw: begin(raw) - 16)
    monkeypatch.setattr(copying, "ALIGNMENT", 128)
    large, wrong = misplaced(write(ReplayBuffer(200)).sample(32))
    assert large == len(wrong) == 2
