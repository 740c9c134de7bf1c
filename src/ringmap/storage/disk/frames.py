"""A run of frames: payloads with checksums, one behind the other in a file, or in a part of one.

    [size, check, payload][size, check, payload] ... nothing, zeros, or bytes of an earlier run
      4     8
     number 0              number 1

The check is the XXH3 of the payload, seeded by the frame's number and the seed of the run: a frame of another run, or
of another place in this one, does not pass for one.

Invariants: the first frame that is not whole ends a run, and why is told; no payload is returned before its checksum
holds, and no size is believed before it is compared with the bytes that are there.
Not here: what a payload means, when it is synced, what an end costs.
"""

from __future__ import annotations

import struct

import xxhash

from ringmap.storage.disk.files import File
from ringmap.storage.disk.system import Data

__all__ = ["CUT", "DAMAGED", "END", "HEADER", "FrameReader", "FrameWriter", "framed"]

HEADER = struct.Struct("<IQ")
"""The size of a payload, and its checksum."""

END, CUT, DAMAGED = "end", "cut", "damaged"
"""Why a run ends: nothing follows, or zeros, as in reserved blocks; the bytes end within a frame, as a kill leaves it;
a frame is there, and is wrong."""

_CHUNK_NBYTES = 1 << 16


def framed(payload: Data, number: int, seed: int = 0) -> bytes:
    """Return the frame of a payload."""
    return HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload, seed + number)) + payload


class FrameWriter:
    """Writes a run of frames.

    Args:
        file: written to.
        seed: of the run, below 2**63.
        at: byte of the file at which the next frame begins.
        number: of that frame.
        zeros: bytes of zeros to write behind each frame, for a run over an earlier one: they end it.
    """

    __slots__ = ("_zeros", "end", "file", "seed")

    def __init__(self, file: File, seed: int = 0, at: int = 0, number: int = 0, zeros: int = 0) -> None:
        self.file, self.seed, self._zeros = file, seed, bytes(zeros)
        self.end = at, number
        """Bytes and frames that count: set together, so that an interrupt can't come in between."""

    def write(self, payload: Data) -> None:
        """Write the next frame, in one write.

        Raises:
            OSError: the disk is full or fails. The next call writes over what is there of it.
        """
        at, number = self.end
        frame = HEADER.pack(len(payload), xxhash.xxh3_64_intdigest(payload, self.seed + number)) + payload
        self.file.write(frame + self._zeros if self._zeros else frame, at)
        self.end = at + len(frame), number + 1


class FrameReader:
    """Reads a run of frames, up to the first that is not whole.

    Args:
        file: read from.
        seed: of the run.
        at: byte of the file at which the next frame begins.
        number: of that frame.
        stop: the byte at which the run's part of the file ends; None: at its end.
        chunk: bytes to read at once, at least.

    Attributes:
        at, number: of the frame after the last whole one.
        seed: may be set between two frames: that of the next ones.
        size: what the header of the last frame that was read says.
        ending: why there are no more: `END`, `CUT`, `DAMAGED`; "" as long as it is not known.
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
        """Return the payload of the next frame; None if it is not whole.

        Args:
            most: a frame that says to be larger is damaged.
        """
        at = self.at - self._begin
        if at + HEADER.size > len(self._data):
            at = self._load(HEADER.size)
        header = self._data[at : at + HEADER.size]
        if len(header) < HEADER.size:
            self.ending, self.size = CUT if any(header) else END, 0
            return None
        self.size, check = HEADER.unpack(header)
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
