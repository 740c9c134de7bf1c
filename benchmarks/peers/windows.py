"""Datasets of windows around a step: 2 pictures and 16 actions, edges repeated, one item at a time.

LeRobot 0.4.4 requires torch<2.11, so its `delta_timestamps` are restated, over tensors that are decoded already: no
PNG, no Arrow. diffusion_policy is no package; its `SequenceSampler` is restated over arrays in RAM, as its
`ReplayBuffer` loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["DONE", "SEEN", "DeltaTimestamps", "OverHdf5", "SequenceSampler"]

Array = np.ndarray[Any, np.dtype[Any]]

SEEN, DONE = range(-1, 1), range(-1, 15)
"""Offsets of pictures and of actions: those of a diffusion policy."""


class DeltaTimestamps:
    """LeRobot's `__getitem__`: the row itself, then a stack of the clamped rows of each key that has
    `delta_timestamps`."""

    def __init__(self, columns: Mapping[str, Array], length: int) -> None:
        self.columns, self.length = {name: torch.from_numpy(rows) for name, rows in columns.items()}, length
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


class SequenceSampler:
    """diffusion_policy's sampler: it lists the bounds of all items once. An item is one slice of each array; where that
    reaches beyond the episode, the first or last row is repeated.

    It returns steps t - 1 to t + 14 of every key, of the pictures only the first two (`key_first_k`). It returns no
    mask.
    """

    def __init__(self, columns: Mapping[str, Array], length: int) -> None:
        self.columns, self.size = columns, len(DONE)
        indices = []
        for start in range(0, len(columns["reward"]), length):
            for begin in range(-1, length - 1):
                first, end = max(begin, 0), min(begin + self.size, length)
                indices.append((start + first, start + end, first - begin))
        self.indices = np.array(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        first, end, at = self.indices[idx]
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

    @staticmethod
    def shown(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Return a batch with masks, and the reward of its own step: for the proof alone."""
        steps = np.asarray(batch["reward"])
        at = np.where(steps[:, 1] == steps[:, 0], 0, steps[:, 1])[:, None]
        masks = {
            f"{name}_is_pad": (at + np.array(offsets) < 0) | (at + np.array(offsets) >= length)
            for name, offsets in (("pixels", SEEN), ("action", DONE))
        }
        return {**batch, "reward": at[:, 0], **masks}


class OverHdf5:
    """What is written by hand: h5py, contiguous, opened once per worker, one slice per column and item, edges and
    masks."""

    def __init__(self, path: Path, columns: Mapping[str, Array], length: int) -> None:
        import h5py

        self.path, self.length, self.num_steps = path, length, len(columns["reward"])
        self.columns: dict[str, Any] | None = None
        with h5py.File(path, "w") as file:
            for name, rows in columns.items():
                file[name] = rows

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
