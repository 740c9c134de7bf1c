"""Reverb, in a Python of its own: its TensorFlow does not install beside our NumPy.

    python -m venv .venv-reverb && .venv-reverb/bin/pip install dm-reverb[tensorflow]==0.14.0
    RINGMAP_BENCH_REVERB=.venv-reverb/bin/python python -m benchmarks sampling

A server in RAM in the process that samples, so without gRPC; items are the clips that start at each step of an
episode, read by a TrajectoryDataset of 4 workers. As a script it imports nothing of ours, and answers as the objects
of `harness.processes` do.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from time import perf_counter
from typing import Any

import numpy as np

__all__ = ["serving"]

BATCH, HISTORY = 256, 4
NAME = "Reverb 0.14.0, server in this process, RAM"


@contextlib.contextmanager
def serving(python: str, num_episodes: int, length: int) -> Iterator[Any]:
    """Start it full of the frames of `noise`; what is given is a pipe that answers seconds with seconds per batch."""
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/pipe") as listener:
        command = [python, __file__, listener.address, str(num_episodes), str(length)]
        with subprocess.Popen(list(map(str, command))) as child, listener.accept() as pipe:
            pipe.recv()
            yield pipe
            pipe.send(0)
            child.wait(20)


def _filled(num_episodes: int, length: int) -> Callable[[], dict[str, Any]]:
    """Return what samples from a full server; a batch is proved."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf

    frames = np.random.default_rng(0).integers(0, 256, (32, length, 64, 64, 3), np.uint8)
    kinds = {"pixels": ((64, 64, 3), tf.uint8), "action": ((2,), tf.float32), "reward": ((), tf.float32)}
    kinds["terminated"] = (), tf.bool
    table = reverb.Table(
        "clips",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        num_episodes * length,
        reverb.rate_limiters.MinSize(1),
        signature={name: tf.TensorSpec((HISTORY, *shape), kind) for name, (shape, kind) in kinds.items()},
    )
    server = reverb.Server([table])
    with server.localhost_client().trajectory_writer(HISTORY) as writer:
        for number in range(num_episodes):
            row = {"action": np.full(2, number, np.float32), "terminated": np.False_}
            for step in range(length):
                row |= {"pixels": frames[number % 32, step], "reward": np.float32(step)}
                writer.append(row)
                if step >= HISTORY - 1:
                    writer.create_item("clips", 1.0, {name: writer.history[name][-HISTORY:] for name in row})
                    if step % 32 == 0:
                        writer.flush()
            writer.end_episode()
    clips = reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{server.port}", "clips", max_in_flight_samples_per_worker=2 * BATCH, num_workers_per_iterator=4
    )
    batches = iter(clips.batch(BATCH, drop_remainder=True).prefetch(2))

    def sample() -> dict[str, Any]:
        assert server is not None  # it lives as long as this
        return {name: values.numpy() for name, values in next(batches).data.items()}

    batch = sample()
    numbers, steps = batch["action"][..., 0].astype(int), batch["reward"].astype(int)
    assert (numbers == numbers[:, :1]).all()
    assert (steps == steps[:, :1] + np.arange(HISTORY)).all()
    assert np.array_equal(batch["pixels"], frames[numbers % 32, steps])
    return sample


def main(address: str, num_episodes: str, length: str) -> None:
    """Fill it, and answer the turns that come in."""
    with Client(address) as pipe:
        sample = _filled(int(num_episodes), int(length))
        pipe.send("full")
        while seconds := pipe.recv():
            times, began = list[float](), perf_counter()
            while not times or perf_counter() - began < seconds:
                start = perf_counter()
                for _ in range(4):  # they arrive in bunches
                    sample()
                times.append((perf_counter() - start) / 4)
            pipe.send(times)


if __name__ == "__main__":
    main(*sys.argv[1:])
