"""DAgger on CartPole: a student that is wrong where its teacher never was learns it there.

    student plays, 2 poles ─► what it saw ─► teacher: what it would have done ─► DistillationBuffer
          ▲                                                                          │ all rounds
          └────────────────────────── epochs of cross-entropy ◄──────────────────────┘

The teacher holds the pole up for 500 steps. In round 0 it plays itself; a student that clones it from
so little falls over soon. From then on the student plays, and the teacher says what would have been right.

    python examples/dagger_cartpole.py [--plot curve.png] [--path DIR] [--tiny]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import torch

from ringmap.data import DistillationBuffer, ExponentialBeta

NUM_ENVS, STEPS = 2, 20
"""A round is 40 labels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5, help="how many times, to see the spread")
    parser.add_argument("--path", type=Path, help="keep the buffer of the first seed here")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("--tiny", action="store_true", help="a few rounds, to see that it learns")
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.seeds = 4, 1
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {"DAgger": [], "cloning": []}
    for seed in range(options.seeds):
        for name, curves in found.items():
            path = options.path if seed == 0 and name == "DAgger" else None
            curves.append(run(seed, options.rounds, name == "DAgger", path))
    print(f"teacher: {evaluate(teacher, episodes=20):.0f} steps of 500")
    print("round    " + "".join(f"{round:8d}" for round in range(options.rounds)))
    for name, curves in found.items():
        print(f"{name:8s} " + "".join(f"{value:8.1f}" for value in np.median(curves, axis=0)))
    if options.plot:
        draw(found, options.plot)
    first, last = np.median(found["DAgger"], axis=0)[[0, -1]]
    if last < 2 * first:
        raise SystemExit(f"DAgger did not learn: {first:.1f} steps in round 0, {last:.1f} at the end")


def teacher(observations: np.ndarray) -> np.ndarray:
    """Push to where the pole falls, and lean against drift."""
    return (observations @ np.array([0.1, 0.5, 1.0, 1.0]) > 0).astype(np.int64)


def run(seed: int, rounds: int, dagger: bool, path: Path | None = None) -> list[float]:
    """Return how long the student holds the pole up after each round."""
    torch.manual_seed(seed)
    # Cloning is the same with the teacher playing for ever.
    beta = ExponentialBeta(0.0) if dagger else 1.0
    buf = DistillationBuffer(rounds * STEPS * NUM_ENVS, beta=beta, path=path, seed=seed)
    student = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)

    def act(observations: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return student(torch.as_tensor(observations)).argmax(-1).numpy()

    envs = [gymnasium.make("CartPole-v1") for _ in range(NUM_ENVS)]
    seen = [env.reset(seed=100 * seed + i)[0] for i, env in enumerate(envs)]
    curve = []
    for _ in range(rounds):
        buf.start_round()
        for _ in range(STEPS):
            observations = np.stack(seen)
            labels = teacher(observations)
            actions = buf.mix(labels, act(observations))
            dones = np.zeros(NUM_ENVS, bool)
            for i, env in enumerate(envs):
                seen[i], _, terminated, truncated, _ = env.step(int(actions[i]))
                dones[i] = terminated or truncated
                if dones[i]:
                    seen[i] = env.reset()[0]
            buf.add(observations, labels, executed_actions=actions, dones=dones)
        for batch in buf.epochs(batch_size=64, num_epochs=20):
            inputs = torch.as_tensor(batch["student_observations"])
            targets = torch.as_tensor(batch["teacher_actions"])
            loss = torch.nn.functional.cross_entropy(student(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(evaluate(act, episodes=10))
    for env in envs:
        env.close()
    buf.close()
    return curve


def evaluate(act, episodes: int) -> float:
    """Return the mean length of episodes that start alike for everyone."""
    env, total = gymnasium.make("CartPole-v1"), 0
    for seed in range(episodes):
        observation, over = env.reset(seed=10_000 + seed)[0], False
        while not over:
            observation, _, terminated, truncated, _ = env.step(int(act(observation[None])[0]))
            over = terminated or truncated
            total += 1
    env.close()
    return total / episodes


def draw(found: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
    for name, curves in found.items():
        low, middle, high = np.quantile(curves, [0, 0.5, 1], axis=0)
        axes.plot(middle, label=name)
        axes.fill_between(range(len(middle)), low, high, alpha=0.2)
    axes.set(xlabel="round of 40 labels", ylabel="steps the pole is up", ylim=(0, 510))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
