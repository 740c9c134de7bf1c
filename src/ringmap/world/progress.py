"""The progress of a collection: which of its seeds are finished.

    offsets   0 ............ watermark ... [a, b) ... [c, d) ...
              all finished                 finished beyond it, as ranges

A collection is known by its seed. Its environment, its number of episodes and its options
must agree when it is resumed.
Not here: where it is kept (ringmap.buffers: notes; a dataset: episode data).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from ringmap.errors import InputError

__all__ = ["Progress", "identity_of", "ranges_of"]

_LONG = 200


def identity_of(env: str, seed: int, episodes: int, options: Any) -> dict[str, Any]:
    """Return the identity of a collection, as JSON.

    Args:
        env: the environment's id.
        seed: of the first episode.
        episodes: how many.
        options: reset options; long ones are kept by their checksum.
    """
    text = None if options is None else json.dumps(options, sort_keys=True, default=_plain)
    if text is not None and len(text) > _LONG:
        text = f"xxh3 {xxhash.xxh3_64_hexdigest(text.encode())} of {len(text)} characters"
    return {"env": env, "seed": seed, "episodes": episodes, "options": text}


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), value.tolist()]
    return repr(value)


def ranges_of(offsets: Iterable[int]) -> list[range]:
    """Return offsets as ranges, in order.

    Example:
        >>> ranges_of({4, 0, 1, 2})
        [range(0, 3), range(4, 5)]
    """
    found: list[range] = []
    for k in sorted(offsets):
        if found and found[-1].stop == k:
            found[-1] = range(found[-1].start, k + 1)
        else:
            found.append(range(k, k + 1))
    return found


class Progress:
    """Which offsets of `0 ... episodes - 1` are finished.

    Args:
        identity: of the collection, from `identity_of`.
        finished: offsets.

    Example:
        >>> progress = Progress(identity_of("CartPole-v1", 7, 10, None), [0, 1, 4])
        >>> progress.missing()
        [2, 3, 5, 6, 7, 8, 9]
        >>> progress.plus(2).as_json()["watermark"], progress.plus(2).as_json()["beyond"]
        (3, [[4, 5]])
    """

    def __init__(self, identity: Mapping[str, Any], finished: Iterable[int] = ()) -> None:
        self.identity = dict(identity)
        self._watermark = 0
        self._beyond = set(finished)
        self._rise()

    def _rise(self) -> None:
        while self._watermark in self._beyond:
            self._beyond.discard(self._watermark)
            self._watermark += 1

    def plus(self, offset: int) -> Progress:
        """Return the progress with one more finished. O(finished beyond the watermark)."""
        other = Progress(self.identity)
        other._watermark, other._beyond = self._watermark, set(self._beyond)
        other.add(offset)
        return other

    def add(self, offset: int) -> None:
        """Note one more as finished. O(1) amortised."""
        if offset >= self._watermark:
            self._beyond.add(offset)
            self._rise()

    def without(self, offsets: Iterable[int]) -> Progress:
        """Return the progress with some not finished after all. O(finished)."""
        return Progress(self.identity, self.finished() - set(offsets))

    def missing(self) -> list[int]:
        """Return the offsets that are not finished, in order. O(episodes)."""
        return [k for k in range(self._watermark, self.identity["episodes"]) if k not in self]

    def finished(self) -> set[int]:
        """Return the offsets that are finished. O(episodes)."""
        return {*range(self._watermark), *self._beyond}

    def __contains__(self, offset: int) -> bool:
        return 0 <= offset < self._watermark or offset in self._beyond

    def __len__(self) -> int:
        return self._watermark + len(self._beyond)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON: the identity, the watermark, and ranges beyond it."""
        beyond = [[r.start, r.stop] for r in ranges_of(self._beyond)]
        return {**self.identity, "watermark": self._watermark, "beyond": beyond}

    @classmethod
    def resumed(cls, kept: Mapping[str, Any], identity: Mapping[str, Any], where: str, place: str) -> Progress:
        """Return a progress that was kept as JSON."""
        differs = [
            f"{name}: {kept.get(name)!r} there, {value!r} now"
            for name, value in identity.items()
            if kept.get(name) != value
        ]
        if differs:
            raise InputError(
                f"{where}: {place} holds another collection with seed {identity['seed']}; what differs: "
                f"{'; '.join(differs)}. Ask for the same, or choose another seed or place"
            )
        progress = cls(identity)
        progress._watermark = kept["watermark"]
        progress._beyond.update(k for first, last in kept["beyond"] for k in range(first, last))
        return progress
