"""A batch that knows which clips it holds: a dict of columns, with the attributes `ids`, `weights` and `redrawn`; and
the form in which columns are returned: arrays, tensors or a TensorDict.

Invariants: keys are columns and nothing else; the attributes belong to this batch, whatever is drawn later; tensors
that stay on the CPU share the memory of the arrays; text becomes lists, since no tensor holds it.
Not here: where columns come from (sampled.py, transitions/), PyTorch's loader (datasets/worker_slots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ringmap.errors import InputError
from ringmap.extras import require
from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.values import nested

__all__ = ["Batch", "Emit", "as_tensordict", "check_device", "rows_of"]

Array = np.ndarray[Any, np.dtype[Any]]
V = TypeVar("V")


class Batch(dict[str, V]):
    """Column -> `(B, ...)`: what `sample()`, `batches()` and a DataLoader return. A plain dict with attributes.

    Args:
        columns: name -> values.
        ids: int64 `(B,)`, for `update_priorities`: the position of each clip, unique to that clip. Always an array.
        weights: float32 `(B,)`, factors for the losses, of the same kind as the columns; None where the sampler
            draws without priorities.
        asked: the ids that were asked for, or drawn; None: those that came.
        numbered: the numbers of episodes in it, and their names; None: it has none, or they are those of a view.
    """

    __slots__ = ("_asked", "ids", "numbered", "weights")

    def __init__(
        self,
        columns: Mapping[str, V] | Iterable[tuple[str, V]] = (),
        ids: Array | None = None,
        weights: Any = None,
        asked: Array | None = None,
        numbered: tuple[Array, Array] | None = None,
    ) -> None:
        dict.__init__(self, columns)
        self.ids = ids
        self.weights = weights
        self._asked = asked
        self.numbered = numbered

    @property
    def redrawn(self) -> Array:
        """Which clips came in place of others, which had been evicted, bool `(B,)`."""
        if self.ids is None or self._asked is None:
            return np.zeros(0 if self.ids is None else len(self.ids), np.bool_)
        found: Array = self.ids != self._asked
        return found

    @property
    def like(self) -> Callable[..., Batch[Any]]:
        """What makes a batch of other columns, with the attributes of this one. It can be pickled."""
        return partial(Batch, ids=self.ids, weights=self.weights, asked=self._asked, numbered=self.numbered)

    def copy(self) -> Batch[V]:
        """Return a shallow copy, attributes included."""
        return self.like(self)

    def mapped(self, convert: Callable[[Any], Any]) -> Batch[Any]:
        """Return the batch with every column, also of nested ones, and the weights converted."""
        weights = None if self.weights is None else convert(self.weights)
        return Batch(_mapped(self, convert), self.ids, weights, self._asked, self.numbered)


def _mapped(columns: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    return {n: _mapped(v, convert) if isinstance(v, dict) else convert(v) for n, v in columns.items()}


def rows_of(clips: Mapping[str, Any], schema: Schema | None, count: int) -> dict[str, Any]:
    """Return clips of one step without their time axis, each column in its stored shape."""
    shapes = {spec.name: spec.shape for spec in (schema.columns if schema is not None else ())}
    return {name: v.reshape(count, *shapes[name]) if name in shapes else v[:, 0] for name, v in clips.items()}


@dataclass(frozen=True)
class Emit:
    """The output that a caller asked for: `to` "numpy", "torch", "tensordict", or None for the form that fits; the
    device of tensors; whether they go there through page-locked memory, without waiting for the copy."""

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
    """Return flat columns of tensors as a TensorDict of batch size `[size]`, nested if `deep`."""
    made = nested(columns) if deep else dict(columns)
    require("torchrl", where)
    from tensordict import TensorDict

    return TensorDict(made, batch_size=[size])
