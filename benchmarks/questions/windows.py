"""Windows: what each column holds around a step, beside plain clips, other people's loaders, and memory.

LeRobot 0.4.4 requires torch<2.11, so its `delta_timestamps` are restated, over tensors that are decoded already: no
PNG, no Arrow. diffusion_policy is no package; its `SequenceSampler` is restated over arrays in RAM, as its
`ReplayBuffer` loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.data import fill, noise
from benchmarks.harness.place import Place
from benchmarks.harness.stored import Stored
from benchmarks.harness.table import Table
from benchmarks.harness.timing import in_turn
from benchmarks.questions.loading import passes
from ringmap import ReplayBuffer
from ringmap.data import Index, NStep, ReturnToGo, Sequences, Window

Array = np.ndarray[Any, np.dtype[Any]]

BATCH, HISTORY = 256, 4
SEEN, DONE = range(-1, 1), range(-1, 15)
"""Offsets of pictures and of actions: those of a diffusion policy."""
EXPECTED = {"LeRobot": 20, "diffusion_policy": 3, "a Dataset over h5py": 10}
"""How many times as fast as these we set out to be, without workers."""
OURS, CLIPS = "ringmap", "ringmap, sample() of clips"


def run(place: Place) -> list[Table]:
    """Time windows beside clips, beside other loaders, sequences beside memcpy, and sums beside loops."""
    stored = _stored(place.size(120, 12), 100)
    with place.folder() as folder:
        buffer = ReplayBuffer(stored.num_steps, HISTORY, path=folder / "buffer", seed=0, reward_at="same")
        fill(buffer, iter(stored), stored.num_episodes)
        tables = [_clips(place, stored, buffer), *_loaders(place, stored, buffer, folder)]
        tables.append(_sequences(place, stored, buffer, folder))
        buffer.close()
    return [*tables, *_sums(place)]


def _stored(num_episodes: int, length: int) -> Stored:
    """Return episodes of 64x64x3 pixels whose actions hold the episode and the step."""
    frames, steps = noise(length), np.arange(length, dtype=np.float32)

    def episode(number: int) -> dict[str, Array]:
        return {
            "pixels": frames[number % len(frames)],
            "action": np.stack([np.full(length, number, np.float32), steps], 1),
            "reward": steps,
        }

    return Stored(episode, "action", num_episodes, length)


def _prove(stored: Stored, batch: Mapping[str, Any], pixels: range, action: range) -> None:
    """Raise unless pixels and actions are those around the step that `reward` names, clamped, with the right masks."""
    clips = {name: np.asarray(values) for name, values in batch.items()}
    numbers, steps = clips["action"][:, 0, 0].astype(int), clips["reward"].astype(int)
    assert len(np.unique(numbers)) > 1, "every item is of one episode"
    frames = [stored.episode(number)["pixels"] for number in range(min(32, stored.num_episodes))]
    for name, offsets in (("pixels", pixels), ("action", action)):
        wanted = steps[:, None] + np.array(offsets)
        inside = (wanted >= 0) & (wanted < stored.length)
        assert (clips[f"{name}_is_pad"] == ~inside).all(), f"mask of {name}"
        near = wanted.clip(0, stored.length - 1)
        if name == "action":
            assert (clips[name][..., 0] == numbers[:, None]).all(), "action of another episode"
            assert (clips[name][..., 1] == near).all(), "action of another step"
            continue
        for i, number in enumerate(numbers):
            assert (clips[name][i] == frames[number % len(frames)][near[i]]).all(), "pixels"


# -- beside clips --------------------------------------------------------------------------------


def _clips(place: Place, stored: Stored, buffer: ReplayBuffer) -> Table:
    table = Table(
        f"sample({BATCH}) of {HISTORY} rows of 64x64x3 pixels and 2 small columns, {stored.num_steps:,} steps stored"
    )
    names = buffer.column_names
    plain = {name: Window(range(HISTORY)) for name in names}
    padded = {name: Window(range(-1, HISTORY - 1), pad="edge") for name in names}
    policy = {"pixels": Window(SEEN, pad="edge"), "action": Window(DONE, pad="edge")}
    stored.assert_holds(buffer.sample(BATCH), BATCH, HISTORY)
    stored.assert_holds(buffer.sample(BATCH, window=plain), BATCH, HISTORY)
    batch = buffer.sample(BATCH, window=padded)
    middle = {**batch, "reward": batch["reward"][:, 1]}
    _prove(stored, middle, range(-1, HISTORY - 1), range(-1, HISTORY - 1))
    _prove(stored, buffer.sample(BATCH, window=policy), SEEN, DONE)

    bare, ends = "ringmap, a window without padding", "ringmap, a window with edges and masks"
    two_and_sixteen = "ringmap, 2 pictures and 16 actions"
    sixteen = "ringmap, sample() of clips of 16 of both"
    calls = {
        CLIPS: lambda: buffer.sample(BATCH),
        bare: lambda: buffer.sample(BATCH, window=plain),
        ends: lambda: buffer.sample(BATCH, window=padded),
        two_and_sixteen: lambda: buffer.sample(BATCH, window=policy),
        sixteen: lambda: buffer.sample(BATCH, 16),
    }
    table.add_all(in_turn(calls, place.size(100, 2), burst=place.size(5, 2)))
    table.ratio(bare, CLIPS, at_most=1.05)
    table.ratio(ends, CLIPS, at_most=1.2)
    table.faster(two_and_sixteen, sixteen)
    return table


# -- beside other loaders ------------------------------------------------------------------------


class _DeltaTimestamps:
    """LeRobot's `__getitem__`: the row itself, then a stack of the clamped rows of each key that has
    `delta_timestamps`."""

    def __init__(self, columns: dict[str, torch.Tensor], length: int) -> None:
        self.columns, self.length = columns, length
        self.deltas = {"pixels": list(SEEN), "action": list(DONE)}

    def __len__(self) -> int:
        return len(self.columns["reward"])

    def __getitem__(self, idx: int) -> dict[str, Any]:
        item = {name: rows[idx] for name, rows in self.columns.items()}
        start = idx // self.length * self.length
        last = start + self.length - 1
        for name, deltas in self.deltas.items():
            rows = [max(start, min(last, idx + delta)) for delta in deltas]
            outside = [idx + delta < start or idx + delta > last for delta in deltas]
            item[f"{name}_is_pad"] = torch.BoolTensor(outside)
            item[name] = torch.stack([self.columns[name][row] for row in rows])
        return item


class _SequenceSampler:
    """diffusion_policy's sampler: it lists the bounds of all items once. An item is one slice of each array; where that
    reaches beyond the episode, the first or last row is repeated.

    It returns steps t - 1 to t + 14 of every key, of the pictures only the first two (`key_first_k`). It returns no
    mask.
    """

    def __init__(self, columns: dict[str, Array], length: int) -> None:
        self.columns, self.size = columns, len(DONE)
        indices = []
        for start in range(0, len(columns["reward"]), length):
            for begin in range(-1, length - 1):
                first, end = max(begin, 0), min(begin + self.size, length)
                indices.append((start + first, start + end, first - begin, end - begin))
        self.indices = np.array(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        first, end, at, until = self.indices[idx]
        item = {}
        for name, rows in self.columns.items():
            size, last = (2, min(end, first + 2 - at)) if name == "pixels" else (self.size, end)
            sample = rows[first:last]
            if at or last - first < size:
                whole = np.empty((size, *rows.shape[1:]), rows.dtype)
                whole[:at] = sample[0]
                whole[at : at + len(sample)] = sample
                whole[at + len(sample) :] = sample[-1]
                sample = whole
            item[name] = torch.from_numpy(np.ascontiguousarray(sample))
        return item


class _OverHdf5:
    """What is written by hand: h5py, contiguous, opened once per worker, one slice per column and item, edges and
    masks."""

    def __init__(self, path: Path, length: int, num_steps: int) -> None:
        self.path, self.length, self.num_steps = path, length, num_steps
        self.columns: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, idx: int) -> dict[str, Any]:
        if self.columns is None:
            import h5py

            self.columns = dict(h5py.File(self.path).items())
        episode, step = divmod(idx, self.length)
        item: dict[str, Any] = {"reward": self.columns["reward"][idx]}
        for name, offsets in (("pixels", SEEN), ("action", DONE)):
            first, end = step + offsets.start, step + offsets.stop
            low, high = max(first, 0), min(end, self.length)
            base = episode * self.length
            rows = self.columns[name][base + low : base + high]
            mask = np.zeros(len(offsets), bool)
            if low > first or high < end:
                rows = np.pad(rows, [(low - first, end - high), *[(0, 0)] * (rows.ndim - 1)], "edge")
                mask[: low - first] = mask[len(mask) - (end - high) :] = True
            item[name], item[f"{name}_is_pad"] = rows, mask
        return item


@dataclass(frozen=True)
class _Loader:
    """Something that a DataLoader reads; `shown` makes of its batches what `_prove` takes."""

    dataset: Any
    shown: Callable[[dict[str, Any]], Mapping[str, Any]] = dict

    def batches(self, workers: int) -> Any:
        return DataLoader(self.dataset, BATCH, shuffle=True, num_workers=workers)


def _loaders(place: Place, stored: Stored, buffer: ReplayBuffer, folder: Path) -> list[Table]:
    import h5py

    chunks = list(stored.chunks())
    arrays = {name: np.concatenate([c[name] for c in chunks]) for name in stored.first}
    del chunks
    with h5py.File(folder / "windows.h5", "w") as file:
        for name, rows in arrays.items():
            file[name] = rows

    def with_masks(batch: dict[str, Any]) -> dict[str, Any]:
        # It has no masks, and its small columns are sequences too: these are for the proof alone.
        steps = np.asarray(batch["reward"])
        at = np.where(steps[:, 1] == steps[:, 0], 0, steps[:, 1])[:, None]
        masks = {
            f"{name}_is_pad": (at + np.array(o) < 0) | (at + np.array(o) >= stored.length)
            for name, o in (("pixels", SEEN), ("action", DONE))
        }
        return {**batch, "reward": at[:, 0], **masks}

    window = {"pixels": Window(SEEN, pad="edge"), "action": Window(DONE, pad="edge")}
    tensors = {name: torch.from_numpy(rows) for name, rows in arrays.items()}
    loaders = {
        OURS: _Loader(buffer.view(window=window)),
        "LeRobot's delta_timestamps over tensors in RAM": _Loader(_DeltaTimestamps(tensors, stored.length)),
        "diffusion_policy's SequenceSampler over arrays in RAM": _Loader(
            _SequenceSampler(arrays, stored.length), with_masks
        ),
        f"a Dataset over h5py {h5py.__version__}": _Loader(
            _OverHdf5(folder / "windows.h5", stored.length, stored.num_steps)
        ),
    }
    tables, group = [], place.size(6, 1)
    for workers in (0, 2):
        table = Table(
            f"a pass of DataLoader(batch_size={BATCH}, shuffle=True, num_workers={workers}): 2 pictures of 64x64x3 and "
            f"16 actions around each of {stored.num_steps:,} steps, edges repeated; seconds per batch"
        )
        for loader in loaders.values():
            batch = next(iter(loader.batches(workers)))
            _prove(stored, loader.shown(batch), SEEN, DONE)
        calls = {name: loader.batches for name, loader in loaders.items()}
        table.add_all(passes(calls, workers, place.size(4, 1), group))
        for name in list(loaders)[1:]:
            bars = [bar for start, bar in EXPECTED.items() if name.startswith(start)]
            table.faster(OURS, name, None if workers else bars[0])
        table.notes.append(
            "LeRobot requires torch<2.11 and does not install beside the torch of this run: its loader is restated, "
            "without its "
            "Arrow table, PNG files and conversion to floats; diffusion_policy's sampler is restated, and has no masks"
        )
        tables.append(table)
    return tables


# -- beside memory -------------------------------------------------------------------------------


def _sequences(place: Place, stored: Stored, buffer: ReplayBuffer, folder: Path) -> Table:
    size, length = 16, 64
    table = Table(
        f"sample({size}, window=Sequences({length})) of 64x64x3 pixels into reused memory, one thread, "
        f"{stored.num_steps:,} steps stored"
    )
    rng = np.random.default_rng(0)
    (file,) = (folder / "buffer" / "columns").glob("*-pixels.npy")
    rows = np.asarray(np.load(file, mmap_mode="r"))[: stored.num_steps]
    batch = buffer.sample(size, window=Sequences(length))
    stored.assert_holds(batch, size, length)
    steps = batch["reward"].astype(int)
    assert (batch["is_first"] == (steps == 0)).all(), "is_first"
    assert (batch["is_last"] == (steps == stored.length - 1)).all(), "is_last"
    every, window = Sequences(length), Sequences(length)
    kept = {"pixels": batch["pixels"].copy()}
    into = {name: values.copy() for name, values in batch.items()}
    copied = np.empty((size * length, *rows.shape[1:]), rows.dtype)

    def memcpy() -> None:
        start = int(rng.integers(len(rows) - len(copied)))
        np.copyto(copied, rows[start : start + len(copied)])

    alone, whole = "ringmap, pixels", "ringmap, all columns and flags"
    bare = "memcpy of as many pixels of the same file, contiguous"
    calls = {
        alone: lambda: buffer.sample(size, window=window, columns=("pixels",), out=kept),
        whole: lambda: buffer.sample(size, window=every, out=into),
        bare: memcpy,
    }
    threads, buffer.threads = buffer.threads, 1
    table.add_all(in_turn(calls, place.size(60, 2), burst=place.size(3, 2)))
    buffer.threads = threads
    table.faster(alone, bare, at_least=0.85)
    table.faster(whole, bare)
    return table


# -- beside loops --------------------------------------------------------------------------------


def _sums(place: Place) -> list[Table]:
    """Return the tables of NStep and ReturnToGo."""
    length, episodes, n, gamma = 1000, place.size(400, 20), 64, 0.99
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(episodes, length))
    buffer = ReplayBuffer(episodes * length, seed=0, reward_at="same")
    for values in rewards:
        buffer.write_episode({"reward": values})
    window, anchors = {"sum": NStep(n, gamma), "at": Index()}, slice(0, -n)
    warm = {"return": ReturnToGo(), "at": Index()}

    def drawn(window: dict[str, Any], columns: tuple[str, ...], **options: Any) -> Any:
        return buffer.sample(BATCH, window=window, columns=columns, **options)

    # Equal to a plain loop first.
    batch = drawn(window, ("sum", "at"), anchors=anchors)
    for i, (ep, t) in enumerate(zip(batch["at_episode"], batch["at_step"], strict=True)):
        plain = sum(gamma**k * rewards[ep, t + k] for k in range(n))
        assert np.isclose(batch["sum"][i], plain), "n-step sum"
    batch = drawn(warm, ("return", "at"))
    for i, (ep, t) in enumerate(zip(batch["at_episode"], batch["at_step"], strict=True)):
        assert np.isclose(batch["return"][i], rewards[ep, t:].sum()), "return-to-go"

    def by_hand() -> Array:
        found = np.empty(BATCH)
        for i in range(BATCH):
            ep, t = rng.integers(episodes), rng.integers(length)
            total = np.zeros_like(rewards[ep, t:])
            total[-1] = rewards[ep, -1]
            for k in range(len(total) - 2, -1, -1):
                total[k] = rewards[ep, t + k] + total[k + 1]
            found[i] = total[0]
        return found

    n_step = Table(f"sample({BATCH}) of {n}-step sums of rewards, the draw included")
    name = f"ringmap, NStep({n})"
    calls: dict[str, Callable[[], object]] = {name: lambda: drawn(window, ("sum",))}
    n_step.add_all(in_turn(calls, place.size(100, 2), burst=5))
    n_step.bar("NStep, ms, median", n_step.times[name]["median"] * 1e3, at_most=0.3)

    returns = Table(f"sample({BATCH}) of returns-to-go in {episodes} episodes of {length:,} steps, the draw included")
    known, cold = "ringmap, ReturnToGo, sums known", "ringmap, ReturnToGo, a new one for each batch"
    discounted = "ringmap, ReturnToGo(0.99), a new one for each batch"
    loop = "a loop over the steps, as Decision Transformer's"
    calls = {
        known: lambda: drawn(warm, ("return",)),
        cold: lambda: drawn({"return": ReturnToGo()}, ("return",)),
        discounted: lambda: drawn({"return": ReturnToGo(0.99)}, ("return",)),
    }
    for _ in range(20):
        calls[known]()
    returns.add_all(in_turn(calls, place.size(40, 2), burst=place.size(5, 2)))
    returns.add_all(in_turn({loop: by_hand}, place.size(3, 1)))
    returns.bar("sums known, ms, median", returns.times[known]["median"] * 1e3, at_most=0.3)
    returns.bar("cold, ms, median", returns.times[cold]["median"] * 1e3, at_most=2)
    returns.faster(known, loop)
    return [n_step, returns]
