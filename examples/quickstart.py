"""The first ten minutes in one file: record, sample, reopen, dump, load. NumPy and Gymnasium alone.

World ── collect ──► ReplayBuffer in a directory ── sample, batches ──► arrays
                                 └── dump ──► HDF5 ── load_dataset(output="numpy") ──► arrays
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import ringmap
from ringmap.data import ReplayBuffer, load_dataset


def main() -> None:
    """Run all of it in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few episodes, for tests")
    episodes = 4 if parser.parse_args().tiny else 40

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay"
        buffer = ReplayBuffer(max_steps=10_000, history_len=4, path=path, seed=0)
        world = ringmap.World("ringmap/TwoRoom-v1", num_envs=2, image_shape=(32, 32))
        world.set_policy(ringmap.policy.RandomPolicy(seed=0))
        world.collect(writer=buffer, episodes=episodes, seed=0)
        world.close()
        batch = buffer.sample(batch_size=16)
        print({name: (values.shape, str(values.dtype)) for name, values in batch.items()})
        buffer.close()

        reader = ReplayBuffer.open(path)  # or in another process, while the writer goes on
        for number, batch in enumerate(reader.batches(64, steps=10)):
            assert np.isfinite(batch["pixels"]).all(), number
        print(f"{reader.num_episodes} episodes, {reader.num_steps_stored} steps, {len(reader)} clips")

        reader.dump(Path(folder) / "replay.h5", format="hdf5", progress=False)
        dataset = load_dataset(Path(folder) / "replay.h5", layout="HWC", output="numpy")
        for number in range(reader.num_episodes):
            stored, loaded = reader.load_episode(number), dataset.load_episode(number)
            for name, values in stored.items():
                assert np.array_equal(values, loaded[name], equal_nan=values.dtype.kind == "f")
        print(f"{len(dataset.lengths)} episodes dumped, loaded and compared")
        assert not ringmap.check(path)
        reader.close()


if __name__ == "__main__":
    main()
