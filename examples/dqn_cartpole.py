"""DQN on CartPole from a replay buffer in a directory: killed with -9 half-way, resumed, and as good as one that was
not.

    python examples/dqn_cartpole.py            # both runs, and a plot of them: about 5 minutes
    python examples/dqn_cartpole.py --tiny     # the same in seconds; it learns nothing

Double DQN with prioritized 3-step transitions. What a killed run needs again is in two places: the buffer's
directory, which needs no saving, and a checkpoint of model, optimizer and sampling state.
"""

import argparse
import copy
import csv
import multiprocessing
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from ringmap import TransitionReplayBuffer
from ringmap.samplers import Linear, PrioritizedSampler

LANES, BATCH, START, EVALUATE, CHECKPOINT = 4, 128, 1_000, 2_000, 1_000


class Lanes:
    """CartPoles side by side; a step tells the last observation of an episode, then resets."""

    def __init__(self, count, seed):
        self.envs = [gym.make("CartPole-v1") for _ in range(count)]
        self.now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])

    def step(self, actions):
        after, dones, truncated = (
            np.empty_like(self.now),
            np.zeros(len(self.envs), bool),
            np.zeros(len(self.envs), bool),
        )
        now = np.empty_like(self.now)
        for i, env in enumerate(self.envs):
            after[i], _, dones[i], truncated[i], _ = env.step(int(actions[i]))
            now[i] = env.reset()[0] if dones[i] or truncated[i] else after[i]
        self.now = now
        return after, np.ones(len(now), np.float32), dones, truncated


def network():
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def evaluate(net, seed, episodes=10):
    """Return the mean return of greedy episodes."""
    lanes, returns, alive = Lanes(episodes, seed), np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        with torch.no_grad():
            actions = net(torch.from_numpy(lanes.now)).argmax(1).numpy()
        _, rewards, dones, truncated = lanes.step(actions)
        returns += rewards * alive
        alive &= ~(dones | truncated)
    return float(returns.mean())


def train(folder, steps, seed):
    """Train up to `steps` environment steps, or go on with what is in `folder`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    net = network()
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    sampler = PrioritizedSampler(alpha=0.5, beta=Linear(0.4, 1.0, steps // LANES), rng=seed)
    buffer = TransitionReplayBuffer(
        50_000, (4,), n_step=3, gamma=0.99, path=folder / "buffer", sampler=sampler, seed=seed
    )
    done, log, best = 0, [], -1.0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        net.load_state_dict(state["net"])
        target.load_state_dict(state["target"])
        optimizer.load_state_dict(state["optimizer"])
        rng.bit_generator.state = state["rng"]
        done, log, best = state["done"], state["log"], state["best"]
        print(f"{folder}: resumed at step {done} with {len(buffer)} transitions stored", flush=True)
    lanes = Lanes(LANES, seed + done)  # an environment can't be saved: its lanes begin anew
    while done < steps:
        explore = max(0.05, 1 - done / (0.2 * steps))
        with torch.no_grad():
            actions = net(torch.from_numpy(lanes.now)).argmax(1).numpy()
        actions = np.where(rng.random(LANES) < explore, rng.integers(0, 2, LANES), actions)
        before = lanes.now
        after, rewards, dones, truncated = lanes.step(actions)
        buffer.add(before, actions, rewards, after, dones, truncated=truncated)
        done += LANES
        if done >= min(START, steps // 2):
            batch = buffer.sample(BATCH, step=done // LANES)
            with torch.no_grad():
                chosen = net(batch["next_observations"]).argmax(1, keepdim=True)
                value = target(batch["next_observations"]).gather(1, chosen)[:, 0]
                goal = batch["rewards"] + batch["discounts"] * (1 - batch["dones"]) * value
            guess = net(batch["observations"]).gather(1, batch["actions"][:, None])[:, 0]
            errors = guess - goal
            loss = (batch.weights * nn.functional.huber_loss(guess, goal, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10)
            optimizer.step()
            buffer.update_priorities(batch.ids, errors.abs())
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        if done % min(EVALUATE, steps // 4) < LANES:
            score = evaluate(net, seed=10_000)
            log.append((done, score))
            print(f"{folder}: step {done}: return {score:.0f}", flush=True)
            if score >= best:
                best = score
                torch.save(net.state_dict(), folder / "best.pt")
        if done % min(CHECKPOINT, steps // 8) < LANES:
            state = {
                "net": net.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": rng.bit_generator.state,
                "done": done,
                "log": log,
                "best": best,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    with open(folder / "returns.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "return"), *log])
    net.load_state_dict(torch.load(folder / "best.pt"))
    final = evaluate(net, seed=20_000, episodes=20)
    print(f"{folder}: best network, 20 new episodes: return {final:.1f}", flush=True)
    buffer.close()
    return final


def kill_half_way(folder, steps, seed):
    """Start a run in a process of its own, and kill it when its checkpoint is beyond the half."""
    child = multiprocessing.Process(target=train, args=(folder, steps, seed))
    child.start()
    while child.is_alive():
        time.sleep(0.05)
        try:
            half = torch.load(folder / "checkpoint.pt", weights_only=False)["done"] >= steps // 2
        except FileNotFoundError:
            continue
        if half:
            child.kill()
            break
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the run ended before it could be killed"


def plot(runs, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), dpi=100, layout="constrained")
    for name, folder in runs.items():
        with open(folder / "returns.csv", newline="") as file:
            rows = [(int(row["step"]), float(row["return"])) for row in csv.DictReader(file)]
        axes.plot(*zip(*rows, strict=True), label=name)
    axes.set(xlabel="environment steps", ylabel="return of 10 greedy episodes", title="DQN, CartPole-v1")
    axes.legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/dqn_cartpole"))
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    steps = 800 if asked.tiny else asked.steps
    killed, whole = asked.out / "killed", asked.out / "uninterrupted"
    kill_half_way(killed, steps, asked.seed)
    scores = {"killed with -9 half-way, resumed": train(killed, steps, asked.seed)}
    scores["uninterrupted"] = train(whole, steps, asked.seed)
    plot(
        {"uninterrupted": whole, "killed with -9 half-way, resumed": killed},
        asked.out / "dqn-cartpole.png",
    )
    for name, score in scores.items():
        print(f"{name}: {score:.1f}")
        assert asked.tiny or score >= 475, "it did not learn"


if __name__ == "__main__":
    main()
