"""Ape-X on CartPole: four collectors with epsilons of their own, one prioritised learner, all killed with -9 half-way
and resumed.

    collector 0, epsilon 0.4    ─► replay/collector-0 ─┐                    ┌─► priorities   learner/
    collector 1, epsilon 0.05   ─► replay/collector-1 ─┼─► prioritised draw ┴─► double DQN, 3 steps
    ...                                                │                             │
         ▲                         pace: drawn per step┘                             │ every 100 updates
         └────────────────────────── policy/ ◄───────────────────────────────────────┘

    python examples/apex_cartpole.py            # a few minutes
    python examples/apex_cartpole.py --tiny     # the same in seconds; it learns nothing
    python examples/apex_cartpole.py --ray      # collectors and learner in a Ray cluster, here one of this machine
    (extra ray)

No server runs (without --ray). What a killed run needs again is in the rings, in `learner/`, in the counts of the pace,
and in a checkpoint of model and optimizer.
"""

import argparse
import copy
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import ringmap
from ringmap.data import NStep, ShardedReplayBuffer
from ringmap.samplers import Linear, PrioritizedSampler

BATCH, PUBLISH, EVALUATE = 128, 100, 500
EPISODES, SEED = 1_000_000, 0
"""More than are ever played: the collectors end with the learner."""


class Actor(nn.Module):
    """Plays what its network values most, and with probability epsilon anything."""

    def __init__(self, epsilon=0.0, seed=None):
        super().__init__()
        self.epsilon, self.rng = epsilon, np.random.default_rng(seed)
        self.net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def get_action(self, infos):
        with torch.no_grad():
            best = self.net(torch.as_tensor(infos["observation"][:, 0])).argmax(1).numpy()
        explores = self.rng.random(len(best)) < self.epsilon
        return np.where(explores, self.rng.integers(0, 2, len(best)), best)


def make_world(number):
    """Return the world of a collector. Epsilons as in the paper: 0.4 ** (1 + 7 i / 3)."""
    world = ringmap.World("CartPole-v1", num_envs=1, add_pixels=False, max_episode_steps=None)
    world.set_policy(Actor(0.4 ** (1 + 7 * number / 3), seed=number))
    return world


def pace_of(folder, tiny):
    """Let each step be drawn about 160 times: five updates for four steps."""
    start = 200 if tiny else 1_000
    return ringmap.Pace(folder / "replay", samples_per_insert=160, min_steps=start, slack=2.0)


def collect(asked):
    folder, common = asked.out, {"max_steps": 15_000, "progress": False, "threads": 1}
    common["weights"] = ringmap.Weights(folder / "policy")
    if asked.ray:
        in_ray().collect(
            make_world, folder / "replay", EPISODES, asked.collect, SEED, actor={"num_cpus": 0.1}, **common
        )
    else:
        ringmap.collect(
            make_world, folder / "replay", EPISODES, asked.collect, SEED, pace=pace_of(folder, asked.tiny), **common
        )


def in_ray():
    """Enter the cluster that runs, which `main` started or `RAY_ADDRESS` names."""
    import ray

    import ringmap.ray as rr

    ray.init("auto", log_to_driver=False)
    return rr


def evaluate(actor, seed, episodes):
    """Return the mean return of greedy episodes."""
    env, total = gym.make("CartPole-v1"), 0.0
    for number in range(episodes):
        observation, over = env.reset(seed=seed + number)[0], False
        while not over:
            action = actor.get_action({"observation": observation[None, None]})[0]
            observation, reward, terminated, truncated, _ = env.step(int(action))
            total, over = total + reward, terminated or truncated
    env.close()
    return total / episodes


class OneMachine:
    """The rings of this machine, drawn from at a pace."""

    def __init__(self, asked, sampler, done):
        self.pace = pace_of(asked.out, asked.tiny)
        self.buf = ShardedReplayBuffer(
            asked.out / "replay", sampler=sampler, state=asked.out / "learner", wait_s=120, seed=SEED + done
        )

    def sample(self, done, **wanted):
        return self.buf.sample(BATCH, step=done, pace=self.pace, **wanted)

    @property
    def shards(self):
        return self.buf.shards

    @property
    def inserted(self):
        return self.pace.inserted

    def close(self):
        self.buf.close()
        self.pace.close()


class Cluster:
    """The rings of all nodes; the collectors play as fast as they can."""

    def __init__(self, asked, sampler, done):
        self.buf = in_ray().ReplayBuffer(asked.out / "replay", sampler=sampler, state=asked.out / "learner", wait_s=120)
        while len(self.buf) < (200 if asked.tiny else 1_000):
            time.sleep(0.1)
        self.close = self.buf.close

    def sample(self, done, **wanted):
        return self.buf.sample(BATCH, **wanted)

    @property
    def shards(self):
        return [shard for node in self.buf.nodes for shard in node.shards]

    @property
    def inserted(self):
        return sum(shard.written for shard in self.shards)


def learn(asked):
    """Learn for so many updates, or go on with what is in `folder`."""
    folder, updates = asked.out, asked.updates
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    actor = Actor()
    net, target = actor.net, copy.deepcopy(actor.net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
    done, log, best, checkpoint = 0, [], -1.0, folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=False)
        net.load_state_dict(state["net"])
        target.load_state_dict(state["target"])
        optimizer.load_state_dict(state["optimizer"])
        done, log, best = state["done"], state["log"], state["best"]
    weights = ringmap.Weights(folder / "policy")
    weights.publish(actor, done)
    sampler = PrioritizedSampler(0.5, Linear(0.4, 1.0, updates), rng=SEED + done)
    replay = (Cluster if asked.ray else OneMachine)(asked, sampler, done)
    window = {"sum": NStep(3, gamma=0.99, next=["observation"])}
    print(f"update {done}: {len(replay.shards)} rings, {replay.inserted:,} steps came in", flush=True)
    while done < updates:
        batch = replay.sample(done, window=window, anchors=slice(0, -1))
        now, after = (torch.from_numpy(batch[n]) for n in ("observation", "next_observation"))
        actions = torch.from_numpy(batch["action"])
        rewards, discounts = (torch.from_numpy(batch[n]).float() for n in ("sum", "sum_discount"))
        with torch.no_grad():
            value = target(after).gather(1, net(after).argmax(1, keepdim=True))[:, 0]
            goal = rewards + discounts * value
        guess = net(now).gather(1, actions[:, None])[:, 0]
        losses = nn.functional.huber_loss(guess, goal, reduction="none")
        optimizer.zero_grad()
        (torch.from_numpy(batch.weights) * losses).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10)
        optimizer.step()
        replay.buf.update_priorities(batch.ids, (guess - goal).detach().abs())
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        done += 1
        if done % min(PUBLISH, updates // 4) == 0:
            weights.publish(actor, done)
        if done % min(EVALUATE, updates // 4) == 0:
            score = evaluate(actor, 10_000, 10)
            stale = [done - shard.policy_step for shard in replay.shards if shard.policy_step is not None]
            log.append((done, replay.inserted, score, max(stale, default=0)))
            print("update {}, step {}: return {:.0f}; weights up to {} updates old".format(*log[-1]), flush=True)
            if score >= best:
                best = score
                torch.save(actor.state_dict(), folder / "best.pt")
            state = {
                "net": net.state_dict(),
                "target": target.state_dict(),
                "optimizer": optimizer.state_dict(),
                "done": done,
                "log": log,
                "best": best,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    replay.close()
    with open(folder / "returns.csv", "w", newline="") as file:
        csv.writer(file).writerows([("update", "step", "return", "stale"), *log])
    actor.load_state_dict(torch.load(folder / "best.pt"))
    print(f"best network, 20 new episodes: return {evaluate(actor, 20_000, 20):.1f}", flush=True)


class Run:
    """A supervisor with its collectors, and a learner: processes of their own."""

    def __init__(self, asked, collectors):
        command = [sys.executable, __file__, "--out", asked.out, "--updates", asked.updates]
        command += ["--tiny"] * asked.tiny + ["--ray"] * asked.ray
        roles = (["--collect", collectors], ["--learn"])
        self.actors, self.learner = (subprocess.Popen([str(word) for word in (*command, *role)]) for role in roles)

    def kill(self):
        for process in (self.actors, self.learner):
            process.kill()
        assert self.learner.wait() == -signal.SIGKILL, "it ended before it could be killed"
        assert self.actors.wait() == -signal.SIGKILL, "the collectors ended by themselves"

    def wait(self):
        try:
            assert self.learner.wait() == 0, "the learner failed"
            assert self.actors.poll() is None, "the collectors failed"
        finally:
            self.actors.send_signal(signal.SIGINT)
            self.actors.wait()


def kill_half_way(run, asked):
    while run.learner.poll() is None and run.actors.poll() is None:
        time.sleep(0.05)
        try:
            state = torch.load(asked.out / "checkpoint.pt", weights_only=False)
        except FileNotFoundError:
            continue
        if state["done"] >= asked.updates // 2:
            break
    run.kill()


def check(asked):
    """Each seed was played once, whoever was killed; each episode names the weights that played it."""
    buf = ShardedReplayBuffer(str(asked.out / "replay/*/*" if asked.ray else asked.out / "replay"), wait_s=0)
    data = buf.get_episode_data()
    assert len(set(data["seed"])) == len(data["seed"]), "a seed was played twice"
    assert None not in data["policy_step"], "an episode does not name its weights"
    assert buf.check() == []
    for shard in buf.shards:
        print(f"{shard.name}: {shard.written:,} steps in all, played last by the weights of update {shard.policy_step}")
    buf.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/apex_cartpole"))
    parser.add_argument("--updates", type=int, default=8_000)
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ray", action="store_true", help="in a Ray cluster, which is started here")
    parser.add_argument("--collect", type=int, help="be the supervisor of so many collectors")
    parser.add_argument("--learn", action="store_true", help="be the learner")
    asked = parser.parse_args()
    if asked.collect:
        try:
            collect(asked)
        except KeyboardInterrupt:
            return
    if asked.learn:
        learn(asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.tiny:
        asked.updates = 40
    if asked.ray:
        import ray

        ray.init(log_to_driver=False, include_dashboard=False, object_store_memory=300_000_000)
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    kill_half_way(Run(asked, 1 if asked.tiny else 4), asked)
    print("killed with -9: the learner, the supervisor, and with it the collectors", flush=True)
    Run(asked, 2 if asked.tiny else 4).wait()
    check(asked)
    with open(asked.out / "returns.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if asked.plot:
        plot(rows, asked.plot)
    best = max(float(row["return"]) for row in rows)
    assert asked.tiny or best >= 475, "it did not learn"


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), dpi=100, layout="constrained")
    axes.plot([int(row["step"]) for row in rows], [float(row["return"]) for row in rows])
    axes.axvline(int(rows[len(rows) // 2 - 1]["step"]), color="gray", linestyle=":")
    axes.set(xlabel="environment steps of all collectors", ylabel="return of 10 greedy episodes")
    figure.savefig(path)


if __name__ == "__main__":
    main()
