"""Where datasets are found by name.

    "runs/replay.h5"  an existing path: that one
    "pusht"           $STABLEWM_HOME/datasets/pusht, pusht.h5, ... (default: ~/.stable_worldmodel)
    "user/repo"       $STABLEWM_HOME/datasets/user/repo, or user--repo, where stable-worldmodel
                      keeps what it downloaded

    "minari:name"     prefix up to the first ":": its loader, called with the rest. The built-in ones look in
                      the download folder of the library of that name

Not here: reading (formats/), downloading.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from ringmap.clips.facts import Facts
from ringmap.clips.window import WindowSpec
from ringmap.datasets.base import Dataset, Where
from ringmap.datasets.joined import ConcatDataset
from ringmap.datasets.stored import StoredDataset
from ringmap.datasets.stored_episodes import EpisodeStream
from ringmap.errors import (
    ArgumentTypeError,
    InputError,
    NotFoundError,
    UnknownFormatError,
    UnsupportedError,
)
from ringmap.formats.common.swap import restore
from ringmap.formats.registry import (
    detect_format,
    get_format,
    list_formats,
    refuse_missing,
    refuse_zip,
)
from ringmap.storage.disk.paths import refuse_address
from ringmap.storage.records.manifest import refuse_dangling

__all__ = [
    "get_cache_dir",
    "has_prefix",
    "list_prefixes",
    "load_arrays",
    "load_dataset",
    "load_prefixed",
    "open_stream",
    "place_of",
    "register_dataset",
    "takes",
]


HOME_VARIABLE = "STABLEWM_HOME"


def get_cache_dir(override_root: str | os.PathLike[str] | None = None, sub_folder: str | None = None) -> Path:
    """Return the folder under which datasets and checkpoints are kept; it is made if need be.

    Args:
        override_root: the folder to use; by default `$STABLEWM_HOME`, else `~/.stable_worldmodel`.
        sub_folder: a folder below it, such as "datasets".

    Source: stable-worldmodel, Data guide.
    """
    folder = _root(override_root) / (sub_folder or "")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_dataset(
    name: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    format: str | None = None,
    *,
    window: WindowSpec | None = None,
    columns: Iterable[str] | None = None,
    anchors: slice | None = None,
    drop_all_padded: bool = False,
    where: Where | None = None,
    fps: Any = None,
    reward_at: str | None = None,
    **reader_options: Any,
) -> Dataset:
    """Open a dataset.

    Args:
        name: a path, a name below `datasets` in the cache folder, or an id with a prefix ("minari:...", "lerobot:...",
            "d4rl:...", or one of `register_dataset`), which is split at the first ":". A path that exists goes first.
            Of a directory of rings, as collectors write them, it is a `ConcatDataset` of these.
        cache_dir: the cache folder; `get_cache_dir` says which by default.
        format: the format's name; found out by default.
        window: name -> `Window`, the steps of that column around a step t; `Computed`; or a function of the batch that
            returns a column: see `Dataset.view`, as for the next four.
        columns: names of the columns to read; None: all.
        anchors: the steps t to leave out at the ends of episodes, such as `slice(2, -7)`.
        drop_all_padded: whether to leave out steps t at which a padded column would be padding alone.
        where: the episodes to keep, numbered from 0: a condition, such as `"return > 100"`, or a function of an
            episode's data.
        fps: steps per second, for windows in seconds, and of what is made of this dataset; None: as the dataset says,
            if it does.
        reward_at: where rewards stand: "next" or "same", as for `ReplayBuffer`; None: as the dataset says, if it does.
        reader_options: for the format's reader: `num_steps`, `frameskip`, `transform`, `layout`,
            `output` ("torch" or "numpy") and what the format adds.

    Returns:
        A `Dataset`: clips by index, episodes by `load_episode`.

    Raises:
        NotFoundError: (FileNotFoundError) nothing is there.
        UnknownFormatError: (ValueError) "No format detected".
        MissingFormatError: it is of a format whose packages are not installed; the message says which extra.
        ArgumentTypeError: (TypeError) it is no path, but a list of them, say.
        InputError: (ValueError) "Ambiguous": several data files; an unknown format or prefix; a bad option; a window
            that does not fit the columns.

    Example:
        >>> import tempfile
        >>> from ringmap.data import get_format
        >>> path = tempfile.mkdtemp() + "/demo.h5"
        >>> with get_format("hdf5").open_writer(path) as writer:
        ...     writer.write_episode({"state": [[0.0], [1.0], [2.0]], "action": [0, 1, 2]})
        >>> dataset = load_dataset(path, num_steps=2)
        >>> len(dataset), dataset[1]["state"].tolist()
        (2, [[1.0], [2.0]])
    """
    told = Facts.named("load_dataset", reward_at, fps)
    dataset = _opened(name, cache_dir, format, reader_options, told)
    if drop_all_padded is False and all(v is None for v in (window, columns, anchors, where)):
        return dataset
    if not isinstance(dataset, Dataset):
        raise InputError(
            f"load_dataset: {name}: windows, columns= and where= need a ringmap Dataset, and this one is a "
            f"{type(dataset).__name__}"
        )
    return dataset.view(window, columns, anchors, drop_all_padded, where=where)


def _opened(
    name: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None,
    format: str | None,
    reader_options: dict[str, Any],
    told: Facts,
) -> Dataset:
    if not isinstance(name, str | os.PathLike):
        raise ArgumentTypeError(
            f"load_dataset: a dataset is opened by its path, name or id, got {type(name).__name__}; of several open "
            "each, and join them: ConcatDataset([load_dataset(path) for path in paths]); a buffer is a dataset already"
        )
    if os.fspath(name).partition(":")[0] not in list_prefixes():
        refuse_address(name)
    name = os.fspath(name)
    if has_prefix(name) and not os.path.exists(os.path.expanduser(name)):
        return _told(load_prefixed(name, **reader_options), told)
    path = _resolve(name, cache_dir)
    if format is not None:
        return _told(get_format(format).open_dataset(path, **reader_options), told)
    found = detect_format(path)
    # A file of HDF5 stands for its folder, in which it may be one of several.
    if path.is_dir() and (found is None or found.name == "hdf5"):
        inside = _datasets_in(path)
        if len(inside) > 1 and all(get_format("ringmap").detect(place) for place in inside):
            rings = (get_format("ringmap").open_dataset(p, **reader_options) for p in inside)
            return ConcatDataset([_told(ring, told) for ring in rings])
        if len(inside) > 1:
            raise InputError(
                f"Ambiguous dataset: {path} holds several: {', '.join(p.name for p in inside[:5])}; pass "
                "the path of one"
            )
        if inside:
            path = inside[0]
            found = detect_format(path)
    if found is None:
        refuse_missing(path)
        refuse_zip(path, "load_dataset")
        raise UnknownFormatError(
            f"No format detected for {path}; formats here are {list_formats()}: pass format=..., or "
            "register the one that reads it (register_format)"
        )
    return _told(found.open_dataset(path, **reader_options), told)


def _told(dataset: Dataset, told: Facts) -> Dataset:
    """Return a dataset, with what the caller names in place of what it says itself."""
    if told.reward_at is not None:
        dataset.reward_at = told.reward_at
    if told.fps is not None:
        dataset.fps = told.fps
    return dataset


def load_arrays(name: str | os.PathLike[str], format: str | None = None, drop: Collection[str] = ()) -> Any:
    """Open a dataset to copy or show it: arrays, images as they are stored. PyTorch need not be installed.

    Args:
        name: as for `load_dataset`.
        format: the format's name; found out by default.
        drop: columns that are not missed, if they are not supported.

    Raises:
        NotFoundError, UnknownFormatError, InputError: as for `load_dataset`.
    """
    try:
        dataset = load_dataset(name, format=format, layout="HWC")
    except UnsupportedError:
        if not drop:
            raise
        dataset = load_dataset(name, format=format, layout="HWC", keys_to_drop=drop)
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]:
        if isinstance(part, StoredDataset):  # a reader of somebody else's may know no such option
            part.output = "numpy"
    return dataset


def open_stream(name: str | os.PathLike[str], format: str | None = None) -> EpisodeStream | None:
    """Return the episodes at a path, or of a name, whose format is read in order; None of any other."""
    name = os.fspath(name)
    if has_prefix(name) and not os.path.exists(os.path.expanduser(name)):
        return None
    path = _resolve(name, None)
    found = detect_format(path) if format is None else get_format(format)
    return None if found is None else found.open_stream(path)


def _root(given: str | os.PathLike[str] | None) -> Path:
    root = given or os.environ.get(HOME_VARIABLE) or "~/.stable_worldmodel"
    refuse_address(root)
    return Path(root).expanduser()


def _resolve(name: str, cache_dir: str | os.PathLike[str] | None) -> Path:
    given = Path(name).expanduser()
    restore(os.path.realpath(given))
    if given.exists():
        return given
    folder = _root(cache_dir) / "datasets"
    tried = [given]
    if not given.is_absolute():
        tried += [folder / name, folder / name.replace("/", "--")]
        for candidate in tried[1:]:
            if candidate.exists():
                return candidate
        found = _with_suffix(folder / name)
        if len(found) > 1:
            raise InputError(f"Ambiguous dataset {name!r}: {', '.join(str(p) for p in found)}; pass the path of one")
        if found:
            return found[0]
    refuse_dangling(str(given))
    beside = "" if given.is_absolute() else f" in {os.getcwd()}"
    named = f"; nor is there a dataset of that name in {folder}" if folder.is_dir() and len(tried) > 1 else ""
    raise NotFoundError(f"No dataset {name!r}: the path {given} does not exist{beside}{named}; check its spelling")


def _datasets_in(folder: Path) -> list[Path]:
    """Return the datasets that lie directly in a folder, without the side tables of others."""
    found = [
        p for p in sorted(folder.iterdir()) if p.name[0] != "." and not p.is_symlink() and detect_format(p) is not None
    ]
    mains = {p.name.removesuffix(".lance") for p in found if p.suffix == ".lance"}
    return [
        p for p in found if not (p.name.endswith("_episodes.lance") and p.name.removesuffix("_episodes.lance") in mains)
    ]


def _with_suffix(path: Path) -> list[Path]:
    """Return what lies beside `path` under its name with one suffix more, as far as a format knows it."""
    if not path.parent.is_dir():
        return []
    beside = sorted(p for p in path.parent.iterdir() if p.stem == path.name and p.suffix)
    return [p for p in beside if detect_format(p) is not None]


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
    return Path(_root_of(prefix)).expanduser() / rest, prefix


def _of_library(prefix: str, how: str) -> Loader:
    """Return what opens a dataset in the download folder of a library; `how` says how it gets there."""

    def load(name: str, **options: Any) -> Any:
        root = _root_of(prefix)
        path = Path(root).expanduser() / name
        if not path.is_dir():
            raise NotFoundError(f"{name}: not at {path}; fetch it first: {how.format(name=name, root=root)}")
        return get_format(prefix).open_dataset(path, **options)

    return load


def _d4rl(name: str, **options: Any) -> Any:
    root = Path(os.environ.get("D4RL_DATASET_DIR") or "~/.d4rl/datasets").expanduser()
    plain = name.replace("_", "-")  # halfcheetah-medium-v2 lies in halfcheetah_medium-v2.hdf5
    found = [p for p in sorted(root.glob("*.hdf5")) if plain in (p.stem, p.stem.replace("_", "-"))]
    if not found:
        raise NotFoundError(f"d4rl:{name}: no {plain}.hdf5 in {root}; put the file there, or set D4RL_DATASET_DIR")
    return get_format("d4rl").open_dataset(found[0], **options)


def _root_of(prefix: str) -> str:
    variable, default = _ROOTS[prefix]
    return os.environ.get(variable) or default


_LOADERS: dict[str, Loader] = {
    "minari": _of_library("minari", "minari download {name}"),
    "lerobot": _of_library("lerobot", "hf download {name} --repo-type dataset --local-dir {root}/{name}"),
    "d4rl": _d4rl,
}

_ROOTS = {
    "minari": ("MINARI_DATASETS_PATH", "~/.minari/datasets"),
    "lerobot": ("HF_LEROBOT_HOME", "~/.cache/huggingface/lerobot"),
}
"""Prefix, which is the format's name, too -> the variable that names the folder of its datasets, and the default."""
