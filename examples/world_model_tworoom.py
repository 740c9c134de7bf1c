"""A small world model of TwoRoom, trained on a buffer that another process is filling.

    collector ────────────── World.collect ──► DIR/replay ── live view ────► DataLoader, 2 workers
                                                                                   │
    picture ─► encoder ─► z ─► dynamics(z, action) ─► z' ─► ... ─► z(H)            ▼
                          └─► where the point is, at each step             this script: loss

The model sees one picture, and then only actions. What counts is how far off it is after eight of them, on
episodes that it was never shown, against saying that the point stays where it is.

    python examples/world_model_tworoom.py [--plot curve.png] [--dir DIR] [--tiny]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ringmap import World
from ringmap.data import ReplayBuffer, Window
from ringmap.policy import ExpertPolicy

SHAPE, STEPS, NUM_ENVS = (32, 32), 8, 8
HISTORY = STEPS + 1
EPISODE_STEPS, MAX_STEPS = 40, 20_000

Batch = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    parser.add_argument("--tiny", action="store_true", help="a few passes, to see that it learns")
    options = parser.parse_args()
    if options.tiny:
        options.episodes, options.passes = 60, 5
    with tempfile.TemporaryDirectory(prefix="ringmap-") as folder:
        train(options.dir or Path(folder), options)


def world() -> World:
    return World("ringmap/TwoRoom-v1", NUM_ENVS, SHAPE, max_episode_steps=EPISODE_STEPS)


def collect(path: Path, episodes: int) -> None:
    """Fill the buffer: half by the expert, half at random. Killed and started again, it goes on."""
    with world() as envs, ReplayBuffer(MAX_STEPS, HISTORY, path=path) as buf:
        envs.set_policy(ExpertPolicy(noise=1.0, seed=0))
        envs.collect(writer=buf, episodes=episodes, seed=0, resume=True, progress=False)
    buf.close()


def held_out(episodes: int) -> Batch:
    """Return clips of episodes that the collector never plays."""
    buf = ReplayBuffer(MAX_STEPS, HISTORY, seed=0)
    with world() as envs:
        envs.set_policy(ExpertPolicy(noise=1.0, seed=1))
        envs.collect(writer=buf, episodes=episodes, seed=1_000_000, progress=False)
    return {name: torch.from_numpy(values) for name, values in tensors(buf.sample(512)).items()}


def tensors(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("pixels", "action", "state")}


class WorldModel(nn.Module):
    """One picture, then actions: where is the point?"""

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
        self.dynamics = nn.Sequential(nn.Linear(size + 2, 128), nn.ReLU(), nn.Linear(128, size))
        self.place = nn.Linear(size, 2)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return latents of pictures `(B, H, W, 3)`."""
        z: torch.Tensor = self.encoder(pixels.permute(0, 3, 1, 2).float() / 255 - 0.5)
        return z

    def roll(self, z: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Return the latents after each of `actions` (B, T, 2): `(B, T, size)`."""
        found = []
        for t in range(actions.shape[1]):
            z = z + self.dynamics(torch.cat([z, actions[:, t]], 1))
            found.append(z)
        return torch.stack(found, 1)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return how wrong places are, and how far predicted latents are from those of the pictures."""
        first, actions = self.encode(batch["pixels"][:, 0]), batch["action"][:, :-1].float()
        ahead = self.roll(first, actions)
        with torch.no_grad():
            seen = self.encode(batch["pixels"][:, 1:].flatten(0, 1)).unflatten(0, ahead.shape[:2])
        places = self.place(torch.cat([first[:, None], ahead], 1))
        wrong = nn.functional.mse_loss(places, batch["state"].float())
        return wrong * 10 + 0.01 * nn.functional.mse_loss(ahead, seen)

    @torch.no_grad()
    def error(self, batch: Batch) -> float:
        """Return how far off the place after all the actions is, in widths of the rooms."""
        ahead = self.roll(self.encode(batch["pixels"][:, 0]), batch["action"][:, :-1].float())
        return float((self.place(ahead[:, -1]) - batch["state"][:, -1]).norm(dim=1).mean())


def train(folder: Path, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    test = held_out(8 if options.tiny else 40)
    stays = float((test["state"][:, -1] - test["state"][:, 0]).norm(dim=1).mean())
    print(f"the point stays where it is: off by {stays:.3f}")
    arguments = folder / "replay", options.episodes
    collector = multiprocessing.Process(target=collect, args=arguments)
    collector.start()
    try:
        reader = wait_for(folder / "replay", collector)
        model = WorldModel()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        window = {name: Window(range(HISTORY)) for name in ("pixels", "action", "state")}
        view = reader.view(window=window, columns=list(window), live=True)
        sampler = view.pass_sampler(seed=0)
        loader = DataLoader(
            view,
            batch_size=64,
            sampler=sampler,
            num_workers=2,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        curve, updates, redraws = [], 0, 0
        for number in range(options.passes):
            busy = collector.is_alive()
            for batch in loader:  # the view moves to what is stored by now
                loss = model.loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                redraws += int(batch.redrawn.sum())
            episodes = len(view.lengths)
            curve.append((updates, model.error(test), episodes))
            print(
                f"pass {number:2d} over {episodes:4d} episodes{' (more come in)' if busy else '':15s} "
                f"{updates:6d} updates: off by {curve[-1][1]:.3f}",
                flush=True,
            )
        reader.close()
    finally:
        collector.terminate()
        collector.join()
    print(f"clips drawn anew because they were evicted meanwhile: {redraws}")
    if options.plot:
        draw(curve, stays, options.plot)
    bar = 0.95 if options.tiny else 0.35
    if curve[-1][1] > bar * stays:
        raise SystemExit(f"the model did not learn: {curve[-1][1]:.3f} against {stays:.3f}")


def wait_for(path: Path, collector: multiprocessing.Process) -> ReplayBuffer:
    """Return a live reader once there is something to read."""
    while collector.exitcode in (None, 0):
        if (path / "manifest.json").exists():
            reader = ReplayBuffer.open(path)
            if len(reader) >= 500 or not collector.is_alive():
                return reader
            reader.close()
        time.sleep(0.1)
    raise SystemExit("the collector died")


def draw(curve: list[tuple[int, float, int]], stays: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    updates, errors, episodes = np.array(curve).T
    figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
    axes.plot(updates, errors, "o-", markersize=3, label=f"model, {STEPS} actions ahead")
    axes.axhline(stays, color="gray", linestyle=":", label="stays where it is")
    axes.set(xlabel="updates", ylabel="off by (widths)", ylim=(0, stays * 1.15))
    other = axes.twinx()
    other.plot(updates, episodes, color="tab:orange", linewidth=1)
    other.set_ylabel("episodes in the buffer", color="tab:orange")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
