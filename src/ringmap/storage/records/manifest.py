"""The manifest: what is at a path, and the small readable JSON that describes it.

    {"format": "ringmap", "version": 3, "uuid": ..., "kind": "episodes", "lineage": ..., "max_steps": ...,
     "columns": [{"name": ..., "file": ..., "dtype": ..., "shape": ...}],
     "settings": {...}, "table": {...}, "carried": {...}, "checksum": ...}

Invariants: replaced whole or not at all; its checksum, over everything else in it, holds;
every file that it names is inside the directory. What a ring is born with (kind, capacity, lineage, ...) stands in the
label of each column, too, so that it outlives the manifest.
`as_rate(rate_text(rate)) == rate`: a rate of steps is a ratio of integers; a float is taken as the decimal number
that it is printed as, so that 29.97 of every width is one rate.
Nothing is changed here; what leads out of the directory is not followed.
Not here: the content of the other files; making them (commit/create.py). `table` and sizes are for people to read, but
a table older than `table.seq` is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np
import xxhash

from ringmap.errors import (
    CorruptError,
    InputError,
    NewerVersionError,
    NotFoundError,
    UnknownFormatError,
    UnreleasedVersionError,
)
from ringmap.storage.columns.backends import BACKENDS, Choice
from ringmap.storage.columns.base import Column
from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.columns.zarr import NAMED
from ringmap.storage.disk.checksums import decode_signed, encode_signed, json_checksum
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.paths import COLUMNS, FINE, FOLDERS, LOCK, MANIFEST, NAMES, STATE, TABLE, Paths
from ringmap.storage.disk.system import NotAFileError
from ringmap.storage.records.state import SLOT, StateFile
from ringmap.storage.records.table import MOST, RECORD, SPARE_SLOTS, EpisodeTable
from ringmap.storage.ring.ring import Ring

__all__ = [
    "DISTILLATION",
    "EPISODES",
    "LARGEST",
    "LAYOUT",
    "ROWS",
    "TRANSITIONS",
    "VERSION",
    "Kind",
    "Manifest",
    "as_rate",
    "column_file",
    "examine",
    "hold",
    "lineage_of",
    "links_in",
    "must_be",
    "rate_text",
    "read_manifest",
    "refuse_dangling",
    "refuse_links",
    "same_rate",
]

VERSION = 3

LARGEST = 1 << 24
"""A larger manifest is not read."""

_MOST = 1 << 56
_CHUNK_MOST = 1 << 30
_FILE_NAME = re.compile(COLUMNS + r"/[0-9]{3,6}-[a-z0-9-]{0,40}\.(npy|zarr)")

EPISODES, TRANSITIONS, ROWS = "episodes", "transitions", "rows"
DISTILLATION = "distillation"
"""A student's rows, with a teacher's labels."""

_OPENED_BY = {
    EPISODES: "ReplayBuffer",
    TRANSITIONS: "TransitionReplayBuffer",
    ROWS: "OfflineToOnlineReplayBuffer",
    DISTILLATION: "DistillationBuffer",
}

_REVISION = 8
"""Of the files that no structure below describes: another one whenever their layout changes."""

LAYOUT = json_checksum([RECORD.descr, SLOT.format, _REVISION])
"""A checksum that changes with the layout of version 3, while it is not released: a directory of another layout is
refused by it. From the release on the version alone counts."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of a buffer are, by its birth.

    `name`: "episodes", or what the class that keeps its rows in this buffer calls them; `capacity`: rows that count,
    None for `max_steps`; `older`: rows before these that stay stored; `stack`: frames of a stack, and its padding.
    """

    name: str = "episodes"
    capacity: int | None = None
    older: int = 0
    stack: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fixed facts of a buffer, and its settings as of the last flush.

    `born`: what its rows are; `lineage`: 16 bytes that its episodes are known by, also in copies of it; `ordinal`: none
    below it is given any more; `closed`: the era that a writer closed, 0 at birth, None after a flush that was no
    close, and after a power cut of a buffer that was open.
    """

    uuid: bytes
    max_steps: int
    spare: int
    schema: Schema | None = None
    choices: tuple[Choice, ...] = ()
    files: tuple[str, ...] = ()
    locked_by_argument: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    born: Kind = Kind()
    lineage: bytes = bytes(16)
    ordinal: int = 0
    closed: int | None = None

    @property
    def kind(self) -> str:
        """What the rows are: "episodes", "transitions", "rows" or "distillation"."""
        return self.born.name

    @property
    def capacity(self) -> int:
        """How many of the newest rows count."""
        return self.max_steps if self.born.capacity is None else self.born.capacity

    @property
    def older(self) -> int:
        """How many rows before the newest `capacity` stay stored."""
        return self.born.older

    @property
    def stack(self) -> tuple[int, str] | None:
        """Frames of a stacked observation, and how it is padded; None without stacks."""
        return self.born.stack

    @property
    def fps(self) -> str | None:
        """Steps per second, as "num/den"; None where that is not known."""
        rate = self.settings.get("fps")
        return None if rate is None else rate_text(as_rate(rate))

    @property
    def reward_at(self) -> str | None:
        """In which row a reward stands, as for `ReplayBuffer`."""
        return self.settings.get("reward_at")

    @property
    def rows(self) -> int:
        """Number of rows in every column."""
        return self.max_steps + self.spare

    @property
    def table_slots(self) -> int:
        """Number of records that the table has room for."""
        return self.rows + SPARE_SLOTS

    @property
    def ring(self) -> Ring:
        """How positions map to rows."""
        return Ring(self.max_steps, self.spare)

    def columns(self, disk: Disk, folder: str) -> list[Column]:
        """Return the columns in a folder of columns, in order, not opened; none before they are fixed."""
        return [self.column(i, disk, folder) for i in range(len(self.files))]

    def column(self, index: int, disk: Disk, folder: str) -> Column:
        """Return one column."""
        assert self.schema is not None
        kind, path = BACKENDS[self.choices[index].backend], os.path.join(folder, self.files[index].partition("/")[2])
        return kind(disk, path, self.schema.columns[index].stored, self.rows, self.label(index))

    @property
    def fixed_sizes(self) -> dict[str, int]:
        """Return the size of the files of a fixed size in bytes, without columns."""
        return {TABLE: EpisodeTable.nbytes(self.table_slots), STATE: StateFile.nbytes}

    @property
    def witness(self) -> int:
        """The number of a record that was stored durably: an older table is damaged."""
        return max(self.table.get("seq", 0), int(self.carried.get("seq", 0)))

    def label(self, index: int) -> dict[str, Any]:
        """Return the label in the file of column `index`: what its ring was born with, and what it is."""
        return {"column": index, **self._birth(), **self._described(index)}

    def _birth(self) -> dict[str, Any]:
        """Return what the ring was born with, as JSON."""
        born, ids = self.born, {"uuid": self.uuid.hex(), "lineage": self.lineage.hex()}
        kind = {
            "kind": born.name,
            "capacity": born.capacity,
            "older": born.older,
            "stack": born.stack and [*born.stack],
        }
        return {**ids, **kind, "max_steps": self.max_steps, "spare": self.spare}

    def _described(self, index: int) -> dict[str, Any]:
        """Return what column `index` is, as JSON."""
        assert self.schema is not None
        spec, choice = self.schema.columns[index], self.choices[index]
        mutable = {"mutable": True} if spec.mutable else {}
        known = {"name": spec.name, "dtype": spec.dtype.str, "shape": list(spec.shape), **mutable}
        return {**known, "file": self.files[index], "backend": choice.backend, **choice.options}

    def with_columns(self, schema: Schema, choices: Sequence[Choice], locked: bool) -> Manifest:
        """Return the manifest with its columns fixed."""
        files = tuple(column_file(i, spec.name, choices[i].backend) for i, spec in enumerate(schema.columns))
        return replace(self, schema=schema, choices=tuple(choices), files=files, locked_by_argument=locked)

    def without_columns(self) -> Manifest:
        """Return the manifest as before the columns were fixed."""
        return replace(self, schema=None, choices=(), files=(), locked_by_argument=False)

    def encode(self) -> bytes:
        """Return the file's bytes."""
        body = {
            "format": "ringmap",
            "version": VERSION,
            "layout": LAYOUT,
            "about": "A replay buffer of the Python package ringmap. Rows: columns/*.npy (NumPy); "
            "episodes: episodes.npy (NumPy). Edit nothing by hand.",
            "byte_order": "little",
            **self._birth(),
            "rows": self.rows,
            "table_slots": self.table_slots,
            "schema_from": "argument" if self.locked_by_argument else "episode",
            "columns": None if self.schema is None else [self._described(i) for i in range(len(self.files))],
            "files": self.fixed_sizes,
            "fps": self.fps,
            "reward_at": self.reward_at,
            "settings": {n: v for n, v in self.settings.items() if n not in ("fps", "reward_at")},
            **{key: getattr(self, key) for key in _PLAIN},
        }
        return encode_signed(body, indent=1)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """Read the file's bytes.

        Raises:
            UnknownFormatError: it is not a ringmap manifest.
            NewerVersionError: it is from a newer ringmap.
            UnreleasedVersionError: it is from a version that was never released.
            CorruptError: it was edited, or damaged.
        """
        body, fault = decode_signed(data)
        if body is None:
            raise CorruptError(f"{path}: the manifest {fault}; run ringmap.check on the buffer")
        if body.get("format") != "ringmap":
            raise UnknownFormatError(f"{path}: not a ringmap buffer: expected format 'ringmap'; choose another path")
        if fault:
            raise CorruptError(
                f"{path}: the manifest {fault}; put the original back, or run ringmap.repair on the buffer"
            )
        version = body.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise NewerVersionError(
                f"{path}: format version {version!r}, this ringmap reads up to {VERSION}; upgrade ringmap"
            )
        if version < VERSION or body.get("layout") != LAYOUT:
            raise UnreleasedVersionError(
                f"{path}: {'' if version < VERSION else 'another layout of '}format version {version} was made by an "
                f"unreleased version of ringmap, and this one reads version {VERSION}: record again"
            )
        try:
            return cls._parse(body, path)
        except NewerVersionError:  # a ValueError, too
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptError(f"{path}: the manifest does not make sense: {error!r}") from None

    @classmethod
    def of_labels(cls, labels: Sequence[dict[str, Any]]) -> Manifest | None:
        """Return the manifest, but for its settings, of a ring whose columns have these labels; None if it has not."""
        known: dict[str, Any] = {"schema_from": "episode", "settings": {}, "fps": None, "reward_at": None}
        known |= {"table": {}, "carried": {}, "ordinal": 0, "closed": None}
        try:
            made = cls._parse({**known, **labels[0], "columns": labels}, "labels")
        except (LookupError, TypeError, ValueError):
            return None
        if [made.label(i) for i in range(len(labels))] != labels:
            return None
        locked = any(spec.mutable for spec in made.schema.columns) if made.schema else False
        return replace(made, locked_by_argument=locked)

    @classmethod
    def _parse(cls, body: dict[str, Any], path: str) -> Manifest:
        for key, is_good in _CHECKS.items():
            if not is_good(body[key]):
                raise ValueError(f"{key} {body[key]!r}")
        max_steps, spare, older = (body[key] for key in ("max_steps", "spare", "older"))
        if (body["capacity"] or max_steps) > max_steps - older:
            raise ValueError(f"capacity {body['capacity']}, older {older} for {max_steps} steps")
        settings, stack = dict(body["settings"]), body["stack"] and tuple(body["stack"])
        if body["fps"] is not None:
            settings["fps"] = as_rate(body["fps"])
        if body["reward_at"] is not None:
            settings["reward_at"] = body["reward_at"]
        columns = body["columns"] or []
        made = cls(
            bytes.fromhex(body["uuid"]),
            max_steps,
            spare,
            files=tuple(column["file"] for column in columns),
            locked_by_argument=body["schema_from"] == "argument",
            settings=settings,
            born=Kind(body["kind"], body["capacity"], older, stack),
            lineage=bytes.fromhex(body["lineage"]),
            **{key: body[key] for key in _PLAIN},
        )
        if body.get("table_slots", made.table_slots) != made.table_slots:
            raise ValueError(f"table_slots {body['table_slots']} for {made.rows} rows")
        if body["columns"] is None:
            return made
        specs = [stored_spec(c["name"], c["shape"], c["dtype"], c.get("mutable") is True) for c in columns]
        schema = Schema(tuple(specs))
        if not specs or len({*made.files}) < len(specs) or len({*schema.names}) < len(specs):
            raise ValueError(f"columns {schema.names} in files {made.files}")
        return replace(made, schema=schema, choices=tuple(map(partial(_choice_in, path), columns, specs)))


def _choice_in(path: str, column: dict[str, Any], spec: ColumnSpec) -> Choice:
    """Return how the manifest says that a column is stored; ValueError if that makes no sense."""
    backend, file = column["backend"], column["file"]
    if backend not in BACKENDS:
        raise NewerVersionError(
            f"{path}: column {spec.name!r} has backend {backend!r}, this ringmap has {sorted(BACKENDS)}; "
            "upgrade ringmap"
        )
    is_zarr, options = backend == "zarr", {}
    if is_zarr:
        codecs, steps = column["codecs"], column["chunk_steps"]
        if type(codecs) is not str or codecs not in NAMED or not _is_count(steps, 1):
            raise ValueError(f"column {spec.name!r} has codecs {codecs!r}, {steps!r} steps in a chunk")
        options = {"codecs": codecs, "chunk_steps": steps}
    fits = spec.row_nbytes * options.get("chunk_steps", 0) <= _CHUNK_MOST
    if not fits or not _FILE_NAME.fullmatch(file) or file.endswith(".zarr") != is_zarr:
        raise ValueError(f"column {spec.name!r} of {backend} in file {file!r} with options {options}")
    return Choice(backend, options)


def _is_count(value: Any, least: int = 0) -> bool:
    """Tell whether a value is an integer in the range of file sizes: results computed from it fit in 64 bits."""
    return type(value) is int and least <= value < _MOST


def _is_id(value: Any) -> bool:
    return type(value) is str and re.fullmatch("[0-9a-f]{32}", value) is not None


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "uuid": _is_id,
    "lineage": _is_id,
    "kind": lambda name: type(name) is str,
    "capacity": lambda n: n is None or _is_count(n, 1),
    "older": _is_count,
    "stack": lambda one: one is None or (len(one) == 2 and _is_count(one[0], 1) and type(one[1]) is str),
    "max_steps": lambda n: _is_count(n, 1),
    "spare": _is_count,
    "columns": lambda one: one is None or type(one) is list,
    "settings": lambda one: type(one) is dict,
    "table": lambda one: type(one) is dict and all(map(_is_count, one.values())),
    "carried": lambda one: one == {} or (_is_count(one["seq"]) and type(one["state"]) is dict),
    "ordinal": _is_count,
    "closed": lambda era: era is None or (type(era) is int and 0 <= era < MOST),
    "fps": lambda rate: rate is None or type(rate) is str,
    "reward_at": lambda where: where is None or type(where) is str,
}
"""What holds of the keys of a manifest, each for itself."""

_PLAIN = "table", "carried", "ordinal", "closed"
"""The keys that are fields, too, with the same values."""


def lineage_of(seed: int | None, name: str) -> bytes:
    """Return the lineage of a new ring: of a seed and the directory's own name, so that a repeated run gets the same;
    else random."""
    if seed is None:
        return uuids.uuid4().bytes
    return xxhash.xxh3_128_digest(f"{seed} {name}".encode(errors="surrogateescape"))


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


def must_be(fixed: Manifest, kind: str, folder: str, where: str) -> None:
    """Raise InputError unless the rows of the buffer in a directory are of a kind."""
    if fixed.kind != kind:
        way = _OPENED_BY.get(fixed.kind)
        then = "upgrade ringmap" if way is None else f"open it with {way}"
        raise InputError(f"{where}: {folder} holds {fixed.kind}, expected {kind}; {then}")


# -- what is at a path ----------------------------------------------------------------------------


def examine(disk: Disk, folder: str) -> Literal["nothing", "unfinished", "buffer"]:
    """Tell what is at `folder`: nothing (or an empty folder), an unfinished creation, or a buffer.

    Raises:
        NotFoundError: a link to nothing.
        UnknownFormatError: a file, or a folder that holds something else.
        CorruptError: a buffer without its manifest.
    """
    if not disk.exists(folder):
        return "nothing"
    if not os.path.isdir(folder) and not disk.volatile:
        refuse_dangling(folder)
        raise UnknownFormatError(f"{folder}: is a file, expected a directory of a buffer; choose another path")
    names = set(disk.names(folder)) - FINE
    if MANIFEST in names:
        return "buffer"
    if names <= {LOCK}:
        return "nothing"
    foreign = names - NAMES
    if foreign:
        raise UnknownFormatError(
            f"{folder}: holds something else ({', '.join(sorted(foreign)[:3])}), and no {MANIFEST}; "
            "name the directory of a buffer, or an empty or new one"
        )
    if COLUMNS in names or _has_commits(disk, folder):
        raise CorruptError(
            f"{folder}: {MANIFEST} is missing from a buffer that has data; put it back, or run "
            "ringmap.repair, which can make it again"
        )
    return "unfinished"


def refuse_dangling(path: str) -> None:
    """Raise for a link to nothing: to a disk that is not mounted, or to what was moved or removed.

    Raises:
        NotFoundError: it is one.
    """
    if os.path.islink(path) and not os.path.exists(path):
        raise NotFoundError(
            f"{path}: is a link to {os.readlink(path)}, which is not there; mount or restore it, or remove the link"
        )


def _has_commits(disk: Disk, folder: str) -> bool:
    try:
        data = disk.read_file(Paths(folder).state, StateFile.nbytes)
    except (OSError, NotAFileError):
        return False
    return StateFile.witnesses_commits(data)


def hold(disk: Disk, folder: str) -> Disk:
    """Return the disk with `folder` held open, while a handle on its buffer exists; see `Disk.hold`.

    Raises:
        NotFoundError, UnknownFormatError: the path is not a folder.
    """
    try:
        return disk.hold(folder)
    except (FileNotFoundError, NotADirectoryError):
        disk.check_held("ReplayBuffer")  # of the handle that this one replaces
        read_manifest(disk, folder)  # raises an error for what is there
        raise


def links_in(disk: Disk, folder: str) -> list[str]:
    """Return the folders of a buffer that are links, or not folders: their content is elsewhere."""
    paths = {name: os.path.join(folder, name) for name in FOLDERS}
    return [n for n, path in paths.items() if not disk.is_folder(path) and disk.exists(path)]


def refuse_links(disk: Disk, folder: str) -> None:
    """Raise unless the folders of a buffer are inside it: nothing outside is read, written or removed.

    Raises:
        CorruptError: one of them is a link, or not a folder.
    """
    for name in links_in(disk, folder):
        path = os.path.join(folder, name)
        raise CorruptError(
            f"{path}: is {disk.kind(path) or 'a file'}, expected a folder: what leads elsewhere is not followed; "
            "put the folder itself there"
        )


def read_manifest(disk: Disk, folder: str) -> Manifest:
    """Return the manifest of the buffer at `folder`.

    Raises:
        UnknownFormatError: there is no buffer (yet).
        CorruptError, NewerVersionError: see `Manifest.decode`.
    """
    paths = Paths(folder)
    try:
        data = disk.read_file(paths.manifest, LARGEST)
        refuse_links(disk, folder)
    except (FileNotFoundError, NotADirectoryError):
        examine(disk, folder)  # gives more detail if it can
        raise NotFoundError(
            f"{folder}: no buffer is there; make one with ReplayBuffer(max_steps=..., path=...)"
        ) from None
    return Manifest.decode(data, paths.manifest)


# -- rates ----------------------------------------------------------------------------------------

_TEXT = re.compile(r"[1-9][0-9]{0,400}/[1-9][0-9]{0,400}")
_NUMBERS = int | float | Fraction | np.integer | np.floating
_TOLERANCE = Fraction(1, 10_000)


def as_rate(value: Any) -> Fraction:
    """Return a rate as it is kept.

    Args:
        value: a positive number, of Python or NumPy, or the text "num/den".

    Raises:
        ValueError: it is something else.

    Example:
        >>> as_rate(12.5), as_rate(np.float32(29.97)), as_rate("30000/1001")
        (Fraction(25, 2), Fraction(2997, 100), Fraction(30000, 1001))
    """
    is_number = isinstance(value, _NUMBERS) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and _TEXT.fullmatch(value)):
        with contextlib.suppress(ValueError, OverflowError):
            rate = Fraction(str(value))
            if float(rate) > 0:  # a number of NumPy, too
                return rate
    raise ValueError(f"{value!r} is no rate")


def rate_text(rate: Fraction) -> str:
    """Return a rate as "num/den"."""
    return f"{rate.numerator}/{rate.denominator}"


def same_rate(one: Fraction, other: Fraction) -> bool:
    """Tell whether two rates are one: 29.97 is 30000/1001. Below one step per second their ratio decides."""
    return abs(one - other) <= _TOLERANCE * min(Fraction(1), one, other)
