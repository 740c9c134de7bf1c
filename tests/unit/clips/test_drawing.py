"""Integers drawn by a product: their range to the last bit, their frequencies, and what a generator's state gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.clips.draws import Around, integers

pytestmark = pytest.mark.usefixtures("guided")


class Fixed:
    """A generator whose draws are all the same."""

    def __init__(self, value):
        self.value = value

    def random(self, count):
        return np.full(count, self.value)


@given(low=st.integers(0, 2**50), count=st.integers(1, 2**52))
def test_the_greatest_and_the_least_draw_stay_in_the_range(low, count):
    greatest = integers(Fixed(1 - 2**-53), low, low + count, 3)
    assert greatest.dtype == np.int64
    assert (greatest == low + count - 1).all()
    assert (integers(Fixed(0.0), low, low + count, 3) == low).all()


def test_frequencies():
    """1,000,000 draws of 1,000 integers: chi-squared of 999 degrees has mean 999, deviation 45."""
    drawn = integers(np.random.default_rng(0), 70, 1070, 1_000_000)
    counts = np.bincount(drawn - 70, minlength=1000)
    assert len(counts) == 1000
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 999 + 4 * 45


def test_a_state_gives_the_same_integers_and_an_empty_range_raises():
    one, other = (integers(np.random.default_rng(3), 5, 90, 50) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert integers(np.random.default_rng(3), 5, 5, 0).shape == (0,)
    with pytest.raises(ValueError, match=r"no integer lies in \[5, 5\)"):
        integers(np.random.default_rng(3), 5, 5, 1)


def test_a_range_that_is_as_long_as_another_one_begins():
    """The length is a float, the beginning an integer, and 5 == 5.0."""
    for count, low in ((77, 77), (78, np.int64(78))):
        assert integers(np.random.default_rng(0), 0, count, 3).dtype == np.int64
        drawn = integers(np.random.default_rng(0), low, low + 10, 3)
        assert drawn.dtype == np.int64
        assert (drawn >= low).all()


@given(every=st.sets(st.integers(-9, 9)), data=st.data())
def test_spots_are_where_the_offsets_stand(every, data):
    around = Around(every)
    some = data.draw(st.lists(st.sampled_from(around.array.tolist()), min_size=1))
    assert around.array[around.spots(np.array(some))].tolist() == some
