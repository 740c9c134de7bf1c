"""Batches on a GPU: `pytest -m gpu` where there is one; elsewhere they are skipped.

Each value says which step it is of. The GPU is kept busy, so that copies to it are still waiting while the loop goes
on: host memory that is filled again too early shows.
"""

import numpy as np
import pytest

from ringmap import ReplayBuffer, TransitionReplayBuffer

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

FRAME = 64 * 64 * 3


@pytest.fixture
def buf(tmp_path):
    with ReplayBuffer(4_000, path=tmp_path / "buf", seed=0, history_len=4) as made:
        for number in range(40):
            steps = np.arange(100) + 100 * number
            frames = np.repeat((steps % 251).astype(np.uint8), FRAME).reshape(100, 64, 64, 3)
            made.write_episode({"pixels": frames, "step": steps})
        yield made
        made.close()


def busy():
    """Give the GPU work for a few hundred milliseconds."""
    one = torch.randn(4096, 4096, device="cuda")
    for _ in range(60):
        one = one @ one / 64
    return one


def wrong(batches):
    """Return how many of some pairs of pixels and steps on the GPU do not belong together."""
    torch.cuda.synchronize()
    return sum(
        int((pixels.amax((-1, -2, -3)) != step % 251).sum()) + int((pixels.amin((-1, -2, -3)) != step % 251).sum())
        for pixels, step in batches
    )


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_batch_is_filled_again_before_it_was_copied(buf, prefetch, pin_memory):
    kept = []
    with buf.batches(64, steps=40, prefetch=prefetch, to="torch", device="cuda", pin_memory=pin_memory) as batches:
        for number, batch in enumerate(batches):
            if number % 10 == 0:
                busy()
            assert batch["pixels"].device.type == "cuda"
            kept.append((batch["pixels"], batch["step"]))
    assert wrong(kept) == 0


def test_control_memory_that_is_filled_again_too_early(buf):
    host = {name: torch.from_numpy(v).pin_memory() for name, v in buf.sample(64).items()}
    kept = []
    for number in range(40):
        if number % 10 == 0:
            busy()
        for name, values in buf.sample(64).items():
            host[name].copy_(torch.from_numpy(values))
        kept.append(tuple(host[name].to("cuda", non_blocking=True) for name in ("pixels", "step")))
    assert wrong(kept) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_page_locked_memory(buf, workers):
    loader = torch.utils.data.DataLoader(
        buf, batch_size=64, shuffle=True, num_workers=workers, pin_memory=True, drop_last=True
    )
    kept = []
    for number, batch in enumerate(loader):
        if number % 10 == 0:
            busy()
        kept.append(tuple(batch[n].to("cuda", non_blocking=True) for n in ("pixels", "step")))
        if number == 40:
            break
    assert wrong(kept) == 0


def test_transitions_come_on_the_device():
    buf = TransitionReplayBuffer(1_000, (8,), device="cuda", seed=0, pin_memory=True)
    for t in range(200):
        buf.add(np.full(8, t), 0, float(t), np.full(8, t + 1), False)
    kept = []
    for number in range(100):
        if number % 20 == 0:
            busy()
        batch = buf.sample(64)
        kept.append((batch["observations"], batch["next_observations"], batch["rewards"]))
    torch.cuda.synchronize()
    for now, after, reward in kept:
        assert torch.equal(now + 1, after)
        assert torch.equal(now[:, 0], reward)
