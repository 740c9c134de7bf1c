"""The cuts that a buffer was asked for: each is checked once, and kept.

    sample(window=..., columns=..., anchors=...)  ->  Cuts.of  ->  Cut, and the clips as the sampler sees them

Invariants: equal requests over the same columns return the same cut.
Not here: what a request means (clips/window.py), draws (engine.py).
"""

from __future__ import annotations

import weakref
from typing import Any

from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.window import Wanted, tell_no_lanes, warn_unreached
from ringmap.errors import InputError, NoClipsError
from ringmap.storage.columns.schema import Schema

__all__ = ["ClipsOfCut", "Cuts"]

_MOST = 32


class ClipsOfCut:
    """The clips of a cut, as a sampler sees them: a stand-in for the buffer, which it is in all other ways."""

    def __init__(self, buffer: Any, cut: Cut) -> None:
        self._buffer = weakref.ref(buffer)
        self._cut = cut

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of anchors, whatever the history."""
        count: int = self._of.engine.count(self._cut, shared=False)
        return count

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Return the anchors that exist now."""
        found: ClipRange = self._of.engine.window(self._cut)
        return found

    def clip_windows(self, history_len: int = 1) -> list[ClipRange]:
        """Return the same, ring by ring."""
        found: list[ClipRange] = self._of.engine.windows(self._cut)
        return found

    @property
    def _of(self) -> Any:
        return self._buffer()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._of, name)


class Cuts:
    """The cuts of one buffer.

    Args:
        buffer: the buffer, or a view: what `ClipsOfCut` stands in for.
    """

    def __init__(self) -> None:
        self._told_lanes = False
        self._known: dict[tuple[Any, ...], tuple[Schema, Cut, ClipsOfCut]] = {}

    def of(self, buffer: Any, wanted: Wanted, schema: Schema | None, where: str) -> tuple[Cut, Any]:
        """Return the cut of a request, and what a sampler receives in place of the buffer.

        Raises:
            InputError: the request is wrong.
            NoClipsError: nothing is stored, so that there are no columns to check it against.
        """
        if wanted.is_plain:
            if wanted.drop_all_padded:
                raise InputError(f"{where}: drop_all_padded is for padded columns; pass window=")
            return Cut.clip(wanted.history, wanted.frameskip), buffer
        try:
            key = wanted.key
        except AttributeError:
            raise InputError(
                f"{where}: window must be a mapping of columns to Window(...), or Sequences(...), got {wanted.window!r}"
            ) from None
        found = self._known.get(key)
        if found is None or found[0] is not schema:
            if schema is None:
                raise NoClipsError(f"{where}: nothing is stored yet; collect first")
            cut = wanted.cut(where, schema)
            if len(self._known) >= _MOST:
                self._known.pop(next(iter(self._known)))
            found = self._known[key] = schema, cut, ClipsOfCut(buffer, cut)
            warn_unreached(buffer.lengths, cut, where)
            if cut.across and not self._told_lanes and not buffer.engine.has_lanes:
                self._told_lanes = True
                tell_no_lanes(where)
        return found[1], found[2]
