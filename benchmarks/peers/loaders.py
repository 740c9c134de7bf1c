"""Other libraries' own loaders compared with ours: over the same files, or the same rows, in one process.

Each library runs as its own documentation shows it. Clips of 4 steps, or single steps where the library has no clips;
batches of 64. `tests/peers` compares what both hand out. Needs the environment of those tests; what is not installed is
named.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.peers.base import release
from ringmap.data import ReplayBuffer, get_format, load_dataset

__all__ = ["exits"]

Call = Callable[[], Any]

HISTORY, BATCH, FPS = 4, 64, 10


def exits(place: Place) -> Iterator[Table]:
    """Time each library's loader and ours in turn."""
    table = Table(
        f"a batch of {BATCH}, one process, medians",
        heads=["library", "its own loader, ms", "ours, ms", "times as fast"],
    )
    folder, found = place.new_folder(), list[tuple[float, float, str]]()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        source = place.closing(_filled(folder / "ring", place.size(60, 8), place.size(100, 20)))
        for package, pair in PAIRS.items():
            if any(find_spec(name) is None for name in package.split("+")):
                table.notes.append(f"not measured: {package} is not installed")
                continue
            times = in_turn(
                dict(zip(("ours", "theirs"), pair(folder / package, source), strict=True)), place.size(40, 1)
            )
            ours, theirs = (float(np.median(taken)) * 1e3 for taken in times.values())
            library = package.split("+")[0]
            found.append((theirs, ours, f"{library} {release(library)}"))
    for theirs, ours, name in sorted(found, key=lambda one: one[0] / one[1]):
        table.row(name, f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.2f}")
    table.notes.append(
        "datasets: ours keeps decoded pictures in memory, up to 256 MiB; lerobot: films, decoded for each clip"
    )
    yield table


def _filled(path: Path, episodes: int, length: int) -> ReplayBuffer:
    """Return a buffer of episodes with a picture and a vector; the vector says which step it is."""
    rng, ramp = np.random.default_rng(0), np.linspace(0, 120, 64).astype(np.uint8)
    rows, steps = length + 1, np.arange(length + 1)
    made = ReplayBuffer(episodes * rows, path=path, history_len=HISTORY)
    for number in range(episodes):
        moved = (3 * steps + number)[:, None, None, None] % 60
        film = ramp[None, :, None, None] + ramp[None, None, :, None] // 2 + moved
        made.write_episode(
            {
                "pixels/top": np.broadcast_to(film, (rows, 64, 64, 3)).astype(np.uint8),
                "obs/arm": np.stack([np.full(rows, number), steps], 1).astype(np.float32),
                "action": rng.normal(size=(rows, 7)).astype(np.float32),
                "reward": rng.normal(size=rows).astype(np.float32),
                "terminated": steps == length,
                "_episode_data": {"task": "follow the ramp"},
            }
        )
    return made


def _write(source: ReplayBuffer, name: str, path: Path, **options: Any) -> None:
    with get_format(name).open_writer(path, **options) as writer:
        for episode in source.episodes():
            writer.write_episode({**episode, "_episode_data": {"task": "follow the ramp"}})


def _next_of(loader: Any) -> Call:
    """Return a call that gives the next batch, and goes on with another pass where one ends."""

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()
    return lambda: next(batches)


def _shuffled(data: Any) -> Call:
    return _next_of(DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data), drop_last=True))


def _lerobot(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    stand_in = importlib.import_module("tests.peers.torchvision_stand_in")  # it has no build for this torch
    stand_in.install()
    import lerobot

    policies = types.ModuleType("lerobot.policies")  # its own __init__ imports all of them
    policies.__path__ = [os.path.join(one, "policies") for one in lerobot.__path__]
    sys.modules.setdefault("lerobot.policies", policies)
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    _write(source, "lerobot", path, fps=FPS)
    ours = load_dataset(path, num_steps=HISTORY)
    pictures = next(name for name in ours.column_names if name.endswith("top"))
    ahead = {key: [step / FPS for step in range(HISTORY)] for key in (pictures, "observation.arm", "action")}
    theirs = LeRobotDataset("us/set", root=path, video_backend="pyav", delta_timestamps=ahead)
    assert np.array_equal(ours[5]["observation.arm"], theirs[5]["observation.arm"])
    return _shuffled(ours), _shuffled(theirs)


def _robomimic(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    file = path.with_suffix(".hdf5")
    with contextlib.redirect_stdout(io.StringIO()):
        from robomimic.utils import obs_utils
        from robomimic.utils.dataset import SequenceDataset

        _write(source, "robomimic", file)
        obs_utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": ["arm"], "rgb": []}})
        theirs = SequenceDataset(
            str(file),
            obs_keys=["arm"],
            dataset_keys=["actions", "rewards", "dones"],
            load_next_obs=True,
            seq_length=HISTORY,
            pad_seq_length=False,
            frame_stack=1,
            hdf5_cache_mode="low_dim",
            hdf5_use_swmr=False,
        )
    keys = ["obs/arm", "next_obs/arm", "action", "reward", "done"]
    ours = load_dataset(file, format="robomimic", num_steps=HISTORY, keys_to_load=keys)
    assert np.array_equal(ours[5]["obs/arm"], theirs[5]["obs"]["arm"])
    return _shuffled(ours), _shuffled(theirs)


def _minari(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    import minari

    os.environ["MINARI_DATASETS_PATH"] = str(path)
    _write(source, "minari", path / "bench/ramp-v0")
    ours, theirs = load_dataset("minari:bench/ramp-v0"), minari.load_dataset("bench/ramp-v0")
    rng = np.random.default_rng(0)

    def mine() -> list[Mapping[str, Any]]:
        return [ours.load_episode(int(n)) for n in rng.integers(0, len(ours.lengths), 4)]

    return mine, lambda: list(theirs.sample_episodes(4))


def _datasets(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    import datasets

    _write(source, "parquet", path)
    with contextlib.redirect_stdout(io.StringIO()):
        datasets.disable_progress_bars()
        found = datasets.load_dataset("parquet", data_dir=str(path), split="train", cache_dir=str(path / ".cache"))
    return _shuffled(load_dataset(path, num_steps=1)), _shuffled(found.with_format("torch"))


def _grain(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    import grain

    import ringmap

    rows = ringmap.grain.source(source)
    loader = grain.DataLoader(
        read_options=grain.ReadOptions(num_threads=4, prefetch_buffer_size=4),  # more would read on in the other's turn
        data_source=rows,
        sampler=grain.samplers.IndexSampler(len(rows), grain.sharding.NoSharding(), shuffle=True, seed=0),
        operations=[grain.transforms.Batch(BATCH)],
        worker_count=0,
    )
    return _shuffled(source), _next_of(loader)


def _torchdata(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _shuffled(source), _next_of(StatefulDataLoader(source, batch_size=BATCH, shuffle=True, drop_last=True))


def _sb3(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer as Theirs

    from ringmap.sb3 import ReplayBuffer as Ours

    box, discrete = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(4)
    rng = np.random.default_rng(0)
    ours, theirs = Ours(2_000, box, discrete, "cpu", path=path), Theirs(2_000, box, discrete, "cpu")
    seen = rng.integers(0, 256, (1, 4, 84, 84), np.uint8)
    for _ in range(1_000):
        following = np.concatenate([seen[:, 1:], rng.integers(0, 256, (1, 1, 84, 84), np.uint8)], 1)
        action = rng.integers(0, 4, (1, 1))
        for buffer in (ours, theirs):
            buffer.add(seen, following, action, np.zeros(1), np.zeros(1, bool), [{}])
        seen = following
    return lambda: ours.sample(BATCH), lambda: theirs.sample(BATCH)


def _torchrl(path: Path, source: ReplayBuffer) -> tuple[Call, Call]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    from ringmap.data import to_torchrl

    columns = {"pixels": torch.randint(0, 256, (4_000, 3, 64, 64), dtype=torch.uint8), "x": torch.rand(4_000, 8)}
    ours = to_torchrl(ReplayBuffer(8_000, path=path / "ring"), batch_size=BATCH)
    theirs = TensorDictReplayBuffer(storage=LazyMemmapStorage(4_000, scratch_dir=path / "theirs"), batch_size=BATCH)
    for part in TensorDict(columns, [4_000]).split(400):
        ours.extend(part)
        theirs.extend(part)
    return ours.sample, theirs.sample


PAIRS: dict[str, Callable[[Path, ReplayBuffer], tuple[Call, Call]]] = {
    "lerobot": _lerobot,
    "robomimic": _robomimic,
    "minari": _minari,
    "datasets": _datasets,
    "grain": _grain,
    "torchdata": _torchdata,
    "stable_baselines3": _sb3,
    "torchrl+tensordict": _torchrl,
}
"""Packages -> what makes the calls: of ours, and of the library's own."""
