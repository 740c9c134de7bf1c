"""SAC on Pendulum, from offline data to online: half of each batch from a dataset at first, none in the end.

    a clumsy controller ─► prior.h5 ─┐ fraction, annealed to 0
                                     ├─► OfflineToOnlineReplayBuffer ─► SAC ─► actor
    actor plays, a step at a time ───┘ the rest                          ▲      │
         └──────────────────────────────────────────────────────────────────────┘

Before the first step it learns from the dataset alone. Beside it, the same SAC without one. What is compared is
the return by steps of the environment: a pendulum that is never held up gets -1200 or so, one that is, about -150.

    python examples/sac_pendulum.py [--plot curve.png] [--dir DIR] [--tiny]
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from ringmap.data import OfflineToOnlineReplayBuffer, get_format
from ringmap.data import ReplayBuffer as Episodes

GAMMA, TAU, BATCH, LIMIT = 0.98, 0.01, 128, 2.0
COLUMNS = ("observation", "action", "reward", "next_observation", "terminated")

Columns = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3000, help="of the environment, one update each")
    parser.add_argument("--before", type=int, default=2000, help="updates from the dataset alone")
    parser.add_argument("--dir", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("--tiny", action="store_true", help="the dataset, and a few steps: it learns nothing")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.before = 60, 100
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ringmap-") as folder:
        work = options.dir or Path(folder)
        clumsy = write_prior(work / "prior.h5", episodes=8 if options.tiny else 40)
        print(f"the clumsy controller: {clumsy:.0f}")
        curves = {"offline to online": run(work / "mixed", work / "prior.h5", options.steps, options.before)}
        if not options.tiny:
            curves["online only"] = run(work / "alone", None, options.steps, 0)
    steps = [step for step, _ in curves["offline to online"]]
    print("steps             " + "".join(f"{step:8d}" for step in steps))
    for name, curve in curves.items():
        print(f"{name:18s}" + "".join(f"{value:8.0f}" for _, value in curve))
    if options.plot:
        draw(curves, clumsy, options.plot)
    last = curves["offline to online"][-1][1]
    if not options.tiny and last < 0.8 * clumsy:
        raise SystemExit(f"SAC did not learn: {last:.0f}, from data of {clumsy:.0f}")


# -- the offline data --------------------------------------------------------------------------


def clumsily(observation: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Pump energy in, catch near the top, and do something else a third of the time."""
    cos, sin, speed = observation
    if rng.random() < 0.35:
        return rng.uniform(-LIMIT, LIMIT, 1).astype(np.float32)
    push = -8 * sin - 2 * speed if cos > 0.8 else np.sign(speed) * LIMIT
    return np.clip([push], -LIMIT, LIMIT).astype(np.float32)


def write_prior(path: Path, episodes: int) -> float:
    """Play, write a dataset, and return the mean return."""
    rng, env, returns = np.random.default_rng(0), gymnasium.make("Pendulum-v1"), []
    with get_format("hdf5").open_writer(path, mode="overwrite") as writer:
        for number in range(episodes):
            steps: dict[str, list[Any]] = {name: [] for name in COLUMNS}
            observation, over = env.reset(seed=number)[0], False
            while not over:
                action = clumsily(observation, rng)
                following, reward, terminated, truncated, _ = env.step(action)
                row = (observation, action, np.float32(reward), following, terminated)
                for name, value in zip(COLUMNS, row, strict=True):
                    steps[name].append(value)
                observation, over = following, terminated or truncated
            writer.write_episode(steps)
            returns.append(float(np.sum(steps["reward"])))
    env.close()
    return float(np.mean(returns))


# -- SAC ---------------------------------------------------------------------------------------


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class SAC:
    """Soft actor-critic with a learned temperature.

    Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018.
    """

    def __init__(self) -> None:
        self.actor = network(3, 2)
        self.critics = nn.ModuleList([network(4, 1), network(4, 1)])
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.optimizers = [
            torch.optim.Adam(parameters, 1e-3)
            for parameters in (self.actor.parameters(), self.critics.parameters(), [self.log_alpha])
        ]

    def act(self, observations: torch.Tensor, mean: bool = False) -> tuple[torch.Tensor, ...]:
        """Return actions, and the logarithm of their density."""
        middle, spread = self.actor(observations).chunk(2, -1)
        if mean:
            return (LIMIT * torch.tanh(middle),)
        normal = torch.distributions.Normal(middle, spread.clamp(-5, 2).exp())
        drawn = normal.rsample()
        squashed = torch.tanh(drawn)
        log = normal.log_prob(drawn) - torch.log(1 - squashed**2 + 1e-6)
        return LIMIT * squashed, log.sum(-1, keepdim=True)

    def update(self, batch: Columns) -> None:
        seen, following = batch["observation"], batch["next_observation"]
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            actions, log = self.act(following)
            ahead = self.worst(self.targets, following, actions) - alpha * log
            goes_on = 1 - batch["terminated"].float()[:, None]
            goal = batch["reward"][:, None] / 10 + GAMMA * goes_on * ahead
        both = torch.cat([seen, batch["action"]], 1)
        critic_loss = sum(nn.functional.mse_loss(q(both), goal) for q in self.critics)
        self.step(1, critic_loss)
        actions, log = self.act(seen)
        self.step(0, (alpha * log - self.worst(self.critics, seen, actions)).mean())
        self.step(2, -(self.log_alpha * (log.detach() - 1)).mean())
        with torch.no_grad():
            for target, critic in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(critic, TAU)

    def worst(self, critics: nn.ModuleList, seen: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        both = torch.cat([seen, done], 1)
        return torch.min(critics[0](both), critics[1](both))

    def step(self, which: int, loss: torch.Tensor) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()


def run(path: Path, prior: Path | None, steps: int, before: int) -> list[tuple[int, float]]:
    """Return the curve of one training: steps, and the return of the mean action."""
    torch.manual_seed(0)
    rng, agent, env = np.random.default_rng(0), SAC(), gymnasium.make("Pendulum-v1")
    nothing = Episodes(max_steps=1)  # an offline half that is never drawn from: all comes from the other
    buf = OfflineToOnlineReplayBuffer(
        nothing if prior is None else str(prior),
        online_capacity=steps,
        offline_fraction=0.5,
        batch_size=BATCH,
        path=path,
        to="torch",
        seed=0,
    )
    if prior is None:
        buf.anneal(1, 1)
    for _ in range(before):
        agent.update(buf.sample())
    observation, curve = env.reset(seed=0)[0], [(0, evaluate(agent))]
    for step in range(steps):
        if prior is None and step < 200:
            action = rng.uniform(-LIMIT, LIMIT, 1).astype(np.float32)
        else:
            with torch.no_grad():
                action = agent.act(torch.from_numpy(observation)[None])[0][0].numpy()
        following, reward, terminated, truncated, _ = env.step(action)
        row = (observation, action, np.float32(reward), following, terminated)
        buf.extend({n: np.asarray(v)[None] for n, v in zip(COLUMNS, row, strict=True)})
        observation = env.reset()[0] if terminated or truncated else following
        if prior is not None or step >= BATCH:
            agent.update(buf.sample())
        if prior is not None:
            buf.anneal(step + 1, steps // 2)
        if (step + 1) % min(250, steps) == 0:
            curve.append((step + 1, evaluate(agent)))
    buf.close()
    env.close()
    return curve


def evaluate(agent: SAC) -> float:
    """Return the mean return of five episodes that start alike for everyone."""
    env, total = gymnasium.make("Pendulum-v1"), 0.0
    for seed in range(5):
        observation, over = env.reset(seed=10_000 + seed)[0], False
        while not over:
            with torch.no_grad():
                (action,) = agent.act(torch.from_numpy(observation)[None], mean=True)
            observation, reward, terminated, truncated, _ = env.step(action[0].numpy())
            over, total = terminated or truncated, total + float(reward)
    env.close()
    return total / 5


def draw(curves: dict[str, list[tuple[int, float]]], clumsy: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "o-", markersize=3, label=name)
    axes.axhline(clumsy, color="gray", linestyle=":", label="who made the dataset")
    axes.set(xlabel="steps of the environment", ylabel="return")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
