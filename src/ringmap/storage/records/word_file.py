"""The words of rows that are not committed yet, in a file beside them.

    open/<id>/steps.bin   [frame 0][rows][rows][rows] ...     codes
    open/<id>/words.bin   [words][words] ...                  a frame for each call that has words that none before it
    had

Invariants: the words of a row are written before the row; the first frame that is not whole ends the words.
Not here: how words are packed (columns/text.py).
"""

from __future__ import annotations

import os
import struct
from contextlib import closing

import xxhash

from ringmap.storage.columns.text import Words, unpack
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.records.blobs import LARGEST_BLOB
from ringmap.storage.records.names import WORDS

__all__ = ["FRAME", "WordFile", "read_words"]

FRAME = struct.Struct("<IQ")
"""The header of a payload: its size, and its checksum."""


class WordFile:
    """The words of an open episode, or of an open group.

    Args:
        file: written from its begin on.
        seed: added to the numbers of the frames, for their checksums.
    """

    def __init__(self, file: File, seed: int = 0) -> None:
        self.file, self._seed = file, seed
        self._end = (0, 0, 0)
        """Bytes, frames and words that count: set together, so that an interrupt can't come in between."""

    @classmethod
    def create(cls, disk: Disk, folder: str, seed: int = 0) -> WordFile:
        """Make the file in a folder of `open/`."""
        return cls(disk.create(os.path.join(folder, WORDS)), seed)

    def write(self, words: Words, sync: bool) -> None:
        """Write the words that are not in the file yet, and sync them if asked to: before a row that names them.

        Raises:
            OSError: the disk is full or fails. The next call writes them again.
        """
        nbytes, frames, count = self._end
        if len(words) == count:
            return
        payload = words.pack(count)
        check = xxhash.xxh3_64_intdigest(payload, self._seed + frames)
        frame = FRAME.pack(len(payload), check) + payload
        self.file.write(frame, nbytes)
        if sync:
            self.file.sync()
        self._end = nbytes + len(frame), frames + 1, len(words)


def read_words(disk: Disk, folder: str, seed: int) -> list[str]:
    """Return the words in the file of a folder; none if there is no such file. No byte is used before its checksum is
    verified."""
    path = os.path.join(folder, WORDS)
    if not disk.is_file(path):
        return []
    words, at, number = list[str](), 0, 0
    with closing(disk.open(path)) as file:
        stop = min(file.size(), LARGEST_BLOB)
        while at + FRAME.size <= stop:
            nbytes, check = FRAME.unpack(file.read(FRAME.size, at))
            at += FRAME.size
            if not 0 < nbytes <= stop - at:
                break
            payload = file.read(nbytes, at)
            if xxhash.xxh3_64_intdigest(payload, seed + number) != check:
                break
            try:
                words += unpack(payload)
            except ValueError:
                break
            at, number = at + nbytes, number + 1
    return words
