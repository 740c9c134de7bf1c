"""`ringmap snapshot`: a buffer as of one commit."""

from __future__ import annotations

from ringmap.cli.console import count, show
from ringmap.cli.options import Buffer, Destination
from ringmap.cli.resolve import EPISODES, look


def snapshot(path: Buffer, dest: Destination) -> None:
    """Copy a buffer as it is now, while its writer goes on.

    The copy is a buffer of its own, equal to one committed state. DEST is a directory that is new or empty; it is
    there whole, or not at all.
    """
    look(path, "snapshot", (EPISODES,))
    from ringmap.buffers.replay import ReplayBuffer

    buffer = ReplayBuffer.open(path)
    try:
        buffer.snapshot(dest)
    finally:
        buffer.close()
    made = ReplayBuffer.open(dest)
    try:
        stored = made.num_episodes, made.num_steps_stored
    finally:
        made.close()
    show(f"wrote {dest}: {count(stored[0], 'episode')}, {count(stored[1], 'step')}")
