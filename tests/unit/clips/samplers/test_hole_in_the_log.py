"""A power cut loses one update of priorities and keeps a later one: that one must not come back."""

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.samplers import PrioritizedSampler

WORDS = 4096


def opened(path):
    sampler = PrioritizedSampler(alpha=1.0, rng=0)
    return ReplayBuffer(100, path=path, sampler=sampler, sync_every_s=0), sampler


def update(buf, *pairs):
    buf.sample(1)
    for at, value in pairs:
        buf.update_priorities(np.array([at]), np.array([value]))


@pytest.mark.parametrize("lost", [(4, 12), (12, 32), (0, 44)], ids=["checksum", "header", "all"])
def test_a_lost_update_takes_the_later_ones_along(tmp_path, lost):
    buf, _ = opened(tmp_path / "buf")
    buf.write_episode({"x": np.arange(10)})
    update(buf, (0, 5.0), (1, 6.0), (2, 7.0))
    buf.engine.source.abandon()
    path = tmp_path / "buf/priorities.bin"
    raw = bytearray(path.read_bytes())
    frame = raw.find(np.array([1], np.int64).tobytes() + np.array([6.0], np.float32).tobytes()) - 32
    assert frame > WORDS
    raw[frame + lost[0] : frame + lost[1]] = bytes(lost[1] - lost[0])
    path.write_bytes(raw)
    buf, sampler = opened(tmp_path / "buf")
    update(buf, (3, 8.0))  # of the size of the frame that was lost
    buf.engine.source.abandon()
    buf, sampler = opened(tmp_path / "buf")
    buf.sample(1)
    found = sampler.kept_priorities().values[:5]
    np.testing.assert_array_equal(found, [5, 1, 1, 8, 1])
    assert buf.check() == []
    buf.close()


def test_what_an_earlier_log_left_is_no_frame(tmp_path):
    """A position 6 of an earlier log lies where log 6 looks for its next frame."""
    buf, sampler = opened(tmp_path / "buf")
    buf.write_episode({"x": np.arange(64)})
    buf.sample(1)
    buf.update_priorities(np.full(64, 6), np.ones(64))
    while sampler._stored.file._number < 6:
        sampler._stored.file.write(sampler.kept_priorities())
    for count in range(1, 6):
        buf.update_priorities(np.arange(count), np.ones(count))
        assert buf.check() == []
    buf.close()
