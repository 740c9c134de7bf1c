"""A sparse goal task, learned off-policy with hindsight and without it.

    actor ── World.collect ──► buffer ── batches(window=...) ──► state, next state, goal, reward ──► critics, actor
                                             │
                                             └─ Hindsight: 4 of 5 goals are places that the same episode reached later

A point in two rooms is told nothing until it is within 0.05 of its goal in the other room: a reward of -1 at every
step, 0 there. By chance it hardly ever gets there, so almost every reward is -1, and there is little to learn from.
Relabelled with places that were reached, the same episodes are full of successes. All else is alike: TD3 with small
networks; each episode begins with a detour to a random place, so that paths around the wall are stored.

    python examples/hindsight_tworoom.py [--plot curve.png] [--tiny]
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ringmap import World
from ringmap.data import Hindsight, ReplayBuffer, Window
from ringmap.policy import BasePolicy

NUM_ENVS, EPISODE_STEPS, BATCH, GAMMA, NEAR = 10, 40, 256, 0.95, 0.05
KEPT = ("state", "goal_state", "action", "reward", "terminated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=80, help="of 10 episodes and 60 updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("--tiny", action="store_true", help="seconds in all; it learns nothing")
    options = parser.parse_args()
    if options.tiny:
        options.rounds = 2
    torch.set_num_threads(1)
    curves = {}
    for name, k in (("with hindsight", 4), ("without hindsight", 0)):
        curves[name] = train(name, k, options)
    if options.plot:
        draw(curves, options.plot)
    last = {name: float(np.mean([s for _, s in curve[-3:]])) for name, curve in curves.items()}
    print("success " + ", ".join(f"{name} {found:.0f} %" for name, found in last.items()))
    told, untold = last.values()
    if not options.tiny and (told < 65 or told < untold + 25):
        raise SystemExit("it did not learn as it should")


def world() -> World:
    return World("ringmap/TwoRoom-v1", NUM_ENVS, max_episode_steps=EPISODE_STEPS, add_pixels=False, size=8)


def sparse(episode: dict[str, Any]) -> dict[str, Any]:
    """Keep what is needed, with a reward that says only whether the goal was reached."""
    kept = {name: episode[name] for name in KEPT}
    reached = np.asarray(episode["is_success"])
    return {**kept, "reward": np.where(reached, 0.0, -1.0).astype(np.float32)}


def reward(achieved: Any, goal: Any) -> Any:
    return -(np.linalg.norm(achieved - goal, axis=-1) >= NEAR).astype(np.float64)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Agent(nn.Module):
    """TD3: an actor, two critics, and slow copies of the critics."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = network(4, 2)
        self.critics = nn.ModuleList([network(6, 1), network(6, 1)])
        self.slow = copy.deepcopy(self.critics)
        self.optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.actor, self.critics)]

    def act(self, state: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        """Return actions `(B, 2)`."""
        return torch.tanh(self.actor(torch.cat([state, goal], 1) * 2 - 1))

    def value(
        self, critics: nn.ModuleList, state: torch.Tensor, goal: torch.Tensor, action: torch.Tensor
    ) -> torch.Tensor:
        seen = torch.cat([torch.cat([state, goal], 1) * 2 - 1, action], 1)
        return torch.cat([critic(seen) for critic in critics], 1)

    def update(self, batch: Any) -> None:
        state, after, goal = batch["state"][:, 0], batch["state"][:, 1], batch["goal_state"]
        action, rewards = batch["action"], batch["her_reward"].float()
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
            next_action = (self.act(after, goal) + noise).clamp(-1, 1)
            ahead = self.value(self.slow, after, goal, next_action).min(1).values
            # A reward of 0 is the goal, and the end.
            wanted = (rewards + GAMMA * (rewards != 0) * ahead).clamp(-1 / (1 - GAMMA), 0)
        wrong = self.value(self.critics, state, goal, action) - wanted[:, None]
        self._step(1, wrong.square().mean())
        chosen = self.act(state, goal)
        self._step(0, -self.value(self.critics, state, goal, chosen)[:, 0].mean())
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.critics.parameters(), strict=True):
                slow.lerp_(fast, 0.02)

    def _step(self, which: int, loss: torch.Tensor) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()


class Greedy(BasePolicy):
    """The agent's actions."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent

    def get_action(self, infos: Any) -> Any:
        return self.act(infos["state"][:, 0], infos["goal_state"][:, 0])

    def act(self, state: Any, goal: Any) -> Any:
        with torch.no_grad():
            found: Any = self.agent.act(torch.from_numpy(state), torch.from_numpy(goal)).numpy()
        return found


class Exploring(Greedy):
    """The same with noise; each episode begins with a detour to a place drawn at random."""

    def set_env(self, envs: Any) -> None:
        super().set_env(envs)
        self.rng = np.random.default_rng(0)
        self.detour = np.zeros((envs.num_envs, 2), np.float32)
        self.left = np.zeros(envs.num_envs, int)

    def get_action(self, infos: Any) -> Any:
        for env, seeds in self.new_episodes():
            self.rng = np.random.default_rng(seeds)
            self.detour[env] = self.rng.uniform(0.1, 0.9, 2)
            self.left[env] = self.rng.integers(0, EPISODE_STEPS // 2)
        away = self.left > 0
        self.left -= 1
        goal = np.where(away[:, None], self.detour, infos["goal_state"][:, 0])
        actions = self.act(infos["state"][:, 0], goal)
        actions = actions + self.rng.normal(0, 0.2, actions.shape)
        random = self.rng.random(len(actions)) < 0.2
        actions[random] = self.rng.uniform(-1, 1, (int(random.sum()), 2))
        return actions.clip(-1, 1).astype(np.float32)


def train(name: str, k: int, options: argparse.Namespace) -> list[tuple[int, float]]:
    """Return the success rate, in percent, after so many episodes."""
    torch.manual_seed(options.seed)
    agent = Agent()
    buf = ReplayBuffer(max_steps=50_000, key_filter=sparse, seed=options.seed)
    window = {
        "state": Window([0, 1]),
        "action": Window([0]),  # the last step has none, and is no anchor
        "her": Hindsight(reward, "future", k, goal="goal_state", achieved="state"),
    }
    curve = []
    with world() as envs, world() as test:
        test.set_policy(Greedy(agent))
        envs.set_policy(Exploring(agent))
        for number in range(options.rounds):
            seed = options.seed + number * NUM_ENVS
            envs.collect(writer=buf, episodes=NUM_ENVS, seed=seed, progress=False)
            for batch in buf.batches(BATCH, 60, prefetch=0, to="torch", window=window):
                batch["action"] = batch["action"][:, 0]
                agent.update(batch)
            if (number + 1) % max(1, options.rounds // 10) == 0:
                episodes = NUM_ENVS if options.tiny else 50
                found = test.evaluate(episodes=episodes, seed=1_000_000, progress=False)
                curve.append(((number + 1) * NUM_ENVS, float(found["success_rate"])))
                print(f"{name}, {curve[-1][0]:4d} episodes: success {curve[-1][1]:.0f} %", flush=True)
    return curve


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "o-", markersize=3, label=name)
    axes.set(xlabel="episodes", ylabel="success (%)", ylim=(-2, 103), title="TwoRoom, told only at the goal")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
