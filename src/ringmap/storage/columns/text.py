"""Text: the words of one commit, and the codes that stand for them in its rows.

    ["push", "push", "lift"]   ->   codes [0, 0, 1], int32, in the column   +   words ["push", "lift"], packed, in the
    blob

Packed: how many, the bytes of each, then all in UTF-8; NumPy's strings and Python's hold lone surrogates, so these are
kept.

Invariants: a word stands once, in the order in which the rows name them; what `decode` returns for the codes of
`encode` equals what was encoded. No word ends in NUL: NumPy's strings can't.
Not here: where words lie (records/blobs.py, records/step_file.py), which words a row needs (read/handle.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.columns.schema import Schema

__all__ = ["Words", "coded", "decoded", "put", "unpack"]

Array = np.ndarray[Any, np.dtype[Any]]

MOST_NBYTES = 1 << 28
"""Bytes of words that a commit of several calls may have: a blob holds twice as many, and data of episodes."""


class Words:
    """The words of some rows; more come with the rows.

    Attributes:
        nbytes: of the words, at most: four for each character, and four for each word.
    """

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = list(words)
        self.nbytes = 4 * (len(self.words) + sum(map(len, self.words)))
        self._codes = {word: code for code, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, texts: Any) -> Array:
        """Return the codes of strings, int32 in their shape, and take up those that are new. O(strings).

        Example:
            >>> Words().encode(np.array(["push", "push", "lift"])).tolist()
            [0, 0, 1]
        """
        array = np.asarray(texts)
        codes = self._codes
        flat = [codes.setdefault(word, len(codes)) for word in array.reshape(-1).tolist()]
        new = list(islice(codes, len(self.words), None))
        self.words += new
        self.nbytes += 4 * (len(new) + sum(map(len, new)))
        return np.array(flat, np.int32).reshape(array.shape)

    def refuse_large(self, arrays: Iterable[Any], where: str) -> None:
        """Raise InputError if the words of further strings might be too many for one commit."""
        nbytes = self.nbytes + sum(array.nbytes + 4 * array.size for array in map(np.asarray, arrays))
        if nbytes > MOST_NBYTES:
            raise InputError(
                f"{where}: text of up to {nbytes:,} bytes would be one commit, expected at most {MOST_NBYTES:,}; store "
                "fewer rows in a call, or end the episode and begin another"
            )

    def decode(self, codes: Array) -> Array:
        """Return the strings that codes `(n, ...)` stand for, or raise ValueError where a code stands for none."""
        texts, bad = decoded(codes, np.zeros(len(codes), np.int64), [self.words])
        if bad.any():
            raise ValueError(f"row {int(bad.argmax())} has a code for none of {len(self.words)} words")
        return texts

    def pack(self, first: int = 0) -> bytes:
        """Return the words from number `first` on as bytes, none for no words."""
        words = [word.encode("utf-8", "surrogatepass") for word in self.words[first:]]
        sizes = np.array([len(words), *map(len, words)], "<u4")
        return sizes.tobytes() + b"".join(words) if words else b""


def decoded(codes: Array, of: Array, tables: Sequence[Sequence[str]]) -> tuple[Array, Array]:
    """Return the strings that codes `(B, ...)` stand for, and which rows have a code that stands for none.

    Args:
        codes: `(B, ...)`.
        of: which table of words is that of each row, `(B,)`.
        tables: of words.

    Returns:
        `(B, ...)`, as wide as the longest, with "" for a code that stands for none; and bool `(B,)`.
    """
    each = codes.reshape(len(codes), math.prod(codes.shape[1:])).astype(np.int64)
    counts = np.array([len(words) for words in tables], np.int64)
    starts, mine = np.concatenate(([0], counts.cumsum())), of[:, None]
    good = (each >= 0) & (each < counts.take(mine))
    numbers = np.where(good, each + starts.take(mine), starts[-1])
    used, back = np.unique(numbers, return_inverse=True)
    places = (starts.searchsorted(used, "right") - 1).tolist()
    everything: list[Sequence[str]] = [*tables, [""]]
    words = [everything[at][n] for at, n in zip(places, (used - starts.take(places)).tolist(), strict=True)]
    bad: Array = ~np.all(good, axis=1)
    return np.array(words, np.str_).take(back.reshape(codes.shape)), bad


def put(into: Array, where: Any, values: Array) -> Array:
    """Do `into[where] = values` and return `into`; a wider copy where these are wider strings, which NumPy would cut.

    Example:
        >>> put(np.array(["a", "b"]), [1], np.array(["long"])).tolist()
        ['a', 'long']
    """
    if values.dtype.kind == into.dtype.kind == "U":
        into = into.astype(np.promote_types(into.dtype, values.dtype), copy=False)
    into[where] = values
    return into


def unpack(data: bytes) -> list[str]:
    """Return the words in packed bytes.

    Raises:
        ValueError: it is not an output of `Words.pack`.
    """
    if not data:
        return []
    count = int.from_bytes(data[:4], "little")
    at = 4 + 4 * count
    if not count or len(data) < at:
        raise ValueError(f"{count} words in {len(data)} bytes")
    stops = at + np.frombuffer(data, "<u4", count, 4).cumsum(dtype=np.int64)
    if stops[-1] != len(data):
        raise ValueError(f"words end at byte {stops[-1]} of {len(data)}")
    bounds = [at, *stops.tolist()]
    words = [data[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(bounds)]
    if len({*words}) < count or any(word.endswith("\0") for word in words):
        raise ValueError("a word stands twice, or ends in NUL")
    return words


def coded(schema: Schema, arrays: list[Array], lengths: Sequence[int] | None = None) -> tuple[list[Array], list[Words]]:
    """Return the rows of commits as they are stored, and the words of each commit.

    `arrays`: one per column; `lengths`: rows of each commit, which follow one another; None: all are of one.
    """
    lengths = [len(arrays[0])] if lengths is None else lengths
    words = [Words() for _ in lengths]
    if not schema.texts:
        return arrays, words
    bounds, columns = np.cumsum(lengths)[:-1], []
    for spec, values in zip(schema.columns, arrays, strict=True):
        if spec.is_text:
            pieces = zip(words, np.split(values, bounds), strict=True)
            values = np.concatenate([own.encode(piece) for own, piece in pieces])
        columns.append(values)
    return columns, words
