"""A trial, in memory, of what another library's HDF5 file can hold: before an episode is logged.

    attribute, name of a dataset -> a file in memory -> read back -> equal? else why not

HDF5's limits (64 KB an attribute, no NUL in names and texts, UTF-8 alone, a name that is a group and a dataset) are not
listed
here: h5py is asked. An episode that was logged and can't be exported would stop every later export of its dataset.
Invariants: nothing on the disk is touched; what passes is read back as it was given.
Not here: the layouts (robomimic, minari), what is said of all that is refused (refusals.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

__all__ = ["is_c_text", "loaded", "refused_attribute", "refused_names", "refused_rows", "storable"]

Array = np.ndarray[Any, np.dtype[Any]]

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

    Args:
        columns: what to call the column, its path in the file, its dtype.

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
