"""What readers make of a state.bin that is damaged under their hands: an error, never less than there is."""

import pytest

import ringmap
from ringmap import ReplayBuffer
from ringmap.errors import CorruptError
from tests.faults.damage.buffers import served
from tests.faults.damage.vandals import Vandal, an_old_state

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.mark.parametrize("slot", [0, 1])
def test_a_torn_state_is_an_error_and_no_empty_buffer(place, slot):
    v = Vandal(place / "a")
    v.flip("state.bin", 4096 * slot + 20)
    reader = ReplayBuffer.open(v.folder)
    for read in (
        lambda: list(reader.episodes()),
        lambda: reader.load_episode(0),
        lambda: reader.sample(2),
    ):
        with pytest.raises(CorruptError, match=r"state\.bin: stays torn"):
            read()
    reader.close()
    with ReplayBuffer.open(v.folder, "r+") as buf:  # which mends it
        assert len(list(served(buf))) == len(v.truth.episodes)
    buf.close()
    assert ringmap.check(v.folder) == []


def test_an_old_copy_of_the_state_is_refused(place):
    v = Vandal(place / "a")
    an_old_state(v)
    with pytest.raises(CorruptError, match=r"state\.bin: shows record 10, but record 12 is stored: an old copy"):
        ReplayBuffer.open(v.folder)
    with ReplayBuffer.open(v.folder, "r+") as buf:  # which finds what is stored
        assert len(list(served(buf))) == len(v.truth.episodes)
    buf.close()
