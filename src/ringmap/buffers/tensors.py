"""Batches as tensors on a device, nested or flat.

Not here: PyTorch's loader (datasets/loader.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.errors import InputError

__all__ = ["check_device", "to_tensors"]


def check_device(device: Any, where: str) -> Any:
    """Return the torch device, or None for NumPy arrays.

    Raises:
        InputError: there is no such device here.
    """
    if device is None:
        return None
    import torch

    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            f"{where}: device {device!r} can't be used here ({str(error).splitlines()[0]}); choose 'cpu', or None for "
            "NumPy arrays"
        ) from None
    return found


def to_tensors(batch: Any, device: Any, pin_memory: bool = False) -> Any:
    """Return nested arrays as tensors on a device; those that stay on the CPU share the arrays' memory.

    Args:
        batch: an array, or a mapping of such.
        device: a torch device.
        pin_memory: whether to go by way of page-locked memory, without waiting for the copy.
    """
    if isinstance(batch, dict):
        return {name: to_tensors(value, device, pin_memory) for name, value in batch.items()}
    import torch

    if batch.dtype.kind in "SUMm":
        return batch
    tensor = torch.from_numpy(np.ascontiguousarray(batch))
    if pin_memory:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=pin_memory)
