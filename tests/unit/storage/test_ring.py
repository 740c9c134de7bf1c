"""Ring arithmetic against a list of slots written one by one."""

from hypothesis import given
from hypothesis import strategies as st

from ringmap.storage.ring.ring import Ring, spare_rows


def test_spare_rows_by_the_rule():
    for max_steps, spare in (
        (1, 1),
        (2, 2),
        (1023, 1023),
        (1024, 1024),
        (1025, 1024),
        (16384, 1024),
        (16400, 1025),
        (1_000_000, 62_500),
    ):
        assert spare_rows(max_steps) == spare, max_steps


@given(max_steps=st.integers(1, 10**9))
def test_spare_rows_at_most_double_the_ring(max_steps):
    spare = spare_rows(max_steps)
    assert 0 < spare <= max_steps
    assert spare == min(max_steps, max(1024, max_steps // 16))


@given(
    max_steps=st.integers(1, 30),
    spare=st.integers(0, 10),
    position=st.integers(0, 2**62),
    share=st.floats(0, 1),
)
def test_pieces_are_the_slots_one_by_one(max_steps, spare, position, share):
    ring = Ring(max_steps, spare)
    count = int(share * ring.rows)
    pieces = ring.pieces(position, count)
    slots = [slot + i for slot, steps in pieces for i in range(steps)]
    assert slots == [(position + i) % (max_steps + spare) for i in range(count)]
    assert len(pieces) <= 2
    assert all(slot >= 0 and slot + steps <= ring.rows for slot, steps in pieces)


@given(max_steps=st.integers(1, 30), spare=st.integers(0, 10), head=st.integers(0, 100))
def test_overwritten_is_what_lies_a_lap_back(max_steps, spare, head):
    ring = Ring(max_steps, spare)
    owner = {}
    for position in range(head):
        owner[position % ring.rows] = position
    standing = set(owner.values())
    for position in range(head):
        assert (position in standing) == (position >= ring.overwritten(head))


def test_control_a_ring_without_its_spare_rows_is_caught():
    class Short(Ring):
        def __post_init__(self):
            object.__setattr__(self, "rows", self.max_steps)

    ring = Short(5, 3)
    assert ring.pieces(6, 1) != Ring(5, 3).pieces(6, 1)
    assert ring.overwritten(9) != Ring(5, 3).overwritten(9)
