"""Conditions on episodes, against plain Python; where they can't be parsed."""

import pickle

import numpy as np
import pytest

from ringmap.clips.where import Condition, Values
from ringmap.errors import InputError

SEEDS = [3.0, np.nan, 50.0, 7.0]
ROOMS = ["left", None, "right hand", "left"]
LARGE = [2**53, 2**53 + 1, -(2**70), 2.0**53]
COLUMNS = {
    "seed": Values(np.array(SEEDS)),
    "room": Values.of(ROOMS),
    "big": Values.of(LARGE),
    "flags": Values.of(["bad", "", "badly_lit good", "bad good"]),
    "mixed": Values.of([1, "left", None, "1"]),
}


def select(text, where="test"):
    return Condition(text, where).select(list(COLUMNS), COLUMNS.get, 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [1, 1, 1, 1]),
        ("seed < 50", [1, 0, 0, 1]),
        ("seed<=50", [1, 0, 1, 1]),
        ("seed != 7", [1, 1, 1, 0]),
        ("not seed < 50", [0, 1, 1, 0]),
        ("room = left", [1, 0, 0, 1]),
        ('room = "right hand"', [0, 0, 1, 0]),
        ("room != left", [0, 1, 1, 0]),
        ("room contains HAND", [0, 0, 1, 0]),
        ("seed = 3 or room contains right", [1, 0, 1, 0]),
        ("seed > 1 and seed < 10 or seed = 50", [1, 0, 1, 1]),
        ("seed > 1 and (seed < 5 or seed = 50)", [1, 0, 1, 0]),
        ("seed == 3", [1, 0, 0, 0]),
        ("seed >= 1e1", [0, 0, 1, 0]),
        ("room > l", [1, 0, 1, 1]),
        ("seed in (3, 7)", [1, 0, 0, 1]),
        ("room in (left, 'right hand')", [1, 0, 1, 1]),
        ("not seed in (3, 7)", [0, 1, 1, 0]),
        ("seed is null", [0, 1, 0, 0]),
        ("room is not null and seed is not null", [1, 0, 1, 1]),
        ("big = 9007199254740993", [0, 1, 0, 0]),
        ("big = 9007199254740992", [1, 0, 0, 1]),
        ("big in (9007199254740993, 5)", [0, 1, 0, 0]),
        ("big > 9007199254740992", [0, 1, 0, 0]),
        ("big < -1180591620717411303423", [0, 0, 1, 0]),
        ("seed < 1180591620717411303424", [1, 0, 1, 1]),
        ("flags contains bad", [1, 0, 0, 1]),
        ("flags = ''", [0, 1, 0, 0]),
        ("mixed = 1", [1, 0, 0, 0]),
        ("mixed = '1'", [0, 0, 0, 1]),
        ("mixed != left", [1, 0, 1, 1]),
        (" or ".join(["(seed = 3)", "not seed = 3"] * 60), [1, 1, 1, 1]),  # side by side, not in one another
    ],
)
def test_against_what_is_meant(text, expected):
    assert select(text).tolist() == [bool(one) for one in expected]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed", "one of < <= > >= = != contains in is at character 5"),
        ("seed <", "expected a value at character 7"),
        ("(seed < 3", "expected `)` at character 10"),
        ("seed < 3)", "expected `and`, `or` or the end at character 9"),
        ("colour = 3", "no value 'colour'; there are 'seed', 'room', 'big', 'flags', 'mixed'; at character 1"),
        ("and", "expected a name"),
        ("seed < 3 seed", "the end at character 10"),
        ("seed < 'x", "can't read \"'\" at character 8"),
        ("((((" * 30, "50 levels"),
        ("seed = 3 or " * 200, "a condition of 2,400 characters; at most 2,000"),
        ("seed = nan", "it is compared with 'nan'"),
        ("seed < )", "expected a value at character 8"),
        ("__import__('os')", "one of < <= > >= = != contains in is at character 11"),
        ("seed = left", "'seed' is a number, and not text; it is compared with 'left' at character 1"),
        (
            "seed > 1 and room < 5",
            "'room' is text, and not a number: put it in quotes; it is compared with 5 at character 14",
        ),
        ("seed contains 5", "'seed' is a number"),
        ("seed in (5, left)", "it is compared with 'left'"),
        ("seed in ()", "expected a value at character 10"),
        ("seed in (5", "expected `)` at character 11"),
        ("seed is 5", "expected `null` at character 9"),
        ("= 3", "expected a name"),
    ],
)
def test_it_says_where(text, said):
    with pytest.raises(InputError) as caught:
        select(text)
    assert said in str(caught.value)


def test_several_conditions_are_joined_and_travel():
    made = pickle.loads(pickle.dumps(Condition.all_of(["seed = 3 or seed = 50", "room = left"], "test")))
    assert made.names == ["seed", "room"]
    assert made.select(list(COLUMNS), COLUMNS.get, 4).tolist() == [True, False, False, False]
    assert Condition.all_of([], "test").select([], COLUMNS.get, 2).all()
    assert Condition.all_of(["", " ", "seed = 3"], "test").text == "seed = 3"
    with pytest.raises(InputError, match="at character 9 of 'seed = 3[)] or [(]seed = 50'"):
        Condition.all_of(["seed = 3) or (seed = 50", "room = left"], "test")
    with pytest.raises(InputError, match="at character 6 of 'room @ left'"):
        Condition.all_of(["seed = 3", "room @ left"], "test")


def test_tables_are_joined_in_an_order():
    parts = [Values.of([1, 2**60 + 1]), None, Values.of(["a", -(10**400)])]
    made = Values.joined(parts, [2, 1, 2], np.array([3, 0, 4, 1, 2]))
    assert [made.get(row) for row in range(5)] == ["a", 1, -(10**400), 2**60 + 1, None]
    assert made.numbers[2] == -np.inf  # by which tables are sorted
    made.keep(1, 1)
    assert [made.get(row) for row in range(5)] == [1, -(10**400), 2**60 + 1, None, None]
