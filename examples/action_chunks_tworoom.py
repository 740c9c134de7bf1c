"""Cloning an expert in chunks of 16 actions from 2 pictures, with the ends of episodes and without them.

    expert ── World.collect ──► buffer ── batches(window=...) ──► pixels at t-1, t; goal at t; actions t ... t+15
                                                                        │
                                              encoder ─► 16 actions ─► masked loss

An expert is at its goal after about 15 steps, so few steps have 16 actions after them. Without padding, the network
learns from the first steps of long episodes alone; with pad="edge" it learns from every step, and a mask keeps what is
padding out of the loss. Both are trained alike, play 8 of their 16 actions, then look again.

    python examples/action_chunks_tworoom.py [--plot curve.png] [--tiny]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ringmap import World
from ringmap.data import ReplayBuffer, Window
from ringmap.policy import BasePolicy, ExpertPolicy

SHAPE, NUM_ENVS, EPISODE_STEPS = (32, 32), 10, 60
CHUNK, PLAYED, BATCH = 16, 8, 64
PADDED = {"pixels": Window([-1, 0], pad="edge"), "action": Window(range(CHUNK), pad="edge")}
WHOLE = {"pixels": Window([-1, 0]), "action": Window(range(CHUNK))}
COLUMNS = ("pixels", "goal", "action")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=1000, help="how many the expert plays")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw the curves into this file")
    parser.add_argument("--tiny", action="store_true", help="seconds in all; it learns nothing")
    options = parser.parse_args()
    if options.tiny:
        options.episodes, options.updates = 20, 10
    torch.set_num_threads(1)
    buf = ReplayBuffer(max_steps=40_000, seed=options.seed)
    with world() as envs:
        envs.set_policy(ExpertPolicy(noise=0.3, seed=options.seed))
        envs.collect(writer=buf, episodes=options.episodes, seed=options.seed, progress=False)
    curves = {}
    for name, window in (("with the ends", PADDED), ("without the ends", WHOLE)):
        anchors = len(buf.view(window=window, columns=COLUMNS))
        print(f"{name}: {anchors:,} of {buf.num_steps_stored:,} steps are anchors", flush=True)
        curves[name] = train(buf, window, options)
    if options.plot:
        draw(curves, options.plot)
    ends, none = (curve[-1][1] for curve in curves.values())
    print(f"success with the ends {ends:.0f} %, without them {none:.0f} %")
    if not options.tiny and (ends < 80 or ends < none + 30):
        raise SystemExit("it did not learn")


def world() -> World:
    return World("ringmap/TwoRoom-v1", NUM_ENVS, SHAPE, max_episode_steps=EPISODE_STEPS)


class Chunker(nn.Module):
    """Two pictures and a picture of the goal: the next 16 actions."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 8 * 8, size),
            nn.LayerNorm(size),
        )
        self.head = nn.Sequential(
            nn.Linear(3 * size, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2 * CHUNK)
        )

    def forward(self, pixels: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        """Return actions `(B, 16, 2)` for pictures `(B, 2, H, W, 3)` and goals `(B, H, W, 3)`."""
        seen = torch.cat([pixels, goal[:, None]], 1)
        frames = seen.flatten(0, 1).permute(0, 3, 1, 2).float() / 255 - 0.5
        found: torch.Tensor = self.head(self.encoder(frames).reshape(len(seen), -1))
        return found.unflatten(1, (CHUNK, 2))

    def loss(self, batch: Any) -> torch.Tensor:
        wrong = (self(batch["pixels"], batch["goal"]) - batch["action"]).square().mean(-1)
        if "action_is_pad" not in batch:
            return wrong.mean()
        real = ~batch["action_is_pad"]
        return (wrong * real).sum() / real.sum()


def train(buf: ReplayBuffer, window: Any, options: argparse.Namespace) -> list[tuple[int, float]]:
    """Return the success rate, in percent, after so many updates."""
    torch.manual_seed(options.seed)
    model = Chunker()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.updates)
    curve = []
    batches = buf.batches(BATCH, options.updates, to="torch", window=window, columns=COLUMNS)
    with batches:
        for update, batch in enumerate(batches, 1):
            loss = model.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if update % (options.updates // (1 if options.tiny else 5)) == 0:
                episodes = 10 if options.tiny else 100 if update == options.updates else 50
                curve.append((update, evaluate(model, episodes)))
                print(f"  {update:5d} updates: success {curve[-1][1]:.0f} %", flush=True)
    return curve


class Chunks(BasePolicy):
    """Plays the first actions of a chunk, then asks for the next."""

    def __init__(self, model: Chunker) -> None:
        super().__init__()
        self.model = model

    def get_action(self, infos: Any) -> Any:
        now = torch.from_numpy(infos["pixels"][:, 0])
        goal = torch.from_numpy(infos["goal"][:, 0])
        fresh = [env for env, _ in self.new_episodes()]
        if len(fresh) == len(now):
            self.before, self.age = now.clone(), np.zeros(len(now), int)
            self.chunks = np.zeros((len(now), CHUNK, 2), np.float32)
        self.before[fresh] = now[fresh]
        self.age[fresh] = 0
        asking = np.flatnonzero(self.age % PLAYED == 0)
        if len(asking):
            with torch.no_grad():
                seen = torch.stack([self.before, now], 1)[asking]
                self.chunks[asking] = self.model(seen, goal[asking]).clamp(-1, 1).numpy()
        actions = self.chunks[np.arange(len(now)), self.age % PLAYED]
        self.before = now.clone()
        self.age += 1
        return actions


def evaluate(model: Chunker, episodes: int) -> float:
    with world() as envs:
        envs.set_policy(Chunks(model))
        found = envs.evaluate(episodes=episodes, seed=1_000_000, progress=False)
    return float(found["success_rate"])


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), "o-", markersize=3, label=name)
    axes.set(xlabel="updates", ylabel="success (%)", ylim=(0, 103), title="TwoRoom, 16 actions from 2 pictures")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
