"""Which cases run by default: the first few of each test, and none of a campaign."""

import pytest

from tests.tiers import few


def test_all_but_the_first_are_slow():
    cases = few(["a", pytest.param("b", marks=pytest.mark.campaign, id="B"), ("c", 1), "d"], 2)
    assert [case.values for case in cases] == [("a",), ("b",), ("c", 1), ("d",)]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["campaign"], [], ["slow"]]
    assert [case.id for case in cases] == [None, "B", None, None]


@pytest.mark.parametrize("number", few([0, pytest.param(1, marks=pytest.mark.campaign)], 0))
@pytest.mark.slow
def test_a_case_of_a_campaign_is_not_slow(request, number):
    """Run by `-m slow`: with the first case alone."""
    assert number == 0 or request.node.get_closest_marker("slow") is None
