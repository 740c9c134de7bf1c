"""Other people's replay buffers, filled with our episodes: one function each, which imports its package.

    Stored (episodes) -> maker(field) -> Rival: sample() -> batch -> clips() -> column -> (B, H, ...)

Each is set up as its documentation says, with the options that make it fastest here. One that is
not installed is left out by name, with a line in the table that says how to install it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from benchmarks.stored import Stored
from benchmarks.table import Table

__all__ = [
    "Field", "Rival", "cpprb_in_files", "cpprb_in_ram", "hdf5", "lance_rows", "open_rivals", "original", "sheeprl_episodes",
    "sheeprl_sequences", "stable_baselines3", "torchrl_in_files", "write_lance",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]

_EXTRA = "pip install -c constraints.txt -e '.[bench]'"
_INSTALL = {
    "stable_worldmodel": "pip install --no-deps stable-worldmodel==0.1.1",
    "sheeprl": "pip install --no-deps sheeprl==0.8.4",
}
"""What cannot stand in an extra: these require much that their buffers alone do without."""


@dataclass(frozen=True)
class Field:
    """What a rival is filled with, in which folder, and what is then asked of it."""

    stored: Stored
    folder: Path
    batch_size: int
    history: int

    def flat(self) -> Iterable[dict[str, Array]]:
        """Yield the steps of many episodes at a time, end to end."""
        return tqdm(self.stored.chunks(), desc="filling a rival", delay=2, leave=False)


@dataclass(frozen=True)
class Rival:
    """A library's buffer, full.

    `sample` draws a batch as that library does; `clips` shows it as column -> array. `lacks`:
    columns that it does not return; `whole`: whether a clip stays in its episode; `in_files`:
    whether the rows are mapped from files. `batches`: number of workers -> a pass of batches.
    """

    name: str
    sample: Callable[[], Any] | None = None
    clips: Callable[[Any], Mapping[str, Any]] = dict
    lacks: tuple[str, ...] = ()
    whole: bool = True
    in_files: bool = False
    batches: Callable[[int], Iterable[Any]] | None = None


def open_rivals(
    makers: Sequence[Callable[[Field], Rival]], field: Field, table: Table
) -> list[Rival]:
    """Fill those that are installed, and prove a batch of each; the table names the others."""
    found = []
    for maker in makers:
        try:
            rival = maker(field)
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            what = (maker.__doc__ or "").partition(".\n")[0].strip(" .")
            table.fact(f"skipped, {what}", f"{error}; {_INSTALL.get(package, _EXTRA)}")
            continue
        if rival.sample is not None:
            batch = rival.clips(rival.sample())
            field.stored.assert_holds(
                batch, field.batch_size, field.history, rival.whole, rival.lacks
            )
        found.append(rival)
    return found


# -- importing -----------------------------------------------------------------------------------


def _alone(
    module: str, empty: Sequence[str], stubs: Mapping[str, dict[str, Any]] | None = None
) -> ModuleType:
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
        sampler = SliceSampler(
            slice_len=field.history, traj_key="episode", cache_values=True, truncated_key=None
        )
        return TensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=steps, prefetch=prefetch
        )

    buffer = reading(None)
    for chunk in field.flat():
        columns = {name: torch.from_numpy(values) for name, values in chunk.items()}
        buffer.extend(TensorDict(columns, batch_size=[len(chunk["episode"])]))

    def batches(workers: int) -> Iterable[Any]:
        clips = field.stored.num_episodes * (field.stored.length - field.history + 1)
        return islice(reading(workers or None), -(-clips // field.batch_size))

    return Rival(
        f"TorchRL {version('torchrl')} memmap, SliceSampler",
        buffer.sample,
        lambda batch: {name: batch[name].numpy() for name in field.stored.first},
        in_files=True,
        batches=batches,
    )


def sheeprl_sequences(field: Field) -> Rival:
    """sheeprl: `SequentialReplayBuffer(memmap=True)`; its clips cross from one episode into the next."""
    folder = field.folder / "sheeprl-sequences"
    buffer = _sheeprl().SequentialReplayBuffer(
        field.stored.num_steps, memmap=True, memmap_dir=folder
    )
    for chunk in field.flat():
        del chunk["episode"]
        buffer.add({name: values[:, None] for name, values in chunk.items()})
    return Rival(
        f"sheeprl {version('sheeprl')} memmap, sequences",
        lambda: buffer.sample(field.batch_size, sequence_length=field.history),
        _time_first,
        whole=False,
        in_files=True,
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
        name: {"shape": values.shape[1:] or 1, "dtype": values.dtype}
        for name, values in field.stored.first.items()
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


def write_lance(field: Field) -> None:
    """Write the steps as rows of a Lance dataset. Its encoders take a gigabyte, so not where memory is limited."""
    import lance
    import pyarrow as pa

    first = field.stored.first
    widths = {name: int(np.prod(values.shape[1:], dtype=int)) for name, values in first.items()}
    kinds = {name: pa.from_numpy_dtype(values.dtype) for name, values in first.items()}
    schema = pa.schema([(name, pa.list_(kinds[name], width)) for name, width in widths.items()])

    def rows() -> Iterable[Any]:
        for chunk in field.flat():
            columns = [
                pa.FixedSizeListArray.from_arrays(chunk[name].reshape(-1), width)
                for name, width in widths.items()
            ]
            yield pa.record_batch(columns, schema=schema)

    lance.write_dataset(rows(), str(field.folder / "clips.lance"), schema=schema)


def lance_rows(field: Field) -> Rival:
    """Lance: one row for each step, written by pylance; `take` of the steps of each clip, as NumPy arrays."""
    import lance

    if not (field.folder / "clips.lance").exists():
        write_lance(field)
    dataset, rng = lance.dataset(str(field.folder / "clips.lance")), np.random.default_rng(3)
    stored, first = field.stored, field.stored.first

    def sample() -> dict[str, Array]:
        episodes = rng.integers(stored.num_episodes, size=field.batch_size) * stored.length
        starts = episodes + rng.integers(stored.length - field.history + 1, size=field.batch_size)
        found = dataset.take((starts[:, None] + np.arange(field.history)).reshape(-1))
        clips = {}
        for name, values in first.items():
            rows = found[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            clips[name] = rows.reshape(field.batch_size, field.history, *values.shape[1:])
        return clips

    return Rival(f"Lance {version('pylance')}, take", sample, in_files=True)


class _Clips:
    """A map-style dataset of clips over a file with one dataset for each column."""

    def __init__(self, path: Path, length: int, history: int, num_episodes: int) -> None:
        self.path, self.length, self.history = path, length, history
        self.per_episode = length - history + 1
        self.size = num_episodes * self.per_episode
        self.columns: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Array]:
        if self.columns is None:  # in each worker its own
            import h5py

            self.columns = dict(h5py.File(self.path).items())
        episode, step = divmod(number, self.per_episode)
        start = episode * self.length + step
        return {name: rows[start : start + self.history] for name, rows in self.columns.items()}


def hdf5(field: Field) -> Rival:
    """A plain PyTorch dataset over h5py: contiguous, not compressed."""
    import h5py
    from torch.utils.data import DataLoader

    path, done = field.folder / "clips.h5", 0
    with h5py.File(path, "w") as file:
        for name, values in field.stored.first.items():
            file.create_dataset(name, (field.stored.num_steps, *values.shape[1:]), values.dtype)
        for chunk in field.flat():
            numbers = chunk.pop("episode")
            for name, values in chunk.items():
                file[name][done : done + len(numbers)] = values
            done += len(numbers)

    def batches(workers: int) -> Iterable[Any]:
        stored = field.stored
        clips: Any = _Clips(path, stored.length, field.history, stored.num_episodes)
        return DataLoader(clips, field.batch_size, shuffle=True, num_workers=workers)

    return Rival(f"a Dataset over h5py {version('h5py')}", in_files=True, batches=batches)
