"""Passes of a plain DataLoader under a writer that never pauses, and every clip proves itself. By hand:

python -m pytest -m campaign tests/faults/concurrency/test_passes.py -s
"""

import contextlib
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.proof import Episodes, num_torn
from benchmarks.harness.race import Ring, a_writer
from ringmap import ReplayBuffer
from ringmap.errors import ClipIndexError

RING = Ring(max_steps=4096, spare=256, longest=64, row_nbytes=4096)
PASSES, BATCH = 25, 64

pytestmark = pytest.mark.campaign


class Counts:
    def __init__(self):
        self.batches = self.clips = self.torn = self.stale = self.redrawn = 0

    def add(self, batch, oldest):
        self.batches += 1
        self.clips += len(batch["row"])
        self.torn += num_torn(batch)
        self.stale += int((batch["episode"] < oldest).sum())
        self.redrawn += int(batch.redrawn.sum())


def passes(buffer, oldest, capsys, what, **options):
    """Run passes; what was evicted before a pass began must not be seen in it."""
    torch.manual_seed(0)
    counts = Counts()
    loader = DataLoader(buffer, BATCH, shuffle=True, num_workers=2, persistent_workers=True, **options)
    for _ in range(PASSES):
        gone = oldest()
        for batch in loader:
            counts.add(batch, gone)
    loader._iterator._shutdown_workers()
    with capsys.disabled():
        print(
            f"\n| {what} | {PASSES} passes | {counts.batches:,} batches | {counts.clips:,} clips | "
            f"{counts.redrawn:,} redrawn | torn {counts.torn} | stale {counts.stale} |"
        )
    assert counts.batches > PASSES * 20
    assert counts.torn == counts.stale == 0
    assert counts.redrawn > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_writer_in_another_process(fast, method, capsys):
    with a_writer(str(fast / "buf"), RING) as written:
        with ReplayBuffer.open(fast / "buf", seed=0) as reader:

            def oldest():
                """Return the number of the oldest episode, however fast it is evicted."""
                while True:
                    with contextlib.suppress(ClipIndexError):
                        reader.refresh()
                        return int(reader.load_episode(0)["episode"][0])

            passes(reader, oldest, capsys, f"another process, {method}", multiprocessing_context=method)
        reader.close()
    assert written[0].episodes > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_thread_of_the_same_process(fast, method, capsys):
    buffer = ReplayBuffer(
        RING.max_steps,
        RING.history,
        path=fast / "buf",
        spare_rows=RING.spare,
        seed=0,
        sync_every_s=0,
    )
    episodes, stop, number = Episodes(RING.row_nbytes // 8, RING.longest), threading.Event(), [0]

    def write():
        buffer.write_episode(episodes(number[0], RING.longest - number[0] % 32))
        number[0] += 1

    while number[0] < 200:
        write()

    def go_on():
        while not stop.is_set():
            write()
            stop.wait(0.0002)  # let the loop have the interpreter lock at times

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        passes(buffer, lambda: 0, capsys, f"a thread, {method}", multiprocessing_context=method)
    finally:
        stop.set()
        thread.join()
        buffer.close()
