"""A small value in a file, written in turn into two slots, of which a kill can tear only one.

    file   [slot 0: generation 6][slot 1: generation 7]...     4096 bytes each
    slot   magic · generation · payload · checksum of the salt and all before it

    peek     beside a writer: both slots valid, else they are read again; the newer one
    newest   where no process writes, or where any whole value will do: the newest valid one

If one slot is torn, its writer may finish it and write the other one while that is read: what was read would be two
generations behind. So `peek` counts only if both slots are valid.

Invariants: generation g is in slot g % 2; a slot counts with its checksum, which covers the salt.
Not here: what the payload means, who may write, and what else the file has behind its slots.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar, Generic, TypeVar

import xxhash

from ringmap.storage.disk.files import File, closed

__all__ = ["GENERATION", "SLOT_NBYTES", "TwoSlots"]

SLOT_NBYTES = 4096
"""Size of a slot."""
GENERATION = 1
"""The place of the generation in a slot, in words of 8 bytes."""

_LOOKS = 2000


T = TypeVar("T", bound=tuple[Any, ...])


class TwoSlots(Generic[T]):
    """The two slots at the beginning of an open file.

    A value is a tuple of the generation and the fields of the payload. A subclass says what a slot holds: `magic`;
    `form`: magic, generation and payload, of a fixed size; `decode`: makes a value of its fields, None for what was
    never written.

    Args:
        file: the open file.
        salt: of the checksums, so that a foreign file has no valid slot.
        mapped: whether `generations` may read a map.
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
        for attempt in range(_LOOKS):
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
        """Release the descriptor and the map; a running look keeps them until it is done."""
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
