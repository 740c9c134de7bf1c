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

with contextlib.suppress(ImportError):  # Windows
    import fcntl

# A thousand processes of the tests would each compile the package.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

TURNS = pytest.StashKey["Turns"]()
RAM, NEEDED_NBYTES = "/dev/shm", 4 << 30
if os.access(RAM, os.W_OK) and shutil.disk_usage(RAM).free >= NEEDED_NBYTES:
    # Where `tmp_path` lies: a sync costs nothing there. `--basetemp` asks for another place.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", RAM)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package before the first process imports it, so that none writes while it is looked at."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parent / "src", quiet=2)


# A thread of OpenMP that waits would turn in a loop, and hold a core that another process of the tests could have.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one process more than there are cores, as tests wait for children and disks for a tenth of the time."""
    with contextlib.suppress(AttributeError):  # not Linux
        return len(os.sched_getaffinity(0)) + 1
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that run alone first, while the other processes have nothing long under way."""
    items.sort(key=lambda item: not is_alone(item))


def is_alone(item: pytest.Item) -> bool:
    """Tell whether a test is marked `alone`."""
    return item.get_closest_marker("alone") is not None


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported by now: it took half a second each time, in hundreds of tests."""
    gc.collect()
    gc.freeze()


class Turns:
    """Two file locks that let a test run alone: `door` is held while one waits for that, and meanwhile."""

    def __init__(self, folder: Path) -> None:
        how = os.O_CREAT | os.O_RDWR
        self.door, self.inside = (os.open(folder / name, how) for name in ("door", "inside"))

    def begin(self, alone: bool) -> None:
        """Wait until a test may run."""
        how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(self.door, how)
        fcntl.flock(self.inside, how)
        if not alone:
            fcntl.flock(self.door, fcntl.LOCK_UN)

    def end(self) -> None:
        """Let others run what they like."""
        for lock in (self.inside, self.door):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked has the file, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Let tests marked `alone`, as they measure the machine, run while no other process of pytest-xdist has one."""
    if not hasattr(item.config, "workerinput") or "fcntl" not in globals():
        return (yield)
    if TURNS not in item.config.stash:
        item.config.stash[TURNS] = Turns(Path(item.config.option.basetemp).parent)
    turns = item.config.stash[TURNS]
    turns.begin(is_alone(item))
    try:
        return (yield)
    finally:
        turns.end()


@pytest.fixture(autouse=True)
def _same_every_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for third parties; our own code takes a Generator
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))
