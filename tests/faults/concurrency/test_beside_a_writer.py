"""Every reading call beside a thread that writes or clears the same handle: right, or an error of ours.

What the other thread does comes whenever the call lets go of the lock on memory, so at each moment at which it can.
"""

import threading

import numpy as np
import pytest

from ringmap import ReplayBuffer
from ringmap.errors import RingmapError


class Beside:
    """The lock on memory; each time that it is let go of, somebody else writes."""

    def __init__(self, write):
        self._lock, self._write = threading.Lock(), write

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        if self._write is not None:
            write, self._write = self._write, None
            other = threading.Thread(target=write)
            other.start()
            other.join()
            self._write = write


CALLS = {
    "sample": lambda buf: buf.sample(4)["step"],
    "own sampler": lambda buf: _with_sampler(buf).sample(4)["step"],
    "clip": lambda buf: buf[-1]["step"],
    "clips": lambda buf: [clip["step"] for clip in buf.__getitems__([0, 20])],
    "row": lambda buf: buf.get_row_data(30)["step"],
    "last row": lambda buf: buf.get_row_data(-1)["step"],
    "rows": lambda buf: buf.get_row_data([0, 30, -1])["step"],
    "column": lambda buf: buf.get_col_data("step"),
    "chunk": lambda buf: [chunk["step"] for chunk in buf.load_chunk([0, -1], [0, 0], [2, 2])],
    "episode": lambda buf: buf.load_episode(-1)["step"],
    "episodes": lambda buf: [step for episode in buf.episodes() for step in episode["step"]],
    "data": lambda buf: [n for n in buf.get_episode_data([0, -1]).get("n", []) if n is not None],
    "pairs": lambda buf: len(list(buf.clip_indices)) + 1,
    "view": lambda buf: buf.view()[3]["step"],
    "split": lambda buf: len(buf.split()[0]) + 1,
    "pass": lambda buf: len(list(buf.pass_sampler())) + 1,
    "batches": lambda buf: [batch["step"] for batch in buf.batches(4, steps=2, prefetch=0)],
}

WRITES = {
    "clears": lambda buf, n: buf.clear(),
    "writes": lambda buf, n: _write(buf, n, 4),
    "writes long": lambda buf, n: _write(buf, n, 60),
    "clears and writes": lambda buf, n: (buf.clear(), _write(buf, n, 3)),
}


def _with_sampler(buf):
    """Return the buffer with a sampler as in the guide."""
    rng = np.random.default_rng(0)
    buf.sampler = lambda step, buffer, size, history: rng.integers(0, buffer.num_valid_ends(history), size)
    return buf


def _write(buf, number, steps):
    buf.write_episode({"step": np.full(steps, number), "_episode_data": {"n": number}})


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_beside_a_writing_thread_works_or_raises_our_error(call, write):
    # Given a full buffer, and somebody who writes to it whenever that is possible
    buf = ReplayBuffer(max_steps=60, history_len=2, spare_rows=60, seed=0)
    numbers = iter(range(1, 10_000))
    for _ in range(9):
        _write(buf, next(numbers), 7)
    buf.engine.owned.retry_s = 0.02  # it gives up in time: the writer is never slower
    buf.engine.owned.lock = Beside(lambda: WRITES[write](buf, next(numbers)))
    # When a call reads, then what comes was written, or the error is ours
    for _ in range(5):
        try:
            found = CALLS[call](buf)
        except RingmapError:
            continue
        assert np.all(np.concatenate([np.ravel(part) for part in np.atleast_1d(found)] or [[1]]) > 0)
