"""Stacks of frames: an observation that is the newest frames of its episode, of which a row stores the last one.

    stacks, size 4      [a a a a]  [a a a b]  [a a b c]  [a b c d]  [b c d e]        padding_type="reset"
    frames in rows       a          b          c          d          e
    earlier              0          1          2          3          3

`earlier` is a column: how many earlier frames of a row's stack are frames of its lane, at most size - 1. The others are
padding: the first frame again ("reset"), or zeros ("zero"). So a stack is read without a look at the rows between, and
row `p` of a lane takes the frames at p, p - N, ..., p - earlier * N, where N is the number of lanes.

The manifest says the size and the padding, and so does the name of the column: rings with others don't mix.

Invariants: a stack that is stored is read back bit for bit; one that this is not true of is refused.
Not here: where rows are, and which of them continue a lane (nstep.py, lanes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.transitions.lanes import same_bytes
from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec

__all__ = ["LANES", "FrameStack"]

Array = np.ndarray[Any, np.dtype[Any]]

_PADDINGS = ("reset", "zero")
LANES = 256
"""Calls of up to as many lanes: all transitions that count have their frames. A larger number takes more of the
disk."""
_MOST = 255
"""`earlier` is one byte."""


@dataclass(frozen=True)
class FrameStack:
    """How observations are stacked: the number of frames, and what stands before the first one of an episode."""

    size: int
    padding_type: str = "reset"

    @classmethod
    def parse(cls, frame_stack: Any, padding_type: Any, where: str) -> FrameStack | None:
        """Return the stack that a caller asks for, None for none."""
        if padding_type not in _PADDINGS:
            raise InputError(
                f"{where}: padding_type must be one of {_PADDINGS}, got {padding_type!r}; a stack with other padding "
                "can't be built again from its frames"
            )
        if frame_stack is None:
            return None
        frame_stack = positive(where, "frame_stack", frame_stack)
        if frame_stack > _MOST:
            raise InputError(f"{where}: frame_stack must be at most {_MOST}, got {frame_stack}")
        return cls(int(frame_stack), padding_type)

    @cached_property
    def column(self) -> ColumnSpec:
        """The column `earlier`."""
        return ColumnSpec(f"stack_{self.size}_{self.padding_type}", (), np.dtype("u1"))

    # -- specs -------------------------------------------------------------------------------

    def frames_of(self, specs: Iterable[ColumnSpec], where: str) -> tuple[ColumnSpec, ...]:
        """Return the columns of frames for leaves of stacked observations."""
        frames = []
        for spec in specs:
            if not spec.shape or spec.shape[0] != self.size:
                raise InputError(
                    f"{where}: {spec.name} has shape {spec.shape}, but frame_stack={self.size}: give the shape of "
                    f"stacked observations, ({self.size}, *frame), as Gymnasium's FrameStackObservation has it"
                )
            frames.append(replace(spec, shape=spec.shape[1:]))
        return tuple(frames)

    def stacks_of(self, specs: Iterable[ColumnSpec]) -> tuple[ColumnSpec, ...]:
        """Return the leaves of stacked observations for columns of frames."""
        return tuple(replace(spec, shape=(self.size, *spec.shape)) for spec in specs)

    # -- how many ----------------------------------------------------------------------------

    def older(self, capacity: int) -> int:
        """Return how many rows before the newest `capacity` stay stored: the frames of the oldest of these."""
        return (self.size - 1) * min(capacity, LANES)

    def most_lanes(self, capacity: int) -> int:
        """Return how many lanes a call may have: nearly all transitions have their frames then."""
        return min(capacity, max(LANES, capacity // (16 * self.size)))

    # -- in ----------------------------------------------------------------------------------

    def check(
        self, stacks: Mapping[str, Array], after: Mapping[str, Array], begins: Array, before: int, where: str
    ) -> None:
        """Raise unless stacks, leaf -> `(N, size, ...)`, can be built again from the frames of their lanes.

        Args:
            stacks: of the step.
            after: after the step.
            begins: `(N,)`: lanes whose stack is not the one that their last step led to.
            before: the number of lanes of the call before.
            where: the method to name in an error.

        Raises:
            InputError: one that begins a lane has other older frames than padding, or a next one is not moved by one.
        """
        is_new, why = (
            begins.any(),
            "frames in between were not stored; go on with the observation of a reset",
        )
        if before != len(begins):
            why = (
                f"the call before had {before} lanes, this one has {len(begins)}; give all lanes in each call (of "
                "Gymnasium's vector environments those with AutoresetMode.SAME_STEP), or begin anew with a reset"
            )
        for name, stack in stacks.items():
            _refuse(
                _differ(after[name][:, :-1], stack[:, 1:]),
                f"{where}: next_{name} of lane {{}} is not the stack of {name} moved by one frame; give as next "
                "observation the "
                "one that the step led to, also where the episode ended (not the first of the next episode)",
            )
            if is_new:
                _refuse(
                    begins & self._is_no_start(stack),
                    f"{where}: {name} of lane {{}} does not go on from the lane's last step, and its older frames are "
                    f"not the padding of an episode's start (padding_type={self.padding_type!r}): {why}",
                )

    def _is_no_start(self, stack: Array) -> Array:
        """Tell for each stack whether it holds something else than one frame, and padding."""
        older = stack[:, :-1]
        padding = stack[:, -1:] if self.padding_type == "reset" else np.zeros_like(stack[:, -1:])
        return _differ(older, np.broadcast_to(padding, older.shape))

    def earlier(self, begins: Array, before: Array | None) -> Array:
        """Return the column `earlier` of a call; `before`: that of the call before, None if all lanes begin."""
        if before is None or len(before) != len(begins):
            return np.zeros(len(begins), np.uint8)
        goes_on = np.minimum(before.astype(np.int64) + 1, self.size - 1)
        return np.where(begins, 0, goes_on).astype(np.uint8)

    # -- out ---------------------------------------------------------------------------------

    def positions(self, newest: Array, lanes: Array, earlier: Array) -> Array:
        """Return the positions of the frames of stacks, `(B, size)`, oldest first; of padding the first frame's."""
        back = np.minimum(self._back, earlier.astype(np.int64)[:, None])
        back *= lanes[:, None]
        return np.subtract(newest[:, None], back, out=back)

    def blank(self, stacks: Sequence[Array], earlier: Array, ahead: int = 0) -> None:
        """Put zeros where stacks, `ahead` steps from their rows, have padding, if it is zeros."""
        short = (earlier < self.size - 1 - ahead).nonzero()[0] if self.padding_type == "zero" else ()
        if len(short):
            is_padding = self._back > earlier[short].astype(np.int64)[:, None] + ahead
            for values in stacks:
                part = values[short]
                part[is_padding] = 0
                values[short] = part

    @cached_property
    def _back(self) -> Array:
        """How many steps before the row each frame of its stack is, for a row in the middle of an episode."""
        return np.arange(self.size - 1, -1, -1)


def _differ(one: Array, other: Array) -> Array:
    """Tell for each row whether any of its bytes differ; NaN equals itself."""
    if not one[0].nbytes or same_bytes(one, other):
        return np.zeros(len(one), np.bool_)
    if one.dtype.kind in "fc":
        one, other = (np.ascontiguousarray(a).view(np.uint8) for a in (one, other))
    found: Array = (one != other).reshape(len(one), -1).any(axis=1)
    return found


def _refuse(bad: Array, message: str) -> None:
    if bad.any():
        raise InputError(message.format(int(bad.argmax())))
