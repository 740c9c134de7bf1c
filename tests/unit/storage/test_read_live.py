"""The protocol of two looks, on a ring of numbers whose writer strikes at every point of a read."""

import itertools

import numpy as np
import pytest

from ringmap.errors import LappedError
from ringmap.storage.read import read_live
from ringmap.storage.read.read_live import is_live, lost, read_whole, redraw_lost

ROWS, LIVE = 12, 6


class Ring:
    """Twelve rows, of which the newest six are live; a row holds its position. `strikes`: at which point how much
    comes."""

    retry_s = 0

    def __init__(self, strikes=(), head=20):
        self.rows = np.zeros(ROWS, np.int64)
        self.head = 0
        self.strikes, self.points = dict(strikes), 0
        self.refreshes = 0
        self.write(head)
        self.known = self.head

    def write(self, count):
        for _ in range(count):
            self.head += 1  # publishes the new tail, and only then overwrites
            self.rows[(self.head - 1) % ROWS] = self.head - 1

    @property
    def tail(self):
        """The position below which rows may be overwritten."""
        return self.head - LIVE

    def point(self):
        self.write(self.strikes.get(self.points, 0))
        self.points += 1

    def newest_tail(self):
        self.point()
        return self.tail

    def refresh(self):
        self.refreshes += 1
        self.point()
        self.known = self.head
        return True

    def live(self):
        """Return what the reader knows to be live: as of its last refresh."""
        return np.arange(self.known - LIVE, self.known)

    def copy(self, positions):
        found = np.empty(len(positions), np.int64)
        for i, position in enumerate(positions):
            self.point()
            found[i] = self.rows[position % ROWS]
        return found


def batch_of(ring):
    """Return the positions of a batch and what was read there."""
    positions = ring.live()[[0, 5, 2, 0]]
    found = ring.copy(positions)
    bad = lost(ring, positions)
    if bad is not None:

        def gather(which):
            found[which] = ring.copy(positions[which])

        def redraw(which):
            return ring.live()[which]

        redraw_lost(ring, positions, bad, gather, redraw, "here", "do this")
    return positions, found


def whole_of(ring):
    """Return all live positions and what was read there."""

    def read():
        positions = ring.live()
        return positions, (positions, ring.copy(positions))

    return read_whole(ring, read, "here", "do this")


def schedules():
    """Strikes at any two of the first twenty points, short, of more than is spare, and of more than the ring."""
    for points in itertools.combinations(range(20), 2):
        for counts in itertools.product((3, 7, 15), repeat=2):
            yield zip(points, counts, strict=True)


@pytest.mark.parametrize("read", [batch_of, whole_of])
def test_what_is_read_is_whole_wherever_the_writer_strikes(read):
    again = 0
    for strikes in schedules():
        ring = Ring(strikes)
        positions, found = read(ring)
        np.testing.assert_array_equal(found, positions)
        again += ring.refreshes
    assert again > 500  # else nothing was lost


def no_look(monkeypatch):
    monkeypatch.setattr(Ring, "newest_tail", lambda ring: ring.point() or 0)


def look_before_the_copy(monkeypatch):
    """The tail that a read begins with is the one that it is held to."""
    copy = Ring.copy

    def copied(ring, positions):
        ring.early = ring.tail
        return copy(ring, positions)

    monkeypatch.setattr(Ring, "copy", copied)
    monkeypatch.setattr(Ring, "newest_tail", lambda ring: ring.point() or ring.early)


def rows_before_the_tail(monkeypatch):
    """A writer that overwrites rows before it publishes the tail, and that is looked at in between."""

    def write(ring, count):
        if count:
            positions = np.arange(ring.head, ring.head + count)
            ring.rows[positions % ROWS] = positions
            ring.shown, ring.head = ring.head - LIVE, ring.head + count

    monkeypatch.setattr(Ring, "write", write)
    monkeypatch.setattr(Ring, "newest_tail", lambda ring: ring.point() or ring.shown)


@pytest.mark.parametrize("read", [batch_of, whole_of])
@pytest.mark.parametrize("wrong", [no_look, look_before_the_copy, rows_before_the_tail])
def test_control_a_wrong_order_is_caught(monkeypatch, wrong, read):
    wrong(monkeypatch)
    torn = 0
    for strikes in schedules():
        positions, found = read(Ring(strikes))
        torn += not np.array_equal(found, positions)
    assert torn


def test_control_what_is_drawn_anew_is_looked_at_as_well(monkeypatch):
    monkeypatch.setattr(read_live, "lost", lambda *_: None)  # that of `redraw_lost`; not ours
    torn = 0
    for strikes in schedules():
        positions, found = batch_of(Ring(strikes))
        torn += not np.array_equal(found, positions)
    assert torn


def test_rows_that_mean_nothing_count_as_lost():
    ring = Ring()
    good = np.array([True, False, True])
    at = ring.live()[:3]
    assert lost(ring, at, good).tolist() == [False, True, False]
    assert lost(ring, at, good | True) is None
    assert lost(ring, at - 1, good).tolist() == [True, True, False]
    assert lost(ring, at - 1).tolist() == [True, False, False]
    assert lost(ring, at[:0]) is None
    assert is_live(ring, ring.tail)
    assert not is_live(ring, ring.tail - 1)


def test_nothing_that_is_read_is_not_looked_at():
    ring = Ring()
    ring.newest_tail = lambda: pytest.fail("a look")
    nothing = np.empty(0, np.int64)
    assert read_whole(ring, lambda: (nothing, "nothing"), "here", "do this") == "nothing"


def test_a_whole_read_is_given_up_after_ten_tries():
    ring = Ring(dict.fromkeys(range(1000), 15))
    with pytest.raises(LappedError, match="here: the writer overtook this reader 10 times in a row, for 0 s; do this"):
        whole_of(ring)
    assert ring.refreshes == 9
