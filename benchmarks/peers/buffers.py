"""Replay buffers of other libraries."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.harness.data import Stored
from benchmarks.peers.base import NO_DEPS, PEERS, Array, Peer, Spec, expect_random

__all__ = [
    "Cpprb",
    "CpprbFiles",
    "Dreamer",
    "Rlox",
    "SheeprlEpisodes",
    "SheeprlSequences",
    "StableBaselines3",
    "StableWorldmodel",
    "TorchRL",
    "TorchRLSlices",
]


class Cpprb(Peer):
    """cpprb: in RAM; it knows single steps, so as many of them as the clips have."""

    package = called = "cpprb"
    way, setting, whole = " in RAM, single steps", "next_obs a column of its own", False

    def __init__(self, spec: Spec, **options: Any) -> None:
        super().__init__(spec)
        from cpprb import PrioritizedReplayBuffer, ReplayBuffer

        columns = {n: {"shape": v.shape[1:] or 1, "dtype": v.dtype} for n, v in spec.first.items()}
        if spec.stack:
            columns["obs"]["shape"] = (*columns["obs"]["shape"][1:], spec.stack)
            del columns["next_obs"]
            options |= {"next_of": "obs", "stack_compress": "obs"}
        self.buffer = (PrioritizedReplayBuffer if spec.prioritized else ReplayBuffer)(spec.size, columns, **options)
        self._draw = (0.4,) if spec.prioritized else ()
        self._last: Any = None

    def add(self, rows: Mapping[str, Any]) -> None:
        self.buffer.add(**rows)

    def add_one(self, step: Mapping[str, Any]) -> None:
        if not self.spec.stack:
            self.buffer.add(**step)
            return
        self.buffer.add(**{n: np.moveaxis(v, 0, -1) if n.endswith("obs") else v for n, v in step.items()})
        if step["done"]:
            self.buffer.on_episode_end()

    def sample(self, size: int) -> Any:
        self._last = batch = self.buffer.sample(size * self.spec.history, *self._draw)
        return batch

    def clips(self, batch: Any) -> Mapping[str, Any]:
        return {n: np.moveaxis(v, -1, 1) if self.spec.stack and n.endswith("obs") else v for n, v in batch.items()}

    def update(self, priorities: Array) -> None:
        self.buffer.update_priorities(self._last["indexes"], priorities)


class CpprbFiles(Cpprb):
    """cpprb: `mmap_prefix=`."""

    way = " memmap, single steps"

    def __init__(self, spec: Spec) -> None:
        assert spec.folder is not None
        (spec.folder / "cpprb").mkdir()
        super().__init__(spec, mmap_prefix=str(spec.folder / "cpprb/rows"))


class StableBaselines3(Peer):
    """Stable-Baselines3: transitions, so with the next observation too, as tensors."""

    package, called, way = "stable-baselines3", "Stable-Baselines3", " in RAM, transitions"
    setting = "handle_timeout_termination=False, observations stored twice, CPU tensors"
    lacks, whole = ("discount",), False

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import ReplayBuffer

        obs, action = spec.first["obs"], spec.first["action"]
        low, high = (0, 255) if obs.dtype == np.uint8 else (-np.inf, np.inf)
        space: Any = Discrete(4) if action.dtype.kind == "i" else Box(-np.inf, np.inf, action.shape[1:])
        self.buffer = ReplayBuffer(
            spec.size,
            Box(low, high, obs.shape[1:], obs.dtype.type),
            space,
            device="cpu",
            n_envs=spec.lanes,
            optimize_memory_usage=bool(spec.stack),
            handle_timeout_termination=False,
        )
        self._infos: list[dict[str, Any]] = [{}] * spec.lanes

    def fill(self, stored: Stored) -> None:
        for chunk in stored.chunks():
            following = np.roll(chunk["obs"], -1, axis=0)
            rows = chunk["obs"], following, chunk["action"], chunk["reward"], 1 - chunk["discount"]
            for now, after, act, reward, done in zip(*rows, strict=True):
                self.buffer.add(now, after, act, np.array([reward]), np.array([done]), self._infos)

    def add(self, rows: Mapping[str, Any]) -> None:
        self.buffer.add(rows["obs"], rows["next_obs"], rows["action"], rows["reward"], rows["done"], self._infos)

    def sample(self, size: int) -> Any:
        return self.buffer.sample(size * self.spec.history)

    def clips(self, batch: Any) -> Mapping[str, Any]:
        names = {"observations": "obs", "next_observations": "next_obs", "actions": "action", "rewards": "reward"}
        return {ours: getattr(batch, name).numpy() for name, ours in names.items()}


class TorchRL(Peer):
    """TorchRL: `LazyTensorStorage`, single steps."""

    package, called, setting = "torchrl", "TorchRL", "LazyTensorStorage, TensorDicts"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

        storage = LazyTensorStorage(spec.size)
        if spec.prioritized:
            self.buffer: Any = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
        else:
            self.buffer = TensorDictReplayBuffer(storage=storage)
        self._last: Any = None

    def add(self, rows: Mapping[str, Any]) -> None:
        import torch
        from tensordict import TensorDict

        tensors = {name: torch.from_numpy(values) for name, values in rows.items()}
        self.buffer.extend(TensorDict(tensors, batch_size=[len(rows["reward"])]))

    def add_one(self, step: Mapping[str, Any]) -> None:
        import torch
        from tensordict import TensorDict

        self.buffer.add(TensorDict({name: torch.as_tensor(v) for name, v in step.items()}, batch_size=[]))

    def sample(self, size: int) -> Any:
        self._last = batch = self.buffer.sample(size)
        return batch

    def clips(self, batch: Any) -> Mapping[str, Any]:
        return {name: batch[name].numpy() for name in self.spec.first}

    def update(self, priorities: Array) -> None:
        import torch

        self._last["td_error"] = torch.from_numpy(priorities.astype(np.float32))
        self.buffer.update_tensordict_priority(self._last)


class TorchRLSlices(TorchRL):
    """TorchRL: `LazyMemmapStorage`, `SliceSampler`."""

    way, workers = " memmap, SliceSampler", 2

    def __init__(self, spec: Spec) -> None:
        Peer.__init__(self, spec)
        from torchrl.data import LazyMemmapStorage

        logging.getLogger("torchrl").setLevel(logging.WARNING)
        self._storage = LazyMemmapStorage(spec.size, scratch_dir=f"{spec.folder}/torchrl")
        self.buffer = self._reading(None)
        self.setting = f"maps told MADV_RANDOM, {spec.threads} threads in torch, prefetch=2"

    def _reading(self, prefetch: int | None) -> Any:
        from torchrl.data import SliceSampler, TensorDictReplayBuffer

        sampler = SliceSampler(slice_len=self.spec.history, traj_key="episode", cache_values=True, truncated_key=None)
        steps = self.spec.batch * self.spec.history
        return TensorDictReplayBuffer(storage=self._storage, sampler=sampler, batch_size=steps, prefetch=prefetch)

    def fill(self, stored: Stored) -> None:
        import torch

        for chunk in stored.chunks():
            self.add(chunk)
        if self.spec.threads:
            torch.set_num_threads(self.spec.threads)
            pixels = self._storage._storage["pixels"]  # it offers no way to say so itself
            expect_random(pixels.data_ptr(), pixels.nbytes)
        self._clips = stored.num_episodes * (stored.length - self.spec.history + 1)

    def sample(self, size: int) -> Any:
        return self.buffer.sample()

    def batches(self, workers: int) -> Iterable[Any]:
        """Iterate, `workers` as threads that prefetch; it has no DataLoader."""
        return islice(self._reading(workers or None), -(-self._clips // self.spec.batch))


class Rlox(Peer):
    """rlox: in RAM, all columns float32."""

    package = called = "rlox"
    setting, install = "float32 rows, in RAM", PEERS

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        from rlox import PrioritizedReplayBuffer, ReplayBuffer

        kind = PrioritizedReplayBuffer if spec.prioritized else ReplayBuffer
        self.buffer, self._seeds, self._last = kind(spec.size, spec.first["obs"].shape[1], 1), count(), dict[str, Any]()

    def add(self, rows: Mapping[str, Any]) -> None:
        if self.spec.prioritized:  # it has no push_batch
            for number in range(len(rows["reward"])):
                step = {name: values[number] for name, values in rows.items()}
                self.add_one({**step, "reward": float(step["reward"]), "done": bool(step["done"])})
            return
        ended = rows["done"].view(np.uint8)
        observed = rows["obs"].reshape(-1), rows["next_obs"].reshape(-1)
        actions = rows["action"].astype(np.float32)
        self.buffer.push_batch(*observed, actions, rows["reward"], ended, np.zeros_like(ended))

    def add_one(self, step: Mapping[str, Any]) -> None:
        action = np.asarray([step["action"]], np.float32)
        self.buffer.push(step["obs"], action, step["reward"], step["done"], False, step["next_obs"])

    def sample(self, size: int) -> Any:
        self._last = batch = self.buffer.sample(size, next(self._seeds))
        return batch

    def update(self, priorities: Array) -> None:
        self.buffer.update_priorities(self._last["indices"], priorities)


class StableWorldmodel(Peer):
    """stable-worldmodel: in RAM, the buffer whose interface ours has."""

    package = called = "stable-worldmodel"
    way, install = " in RAM", NO_DEPS

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        found = _alone("stable_worldmodel.data.buffer", ["stable_worldmodel", "stable_worldmodel.data"])
        self.buffer = found.ReplayBuffer(spec.size, history_len=spec.history)

    def fill(self, stored: Stored) -> None:
        for episode in stored:
            self.buffer.write_episode({name: values.copy() for name, values in episode.items()})

    def sample(self, size: int) -> Any:
        return self.buffer.sample(size)

    def batches(self, workers: int) -> Iterable[Any]:
        """Load them as ours."""
        from torch.utils.data import DataLoader

        return DataLoader(self.buffer, batch_size=self.spec.batch, shuffle=True, num_workers=workers)


class SheeprlSequences(Peer):
    """sheeprl: `SequentialReplayBuffer(memmap=True)`; its clips cross from one episode into the next."""

    package = called = "sheeprl"
    way, install, whole = " memmap, sequences", NO_DEPS, False

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.buffer = _sheeprl().SequentialReplayBuffer(
            spec.size, memmap=True, memmap_dir=Path(str(spec.folder), "sheeprl-sequences")
        )
        self.setting = f"maps told MADV_RANDOM, {spec.threads} threads that each draw a share of the batch"
        self._pool = ThreadPoolExecutor(spec.threads or 1)

    def add(self, rows: Mapping[str, Any]) -> None:
        self.buffer.add({name: values[:, None] for name, values in rows.items()})

    def fill(self, stored: Stored) -> None:
        super().fill(stored)
        if self.spec.threads:
            self.buffer.buffer["pixels"].array._mmap.madvise(mmap.MADV_RANDOM)

    def sample(self, size: int) -> Any:
        if not self.spec.threads:
            return self._part(size)
        share = -(-size // self.spec.threads)
        parts = list(self._pool.map(self._part, [share] * (size // share)))
        return {name: np.concatenate([p[name] for p in parts], axis=2) for name in parts[0]}

    def _part(self, size: int) -> Any:
        return self.buffer.sample(size, sequence_length=self.spec.history)

    def clips(self, batch: Any) -> Mapping[str, Any]:
        return {name: values[0].swapaxes(0, 1) for name, values in batch.items()}  # (1, H, B, ...)


class SheeprlEpisodes(SheeprlSequences):
    """sheeprl: `EpisodeBuffer(memmap=True)`."""

    way, whole = " memmap, episodes", True

    def __init__(self, spec: Spec) -> None:
        Peer.__init__(self, spec)
        folder = Path(str(spec.folder), "sheeprl")
        self.buffer = _sheeprl().EpisodeBuffer(spec.size, spec.history, memmap=True, memmap_dir=folder)

    def fill(self, stored: Stored) -> None:
        last = np.arange(stored.length) == stored.length - 1
        for episode in stored:
            self.add({"terminated": np.zeros_like(last), **episode, "truncated": last})


class Dreamer(Peer):
    """DreamerV3's replay, in RAM: its algorithm restated, because its package does not install."""

    called, way, whole = "DreamerV3's replay", ", restated, in RAM", False
    chunk = 1_024

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._chunks, self._left = list[dict[str, Array]](), dict[str, Array]()
        self._rng = np.random.default_rng(4)

    def add(self, rows: Mapping[str, Any]) -> None:
        left = {n: np.concatenate([self._left[n], v]) if self._left else v for n, v in rows.items()}
        while len(left["reward"]) >= self.chunk:
            self._chunks.append({name: values[: self.chunk].copy() for name, values in left.items()})
            left = {name: values[self.chunk :] for name, values in left.items()}
        self._left = left

    def fill(self, stored: Stored) -> None:
        super().fill(stored)
        self._chunks += [self._left] if len(self._left["reward"]) else []

    def sample(self, size: int) -> dict[str, Array]:
        history, chunks = self.spec.history, self._chunks
        batch = {n: np.empty((size, history, *v.shape[1:]), v.dtype) for n, v in chunks[0].items()}
        starts = self._rng.integers(self.spec.size - history + 1, size=size)
        for i, start in enumerate(starts.tolist()):
            done = 0
            while done < history:  # a sequence goes on in the next chunk
                number, at = divmod(start + done, self.chunk)
                count = min(history - done, self.chunk - at)
                for name, rows in batch.items():
                    rows[i, done : done + count] = chunks[number][name][at : at + count]
                done += count
        return batch


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
