"""What do windows cost, beside plain clips, other people's loaders, and memory?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.harness.data import Stored, columns_of, noise
from benchmarks.harness.place import Place
from benchmarks.harness.table import Table
from benchmarks.harness.timing import passes
from benchmarks.peers.base import release
from benchmarks.peers.windows import DONE, SEEN, DeltaTimestamps, OverHdf5, SequenceSampler
from ringmap import ReplayBuffer
from ringmap.data import Index, NStep, ReturnToGo, Sequences, Window

Array = np.ndarray[Any, np.dtype[Any]]
Calls = dict[str, Callable[[], object]]

BATCH, HISTORY = 256, 4
OURS, CLIPS = "ringmap", "ringmap, sample() of clips"
POLICY = {"pixels": Window(SEEN, pad="edge"), "action": Window(DONE, pad="edge")}


def windows(place: Place) -> Iterator[Table]:
    """Time windows beside clips, beside other loaders, sequences beside memcpy, and sums beside loops."""
    length, folder = 100, place.new_folder()
    frames, steps = noise(length), np.arange(length, dtype=np.float32)

    def episode(number: int) -> dict[str, Array]:
        """Return 64x64x3 pixels and actions that hold the episode and the step."""
        action = np.stack([np.full(length, number, np.float32), steps], 1)
        return {"pixels": frames[number % len(frames)], "action": action, "reward": steps}

    stored = Stored(episode, "action", place.size(120, 12), length)
    buffer = place.closing(ReplayBuffer(stored.num_steps, HISTORY, path=folder / "buffer", seed=0, reward_at="same"))
    for one in stored:
        buffer.write_episode(one)
    yield _clips(place, stored, buffer)
    yield from _loaders(place, stored, buffer, folder)
    yield _sequences(place, stored, buffer, folder)
    yield from _sums(place)


def _prove(stored: Stored, batch: Mapping[str, Any], pixels: range, action: range) -> None:
    """Raise unless pixels and actions are those around the step that `reward` names, clamped, with the right masks."""
    clips = {name: np.asarray(values) for name, values in batch.items()}
    numbers, steps = clips["action"][:, 0, 0].astype(int), clips["reward"].astype(int)
    assert len(np.unique(numbers)) > 1, "every item is of one episode"
    for name, offsets in (("pixels", pixels), ("action", action)):
        wanted = steps[:, None] + np.array(offsets)
        inside = (wanted >= 0) & (wanted < stored.length)
        assert (clips[f"{name}_is_pad"] == ~inside).all(), f"mask of {name}"
        for found, number, near in zip(clips[name], numbers, wanted.clip(0, stored.length - 1), strict=True):
            assert (found == stored.episode(int(number))[name][near]).all(), f"{name} of another step"


def _clips(place: Place, stored: Stored, buffer: ReplayBuffer) -> Table:
    table = Table(
        f"sample({BATCH}) of {HISTORY} rows of 64x64x3 pixels and 2 small columns, {stored.num_steps:,} steps stored"
    )
    plain = {name: Window(range(HISTORY)) for name in buffer.column_names}
    around = range(-1, HISTORY - 1)
    padded = {name: Window(around, pad="edge") for name in buffer.column_names}
    stored.assert_holds(buffer.sample(BATCH), BATCH, HISTORY)
    stored.assert_holds(buffer.sample(BATCH, window=plain), BATCH, HISTORY)
    batch = buffer.sample(BATCH, window=padded)
    _prove(stored, {**batch, "reward": batch["reward"][:, 1]}, around, around)
    _prove(stored, buffer.sample(BATCH, window=POLICY), SEEN, DONE)
    bare, ends = "ringmap, a window without padding", "ringmap, a window with edges and masks"
    policy, sixteen = "ringmap, 2 pictures and 16 actions", "ringmap, sample() of clips of 16 of both"
    calls: Calls = {
        CLIPS: lambda: buffer.sample(BATCH),
        bare: lambda: buffer.sample(BATCH, window=plain),
        ends: lambda: buffer.sample(BATCH, window=padded),
        policy: lambda: buffer.sample(BATCH, window=POLICY),
        sixteen: lambda: buffer.sample(BATCH, 16),
    }
    table.time(calls, place.size(100, 2), place.size(5, 2))
    table.ratio(bare, CLIPS, at_most=1.05)
    table.ratio(ends, CLIPS, at_most=1.2)
    table.faster(policy, sixteen)
    return table


def _loaders(place: Place, stored: Stored, buffer: ReplayBuffer, folder: Path) -> Iterator[Table]:
    chunks = list(stored.chunks())
    arrays = {name: np.concatenate([c[name] for c in chunks]) for name in stored.first}
    del chunks
    sampler = "diffusion_policy's SequenceSampler over arrays in RAM"
    datasets: dict[str, tuple[Any, float | None]] = {
        OURS: (buffer.view(window=POLICY), None),
        "LeRobot's delta_timestamps over tensors in RAM": (DeltaTimestamps(arrays, stored.length), 20),
        sampler: (SequenceSampler(arrays, stored.length), 3),
        f"a Dataset over h5py {release('h5py')}": (OverHdf5(folder / "windows.h5", arrays, stored.length), 10),
    }
    for workers in (0, 2):
        table = Table(
            f"a pass of DataLoader(batch_size={BATCH}, shuffle=True, num_workers={workers}): 2 pictures of 64x64x3 and "
            f"16 actions around each of {stored.num_steps:,} steps, edges repeated; seconds per batch"
        )
        calls = {
            name: lambda workers, data=data: DataLoader(data, BATCH, shuffle=True, num_workers=workers)
            for name, (data, _) in datasets.items()
        }
        for name, call in calls.items():
            batch = next(iter(call(workers)))
            _prove(stored, SequenceSampler.shown(batch, stored.length) if name == sampler else batch, SEEN, DONE)
        table.add_all(passes(calls, workers, place.size(4, 1), place.size(6, 1)))
        for name, (_, bar) in list(datasets.items())[1:]:
            table.faster(OURS, name, None if workers else bar)
        table.notes.append(
            "LeRobot requires torch<2.11 and does not install beside the torch of this run: its loader is restated, "
            "without its "
            "Arrow table, PNG files and conversion to floats; diffusion_policy's sampler is restated, and has no masks"
        )
        yield table


def _sequences(place: Place, stored: Stored, buffer: ReplayBuffer, folder: Path) -> Table:
    size, length, rng = 16, 64, np.random.default_rng(0)
    table = Table(
        f"sample({size}, window=Sequences({length})) of 64x64x3 pixels into reused memory, one thread, "
        f"{stored.num_steps:,} steps stored"
    )
    rows = columns_of(folder / "buffer")["pixels"][: stored.num_steps]
    every, window = Sequences(length), Sequences(length)
    batch = buffer.sample(size, window=every)
    stored.assert_holds(batch, size, length)
    steps = batch["reward"].astype(int)
    assert (batch["is_first"] == (steps == 0)).all(), "is_first"
    assert (batch["is_last"] == (steps == stored.length - 1)).all(), "is_last"
    kept, into = {"pixels": batch["pixels"].copy()}, {name: values.copy() for name, values in batch.items()}
    copied = np.empty((size * length, *rows.shape[1:]), rows.dtype)

    def memcpy() -> None:
        start = int(rng.integers(len(rows) - len(copied)))
        np.copyto(copied, rows[start : start + len(copied)])

    alone, whole = "ringmap, pixels", "ringmap, all columns and flags"
    bare = "memcpy of as many pixels of the same file, contiguous"
    calls: Calls = {
        alone: lambda: buffer.sample(size, window=window, columns=("pixels",), out=kept),
        whole: lambda: buffer.sample(size, window=every, out=into),
        bare: memcpy,
    }
    threads, buffer.threads = buffer.threads, 1
    table.time(calls, place.size(60, 2), place.size(3, 2))
    buffer.threads = threads
    table.faster(alone, bare, at_least=0.85)
    table.faster(whole, bare)
    return table


def _sums(place: Place) -> Iterator[Table]:
    """Time NStep and ReturnToGo."""
    length, episodes, n, gamma = 1000, place.size(400, 20), 64, 0.99
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(episodes, length))
    buffer = ReplayBuffer(episodes * length, seed=0, reward_at="same")
    for values in rewards:
        buffer.write_episode({"reward": values})

    def drawn(computed: Any, **options: Any) -> Any:
        window = {"sum": computed, "at": Index()}
        return buffer.sample(BATCH, window=window, columns=("sum", *options.pop("also", ())), **options)

    n_steps, to_go = NStep(n, gamma), ReturnToGo()
    for computed, options, plain in (  # equal to a plain loop first
        (n_steps, {"anchors": slice(0, -n)}, lambda ep, t: sum(gamma**k * rewards[ep, t + k] for k in range(n))),
        (to_go, {}, lambda ep, t: rewards[ep, t:].sum()),
    ):
        batch = drawn(computed, also=("at",), **options)
        for found, ep, t in zip(batch["sum"], batch["at_episode"], batch["at_step"], strict=True):
            assert np.isclose(found, plain(ep, t)), type(computed).__name__
    table = Table(f"sample({BATCH}) of {n}-step sums of rewards, the draw included")
    name = f"ringmap, NStep({n})"
    table.time({name: lambda: drawn(n_steps)}, place.size(100, 2), 5)
    table.limit(name, "ms", at_most=0.3)
    yield table

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

    table = Table(f"sample({BATCH}) of returns-to-go in {episodes} episodes of {length:,} steps, the draw included")
    known, cold = "ringmap, ReturnToGo, sums known", "ringmap, ReturnToGo, a new one for each batch"
    loop = "a loop over the steps, as Decision Transformer's"
    calls: Calls = {
        known: lambda: drawn(to_go),
        cold: lambda: drawn(ReturnToGo()),
        "ringmap, ReturnToGo(0.99), a new one for each batch": lambda: drawn(ReturnToGo(0.99)),
    }
    for _ in range(20):
        calls[known]()
    table.time(calls, place.size(40, 2), place.size(5, 2))
    table.time({loop: by_hand}, place.size(3, 1))
    table.limit(known, "ms", at_most=0.3)
    table.limit(cold, "ms", at_most=2)
    table.faster(known, loop)
    yield table
