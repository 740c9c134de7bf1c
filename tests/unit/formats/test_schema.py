import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringmap.errors import InputError
from ringmap.formats.episode import check_episode
from ringmap.storage.columns.schema import ColumnSpec, Schema

DTYPES = ["?", "i1", "i4", "i8", "u1", "u8", "f2", "f4", "f8", "c8", "c16"]


@st.composite
def casts(draw):
    source, target = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    values = draw(hnp.arrays(source, 1))
    if draw(st.booleans()):
        info = np.iinfo(np.dtype(source)) if np.dtype(source).kind in "iu" else None
        edge = [info.min, info.max, info.max - 1] if info else [2**63, -(2**63), 2**64, 0.5, 255]
        if source != "?":
            with np.errstate(over="ignore"):
                values = np.array([draw(st.sampled_from(edge))]).astype(source)
    return values, np.dtype(target)


def exact(value):
    """Python's own number, which compares without rounding."""
    value = value.item()
    return complex(value) if isinstance(value, complex) else value


@given(casts())
def test_a_cast_is_taken_exactly_when_the_value_stays_equal(case):
    values, target = case
    schema = Schema((ColumnSpec("x", (), target),))
    with np.errstate(all="ignore"):
        real = values.real if target.kind != "c" else values
        result = real.astype(target)
    before, after = exact(values[0]), exact(result[0])
    nan = before != before and after != after
    stays = nan or before == after
    try:
        got = check_episode({"x": values}, schema, "test").columns["x"]
    except InputError:
        # NaN with an imaginary part, or in two parts, may be refused: it has no one equal.
        assert not stays or (nan and values.dtype.kind == "c")
    else:
        assert stays
        assert got.dtype == target
        np.testing.assert_array_equal(got, result)


def test_text_of_no_width_takes_any():
    schema = Schema((ColumnSpec("x", (), np.dtype("U")),))
    assert check_episode({"x": ["longer than that"]}, schema, "test").columns["x"].dtype == "<U16"


def test_text_that_is_too_long_is_refused():
    schema = Schema((ColumnSpec("x", (), np.dtype("U3")),))
    assert check_episode({"x": ["abc", ""]}, schema, "test").columns["x"].dtype == "<U3"
    with pytest.raises(InputError, match="step 1"):
        check_episode({"x": ["abc", "abcd"]}, schema, "test")


@pytest.mark.parametrize("target", ["M8[s]", "m8[s]"])
def test_dates_keep_their_unit(target):
    schema = Schema((ColumnSpec("x", (), np.dtype(target)),))
    fine = np.array([1000, 2000], target.replace("s", "ms"))
    assert check_episode({"x": fine}, schema, "test").columns["x"].dtype == target
    with pytest.raises(InputError, match="step 1"):
        check_episode({"x": fine + np.array([0, 1], "m8[ms]")}, schema, "test")
    with pytest.raises(InputError, match="does not fit"):
        check_episode({"x": [1, 2]}, schema, "test")


def test_what_goes_in_is_left_alone():
    episode = {"x": [1, 2], "_episode_data": {"seed": 1}}
    checked = check_episode(episode, None, "test")
    assert checked.length == 2
    assert checked.data == {"seed": 1}
    assert checked.schema.names == ["x"]
    assert episode == {"x": [1, 2], "_episode_data": {"seed": 1}}


def test_columns_come_in_the_schemas_order():
    first = check_episode({"a": [1], "b": [2]}, None, "test")
    assert list(check_episode({"b": [2], "a": [1]}, first.schema, "test").columns) == ["a", "b"]
