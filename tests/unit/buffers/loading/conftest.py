import itertools

import numpy as np
import pytest
import torch

from ringmap import ReplayBuffer

HISTORY, SKIP = 3, 2


def episode(number, length):
    """Every value says which episode and step it is from."""
    step = np.arange(length)
    return {
        "place": np.stack([np.full(length, number), step], axis=1),
        "pixels": ((number * 7 + step[:, None, None] * 3 + np.arange(12).reshape(3, 4)) % 251).astype(np.uint8),
        "action": (number * 1000 + step).astype(np.float32),
        "done": step == length - 1,
    }


def truth(number, start):
    """The clip of an episode that starts at this step."""
    whole = episode(number, start + HISTORY * SKIP)
    clip = {name: values[start::SKIP] for name, values in whole.items() if name != "action"}
    clip["action"] = whole["action"][start:].reshape(HISTORY, SKIP)
    clip["done"] = np.zeros(HISTORY, bool)
    return clip


def prove(batch):
    """Compare every clip of a collated batch with the truth; return which they are."""
    found = []
    assert sorted(batch) == ["action", "done", "pixels", "place"]
    assert all(isinstance(values, torch.Tensor) for values in batch.values())
    for at in range(len(batch["place"])):
        number, start = batch["place"][at, 0].tolist()
        for name, expected in truth(number, start).items():
            if name != "done":  # whose last step is true at the end of an episode only
                assert batch[name].dtype == torch.from_numpy(expected).dtype
                assert np.array_equal(batch[name][at].numpy(), expected), (name, number, start)
        found.append((number, start))
    return found


def fill(buffer, count, first=0):
    for number in range(first, first + count):
        buffer.write_episode(episode(number, 9 + number % 5))


@pytest.fixture(params=["ram", "disk"])
def buffer(request, tmp_path):
    path = None if request.param == "ram" else tmp_path / "buf"
    made = ReplayBuffer(2000, HISTORY, SKIP, path=path, seed=0, sync_every_s=0)
    fill(made, 20)
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path):
    made = ReplayBuffer(2000, HISTORY, SKIP, path=tmp_path / "buf", seed=0, sync_every_s=0)
    fill(made, 20)
    yield made
    made.close()


def everything(buffer):
    """Return `(number, start)` of all clips of the first 20 episodes."""
    return sorted(
        (number, start)
        for number, start in itertools.product(range(20), range(20))
        if start <= 9 + number % 5 - HISTORY * SKIP
    )


def end(loader):
    """End workers that wait for another pass."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
