"""What a caller asked for: a window, columns and anchors, before it is known which columns there are.

    sample(window=..., columns=..., anchors=...)  ->  Wanted  --schema-->  Cut

Not here: what a window means (window.py), index arithmetic (cut.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.cut import Cut
from ringmap.clips.window import Window, WindowMaker, WindowSpec, cut_of
from ringmap.errors import ArgumentTypeError, InputError
from ringmap.storage.columns.schema import Schema

__all__ = ["Wanted", "check_anchors", "tell_no_lanes", "warn_unreached"]

log = logging.getLogger("ringmap")

Array = np.ndarray[Any, np.dtype[Any]]

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
    fps: Fraction | float | None = None
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
            self.history,
            self.frameskip,
            cut,
            self.columns,
            ends,
            self.drop_all_padded,
            self.fps,
            self.reward_at,
        )

    def cut(self, where: str, schema: Schema) -> Cut:
        """Return the cut of this request over stored columns.

        Raises:
            InputError: see `cut_of`.
        """
        if not isinstance(self.window, Mapping | WindowMaker | None):
            raise InputError(
                f"{where}: window must be a mapping of columns to Window(...), or Sequences(...), got {self.window!r}"
            )
        if self.window is not None:
            return cut_of(
                where,
                schema,
                self.window,
                columns=self.columns,
                anchors=self.anchors,
                drop_all_padded=self.drop_all_padded,
                frameskip=self.frameskip,
                fps=self.fps,
                reward_at=self.reward_at,
            )
        checked = cut_of(where, schema, {}, columns=self.columns, anchors=self.anchors)
        columns = None if self.columns is None else tuple(self.columns)
        cut = Cut.clip(self.history, self.frameskip, columns)
        if self.anchors is None:
            return cut
        return replace(cut, before=checked.before, after=max(cut.after, checked.after))


def check_anchors(where: str, anchors: Any) -> None:
    """Raise ArgumentTypeError if episodes are to be selected by `anchors`, which selects steps."""
    if callable(anchors) or isinstance(anchors, str):
        raise ArgumentTypeError(
            f"{where}: anchors= takes a slice of steps, such as slice(2, -7), got {anchors!r:.80}; which episodes are "
            "wanted says where=, of view, split and load_dataset"
        )


def tell_no_lanes(where: str) -> None:
    """Say in the log in which order sequences run over episodes without lanes."""
    log.info(
        "%s: across=True: the lanes of the stored episodes are not known; sequences run from one to the next in the "
        "order of storage",
        where,
    )


def warn_unreached(lengths: Array, cut: Cut, where: str) -> None:
    """Warn if more than a tenth of the stored steps are in episodes too short for a clip, and some are not."""
    if cut.across:
        return
    steps, missed = int(lengths.sum()), int(lengths[cut.counts(lengths) == 0].sum())
    if _MUCH * steps < missed < steps:
        log.warning(
            "%s: %d of %d stored steps are in no clip: episodes shorter than %d steps have none (the longest has %d); "
            "use a smaller history, or pad=",
            where,
            missed,
            steps,
            max(cut.span, cut.least),
            int(lengths.max()),
        )
