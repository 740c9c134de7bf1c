"""The writing side of a Lance dataset: images encoded, the rest as it is; one commit of Lance per group of episodes.

    rows -> files of rows, checked -> commit (Lance: a new version, by one rename)

Invariants: episode data is there before the episodes that it belongs to; a file counts only when it is as long as
Lance says: cut short by a limit or a quota, it is not committed.
Not here: the log (common/writer.py), what columns look like (columns.py).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringmap.clips.facts import Facts
from ringmap.errors import InputError
from ringmap.formats.common.arrow import to_arrow
from ringmap.formats.common.log import Encoded, Record, groups_of
from ringmap.formats.common.refusals import Refused
from ringmap.formats.common.writer import EpisodeWriter
from ringmap.formats.episode import CheckedEpisode
from ringmap.formats.lance import Lance
from ringmap.formats.lance.columns import (
    EPISODE,
    METADATA,
    PACKED,
    STEP,
    Field,
    all_data,
    arrow_schema,
    arrow_type,
    committed,
    episodes_path,
    fields_of,
    lance,
    opened,
    plan_fields,
    sized_fields,
    table_of,
)
from ringmap.formats.media.images import check_image_format, encode, holds
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.columns.values import cast
from ringmap.storage.records.blobs import decode_data, encode_data

__all__ = ["LanceWriter"]

Array = np.ndarray[Any, np.dtype[Any]]

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
    """Return number and packed data of each episode of a table; those of another program are packed here.

    Raises:
        InputError: it holds what no data of an episode are.
    """
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
