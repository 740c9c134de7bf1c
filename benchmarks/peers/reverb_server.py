"""Reverb, in a Python of its own: its TensorFlow does not install beside our NumPy.

    python -m venv .venv-reverb && .venv-reverb/bin/pip install dm-reverb[tensorflow]==0.14.0
    RINGMAP_BENCH_REVERB=.venv-reverb/bin/python python -m benchmarks sampling

A server in RAM in the process that samples, so without gRPC; items are the clips that start at each step of an
episode, read by a TrajectoryDataset of 4 workers. It imports nothing of ours, and speaks as `turns.serve` does.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter

import numpy as np

BATCH, HISTORY = 256, 4


def main(num_episodes: int, length: int) -> None:
    """Fill it with the frames of `data.noise`, prove a batch, and answer the turns that come in."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import reverb
    import tensorflow as tf

    shape = 32, length, 64, 64, 3
    frames = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    signature = {
        "pixels": tf.TensorSpec((HISTORY, 64, 64, 3), tf.uint8),
        "action": tf.TensorSpec((HISTORY, 2), tf.float32),
        "reward": tf.TensorSpec((HISTORY,), tf.float32),
        "terminated": tf.TensorSpec((HISTORY,), tf.bool),
    }
    table = reverb.Table(
        "clips",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        num_episodes * length,
        reverb.rate_limiters.MinSize(1),
        signature=signature,
    )
    server = reverb.Server([table])
    with server.localhost_client().trajectory_writer(HISTORY) as writer:
        for number in range(num_episodes):
            action = np.full(2, number, np.float32)
            for step in range(length):
                row = {
                    "pixels": frames[number % 32, step],
                    "action": action,
                    "reward": np.float32(step),
                    "terminated": np.False_,
                }
                writer.append(row)
                if step >= HISTORY - 1:
                    clip = {name: writer.history[name][-HISTORY:] for name in row}
                    writer.create_item("clips", 1.0, clip)
                    if step % 32 == 0:
                        writer.flush()
            writer.end_episode()
    clips = reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{server.port}",
        "clips",
        max_in_flight_samples_per_worker=2 * BATCH,
        num_workers_per_iterator=4,
    )
    batches = iter(clips.batch(BATCH, drop_remainder=True).prefetch(2))

    def sample() -> dict[str, np.ndarray]:
        return {name: values.numpy() for name, values in next(batches).data.items()}

    batch = sample()
    numbers, steps = batch["action"][..., 0].astype(int), batch["reward"].astype(int)
    assert (numbers == numbers[:, :1]).all()
    assert (steps == steps[:, :1] + np.arange(HISTORY)).all()
    assert np.array_equal(batch["pixels"], frames[numbers % 32, steps])
    name = "Reverb 0.14.0, server in this process, RAM"
    print("turn: " + json.dumps({"settings": {name: ""}, "notes": {}}), flush=True)
    for line in sys.stdin:
        seconds, times, began = json.loads(line)["seconds"], [], perf_counter()
        while not times or perf_counter() - began < seconds:
            start = perf_counter()
            for _ in range(4):  # they arrive in bunches
                sample()
            times.append((perf_counter() - start) / 4)
        print("turn: " + json.dumps({"seconds": times}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
