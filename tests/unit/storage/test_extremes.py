"""Smallest, greatest, all: the same as NumPy's reductions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringmap.storage.ring.arrays import all_true, highest, lowest


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50), st.integers(1, 3))
def test_as_numpy_says(values, step):
    array = np.array(values, np.int64)[::step]
    assert lowest(array) == array.min()
    assert highest(array) == array.max()


@given(st.lists(st.booleans(), max_size=50), st.integers(1, 3))
def test_all_as_numpy_says(flags, step):
    array = np.array(flags, np.bool_)[::step]
    assert all_true(array) == bool(array.all())
