"""PPO on CartPole from a rollout buffer.

python examples/ppo_cartpole.py            # learns to 500, about 2 minutes
python examples/ppo_cartpole.py --tiny     # the same in seconds; it learns nothing
"""

import argparse
import csv
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from ringmap import RolloutBuffer

ENVS, STEPS, EPOCHS, MINIBATCHES, CLIP = 8, 128, 4, 4, 0.2


class Lanes:
    """CartPoles side by side; a step tells the last observation of an episode, then resets."""

    def __init__(self, count, seed):
        self.envs = [gym.make("CartPole-v1") for _ in range(count)]
        self.now = np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)])

    def step(self, actions):
        after, ended = np.empty_like(self.now), np.zeros((2, len(self.envs)), bool)
        now = np.empty_like(self.now)
        for i, env in enumerate(self.envs):
            after[i], _, ended[0, i], ended[1, i], _ = env.step(int(actions[i]))
            now[i] = env.reset()[0] if ended[:, i].any() else after[i]
        self.now = now
        return after, np.ones(len(now), np.float32), ended[0], ended[1]


def network(outputs, gain):
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def evaluate(actor, seed, episodes=10):
    """Return the mean return of greedy episodes."""
    lanes, returns, alive = Lanes(episodes, seed), np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        with torch.no_grad():
            actions = actor(torch.from_numpy(lanes.now)).argmax(1).numpy()
        _, rewards, dones, truncated = lanes.step(actions)
        returns += rewards * alive
        alive &= ~(dones | truncated)
    return float(returns.mean())


def train(total, seed):
    """Return `(step, return)` pairs."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    actor, critic = network(2, 0.01), network(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5)
    buffer = RolloutBuffer(ENVS, STEPS, (4,), (), action_dtype=torch.int64, seed=seed)
    lanes, log = Lanes(ENVS, seed), []
    iterations = max(2, total // (ENVS * STEPS))
    for iteration in range(1, iterations + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - (iteration - 1) / iterations)
        buffer.clear()
        while not buffer.is_full:
            obs = torch.from_numpy(lanes.now)
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=actor(obs))
                actions, values = policy.sample(), critic(obs)
                after, rewards, dones, truncated = lanes.step(actions.numpy())
                final = critic(torch.from_numpy(after))
            buffer.add(
                obs,
                None,
                actions,
                rewards,
                dones | truncated,
                values,
                policy.log_prob(actions),
                timeouts=truncated,
                final_values=final,
            )
        with torch.no_grad():
            last = critic(torch.from_numpy(lanes.now))
        buffer.compute_returns_and_advantages(last, gamma=0.99, gae_lambda=0.95)
        for batch in buffer.minibatches(MINIBATCHES, EPOCHS, normalize_advantages=True):
            policy = torch.distributions.Categorical(logits=actor(batch["observations"]))
            ratio = (policy.log_prob(batch["actions"]) - batch["old_log_probs"]).exp()
            gain = batch["advantages"]
            surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            error = nn.functional.mse_loss(critic(batch["observations"])[:, 0], batch["returns"])
            loss = -surrogate + 0.5 * error - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        if iteration % 5 == 0 or iteration == iterations:
            log.append((iteration * ENVS * STEPS, evaluate(actor, seed=10_000)))
            print(f"step {log[-1][0]}: return {log[-1][1]:.0f}", flush=True)
    final = evaluate(actor, seed=20_000, episodes=20)
    print(f"20 new episodes: return {final:.1f}")
    return log, final


def plot(log, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), dpi=100, layout="constrained")
    axes.plot(*zip(*log, strict=True))
    axes.set(xlabel="environment steps", ylabel="return of 10 greedy episodes", title="PPO, CartPole-v1")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/ppo_cartpole"))
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    log, final = train(2 * ENVS * STEPS if asked.tiny else asked.steps, asked.seed)
    asked.out.mkdir(parents=True, exist_ok=True)
    with open(asked.out / "returns.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "return"), *log])
    plot(log, asked.out / "ppo-cartpole.png")
    assert asked.tiny or final >= 475, "it did not learn"


if __name__ == "__main__":
    main()
