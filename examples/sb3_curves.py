"""Stable-Baselines3 over a ring and over its own buffer: the same curves, and a run that is killed with -9 and goes on.

    python examples/sb3_curves.py            # about 15 minutes
    python examples/sb3_curves.py --tiny     # the same in seconds; it learns nothing

DQN on CartPole and SAC on Pendulum, with the settings of RL Baselines3 Zoo. With the same seed both buffers draw the
same batches, so the returns are equal. Needs the extra `sb3`.
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

import ringmap

TASKS = {
    "DQN, CartPole-v1": (
        DQN,
        "CartPole-v1",
        40_000,
        {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
    "SAC, Pendulum-v1": (SAC, "Pendulum-v1", 2_000, {"learning_rate": 1e-3, "buffer_size": 100_000}),
}
CHECKPOINTS, EPISODES = 5, 10


def settings(options, tiny):
    small = {"learning_starts": 100, "train_freq": 32, "gradient_steps": 4}
    return {**options, **small} if tiny else options


class Watch(BaseCallback):
    """Every so many steps, evaluates the greedy policy, and saves the model in `file`; at the step `killed`, kills the
    process."""

    def __init__(self, every, episodes, file=None, killed=None):
        super().__init__()
        self.every, self.episodes, self.file, self.killed = every, episodes, file, killed
        self.returns = {}

    def _on_step(self):
        if self.num_timesteps == self.killed:
            print(f"killed with -9 in step {self.num_timesteps:,}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_timesteps % self.every == 0:
            env = gym.make(self.training_env.get_attr("spec")[0].id)
            env.reset(seed=10_000)
            mean, _ = evaluate_policy(self.model, env, self.episodes, warn=False)
            self.returns[self.num_timesteps] = mean
            if self.file:
                self.model.save(self.file.with_suffix(".new.zip"))
                os.replace(self.file.with_suffix(".new.zip"), self.file)
        return True


def train(task, seed, tiny, path=None):
    """Return the returns of the greedy policy by step, and the processor time of learning."""
    algorithm, name, steps, options = TASKS[task]
    steps = 500 if tiny else steps
    ring = {"replay_buffer_class": ringmap.sb3.ReplayBuffer, "replay_buffer_kwargs": {"path": path}}
    model = algorithm(
        "MlpPolicy", gym.make(name), seed=seed, device="cpu", **settings(options, tiny), **(ring if path else {})
    )
    watch = Watch(steps // CHECKPOINTS, 1 if tiny else EPISODES)
    start = time.process_time()
    model.learn(steps, watch)
    return watch.returns, time.process_time() - start


def kept(folder, seed, tiny, killed=2):
    """Train DQN, with a checkpoint of the model every so often, until `killed` of the steps; go on with what is in the
    folder."""
    torch.set_num_threads(1)
    algorithm, name, steps, options = TASKS["DQN, CartPole-v1"]
    steps, file = 500 if tiny else steps // 4, folder / "model.zip"
    if file.exists():
        model = algorithm.load(file, gym.make(name))
        print(
            f"resumed with the model of step {model.num_timesteps:,}; the ring has {model.replay_buffer.size():,} "
            "transitions"
        )
        assert model.replay_buffer.size() >= model.num_timesteps
    else:
        model = algorithm(
            "MlpPolicy",
            gym.make(name),
            seed=seed,
            device="cpu",
            replay_buffer_class=ringmap.sb3.ReplayBuffer,
            replay_buffer_kwargs={"path": folder / "ring"},
            **settings(options, tiny),
        )
    watch = Watch(steps // CHECKPOINTS, 1 if tiny else EPISODES, file, int(killed * steps))
    model.learn(steps - model.num_timesteps, watch, reset_num_timesteps=False)
    return watch.returns


def kill_half_way(folder, seed, tiny):
    """Train in a process of its own, which is killed after the half, between two checkpoints."""
    folder.mkdir()
    child = multiprocessing.get_context("spawn").Process(target=kept, args=(folder, seed, tiny, 0.55))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL, "it was not killed"


def row(name, values):
    return f"| {name} | {' | '.join(values)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    seeds = range(1 if asked.tiny else asked.seeds)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ringmap-") as home:
        for task in TASKS:
            curves, seconds = {}, {}
            for seed in seeds:
                for buffer in ("ringmap", "Stable-Baselines3"):
                    path = Path(home) / f"{task} {seed}" if buffer == "ringmap" else None
                    curve, took = train(task, seed, asked.tiny, path)
                    curves.setdefault(buffer, []).append(curve)
                    seconds.setdefault(buffer, []).append(took)
            steps = list(curves["ringmap"][0])
            print(row(task, [f"step {step:,}" for step in steps]) + " processor time |")
            print(row("---", ["---"] * (len(steps) + 1)))
            for seed in seeds:
                for buffer in curves:
                    values = [f"{value:.0f}" for value in curves[buffer][seed].values()]
                    print(row(f"{buffer}, seed {seed}", [*values, f"{seconds[buffer][seed]:.0f} s"]))
            print(flush=True)
            assert curves["ringmap"] == curves["Stable-Baselines3"], "they differ"
            best = np.mean([max(curve.values()) for curve in curves["ringmap"]])
            assert asked.tiny or best > {"DQN": 200, "SAC": -1000}[task[:3]], "it did not learn"
        folder = Path(home) / "killed"
        kill_half_way(folder, 0, asked.tiny)
        returns = kept(folder, 0, asked.tiny)
        print("and went on: " + ", ".join(f"{value:.0f} at {step:,}" for step, value in returns.items()))
        assert asked.tiny or max(returns.values()) > 50, "it did not learn"


if __name__ == "__main__":
    main()
