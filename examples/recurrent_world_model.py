"""A recurrent world model that must remember, trained on sequences that begin with the state stored in the buffer.

    play, 8 lanes ─► rows (observation, action, reward, latent) ─► buffer ─► Sequences(5) ─► GRU from the first latent
                                                                    ▲                            │
                                                                    └─ update(step_id, latent) ◄─┘ newer latents

A cue, left or right, is shown for one step. 6 to 11 steps later the agent is asked for it now and then: the reward is 1
for the right action, -1 for the other. No sequence of 5 steps holds both, so only the state that it begins with can
tell. The latent of a row is the state before its observation. Four ways to begin, all else alike:
- zero state;
- stored: the latent that the network of its time had as it played;
- stored, burn-in: the same, and two steps more before the five, which only bring the state up to date (R2D2);
- written back: as stored, and the newer latents of each batch go into their rows (DreamerV3).

Two tasks: episodes of 12 steps, and one that never ends, stored in parts. At last a run without an end is killed with
-9 and resumed.

    python examples/recurrent_world_model.py [--seeds 3] [--dir DIR] [--tiny]    # about 5 minutes
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ringmap import Column, ReplayBuffer
from ringmap.data import Sequences

LANES, BATCH, LENGTH, SIZE, EXPLORE = 8, 64, 5, 32, 0.1
QUIET, PERIOD = 6, 12
MAX_STEPS, PART, START = 5_000, 64, 1_000
TASKS = ("episodes", "endless")
BURN_IN = {"zero state": 0, "stored": 0, "stored, burn-in": 2, "written back": 0}
SCHEMA = {
    "observation": (
        (2,),
        "float32",
    ),  # the cue, -1 or 1 when it is shown; whether the agent is asked
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "lane": ((), "int64"),
    "number": ((), "int64"),  # of the step in its lane, to see that none is lost or stored twice
    "latent": Column((SIZE,), "float32", mutable=True),
}


class Recall:
    """A lane of the task: the cue is new every 12 steps."""

    def __init__(self, seed: Any) -> None:
        self.rng, self.t = np.random.default_rng(seed), 0

    def look(self) -> np.ndarray:
        shown = 0
        if self.t == 0:
            self.cue = int(self.rng.integers(2))
            shown = 2 * self.cue - 1
        self.asked = self.t >= QUIET and self.rng.random() < 0.5
        return np.array([shown, self.asked], np.float32)

    def step(self, action: int) -> tuple[float, bool]:
        """Return the reward, and whether the next step shows a cue."""
        self.t = (self.t + 1) % PERIOD
        return (1.0 if action == self.cue else -1.0) * self.asked, self.t == 0


class WorldModel(nn.Module):
    """From a state and an observation: the reward of each action; with the action, too: the next state and
    observation."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(4, SIZE, batch_first=True)
        self.reward = nn.Sequential(nn.Linear(SIZE + 2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.following = nn.Linear(SIZE, 2)
        with torch.no_grad():  # units that forget slowly; Tallec & Ollivier, ICLR 2018
            self.memory.bias_ih_l0[SIZE : 2 * SIZE] = torch.log(1 + PERIOD * torch.rand(SIZE))
            self.memory.bias_hh_l0.zero_()

    def forward(self, state, observations, actions):
        """Return rewards (B, T, 2), and the states after each step (B, T, SIZE)."""
        taken = nn.functional.one_hot(actions, 2).float()
        after, _ = self.memory(torch.cat([observations, taken], -1), state[None].contiguous())
        before = torch.cat([state[:, None], after[:, :-1]], 1)
        return self.reward(torch.cat([before, observations], -1)), after

    def loss(self, state, batch):
        """Return how wrong rewards are where the agent was asked, the loss, and the states after each step."""
        observations, actions = batch["observation"], batch["action"]
        rewards, after = self(state, observations, actions)
        wrong = (rewards.gather(2, actions[..., None])[..., 0] - batch["reward"]).square()
        asked = observations[..., 1]
        error = (wrong * asked).sum() / asked.sum().clamp(min=1)
        ahead = nn.functional.mse_loss(self.following(after[:, :-1]), observations[:, 1:])
        return error, error + 0.1 * ahead, after.detach()


class Player:
    """Plays all lanes with a model, and stores each step with the state before it."""

    def __init__(self, buf: ReplayBuffer, endless: bool, seed: int, played: Path) -> None:
        self.buf, self.every, self.rng = buf, PART if endless else None, np.random.default_rng(seed)
        self.numbers = count(buf)
        self.lanes = [Recall((seed, lane, self.numbers[lane])) for lane in range(LANES)]
        self.seen = np.stack([lane.look() for lane in self.lanes])
        self.open = [buf.begin_episode(commit_every=self.every, lane=i) for i in range(LANES)]
        self.state = torch.zeros(LANES, SIZE)
        self.played = played.open("ab", buffering=0)  # a byte for each append that returned
        self.right: list[bool] = []

    @torch.no_grad()
    def step(self, model: WorldModel) -> None:
        observations = torch.from_numpy(self.seen)
        actions = model.reward(torch.cat([self.state, observations], 1)).argmax(1)
        explored = self.rng.random(LANES) < EXPLORE
        actions[explored] = torch.from_numpy(self.rng.integers(0, 2, explored.sum()))
        after = model(self.state, observations[:, None], actions[:, None])[1][:, 0]
        for i, lane in enumerate(self.lanes):
            asked = lane.asked
            reward, shows = lane.step(int(actions[i]))
            if asked and not explored[i]:
                self.right.append(reward > 0)
            row = {"observation": self.seen[i], "action": actions[i], "reward": reward, "lane": i}
            self.open[i].append({**row, "number": self.numbers[i], "latent": self.state[i]})
            self.played.write(bytes([i]))
            self.numbers[i] += 1
            if shows and self.every is None:
                self.open[i].finish(terminated=True)
                self.open[i] = self.buf.begin_episode()
                after[i] = 0
            self.seen[i] = lane.look()
        self.state = after


def count(buf: ReplayBuffer) -> list[int]:
    """Return the number of the next step of each lane; those that are stored must follow each other."""
    found: dict[int, list[int]] = {lane: [] for lane in range(LANES)}
    for i in range(buf.num_episodes):
        episode = buf.load_episode(i)
        found[int(episode["lane"][0])].extend(episode["number"].tolist())
    for lane, numbers in found.items():
        first = numbers[0] if numbers else 0
        assert numbers == list(range(first, first + len(numbers))), f"a step of lane {lane} is lost, or there twice"
    return [numbers[-1] + 1 if numbers else 0 for numbers in found.values()]


def train(folder: Path, task: str, start: str, seed: int, updates: int) -> list[list[float]]:
    """Train, or go on with what is in `folder`; return rows (updates, error of rewards, share of right answers)."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    model = WorldModel()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    buf = ReplayBuffer(
        MAX_STEPS,
        path=folder / "buffer",
        schema=SCHEMA,
        reward_at="same",
        spare_rows=1_000,
        interrupted="keep",
        seed=seed,
    )
    done, curve, errors, checkpoint = 0, [], [], folder / "checkpoint.pt"
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        done, curve = kept["done"], kept["curve"]
    player = Player(buf, task == "endless", seed, folder / "played")
    burn_in = BURN_IN[start]
    window = Sequences(burn_in + LENGTH, burn_in=burn_in)
    while done < updates:
        player.step(model)
        player.step(model)
        if buf.num_steps_stored < START:
            continue
        batch = buf.sample(BATCH, window=window)
        steps = {name: torch.from_numpy(values) for name, values in batch.items()}
        state = steps["latent"][:, 0] * (start != "zero state")
        if burn_in:
            with torch.no_grad():
                warm = steps["observation"][:, :burn_in], steps["action"][:, :burn_in]
                state = model(state, *warm)[1][:, -1]
        error, loss, after = model.loss(state, {name: v[:, burn_in:] for name, v in steps.items()})
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if start == "written back":  # the state after a step is the latent of the next one
            buf.update(batch["step_id"][:, 1:], {"latent": after[:, :-1]})
        done += 1
        errors.append(error.item())
        if done % (updates // 5) == 0:
            curve.append([done, float(np.mean(errors)), float(np.mean(player.right))])
            errors, player.right = [], []
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**kept, "done": done, "curve": curve}, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    player.played.close()
    buf.close()
    return curve


def kill_half_way(folder: Path, updates: int) -> None:
    """Start a run without an end in a process of its own, kill it, and look at what it left."""
    arguments = folder, "endless", "written back", 0, updates
    child = multiprocessing.Process(target=train, args=arguments)
    child.start()
    while child.is_alive():
        time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError):
            if torch.load(folder / "checkpoint.pt", weights_only=False)["done"] >= updates // 2:
                child.kill()
                break
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the run ended before it could be killed"
    done = torch.load(folder / "checkpoint.pt", weights_only=False)["done"]
    print(f"killed; the checkpoint is of update {done}")
    parts = ReplayBuffer.open(folder / "buffer")
    print(f"in parts: the newest steps of the lanes are {[n - 1 for n in count(parts)]}")
    parts.close()


def look(folder: Path) -> None:
    """Compare what is stored with the appends that returned."""
    appended = np.bincount(np.frombuffer((folder / "played").read_bytes(), np.uint8), minlength=LANES)
    with contextlib.closing(ReplayBuffer(MAX_STEPS, path=folder / "buffer", interrupted="keep")) as buf:
        numbers = count(buf)
        print(f"stored: the newest steps of the lanes are {[n - 1 for n in numbers]}")
        print(f"{buf.num_episodes} episodes of {buf.lengths.tolist()} steps, each step once")
    # The kill may come between an append and the note of it.
    missing = appended - numbers
    assert ((missing == 0) | (missing == -1)).all(), f"appended {appended}, stored {numbers}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="seconds in all; it learns nothing")
    options = parser.parse_args()
    if options.tiny:
        options.updates, options.seeds = 10, 1
    with tempfile.TemporaryDirectory(prefix="ringmap-") as temporary:
        folder = options.dir or Path(temporary)
        kill_half_way(folder / "killed", options.updates)
        look(folder / "killed")
        resumed = train(folder / "killed", "endless", "written back", 0, options.updates)
        look(folder / "killed")
        print("resumed:    error " + " ".join(f"{error:5.2f}" for _, error, _ in resumed))
        print("            right " + " ".join(f"{right:5.2f}" for _, _, right in resumed))
        last = {}
        for task in TASKS:
            for start in BURN_IN:
                curves = np.array(
                    [
                        train(folder / f"{task}, {start}, {seed}", task, start, seed, options.updates)
                        for seed in range(options.seeds)
                    ]
                )
                middle = np.median(curves, 0)
                last[task, start] = middle[-1, 1]
                print(f"{task}, {start}:")
                print("            error " + " ".join(f"{error:5.2f}" for error in middle[:, 1]))
                print("            right " + " ".join(f"{right:5.2f}" for right in middle[:, 2]))
                print(f"            of each seed at the end {curves[:, -1, 2].round(2)}", flush=True)
    remember = [("episodes", "stored, burn-in"), *((task, "written back") for task in TASKS)]
    good = max(last[run] for run in remember) < 0.4
    good &= min(last[task, "zero state"] for task in TASKS) > 0.9
    if not good and not options.tiny:
        raise SystemExit("it did not learn as it should")


if __name__ == "__main__":
    main()
