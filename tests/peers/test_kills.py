"""Writers of other libraries' layouts that are killed before each system call that changes a file.

`python -m pytest -m campaign tests/peers/test_kills.py` kills before every one, else before six of each.
"""

import numpy as np
import pytest

from ringmap.data import get_format, load_dataset
from ringmap.formats.base import EPISODE_DATA_KEY
from ringmap.testing.formats import FormatTests
from tests.peers import test_lerobot, test_robomimic

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class LeRobot(FormatTests):
    name, suffix, writer_options = "lerobot", "", {"fps": 10}

    def episodes_to_kill(self):
        return [
            {**test_lerobot.episode(n, 5 + n), EPISODE_DATA_KEY: {"task": test_lerobot.WORDS[n % 3]}} for n in range(3)
        ]

    def check(self, path, episodes):
        test_lerobot.check_ours(path, range(len(episodes)))


class Robomimic(FormatTests):
    name, suffix = "robomimic", ".hdf5"

    def episodes_to_kill(self):
        return [
            {
                **test_robomimic.episode(n, 4 + n),
                EPISODE_DATA_KEY: {"mask": ["train", "small"] if n == 0 else "valid", "seed": n},
            }
            for n in range(3)
        ]

    def check(self, path, episodes):
        if episodes:  # a file without demos has no masks
            test_robomimic.check(path, range(len(episodes)))


class Minari(FormatTests):
    name, suffix = "minari", "-v0"

    def episodes_to_kill(self):
        test_minari = pytest.importorskip("tests.peers.test_minari")
        return [test_minari.episode(n, 3 + n) for n in range(3)]

    def check(self, path, episodes):
        found = load_dataset(path, format="minari", output="numpy", layout="HWC")
        assert found.lengths.tolist() == [len(e["action"]) - 1 for e in episodes]
        for number, given in enumerate(episodes):
            got = found.load_episode(number)
            assert np.array_equal(got["action"], given["action"][:-1])
            assert np.array_equal(got["observation/camera"], given["obs/camera"][:-1])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("suite", [LeRobot, Robomimic, Minari])
def test_killed_at_system_calls(tmp_path, suite, every):
    """What a killed writer left is read, and can be converted."""
    calls, lost = suite().losses(tmp_path, 0, None if every else 6)
    print(f"{suite.__name__}: {calls} places, {len(lost)} losses")
    assert lost == []
    assert calls > 6


@pytest.mark.parametrize("suite", [LeRobot, Robomimic, Minari])
def test_control_a_reader_that_knows_no_log(tmp_path, monkeypatch, suite):
    known = get_format(suite.name)
    monkeypatch.setattr(known, "open_dataset", known.open_reader)
    assert suite().losses(tmp_path, 0, 4, stop=True)[1]
