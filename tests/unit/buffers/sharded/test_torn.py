"""No clip of many rings is torn, however many writers run flat out.

The default suite reads a sample; the campaign 1,000,000 clips of 16 writers. The control, without the look after the
copy, must tear.
"""

import contextlib
import os

import pytest

from benchmarks.harness.proof import num_torn
from benchmarks.harness.race import Ring, a_writer, one_look
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import LappedError
from tests.tiers import few

WRITERS, BATCH = 4, 32
CAMPAIGN = {"writers": 16, "size": 32, "is_apart": True}


@contextlib.contextmanager
def a_core_of_its_own():
    """Start the writers in this block on other cores than this process goes on with; a reader beside 16 of them hardly
    runs."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if len(cores) == 1:
        yield lambda: None
        return
    os.sched_setaffinity(0, cores[:-1])
    try:
        yield lambda: os.sched_setaffinity(0, cores[-1:])
    finally:
        os.sched_setaffinity(0, cores)


def race(folder, ring, clips, writers=WRITERS, size=BATCH, is_apart=False):
    """Return how many of so many clips are torn, and how many were redrawn, while every ring is written without a
    pause."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        move = stack.enter_context(a_core_of_its_own()) if is_apart else lambda: None
        for number in range(writers):
            stack.enter_context(a_writer(str(folder / f"{number}"), ring))
        move()
        buf = ShardedReplayBuffer(folder, history_len=ring.history, seed=0, wait_s=60)
        done = torn = laps = 0
        while done < clips or len(buf.shards) < writers:
            try:
                batch = buf.sample(size)
            except LappedError:
                laps += 1
                assert laps < 100 + clips // size
                continue
            done += size
            torn += num_torn(batch)
            if len(set((batch.ids >> 48).tolist())) < 2:
                buf.refresh()
        assert [shard.problem for shard in buf.shards] == [None] * writers
        return torn, buf.num_redraws


SAMPLE = 2_000
RINGS = {
    "large rows": Ring(),
    "small rows": Ring(max_steps=256, spare=64, row_nbytes=256),
    "retired first": Ring(spare=1),
}


@pytest.mark.parametrize("ring", few(RINGS.values()), ids=RINGS.keys())
def test_no_clip_is_torn(tmp_path, ring):
    torn, redraws = race(tmp_path / "fleet", ring, SAMPLE)
    assert torn == 0


def test_the_control_tears(tmp_path):
    with one_look():
        torn, _ = race(tmp_path / "fleet", RINGS["large rows"], SAMPLE)
    assert torn > 0


@pytest.mark.campaign
@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS.keys())
def test_no_clip_of_a_million_is_torn(tmp_path, ring):
    clips = int(os.environ.get("CLIPS", 1_000_000))
    torn, redraws = race(tmp_path / "fleet", ring, clips, **CAMPAIGN)
    print(f"\n{torn:,} of {clips:,} clips torn, {redraws:,} redrawn, {CAMPAIGN['writers']} writers")
    assert torn == 0
    assert redraws > 0
