"""What tests and doctests share: fixed seeds, a folder of their own for doctests, no process left, and no hang."""

import compileall
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

# A thousand processes of the tests would each compile the package.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# Modules that are classes of a library: where it is not installed there is nothing to collect.
collect_ignore = [
    f"src/ringmap/exits/{module}.py"
    for module, library in {"stable_baselines3": "stable_baselines3"}.items()
    if find_spec(library) is None
]

RAM, NEEDED_NBYTES = "/dev/shm", 4 << 30
if os.access(RAM, os.W_OK) and shutil.disk_usage(RAM).free >= NEEDED_NBYTES:
    # Where `tmp_path` lies: a sync costs nothing there. `--basetemp` asks for another place.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", RAM)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package before the first process imports it, so that none writes while it is looked at.

    Let Ctrl-C interrupt, also where the tests are a job in the background of a script: its processes ignore it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Spare the garbage collector what is imported by now: it took half a second each time, in hundreds of tests.

    Let the loggers of PyTorch hand on what they log: pytest gives its handlers to each of 41 that do not, six times a
    test.
    """
    gc.collect()
    gc.freeze()
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def pytest_sessionfinish() -> None:
    """End this process, with its stacks on stderr, if it does not end by itself: a thread or a pipe may hold it."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


@pytest.fixture(autouse=True)
def _no_limit_for_a_campaign(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("campaign"):
        faulthandler.cancel_dump_traceback_later()


SERVERS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "ringmap.testing.kills",
    "ray/gcs/gcs_server",
)
"""What a process starts once, and ends with it."""


TASKS = "/proc/self/task"
PATIENCE_S = 30  # a busy machine ends processes late


def children() -> set[int]:
    """Return the children of this process, and those that its fork server made."""
    found = {child.pid for child in multiprocessing.active_children() if child.pid}
    with contextlib.suppress(OSError):  # not Linux
        for thread in os.listdir(TASKS):  # not pathlib: this runs twice a test
            with contextlib.suppress(OSError), open(f"{TASKS}/{thread}/children") as listed:
                found.update(map(int, listed.read().split()))
    return found


def living(pids: set[int]) -> dict[int, str]:
    """Return those of these processes that live and are no servers, with their command lines."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            # Empty where it is dead and only its status is waited for, and for a moment where it begins.
            if command := Path(f"/proc/{pid}/cmdline").read_bytes():
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    made = {child.pid for child in multiprocessing.active_children()}  # some by a server, with its command line
    servers = {pid for pid, words in found.items() if any(name in words for name in SERVERS)}
    return {pid: words for pid, words in found.items() if pid in made or pid not in servers}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Fail the test that leaves a child alive: it holds the pipes of others, and the end of the session waits."""
    before = children()
    yield
    if not living(children() - before):
        return
    with pytest.MonkeyPatch.context() as patch:
        if utils := sys.modules.get("torch.utils.data._utils"):
            patch.setattr(utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # or it waits 5 s for each
        gc.collect()  # an iterator of a DataLoader ends its workers
    until = time.monotonic() + PATIENCE_S
    while left := living(children() - before):
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"the test left processes alive: {left}")
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _same_every_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - for third parties; our own code takes a Generator
    if torch := sys.modules.get("torch"):
        # Not `torch.manual_seed`: without a GPU it keeps the stack of each call, for a GPU that may come.
        torch.default_generator.manual_seed(0)
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(request.getfixturevalue("tmp_path"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave a case of a campaign to the campaign where it is slow, too: `-m slow` does not run it."""
    if item.get_closest_marker("campaign"):
        item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
