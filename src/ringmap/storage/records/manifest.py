"""The manifest: describes a directory, in small readable JSON.

    {"format": "ringmap", "version": 3, "uuid": ..., "kind": "episodes", "lineage": ..., "max_steps": ...,
     "columns": [{"name": ..., "file": ..., "dtype": ..., "shape": ..., "nbytes": ...}],
     "settings": {...}, "table": {...}, "carried": {...}, "checksum": ...}

Invariants: replaced whole or not at all; its checksum, over everything else in it, holds;
every file that it names is inside the directory and has exactly the stated size. What a ring is born with (kind,
capacity, lineage, ...) stands in the label of each column, too, so that it outlives the manifest.
`parse_rate(rate_text(rate)) == rate`: a rate of steps is a ratio of integers; a float is taken as the decimal number
that it is printed as, so that 29.97 of every width is one rate.
Not here: the content of the files. `table` is for people to read, except as the witness
that a table older than its `seq` is damaged.
"""

from __future__ import annotations

import math
import re
import unicodedata
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import (
    CorruptError,
    InputError,
    NewerVersionError,
    UnknownFormatError,
    UnreleasedVersionError,
)
from ringmap.storage.columns.backends import BACKENDS, Choice, StoredColumn
from ringmap.storage.columns.codecs import NAMED
from ringmap.storage.columns.schema import ColumnSpec, Schema, stored_spec
from ringmap.storage.disk.checksums import decode_signed, encode_signed, json_checksum
from ringmap.storage.disk.paths import COLUMNS, STATE, TABLE
from ringmap.storage.records.state import SLOT, StateFile
from ringmap.storage.records.table import MOST, RECORD, EpisodeTable
from ringmap.storage.ring.ring import Ring

__all__ = [
    "DISTILLATION",
    "EPISODES",
    "FORMAT",
    "LABELS",
    "LARGEST",
    "LAYOUT",
    "LINEAGE_NBYTES",
    "ROWS",
    "TRANSITIONS",
    "VERSION",
    "Kind",
    "Manifest",
    "as_rate",
    "born_in",
    "column_file",
    "lineage_of",
    "must_be",
    "parse_rate",
    "rate_text",
    "same_rate",
    "stored_options",
]

FORMAT, VERSION = "ringmap", 3

LINEAGE_NBYTES = 16

LARGEST = 1 << 24
"""A larger manifest is not read."""

_MOST = 1 << 56
_CHUNK_MOST = 1 << 30
_FILE_NAME = re.compile(COLUMNS + r"/[0-9]{3,6}-[a-z0-9-]{0,40}\.(npy|zarr)")

EPISODES, TRANSITIONS, ROWS = "episodes", "transitions", "rows"
DISTILLATION, LABELS = "distillation", "labels"
"""A student's rows, and the log of a teacher's labels beside them."""

_OPENED_BY = {
    EPISODES: "ReplayBuffer",
    TRANSITIONS: "TransitionReplayBuffer",
    ROWS: "OfflineToOnlineReplayBuffer",
    DISTILLATION: "DistillationBuffer, which takes the directory above",
    LABELS: "DistillationBuffer, which takes the directory above",
}

_FILES = {
    "blob": "sizes <III: sums, words, data; small state <IIQ: offset, size, sum; sums <Q each; words; small state if "
    "it is new; data",
    "column": "header 4096, rows, label; codecs of a Zarr array by name",
    "frame": "size <I, check <Q seeded by the number and the file, payload",
    "open": "frame 0 JSON with salt, whose check seeds steps.bin and words.bin; a frame of rows for each call",
    "manifest": "lineage, kind, ordinal and closed are known",
    "mutable": "headers at 0 and 4096: magic, number, highest, synced, boot, check; marks at 8192; two planes; copy: "
    "check, generation, position, values",
    "priorities": "headers at 0 and 4096: magic, generation, upto, highest, sum, check; unsure at 64, leaves, two "
    "logs of frames: generation, kinds 1 to 3, count",
    "text": "codes <i4, dtype <U0; words: count <I, sizes <I each, UTF-8;",
    "transitions": "column _episode <i8 after lanes; records with MANY in part",
    "successors": "headers at 0 and 4096: magic, generation, head, rows_sum, offset, size, sum, check; payloads",
}
"""The files that no structure below describes, in words: change them with the file."""

LAYOUT = json_checksum([RECORD.descr, SLOT.format, _FILES])
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

    def encode(self) -> dict[str, Any]:
        """Return the keys of the manifest."""
        stack = None if self.stack is None else list(self.stack)
        return {"kind": self.name, "capacity": self.capacity, "older": self.older, "stack": stack}

    @classmethod
    def parse(cls, body: dict[str, Any], max_steps: int) -> Kind:
        """Return the kind in the keys of a manifest.

        Raises:
            ValueError: it is none.
        """
        name, capacity, older, stack = (body[key] for key in ("kind", "capacity", "older", "stack"))
        known = [n for n in (capacity, older) if n is not None]
        good = isinstance(name, str) and all(map(_is_count, known)) and older is not None
        good = good and 0 < (max_steps if capacity is None else capacity) <= max_steps - older
        if stack is not None:
            size, padding = stack
            good = good and _is_count(size) and size > 0 and isinstance(padding, str)
            stack = size, padding
        if not good:
            raise ValueError(f"kind {name!r}, capacity {capacity!r}, older {older!r}, stack {stack!r}")
        return cls(name, capacity, older, stack)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fixed facts of a buffer, and its settings as of the last flush.

    `born`: what its rows are; `lineage`: 16 bytes that its episodes are known by, also in copies of it; `ordinal`: none
    below it is given any more; `closed`: the era that a writer closed, 0 at birth, None after a flush that was no
    close.
    """

    uuid: bytes
    max_steps: int
    spare: int
    table_slots: int
    schema: Schema | None = None
    choices: tuple[Choice, ...] = ()
    files: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    locked_by_argument: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)
    carried: dict[str, Any] = field(default_factory=dict)
    born: Kind = Kind()
    lineage: bytes = bytes(LINEAGE_NBYTES)
    ordinal: int = 0
    closed: int | None = None

    @property
    def kind(self) -> str:
        """What the rows are: "episodes", "transitions", "rows", "distillation" or "labels"."""
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
        found: str | None = self.settings.get("reward_at")
        return found

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
        spec = self.schema.columns[index].stored
        return StoredColumn(self.files[index], self.choices[index].backend, spec, self.rows, self.label(index))

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
        assert self.schema is not None
        return {
            "uuid": self.uuid.hex(),
            "column": index,
            **_spec(self.schema.columns[index]),
            "max_steps": self.max_steps,
            "spare": self.spare,
            "born": self.birth(),
            **self.choices[index].options,
        }

    def birth(self) -> dict[str, Any]:
        """Return what the ring was born with, as JSON."""
        return {**self.born.encode(), "lineage": self.lineage.hex()}

    def with_columns(self, schema: Schema, choices: Sequence[Choice], locked: bool) -> Manifest:
        """Return the manifest with its columns fixed, sizes not yet known."""
        files = tuple(column_file(i, spec.name, choices[i].backend) for i, spec in enumerate(schema.columns))
        return replace(self, schema=schema, choices=tuple(choices), files=files, locked_by_argument=locked)

    def with_sizes(self) -> Manifest:
        """Return the manifest with the size of each column, whose backends are known."""
        return replace(self, sizes=tuple(one.nbytes for one in self.columns))

    def without_columns(self) -> Manifest:
        """Return the manifest as before the columns were fixed."""
        return replace(self, schema=None, choices=(), files=(), sizes=(), locked_by_argument=False)

    def encode(self) -> bytes:
        """Return the file's bytes."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "layout": LAYOUT,
            "about": "A replay buffer of the Python package ringmap. Rows: columns/*.npy (NumPy); "
            "episodes: episodes.npy (NumPy). Edit nothing by hand.",
            "byte_order": "little",
            "uuid": str(uuids.UUID(bytes=self.uuid)),
            **self.birth(),
            "max_steps": self.max_steps,
            "spare": self.spare,
            "rows": self.rows,
            "table_slots": self.table_slots,
            "schema_from": "argument" if self.locked_by_argument else "episode",
            "columns": None
            if self.schema is None
            else [
                {
                    **_spec(spec),
                    "file": file,
                    "backend": choice.backend,
                    "nbytes": nbytes,
                    **({"options": choice.options} if choice.options else {}),
                }
                for spec, file, choice, nbytes in zip(
                    self.schema.columns, self.files, self.choices, self.sizes, strict=True
                )
            ],
            "files": self.fixed_sizes,
            "fps": self.fps,
            "reward_at": self.reward_at,
            "settings": {n: v for n, v in self.settings.items() if n not in ("fps", "reward_at")},
            "table": self.table,
            "carried": self.carried,
            "ordinal": self.ordinal,
            "closed": self.closed,
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
        if body.get("format") != FORMAT:
            raise UnknownFormatError(f"{path}: not a ringmap buffer: expected format {FORMAT!r}; choose another path")
        version = body.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise NewerVersionError(
                f"{path}: format version {version!r}, this ringmap reads up to {VERSION}; upgrade ringmap"
            )
        if version < VERSION:
            raise _unreleased(path, f"format version {version}")
        if fault:
            raise CorruptError(
                f"{path}: the manifest {fault}; put the original back, or run ringmap.repair on the buffer"
            )
        if body.get("layout") != LAYOUT:
            raise _unreleased(path, f"another layout of format version {version}")
        try:
            return cls._parse(body, path)
        except NewerVersionError:  # a ValueError, too
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptError(f"{path}: the manifest does not make sense: {error!r}") from None

    @classmethod
    def _parse(cls, body: dict[str, Any], path: str) -> Manifest:
        for key, is_good in _CHECKS.items():
            if not is_good(body[key]):
                raise ValueError(f"{key} {body[key]!r}")
        max_steps, spare, slots = body["max_steps"], body["spare"], body["table_slots"]
        if slots > 4 * (max_steps + spare) + 4096:  # it is read into memory when it is checked
            raise ValueError(f"table_slots {slots} for {max_steps + spare} rows")
        settings = dict(body["settings"])
        if body["fps"] is not None:
            settings["fps"] = parse_rate(body["fps"])
        if body["reward_at"] is not None:
            settings["reward_at"] = body["reward_at"]
        born, lineage = born_in(body, max_steps)
        made = cls(
            uuids.UUID(body["uuid"]).bytes,
            max_steps,
            spare,
            slots,
            locked_by_argument=body["schema_from"] == "argument",
            settings=settings,
            table=body["table"],
            carried=body["carried"],
            born=born,
            lineage=lineage,
            ordinal=body["ordinal"],
            closed=body["closed"],
        )
        columns = body["columns"]
        if columns is None:
            return made
        schema = Schema(
            tuple(stored_spec(c["name"], c["shape"], c["dtype"], c.get("mutable") is True) for c in columns)
        )
        files, sizes = tuple(c["file"] for c in columns), tuple(int(c["nbytes"]) for c in columns)
        choices = tuple(_choice_in(c, spec, path) for c, spec in zip(columns, schema.columns, strict=True))
        if not files or len({*files}) < len(files) or len({*schema.names}) < len(files):
            raise ValueError(f"columns {schema.names} in files {files}")
        return replace(made, schema=schema, choices=choices, files=files, sizes=sizes)


def _choice_in(told: dict[str, Any], spec: ColumnSpec, path: str) -> Choice:
    """Return how the manifest says that a column is stored.

    Raises:
        NewerVersionError: by a backend that is not known.
        ValueError: it makes no sense.
    """
    backend, file, options = told["backend"], told["file"], stored_options(told.get("options", {}))
    if backend not in BACKENDS:
        raise NewerVersionError(
            f"{path}: column {spec.name!r} has backend {backend!r}, this ringmap has {sorted(BACKENDS)}; "
            "upgrade ringmap"
        )
    fits = spec.row_nbytes * options.get("chunk_steps", 0) <= _CHUNK_MOST
    if not (fits and _FILE_NAME.fullmatch(file) and file.endswith(".zarr") == (backend == "zarr") == bool(options)):
        raise ValueError(f"column {spec.name!r} of {backend} in file {file!r} with options {options!r}")
    return Choice(backend, options)


def _is_count(value: Any) -> bool:
    """Tell whether a value is an integer in the range of file sizes: results computed from it fit in 64 bits."""
    return type(value) is int and 0 <= value < _MOST


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "max_steps": lambda n: _is_count(n) and n > 0,
    "spare": _is_count,
    "table_slots": lambda n: _is_count(n) and n > 0,
    "settings": lambda one: type(one) is dict,
    "table": lambda one: type(one) is dict and all(map(_is_count, one.values())),
    "carried": lambda one: one == {} or (_is_count(one["seq"]) and type(one["state"]) is dict),
    "ordinal": _is_count,
    "closed": lambda era: era is None or (type(era) is int and 0 <= era < MOST),
    "reward_at": lambda where: where is None or type(where) is str,
}
"""What holds of the keys of a manifest, each for itself."""


def born_in(body: dict[str, Any], max_steps: int) -> tuple[Kind, bytes]:
    """Return the kind and the lineage that a manifest's body, or a label, names.

    Raises:
        ValueError, KeyError, TypeError: it names none.
    """
    lineage = bytes.fromhex(body["lineage"])
    if len(lineage) != LINEAGE_NBYTES or lineage.hex() != body["lineage"]:
        raise ValueError(f"lineage {body['lineage']!r}")
    return Kind.parse(body, max_steps), lineage


def lineage_of(seed: int | None, name: str) -> bytes:
    """Return the lineage of a new ring: of a seed and the directory's own name, so that a repeated run gets the same;
    else random."""
    if seed is None:
        return uuids.uuid4().bytes
    return xxhash.xxh3_128_digest(f"{seed} {name}".encode(errors="surrogateescape"))


def _unreleased(path: str, what: str) -> UnreleasedVersionError:
    return UnreleasedVersionError(
        f"{path}: {what} was made by an unreleased version of ringmap, and this one reads version {VERSION}: record "
        "again"
    )


def _spec(spec: ColumnSpec) -> dict[str, Any]:
    """Return the keys that say what the rows of a column are."""
    mutable = {"mutable": True} if spec.mutable else {}
    return {"name": spec.name, "dtype": spec.dtype.str, "shape": list(spec.shape), **mutable}


def stored_options(given: Any) -> dict[str, Any]:
    """Return the stored options of a column.

    Raises:
        ValueError: they are not valid.
    """
    if given == {}:
        return {}
    steps, codecs = given["chunk_steps"], given["codecs"]
    if len(given) != 2 or not _is_count(steps) or not steps or type(codecs) is not str or codecs not in NAMED:
        raise ValueError(f"options {given!r}")
    return {"codecs": codecs, "chunk_steps": steps}


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


# -- rates ----------------------------------------------------------------------------------------

_TEXT = re.compile(r"[1-9][0-9]{0,400}/[1-9][0-9]{0,400}")

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
    if isinstance(value, str):
        return parse_rate(value)
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction | np.integer | np.floating):
        raise ValueError(f"{value!r} is no rate")
    return _positive(Fraction(str(value)))


def rate_text(rate: Fraction) -> str:
    """Return a rate as "num/den"."""
    return f"{rate.numerator}/{rate.denominator}"


def parse_rate(text: Any) -> Fraction:
    """Return the rate of a text "num/den".

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str) or not _TEXT.fullmatch(text):
        raise ValueError(f"{text!r} is no rate")
    return _positive(Fraction(text))


def same_rate(one: Fraction, other: Fraction) -> bool:
    """Tell whether two rates are one: 29.97 is 30000/1001. Below one step per second their ratio decides."""
    return abs(one - other) <= _TOLERANCE * min(Fraction(1), one, other)


def _positive(rate: Fraction) -> Fraction:
    """Return a rate that is positive, and a number of NumPy, too."""
    try:
        fits = 0 < float(rate) < math.inf
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"{rate} is no rate")
    return rate
