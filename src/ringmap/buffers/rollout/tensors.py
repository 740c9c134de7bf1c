"""Steps of many environments as tensors: one for each leaf, `(steps, environments, ...)`.

    name      [t0: e0 e1 .. | t1: e0 e1 .. | ... ]      allocated once
    flat      all steps of all environments in one row, time first
    cut       the same in sequences of `length` steps, time first

Invariants: a write allocates nothing; a value that its tensor can't hold is refused; returned tensors are views.
Not here: the meaning of the names, which rows are picked (buffer.py), nested names (nested.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ringmap.buffers.nested import Leaves, leaf_array
from ringmap.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["StepTensors"]


class StepTensors:
    """The tensors of one buffer: of nested values, and float32 `(num_steps, num_envs)` of scalars."""

    def __init__(
        self, num_steps: int, num_envs: int, trees: Mapping[str, Leaves], scalars: tuple[str, ...], device: Any
    ) -> None:
        import torch

        self.trees = dict(trees)
        self.num_envs = num_envs
        self.by_name: dict[str, Tensor] = {}
        for spec in (spec for tree in trees.values() for spec in tree.columns):
            try:
                kind = torch.from_numpy(np.empty(0, spec.dtype)).dtype
            except TypeError:
                raise InputError(f"{spec.name}: no tensor holds {spec.kind}") from None
            shape = (num_steps, num_envs, *spec.shape)
            self.by_name[spec.name] = torch.zeros(shape, dtype=kind, device=device)
        for name in scalars:
            self.by_name[name] = torch.zeros(num_steps, num_envs, device=device)

    # -- in ----------------------------------------------------------------------------------

    def row(self, name: str, value: Any, where: str) -> Tensor:
        """Return a value as one step of a tensor, `(N, ...)`; `(N, 1)` is accepted for `(N,)`."""
        import torch

        target = self.by_name[name]
        expected = target.shape[1:]
        if not isinstance(value, torch.Tensor):
            value = leaf_array(value, where, name)
        try:
            row = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{where}: {name} can't be made a tensor: {error}") from None
        if row.shape != expected and row.shape == (*expected, 1):
            row = row.squeeze(-1)
        if row.shape != expected:
            raise InputError(f"{where}: {name} has shape {tuple(row.shape)}, expected {tuple(expected)}")
        if not _always_fits(row, target) and not _fits(row, target.dtype):
            raise InputError(
                f"{where}: {name} of {row.dtype} has values that {target.dtype} can't hold; convert them, or declare "
                "another dtype"
            )
        return row

    def leaves(self, name: str, value: Any, where: str) -> dict[str, Tensor]:
        """Return a nested value as one step of each of its leaves."""
        parts = self.trees[name].flatten(value, where).items()
        return {leaf: self.row(leaf, part, where) for leaf, part in parts}

    def write(self, step: int, rows: Mapping[str, Tensor]) -> None:
        """Store rows that `row` returned as one step."""
        for name, row in rows.items():
            self.by_name[name][step].copy_(row)

    def take_over(self, tensors: Mapping[str, Tensor], steps: int, where: str) -> None:
        """Store the first steps of all tensors, or nothing if names, shapes or dtypes differ."""
        ours = {n: ((steps, *t.shape[1:]), t.dtype) for n, t in self.by_name.items()}
        theirs = {n: (tuple(t.shape), t.dtype) if hasattr(t, "dtype") else t for n, t in tensors.items()}
        if ours != theirs:
            raise InputError(f"{where}: expected columns {ours}, got {theirs}")
        for name, tensor in tensors.items():
            self.by_name[name][:steps].copy_(tensor)

    # -- out ---------------------------------------------------------------------------------

    def nested(self, name: str) -> Any:
        """Return the tensors of a nested value, nested."""
        return self.trees[name].nest(self.by_name)

    def flat(self, steps: int) -> dict[str, Tensor]:
        """Return the first steps of all tensors, `(steps * N, ...)`."""
        return {n: t[:steps].reshape(-1, *t.shape[2:]) for n, t in self.by_name.items()}

    def cut(self, steps: int, length: int) -> dict[str, Tensor]:
        """Return the first steps of all tensors in sequences, `(length, steps / length * N, ...)`, earlier steps
        first."""
        found = {}
        for name, tensor in self.by_name.items():
            parts = tensor[:steps].reshape(-1, length, self.num_envs, *tensor.shape[2:])
            found[name] = parts.transpose(0, 1).reshape(length, -1, *tensor.shape[2:])
        return found


def _always_fits(row: Tensor, target: Tensor) -> bool:
    """Tell whether a cast loses at most float precision. Decides by dtype: looking at values would wait for the
    device."""
    import torch

    if row.dtype == target.dtype or row.dtype == torch.bool:
        return True
    floats = row.dtype.is_floating_point and target.dtype.is_floating_point
    return floats and torch.finfo(row.dtype).max <= torch.finfo(target.dtype).max


def _fits(row: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a cast keeps all values; of floats, whether it makes none infinite."""
    import torch

    if row.dtype.is_complex and not dtype.is_complex:
        return not bool(row.imag.any()) and _fits(row.real, dtype)
    made = row.to(dtype)
    if row.dtype.is_floating_point and dtype.is_floating_point:
        return not bool((made.isinf() & ~row.isinf()).any())
    return torch.equal(made.to(row.dtype), row)
