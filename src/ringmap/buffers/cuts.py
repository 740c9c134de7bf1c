"""The cuts that a buffer was asked for: each is checked once, and kept.

    sample(window=..., columns=..., anchors=...)  ->  Cuts.of  ->  Cut, and the clips as the sampler sees them

Invariants: equal requests over the same columns return the same cut.
Not here: what a request means (clips/window.py), draws (engine.py).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from ringmap.clips.clip_range import ClipRange
from ringmap.clips.cut import Cut
from ringmap.clips.window import Window, WindowMaker, WindowSpec, cut_of
from ringmap.errors import InputError, NoClipsError
from ringmap.storage.columns.schema import Schema

__all__ = ["ClipsOfCut", "Cuts", "Wanted", "warn_unreached"]

log = logging.getLogger("ringmap")

_MOST = 32
_MUCH = 0.1
"""Fraction of the steps that no item reaches, above which there is a warning."""


class Wanted(NamedTuple):
    """What a caller asked for; the arguments are those of `ReplayBuffer.sample`."""

    history: int
    frameskip: int
    window: WindowSpec | None = None
    columns: Iterable[str] | None = None
    anchors: slice | None = None
    drop_all_padded: bool = False
    fps: float | None = None
    reward_at: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether whole clips are wanted, as without these arguments."""
        return self.window is None and self.columns is None and self.anchors is None

    @property
    def key(self) -> tuple[Any, ...]:
        """A value that equal requests share. A function, or a computed column, is itself only."""
        window, slice_ = self.window, self.anchors
        cut: Any = None
        if isinstance(window, WindowMaker):
            cut = window.key
        elif window is not None:
            cut = tuple([(n, w if isinstance(w, Window) else id(w)) for n, w in window.items()])
        ends = (slice_.start, slice_.stop, slice_.step) if isinstance(slice_, slice) else slice_
        return (
            self.history, self.frameskip, cut, self.columns, ends, self.drop_all_padded, self.fps, self.reward_at,
        )  # fmt: skip

    def cut(self, where: str, schema: Schema) -> Cut:
        """Return the cut of this request over stored columns.

        Raises:
            InputError: see `cut_of`.
        """
        if self.window is not None:
            return cut_of(
                where, schema, self.window, columns=self.columns, anchors=self.anchors,
                drop_all_padded=self.drop_all_padded, frameskip=self.frameskip, fps=self.fps, reward_at=self.reward_at,
            )  # fmt: skip
        checked = cut_of(where, schema, {}, columns=self.columns, anchors=self.anchors)
        columns = None if self.columns is None else tuple(self.columns)
        cut = Cut.clip(self.history, self.frameskip, columns)
        if self.anchors is None:
            return cut
        return replace(cut, before=checked.before, after=max(cut.after, checked.after))


class ClipsOfCut:
    """The clips of a cut, as a sampler sees them: a stand-in for the buffer, which it is in all other ways."""

    def __init__(self, buffer: Any, cut: Cut) -> None:
        self._buffer = weakref.ref(buffer)
        self._cut = cut

    def num_valid_ends(self, history_len: int | None = None) -> int:
        """Return the number of anchors, whatever the history."""
        count: int = self._of.engine.pin(self._cut, shared=False).count
        return count

    def clip_window(self, history_len: int = 1) -> ClipRange:
        """Return the anchors that exist now."""
        found: ClipRange = self._of.engine.window(self._cut)
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
            warn_unreached(buffer, cut, where)
        return found[1], found[2]


def warn_unreached(buffer: Any, cut: Cut, where: str) -> None:
    """Warn if more than a tenth of the stored steps are in episodes too short for a clip, and some are not."""
    lengths = buffer.lengths
    steps, missed = int(lengths.sum()), int(lengths[cut.counts(lengths) == 0].sum())
    if _MUCH * steps < missed < steps:
        log.warning(
            "%s: %d of %d stored steps are in no clip: episodes shorter than %d steps have none; use a smaller history, or pad=",
            where, missed, steps, max(cut.span, cut.least),
        )  # fmt: skip
