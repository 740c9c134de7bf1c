"""`ringmap snapshot`: a buffer as of one commit."""

from __future__ import annotations

import contextlib

from ringmap.buffers.opening import EPISODES, FLEET, kind_of
from ringmap.cli.console import count, show
from ringmap.cli.options import Buffer, Destination
from ringmap.cli.resolve import episodes_at


def snapshot(path: Buffer, dest: Destination) -> None:
    """Copy a buffer as it is now, while its writer goes on.

    The copy is a buffer of its own, equal to one committed state. DEST is a directory that is new or empty; it is
    there whole, or not at all. Of a directory of rings each ring is copied, one after the other.
    """
    kind_of(path, "snapshot", (EPISODES, FLEET))
    with contextlib.closing(episodes_at(path, "snapshot")) as buffer:
        buffer.snapshot(dest)
    with contextlib.closing(episodes_at(dest, "snapshot")) as made:
        stored = made.num_episodes, made.num_steps_stored
    show(f"wrote {dest}: {count(stored[0], 'episode')}, {count(stored[1], 'step')}")
