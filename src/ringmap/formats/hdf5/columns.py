"""The layout of a column in an HDF5 file.

    /pixels     uint8 (N, H, W, C), chunked along time     plain names and dtypes: as they are
    /obs%2Fx    attribute ringmap_column = "\\"obs/x\\""      names that HDF5 or the layout can't take
    /task       UTF-8, variable length                     attribute ringmap_dtype = "<U0"
    /stamp      int64                                      attribute ringmap_dtype = "<M8[ns]"
    /ep_len     int32 (E,)      attributes: episode data (data.py), ringmap_birth
    /ep_offset  int64 (E,)
    /obs/camera                                            column "obs/camera": of other programs, and `nested=True`

The attributes are ours; a reader that does not know them sees the plain layout of
stable-worldmodel (Data guide, HDF5): one dataset per column over all steps.
Invariants: what `create_columns` and `write` stored, `find_columns` and `windows` give back equal, dtype
and all; nothing is followed out of the file: no links, no external storage, no pickle.
Not here: when what is written (writer.py), which rows are a clip (reader.py).
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from ringmap.errors import CorruptError, MissingExtraError
from ringmap.formats.common.hdf5_trial import is_c_text
from ringmap.formats.common.names import ESCAPED, escape, quoted, unescape
from ringmap.formats.common.safe_hdf5 import check_link, is_text, refuse_sparse
from ringmap.formats.hdf5.direct import Direct
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import TEXT, ColumnSpec, Schema

__all__ = ["EPISODE_LENGTHS", "EPISODE_OFFSETS", "Column", "Found", "create_columns", "find_columns", "strange_in"]

Array = np.ndarray[Any, np.dtype[Any]]

EPISODE_LENGTHS = "ep_len"
EPISODE_OFFSETS = "ep_offset"

NAME_ATTRIBUTE = "ringmap_column"
DTYPE_ATTRIBUTE = "ringmap_dtype"

MAX_CHUNK_ROWS = 16384
"""A chunk of a narrow column ends here: 1 MB of it would be mostly air in a small dataset."""

_CACHE_NBYTES = 32 << 20

_DEEPEST = 32


class Column:
    """A column of an open file.

    Args:
        name: the column's name, which the link's may differ from.
        dataset: where it lies.
        fd: of its file, to read it; -1 for a file that is written.

    Raises:
        CorruptError: it lies outside the file.
    """

    def __init__(self, name: str, dataset: Any, fd: int = -1) -> None:
        self._fd = fd
        self.dataset = dataset
        refuse_sparse(dataset.file.filename, name, dataset)
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
    """Create empty columns.

    Args:
        root: of a file.
        schema: of the columns.
        chunk_nbytes: about how large a chunk is.
        filters: compression, as `h5py.Group.create_dataset` takes it; none for text.
        nested: whether a column whose name is a path gets groups, as far as HDF5 can.
    """
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
class Found:
    """What an open file holds beside its table of episodes.

    Args:
        columns: by name, in the order in which they were created.
        unsupported: name -> what it is, of columns that are sound, and of a type that none has here.
        others: the paths of what is no column: single values, arrays below a group with too few rows.
    """

    columns: dict[str, Column]
    unsupported: dict[str, str]
    others: list[str]


def find_columns(root: Any, rows: int, fd: int = -1) -> Found:
    """Return the columns of an open file: its datasets; one below a group is named by its path.

    Args:
        root: the file.
        rows: as many as the episodes need.
        fd: of the file, to read it.

    Raises:
        CorruptError: a link that leads elsewhere, a column with too few rows, or a name that two have.
    """
    path, found = root.file.filename, Found({}, {}, [])
    for place, dataset in _datasets(root):
        if place in (EPISODE_LENGTHS, EPISODE_OFFSETS):
            continue
        given = dataset.attrs.get(NAME_ATTRIBUTE)
        try:
            name = str(json.loads(given)) if isinstance(given, str) else place
        except ValueError as error:
            raise CorruptError(f"{path}: {place!r} has a bad name: {error}") from error
        if not dataset.shape or ("/" in place and dataset.shape[0] < rows):
            found.others.append(place)
        elif dataset.shape[0] < rows:
            raise CorruptError(
                f"{path}: column {name!r} has {dataset.shape[0]} rows, but the episodes need {rows}; its writer was "
                "killed, or it is no column"
            )
        elif name in found.columns or name in found.unsupported:
            raise CorruptError(f"{path}: two columns have the name {name!r}; rename one of them")
        elif dataset.dtype.kind in "biufcS" or is_text(dataset.dtype):
            found.columns[name] = Column(name, dataset, fd)
        else:
            found.unsupported[name] = (
                f"of HDF5 type {dataset.dtype}, expected bool, integers, floats, complex or strings"
            )
    return found


def _datasets(group: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the dataset of all that is below a group."""
    if depth > _DEEPEST:  # a group that holds itself
        raise CorruptError(f"{group.file.filename}: {group.name} is nested too deep")
    for link in group:
        check_link(group, link)
        dataset = open_dataset(group, link)
        if dataset is not None:
            yield prefix + link, dataset
        elif isinstance(found := group.get(link), h5py.Group):
            yield from _datasets(found, f"{prefix}{link}/", depth + 1)


def open_dataset(group: Any, link: str) -> Any:
    """Open a dataset with a chunk cache that suits it, or return None when `link` is no dataset.

    Without filters there is none: HDF5 then reads just the rows asked for, not their whole chunk.

    Raises:
        MissingExtraError: a filter that this file needs is not there.
    """
    found = group.get(link)
    if not isinstance(found, h5py.Dataset):
        return None
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    for code in filters:
        if not h5py.h5z.filter_avail(code):
            _bring_filters(group.file.filename, link, code)
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(521, _CACHE_NBYTES if filters else 0, 0.75)
    return h5py.Dataset(h5py.h5d.open(group.id, link.encode(errors="surrogateescape"), access))


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
