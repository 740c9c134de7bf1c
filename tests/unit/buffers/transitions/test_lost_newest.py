"""A power cut, or a failed sync, takes what was added last: the rest must not lead to what is gone."""

import numpy as np
import pytest

from ringmap import TransitionReplayBuffer
from ringmap.samplers import PrioritizedSampler
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.system import System
from tests.disks import Through
from tests.tiers import few

LANES = 2


class Boot(System):
    number = 1

    def boot_id(self):
        return self.number.to_bytes(16, "little")


def opened(path, sampler):
    kind = Through(TransitionReplayBuffer, Disk(Boot()))
    return kind(24, (2,), device=None, path=path, seed=3, sampler=sampler, sync_every_s=0)


def add(buf, number):
    lanes = np.arange(LANES)
    now, after = (np.stack([lanes, lanes * 0 + at], 1) for at in (number, number + 1))
    buf.add(now, np.full(LANES, number), np.zeros(LANES), after, np.zeros(LANES, bool))


def proven(buf):
    """Return the numbers of the steps that many draws find, each led to the next one of its lane."""
    seen = set()
    for _ in range(30):
        batch = buf.sample(min(16, len(buf)))
        np.testing.assert_array_equal(batch["next_observations"], batch["observations"] + [0, 1])
        seen |= set(batch["actions"].tolist())
    return seen


@pytest.mark.parametrize("sampler", [None, PrioritizedSampler], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("calls", few([40, 6]))
@pytest.mark.parametrize("lost", [0, 1, 2], ids=["newest", "one before", "two before"])
def test_what_is_left_leads_to_nothing_that_is_gone(tmp_path, monkeypatch, sampler, calls, lost):
    def fresh():
        return sampler and sampler(rng=0)

    buf = opened(tmp_path / "buf", fresh())
    for number in range(calls):
        if number == calls - 4:
            buf.flush()
        add(buf, number)
        buf.engine.commit_pending("a test")
    ring = buf._ring.buffer.engine.owned
    slot = ring.live.starts.tolist()[-1 - lost] % ring.ring.rows
    ring.abandon()
    with open(tmp_path / "buf/columns/000-observations.npy", "r+b") as column:
        column.seek(4096 + slot * 8)
        column.write(b"\xee" * 8)
    monkeypatch.setattr(Boot, "number", 2)  # the page cache is gone
    buf = opened(tmp_path / "buf", fresh())
    gone = calls - 1 - lost
    seen = proven(buf)
    assert gone not in seen
    # What led to a step that is gone is told by no row; all others are drawn.
    assert seen >= set(range(calls - 4, calls)) - {gone, gone - 1}
    add(buf, 1000)
    assert 1000 in proven(buf)
    assert buf.check() == []
    buf.close()


def read_data(reader):
    """Read what is stored beside each call, the newest first and last."""
    source = reader.engine.source
    starts = source.live.starts.tolist()
    return [source.data_at(start) for start in (*starts[::-1], *starts)]


@pytest.mark.parametrize("calls", [1, 2], ids=["newest", "the one before"])
def test_a_reader_forgets_what_followed_calls_that_are_gone(tmp_path, calls):
    """A failed sync takes the newest calls, and the next writer stores others in their place."""
    path = tmp_path / "buf"
    buf = opened(path, None)
    add(buf, 0)
    buf.close()
    buf = opened(path, None)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for number in range(calls):  # none follows the one before it, whose next observations are stored apart
        add(buf, 10 + 10 * number)
        buf.flush()
    reader = TransitionReplayBuffer.open(path, device=None)
    assert proven(reader) == {0, *range(10, 10 + 10 * calls, 10)}
    assert read_data(reader)  # the segment of the newest stays open
    buf.close()
    for file in {file for file in path.rglob("*") if file.is_file()} - before.keys():
        file.unlink()
    for file, data in before.items():
        with open(file, "r+b") as disk:
            disk.write(data)
            disk.truncate()
    buf = opened(path, None)
    for number in range(calls):
        add(buf, 15 + 10 * number)
        buf.flush()
    reader.refresh()
    assert read_data(reader)
    assert proven(reader) == {0, *range(15, 15 + 10 * calls, 10)}
    buf.close()
    reader.close()
