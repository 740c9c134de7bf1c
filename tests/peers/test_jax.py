"""JAX takes batches over without a copy: `jax.dlpack.from_dlpack` returns the same memory."""

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed (extra exits)")

import jax

from ringmap import ReplayBuffer, TransitionReplayBuffer
from ringmap.storage.columns.copying import LEAST_NBYTES


def is_shared(values):
    taken = jax.dlpack.from_dlpack(values)
    assert np.array_equal(taken, values)
    return taken.unsafe_buffer_pointer() == values.ctypes.data


def check(batch, names):
    for name in names:
        assert batch[name].nbytes >= LEAST_NBYTES
        assert is_shared(batch[name]), name


@pytest.mark.parametrize("path", [None, "buf"])
def test_batches_are_taken_over(tmp_path, path):
    buf = ReplayBuffer(500, history_len=4, path=None if path is None else tmp_path / path, seed=0)
    rng = np.random.default_rng(0)
    for length in (60, 70):
        pixels = rng.integers(0, 255, (length, 21, 21, 3), np.uint8)
        buf.write_episode({"pixels": pixels, "state": rng.random((length, 200), np.float32)})
    for _ in range(5):
        check(buf.sample(32), ["pixels", "state"])
    check(buf[list(range(32))], ["pixels", "state"])
    with buf.batches(32, steps=3) as batches:
        for batch in batches:
            check(batch, ["pixels", "state"])


def test_transitions_are_taken_over():
    buf = TransitionReplayBuffer(200, (600,), device=None, seed=0)
    for step in range(100):
        buf.add(np.full(600, step), 0, 0.0, np.full(600, step + 1), False)
    check(buf.sample(64), ["observations", "next_observations"])


def test_control():
    """Sixteen bytes further on, JAX copies."""
    raw = np.zeros(LEAST_NBYTES + 128, np.uint8)
    at = -raw.ctypes.data % 64
    assert is_shared(raw[at : at + LEAST_NBYTES])
    assert not is_shared(raw[at + 16 : at + 16 + LEAST_NBYTES])
