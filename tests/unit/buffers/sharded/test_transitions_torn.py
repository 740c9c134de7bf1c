"""No transition of many rings is torn, or comes with another's next observation, however many writers run flat out.

The default suite reads a sample; the campaign 200,000 of 8 writers. The control, without the look after the copy, must
tear.
"""

import contextlib
import os

import numpy as np
import pytest

from benchmarks.harness.race import one_look
from ringmap import TransitionReplayBuffer
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import LappedError
from tests.unit.buffers.processes import Child

LANES, LENGTH, GAMMA = 4, 9, 0.5
SAMPLE, WRITERS = 2_000, 2
KINDS = {
    "large rows, 1 step": (1024, 1),
    "large rows, 3 steps": (1024, 3),
    "small rows, 3 steps": (8, 3),
}


def call(ring, step, width):
    """Return a call of every lane: its number fills each observation; the last one of an episode is negative."""
    lanes = np.arange(LANES)
    number = step * LANES + lanes
    done = (step + lanes) % LENGTH == LENGTH - 1
    after = np.where(done, -(number + LANES), number + LANES)
    obs, then = (np.repeat(n[:, None], width, 1) for n in (number, after))
    obs[:, 0] = then[:, 0] = ring
    return obs, number, (number % 1024).astype(np.float32), then, done


def num_wrong(batch, n_step):
    """Return how many transitions are not what the number in their observation says."""
    obs, after = batch["observations"], batch["next_observations"]
    number, ring = obs[:, -1], batch.ids >> 48
    left = LENGTH - (number // LANES + number % LANES) % LENGTH  # steps to the end of the episode
    summed = np.minimum(n_step, left)
    if n_step > 1:  # fewer in the newest call
        fewer = np.round(np.log(batch["discounts"]) / np.log(GAMMA)).astype(np.int64)
        wrong = (fewer > summed) | (fewer < 1)
        summed = fewer
    else:
        wrong = np.zeros(len(obs), bool)
    last = number + summed * LANES
    ended = summed == left
    wrong |= (obs[:, 1:] != number[:, None]).any(1) | (obs[:, 0] != after[:, 0])
    wrong |= (after[:, 1:] != np.where(ended, -last, last)[:, None]).any(1)
    rewards = sum(np.where(i < summed, GAMMA**i * ((number + i * LANES) % 1024), 0) for i in range(n_step))
    wrong |= (batch["actions"] != number) | (batch["dones"] != ended)
    wrong |= ~np.isclose(batch["rewards"], rewards)
    wrong |= (batch.ids & ((1 << 48) - 1)) != number
    names = {r: obs[ring == r, 0] for r in set(ring.tolist())}
    assert all(len(set(found.tolist())) <= 1 + wrong.sum() for found in names.values())
    return int(wrong.sum())


def write(folder, ring, width):
    """Write without a pause, until the parent is gone or kills this process."""

    def work(child):
        parent, step = os.getppid(), 0
        buf = TransitionReplayBuffer(
            64, (width,), obs_dtype=np.int64, path=folder / f"{ring}", device=None, sync_every_s=0
        )
        while os.getppid() == parent:
            buf.add(*call(ring, step, width))
            step += 1
            if step == 200:
                child.say("ready")

    return Child(work)


def race(folder, width, n_step, count, writers=WRITERS, size=256, until_wrong=False):
    """Return how many of so many transitions are wrong, and how many were redrawn."""
    with contextlib.ExitStack() as stack:
        children = [write(folder, ring, width) for ring in range(writers)]
        for child in children:
            stack.callback(child.kill)
        assert all(child.hear() == "ready" for child in children)
        buf = ShardedReplayBuffer(folder, n_step=n_step, gamma=GAMMA, seed=0)
        stack.callback(buf.close)
        done = wrong = laps = 0
        while done < count and not (wrong and until_wrong):
            try:
                batch = buf.sample(size)
            except LappedError:
                laps += 1
                assert laps < 2000 + count // size
                continue
            done += size
            wrong += num_wrong(batch, n_step)
        return wrong, buf.num_redraws, [shard.problem for shard in buf.shards]


def test_the_proof_finds_what_is_wrong(tmp_path):
    buf = TransitionReplayBuffer(64, (8,), obs_dtype=np.int64, path=tmp_path / "0", device=None)
    for step in range(16):
        buf.add(*call(0, step, 8))
    buf.close()
    batch = ShardedReplayBuffer(tmp_path, n_step=3, gamma=GAMMA, seed=0).sample(64)
    assert num_wrong(batch, 3) == 0
    for name in ("observations", "next_observations", "rewards", "dones", "actions", "discounts"):
        values = batch[name].reshape(64, -1)
        for column in range(1 if values.shape[1] > 1 else 0, values.shape[1]):
            kept = values[5, column]
            values[5, column] = kept + 1 if kept != 1 else 0
            assert num_wrong(batch, 3) == 1, name
            values[5, column] = kept


def test_no_transition_is_torn(fast):
    wrong, redraws, problems = race(fast, *KINDS["large rows, 3 steps"], SAMPLE)
    assert wrong == 0
    assert redraws > 0
    assert problems == [None] * WRITERS


def test_the_control_tears(fast):
    with one_look():
        wrong, _, _ = race(fast, *KINDS["large rows, 3 steps"], 100 * SAMPLE, until_wrong=True)
    assert wrong > 0


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_transition_of_many_is_torn(fast, kind):
    count = int(os.environ.get("CLIPS", 200_000))
    wrong, redraws, problems = race(fast, *kind, count, writers=8)
    print(f"\n{wrong:,} of {count:,} transitions wrong, {redraws:,} redrawn, 8 writers")
    assert wrong == 0
    assert redraws > 0
    assert problems == [None] * 8
