"""The manifest: describes a directory, in small readable JSON.

    {"format": "ringmap", "version": 1, "uuid": ..., "max_steps": ...,
     "columns": [{"name": ..., "file": ..., "dtype": ..., "shape": ..., "nbytes": ...}],
     "settings": {...}, "table": {...}, "carried": {...}, "checksum": ...}

Invariants: replaced whole or not at all; its checksum, over everything else in it, holds;
every file that it names is inside the directory and has exactly the stated size.
Not here: the content of the files. `table` is for people to read, except as the witness
that a table older than its `seq` is damaged.
"""

from __future__ import annotations

import json
import re
import unicodedata
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringmap.errors import CorruptError, NewerVersionError, UnknownFormatError
from ringmap.storage.columns.backends import StoredColumn
from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.disk.canonical import json_checksum
from ringmap.storage.records.names import COLUMNS, STATE, TABLE
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import EpisodeTable
from ringmap.storage.ring.arithmetic import Ring

__all__ = [
    "FEATURES",
    "FORMAT",
    "VERSION",
    "Manifest",
    "column_file",
    "read_limit",
    "stored_options",
]

FORMAT, VERSION = "ringmap", 2

FEATURES = frozenset({"groups", "mutable", "chains"})
"""What a directory of version 2 may use, as far as this release knows: "groups", rows in an open group; "mutable", columns whose
values may change; "chains", episodes in parts."""
_LIMIT = 1 << 24
_MOST = 1 << 56
_CHUNK_MOST = 1 << 30
_FILE_NAME = re.compile(COLUMNS + r"/[0-9]{3,6}-[a-z0-9-]{0,40}\.(npy|zarr)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fixed facts of a buffer, and its settings as of the last flush."""

    uuid: bytes
    max_steps: int
    spare: int
    table_slots: int
    schema: Schema | None = None
    backends: tuple[str, ...] = ()
    options: tuple[dict[str, Any], ...] = ()
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    locked_by_argument: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """The version of the directory's format: 1 until a feature is used."""
        return VERSION if self.features else 1

    @property
    def rows(self) -> int:
        """Number of rows in every column."""
        return self.max_steps + self.spare

    @property
    def ring(self) -> Ring:
        """How positions map to rows."""
        return Ring(self.max_steps, self.spare)

    @property
    def columns(self) -> list[StoredColumn]:
        """The columns, in order; none before they are fixed."""
        return [self.column(i) for i in range(len(self.files))]

    def column(self, index: int) -> StoredColumn:
        """Return one column."""
        assert self.schema is not None
        spec, label = self.schema.columns[index], self.label(index)
        return StoredColumn(self.files[index], self.backends[index], spec, self.rows, label)

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """Return the size of the files of a fixed size in bytes, without columns."""
        return {TABLE: EpisodeTable.nbytes(self.table_slots), STATE: StateFile.nbytes}

    @property
    def witness(self) -> int:
        """The number of a record that was stored durably: an older table is damaged."""
        return max(self.table.get("seq", 0), int(self.carried.get("seq", 0)))

    def label(self, index: int) -> dict[str, Any]:
        """Return the label in the file of column `index`."""
        spec = self.schema.columns[index] if self.schema else None
        assert spec is not None
        return {
            "uuid": self.uuid.hex(), "column": index, "name": spec.name, "dtype": spec.dtype.str,
            "shape": list(spec.shape), "max_steps": self.max_steps, "spare": self.spare, **_mutable(spec),
            **self.options[index],
        }  # fmt: skip

    def with_columns(
        self,
        schema: Schema,
        backends: Sequence[str],
        options: Sequence[dict[str, Any]],
        locked: bool,
    ) -> Manifest:
        """Return the manifest with its columns fixed, sizes not yet known."""
        files = tuple(
            column_file(i, spec.name, backends[i]) for i, spec in enumerate(schema.columns)
        )
        features = (*self.features, *("mutable" for _ in schema.mutable.columns[:1]))
        return replace(
            self, schema=schema, backends=tuple(backends), options=tuple(options), files=files,
            locked_by_argument=locked, features=tuple(dict.fromkeys(features)),
        )  # fmt: skip

    def with_sizes(self) -> Manifest:
        """Return the manifest with the size of each column, whose backends are known."""
        return replace(self, sizes=tuple(one.nbytes for one in self.columns))

    def without_columns(self) -> Manifest:
        """Return the manifest as before the columns were fixed."""
        features = tuple(feature for feature in self.features if feature != "mutable")
        return replace(
            self, schema=None, backends=(), options=(), files=(), sizes=(), locked_by_argument=False,
            features=features,
        )  # fmt: skip

    def encode(self) -> bytes:
        """Return the file's bytes."""
        body = {
            "format": FORMAT,
            "version": self.version,
            **({"features": list(self.features)} if self.features else {}),
            "about": "A replay buffer of the Python package ringmap. Rows: columns/*.npy (NumPy); "
            "episodes: episodes.npy (NumPy). Edit nothing by hand.",
            "byte_order": "little",
            "uuid": str(uuids.UUID(bytes=self.uuid)),
            "max_steps": self.max_steps,
            "spare": self.spare,
            "rows": self.rows,
            "table_slots": self.table_slots,
            "schema_from": "argument" if self.locked_by_argument else "episode",
            "columns": None
            if self.schema is None
            else [
                {"name": s.name, "file": f, "backend": b, "dtype": s.dtype.str,
                 "shape": list(s.shape), "nbytes": n, **_mutable(s), **({"options": o} if o else {})}
                for s, f, b, o, n in zip(
                    self.schema.columns, self.files, self.backends, self.options, self.sizes, strict=True
                )
            ],
            "files": self.fixed_sizes,
            "settings": self.settings,
            "table": self.table,
            "carried": self.carried,
        }  # fmt: skip
        return (
            json.dumps(
                {**body, "checksum": json_checksum(body)}, indent=1, ensure_ascii=True
            ).encode()
            + b"\n"
        )

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Read the file's bytes.

        Raises:
            UnknownFormatError: it is not a ringmap manifest.
            NewerVersionError: it is from a newer ringmap.
            CorruptError: it was edited, or damaged.
        """
        try:
            body = json.loads(data)
            checksum = body.pop("checksum", None) if isinstance(body, dict) else None
            expected = json_checksum(body)  # nested too deep, it raises as loading it does
        except (ValueError, RecursionError):
            raise CorruptError(
                f"{path}: the manifest is not valid JSON; run ringmap.check on the buffer"
            ) from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise UnknownFormatError(
                f"{path}: not a ringmap buffer: expected format {FORMAT!r}; choose another path"
            )
        version = body.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise NewerVersionError(
                f"{path}: format version {version!r}, this ringmap reads up to {VERSION}; upgrade ringmap"
            )
        if checksum != expected:
            raise CorruptError(
                f"{path}: the manifest was edited or damaged: its checksum is {checksum!r}, expected "
                f"{expected!r}; put the original back, or run ringmap.repair on the buffer"
            )
        features = body.get("features", [])
        unknown = [f for f in features if f not in FEATURES] if _are_names(features) else []
        if unknown:
            raise NewerVersionError(
                f"{path}: the buffer uses {unknown}, this ringmap knows {sorted(FEATURES)}; upgrade ringmap"
            )
        try:
            return cls._parse(body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"{path}: the manifest does not make sense: {error!r}") from None

    @classmethod
    def _parse(cls, body: dict[str, Any]) -> Manifest:
        columns = body["columns"]
        schema: Schema | None = None
        backends: tuple[str, ...] = ()
        options: tuple[dict[str, Any], ...] = ()
        files: tuple[str, ...] = ()
        sizes: tuple[int, ...] = ()
        if columns is not None:
            schema = Schema(
                tuple(
                    stored_spec(c["name"], c["shape"], c["dtype"], c.get("mutable") is True)
                    for c in columns
                )
            )
            backends = tuple(c["backend"] for c in columns)
            options = tuple(stored_options(c.get("options", {})) for c in columns)
            files = tuple(c["file"] for c in columns)
            sizes = tuple(int(c["nbytes"]) for c in columns)
            for i, (name, file) in enumerate(zip(schema.names, files, strict=True)):
                if not _FILE_NAME.fullmatch(file) or name in schema.names[:i]:
                    raise ValueError(f"column {name!r} in file {file!r}")
                if file.endswith(".zarr") != ("chunk_steps" in options[i]):
                    raise ValueError(
                        f"column {name!r} in file {file!r} with options {options[i]!r}"
                    )
                if schema.columns[i].row_nbytes * options[i].get("chunk_steps", 0) > _CHUNK_MOST:
                    raise ValueError(f"column {name!r} with options {options[i]!r}")
            if not files or len({*files}) < len(files):
                raise ValueError(f"files {files!r}")
            if not all(isinstance(backend, str) for backend in backends):
                raise ValueError(f"backends {backends!r}")
        max_steps, spare, slots = body["max_steps"], body["spare"], body["table_slots"]
        if not (_are_counts(max_steps, spare, slots) and max_steps > 0 and slots > 0):
            raise ValueError(f"sizes {max_steps!r}, {spare!r}, {slots!r}")
        if slots > 4 * (max_steps + spare) + 4096:  # it is read into memory when it is checked
            raise ValueError(f"table_slots {slots} for {max_steps + spare} rows")
        features = body.get("features", [])
        if not _are_names(features) or (body["version"] < 2) != (not features):
            raise ValueError(f"version {body['version']!r} with features {features!r}")
        table, carried = dict(body["table"]), dict(body["carried"])
        if not _are_counts(*table.values()):
            raise ValueError(f"table {table!r}")
        if carried and not (_are_counts(carried["seq"]) and isinstance(carried["state"], dict)):
            raise ValueError("carried state")
        return cls(
            uuids.UUID(body["uuid"]).bytes, max_steps, spare, slots, schema, backends, options, files, sizes,
            body["schema_from"] == "argument", dict(body["settings"]), table, carried,
            tuple(features),
        )  # fmt: skip


def _mutable(spec: ColumnSpec) -> dict[str, bool]:
    return {"mutable": True} if spec.mutable else {}


def _are_counts(*numbers: Any) -> bool:
    """Tell whether all are integers in the range of file sizes: results computed from them fit in 64 bits."""
    return all(type(n) is int and 0 <= n < _MOST for n in numbers)


def _are_names(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)


def stored_options(given: Any) -> dict[str, Any]:
    """Return the stored options of a column.

    Raises:
        ValueError: they are not valid.
    """
    if given == {}:
        return {}
    steps, codecs = given["chunk_steps"], given["codecs"]
    named = [type(c) is dict and type(c.get("name")) is str for c in codecs]
    if (
        set(given) != {"chunk_steps", "codecs"}
        or not _are_counts(steps)
        or not steps
        or not all(named)
    ):
        raise ValueError(f"options {given!r}")
    return {"codecs": list(codecs), "chunk_steps": steps}


def read_limit() -> int:
    """Return the maximum size of a manifest that is read."""
    return _LIMIT


def column_file(index: int, name: str, backend: str) -> str:
    """Return the file of a column: its number, and a readable slug of its name.

    Example:
        >>> column_file(7, "obs/Pixels é", "memmap")
        'columns/007-obs-pixels-e.npy'
        >>> column_file(0, "..", "memmap")
        'columns/000-.npy'
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:40].strip("-")
    return f"{COLUMNS}/{index:03d}-{slug}.{'zarr' if backend == 'zarr' else 'npy'}"
