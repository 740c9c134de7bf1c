"""HDF5 files of other programs: what they hold, and a trial, in memory, of what they can hold.

    root --fits--> which format it is        group --datasets--> ("obs/camera", dataset), ...

    attribute, name of a dataset -> a file in memory -> read back -> equal? else why not

HDF5's limits (64 KB an attribute, no NUL in names and texts, UTF-8 alone, a name that is a group and a dataset) are not
listed here: h5py is asked, before an episode is logged that could not be exported.
Invariants: reads only; nothing on the disk is touched; no link to elsewhere is followed, nothing is opened that its
file can't hold.
Not here: the layouts (d4rl.py, robomimic, minari, hdf5).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ringmap.errors import CorruptError
from ringmap.formats.common.untrusted import LARGEST_ROW, check_row, refuse_vast

__all__ = [
    "check_link",
    "datasets",
    "group_of",
    "has_own",
    "is_c_text",
    "is_text",
    "loaded",
    "member_of",
    "refuse_sparse",
    "refused_attribute",
    "refused_names",
    "refused_rows",
    "root_fits",
    "storable",
]


Array = np.ndarray[Any, np.dtype[Any]]

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
    """Raise unless a member of a group lies in its own file."""
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
            refuse_sparse(member.file.filename, member.name.lstrip("/"), member)
            yield prefix + name, member


def is_text(dtype: np.dtype[Any]) -> bool:
    """Return whether h5py reads rows of a dtype as texts of any length."""
    import h5py

    return h5py.check_string_dtype(dtype) is not None and dtype.kind == "O"


def refuse_sparse(path: str, name: str, dataset: Any) -> None:
    """Raise if a dataset of an HDF5 file (h5py) keeps rows in other files, or declares more than its file can hold.

    HDF5 would follow the first, and make room for the second before it reads."""
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
    # The file's length, not what HDF5 says is stored: for that it would walk the places of all chunks.
    refuse_vast(f"{path}: column {name!r}", dataset.shape[0] * row, dataset.file.id.get_filesize(), ratio)


_PYTHONS = (np.bool_, np.int64, np.float64, np.str_, np.bytes_)

_RAISED = (OSError, RuntimeError, ValueError, TypeError, LookupError, OverflowError)


def storable(value: Any) -> Any:
    """Return a value as h5py stores it: texts as strings of any length."""
    import h5py

    array = np.asarray(value)
    if array.dtype.kind != "U":
        return value
    return array.astype(h5py.string_dtype()) if array.ndim else str(array[()])


def loaded(value: Any) -> Any:
    """Return a value that h5py has read: Python's own number where it has one of that type (bool, int64, float64), else
    NumPy's."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        texts = [v.decode() if isinstance(v, bytes) else str(v) for v in value.reshape(-1).tolist()]
        return np.array(texts, str).reshape(value.shape)
    return value.item() if isinstance(value, _PYTHONS) else value


def refused_rows(rows: Array) -> str | None:
    """Return why a dataset can't hold rows as the readers of others expect them; None if it can."""
    if rows.dtype.kind not in "biufcSU":
        return "HDF5 has no type for it; convert it to numbers"
    if rows.dtype.kind == "U":
        bad = next((text for text in rows.reshape(-1).tolist() if not is_c_text(text)), None)
        if bad is not None:
            return f"text of HDF5 is UTF-8 without NUL, and it has {bad!r}"
    return None


def refused_attribute(name: str, value: Any) -> str | None:
    """Return why no attribute can be called so and hold this value; None if it is read back as it is given.

    Cost: 0.3 ms; 1 us for numbers and short texts with names of letters and digits.
    """
    plain = type(value) in (float, bool) or (type(value) is int and abs(value) < 1 << 63)
    short = type(value) is str and len(value) < 1000 and is_c_text(value)
    if (plain or short) and name.isidentifier() and len(name) < 1000:
        return None
    if value is None or np.asarray(value).dtype.kind not in "biufcSU":
        return "it is no attribute of HDF5: expected numbers of up to 64 bits, flags, text, or arrays of them"
    with _in_memory() as file:
        try:
            file.attrs[name] = storable(value)
            names = list(file.attrs)
            if names != [name]:
                return f"its name would be {names[0]!r} in HDF5"
            back = np.asarray(loaded(file.attrs[name]))
        except _RAISED as error:
            return f"HDF5 has no attribute for it ({error})"
    array = np.asarray(value)
    kinds = {array.dtype.kind, back.dtype.kind}
    same = array.shape == back.shape and (len(kinds) == 1 or kinds == {"i", "u"})
    is_float = array.dtype.kind in "fc"
    if same and np.array_equal(array, back, equal_nan=is_float):
        return None
    return f"an attribute of HDF5 would be read back as {back!r:.80}"


def refused_names(columns: Iterable[tuple[str, str, np.dtype[Any]]]) -> dict[str, str]:
    """Return which columns can't be datasets side by side, by their names or dtypes: name -> why.

    Cost: about 5 ms for new columns; 10 us for those that were asked for before.
    """
    asked = ((n, path, np.dtype("U1") if d.kind == "U" else d) for n, path, d in columns)
    return dict(_refused_names(tuple(asked)))


@functools.lru_cache(64)
def _refused_names(columns: tuple[tuple[str, str, np.dtype[Any]], ...]) -> dict[str, str]:
    refused = {}
    with _in_memory() as file:
        for name, path, dtype in columns:
            parts = path.split("/")
            if not all(parts) or {".", ".."} & {*parts} or "\0" in path:
                refused[name] = f"{path!r} is no path in a file of HDF5"
                continue
            try:
                file.create_dataset(path, data=storable(np.empty(0, dtype)))
            except _RAISED as error:
                refused[name] = f"there can be no {path!r} beside the others in a file of HDF5 ({error})"
    return refused


def is_c_text(text: str) -> bool:
    """Return whether a text is UTF-8 without NUL."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


@contextlib.contextmanager
def _in_memory() -> Iterator[Any]:
    import h5py

    with h5py.File("trial", "w", driver="core", backing_store=False) as file:
        yield file
