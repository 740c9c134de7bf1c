"""The form in which columns are returned: NumPy arrays, tensors or a TensorDict, and the device of tensors.

Invariants: tensors that stay on the CPU share the memory of the arrays; text becomes lists, since no tensor holds it.
Not here: what the columns hold, how flat columns become nested (nested.py), PyTorch's loader
(datasets/worker_slots.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.storage.columns.values import nested

__all__ = ["Emit", "as_tensordict", "check_device"]


@dataclass(frozen=True)
class Emit:
    """The output that a caller asked for.

    `to`: "numpy", "torch", "tensordict", or None for the form that fits; `device`: the device of tensors; `pin_memory`:
    whether tensors go through page-locked memory, without waiting for the copy.
    """

    to: str | None = None
    device: Any = None
    pin_memory: bool = False

    def check(self, where: str, known: tuple[str, ...] = ("numpy", "torch", "tensordict")) -> None:
        """Raise InputError for options that contradict, MissingExtraError for a package that is not installed."""
        if self.to not in (None, *known):
            raise InputError(f"{where}: to must be one of {(None, *known)}, got {self.to!r}")
        if self.to == "numpy" and self.wants_tensors:
            raise InputError(f"{where}: device and pin_memory are for tensors, but to='numpy'")
        if self.to == "tensordict":
            require("torchrl", where)
        if self.to == "torch" or self.wants_tensors:
            require("torch", where, instead="ask for to='numpy'")
        check_device(self.device, where)

    @property
    def wants_tensors(self) -> bool:
        """Whether a device or page-locked memory was asked for."""
        return self.device is not None or self.pin_memory

    @property
    def plain(self) -> str:
        """The form that fits data without TensorDicts."""
        return self.to or ("torch" if self.wants_tensors else "numpy")

    def arrays(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns as NumPy arrays."""
        return {n: v.cpu().numpy() if hasattr(v, "cpu") else v for n, v in columns.items()}

    def tensors(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns as tensors on the device."""
        return {name: self._tensor(values) for name, values in columns.items()}

    def _tensor(self, values: Any) -> Any:
        from ringmap.datasets.worker_slots import as_tensor

        made = as_tensor(values) if isinstance(values, np.ndarray) else values
        if not hasattr(made, "to"):
            return made
        if self.pin_memory:
            made = made.pin_memory()
        if self.device is None:
            return made
        return made.to(self.device, non_blocking=self.pin_memory)


def check_device(device: Any, where: str) -> Any:
    """Return the torch device, or None if no device is asked for.

    Raises:
        MissingExtraError: torch is not installed.
        InputError: this machine has no such device.
    """
    if device is None:
        return None
    require("torch", where, instead="ask for NumPy arrays with device=None")
    import torch

    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"{where}: device {device!r} can't be used here ({str(error).splitlines()[0]}); choose 'cpu', or None"
        ) from None
    return found


def as_tensordict(columns: Mapping[str, Any], size: int, deep: bool, where: str) -> Any:
    """Return flat columns of tensors as a TensorDict of batch size `[size]`, nested if `deep`.

    Raises:
        MissingExtraError: tensordict is not installed.
    """
    made = nested(columns) if deep else dict(columns)
    require("torchrl", where)
    from tensordict import TensorDict

    return TensorDict(made, batch_size=[size])
