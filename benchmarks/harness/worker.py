"""What a spawned process does in pickling.py: apart, so that one without a buffer imports NumPy alone."""

from __future__ import annotations

import contextlib
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

__all__ = ["SHAPE", "work"]

SHAPE = (64, 4, 64, 64, 3)
"""Of the batch of pixels."""


def work(pipe: Connection, payload: bytes | None) -> None:
    """Open the buffer, tell when the first batch is there, then how much memory that took."""
    if payload is None:
        batch = {"pixels": np.ones(SHAPE, np.uint8)}
    else:
        buffer = pickle.loads(payload)
        batch = buffer.sample(SHAPE[0])
    pipe.send(len(next(iter(batch.values()))))
    pipe.recv()
    pipe.send(_memory())


def _memory() -> dict[str, int]:
    """Return the kinds of memory of this process, in bytes; empty where the system does not tell."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            name, kib, *_ = line.replace(":", " ").split()
            found[name] = int(kib) * 1024
    return found
