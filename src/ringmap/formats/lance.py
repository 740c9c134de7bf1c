"""The Lance format: one row per step in a Lance dataset, made for random access.

    NAME.lance             episode_idx int32 | step_idx int32 | pixels binary (PNG) | action float32[2] ...
    NAME_episodes.lance    episode_idx int32 | seed int64 ...    one row per episode, if there is episode data

    how       Arrow type                    for
    png, jpeg binary                        images: what the codec holds (media/images.py)
    list      fixed-size list of numbers    numbers, complex (as pairs), dates (as int64)
    text      string                        one text per step
    raw       fixed-size list of uint8      bytes, arrays of text
    none      -                             columns of size 0

The layout of stable-worldmodel, with every dtype kept; `compat=True` writes theirs to the letter. The table `ringmap`
in the schema's metadata says which column is which; without it (a dataset that another program made) binary columns are
images and lists are what they are. Rows of all columns are read by one `take` per batch; a group of episodes is one
commit of Lance (a new version, by one rename).
Invariants: episode data is there before the episodes that it belongs to; a file counts only when it is as long as
Lance says: cut short by a limit or a quota, it is not committed.
Not here: values as Arrow has them (common/arrow.py), the log (common/writer.py).
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.clips.facts import PREFIX, Facts
from ringmap.errors import CorruptError, InputError, ReplacedError, RoleError, UnknownFormatError, UnsupportedError
from ringmap.formats.builtin import Lance
from ringmap.formats.common.arrow import from_arrow, refuse_missing, to_arrow
from ringmap.formats.common.log import Encoded, Record, groups_of
from ringmap.formats.common.names import file_name
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.source import DirectorySource, damage_named, steps_of
from ringmap.formats.common.untrusted import check_name, check_row, refuse_links
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.media.images import check_image_format, decode_into, encode, holds, picture_of
from ringmap.storage.columns.copying import empty
from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.columns.values import cast
from ringmap.storage.records.blobs import decode_data, encode_data

__all__ = ["LanceSource", "LanceWriter", "lance"]


Array = np.ndarray[Any, np.dtype[Any]]

EPISODE = "episode_idx"
STEP = "step_idx"
_LANCE_OWN = (
    "_rowid",
    "_rowaddr",
    "_rowoffset",
    "_row_created_at_version",
    "_row_last_updated_at_version",
)
METADATA = b"ringmap"
PACKED = "ringmap"
"""The column of a table of data of episodes that holds them as we pack them."""


@dataclass(frozen=True, slots=True)
class Field:
    """A column, and the field that holds it."""

    spec: ColumnSpec
    name: str
    how: str


def lance() -> Any:
    """Return the module `lance`, whose warning at each fork is kept for the process that needs it.

    pylance's threads do not survive a fork, and it says so to whoever forks. Ours use no handle that was opened before
    a fork (`DirectorySource`); but in the child `take` hangs or crashes now and then, on some datasets every other
    time.

    Raises:
        RoleError: this process was forked from one that had used Lance.
    """
    import lance as module

    global _hooked, _used_by
    if _used_by not in (None, os.getpid()):
        raise RoleError(
            "Lance was used before this process was forked, and its threads did not come along: reading here would "
            "hang or crash. Start workers with DataLoader(..., multiprocessing_context='spawn'), or 'forkserver'"
        )
    _used_by = os.getpid()
    if not _hooked and hasattr(os, "register_at_fork"):
        _hooked = True
        # Hooks run in reverse order: ours, registered later, before the one that warns.
        os.register_at_fork(before=_quiet, after_in_parent=_loud, after_in_child=_loud)
    return module


_hooked = False
_used_by: int | None = None
_silenced = threading.local()


def _quiet() -> None:
    silence = warnings.catch_warnings()
    silence.__enter__()
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    _silenced.by = silence


def _loud() -> None:
    silence, _silenced.by = getattr(_silenced, "by", None), None
    if silence is not None:
        silence.__exit__(None, None, None)


def opened(path: str) -> Any:
    """Open a dataset whose files all lie in its folder.

    Raises:
        CorruptError: one is a link, or the dataset says that it has files elsewhere.
    """
    refuse_links(path)
    dataset = lance().dataset(path)
    for fragment in dataset.get_fragments():
        for file in fragment.data_files():
            # Lance may keep files under another base, which is any path or address.
            if getattr(file, "base_id", None) is not None:
                raise CorruptError(f"{path}: keeps {file.path} elsewhere, which is not followed")
            for part in file.path.split("/"):
                check_name(path, part)
    return dataset


def committed(path: str) -> bool:
    """Return whether Lance has committed anything at a path: a kill may leave folders without a version."""
    folder = os.path.join(path, "_versions")
    return os.path.isdir(folder) and any(n.endswith(".manifest") for n in os.listdir(folder))


def episodes_path(path: str) -> str:
    """Return where the episode data of a dataset lies.

    Example:
        >>> episodes_path("runs/prior.lance")
        'runs/prior_episodes.lance'
    """
    return f"{path.removesuffix('.lance')}_episodes.lance"


def plan_fields(schema: Schema, image_format: str) -> list[Field]:
    """Return how the columns of a new dataset are to lie."""
    return [Field(spec, _field_name(spec.name), _how(spec, image_format)) for spec in schema.columns]


def _how(spec: ColumnSpec, image_format: str) -> str:
    kind = spec.dtype.kind
    if not spec.row_nbytes:
        return "none"
    if holds(image_format, spec):
        return image_format
    if kind == "S" or (kind == "U" and spec.shape and not spec.is_text):
        return "raw"
    return "text" if kind == "U" else "list"


def _field_name(column: str) -> str:
    name = file_name(column, (EPISODE, STEP, *_LANCE_OWN))
    return "".join(f"%{ord(c):02X}" if c in ".`\"'" else c for c in name)


def arrow_schema(fields: list[Field], compat: bool = False, facts: Facts | None = None) -> Any:
    """Return the Arrow schema of a dataset; `compat` leaves our table of columns out, and the facts."""
    import pyarrow as pa

    found = [pa.field(EPISODE, pa.int32()), pa.field(STEP, pa.int32())]
    for field in fields:
        if field.how != "none":
            found.append(pa.field(field.name, arrow_type(field)))
    if compat:
        return pa.schema(found)
    table = [[f.spec.name, f.name, f.how, f.spec.dtype.str, list(f.spec.shape)] for f in fields]
    known: dict[Any, Any] = {} if facts is None else dict(facts.encode(PREFIX))
    return pa.schema(found, metadata={METADATA: json.dumps(table).encode(), **known})


def facts_of(schema: Any) -> Facts:
    """Return what a dataset's schema states of its episodes."""
    stored = (schema.metadata or {}).items()
    texts = {k.decode("utf-8", "replace"): v.decode("utf-8", "replace") for k, v in stored}
    return Facts.stated(texts, PREFIX)


def arrow_type(field: Field) -> Any:
    """Return the Arrow type of a field."""
    import pyarrow as pa

    if field.how in ("png", "jpeg"):
        return pa.binary()
    if field.how == "plain":
        return pa.from_numpy_dtype(field.spec.dtype)
    if field.how == "text":
        return pa.list_(pa.string()) if field.spec.shape else pa.string()
    dtype, size = _items(field)
    return pa.list_(pa.from_numpy_dtype(dtype), size)


def _items(field: Field) -> tuple[np.dtype[Any], int]:
    """Return dtype and number of the items of a step in its list."""
    spec = field.spec
    size = math.prod(spec.shape)
    if field.how == "raw":
        return np.dtype(np.uint8), spec.row_nbytes
    if spec.dtype.kind == "c":
        return np.dtype(f"<f{spec.dtype.itemsize // 2}"), 2 * size
    if spec.dtype.kind in "mM":
        return np.dtype("<i8"), size
    return spec.dtype, size


def fields_of(schema: Any, path: str, unsupported: dict[str, str] | None = None) -> list[Field]:
    """Return the columns of a dataset; image columns of other programs' come without a size yet, and those of a type
    that none has here go to `unsupported`.

    Raises:
        CorruptError: it has no episode and step numbers.
        UnsupportedError: a column is of a type that none has, and nobody asks which.
    """
    import pyarrow as pa

    for name in (EPISODE, STEP):
        if name not in schema.names:
            raise CorruptError(f"{path}: has no column {name!r}; it holds {schema.names}")
    given = (schema.metadata or {}).get(METADATA)
    if given is not None:
        try:
            table = json.loads(given)
            return [_field(path, stored_spec(n, shape, dt), f, how) for n, f, how, dt, shape in table]
        except CorruptError:
            raise
        except (ValueError, TypeError) as error:
            raise CorruptError(f"{path}: the table of its columns is damaged: {error}") from error
    fields = []
    for column in schema:
        name, kind = column.name, column.type
        if name in (EPISODE, STEP):
            continue
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            fields.append(Field(ColumnSpec(name, (0, 0, 3), np.dtype(np.uint8)), name, "jpeg"))
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            fields.append(Field(ColumnSpec(name, (), np.dtype("U")), name, "text"))
        elif pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
            dtype = np.dtype(kind.value_type.to_pandas_dtype())
            check_row(path, name, kind.list_size * dtype.itemsize)
            fields.append(Field(ColumnSpec(name, (kind.list_size,), dtype), name, "list"))
        elif _is_number(kind):
            dtype = np.dtype(kind.to_pandas_dtype())
            fields.append(Field(ColumnSpec(name, (), dtype), name, "plain"))
        else:
            what = f"of type {kind}, which no column is"
            if unsupported is None:
                raise UnsupportedError(f"{path}: column {name!r} is {what}")
            unsupported[name] = what
    return fields


def sized_fields(dataset: Any, path: str, unsupported: dict[str, str] | None = None) -> list[Field]:
    """Return the columns of a dataset, images as the first step has them; those that are not read go to `unsupported`.

    Raises:
        UnsupportedError: images are not read, and nobody asks which.
    """
    fields = fields_of(dataset.schema, path, unsupported)
    unsized = [f for f in fields if f.how == "jpeg" and f.spec.shape[:2] == (0, 0)]
    if not unsized or not dataset.count_rows():
        return fields
    first = dataset.take([0], columns=[f.name for f in unsized])
    found = {field.spec.name: field for field in fields}
    for field in unsized:
        name = field.spec.name
        try:
            refuse_missing(first.column(field.name), field.spec, path)
            size = picture_of(first.column(field.name)[0].as_py(), f"{path}: {field.name}")
        except (CorruptError, UnsupportedError) as error:
            if unsupported is None:
                raise
            sound = isinstance(error, UnsupportedError)
            kind = "pictures that are not read" if sound else "bytes that are no picture"
            unsupported[name] = f"of {kind} ({error})"
            del found[name]
            continue
        found[name] = replace(field, spec=ColumnSpec(name, size.shape, size.dtype))
    return list(found.values())


def table_of(dataset: Any, path: str) -> tuple[Array, Array, Array]:
    """Return lengths, offsets and numbers of the episodes: the runs of rows of one episode number."""
    table = dataset.to_table(columns=[EPISODE, STEP])
    numbers, steps = (table.column(name).to_numpy() for name in (EPISODE, STEP))
    if not len(numbers):
        return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64)
    begins = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    lengths = np.diff(np.append(begins, len(numbers)))
    if len(np.unique(numbers[begins])) != len(begins):
        raise CorruptError(f"{path}: the rows of an episode do not lie together; sort it by {EPISODE}")
    expected = np.arange(len(numbers)) - np.repeat(begins, lengths)
    if not np.array_equal(steps - np.repeat(steps[begins], lengths), expected):
        raise CorruptError(f"{path}: the steps of an episode are not in order; sort it by {STEP}")
    return lengths.astype(np.int32), begins.astype(np.int64), numbers[begins].astype(np.int64)


def all_data(data: Any) -> dict[int, dict[str, Any]]:
    """Return number of an episode -> its data; a table without numbers has those of all, from 0 on."""
    found = {}
    for at, row in enumerate(data.to_table().to_pylist()):
        number = row.pop(EPISODE, at)
        packed = row.get(PACKED)
        found[number] = {k: v for k, v in row.items() if v is not None} if packed is None else decode_data(packed)
    return found


def _field(path: str, spec: ColumnSpec, name: Any, how: Any) -> Field:
    """Return a field as the schema's metadata describes it, validating every value."""
    check_row(path, spec.name, spec.row_nbytes)
    images = how in ("png", "jpeg") and holds(how, spec)
    if not (images or how in ("list", "raw", "text") or (how == "none" and not spec.row_nbytes)):
        raise ValueError(f"column {spec} is stored as {how!r}")
    return Field(spec, str(name), how)


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


_SCAN = 512
"""From this many rows in a row on, scanning them beats taking them one by one."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """The versions of the rows and of the episode data that were newest, and the rows' files.

    A version that comes later leaves the files of this one; their names are never used again.
    """

    rows: Any
    data: Any
    files: list[Any]


class LanceSource(DirectorySource):
    """The columns of a Lance dataset, as `StoredDataset` reads them.

    Args:
        path: the folder.

    Raises:
        NotFoundError: there is no such folder.
        UnknownFormatError: it is not a Lance dataset.
        CorruptError: it is damaged, or of another layout.

    Processes and threads: Lance reads in threads of its own. Pickled, it opens the dataset again by itself; forked,
        it raises RoleError, since those threads do not come along.
    """

    _files: list[Any] | None = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if not Lance.detect(self.path):
            raise UnknownFormatError(f"{self.path}: is not a Lance dataset")
        with damage_named(self.path):
            handle = self._handle()
            dataset, self._files = handle.rows, handle.files
            self.unsupported: dict[str, str] = {}
            fields = sized_fields(dataset, self.path, self.unsupported)
            self._fields = {f.spec.name: f for f in fields}
            self.lengths, self.offsets, self._numbers = table_of(dataset, self.path)
            facts_of(dataset.schema).give(self)
        self.schema = Schema(tuple(f.spec for f in self._fields.values()))
        self._data: dict[int, dict[str, Any]] | None = None
        with damage_named(episodes_path(self.path)):
            self.episode_columns = _data_names(handle.data)

    def _open(self) -> _Opened:
        rows, beside = opened(self.path), episodes_path(self.path)
        # Rows that are deleted stay in their files: which ones is in a file of its own.
        files = [(*(file.path for file in part.data_files()), part.deletion_file()) for part in rows.get_fragments()]
        if self._files is not None and files[: len(self._files)] != self._files:
            raise ReplacedError(f"{self.path}: has other rows than when it was loaded; load it again")
        return _Opened(rows, opened(beside) if committed(beside) else None, files)

    def _windows(
        self, handle: _Opened, columns: Sequence[str], starts: Array, length: int, stride: int
    ) -> dict[str, Array]:
        rows = steps_of(starts, length, stride)
        fields = [self._fields[name] for name in columns]
        names = [field.name for field in fields if field.how != "none"]
        found: dict[str, Array] = {}
        order = None
        table = None
        if names and rows.size:
            if len(starts) == 1 and stride == 1 and rows.size >= _SCAN:
                first = int(rows[0, 0])
                table = handle.rows.to_table(columns=names, offset=first, limit=rows.size)
            else:
                unique, order = np.unique(rows.ravel(), return_inverse=True)
                if len(unique) == rows.size and np.array_equal(unique, rows.ravel()):
                    order = None
                table = handle.rows.take(unique.tolist(), columns=names)
        for field in fields:
            shape = (*rows.shape, *field.spec.shape)
            if table is None or field.how == "none":
                found[field.spec.name] = np.empty(shape, _dtype(field.spec))
                continue
            column = table.column(field.name)
            if field.how in ("png", "jpeg"):
                out = empty((len(column), *field.spec.shape), field.spec.dtype)
                refuse_missing(column, field.spec, self.path)
                files = [memoryview(v.as_buffer()) for v in column]
                decode_into(out, files, field.spec)
                found[field.spec.name] = (out if order is None else out[order]).reshape(shape)
            else:
                taken = from_arrow(column, field.spec, self.path)
                found[field.spec.name] = (taken.copy() if order is None else taken[order]).reshape(shape)
        return found

    def _episode_data(self, handle: _Opened, episode: int) -> dict[str, Any]:
        if self._data is None:
            self._data = all_data(handle.data) if self.episode_columns else {}
        return dict(self._data.get(int(self._numbers[episode]), {}))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_data": None}


def _data_names(data: Any) -> list[str]:
    if data is None:
        return []
    schema = data.schema
    given = (schema.metadata or {}).get(METADATA)
    if given is not None:
        return [str(name) for name in json.loads(given)]
    return [name for name in schema.names if name != EPISODE]


def _dtype(spec: ColumnSpec) -> Any:
    return spec.dtype if spec.dtype.itemsize else np.dtype("<U1")


_GROUP_NBYTES = 128 << 20


class LanceWriter(EpisodeWriter):
    """Writes episodes to a Lance dataset. Use it in a `with` block.

    `path`, `mode` and `progress`, what entering raises, and what a kill leaves: see `EpisodeWriter`. Images are encoded
    in parallel.

    Args:
        image_format: "png" is lossless, "jpeg" (quality 95) is smaller.
        compat: write stable-worldmodel's exact layout: numbers as flat float32 lists, images as
            JPEG. Fractions are rounded; a number that float32 does not hold is refused.

    Raises:
        InputError: an option is wrong.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "demo.lance")
        >>> with LanceWriter(path) as writer:
        ...     writer.write_episode({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        >>> from ringmap.data import load_dataset
        >>> load_dataset(path).get_episode_data()
        {'seed': [7]}
    """

    format = Lance
    files = r"(_versions|_transactions|_indices|_deletions|_refs|data|tree)/.*|_latest.*"
    beside = "_episodes.lance"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "append",
        image_format: str | None = None,
        compat: bool = False,
        progress: bool = False,
    ) -> None:
        super().__init__(path, mode, progress)
        chosen = image_format or ("jpeg" if compat else "png")
        self.image_format = check_image_format(chosen, "LanceWriter")
        self.compat = self._compat = compat
        self._fields: list[Field] = []

    def resume(self, dataset: Any) -> None:
        """Find out how the columns of an existing dataset are stored."""
        self._fields, self._compat = [], self.compat
        if dataset is None:
            return
        path = self.path
        stored = opened(path)
        self._fields = sized_fields(stored, path)
        self._compat = METADATA not in (stored.schema.metadata or {})
        if committed(episodes_path(path)):
            _packed(opened(episodes_path(path)), path)  # before anything is logged

    def refuses(self, name: str, rows: Array) -> str | None:
        """Return why stable-worldmodel's layout can't hold a column: it rounds fractions, as a buffer does, and nothing
        else."""
        kind = rows.dtype.kind
        picture = holds("jpeg", ColumnSpec(name, rows.shape[1:], rows.dtype))
        if not self._compat or picture or name in self._others():
            return None
        if kind not in "biufU" or (kind == "U" and rows.ndim > 1) or 0 in rows.shape[1:]:
            return "stable-worldmodel's layout has no place for it"
        try:
            cast(rows, np.dtype("f4"), "safe", name) if kind != "U" else None
        except InputError as error:
            return f"stable-worldmodel's layout holds float32 ({error})"
        return None

    def looks_at(self, name: str, dtype: np.dtype[Any]) -> bool:
        """Return whether float32 may not hold the values of a column."""
        return self._compat and dtype.kind in "iuf" and dtype.itemsize > 2

    def layout(
        self, columns: dict[str, Array], data: dict[str, Any], refused: Refused, where: str
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return columns as stable-worldmodel's layout has them, if it is that."""
        others = [*self._others(), *refused.values()]
        return (_flattened(columns, others) if self._compat else columns), data

    def _others(self) -> list[str]:
        """Return the columns that another program stored in other ways than in this layout: they stay as they are."""
        return [f.spec.name for f in self._fields if f.how != "list" or f.spec.dtype != np.float32]

    def encode(self, episode: CheckedEpisode) -> dict[str, Array | Encoded]:
        """Return the columns, images encoded."""
        columns: dict[str, Array | Encoded] = dict(episode.columns)
        fields = self._fields or plan_fields(episode.schema, self.image_format)
        for field in fields:
            if field.how in ("png", "jpeg"):
                # Another program's binary columns count as JPEG, whatever they are.
                how = field.how if holds(field.how, field.spec) else "png"
                images = encode(episode.columns[field.spec.name], how)
                columns[field.spec.name] = Encoded(images, how)
        if self._compat or any(f.how == "jpeg" for f in fields):
            lossy = (
                "numbers become float32, images JPEG" if self._compat else "images are stored as JPEG, which is lossy"
            )
            self.say_once(f"{lossy}; for exact values leave compat=False and image_format='png'")
        return columns

    def export(self, episodes: Iterable[Record], path: str) -> None:
        """Write a new dataset."""
        import pyarrow as pa

        none = pa.array([], pa.int32())
        lance().write_dataset(pa.table({EPISODE: none, STEP: none}), path, mode="create")
        self.extend(episodes, path)

    def extend(self, episodes: Iterable[Record], path: str) -> None:
        """Add episodes: files of rows, and a commit of each group."""
        dataset = opened(path)
        rows = dataset.count_rows()
        schema, fields, later = dataset.schema, list[Field](), 0
        for group in groups_of(episodes, _GROUP_NBYTES):
            if rows and not fields:
                fields = fields_of(schema, path)
                # Numbers need not count from 0: another program's, or where episodes were deleted.
                later = int(table_of(dataset, path)[2].max()) + 1 - group[0].number
            if any(record.packed for record in group) or committed(episodes_path(path)):
                _add_data(episodes_path(path), group, later)
            if not rows:
                fields = plan_fields(group[0].schema, self.image_format)
                schema = arrow_schema(fields, self._compat, Facts.stated(group[0].notes))
            _commit(path, _batches(group, fields, schema, later), schema, fresh=not rows)
            rows = 1


def _flattened(columns: Mapping[str, Array], others: Sequence[str]) -> dict[str, Array]:
    """Return columns as stable-worldmodel's layout holds them: numbers as flat float32 rows, but for images, and
    others."""
    made = dict(columns)
    for name, rows in columns.items():
        spec = ColumnSpec(name, rows.shape[1:], rows.dtype)
        if rows.dtype.kind in "biuf" and name not in others and not holds("jpeg", spec):
            made[name] = rows.reshape(len(rows), -1).astype(np.float32)
    return made


def _batches(group: list[Record], fields: list[Field], schema: Any, later: int) -> Iterator[Any]:
    import pyarrow as pa

    for record in group:
        arrays = [
            pa.array(np.full(record.length, record.number + later, np.int32)),
            pa.array(np.arange(record.length, dtype=np.int32)),
        ]
        names = [EPISODE, STEP]
        for field in fields:
            if field.how != "none":
                names.append(field.name)
                arrays.append(to_arrow(record.columns[field.spec.name], arrow_type(field)))
        batch = pa.record_batch(arrays, names=names)
        yield pa.record_batch([batch.column(name) for name in schema.names], schema=schema)


def _commit(path: str, batches: Iterator[Any], schema: Any, fresh: bool) -> None:
    """Write rows into files, and commit them: after what is there, or in its place."""
    import pyarrow as pa
    from lance.fragment import write_fragments

    module = lance()
    there = committed(path)
    version = module.dataset(path).version if there else None
    reader = pa.RecordBatchReader.from_batches(schema, batches)
    mode = ("overwrite" if there else "create") if fresh else "append"
    made = write_fragments(reader, path, schema=schema, mode=mode)
    for fragment in made:
        for file in fragment.files:
            stored = os.path.getsize(os.path.join(path, "data", file.path))
            if file.file_size_bytes not in (None, stored):
                raise OSError(
                    errno.EFBIG,
                    f"{stored} of {file.file_size_bytes} bytes were written; is there a limit on the size of files?",
                    file.path,
                )
    kind = module.LanceOperation
    what = kind.Overwrite(schema, made) if fresh else kind.Append(made)
    module.LanceDataset.commit(path, what, read_version=version)


def _add_data(path: str, group: list[Record], later: int) -> None:
    """Add one row per episode, by its number; the whole table is written again when its columns, or old rows, have to
    change."""
    known: list[tuple[int, bytes]] = []
    old, fresh = None, [(record.number + later, record.packed) for record in group]
    if committed(path):
        old = opened(path)
        known = _packed(old, path)
    # Of episodes whose rows never came, or were deleted: a number is given again.
    stale = [row for row in known if row[0] >= fresh[0][0]]
    if stale == fresh:
        return
    if not known:  # no episode so far had any
        fresh = [(number, b"") for number in range(fresh[0][0])] + fresh
    new = _table(fresh)
    if old is not None and not stale and old.schema.equals(new.schema, check_metadata=True):
        _commit(path, iter(new.to_batches()), new.schema, fresh=False)
    else:
        new = _table([row for row in known if row[0] < fresh[0][0]] + fresh)
        _commit(path, iter(new.to_batches()), new.schema, fresh=True)


def _packed(data: Any, path: str) -> list[tuple[int, bytes]]:
    """Return number and packed data of each episode of a table; those of another program are packed here."""
    if PACKED in data.schema.names:
        table = data.to_table(columns=[EPISODE, PACKED])
        return list(zip(table[EPISODE].to_pylist(), table[PACKED].to_pylist(), strict=True))
    where = f"LanceWriter: {path}"
    return [(number, encode_data(values, where)) for number, values in all_data(data).items()]


def _is_plain(name: str) -> bool:
    """Return whether Lance can call a column so."""
    return bool(name) and not any(c in ".`\"'" or c < " " or "\ud800" <= c <= "\udfff" for c in name)


def _table(rows: list[tuple[int, bytes]]) -> Any:
    """Return the table of episode data: our own packing, and a plain column for each name that fits one."""
    import pyarrow as pa

    data = [decode_data(packed) for _, packed in rows]
    names = list(dict.fromkeys(name for values in data for name in values))
    columns = {
        EPISODE: pa.array([number for number, _ in rows], pa.int32()),
        PACKED: pa.array([packed for _, packed in rows], pa.binary()),
    }
    for name in names:
        if name in columns or not _is_plain(name):
            continue
        values = [v.get(name) for v in data]
        values = [v.item() if isinstance(v, np.generic) else v for v in values]
        try:
            columns[name] = pa.array([v.tolist() if isinstance(v, np.ndarray) else v for v in values])
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError, TypeError):
            continue
        if pa.types.is_null(columns[name].type):
            del columns[name]
    made = pa.table(columns)
    return made.replace_schema_metadata({METADATA: json.dumps(names).encode()})
