"""A decision transformer: asked for a return, it acts as those who got such a return did.

    players ── World.collect ──► buffer ── batches(window=...) ──► returns-to-go, states, actions at t-5 ... t
                                                                          │
                                       (return, state, action) x 6 ─► causal transformer ─► actions

Half of the stored episodes go to the goal; the other half, by mistake, to its mirror image in the same room, and wait
there.
Nothing says which is which but the rewards: -1 for each step until the goal is reached. A network that clones all
episodes has nothing to choose by; one that is told the return-to-go, and then asked for a good one, goes to the goal.

    python examples/decision_transformer_tworoom.py [--plot curve.png] [--tiny]

Source: Chen et al., "Decision Transformer: Reinforcement Learning via Sequence Modeling", NeurIPS 2021.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ringmap import World
from ringmap.data import ReplayBuffer, ReturnToGo, Window
from ringmap.policy import BasePolicy

NUM_ENVS, EPISODE_STEPS, CONTEXT, BATCH, SCALE = 20, 40, 6, 64, 20.0
ASKED = (-40, -32, -26, -20, -15)
PAST = range(1 - CONTEXT, 1)
WINDOW = {
    "state": Window(PAST, pad="zero"),
    "goal_state": Window(PAST, pad="zero"),
    "action": Window(PAST, pad="zero"),
    "return": ReturnToGo(offsets=PAST),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=600, help="how many are stored")
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw returns asked for and received into this file")
    parser.add_argument("--tiny", action="store_true", help="seconds in all; it learns nothing")
    options = parser.parse_args()
    if options.tiny:
        options.episodes, options.updates = 20, 10
    torch.set_num_threads(1)
    buf = ReplayBuffer(max_steps=60_000, key_filter=hurry, seed=options.seed)
    with world() as envs:
        envs.set_policy(Players(options.seed))
        envs.collect(writer=buf, episodes=options.episodes, seed=options.seed, progress=False)
    view = buf.view(window={"return": ReturnToGo()}, columns=["return", "step_idx"])
    every = view[list(range(len(view)))]
    returns = every["return"][every["step_idx"] == 0]
    told, cloned = (train(buf, knows, options) for knows in (True, False))
    episodes = NUM_ENVS if options.tiny else 100
    results = [evaluate(told, goal, episodes) for goal in ASKED]
    plain = evaluate(cloned, 0.0, episodes)
    for goal, (received, success) in zip(ASKED, results, strict=True):
        print(f"asked for {goal}: received {received:6.1f}, success {success:.0f} %")
    print(f"not asked, cloned: received {plain[0]:6.1f}, success {plain[1]:.0f} %")
    if options.plot:
        draw(results, plain, returns, options.plot)
    best = results[-1][1]
    print(f"success with returns {best:.0f} %, without them {plain[1]:.0f} %")
    if not options.tiny and (best < 80 or best < plain[1] + 25):
        raise SystemExit("it did not learn")


def world() -> World:
    return World("ringmap/TwoRoom-v1", NUM_ENVS, max_episode_steps=EPISODE_STEPS, add_pixels=False, size=8)


def hurry(episode: dict[str, Any]) -> dict[str, Any]:
    """Put a reward of -1 for each step in the place of distances."""
    return {**episode, "reward": -np.ones(len(episode["reward"]), np.float32)}


class Players(BasePolicy):
    """Every second episode, on average, goes to the goal, the others to its mirror image; all with noise."""

    def set_env(self, envs: Any) -> None:
        super().set_env(envs)
        self.rngs = [np.random.default_rng(0)] * envs.num_envs
        self.mistaken = np.zeros(envs.num_envs, bool)

    def get_action(self, infos: Any) -> Any:
        for env, seeds in self.new_episodes():
            self.rngs[env] = np.random.default_rng(seeds)
            self.mistaken[env] = self.rngs[env].random() < 0.5
        state, target = infos["state"][:, 0], infos["goal_state"][:, 0].copy()
        target[self.mistaken, 1] = 1 - target[self.mistaken, 1]
        noise = np.stack([rng.normal(0, 0.3, 2) for rng in self.rngs])
        return (towards(state, target) + noise).clip(-1, 1).astype(np.float32)


def towards(state: Any, target: Any) -> Any:
    """Return actions to targets, `(N, 2)`: to the door, through it, and straight on."""
    side = np.where(state[:, 0] > 0.5, 1.0, -1.0)
    other_room = side != np.where(target[:, 0] > 0.5, 1.0, -1.0)
    at_door = np.abs(state[:, 1] - 0.5) < 0.05
    x = np.where(at_door, 0.5 - side * 0.08, 0.5 + side * 0.08)
    stop = np.where(other_room[:, None], np.stack([x, np.full_like(x, 0.5)], 1), target)
    in_doorway = ~other_room & (np.abs(state[:, 0] - 0.5) < 0.065)
    stop[in_doorway] = np.stack([0.5 + side * 0.1, state[:, 1]], 1)[in_doorway]
    move = (stop - state) / 0.05
    return move / np.maximum(1, np.abs(move).max(1, keepdims=True))


class DecisionTransformer(nn.Module):
    """Returns-to-go, states and goals, and actions of the last steps: the action of each.

    Args:
        knows: whether it is told the returns; False: it clones.
    """

    def __init__(self, knows: bool, size: int = 64) -> None:
        super().__init__()
        self.knows = knows
        self.tokens = nn.ModuleList([nn.Linear(1, size), nn.Linear(4, size), nn.Linear(2, size)])
        self.place = nn.Parameter(torch.randn(CONTEXT, 3, size) * 0.02)
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2))
        ahead = torch.ones(3 * CONTEXT, 3 * CONTEXT, dtype=torch.bool).triu(1)
        self.register_buffer("ahead", ahead)

    def forward(self, returns: Any, states: Any, actions: Any, is_pad: Any) -> torch.Tensor:
        """Return actions `(B, T, 2)` for `(B, T)`, `(B, T, 4)`, `(B, T, 2)` and `(B, T)`."""
        told = returns[..., None] / SCALE * self.knows
        parts = [f(x) for f, x in zip(self.tokens, (told, states, actions), strict=True)]
        tokens = (torch.stack(parts, 2) + self.place) * ~is_pad[..., None, None]
        found: torch.Tensor = self.body(tokens.flatten(1, 2), mask=self.ahead)
        return self.head(found.unflatten(1, (CONTEXT, 3))[:, :, 1])  # after return and state


def train(buf: ReplayBuffer, knows: bool, options: argparse.Namespace) -> DecisionTransformer:
    torch.manual_seed(options.seed)
    model = DecisionTransformer(knows)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.updates)
    with buf.batches(BATCH, options.updates, to="torch", window=WINDOW, columns=tuple(WINDOW)) as batches:
        for update, batch in enumerate(batches, 1):
            is_pad = batch["state_is_pad"]
            states = torch.cat([batch["state"], batch["goal_state"]], -1)
            found = model(batch["return"].float(), states, batch["action"], is_pad)
            real = ~batch["action_is_pad"]
            wrong = (found - batch["action"]).square().mean(-1)
            loss = (wrong * real).sum() / real.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if update % 500 == 0:
                print(f"{'told' if knows else 'cloned'}, {update} updates: loss {loss:.3f}", flush=True)
    return model.eval()


class Asking(BasePolicy):
    """Asks the model for a return; what was received is taken off."""

    def __init__(self, model: DecisionTransformer, asked: float) -> None:
        super().__init__()
        self.model, self.asked = model, asked

    def get_action(self, infos: Any) -> Any:
        state = np.concatenate([infos["state"][:, 0], infos["goal_state"][:, 0]], 1)
        fresh = [env for env, _ in self.new_episodes()]
        if len(fresh) == len(state):
            self.left = np.zeros(len(state), np.float32)
            self.past = np.zeros((len(state), CONTEXT, 7), np.float32)  # return, state, goal, action
            self.age = np.zeros(len(state), int)
        self.left += 1  # a reward of -1
        self.left[fresh], self.past[fresh], self.age[fresh] = self.asked, 0, 0
        self.past = np.roll(self.past, -1, 1)
        self.past[:, -1] = np.concatenate([self.left[:, None], state, 0 * state[:, :2]], 1)
        self.age += 1
        is_pad = np.arange(CONTEXT) < CONTEXT - self.age[:, None]
        past = torch.from_numpy(self.past)
        with torch.no_grad():
            found = self.model(past[..., 0], past[..., 1:5], past[..., 5:], torch.from_numpy(is_pad))
        self.past[:, -1, 5:] = found[:, -1].clamp(-1, 1).numpy()
        return self.past[:, -1, 5:].copy()


def evaluate(model: DecisionTransformer, asked: float, episodes: int) -> tuple[float, float]:
    """Return the mean return, minus the number of steps, and the success rate in percent."""
    with world() as envs:
        envs.set_policy(Asking(model, asked))
        found = envs.evaluate(episodes=episodes, seed=1_000_000, progress=False)
    return -float(found["episode_lengths"].mean()), float(found["success_rate"])


def draw(results: Any, plain: Any, stored: Any, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
    axes.plot(ASKED, [received for received, _ in results], "o-", markersize=4, label="decision transformer")
    axes.plot(ASKED, ASKED, color="0.8", linewidth=1, label="as asked")
    axes.axhline(plain[0], color="tab:orange", label="cloned, not asked")
    axes.axhline(stored.mean(), color="gray", linestyle=":", label="mean of what is stored")
    axes.set(xlabel="return asked for", ylabel="return received", title="TwoRoom, half of the episodes mistaken")
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
