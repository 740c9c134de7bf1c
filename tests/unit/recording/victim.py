"""A process that records until it is killed: `python -m tests.unit.recording.victim DIR [stream]`.

It says after each step how many episodes are stored, so that whoever kills it knows what must be there.
"""

import sys

import numpy as np
from gymnasium.vector import SyncVectorEnv

from ringmap.recording import ReplayBufferCollectionWrapper
from tests.unit.recording.reading import full_buffer
from tests.unit.recording.scripted import Scripted

NUM, STEPS = 8, 400


def actions_of(step):
    return np.full(NUM, step % 1000)


def record(path, stream):
    buf = full_buffer("box", path=path, max_steps=100_000)
    env = ReplayBufferCollectionWrapper(
        SyncVectorEnv([lambda i=i: Scripted(i, "box", script=3) for i in range(NUM)]), buf, stream=stream
    )
    env.reset(seed=0)
    for step in range(STEPS):
        env.step(actions_of(step))
        print(step + 1, buf.num_episodes, flush=True)


if __name__ == "__main__":
    record(sys.argv[1], "stream" in sys.argv[2:])
