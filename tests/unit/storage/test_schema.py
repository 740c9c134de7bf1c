"""Schemas: how a user gives one, how an episode becomes arrays, what is refused and in which words."""

import re
from collections import namedtuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ringmap.errors import InputError
from ringmap.storage.columns.schema import Column, ColumnSpec, Schema, as_columns, portable


def specs(schema):
    return [(spec.name, spec.shape, spec.dtype.str) for spec in schema.columns]


# -- how a schema is given ---------------------------------------------------------------------


def test_pairs_of_shape_and_dtype():
    given = {
        "obs": ((3, 2), "f4"),
        "action": (2, np.int64),
        "flag": ((), bool),
        "name": ([], "U5"),
        "t": ((), "M8[ms]"),
    }
    assert specs(Schema.parse(given)) == [
        ("obs", (3, 2), "<f4"),
        ("action", (2,), "<i8"),
        ("flag", (), "|b1"),
        ("name", (), "<U5"),
        ("t", (), "<M8[ms]"),
    ]


def test_pairs_of_another_byte_order_become_little_endian():
    assert specs(Schema.parse({"obs": ((), ">f4"), "n": ((), ">U3")})) == [
        ("obs", (), "<f4"),
        ("n", (), "<U3"),
    ]


def test_an_example_episode():
    given = {
        "obs": np.zeros((7, 3), np.float32),
        "name": ["ab", "c"] * 3 + ["d"],
        "t": torch.zeros(7, 2, dtype=torch.int16),
    }
    assert specs(Schema.parse(given)) == [
        ("obs", (3,), "<f4"),
        ("name", (), "<U0"),
        ("t", (2,), "<i2"),
    ]


def test_an_example_of_tuples_is_no_pair():
    assert specs(Schema.parse({"obs": (1.0, 2.0), "pos": ((1, 2), (3, 4))})) == [
        ("obs", (), "<f8"),
        ("pos", (2,), "<i8"),
    ]
    assert specs(Schema.parse({"obs": (1.0, 2.0, 3.0)})) == [("obs", (), "<f8")]


def test_a_schema_itself():
    schema = Schema.parse({"obs": ((), "f4")})
    assert Schema.parse(schema) is schema


def test_a_dict_space_gives_its_keys():
    space = spaces.Dict(
        pixels=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        action=spaces.Discrete(3),
        bits=spaces.MultiBinary(5),
        many=spaces.MultiDiscrete([2, 3]),
    )
    assert sorted(specs(Schema.parse(space))) == sorted(
        [
            ("pixels", (4, 4, 3), "|u1"),
            ("action", (), "<i8"),
            ("bits", (5,), "|i1"),
            ("many", (2,), "<i8"),
        ]
    )


def test_nested_spaces_and_pairs_join_their_keys():
    box = spaces.Box(-1, 1, (2,))
    space = spaces.Dict(a=spaces.Dict(b=box, c=spaces.Tuple([box, spaces.Discrete(2)])), d=box)
    pairs = {"a": {"b": ((2,), "f4"), "c": {"0": ((2,), "f4"), "1": ((), "i8")}}, "d": ((2,), "f4")}
    expected = [("a/b", (2,), "<f4"), ("a/c/0", (2,), "<f4"), ("a/c/1", (), "<i8"), ("d", (2,), "<f4")]
    assert specs(Schema.parse(space)) == specs(Schema.parse(pairs)) == expected


def test_another_space_gives_the_observation():
    assert specs(Schema.parse(spaces.Box(-1, 1, (6,)))) == [("observation", (6,), "<f4")]
    env = gymnasium.make("CartPole-v1")
    assert specs(Schema.parse(env.observation_space)) == [("observation", (4,), "<f4")]
    env.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (5, "expected column -> .*got int"),
        ([("obs", ((), "f4"))], "got list"),
        ({}, "expected column"),
        ({3: ((), "f4")}, "column names are strings, got 3"),
        ({"obs": ((-1,), "f4")}, "negative size"),
        ({"obs": ((), "float7")}, "column 'obs'"),
        ({"obs": ((), object)}, "Python objects"),
        ({"obs": ((), "f16")}, "no fixed meaning on every machine"),
        ({"obs": ((), "V8")}, "no fixed meaning"),
        ({"obs": Column((), "U", mutable=True)}, "'obs' is of text and mutable; name a width"),
        ({"obs": ((), bytes)}, "width 0"),
        ({"obs": ((), "f4"), "x": [1, 2]}, "'x' is not a .* pair"),
        ({"obs": np.zeros((3, 1)), "x": np.zeros(4)}, "'x' has 4 steps, expected 3"),
        (spaces.Dict(a=spaces.Sequence(spaces.Discrete(2))), "space 'a' .*flatten"),
        (spaces.Graph(spaces.Discrete(2), None), "space 'observation'"),
        ({"obs": {"a/b": ((), "f4")}}, "obs: key 'a/b' holds a slash"),
    ],
)
def test_no_schema(given, words):
    with pytest.raises(InputError, match=f"^schema.*{words}"):
        Schema.parse(given)


@pytest.mark.parametrize("dtype", ["?", "i2", "f2", "c16", "S4", "U4", "m8[s]"])
def test_inferred_from_an_episode(dtype):
    arrays = {
        "a": np.zeros((4, 2), dtype),
        "b": np.zeros((4, 0, 3), np.dtype(dtype).newbyteorder(">")),
    }
    little = "<U0" if dtype == "U4" else np.dtype(dtype).str  # str is text, of any length
    assert specs(Schema.of(arrays)) == [("a", (2,), little), ("b", (0, 3), little)]


def test_schemas_are_equal_by_order_name_shape_and_dtype():
    def schema(**columns):
        return Schema.parse(columns)

    one = schema(a=((), "f4"), b=((2,), "i8"))
    assert one == schema(a=((), "<f4"), b=(2, "int64"))
    for other in (
        schema(b=((2,), "i8"), a=((), "f4")),
        schema(a=((), "f8"), b=((2,), "i8")),
        schema(a=((1,), "f4"), b=((2,), "i8")),
        schema(a=((), "f4"), c=((2,), "i8")),
    ):
        assert one != other


def test_row_nbytes():
    assert ColumnSpec("x", (3, 2), np.dtype("f4")).row_nbytes == 24
    assert ColumnSpec("x", (), np.dtype("U5")).row_nbytes == 20
    assert ColumnSpec("x", (0, 9), np.dtype("f4")).row_nbytes == 0


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "=i8", "|u1", ">U3", ">M8[s]", "?"])
def test_portable_is_little_endian(dtype):
    got = portable(np.dtype(dtype))
    assert got.str[0] in "<|"
    assert np.zeros(1, dtype).astype(got).dtype == got


# -- how values become arrays ------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "shape", "dtype"),
    [
        ([1, 2, 3], (3,), "int64"),
        ((1.5, 2, 3), (3,), "float64"),
        ([True, False, True], (3,), "bool"),
        ([np.float32(1)] * 3, (3,), "float32"),
        ([np.zeros((2, 2), np.uint8)] * 3, (3, 2, 2), "uint8"),
        ([[1, 2], (3, 4), np.array([5, 6])], (3, 2), "int64"),
        ([torch.ones(2, requires_grad=True)] * 3, (3, 2), "float32"),
        (torch.ones(3, 2, dtype=torch.float64), (3, 2), "float64"),
        (torch.ones(3, requires_grad=True), (3,), "float32"),
        (["a", "bc", ""], (3,), "<U2"),
        ([b"a", b"bc", b""], (3,), "|S2"),
        ([1 + 2j] * 3, (3,), "complex128"),
        (range(3), (3,), "int64"),
        ([Point(1, 2)] * 3, (3, 2), "int64"),
        (np.ma.masked_array([1, 2, 3], [0, 0, 0]), (3,), "int64"),
        (np.zeros((3, 0)), (3, 0), "float64"),
        (np.array(["2020-01-01"] * 3, "M8[D]"), (3,), "<M8[D]"),
    ],
    ids=str,
)
def test_values_become_arrays(value, shape, dtype):
    array = as_columns({"x": value}, "here")["x"]
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype) == (shape, dtype)


def test_an_array_is_not_copied():
    given = np.zeros((3, 2))
    assert as_columns({"x": given}, "here")["x"] is given


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "column 'x' is a scalar"),
        (np.float32(3), "column 'x' is a scalar"),
        ("abc", "column 'x' is a scalar"),
        (torch.tensor(3), "column 'x' is a scalar"),
        (None, "column 'x' is a scalar"),
        ({"a": 1}, "column 'x/a' is a scalar"),
        ([None, None], "Python objects"),
        ([{"a": object()}], "column 'x/a' holds Python objects"),
        ([np.zeros(2), np.zeros(3)], "column 'x' is ragged.*pad them"),
        ([[1], [1, 2]], "column 'x' is ragged"),
        (np.array([object()]), "Python objects .*_episode_data"),
        ([2**70], "Python objects"),
        (np.zeros(3, np.longdouble), "no fixed meaning"),
        (np.zeros(3, [("a", "f4")]), "no fixed meaning"),
        (torch.zeros(3, dtype=torch.bfloat16), "tensor of a dtype that NumPy has"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_values_that_are_no_column(value, words):
    with pytest.raises(InputError, match=f"^here: .*({words})"):
        as_columns({"x": value}, "here")


def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(InputError, match=r"column 'x' .*tensor of a dtype that NumPy has"):
        as_columns({"x": torch.zeros(3, device="meta")}, "here")


def test_names_are_strings():
    with pytest.raises(InputError, match=r"column names are strings, got 7 \(int\)"):
        as_columns({7: [1]}, "here")
    with pytest.raises(InputError, match="column names are strings, got None"):
        as_columns({None: [1]}, "here")


def test_lengths_agree():
    with pytest.raises(InputError, match="column 'c' has 2 steps, expected 3 as in 'a'"):
        as_columns({"a": [1, 2, 3], "b": np.zeros((3, 9)), "c": [1, 2]}, "here")
    assert as_columns({"a": [], "b": np.zeros((0, 4))}, "here")["b"].shape == (0, 4)


# -- what fits ---------------------------------------------------------------------------------

SCHEMA = Schema.parse({"obs": ((3,), "f4"), "action": ((), "i8")})


def arrays(**change):
    return {"obs": np.ones((2, 3)), "action": np.zeros(2, np.int32), **change}


def test_what_fits_comes_in_order_dtype_and_contiguous():
    given = arrays(obs=np.arange(12.0).reshape(4, 3)[::2])
    fitted = SCHEMA.fit(dict(reversed(given.items())), "safe", "here")
    assert list(fitted) == ["obs", "action"]
    assert [a.dtype for a in fitted.values()] == [np.float32, np.int64]
    assert all(a.flags.c_contiguous for a in fitted.values())
    assert fitted["obs"].tolist() == given["obs"].tolist()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"obs": np.ones((2, 3))}, "schema mismatch: missing columns ['action'], extra columns []"),
        (arrays(more=np.ones(2)), "schema mismatch: missing columns [], extra columns ['more']"),
        (
            {"obs": np.ones((2, 3)), "actoin": np.ones(2)},
            "schema mismatch: missing columns ['action'], extra columns ['actoin']; the schema was locked to ['obs', "
            "'action']",
        ),
        (arrays(obs=np.ones((2, 4))), "column 'obs' has per-step shape (4,), expected (3,)"),
        (arrays(obs=np.ones((2, 3, 1))), "column 'obs' has per-step shape (3, 1), expected (3,)"),
        (arrays(action=np.ones((2, 1))), "column 'action' has per-step shape (1,), expected ()"),
        (
            arrays(action=np.array([0, 0.5])),
            "column 'action': step 1 of dtype float64 does not fit in the locked dtype int64",
        ),
    ],
)
def test_what_does_not_fit(given, words):
    with pytest.raises(InputError, match="^here: " + re.escape(words)):
        SCHEMA.fit(given, "safe", "here")


def test_unsafe_lets_values_change_but_not_shapes():
    assert SCHEMA.fit(arrays(action=np.array([0, 2.9])), "unsafe", "here")["action"].tolist() == [
        0,
        2,
    ]
    with pytest.raises(InputError, match="per-step shape"):
        SCHEMA.fit(arrays(obs=np.ones((2, 4))), "unsafe", "here")


def test_control_a_fit_that_does_not_order_is_caught():
    given = arrays()
    disordered = {name: given[name] for name in ("action", "obs")}
    assert list(disordered) != list(SCHEMA.fit(disordered, "safe", "here"))


ROWS = {"obs": np.zeros((7, 3), np.float32), "flag": np.ones(7, np.bool_)}


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ">f4"])
def test_floats_of_another_size_are_converted_as_those_of_a_list(dtype, rng):
    schema, obs = Schema.of(ROWS), rng.normal(size=(7, 3)).astype(dtype)
    fitted = schema.fit({**ROWS, "obs": obs}, "safe", "here")
    listed = schema.fit({**ROWS, "obs": list(obs)}, "safe", "here")
    for one, other in zip(fitted.values(), listed.values(), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_a_float_that_is_too_large_is_refused_as_one_of_a_list():
    rows = {**ROWS, "obs": np.full((7, 3), 1e300)}
    with pytest.raises(InputError) as one:
        Schema.of(ROWS).fit(rows, "safe", "here")
    with pytest.raises(InputError) as other:
        Schema.of(ROWS).fit({**rows, "obs": list(rows["obs"])}, "safe", "here")
    assert str(one.value) == str(other.value)


def test_rows_that_match_are_not_copied():
    fitted = Schema.of(ROWS).fit(dict(reversed(ROWS.items())), "safe", "here")
    assert list(fitted) == list(ROWS)
    assert all(one is ROWS[name] for name, one in fitted.items())


def test_no_rows_fit_every_schema():
    fitted = Schema.of(ROWS).fit({"other": []}, "safe", "here")
    assert {name: (values.shape, values.dtype) for name, values in fitted.items()} == {
        "obs": ((0, 3), np.float32),
        "flag": ((0,), np.bool_),
    }


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"obs": ROWS["obs"]}, "missing columns"),
        ({**ROWS, "other": ROWS["flag"]}, "extra columns"),
        ({**ROWS, "obs": ROWS["obs"].astype(np.longdouble)}, "dtype"),
        ({**ROWS, "obs": np.zeros((7, 4), np.float32)}, "per-step shape"),
        ({**ROWS, "flag": np.ones(6, np.bool_)}, "has 6 steps, expected 7"),
        ({**ROWS, "flag": np.array(True)}, "is a scalar"),
    ],
)
def test_rows_that_do_not_match(rows, words):
    with pytest.raises(InputError, match=f"here: .*{words}"):
        Schema.of(ROWS).fit(rows, "safe", "here")


@pytest.mark.parametrize(
    "change",
    [
        {"obs": ROWS["obs"].astype(np.int64)},
        {"obs": np.zeros((3, 7), np.float32).T},
        {"flag": [True] * 7},
        {"flag": np.ones(7, object)},
    ],
)
def test_rows_that_are_converted(change):
    fitted = Schema.of(ROWS).fit({**ROWS, **change}, "safe", "here")
    for name, values in fitted.items():
        assert values.flags.c_contiguous
        assert values.dtype == ROWS[name].dtype
        np.testing.assert_array_equal(values, ROWS[name])
