"""The table of the clips of all rings, with rings in parts, which draw their own clips."""

import numpy as np
import pytest

from ringmap.buffers.rings import apart
from ringmap.clips.cut import Cut
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import NoClipsError
from tests.unit.buffers.steps import prove

CLIPS = Cut.clip(3)


@pytest.fixture
def in_parts(three):
    """The three rings, with episodes in parts in the first two."""
    for name in "ab":
        three.write_in_parts(name, 30)
    return three


def opened(fleet, **options):
    """Open the rings, and count their clips."""
    buf = ShardedReplayBuffer(fleet.folder, history_len=3, seed=0, **options)
    buf.sample(3)
    return buf


def clear(fleet, buf, names):
    """Clear rings, and let them be followed as by another thread in the middle of a draw."""
    for ring in buf.engine.members.open:
        if ring.name in names:
            fleet.writers[ring.name].clear()
            fleet.model[ring.name].clear()
            ring.source.refresh()


@pytest.mark.parametrize("weights", ["clips", "equal"])
def test_a_ring_in_parts_that_is_cleared_during_a_draw(in_parts, weights):
    """Clips of the others are drawn in place of its own, until it has some again."""
    buf = opened(in_parts, weights=weights)
    clear(in_parts, buf, "a")
    ids = buf.engine.many.draw(300, CLIPS, buf.engine.rng).positions
    assert set(apart(ids)[0].tolist()) == {1, 2}
    prove(buf.engine.read(ids, CLIPS), in_parts.lengths, 3)
    in_parts.write_in_parts("a", 20)
    batch = buf.sample(300)
    prove(batch, in_parts.lengths, 3)
    assert set(apart(batch.ids)[0].tolist()) == {0, 1, 2}


def test_all_rings_are_cleared_during_a_draw(three):
    for name in "abc":
        three.write_in_parts(name, 30)
    buf = opened(three)
    clear(three, buf, "abc")
    assert buf.engine.many.draw(300, CLIPS, buf.engine.rng) is None


def test_weights_of_rings_without_clips(fleet):
    fleet.ring("a")
    fleet.ring("b")
    fleet.write("b", 20)
    buf = ShardedReplayBuffer(fleet.folder, history_len=3, weights={"a": 2.0, "b": 0.0})
    with pytest.raises(NoClipsError, match="give no weight to a ring with episodes"):
        buf.sample(3)
    fleet.write("a", 20)
    assert np.unique(apart(buf.sample(100).ids)[0]).tolist() == [0]
