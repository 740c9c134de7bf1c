"""The tree of an HDF5 file that another program wrote: its root, and all datasets below a group.

    root --fits--> which format it is        group --datasets--> ("obs/camera", dataset), ...

Invariants: reads only; no link to elsewhere is followed, nothing is opened that its file can't hold.
Not here: the layouts (d4rl.py, robomimic, minari, hdf5).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringmap.errors import CorruptError
from ringmap.formats.common.untrusted import LARGEST_ROW, check_row, refuse_vast

__all__ = ["check_link", "datasets", "group_of", "has_own", "is_text", "member_of", "refuse_sparse", "root_fits"]

_DEEPEST = 32

_FILTERED = 100_000
"""Bytes that a filter of HDF5 may pack into one: Zstandard's best, for constant rows."""


def root_fits(path: str | os.PathLike[str], fits: Callable[[Any], bool]) -> bool:
    """Return whether a path is an HDF5 file whose root fits. Never raises."""
    if not os.path.isfile(path):  # opening a pipe would wait for its other end
        return False
    import h5py

    try:
        if not h5py.is_hdf5(path):
            return False
        # Through a file of ours HDF5 locks nothing: nobody is kept out by a look.
        with open(path, "rb") as raw, h5py.File(raw, "r") as root:
            return fits(root)
    except (OSError, KeyError, RuntimeError, ValueError):
        return False


def has_own(group: Any, name: str) -> bool:
    """Return whether a group has a member that lies in its own file. Opens nothing."""
    import h5py

    return isinstance(group.get(name, getlink=True), h5py.HardLink)


def check_link(group: Any, name: str) -> None:
    """Raise unless a member of a group lies in its own file.

    Raises:
        CorruptError: it is a link to elsewhere.
        KeyError: there is none.
    """
    import h5py

    if group.id.links.get_info(name.encode(errors="surrogateescape")).type != h5py.h5l.TYPE_HARD:
        raise CorruptError(
            f"{group.file.filename}: {group.name.rstrip('/')}/{name} is a link to elsewhere, which is not followed; "
            "copy what it stands for into this file (h5repack)"
        )


def member_of(parent: Any, name: str) -> Any:
    """Return a member that lies in its group's own file.

    Raises:
        CorruptError: it is a link to elsewhere.
        KeyError: there is none.
    """
    check_link(parent, name)
    return parent[name]


def group_of(parent: Any, name: str) -> Any:
    """Return a member that is a group, as `member_of`."""
    import h5py

    found = member_of(parent, name)
    if not isinstance(found, h5py.Group):
        raise CorruptError(f"{parent.file.filename}: {parent.name}/{name} is no group")
    return found


def datasets(group: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the dataset of all that is below a group.

    Raises:
        CorruptError: a link leads elsewhere, or a dataset is larger than its file can hold.
    """
    import h5py

    if depth > _DEEPEST:  # a group that holds itself
        raise CorruptError(f"{group.file.filename}: {group.name} is nested too deep")
    for name in group:
        check_link(group, name)
        member = group[name]
        if isinstance(member, h5py.Group):
            yield from datasets(member, f"{prefix}{name}/", depth + 1)
        elif isinstance(member, h5py.Dataset):
            refuse_sparse(member.file.filename, member.name, member)
            yield prefix + name, member


def is_text(dtype: np.dtype[Any]) -> bool:
    """Return whether h5py reads rows of a dtype as texts of any length."""
    import h5py

    return h5py.check_string_dtype(dtype) is not None and dtype.kind == "O"


def refuse_sparse(path: str, name: str, dataset: Any) -> None:
    """Raise if a dataset of an HDF5 file (h5py) keeps rows in other files, or declares more than its file can hold.

    HDF5 would follow the first, and make room for the second before it reads.

    Raises:
        CorruptError: it does.
    """
    if dataset.is_virtual or dataset.external:
        raise CorruptError(
            f"{path}: column {name!r} keeps its rows in other files, which are not followed; copy it into this file "
            "(h5repack)"
        )
    if not dataset.shape:
        return
    plist, itemsize = dataset.id.get_create_plist(), dataset.dtype.itemsize
    row = math.prod(dataset.shape[1:]) * itemsize
    check_row(path, name, row)
    if dataset.chunks is not None and math.prod(dataset.chunks) * itemsize > LARGEST_ROW:
        raise CorruptError(
            f"{path}: column {name!r} has chunks {dataset.chunks} of {dataset.dtype}, expected at most "
            f"{LARGEST_ROW:,} bytes each"
        )
    ratio = _FILTERED if plist.get_nfilters() else 1
    stored = dataset.id.get_storage_size()
    refuse_vast(f"{path}: column {name!r}", dataset.shape[0] * row, stored, ratio)
