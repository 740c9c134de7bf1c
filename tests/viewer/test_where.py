"""Conditions on episodes, against plain Python; where they can't be parsed."""

import numpy as np
import pytest

from ringmap.clips.where import Values, select
from ringmap.errors import InputError

SEEDS = [3.0, np.nan, 50.0, 7.0]
ROOMS = ["left", None, "right hand", "left"]
COLUMNS = {
    "seed": Values(np.array(SEEDS)),
    "room": Values(np.full(4, np.nan), np.array(ROOMS, object)),
}


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
        ("seed = left", [0, 0, 0, 0]),
    ],
)
def test_against_what_is_meant(text, expected):
    assert select(text, COLUMNS, 4, "test").tolist() == [bool(one) for one in expected]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed", "one of < <= > >= = != contains at character 5"),
        ("seed <", "expected a value at character 7"),
        ("(seed < 3", "expected `)` at character 10"),
        ("seed < 3)", "expected `and`, `or` or the end at character 9"),
        ("colour = 3", "no value 'colour'; there are 'seed', 'room'; at character 1"),
        ("and", "expected a name"),
        ("seed < 3 seed", "the end at character 10"),
        ("seed < 'x", "can't read \"'\" at character 8"),
        ("((((" * 30, "50 levels"),
        ("seed < )", "expected a value at character 8"),
        ("__import__('os')", "no value '__import__'"),
        ("= 3", "expected a name"),
    ],
)
def test_it_says_where(text, said):
    with pytest.raises(InputError) as caught:
        select(text, COLUMNS, 4, "test")
    assert said in str(caught.value)
