"""A worker that outlives a pass sees, in the next one, what its owner sees."""

import numpy as np
import torch
from torch.utils.data import DataLoader

from ringmap import ReplayBuffer


def test_persistent_workers_see_what_came_since_the_last_pass(home):
    buf = ReplayBuffer(max_steps=1_000, path=home / "buf")
    buf.write_episode({"x": np.arange(10)})
    reader = ReplayBuffer.open(home / "buf")
    loader = DataLoader(
        reader,
        batch_size=100,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    try:
        assert torch.equal(next(iter(loader))["x"][:, 0], torch.arange(10))
        buf.write_episode({"x": np.arange(10, 100)})
        reader.refresh()
        (batch,) = loader
        assert torch.equal(batch["x"][:, 0], torch.arange(100))
    finally:
        loader._iterator._shutdown_workers()
        reader.close()
        buf.close()
