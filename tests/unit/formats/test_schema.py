"""Episodes against the schema of a dataset: what stays equal is cast, in the schema's order; the rest is refused."""

import numpy as np
import pytest

from ringmap.errors import InputError
from ringmap.formats.episode import check_episode
from ringmap.storage.columns.schema import ColumnSpec, Schema

SECONDS = np.array([1000, 2000], "M8[ms]")


@pytest.mark.parametrize(
    ("target", "rows", "got"),
    [
        ("f4", [1, 2**24], "f4"),
        ("i1", [1.0, -128.0], "i1"),
        ("f4", [np.nan, np.inf], "f4"),
        ("c8", [1, 2], "c8"),
        ("f4", np.array([1 + 0j, 2]), "f4"),
        ("?", [1, 0], "?"),
        ("U", ["longer than that"], "<U16"),  # of no width: it takes any
        ("U3", ["abc", ""], "<U3"),
        ("M8[s]", SECONDS, "M8[s]"),
        ("m8[s]", SECONDS.astype("m8[ms]"), "m8[s]"),
        ("i8", np.array([1, 2**63 - 1], "u8"), "i8"),
        ("f8", [1, 2**53], "f8"),
        ("i8", [1.0, -(2.0**63)], "i8"),
        ("i8", np.array([1, 2**63], "u8"), "step 1"),
        ("u8", [1, -1], "step 1"),
        ("f8", [1, 2**63 - 1], "step 1"),
        ("i8", [1.0, 2.0**63], "step 1"),
        ("f4", [1, 2**24 + 1], "step 1"),
        ("i1", [1.0, 128.0], "step 1"),
        ("i1", [1.0, 0.5], "step 1"),
        ("i1", [1.0, np.nan], "step 1"),
        ("f4", np.array([1 + 0j, 1j]), "step 1"),
        ("?", [1, 2], "step 1"),
        ("U3", ["abc", "abcd"], "step 1"),
        ("M8[s]", SECONDS + np.array([0, 1], "m8[ms]"), "step 1"),
        ("M8[s]", [1, 2], "does not fit"),
    ],
)
def test_a_cast_is_taken_exactly_when_the_values_stay_equal(target, rows, got):
    schema = Schema((ColumnSpec("x", (), np.dtype(target)),))
    if got in ("step 1", "does not fit"):
        with pytest.raises(InputError, match=got):
            check_episode({"x": rows}, schema, "test")
        return
    found = check_episode({"x": rows}, schema, "test").columns["x"]
    assert found.dtype == got
    np.testing.assert_array_equal(found, np.asarray(rows))


def test_what_goes_in_is_left_alone_and_comes_in_the_order_of_the_schema():
    episode = {"a": [1, 2], "b": [3, 4], "_episode_data": {"seed": 1}}
    checked = check_episode(episode, None, "test")
    assert (checked.length, checked.data, checked.schema.names) == (2, {"seed": 1}, ["a", "b"])
    assert episode == {"a": [1, 2], "b": [3, 4], "_episode_data": {"seed": 1}}
    assert list(check_episode({"b": [2], "a": [1]}, checked.schema, "test").columns) == ["a", "b"]
