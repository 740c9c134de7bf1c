"""Random calls against the model, on disk, while another process reads the same directory.

    python -m tools.campaign.machine --minutes 6 --seed 1

The machine is that of tests/unit/buffers/test_state_machine.py. Every directory gets a companion: a process
that draws clips without a pause and proves each of them, until the machine goes on to the next directory.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time

from hypothesis import HealthCheck, seed, settings

from ringmap import ReplayBuffer
from ringmap.errors import NoClipsError, RingmapError
from tests.unit.buffers import test_state_machine as machine
from tests.unit.buffers.steps import clip, same


def read_on(path, told, stop):
    """Read the buffer at `path` for as long as `stop` is not set; count, and say what is wrong."""
    clips = looks = 0
    wrong = None
    while not stop.is_set() and wrong is None:
        try:
            with ReplayBuffer.open(path, seed=0) as reader:
                while not stop.is_set():
                    reader.refresh()
                    looks += 1
                    with contextlib.suppress(NoClipsError):
                        prove_batch(reader.sample(4), reader.history_len, reader.frameskip)
                        clips += 4
            reader.close()
        except AssertionError as error:
            wrong = f"{path}: {error!r}"
        except (RingmapError, OSError):
            time.sleep(0.001)  # not born yet, or in the middle of a birth, replaced, lapped
    told.put((looks, clips, wrong))


def prove_batch(batch, history, skip):
    """Each clip is what it says of itself, bit for bit."""
    for i in range(len(batch["episode"])):
        one = {name: values[i] for name, values in batch.items()}
        same(one, clip(int(one["episode"][0]), int(one["step"][0]), history, skip))


class Beside(machine.DiskMachine):
    """The machine on disk, with a live reader throughout."""

    looks = clips = 0
    wrong = None

    def __init__(self):
        super().__init__()
        context = multiprocessing.get_context("fork")
        self._told, self._stop = context.SimpleQueue(), context.Event()
        self._reader = context.Process(
            target=read_on,
            args=(os.path.join(self.folder, "buf"), self._told, self._stop),
            daemon=True,
        )
        self._reader.start()

    def teardown(self):
        self._stop.set()
        looks, clips, wrong = self._told.get()
        self._reader.join()
        Beside.looks += looks
        Beside.clips += clips
        super().teardown()
        assert wrong is None, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    profile = settings(
        settings.get_profile("default"),
        derandomize=False,
        database=None,
        stateful_step_count=60,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    began, number, violation = time.monotonic(), options.seed, None
    counts = machine.Counts
    total = dict.fromkeys(("examples", "steps", "faults", "crashes"), 0)
    while time.monotonic() - began < options.minutes * 60 and violation is None:
        try:
            machine.run(seed(number)(Beside), profile, max_examples=20)
        except AssertionError as error:
            violation = f"seed {number}: {error!r}"
        for name in total:
            total[name] += getattr(counts, name)
        number += 1
    seconds = round(time.monotonic() - began)
    found = {**total, "looks": Beside.looks, "clips": Beside.clips, "seconds": seconds}
    print(json.dumps({"seed": options.seed, **found, "violation": violation}))
    return violation is not None


if __name__ == "__main__":
    sys.exit(main())
