"""Safe casts let through what compares equal, and nothing else; the oracle is Python's own arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringmap.errors import InputError
from ringmap.storage.columns.values import cast

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", "f4", "f8"]
NUMBERS = ["?", *INTEGERS, *FLOATS, "c8", "c16"]

EDGES = sorted(
    {
        s * (2**p + d)
        for p in (0, 1, 7, 8, 10, 11, 15, 16, 24, 31, 32, 52, 53, 62, 63, 64)
        for d in (-1, 0, 1)
        for s in (1, -1)
    }
)
ODD = [
    0.5,
    -0.5,
    2.9,
    300.7,
    1e300,
    -1e300,
    65504.0,
    65520.0,
    3.4028236e38,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
]


def scalars(dtype):
    """Return a strategy for values that `dtype` holds exactly, as NumPy scalars of it."""
    kind = dtype.kind
    if kind == "b":
        return st.booleans().map(dtype.type)
    if kind in "iu":
        info = np.iinfo(dtype)
        edges = [n for n in EDGES if info.min <= n <= info.max]
        return st.one_of(st.sampled_from(edges), st.integers(info.min, info.max)).map(dtype.type)

    def real(value):
        with np.errstate(all="ignore"):
            return np.float64(value) if dtype.itemsize in (8, 16) and kind == "f" else dtype.type(value)

    values = st.one_of(st.sampled_from([*EDGES, *ODD]), st.integers(-300, 300), st.floats())
    if kind == "f":
        return values.map(lambda v: dtype.type(real(v)))
    half = np.dtype(f"f{dtype.itemsize // 2}")
    part = st.one_of(st.just(0.0), scalars(half))
    return st.tuples(scalars(half), part).map(lambda p: dtype.type(complex(float(p[0]), float(p[1]))))


def real_fits(value, target):
    """Tell whether a Python bool, int or float may become a real of dtype `target`."""
    if target.kind in "biu":
        low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
        return math.isfinite(value) and value == int(value) and low <= int(value) <= high
    with np.errstate(all="ignore"):
        got = float(target.type(value))
    if isinstance(value, int):
        return math.isfinite(got) and Fraction(got) == value
    return not (math.isinf(got) and math.isfinite(value))


def fits(value, target):
    """Tell whether a NumPy scalar may become a `target`, by the rules of the specification."""
    plain = value.item()
    if isinstance(plain, complex):
        if target.kind != "c":
            return plain.imag == 0 and real_fits(plain.real, target)
        half = np.dtype(f"f{target.itemsize // 2}")
        return real_fits(plain.real, half) and real_fits(plain.imag, half)
    if target.kind == "c":
        return real_fits(plain, np.dtype(f"f{target.itemsize // 2}"))
    return real_fits(plain, target)


def check(values, target):
    """Compare a cast with the oracle, value by value."""
    steps = values.reshape(len(values), -1)
    bad = [i for i, step in enumerate(steps) if not all(fits(v, target) for v in step)]
    if bad:
        with pytest.raises(InputError) as raised:
            cast(values, target, "safe", "here: column 'x'")
        words = str(raised.value)
        assert f"step {bad[0]} " in words, words
        assert words.startswith("here: column 'x'")
        assert str(values.dtype) in words, "names the dtype that came"
        assert f"dtype {target}" in words, "names the locked one"
        return
    got = cast(values, target, "safe", "here")
    assert (got.dtype, got.shape) == (target, values.shape)
    with np.errstate(all="ignore"):
        real = values.real if values.dtype.kind == "c" and target.kind != "c" else values
        assert got.tobytes() == real.astype(target).tobytes()


@settings(max_examples=6 * settings.default.max_examples)
@given(source=st.sampled_from(NUMBERS), target=st.sampled_from(NUMBERS), data=st.data())
def test_numbers_pass_if_and_only_if_they_fit(source, target, data):
    dtype = np.dtype(source)
    values = data.draw(st.lists(scalars(dtype), min_size=1, max_size=4))
    check(np.array(values, dtype), np.dtype(target))


@pytest.mark.parametrize("source", NUMBERS)
def test_every_edge_one_by_one(source):
    """The boundaries, all of them, each alone: 2**53, 2**63, uint64, NaN, inf, halves."""
    dtype = np.dtype(source)
    with np.errstate(all="ignore"):
        if dtype.kind == "b":
            values = np.array([False, True])
        elif dtype.kind in "iu":
            info = np.iinfo(dtype)
            values = np.array([n for n in EDGES if info.min <= n <= info.max], dtype)
        else:
            values = np.array([*map(float, EDGES), *ODD]).astype(dtype)
    odd = [
        1 + 1j,
        1 + 1e-30j,
        complex(1, math.nan),
        complex(math.inf, 1e300),
        complex(1e300, math.inf),
    ]
    for goal in map(np.dtype, NUMBERS):
        for value in values:
            check(np.array([value], dtype), goal)
        for value in odd if dtype.kind == "c" else ():
            with np.errstate(all="ignore"):
                check(np.array([value]).astype(dtype), goal)


@pytest.mark.parametrize(
    ("value", "source", "target", "good"),
    [
        (300.7, "f8", "u1", False),
        (2.9, "f8", "i4", False),
        (3.0, "f8", "i4", True),
        (1e300, "f8", "f4", False),
        (0.1, "f8", "f4", True),
        (math.inf, "f8", "f2", True),
        (math.nan, "f8", "f2", True),
        (math.nan, "f8", "i8", False),
        (math.nan, "f8", "?", False),
        (2**53 + 1, "i8", "f8", False),
        (2**53, "i8", "f8", True),
        (2**64 - 1, "u8", "f8", False),
        (2**63, "u8", "i8", False),
        (2**63, "u8", "f4", True),
        (float(2**63), "f8", "i8", False),
        (float(2**63), "f8", "u8", True),
        (float(2**64), "f8", "u8", False),
        (float(-(2**63)), "f8", "i8", True),
        (-1, "i8", "u8", False),
        (2, "i8", "?", False),
        (1, "i8", "?", True),
        (True, "?", "u1", True),
        (1 + 0j, "c16", "i4", True),
        (1 + 2j, "c16", "f8", False),
        (70000, "i8", "f2", False),
        (2049, "i8", "f2", False),
    ],
)
def test_what_the_original_stored_silently(value, source, target, good):
    values = np.array([value], source)
    assert fits(values[0], np.dtype(target)) == good, "the oracle itself"
    check(values, np.dtype(target))


def test_the_first_offending_step_is_named_in_rows_of_any_shape():
    values = np.zeros((6, 2, 2))
    values[3, 1, 0] = 2.5
    values[5, 0, 0] = 2.5
    with pytest.raises(InputError, match=r"step 3 of dtype float64 does not fit in the locked dtype int8"):
        cast(values, np.dtype("i1"), "safe", "x")
    assert cast(np.zeros((4, 0)), np.dtype("i1"), "safe", "x").shape == (4, 0)


@pytest.mark.parametrize("source", [">i4", ">f8", ">U3", ">M8[s]"])
def test_other_byte_order_is_no_change(source):
    plain = np.dtype(source).newbyteorder("<")
    values = np.array(["1", "2", "20"]).astype("i8" if "M" in source else "U3").astype(source)
    got = cast(values, plain, "safe", "x")
    assert got.dtype == plain
    assert (got == values).all()


# -- text --------------------------------------------------------------------------------------

letters = st.text(st.sampled_from("aZ9 é漢😀\n"), max_size=6).filter(lambda s: not s.endswith("\0"))


@given(texts=st.lists(letters, min_size=1, max_size=4), width=st.integers(1, 5))
@example(texts=["ab", "abc"], width=2)
@example(texts=["a ", "a "], width=1)
def test_strings_must_fit_in_strings(texts, width):
    values, target = np.array(texts, "U6"), np.dtype(f"U{width}")
    bad = [i for i, text in enumerate(texts) if len(text) > width]
    check_text(values, target, bad, texts)


@given(texts=st.lists(st.binary(max_size=6), min_size=1, max_size=4), width=st.integers(1, 5))
def test_bytes_must_fit_in_bytes(texts, width):
    texts = [text.rstrip(b"\0") for text in texts]  # NumPy strips them
    values, target = np.array(texts, "S6"), np.dtype(f"S{width}")
    bad = [i for i, text in enumerate(texts) if len(text) > width]
    check_text(values, target, bad, texts)


@given(texts=st.lists(letters, min_size=1, max_size=4), width=st.integers(1, 5))
@example(texts=["a", "é", "abcdef"], width=5)
@example(texts=["abcdef", "é"], width=5)
def test_strings_become_bytes_if_ascii(texts, width):
    values, target = np.array(texts, "U6"), np.dtype(f"S{width}")
    bad = [i for i, text in enumerate(texts) if len(text) > width or not text.isascii()]
    check_text(values, target, bad, [text.encode() for text in texts])


@given(texts=st.lists(st.binary(max_size=6), min_size=1, max_size=4), width=st.integers(1, 5))
@example(texts=[b"a", b"\xff", b"abcdef"], width=5)
@example(texts=[b"abcdef", b"\xff"], width=5)
def test_bytes_become_strings_if_ascii(texts, width):
    texts = [text.rstrip(b"\0") for text in texts]
    values, target = np.array(texts, "S6"), np.dtype(f"U{width}")
    bad = [i for i, text in enumerate(texts) if len(text) > width or not text.isascii()]
    check_text(values, target, bad, [text.decode("latin1") for text in texts])


def check_text(values, target, bad, expected):
    if bad:
        with pytest.raises(InputError, match=rf"step {bad[0]} of dtype"):
            cast(values, target, "safe", "x")
    else:
        got = cast(values, target, "safe", "x")
        assert got.dtype == target
        assert got.tolist() == expected


# -- dates and durations -----------------------------------------------------------------------

UNITS = {"D": 86400 * 10**9, "h": 3600 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
NAT = -(2**63)


@pytest.mark.parametrize("kind", ["M8", "m8"])
@given(
    data=st.data(),
    source=st.sampled_from(sorted(UNITS)),
    target=st.sampled_from(sorted(UNITS)),
)
def test_dates_pass_if_they_say_the_same(kind, data, source, target):
    count = st.one_of(
        st.integers(-(2**63) + 1, 2**63 - 1),
        st.integers(-(10**12), 10**12),
        st.sampled_from([NAT, 0, 1, 10**9, 2**63 - 1]),
    )
    numbers = data.draw(st.lists(count, min_size=1, max_size=4))
    values = np.array(numbers, "i8").view(f"{kind}[{source}]")
    expected = [n if n == NAT else Fraction(n * UNITS[source], UNITS[target]) for n in numbers]
    bad = [i for i, n in enumerate(expected) if n != NAT and not (n.denominator == 1 and -(2**63) < n < 2**63)]
    goal = np.dtype(f"{kind}[{target}]")
    if bad:
        with pytest.raises(InputError, match=rf"step {bad[0]} of dtype"):
            cast(values, goal, "safe", "x")
    else:
        assert cast(values, goal, "safe", "x").view("i8").tolist() == [int(n) for n in expected]


def test_a_date_beyond_the_range_of_nanoseconds():
    values = np.array(["1970-01-02", "3000-01-01"], "M8[s]")
    with pytest.raises(InputError, match="step 1 "):
        cast(values, np.dtype("M8[ns]"), "safe", "x")


# -- other kinds -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("U1", "i8"),
        ("i8", "U9"),
        ("S1", "f4"),
        ("?", "S5"),
        ("M8[s]", "i8"),
        ("i8", "M8[s]"),
        ("m8[s]", "M8[s]"),
        ("M8[s]", "m8[s]"),
        ("m8[s]", "f8"),
        ("U3", "M8[s]"),
        ("M8[s]", "U30"),
    ],
)
def test_another_kind_is_refused(source, target):
    with pytest.raises(InputError, match=r"step 0 of dtype .* is of another kind"):
        cast(np.zeros(3, source), np.dtype(target), "safe", "x")


# -- unsafe ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", NUMBERS)
def test_unsafe_is_what_numpy_does(source):
    for target in NUMBERS:
        unsafe_is_what_numpy_does(source, target)


def unsafe_is_what_numpy_does(source, target):
    with np.errstate(all="ignore"):
        values = np.array([0, 1, 1.5, -1, 300.7, 1e30]).astype(source)
        real = values.real if values.dtype.kind == "c" and target not in ("c8", "c16", "?") else values
        expected = real.astype(target)
    assert cast(values, np.dtype(target), "unsafe", "x").tobytes() == expected.tobytes()


def test_unsafe_never_cuts_strings_and_writes_numbers_out():
    for value, kind in (
        ("abcdef", "U3"),
        (b"abcdef", "S3"),
        ("abcdef", "S3"),
        (b"abcdef", "U3"),
        (123456, "U3"),
    ):
        with pytest.raises(InputError, match="does not fit.*; shorten it, or name a greater width"):
            cast(np.array([value]), np.dtype(kind), "unsafe", "x")
    assert cast(np.array([12]), np.dtype("U3"), "unsafe", "x").tolist() == ["12"]
    with pytest.raises(InputError, match="can't be converted"):
        cast(np.array(["x"]), np.dtype("i4"), "unsafe", "x")


# -- control -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [(math.inf, "f8", "i8"), (2**53 + 1, "i8", "f8"), (1e39, "f8", "f4"), (2**63, "u8", "i8")],
)
def test_control_a_cast_that_does_not_look_is_caught(monkeypatch, value, source, target):
    monkeypatch.setattr("ringmap.storage.columns.values._kept", lambda values, result: np.ones(len(values), bool))
    with pytest.raises(pytest.fail.Exception):
        check(np.array([value], source), np.dtype(target))
