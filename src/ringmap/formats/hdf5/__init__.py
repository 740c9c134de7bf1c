"""The HDF5 format: one file, one dataset per column over all steps.

    /pixels     uint8 (N, H, W, C), chunked along time     plain names and dtypes: as they are
    /obs%2Fx    attribute ringmap_column = "\\"obs/x\\""      names that HDF5 or the layout can't take
    /task       UTF-8, variable length                     attribute ringmap_dtype = "<U0"
    /stamp      int64                                      attribute ringmap_dtype = "<M8[ns]"
    /ep_len     int32 (E,)                                 steps of each episode
    /ep_offset  int64 (E,)                                 row of each episode's first step
    /obs/camera                                            column "obs/camera": of other programs, and `nested=True`

Data of episodes are attributes of `ep_len`: typed where HDF5 holds the value as it is, else packed. No group stands for
them: stable-worldmodel's reader takes every member of the root for a column.

    episode_7.seed = 3              int64        a whole number, a fraction, a flag, an array of these
    episode_7.task = "push"         UTF-8        text
    ringmap_episode_000000007.0     uint8        what HDF5 would change (None, 2**70, NumPy's scalars), in parts
    ringmap_episode_columns         JSON         the names of all, first seen first
    ringmap_table                   uint64 (2,)  the mark of the table of episodes that they were written for
    ringmap_birth                   text         which file it is

A reader that does not know these attributes sees the plain layout of stable-worldmodel (Data guide, HDF5). A group of
episodes is added in place, by one commit of the pages that it changes.
Invariants: what was written is read equal, dtype and all; nothing is followed out of the file: no links, no external
storage, no pickle; a process that opens the path again and finds another file there, or the same one with other
episodes, refuses: one that was appended to has its old birth.
Not here: pages and their journal (journal.py), the log (common/writer.py), pickling and forks (common/source.py).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import h5py
import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.datasets.base import num_rows
from ringmap.errors import (
    CorruptError,
    InputError,
    MissingExtraError,
    ReplacedError,
    UnknownFormatError,
)
from ringmap.formats.builtin import HDF5
from ringmap.formats.common import disk
from ringmap.formats.common.log import Record, groups_of
from ringmap.formats.common.names import ESCAPED, escape, quoted, unescape
from ringmap.formats.common.safe_hdf5 import datasets, has_own, is_c_text, is_text, loaded, refuse_sparse
from ringmap.formats.common.source import (
    DirectorySource,
    damage_named,
    fits,
    mark_of,
    refuse_other_table,
    stamp_of,
    tell_left_out,
)
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.hdf5.journal import WAIT_S, JournaledFile, journaled, unwritten
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import TEXT, ColumnSpec, Schema
from ringmap.storage.records.blobs import decode_data, encode_data

__all__ = ["Direct", "HDF5Source", "HDF5Writer"]


Array = np.ndarray[Any, np.dtype[Any]]

EPISODE_LENGTHS = "ep_len"
EPISODE_OFFSETS = "ep_offset"

NAME_ATTRIBUTE = "ringmap_column"
DTYPE_ATTRIBUTE = "ringmap_dtype"

MAX_CHUNK_ROWS = 16384
"""A chunk of a narrow column ends here: 1 MB of it would be mostly air in a small dataset."""

_CACHE_NBYTES = 32 << 20


class Column:
    """A column of an open file.

    Raises:
        CorruptError: it lies outside the file.
    """

    def __init__(self, name: str, dataset: Any, fd: int = -1) -> None:
        self._fd = fd
        self.dataset = dataset
        stored = dataset.dtype
        given = dataset.attrs.get(DTYPE_ATTRIBUTE)
        self.is_text = is_text(stored)
        dtype = np.dtype("U") if self.is_text else stored.newbyteorder("=")
        if given is not None:
            dtype = _declared(dataset, name, given, "U" if self.is_text else "mM")
        self.escapes = given is not None
        self._stored = np.dtype("=i8") if dtype.kind in "mM" else dtype
        self.spec = ColumnSpec(name, dataset.shape[1:], dtype)
        self._direct: Direct | None = None
        self._looked = False

    def __len__(self) -> int:
        return int(self.dataset.shape[0])

    def write(self, start: int, rows: Array) -> None:
        """Write `rows` from row `start` on; the column grows as needed, and never shrinks."""
        shape = (start + len(rows), *self.spec.shape)
        if shape[0] > len(self):
            self.dataset.id.set_extent(shape)
        if not rows.size:
            return
        if self.is_text:
            self.dataset[start : start + len(rows)] = self._encode(rows)
            return
        stored = rows.view("<i8") if rows.dtype.kind in "mM" else rows
        # The low-level call: h5py's indexing costs more than the write of a small episode.
        space = self.dataset.id.get_space()
        space.select_hyperslab((start,) + (0,) * (rows.ndim - 1), rows.shape)
        self.dataset.id.write(h5py.h5s.create_simple(rows.shape), space, stored)

    def windows(self, starts: Array, length: int, stride: int) -> Array:
        """Read rows `s, s + stride, ... < s + length` for each s: a fresh array (B, T, ...)."""
        count = len(range(0, length, stride))
        shape = (count, *self.spec.shape)
        if self.is_text:
            texts = [self.dataset[s : s + length : stride] for s in starts.tolist()]
            found = np.stack(texts) if texts else np.empty((0, *shape), object)
            return self._decode(found)
        direct = self._from_chunks(starts, length, stride)
        if direct is not None:
            return direct.view(self.spec.dtype) if self.spec.dtype.kind in "mM" else direct
        out = empty((len(starts), *shape), self._stored)
        if out.size:
            memory, space = h5py.h5s.create_simple(shape), self.dataset.id.get_space()
            zeros, ones = (0,) * len(self.spec.shape), (1,) * len(self.spec.shape)
            for start, part in zip(starts.tolist(), out, strict=True):
                space.select_hyperslab((start, *zeros), shape, (stride, *ones))
                self.dataset.id.read(memory, space, part)
        return out.view(self.spec.dtype) if self.spec.dtype.kind in "mM" else out

    def _from_chunks(self, starts: Array, length: int, stride: int) -> Array | None:
        """Return windows without HDF5's help, or None where it has to be asked."""
        if not self._looked:
            self._looked = True
            self._direct = Direct.of(self.dataset, self._stored, self._fd)
        return None if self._direct is None else self._direct.windows(starts, length, stride)

    def _encode(self, rows: Array) -> Array:
        strange, texts = strange_in(rows), rows.astype(object)
        if strange.any():
            texts[strange] = [escape(text) for text in texts[strange]]
        return texts

    def _decode(self, found: Array) -> Array:
        texts = [v.decode() if isinstance(v, bytes) else v for v in found.ravel()]
        if self.escapes:
            texts = [unescape(text) if text.startswith(ESCAPED) else text for text in texts]
        width = max(map(len, texts), default=0)
        fits = self.spec.dtype.itemsize and width <= self.spec.dtype.itemsize // 4
        dtype = self.spec.dtype if fits else np.dtype(f"<U{max(width, 1)}")
        return np.array(texts, dtype).reshape(found.shape)


def strange_in(rows: Array) -> Array:
    """Return which texts HDF5 does not hold as they are, or would be taken for escaped ones."""
    points = np.ascontiguousarray(rows).view(np.uint32).reshape(*rows.shape, -1)
    inner_nul = (points[..., :-1] == 0) & (points[..., 1:] != 0)
    strange: Array = ((points >= 0xD800) & (points <= 0xDFFF)).any(-1) | inner_nul.any(-1)
    strange |= points[..., 0] == ord(ESCAPED)
    return strange


def create_columns(
    root: Any, schema: Schema, chunk_nbytes: int, filters: dict[str, Any], nested: bool
) -> dict[str, Column]:
    """Create empty columns."""
    made = {}
    for spec in schema.columns:
        rows = max(1, min(chunk_nbytes // max(spec.row_nbytes, 1), MAX_CHUNK_ROWS))
        stored: Any = spec.dtype
        if spec.dtype.kind == "U":
            stored = h5py.string_dtype("utf-8")
        elif spec.dtype.kind in "mM":
            stored = np.dtype("<i8")
        group, link = _place_of(root, spec.name, schema.names) if nested else (root, link_name(spec.name))
        dataset = group.create_dataset(
            link,
            shape=(0, *spec.shape),
            maxshape=(None, *(n or None for n in spec.shape)),  # HDF5 has no chunk of size 0
            chunks=(rows, *(max(n, 1) for n in spec.shape)),
            dtype=stored,
            fill_time="ifset" if spec.dtype.kind == "U" else "never",
            **({} if spec.dtype.kind == "U" else filters),
        )
        if dataset.name != "/" + spec.name:
            dataset.attrs[NAME_ATTRIBUTE] = json.dumps(spec.name)
        if spec.dtype.kind in "UmM":
            dataset.attrs[DTYPE_ATTRIBUTE] = spec.dtype.str
        made[spec.name] = Column(spec.name, dataset)
    return made


def _place_of(root: Any, name: str, others: Collection[str]) -> tuple[Any, str]:
    """Return the group of a column, which is made, and the name of its link there."""
    *parents, last = name.split("/")
    above = {"/".join(parents[:n]) for n in range(1, len(parents) + 1)}
    usable = all(part not in ("", ".", "..") and is_c_text(part) for part in (*parents, last))
    if not parents or not usable or above & {*others, EPISODE_LENGTHS, EPISODE_OFFSETS}:
        return root, link_name(name)
    for part in parents:
        root = root[part] if part in root else root.create_group(part, track_order=True)
    return root, last


@dataclass(frozen=True, slots=True)
class Contents:
    """What an open file holds beside its table of episodes."""

    columns: dict[str, Column]
    unsupported: dict[str, str]
    others: list[str]


def find_columns(root: Any, rows: int, fd: int = -1) -> Contents:
    """Return the columns of an open file: its datasets; one below a group is named by its path.

    Raises:
        CorruptError: a link that leads elsewhere, a column with too few rows, or a name that two have.
    """
    path, contents = root.file.filename, Contents({}, {}, [])
    for place, found_there in datasets(root):
        if place in (EPISODE_LENGTHS, EPISODE_OFFSETS):
            continue
        dataset = _cached(found_there)
        given = dataset.attrs.get(NAME_ATTRIBUTE)
        try:
            name = str(json.loads(given)) if isinstance(given, str) else place
        except ValueError as error:
            raise CorruptError(f"{path}: {place!r} has a bad name: {error}") from error
        if not dataset.shape or ("/" in place and dataset.shape[0] < rows):
            contents.others.append(place)
        elif dataset.shape[0] < rows:
            raise CorruptError(
                f"{path}: column {name!r} has {dataset.shape[0]} rows, but the episodes need {rows}; its writer was "
                "killed, or it is no column"
            )
        elif name in contents.columns or name in contents.unsupported:
            raise CorruptError(f"{path}: two columns have the name {name!r}; rename one of them")
        elif dataset.dtype.kind in "biufcS" or is_text(dataset.dtype):
            contents.columns[name] = Column(name, dataset, fd)
        else:
            contents.unsupported[name] = (
                f"of HDF5 type {dataset.dtype}, expected bool, integers, floats, complex or strings"
            )
    return contents


def _cached(found: Any) -> Any:
    """Return a dataset with a chunk cache that suits it: without filters none, for HDF5 then reads just the rows asked
    for, not their whole chunk.

    Raises:
        MissingExtraError: a filter that this file needs is not there.
    """
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    for code in filters:
        if not h5py.h5z.filter_avail(code):
            _bring_filters(found.file.filename, found.name.lstrip("/"), code)
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(521, _CACHE_NBYTES if filters else 0, 0.75)
    return h5py.Dataset(h5py.h5d.open(found.file.id, found.name.encode(errors="surrogateescape"), access))


def link_name(column: str) -> str:
    """Return the name of a column's link: the column's own where HDF5 and the layout can take it.

    Example:
        >>> link_name("état"), link_name("obs/pixels"), link_name(".."), link_name("ep_len")
        ('état', 'obs%2Fpixels', '%2E%2E', '%65p_len')
    """
    return quoted(column, (EPISODE_LENGTHS, EPISODE_OFFSETS))


def _bring_filters(path: str, link: str, code: int) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("hdf5plugin")  # registers its filters
    if not h5py.h5z.filter_avail(code):
        raise MissingExtraError(
            f"{path}: column {link!r} is compressed with HDF5 filter {code}, which h5py does not "
            "bring; pip install hdf5plugin"
        )


def _declared(dataset: Any, name: str, given: Any, kinds: str) -> np.dtype[Any]:
    with contextlib.suppress(TypeError):
        dtype: np.dtype[Any] = np.dtype(given)
        if dtype.kind in kinds and (dtype.itemsize or dtype == TEXT):
            return dtype
    raise CorruptError(
        f"{dataset.file.filename}: column {name!r} of HDF5 type {dataset.dtype} says that its dtype is {given!r}"
    )


_NAMES = "ringmap_episode_columns"
_TABLE = "ringmap_table"

_PART_NBYTES = 60_000
"""HDF5 holds an attribute of up to 64 kB in any version of its files."""


def add_episode_data(table: Any, first: int, data: Sequence[dict[str, Any]]) -> None:
    """Store the data of episodes from number `first` on in the dataset `ep_len`."""
    known = dict.fromkeys(data_names(table))
    count = len(known)
    for number, values in enumerate(data, first):
        packed = {name: value for name, value in values.items() if not _is_typed(name, value)}
        for name, value in values.items():
            known.setdefault(name)
            if name not in packed:
                _create(table, _typed_name(number, name), value)
        blob = encode_data(packed, "HDF5Writer") if packed else b""
        for part in range(-(-len(blob) // _PART_NBYTES)):
            piece = np.frombuffer(blob, np.uint8)[part * _PART_NBYTES : (part + 1) * _PART_NBYTES]
            _create(table, _packed_name(number, part), piece)
    if len(known) > count:
        table.attrs[_NAMES] = json.dumps(list(known))


def read_episode_data(table: Any, number: int) -> dict[str, Any]:
    """Return an episode's data from the dataset `ep_len`; {} when it has none."""
    attrs, parts = table.attrs, list[bytes]()
    found = {}
    for name in data_names(table):
        value = attrs.get(_typed_name(number, name)) if _is_plain(name) else None
        if value is not None:
            found[name] = loaded(value)
    while (part := attrs.get(_packed_name(number, len(parts)))) is not None:
        parts.append(np.asarray(part, np.uint8).tobytes())
    return {**found, **(decode_data(b"".join(parts)) if parts else {})}


def data_names(table: Any) -> list[str]:
    """Return the names of all data of episodes."""
    given = table.attrs.get(_NAMES)
    return [str(name) for name in json.loads(given)] if isinstance(given, str) else []


def _typed_name(number: int, name: str) -> str:
    return f"episode_{number}.{name}"


def _packed_name(number: int, part: int) -> str:
    return f"ringmap_episode_{number:09d}.{part}"


def _is_plain(name: str) -> bool:
    return len(name) < 1000 and is_c_text(name)


def _is_typed(name: str, value: Any) -> bool:
    """Return whether an attribute of this name is read back equal, type and all."""
    if not _is_plain(name):
        return False
    if isinstance(value, np.ndarray):
        return (
            value.ndim > 0 and value.dtype.kind in "biuf" and value.itemsize <= 8 and 0 < value.nbytes <= _PART_NBYTES
        )
    if type(value) is str:
        return len(value) < 1000 and is_c_text(value)
    return type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63)


def _create(table: Any, name: str, value: Any) -> None:
    """Create an attribute: without h5py's detour by another name, which costs more than all the rest."""
    if isinstance(value, str):
        array, kind = np.array(value, object), h5py.h5t.py_create(h5py.string_dtype(), logical=True)
    else:
        array = np.asarray(value)
        kind = h5py.h5t.py_create(array.dtype, logical=True)
    space = h5py.h5s.create_simple(array.shape) if array.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
    h5py.h5a.create(table.id, name.encode(), kind, space).write(array)


_MOST_CHUNKS = 1 << 22


class Direct:
    """The chunks of a column in an open file, by the byte at which each begins, -1 where none was written. Any
    number of threads may read while the file stays open."""

    def __init__(self, fd: int, dtype: np.dtype[Any], row: tuple[int, ...], step: int, places: Array) -> None:
        self._dtype, self._row, self._step, self._places = dtype, row, step, places
        self._row_nbytes = int(np.prod(row, dtype=np.int64)) * dtype.itemsize
        self._fd = fd

    @classmethod
    def of(cls, dataset: Any, dtype: np.dtype[Any], fd: int) -> Direct | None:
        """Return direct access to a dataset in a file of this descriptor, or None where HDF5 has to read it."""
        plist, file = dataset.id.get_create_plist(), dataset.file
        if (
            not hasattr(os, "preadv")
            or dataset.chunks is None
            or plist.get_nfilters()
            or dataset.chunks[1:] != dataset.shape[1:]
            or file.userblock_size
            or not dataset.size
            or dataset.id.get_num_chunks() > _MOST_CHUNKS
            or not dataset.id.get_type().equal(h5py.h5t.py_create(dtype))
        ):
            return None
        step = dataset.chunks[0]
        places = np.full(-(-dataset.shape[0] // step), -1, np.int64)

        def note(chunk: Any) -> None:
            places[chunk.chunk_offset[0] // step] = chunk.byte_offset

        dataset.id.chunk_iter(note)
        return cls(fd, dtype, dataset.shape[1:], step, places)

    def windows(self, starts: Array, length: int, stride: int) -> Array | None:
        """Return windows of rows, or None where a chunk was never written (HDF5 knows its fill value)."""
        count = len(range(0, length, stride))
        out = empty((len(starts), count, *self._row), self._dtype)
        if not out.size:
            return out
        nbytes, step = self._row_nbytes, self._step
        flat = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        at = 0
        for start in starts.tolist():
            row, stop = start, start + length
            while row < stop:
                place = int(self._places[row // step])
                if place < 0:
                    return None
                inside = row % step
                run = min(step - inside, stop - row) if stride == 1 else 1
                self._read(flat[at : at + run * nbytes], place + inside * nbytes)
                at += run * nbytes
                row += run if stride == 1 else stride
        return out

    def _read(self, into: memoryview, place: int) -> None:
        done = os.preadv(self._fd, [into], place)
        while done < len(into):
            more = os.preadv(self._fd, [into[done:]], place + done)
            if not more:
                raise CorruptError(f"the file ends at byte {place + done}, inside of a chunk")
            done += more


BIRTH = "ringmap_birth"
"""Attribute of `ep_len`: a random text that a file gets when our writer makes it, and keeps while it is appended to."""

_open_files: weakref.WeakSet[HDF5File] = weakref.WeakSet()


class HDF5Source(DirectorySource):
    """The columns of an HDF5 file, as `StoredDataset` reads them.

    Args:
        path: the file.

    Raises:
        NotFoundError: there is no such file.
        LockedError: a writer keeps it locked.
        UnknownFormatError: it is not an HDF5 file, or one of another layout.
        CorruptError: it is damaged, or refers to other files.

    Processes and threads: HDF5 runs one call at a time; pickled or forked, it opens the file again
    by itself. A read waits while a writer adds a group of episodes, and then opens the file again.
    """

    _holds = True
    _stamp: tuple[int, ...] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        file = self._handle()
        self._birth = file.table.attrs.get(BIRTH)
        self.lengths, self.offsets = file.lengths, file.offsets
        with damage_named(self.path):
            self.episode_columns = data_names(file.table)
            Facts.stated(file.table.attrs, PREFIX).give(self)
        self.schema = Schema(tuple(column.spec for column in file.columns.values()))
        self.unsupported = file.contents.unsupported
        self._stamp = file.stamp
        tell_left_out(self.path, file.contents.others)

    @property
    def opened(self) -> HDF5File:
        """The open file."""
        found: HDF5File = self._handle()
        return found

    def _open(self) -> HDF5File:
        found = HDF5File(self.path)
        if self._stamp not in (None, found.stamp) and not self._continues(found):
            found.close()
            raise ReplacedError(f"{self.path}: was written over since this dataset was loaded; load it again")
        return found

    def _continues(self, found: HDF5File) -> bool:
        """Return whether a file that was opened again is what it was, and a writer of ours has added episodes."""
        count = len(self.lengths)
        known = {spec.name: spec for spec in self.schema.columns}
        return (
            self._birth is not None
            and found.table.attrs.get(BIRTH) == self._birth
            and np.array_equal(found.lengths[:count], self.lengths)
            and np.array_equal(found.offsets[:count], self.offsets)
            and known == {name: column.spec for name, column in found.columns.items()}
        )

    def _release(self, handle: HDF5File) -> None:
        handle.close()

    def _windows(
        self, handle: HDF5File, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        found = {}
        for name in columns:
            with damage_named(f"{self.path}: column {name!r}"):
                found[name] = handle.columns[name].windows(starts, length, stride)
        return found

    def _episode_data(self, handle: HDF5File, episode: int) -> dict[str, Any]:
        if not handle.fits:
            raise refuse_other_table(self.path)
        return read_episode_data(handle.table, episode)

    def _unmixed(self, read: Callable[[HDF5File], dict[str, Any]]) -> dict[str, Any]:
        """Return what is read of the file as it was when it was opened; its writers wait meanwhile."""
        with self._alone():
            while True:
                opened = self.opened
                disk.lock(opened.fd, self.path, shared=True, wait_s=WAIT_S)
                try:
                    if opened.is_unchanged():
                        try:
                            return read(opened)
                        finally:
                            if not opened.is_unchanged():  # by a program that locks nothing
                                raise ReplacedError(f"{self.path}: was written over while it was open; load it again")
                finally:
                    disk.unlock(opened.fd, close=False)
                self.close()


class HDF5File:
    """An open file, its columns and its table of episodes.

    Attributes:
        stamp: what changes when the file is written, as of the opening.
        fits: whether the data of episodes are of these episodes.
    """

    file: Any = None

    def __init__(self, path: str) -> None:
        with unwritten(path) as fd:
            self.fd = os.dup(fd)  # shares the lock, which `unwritten` gives back
            try:
                self.file = _opened(path, self.fd)
                self.stamp = stamp_of(os.fstat(self.fd))
                with damage_named(path):
                    self.lengths, self.offsets = read_table(self.file)
                    self.contents = find_columns(self.file, num_rows(self.lengths, self.offsets), self.fd)
            except BaseException:
                self.close()
                raise
        self.columns = self.contents.columns
        self.table = self.file[EPISODE_LENGTHS]
        self.fits = fits(self.table.attrs.get(_TABLE), self.lengths, self.offsets)
        _open_files.add(self)

    def is_unchanged(self) -> bool:
        """Return whether nothing was written since the opening."""
        found = os.fstat(self.fd)
        return (found.st_size, found.st_mtime_ns) == self.stamp[2:]

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@atexit.register
def _close_open_files() -> None:
    """Close what a thread, or a fork's parent, keeps open: HDF5's own end would, by a driver that is Python, which is
    gone by then."""
    for one in list(_open_files):
        with contextlib.suppress(Exception):
            one.file.close()


def _opened(path: str, fd: int) -> Any:
    try:
        # By a driver of our own: HDF5 shares what it has in memory of a file among those who open it by its path in one
        # process, also what was there before a commit. And it locks nothing.
        return h5py.File(JournaledFile(fd, path), "r")
    except OSError as error:
        if not h5py.is_hdf5(path):
            raise UnknownFormatError(f"{path}: is not an HDF5 file") from error
        hint = ""
        if "h5clear" in str(error) or "already open for write" in str(error):
            hint = "; another program's writer left it open: try `h5clear -s` on a copy"
        raise CorruptError(f"{path}: HDF5 can't open it: {error}{hint}") from error


def read_table(root: Any) -> tuple[Array, Array]:
    """Return `(lengths int32, offsets int64)` of the episodes in an open file.

    Raises:
        UnknownFormatError: the file has no episode table.
        CorruptError: the table makes no sense.
    """
    path = root.file.filename
    found = []
    for name in (EPISODE_LENGTHS, EPISODE_OFFSETS):
        values = root.get(name) if has_own(root, name) else None
        if not isinstance(values, h5py.Dataset) or values.is_virtual or values.external:
            raise UnknownFormatError(
                f"{path}: has no dataset {name!r}; expected one dataset per column over all steps, "
                f"with {EPISODE_LENGTHS!r} and {EPISODE_OFFSETS!r} beside them"
            )
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise CorruptError(f"{path}: {name!r} is {values.dtype} {values.shape}, expected integers (E,)")
        refuse_sparse(path, name, values)
        found.append(values[()].astype(np.int64))
    lengths, offsets = found
    ends = lengths.max(initial=0), offsets.max(initial=0)
    if (
        len(lengths) != len(offsets)
        or min(lengths.min(initial=0), offsets.min(initial=0)) < 0
        or ends[0] >= 1 << 31
        or ends[1] > 1 << 62  # their sum stays a number
    ):
        raise CorruptError(
            f"{path}: {EPISODE_LENGTHS!r} and {EPISODE_OFFSETS!r} do not describe episodes "
            f"({len(lengths)} and {len(offsets)} entries)"
        )
    return lengths.astype(np.int32), offsets


_TABLE_CHUNK = 1024

_PIECE_NBYTES = 8 << 20


class HDF5Writer(EpisodeWriter):
    """Writes episodes to an HDF5 file. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. Readers may have
    the file open: they wait while a group of episodes goes over. A program that holds it open with HDF5's own lock
    keeps episodes in the log.

    Args:
        compression: as h5py takes it ("gzip", "lzf", a filter's number); None for none.
        compression_opts: as h5py takes it.
        shuffle: reorder bytes before compressing; None for when there is compression.
        chunk_nbytes: about how large a chunk of a column is.
        nested: whether a new file has column "obs/camera" as dataset `camera` of group `obs`, as other programs write
            it; else all columns lie side by side, which stable-worldmodel reads.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.h5")
        >>> with HDF5Writer(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> from ringmap.data import load_dataset
        >>> load_dataset(path).get_episode_data()
        {'seed': [7]}
    """

    format = HDF5

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        compression: str | int | None = None,
        compression_opts: Any = None,
        shuffle: bool | None = None,
        chunk_nbytes: int = 1 << 20,
        nested: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        if chunk_nbytes <= 0:
            raise InputError(f"HDF5Writer: chunk_nbytes must be positive, got {chunk_nbytes}")
        self._chunk_nbytes, self._nested = chunk_nbytes, nested
        self._filters: dict[str, Any] = {}
        self._plain: dict[str, Column] = {}
        if compression is not None:
            self._filters = {"compression": compression, "shuffle": shuffle is not False}
            if compression_opts is not None:
                self._filters["compression_opts"] = compression_opts
            try:  # before an episode is logged that could not leave the log
                with h5py.File("trial", "w", driver="core", backing_store=False) as file:
                    file.create_dataset("x", (1,), np.uint8, chunks=(1,), **self._filters)
            except (ValueError, TypeError) as error:
                raise InputError(f"HDF5Writer: {self.path}: options {self._filters}: {error}") from error

    def __enter__(self) -> Self:
        if os.path.isdir(self.path):
            raise InputError(f"HDF5Writer: {self.path} is a directory; give the path of a file in it")
        there = os.path.isfile(self.path) and os.path.getsize(self.path)
        if there and self.mode == "overwrite" and not h5py.is_hdf5(self.path):  # a suffix alone says nothing
            raise UnknownFormatError(
                f"HDF5Writer: {self.path} is not an HDF5 file; choose another path, or delete it yourself"
            )
        return super().__enter__()

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why a column of text, which another program made, can't hold these."""
        column = self._plain.get(name)
        strange = strange_in(rows) if column is not None and rows.dtype.kind == "U" else np.zeros(1, bool)
        return f"it has {rows[strange][0]!r}: NUL and lone surrogates are no UTF-8" if strange.any() else None

    def resume(self, dataset: Any) -> None:
        """Look at columns that another program made."""
        self._plain = {}
        if dataset is None:
            return
        file: HDF5File = dataset.source.opened
        if not file.fits:
            raise refuse_other_table(self.path)
        for name, column in (*file.columns.items(), ("ep_len", file.table), ("ep_offset", file.file[EPISODE_OFFSETS])):
            if getattr(column, "dataset", column).maxshape[0] is not None:
                raise InputError(
                    f"HDF5Writer: {self.path}: column {name!r} was made with a fixed size; it can't be appended to, "
                    "only copied"
                )
        self._plain = {n: c for n, c in file.columns.items() if c.is_text and not c.escapes}

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new file. Superblock 2: a killed writer leaves no mark that others would refuse to open."""
        with h5py.File(path, "x", libver=("v108", "v108"), track_order=True, rdcc_nbytes=0) as file:
            for name, dtype in ((EPISODE_LENGTHS, np.int32), (EPISODE_OFFSETS, np.int64)):
                file.create_dataset(name, shape=(0,), maxshape=(None,), chunks=(_TABLE_CHUNK,), dtype=dtype)
            file[EPISODE_LENGTHS].attrs[BIRTH] = uuid.uuid4().hex
            self._add(file, episodes)

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes in place: all of them, or none, at any moment."""
        with journaled(path) as file:
            self._add(file, episodes)

    def _add(self, file: Any, episodes: Iterable[Record]) -> None:
        """Cost: O(bytes), plus the table of episodes, plus at most a chunk per column that is written twice."""
        lengths, offsets = read_table(file)
        first = rows = num_rows(lengths, offsets)
        columns, table = find_columns(file, rows).columns, file[EPISODE_LENGTHS]
        fresh: list[int] = []
        for group in groups_of(episodes, _PIECE_NBYTES):
            if not columns:
                schema = group[0].schema
                columns = create_columns(file, schema, self._chunk_nbytes, self._filters, self._nested)
            if not len(lengths) and not fresh:
                table.attrs.update(Facts.stated(group[0].notes).encode(PREFIX))
            parts: list[Any] = []
            for name, column in columns.items():
                parts = [record.columns[name] for record in group]
                column.write(rows, parts[0] if len(parts) == 1 else np.concatenate(parts))
            add_episode_data(table, len(lengths) + len(fresh), [record.data for record in group])
            fresh += [record.length for record in group]
            rows += sum(record.length for record in group)
            del group, parts  # before the next are read
        if not fresh:
            return
        more = np.array(fresh, np.int32)
        starts = first + np.cumsum(more, dtype=np.int64) - more
        Column(EPISODE_LENGTHS, table).write(len(lengths), more)
        Column(EPISODE_OFFSETS, file[EPISODE_OFFSETS]).write(len(lengths), starts)
        if _NAMES in table.attrs:
            table.attrs.modify(_TABLE, mark_of(more, starts, mark_of(lengths, offsets)))
