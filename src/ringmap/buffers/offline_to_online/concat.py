"""Joins two parts of a batch: offline rows first, in the columns of both.

Invariants: both parts have the same columns, of the same shapes, or nothing is returned.
Not here: where the parts come from (batch_source.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringmap.datasets.image_axes import PictureAxes, channels_are_last
from ringmap.errors import InputError, UnknownColumnError
from ringmap.storage.columns.copying import empty

__all__ = ["joined"]


def joined(offline: dict[str, Any], online: dict[str, Any], axes: PictureAxes, where: str) -> dict[str, Any]:
    """Join two batches, in the column order of the first.

    Args:
        offline: rows or clips.
        online: the same columns, of the same shapes and axes.
        axes: of the pictures that are offline.
        where: for messages.

    Raises:
        UnknownColumnError: they have other columns.
        InputError: a column has another shape, or its channels elsewhere.
    """
    if offline.keys() != online.keys():
        raise UnknownColumnError(
            f"{where}: the halves have different columns: only offline {sorted(offline.keys() - online.keys())}, "
            f"only online {sorted(online.keys() - offline.keys())}; store the same ones"
        )
    batch: dict[str, Any] = {}
    for name, first in offline.items():
        second = online[name]
        spec, turned = axes.get(name, (None, False))
        if turned and spec is not None and channels_are_last(second, spec):
            raise InputError(
                f"{where}: column {name!r} comes with its channels first offline and last online; load with "
                "layout='HWC'"
            )
        if tuple(first.shape[1:]) != tuple(second.shape[1:]):
            raise InputError(
                f"{where}: column {name!r} has shape {tuple(first.shape[1:])} offline and "
                f"{tuple(second.shape[1:])} online; store it alike (for images: load with layout='HWC')"
            )
        if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
            shape = len(first) + len(second), *first.shape[1:]
            into = empty(shape, np.result_type(first, second))
            batch[name] = np.concatenate([first, second], out=into)
        else:
            import torch

            both = [torch.as_tensor(part) for part in (first, second)]
            batch[name] = torch.cat([part.to(both[0].device) for part in both])
    return batch
