"""The formats that come with ringmap: how each knows a path, and where its reader and its writer are.

Their modules, and the packages that these need, are imported when a dataset is opened.
Not here: the list of all formats (registry.py), the layouts (a module each).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ringmap.clips.facts import Facts
from ringmap.errors import CorruptError, InputError, NotFoundError, UnsupportedError
from ringmap.extras import missing
from ringmap.formats.base import Format, named
from ringmap.formats.common.safe_hdf5 import has_own, root_fits
from ringmap.formats.common.untrusted import kind_at, read_json

__all__ = [
    "BUILT_IN",
    "D4RL",
    "HDF5",
    "BuiltIn",
    "Folder",
    "Lance",
    "LeRobot",
    "Minari",
    "Npz",
    "Parquet",
    "Ringmap",
    "Rlds",
    "Robomimic",
    "Video",
    "Zarr",
]


class BuiltIn(Format):
    """A format of ours."""

    extra: ClassVar[str] = ""
    """The extra of ringmap whose packages it needs; "" for none."""

    shares: ClassVar[str] = ""
    """The format whose suffixes it has, too, and ahead of which it is asked whether it knows a path; "" for none."""

    general: ClassVar[bool] = False
    """Whether it is asked after all others, those of third parties too."""

    supports_episode_data = True

    @classmethod
    def available(cls) -> bool:
        """Return whether the packages are installed. It imports nothing."""
        return not cls.extra or not missing(cls.extra)

    @classmethod
    def install(cls) -> str:
        """Return the requirement for pip."""
        return f"ringmap[{cls.extra}]" if cls.extra else "ringmap"


class HDF5(BuiltIn):
    """Datasets in one HDF5 file each. Lossless for every dtype that a buffer stores."""

    name = "hdf5"
    lossless = True
    source = "ringmap.formats.hdf5:HDF5Source"
    writer = "ringmap.formats.hdf5:HDF5Writer"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the suffix (.h5, .hdf5), the first bytes, or a directory that holds such a file."""
        path = os.fspath(path)
        if os.path.isdir(path):
            return bool(_hdf5_files_in(path))
        return path.endswith(_HDF5_SUFFIXES) or _is_signed(path)

    @classmethod
    def place(cls, path: str) -> str:
        """Return the file itself, or the one HDF5 file of a directory.

        Raises:
            NotFoundError: there is no file.
            InputError: "Ambiguous": the directory holds several.
        """
        if not os.path.isdir(path):
            return path
        found = _hdf5_files_in(path)
        if not found:
            raise NotFoundError(f"{path}: the directory holds no .h5 or .hdf5 file")
        if len(found) > 1:
            raise InputError(
                f"Ambiguous dataset: {path} holds {len(found)} HDF5 files ({', '.join(found[:5])}"
                f"{', ...' if len(found) > 5 else ''}); pass the path of one"
            )
        return os.path.join(path, found[0])


_HDF5_SUFFIXES = (".h5", ".hdf5")

_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def _hdf5_files_in(folder: str) -> list[str]:
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name.endswith(_HDF5_SUFFIXES) and entry.is_file(follow_symlinks=False)
    )


def _is_signed(path: str) -> bool:
    """Look for HDF5's signature, which stands at byte 0, 512, 1024, ..."""
    if not os.path.isfile(path):  # opening a pipe would wait for its other end
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at + len(_HDF5_SIGNATURE) <= size:
            file.seek(at)
            if file.read(len(_HDF5_SIGNATURE)) == _HDF5_SIGNATURE:
                return True
            at = max(512, 2 * at)
    return False


class Zarr(BuiltIn):
    """Datasets in Zarr groups. Lossless for every dtype that a buffer stores."""

    name = "zarr"
    lossless = True
    source = "ringmap.formats.zarr:ZarrSource"
    writer = "ringmap.formats.zarr:ZarrWriter"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `meta/episode_ends`."""
        folder = os.path.join(os.fspath(path), "meta", "episode_ends")
        return any(os.path.isfile(os.path.join(folder, f)) for f in (".zarray", "zarr.json"))


class _Tabular(BuiltIn):
    """A folder of columns with an episode table."""

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the episode table, and the kind of the images."""
        path = os.fspath(path)
        if not os.path.isfile(os.path.join(path, "ep_len.npz")):
            return False
        table = os.path.join(path, "ep_len.json")
        if os.path.isfile(table):
            with contextlib.suppress(OSError, CorruptError):
                found = read_json(table)
                return isinstance(found, dict) and found.get("format") == cls.name
        folders = [e.path for e in os.scandir(path) if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
        videos = any(file.endswith(".mp4") for folder in folders for file in os.listdir(folder)[:16])
        return videos == (cls.name == Video.name)


class Folder(_Tabular):
    """Datasets as folders of .npz files and images. Lossless with `image_format="png"`."""

    name = "folder"
    source = "ringmap.formats.folder:FolderSource"
    writer = "ringmap.formats.folder:FolderWriter"


class Video(_Tabular):
    """Datasets as folders of .npz files and videos. Lossless with `lossless=True`."""

    name = "video"
    extra = "video"
    source = "ringmap.formats.folder:VideoSource"
    writer = "ringmap.formats.folder:VideoWriter"


class Lance(BuiltIn):
    """Datasets in Lance. Lossless; images as PNG, or JPEG by choice."""

    name = "lance"
    extra = "lance"
    lossless = True
    source = "ringmap.formats.lance:LanceSource"
    writer = "ringmap.formats.lance:LanceWriter"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the folder of versions that every Lance dataset has."""
        return os.path.isdir(os.path.join(os.fspath(path), "_versions"))


class Parquet(BuiltIn):
    """Datasets in Parquet files. Lossless for every dtype that a buffer stores."""

    name = "parquet"
    extra = "parquet"
    lossless = True
    source = "ringmap.formats.parquet:ParquetSource"
    writer = "ringmap.formats.parquet:ParquetWriter"
    marker = ".ringmap-parquet"
    """The name of the file that marks a folder."""

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the file that marks a folder."""
        return os.path.isfile(os.path.join(os.fspath(path), cls.marker))


class Robomimic(BuiltIn):
    """Files of robomimic. Lossless."""

    name = "robomimic"
    shares = "hdf5"
    lossless = True
    source = "ringmap.formats.robomimic:RobomimicSource"
    writer = "ringmap.formats.robomimic:RobomimicWriter"
    appends = False

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the group `data` with its attribute `total`, or with demos; there is no table of episodes beside
        it."""
        return root_fits(path, _has_demos)


def _has_demos(root: Any) -> bool:
    import h5py

    if "ep_len" in root or not has_own(root, "data"):
        return False
    data = root["data"]
    return isinstance(data, h5py.Group) and ("total" in data.attrs or any(name.startswith("demo_") for name in data))


class D4RL(BuiltIn):
    """Files of D4RL, by their path. Read-only."""

    name = "d4rl"
    shares = "hdf5"
    supports_episode_data = False
    columns = ("observations", "actions", "rewards", "terminals")
    """The datasets that each file has at its root."""

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the four datasets that each file has at its root."""
        return root_fits(path, lambda root: "ep_len" not in root and all(has_own(root, name) for name in cls.columns))

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """Return the dataset at a path; the options are those of `D4RLDataset`."""
        return named("ringmap.formats.d4rl:D4RLDataset")(path, **options)


class Ringmap(BuiltIn):
    """Buffers on disk: of episodes, or of transitions or rows, which are cut into episodes. Read-only."""

    name = "ringmap"
    source = "ringmap.formats.ringmap:BufferSource"

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """Return the dataset at a path, which knows what the buffer does: its clips, its rate, and where rewards
        stand."""
        from ringmap.formats.ringmap import source_of

        source, known = source_of(path)
        if source != cls.source:  # of transitions or rows
            from ringmap.datasets.stored import StoredDataset

            return StoredDataset(named(source)(path), **options)
        return super().open_reader(path, **{**known, **options})

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the manifest and the table of episodes."""
        from ringmap.storage.disk.paths import MANIFEST, TABLE

        return all(os.path.isfile(os.path.join(os.fspath(path), f)) for f in (MANIFEST, TABLE))


class LeRobot(BuiltIn):
    """LeRobot datasets, version 3. Exact with `videos=False`."""

    name = "lerobot"
    extra = "lerobot"
    source = "ringmap.formats.lerobot:LeRobotSource"
    writer = "ringmap.formats.lerobot.writer:LeRobotWriter"
    appends = False

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `meta/info.json` and its version."""
        try:
            found = read_json(os.path.join(os.fspath(path), "meta", "info.json"))
        except (OSError, CorruptError):
            return False
        return isinstance(found, dict) and "codebase_version" in found

    @classmethod
    def copier(cls, parts: Sequence[Any], facts: Facts, options: Mapping[str, Any]) -> Any:
        """Return what reads episodes with their pictures as they are stored, if all parts are LeRobot sets; see
        `Format.copier`."""
        return named("ringmap.formats.lerobot.writer:copier")(parts, facts, options)


class Minari(BuiltIn):
    """Minari datasets. Lossless."""

    name = "minari"
    extra = "minari"
    lossless = True
    source = "ringmap.formats.minari:MinariSource"
    writer = "ringmap.formats.minari:MinariWriter"
    appends = False

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `data/metadata.json` and what lies beside it."""
        folder = os.path.join(os.fspath(path), "data")
        return os.path.isfile(os.path.join(folder, "metadata.json")) and any(
            name == "main_data.hdf5" or name.isdigit() for name in os.listdir(folder)
        )


class Rlds(BuiltIn):
    """RLDS data sets. Read only, in order."""

    name = "rlds"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by `dataset_info.json`, and `features.json` with steps."""
        folder = os.fspath(path)
        if kind_at(os.path.join(folder, "dataset_info.json")):
            return False
        try:
            found = read_json(os.path.join(folder, "features.json"))
            return "sequence" in found["featuresDict"]["features"]["steps"]
        except (OSError, CorruptError, LookupError, TypeError):
            return False

    @classmethod
    def open_reader(cls, path: str | os.PathLike[str], **options: Any) -> Any:
        """Refuse: no episode is found by its number.

        Raises:
            UnsupportedError: always; it says what to do.
        """
        raise UnsupportedError(
            f"{os.fspath(path)}: an RLDS data set is read in order, and not by index; convert it: "
            f"ringmap.data.convert({os.fspath(path)!r}, 'copy.h5')"
        )

    @classmethod
    def open_stream(cls, path: str | os.PathLike[str]) -> Any:
        """Return the episodes, which are read in order."""
        return named("ringmap.formats.rlds:RldsEpisodes")(path)


class Npz(BuiltIn):
    """Folders of .npz files, one an episode. Read-only."""

    name = "npz"
    general = True
    source = "ringmap.formats.npz:NpzSource"

    @classmethod
    def detect(cls, path: str | os.PathLike[str]) -> bool:
        """Tell by the files: all that is no hidden one ends in .npz."""
        try:
            names = [name for name in os.listdir(path) if not name.startswith(".")]
        except OSError:
            return str(path).endswith(".npz") and os.path.isfile(path)
        return (
            bool(names)
            and "ep_len.npz" not in names
            and all(n.endswith(".npz") and kind_at(os.path.join(path, n)) == "" for n in names)
        )


BUILT_IN: dict[str, type[BuiltIn]] = {
    one.name: one
    for one in (HDF5, Zarr, Folder, Video, Lance, Parquet, Robomimic, D4RL, Ringmap, LeRobot, Minari, Rlds, Npz)
}
"""The formats by name, in the order in which they are listed."""
