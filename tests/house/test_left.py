"""A test that leaves a process alive fails, by name: as conftest.py at the root has it."""

import pytest

from tests import ROOT
from tests.house import PYTHON, run

PLANTED = """
import multiprocessing, os, time

def test_of_a_fork():
    if not os.fork():
        time.sleep(60)
        os._exit(0)

def test_of_a_fork_server():
    multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,)).start()

def test_of_nothing():
    assert not os.system("true")
"""


@pytest.mark.slow
def test_control(tmp_path):
    shared = (ROOT / "conftest.py").read_text()
    assert "PATIENCE_S = 30" in shared
    (tmp_path / "conftest.py").write_text(shared.replace("PATIENCE_S = 30", "PATIENCE_S = 1"))
    (tmp_path / "test_planted.py").write_text(PLANTED)
    with pytest.raises(AssertionError) as told:
        run(
            PYTHON,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            "/dev/null",
            f"--rootdir={tmp_path}",
            tmp_path,
            cwd=tmp_path,
        )
    assert "3 passed, 2 errors" in str(told.value)
    for name in ("fork", "fork_server"):
        assert f"ERROR test_planted.py::test_of_a_{name} - " in str(told.value)
