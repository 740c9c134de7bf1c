"""`ringmap demo`: what a buffer is for, in half a minute.

    collector, a process ── killed, started again ──►  DIR/replay  ── live reader ──►  training, here

Not here: the same at length (examples/main_job.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmap.cli.console import count, show
from ringmap.errors import ExistsError, RingmapError
from ringmap.extras import require
from ringmap.storage.disk.paths import refuse_address

if TYPE_CHECKING:
    from ringmap.buffers.replay import ReplayBuffer

Episodes = Annotated[int, typer.Option("--episodes", metavar="N", min=8, help="How many to collect.")]
Folder = Annotated[
    str | None,
    typer.Option("--dir", metavar="DIR", help="Work here, and keep it; by default a temporary folder."),
]
Batches = Annotated[int, typer.Option("--batches", metavar="N", min=1, help="How many to train on.")]

_SEED = 0
_MOST = 41
"""Steps of an episode, its reset among them."""
_GREY, _CONTRAST = 0.8, 3.0
"""Pixels as the network takes them: around 0, as most are nearly white."""
_LOOK_S = 0.002
_PATIENCE_S = 120.0


def demo(episodes: Episodes = 120, batches: Batches = 400, folder: Folder = None) -> None:
    """Collect, be killed, go on, and train: in a temporary folder.

    A process collects episodes of a point in two rooms, with pixels, and is killed with SIGKILL. The same command goes
    on where it was, while a small network learns from what is there. In the end the buffer is checked and dumped.
    """
    refuse_address(folder or "")
    if folder is not None and os.path.isdir(folder) and os.listdir(folder):
        raise ExistsError(f"demo: {folder} is not empty; choose a new --dir")
    place = folder or tempfile.mkdtemp(prefix="ringmap-")
    os.makedirs(place, exist_ok=True)
    try:
        _run(os.path.join(place, "replay"), os.path.join(place, "replay.h5"), episodes, batches)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if folder is None:
        show("The temporary folder is gone; say --dir DIR for one that stays.")
    else:
        show(f"Look at it: ringmap info {os.path.join(place, 'replay')}")


def collect(path: str, episodes: str) -> None:
    """Collect, in a process of its own: the same call whether something is there already or not."""
    from ringmap import World
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.policy import RandomPolicy

    buffer = ReplayBuffer(max_steps=int(episodes) * _MOST, path=path)
    world = World("swm/TwoRoom-v1", num_envs=4, image_shape=(32, 32), max_episode_steps=_MOST - 1)
    world.set_policy(RandomPolicy(seed=_SEED))
    world.collect(writer=buffer, episodes=int(episodes), seed=_SEED, resume=True)
    world.close()
    buffer.close()


def _run(path: str, dumped: str, episodes: int, batches: int) -> None:
    require("torch", "demo")
    import torch  # noqa: F401 - takes seconds, in which the collector would have finished

    from ringmap.storage.inspect.check import check

    collector = _start(path, episodes)
    try:
        reader = _opened(path, collector)
        _until(reader, collector, episodes // 4)
        collector.kill()
        collector.wait()
        reader.refresh()
        show(f"A collector was killed in the middle of its work: {count(reader.num_episodes, 'episode')} are stored.")
        show("The same command again, and meanwhile a network learns to see where the point is:")
        collector = _start(path, episodes)
        _train(reader, batches)
        _until(reader, collector, episodes)
        if collector.wait(_PATIENCE_S):
            raise RingmapError(f"demo: the collector ended with code {collector.returncode}")
    finally:
        if collector.poll() is None:
            collector.kill()
            collector.wait()
    reader.refresh()
    seeds = sorted(int(values[0]) if isinstance(values, list) else int(values) for values in _seeds(reader))
    if seeds != list(range(_SEED, _SEED + episodes)):
        raise RingmapError(f"demo: expected the seeds 0 to {episodes - 1}, each once, got {seeds}")
    show(f"{count(episodes, 'episode')} of {count(episodes, 'seed')}: none is lost, none is there twice.")
    show(f"check: {'sound' if not check(path) else 'NOT SOUND'}")
    reader.dump(dumped, "hdf5")
    show(f"{_compared(reader, dumped)} values equal in the HDF5 dump.")
    reader.close()


def _start(path: str, episodes: int) -> subprocess.Popen[bytes]:
    code = "import sys; from ringmap.cli.demo import collect; collect(*sys.argv[1:])"
    quiet = subprocess.DEVNULL if not sys.stderr.isatty() else None
    return subprocess.Popen(
        [sys.executable, "-c", code, path, str(episodes)],
        stdin=subprocess.DEVNULL,
        stdout=quiet,
        stderr=quiet,
    )


def _opened(path: str, collector: subprocess.Popen[bytes]) -> ReplayBuffer:
    """Open a live reader as soon as there is a buffer to read."""
    from ringmap.buffers.replay import ReplayBuffer
    from ringmap.storage.disk.paths import Paths

    while not os.path.exists(Paths(path).manifest):
        if collector.poll() is not None:
            raise RingmapError(f"demo: the collector ended with code {collector.returncode}")
        time.sleep(_LOOK_S)
    return ReplayBuffer.open(path, seed=_SEED)


def _until(reader: ReplayBuffer, collector: subprocess.Popen[bytes], episodes: int) -> None:
    """Wait until so many episodes are stored, or the collector has ended."""
    while reader.num_episodes < episodes and collector.poll() is None:
        time.sleep(_LOOK_S)
        reader.refresh()


def _train(reader: ReplayBuffer, batches: int) -> None:
    """Learn to tell the state from the pixels; say how well, on episodes as they come."""
    import torch

    torch.manual_seed(_SEED)
    torch.set_num_threads(1)  # the collector has the other cores, and the network is small
    network = torch.nn.Sequential(
        torch.nn.Linear(reader.get_dim("pixels"), 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, reader.get_dim("state")),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    errors: list[float] = []
    for number in range(1, batches + 1):
        reader.refresh()
        batch = reader.sample(64)
        pixels = torch.from_numpy(batch["pixels"].reshape(64, -1)).float() / 255 - _GREY
        state = torch.from_numpy(batch["state"].reshape(64, -1))
        loss = torch.nn.functional.mse_loss(network(_CONTRAST * pixels), state)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        errors.append(float(loss.detach()) ** 0.5)
        if number % max(1, batches // 4) == 0:
            mean = sum(errors[-20:]) / len(errors[-20:])
            stored = count(reader.num_episodes, "episode")
            show(f"  batch {number:>4}: {stored} stored, off by {100 * mean:.0f} % of the width")


def _seeds(reader: ReplayBuffer) -> list[Any]:
    return reader.get_episode_data()["seed"]


def _compared(reader: ReplayBuffer, dumped: str) -> str:
    """Compare a dump with the buffer, value by value; return how many there are."""
    import numpy as np

    from ringmap.formats.catalog.load import load_arrays

    dataset, values = load_arrays(dumped), 0
    for number in range(reader.num_episodes):
        mine, theirs = reader.load_episode(number), dataset.load_episode(number)
        for name, column in mine.items():
            if not np.array_equal(column, np.asarray(theirs[name]), equal_nan=column.dtype.kind == "f"):
                raise RingmapError(f"demo: episode {number}, column {name!r} differs in the dump")
            values += column.size
    return count(values)
