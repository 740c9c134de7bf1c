"""The main job: collect from pixels, be killed, go on, train meanwhile, dump, reload, compare.

    collector (--collect) ── World.collect ──►  DIR/replay  ── live reader ──►  DataLoader, 2 workers
         ▲    started, killed and started again                                        │
         └───────────────────────────── this script ◄── loss ──────────────────────────┘

The collector is a command of its own: `main_job.py --collect --dir DIR --episodes N`. Kill it
as you like and start it again; it goes on where it was.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from PIL import Image
from tqdm import tqdm

import ringmap
from ringmap import World
from ringmap.data import EPISODE_DATA_KEY, ReplayBuffer, load_dataset
from ringmap.policy import BasePolicy

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a screen
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

MAX_EPISODE_STEPS = 200
MAX_EPISODES = 500
# Room for all, so that all can be compared in the end; `resume=True` does not need it.
MAX_STEPS = MAX_EPISODES * (MAX_EPISODE_STEPS + 1)
NUM_ENVS, SHAPE = 4, (64, 64)
HISTORY_LEN, FRAMESKIP = 3, 2

Episode = dict[str, Any]


def main() -> int:
    options = parse()
    sys.stdout.reconfigure(line_buffering=True)
    if options.collect:
        collect(options.dir / "replay", options.episodes)
        return 0
    folder = options.dir or Path(tempfile.mkdtemp(prefix="ringmap-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run(folder, options)
    except Off as error:
        print(f"\nNOT AS IT SHOULD BE: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    finally:
        if options.dir is None and not options.keep:
            shutil.rmtree(folder)
    print(f"All is well. {f'See {folder}' if folder.exists() else 'The temporary folder is gone.'}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, help=f"how many, at most {MAX_EPISODES}")
    parser.add_argument("--dir", type=Path, help="where to work; stays, and may be used again")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    parser.add_argument("--tiny", action="store_true", help="a few episodes, to see that it runs")
    parser.add_argument("--collect", action="store_true", help="only collect, into --dir")
    options = parser.parse_args()
    options.episodes = options.episodes or (16 if options.tiny else 200)
    options.kills, options.batches = (1, 50) if options.tiny else (4, 400)
    if not 1 <= options.episodes <= MAX_EPISODES:
        parser.error(f"--episodes must be 1 to {MAX_EPISODES}, got {options.episodes}")
    if options.collect and options.dir is None:
        parser.error("--collect needs --dir")
    return options


class Off(Exception):
    """Something is not as it should be."""


def expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Off(otherwise)


def bar(*items: Any, **options: Any) -> tqdm[Any]:
    return tqdm(*items, mininterval=0.2 if sys.stderr.isatty() else 5, **options)


# -- the environments, and who plays ----------------------------------------------------------


def make_world() -> World:
    return World(
        "CartPole-v1",
        NUM_ENVS,
        SHAPE,
        max_episode_steps=MAX_EPISODE_STEPS,
        pre_wrappers=[WithoutSky],
    )


class WithoutSky(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Shows the part of the picture in which something happens."""

    def render(self) -> np.ndarray:
        frame = self.env.render()
        return frame[len(frame) * 3 // 8 : len(frame) * 7 // 8]


class HalfBlind(BasePolicy):
    """Pushes to where the pole leans, or at random; the episode's seed decides which, and how."""

    def set_env(self, envs: Any) -> None:
        super().set_env(envs)
        self.rngs: dict[int, np.random.Generator] = {}

    def get_action(self, infos: Episode) -> np.ndarray:
        for i in np.flatnonzero(infos["step_idx"] == 0):
            self.rngs[i] = np.random.default_rng(self.env.seeds[i])
        self.say(infos)
        seen = infos["observation"][:, 0]
        return np.array([choose(seen[i], self.rngs[i]) for i in range(self.env.num_envs)])

    def say(self, infos: Episode) -> None:
        """Say where it is, for a parent that listens."""
        playing = ~(infos["terminated"] | infos["truncated"])[:, 0]
        i = int(np.argmax(np.where(playing, infos["step_idx"][:, 0], -1)))
        print("step", self.env.seeds[i], infos["step_idx"][i, 0], flush=True)


def choose(observation: np.ndarray, rng: np.random.Generator) -> int:
    leans_right = observation[2] + observation[3] > 0
    return int(leans_right) if rng.random() < 0.3 else int(rng.integers(2))


def play(seed: int, draw: bool) -> Episode:
    """Return the episode of a seed, from a loop by hand: what the world has to have collected."""
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array" if draw else None)
    env = WithoutSky(env)
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    rows: Episode = {"observation": [observation], "action": [], "reward": [np.nan]}
    rows |= {"terminated": [False], "truncated": [False], "pixels": []}
    for t in range(1, MAX_EPISODE_STEPS + 1):
        rows["pixels"] += [picture(env)] if draw else []
        action = choose(observation, rng)
        observation, reward, terminated, _, _ = env.step(action)
        rows["action"].append(action)
        rows["observation"].append(observation)
        rows["reward"].append(reward)
        rows["terminated"].append(terminated)
        rows["truncated"].append(t == MAX_EPISODE_STEPS)
        if terminated:
            break
    rows["pixels"] += [picture(env)] if draw else []
    rows["action"].append(0)  # nothing was done at the last observation
    rows["step_idx"] = range(t + 1)
    env.close()
    return {name: np.array(values) for name, values in rows.items() if name != "pixels" or draw}


def picture(env: Any) -> np.ndarray:
    return np.asarray(Image.fromarray(env.render()).resize(SHAPE, Image.Resampling.BILINEAR))


# -- the collector: a process of its own ------------------------------------------------------


class Telling(ReplayBuffer):
    """A buffer that says what is written to it, for a parent that listens."""

    def write_episode(self, ep_data: Any, **more: Any) -> None:
        seed, length = ep_data[EPISODE_DATA_KEY]["seed"], len(ep_data["reward"])
        print("write", seed, length, flush=True)
        super().write_episode(ep_data, **more)
        print("stored", seed, length, flush=True)


def collect(folder: Path, episodes: int) -> None:
    """Collect the seeds below `episodes` that are not in yet."""
    with make_world() as world:
        world.set_policy(HalfBlind())
        buf = Telling(MAX_STEPS, HISTORY_LEN, FRAMESKIP, path=folder)
        world.collect(writer=buf, episodes=episodes, seed=0, resume=True, progress=False)
        buf.close()


def seeds_in(buf: ReplayBuffer) -> list[int]:
    return [int(seed) for seed in buf.get_episode_data().get("seed", [])]


class Collector:
    """The collector as its parent sees it: started, listened to, killed, started again.

    Args:
        folder: where to work.
        episodes: how many are to be there in the end.
    """

    def __init__(self, folder: Path, episodes: int) -> None:
        self.command = [sys.executable, os.path.abspath(__file__), "--collect"]
        self.command += ["--dir", str(folder), "--episodes", str(episodes)]
        self.num_starts = 0
        self.stored: list[int] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, bufsize=0)
        os.set_blocking(self.process.stdout.fileno(), False)
        # A small pipe: a collector that nobody listens to waits after some hundred steps.
        fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        self.num_starts += 1
        self.heard = b""
        self.doing, self.seed, self.step = "start", -1, 0

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def listen(self, wait: bool = False) -> None:
        """Take in what it has said since; `wait` until it says anything."""
        if wait:
            select.select([self.process.stdout], [], [])
        while data := self.process.stdout.read(1 << 16):
            *lines, self.heard = (self.heard + data).split(b"\n")
            for line in lines:
                doing, seed, step = line.split()
                self.doing, self.seed, self.step = doing.decode(), int(seed), int(step)
                if self.doing == "stored":
                    self.stored.append(self.seed)
        if data == b"" and not self.ended:  # not None: nothing more will come
            code = self.process.wait()
            expect(code == 0, f"the collector ended with exit code {code}")

    def kill(self) -> None:
        """Kill it with SIGKILL, and take in its last words, which tell where it was."""
        self.process.kill()
        self.process.wait()
        if not self.process.stdout.closed:
            self.listen()
            self.process.stdout.close()


# -- the trainer: this process ----------------------------------------------------------------


class Trainer:
    """A small network that foretells CartPole's state from two pictures and the actions."""

    def __init__(self) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        torch.set_num_threads(1)  # the collector and the workers want a core as well
        self.see = nn.Sequential(
            *(nn.PixelUnshuffle(2), nn.Conv2d(24, 16, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        )
        self.tell = nn.Sequential(nn.Linear(16 * 64 + 2 * FRAMESKIP, 64), nn.ReLU(), nn.Linear(64, 4))
        self.scale = torch.tensor([0.25, 0.6, 0.1, 0.9])  # about how much each value varies
        both = [*self.see.parameters(), *self.tell.parameters()]
        self.optimizer = torch.optim.Adam(both, 2e-3)
        self.losses: list[float] = []

    def train(self, batch: Episode) -> None:
        import torch

        now, then = slice(0, 2), 2  # two pictures and what was done; then the state to foretell
        pixels = 1 - batch["pixels"][:, now].movedim(-1, 2).flatten(1, 2) / 255
        actions = batch["action"][:, now].flatten(1).float()
        target = batch["observation"][:, then] / self.scale
        guess = self.tell(torch.cat([self.see(pixels), actions], 1))
        loss = (guess - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    @property
    def first_and_last(self) -> tuple[float, float]:
        return float(np.mean(self.losses[:5])), float(np.mean(self.losses[-20:]))


def live_batches(buf: ReplayBuffer) -> Iterator[tuple[int, Episode]]:
    """Yield (clips known, batch), pass after pass, each over all that is stored when it begins."""
    from torch.utils.data import DataLoader

    while True:
        buf.refresh()
        # "fork" costs milliseconds for each pass, where "spawn" imports everything anew. It is safe
        # with a buffer that has a path: the workers drop what they inherit and open it themselves.
        loader = DataLoader(buf, batch_size=64, shuffle=True, num_workers=2, multiprocessing_context="fork")
        size = len(buf)
        for batch in loader:
            yield size, batch


def expect_whole(batch: Episode) -> None:
    """Raise unless every clip is consecutive steps of one episode."""
    whole = (batch["id"] == batch["id"][:, :1]).all()
    whole &= (batch["step_idx"].diff(dim=1) == FRAMESKIP).all()
    expect(bool(whole), "a clip is torn: its steps do not belong together")


# -- the job ----------------------------------------------------------------------------------


def run(folder: Path, options: argparse.Namespace) -> None:
    began = time.monotonic()
    path, h5, count = folder / "replay", folder / "replay.h5", options.episodes
    before = seeds_stored(path) if (path / "manifest.json").exists() else []
    begun = episodes_asked(path) if before else count
    expect(
        begun == count,
        f"{path} is of a collection of {begun} episodes: ask for as many, or another --dir",
    )

    print(f"1. Collect {count} episodes of CartPole into {path}, and train on them meanwhile.")
    if before:
        print(f"   {len(before)} are there from an earlier run.")
    trainer, at_work, killed, num_starts = collect_and_train(path, options, before)

    print("2. Look at what is stored.")
    buf = ReplayBuffer.open(path, history_len=HISTORY_LEN, frameskip=FRAMESKIP)
    found = sorted(seeds_in(buf))
    lost, doubled = set(range(count)) - set(found), len(found) - len(set(found))
    expect(not lost and not doubled, f"lost: {sorted(lost)}, doubled: {doubled} in {found}")
    expect(buf.num_episodes == count, f"{buf.num_episodes} episodes instead of {count}")
    findings = ringmap.check(path)
    expect(not findings, f"ringmap.check finds {findings}")
    print(f"   {count} episodes, {buf.num_steps_stored:,} steps; none lost, none doubled, all files sound.")

    print("3. Play every seed again and compare, byte for byte.")
    with_pixels = {*killed, *range(0, count, max(1, count // 4))}
    replay_and_compare(buf, with_pixels)

    print(f"4. Dump to {h5}, load that, and compare, byte for byte.")
    buf.dump(h5, format="hdf5")
    compare_dump(buf, h5)

    first, last = trainer.first_and_last
    expect(last < 0.7 * first, f"the loss did not go down: {first:.3f}, then {last:.3f}")
    rows = {
        "episodes": f"{count} asked, {count} stored, each once ({buf.num_steps_stored:,} steps)",
        "collector": f"started {num_starts} times, killed in mid-episode {len(killed)} times",
        "training": f"{len(trainer.losses)} batches, {at_work} of them while collecting; "
        f"loss {first:.2f} -> {last:.2f}",
        "played again": f"{count} episodes equal, {len(with_pixels)} of them with their pixels",
        "HDF5": f"{count} episodes equal, {h5.stat().st_size / 1e6:.0f} MB",
        "time": f"{time.monotonic() - began:.0f} s",
    }
    print("\nSummary")
    for name, text in rows.items():
        print(f"  {name:13} {text}")
    buf.close()


def seeds_stored(path: Path) -> list[int]:
    """Return the seeds that a fresh reader finds."""
    buf = ReplayBuffer.open(path)
    seeds = seeds_in(buf)
    buf.close()
    return seeds


def episodes_asked(path: Path) -> int:
    """Return how many episodes the collection was begun with."""
    buf = ReplayBuffer.open(path, mode="r+")
    asked = buf.notes.get("collections", {}).get("0", {}).get("episodes", 0)
    buf.close()
    return int(asked)


def collect_and_train(
    path: Path, options: argparse.Namespace, before: list[int]
) -> tuple[Trainer, int, list[int], int]:
    """Do both at once, and kill the collector several times.

    Returns:
        the trainer, how many batches it trained while collecting, the seeds in whose episodes the
        collector was killed, and how often it was started.
    """
    count, missing = options.episodes, options.episodes - len(before)
    kills = min(options.kills, missing // 8) if missing >= 16 else 0
    kill_at = [len(before) + missing * (k + 1) // (kills + 1) for k in range(kills)]
    killed: list[int] = []
    at_work, sizes = 0, set()
    trainer = Trainer()
    collector = Collector(path.parent, count)
    progress = bar(total=count, initial=len(before), desc="   collect and train", unit="ep")
    try:
        while len(before) + len(collector.stored) < min(4, count):  # something to train on
            collector.listen(wait=True)
        buf = ReplayBuffer.open(path, history_len=HISTORY_LEN, frameskip=FRAMESKIP)
        for size, batch in live_batches(buf):
            expect_whole(batch)
            trainer.train(batch)
            if not collector.ended:
                at_work += 1
                sizes.add(size)
            elif len(trainer.losses) >= options.batches:
                break
            collector.listen()
            stored = len(before) + len(collector.stored)
            due = len(killed) < kills and stored >= kill_at[len(killed)]
            if due and collector.doing == "step" and collector.step >= 5:
                collector.kill()
                found = seeds_stored(path)
                expect_nothing_lost(found, collector, before)
                if collector.doing == "step":  # otherwise it was faster than the kill: once more
                    killed.append(collector.seed)
                    progress.write(
                        f"   SIGKILL at step {collector.step} of episode {collector.seed}: {len(found)} whole "
                        "episodes are there; starting the same command again."
                    )
                collector.stored = found[len(before) :]
                collector.start()
            progress.set_postfix({"batches": len(trainer.losses), "loss": f"{trainer.losses[-1]:.3f}"}, refresh=False)
            progress.update(stored - progress.n)
    finally:
        collector.kill()
        progress.close()
    expect(len(killed) == kills, f"the collector was killed {len(killed)} times, not {kills}")
    grew = at_work > 0 and len(sizes) > 1
    expect(grew or missing < 10, "training saw nothing of what was collected meanwhile")
    return trainer, at_work, killed, collector.num_starts


def expect_nothing_lost(found: list[int], collector: Collector, before: list[int]) -> None:
    """Raise unless a killed collector left what it said it had stored."""
    said = before + collector.stored
    # The kill may have come between the commit and the word for it: then one more is there.
    maybe = [collector.seed] if collector.doing == "write" else []
    expect(found in (said, said + maybe), f"{found} are stored, but {said} were")


def replay_and_compare(buf: ReplayBuffer, with_pixels: set[int]) -> None:
    """Raise unless every stored episode is what its seed gives again."""
    for i, seed in enumerate(bar(seeds_in(buf), desc="   play again", unit="ep", leave=False)):
        stored = buf.load_episode(i)
        for name, values in play(seed, draw=seed in with_pixels).items():
            again = values.astype(stored[name].dtype)
            expect_same(stored[name], again, f"column {name!r} of episode {seed}")


def compare_dump(buf: ReplayBuffer, h5: Path) -> None:
    """Raise unless the file holds what the buffer holds."""
    data = load_dataset(h5, num_steps=HISTORY_LEN, frameskip=FRAMESKIP, layout="HWC")
    expect(len(data) == len(buf), f"{len(data)} clips in the file, {len(buf)} in the buffer")
    expect(data.get_episode_data() == buf.get_episode_data(), "the episode data differ")
    expect(data.column_names == buf.column_names, f"other columns: {data.column_names}")
    for i in bar(range(buf.num_episodes), desc="   compare", unit="ep", leave=False):
        loaded = data.load_episode(i)
        for name, values in buf.load_episode(i).items():
            expect_same(np.asarray(loaded[name]), values, f"column {name!r} of episode {i}")


def expect_same(a: np.ndarray, b: np.ndarray, what: str) -> None:
    same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    expect(same, f"{what} differs")


if __name__ == "__main__":
    sys.exit(main())
