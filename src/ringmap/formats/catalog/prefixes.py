"""Datasets by an id with a prefix: `"minari:mujoco/hopper/expert-v0"`.

    "minari:name"   prefix up to the first ":"   -> the loader of that prefix, called with the rest

The built-in loaders look in the download folder of the library of that name, and download nothing themselves.
Not here: paths and names of our own (load.py), reading (formats/).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringmap.errors import InputError, NotFoundError
from ringmap.storage.disk.paths import refuse_address

__all__ = ["has_prefix", "list_prefixes", "load_prefixed", "place_of", "register_dataset", "takes"]

Loader = Callable[..., Any]


def register_dataset(prefix: str, loader: Loader) -> None:
    """Let `load_dataset("prefix:rest", **options)` call `loader(rest, **options)`.

    Args:
        prefix: what stands before the first ":".
        loader: returns a dataset, a buffer, or any object that the caller of `load_dataset` can use.

    Raises:
        InputError: the prefix is empty, holds a ":" or a "/", or is taken.

    Example:
        >>> import numpy as np
        >>> from ringmap.data import ReplayBuffer, load_dataset
        >>> def ramp(name, steps=5):
        ...     buf = ReplayBuffer(max_steps=100)
        ...     buf.write_episode({"x": np.arange(steps) * float(name)})
        ...     return buf
        >>> register_dataset("ramp", ramp)
        >>> load_dataset("ramp:2.5", steps=3).get_col_data("x").tolist()
        [0.0, 2.5, 5.0]
    """
    if not isinstance(prefix, str) or not prefix or not has_prefix(f"{prefix}:") or ":" in prefix:
        raise InputError(f"register_dataset: a prefix is a non-empty string without ':' and '/', got {prefix!r}")
    if prefix in _LOADERS:
        raise InputError(f"register_dataset: prefix {prefix!r} is already registered; choose another")
    if not callable(loader):
        raise InputError(f"register_dataset: the loader of {prefix!r} must be callable")
    _LOADERS[prefix] = loader


def list_prefixes() -> list[str]:
    """Return the prefixes that `load_dataset` knows."""
    return list(_LOADERS)


def has_prefix(name: str) -> bool:
    """Return whether a name is an id with a prefix: a ":" stands in it, and before the first one no separator of
    folders.

    Example:
        >>> has_prefix("minari:kitchen/mixed-v0"), has_prefix("runs/2026-11-28T10:00")
        (True, False)
    """
    prefix, colon, _ = name.partition(":")
    return bool(colon) and not any(separator in prefix for separator in ("/", os.sep))


def takes(name: str, option: str) -> bool:
    """Return whether the loader of an id names this option among its parameters."""
    loader = _LOADERS.get(name.partition(":")[0])
    return loader is not None and option in inspect.signature(loader).parameters


def load_prefixed(name: str, **options: Any) -> Any:
    """Return the dataset with an id that has a prefix.

    Raises:
        InputError: the prefix is unknown, or nothing follows it.
        NotFoundError: it is not on this machine.
    """
    prefix, _, rest = name.partition(":")
    loader = _LOADERS.get(prefix)
    if loader is None:
        raise InputError(
            f"load_dataset: unknown prefix {prefix!r} of {name!r}; known: {list_prefixes()}. Give a path that "
            "exists, or register the prefix (register_dataset)"
        )
    if not rest:
        raise InputError(f"load_dataset: {name!r} names no dataset after its prefix")
    return loader(rest, **options)


def place_of(dest: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Return where a new dataset is written, and its format if `dest` is an id of one that others read.

    Example:
        >>> place_of("runs/demo.h5")
        ('runs/demo.h5', None)
    """
    refuse_address(dest)
    prefix, _, rest = os.fspath(dest).partition(":")
    if prefix not in _ROOTS or not rest or os.path.exists(dest):
        return dest, None
    return Path(_root(prefix)).expanduser() / rest, prefix


def _minari(name: str, **options: Any) -> Any:
    from ringmap.formats.registry import get_format

    place = _local(_root("minari"), name, f"minari download {name}")
    return get_format("minari").open_dataset(place, **options)


def _lerobot(name: str, **options: Any) -> Any:
    from ringmap.formats.registry import get_format

    root = _root("lerobot")
    how = f"hf download {name} --repo-type dataset --local-dir {root}/{name}"
    return get_format("lerobot").open_dataset(_local(root, name, how), **options)


def _d4rl(name: str, **options: Any) -> Any:
    from ringmap.formats.registry import get_format

    root = Path(os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()
    plain = name.replace("_", "-")  # halfcheetah-medium-v2 lies in halfcheetah_medium-v2.hdf5
    found = [p for p in sorted(root.glob("*.hdf5")) if plain in (p.stem, p.stem.replace("_", "-"))]
    if not found:
        raise NotFoundError(f"d4rl:{name}: no {plain}.hdf5 in {root}; put the file there, or set D4RL_DATASET_DIR")
    return get_format("d4rl").open_dataset(found[0], **options)


def _root(prefix: str) -> str:
    variable, default = _ROOTS[prefix]
    return os.environ.get(variable) or default


def _local(root: str, name: str, how: str) -> Path:
    path = Path(root).expanduser() / name
    if not path.is_dir():
        raise NotFoundError(f"{name}: not at {path}; fetch it first: {how}")
    return path


_LOADERS: dict[str, Loader] = {"minari": _minari, "lerobot": _lerobot, "d4rl": _d4rl}

_ROOTS = {
    "minari": ("MINARI_DATASETS_PATH", "~/.minari/datasets"),
    "lerobot": ("HF_LEROBOT_HOME", "~/.cache/huggingface/lerobot"),
}
"""Prefix, which is the format's name, too -> the variable that names the folder of its datasets, and the default."""
