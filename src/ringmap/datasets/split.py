"""Splits: the side of an episode is a function of that episode alone, whatever is stored beside it.

    place of an episode   (its ordinal * golden ratio + hash of its lineage and the seed) modulo 1, in 64 bits
    split(0.8)            [==== train ====================|= rest =]      arcs of that circle
    split(0.9) of train   [== train ================|rest]

The places of any run of ordinals are spread evenly (Weyl's sequence on the golden ratio): so the share is exact to
within 3 episodes in every span of 3 to 10,000, and no episode ever changes sides, in any process, after any growth,
eviction or copy.

Invariants: sides share no episode; all sides together have every episode that is stored; a split of a side divides its
arcs. Not here: ordinals and lineages (storage/), the episodes of a side as a dataset (`Dataset.take`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import InputError

__all__ = ["Arcs", "shares_of", "split_seed"]

Array = np.ndarray[Any, np.dtype[Any]]

_GOLDEN = 11400714819323198485
_CIRCLE = 1 << 64


@dataclass(frozen=True, slots=True)
class Arcs:
    """Arcs `[start, stop)` of a circle of 2**64 places, on which a seed puts each episode.

    Example:
        >>> train, rest = Arcs.whole(seed=0).divided([0.8, 0.2], seed=0)
        >>> lineages, ordinals = np.zeros((10, 16), np.uint8), np.arange(10, dtype=np.uint64)
        >>> int(train.hold(lineages, ordinals).sum()), int(rest.hold(lineages, ordinals).sum())
        (9, 1)
    """

    seed: int
    pieces: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, seed: int) -> Arcs:
        """Return the whole circle."""
        return cls(seed, ((0, _CIRCLE),))

    @classmethod
    def of_json(cls, given: Any, where: str) -> Arcs:
        """Return the arcs that `as_json` returned."""
        try:
            seed, pieces = given["seed"], tuple((a, b) for a, b in given["pieces"])
            bounds = [bound for piece in pieces for bound in piece]
            if (
                pieces
                and all(type(n) is int for n in [seed, *bounds])
                and all(0 <= a < b <= _CIRCLE for a, b in pieces)
            ):
                return cls(split_seed(seed, where), pieces)
        except (KeyError, TypeError, ValueError):
            pass
        raise InputError(f"{where}: these are no arcs of a side of a split: {given!r:.200}")

    def as_json(self) -> dict[str, Any]:
        """Return them for JSON."""
        return {"seed": self.seed, "pieces": [list(piece) for piece in self.pieces]}

    @property
    def size(self) -> int:
        """Places on them."""
        return sum(stop - start for start, stop in self.pieces)

    def hold(self, lineages: Array, ordinals: Array) -> Array:
        """Tell which episodes are on them, by lineages, uint8 `(n, 16)`, and ordinals, uint64 `(n,)`."""
        places, found = _places(lineages, ordinals, self.seed), np.zeros(len(ordinals), np.bool_)
        for start, stop in self.pieces:
            found |= (places >= np.uint64(start)) & (places <= np.uint64(stop - 1))
        return found

    def divided(self, shares: Sequence[float], seed: int) -> list[Arcs]:
        """Return arcs of these shares of them, one after the other, from a start that another seed moves."""
        size = self.size
        moved = 0 if seed == self.seed else _hash(b"", seed) * size // _CIRCLE
        bounds = [0, *(round(share * size) for share in itertools.accumulate(shares))]
        bounds[-1] = size
        return [
            Arcs(self.seed, tuple(self._between(moved + start, moved + stop)))
            for start, stop in itertools.pairwise(bounds)
        ]

    def _between(self, start: int, stop: int) -> Iterable[tuple[int, int]]:
        """Yield what lies from one place to another, counted along the arcs, round and round."""
        size, first = self.size, 0
        for turn in (0, size):
            first = turn
            for low, high in self.pieces:
                a, b = max(start, first), min(stop, first + high - low)
                if a < b:
                    yield low + a - first, low + b - first
                first += high - low

    @property
    def longest_wait(self) -> int:
        """Of how many episodes in a row one at least is on the longest arc."""
        share = max(stop - start for start, stop in self.pieces) / _CIRCLE
        one, two, ratio = 1, 1, 1.0
        while ratio > share:  # the time between two visits of an arc is one of three Fibonacci numbers
            one, two, ratio = two, one + two, ratio * 0.6180339887498949
        return two


def shares_of(train: Any, where: str) -> list[float]:
    """Return the shares of all sides: `train` and the rest, or as many as are given, which are all."""
    one = isinstance(train, float | int | np.number)
    given = [train, 1 - train] if one else list(train) if np.iterable(train) else [train]
    if not all(isinstance(share, float | int | np.integer | np.floating) for share in given):
        raise InputError(f"{where}: expected a number between 0 and 1, or a list of such numbers, got {train!r}")
    shares = [float(share) for share in given]
    if len(shares) < 2 or not all(0 < share < 1 for share in shares):
        raise InputError(
            f"{where}: train must lie between 0 and 1, or be the shares of two sides or more, got {train!r}"
        )
    if abs(sum(shares) - 1) > 1e-6:  # shares may be float32
        raise InputError(
            f"{where}: the shares {train!r} add up to {sum(shares):g}, expected 1; leave a side unused to leave "
            "episodes out"
        )
    return shares


def _places(lineages: Array, ordinals: Array, seed: int) -> Array:
    """Return the place of each episode, uint64 `(n,)`."""
    rows = np.ascontiguousarray(lineages).view("V16").reshape(-1)
    kinds, which = np.unique(rows, return_inverse=True)
    moved = np.array([_hash(kind.tobytes(), seed) for kind in kinds], np.uint64)
    places: Array = ordinals.astype(np.uint64) * np.uint64(_GOLDEN) + moved[which.reshape(-1)]
    return places


def _hash(lineage: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(lineage + seed.to_bytes(8, "little", signed=True))


def split_seed(seed: Any, where: str) -> int:
    """Return the seed of a split."""
    if isinstance(seed, int | np.integer) and -(1 << 63) <= seed < 1 << 63:
        return int(seed)
    raise InputError(f"{where}: seed must be an integer of 64 bits, got {seed!r}")
