"""Where slots are: the machine alone, row by row."""

import pytest

from ringmap.errors import RoleError
from ringmap.recording.slots import DISABLED, ENDED, NEW, NEXT_STEP, PLAYING, SAME_STEP, WAITING, Slots


def begun(num, mode):
    slots = Slots(num, mode)
    slots.reset(range(num))
    return slots


@pytest.mark.parametrize(
    ("mode", "after", "begins"), [(NEXT_STEP, WAITING, []), (SAME_STEP, PLAYING, [1]), (DISABLED, ENDED, [])]
)
def test_what_the_end_of_an_episode_leads_to(mode, after, begins):
    slots = begun(3, mode)
    assert slots.advance([]) == []
    assert slots.advance([1]) == begins
    assert slots.state == [PLAYING, after, PLAYING]
    assert slots.steps.tolist() == [2, 0, 2]
    assert slots.episode.tolist() == [0, 3 if begins else 1, 2]


def test_the_reset_row_begins_and_is_no_step():
    slots = begun(2, NEXT_STEP)
    slots.advance([0, 1])
    assert slots.advance([]) == [0, 1]
    assert slots.steps.tolist() == [0, 0]
    assert slots.playing == [0, 1]
    assert slots.episode.tolist() == [2, 3]


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_a_cut_one_goes_on_as_another_episode(mode):
    slots = begun(3, mode)
    slots.advance([])
    assert slots.advance([], cut=[2]) == [2]
    assert slots.episode.tolist() == [0, 1, 3]
    assert slots.steps.tolist() == [2, 2, 0]
    assert slots.advance([1], cut=[1]) == ([1] if mode == SAME_STEP else [])


def test_a_lost_one_begins_with_its_next_row_whatever_that_is():
    for mode, after in ((NEXT_STEP, WAITING), (SAME_STEP, PLAYING), (DISABLED, ENDED)):
        slots = begun(2, mode)
        slots.lose([0, 1])
        assert slots.advance([1]) == ([0, 1] if mode == SAME_STEP else [0])
        assert slots.state == [PLAYING, after]


def test_step_before_reset():
    slots = Slots(3, DISABLED)
    with pytest.raises(RoleError, match=r"env \[0, 1, 2\] has not been reset yet"):
        slots.check_step("doc")
    slots.reset([0, 2])
    with pytest.raises(RuntimeError, match=r"env \[1\] has not been reset yet"):
        slots.check_step("doc")
    slots.lose([1])
    assert slots.state[1] == NEW, "what never began can't be lost"
    slots.reset([1])
    slots.check_step("doc")
    slots.advance([2])
    with pytest.raises(RuntimeError, match=r"env \[2\] has ended its episode"):
        slots.check_step("doc")


def test_split_gives_new_numbers_to_what_is_open():
    slots = begun(2, NEXT_STEP)
    slots.advance([0])
    slots.split()
    assert slots.episode.tolist() == [0, 2]
    assert slots.steps.tolist() == [0, 0]
    assert slots.state == [WAITING, PLAYING]
