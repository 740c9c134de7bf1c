"""Which cases of a test run by default, and which are marked `slow`: `python -m pytest -m slow` runs those."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Return these cases for `parametrize`: the first `count` run by default, the others are slow.

    Cases of a campaign stay as they are, and do not count.
    """
    made = []
    for case in cases:
        values, marks, name = (case if isinstance(case, tuple) else (case,)), (), None
        if isinstance(case, type(pytest.param())):
            values, marks, name = case.values, tuple(case.marks), case.id
        if any(mark.name == "campaign" for mark in marks):
            made.append(case)
            continue
        if count <= 0:
            marks += (pytest.mark.slow,)
        count -= 1
        made.append(pytest.param(*values, marks=marks, id=name))
    return made
