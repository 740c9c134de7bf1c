"""DQN from stacked frames of 84 x 84, each stored once: killed with -9 half-way, resumed, and equal to one that was
not.

    python examples/dqn_frames.py            # both runs: about 10 minutes
    python examples/dqn_frames.py --tiny     # the same in seconds; it learns nothing

The game is Catch, drawn as Atari's games are: a ball falls and drifts, and a paddle has to be under it. One frame does
not say where the ball drifts, so the network sees four (Gymnasium's `FrameStackObservation`). All that a run needs
again is in the buffer's directory, which needs no saving, and in a checkpoint: networks, generators and the games. A
resumed run plays the steps since its checkpoint again; what these led to is stored already.
"""

import argparse
import copy
import csv
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import FrameStackObservation
from torch import nn

from ringmap import TransitionReplayBuffer

LANES, BATCH, STACK, SIDE, DROPS = 4, 32, 4, 84, 3


class Catch(gym.Env):
    """Three balls fall, one after the other; each that is caught gives 1, each other one -1."""

    observation_space = gym.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.paddle, self.left = SIDE // 2, DROPS
        self._drop()
        return self._frame(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + 5 * (action - 1), 6, SIDE - 6))
        self.y += 4
        self.x += self.drift
        if not 2 <= self.x <= SIDE - 2:  # off the wall
            self.drift = -self.drift
            self.x += 2 * self.drift
        reward = 0.0
        if self.y >= SIDE - 6:
            reward = 1.0 if abs(self.x - self.paddle) <= 8 else -1.0
            self.left -= 1
            self._drop()
        return self._frame(), reward, self.left == 0, False, {}

    def _drop(self):
        self.x, self.y = int(self.np_random.integers(8, SIDE - 8)), 2
        self.drift = int(self.np_random.integers(-4, 5))

    def _frame(self):
        frame = np.zeros((SIDE, SIDE), np.uint8)
        frame[self.y - 2 : self.y + 2, self.x - 2 : self.x + 2] = 255
        frame[SIDE - 4 :, self.paddle - 6 : self.paddle + 6] = 128
        return frame


class Lanes:
    """Games side by side; a step tells the last observation of an episode, then resets."""

    def __init__(self, count, seed):
        self.envs = [FrameStackObservation(Catch(), STACK, padding_type="reset") for _ in range(count)]
        self.now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])

    def step(self, actions):
        played = [env.step(int(action)) for env, action in zip(self.envs, actions, strict=True)]
        after, rewards, dones, _, _ = (np.array(values) for values in zip(*played, strict=True))
        self.now = np.stack(
            [env.reset()[0] if done else a for env, done, a in zip(self.envs, dones, after, strict=True)]
        )
        return after, rewards.astype(np.float32), dones.astype(bool)


class Since:
    """Draw from the transitions before `stop`, of a buffer that may hold what came later, before a kill."""

    def __init__(self, seed):
        self.rng, self.stop = np.random.default_rng(seed), 0

    def __call__(self, step, buffer, batch_size, history_len):
        return self.rng.integers(0, self.stop, batch_size)


def network():
    return nn.Sequential(
        nn.Conv2d(STACK, 16, 8, 4),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 81, 128),
        nn.ReLU(),
        nn.Linear(128, 3),
    )


def values(net, stacks):
    return net(torch.as_tensor(stacks).float() / 255)


def evaluate(net, seed, episodes):
    """Return the mean return of greedy episodes."""
    lanes, returns, alive = Lanes(episodes, seed), np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        with torch.no_grad():
            actions = values(net, lanes.now).argmax(1).numpy()
        _, rewards, dones = lanes.step(actions)
        returns += rewards * alive
        alive &= ~dones
    return float(returns.mean())


def nbytes_of(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def train(folder, steps, seed, episodes):
    """Train up to `steps` steps of all lanes, or go on with what is in `folder`; return the score of each
    evaluation."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rng, sampler = np.random.default_rng(seed), Since(seed)
    net = network()
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    buffer = TransitionReplayBuffer(
        steps * LANES,
        (STACK, SIDE, SIDE),
        obs_dtype=np.uint8,
        frame_stack=STACK,
        padding_type="reset",
        extra={"explored": ((), "?")},
        path=folder / "buffer",
        sampler=sampler,
        seed=seed,
    )
    lanes, done, log = Lanes(LANES, seed), 0, []
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        for part, name in ((net, "net"), (target, "target"), (optimizer, "optimizer")):
            part.load_state_dict(state[name])
        lanes, rng, sampler.rng = pickle.loads(state["games"])
        done, log = state["done"], state["log"]
        print(f"{folder}: resumed at step {done}; {len(buffer) // LANES} steps are stored", flush=True)
    stored = len(buffer) // LANES
    while done < steps:
        with torch.no_grad():
            actions = values(net, lanes.now).argmax(1).numpy()
        explored = rng.random(LANES) < max(0.05, 1 - done / (0.3 * steps))
        actions = np.where(explored, rng.integers(0, 3, LANES), actions)
        before = lanes.now
        after, rewards, dones = lanes.step(actions)
        if done >= stored:  # else it was stored before the kill
            buffer.add(before, actions, rewards, after, dones, extra={"explored": explored})
        done += 1
        sampler.stop = done * LANES
        if done >= steps // 20:
            batch = buffer.sample(BATCH)
            with torch.no_grad():
                best = values(target, batch["next_observations"]).max(1).values
                goal = batch["rewards"] + 0.97 * (1 - batch["dones"]) * best
            guess = values(net, batch["observations"]).gather(1, batch["actions"][:, None])[:, 0]
            optimizer.zero_grad()
            nn.functional.huber_loss(guess, goal).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if done % (steps // 10) == 0:
            log.append((done, evaluate(net, 10_000, episodes)))
            print(f"{folder}: step {done}: return {log[-1][1]:.2f} of {DROPS}", flush=True)
        if done % (steps // 16) == 0:
            state = {
                "net": net.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "games": pickle.dumps((lanes, rng, sampler.rng)),
                "done": done,
                "log": log,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    with open(folder / "returns.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "return"), *log])
    buffer.close()
    return log


def kill_half_way(folder, steps, seed, episodes):
    """Start a run in a process of its own, and kill it when its checkpoint is beyond the half."""
    child = multiprocessing.Process(target=train, args=(folder, steps, seed, episodes))
    child.start()
    while child.is_alive():
        time.sleep(0.02)
        try:
            half = torch.load(folder / "checkpoint.pt", weights_only=False)["done"] >= steps // 2
        except FileNotFoundError:
            continue
        if half:
            child.kill()
            break
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the run ended before it could be killed"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/dqn_frames"))
    parser.add_argument("--steps", type=int, default=16_000, help="of each of 4 games")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    steps, episodes = (160, 1) if asked.tiny else (asked.steps, 20)
    killed, whole = asked.out / "killed", asked.out / "uninterrupted"
    kill_half_way(killed, steps, asked.seed, episodes)
    resumed = train(killed, steps, asked.seed, episodes)
    uninterrupted = train(whole, steps, asked.seed, episodes)
    assert resumed == uninterrupted, f"{resumed} != {uninterrupted}"
    print(f"killed with -9 half-way and resumed, and uninterrupted: equal at all {len(resumed)} evaluations")
    count, frame = steps * LANES, SIDE * SIDE
    print(
        f"{count:,} transitions take {nbytes_of(whole / 'buffer') / 1e6:,.0f} MB; their frames "
        f"{count * frame / 1e6:,.0f} MB, both stacks of each {2 * STACK * count * frame / 1e6:,.0f} MB"
    )
    assert asked.tiny or max(score for _, score in resumed) >= 2, "it did not learn"


if __name__ == "__main__":
    main()
