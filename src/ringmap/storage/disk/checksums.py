"""What a checksum makes whole: a JSON object, a run of frames in a file, a value in two slots of a file.

    object  {"a": 1, "checksum": "8f.."}     the checksum is that of all else, as canonical JSON: it holds in any layout

    frames  [size, check, payload][size, check, payload] ... nothing, zeros, or bytes of an earlier run
              4     8
             number 0              number 1

    slots   [slot 0: generation 6][slot 1: generation 7]...     4096 bytes each, of which a kill can tear only one:
            magic, generation, payload, checksum of the salt and all before it

The check of a frame is seeded by its number and the seed of the run: a frame of another run, or of another place in
this one, does not pass for one. If one slot is torn, its writer may finish it and write the other one while that is
read: what was read would be two generations behind. So `peek`, beside a writer, counts only if both slots are valid;
`newest` is for where no process writes, or where any whole value will do.

Invariants: the first frame that is not whole ends a run, and why is told; no payload is returned before its checksum
holds, and no size is believed before it is compared with the bytes that are there; generation g is in slot g % 2.
Not here: what objects, payloads and values mean, when they are synced, who may write.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar, Generic, TypeVar

import xxhash

from ringmap.storage.disk.files import File, closed
from ringmap.storage.disk.system import Data

__all__ = [
    "CHECKSUM",
    "CUT",
    "DAMAGED",
    "END",
    "FINISH",
    "FINISHED",
    "GENERATION",
    "HEADER",
    "SLOT_NBYTES",
    "FrameReader",
    "TwoSlots",
    "decode_signed",
    "encode_signed",
    "framed",
    "json_checksum",
]

# -- objects ---------------------------------------------------------------------------------------

CHECKSUM = "checksum"
"""The key of the checksum."""


def json_checksum(body: Any) -> str:
    """Return the XXH3 of an object as JSON in ASCII, keys sorted, without spaces: 16 hexadecimal digits.

    Example:
        >>> json_checksum({"b": 1, "a": 2}) == json_checksum({"a": 2, "b": 1})
        True
    """
    text = json.dumps(body, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def encode_signed(body: dict[str, Any], indent: int | None = None) -> bytes:
    """Return an object with its checksum, as JSON in ASCII; with an `indent` in lines, for people."""
    text = json.dumps({**body, CHECKSUM: json_checksum(body)}, indent=indent, ensure_ascii=True)
    return text.encode() + b"\n" * (indent is not None)


def decode_signed(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the object without its checksum, and what is wrong with it in words, empty for nothing.

    The object is None if the bytes are no JSON, {} if they are JSON of something else; with a wrong checksum it is
    returned all the same, for who has to know what it is of, or takes what people edited.

    Example:
        >>> decode_signed(encode_signed({"a": 2}))
        ({'a': 2}, '')
        >>> decode_signed(b'{"a": 2}')[1]
        "was edited or damaged: its checksum is None, expected '12c7c1dc69f1e404'"
    """
    try:
        body = json.loads(data)
        found = body.pop(CHECKSUM, None) if isinstance(body, dict) else None
        expected = json_checksum(body)  # nested too deep, it raises as loading it does
    except (ValueError, RecursionError):
        return None, "is not valid JSON"
    fault = "" if found == expected else f"was edited or damaged: its checksum is {found!r}, expected {expected!r}"
    return (body if isinstance(body, dict) else {}), fault


# -- frames ----------------------------------------------------------------------------------------

HEADER = struct.Struct("<IQ")
"""The size of a payload, and its checksum."""

FINISH = HEADER.pack(0, (1 << 64) - 1)
"""What a writer may put behind its newest frame, for the next one to go over: an end without it is none that it
wrote."""

FINISHED, END, CUT, DAMAGED = "finished", "end", "cut", "damaged"
"""Why a run ends: by `FINISH`; nothing follows, or zeros; the bytes end within a frame, as a kill leaves it; a frame is
there, and is wrong."""

_CHUNK_NBYTES = 1 << 16


def framed(payload: Data, number: int, seed: int = 0) -> bytes:
    """Return the frame of a payload."""
    return HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload, seed + number)) + payload


class FrameReader:
    """Reads a run of frames, up to the first that is not whole.

    Args:
        file: read from.
        seed: of the run.
        at: byte of the file at which the next frame begins.
        number: of that frame.
        stop: the byte at which the run's part of the file ends; None: at its end.
        chunk: bytes to read at once, at least.

    `at`, `number`: of the frame after the last whole one; `seed` may be set between two frames; `size`: what the header
    of the last frame that was read says; `ending`: why there are no more, "" as long as that is not known.
    """

    __slots__ = ("_begin", "_chunk", "_data", "_file", "at", "ending", "number", "seed", "size", "stop")

    def __init__(
        self,
        file: File,
        seed: int = 0,
        at: int = 0,
        number: int = 0,
        stop: int | None = None,
        chunk: int = _CHUNK_NBYTES,
    ) -> None:
        self._file, self._chunk = file, chunk
        self._data, self._begin = b"", at
        self.seed, self.at, self.number = seed, at, number
        self.stop = file.size() if stop is None else min(stop, file.size())
        self.size, self.ending = 0, ""

    def next(self, most: int) -> bytes | None:
        """Return the payload of the next frame; None if it is not whole. One that says to have more than `most` bytes
        is damaged."""
        at = self.at - self._begin
        if at + HEADER.size > len(self._data):
            at = self._load(HEADER.size)
        header = self._data[at : at + HEADER.size]
        if len(header) < HEADER.size:
            self.ending, self.size = CUT if any(header) else END, 0
            return None
        self.size, check = HEADER.unpack(header)
        if header == FINISH:
            self.ending = FINISHED
            return None
        if self.size > most or not (self.size or check):
            self.ending = DAMAGED if self.size else END
            return None
        nbytes = HEADER.size + self.size
        if self.at + nbytes > self.stop:
            self.ending = CUT
            return None
        if at + nbytes > len(self._data):
            at = self._load(nbytes)
        payload = self._data[at + HEADER.size : at + nbytes]
        if len(payload) != self.size or xxhash.xxh3_64_intdigest(payload, self.seed + self.number) != check:
            self.ending = DAMAGED
            return None
        self.at, self.number = self.at + nbytes, self.number + 1
        return payload

    def _load(self, nbytes: int) -> int:
        """Read the next bytes of the run, fewer where it stops; return where they begin among those read."""
        self._data = self._file.read(min(max(nbytes, self._chunk), self.stop - self.at), self.at)
        self._begin = self.at
        return 0


# -- two slots -------------------------------------------------------------------------------------

SLOT_NBYTES = 4096
"""Size of a slot."""
GENERATION = 1
"""The place of the generation in a slot, in words of 8 bytes."""

_PEEKS = 2000


T = TypeVar("T", bound=tuple[Any, ...])


class TwoSlots(Generic[T]):
    """The two slots at the beginning of an open file.

    A value is a tuple of the generation and the fields of the payload. A subclass says what a slot holds: `magic`;
    `form`: magic, generation and payload, of a fixed size; `decode`: makes a value of its fields, None for what was
    never written. `salt`: of the checksums, so that a foreign file has no valid slot; `mapped`: whether `generations`
    may read a map.
    """

    magic: ClassVar[bytes]
    form: ClassVar[struct.Struct]
    decode: ClassVar[Callable[..., Any]]

    def __init__(self, file: File, salt: bytes, mapped: bool = False) -> None:
        self.path = file.path
        self._file = file
        self._salt = salt
        self._words: memoryview | None = file.map().data.cast("Q") if mapped else None

    def data(self) -> bytes:
        """Return the bytes of both slots."""
        return self._file.read(2 * SLOT_NBYTES, 0)

    def slots(self, data: bytes | None = None) -> tuple[T | None, T | None]:
        """Return both slots, None for one that is not valid; of the bytes of both, if the caller has them."""
        data = self.data() if data is None else data
        return self._parse(data, 0), self._parse(data, 1)

    def newest(self, data: bytes | None = None) -> T | None:
        """Return the newest valid slot, or None; of the bytes of both, if the caller has them."""
        values = [value for value in self.slots(data) if value is not None]
        return max(values, key=itemgetter(0), default=None)

    def peek(self) -> tuple[T | None, bytes]:
        """Return the newest value while a writer may be writing, or None if a slot stays torn; and the bytes that were
        seen.

        While these are in the file, no later value was shown: generations only rise, and each goes over the older slot.
        Only the valid slots do not tell: a writer that is two further may be in the middle of the third.
        """
        for attempt in range(_PEEKS):
            data = self.data()
            one, other = self.slots(data)
            if one is not None and other is not None:
                return max(one, other, key=itemgetter(0)), data
            if attempt > 100:  # a writer killed during a write, or one that is not scheduled
                time.sleep(0.0005)
        return None, data

    def generations(self) -> tuple[int, int] | None:
        """Return the generations in both slots, without a system call; None if the file is not mapped.

        While they stay the same, no later value was shown: each write changes one of them. Rows that are loaded before
        this call are loaded before the generations, as this processor keeps the order of loads.
        """
        words = self._words
        return None if words is None else (words[GENERATION], words[SLOT_NBYTES // 8 + GENERATION])

    def write(self, value: T) -> None:
        """Write a value into the slot of its generation. O(1)."""
        packed = self.form.pack(self.magic, *value)
        check = xxhash.xxh3_64_intdigest(self._salt + packed).to_bytes(8, "little")
        self._file.write(packed + check, value[0] % 2 * SLOT_NBYTES)

    def sync(self) -> None:
        """Return once the written values are durable on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Release the descriptor and the map; a running peek keeps them until it is done."""
        self._file, self._words = closed(self._file.path), None

    def _parse(self, data: bytes, slot: int) -> T | None:
        at, size = slot * SLOT_NBYTES, self.form.size
        packed, check = data[at : at + size], data[at + size : at + size + 8]
        if len(check) != 8 or int.from_bytes(check, "little") != xxhash.xxh3_64_intdigest(self._salt + packed):
            return None
        magic, generation, *fields = self.form.unpack(packed)
        if magic != self.magic or generation % 2 != slot:
            return None
        value: T | None = self.decode(generation, *fields)
        return value
