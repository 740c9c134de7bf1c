"""Folders of .npz columns, with images beside them: the formats `folder` and `video`, of stable-worldmodel.

    DIR/
      ep_len.npz  ep_offset.npz     (E,) int32, int64
      <col>.npz                     (N, ...): all steps of all episodes (key `arr_0`)
      <col>/ep_<i>...               images: `ep_0_step_0.jpeg`, a file per step (folder), or `ep_0.mp4`, a video per
                                    episode (video)
      ep_len.json                   which column is which: names, dtypes, shapes. Ours: stable-worldmodel's reader
                                    passes over whatever is called ep_len, and takes all else for a column
      ep_len.data                   episode data, if there is any. Ours

JPEG and H.264 are lossy; `image_format="png"` and `lossless=True` are not. Episodes are added in groups: images first,
then columns, `ep_len` last, each file in one step.
Invariants: rows and images beyond `ep_len` count for nothing; adding twice is adding once.
Not here: pictures and frames (media/), the log (common/writer.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ringmap.clips.facts import Facts, check_fps
from ringmap.datasets.base import num_rows
from ringmap.errors import CorruptError, InputError, UnsupportedError
from ringmap.formats.builtin import Folder, Video
from ringmap.formats.common import disk
from ringmap.formats.common.log import Encoded, Record, log_path
from ringmap.formats.common.names import file_name
from ringmap.formats.common.npz import NpzWriter, npz_in, open_members, open_npz, save_npz
from ringmap.formats.common.source import (
    DecodingSource,
    DirectorySource,
    damage_named,
    fits,
    mark_of,
    refuse_other_table,
    stamp_of,
    steps_of,
    tell_left_out,
)
from ringmap.formats.common.untrusted import (
    check_name,
    check_row,
    kind_at,
    open_binary,
    read_json,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.media.images import (
    Picture,
    check_image_format,
    decode_into,
    encode,
    holds,
    picture_of,
)
from ringmap.formats.media.videos import Decoder, Encoding, decode_runs, encode_video
from ringmap.storage.columns.schema import TEXT, ColumnSpec, Schema, stored_spec
from ringmap.storage.records.blobs import decode_data

__all__ = ["FolderSource", "FolderWriter", "TabularSource", "TabularWriter", "VideoSource", "VideoWriter"]


Array = np.ndarray[Any, np.dtype[Any]]

LENGTHS, OFFSETS = "ep_len", "ep_offset"
TABLE, DATA = "ep_len.json", "ep_len.data"

TABULAR = "npz"

MEDIA = {"jpeg": "jpeg", "jpg": "jpeg", "png": "png", "mp4": "lossless video"}
"""How a column of ours may be stored -> the codec that has to hold it."""

_MOST = 1 << 31
_MANY = 1 << 16

_PIECE_NBYTES = 16 << 20
_LOOKS = 3

_MEDIA = r"ep_(\d+)(_step_\d+)?\.(jpe?g|png|mp4)"


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and where it lies."""

    spec: ColumnSpec
    file: str
    how: str


def plan_columns(schema: Schema, how_images: str, codec: str) -> list[Column]:
    """Return where the columns of a new dataset are to lie: as pictures what the codec holds."""
    return [
        Column(
            spec,
            file_name(spec.name, (LENGTHS, OFFSETS)),
            how_images if holds(codec, spec) else TABULAR,
        )
        for spec in schema.columns
    ]


class TabularWriter(EpisodeWriter):
    """Writes such folders: columns, episode data, offsets, and last the lengths, each file in one step."""

    source: ClassVar[type[TabularSource]]
    files = rf"[^/]+\.npz(\.new)?|ep_len\.(json|data)(\.new)?|[^/]+/{_MEDIA}"

    _columns: Sequence[Column] = ()

    # -- what a format supplies --------------------------------------------------------------

    def _how(self) -> tuple[str, str]:
        """Return how images of a new dataset are stored, and their codec: see `holds`."""
        raise NotImplementedError

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        """Return images encoded, and what is lossy about it, and what to do, or ""."""
        raise NotImplementedError

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        """Write the encoded images of an episode."""
        raise NotImplementedError

    # -- as an EpisodeWriter -----------------------------------------------------------------

    def resume(self, dataset: Any) -> None:
        """Find out how the images of an existing dataset are stored."""
        self._columns = list(dataset.source.columns.values()) if dataset else ()
        data = os.path.join(self.path, DATA)
        if dataset and os.path.exists(data) and not fits(_mark_in(data), dataset.lengths, dataset.offsets):
            raise refuse_other_table(self.path)

    def encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        """Return the columns, images encoded."""
        made: dict[str, Array | Encoded] = dict(episode.columns)
        for column in self._columns or plan_columns(episode.schema, *self._how()):
            if column.how != TABULAR:
                packed, lossy = self._pack(column.how, episode.columns[column.spec.name])
                made[column.spec.name] = packed
                if lossy:
                    self.say_once(f"images are stored as {lossy}")
        return made

    def rewritten(self, path: str) -> int:
        """Return the size of the columns, which are written as a whole."""
        with os.scandir(path) as entries:
            return sum(e.stat().st_size for e in entries if e.name.endswith(".npz"))

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new dataset."""
        disk.make_folder(path)
        _save_table(path, self.format.name, [])
        save_npz(os.path.join(path, f"{OFFSETS}.npz"), np.empty(0, np.int64))
        save_npz(os.path.join(path, f"{LENGTHS}.npz"), np.empty(0, np.int32))
        self.extend(episodes, path)

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes: images, columns, and last the table of episodes."""
        lengths, offsets = _episodes(path)
        columns, new, packed = self.source.columns_at(path), list[int](), list[bytes]()
        facts, texts = Facts(), dict[str, np.dtype[Any]]()
        start = num_rows(lengths, offsets)
        names: dict[str, None] = {}
        for record in episodes:
            columns = columns if columns or new else _columns_of(record)
            facts = facts if new else Facts.stated(record.notes)
            new.append(record.length)
            packed.append(record.packed)
            names.update(dict.fromkeys(str(name) for name in record.data))
            for name in record.schema.texts:
                texts[name] = np.promote_types(texts.get(name, TEXT), record.columns[name].dtype)  # type: ignore[union-attr]
        if not new:
            return
        with contextlib.ExitStack() as stack:
            writers = {}
            for column in columns:
                if column.how == TABULAR:
                    file, spec = os.path.join(path, f"{column.file}.npz"), column.spec
                    if spec.is_text:  # as wide as the longest: the file is written whole
                        before = open_npz(file).dtype if start else TEXT
                        wide = np.promote_types(before, texts[spec.name])
                        spec = ColumnSpec(spec.name, spec.shape, wide)
                    writer = stack.enter_context(NpzWriter(file, spec, start + sum(new)))
                    step = max(1, _PIECE_NBYTES // max(1, spec.row_nbytes))
                    for at in range(0, start, step):
                        # Another map for each piece: all touched pages of one would stay in memory.
                        writer.write(open_npz(file)[at : min(at + step, start)])
                    writers[column.spec.name] = writer
                else:
                    disk.make_folder(os.path.join(path, column.file))
            for number, record in enumerate(episodes, len(lengths)):
                for column in columns:
                    value = record.columns[column.spec.name]
                    if isinstance(value, Encoded):
                        folder = os.path.join(path, column.file)
                        self._put(folder, number, column.how, value)
                    else:
                        writers[column.spec.name].write(value)
        made = np.concatenate([lengths, np.array(new, np.int32)])
        starts = np.concatenate([offsets, start + np.cumsum(new, dtype=np.int64) - new])
        if any(packed) or os.path.exists(os.path.join(path, DATA)):
            _add_data(path, len(lengths), packed, list(names), mark_of(made, starts))
        if not len(lengths):
            _save_table(path, self.format.name, columns, facts)  # what it names is there
        save_npz(os.path.join(path, f"{OFFSETS}.npz"), starts)
        save_npz(os.path.join(path, f"{LENGTHS}.npz"), made)


class _Opened:
    """The columns that are mapped, their files, and the data of all episodes once one's were asked for."""

    def __init__(self) -> None:
        self.columns: dict[str, Array] = {}
        self.fds: list[int] = []
        self.data: tuple[Array, bytes] | None = None

    def map(self, path: str) -> Array:
        """Return the array of a file, which stays open: whoever writes it changes what `os.fstat` says."""
        with open_binary(path) as raw:
            self.fds.append(os.dup(raw.fileno()))
            return npz_in(path, raw)

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)


class TabularSource(DirectorySource):
    """The columns of such a folder, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        CorruptError: it is damaged, or of another layout.
    """

    @classmethod
    def find_media(cls, folder: str) -> tuple[str, Picture] | None:
        """Return how the images of a folder, which another program made, are stored, and what the first one is."""
        raise NotImplementedError

    @classmethod
    def columns_at(cls, path: str, unsupported: dict[str, str] | None = None) -> list[Column]:
        """Return the columns of a dataset, in order; those of other programs by the names of their files.

        Args:
            path: of the dataset.
            unsupported: gets those whose pictures are not read.

        Raises:
            UnsupportedError: pictures are not read, and nobody asks which.
        """
        table = os.path.join(path, TABLE)
        if os.path.isfile(table):
            found = read_json(table)["columns"]
            return [_column(path, stored_spec(n, shape, dt), f, how) for n, f, how, dt, shape in found]
        columns = []
        for name in sorted(os.listdir(path)):
            stem, suffix = os.path.splitext(name)
            if suffix == ".npz" and stem not in (LENGTHS, OFFSETS):
                try:
                    rows = open_npz(os.path.join(path, name))
                except UnsupportedError as error:
                    if unsupported is None:
                        raise
                    unsupported[stem] = f"not read: {error}"
                    continue
                columns.append(Column(ColumnSpec(stem, rows.shape[1:], rows.dtype), stem, TABULAR))
        for name in _folders(path):
            try:
                media = cls.find_media(os.path.join(path, name))
            except UnsupportedError as error:
                if unsupported is None:
                    raise
                unsupported[name] = f"of pictures that are not read ({error})"
                continue
            if media is not None:
                how, found = media
                columns.append(Column(ColumnSpec(name, found.shape, found.dtype), name, how))
        return columns

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        with damage_named(self.path):
            self.lengths, self.offsets = _episodes(self.path)
            self.unsupported: dict[str, str] = {}
            found = self.columns_at(self.path, self.unsupported)
            self.columns = {c.spec.name: c for c in found}
            self.episode_columns = _data_names(self.path)
            _facts(self.path).give(self)
            self._handle()
            self._refuse_vast()
        self.schema = Schema(tuple(c.spec for c in self.columns.values()))
        if not os.path.isfile(os.path.join(self.path, TABLE)):  # another program's
            known = {*self.columns, *self.unsupported}
            tell_left_out(self.path, [name for name in _folders(self.path) if name not in known])

    def _witnesses(self) -> Sequence[str]:
        table = os.path.join(self.path, TABLE)
        return (table if os.path.exists(table) else os.path.join(self.path, f"{LENGTHS}.npz"),)

    def _open(self) -> Any:
        rows = num_rows(self.lengths, self.offsets)
        handle = _Opened()
        for name, column in self.columns.items():
            if column.how == TABULAR:
                handle.columns[name] = found = handle.map(os.path.join(self.path, f"{column.file}.npz"))
                if len(found) < rows:
                    raise CorruptError(
                        f"{self.path}: column {name!r} has {len(found)} rows, but the episodes need {rows}"
                    )
        return handle

    def _kept(self, handle: _Opened) -> Any:
        return [stamp_of(os.fstat(fd)) for fd in handle.fds]

    def _refuse_vast(self) -> None:
        """Raise if the table tells of more images than there are: `_open` compares the other columns."""
        rows = num_rows(self.lengths, self.offsets)
        for name, column in self.columns.items():
            if column.how == TABULAR:
                continue
            folder = os.path.join(self.path, column.file)
            if (kind := kind_at(folder)) not in ("a folder", "missing"):
                raise CorruptError(f"{folder}: is {kind or 'a file'}, expected the folder of column {name!r}")
            if rows > _MANY and self._most_images(folder, column) < rows:
                raise CorruptError(
                    f"{self.path}: the episodes have {rows:,} steps, but {folder} can't hold so many images"
                )

    def _most_images(self, folder: str, column: Column) -> int:
        """Return how many images a folder can hold at most."""
        return len(os.listdir(folder)) if os.path.isdir(folder) else 0

    def _windows(
        self, handle: Any, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        rows = steps_of(starts, length, stride)
        found: dict[str, Array] = {}
        unique = order = None
        for name in columns:
            column = self.columns[name]
            if column.how == TABULAR:
                # np.array: never a map of the file; little-endian ours, maybe not a foreign one's
                taken = np.array(handle.columns[name][rows.ravel()], column.spec.dtype.newbyteorder("="))
                found[name] = taken.reshape(*rows.shape, *column.spec.shape)
                continue
            if unique is None:
                unique, order = np.unique(rows.ravel(), return_inverse=True)
            images = np.empty((len(unique), *column.spec.shape), column.spec.dtype)
            if len(unique):
                by_offset = np.argsort(self.offsets, kind="stable")
                at = np.searchsorted(self.offsets[by_offset], unique, side="right") - 1
                # Of episodes without steps, which share their offset with the next, the last is it.
                episodes = by_offset[at]
                self._images(images, column, episodes, unique - self.offsets[episodes])
            whole = len(unique) == rows.size and bool((np.diff(rows.ravel()) > 0).all())
            found[name] = (images if whole else images[order]).reshape(*rows.shape, *column.spec.shape)
        return found

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        """Decode these steps, sorted, into `out`."""
        raise NotImplementedError

    def _episode_data(self, handle: _Opened, episode: int) -> dict[str, Any]:
        path = os.path.join(self.path, DATA)
        if handle.data is None:
            if not os.path.exists(path):
                return {}
            handle.data = _load_data(path)
            _refuse_other_table(self.path)
        ends, blob = handle.data
        if episode >= len(ends):
            return {}
        return decode_data(blob[int(ends[episode - 1]) if episode else 0 : int(ends[episode])])


def _columns_of(record: Record) -> list[Column]:
    """Return where the columns of a dataset without episodes are to lie, as its first record has them."""
    found = []
    for spec in record.schema.columns:
        value = record.columns[spec.name]
        how = value.how if isinstance(value, Encoded) else TABULAR
        found.append(Column(spec, file_name(spec.name, (LENGTHS, OFFSETS)), how))
    return found


def _column(path: str, spec: ColumnSpec, file: Any, how: Any) -> Column:
    """Return a column as a file of the dataset describes it, validating every value."""
    check_name(path, file)
    check_row(path, spec.name, spec.row_nbytes)
    if how != TABULAR and not (how in MEDIA and holds(MEDIA[how], spec)):
        raise CorruptError(f"{path}: column {spec} is stored as {how!r}, expected {TABULAR!r} or an image")
    return Column(spec, file, how)


def _episodes(path: str) -> tuple[Array, Array]:
    lengths = np.array(open_npz(os.path.join(path, f"{LENGTHS}.npz")))
    offsets = np.array(open_npz(os.path.join(path, f"{OFFSETS}.npz")))
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise CorruptError(f"{path}: {LENGTHS} is {lengths.dtype} {lengths.shape}, expected (E,) integers")
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or len(offsets) < len(lengths):
        raise CorruptError(f"{path}: {OFFSETS} is {offsets.dtype} {offsets.shape}, expected (E,) integers")
    if max(lengths.max(initial=0), offsets.max(initial=0)) >= _MOST or (offsets < 0).any():
        raise CorruptError(f"{path}: {LENGTHS} and {OFFSETS} do not describe episodes")
    return lengths.astype(np.int32), offsets[: len(lengths)].astype(np.int64)


def _folders(path: str) -> list[str]:
    return sorted(e.name for e in os.scandir(path) if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))


def _facts(path: str) -> Facts:
    table = os.path.join(path, TABLE)
    return Facts.stated(read_json(table)) if os.path.isfile(table) else Facts()


def _save_table(path: str, name: str, columns: list[Column], facts: Facts | None = None) -> None:
    table = [[c.spec.name, c.file, c.how, c.spec.dtype.str, list(c.spec.shape)] for c in columns]
    known = {} if facts is None else facts.encode()
    data = json.dumps({"format": name, "columns": table, **known}, indent=1).encode()
    disk.replace_file(os.path.join(path, TABLE), data)


# -- episode data ---------------------------------------------------------------------------------


def _add_data(path: str, episodes: int, packed: list[bytes], fresh: list[str], mark: Array) -> None:
    """Write the episode data of all episodes again: ends, bytes, names, the mark of the table."""
    file = os.path.join(path, DATA)
    ends, blob, names = np.empty(0, np.int64), b"", list[str]()
    if os.path.exists(file):
        (ends, blob), names = _load_data(file), _data_names(path)
    ends = ends[:episodes]
    blob = blob[: int(ends[-1]) if len(ends) else 0]
    names += [name for name in fresh if name not in names]
    sizes = [0] * (episodes - len(ends)) + [len(part) for part in packed]
    ends = np.concatenate([ends, len(blob) + np.cumsum(sizes, dtype=np.int64)])
    disk.remove(file + ".new")  # a link there would be followed
    with zipfile.ZipFile(file + ".new", "x", zipfile.ZIP_STORED) as archive:
        for member, array in (
            ("ends", ends),
            ("bytes", np.frombuffer(b"".join([blob, *packed]), np.uint8)),
            ("names", np.frombuffer(json.dumps(names).encode(), np.uint8)),
            ("table", mark),
        ):
            with archive.open(f"{member}.npy", "w", force_zip64=True) as into:
                np.lib.format.write_array(into, array, allow_pickle=False)
    disk.replace(file + ".new", file)


def _load_data(file: str) -> tuple[Array, bytes]:
    ends, blob = open_members(file, ("ends", "bytes"))
    return ends, blob.tobytes()


def _refuse_other_table(path: str) -> None:
    """Raise unless the data are of the episodes there. A writer that adds to them at this moment writes them first, and
    has a log."""
    for _ in range(_LOOKS):
        if fits(_mark_in(os.path.join(path, DATA)), *_episodes(path)) or os.path.exists(log_path(path)):
            return
    raise refuse_other_table(path)


def _mark_in(file: str) -> Array | None:
    """Return the mark of the data in a file, None of data without one."""
    with contextlib.suppress(KeyError):
        return open_members(file, ("table",))[0]
    return None


def _data_names(path: str) -> list[str]:
    file = os.path.join(path, DATA)
    if not os.path.exists(file):
        return []
    (names,) = open_members(file, ("names",))
    return [str(name) for name in json.loads(names.tobytes())]


def image_name(episode: int, step: int, suffix: str) -> str:
    """Return the name of the file of one image.

    Example:
        >>> image_name(3, 7, "jpeg")
        'ep_3_step_7.jpeg'
    """
    return f"ep_{episode}_step_{step}.{suffix}"


class FolderSource(TabularSource):
    """As `TabularSource`, of the format `folder`."""

    @classmethod
    def find_media(cls, folder: str) -> tuple[str, Picture] | None:
        """Return the suffix of the images, and what the first one is."""
        for suffix in ("jpeg", "jpg", "png", "tiff", "tif"):
            first = os.path.join(folder, image_name(0, 0, suffix))
            if os.path.exists(first):
                return suffix, picture_of(first, "image")
        return None

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        folder = os.path.join(self.path, column.file)
        files = [
            os.path.join(folder, image_name(episode, step, column.how))
            for episode, step in zip(episodes.tolist(), steps.tolist(), strict=True)
        ]
        decode_into(out, files, column.spec)
        for file in files:
            self._refuse_newer(file)


class FolderWriter(TabularWriter):
    """Writes episodes to a folder. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. Images are encoded
    in parallel.

    Args:
        image_format: "jpeg" (quality 95, full chroma) is lossy, "png" is not. Of a dataset that is
            appended to, the one that it has.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo")
        >>> with FolderWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> sorted(os.listdir(path))
        ['ep_len.data', 'ep_len.json', 'ep_len.npz', 'ep_offset.npz', 'reward.npz']
    """

    format = Folder
    source = FolderSource

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        image_format: str = "jpeg",
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        self.image_format = check_image_format(image_format, "FolderWriter")

    def _how(self) -> tuple[str, str]:
        return self.image_format, self.image_format

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        kind = check_image_format(how, "FolderWriter")
        lossy = "JPEG, which is lossy; for exact images pass image_format='png'"
        return Encoded(encode(images, kind), how), lossy if kind == "jpeg" else ""

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        for step, data in enumerate(images.values):
            disk.write_file(os.path.join(folder, image_name(number, step, how)), data)


def video_name(episode: int) -> str:
    """Return the name of the file of an episode.

    Example:
        >>> video_name(3)
        'ep_3.mp4'
    """
    return f"ep_{episode}.mp4"


class VideoSource(DecodingSource, TabularSource):
    """As `TabularSource`, of the format `video`.

    Processes and threads: up to 64 videos stay open per process; a fork opens its own.
    """

    @classmethod
    def find_media(cls, folder: str) -> tuple[str, Picture] | None:
        """Return "mp4", and what the pictures of the first video are."""
        first = os.path.join(folder, video_name(0))
        if not os.path.exists(first):
            return None
        decoder = Decoder(first)
        try:
            return "mp4", decoder.picture
        finally:
            decoder.close()

    def _most_images(self, folder: str, column: Column) -> int:
        """Return how many images a folder can hold at most: a frame takes a byte of its video."""
        sizes = (os.path.join(folder, video_name(i)) for i in range(len(self.lengths)))
        return sum(os.stat(path, follow_symlinks=False).st_size for path in sizes if not kind_at(path))

    def _images(self, out: Array, column: Column, episodes: Array, steps: Array) -> None:
        folder = os.path.join(self.path, column.file)

        def path_of(episode: int) -> str:
            return os.path.join(folder, video_name(episode))

        decode_runs(self._decoders, out, episodes, steps, path_of)
        for episode in np.unique(episodes).tolist():
            self._refuse_newer(path_of(episode))


class VideoWriter(TabularWriter):
    """Writes episodes to a folder, images as videos. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. The encoder has
    threads of its own.

    Args:
        lossless: keep every value of the images: H.264 in RGB with quantizer 0; PNG of uint16 with 1 or 3 channels,
            which is a column of numbers without it.
        codec: the encoder, as PyAV names it.
        crf: quality, 0 to 51: less is better, and larger.
        fps: steps per second of the dataset, and frames per second that a player shows; None: the rate of the source.
            Players show 30 where that is not known.

    Raises:
        InputError: an option is wrong.
    """

    format = Video
    source = VideoSource

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        lossless: bool = False,
        codec: str = "libx264",
        crf: int = 18,
        fps: Any = None,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if not 0 <= crf <= 51:
            raise InputError(f"VideoWriter: crf must be 0 to 51, got {crf}")
        if lossless and codec != "libx264":
            raise InputError(f"VideoWriter: lossless=True is for codec='libx264', got {codec!r}")
        import av

        try:
            av.Codec(codec, "w")
        except ValueError as error:
            raise InputError(f"VideoWriter: PyAV has no encoder {codec!r}") from error
        self._named = check_fps("VideoWriter", fps)
        self.facts = Facts(fps=self._named)
        self._encoding = Encoding(codec, crf, lossless=lossless)

    def expect_facts(self, facts: Facts, where: str) -> None:
        """Note what is known of the episodes; a rate that the option names counts."""
        super().expect_facts(Facts(facts.reward_at, self._named or facts.fps), where)

    def _how(self) -> tuple[str, str]:
        return "mp4", "lossless video" if self._encoding.lossless else "video"

    def _pack(self, how: str, images: Array) -> tuple[Encoded, str]:
        video = io.BytesIO()
        rate = self.facts.fps or self._encoding.fps
        encode_video(video, images, replace(self._encoding, fps=rate))
        lossy = not self._encoding.lossless and images.dtype == np.uint8
        told = "H.264, which is lossy; for exact images pass lossless=True" if lossy else ""
        return Encoded([video.getvalue()], how), told

    def _put(self, folder: str, number: int, how: str, images: Encoded) -> None:
        disk.write_file(os.path.join(folder, video_name(number)), images.values[0])
