"""Checks a dataset before the package `minari` opens it: that package trusts what it reads.

    metadata.json without spaces -> minari makes the environment that the file names: any callable, any arguments
    main_data.hdf5               -> links and storage elsewhere are followed, shapes are believed

Invariants: reads only; nothing that is refused was handed to minari, nor to a decoder of images.
Not here: reading (reader.py).
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

from ringmap.errors import CorruptError
from ringmap.formats.common.safe_hdf5 import check_link, datasets
from ringmap.formats.common.untrusted import (
    LARGEST_ROW,
    kind_at,
    read_json,
    refuse_links,
)
from ringmap.formats.media.images import picture_of

__all__ = ["refuse_episode", "refuse_harm"]

_HDF5 = "main_data.hdf5"

_COUNTED = 1000
"""Steps that a byte may stand for, packed."""


def refuse_harm(folder: str) -> None:
    """Look at a dataset's `data` folder as a whole.

    Raises:
        CorruptError: opening it would run code, or lead out of it.
    """
    refuse_links(folder)
    path = os.path.join(folder, "metadata.json")
    found = read_json(path)
    stored = sum(os.stat(os.path.join(at, name)).st_size for at, _, names in os.walk(folder) for name in names)
    for name in ("total_episodes", "total_steps"):
        count = found.get(name, 0) if isinstance(found, dict) else -1
        if type(count) is not int or not 0 <= count <= _COUNTED * stored:
            raise CorruptError(
                f"{path}: {name!r} is {count!r}, expected at most {_COUNTED} for each of {stored:,} bytes"
            )
    for name in ("observation_space", "action_space"):
        space = found.get(name) if isinstance(found, dict) else None
        if not isinstance(space, str | dict):
            raise CorruptError(
                f"{path}: has no {name!r}: minari would make the environment that the file names to find out, "
                "which runs code of its choice; add the spaces (Minari's documentation, Dataset Standards)"
            )
        try:
            _check_space(json.loads(space) if isinstance(space, str) else space, path)
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptError(f"{path}: {name!r} makes no sense: {error}") from None
    if kind_at(os.path.join(folder, _HDF5)) == "":
        with _opened(folder) as file:
            for name in file:
                check_link(file, name)


def refuse_episode(folder: str, number: int) -> None:
    """Look at all that is stored of an episode, before it is read.

    Raises:
        CorruptError: it lies elsewhere, is larger than the file can hold, or has images that are none.
    """
    if kind_at(os.path.join(folder, _HDF5)):
        return
    with _opened(folder) as file:
        name = f"episode_{number}"
        if name in file:
            check_link(file, name)
            for _, dataset in datasets(file[name]):
                _check_dataset(dataset)


def _opened(folder: str) -> Any:
    import h5py

    return h5py.File(os.path.join(folder, _HDF5), "r")


def _check_dataset(found: Any) -> None:
    import h5py

    path = f"{found.file.filename}: {found.name}"
    if h5py.check_string_dtype(found.dtype) is not None:  # what a Text space holds
        _check_texts(found, path)
    elif h5py.check_vlen_dtype(found.dtype) is not None:  # images, each as the bytes of a file
        for image in found[()]:
            picture_of(image.tobytes(), path)


def _check_texts(found: Any, path: str) -> None:
    """Raise unless the texts of an episode fit an array as wide as the longest: many may be the same bytes."""
    longest = found.dtype.itemsize
    if found.dtype.kind == "O":  # one at a time: together they may be larger than the file by far
        longest = max((len(found[number]) for number in range(len(found))), default=0)
    nbytes, stored = 4 * longest * len(found), os.stat(found.file.filename).st_size
    if nbytes > max(LARGEST_ROW, _COUNTED * stored):
        raise CorruptError(
            f"{path}: has {len(found):,} texts of up to {longest:,} bytes, which take {nbytes:,}, in a file of "
            f"{stored:,}"
        )


def _check_space(space: Any, path: str, depth: int = 0) -> None:
    """Raise unless the parts of a space are of a size that an array is made for."""
    if not isinstance(space, dict) or depth > 32:
        raise ValueError("is no space")
    shape = space.get("shape", ())
    if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * 8 > LARGEST_ROW:
        raise ValueError(f"shape {shape!r}")
    inner = space.get("subspaces", ())
    for one in inner.values() if isinstance(inner, dict) else inner:
        _check_space(one, path, depth + 1)
