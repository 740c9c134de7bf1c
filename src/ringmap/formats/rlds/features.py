"""The features of a TFDS data set: what features.json says of them, and their values as arrays.

    {"steps": Dataset({"observation": {"image": Image}, ...}), "episode_metadata": {"path": Text}}
        -> steps/observation/image, ...  one value per step      episode_metadata/path  one per episode

Source: TensorFlow Datasets, `tfds.features`; rlds, "dataset format".
Not here: the wire format (example.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringmap.errors import CorruptError
from ringmap.formats.common.untrusted import LARGEST_PICTURE, refuse_vast
from ringmap.formats.media.images import decode_into, picture_of
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["Leaf", "decode", "leaves_of"]

Array = np.ndarray[Any, np.dtype[Any]]

_TEXT = 1000
"""Bytes that a byte of a record may become as text of one width."""

_DEEPEST = 32

_ANY_TEXT = np.dtype("U")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A feature without parts.

    Args:
        name: its parts joined with "/".
        kind: "number", "text", "bytes" (of an array), "zlib" or "picture"; else what it is, which is not read.
        shape: of a value, -1 where any: one axis of episode data, height and width of a picture, (H, W, C).
        dtype: of its numbers; "U" for text.
        each: values in a list of fixed length, one list per step; 0: no list.
    """

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

    Args:
        leaf: the feature; one axis may be of any length if `steps` is 1, and pictures have the size of the first one.
        values: of a record.
        steps: how many steps the record has.
        where: the file, record and feature, for a message.

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
        refuse_vast(f"{where}: texts", 4 * width * len(texts), sum(map(len, values)), _TEXT)
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
