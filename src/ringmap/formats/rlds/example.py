"""Serialized tf.train.Example: the values of each feature.

    Example   { Features = 1 }
    Features  { map = 1, of name = 1 and Feature = 2 }
    Feature   { list of bytes = 1, of floats = 2 or of integers = 3 }       each list { value = 1, repeated }

Invariants: a length never reaches beyond what holds it; only the features that are asked for are copied.
Source: Protocol Buffers documentation, Encoding; TensorFlow, `example.proto` and `feature.proto`.
Not here: what values mean (features.py), the name of the file in errors (`damage_named`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["features_of", "values_of"]

Array = np.ndarray[Any, np.dtype[Any]]
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
