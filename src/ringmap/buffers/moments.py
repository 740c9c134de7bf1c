"""A moment: the episodes of a view, as JSON, for another process or a later run.

    starts   [40, 52, 60]  ->  [40, 12, 8]  ->  "b:KAwI"      differences, in the least type that holds them, packed

Invariants: the episodes of a moment are as they were, whatever was evicted since.
Not here: what an item of an episode is (clips/cut.py).
Cost: 1 to 3 bytes for each episode.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ringmap.errors import InputError
from ringmap.storage.ring.links import Parts, WholeEpisodes

__all__ = ["RingEpisodes", "episodes_of", "moment_of", "pack", "unpack"]

Array = np.ndarray[Any, np.dtype[Any]]

_OF_PARTS = "ended", "part_starts", "part_lengths", "chains", "steps", "lanes"
_MOST = 1 << 28
"""Integers of one array: no moment has more, whatever its text claims."""


def pack(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return arrays of integers as short texts.

    Example:
        >>> made = pack({"starts": np.array([40, 52, 60])})
        >>> {name: values.tolist() for name, values in unpack(made, ["starts"], "x").items()}
        {'starts': [40, 52, 60]}
    """
    made = {}
    for name, values in arrays.items():
        steps = np.diff(np.asarray(values, np.int64), prepend=np.int64(0))
        low, high = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        dtype = next(t for t in "bhiq" if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
        raw = zlib.compress(steps.astype(f"<{dtype}").tobytes(), 1)
        made[name] = f"{dtype}:{base64.b64encode(raw).decode()}"
    return made


def unpack(texts: Any, names: Iterable[str], where: str) -> dict[str, Array]:
    """Return the arrays that `pack` made texts of, int64.

    Raises:
        InputError: they are no such texts.
    """
    found = {}
    for name in names:
        try:
            dtype, text = texts[name].split(":")
            if dtype not in ("b", "h", "i", "q"):
                raise ValueError(f"type {dtype!r}")
            size = np.dtype(dtype).itemsize
            packed = zlib.decompressobj()
            raw = packed.decompress(base64.b64decode(text, validate=True), _MOST * size)
            if not packed.eof:
                raise ValueError("it is cut off")
            found[name] = np.cumsum(np.frombuffer(raw, f"<{dtype}"), dtype=np.int64)
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            binascii.Error,
            zlib.error,
        ) as error:
            raise InputError(
                f"{where}: the moment has no readable {name!r} ({error}); give what `moment` of a view, or a state, "
                "said"
            ) from None
    return found


class RingEpisodes(NamedTuple):
    """Episodes of one ring, as a view holds them.

    `starts`: their names; `lengths`: their steps; `stored`: their parts joined, and the number of each among these,
    None without parts; `is_part`: whether stored episodes were left out.
    """

    starts: Array
    lengths: Array
    stored: tuple[WholeEpisodes, Array] | None = None
    is_part: bool = False

    @property
    def ended(self) -> Array:
        """Tell of each whether it has ended: bool `(n,)`."""
        if self.stored is None:
            return np.ones(len(self.starts), np.bool_)
        whole, chosen = self.stored
        found: Array = ~whole.is_open[chosen]
        return found

    def frozen(self) -> RingEpisodes:
        """Return these with lengths that no caller, and no ring, changes."""
        if not self.lengths.flags.writeable and self.lengths.dtype == np.int32 and self.lengths.base is None:
            return self
        lengths = np.array(self.lengths, np.int32)
        lengths.flags.writeable = False
        return self._replace(lengths=lengths)

    def take(self, chosen: Array) -> RingEpisodes:
        """Return some of them."""
        stored = self.stored and (self.stored[0], self.stored[1][chosen])
        return RingEpisodes(self.starts[chosen], self.lengths[chosen], stored, True)

    def positions(self, episodes: Array, steps: Array) -> Array:
        """Return the positions on the ring of steps of episodes."""
        if self.stored is not None:
            whole, chosen = self.stored
            return whole.positions(whole.places[chosen[episodes]] + steps)
        found: Array = self.starts[episodes] + steps
        return found

    def steps_of(self, episodes: Array, positions: Array) -> Array:
        """Return which steps of episodes stand at these positions, -1 for none."""
        steps: Array = positions - self.starts[episodes]
        if self.stored is not None:
            whole, chosen = self.stored
            steps = whole.places_at(positions) - whole.places[chosen[episodes]]
        return np.where((steps >= 0) & (steps < self.lengths[episodes]), steps, -1)


def moment_of(uuid: bytes, episodes: RingEpisodes) -> dict[str, Any]:
    """Return the moment of episodes of one ring."""
    arrays = {"starts": episodes.starts, "lengths": episodes.lengths}
    if episodes.stored is not None:
        starts, lengths, parts = episodes.stored[0].parts_in(episodes.stored[1])
        arrays |= {"ended": episodes.ended, "part_starts": starts, "part_lengths": lengths}
        arrays |= {"chains": parts.chains, "steps": parts.steps, "lanes": parts.lanes}
    return {"uuid": uuid.hex(), "is_part": episodes.is_part, **pack(arrays)}


def episodes_of(moment: Any, where: str) -> tuple[bytes, RingEpisodes]:
    """Return the ring that a moment is of, and its episodes.

    Raises:
        InputError: it is no moment of one ring.
    """
    arrays = unpack(moment, ("starts", "lengths"), where)
    starts, lengths = arrays["starts"], arrays["lengths"]
    try:
        uuid, is_part = bytes.fromhex(moment["uuid"]), moment["is_part"]
        fits = len(starts) == len(lengths) and not (lengths < 0).any() and is_part in (True, False)
        stored = None
        if set(moment) != {"uuid", "is_part", "starts", "lengths"}:
            ended, at, sizes, *of_parts = unpack(moment, _OF_PARTS, where).values()
            ended_names = dict.fromkeys(starts[ended.astype(np.bool_)].tolist(), 0)
            fits = fits and len(ended) == len(starts)
            whole = WholeEpisodes(at, sizes, Parts(*of_parts), ended_names)
            stored = whole, whole.find(starts)
            fits = fits and not (stored[1] < 0).any() and np.array_equal(whole.lengths[stored[1]], lengths)
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"{where}: this is no moment of a view ({error!r})") from None
    if not fits:
        raise InputError(f"{where}: this is no moment of a view: its episodes do not fit")
    return uuid, RingEpisodes(starts, lengths, stored, is_part)
