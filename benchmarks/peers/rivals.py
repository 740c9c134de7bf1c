"""Other people's replay buffers, filled with our episodes: one function each, which imports its package.

    Stored (episodes) -> maker(field) -> Rival: sample() -> batch -> clips() -> column -> (B, H, ...)

Each is set up as its documentation says, with the options that make it fastest here. One that is
not installed is left out by name, with a line in the table that says how to install it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.harness.stored import Stored
from benchmarks.harness.table import Table

__all__ = [
    "Field",
    "Rival",
    "cpprb_in_files",
    "cpprb_in_ram",
    "dreamer",
    "expect_random",
    "install_of",
    "missing",
    "open_rivals",
    "original",
    "sheeprl_episodes",
    "sheeprl_sequences",
    "stable_baselines3",
    "torchrl_in_files",
]

Array = np.ndarray[Any, np.dtype[Any]]

_EXTRA = "pip install -c constraints.txt -e '.[bench]'"
_PEERS = "pip install -c constraints.txt -r benchmarks/peers.txt"
_NO_DEPS = "pip install --no-deps -r benchmarks/peers-alone.txt"
_INSTALL = {
    **dict.fromkeys(("stable_worldmodel", "sheeprl", "litdata"), _NO_DEPS),
    **dict.fromkeys(("tensorstore", "array_record", "grain", "datasets", "webdataset", "rlox"), _PEERS),
}
"""What cannot stand in an extra: some require much that their buffers alone do without."""


@dataclass(frozen=True)
class Field:
    """What a rival is filled with, in which folder, and what is then asked of it.

    `threads`: for rows that are on the disk, how many may wait for it at once; 0: they are in memory.
    """

    stored: Stored
    folder: Path
    batch_size: int
    history: int
    threads: int = 0

    def flat(self) -> Iterable[dict[str, Array]]:
        """Yield the steps of many episodes at a time, end to end."""
        return tqdm(self.stored.chunks(), desc="filling a rival", delay=2, leave=False)


@dataclass(frozen=True)
class Rival:
    """A library's buffer, full.

    `sample` draws a batch as that library does; `clips` shows it as column -> array. `lacks`:
    columns that it does not return; `whole`: whether a clip stays in its episode; `in_files`:
    whether the rows are mapped from files. `batches`: number of workers -> a pass of batches;
    `workers`: how many it does best with from a disk; `streams`: whether it can't draw any clip.
    `setting`: how it is set up, for people.
    """

    name: str
    sample: Callable[[], Any] | None = None
    clips: Callable[[Any], Mapping[str, Any]] = dict
    lacks: tuple[str, ...] = ()
    whole: bool = True
    in_files: bool = False
    batches: Callable[[int], Iterable[Any]] | None = None
    workers: int = 0
    streams: bool = False
    setting: str = ""


def open_rivals(makers: Sequence[Callable[[Field], Rival]], field: Field, table: Table) -> list[Rival]:
    """Fill those that are installed, and prove a batch of each; the table names the others."""
    found = []
    for maker in makers:
        try:
            rival = maker(field)
        except ImportError as error:
            table.fact(*missing(maker, error))
            continue
        if rival.sample is not None:
            batch = rival.clips(rival.sample())
            field.stored.assert_holds(batch, field.batch_size, field.history, rival.whole, rival.lacks)
        found.append(rival)
    return found


def missing(maker: Callable[[Field], Rival], error: ImportError) -> tuple[str, str]:
    """Return which rival is not there, and how to install it."""
    package = (error.name or "").partition(".")[0]
    what = (maker.__doc__ or "").partition(".\n")[0].strip(" .")
    return f"skipped, {what}", f"{error}; {install_of(package)}"


def install_of(package: str) -> str:
    """Return the command that installs a rival."""
    return _INSTALL.get(package, _EXTRA)


# -- importing -----------------------------------------------------------------------------------


def _alone(module: str, empty: Sequence[str], stubs: Mapping[str, dict[str, Any]] | None = None) -> ModuleType:
    """Import a module without what the packages around it import.

    Args:
        module: its name.
        empty: the packages around it, outermost first: they stay empty.
        stubs: modules that it imports from -> all that these are to hold.
    """
    if module not in sys.modules:
        spec = find_spec(empty[0])
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {empty[0]!r}", name=empty[0])
        where = spec.submodule_search_locations[0]
        for name in empty:
            package = ModuleType(name)
            package.__path__ = [str(Path(where, *name.split(".")[1:]))]
            sys.modules[name] = package
        for name, contents in (stubs or {}).items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
    return import_module(module)


def _sheeprl() -> ModuleType:
    return _alone(
        "sheeprl.data.buffers",
        ["sheeprl", "sheeprl.data", "sheeprl.utils"],
        {"sheeprl.utils.utils": {"NUMPY_TO_TORCH_DTYPE_DICT": {}}},  # its tensors are not asked for
    )


# -- the original --------------------------------------------------------------------------------


def original(field: Field) -> Rival:
    """stable-worldmodel: in RAM, the buffer whose interface ours has."""
    found = _alone("stable_worldmodel.data.buffer", ["stable_worldmodel", "stable_worldmodel.data"])
    buffer = found.ReplayBuffer(field.stored.num_steps, history_len=field.history)
    for episode in field.stored:
        buffer.write_episode({name: values.copy() for name, values in episode.items()})

    def batches(workers: int) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        return DataLoader(buffer, batch_size=field.batch_size, shuffle=True, num_workers=workers)

    return Rival(
        f"stable-worldmodel {version('stable-worldmodel')} in RAM",
        lambda: buffer.sample(field.batch_size),
        batches=batches,
    )


# -- mapped from files ---------------------------------------------------------------------------


def torchrl_in_files(field: Field) -> Rival:
    """TorchRL: `LazyMemmapStorage`, `SliceSampler`."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    steps = field.batch_size * field.history
    storage = LazyMemmapStorage(field.stored.num_steps, scratch_dir=str(field.folder / "torchrl"))

    def reading(prefetch: int | None) -> Any:
        sampler = SliceSampler(slice_len=field.history, traj_key="episode", cache_values=True, truncated_key=None)
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=steps, prefetch=prefetch)

    buffer = reading(None)
    for chunk in field.flat():
        columns = {name: torch.from_numpy(values) for name, values in chunk.items()}
        buffer.extend(TensorDict(columns, batch_size=[len(chunk["episode"])]))
    if field.threads:
        torch.set_num_threads(field.threads)
        pixels = storage._storage["pixels"]  # it offers no way to say so itself
        expect_random(pixels.data_ptr(), pixels.nbytes)

    def batches(workers: int) -> Iterable[Any]:
        clips = field.stored.num_episodes * (field.stored.length - field.history + 1)
        return islice(reading(workers or None), -(-clips // field.batch_size))

    return Rival(
        f"TorchRL {version('torchrl')} memmap, SliceSampler",
        buffer.sample,
        lambda batch: {name: batch[name].numpy() for name in field.stored.first},
        in_files=True,
        batches=batches,
        workers=2,
        setting=f"maps told MADV_RANDOM, {field.threads} threads in torch, prefetch=2",
    )


def sheeprl_sequences(field: Field) -> Rival:
    """sheeprl: `SequentialReplayBuffer(memmap=True)`; its clips cross from one episode into the next."""
    folder = field.folder / "sheeprl-sequences"
    buffer = _sheeprl().SequentialReplayBuffer(field.stored.num_steps, memmap=True, memmap_dir=folder)
    for chunk in field.flat():
        del chunk["episode"]
        buffer.add({name: values[:, None] for name, values in chunk.items()})
    if field.threads:
        buffer.buffer["pixels"].array._mmap.madvise(mmap.MADV_RANDOM)
        pool = ThreadPoolExecutor(field.threads)
    share = -(-field.batch_size // field.threads) if field.threads else field.batch_size

    def part(_: int) -> Any:
        return buffer.sample(share, sequence_length=field.history)

    def sample() -> Any:
        if not field.threads:
            return part(0)
        parts = list(pool.map(part, range(field.batch_size // share)))
        return {name: np.concatenate([p[name] for p in parts], axis=2) for name in parts[0]}

    return Rival(
        f"sheeprl {version('sheeprl')} memmap, sequences",
        sample,
        _time_first,
        whole=False,
        in_files=True,
        setting=f"maps told MADV_RANDOM, {field.threads} threads that each draw a share of the batch",
    )


def sheeprl_episodes(field: Field) -> Rival:
    """sheeprl: `EpisodeBuffer(memmap=True)`."""
    buffer = _sheeprl().EpisodeBuffer(
        field.stored.num_steps, field.history, memmap=True, memmap_dir=field.folder / "sheeprl"
    )
    last = np.arange(field.stored.length) == field.stored.length - 1
    for episode in field.stored:
        ends = {"terminated": episode.get("terminated", np.zeros_like(last)), "truncated": last}
        buffer.add({name: values[:, None] for name, values in {**episode, **ends}.items()})
    return Rival(
        f"sheeprl {version('sheeprl')} memmap, episodes",
        lambda: buffer.sample(field.batch_size, sequence_length=field.history),
        _time_first,
        in_files=True,
    )


def _time_first(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Turn sheeprl's `(1, H, B, ...)` round."""
    return {name: values[0].swapaxes(0, 1) for name, values in batch.items()}


def cpprb_in_files(field: Field) -> Rival:
    """cpprb: `mmap_prefix=`; it knows single steps, so as many of them as the clips have."""
    folder = field.folder / "cpprb"
    folder.mkdir()
    return _cpprb(field, " memmap", mmap_prefix=str(folder / "rows"))


def cpprb_in_ram(field: Field) -> Rival:
    """cpprb: its default."""
    return _cpprb(field, " in RAM")


def _cpprb(field: Field, where: str, **options: Any) -> Rival:
    from cpprb import ReplayBuffer

    columns = {
        name: {"shape": values.shape[1:] or 1, "dtype": values.dtype} for name, values in field.stored.first.items()
    }
    buffer = ReplayBuffer(field.stored.num_steps, columns, **options)
    for chunk in field.flat():
        del chunk["episode"]
        buffer.add(**chunk)
    steps = field.batch_size * field.history
    return Rival(
        f"cpprb {version('cpprb')}{where}, single steps",
        lambda: buffer.sample(steps),
        whole=False,
        in_files="mmap_prefix" in options,
    )


def expect_random(address: int, nbytes: int) -> None:
    """Turn the system's readahead off for a map, which is given by its address."""
    page = mmap.PAGESIZE
    start = address // page * page
    libc = ctypes.CDLL(None, use_errno=True)
    told = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), mmap.MADV_RANDOM)
    if told:
        raise OSError(ctypes.get_errno(), "madvise")


# -- others --------------------------------------------------------------------------------------


def stable_baselines3(field: Field) -> Rival:
    """Stable-Baselines3: transitions, so with the next observation too."""
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer

    first = field.stored.first
    obs, action = (Box(-np.inf, np.inf, first[name].shape[1:]) for name in ("obs", "action"))
    buffer = ReplayBuffer(field.stored.num_steps, obs, action, device="cpu")
    for chunk in field.flat():
        following = np.roll(chunk["obs"], -1, axis=0)
        rows = chunk["obs"], following, chunk["action"], chunk["reward"], 1 - chunk["discount"]
        for now, after, act, reward, done in zip(*rows, strict=True):
            buffer.add(now, after, act, np.array([reward]), np.array([done]), [{}])
    return Rival(
        f"Stable-Baselines3 {version('stable-baselines3')} in RAM, transitions",
        lambda: buffer.sample(field.batch_size * field.history),
        lambda batch: {
            "obs": batch.observations,
            "action": batch.actions,
            "reward": batch.rewards,
        },
        lacks=("discount",),
        whole=False,
    )


def dreamer(field: Field) -> Rival:
    """DreamerV3's replay, in RAM: its algorithm restated, because its package does not install."""
    chunk_len, history, rng = 1_024, field.history, np.random.default_rng(4)
    chunks: list[dict[str, Array]] = []
    left: dict[str, Array] = {}
    for more in field.flat():
        del more["episode"]
        left = {n: np.concatenate([left[n], v]) if left else v for n, v in more.items()}
        while len(left["reward"]) >= chunk_len:
            chunks.append({name: values[:chunk_len].copy() for name, values in left.items()})
            left = {name: values[chunk_len:] for name, values in left.items()}
    if len(left["reward"]):
        chunks.append(left)

    def sample() -> dict[str, Array]:
        batch = {
            name: np.empty((field.batch_size, history, *values.shape[1:]), values.dtype)
            for name, values in chunks[0].items()
        }
        starts = rng.integers(field.stored.num_steps - history + 1, size=field.batch_size)
        for i, start in enumerate(starts.tolist()):
            done = 0
            while done < history:  # a sequence goes on in the next chunk
                chunk, at = divmod(start + done, chunk_len)
                size = min(history - done, chunk_len - at)
                for name, rows in batch.items():
                    rows[i, done : done + size] = chunks[chunk][name][at : at + size]
                done += size
        return batch

    return Rival("DreamerV3's replay, restated, in RAM", sample, whole=False)
