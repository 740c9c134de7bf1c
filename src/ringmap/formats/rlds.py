"""The RLDS format: data sets of episodes that TensorFlow Datasets wrote (Open X-Embodiment), read without TensorFlow.

    features.json                             names, shapes, dtypes, encodings
    dataset_info.json                         name, splits, how many records each file has
    NAME-SPLIT.tfrecord-00000-of-00002        one record an episode, in all splits
    NAME-SPLIT.array_record-00000-of-00002    ... or these; they need the extra `rlds`

It is read in order, since nothing in it says how many steps an episode has: `convert` copies it.
Columns: the features of a step under their own names; `is_terminal` is the column `terminated`, and `truncated` is true
at the last step if that is not terminal. A reward stands in the row of its action. Other features are episode data,
with `split`.
A record is walked by the lengths of its fields:

    TFRecord      length (8 bytes), its checksum (4), the record, its checksum (4)      CRC32C, masked
    ArrayRecord   read by the package `array_record` (extra `rlds`), which checks what it reads
    Example   { Features = 1 }
    Features  { map = 1, of name = 1 and Feature = 2 }
    Feature   { list of bytes = 1, of floats = 2 or of integers = 3 }       each list { value = 1, repeated }

Invariants: reads only; whole records, in order, one of TFRecord after its checksum was compared; a length never reaches
beyond what holds it.
Source: google-research/rlds, README, "Dataset Format"; TensorFlow Datasets, `tfds.features`; TensorFlow, "TFRecords
format details", `example.proto` and `feature.proto`; Protocol Buffers documentation, Encoding; google/array_record.
Not here: writing, which needs TFDS.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import google_crc32c
import numpy as np

from ringmap.datasets.stored_episodes import EpisodeStream
from ringmap.errors import CorruptError, UnknownFormatError
from ringmap.extras import require
from ringmap.formats.builtin import Rlds
from ringmap.formats.common.source import damage_named
from ringmap.formats.common.untrusted import (
    LARGEST_PICTURE,
    check_name,
    open_binary,
    read_json,
    refuse_elsewhere,
)
from ringmap.formats.media.images import decode_into, picture_of
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.disk.paths import local_path

__all__ = ["Leaf", "RldsEpisodes", "decode", "features_of", "values_of"]


Array = np.ndarray[Any, np.dtype[Any]]

_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"

log = logging.getLogger("ringmap")


class RldsEpisodes(EpisodeStream):
    """The episodes of an RLDS data set, in order.

    Raises:
        UnknownFormatError: it is no RLDS data set, or its files are of another kind.
        CorruptError: it is damaged; from iterating, too.
        MissingExtraError: from iterating: its files are ArrayRecord, and the package is not installed.

    Cost: opening reads the two descriptions; the columns are those of the first episode, which is read for them.
    """

    reward_at = "same"
    """A row is a step: an observation, its action, and the reward of that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)
        if not Rlds.detect(self.path):
            raise UnknownFormatError(
                f"{self.path}: is no RLDS data set: it has no dataset_info.json, or no features.json with steps"
            )
        with damage_named(self.path):
            self._columns, self._data = self._features()
            counters = [leaf for leaf in self._columns.values() if leaf.per_step > 0]
            if not counters:
                raise CorruptError(f"{self.path}: no feature tells how many steps an episode has")
            self._counter = min(counters, key=lambda leaf: (leaf.kind != "number", leaf.per_step))
            self._files = list(self._named())
        self._schema: Schema | None = None
        self.num_episodes = sum(count for _, _, count in self._files)
        self.episode_column_names = [*(leaf.name for leaf in self._data), "split"]

    @property
    def schema(self) -> Schema:
        """The columns of the first episode; none without episodes."""
        if self._schema is None:
            self._schema = next((Schema.of(columns) for columns, _ in self), Schema(()))
        return self._schema

    def __iter__(self) -> Iterator[tuple[dict[str, Array], dict[str, Any]]]:
        """Yield the columns and the data of each episode."""
        for split, file, told in self._files:
            count = 0
            with damage_named(file):
                for data in self._reader(file):
                    yield self._episode(data, split, f"{file}: record {count}")
                    count += 1
                if count != told:
                    raise CorruptError(f"{file}: has {count} records, expected {told}, as dataset_info.json says")

    def _episode(self, data: bytes, split: str, where: str) -> tuple[dict[str, Array], dict[str, Any]]:
        with damage_named(where):
            places = features_of(data)
            if self._counter.key not in places:
                raise CorruptError(f"{where} has no feature {self._counter.key!r}")
            steps = len(values_of(data, places[self._counter.key])) // self._counter.per_step
        columns = dict(_decoded(data, places, self._columns, steps, where))
        if "terminated" in columns and "truncated" not in columns:
            columns["truncated"] = np.arange(steps) == steps - 1
            columns["truncated"] &= ~columns["terminated"].astype(bool)
        known = {leaf.name: leaf for leaf in self._data if leaf.key in places}  # each is optional
        rows = _decoded(data, places, known, 1, where)
        constant = {n: row[0] if row.ndim > 1 else row[0].item() for n, row in rows}
        return columns, {**constant, "split": split}

    def _features(self) -> tuple[dict[str, Leaf], list[Leaf]]:
        """Return the columns, and the leaves that are episode data."""
        file = os.path.join(self.path, "features.json")
        refuse_elsewhere(self.path, file)
        columns, data = {}, []
        for in_steps, leaf in leaves_of(read_json(file)):
            if not leaf.reads:
                log.warning("%s: feature %r is left out: a %s is not read", self.path, leaf.name, leaf.kind)
            elif not in_steps:
                data.append(leaf)
            else:
                columns[leaf.name.removeprefix("steps/")] = leaf
        if "terminated" in columns or "truncated" in columns:
            return columns, data
        return {"terminated" if n == "is_terminal" else n: leaf for n, leaf in columns.items()}, data

    def _named(self) -> Iterator[tuple[str, str, int]]:
        """Yield split, path and number of records of each file, in order."""
        place = os.path.join(self.path, "dataset_info.json")
        info = read_json(place)
        kind = info.get("fileFormat", "tfrecord")
        if kind not in READERS:
            raise UnknownFormatError(f"{self.path}: its files are {kind!r}, expected one of {list(READERS)}")
        self._reader = READERS[kind]
        for split in info["splits"]:
            if split.get("filepathTemplate", _TEMPLATE) != _TEMPLATE:
                raise UnknownFormatError(
                    f"{self.path}: its files are named {split['filepathTemplate']!r}, expected {_TEMPLATE!r}"
                )
            counts = split["shardLengths"]
            for number, count in enumerate(counts):
                name = f"{info['name']}-{split['name']}.{kind}-{number:05d}-of-{len(counts):05d}"
                file = os.path.join(self.path, check_name(place, name))
                refuse_elsewhere(self.path, file)
                yield str(split["name"]), file, int(count)


def _decoded(
    data: bytes, places: Mapping[str, tuple[int, int]], leaves: Mapping[str, Leaf], steps: int, where: str
) -> Iterator[tuple[str, Array]]:
    for name, leaf in leaves.items():
        of = f"{where}: {leaf.name!r}"
        with damage_named(of):
            yield name, decode(leaf, values_of(data, places.get(leaf.key, (0, 0))), steps, of)


_HEAD, _FOOT = 12, 4


def _tf_records(path: str) -> Iterator[bytes]:
    """Yield the records of a TFRecord file."""
    with open_binary(path) as file:
        end = os.fstat(file.fileno()).st_size
        while (at := file.tell()) < end:
            head = file.read(_HEAD)
            if len(head) < _HEAD:
                raise CorruptError(f"{path}: is cut in the head of a record at byte {at:,}")
            size, stored = struct.unpack("<QI", head)
            if _masked(head[:8]) != stored:
                raise CorruptError(f"{path}: the length of the record at byte {at:,} has another checksum")
            if at + _HEAD + size + _FOOT > end:
                raise CorruptError(
                    f"{path}: a record of {size:,} bytes at byte {at:,} ends beyond the file, which has {end:,}"
                )
            data = file.read(size)
            if _masked(data) != int.from_bytes(file.read(_FOOT), "little"):
                raise CorruptError(f"{path}: the record at byte {at:,} has another checksum")
            yield data


def _array_records(path: str) -> Iterator[bytes]:
    """Yield the records of an ArrayRecord file."""
    require("rlds", f"{path}: an ArrayRecord file")
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
    if not reader.ok():
        reader.close()  # raises what is wrong
        raise CorruptError(f"{path}: is no ArrayRecord file")
    for _ in range(reader.num_records()):
        yield reader.read()
    reader.close()


READERS: dict[str, Callable[[str], Iterator[bytes]]] = {"tfrecord": _tf_records, "array_record": _array_records}
"""The name of a kind of files in `dataset_info.json` -> what reads them."""


def _masked(data: bytes) -> int:
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


Place = tuple[int, int]

_INTEGER, _EIGHT, _SIZED, _FOUR = 0, 1, 2, 5
"""The wire types."""

_LONGEST = 10
"""Bytes of an integer of 64 bits."""


def features_of(data: bytes) -> dict[str, Place]:
    """Return name -> where its Feature begins and ends in an Example.

    Raises:
        ValueError: it is none.
    """
    found = {}
    for features in _sized(data, (0, len(data)), 1):
        for entry in _sized(data, features, 1):
            name, place = b"", (0, 0)
            for number, wire, start, stop in _fields(data, entry):
                if wire == _SIZED and number == 1:
                    name = data[start:stop]
                elif wire == _SIZED and number == 2:
                    place = start, stop
            found[name.decode()] = place
    return found


def values_of(data: bytes, place: Place) -> list[bytes] | Array:
    """Return the values of a Feature: a list of bytes, or an array of float32 or int64.

    Raises:
        ValueError: it is none, or holds several kinds of values.
    """
    kinds, parts = set(), []
    for number, wire, start, stop in _fields(data, place):
        if wire == _SIZED and number in (1, 2, 3):
            kinds.add(number)
            # Numbers stand packed in one part, or each is a part.
            parts += [data[a:b] for field, _, a, b in _fields(data, (start, stop)) if field == 1]
    if len(kinds) > 1:
        raise ValueError("a feature has values of several kinds")
    if kinds == {1}:
        return parts
    packed = b"".join(parts)
    if kinds == {3}:
        return _integers(np.frombuffer(packed, np.uint8))
    if len(packed) % 4:
        raise ValueError(f"floats take {len(packed)} bytes, which is no multiple of 4")
    return np.frombuffer(packed, "<f4")


def _sized(data: bytes, place: Place, wanted: int) -> list[Place]:
    return [(a, b) for number, wire, a, b in _fields(data, place) if (number, wire) == (wanted, _SIZED)]


def _fields(data: bytes, place: Place) -> Iterator[tuple[int, int, int, int]]:
    """Yield number and wire type of each field of a message, and where its value begins and ends."""
    at, end = place
    while at < end:
        tag, at = _integer(data, at, end)
        start = at
        wire = tag & 7
        if wire == _INTEGER:
            _, at = _integer(data, at, end)
        elif wire == _SIZED:
            size, start = _integer(data, at, end)
            at = start + size
        elif wire in (_EIGHT, _FOUR):
            at += 8 if wire == _EIGHT else 4
        else:
            raise ValueError(f"a field at byte {start} is of wire type {wire}, expected 0, 1, 2 or 5")
        if at > end:
            raise ValueError(f"a field at byte {start} ends at byte {at:,}, beyond {end:,}, where its message ends")
        yield tag >> 3, wire, start, at


def _integer(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return an integer, and where it ends."""
    value = 0
    for i, byte in enumerate(data[at : min(at + _LONGEST, end)]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError(f"an integer at byte {at} does not end")


def _integers(raw: Array) -> Array:
    """Return the integers that are packed in these bytes, int64."""
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):  # flags, and other small numbers
        return raw.astype(np.int64)
    sizes = np.diff(ends, prepend=-1)
    if not len(ends) or ends[-1] != len(raw) - 1 or sizes.max() > _LONGEST:
        raise ValueError("a list of integers does not end with one")
    values = np.zeros(len(ends), np.uint64)
    for i in range(int(sizes.max())):
        longer = sizes > i
        bits = raw[ends[longer] - sizes[longer] + 1 + i] & np.uint8(0x7F)
        values[longer] |= bits.astype(np.uint64) << np.uint64(7 * i)
    return values.view(np.int64)


_TEXT = 1000
"""Bytes that a byte of a record may become as text of one width."""

_DEEPEST = 32

_ANY_TEXT = np.dtype("U")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A feature without parts."""

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = _ANY_TEXT
    each: int = 0

    @property
    def reads(self) -> bool:
        """Whether its values can be read as an array, once pictures have a size."""
        return self.kind in ("number", "text", "bytes", "zlib", "picture")

    @property
    def key(self) -> str:
        """The name of its values in a record."""
        return f"{self.name}/ragged_flat_values" if self.each else self.name

    @property
    def per_step(self) -> int:
        """How many values a record has of it for each step: of a number each number, else each value."""
        return (self.each or 1) * (math.prod(self.shape) if self.kind in ("number", "text") else 1)


def leaves_of(feature: Any, name: str = "", steps: bool = False) -> Iterator[tuple[bool, Leaf]]:
    """Yield the leaves of a feature as features.json describes it, and whether each has a value per step.

    Raises:
        CorruptError: the description makes no sense.
    """
    if name.count("/") > _DEEPEST or not isinstance(feature, Mapping):
        raise CorruptError(f"feature {name!r} is {str(feature)[:80]!r}, expected a description")
    if "featuresDict" in feature:
        for part, inner in feature["featuresDict"].get("features", {}).items():
            yield from leaves_of(inner, f"{name}/{part}" if name else str(part), steps)
    elif "sequence" in feature and name == "steps":
        yield from leaves_of(feature["sequence"]["feature"], name, True)
    elif "sequence" in feature:
        each = int(feature["sequence"].get("length", -1))
        for _, leaf in leaves_of(feature["sequence"]["feature"], name, steps):
            if steps and each > 0 and not leaf.each:
                yield steps, replace(leaf, each=each)
            elif not steps and not leaf.shape and leaf.kind in ("number", "text"):
                yield steps, replace(leaf, shape=(-1,))
            else:
                yield steps, replace(leaf, kind="Sequence of any length")
    else:
        yield steps, _leaf(feature, name, steps)


def _leaf(feature: Mapping[str, Any], name: str, steps: bool) -> Leaf:
    if "text" in feature:
        return Leaf(name, "text")
    if "classLabel" in feature:
        return Leaf(name, "number", (), np.dtype(np.int64))
    kind = "tensor" if "tensor" in feature else "image"
    if kind not in feature:
        return Leaf(name, str(feature.get("pythonClassName", "unknown")).rpartition(".")[2])
    told = feature[kind]
    shape = tuple(int(n) for n in told.get("shape", {}).get("dimensions", ()))
    if min(shape, default=0) < -1:
        raise CorruptError(f"feature {name!r} has shape {shape}")
    if kind == "image":
        picture = Leaf(name, "picture", shape, np.dtype(told.get("dtype", "uint8")))
        known = len(shape) == 3 and (picture.dtype.name, shape[2]) in _PICTURES
        if known and math.prod(shape[:2]) > LARGEST_PICTURE:
            raise CorruptError(f"feature {name!r}: pictures of {shape}, expected at most {LARGEST_PICTURE:,} pixels")
        return picture if known else replace(picture, kind=f"Image {shape} {picture.dtype}")
    encoding = str(told.get("encoding", "none")).lower()
    if encoding not in _ENCODINGS or shape.count(-1) > (0 if steps else 1):
        return Leaf(name, f"Tensor {shape}, encoding {encoding!r}")
    if told["dtype"] in ("string", "object"):
        return Leaf(name, "text", shape)
    try:
        dtype = np.dtype(told["dtype"])
    except TypeError:  # bfloat16
        return Leaf(name, f"Tensor of {told['dtype']}")
    if dtype.kind not in "biuf":
        return Leaf(name, f"Tensor of {dtype}")
    return Leaf(name, _ENCODINGS[encoding], shape, dtype)


_ENCODINGS = {"none": "number", "bytes": "bytes", "zlib": "zlib"}

_PICTURES = {(dtype, channels) for dtype in ("uint8", "uint16") for channels in (1, 3, 4)} | {("float32", 1)}
"""dtype and channels of pictures. A float32 is stored as four channels of bytes."""


def decode(leaf: Leaf, values: list[bytes] | Array, steps: int, where: str) -> Array:
    """Return the values of a feature as an array (steps, ...).

    Raises:
        CorruptError: they are not as many, or not what the leaf says.
    """
    if leaf.kind == "picture" and -1 in leaf.shape and len(values):
        first = picture_of(values[0], where)
        leaf = replace(leaf, shape=(first.height, first.width, leaf.shape[2]))
    shape = (steps, *((leaf.each,) if leaf.each else ()), *leaf.shape)
    expected = steps * leaf.per_step
    if -1 in leaf.shape and leaf.kind in ("number", "text"):
        expected = len(values)
    if len(values) != expected:
        raise CorruptError(f"{where} has {len(values)} values in {steps} steps, expected {expected}")
    if leaf.kind == "number":
        if isinstance(values, list) and values:
            raise CorruptError(f"{where} is text, expected {leaf.dtype}")
        return _cast(np.asarray(values), leaf.dtype, where).reshape(shape)
    if not isinstance(values, list):
        if len(values):
            raise CorruptError(f"{where} is {values.dtype}, expected bytes")
        values = []
    if leaf.kind == "text":
        texts = [value.decode() for value in values]
        width = max(map(len, texts), default=0)
        return np.array(texts, f"U{max(width, 1)}").reshape(shape)
    if leaf.kind == "picture":
        # A float is four channels of bytes.
        stored = (*leaf.shape[:2], 4) if leaf.dtype == np.float32 else leaf.shape
        kind = np.dtype(np.uint8) if leaf.dtype == np.float32 else leaf.dtype
        pictures = np.empty((len(values), *stored), kind)
        decode_into(pictures, values, ColumnSpec(where, stored, kind))
        return pictures.view(leaf.dtype).reshape(shape)
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize  # negative, if any
    parts = [_unpacked(value, nbytes, where) if leaf.kind == "zlib" else value for value in values]
    if any(len(part) != nbytes for part in parts) and nbytes >= 0:
        raise CorruptError(f"{where}: values of {sorted(set(map(len, parts)))} bytes, expected {nbytes}")
    return np.frombuffer(b"".join(parts), leaf.dtype.newbyteorder("<")).reshape(shape)


def _cast(values: Array, dtype: np.dtype[Any], where: str) -> Array:
    if len(values) and (values.dtype.kind == "f") != (dtype.kind == "f"):
        raise CorruptError(f"{where} is {values.dtype}, expected {dtype}")
    if dtype == np.uint64:
        return values.astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        found = values.astype(dtype)
    if dtype.kind in "biu" and (found != values).any():
        raise CorruptError(f"{where} holds numbers that {dtype} can't")
    return found


def _unpacked(data: bytes, nbytes: int, where: str) -> bytes:
    """Return what zlib packed, which has so many bytes; any number of them if negative."""
    unpack = zlib.decompressobj()
    most = nbytes if nbytes >= 0 else _TEXT * len(data)
    found = unpack.decompress(data, most + 1)
    if len(found) > most or not unpack.eof:
        raise CorruptError(f"{where}: a packed value has more than {most:,} bytes, or does not end")
    return found
