"""A driver as a process, for tests that kill it; and what its collectors leave."""

import os
import sys
import threading
from functools import partial
from pathlib import Path

import ringmap.ray as rr
from ringmap.storage.disk.lock import holder_of
from ringmap.storage.disk.system import System
from tests.unit.fleet import worlds
from tests.unit.fleet.supervised import SEED, committed, is_alive, stored, uninterrupted

SLOW = partial(worlds.make_world, pause_s=0.01)


def call(path, episodes, collectors, make_world=worlds.make_world, **options):
    """Collect over the cluster that this process is in."""
    given = {"max_steps": 5000, "seed": SEED, "progress": False, **options}
    rr.collect(make_world, path, episodes, collectors, **given)


def found(path):
    """Return what the rings of all nodes hold, by seed; no seed may be there twice."""
    return stored(str(Path(path, "*", "*")))


def rings(path):
    return sorted(made.parent for made in Path(path).glob("*/collector-*/manifest.json"))


def writers(path):
    """Return ring -> process, of the rings that are being written."""
    locks = {ring: str(ring / "lock") for ring in rings(path)}
    held = {ring: holder_of(lock).get("pid") for ring, lock in locks.items() if System().is_locked(lock)}
    return {ring: pid for ring, pid in held.items() if pid and is_alive(pid)}


def all_committed(path):
    return sum(committed(node) for node in path.glob("*") if node.is_dir())


def assert_exact(path, episodes):
    assert found(path) == uninterrupted(episodes)
    assert all_committed(path) == episodes, "a seed was played twice"


class Beside:
    """Runs a function in a thread beside the test, and raises what it raised."""

    def __init__(self, work, *args, **options):
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(work, *args), kwargs=options, daemon=True)

    def _run(self, work, *args, **options):
        try:
            work(*args, **options)
        except BaseException as error:
            self._error = error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, error, at):
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error


if __name__ == "__main__":
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False)
    print("driver", os.getpid(), flush=True)
    call(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), SLOW)
