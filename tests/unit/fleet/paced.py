"""Collectors and learners as processes, which say what they did through a pipe."""

import itertools
import os
import signal
from pathlib import Path

import numpy as np

from ringmap import Pace, ReplayBuffer
from ringmap.storage.disk.checksums import decode_signed

NUMBERS = {"samples_per_insert": 4, "min_steps": 400, "slack": 0.5}
COMMIT, BATCH = 20, 64


def collect(path, name, commits, pipe=None, is_killed=False, **options):
    """Write so many commits, or until killed; say what is inserted and drawn after each; be killed in the middle of
    the last one, if asked for."""
    pace = Pace(path, **{**NUMBERS, **options})
    buf = ReplayBuffer(1000, path=f"{path}/{name}")
    for _ in itertools.count() if commits is None else range(commits):
        with pace.insert(COMMIT, buf.flush):
            buf.write_episode({"obs": np.zeros((COMMIT, 2), np.float32)})
            if pipe is not None:  # nobody else commits or draws now
                pipe.send((pace.inserted, pace.drawn))
            if is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
    buf.close()


def learn(path, batches, pipe=None, **options):
    """Draw so many batches, or until killed; say what it saw of the rings at each, and what is drawn."""
    pace = Pace(path, **{**NUMBERS, **options})
    for _ in itertools.count() if batches is None else range(batches):
        pace.draw(BATCH)
        pipe.send(seen_by_learner(path))
    pace.close()


def seen_by_learner(path):
    """Return what a learner saw inserted when it drew last, and what it has drawn."""
    found, _ = decode_signed(Path(path, "pace", "pace.json").read_bytes())
    return sum(found["marks"].values()), sum(found["drawn"].values())


def learn_and_hold(path, pipe, **options):
    """Draw whenever told to; be alive until the pipe is closed."""
    pace = Pace(path, **{**NUMBERS, **options})
    try:
        while count := pipe.recv():
            pace.draw(count)
            pipe.send(seen_by_learner(path))
    except EOFError:
        pass
