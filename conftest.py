"""What tests and doctests share: fixed seeds, and a folder of their own for doctests."""

import compileall
import contextlib
import gc
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

# A thousand processes of the tests would each compile the package.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

RAM, NEEDED_NBYTES = "/dev/shm", 4 << 30
if os.access(RAM, os.W_OK) and shutil.disk_usage(RAM).free >= NEEDED_NBYTES:
    # Where `tmp_path` lies: a sync costs nothing there. `--basetemp` asks for another place.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", RAM)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package before the first process imports it, so that none writes while it is looked at."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parent / "src", quiet=2)


# The tests run on all cores already: a second thread of OpenMP made small convolutions four times as dear.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than there are cores, as tests wait for children and disks for a tenth of the time."""
    with contextlib.suppress(AttributeError):  # not Linux
        return len(os.sched_getaffinity(0)) + 1
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported by now: it took half a second each time, in hundreds of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_every_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for third parties; our own code takes a Generator
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
